/* flash_f32.cuh: what the fp32 attention kernels share besides the products: which pairs there are,
 * and the way from a product of query and key to a score.
 *
 * A warp holds scores as C fragments c[n][e] of mma_f32.cuh, 16 rows by 8 columns a fragment: row
 * g + 8 * (e / 2), column 8n + 2t + e % 2. Forward and the query gradient have queries as rows and
 * keys as columns. The key and value gradients have it the other way round: transposed.
 */
#ifndef ATTN_FLASH_F32_CUH
#define ATTN_FLASH_F32_CUH

#include "../attn.h"
#include "../dropout.h"
#include "mma_f32.cuh"

#define LOG2E 1.4426950408889634
#define LN2   0.6931471805599453f

/* A call, and its numbers as the kernels use them. */
struct call {
  struct attn_args args;
  float scale; /* of products: to units of log2, or to the argument of tanh under a softcap */
  float cap;   /* the softcap in units of log2, 0: none */
  float kept_scale;
  uint32_t threshold; /* of dropout, 0: none */
  uint32_t planes;    /* batch * heads */
  uint32_t group;     /* query heads of a key head */
};

static struct call call_of(const struct attn_args *args) {
  bool capped = args->softcap != 0;
  struct call call = {*args};
  call.scale = (float)(capped ? args->scale / args->softcap : args->scale * LOG2E);
  call.cap = (float)(args->softcap * LOG2E);
  call.kept_scale = (float)attn_dropout_scale(args->dropout_p);
  call.threshold = attn_dropout_threshold(args->dropout_p);
  call.planes = (uint32_t)(args->batch * args->heads);
  call.group = (uint32_t)(args->heads / args->kv_heads);
  return call;
}

/* 1 / x to the last bit or two: a division would be a call, and cost registers. */
static __device__ __forceinline__ float reciprocal(float x) {
  float y = rcp_approx(x);
  return fmaf(fmaf(-x, y, 1), y, y);
}

/* One query head of one sequence. */
struct head {
  uint32_t b, h, kv_h;
  int64_t first_query, first_key; /* rows of the sequence's first query and key */
  int64_t first_sum;              /* place of row 0 in logsumexp */
  int queries, keys, shift;       /* row i is level with key i + shift */
};

static __device__ __forceinline__ struct head head_at(const struct call *call, uint32_t b,
                                                      uint32_t h) {
  const struct attn_args *a = &call->args;
  struct head head = {b, h, h / call->group, 0, 0, 0, (int)a->seq_q, (int)a->seq_k, 0};
  if (a->cu_seq_q != NULL) {
    head.first_query = a->cu_seq_q[b];
    head.queries = a->cu_seq_q[b + 1] - a->cu_seq_q[b];
    head.first_sum = h * a->total_q + head.first_query;
  } else {
    head.first_sum = (b * a->heads + h) * a->seq_q;
  }
  if (a->cu_seq_k != NULL) {
    head.first_key = a->cu_seq_k[b];
    head.keys = a->cu_seq_k[b + 1] - a->cu_seq_k[b];
  }
  head.shift = a->bottom_right ? head.keys - head.queries : 0;
  return head;
}

/* Row `row` of head h in a tensor, h counted in the tensor's own heads. */
static __device__ float *row_at(const struct attn_tensor *tensor, int64_t b, int64_t h,
                                int64_t row) {
  return (float *)tensor->data + b * tensor->stride_b + h * tensor->stride_h +
         row * tensor->stride_s;
}

/* Row i sees the keys from first_seen on, and before end_seen, unless the mask hides them. */
static __device__ __forceinline__ int first_seen(const struct attn_args *a, const struct head *head,
                                                 int i) {
  int64_t first = a->window_left < 0 ? 0 : (int64_t)i + head->shift - a->window_left;
  return first < 0 ? 0 : first > head->keys ? head->keys : (int)first;
}

static __device__ __forceinline__ int end_seen(const struct attn_args *a, const struct head *head,
                                               int i) {
  int64_t end = a->window_right < 0 ? head->keys : (int64_t)i + head->shift + a->window_right + 1;
  return end < 0 ? 0 : end > head->keys ? head->keys : (int)end;
}

/* Do all rows i0 ... i1 see all keys j0 ... j1? Then no pair need be looked at. A vote, like the
 * next, of arguments that are the warp's: so the compiler knows that the warp goes one way. */
static __device__ __forceinline__ bool all_seen(const struct attn_args *a, const struct head *head,
                                                int i0, int i1, int j0, int j1) {
  return __all_sync(~0u, a->mask.data == NULL && i1 < head->queries &&
                             first_seen(a, head, i1) <= j0 && j1 < end_seen(a, head, i0));
}

/* Do some rows see some keys? */
static __device__ __forceinline__ bool any_seen(const struct attn_args *a, const struct head *head,
                                                int i0, int i1, int j0, int j1) {
  return __any_sync(~0u, i0 < head->queries && first_seen(a, head, i0) <= j1 &&
                             j0 < end_seen(a, head, i1));
}

/* Where a lane's pairs lie: query i and key j of element e of fragment n. */
static __device__ __forceinline__ void pair_at(bool transposed, int row, int col, int n, int e,
                                               int *i, int *j) {
  int r = row + e / 2 * 8, c = col + 8 * n + e % 2;
  *i = transposed ? c : r;
  *j = transposed ? r : c;
}

/* Products to scores in units of log2, before the mask. slope, if any, is multiplied by the
 * derivative of the softcap. */
static __device__ __forceinline__ void scale_scores(const struct call *call, float s[COLS][4],
                                                    float slope[COLS][4]) {
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[n][e] *= call->scale;
  if (call->cap == 0)
    return;
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = tanhf(s[n][e]);
      s[n][e] = call->cap * x;
      if (slope != NULL)
        slope[n][e] *= 1 - x * x;
    }
}

/* Adds the mask, and makes pairs that do not take part -inf. row, col: of the lane's element 0. */
static __device__ __forceinline__ void mask_scores(const struct attn_args *a,
                                                   const struct head *head, bool transposed,
                                                   float s[COLS][4], int row, int col) {
  const int64_t plane = head->b * a->mask.stride_b + head->h * a->mask.stride_h;
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int i, j;
      pair_at(transposed, row, col, n, e, &i, &j);
      bool seen = i < head->queries && first_seen(a, head, i) <= j && j < end_seen(a, head, i);
      if (seen && a->mask.data != NULL) {
        int64_t at = plane + i * a->mask.stride_q + j * a->mask.stride_k;
        if (a->mask.dtype == ATTN_BOOL)
          seen = ((const uint8_t *)a->mask.data)[at] != 0;
        else
          s[n][e] += ((const float *)a->mask.data)[at] * (float)LOG2E;
      }
      s[n][e] = seen ? s[n][e] : -INFINITY;
    }
}

/* Bit 4n + e: does dropout keep the pair? */
static __device__ __forceinline__ uint32_t kept_pairs(const struct call *call,
                                                      const struct head *head, bool transposed,
                                                      int row, int col) {
  const struct attn_args *a = &call->args;
  const uint32_t plane = head->b * (uint32_t)a->heads + head->h;
  const int64_t rng_state[2] = {a->rng_state[0], a->rng_state[1]};
  uint32_t kept = 0;
  static_assert(COLS <= 8, "one bit a pair");
  /* One draw serves what a lane holds of one query within 32 keys: keys g and g + 8 of a column
   * when transposed, else columns 2t and 2t + 1 of each fragment of a row. */
  const int together = transposed ? 1 : COLS < 4 ? COLS : 4;
#pragma unroll
  for (int n = 0; n < COLS; n += together)
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      int i, j;
      pair_at(transposed, row, col, n, transposed ? d : 2 * d, &i, &j);
      struct attn_philox draw = attn_philox(rng_state, attn_dropout_group(j), (uint32_t)i, plane);
      /* Word w is for keys 8w ... of the 32. A tile of 16 keys may hold the upper two. */
      if (j & 16) {
        draw.word[0] = draw.word[2];
        draw.word[1] = draw.word[3];
      }
#pragma unroll
      for (int m = 0; m < 2 * together; ++m) {
        const int e = transposed ? 4 * n + d + 2 * m : 4 * (n + m / 2) + 2 * d + m % 2;
        uint32_t number =
            transposed ? draw.word[m] >> (j & 1) * 16 : draw.word[m / 2] >> m % 2 * 16;
        kept |= (number & 0xFFFF) >= call->threshold ? 1u << e : 0;
      }
    }
  return kept;
}

/* Backward of one fragment row: products s = q . k and dp = grad_out . value become the dropped
 * probabilities and their gradients with respect to the products, but for the scale; or, for_mask,
 * with respect to the mask. lse in units of log2, +inf for a row without keys; lse and delta of the
 * lane's rows g, g + 8, or of its columns 8n + 2t, + 1 when transposed. */
static __device__ __forceinline__ void differentiate(const struct call *call,
                                                     const struct head *head, bool transposed,
                                                     bool whole, bool for_mask, int row, int col,
                                                     const float *lse, const float *delta,
                                                     float s[COLS][4], float dp[COLS][4]) {
  const bool drops = call->threshold > 0;
  const uint32_t kept = drops ? kept_pairs(call, head, transposed, row, col) : ~0u;
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = drops ? (kept >> (4 * n + e) & 1 ? dp[n][e] * call->kept_scale : 0) : dp[n][e];
      dp[n][e] = x - delta[transposed ? 2 * n + e % 2 : e / 2];
    }
  scale_scores(call, s, for_mask ? NULL : dp);
  if (!whole)
    mask_scores(&call->args, head, transposed, s, row, col);
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float p = exp2_approx(s[n][e] - lse[transposed ? 2 * n + e % 2 : e / 2]);
      dp[n][e] *= p;
      s[n][e] = drops ? (kept >> (4 * n + e) & 1 ? p * call->kept_scale : 0) : p;
    }
}

/* logsumexp as exp2 wants it. */
static __device__ __forceinline__ float in_log2(float lse) {
  return lse == -INFINITY ? INFINITY : lse * (float)LOG2E;
}

/* Blocks of THREADS with SHARED bytes. Errors are reported here and must not wait for the next. */
static int launch(const void *kernel, int64_t blocks, int threads, int shared, struct call *call,
                  void *stream) {
  void *parameters[] = {call};
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(threads), parameters, shared,
                             (cudaStream_t)stream);
  if (error != cudaSuccess)
    cudaGetLastError();
  return error == cudaErrorNoKernelImageForDevice ? ATTN_NO_DEVICE_CODE : (int)error;
}

#endif
