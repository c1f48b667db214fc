/* stages.c: picks the instance of a stage by dtype. */
#include "../attn.h"

#include <stddef.h>

#define DECLARE(op)                                                                                \
  attn_stage_cuda_fn attn_##op##_cuda_f32, attn_##op##_cuda_f64, attn_##op##_cuda_f16,             \
      attn_##op##_cuda_bf16

/* Every stage has the same instances, and an empty tensor is done before it starts. */
#define DEFINE(op)                                                                                 \
  DECLARE(op);                                                                                     \
  int attn_##op##_cuda(const struct attn_stage *stage, void *stream) {                             \
    static attn_stage_cuda_fn *const instances[] = {                                               \
        [ATTN_F32] = attn_##op##_cuda_f32,                                                         \
        [ATTN_F64] = attn_##op##_cuda_f64,                                                         \
        [ATTN_F16] = attn_##op##_cuda_f16,                                                         \
        [ATTN_BF16] = attn_##op##_cuda_bf16,                                                       \
        [ATTN_BOOL] = NULL,                                                                        \
    };                                                                                             \
    if (instances[stage->dtype] == NULL)                                                           \
      return ATTN_UNSUPPORTED;                                                                     \
    if (stage->batch == 0 || stage->heads == 0 || stage->rows == 0 || stage->cols == 0)            \
      return ATTN_OK;                                                                              \
    return instances[stage->dtype](stage, stream);                                                 \
  }

DEFINE(scale)
DEFINE(masked_fill)
DEFINE(softmax)
DEFINE(softmax_backward)
DEFINE(dropout)
