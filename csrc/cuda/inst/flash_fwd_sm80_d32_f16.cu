#define HEAD_DIM   32
#define DTYPE      f16
#define NAME(tail) attn_flash_fwd_sm80_d32_f16##tail
#include "../flash_fwd_sm80.cuh"
