/* flash_bwd_sm80_f32.cuh: attention of fp32 tensors in full fp32 accuracy, backward.
 *
 * Formulas, with P = exp(s - logsumexp) of one head, K = keep / (1 - p), delta = rowsum(dO * O)
 *   dV = (K P)^T dO     dS = P * (K dO V^T - delta)     dQ = scale dS K     dK = scale dS^T Q
 *   query, dO, dQ [Sq, D or Dv], key, dK [Sk, D], value, dV [Sk, Dv]
 * Architecture: sm_80 and later; products by three of tf32 each (mma_f32.cuh).
 * Kernels
 *   _delta  a warp a row: delta, into the workspace [B, Hq, Sq] or [Hq, total_q]; clears dQ
 *   _dkv    a block a tile of ROWS keys of a key head; walks the group's query heads and the
 *           queries that see it. Adds its part of dQ with atomics, unless dQ must be deterministic
 *   _dq     a block a tile of ROWS queries; walks the keys. Only for deterministic calls: it makes
 *           S and dO V^T a second time, seven products instead of five
 *   _dmask  flash_dmask_sm80_f32.cuh, only where a mask wants its gradient
 * Grid: tiles times heads times SLICES; under a causal mask the tiles with most work first. A
 *   block keeps the columns of its slice of dQ, dK and dV.
 * Warps: WARPS, each TILES * 16 rows of the block's and all columns. No roles. For dQ in _dkv the
 *   warps divide [8 COLS][OUT_DIM] among them, since each sees only its own keys of dS.
 * Tiles: the block's own two, [ROWS][HEAD_DIM], and two of the walk, [8 COLS][HEAD_DIM]. Rows:
 *     HEAD_DIM 32, 64: 64 and 32      128: 64 and 16      256: 32 and 16, two slices
 * Shared memory: own tiles, walked tiles, logsumexp and delta of the walked rows, and for dQ
 *   dS [8 COLS][ROWS + 4]; at most 99 KiB, which every GPU from sm_80 on has.
 * Barriers: of all threads. After cp.async.wait_group 0: the walked tiles are there. Before the
 *   next copy: they are read. In _dkv one more: all warps wrote dS before it is read.
 * Numerics: as in forward; sums in fp32, in registers over the whole walk.
 * The caller has checked: everything attn.h says. A gradient is wanted where its data is not NULL.
 * Bound by: the instructions that split operands, then the tensor cores.
 * Sources: FlashAttention-2, arXiv 2307.08691.
 */
#include "flash_f32.cuh"

enum {
  ROWS = WARPS * TILES * 16,
  WALKED = 8 * COLS,
  THREADS = WARPS * 32,
  OWN_TILE = ROWS * HEAD_DIM, /* floats */
  WALKED_TILE = WALKED * HEAD_DIM,
  DS_STRIDE = ROWS + 4, /* floats of a row of dS: rows g of a fragment fall into different banks */
  SHARED_DQ = (2 * OWN_TILE + 2 * WALKED_TILE) * (int)sizeof(float),
  SHARED_DKV = SHARED_DQ + WALKED * (2 + DS_STRIDE) * (int)sizeof(float)
};

extern "C" __global__ void NAME(_delta_kernel)(const __grid_constant__ struct call call) {
  const struct attn_args *a = &call.args;
  const int lane = threadIdx.x % 32;
  const uint32_t heads = (uint32_t)a->heads, plane = blockIdx.x % call.planes;
  const struct head head = head_at(&call, plane / heads, plane % heads);
  const int i = (int)(blockIdx.x / call.planes) * (THREADS / 32) + threadIdx.x / 32;
  if (i >= head.queries)
    return;
  const float *grad = row_at(&a->grad_out, head.b, head.h, head.first_query + i);
  const float *out = row_at(&a->out, head.b, head.h, head.first_query + i);
  float sum = 0;
  for (int c = lane; c < a->head_dim_v; c += 32)
    sum += grad[c] * out[c];
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0)
    ((float *)a->workspace)[head.first_sum + i] = sum;
  if (a->grad_query.data != NULL && !a->deterministic) {
    float *grad_query = row_at(&a->grad_query, head.b, head.h, head.first_query + i);
    for (int c = lane; c < a->head_dim; c += 32)
      grad_query[c] = 0;
  }
}

/* dQ of the walked queries += scale dS K. Warp w takes rows 16 (w % (COLS / 2)) on and every
 * PARTS-th pair of fragments of 8 columns. In plain column order, so that four lanes add to 32
 * bytes at once. */
static __device__ __forceinline__ void add_dq(const struct call *call, const struct head *head,
                                              int i0, int slice, const float *ds,
                                              const float *key) {
  enum { HALVES = COLS / 2, PARTS = WARPS / HALVES };
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int row = warp % HALVES * 16 + g;
  const struct attn_args *a = &call->args;
  const float scale = (float)a->scale;
  ds += row * DS_STRIDE + 2 * t;
  const int first = slice * (OUT_DIM / 16), end = first + OUT_DIM / 16;
  for (int n = first + warp / HALVES; n < end; n += PARTS) {
    float part[2][4] = {};
#pragma unroll 2
    for (int k = 0; k < ROWS / 8; ++k) { /* sums over keys 8k + 2t and 8k + 2t + 1 */
      struct a_fragment x;
      float2 low = *(const float2 *)(ds + 8 * k),
             high = *(const float2 *)(ds + 8 * DS_STRIDE + 8 * k);
      split(low.x, &x.big[0], &x.small[0]);
      split(high.x, &x.big[1], &x.small[1]);
      split(low.y, &x.big[2], &x.small[2]);
      split(high.y, &x.big[3], &x.small[3]);
      struct b_fragment y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = 4 * n + 2 * i + g / 4;
        const float *even = key + (8 * k + 2 * t) * HEAD_DIM + g % 4;
        split(even[(chunk ^ swizzle(2 * t)) * CHUNK], &y[i].big[0], &y[i].small[0]);
        split(even[HEAD_DIM + (chunk ^ swizzle(2 * t + 1)) * CHUNK], &y[i].big[1], &y[i].small[1]);
      }
      mma_f32(part, &x, &y, 1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = i0 + row + 8 * half;
      if (i >= head->queries)
        continue;
      float *to = row_at(&a->grad_query, head->b, head->h, head->first_query + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = 16 * n + 8 * (e / 2) + 2 * t + e % 2;
        if (col < a->head_dim)
          atomicAdd(to + col, part[e / 2][2 * half + e % 2] * scale);
      }
    }
  }
}

/* Starts the copy of the walked queries and their sums. */
static __device__ __forceinline__ void
copy_queries(const struct attn_args *a, const struct head *head, float *tile, float *sums, int i0) {
  copy_tile(tile, row_at(&a->query, head->b, head->h, head->first_query + i0), a->query.stride_s,
            WALKED, head->queries - i0, (int)a->head_dim);
  copy_tile(tile + WALKED_TILE, row_at(&a->grad_out, head->b, head->h, head->first_query + i0),
            a->grad_out.stride_s, WALKED, head->queries - i0, (int)a->head_dim_v);
  for (int r = threadIdx.x; r < 2 * WALKED; r += THREADS) {
    const float *from = (const float *)(r < WALKED ? a->logsumexp : a->workspace) + head->first_sum;
    const int i = i0 + r % WALKED;
    cp_async_4(shared_address(sums + r), i < head->queries ? from + i : from,
               i < head->queries ? 4 : 0);
  }
  cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    NAME(_dkv_kernel)(const __grid_constant__ struct call call) {
  extern __shared__ __align__(16) float key[];
  __shared__ struct head head; /* here, since registers are short; h walks the group */
  float *const value = key + OWN_TILE, *const query = value + OWN_TILE;
  float *const grad_out = query + WALKED_TILE, *const sums = grad_out + WALKED_TILE;
  float *const ds = sums + 2 * WALKED;

  const struct attn_args *a = &call.args;
  const uint32_t heads = (uint32_t)a->kv_heads, planes = (uint32_t)a->batch * heads;
  const uint32_t slice = blockIdx.x % SLICES, block = blockIdx.x / SLICES;
  const uint32_t plane = block % planes;
  const bool wants_dq = a->grad_query.data != NULL && !a->deterministic;
  if (threadIdx.x == 0)
    head = head_at(&call, plane / heads, plane % heads * call.group);
  __syncthreads(); /* thread 0 wrote head, all read it */

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int j0 = (int)(block / planes) * ROWS, j1 = j0 + ROWS - 1;
  const int w0 = j0 + warp * TILES * 16, w1 = w0 + TILES * 16 - 1; /* the warp's keys */
  if (j0 >= head.keys)
    return;
  /* The queries that see some of the keys. */
  const int64_t low = a->window_right < 0 ? 0 : (int64_t)j0 - head.shift - a->window_right;
  const int64_t high =
      a->window_left < 0 ? head.queries : (int64_t)j1 - head.shift + a->window_left + 1;
  const int begin = low <= 0 ? 0 : (int)min(low, (int64_t)head.queries) / WALKED * WALKED;
  const int end = (int)min(high, (int64_t)head.queries);

  copy_tile(key, row_at(&a->key, head.b, head.kv_h, head.first_key + j0), a->key.stride_s, ROWS,
            head.keys - j0, (int)a->head_dim);
  copy_tile(value, row_at(&a->value, head.b, head.kv_h, head.first_key + j0), a->value.stride_s,
            ROWS, head.keys - j0, (int)a->head_dim_v);

  float dv[TILES][OUT_DIM / 8][4] = {}, dk[TILES][OUT_DIM / 8][4] = {};

  for (uint32_t member = 0; member < call.group; ++member) {
    if (member > 0) {
      if (threadIdx.x == 0)
        head = head_at(&call, head.b, head.h + 1);
      __syncthreads(); /* thread 0 wrote head, all read it; the barrier below came between */
    }
    for (int i0 = begin; i0 < end; i0 += WALKED) {
      copy_queries(a, &head, query, sums, i0);
      cp_async_wait<0>();
      __syncthreads(); /* all copied, all read the tiles and the sums */
      const bool seen = any_seen(a, &head, i0, i0 + WALKED - 1, w0, w1);
      float s[TILES][COLS][4], dp[TILES][COLS][4];
      if (seen) {
        multiply_transposed(s, key, warp * TILES * 16, query);
        multiply_transposed(dp, value, warp * TILES * 16, grad_out);
        float lse[2 * COLS], delta[2 * COLS];
#pragma unroll
        for (int c = 0; c < 2 * COLS; ++c) {
          lse[c] = in_log2(sums[c / 2 * 8 + 2 * t + c % 2]);
          delta[c] = sums[WALKED + c / 2 * 8 + 2 * t + c % 2];
        }
        const bool whole = all_seen(a, &head, i0, i0 + WALKED - 1, w0, w1);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
          differentiate(&call, &head, true, whole, false, w0 + 16 * m + g, i0 + 2 * t, lse, delta,
                        s[m], dp[m]);
        if (a->grad_value.data != NULL)
          accumulate(dv, s, grad_out + slice * OUT_DIM);
        if (a->grad_key.data != NULL)
          accumulate(dk, dp, query + slice * OUT_DIM);
      }
      if (wants_dq) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int e = 0; e < 4 * COLS; ++e)
            ds[(e / 4 * 8 + 2 * t + e % 2) * DS_STRIDE + warp * TILES * 16 + 16 * m + g +
               e % 4 / 2 * 8] = seen ? dp[m][e / 4][e % 4] : 0;
        __syncthreads(); /* all wrote their keys of dS, all read them */
        add_dq(&call, &head, i0, (int)slice, ds, key);
      }
      __syncthreads(); /* the walked tiles, the sums and dS are read, the next copy may start */
    }
  }
  cp_async_wait<0>(); /* of a block that no query sees */

  const float plain[2] = {1, 1}, scale[2] = {(float)a->scale, (float)a->scale};
  const int column = (int)slice * OUT_DIM;
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    if (a->grad_value.data != NULL)
      store_rows(row_at(&a->grad_value, head.b, head.kv_h, head.first_key) + column,
                 a->grad_value.stride_s, w0 + 16 * m + g, head.keys, (int)a->head_dim_v - column,
                 dv[m], plain);
    if (a->grad_key.data != NULL)
      store_rows(row_at(&a->grad_key, head.b, head.kv_h, head.first_key) + column,
                 a->grad_key.stride_s, w0 + 16 * m + g, head.keys, (int)a->head_dim - column, dk[m],
                 scale);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    NAME(_dq_kernel)(const __grid_constant__ struct call call) {
  extern __shared__ __align__(16) float query[];
  __shared__ struct head head; /* here, since registers are short */
  float *const grad_out = query + OWN_TILE, *const key = grad_out + OWN_TILE;
  float *const value = key + WALKED_TILE;

  const struct attn_args *a = &call.args;
  const uint32_t heads = (uint32_t)a->heads, slice = blockIdx.x % SLICES;
  const uint32_t block = blockIdx.x / SLICES, plane = block % call.planes;
  if (threadIdx.x == 0)
    head = head_at(&call, plane / heads, plane % heads);
  __syncthreads(); /* thread 0 wrote head, all read it */

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int i0 = (int)(gridDim.x / SLICES / call.planes - 1 - block / call.planes) * ROWS;
  const int w0 = i0 + warp * TILES * 16, w1 = w0 + TILES * 16 - 1; /* the warp's queries */
  if (i0 >= head.queries)
    return;
  const int last = min(i0 + ROWS, head.queries) - 1;
  const int begin = first_seen(a, &head, i0) / WALKED * WALKED, end = end_seen(a, &head, last);

  copy_tile(query, row_at(&a->query, head.b, head.h, head.first_query + i0), a->query.stride_s,
            ROWS, head.queries - i0, (int)a->head_dim);
  copy_tile(grad_out, row_at(&a->grad_out, head.b, head.h, head.first_query + i0),
            a->grad_out.stride_s, ROWS, head.queries - i0, (int)a->head_dim_v);

  float dq[TILES][OUT_DIM / 8][4] = {}, lse[TILES][2], delta[TILES][2];
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(w0 + 16 * m + g + 8 * half, head.queries - 1);
      lse[m][half] = in_log2(((const float *)a->logsumexp)[head.first_sum + i]);
      delta[m][half] = ((const float *)a->workspace)[head.first_sum + i];
    }

  for (int j0 = begin; j0 < end; j0 += WALKED) {
    copy_tile(key, row_at(&a->key, head.b, head.kv_h, head.first_key + j0), a->key.stride_s, WALKED,
              head.keys - j0, (int)a->head_dim);
    copy_tile(value, row_at(&a->value, head.b, head.kv_h, head.first_key + j0), a->value.stride_s,
              WALKED, head.keys - j0, (int)a->head_dim_v);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); /* all copied, all read the tiles */
    if (any_seen(a, &head, w0, w1, j0, j0 + WALKED - 1)) {
      float s[TILES][COLS][4], dp[TILES][COLS][4];
      multiply_transposed(s, query, warp * TILES * 16, key);
      multiply_transposed(dp, grad_out, warp * TILES * 16, value);
      const bool whole = all_seen(a, &head, w0, w1, j0, j0 + WALKED - 1);
#pragma unroll
      for (int m = 0; m < TILES; ++m)
        differentiate(&call, &head, false, whole, false, w0 + 16 * m + g, j0 + 2 * t, lse[m],
                      delta[m], s[m], dp[m]);
      accumulate(dq, dp, key + slice * OUT_DIM);
    }
    __syncthreads(); /* the walked tiles are read, the next copy may start */
  }
  cp_async_wait<0>(); /* of a block that sees no key */

  const float scale[2] = {(float)a->scale, (float)a->scale};
  const int column = (int)slice * OUT_DIM;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
    store_rows(row_at(&a->grad_query, head.b, head.h, head.first_query) + column,
               a->grad_query.stride_s, w0 + 16 * m + g, head.queries, (int)a->head_dim - column,
               dq[m], scale);
}

#include "flash_dmask_sm80_f32.cuh"

extern "C" int NAME()(const struct attn_args *a, void *stream) {
  struct call call = call_of(a);
  const int64_t q_tiles = (a->seq_q + ROWS - 1) / ROWS, k_tiles = (a->seq_k + ROWS - 1) / ROWS;
  const int64_t rows = (a->seq_q + WARPS - 1) / WARPS, planes = call.planes;
  const bool dkv = a->grad_key.data != NULL || a->grad_value.data != NULL ||
                   (a->grad_query.data != NULL && !a->deterministic);
  int status = ATTN_OK;
  if (planes * rows > 0)
    status = launch((const void *)NAME(_delta_kernel), planes * rows, THREADS, 0, &call, stream);
  if (status == ATTN_OK && dkv && planes * k_tiles > 0)
    status = launch((const void *)NAME(_dkv_kernel), SLICES * planes / call.group * k_tiles,
                    THREADS, SHARED_DKV, &call, stream);
  if (status == ATTN_OK && a->grad_query.data != NULL && a->deterministic && planes * q_tiles > 0)
    status = launch((const void *)NAME(_dq_kernel), SLICES * planes * q_tiles, THREADS, SHARED_DQ,
                    &call, stream);
  if (status == ATTN_OK && a->grad_mask.data != NULL && planes > 0)
    status = launch_dmask(a, &call, stream);
  return status;
}

extern "C" int64_t NAME(_workspace)(const struct attn_args *a) {
  return a->heads * (a->cu_seq_q != NULL ? a->total_q : a->batch * a->seq_q) *
         (int64_t)sizeof(float);
}
