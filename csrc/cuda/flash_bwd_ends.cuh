/* flash_bwd_ends.cuh: the kernels before and after that of flash_bwd_sm80, a block a row block.
 *
 * before  stats of its rows: log2(e) * logsumexp and delta = rowsum(dO * O); zeroes dq, turns
 *         and dmask
 * after   dQ = scale * dq in the tensor's dtype; sums of dmask
 * Bound by memory.
 */
#ifndef ATTN_FLASH_BWD_ENDS_CUH
#define ATTN_FLASH_BWD_ENDS_CUH

#include "flash_bwd_tile.cuh"

/* The place of row block index; at->first is its number in its head, h its query head. */
static __device__ __forceinline__ struct place row_place(const struct plan *p, uint32_t index,
                                                         int *h) {
  struct place at;
  const uint32_t head = index / (uint32_t)p->q_blocks;
  at.first = (int)(index % (uint32_t)p->q_blocks);
  at.b = head / (uint32_t)p->args.heads;
  *h = (int)(head % (uint32_t)p->args.heads);
  set_sequence(&at, &p->args);
  return at;
}

/* Element number i of [sizes] split into its four indices, times strides. */
static __device__ __forceinline__ int64_t offset_of(int64_t i, const int64_t sizes[4],
                                                    const struct attn_mask *mask) {
  const int64_t k = i % sizes[3], q = i / sizes[3] % sizes[2], bh = i / sizes[3] / sizes[2];
  return bh / sizes[1] * mask->stride_b + bh % sizes[1] * mask->stride_h + q * mask->stride_q +
         k * mask->stride_k;
}

static __device__ __forceinline__ void store_as(enum attn_dtype dtype, void *data, int64_t at,
                                                float x) {
  if (dtype == ATTN_F32)
    ((float *)data)[at] = x;
  else
    ((uint16_t *)data)[at] = (uint16_t)(dtype == ATTN_BF16 ? pack_bf16(x, 0) : pack_f16(x, 0));
}

static __device__ __forceinline__ void zero_dmask(const struct plan *p) {
  const int64_t *sizes = p->dmask_sizes;
  const int64_t count = sizes[0] * sizes[1] * sizes[2] * sizes[3];
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * blockDim.x)
    store_as(p->dmask.dtype, p->dmask.data, offset_of(i, sizes, &p->dmask), 0);
}

/* grad_mask from dmask, summed in order over the axes where only grad_mask is broadcast. */
static __device__ __forceinline__ void sum_dmask(const struct plan *p) {
  const int64_t *sums = p->dmask_sums;
  const int64_t sizes[4] = {p->dmask_sizes[0] / sums[0], p->dmask_sizes[1] / sums[1],
                            p->dmask_sizes[2] / sums[2], p->dmask_sizes[3] / sums[3]};
  const int64_t count = sizes[0] * sizes[1] * sizes[2] * sizes[3];
  const int64_t terms = sums[0] * sums[1] * sums[2] * sums[3];
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * blockDim.x) {
    const float *from = (const float *)p->dmask.data + offset_of(i, sizes, &p->dmask);
    float sum = 0;
    for (int64_t j = 0; j < terms; ++j)
      sum += from[offset_of(j, sums, &p->dmask)];
    store_as(p->args.grad_mask.dtype, p->args.grad_mask.data,
             offset_of(i, sizes, &p->args.grad_mask), sum);
  }
}

/* Sum of eight products of two rows, from column column on. */
static __device__ __forceinline__ float dot_8(const uint16_t *x, const uint16_t *y, int column,
                                              int columns, bool aligned) {
  float sum = 0;
  if (aligned) {
    if (column >= columns)
      return 0;
    const uint4 u = *(const uint4 *)(x + column), v = *(const uint4 *)(y + column);
    const uint32_t a[4] = {u.x, u.y, u.z, u.w}, b[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum += UNPACK((uint16_t)a[i]) * UNPACK((uint16_t)b[i]) +
             UNPACK((uint16_t)(a[i] >> 16)) * UNPACK((uint16_t)(b[i] >> 16));
    return sum;
  }
  for (int i = column; i < min(column + 8, columns); ++i)
    sum += UNPACK(x[i]) * UNPACK(y[i]);
  return sum;
}

template <int KIND> static __device__ __forceinline__ void before(const struct plan *p) {
  constexpr int BLOCK_Q = tile<KIND>::BLOCK_Q, LANES = 8;
  const struct attn_args *a = &p->args;
  if (p->dmask.data != NULL)
    zero_dmask(p);
  int h;
  const struct place at = row_place(p, blockIdx.x, &h);
  const int row_0 = at.first * BLOCK_Q;
  if (row_0 >= at.seq_q)
    return;
  const int64_t block = row_block_0(p, &at, h, BLOCK_Q) + at.first;
  if (p->turns != NULL && threadIdx.x < 2)
    p->turns[2 * block + threadIdx.x] = 0;
  if (p->dq != NULL) {
    float4 *dq = (float4 *)(p->dq + block * (BLOCK_Q * HEAD_DIM));
#pragma unroll
    for (int i = 0; i < BLOCK_Q * HEAD_DIM / 4; i += ATTN_FLASH_BWD_THREADS)
      dq[i + threadIdx.x] = make_float4(0, 0, 0, 0);
  }

  const int64_t lse_0 =
      a->cu_seq_q == NULL ? (at.b * a->heads + h) * a->seq_q : h * a->total_q + at.q_row;
  float *stats = p->stats + block * (2 * BLOCK_Q);
  for (int i = threadIdx.x / LANES; i < BLOCK_Q; i += ATTN_FLASH_BWD_THREADS / LANES) {
    const int row = row_0 + i;
    const bool exists = row < at.seq_q;
    float delta = 0;
    if (exists) {
      const uint16_t *out = row_in(&a->out, at.b, h, at.q_row + row);
      const uint16_t *grad = row_in(&a->grad_out, at.b, h, at.q_row + row);
      for (int column = threadIdx.x % LANES * 8; column < HEAD_DIM; column += LANES * 8)
        delta += dot_8(out, grad, column, (int)a->head_dim_v, p->aligned);
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      delta += __shfl_xor_sync(~0u, delta, step);
    if (threadIdx.x % LANES != 0)
      continue;
    const float lse = exists ? ((const float *)a->logsumexp)[lse_0 + row] : MINUS_INFINITY;
    const bool sees = lse != MINUS_INFINITY;
    stats[i] = sees ? lse * LOG2_E : -MINUS_INFINITY;
    stats[BLOCK_Q + i] = sees ? delta : 0;
  }
}

/* A warp reads the fragments that the same warp of the main kernel adds to. */
template <int KIND> static __device__ __forceinline__ void after(const struct plan *p) {
  using T = tile<KIND>;
  const struct attn_args *a = &p->args;
  if (p->dmask.data != a->grad_mask.data)
    sum_dmask(p);
  if (p->dq == NULL)
    return;
  int h;
  const struct place at = row_place(p, blockIdx.x, &h);
  if (at.first * T::BLOCK_Q >= at.seq_q)
    return;
  const int64_t block = row_block_0(p, &at, h, T::BLOCK_Q) + at.first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const float *dq =
      p->dq + block * (T::BLOCK_Q * HEAD_DIM) + warp * (T::BLOCK_Q * HEAD_DIM / 8) + lane;
  const float scale = p->score.scale;
  const int columns = (int)a->head_dim;
#pragma unroll
  for (int m = 0; m < T::DQ_M; ++m)
#pragma unroll
    for (int n = 0; n < T::DQ_N; ++n) {
      float c[8]; /* C fragments of 2 x 8 columns */
#pragma unroll
      for (int e = 0; e < 8; ++e)
        c[e] = dq[((m * T::DQ_N + n) * 8 + e) * 32] * scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        /* Even lanes get four neighbours of the first 8 columns, odd ones of the second. */
        uint32_t first = PACK(c[2 * half], c[2 * half + 1]);
        uint32_t second = PACK(c[4 + 2 * half], c[5 + 2 * half]);
        const uint32_t swap = __shfl_xor_sync(~0u, t % 2 ? first : second, 1);
        (t % 2 ? first : second) = swap;
        const int row = at.first * T::BLOCK_Q + warp % T::DQ_Q_WARPS * (16 * T::DQ_M) + 16 * m +
                        8 * half + lane / 4;
        const int column = 16 * (n * T::DQ_D_WARPS + warp / T::DQ_Q_WARPS) + t % 2 * 8 + t / 2 * 4;
        if (row >= at.seq_q)
          continue;
        uint16_t *to = row_in(&a->grad_query, at.b, h, at.q_row + row) + column;
        if (p->aligned) {
          if (column < columns)
            *(uint2 *)to = make_uint2(first, second);
          continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e < columns)
            to[e] = (uint16_t)((e < 2 ? first : second) >> e % 2 * 16);
      }
    }
}

#endif
