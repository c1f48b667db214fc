/* override_cpu.h: what F.scaled_dot_product_attention runs on the CPU, by our kernels. Results lie
 * in memory as torch's do, since compiled code relies on it: out as query, logsumexp [B, S, H] seen
 * as [B, H, S], gradients [B, S, H, D] seen as [B, H, S, D]. */
#pragma once

#include "override.h"

namespace attn_ext {

/* Contiguous [B, H, S] to [B, S, H] in memory. A row that sees no key has -inf in ours and 0 in
 * torch's, whose backward may be the one to read it. */
template <class T>
void transpose_rows(const FlashCall &call, const Tensor &from, const Tensor &to) {
  auto *rows = static_cast<const T *>(from.const_data_ptr());
  auto *out = static_cast<T *>(to.mutable_data_ptr());
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads; ++h)
      for (int64_t s = 0; s < call.seq_q; ++s, ++rows)
        out[(b * call.seq_q + s) * call.heads + h] = std::isinf(*rows) ? T(0) : *rows;
}

inline FlashOptions cpu_options(bool is_causal, std::optional<double> scale) {
  return {0.0, is_causal, std::nullopt, scale, std::nullopt, std::nullopt, false, 0.0};
}

inline std::optional<std::tuple<Tensor, Tensor>>
sdpa_flash_for_cpu(const Tensor &query, const Tensor &key, const Tensor &value, double dropout_p,
                   bool is_causal, const MaybeTensor &attn_mask, std::optional<double> scale) {
  auto call = taken<FlashCall>(dropout_p, "_scaled_dot_product_flash_attention_for_cpu", query, key,
                               value, attn_mask, cpu_options(is_causal, scale));
  if (!call)
    return std::nullopt;
  Tensor out = torch::stable::empty_like(query);
  if (!has_unit_rows(out))
    return std::nullopt;
  call->prepare();
  int64_t heads = call->heads, rows = call->seq_q;
  Sizes shape = {call->batch, heads, rows};
  Tensor contiguous = empty(query, shape, call->logsumexp_dtype());
  Tensor logsumexp = empty_strided(query, shape, {rows * heads, 1, heads}, call->logsumexp_dtype());
  call->forward<Cpu>(out, contiguous);
  if (call->args.dtype == ATTN_F64)
    transpose_rows<double>(*call, contiguous, logsumexp);
  else
    transpose_rows<float>(*call, contiguous, logsumexp);
  return std::tuple(out, logsumexp);
}

inline std::optional<std::tuple<Tensor, Tensor, Tensor>>
sdpa_flash_for_cpu_backward(const Tensor &grad_out, const Tensor &query, const Tensor &key,
                            const Tensor &value, const Tensor &out, const Tensor &logsumexp,
                            double dropout_p, bool is_causal, const MaybeTensor &attn_mask,
                            std::optional<double> scale) {
  auto call =
      taken<FlashCall>(dropout_p, "_scaled_dot_product_flash_attention_for_cpu_backward", query,
                       key, value, if_defined(attn_mask), cpu_options(is_causal, scale));
  if (!call)
    return std::nullopt;
  auto grad_like = [](const Tensor &tensor) {
    int64_t heads = tensor.size(1), rows = tensor.size(2), dim = tensor.size(3);
    return empty_strided(tensor, sizes_of(tensor), {rows * heads * dim, dim, heads * dim, 1},
                         tensor.scalar_type());
  };
  std::array grads{grad_like(query), grad_like(key), grad_like(value)};
  Sizes rows = {call->batch, call->heads, call->seq_q};
  if (!backward_into<Cpu>(*call, grad_out, out, logsumexp, rows, grads, true))
    return std::nullopt;
  return std::tuple(grads[0], grads[1], grads[2]);
}

inline std::unique_ptr<StableLibrary> add_overrides_cpu() {
  auto library =
      std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
  add_override<"_scaled_dot_product_flash_attention_for_cpu", &sdpa_flash_for_cpu>(*library);
  add_override<"_scaled_dot_product_flash_attention_for_cpu_backward",
               &sdpa_flash_for_cpu_backward>(*library);
  return library;
}

} // namespace attn_ext
