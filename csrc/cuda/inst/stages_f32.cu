#define SCALAR         float
#define PAIR           float2
#define REAL           float
#define TO_REAL        (float)
#define TO_PAIR        make_float2
#define EXP(x, base)   expf((x) - (base))
#define NAME(op, tail) attn_##op##_cuda_f32##tail
#include "../stages_elementwise.cuh"
#include "../stages_softmax.cuh"
