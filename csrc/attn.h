/* attn.h: the contract between the binding, which sees torch, and the kernels, which do not.
 *
 * Shapes
 *   B  batch             Hq query heads     Hkv key and value heads, Hq % Hkv == 0
 *   Sq query length      Sk key length      D head size of query and key   Dv head size of value
 *   query [B, Hq, Sq, D]   key [B, Hkv, Sk, D]   value [B, Hkv, Sk, Dv]   out [B, Hq, Sq, Dv]
 *   logsumexp [B, Hq, Sq]  query head h reads key head h / (Hq / Hkv)
 *
 * Attention of one query row i over the keys j that it sees
 *   s_ij = scale * (query_i . key_j)           then softcap, then + mask_ij where the mask is float
 *   out_i = sum_j keep_ij * exp(s_ij - logsumexp_i) * value_j,  logsumexp_i = ln sum_j exp(s_ij)
 *   A row that sees no key, or only keys at -inf: out_i = 0, logsumexp_i = -inf, all gradients 0.
 *
 * Kernels never print, exit or allocate. The caller has checked every rule written here; pointers
 * of empty tensors may be NULL and are not read. All strides and offsets are in elements, 64 bits.
 */
#ifndef ATTN_H
#define ATTN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum attn_dtype { ATTN_F32, ATTN_F64, ATTN_F16, ATTN_BF16, ATTN_BOOL };

/* What an entry point returns: 0, a cudaError_t (positive), or one of these. */
enum attn_status { ATTN_OK = 0, ATTN_UNSUPPORTED = -1, ATTN_NO_DEVICE_CODE = -2 };

enum { ATTN_MAX_HEAD_DIM = 256 };

/* [B, H, S, D] with a unit last stride; S is a query or key position. data NULL: not there. */
struct attn_tensor {
  void *data;
  int64_t stride_b, stride_h, stride_s;
};

/* [B, Hq, Sq, Sk] after broadcasting: an axis of size 1 has stride 0, and no stride need be 1.
 * bool: true lets the pair take part; float (f32, or the dtype of query): added to the score. */
struct attn_mask {
  void *data; /* NULL: no mask */
  enum attn_dtype dtype;
  int64_t stride_b, stride_h, stride_q, stride_k;
};

/* One call of fused attention, forward or backward. */
struct attn_args {
  enum attn_dtype dtype; /* of query, key, value, out and of their gradients */
  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim, head_dim_v;

  double scale;
  double softcap; /* 0: none; else s = softcap * tanh(s / softcap), before the mask */

  /* Row i sees key j only if -window_left <= j - (i + shift) <= window_right; a negative bound
   * means none. shift is 0, or Sk - Sq when bottom_right. is_causal is window_right = 0. */
  int64_t window_left, window_right;
  bool bottom_right;

  double dropout_p;         /* 0 <= p <= 1; the pattern is defined in dropout.h */
  const int64_t *rng_state; /* [2] seed, offset; on the tensors' device; NULL when dropout_p is 0 */

  struct attn_tensor query, key, value, out;
  struct attn_mask mask;

  /* [B, Hq, Sq] contiguous, or [Hq, total_q] when packed; f32, or f64 when dtype is f64; natural
   * log. Row i of head h of sequence b: (b * Hq + h) * Sq + i, packed h * total_q + cu_seq[b] + i.
   */
  void *logsumexp;

  /* Packed batches: sequence b owns rows cu_seq[b] to cu_seq[b + 1] - 1 of tensors whose stride_b
   * is 0, and seq_q, seq_k are the longest lengths. [B + 1] on the tensors' device; NULL: dense. */
  const int32_t *cu_seq_q, *cu_seq_k;
  int64_t total_q, total_k; /* rows of the packed tensors; B * Sq, B * Sk when dense */
  int64_t
      first_head; /* CPU: packed sequences come one by one, and dropout counts heads from here */

  /* Backward. A gradient whose data is NULL is not asked for and costs nothing. */
  struct attn_tensor grad_out, grad_query, grad_key, grad_value;
  struct attn_mask grad_mask; /* strides of the mask's own shape: the sum over broadcast axes */
  bool deterministic;         /* bit-equal from run to run */

  void *workspace; /* attn_flash_{fwd,bwd}_workspace_*() bytes, 256-byte aligned, unwritten */
};

/* One stage of unfused attention over scores [B, H, R, C]; in and out may be the same memory. */
struct attn_stage {
  enum attn_dtype dtype;
  int64_t batch, heads, rows, cols;
  struct attn_tensor in, out;
  struct attn_tensor probs; /* softmax_backward: the softmax's output; in is its gradient */
  struct attn_mask mask;    /* masked_fill: bool, true is filled (aten's meaning) */
  bool is_causal;           /* masked_fill: pairs with column > row are filled too */
  double value;             /* scale: the factor; masked_fill: the fill; dropout: p */
  const int64_t *rng_state; /* dropout */
};

/* CPU. Each call does tiles or rows [begin, end), so that the caller's thread pool can split them.
 * Rows of a stage are counted over B * H * R. */
typedef void attn_stage_cpu_fn(const struct attn_stage *stage, int64_t begin, int64_t end);
attn_stage_cpu_fn attn_scale_cpu, attn_masked_fill_cpu, attn_softmax_cpu, attn_softmax_backward_cpu,
    attn_dropout_cpu;

int64_t attn_flash_fwd_tiles_cpu(const struct attn_args *args);
void attn_flash_fwd_cpu(const struct attn_args *args, int64_t begin, int64_t end);

/* Backward runs its phases in this order, each split over its own tiles; a phase whose gradient is
 * not asked for has none. The workspace holds rowsum(grad_out * out), written by the first. */
enum attn_bwd_phase { ATTN_BWD_DELTA, ATTN_BWD_DKV, ATTN_BWD_DQ, ATTN_BWD_DMASK, ATTN_BWD_PHASES };
int64_t attn_flash_bwd_workspace_cpu(const struct attn_args *args);
int64_t attn_flash_bwd_tiles_cpu(const struct attn_args *args, enum attn_bwd_phase phase);
void attn_flash_bwd_cpu(const struct attn_args *args, enum attn_bwd_phase phase, int64_t begin,
                        int64_t end);

/* Which build of the kernels runs here: "base", "avx2" or "avx512". ATTN_EXT_ISA picks
 * one by name; a name that is unknown or that this CPU cannot run gives NULL. */
const char *attn_isa_cpu(void);

/* CUDA. Work goes to the current device and to stream (a cudaStream_t). */
typedef int attn_stage_cuda_fn(const struct attn_stage *stage, void *stream);
attn_stage_cuda_fn attn_scale_cuda, attn_masked_fill_cuda, attn_softmax_cuda,
    attn_softmax_backward_cuda, attn_dropout_cuda;

int64_t attn_flash_fwd_workspace_cuda(const struct attn_args *args);
int attn_flash_fwd_cuda(const struct attn_args *args, void *stream);
int64_t attn_flash_bwd_workspace_cuda(const struct attn_args *args);
int attn_flash_bwd_cuda(const struct attn_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif
