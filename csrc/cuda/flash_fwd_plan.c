/* flash_fwd_plan.c: which of an instance's kernels runs, over how many blocks. */
#include "flash_fwd_plan.h"

#include <cuda_runtime_api.h>
#include <stddef.h>

enum {
  MOST_POSITIONS = 1 << 30, /* the kernels count positions in int */
  MOST_BLOCKS = INT32_MAX,  /* of gridDim.x */
  LEAST_KEYS = 256          /* of a split: less is not worth its partial rows */
};

struct launch {
  struct plan plan;
  const struct flash_fwd_kernel *kernel;
  int64_t tiles;
  unsigned grid_x, grid_y;
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

static bool rows_aligned(const struct attn_tensor *tensor, int64_t columns) {
  return (uintptr_t)tensor->data % 16 == 0 && columns % 8 == 0 && tensor->stride_b % 8 == 0 &&
         tensor->stride_h % 8 == 0 && tensor->stride_s % 8 == 0 &&
         tensor->stride_s >= INT32_MIN / 2 && tensor->stride_s <= INT32_MAX / 2;
}

static bool all_aligned(const struct attn_args *args) {
  return rows_aligned(&args->query, args->head_dim) && rows_aligned(&args->key, args->head_dim) &&
         rows_aligned(&args->value, args->head_dim_v) && rows_aligned(&args->out, args->head_dim_v);
}

/* How many blocks of the kernel an SM holds. Asking also grants the kernel its shared memory, so
 * every launch comes through here. Threads that race do it twice. */
static cudaError_t blocks_per_sm(const struct flash_fwd_kernel *kernel, int device, int *blocks) {
  signed char *known = device < ATTN_MOST_DEVICES ? &kernel->blocks_per_sm[device] : NULL;
  *blocks = known == NULL ? 0 : __atomic_load_n(known, __ATOMIC_ACQUIRE);
  if (*blocks > 0)
    return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(
      kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel->shared);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel->function, kernel->threads,
                                                          (size_t)kernel->shared);
  if (error == cudaSuccess && known != NULL)
    __atomic_store_n(known, (signed char)*blocks, __ATOMIC_RELEASE);
  return error;
}

static int fill(struct launch *launch, const struct flash_fwd_instance *instance,
                const struct attn_args *args) {
  struct plan *plan = &launch->plan;
  if (args->seq_q >= MOST_POSITIONS || args->seq_k >= MOST_POSITIONS)
    return ATTN_UNSUPPORTED;
  const int64_t group = args->heads / args->kv_heads;
  const bool plain =
      args->mask.data == NULL && args->softcap == 0 && args->dropout_p == 0 && args->scale > 0;
  *plan = (struct plan){.args = *args, .score = attn_score_of(args), .aligned = all_aligned(args)};

  const struct flash_fwd_kernel *kernel = args->seq_q * group <= instance->few.block_q
                                              ? &instance->few
                                          : plain && plan->aligned ? &instance->plain
                                                                   : &instance->general;
  int device, sms, l2, per_sm;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = blocks_per_sm(kernel, device, &per_sm);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess)
    return (int)error;
  if (per_sm == 0)
    return ATTN_UNSUPPORTED;
  launch->kernel = kernel;

  /* Heads are packed where that saves tiles. */
  const int64_t apart = group * ceil_div(args->seq_q, kernel->block_q);
  const int64_t packed = ceil_div(group * args->seq_q, kernel->block_q);
  plan->pack = packed < apart ? (int)group : 1;
  plan->row_tiles = (int)min(packed < apart ? packed : apart / group, INT32_MAX);
  const int64_t heads = args->heads / plan->pack;
  launch->tiles = args->batch * heads * plan->row_tiles;

  plan->splits = (int)max(1, min((int64_t)sms * per_sm / launch->tiles, args->seq_k / LEAST_KEYS));

  const int64_t blocks = heads * plan->row_tiles * plan->splits; /* of a batch */
  if (blocks > MOST_BLOCKS)
    return ATTN_UNSUPPORTED;
  plan->slice = (int)min(args->batch, MOST_BLOCKS / blocks);

  const int64_t kv_bytes = max(1, 2 * args->seq_k * (args->head_dim + args->head_dim_v));
  const int64_t sharers = plan->pack == 1 ? group : 1;
  const bool uneven = args->window_right >= 0 && plan->row_tiles > 1;
  plan->section = !uneven ? 1 : (int)max(1, min(plan->slice * heads, l2 / 2 / kv_bytes * sharers));
  launch->grid_x = (unsigned)(plan->slice * blocks);
  launch->grid_y = (unsigned)ceil_div(args->batch, plan->slice);
  return ATTN_OK;
}

int64_t attn_flash_fwd_sm80_workspace(const struct flash_fwd_instance *instance,
                                      const struct attn_args *args) {
  struct launch launch;
  if (fill(&launch, instance, args) != ATTN_OK || launch.plan.splits == 1)
    return 0; /* the launch will report the error */
  const struct flash_fwd_kernel *kernel = launch.kernel;
  return launch.tiles * launch.plan.splits * kernel->block_q * kernel->partial_row *
         (int64_t)sizeof(float);
}

int attn_flash_fwd_sm80_launch(const struct flash_fwd_instance *instance,
                               const struct attn_args *args, void *stream) {
  struct launch launch;
  const int status = fill(&launch, instance, args);
  if (status != ATTN_OK)
    return status;
  const struct flash_fwd_kernel *kernel = launch.kernel;
  launch.plan.partials = args->workspace;
  void *parameters[] = {&launch.plan};
  const dim3 grid = {launch.grid_x, launch.grid_y, 1}, block = {(unsigned)kernel->threads, 1, 1};
  const cudaError_t error =
      launch.plan.splits > 1
          ? cudaLaunchCooperativeKernel(kernel->function, grid, block, parameters,
                                        (size_t)kernel->shared, (cudaStream_t)stream)
          : cudaLaunchKernel(kernel->function, grid, block, parameters, (size_t)kernel->shared,
                             (cudaStream_t)stream);
  if (error != cudaSuccess)
    cudaGetLastError(); /* it is reported here, so it must not wait for the next caller */
  return error == cudaErrorNoKernelImageForDevice ? ATTN_NO_DEVICE_CODE : (int)error;
}
