#define SCALAR         __half
#define PAIR           __half2
#define REAL           float
#define TO_REAL        __half2float
#define TO_PAIR        __floats2half2_rn
#define EXP(x, base)   exp2_approx(((x) - (base)) * 1.4426950408889634f)
#define NAME(op, tail) attn_##op##_cuda_f16##tail
#include "../stages_elementwise.cuh"
#include "../stages_softmax.cuh"
