/* flash.h: the fused ops, forward and backward. Check, allocate, call. Device is Cpu or Cuda of
 * device.h; the kernels behind it are chosen by cpu/select.c and cuda/select.c. */
#pragma once

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "device.h"

namespace attn_ext {

/* What every fused op is asked beside its tensors. */
struct FlashOptions {
  double dropout_p;
  bool is_causal;
  MaybeTensor rng_state;
  std::optional<double> scale;
  std::optional<int64_t> window_size_left, window_size_right;
  bool bottom_right;
  double softcap;
};

/* What a fused op adds to Attention: bands, soft cap, head sizes up to 256, and the kernel's
 * struct. Holds the copies of inputs whose last stride was not 1 for as long as the call takes. */
struct FlashCall : Attention {
  attn_args args{};
  Tensor query, key, value;

  FlashCall(const char *op, const Tensor &query_in, const Tensor &key_in, const Tensor &value_in,
            const MaybeTensor &attn_mask, const FlashOptions &options)
      : Attention(op, query_in, key_in, value_in, attn_mask, options.dropout_p, options.is_causal,
                  options.rng_state, options.scale),
        query(query_in), key(key_in), value(value_in) {
    int64_t left = options.window_size_left.value_or(-1);
    int64_t right = options.window_size_right.value_or(-1);
    ATTN_CHECK(head_dim <= ATTN_MAX_HEAD_DIM && head_dim_v <= ATTN_MAX_HEAD_DIM, op,
               "expected head sizes up to ", int(ATTN_MAX_HEAD_DIM), ", got ", head_dim, " and ",
               head_dim_v, "; backend=\"naive\" takes any");
    ATTN_CHECK(left >= -1 && right >= -1, op,
               "expected window sizes of at least 0, or -1 or None for no bound, got ", left,
               " and ", right);
    ATTN_CHECK(options.softcap >= 0.0 && std::isfinite(options.softcap), op,
               "expected softcap finite and at least 0 (0: none), got ", options.softcap);

    args.dtype = dtype_of(query);
    args.batch = batch, args.heads = heads, args.kv_heads = kv_heads;
    args.seq_q = seq_q, args.seq_k = seq_k, args.head_dim = head_dim, args.head_dim_v = head_dim_v;
    args.total_q = batch * seq_q, args.total_k = batch * seq_k;
    args.scale = scale;
    args.softcap = options.softcap;
    /* No two rows are further apart; sums with what a caller takes for infinity would overflow. */
    args.window_left = std::min<int64_t>(left, INT32_MAX);
    args.window_right = options.is_causal ? 0 : std::min<int64_t>(right, INT32_MAX);
    args.bottom_right = options.bottom_right;
    args.dropout_p = options.dropout_p;
    if (options.dropout_p > 0.0)
      args.rng_state = static_cast<const int64_t *>(options.rng_state->const_data_ptr());
    if (attn_mask)
      args.mask = broadcast_mask(op, "attn_mask", *attn_mask, scores_shape);
  }

  ScalarType logsumexp_dtype() const {
    return args.dtype == ATTN_F64 ? ScalarType::Double : ScalarType::Float;
  }

  /* Copies what no kernel reads as it lies; after the checks, since it allocates. */
  void prepare() {
    query = with_unit_rows(query), key = with_unit_rows(key), value = with_unit_rows(value);
    args.query = view_of(query), args.key = view_of(key), args.value = view_of(value);
  }

  template <class Device> void forward(const Tensor &out, const Tensor &logsumexp) {
    if (logsumexp.numel() == 0)
      return;
    args.out = view_of(out);
    args.logsumexp = logsumexp.mutable_data_ptr();
    drop_packed_batch();
    Device device(query);
    MaybeTensor workspace;
    if (int64_t bytes = device.forward_workspace(args))
      workspace = allocate_workspace(bytes);
    device.forward(op, args);
  }

  template <class Device> void backward() {
    drop_packed_batch();
    Device device(query);
    MaybeTensor workspace;
    if (int64_t bytes = device.backward_workspace(args))
      workspace = allocate_workspace(bytes);
    device.backward(op, args);
  }

  /* The rules of backward's own tensors; out and grad_out as [B, Hq, Sq, Dv]. */
  void check_backward(const Tensor &grad_out, const Tensor &out, const Tensor &logsumexp,
                      const Sizes &logsumexp_shape, const std::vector<bool> &output_mask,
                      size_t outputs) {
    const Tensor *given[] = {&grad_out, &out};
    const char *names[] = {"grad_out", "out"};
    for (int i = 0; i < 2; ++i) {
      check_shape(op, names[i], *given[i], out_shape());
      ATTN_CHECK(given[i]->scalar_type() == query.scalar_type(), op, "expected ", names[i],
                 " of query's dtype ", torch::headeronly::toString(query.scalar_type()), ", got ",
                 torch::headeronly::toString(given[i]->scalar_type()));
      check_beside(op, names[i], *given[i], "query", query);
    }
    check_shape(op, "logsumexp", logsumexp, logsumexp_shape);
    check_beside(op, "logsumexp", logsumexp, "query", query);
    ATTN_CHECK(logsumexp.scalar_type() == logsumexp_dtype() && logsumexp.is_contiguous(), op,
               "expected logsumexp as forward returned it, contiguous and ",
               torch::headeronly::toString(logsumexp_dtype()), ", got ",
               torch::headeronly::toString(logsumexp.scalar_type()));
    ATTN_CHECK(output_mask.size() == outputs, op, "expected output_mask of ", outputs,
               " flags, got ", output_mask.size());
  }

private:
  /* The sequences of a packed tensor are found by cu_seq alone: its one batch has stride 0. */
  void drop_packed_batch() {
    if (args.cu_seq_q == nullptr)
      return;
    for (attn_tensor *tensor : {&args.query, &args.key, &args.value, &args.out, &args.grad_out,
                                &args.grad_query, &args.grad_key, &args.grad_value})
      tensor->stride_b = 0;
  }

  Tensor allocate_workspace(int64_t bytes) {
    Tensor workspace = empty(query, {bytes}, ScalarType::Byte);
    args.workspace = workspace.mutable_data_ptr();
    return workspace;
  }
};

/* deterministic is a wish for the backward pass, which autograd hands on. */
template <class Device>
std::tuple<Tensor, Tensor> flash_attention_forward(
    const Tensor &query, const Tensor &key, const Tensor &value, const MaybeTensor &attn_mask,
    double dropout_p, bool is_causal, const MaybeTensor &rng_state, std::optional<double> scale,
    std::optional<int64_t> window_size_left, std::optional<int64_t> window_size_right,
    bool bottom_right, double softcap, bool /* deterministic */) {
  FlashCall call("flash_attention_forward", query, key, value, attn_mask,
                 {dropout_p, is_causal, rng_state, scale, window_size_left, window_size_right,
                  bottom_right, softcap});
  call.prepare();
  Tensor out = empty_in_layout(query, call.out_shape());
  Tensor logsumexp = empty(query, {call.batch, call.heads, call.seq_q}, call.logsumexp_dtype());
  call.forward<Device>(out, logsumexp);
  return {out, logsumexp};
}

/* output_mask: which of the four gradients are wanted; the others come back empty. */
template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor>
flash_attention_backward(const Tensor &grad_out_in, const Tensor &query, const Tensor &key,
                         const Tensor &value, const Tensor &out_in, const Tensor &logsumexp,
                         const MaybeTensor &attn_mask, double dropout_p, bool is_causal,
                         const MaybeTensor &rng_state, std::vector<bool> output_mask,
                         std::optional<double> scale, std::optional<int64_t> window_size_left,
                         std::optional<int64_t> window_size_right, bool bottom_right,
                         double softcap, bool deterministic) {
  FlashCall call("flash_attention_backward", query, key, value, attn_mask,
                 {dropout_p, is_causal, rng_state, scale, window_size_left, window_size_right,
                  bottom_right, softcap});
  call.check_backward(grad_out_in, out_in, logsumexp, {call.batch, call.heads, call.seq_q},
                      output_mask, 4);
  bool mask_gradient = output_mask[3] && attn_mask && attn_mask->scalar_type() != ScalarType::Bool;

  call.prepare();
  Tensor grad_out = with_unit_rows(grad_out_in), out = with_unit_rows(out_in);
  attn_args &args = call.args;
  args.out = view_of(out), args.grad_out = view_of(grad_out);
  args.logsumexp = const_cast<void *>(logsumexp.const_data_ptr());
  args.deterministic = deterministic;

  Tensor grads[4];
  const Tensor *inputs[] = {&query, &key, &value};
  attn_tensor *views[] = {&args.grad_query, &args.grad_key, &args.grad_value};
  for (int i = 0; i < 3; ++i) {
    grads[i] = output_mask[i] ? empty_in_layout(*inputs[i], sizes_of(*inputs[i]))
                              : empty(query, {0}, query.scalar_type());
    if (output_mask[i])
      *views[i] = view_of(grads[i]);
  }
  if (mask_gradient) {
    grads[3] = empty(query, sizes_of(*attn_mask), attn_mask->scalar_type());
    args.grad_mask = broadcast_mask(call.op, "grad_attn_mask", grads[3], call.scores_shape);
  } else {
    grads[3] = empty(query, {0}, query.scalar_type());
  }
  call.backward<Device>();
  return {grads[0], grads[1], grads[2], grads[3]};
}

} // namespace attn_ext
