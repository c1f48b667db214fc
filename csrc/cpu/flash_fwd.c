/* flash_fwd.c: fused attention, forward, on the CPU.
 *
 * Formula and shapes: attn.h. No matrix [Sq, Sk] exists; scores live one tile at a time.
 * Architecture: any, through vec.h; built for each ISA, and for REAL float and double.
 * Grid: a tile is (b, query head, block of query rows). Blocks of one head go first, last, second,
 *   second last, ..., so that equal shares of tiles are equal shares of work under a causal band.
 * Roles: none; a call does its tiles one after another. Key tiles that no row of the block sees are
 *   skipped, and of the others each panel takes only the keys that one of its rows sees.
 * Tiles: KEYS keys, loaded (widened) once for a block. A block is up to ROWS rows in panels of
 *   PANEL lanes (vec.h), fewer where head sizes are large or where there would be few blocks.
 *     scores [KEYS][PANEL] = key [KEYS][D] * query^T [D][PANEL]
 *     out    [PANEL][Dv]  += scores^T * value [KEYS][Dv], scaled for the new maximum on the way
 * Scratch, on the stack: queries and outs of a block 64 KiB each, keys and values of a tile 64 KiB
 *   each, one tile of scores, of mask and of dropout 12 KiB each.
 * Barriers: none.
 * Numerics: REAL accumulates. The maximum ignores NaN, the sum does not: a NaN that a row sees
 *   makes that row NaN, and no other. A key that a row does not see (outside the band, bool mask
 *   false, bias -inf) adds exactly nothing to it, even if the key or its value is NaN.
 * The caller has checked: everything in attn.h. cu_seq_* are not read: the caller of a packed batch
 *   calls once for each sequence, with shifted pointers and first_head.
 * Bound by: FMA, and by the exponentials, an eighth of the time at D 64. One core of a Xeon with
 *   AVX-512, fp32, B 1 H 8 S 1024: 98 GFLOP/s at D 64, 102 at D 128 (make -C tests/c bench).
 * Sources: Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.
 */
#include "scores.h"

enum {
  ROWS = 192,
  KEYS = 256 / sizeof(REAL),
  ROOM = 65536 / sizeof(REAL), /* numbers that queries of a block may take, and outs */
};

static int64_t wide(int64_t head_dim) {
  return round_up(head_dim, VL);
}

/* Rows of a block: PANEL at least, and few enough that there are tiles for many threads. */
static int64_t rows_of_block(const struct attn_args *args) {
  const int64_t widest = at_least(at_least(wide(args->head_dim), wide(args->head_dim_v)), 1);
  int64_t panels = at_most(ROWS, ROOM / widest) / PANEL;
  while (panels > 1 && args->batch * args->heads * tiles_of(args->seq_q, panels * PANEL) < 32)
    panels = (panels + 1) / 2;
  return panels * PANEL;
}

int64_t ATTN_NAME(flash_fwd_tiles)(const struct attn_args *args) {
  return args->batch * args->heads * tiles_of(args->seq_q, rows_of_block(args));
}

/* Scores s [n][PANEL] -> exp(s - max), after max [PANEL] and sum [PANEL] took them in. rescale
 * [PANEL] is what earlier sums and outs are multiplied by. */
static void softmax_tile(REAL *s, int64_t n, REAL *max, REAL *sum, REAL *rescale) {
  vec new_max[NV], base[NV], total[NV];
  for (int v = 0; v < NV; ++v)
    new_max[v] = vec_load(max + v * VL);
  for (int64_t a = 0; a < n; ++a)
    for (int v = 0; v < NV; ++v)
      new_max[v] = vec_max(vec_load(s + a * PANEL + v * VL), new_max[v]);
  for (int v = 0; v < NV; ++v) {
    /* Where all is -inf so far, subtract 0: -inf - -inf would be NaN. */
    base[v] = vec_where((vec_bits)(new_max[v] != MINUS_INF), new_max[v]);
    const vec factor = vec_exp(vec_load(max + v * VL) - base[v]);
    total[v] = vec_load(sum + v * VL) * factor;
    vec_store(rescale + v * VL, factor);
    vec_store(max + v * VL, new_max[v]);
  }
  for (int64_t a = 0; a < n; ++a)
    for (int v = 0; v < NV; ++v) {
      const vec p = vec_exp(vec_load(s + a * PANEL + v * VL) - base[v]);
      total[v] += p;
      vec_store(s + a * PANEL + v * VL, p);
    }
  for (int v = 0; v < NV; ++v)
    vec_store(sum + v * VL, total[v]);
}

/* outs [PANEL][ld] = rescale * outs + weights^T [PANEL][n] * values [n][ld]. */
static void add_values(REAL *outs, const REAL *rescale, const REAL *weights, const REAL *values,
                       int64_t n, int64_t ld, bool finite) {
  if (finite)
    multiply_blocks(weights, 1, PANEL, values, ld, outs, ld, PANEL, n, ld, SCALE, rescale);
  else
    multiply_nonzero(weights, 1, PANEL, values, ld, outs, ld, PANEL, n, ld, rescale);
}

/* Divides outs [rows][ld] by the sums; writes them and logsumexp of one head from row first on. */
static void finish_rows(const struct attn_args *args, int64_t b, int64_t h, int64_t first,
                        int64_t rows, REAL *outs, int64_t ld, const REAL *max, const REAL *sum) {
  REAL *logsumexp = args->logsumexp;
  for (int64_t r = 0; r < rows; ++r) {
    const REAL factor = sum[r] == 0 ? 0 : 1 / sum[r];
    for (int64_t c = 0; c < ld; ++c)
      outs[r * ld + c] *= factor;
    logsumexp[(b * args->heads + h) * args->seq_q + first + r] = max[r] + REAL_LOG(sum[r]);
  }
  store_rows(outs, ld, &args->out, args->dtype, b, h, first, rows, args->head_dim_v);
}

static void attend(const struct attn_args *args, int64_t b, int64_t h, int64_t first,
                   int64_t rows) {
  _Alignas(64) REAL queries[ROOM];                    /* [panel][D][PANEL] */
  _Alignas(64) REAL outs[ROOM];                       /* [rows][wide Dv] */
  _Alignas(64) REAL keys[KEYS * ATTN_MAX_HEAD_DIM];   /* [KEYS][wide D] */
  _Alignas(64) REAL values[KEYS * ATTN_MAX_HEAD_DIM]; /* [KEYS][wide Dv] */
  _Alignas(64) REAL tile[KEYS * PANEL], keep[KEYS * PANEL];
  _Alignas(64) REAL max[ROWS], sum[ROWS], rescale[PANEL];
  const int64_t dim = args->head_dim, ld = wide(dim), ld_v = wide(args->head_dim_v);
  const int64_t kv_head = h / (args->heads / args->kv_heads), panels = tiles_of(rows, PANEL);
  const struct scores s = scores_of(args, LANES_ARE_QUERIES, b, h);

  load_panels(queries, panels, &args->query, args->dtype, b, h, first, rows, dim);
  memset(outs, 0, (size_t)(panels * PANEL * ld_v) * sizeof *outs);
  for (int64_t r = 0; r < panels * PANEL; ++r)
    max[r] = MINUS_INF, sum[r] = 0;

  const struct range seen = seen_by(&s, first, rows, args->seq_k);
  for (int64_t key = seen.begin / KEYS * KEYS; key < seen.end; key += KEYS) {
    const int64_t n = at_most(KEYS, args->seq_k - key);
    load_rows(keys, ld, KEYS, &args->key, args->dtype, b, kv_head, key, n, dim);
    const bool finite = load_rows(values, ld_v, KEYS, &args->value, args->dtype, b, kv_head, key, n,
                                  args->head_dim_v);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t row = first + p * PANEL, lanes = at_most(PANEL, first + rows - row);
      const struct range mine = seen_by(&s, row, lanes, args->seq_k);
      const int64_t begin = at_least(mine.begin - key, 0) / MR * MR;
      const int64_t count = at_most(mine.end - key, n) - begin;
      if (count <= 0)
        continue;
      prefetch_mask(&s, key + begin, count, row, lanes);
      multiply_panel(keys + begin * ld, ld, queries + p * dim * PANEL, tile, count, dim);
      finish_scores(tile, &s, key + begin, count, row, lanes, NULL);
      softmax_tile(tile, count, max + p * PANEL, sum + p * PANEL, rescale);
      if (s.rng_state) {
        draw_dropout(keep, &s, key + begin, count, row);
        scale_by(tile, keep, count);
      }
      add_values(outs + p * PANEL * ld_v, rescale, tile, values + begin * ld_v, count, ld_v,
                 finite);
    }
  }
  finish_rows(args, b, h, first, rows, outs, ld_v, max, sum);
}

void ATTN_NAME(flash_fwd)(const struct attn_args *args, int64_t begin, int64_t end) {
  const int64_t rows = rows_of_block(args), blocks = tiles_of(args->seq_q, rows);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t head = tile / blocks, turn = tile % blocks;
    const int64_t first = (turn % 2 ? blocks - 1 - turn / 2 : turn / 2) * rows;
    attend(args, head / args->heads, head % args->heads, first, at_most(rows, args->seq_q - first));
  }
}
