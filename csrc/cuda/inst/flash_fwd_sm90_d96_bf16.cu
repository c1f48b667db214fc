#include <cuda_bf16.h>
#define SCALAR     __nv_bfloat16
#define WGMMA_TYPE "bf16"
#define HEAD_DIM   96
#define NAME(tail) attn_flash_fwd_sm90_d96_bf16##tail
#include "../flash_fwd_sm90.cuh"
