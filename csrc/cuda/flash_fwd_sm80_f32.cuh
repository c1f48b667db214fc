/* flash_fwd_sm80_f32.cuh: attention of fp32 tensors in full fp32 accuracy, forward.
 *
 * Formula, of row i over the keys j it sees (attn.h)
 *   out_i = sum_j keep_ij exp(s_ij - logsumexp_i) value_j,   s_ij = scale * query_i . key_j
 *   query [Sq, D], key [Sk, D], value [Sk, Dv] of one head of one sequence
 * Architecture: sm_80 and later. The 16-bit kernels beside it feed the tensor cores directly;
 *   here each product is three of tf32 (mma_f32.cuh). Their ceiling is 341 FLOP a clock and SM on
 *   sm_80, where the fp32 units have 128, and 105 TFLOP/s on an H200, where those have 65.
 * Grid: a block a tile of ROWS queries of a head, times SLICES of the columns of out. Under a
 *   causal mask the last tiles see most keys, so they go first, for all heads.
 * Warps: WARPS, each TILES * 16 rows and all keys of a block. No roles.
 * Tiles: query [ROWS][HEAD_DIM]; BUFFERS times key, value [KEYS][HEAD_DIM]. Rows, keys, buffers:
 *     HEAD_DIM 32, 64: 128, 32, 2      128: 64, 32, 2      256: 64, 16, 1, two slices
 * Shared memory: query, then key and value of each buffer: at most 96 KiB, which every GPU from
 *   sm_80 on has. 4 * HEAD_DIM * (ROWS + 2 * BUFFERS * KEYS) bytes.
 * Barriers: of all threads, after cp.async.wait_group 0: what all have copied, all read. With two
 *   buffers it also says that all have read the other one, so its next copy starts behind it.
 *   With one, a second barrier after the products says so.
 * Numerics: products fp32 by 3 x tf32, softmax in fp32 in units of log2, sums in fp32. An
 *   infinite query, key or value gives NaN, since its small part is inf - inf.
 * The caller has checked: everything attn.h says; last strides are 1. Any address and stride
 *   works: rows that are not 16-byte aligned are copied in words of 4.
 * Bound by: the instructions that split operands, then the tensor cores, half of whose time is
 *   used. README.md has the figures.
 * Sources: FlashAttention-2, arXiv 2307.08691; Ootomo and Yokota, "Recovering single precision
 *   accuracy from Tensor Cores while surpassing the FP32 theoretical peak", arXiv 2203.03341.
 */
#include "flash_f32.cuh"

enum {
  KEYS = 8 * COLS,
  ROWS = WARPS * TILES * 16,
  THREADS = WARPS * 32,
  TILE = KEYS * HEAD_DIM, /* floats of a tile of keys or of values */
  SHARED = (ROWS * HEAD_DIM + 2 * BUFFERS * TILE) * (int)sizeof(float)
};

/* Running softmax of rows g and g + 8 of the warp's fragments. sum is the lane's own columns'. */
struct rows_state {
  float max[TILES][2], sum[TILES][2];
};

/* Scores to probabilities. The output so far is for the old maximum, unless that still holds. */
static __device__ __forceinline__ void soften(struct rows_state *state, float s[TILES][COLS][4],
                                              float out[TILES][OUT_DIM / 8][4]) {
  float factor[TILES][2];
  bool changed = false;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = state->max[m][half];
#pragma unroll
      for (int n = 0; n < COLS; ++n)
        max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      /* A row without a key so far: subtract 0, since -inf - (-inf) is no number. */
      const float base = max == -INFINITY ? 0 : max;
      factor[m][half] = exp2_approx(state->max[m][half] - base);
      changed |= factor[m][half] != 1;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < COLS; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[m][n][e] = exp2_approx(s[m][n][e] - base);
          sum += s[m][n][e];
        }
      state->max[m][half] = max;
      state->sum[m][half] = state->sum[m][half] * factor[m][half] + sum;
    }
  if (__any_sync(~0u, changed))
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < OUT_DIM / 2; ++i)
        out[m][i / 4][i % 4] *= factor[m][i % 4 / 2];
}

/* Starts the copy of the keys and values from j0 on to a buffer. */
static __device__ __forceinline__ void copy_keys(const struct attn_args *a, const struct head *head,
                                                 float *buffer, int j0) {
  copy_tile(buffer, row_at(&a->key, head->b, head->kv_h, head->first_key + j0), a->key.stride_s,
            KEYS, head->keys - j0, (int)a->head_dim);
  copy_tile(buffer + TILE, row_at(&a->value, head->b, head->kv_h, head->first_key + j0),
            a->value.stride_s, KEYS, head->keys - j0, (int)a->head_dim_v);
  cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    NAME(_kernel)(const __grid_constant__ struct call call) {
  extern __shared__ __align__(16) float query[];
  __shared__ struct head head; /* here, since registers are short */
  float *const buffers = query + ROWS * HEAD_DIM;

  const struct attn_args *a = &call.args;
  const uint32_t heads = (uint32_t)a->heads, slice = blockIdx.x % SLICES;
  const uint32_t block = blockIdx.x / SLICES, plane = block % call.planes;
  if (threadIdx.x == 0)
    head = head_at(&call, plane / heads, plane % heads);
  __syncthreads(); /* thread 0 wrote head, all read it */
  const int i0 = (int)(gridDim.x / SLICES / call.planes - 1 - block / call.planes) * ROWS;
  if (i0 >= head.queries)
    return;

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int last = min(i0 + ROWS, head.queries) - 1;
  const int begin = first_seen(a, &head, i0) / KEYS * KEYS, end = end_seen(a, &head, last);
  const int w0 = i0 + warp * TILES * 16, w1 = w0 + TILES * 16 - 1; /* the warp's rows */

  copy_tile(query, row_at(&a->query, head.b, head.h, head.first_query + i0), a->query.stride_s,
            ROWS, head.queries - i0, (int)a->head_dim);
  copy_keys(a, &head, buffers, begin);

  struct rows_state state;
  float out[TILES][OUT_DIM / 8][4] = {};
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    state.max[m][0] = state.max[m][1] = -INFINITY;
    state.sum[m][0] = state.sum[m][1] = 0;
  }

  float *key = buffers;
#pragma unroll 1
  for (int j0 = begin; j0 < end; j0 += KEYS) {
    cp_async_wait<0>();
    __syncthreads(); /* this buffer was copied by all, all read it; the other one is read */
    float *const next = BUFFERS == 1 || key != buffers ? buffers : buffers + 2 * TILE;
    if (BUFFERS > 1 && j0 + KEYS < end)
      copy_keys(a, &head, next, j0 + KEYS);

    if (any_seen(a, &head, w0, w1, j0, j0 + KEYS - 1)) {
      float s[TILES][COLS][4];
      multiply_transposed(s, query, warp * TILES * 16, key);
      const bool whole = all_seen(a, &head, w0, w1, j0, j0 + KEYS - 1);
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        scale_scores(&call, s[m], NULL);
        if (!whole)
          mask_scores(a, &head, false, s[m], w0 + 16 * m + g, j0 + 2 * t);
      }
      soften(&state, s, out);
      if (call.threshold > 0) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
          uint32_t kept = kept_pairs(&call, &head, false, w0 + 16 * m + g, j0 + 2 * t);
#pragma unroll
          for (int e = 0; e < 4 * COLS; ++e)
            s[m][e / 4][e % 4] = kept >> e & 1 ? s[m][e / 4][e % 4] : 0;
        }
      }
      accumulate(out, s, key + TILE + slice * OUT_DIM);
    }

    if (BUFFERS == 1 && j0 + KEYS < end) {
      __syncthreads(); /* all have read the buffer, the next copy may start */
      copy_keys(a, &head, next, j0 + KEYS);
    }
    key = next;
  }
  cp_async_wait<0>(); /* of a block that sees no key */

  float *to = row_at(&a->out, head.b, head.h, head.first_query) + slice * OUT_DIM;
  const int cols = (int)a->head_dim_v - (int)slice * OUT_DIM;
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    const int row = w0 + 16 * m + g;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[half] = sum == 0 ? 0 : call.kept_scale * reciprocal(sum);
      if (t == 0 && slice == 0 && row + 8 * half < head.queries)
        ((float *)a->logsumexp)[head.first_sum + row + 8 * half] =
            sum == 0 ? -INFINITY : state.max[m][half] * LN2 + logf(sum);
    }
    store_rows(to, a->out.stride_s, row, head.queries, cols, out[m], inverse);
  }
}

extern "C" int NAME()(const struct attn_args *args, void *stream) {
  int64_t blocks = SLICES * args->batch * args->heads * ((args->seq_q + ROWS - 1) / ROWS);
  if (blocks == 0)
    return ATTN_OK;
  struct call call = call_of(args);
  return launch((const void *)NAME(_kernel), blocks, THREADS, SHARED, &call, stream);
}
