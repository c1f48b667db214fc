/* tile_sm80.cuh: tiles of HEAD_DIM 16-bit columns in shared memory. */
#ifndef ATTN_TILE_SM80_CUH
#define ATTN_TILE_SM80_CUH

#include "ptx_sm80.cuh"

enum {
  PITCH = 2 * HEAD_DIM,                /* bytes of a row */
  CHUNKS = HEAD_DIM % 64 == 0 ? 8 : 4, /* 16-byte chunks that the swizzle permutes */
  SWIZZLE = 16 * (CHUNKS - 1)
};

/* What is xored into the chunk number of a row, so that 8 rows at one column fall into 8 different
 * groups of 4 banks. */
static __device__ __forceinline__ int swizzle_of(int row) {
  return CHUNKS == 8 ? row & 7 : row >> 1 & 3;
}

/* Shared address of a chunk below CHUNKS, tile aligned to 128 bytes. */
static __device__ __forceinline__ uint32_t lane_address(uint32_t tile, int row, int chunk) {
  return tile + row * PITCH + (chunk ^ swizzle_of(row)) * 16;
}

/* The same lane's address rows rows and chunks chunks further; both are constants, rows a multiple
 * of 8, chunks even: so it is an xor that is shared by many, and an immediate. */
static __device__ __forceinline__ uint32_t swizzled(uint32_t lane, int rows, int chunks) {
  return (lane ^ (16 * chunks & SWIZZLE)) + (16 * chunks & ~SWIZZLE) + rows * PITCH;
}

/* Eight 16-bit elements to shared memory, the first left of them from from, the rest zero and not
 * read; nothing unless on. aligned: from is a multiple of 16 bytes and left one of 8; else element
 * by element, through registers. */
static __device__ __forceinline__ void load_chunk(bool on, uint32_t to, const uint16_t *from,
                                                  int left, bool aligned) {
  if (aligned) {
    cp_async_16_if(on, to, from, left > 0 ? 16 : 0);
    return;
  }
  if (!on)
    return;
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < left ? from[2 * i] : 0;
    const uint32_t high = 2 * i + 1 < left ? from[2 * i + 1] : 0;
    word[i] = low | high << 16;
  }
  st_shared_16(to, make_uint4(word[0], word[1], word[2], word[3]));
}

/* n rows on, stride elements each. aligned: 2 * stride fits an int. */
static __device__ __forceinline__ const uint16_t *rows_on(const uint16_t *from, int n,
                                                          int64_t stride, bool aligned) {
  return aligned ? mad_wide(n, 2 * (int)stride, from) : from + n * stride;
}

/* A thread's share of ROWS rows of a tile, which LOADERS threads copy: rows 0, STEP, ... and chunks
 * 0, CHUNKS, ... from its own first on. to, from: its first chunk. Of rows from rows_left on, and
 * of columns from columns_left on, nothing is read and zero written. */
template <int LOADERS, int ROWS>
static __device__ __forceinline__ void load_rows(bool on, uint32_t to, const uint16_t *from,
                                                 int64_t stride, int rows_left, int columns_left,
                                                 bool aligned) {
  constexpr int STEP = LOADERS / CHUNKS; /* a power of two, and above the thread's first row */
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP)
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 8; c += CHUNKS)
      load_chunk(on, (to ^ 16 * swizzle_of(i)) + i * PITCH + 16 * c,
                 rows_on(from, i, stride, aligned) + 8 * c,
                 i < rows_left ? columns_left - 8 * c : 0, aligned);
}

/* Eight elements from column column on of a row of columns columns. */
static __device__ __forceinline__ void store_columns(uint16_t *row, int column, int columns,
                                                     uint4 pack, bool aligned) {
  if (aligned) {
    if (column < columns)
      *(uint4 *)(row + column) = pack;
    return;
  }
  const uint32_t word[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (column + e < columns)
      row[column + e] = (uint16_t)(word[e / 2] >> e % 2 * 16);
}

/* A lane's four registers, each a pair of one row and 8 columns, to 16 bytes of one of 4 x 8
 * columns: lane t of each four gets column group t, so that stores are 16 bytes. */
static __device__ __forceinline__ uint4 quad_transpose(uint32_t r0, uint32_t r1, uint32_t r2,
                                                       uint32_t r3) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? r0 : r1, 1), y = __shfl_xor_sync(~0u, odd ? r2 : r3, 1);
  (odd ? r0 : r1) = x, (odd ? r2 : r3) = y;
  x = __shfl_xor_sync(~0u, upper ? r0 : r2, 2), y = __shfl_xor_sync(~0u, upper ? r1 : r3, 2);
  (upper ? r0 : r2) = x, (upper ? r1 : r3) = y;
  return make_uint4(r0, r1, r2, r3);
}

/* Where fragment [16 rows, 16 columns] number (m, d) of a warp's Q lies. */
static __device__ __forceinline__ uint32_t q_offset(int m, int d) {
  return (m * (HEAD_DIM / 16) + d) * 512;
}

static __device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    x += __shfl_xor_sync(~0u, x, step);
  return x;
}

#endif
