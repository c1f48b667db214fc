#include <cuda_fp16.h>
#define SCALAR     __half
#define WGMMA_TYPE "f16"
#define HEAD_DIM   192
#define NAME(tail) attn_flash_fwd_sm90_d192_f16##tail
#include "../flash_fwd_sm90.cuh"
