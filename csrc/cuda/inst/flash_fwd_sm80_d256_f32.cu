#define HEAD_DIM   256
#define WARPS      4
#define TILES      1
#define COLS       2
#define BUFFERS    1
#define SLICES     2
#define MIN_BLOCKS 2
#define NAME(tail) attn_flash_fwd_sm80_d256_f32##tail
#include "../flash_fwd_sm80_f32.cuh"
