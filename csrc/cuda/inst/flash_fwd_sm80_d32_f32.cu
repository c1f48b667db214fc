#define HEAD_DIM   32
#define WARPS      4
#define TILES      2
#define COLS       4
#define BUFFERS    2
#define SLICES     1
#define MIN_BLOCKS 2
#define NAME(tail) attn_flash_fwd_sm80_d32_f32##tail
#include "../flash_fwd_sm80_f32.cuh"
