#include <cuda_bf16.h>
#define SCALAR     __nv_bfloat16
#define WGMMA_TYPE "bf16"
#define HEAD_DIM   192
#define NAME(tail) attn_flash_fwd_sm90_d192_bf16##tail
#include "../flash_fwd_sm90.cuh"
