#define HEAD_DIM   256
#define WARPS      2
#define TILES      1
#define COLS       2
#define SLICES     2
#define MIN_BLOCKS 2
#define NAME(tail) attn_flash_bwd_sm80_d256_f32##tail
#include "../flash_bwd_sm80_f32.cuh"
