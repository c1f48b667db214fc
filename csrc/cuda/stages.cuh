/* stages.cuh: what the stage kernels share, for the one dtype that the including instance sets:
 *
 *   SCALAR, PAIR       the type in memory, two of them as .x and .y
 *   REAL               the type of arithmetic
 *   TO_REAL, TO_PAIR   a SCALAR to REAL, two REALs to a PAIR
 *   EXP(x, base)       e to the power of x - base
 *   NAME(op, tail)     attn_<op>_cuda_<dtype><tail>, the name of a launcher or of a kernel
 *
 * Packs
 *   A row is cut into packs of 16 bytes that start at 16-byte boundaries of the row written, so the
 *   first and the last pack may stick out of the row. Pack p holds columns
 *   p * PACK - shift ... + PACK - 1, with shift < PACK. A pack that lies in the row and at a
 *   boundary moves in one access, any other one element by element: odd sizes, odd strides and odd
 *   addresses need no path of their own, and inside a row they cost no speed.
 */
#ifndef ATTN_STAGES_CUH
#define ATTN_STAGES_CUH

#include "../attn.h"
#include "ptx_sm80.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum {
  PACK = 16 / sizeof(SCALAR), /* elements of a pack */
  PACKS = 4,                  /* packs a thread has in flight: enough to cover the latency */
  BLOCK = 256
};

struct __align__(16) pack {
  SCALAR at[PACK];
};

static __device__ SCALAR scalar_of(REAL x) {
  return TO_PAIR(x, x).x;
}

/* Two at a time, since the conversion instructions to fp16 and bf16 take two. */
static __device__ struct pack pack_of(const REAL x[PACK]) {
  struct pack pack;
#pragma unroll
  for (int e = 0; e < PACK; e += 2)
    *(PAIR *)&pack.at[e] = TO_PAIR(x[e], x[e + 1]);
  return pack;
}

static __device__ SCALAR *row_of(const struct attn_tensor *tensor, int64_t b, int64_t h,
                                 int64_t row) {
  return (SCALAR *)tensor->data + b * tensor->stride_b + h * tensor->stride_h +
         row * tensor->stride_s;
}

/* Elements between the 16-byte boundary at or before row and row. */
static __device__ int shift_of(const SCALAR *row) {
  return (int)((uintptr_t)row % sizeof(uint4) / sizeof(SCALAR));
}

static __device__ __forceinline__ bool is_whole(const SCALAR *row, int64_t col, int64_t cols) {
  return col >= 0 && col + PACK <= cols && (uintptr_t)(row + col) % sizeof(uint4) == 0;
}

/* Columns col ... col + PACK - 1; those that the row does not have read as outside. whole: the
 * caller knows that packs lie either in the row, at a boundary, or right of it. */
static __device__ __forceinline__ struct pack load_pack(const SCALAR *row, int64_t col,
                                                        int64_t cols, bool whole, SCALAR outside) {
  struct pack pack;
#pragma unroll
  for (int e = 0; e < PACK; ++e)
    pack.at[e] = outside;
  if (whole ? col < cols : is_whole(row, col, cols)) {
    *(uint4 *)&pack = *(const uint4 *)(row + col);
  } else if (!whole) {
#pragma unroll
    for (int e = 0; e < PACK; ++e)
      if (col + e >= 0 && col + e < cols)
        pack.at[e] = row[col + e];
  }
  return pack;
}

static __device__ __forceinline__ void store_pack(SCALAR *row, int64_t col, int64_t cols,
                                                  bool whole, struct pack pack) {
  if (whole ? col < cols : is_whole(row, col, cols)) {
    __stwb((uint4 *)(row + col), *(uint4 *)&pack); /* by name: a plain store would be split */
  } else if (!whole) {
#pragma unroll
    for (int e = 0; e < PACK; ++e)
      if (col + e >= 0 && col + e < cols)
        row[col + e] = pack.at[e];
  }
}

/* How the rows of [B, H, R, C] are dealt out. A block is lanes x rows threads and walks its rows in
 * heads blockIdx.y, + gridDim.y, ... of batches blockIdx.z, + gridDim.z, ...: a grid has at most
 * 65535 of either. blockIdx.x counts the pieces of a row, then the blocks of rows. */
struct deal {
  uint32_t pieces; /* that a row is cut into; the lanes of a row take PACKS packs each of a piece */
  bool whole;      /* all rows start and end at 16-byte boundaries */
  int64_t group;   /* heads that a block walks */
};

#define FOR_EACH_HEAD(s, b, h, group)                                                              \
  for (int64_t b = blockIdx.z; b < (s).batch; b += gridDim.z)                                      \
    for (int64_t h = blockIdx.y * (group); h < (s).heads; h += gridDim.y * (group))

static __device__ __forceinline__ int64_t row_of_block(uint32_t pieces) {
  return (int64_t)(blockIdx.x / pieces) * blockDim.y;
}

static int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static bool at_boundaries(const struct attn_tensor *tensor) {
  return (uintptr_t)tensor->data % sizeof(uint4) == 0 &&
         (tensor->stride_b | tensor->stride_h | tensor->stride_s) % PACK == 0;
}

/* Threads that share a row at PACKS packs each, a power of two up to most. */
static int lanes_for(int64_t cols, bool whole, int most) {
  int64_t packs = whole ? cols / PACK : (cols + 2 * PACK - 2) / PACK; /* at the worst shift */
  int lanes = 1;
  while (lanes < most && (int64_t)lanes * PACKS < packs)
    lanes *= 2;
  return lanes;
}

/* A block has at least a warp, at most threads, and no more rows than there are. */
static int launch(const void *kernel, const struct attn_stage *s, const struct deal *deal,
                  void **args, int lanes, int threads, void *stream) {
  int rows = lanes < 32 ? 32 / lanes : 1;
  while (rows * lanes < threads && rows < s->rows)
    rows *= 2;
  int64_t groups = ceil_div(s->heads, deal->group);
  dim3 grid((unsigned)(ceil_div(s->rows, rows) * deal->pieces),
            (unsigned)(groups < UINT16_MAX ? groups : UINT16_MAX),
            (unsigned)(s->batch < UINT16_MAX ? s->batch : UINT16_MAX));
  cudaError_t error =
      cudaLaunchKernel(kernel, grid, dim3(lanes, rows), args, 0, (cudaStream_t)stream);
  if (error != cudaSuccess)
    cudaGetLastError(); /* it is reported here, so it must not wait for the next caller */
  return error == cudaErrorNoKernelImageForDevice ? ATTN_NO_DEVICE_CODE : (int)error;
}

#endif
