#define HEAD_DIM   96
#define DTYPE      bf16
#define NAME(tail) attn_flash_fwd_sm80_d96_bf16##tail
#include "../flash_fwd_sm80.cuh"
