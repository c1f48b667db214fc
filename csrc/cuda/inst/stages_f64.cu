#define SCALAR         double
#define PAIR           double2
#define REAL           double
#define TO_REAL        (double)
#define TO_PAIR        make_double2
#define EXP(x, base)   exp((x) - (base))
#define NAME(op, tail) attn_##op##_cuda_f64##tail
#include "../stages_elementwise.cuh"
#include "../stages_softmax.cuh"
