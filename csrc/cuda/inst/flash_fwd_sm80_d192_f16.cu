#define HEAD_DIM   192
#define DTYPE      f16
#define NAME(tail) attn_flash_fwd_sm80_d192_f16##tail
#include "../flash_fwd_sm80.cuh"
