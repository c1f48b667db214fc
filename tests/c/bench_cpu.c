/* bench_cpu.c: the fused kernels of each build on one core, best of several calls, in GFLOP/s (the
 * usual count: forward 4 B Hq Sq Sk D, backward 2.5 times that, causal half). B 1, H 8. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void forward(const struct attn_cpu_kernels *k, const struct attn_args *a) {
  k->flash_fwd(a, 0, k->flash_fwd_tiles(a));
}

static void backward(const struct attn_cpu_kernels *k, const struct attn_args *a) {
  for (int phase = 0; phase < ATTN_BWD_PHASES; ++phase)
    k->flash_bwd(a, phase, 0, k->flash_bwd_tiles(a, phase));
}

static double best(void (*call)(const struct attn_cpu_kernels *, const struct attn_args *),
                   const struct attn_cpu_kernels *k, const struct attn_args *a) {
  double least = 1e9;
  for (int n = 0; n < 8; ++n) {
    const double start = seconds();
    call(k, a);
    const double took = seconds() - start;
    least = took < least ? took : least;
  }
  return least;
}

static void bench(const struct attn_cpu_build *build, enum attn_dtype dtype, int64_t seq,
                  int64_t dim, bool causal) {
  enum { QUERY, KEY, VALUE, OUT, GRAD_OUT, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, TENSORS };
  struct tensor t[TENSORS];
  for (int n = 0; n < TENSORS; ++n) {
    t[n] = tensor_new(dtype, 1, 8, seq, dim, CONTIGUOUS);
    for (int64_t i = 0; i < 8 * seq * dim; ++i)
      tensor_set(&t[n], 0, 0, 0, i, random_normal());
  }
  struct tensor logsumexp = tensor_new(ATTN_F32, 1, 8, seq, 1, CONTIGUOUS);
  struct attn_args a = {.dtype = dtype,
                        .batch = 1,
                        .heads = 8,
                        .kv_heads = 8,
                        .seq_q = seq,
                        .seq_k = seq,
                        .head_dim = dim,
                        .head_dim_v = dim,
                        .scale = 0.125,
                        .window_left = -1,
                        .window_right = causal ? 0 : -1,
                        .query = view_of(&t[QUERY]),
                        .key = view_of(&t[KEY]),
                        .value = view_of(&t[VALUE]),
                        .out = view_of(&t[OUT]),
                        .logsumexp = logsumexp.data,
                        .grad_out = view_of(&t[GRAD_OUT]),
                        .grad_query = view_of(&t[GRAD_QUERY]),
                        .grad_key = view_of(&t[GRAD_KEY]),
                        .grad_value = view_of(&t[GRAD_VALUE])};
  struct tensor workspace =
      tensor_new(ATTN_BOOL, 1, 1, 1, build->f32.flash_bwd_workspace(&a), CONTIGUOUS);
  a.workspace = workspace.data;
  const double flops = 4.0 * 8 * (double)(seq * seq * dim) / (causal ? 2 : 1) * 1e-9;
  const double fwd = best(forward, &build->f32, &a), bwd = best(backward, &build->f32, &a);
  printf("%-7s %-4s S%-5ld D%-4ld %-7s %7.1f %7.1f\n", build->name, dtype_names[dtype], (long)seq,
         (long)dim, causal ? "causal" : "full", flops / fwd, 2.5 * flops / bwd);
  fflush(stdout);
  for (int n = 0; n < TENSORS; ++n)
    tensor_free(&t[n]);
  tensor_free(&logsumexp);
  tensor_free(&workspace);
}

int main(void) {
  printf("build   dtype                        fwd     bwd  GFLOP/s\n");
  for (int n = 0; n < attn_cpu_build_count; ++n)
    for (int dtype = 0; attn_cpu_build_runs(n) && dtype < 2; ++dtype)
      for (int64_t dim = 64; dim <= 128; dim *= 2)
        for (int causal = 0; causal < 2; ++causal)
          bench(&attn_cpu_builds[n], dtype ? ATTN_BF16 : ATTN_F32, 1024, dim, causal);
  return 0;
}
