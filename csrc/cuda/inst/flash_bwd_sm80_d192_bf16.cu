#define HEAD_DIM   192
#define DTYPE      bf16
#define NAME(tail) attn_flash_bwd_sm80_d192_bf16##tail
#include "../flash_bwd_sm80.cuh"
