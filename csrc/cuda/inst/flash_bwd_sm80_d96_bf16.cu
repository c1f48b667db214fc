#define HEAD_DIM   96
#define DTYPE      bf16
#define NAME(tail) attn_flash_bwd_sm80_d96_bf16##tail
#include "../flash_bwd_sm80.cuh"
