/* select.c: which kernel runs a fused call: the first row of the table that takes it. */
#include "../attn.h"

#include <cuda_runtime_api.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>

/* What a call may ask for beyond dense, aligned rows; a row names those it leaves out. */
enum feature {
  MASK = 1, /* a mask tensor */
  SOFTCAP = 2,
  DROPOUT = 4,
  PACKED = 8,     /* batches of several lengths: cu_seq */
  UNALIGNED = 16, /* a tensor with a row that does not start at 16 bytes */
  PADDED = 32,    /* a head size other than the row's own */
  EXPANDED = 64,  /* query, key or value repeated along an axis of stride 0 */
  SCALE = 128,    /* zero or negative: the largest score is not the largest product */
  FEW = 256,      /* fewer than 64 queries of a head, for which keys are better split; or no key */
  LARGE = 512     /* 2^30 queries or keys of a head, or tiles of 64 queries */
};
enum { ANYTHING = ~0 };

typedef int launch_fn(const struct attn_args *args, void *stream);
typedef int64_t workspace_fn(const struct attn_args *args);

struct row {
  int first, last; /* compute capability, 10 * major + minor */
  enum attn_dtype dtype;
  int64_t head_dim; /* the largest of query, key and value */
  int leaves_out;
  launch_fn *launch;
  workspace_fn *workspace; /* NULL: none */
};

#define SM80_FORWARD(d)                                                                            \
  {80,                                                                                             \
   INT_MAX,                                                                                        \
   ATTN_F16,                                                                                       \
   d,                                                                                              \
   0,                                                                                              \
   attn_flash_fwd_sm80_d##d##_f16,                                                                 \
   attn_flash_fwd_sm80_d##d##_f16_workspace},                                                      \
  {                                                                                                \
    80, INT_MAX, ATTN_BF16, d, 0, attn_flash_fwd_sm80_d##d##_bf16,                                 \
        attn_flash_fwd_sm80_d##d##_bf16_workspace                                                  \
  }
#define DECLARE_SM80_FORWARD(d)                                                                    \
  launch_fn attn_flash_fwd_sm80_d##d##_f16, attn_flash_fwd_sm80_d##d##_bf16;                       \
  workspace_fn attn_flash_fwd_sm80_d##d##_f16_workspace, attn_flash_fwd_sm80_d##d##_bf16_workspace

DECLARE_SM80_FORWARD(32);
DECLARE_SM80_FORWARD(64);
DECLARE_SM80_FORWARD(96);
DECLARE_SM80_FORWARD(128);
DECLARE_SM80_FORWARD(192);
DECLARE_SM80_FORWARD(256);

#define SM80_F32(op, d, workspace)                                                                 \
  {80, INT_MAX, ATTN_F32, d, 0, attn_flash_##op##_sm80_d##d##_f32, workspace}
#define DECLARE_SM80_F32(d)                                                                        \
  launch_fn attn_flash_fwd_sm80_d##d##_f32, attn_flash_bwd_sm80_d##d##_f32;                        \
  workspace_fn attn_flash_bwd_sm80_d##d##_f32_workspace

DECLARE_SM80_F32(32);
DECLARE_SM80_F32(64);
DECLARE_SM80_F32(128);
DECLARE_SM80_F32(256);

#define SM80_BACKWARD(d)                                                                           \
  {80,                                                                                             \
   INT_MAX,                                                                                        \
   ATTN_F16,                                                                                       \
   d,                                                                                              \
   0,                                                                                              \
   attn_flash_bwd_sm80_d##d##_f16,                                                                 \
   attn_flash_bwd_sm80_d##d##_f16_workspace},                                                      \
  {                                                                                                \
    80, INT_MAX, ATTN_BF16, d, 0, attn_flash_bwd_sm80_d##d##_bf16,                                 \
        attn_flash_bwd_sm80_d##d##_bf16_workspace                                                  \
  }
#define DECLARE_SM80_BACKWARD(d)                                                                   \
  launch_fn attn_flash_bwd_sm80_d##d##_f16, attn_flash_bwd_sm80_d##d##_bf16;                       \
  workspace_fn attn_flash_bwd_sm80_d##d##_f16_workspace, attn_flash_bwd_sm80_d##d##_bf16_workspace

DECLARE_SM80_BACKWARD(32);
DECLARE_SM80_BACKWARD(64);
DECLARE_SM80_BACKWARD(96);
DECLARE_SM80_BACKWARD(128);
DECLARE_SM80_BACKWARD(192);
DECLARE_SM80_BACKWARD(256);

#ifdef ATTN_SM90
#  define SM90_FORWARD(d)                                                                          \
    {90, 90, ATTN_F16, d, ANYTHING, attn_flash_fwd_sm90_d##d##_f16, NULL}, {                       \
      90, 90, ATTN_BF16, d, ANYTHING, attn_flash_fwd_sm90_d##d##_bf16, NULL                        \
    }
#  define DECLARE_SM90_FORWARD(d)                                                                  \
    launch_fn attn_flash_fwd_sm90_d##d##_f16, attn_flash_fwd_sm90_d##d##_bf16

DECLARE_SM90_FORWARD(64);
DECLARE_SM90_FORWARD(96);
DECLARE_SM90_FORWARD(128);
DECLARE_SM90_FORWARD(192);
DECLARE_SM90_FORWARD(256);
#endif

static const struct row forward[] = {
#ifdef ATTN_SM90
    SM90_FORWARD(64),         SM90_FORWARD(96),        SM90_FORWARD(128),
    SM90_FORWARD(192),        SM90_FORWARD(256),
#endif
    SM80_FORWARD(32),         SM80_FORWARD(64),        SM80_FORWARD(96),
    SM80_FORWARD(128),        SM80_FORWARD(192),       SM80_FORWARD(256),
    SM80_F32(fwd, 32, NULL),  SM80_F32(fwd, 64, NULL), SM80_F32(fwd, 128, NULL),
    SM80_F32(fwd, 256, NULL),
};

static const struct row backward[] = {
    SM80_BACKWARD(32),
    SM80_BACKWARD(64),
    SM80_BACKWARD(96),
    SM80_BACKWARD(128),
    SM80_BACKWARD(192),
    SM80_BACKWARD(256),
    SM80_F32(bwd, 32, attn_flash_bwd_sm80_d32_f32_workspace),
    SM80_F32(bwd, 64, attn_flash_bwd_sm80_d64_f32_workspace),
    SM80_F32(bwd, 128, attn_flash_bwd_sm80_d128_f32_workspace),
    SM80_F32(bwd, 256, attn_flash_bwd_sm80_d256_f32_workspace),
};

static bool is_aligned(const struct attn_tensor *tensor) {
  return (uintptr_t)tensor->data % 16 == 0 && tensor->stride_b % 8 == 0 &&
         tensor->stride_h % 8 == 0 && tensor->stride_s % 8 == 0;
}

static bool is_expanded(const struct attn_tensor *tensor, int64_t batch, int64_t heads,
                        int64_t rows) {
  return (batch > 1 && tensor->stride_b == 0) || (heads > 1 && tensor->stride_h == 0) ||
         (rows > 1 && tensor->stride_s == 0);
}

static int features_of(const struct attn_args *args, int64_t head_dim) {
  int features = 0;
  if (args->mask.data != NULL)
    features |= MASK;
  if (args->softcap != 0)
    features |= SOFTCAP;
  if (args->dropout_p != 0)
    features |= DROPOUT;
  if (args->cu_seq_q != NULL || args->cu_seq_k != NULL)
    features |= PACKED;
  if (!is_aligned(&args->query) || !is_aligned(&args->key) || !is_aligned(&args->value) ||
      !is_aligned(&args->out))
    features |= UNALIGNED;
  if (args->head_dim != head_dim || args->head_dim_v != head_dim)
    features |= PADDED;
  if (is_expanded(&args->query, args->batch, args->heads, args->seq_q) ||
      is_expanded(&args->key, args->batch, args->kv_heads, args->seq_k) ||
      is_expanded(&args->value, args->batch, args->kv_heads, args->seq_k))
    features |= EXPANDED;
  if (!(args->scale > 0))
    features |= SCALE;
  if (args->seq_q < 64 || args->seq_k == 0)
    features |= FEW;
  const int64_t most = 1 << 30;
  if (args->seq_q >= most || args->seq_k >= most ||
      args->batch * args->heads >= most / (args->seq_q / 64 + 1))
    features |= LARGE;
  return features;
}

/* Sets *found to the row that takes the call, or returns why there is none. */
static int find(const struct row *rows, size_t count, const struct attn_args *args,
                const struct row **found) {
  int device, major, minor;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess)
    return (int)error;
  int capability = 10 * major + minor;
  if (capability < 80)
    return ATTN_NO_DEVICE_CODE;
  /* ATTN_EXT_SM=80 runs the portable kernels on a newer GPU: to compare, to rule a kernel out. */
  const char *newest = getenv("ATTN_EXT_SM");
  if (newest != NULL && atoi(newest) >= 80 && atoi(newest) < capability)
    capability = atoi(newest);

  const int64_t head_dim = args->head_dim > args->head_dim_v ? args->head_dim : args->head_dim_v;
  for (const struct row *row = rows; row < rows + count; ++row)
    if (row->first <= capability && capability <= row->last && row->dtype == args->dtype &&
        head_dim <= row->head_dim && (features_of(args, row->head_dim) & row->leaves_out) == 0) {
      *found = row;
      return ATTN_OK;
    }
  return ATTN_UNSUPPORTED;
}

#define COUNT(rows) (sizeof(rows) / sizeof((rows)[0]))

/* Where the launch will fail, the workspace is 0 and the launch says why. */
static int64_t workspace(const struct row *rows, size_t count, const struct attn_args *args) {
  const struct row *row;
  if (find(rows, count, args, &row) != ATTN_OK || row->workspace == NULL)
    return 0;
  return row->workspace(args);
}

static int launch(const struct row *rows, size_t count, const struct attn_args *args,
                  void *stream) {
  const struct row *row;
  const int status = find(rows, count, args, &row);
  return status == ATTN_OK ? row->launch(args, stream) : status;
}

static bool is_empty(const struct attn_args *args) {
  return args->batch == 0 || args->heads == 0 || args->seq_q == 0;
}

int64_t attn_flash_fwd_workspace_cuda(const struct attn_args *args) {
  return is_empty(args) ? 0 : workspace(forward, COUNT(forward), args);
}

int attn_flash_fwd_cuda(const struct attn_args *args, void *stream) {
  return is_empty(args) ? ATTN_OK : launch(forward, COUNT(forward), args, stream);
}

/* Keys without a query still have gradients, which are 0. */
static bool is_empty_backward(const struct attn_args *args) {
  return args->batch == 0 || args->heads == 0 || (args->seq_q == 0 && args->seq_k == 0);
}

int64_t attn_flash_bwd_workspace_cuda(const struct attn_args *args) {
  return is_empty_backward(args) ? 0 : workspace(backward, COUNT(backward), args);
}

int attn_flash_bwd_cuda(const struct attn_args *args, void *stream) {
  return is_empty_backward(args) ? ATTN_OK : launch(backward, COUNT(backward), args, stream);
}
