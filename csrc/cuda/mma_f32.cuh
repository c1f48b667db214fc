/* mma_f32.cuh: fp32 matrix products of a warp on the tf32 tensor cores, by three products each.
 *
 * Splitting
 *   tf32 keeps 11 of the 24 mantissa bits, so x = big + small with big = x to the nearest tf32,
 *   and a . b = small . big + big . small + big . big, but for about 2^-22 of a product: what
 *   small . small and the cut of small leave.
 * Sums
 *   The tensor core cuts its sums instead of rounding them, always towards zero. A long chain of
 *   them drifts (1e-4 of the result after 8192 keys of one sign), so each chain here is short and
 *   starts at zero, and the fp32 units, which round, add the chains up.
 * Tiles in shared memory: float tile [rows][HEAD_DIM]
 *   A row is a sequence of 16-byte chunks; chunk c of row r stands at c ^ swizzle(r). So the two
 *   ways to read a tile, along a row (scores) and across rows (values), and the copies that fill
 *   it are all free of bank conflicts.
 * Fragments of mma.m16n8k8, for lane l with g = l / 4, t = l % 4
 *   A [16, 8]  a[0] row g, column t     a[1] row g + 8     a[2], a[3] column t + 4
 *   B [8, 8]   b[0] row t, column g     b[1] row t + 4
 *   C [16, 8]  c[0], c[1] row g, columns 2t, 2t + 1     c[2], c[3] row g + 8
 *   The order of the summed index is free, so a lane takes for it what it can load at once.
 *
 * An instance sets HEAD_DIM (32, 64, 128, 256); SLICES, the blocks that share the columns of a
 * result whose rows do not fit in the registers of one; TILES, the fragments of 16 rows that a
 * warp has; and COLS, the fragments of 8 columns of its scores.
 */
#ifndef ATTN_MMA_F32_CUH
#define ATTN_MMA_F32_CUH

#include "ptx_sm80.cuh"

enum {
  CHUNK = 4,                 /* floats */
  CHUNKS = HEAD_DIM / CHUNK, /* of a row */
  OUT_DIM = HEAD_DIM / SLICES
};

/* PTX ISA 9.7.15.5.14 mma: c += a . b in tf32, fp32 accumulation. */
static __device__ __forceinline__ void mma_m16n8k8_tf32(float c[4], const uint32_t a[4],
                                                        const uint32_t b[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* PTX ISA 9.7.9.25.3.1 cp.async: 4 bytes from global to shared memory, or zeros if size is 0. */
static __device__ __forceinline__ void cp_async_4(uint32_t to, const void *from, uint32_t size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(size)
               : "memory");
}

/* Rows 2i and 2i + 1 differ in bit 2, rows of equal parity in bits 1 and 2, as the reads need. */
static __device__ __forceinline__ int swizzle(int row) {
  return (row & 6) ^ (row & 1) << 2;
}

/* Starts the copy of rows x cols of a matrix to a tile of tile_rows rows; the rest becomes 0. The
 * caller commits and waits. */
static __device__ __forceinline__ void copy_tile(float *tile, const float *from, int64_t stride,
                                                 int tile_rows, int64_t rows, int cols) {
  const bool aligned = ((uintptr_t)from | (uintptr_t)(stride * sizeof(float))) % 16 == 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < tile_rows * CHUNKS; i += blockDim.x) {
    int row = i / CHUNKS, chunk = i % CHUNKS, left = row < rows ? cols - chunk * CHUNK : 0;
    const float *source = left > 0 ? from + row * stride + chunk * CHUNK : from;
    uint32_t target = shared_address(tile + row * HEAD_DIM + (chunk ^ swizzle(row)) * CHUNK);
    if (aligned) {
      cp_async_16(target, source, left <= 0 ? 0 : left < CHUNK ? left * 4 : 16);
    } else {
#pragma unroll
      for (int e = 0; e < CHUNK; ++e)
        cp_async_4(target + 4 * e, e < left ? source + e : from, e < left ? 4 : 0);
    }
  }
}

/* The carry of half a unit rounds big to the nearest, so that small, of which the tensor core cuts
 * the lower bits, is as often negative as positive and the cuts average out. cvt.rna.tf32 would
 * take twice the instructions, for the sake of NaN. */
static __device__ __forceinline__ void split(float x, uint32_t *big, uint32_t *small) {
  *big = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;
  *small = __float_as_uint(x - __uint_as_float(*big));
}

/* Keeps the compiler from holding what it made of x for its next use: registers are dearer. */
static __device__ __forceinline__ void forget(float x[4]) {
  asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]));
}

struct a_fragment {
  uint32_t big[4], small[4];
};

struct b_fragment {
  uint32_t big[2], small[2];
};

/* c[0], c[1] += sum over steps of a[step] . b[step][0], b[step][1]. The smallest terms come first,
 * and neighbouring instructions have nothing to do with each other, so that they need not wait. */
static __device__ __forceinline__ void mma_f32(float c[2][4], const struct a_fragment *a,
                                               const struct b_fragment b[][2], int steps) {
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i)
    mma_m16n8k8_tf32(c[i % 2], a[i / 2].small, b[i / 2][i % 2].big);
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i)
    mma_m16n8k8_tf32(c[i % 2], a[i / 2].big, b[i / 2][i % 2].small);
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i)
    mma_m16n8k8_tf32(c[i % 2], a[i / 2].big, b[i / 2][i % 2].big);
}

/* c [16 * TILES, 8 * COLS] = the warp's rows of a tile, from first on, times all rows of another,
 * transposed. A lane sums over the 4 columns of a chunk: x and y in one step, z and w in the next.
 */
static __device__ __forceinline__ void
multiply_transposed(float c[TILES][COLS][4], const float *rows, int first, const float *cols) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  rows += (first + g) * HEAD_DIM;
  cols += g * HEAD_DIM;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int n = 0; n < COLS; ++n)
      c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;

#pragma unroll 2
  for (int k = 0; k < CHUNKS / 4; ++k) {
    const int at = (4 * k + t ^ swizzle(g)) * CHUNK; /* rows that are 8 apart have one swizzle */
    struct a_fragment a[TILES][2];                   /* [m][step] */
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) { /* rows g and g + 8 */
        float4 x = *(const float4 *)(rows + (16 * m + 8 * half) * HEAD_DIM + at);
        split(x.x, &a[m][0].big[half], &a[m][0].small[half]);
        split(x.y, &a[m][0].big[half + 2], &a[m][0].small[half + 2]);
        split(x.z, &a[m][1].big[half], &a[m][1].small[half]);
        split(x.w, &a[m][1].big[half + 2], &a[m][1].small[half + 2]);
      }
    }
#pragma unroll
    for (int n = 0; n < COLS; n += 2) {
      struct b_fragment b[2][2]; /* [step][of columns n and n + 1] */
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 y = *(const float4 *)(cols + 8 * (n + i) * HEAD_DIM + at);
        split(y.x, &b[0][i].big[0], &b[0][i].small[0]);
        split(y.y, &b[0][i].big[1], &b[0][i].small[1]);
        split(y.z, &b[1][i].big[0], &b[1][i].small[0]);
        split(y.w, &b[1][i].big[1], &b[1][i].small[1]);
      }
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        float part[2][4] = {};
        mma_f32(part, a[m], b, 2);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          c[m][n + i / 4][i % 4] += part[i / 4][i % 4];
      }
    }
  }
}

/* out [16 * TILES, OUT_DIM] += p [16 * TILES, 8 * COLS] . tile [8 * COLS, OUT_DIM].
 * p is a C fragment; step k sums over rows 8k + 2t and 8k + 2t + 1 of the tile, which makes it an
 * A fragment as it stands. Column 2n + i of 16 belongs to fragment i, column n, so that a lane
 * loads two neighbours, and holds columns 4t ... 4t + 3 of each 16: see store_rows. */
static __device__ __forceinline__ void accumulate(float out[TILES][OUT_DIM / 8][4],
                                                  float p[TILES][COLS][4], const float *tile) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float *even = tile + 2 * t * HEAD_DIM + g % 2 * 2;
  const float *odd = even + HEAD_DIM;
#pragma unroll
  for (int n = 0; n < OUT_DIM / 16; ++n) {
    const int chunk = n % 2 * 4 + g / 2; /* of 8 */
    const int even_at = n / 2 * 32 + (chunk ^ swizzle(2 * t)) * CHUNK;
    const int odd_at = n / 2 * 32 + (chunk ^ swizzle(2 * t + 1)) * CHUNK;
    float part[TILES][2][4] = {}; /* [m][i][C] */
#pragma unroll
    for (int k = 0; k < COLS; ++k) {
      float2 x = *(const float2 *)(even + 8 * k * HEAD_DIM + even_at);
      float2 y = *(const float2 *)(odd + 8 * k * HEAD_DIM + odd_at);
      struct b_fragment b[2]; /* [i] */
      split(x.x, &b[0].big[0], &b[0].small[0]);
      split(y.x, &b[0].big[1], &b[0].small[1]);
      split(x.y, &b[1].big[0], &b[1].small[0]);
      split(y.y, &b[1].big[1], &b[1].small[1]);
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        struct a_fragment a;
        forget(p[m][k]);
        split(p[m][k][0], &a.big[0], &a.small[0]);
        split(p[m][k][2], &a.big[1], &a.small[1]);
        split(p[m][k][1], &a.big[2], &a.small[2]);
        split(p[m][k][3], &a.big[3], &a.small[3]);
        mma_f32(part[m], &a, &b, 1);
      }
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        out[m][2 * n + j / 4][j % 4] += part[m][j / 4][j % 4];
  }
}

/* Writes rows row and row + 8 of a matrix from out [OUT_DIM / 8][4], times factor. */
static __device__ __forceinline__ void store_rows(float *to, int64_t stride, int64_t row,
                                                  int64_t rows, int cols,
                                                  const float out[OUT_DIM / 8][4],
                                                  const float factor[2]) {
  const int t = threadIdx.x % 4;
  const bool aligned = ((uintptr_t)to | (uintptr_t)(stride * sizeof(float))) % 16 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows)
      continue;
    float *target = to + (row + 8 * half) * stride;
#pragma unroll
    for (int n = 0; n < OUT_DIM / 16; ++n) {
      const int col = 16 * n + 4 * t;
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = out[2 * n + i % 2][2 * half + i / 2] * factor[half];
      if (aligned && col + 4 <= cols) {
        *(float4 *)(target + col) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (col + i < cols)
            target[col + i] = x[i];
      }
    }
  }
}

#endif
