#define SCALAR         __nv_bfloat16
#define PAIR           __nv_bfloat162
#define REAL           float
#define TO_REAL        __bfloat162float
#define TO_PAIR        __floats2bfloat162_rn
#define EXP(x, base)   exp2_approx(((x) - (base)) * 1.4426950408889634f)
#define NAME(op, tail) attn_##op##_cuda_bf16##tail
#include "../stages_elementwise.cuh"
#include "../stages_softmax.cuh"
