/* varlen.h: the fused ops on packed batches. Sequence b owns rows cum_seq[b] to cum_seq[b + 1] - 1
 * of query [total_q, Hq, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv]; logsumexp is [Hq,
 * total_q]. Causal and windows align at the bottom right of each sequence. */
#pragma once

#include "flash.h"

namespace attn_ext {

/* [total, H, D] seen as [1, H, total, D]. */
inline Tensor unpacked(const char *op, const char *name, const Tensor &packed) {
  ATTN_CHECK(packed.dim() == 3, op, "expected ", name,
             " with 3 dimensions [total, heads, head_dim], got ", text(packed));
  return torch::stable::transpose(torch::stable::unsqueeze(packed, 0), 1, 2);
}

inline void check_offsets(const char *op, const char *name, const Tensor &offsets,
                          const Tensor &query) {
  ATTN_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 &&
                 offsets.size(0) >= 1 && offsets.is_contiguous(),
             op, "expected ", name, " as a contiguous int32 tensor of shape [batch + 1], got ",
             torch::headeronly::toString(offsets.scalar_type()), " ", text(offsets));
  check_beside(op, name, offsets, "query", query);
}

/* On the CPU the offsets themselves are checked; on CUDA that would need a synchronize, so kernels
 * keep to total_q and total_k instead. */
inline void check_offsets_on_cpu(const char *op, const char *name, const Tensor &offsets,
                                 int64_t total, int64_t longest) {
  if (!offsets.is_cpu())
    return;
  auto *at = static_cast<const int32_t *>(offsets.const_data_ptr());
  int64_t batch = offsets.size(0) - 1;
  bool right = at[0] == 0 && at[batch] == total;
  for (int64_t b = 0; b < batch; ++b)
    right = right && at[b] <= at[b + 1] && at[b + 1] - at[b] <= longest;
  ATTN_CHECK(right, op, "expected ", name, " to rise from 0 to ", total, " in steps of at most ",
             longest, "; it does not");
}

struct VarlenCall : FlashCall {
  VarlenCall(const char *op, const Tensor &query_in, const Tensor &key_in, const Tensor &value_in,
             const Tensor &cum_seq_q, const Tensor &cum_seq_k, int64_t max_q, int64_t max_k,
             const FlashOptions &options)
      : FlashCall(op, unpacked(op, "query", query_in), unpacked(op, "key", key_in),
                  unpacked(op, "value", value_in), std::nullopt, options) {
    check_offsets(op, "cum_seq_q", cum_seq_q, query_in);
    check_offsets(op, "cum_seq_k", cum_seq_k, query_in);
    check_shape(op, "cum_seq_k", cum_seq_k, sizes_of(cum_seq_q));
    ATTN_CHECK(max_q >= 0 && max_k >= 0, op, "expected max_q and max_k of at least 0, got ", max_q,
               " and ", max_k);
    check_offsets_on_cpu(op, "cum_seq_q", cum_seq_q, seq_q, max_q);
    check_offsets_on_cpu(op, "cum_seq_k", cum_seq_k, seq_k, max_k);
    args.total_q = seq_q, args.total_k = seq_k;
    args.batch = cum_seq_q.size(0) - 1, args.seq_q = max_q, args.seq_k = max_k;
    args.cu_seq_q = static_cast<const int32_t *>(cum_seq_q.const_data_ptr());
    args.cu_seq_k = static_cast<const int32_t *>(cum_seq_k.const_data_ptr());
  }

  Sizes logsumexp_shape() const { return {heads, seq_q}; }
};

template <class Device>
std::tuple<Tensor, Tensor> flash_attention_varlen_forward(
    const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &cum_seq_q,
    const Tensor &cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    const MaybeTensor &rng_state, std::optional<double> scale,
    std::optional<int64_t> window_size_left, std::optional<int64_t> window_size_right,
    double softcap, bool /* deterministic */) {
  VarlenCall call(
      "flash_attention_varlen_forward", query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
      {dropout_p, is_causal, rng_state, scale, window_size_left, window_size_right, true, softcap});
  call.prepare();
  Tensor out = empty(query, {call.seq_q, call.heads, call.head_dim_v}, query.scalar_type());
  Tensor logsumexp = empty(query, call.logsumexp_shape(), call.logsumexp_dtype());
  call.forward<Device>(unpacked(call.op, "out", out), logsumexp);
  return {out, logsumexp};
}

/* output_mask: which of the three gradients are wanted; the others come back empty. */
template <class Device>
std::tuple<Tensor, Tensor, Tensor> flash_attention_varlen_backward(
    const Tensor &grad_out_in, const Tensor &query, const Tensor &key, const Tensor &value,
    const Tensor &out_in, const Tensor &logsumexp, const Tensor &cum_seq_q, const Tensor &cum_seq_k,
    int64_t max_q, int64_t max_k, double dropout_p, bool is_causal, const MaybeTensor &rng_state,
    std::vector<bool> output_mask, std::optional<double> scale,
    std::optional<int64_t> window_size_left, std::optional<int64_t> window_size_right,
    double softcap, bool deterministic) {
  VarlenCall call(
      "flash_attention_varlen_backward", query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
      {dropout_p, is_causal, rng_state, scale, window_size_left, window_size_right, true, softcap});
  Tensor grad_out = unpacked(call.op, "grad_out", grad_out_in);
  Tensor out = unpacked(call.op, "out", out_in);
  call.check_backward(grad_out, out, logsumexp, call.logsumexp_shape(), output_mask, 3);

  call.prepare();
  grad_out = with_unit_rows(grad_out), out = with_unit_rows(out);
  attn_args &args = call.args;
  args.out = view_of(out), args.grad_out = view_of(grad_out);
  args.logsumexp = const_cast<void *>(logsumexp.const_data_ptr());
  args.deterministic = deterministic;

  Tensor grads[3];
  const Tensor *inputs[] = {&query, &key, &value};
  attn_tensor *views[] = {&args.grad_query, &args.grad_key, &args.grad_value};
  for (int i = 0; i < 3; ++i) {
    grads[i] = empty(query, output_mask[i] ? sizes_of(*inputs[i]) : Sizes{0}, query.scalar_type());
    if (output_mask[i])
      *views[i] = view_of(unpacked(call.op, "gradient", grads[i]));
  }
  call.backward<Device>();
  return {grads[0], grads[1], grads[2]};
}

} // namespace attn_ext
