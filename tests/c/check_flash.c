/* check_flash.c: fused attention, forward and backward, in every build, against cpu/ref.c. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cpu/ref.h"

enum mask_kind { NO_MASK, BOOL_MASK, FLOAT_MASK };
enum values { NORMAL, HUGE_SCORES, TINY, EQUAL_KEYS };

/* One problem: what is asked, and the operands. */
struct problem {
  const char *what;
  struct attn_args args; /* sizes and options; views of the operands below */
  enum mask_kind mask_kind;
  enum values values;
  enum layout layout, mask_layout;
  enum attn_dtype mask_dtype;
  bool mask_axes[4]; /* false: the mask broadcasts along this axis */
  bool want[4];      /* gradients of query, key, value, mask */
  int64_t rng_state[2];
  struct tensor query, key, value, grad_out, mask;
};

/* What a backend writes. */
struct results {
  struct tensor out, logsumexp, grads[4];
};

static const char *const result_names[] = {"out",      "logsumexp",  "grad_query",
                                           "grad_key", "grad_value", "grad_mask"};

static struct tensor *nth_result(struct results *r, int n) {
  return n == 0 ? &r->out : n == 1 ? &r->logsumexp : &r->grads[n - 2];
}

static void describe(const struct problem *p, char *text, size_t bytes) {
  const struct attn_args *a = &p->args;
  snprintf(
      text, bytes,
      "%s %s B%ld H%ld/%ld Sq%ld Sk%ld D%ld Dv%ld scale %g cap %g window %ld %ld%s p %g mask %s "
      "%s axes %d%d%d%d layouts %d %d values %d",
      p->what, dtype_names[a->dtype], (long)a->batch, (long)a->heads, (long)a->kv_heads,
      (long)a->seq_q, (long)a->seq_k, (long)a->head_dim, (long)a->head_dim_v, a->scale, a->softcap,
      (long)a->window_left, (long)a->window_right, a->bottom_right ? " bottom right" : "",
      a->dropout_p, (const char *[]){"none", "bool", "float"}[p->mask_kind],
      dtype_names[p->mask_dtype], p->mask_axes[0], p->mask_axes[1], p->mask_axes[2],
      p->mask_axes[3], p->layout, p->mask_layout, p->values);
}

static void fill(struct tensor *t, double size) {
  FOR_EACH(t) tensor_set(t, b, h, s, d, random_normal() * size);
}

/* A tenth of the pairs, and every seventh row, are not seen. */
static void fill_mask(struct tensor *t, enum mask_kind kind) {
  FOR_EACH(t) {
    const bool seen = random_below(10) && (s + h) % 7 != 3;
    tensor_set(t, b, h, s, d, kind == BOOL_MASK ? seen : seen ? random_normal() : -INFINITY);
  }
}

static void make_operands(struct problem *p) {
  struct attn_args *a = &p->args;
  const double huge = a->dtype == ATTN_F16 ? 12 : 60; /* scores within the dtype's range */
  const double size = p->values == HUGE_SCORES ? huge : p->values == TINY ? 1e-3 : 1;
  p->query = tensor_new(a->dtype, a->batch, a->heads, a->seq_q, a->head_dim, p->layout);
  p->key = tensor_new(a->dtype, a->batch, a->kv_heads, a->seq_k, a->head_dim, p->layout);
  p->value = tensor_new(a->dtype, a->batch, a->kv_heads, a->seq_k, a->head_dim_v, p->layout);
  p->grad_out = tensor_new(a->dtype, a->batch, a->heads, a->seq_q, a->head_dim_v, p->layout);
  fill(&p->query, size);
  fill(&p->key, p->values == EQUAL_KEYS ? 0 : size);
  fill(&p->value, p->values == TINY ? 1e-5 : 1);
  fill(&p->grad_out, 1);
  if (p->mask_kind != NO_MASK) {
    p->mask =
        tensor_new(p->mask_dtype, p->mask_axes[0] ? a->batch : 1, p->mask_axes[1] ? a->heads : 1,
                   p->mask_axes[2] ? a->seq_q : 1, p->mask_axes[3] ? a->seq_k : 1, p->mask_layout);
    fill_mask(&p->mask, p->mask_kind);
  }
}

static struct results new_results(const struct problem *p, bool wide) {
  const struct attn_args *a = &p->args;
  const enum attn_dtype dtype = wide ? ATTN_F64 : a->dtype;
  const enum attn_dtype sums = a->dtype == ATTN_F64 || wide ? ATTN_F64 : ATTN_F32;
  const enum layout layout = wide || p->layout == EXPANDED ? CONTIGUOUS : p->layout;
  struct results r = {
      tensor_new(dtype, a->batch, a->heads, a->seq_q, a->head_dim_v, layout),
      tensor_new(sums, a->batch, a->heads, a->seq_q, 1, CONTIGUOUS),
      {tensor_new(dtype, a->batch, a->heads, a->seq_q, a->head_dim, layout),
       tensor_new(dtype, a->batch, a->kv_heads, a->seq_k, a->head_dim, layout),
       tensor_new(dtype, a->batch, a->kv_heads, a->seq_k, a->head_dim_v, layout)},
  };
  if (p->mask_kind == FLOAT_MASK) {
    const int64_t *size = p->mask.size;
    r.grads[3] = tensor_new(wide ? ATTN_F64 : p->mask_dtype, size[0], size[1], size[2], size[3],
                            wide ? CONTIGUOUS : p->mask_layout);
  }
  return r;
}

static void free_results(struct results *r) {
  for (int n = 0; n < 6; ++n)
    tensor_free(nth_result(r, n));
}

/* The arguments of one call with these operands and results; want NULL asks for all gradients. */
static struct attn_args args_for(const struct problem *p, const struct tensor operands[5],
                                 struct results *r, const bool *want) {
  struct attn_args a = p->args;
  a.dtype = operands[0].dtype;
  a.query = view_of(&operands[0]), a.key = view_of(&operands[1]), a.value = view_of(&operands[2]);
  a.grad_out = view_of(&operands[3]);
  if (p->mask_kind != NO_MASK)
    a.mask = mask_of(&operands[4]);
  a.rng_state = p->args.dropout_p > 0 ? p->rng_state : NULL;
  a.out = view_of(&r->out);
  a.logsumexp = r->logsumexp.data;
  struct attn_tensor *views[] = {&a.grad_query, &a.grad_key, &a.grad_value};
  for (int n = 0; n < 3; ++n)
    if (!want || want[n])
      *views[n] = view_of(&r->grads[n]);
  if (p->mask_kind == FLOAT_MASK && (!want || want[3]))
    a.grad_mask = mask_of(&r->grads[3]);
  return a;
}

/* Forward, then backward, each phase in two parts, the later tiles first. */
static void run_build(const struct attn_cpu_kernels *k, struct attn_args *a,
                      struct tensor *workspace, int64_t parts) {
  for (int64_t part = parts; part-- > 0;) {
    const int64_t tiles = k->flash_fwd_tiles(a);
    k->flash_fwd(a, tiles * part / parts, tiles * (part + 1) / parts);
  }
  *workspace = tensor_new(ATTN_BOOL, 1, 1, 1, k->flash_bwd_workspace(a), CONTIGUOUS);
  a->workspace = workspace->data;
  for (int phase = 0; phase < ATTN_BWD_PHASES; ++phase)
    for (int64_t part = parts; part-- > 0;) {
      const int64_t tiles = k->flash_bwd_tiles(a, phase);
      k->flash_bwd(a, phase, tiles * part / parts, tiles * (part + 1) / parts);
    }
}

static void compare(const struct problem *p, const char *build, struct results *ours,
                    struct results *plain, struct results *truth, struct results *sizes,
                    const struct tensor *workspace) {
  char text[400];
  describe(p, text, sizeof text);
  /* Weights are exp(score - logsumexp): half a last digit of a score, and half of a logsumexp that
   * the backward pass gets back rounded, move a weight by that factor. */
  double largest = 0;
  FOR_EACH(&truth->logsumexp) {
    const double x = fabs(tensor_get(&truth->logsumexp, b, h, s, d));
    largest = isfinite(x) ? fmax(largest, x) : largest;
  }
  const double drift = epsilon_of(ours->logsumexp.dtype) * largest;
  for (int n = 0; n < 6; ++n) {
    const struct tensor *t = nth_result(ours, n);
    double error, allowed;
    if (!t->data)
      continue;
    check_result(tensor_guards_hold(t), "%s %s: %s written outside", build, text, result_names[n]);
    if (n >= 2 && !p->want[n - 2])
      continue;
    const bool close = close_enough(t, nth_result(plain, n), nth_result(truth, n),
                                    nth_result(sizes, n), n == 1 ? 0 : drift, &error, &allowed);
    check_result(close, "%s %s: %s error %.3g, allowed %.3g", build, text, result_names[n], error,
                 allowed);
  }
  check_result(tensor_guards_hold(workspace), "%s %s: workspace", build, text);
}

static bool same_bytes(struct results *a, struct results *b) {
  bool same = true;
  for (int n = 0; n < 6; ++n) {
    const struct tensor *x = nth_result(a, n), *y = nth_result(b, n);
    FOR_EACH(x)
    if (x->data) {
      const double u = tensor_get(x, b, h, s, d), v = tensor_get(y, b, h, s, d);
      same &= u == v || (isnan(u) && isnan(v));
    }
  }
  return same;
}

/* The problem in every build; its operands are made, and freed here. */
static void check_problem(struct problem *p) {
  struct tensor operands[5] = {p->query, p->key, p->value, p->grad_out, p->mask}, wide[5] = {{0}};
  for (int n = 0; n < (p->mask_kind == NO_MASK ? 4 : 5); ++n)
    wide[n] = tensor_widened(&operands[n]);
  struct results truth = new_results(p, true), plain = new_results(p, true);
  struct results sizes = new_results(p, true);
  struct attn_args for_truth = args_for(p, wide, &truth, NULL);
  struct attn_args for_plain = args_for(p, wide, &plain, NULL);
  struct attn_args for_sizes = args_for(p, wide, &sizes, NULL);
  attn_ref_flash_fwd(&for_truth);
  attn_ref_flash_bwd(&for_truth);
  plain_flash(&for_plain, &for_sizes, p->args.dtype, p->mask_dtype);

  for (int n = 0; n < attn_cpu_build_count; ++n) {
    if (!attn_cpu_build_runs(n))
      continue;
    const struct attn_cpu_build *build = &attn_cpu_builds[n];
    const struct attn_cpu_kernels *k = p->args.dtype == ATTN_F64 ? &build->f64 : &build->f32;
    struct results ours = new_results(p, false), again = new_results(p, false);
    struct tensor workspace;
    struct attn_args args = args_for(p, operands, &ours, p->want);
    run_build(k, &args, &workspace, 1);
    compare(p, build->name, &ours, &plain, &truth, &sizes, &workspace);
    tensor_free(&workspace);
    args = args_for(p, operands, &again, p->want);
    run_build(k, &args, &workspace, 3);
    check_result(same_bytes(&ours, &again), "%s %s: other bits when split in 3", build->name,
                 p->what);
    tensor_free(&workspace);
    free_results(&ours);
    free_results(&again);
  }
  free_results(&truth);
  free_results(&plain);
  free_results(&sizes);
  for (int n = 0; n < 5; ++n) {
    tensor_free(&operands[n]);
    tensor_free(&wide[n]);
  }
}

static struct problem new_problem(const char *what, enum attn_dtype dtype, int64_t seq_q,
                                  int64_t seq_k, int64_t head_dim) {
  struct problem p = {
      .what = what,
      .args = {.dtype = dtype,
               .batch = 1,
               .heads = 2,
               .kv_heads = 2,
               .seq_q = seq_q,
               .seq_k = seq_k,
               .head_dim = head_dim,
               .head_dim_v = head_dim,
               .scale = head_dim ? 1 / sqrt((double)head_dim) : 1,
               .window_left = -1,
               .window_right = -1,
               .deterministic = true},
      .mask_dtype = dtype,
      .mask_axes = {true, true, true, true},
      .want = {true, true, true, true},
      .rng_state = {(int64_t)random_bits(), random_below(1 << 20)},
  };
  return p;
}

static void check_random(enum attn_dtype dtype) {
  struct problem p = new_problem("random", dtype, 1, 1, 1);
  struct attn_args *a = &p.args;
  do {
    a->batch = RANDOM_OF(1, 1, 2, 3);
    a->kv_heads = RANDOM_OF(1, 1, 2);
    a->heads = a->kv_heads * RANDOM_OF(1, 1, 2, 3);
    a->seq_q =
        RANDOM_OF(0, 1, 2, 7, 8, 11, 12, 13, 23, 24, 25, 33, 47, 48, 49, 63, 65, 96, 97, 193);
    a->seq_k = RANDOM_OF(0, 1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 129, 200);
    a->head_dim = RANDOM_OF(0, 1, 2, 3, 8, 15, 16, 17, 31, 32, 48, 64, 80, 96, 128, 200, 256);
    a->head_dim_v = RANDOM_OF(a->head_dim, a->head_dim, 0, 1, 7, 8, 24, 33, 64, 72, 256);
  } while (a->batch * a->heads * a->seq_q * a->seq_k * (a->head_dim + a->head_dim_v) > 1000000);
  a->scale = a->head_dim ? 1 / sqrt((double)a->head_dim) : 1;
  if (random_below(6) == 0)
    a->scale *= -1.5;
  if (random_below(3) == 0)
    a->window_right = RANDOM_OF(0, 0, 0, 1, 20);
  if (random_below(4) == 0)
    a->window_left = RANDOM_OF(0, 3, 30, 70);
  a->bottom_right = random_below(3) == 0;
  a->softcap = RANDOM_OF(0, 0, 0, 2, 30);
  a->dropout_p = (double[]){0, 0, 0, 0.25, 0.5, 1}[random_below(6)];
  a->first_head = RANDOM_OF(0, 0, 5);
  p.mask_kind = (enum mask_kind)random_below(3);
  if (p.mask_kind == BOOL_MASK)
    p.mask_dtype = ATTN_BOOL;
  else if (random_below(2))
    p.mask_dtype = ATTN_F32;
  for (int axis = 0; axis < 4; ++axis)
    p.mask_axes[axis] = random_below(3) != 0, p.want[axis] = random_below(5) != 0;
  p.layout = (enum layout)RANDOM_OF(CONTIGUOUS, HEADS_INSIDE, GAPS, EXPANDED);
  p.mask_layout = (enum layout)RANDOM_OF(CONTIGUOUS, HEADS_INSIDE, GAPS, STEP_2);
  p.values = (enum values)RANDOM_OF(NORMAL, NORMAL, NORMAL, HUGE_SCORES, TINY, EQUAL_KEYS);
  make_operands(&p);
  check_problem(&p);
}

/* A key that no row sees holds NaN, and so does its value. */
static void check_unseen_nan(enum attn_dtype dtype, enum mask_kind kind) {
  struct problem p = new_problem("NaN in keys that no row sees", dtype, 70, 90, 24);
  p.mask_kind = kind;
  p.mask_dtype = kind == BOOL_MASK ? ATTN_BOOL : dtype;
  make_operands(&p);
  for (int64_t key = 5; key < 90; key += 40)
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 70; ++i)
        tensor_set(&p.mask, 0, h, i, key, kind == BOOL_MASK ? 0 : -INFINITY);
      for (int64_t d = 0; d < 24; ++d) {
        tensor_set(&p.key, 0, h, key, d, NAN);
        tensor_set(&p.value, 0, h, key, d, NAN);
      }
    }
  check_problem(&p);
}

/* NaN in one key, its value or one query under a narrow band: only what sees it turns to NaN. */
static void check_seen_nan(enum attn_dtype dtype, int which) {
  const char *const names[] = {"NaN in a query", "NaN in a key", "NaN in a value",
                               "NaN in grad_out"};
  struct problem p = new_problem(names[which], dtype, 150, 150, 17);
  p.args.window_left = 9;
  p.args.window_right = 2;
  make_operands(&p);
  struct tensor *const tensors[] = {&p.query, &p.key, &p.value, &p.grad_out};
  tensor_set(tensors[which], 0, 1, 70, 3, NAN);
  check_problem(&p);
}

/* Scores that overflow a product's range, values near the largest number, and subnormal ones. */
static void check_extremes(enum attn_dtype dtype) {
  struct problem p = new_problem("extremes", dtype, 33, 65, 4);
  make_operands(&p);
  const double most = dtype == ATTN_F16 ? 60000 : dtype == ATTN_F64 ? 1e300 : 3e38;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t d = 0; d < 4; ++d) {
      tensor_set(&p.query, 0, h, 3, d, d == 0 ? sqrt(most) : 0);
      tensor_set(&p.key, 0, h, 9, d, d == 0 ? sqrt(most) / 4 : 0);
      tensor_set(&p.value, 0, h, 9, d, most / 2);
      tensor_set(&p.value, 0, h, 11, d, dtype == ATTN_F16 ? 1e-7 : 1e-40);
    }
  }
  p.want[0] = p.want[1] = false; /* of the order of most * most */
  check_problem(&p);
}

/* Every row without a key: by band, by bool mask, by float mask, by Sk = 0. */
static void check_no_keys(enum attn_dtype dtype) {
  struct problem band = new_problem("no key in the band", dtype, 60, 10, 8);
  band.args.window_left = band.args.window_right = 0; /* rows from 10 on see none */
  make_operands(&band);
  check_problem(&band);
  for (int kind = BOOL_MASK; kind <= FLOAT_MASK; ++kind) {
    struct problem p = new_problem("all masked", dtype, 5, 70, 8);
    p.mask_kind = (enum mask_kind)kind;
    p.mask_dtype = kind == BOOL_MASK ? ATTN_BOOL : dtype;
    make_operands(&p);
    FOR_EACH(&p.mask) tensor_set(&p.mask, b, h, s, d, kind == BOOL_MASK ? 0 : -INFINITY);
    check_problem(&p);
  }
  struct problem empty = new_problem("no keys", dtype, 5, 0, 8);
  make_operands(&empty);
  check_problem(&empty);
}

/* Longer than any tile and block, so that maxima change and several blocks share a head. */
static void check_long(enum attn_dtype dtype) {
  struct problem p = new_problem("long", dtype, 431, 523, 16);
  p.args.heads = 1, p.args.kv_heads = 1;
  p.args.window_right = 0;
  p.args.bottom_right = true;
  p.mask_kind = FLOAT_MASK;
  p.mask_axes[2] = false;
  make_operands(&p);
  check_problem(&p);
}

void check_flash(int cases) {
  for (enum attn_dtype dtype = ATTN_F32; dtype <= ATTN_BF16; ++dtype) {
    for (int n = 0; n < cases; ++n)
      check_random(dtype);
    check_unseen_nan(dtype, BOOL_MASK);
    check_unseen_nan(dtype, FLOAT_MASK);
    for (int which = 0; which < 4; ++which)
      check_seen_nan(dtype, which);
    check_extremes(dtype);
    check_no_keys(dtype);
    check_long(dtype);
  }
}
