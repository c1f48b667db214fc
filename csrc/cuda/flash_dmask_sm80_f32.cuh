/* flash_dmask_sm80_f32.cuh: the gradient of an additive mask, for fp32 attention.
 *
 * Formula: dMask = P * (K dO V^T - delta), as in flash_bwd_sm80_f32.cuh, [B, Hq, Sq, Sk], summed
 *   over the axes that the mask is broadcast along; an axis of size 1 counts as such.
 * Architecture: sm_80 and later. A file of its own: a mask that wants a gradient is rare, and this
 *   way its cost falls on such calls alone.
 * Grid: a block a tile of ROWS x WALKED of the mask's own shape. It walks all heads, batches and
 *   tiles that add to it, in order, so the sum is deterministic and needs no atomics.
 * Warps, tiles, shared memory: as the _dq kernel.
 * Barriers: of all threads: after the copies (all copied, all read), before the next (all have
 *   read), and around sums [WARPS][WALKED], what each warp has of the columns, at the end.
 * Numerics: as in backward.
 * The caller has checked: everything attn.h says.
 * Bound by: the tensor cores; by the walk's length where a mask has few elements of its own.
 * Sources: none.
 */

/* Adds to sum what one head's pairs of rows i0 ... and columns j0 ... give. */
static __device__ __forceinline__ void add_dmask(const struct call *call, const struct head *head,
                                                 float *query, int i0, int j0,
                                                 float sum[TILES][COLS][4]) {
  const struct attn_args *a = &call->args;
  float *const grad_out = query + OWN_TILE, *const key = grad_out + OWN_TILE;
  float *const value = key + WALKED_TILE;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int w0 = i0 + warp * TILES * 16, w1 = w0 + TILES * 16 - 1;

  __syncthreads(); /* all have read the tiles before */
  copy_tile(query, row_at(&a->query, head->b, head->h, head->first_query + i0), a->query.stride_s,
            ROWS, head->queries - i0, (int)a->head_dim);
  copy_tile(grad_out, row_at(&a->grad_out, head->b, head->h, head->first_query + i0),
            a->grad_out.stride_s, ROWS, head->queries - i0, (int)a->head_dim_v);
  copy_tile(key, row_at(&a->key, head->b, head->kv_h, head->first_key + j0), a->key.stride_s,
            WALKED, head->keys - j0, (int)a->head_dim);
  copy_tile(value, row_at(&a->value, head->b, head->kv_h, head->first_key + j0), a->value.stride_s,
            WALKED, head->keys - j0, (int)a->head_dim_v);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads(); /* all copied, all read */
  if (!any_seen(a, head, w0, w1, j0, j0 + WALKED - 1))
    return;

  float s[TILES][COLS][4], dp[TILES][COLS][4];
  multiply_transposed(s, query, warp * TILES * 16, key);
  multiply_transposed(dp, grad_out, warp * TILES * 16, value);
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(w0 + 16 * m + g + 8 * half, head->queries - 1);
      lse[half] = in_log2(((const float *)a->logsumexp)[head->first_sum + i]);
      delta[half] = ((const float *)a->workspace)[head->first_sum + i];
    }
    differentiate(call, head, false, false, true, w0 + 16 * m + g, j0 + 2 * t, lse, delta, s[m],
                  dp[m]);
#pragma unroll
    for (int e = 0; e < 4 * COLS; ++e)
      sum[m][e / 4][e % 4] += dp[m][e / 4][e % 4];
  }
}

static __device__ __forceinline__ int tiles_of(int64_t length, int tile, bool summed) {
  return summed ? 1 : (int)((length + tile - 1) / tile);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    NAME(_dmask_kernel)(const __grid_constant__ struct call call) {
  extern __shared__ __align__(16) float query[];
  __shared__ float sums[WARPS][WALKED]; /* [warp][column] */
  __shared__ struct head head;
  const struct attn_args *a = &call.args;
  const struct attn_mask *to = &a->grad_mask;
  const bool sum_b = to->stride_b == 0, sum_h = to->stride_h == 0;
  const bool sum_q = to->stride_q == 0, sum_k = to->stride_k == 0;
  const int q_tiles = tiles_of(a->seq_q, ROWS, sum_q), k_tiles = tiles_of(a->seq_k, WALKED, sum_k);
  const uint32_t tile = blockIdx.x % (q_tiles * k_tiles), plane = blockIdx.x / (q_tiles * k_tiles);
  const uint32_t heads = sum_h ? 1 : (uint32_t)a->heads;
  const int q0 = tile / k_tiles * ROWS, k0 = tile % k_tiles * WALKED;
  const uint32_t b0 = plane / heads, h0 = plane % heads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  float sum[TILES][COLS][4] = {};
  const uint32_t h_count = sum_h ? (uint32_t)a->heads : 1;
  const uint32_t walk = h_count * (sum_b ? (uint32_t)a->batch : 1);
  for (uint32_t step = 0; step < walk; ++step) {
    __syncthreads(); /* all have read head */
    if (threadIdx.x == 0)
      head = head_at(&call, b0 + step / h_count, h0 + step % h_count);
    __syncthreads(); /* thread 0 wrote head, all read it */
    const int q_steps = sum_q ? (head.queries + ROWS - 1) / ROWS : q0 < head.queries;
    const int k_steps = sum_k ? (head.keys + WALKED - 1) / WALKED : k0 < head.keys;
    for (int at = 0; at < q_steps * k_steps; ++at) {
      const int i0 = q0 + at / k_steps * ROWS, j0 = k0 + at % k_steps * WALKED;
      if (any_seen(a, &head, i0, i0 + ROWS - 1, j0, j0 + WALKED - 1))
        add_dmask(&call, &head, query, i0, j0, sum);
    }
  }

  /* Rows first: then columns 8n + 2t, + 1 of each lane hold sums over g, or over t, or neither. */
  if (sum_k)
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = 0;
#pragma unroll
        for (int n = 0; n < COLS; ++n)
          x += sum[m][n][2 * half] + sum[m][n][2 * half + 1];
        x += __shfl_xor_sync(~0u, x, 1);
        x += __shfl_xor_sync(~0u, x, 2);
#pragma unroll
        for (int n = 0; n < COLS; ++n)
          sum[m][n][2 * half] = sum[m][n][2 * half + 1] = x;
      }

  float *const out = (float *)to->data + b0 * to->stride_b + h0 * to->stride_h;
  if (!sum_q) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int e = 0; e < 4 * COLS; ++e) {
        int i, j;
        pair_at(false, q0 + warp * TILES * 16 + 16 * m + g, k0 + 2 * t, e / 4, e % 4, &i, &j);
        if (i < a->seq_q && j < (sum_k ? 1 : a->seq_k))
          out[i * to->stride_q + j * to->stride_k] = sum[m][e / 4][e % 4];
      }
    return;
  }
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = 0;
#pragma unroll
      for (int m = 0; m < TILES; ++m)
        x += sum[m][n][c] + sum[m][n][2 + c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        x += __shfl_xor_sync(~0u, x, step);
      if (g == 0)
        sums[warp][8 * n + 2 * t + c] = x;
    }
  __syncthreads(); /* each warp wrote its columns, the first threads read all */
  const int j = k0 + threadIdx.x;
  if (threadIdx.x < (sum_k ? 1 : WALKED) && j < a->seq_k) {
    float x = 0;
    for (int w = 0; w < WARPS; ++w)
      x += sums[w][threadIdx.x];
    out[j * to->stride_k] = x;
  }
}

static int launch_dmask(const struct attn_args *a, struct call *call, void *stream) {
  const struct attn_mask *to = &a->grad_mask;
  const int64_t q_tiles = to->stride_q == 0 ? 1 : (a->seq_q + ROWS - 1) / ROWS;
  const int64_t k_tiles = to->stride_k == 0 ? 1 : (a->seq_k + WALKED - 1) / WALKED;
  const int64_t planes = (to->stride_b == 0 ? 1 : a->batch) * (to->stride_h == 0 ? 1 : a->heads);
  return launch((const void *)NAME(_dmask_kernel), planes * q_tiles * k_tiles, THREADS, SHARED_DQ,
                call, stream);
}
