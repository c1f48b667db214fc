/* flash_bwd.c: fused attention, backward, on the CPU.
 *
 * Formulas, with P = exp(S - logsumexp) and K = what dropout multiplies a weight by (1 without)
 *   delta_i = sum_c grad_out_ic out_ic
 *   dP = grad_out value^T    dS = P (K dP - delta), which is also the mask's gradient
 *   grad_value = (K P)^T grad_out    grad_key = scale dS^T query    grad_query = scale dS key
 *   and where there is a soft cap, dS (1 - tanh^2) in the place of dS in the last two.
 * Shapes: attn.h.
 * Architecture: any, through vec.h; built for each ISA, and for REAL float and double.
 * Grid, by phase
 *   DELTA  (b, query head, block of rows) -> delta in the workspace
 *   DKV    (b, key head, share of the key blocks) -> grad_key, grad_value, and this share's part of
 *          grad_query in the workspace. Of C shares, c owns key blocks c, c + C, ...: equal work
 *          under a causal band
 *   DQ     (b, query head, block of rows): the sum of the C parts -> grad_query
 *   DMASK  (block of the mask's own elements): scores once more, summed over the broadcast axes
 *   Without DMASK, P and dP are computed once: five products in all. Tiles of a phase share
 *   nothing, and C depends on sizes only: the same bits for any number of threads.
 * Roles: none.
 * Tiles: a key block is up to BLOCK_KEYS keys, as panels (for S and dP) and as rows (for
 *   grad_query). Queries and their gradients stream by as rows, up to QUERIES at a time, each both
 *   the left operand of S or dP and the right one of grad_key or grad_value.
 * Scratch, on the stack: five arrays of 48 KiB for a key block, two of 16 KiB for a query tile, and
 *   five tiles of [QUERIES][PANEL], 9 KiB each; the other phases have less.
 * Barriers: none inside a phase. The caller waits between phases: DKV and DMASK read what DELTA
 *   wrote, DQ what DKV wrote.
 * Numerics: REAL accumulates. A row with logsumexp -inf, and a pair that is not seen, has P = 0 and
 *   adds exactly nothing anywhere, even beside NaN.
 * The caller has checked: everything in attn.h. cu_seq_* are not read, as in flash_fwd.c.
 * Bound by: FMA; nine tenths of the time are the five products. One core of a Xeon with AVX-512,
 *   fp32, B 1 H 8 S 1024: 103 GFLOP/s at D 64 and at D 128 (make -C tests/c bench).
 * Sources: Dao, arXiv 2307.08691.
 */
#include "scores.h"

enum {
  BLOCK_KEYS = 192,
  QUERIES = 48,
  KEY_ROOM = 49152 / sizeof(REAL),   /* numbers of a key block, each of five arrays */
  QUERY_ROOM = 16384 / sizeof(REAL), /* numbers of a query tile, each of two arrays */
  DELTA_ROWS = 96,
  MASK_ROWS = 192,
  SHARES = 32 /* of all heads together: enough for many threads */
};

static int64_t wide(int64_t head_dim) {
  return round_up(head_dim, VL);
}

static int64_t widest(const struct attn_args *args) {
  return at_least(at_least(wide(args->head_dim), wide(args->head_dim_v)), 1);
}

static int64_t query_tile_rows(const struct attn_args *args) {
  return at_most(QUERIES, QUERY_ROOM / widest(args)) / MR * MR;
}

/* How DKV divides the keys of a head, and where its parts of grad_query lie. */
struct plan {
  int64_t keys, blocks, shares; /* keys of a block, blocks and shares of a head */
  int64_t part_rows;            /* rows of one head in a part */
  int64_t delta_bytes, part_bytes;
};

static struct plan plan_of(const struct attn_args *args) {
  const int64_t heads = at_least(args->batch * args->kv_heads, 1);
  int64_t panels = at_most(BLOCK_KEYS, KEY_ROOM / widest(args)) / PANEL;
  while (panels > 1 && heads * tiles_of(args->seq_k, panels * PANEL) < SHARES)
    panels = (panels + 1) / 2;
  struct plan plan = {.keys = panels * PANEL, .part_rows = round_up(args->seq_q, MR)};
  plan.blocks = tiles_of(args->seq_k, plan.keys);
  plan.delta_bytes = round_up(args->batch * args->heads * args->seq_q * (int64_t)sizeof(REAL), 256);
  plan.part_bytes =
      args->batch * args->heads * plan.part_rows * wide(args->head_dim) * (int64_t)sizeof(REAL);
  /* Parts cost memory: past 256 MiB only as many as fit, one at least. */
  const int64_t fit = at_least(((int64_t)256 << 20) / at_least(plan.part_bytes, 1), 1);
  plan.shares = at_most(at_most(tiles_of(SHARES, heads), fit), plan.blocks);
  return plan;
}

static bool wants_scores(const struct attn_args *args) {
  return args->grad_query.data || args->grad_key.data;
}

int64_t ATTN_NAME(flash_bwd_workspace)(const struct attn_args *args) {
  const struct plan plan = plan_of(args);
  return plan.delta_bytes + (args->grad_query.data ? plan.shares * plan.part_bytes : 0);
}

static REAL *delta_of(const struct attn_args *args, int64_t b, int64_t h) {
  return (REAL *)args->workspace + (b * args->heads + h) * args->seq_q;
}

/* Rows of head h of batch b in the part of grad_query that a share sums: [part_rows][wide D]. */
static REAL *part_of(const struct attn_args *args, const struct plan *plan, int64_t share,
                     int64_t b, int64_t h) {
  char *part = (char *)args->workspace + plan->delta_bytes + share * plan->part_bytes;
  return (REAL *)part + (b * args->heads + h) * plan->part_rows * wide(args->head_dim);
}

/* DELTA and DQ: rows [first, first + n) of one head. */

static void sum_delta(const struct attn_args *args, int64_t b, int64_t h, int64_t first,
                      int64_t n) {
  _Alignas(64) REAL outs[ATTN_MAX_HEAD_DIM * PANEL], grads[ATTN_MAX_HEAD_DIM * PANEL];
  _Alignas(64) REAL sums[PANEL];
  const int64_t cols = args->head_dim_v;
  for (int64_t r = 0; r < n; r += PANEL) {
    const int64_t lanes = at_most(PANEL, n - r);
    load_panels(outs, 1, &args->out, args->dtype, b, h, first + r, lanes, cols);
    load_panels(grads, 1, &args->grad_out, args->dtype, b, h, first + r, lanes, cols);
    /* A row to a lane, one column after the other, as dP is summed: where one key has all the
     * weight, out is its value, delta is dP to the last bit, and dS is exactly 0. */
    for (int v = 0; v < PANEL; v += VL) {
      vec sum = {0};
      for (int64_t c = 0; c < cols; ++c)
        sum += vec_load(grads + c * PANEL + v) * vec_load(outs + c * PANEL + v);
      vec_store(sums + v, sum);
    }
    memcpy(delta_of(args, b, h) + first + r, sums, (size_t)lanes * sizeof *sums);
  }
}

static void sum_parts(const struct attn_args *args, int64_t b, int64_t h, int64_t first,
                      int64_t n) {
  _Alignas(64) REAL sum[ATTN_MAX_HEAD_DIM];
  const struct plan plan = plan_of(args);
  const int64_t ld = wide(args->head_dim);
  for (int64_t r = first; r < first + n; ++r) {
    memset(sum, 0, sizeof sum);
    for (int64_t share = 0; share < plan.shares; ++share) {
      const REAL *part = part_of(args, &plan, share, b, h) + r * ld;
      for (int64_t c = 0; c < ld; c += VL)
        vec_store(sum + c, vec_load(sum + c) + vec_load(part + c));
    }
    for (int64_t c = 0; c < ld; c += VL)
      vec_store(sum + c, vec_load(sum + c) * (REAL)args->scale);
    store_rows(sum, ld, &args->grad_query, args->dtype, b, h, r, 1, args->head_dim);
  }
}

/* Queries first .. first + n - 1 of one head, with what the backward pass needs of each. */
struct query_tile {
  _Alignas(64) REAL query[QUERY_ROOM];    /* [rows][wide D] */
  _Alignas(64) REAL grad_out[QUERY_ROOM]; /* [rows][wide Dv] */
  REAL logsumexp[QUERIES], delta[QUERIES];
  int64_t first, n;
  bool query_finite, grad_finite;
};

static void load_queries(struct query_tile *tile, const struct attn_args *args, int64_t b,
                         int64_t h, int64_t first, int64_t n, int64_t rows) {
  tile->first = first, tile->n = n;
  tile->query_finite = load_rows(tile->query, wide(args->head_dim), rows, &args->query, args->dtype,
                                 b, h, first, n, args->head_dim);
  tile->grad_finite = load_rows(tile->grad_out, wide(args->head_dim_v), rows, &args->grad_out,
                                args->dtype, b, h, first, n, args->head_dim_v);
  const REAL *logsumexp = (const REAL *)args->logsumexp + (b * args->heads + h) * args->seq_q;
  for (int64_t r = 0; r < n; ++r) {
    /* A row that saw no key gets weights of exp(-inf - inf) = 0. */
    const REAL lse = logsumexp[first + r];
    tile->logsumexp[r] = lse == MINUS_INF ? -MINUS_INF : lse;
    tile->delta[r] = delta_of(args, b, h)[first + r];
  }
}

/* A tile of pairs: queries of a query tile x the keys of a panel. */
struct pair_tile {
  _Alignas(64) REAL weights[QUERIES * PANEL]; /* P, then K P */
  _Alignas(64) REAL grads[QUERIES * PANEL];   /* dP, then dS (before the soft cap's slope) */
  _Alignas(64) REAL slope[QUERIES * PANEL];   /* of the soft cap */
  _Alignas(64) REAL keep[QUERIES * PANEL];    /* K */
};

/* Weights of queries begin .. begin + n - 1 of the tile, and dS where asked for. keys [D][PANEL]
 * and values [Dv][PANEL] are panels whose first lane is key number `key`. */
static void differentiate(struct pair_tile *t, const struct query_tile *q, const struct scores *s,
                          const struct attn_args *args, const REAL *keys, const REAL *values,
                          int64_t begin, int64_t n, int64_t key, int64_t lanes, bool want_grads) {
  const int64_t ld = wide(args->head_dim), ld_v = wide(args->head_dim_v);
  multiply_panel(q->query + begin * ld, ld, keys, t->weights, n, args->head_dim);
  finish_scores(t->weights, s, q->first + begin, n, key, lanes, t->slope);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t at = r * PANEL; at < (r + 1) * PANEL; at += VL) {
      const vec score = vec_load(t->weights + at);
      const vec_bits seen = (vec_bits)(score != MINUS_INF);
      vec_store(t->weights + at, vec_where(seen, vec_exp(score - q->logsumexp[begin + r])));
    }
  if (s->rng_state)
    draw_dropout(t->keep, s, q->first + begin, n, key);
  if (want_grads) {
    multiply_panel(q->grad_out + begin * ld_v, ld_v, values, t->grads, n, args->head_dim_v);
    if (s->rng_state)
      scale_by(t->grads, t->keep, n);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t at = r * PANEL; at < (r + 1) * PANEL; at += VL) {
        const vec weight = vec_load(t->weights + at);
        const vec grad = weight * (vec_load(t->grads + at) - q->delta[begin + r]);
        vec_store(t->grads + at, vec_where((vec_bits)(weight != 0), grad));
      }
  }
  if (s->rng_state)
    scale_by(t->weights, t->keep, n);
}

/* A key block of one head, and the gradients that it sums. */
struct key_block {
  _Alignas(64) REAL keys[KEY_ROOM];       /* [panel][D][PANEL] */
  _Alignas(64) REAL values[KEY_ROOM];     /* [panel][Dv][PANEL] */
  _Alignas(64) REAL key_rows[KEY_ROOM];   /* [keys][wide D] */
  _Alignas(64) REAL grad_key[KEY_ROOM];   /* [keys][wide D] */
  _Alignas(64) REAL grad_value[KEY_ROOM]; /* [keys][wide Dv] */
  int64_t first, n, panels;
  bool finite;
};

/* c [rows][ld] += a * b [depth][ld]; what has no weight adds nothing even if b is not finite. */
ATTN_INLINE void accumulate(const REAL *a, int64_t a_row, int64_t a_col, const REAL *b, REAL *c,
                            int64_t ld, int64_t rows, int64_t depth, bool finite) {
  if (finite)
    multiply_blocks(a, a_row, a_col, b, ld, c, ld, rows, depth, ld, ADD, NULL);
  else
    multiply_nonzero(a, a_row, a_col, b, ld, c, ld, rows, depth, ld, NULL);
}

/* What the queries of a tile add to the gradients; part is where their rows of grad_query lie. */
static void add_queries(struct key_block *k, const struct query_tile *q, struct pair_tile *t,
                        const struct scores *s, const struct attn_args *args, REAL *part) {
  const int64_t ld = wide(args->head_dim), ld_v = wide(args->head_dim_v);
  const bool want_grads = wants_scores(args);
  for (int64_t p = 0; p < k->panels; ++p) {
    const int64_t key = k->first + p * PANEL, lanes = at_most(PANEL, k->n - p * PANEL);
    const struct range seen = seen_by(s, key, lanes, args->seq_q);
    /* Whole groups of MR rows, so that no product writes to a row outside this range. */
    const int64_t begin = at_least(seen.begin - q->first, 0) / MR * MR;
    const int64_t n = at_most(round_up(seen.end - q->first, MR), q->n) - begin;
    if (n <= 0)
      continue;
    differentiate(t, q, s, args, k->keys + p * args->head_dim * PANEL,
                  k->values + p * args->head_dim_v * PANEL, begin, n, key, lanes, want_grads);
    if (args->grad_value.data)
      accumulate(t->weights, 1, PANEL, q->grad_out + begin * ld_v, k->grad_value + p * PANEL * ld_v,
                 ld_v, PANEL, n, q->grad_finite);
    if (!want_grads)
      continue;
    if (s->softcap != 0)
      scale_by(t->grads, t->slope, n);
    if (args->grad_key.data)
      accumulate(t->grads, 1, PANEL, q->query + begin * ld, k->grad_key + p * PANEL * ld, ld, PANEL,
                 n, q->query_finite);
    if (args->grad_query.data) {
      memset(t->grads + n * PANEL, 0, (size_t)((round_up(n, MR) - n) * PANEL) * sizeof(REAL));
      accumulate(t->grads, PANEL, 1, k->key_rows + p * PANEL * ld, part + begin * ld, ld,
                 round_up(n, MR), PANEL, k->finite);
    }
  }
}

static void store_key_block(struct key_block *k, const struct attn_args *args, int64_t b,
                            int64_t h) {
  const int64_t ld = wide(args->head_dim), ld_v = wide(args->head_dim_v);
  for (int64_t i = 0; i < k->n * ld; ++i)
    k->grad_key[i] *= (REAL)args->scale;
  if (args->grad_key.data)
    store_rows(k->grad_key, ld, &args->grad_key, args->dtype, b, h, k->first, k->n, args->head_dim);
  if (args->grad_value.data)
    store_rows(k->grad_value, ld_v, &args->grad_value, args->dtype, b, h, k->first, k->n,
               args->head_dim_v);
}

/* DKV: one share of the key blocks of key head h. */
static void differentiate_share(const struct attn_args *args, int64_t b, int64_t h, int64_t share) {
  struct key_block k;
  struct query_tile q;
  struct pair_tile t;
  const struct plan plan = plan_of(args);
  const int64_t ld = wide(args->head_dim), ld_v = wide(args->head_dim_v);
  const int64_t group = args->heads / args->kv_heads, rows = query_tile_rows(args);

  for (int64_t head = h * group; args->grad_query.data && head < (h + 1) * group; ++head)
    memset(part_of(args, &plan, share, b, head), 0, (size_t)(plan.part_rows * ld) * sizeof(REAL));

  for (int64_t block = share; block < plan.blocks; block += plan.shares) {
    k.first = block * plan.keys;
    k.n = at_most(plan.keys, args->seq_k - k.first);
    k.panels = tiles_of(k.n, PANEL);
    load_panels(k.keys, k.panels, &args->key, args->dtype, b, h, k.first, k.n, args->head_dim);
    load_panels(k.values, k.panels, &args->value, args->dtype, b, h, k.first, k.n,
                args->head_dim_v);
    k.finite = load_rows(k.key_rows, ld, k.panels * PANEL, &args->key, args->dtype, b, h, k.first,
                         k.n, args->head_dim);
    memset(k.grad_key, 0, (size_t)(k.panels * PANEL * ld) * sizeof(REAL));
    memset(k.grad_value, 0, (size_t)(k.panels * PANEL * ld_v) * sizeof(REAL));

    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      const struct scores s = scores_of(args, LANES_ARE_KEYS, b, head);
      const struct range seen = seen_by(&s, k.first, k.n, args->seq_q);
      for (int64_t row = seen.begin / rows * rows; row < seen.end; row += rows) {
        load_queries(&q, args, b, head, row, at_most(rows, args->seq_q - row), rows);
        REAL *part = args->grad_query.data ? part_of(args, &plan, share, b, head) + row * ld : NULL;
        add_queries(&k, &q, &t, &s, args, part);
      }
    }
    store_key_block(&k, args, b, h);
  }
}

/* DMASK: how the mask's own elements are divided. An axis of stride 0 is summed over. */
struct mask_grid {
  int64_t batches, heads, row_blocks, panels;
};

static struct mask_grid mask_grid_of(const struct attn_args *args) {
  const struct attn_mask *m = &args->grad_mask;
  return (struct mask_grid){
      m->stride_b ? args->batch : 1,
      m->stride_h ? args->heads : 1,
      m->stride_q ? tiles_of(args->seq_q, MASK_ROWS) : 1,
      m->stride_k ? tiles_of(args->seq_k, PANEL) : 1,
  };
}

/* Adds dS of one head to sum [MASK_ROWS][PANEL], over rows [row, row_end) and the panel at key.
 * Rows past MASK_ROWS fold back: then the mask has no row axis and they are summed anyway. */
static void add_mask_panel(REAL *sum, const struct attn_args *args, int64_t b, int64_t h,
                           int64_t row, int64_t row_end, int64_t key) {
  _Alignas(64) REAL keys[ATTN_MAX_HEAD_DIM * PANEL], values[ATTN_MAX_HEAD_DIM * PANEL];
  struct query_tile q;
  struct pair_tile t;
  const int64_t kv_head = h / (args->heads / args->kv_heads), rows = query_tile_rows(args);
  const int64_t lanes = at_most(PANEL, args->seq_k - key);
  const struct scores s = scores_of(args, LANES_ARE_KEYS, b, h);
  const struct range seen = seen_by(&s, key, lanes, args->seq_q);

  load_panels(keys, 1, &args->key, args->dtype, b, kv_head, key, lanes, args->head_dim);
  load_panels(values, 1, &args->value, args->dtype, b, kv_head, key, lanes, args->head_dim_v);
  for (int64_t first = row; first < at_most(row_end, seen.end); first += rows) {
    const int64_t n = at_most(rows, row_end - first);
    if (first + n <= seen.begin)
      continue;
    load_queries(&q, args, b, h, first, n, rows);
    differentiate(&t, &q, &s, args, keys, values, 0, n, key, lanes, true);
    for (int64_t r = 0; r < n; ++r)
      for (int v = 0; v < PANEL; v += VL) {
        REAL *at = sum + (first - row + r) % MASK_ROWS * PANEL + v;
        vec_store(at, vec_load(at) + vec_load(t.grads + r * PANEL + v));
      }
  }
}

/* Writes what sum [MASK_ROWS][PANEL] holds for the mask's rows from row and keys from key. */
static void store_mask(REAL *sum, const struct attn_args *args, int64_t b, int64_t h, int64_t row,
                       int64_t key) {
  const struct attn_mask *m = &args->grad_mask;
  const int64_t rows = m->stride_q ? at_most(MASK_ROWS, args->seq_q - row) : 1;
  const int64_t cols = m->stride_k ? at_most(PANEL, args->seq_k - key) : 1;
  for (int64_t r = 1; !m->stride_q && r < MASK_ROWS; ++r)
    for (int v = 0; v < PANEL; v += VL)
      vec_store(sum + v, vec_load(sum + v) + vec_load(sum + r * PANEL + v));
  for (int64_t r = 0; !m->stride_k && r < rows; ++r)
    for (int l = 1; l < PANEL; ++l)
      sum[r * PANEL] += sum[r * PANEL + l];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset =
        b * m->stride_b + h * m->stride_h + (row + r) * m->stride_q + key * m->stride_k;
    char *at = (char *)m->data + offset * dtype_size(m->dtype);
    if (m->stride_k == 1)
      store_row(at, sum + r * PANEL, m->dtype, cols);
    for (int64_t c = 0; m->stride_k != 1 && c < cols; ++c)
      store_row(at + c * m->stride_k * dtype_size(m->dtype), sum + r * PANEL + c, m->dtype, 1);
  }
}

static void differentiate_mask(const struct attn_args *args, int64_t tile) {
  _Alignas(64) REAL sum[MASK_ROWS * PANEL] = {0};
  const struct attn_mask *m = &args->grad_mask;
  const struct mask_grid grid = mask_grid_of(args);
  const int64_t key = tile % grid.panels * PANEL;
  const int64_t row = tile / grid.panels % grid.row_blocks * MASK_ROWS;
  const int64_t head = tile / grid.panels / grid.row_blocks;
  const int64_t b = head / grid.heads, h = head % grid.heads;
  const int64_t b_end = m->stride_b ? b + 1 : args->batch;
  const int64_t h_end = m->stride_h ? h + 1 : args->heads;
  const int64_t row_end = m->stride_q ? at_most(row + MASK_ROWS, args->seq_q) : args->seq_q;
  const int64_t key_end = m->stride_k ? at_most(key + PANEL, args->seq_k) : args->seq_k;

  for (int64_t at_b = b; at_b < b_end; ++at_b)
    for (int64_t at_h = h; at_h < h_end; ++at_h)
      for (int64_t at_key = key; at_key < key_end; at_key += PANEL)
        add_mask_panel(sum, args, at_b, at_h, row, row_end, at_key);
  store_mask(sum, args, b, h, row, key);
}

int64_t ATTN_NAME(flash_bwd_tiles)(const struct attn_args *args, enum attn_bwd_phase phase) {
  const int64_t row_blocks = args->batch * args->heads * tiles_of(args->seq_q, DELTA_ROWS);
  const bool want_mask = args->grad_mask.data != NULL;
  switch (phase) {
  case ATTN_BWD_DELTA:
    return wants_scores(args) || want_mask ? row_blocks : 0;
  case ATTN_BWD_DKV:
    return wants_scores(args) || args->grad_value.data
               ? args->batch * args->kv_heads * plan_of(args).shares
               : 0;
  case ATTN_BWD_DQ:
    return args->grad_query.data ? row_blocks : 0;
  default: {
    const struct mask_grid grid = mask_grid_of(args);
    return want_mask ? grid.batches * grid.heads * grid.row_blocks * grid.panels : 0;
  }
  }
}

void ATTN_NAME(flash_bwd)(const struct attn_args *args, enum attn_bwd_phase phase, int64_t begin,
                          int64_t end) {
  const int64_t row_blocks = tiles_of(args->seq_q, DELTA_ROWS), shares = plan_of(args).shares;
  for (int64_t tile = begin; tile < end; ++tile) {
    if (phase == ATTN_BWD_DKV) {
      const int64_t head = tile / shares;
      differentiate_share(args, head / args->kv_heads, head % args->kv_heads, tile % shares);
    } else if (phase == ATTN_BWD_DMASK) {
      differentiate_mask(args, tile);
    } else {
      const int64_t head = tile / row_blocks, first = tile % row_blocks * DELTA_ROWS;
      (phase == ATTN_BWD_DELTA ? sum_delta : sum_parts)(args, head / args->heads,
                                                        head % args->heads, first,
                                                        at_most(DELTA_ROWS, args->seq_q - first));
    }
  }
}
