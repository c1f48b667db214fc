#define HEAD_DIM   32
#define WARPS      4
#define TILES      1
#define COLS       4
#define SLICES     1
#define MIN_BLOCKS 2
#define NAME(tail) attn_flash_bwd_sm80_d32_f32##tail
#include "../flash_bwd_sm80_f32.cuh"
