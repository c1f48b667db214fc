/* override_cuda.h: flash attention of aten on CUDA by our kernels: the op that
 * F.scaled_dot_product_attention runs where torch chooses flash, on [B, H, S, D], and the one below
 * it that varlen_attn runs, on [B, S, H, D] or packed [total, H, D]. Results lie in memory as their
 * operands do, logsumexp is contiguous. Causal and windows align at the bottom right, as in torch's
 * kernels; F.scaled_dot_product_attention asks for causal where Sq is Sk alone. */
#pragma once

#include "override.h"
#include "varlen.h"

namespace attn_ext {

using Three = std::tuple<Tensor, Tensor, Tensor>;

/* torch.are_deterministic_algorithms_enabled, which torch's C interface does not offer. */
inline PyObject *&deterministic_flag() {
  static PyObject *function = nullptr;
  return function;
}

/* Asked in every backward pass, which runs without the GIL. */
inline bool wants_deterministic() {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *said = PyObject_CallNoArgs(deterministic_flag());
  bool wanted = said == nullptr || PyObject_IsTrue(said) != 0;
  Py_XDECREF(said);
  PyErr_Clear();
  PyGILState_Release(state);
  return wanted;
}

/* torch's own flash attention has no other dtypes. */
inline bool is_half(const Tensor &tensor) {
  return tensor.scalar_type() == ScalarType::Half || tensor.scalar_type() == ScalarType::BFloat16;
}

inline FlashOptions cuda_options(bool is_causal, std::optional<double> scale,
                                 std::optional<int64_t> window_size_left = std::nullopt,
                                 std::optional<int64_t> window_size_right = std::nullopt) {
  return {0.0, is_causal, std::nullopt, scale, window_size_left, window_size_right, true, 0.0};
}

/* What dropout would use, allocated and left unwritten: a fill would be a launch. */
inline Three no_dropout(const Tensor &query) {
  return {empty(query, {2}, ScalarType::UInt64), empty(query, {}, ScalarType::UInt64),
          empty(query, {0}, query.scalar_type())};
}

inline std::optional<
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>>
sdpa_flash(const Tensor &query, const Tensor &key, const Tensor &value, double dropout_p,
           bool is_causal, bool return_debug_mask, std::optional<double> scale) {
  if (return_debug_mask || !is_half(query))
    return std::nullopt;
  auto call = taken<FlashCall>(dropout_p, "_scaled_dot_product_flash_attention", query, key, value,
                               std::nullopt, cuda_options(is_causal, scale));
  if (!call)
    return std::nullopt;
  Tensor out = torch::stable::empty_like(query);
  if (!has_unit_rows(out))
    return std::nullopt;
  call->prepare();
  Tensor logsumexp = empty(query, {call->batch, call->heads, call->seq_q}, call->logsumexp_dtype());
  call->forward<Cuda>(out, logsumexp);
  auto [rng_state, unused, debug_attn_mask] = no_dropout(query);
  Tensor undefined; /* cum_seq_q, cum_seq_k of a dense batch */
  return std::tuple(out, logsumexp, undefined, undefined, call->seq_q, call->seq_k, rng_state,
                    unused, debug_attn_mask);
}

inline std::optional<Three> sdpa_flash_backward(const Tensor &grad_out, const Tensor &query,
                                                const Tensor &key, const Tensor &value,
                                                const Tensor &out, const Tensor &logsumexp,
                                                const Tensor &, const Tensor &, int64_t, int64_t,
                                                double dropout_p, bool is_causal, const Tensor &,
                                                const Tensor &, std::optional<double> scale) {
  if (!is_half(query))
    return std::nullopt;
  auto call = taken<FlashCall>(dropout_p, "_scaled_dot_product_flash_attention_backward", query,
                               key, value, std::nullopt, cuda_options(is_causal, scale));
  if (!call)
    return std::nullopt;
  using torch::stable::empty_like;
  std::array grads{empty_like(query), empty_like(key), empty_like(value)};
  Sizes rows = {call->batch, call->heads, call->seq_q};
  if (!backward_into<Cuda>(*call, grad_out, out, logsumexp, rows, grads, wants_deterministic()))
    return std::nullopt;
  return std::tuple(grads[0], grads[1], grads[2]);
}

/* [B, S, H, D], or packed [total, H, D], seen as [B, H, S, D]. */
inline Tensor heads_first(const char *op, const Tensor &tensor) {
  return tensor.dim() == 3 ? unpacked(op, "tensor", tensor)
                           : torch::stable::transpose(tensor, 1, 2);
}

/* Calls use(call, shape of logsumexp) with the dense or the packed call that the tensors make. */
template <class Use>
auto with_rows_first(const char *op, const Tensor &query, const Tensor &key, const Tensor &value,
                     const MaybeTensor &cum_seq_q, const MaybeTensor &cum_seq_k, int64_t max_q,
                     int64_t max_k, double dropout_p, const FlashOptions &options, const Use &use)
    -> decltype(use(std::declval<FlashCall &>(), Sizes())) {
  int64_t rank = query.dim();
  if (!is_half(query) || key.dim() != rank || value.dim() != rank)
    return std::nullopt;
  if (rank == 3 && cum_seq_q && cum_seq_k) {
    if (auto call = taken<VarlenCall>(dropout_p, op, query, key, value, *cum_seq_q, *cum_seq_k,
                                      max_q, max_k, options))
      return use(*call, call->logsumexp_shape());
  } else if (rank == 4 && !cum_seq_q && !cum_seq_k) {
    if (auto call = taken<FlashCall>(dropout_p, op, heads_first(op, query), heads_first(op, key),
                                     heads_first(op, value), std::nullopt, options))
      return use(*call, Sizes{call->batch, call->heads, call->seq_q});
  }
  return std::nullopt;
}

inline std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>
flash_forward(const Tensor &query, const Tensor &key, const Tensor &value,
              const MaybeTensor &cum_seq_q, const MaybeTensor &cum_seq_k, int64_t max_q,
              int64_t max_k, double dropout_p, bool is_causal, bool return_debug_mask,
              std::optional<double> scale, std::optional<int64_t> window_size_left,
              std::optional<int64_t> window_size_right, const MaybeTensor &seqused_k,
              const MaybeTensor &alibi_slopes) {
  using Results = std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>;
  if (return_debug_mask || if_defined(seqused_k) || if_defined(alibi_slopes))
    return std::nullopt;
  const char *op = "_flash_attention_forward";
  return with_rows_first(op, query, key, value, if_defined(cum_seq_q), if_defined(cum_seq_k), max_q,
                         max_k, dropout_p,
                         cuda_options(is_causal, scale, window_size_left, window_size_right),
                         [&](auto &call, const Sizes &logsumexp_shape) -> Results {
                           Tensor out = torch::stable::empty_like(query);
                           if (!has_unit_rows(out))
                             return std::nullopt;
                           call.prepare();
                           Tensor logsumexp = empty(query, logsumexp_shape, call.logsumexp_dtype());
                           call.template forward<Cuda>(heads_first(op, out), logsumexp);
                           auto [rng_state, unused, debug_attn_mask] = no_dropout(query);
                           return std::tuple(out, logsumexp, rng_state, unused, debug_attn_mask);
                         });
}

inline std::optional<Three>
flash_backward(const Tensor &grad_out, const Tensor &query, const Tensor &key, const Tensor &value,
               const Tensor &out, const Tensor &logsumexp, const Tensor &cum_seq_q,
               const Tensor &cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p,
               bool is_causal, const Tensor &, const Tensor &, std::optional<double> scale,
               std::optional<int64_t> window_size_left, std::optional<int64_t> window_size_right) {
  const char *op = "_flash_attention_backward";
  if (grad_out.dim() != query.dim() || out.dim() != query.dim())
    return std::nullopt;
  return with_rows_first(
      op, query, key, value, if_defined(cum_seq_q), if_defined(cum_seq_k), max_q, max_k, dropout_p,
      cuda_options(is_causal, scale, window_size_left, window_size_right),
      [&](auto &call, const Sizes &logsumexp_shape) -> std::optional<Three> {
        using torch::stable::empty_like;
        Three grads{empty_like(query), empty_like(key), empty_like(value)};
        std::array views{heads_first(op, std::get<0>(grads)), heads_first(op, std::get<1>(grads)),
                         heads_first(op, std::get<2>(grads))};
        if (!backward_into<Cuda>(call, heads_first(op, grad_out), heads_first(op, out), logsumexp,
                                 logsumexp_shape, views, wants_deterministic()))
          return std::nullopt;
        return grads;
      });
}

inline std::unique_ptr<StableLibrary> add_overrides_cuda() {
  if (deterministic_flag() == nullptr) {
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch != nullptr)
      deterministic_flag() = PyObject_GetAttrString(torch, "are_deterministic_algorithms_enabled");
    Py_XDECREF(torch);
    PyErr_Clear();
    ATTN_CHECK(deterministic_flag() != nullptr, "activate",
               "torch.are_deterministic_algorithms_enabled is missing");
  }
  auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA",
                                                 __FILE__, __LINE__);
  add_override<"_scaled_dot_product_flash_attention", &sdpa_flash>(*library);
  add_override<"_scaled_dot_product_flash_attention_backward", &sdpa_flash_backward>(*library);
  add_override<"_flash_attention_forward", &flash_forward>(*library);
  add_override<"_flash_attention_backward", &flash_backward>(*library);
  return library;
}

} // namespace attn_ext
