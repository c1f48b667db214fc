/* flash_fwd_rows.cuh: how flash_fwd_sm80 stores rows: finished, or as partials that are merged. */
#ifndef ATTN_FLASH_FWD_ROWS_CUH
#define ATTN_FLASH_FWD_ROWS_CUH

#include "flash_fwd_warp.cuh"

/* out and logsumexp of a warp's rows. rows: from this lane's first on. */
template <int KIND>
static __device__ __forceinline__ void store_rows(const warp_state<KIND> &w, const struct plan *p,
                                                  const struct place *at, const struct row *rows) {
  const struct attn_args *a = &p->args;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < tile<KIND>::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const struct row row = rows[16 * m + 8 * h];
      const bool exists = row.position < at->seq_q;
      const float sum = w.sum[m][h];
      const float factor = sum == 0 ? 0 : p->score.keep_scale * rcp_approx(sum);
      uint16_t *out = row_in(&a->out, at->b, row.head, at->q_row + row.position);
      if (exists && lane % 4 == 0)
        *logsumexp_of(p, at, row) = sum == 0 ? MINUS_INFINITY : (w.max[m][h] + __log2f(sum)) * LN_2;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          r[i] = PACK(w.o[m][n + i][2 * h] * factor, w.o[m][n + i][2 * h + 1] * factor);
        const uint4 pack = quad_transpose(r[0], r[1], r[2], r[3]);
        if (exists)
          store_columns(out, 8 * (n + lane % 4), (int)a->head_dim_v, pack,
                        KIND == PLAIN || p->aligned);
      }
    }
}

/* Partial rows, [BLOCK_Q][ROW] floats each: O not yet divided, then maximum and sum. */
template <int KIND>
static __device__ __forceinline__ void store_partial(const warp_state<KIND> &w, float *partial,
                                                     int row_0, int rows) {
  using T = tile<KIND>;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_0 + 16 * m + 8 * h;
      float *to = partial + row * T::ROW;
      if (row >= rows)
        continue;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *(float2 *)(to + 8 * n + 2 * t) = make_float2(w.o[m][n][2 * h], w.o[m][n][2 * h + 1]);
      if (t == 0)
        *(float2 *)(to + HEAD_DIM) = make_float2(w.max[m][h], w.sum[m][h]);
    }
}

/* One row merged from count partials, stride floats apart, by one warp: to out and logsumexp, or,
 * where next is given, to another partial. */
template <int KIND>
static __device__ __forceinline__ void merge_row(const struct plan *p, const struct place *at,
                                                 struct row row, const float *partials,
                                                 int64_t stride, int count, float *next) {
  const struct attn_args *a = &p->args;
  const int lane = threadIdx.x % 32;
  float max = LOWEST_MAX, sum = 0;
  for (int i = lane; i < count; i += 32)
    max = fmaxf(max, partials[i * stride + HEAD_DIM]);
  max = warp_max(max);
  for (int i = lane; i < count; i += 32) {
    const float2 part = *(const float2 *)(partials + i * stride + HEAD_DIM);
    sum += part.y * exp2_approx(part.x - max);
  }
  sum = warp_sum(sum);
  const float factor = next != NULL ? 1 : sum == 0 ? 0 : p->score.keep_scale * rcp_approx(sum);
  uint16_t *out = row_in(&a->out, at->b, row.head, at->q_row + row.position);

  /* 16 lanes of 2 columns each, twice: the halves of the warp take every other partial. */
  for (int column = lane % 16 * 2; column < HEAD_DIM; column += 32) {
    float2 o = make_float2(0, 0);
#pragma unroll 4
    for (int i = lane / 16; i < count; i += 2) {
      const float *partial = partials + i * stride;
      const float weight = exp2_approx(partial[HEAD_DIM] - max);
      const float2 x = *(const float2 *)(partial + column);
      o.x += weight * x.x, o.y += weight * x.y;
    }
    o.x = (o.x + __shfl_xor_sync(~0u, o.x, 16)) * factor;
    o.y = (o.y + __shfl_xor_sync(~0u, o.y, 16)) * factor;
    if (next != NULL) {
      if (lane < 16)
        *(float2 *)(next + column) = o;
      continue;
    }
    const uint32_t pair = PACK(o.x, o.y);
    if (lane < 16 && column < a->head_dim_v)
      out[column] = (uint16_t)pair;
    if (lane < 16 && column + 1 < a->head_dim_v)
      out[column + 1] = (uint16_t)(pair >> 16);
  }
  if (lane == 0 && next != NULL)
    *(float2 *)(next + HEAD_DIM) = make_float2(max, sum);
  if (lane == 0 && next == NULL)
    *logsumexp_of(p, at, row) = sum == 0 ? MINUS_INFINITY : (max + __log2f(sum)) * LN_2;
}

/* All rows of all tiles, once the whole grid has written its partials. */
template <int KIND> static __device__ __forceinline__ void merge_splits(const struct plan *p) {
  using T = tile<KIND>;
  const uint32_t rows = gridDim.x / p->splits * T::BLOCK_Q;
  for (uint32_t i = blockIdx.x * T::WARPS + threadIdx.x / 32; i < rows; i += gridDim.x * T::WARPS) {
    const struct place at = place_of(p, i / T::BLOCK_Q * p->splits, 0, T::BLOCK_Q, T::BLOCK_K);
    const struct row row = row_of(p, &at, at.row_0 + (int)(i % T::BLOCK_Q));
    if (row.position < at.seq_q)
      merge_row<KIND>(p, &at, row,
                      p->partials +
                          ((int64_t)at.tile * p->splits * T::BLOCK_Q + i % T::BLOCK_Q) * T::ROW,
                      T::BLOCK_Q * T::ROW, p->splits, NULL);
  }
}

#endif
