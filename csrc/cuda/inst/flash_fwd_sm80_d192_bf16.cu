#define HEAD_DIM   192
#define DTYPE      bf16
#define NAME(tail) attn_flash_fwd_sm80_d192_bf16##tail
#include "../flash_fwd_sm80.cuh"
