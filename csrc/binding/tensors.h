/* tensors.h: the few things the binding needs of torch beyond its stable headers: allocation with
 * given strides, nested calls through the dispatcher, and words for error messages. */
#pragma once

#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attn.h"

namespace attn_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

/* Raises a RuntimeError that names the op. Always with a text: without one the message is empty. */
#define ATTN_CHECK(condition, op, ...)                                                             \
  STD_TORCH_CHECK(condition, "attn_ext::", op, ": ", __VA_ARGS__)

inline Sizes sizes_of(const Tensor &tensor) {
  auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline std::string text(const Sizes &sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); ++i)
    out << (i ? ", " : "[") << sizes[i];
  out << (sizes.empty() ? "[]" : "]");
  return out.str();
}

inline std::string text(const Tensor &tensor) {
  return text(sizes_of(tensor));
}

inline std::string device_text(const Tensor &tensor) {
  std::string type = tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device";
  return tensor.is_cuda() ? type + ":" + std::to_string(tensor.get_device_index()) : type;
}

inline bool same_device(const Tensor &a, const Tensor &b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() &&
         a.get_device_index() == b.get_device_index();
}

/* An unwritten tensor beside `like`, of these sizes and strides. */
inline Tensor empty_strided(const Tensor &like, const Sizes &sizes, const Sizes &strides,
                            ScalarType dtype) {
  int32_t device_type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype_code, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty(const Tensor &like, const Sizes &sizes, ScalarType dtype) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i] > 1 ? sizes[i] : 1)
    strides[i] = step;
  return empty_strided(like, sizes, strides, dtype);
}

/* An unwritten [B, H, S, D] that lies in memory as `like` does: [B, S, H, D] where its heads are
 * inside its rows (a transposed view of a projection), else contiguous. */
inline Tensor empty_in_layout(const Tensor &like, const Sizes &sizes) {
  int64_t heads = sizes[1], rows = sizes[2], dim = sizes[3];
  if (like.stride(1) < like.stride(2)) {
    int64_t row = std::max<int64_t>(heads * dim, 1), head = std::max<int64_t>(dim, 1);
    int64_t batch = std::max<int64_t>(rows, 1) * row;
    return empty_strided(like, sizes, {batch, head, row, 1}, like.scalar_type());
  }
  return empty(like, sizes, like.scalar_type());
}

/* Call an op through the dispatcher, so that a trace shows it inside ours. The exception of an
 * inner failure has lost its text: check first. */
template <class... Args>
StableIValue dispatch(const char *op, const char *overload, const Args &...args) {
  using torch::stable::detail::from;
  std::array<StableIValue, sizeof...(Args)> stack{from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return stack[0];
}

template <class... Args> Tensor call(const char *op, const char *overload, const Args &...args) {
  return torch::stable::detail::to<Tensor>(dispatch(op, overload, args...));
}

inline Tensor with_unit_rows(const Tensor &tensor) {
  int64_t last = tensor.dim() - 1;
  bool unit = last < 0 || tensor.stride(last) == 1 || tensor.size(last) <= 1;
  return unit ? tensor : torch::stable::contiguous(tensor);
}

inline attn_dtype dtype_of(const Tensor &tensor) {
  switch (tensor.scalar_type()) {
  case ScalarType::Double:
    return ATTN_F64;
  case ScalarType::Half:
    return ATTN_F16;
  case ScalarType::BFloat16:
    return ATTN_BF16;
  case ScalarType::Bool:
    return ATTN_BOOL;
  default:
    return ATTN_F32; /* checked by the caller */
  }
}

} // namespace attn_ext
