/* check_stages.c: the stages in every build, against cpu/ref.c, and the conversions between dtypes
 * that they share with the fused kernels. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "cpu/ref.h"

/* A stage: its name, its kernel in a build, its oracle. */
struct op {
  const char *name;
  attn_stage_cpu_fn *const *(*kernel)(const struct attn_cpu_kernels *k);
  void (*ref)(const struct attn_stage *stage);
};

#define KERNEL_OF(stage)                                                                           \
  static attn_stage_cpu_fn *const *stage##_of(const struct attn_cpu_kernels *k) {                  \
    return &k->stage;                                                                              \
  }
KERNEL_OF(scale)
KERNEL_OF(masked_fill)
KERNEL_OF(softmax)
KERNEL_OF(softmax_backward)
KERNEL_OF(dropout)

static const struct op ops[] = {
    {"scale", scale_of, attn_ref_scale},
    {"masked_fill", masked_fill_of, attn_ref_masked_fill},
    {"softmax", softmax_of, attn_ref_softmax},
    {"softmax_backward", softmax_backward_of, attn_ref_softmax_backward},
    {"dropout", dropout_of, attn_ref_dropout},
};

/* Scores as attention meets them: some rows all -inf, some with NaN or inf, some huge. */
static void fill_scores(struct tensor *t) {
  FOR_EACH(t) {
    const int64_t kind = (s + 3 * h) % 8;
    double x = random_normal() * (kind == 1 ? 1e4 : kind == 2 ? 1e-6 : 2);
    if (kind == 3 || (kind == 4 && random_below(2)))
      x = -INFINITY;
    if ((kind == 5 && d == t->size[3] / 2) || (kind == 6 && d == t->size[3] - 1))
      x = kind == 5 ? NAN : INFINITY;
    tensor_set(t, b, h, s, d, x);
  }
}

static void fill_random(struct tensor *t, double size) {
  FOR_EACH(t) tensor_set(t, b, h, s, d, random_normal() * size);
}

static void check_op(const struct op *op, enum attn_dtype dtype) {
  const int64_t batch = RANDOM_OF(1, 2), heads = RANDOM_OF(1, 3), rows = RANDOM_OF(1, 2, 9, 17);
  const int64_t cols = RANDOM_OF(1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 255, 1023, 1024, 1025, 2100);
  const enum layout layout = (enum layout)RANDOM_OF(CONTIGUOUS, HEADS_INSIDE, GAPS);
  const bool in_place = random_below(2), fills = strcmp(op->name, "masked_fill") == 0;
  const int64_t rng_state[] = {(int64_t)random_bits(), (int64_t)random_bits()};
  const bool probs_op = strcmp(op->name, "softmax_backward") == 0;

  struct tensor in = tensor_new(dtype, batch, heads, rows, cols, layout);
  struct tensor probs = tensor_new(dtype, batch, heads, rows, cols, layout);
  struct tensor mask =
      tensor_new(ATTN_BOOL, RANDOM_OF(1, batch), RANDOM_OF(1, heads), RANDOM_OF(1, rows),
                 RANDOM_OF(1, cols), (enum layout)RANDOM_OF(CONTIGUOUS, GAPS, STEP_2));
  FOR_EACH(&mask) tensor_set(&mask, b, h, s, d, (double)random_below(2));
  if (probs_op)
    fill_random(&in, 1), fill_random(&probs, 0.1);
  else
    fill_scores(&in);

  struct attn_stage stage = {.batch = batch, .heads = heads, .rows = rows, .cols = cols};
  stage.value = strcmp(op->name, "dropout") == 0 ? (double[]){0.1, 0.5, 1}[random_below(3)]
                : fills                          ? (double[]){-INFINITY, -1e9, 0.1}[random_below(3)]
                                                 : random_normal();
  if (fills)
    stage.value = round_to(dtype, stage.value);
  stage.rng_state = rng_state;
  if (fills && random_below(4))
    stage.mask = mask_of(&mask);
  stage.is_causal = random_below(2);

  struct tensor wide_in = tensor_widened(&in), wide_probs = tensor_widened(&probs);
  struct tensor truth = tensor_new(ATTN_F64, batch, heads, rows, cols, CONTIGUOUS);
  struct tensor plain = tensor_new(ATTN_F64, batch, heads, rows, cols, CONTIGUOUS);
  struct tensor sizes = tensor_new(ATTN_F64, batch, heads, rows, cols, CONTIGUOUS);
  const struct attn_tensor sizes_view = view_of(&sizes);
  struct attn_stage wide = stage;
  wide.dtype = ATTN_F64;
  wide.in = view_of(&wide_in), wide.probs = view_of(&wide_probs), wide.out = view_of(&truth);
  op->ref(&wide);
  wide.out = view_of(&plain);
  if (fills)
    op->ref(&wide); /* nothing is rounded: no error, and sizes stay NaN */
  else
    plain_stage(op->name, &wide, &sizes_view, dtype);

  for (int n = 0; n < attn_cpu_build_count; ++n) {
    if (!attn_cpu_build_runs(n))
      continue;
    const struct attn_cpu_build *build = &attn_cpu_builds[n];
    struct tensor out = tensor_new(dtype, batch, heads, rows, cols, layout);
    if (in_place)
      FOR_EACH(&in) tensor_set(&out, b, h, s, d, tensor_get(&in, b, h, s, d));
    stage.dtype = dtype;
    stage.in = view_of(in_place ? &out : &in), stage.probs = view_of(&probs);
    stage.out = view_of(&out);
    attn_stage_cpu_fn *kernel = *op->kernel(dtype == ATTN_F64 ? &build->f64 : &build->f32);
    const int64_t all = batch * heads * rows;
    kernel(&stage, all / 3, all);
    kernel(&stage, 0, all / 3);
    double error, allowed;
    const bool close = close_enough(&out, &plain, &truth, &sizes, 0, &error, &allowed);
    check_result(close && tensor_guards_hold(&out),
                 "%s %s %s [%ld, %ld, %ld, %ld] layout %d%s value %g: error %.3g, allowed %.3g",
                 build->name, op->name, dtype_names[dtype], (long)batch, (long)heads, (long)rows,
                 (long)cols, layout, in_place ? " in place" : "", stage.value, error, allowed);
    tensor_free(&out);
  }
  struct tensor *all[] = {&in, &probs, &mask, &wide_in, &wide_probs, &truth, &plain, &sizes};
  for (int n = 0; n < 8; ++n)
    tensor_free(all[n]);
}

/* Each of the 65536 numbers of a 16-bit dtype, times 1, must come back; times a factor, must be
 * rounded to nearest even. */
static void check_conversions(enum attn_dtype dtype, double factor) {
  struct tensor in = tensor_new(dtype, 1, 1, 256, 256, CONTIGUOUS);
  FOR_EACH(&in) {
    const uint16_t bits = (uint16_t)(s * 256 + d);
    memcpy(in.data + (s * 256 + d) * 2, &bits, sizeof bits);
  }
  for (int n = 0; n < attn_cpu_build_count; ++n) {
    if (!attn_cpu_build_runs(n))
      continue;
    struct tensor out = tensor_new(dtype, 1, 1, 256, 256, CONTIGUOUS);
    struct attn_stage stage = {.dtype = dtype, .batch = 1, .heads = 1, .rows = 256, .cols = 256};
    stage.in = view_of(&in), stage.out = view_of(&out);
    stage.value = factor;
    attn_cpu_builds[n].f32.scale(&stage, 0, 256);
    int wrong = 0;
    FOR_EACH(&in) {
      const float product = (float)tensor_get(&in, b, h, s, d) * (float)factor;
      const double want = round_to(dtype, product), got = tensor_get(&out, b, h, s, d);
      wrong += isnan(want) ? !isnan(got) : want != got || signbit(want) != signbit(got);
    }
    check_result(wrong == 0, "%s %s times %g: %d of 65536 wrong", attn_cpu_builds[n].name,
                 dtype_names[dtype], factor, wrong);
    tensor_free(&out);
  }
  tensor_free(&in);
}

void check_stages(int cases) {
  for (enum attn_dtype dtype = ATTN_F32; dtype <= ATTN_BF16; ++dtype)
    for (size_t op = 0; op < sizeof ops / sizeof *ops; ++op)
      for (int n = 0; n < cases; ++n)
        check_op(&ops[op], dtype);
  for (enum attn_dtype dtype = ATTN_F16; dtype <= ATTN_BF16; ++dtype) {
    check_conversions(dtype, 1);
    check_conversions(dtype, 0.3330078125);
    check_conversions(dtype, 1.0009765625);
    check_conversions(dtype, 0x1p-13);
  }
}
