#define HEAD_DIM   32
#define DTYPE      bf16
#define NAME(tail) attn_flash_fwd_sm80_d32_bf16##tail
#include "../flash_fwd_sm80.cuh"
