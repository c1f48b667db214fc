#define HEAD_DIM   128
#define DTYPE      f16
#define NAME(tail) attn_flash_bwd_sm80_d128_f16##tail
#include "../flash_bwd_sm80.cuh"
