/* select.h: the table of builds of the CPU kernels, for select.c and for tests of each build. */
#ifndef ATTN_CPU_SELECT_H
#define ATTN_CPU_SELECT_H

#include "attn.h"

/* The kernels of one ISA that compute in one type: float (fp32, fp16, bf16) or double (fp64). */
struct attn_cpu_kernels {
  attn_stage_cpu_fn *scale, *masked_fill, *softmax, *softmax_backward, *dropout;
  int64_t (*flash_fwd_tiles)(const struct attn_args *args);
  void (*flash_fwd)(const struct attn_args *args, int64_t begin, int64_t end);
  int64_t (*flash_bwd_workspace)(const struct attn_args *args);
  int64_t (*flash_bwd_tiles)(const struct attn_args *args, enum attn_bwd_phase phase);
  void (*flash_bwd)(const struct attn_args *args, enum attn_bwd_phase phase, int64_t begin,
                    int64_t end);
};

struct attn_cpu_build {
  const char *name;
  struct attn_cpu_kernels f32, f64;
};

/* From the most portable to the fastest. */
extern const struct attn_cpu_build attn_cpu_builds[];
extern const int attn_cpu_build_count;

/* Whether this CPU and its system run the n-th build. */
bool attn_cpu_build_runs(int n);

#endif
