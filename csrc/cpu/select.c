/* select.c: which build of the CPU kernels runs here, and the entry points of attn.h. */
#include "select.h"

#include <stdlib.h>
#include <string.h>

#define DECLARE(isa, real)                                                                         \
  attn_stage_cpu_fn attn_scale_##isa##_##real, attn_masked_fill_##isa##_##real,                    \
      attn_softmax_##isa##_##real, attn_softmax_backward_##isa##_##real,                           \
      attn_dropout_##isa##_##real;                                                                 \
  int64_t attn_flash_fwd_tiles_##isa##_##real(const struct attn_args *);                           \
  void attn_flash_fwd_##isa##_##real(const struct attn_args *, int64_t, int64_t);                  \
  int64_t attn_flash_bwd_workspace_##isa##_##real(const struct attn_args *);                       \
  int64_t attn_flash_bwd_tiles_##isa##_##real(const struct attn_args *, enum attn_bwd_phase);      \
  void attn_flash_bwd_##isa##_##real(const struct attn_args *, enum attn_bwd_phase, int64_t,       \
                                     int64_t);

#define KERNELS(isa, real)                                                                         \
  {attn_scale_##isa##_##real,           attn_masked_fill_##isa##_##real,                           \
   attn_softmax_##isa##_##real,         attn_softmax_backward_##isa##_##real,                      \
   attn_dropout_##isa##_##real,         attn_flash_fwd_tiles_##isa##_##real,                       \
   attn_flash_fwd_##isa##_##real,       attn_flash_bwd_workspace_##isa##_##real,                   \
   attn_flash_bwd_tiles_##isa##_##real, attn_flash_bwd_##isa##_##real}

#define DECLARE_BUILD(isa) DECLARE(isa, f32) DECLARE(isa, f64)
#define BUILD(isa)         {#isa, KERNELS(isa, f32), KERNELS(isa, f64)}

DECLARE_BUILD(base)
#ifdef __x86_64__
DECLARE_BUILD(avx2)
DECLARE_BUILD(avx512)
#endif

const struct attn_cpu_build attn_cpu_builds[] = {
    BUILD(base),
#ifdef __x86_64__
    BUILD(avx2),
    BUILD(avx512),
#endif
};

const int attn_cpu_build_count = sizeof attn_cpu_builds / sizeof *attn_cpu_builds;

bool attn_cpu_build_runs(int n) {
#ifdef __x86_64__
  __builtin_cpu_init();
  /* A CPU with AVX2 has F16C too; older compilers cannot ask for it. */
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  return n == 0 || (n == 1 && avx2) || (n == 2 && avx512);
#else
  return n == 0;
#endif
}

static const struct attn_cpu_build *forced_build(const char *name) {
  for (int n = 0; n < attn_cpu_build_count; ++n)
    if (strcmp(name, attn_cpu_builds[n].name) == 0 && attn_cpu_build_runs(n))
      return &attn_cpu_builds[n];
  return NULL;
}

/* The name that ATTN_EXT_ISA forces; NULL where it is unset or empty. */
static const char *forced_name(void) {
  const char *name = getenv("ATTN_EXT_ISA");
  return name && *name ? name : NULL;
}

/* The forced build or, where none is forced or the forced one does not run, the fastest that runs.
 * Threads that meet here for the first time all find the same one. */
static const struct attn_cpu_build *build(void) {
  static const struct attn_cpu_build *chosen;
  const struct attn_cpu_build *found = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  if (found)
    return found;
  const char *name = forced_name();
  found = name ? forced_build(name) : NULL;
  for (int n = attn_cpu_build_count; !found; --n)
    found = attn_cpu_build_runs(n - 1) ? &attn_cpu_builds[n - 1] : NULL;
  __atomic_store_n(&chosen, found, __ATOMIC_RELEASE);
  return found;
}

const char *attn_isa_cpu(void) {
  const char *name = forced_name();
  return name && !forced_build(name) ? NULL : build()->name;
}

static const struct attn_cpu_kernels *kernels(enum attn_dtype dtype) {
  return dtype == ATTN_F64 ? &build()->f64 : &build()->f32;
}

#define STAGE(op)                                                                                  \
  void attn_##op##_cpu(const struct attn_stage *stage, int64_t begin, int64_t end) {               \
    kernels(stage->dtype)->op(stage, begin, end);                                                  \
  }
STAGE(scale)
STAGE(masked_fill)
STAGE(softmax)
STAGE(softmax_backward)
STAGE(dropout)

int64_t attn_flash_fwd_tiles_cpu(const struct attn_args *args) {
  return kernels(args->dtype)->flash_fwd_tiles(args);
}

void attn_flash_fwd_cpu(const struct attn_args *args, int64_t begin, int64_t end) {
  kernels(args->dtype)->flash_fwd(args, begin, end);
}

int64_t attn_flash_bwd_workspace_cpu(const struct attn_args *args) {
  return kernels(args->dtype)->flash_bwd_workspace(args);
}

int64_t attn_flash_bwd_tiles_cpu(const struct attn_args *args, enum attn_bwd_phase phase) {
  return kernels(args->dtype)->flash_bwd_tiles(args, phase);
}

void attn_flash_bwd_cpu(const struct attn_args *args, enum attn_bwd_phase phase, int64_t begin,
                        int64_t end) {
  kernels(args->dtype)->flash_bwd(args, phase, begin, end);
}
