/* flash_bwd_plan.c: which of an instance's kernels run, over how many blocks, in which memory. */
#include "flash_bwd_plan.h"

#include <cuda_runtime_api.h>
#include <stddef.h>

enum {
  MOST_POSITIONS = 1 << 30, /* the kernels count positions in int */
  MOST_BLOCKS = INT32_MAX,  /* of gridDim.x */
  MOST_BLOCK_Q = 128,
  LEAST_BLOCK_Q = 32
};

static int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static int64_t min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static bool aligned_if_there(const struct attn_tensor *tensor, int64_t columns) {
  return tensor->data == NULL ||
         ((uintptr_t)tensor->data % 16 == 0 && columns % 8 == 0 && tensor->stride_b % 8 == 0 &&
          tensor->stride_h % 8 == 0 && tensor->stride_s % 8 == 0 &&
          tensor->stride_s >= INT32_MIN / 2 && tensor->stride_s <= INT32_MAX / 2);
}

static bool all_aligned(const struct attn_args *args) {
  const int64_t d = args->head_dim, dv = args->head_dim_v;
  return aligned_if_there(&args->query, d) && aligned_if_there(&args->key, d) &&
         aligned_if_there(&args->value, dv) && aligned_if_there(&args->out, dv) &&
         aligned_if_there(&args->grad_out, dv) && aligned_if_there(&args->grad_query, d) &&
         aligned_if_there(&args->grad_key, d) && aligned_if_there(&args->grad_value, dv);
}

/* The mask's gradient is written in place where each pair has an element of its own. Else it is
 * summed in fp32: by atomics in the mask's own shape, or, to be deterministic, pair by pair, and
 * the sums are taken in order by the last kernel. Returns how many floats that needs. */
static int64_t plan_dmask(struct plan *plan) {
  const struct attn_args *a = &plan->args;
  const int64_t all[4] = {a->batch, a->heads, a->seq_q, a->seq_k};
  const int64_t strides[4] = {a->grad_mask.stride_b, a->grad_mask.stride_h, a->grad_mask.stride_q,
                              a->grad_mask.stride_k};
  plan->dmask = a->grad_mask;
  plan->dmask_shared = false;
  if (a->grad_mask.data == NULL)
    return 0;
  bool broadcast = false;
  for (int i = 0; i < 4; ++i) {
    plan->dmask_sizes[i] = all[i];
    plan->dmask_sums[i] = 1;
    broadcast |= strides[i] == 0 && all[i] > 1;
  }
  if (!broadcast)
    return 0;
  plan->dmask_shared = !a->deterministic;
  int64_t own[4], count = 1;
  for (int i = 3; i >= 0; --i) {
    const bool alone = strides[i] == 0;
    if (alone && a->deterministic)
      plan->dmask_sums[i] = all[i];
    if (alone && !a->deterministic)
      plan->dmask_sizes[i] = 1;
    own[i] = plan->dmask_sizes[i] == 1 ? 0 : count;
    count *= plan->dmask_sizes[i];
  }
  plan->dmask.dtype = ATTN_F32;
  plan->dmask.stride_b = own[0], plan->dmask.stride_h = own[1];
  plan->dmask.stride_q = own[2], plan->dmask.stride_k = own[3];
  return count;
}

/* Hands out parts of the workspace, 256-byte aligned; from NULL on it only counts. */
struct space {
  char *next;
  int64_t used;
};

static void *take(struct space *space, int64_t bytes) {
  void *part = space->next == NULL ? NULL : space->next + space->used;
  space->used += ceil_div(bytes, 256) * 256;
  return part;
}

/* Row blocks hold rows rows, a multiple of them of any block size at most MOST_BLOCK_Q. */
static int64_t lay_out(struct plan *plan, void *workspace, int head_dim) {
  const struct attn_args *a = &plan->args;
  const int64_t rows = a->cu_seq_q != NULL
                           ? a->heads * (a->total_q + a->batch * MOST_BLOCK_Q)
                           : a->batch * a->heads * ceil_div(a->seq_q, MOST_BLOCK_Q) * MOST_BLOCK_Q;
  const int64_t dmask = plan_dmask(plan);
  struct space space = {workspace, 0};
  plan->stats = take(&space, rows * 2 * (int64_t)sizeof(float));
  if (a->grad_query.data != NULL)
    plan->dq = take(&space, rows * head_dim * (int64_t)sizeof(float));
  if (a->grad_query.data != NULL && a->deterministic)
    plan->turns = take(&space, rows / LEAST_BLOCK_Q * 2 * (int64_t)sizeof(int));
  if (dmask > 0)
    plan->dmask.data = take(&space, dmask * (int64_t)sizeof(float));
  return space.used;
}

int64_t attn_flash_bwd_sm80_workspace(const struct attn_args *args, int head_dim) {
  struct plan plan = {.args = *args};
  return lay_out(&plan, NULL, head_dim);
}

/* Asked for at each launch: it is one store in the driver's table of this device, and knows no
 * state that threads could race for. */
static cudaError_t grant_shared(const struct flash_bwd_kernel *kernel) {
  return cudaFuncSetAttribute(kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kernel->shared);
}

static cudaError_t launch(const void *function, int64_t blocks, int shared, struct plan *plan,
                          void *stream) {
  void *parameters[] = {plan};
  if (blocks == 0)
    return cudaSuccess;
  return cudaLaunchKernel(function, (dim3){(unsigned)blocks, 1, 1},
                          (dim3){ATTN_FLASH_BWD_THREADS, 1, 1}, parameters, (size_t)shared,
                          (cudaStream_t)stream);
}

int attn_flash_bwd_sm80_launch(const struct flash_bwd_instance *instance,
                               const struct attn_args *args, void *stream) {
  if (args->seq_q >= MOST_POSITIONS || args->seq_k >= MOST_POSITIONS)
    return ATTN_UNSUPPORTED;
  struct plan plan = {.args = *args, .score = attn_score_of(args), .aligned = all_aligned(args)};
  lay_out(&plan, args->workspace, instance->head_dim);

  int device, most_shared, l2;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess)
    return (int)error;

  const bool plain = plan.aligned && args->mask.data == NULL && args->softcap == 0 &&
                     args->dropout_p == 0 && args->scale > 0 && args->grad_query.data != NULL &&
                     args->grad_key.data != NULL && args->grad_value.data != NULL;
  const struct flash_bwd_kernel *kernel = plain ? &instance->plain : &instance->general;
  if (kernel->shared > most_shared)
    kernel = &instance->general; /* it takes smaller tiles than plain */
  if (kernel->shared > most_shared)
    kernel = &instance->small;

  plan.q_blocks = (int)ceil_div(args->seq_q, kernel->block_q);
  plan.k_blocks = (int)ceil_div(args->seq_k, kernel->block_k);
  if (args->cu_seq_q != NULL)
    plan.packed_blocks = args->total_q / kernel->block_q + args->batch;
  const int64_t key_heads = args->batch * args->kv_heads;
  const int64_t row_blocks = args->batch * args->heads * plan.q_blocks;
  if (key_heads * plan.k_blocks > MOST_BLOCKS || row_blocks > MOST_BLOCKS)
    return ATTN_UNSUPPORTED;

  const int64_t head_bytes =
      max(1, args->heads / args->kv_heads * args->seq_q * instance->head_dim * 8);
  const bool uneven = args->window_right >= 0 && plan.k_blocks > 1;
  plan.section = uneven ? (int)max(1, min(key_heads, l2 / 2 / head_bytes)) : 1;

  const bool pairs_asked = args->grad_query.data != NULL || args->grad_key.data != NULL ||
                           args->grad_value.data != NULL || args->grad_mask.data != NULL;
  const bool convert = args->grad_query.data != NULL || plan.dmask.data != args->grad_mask.data;
  error = grant_shared(kernel);
  if (error == cudaSuccess)
    error = launch(kernel->before, row_blocks, 0, &plan, stream);
  if (error == cudaSuccess && pairs_asked)
    error = launch(kernel->function, key_heads * plan.k_blocks, kernel->shared, &plan, stream);
  if (error == cudaSuccess && convert)
    error = launch(kernel->after, row_blocks, 0, &plan, stream);
  if (error != cudaSuccess)
    cudaGetLastError(); /* it is reported here, so it must not wait for the next caller */
  return error == cudaErrorNoKernelImageForDevice ? ATTN_NO_DEVICE_CODE : (int)error;
}
