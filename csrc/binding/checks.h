/* checks.h: every rule that an op asks of its arguments, every error text, and the way from checked
 * tensors to the structs of attn.h. All checks of an op run before its first allocation. */
#pragma once

#include <cmath>
#include <limits>

#include "tensors.h"

namespace attn_ext {

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

inline void check_floating(const char *op, const char *name, const Tensor &tensor) {
  ATTN_CHECK(is_floating(tensor.scalar_type()), op, "expected ", name,
             " of dtype float32, float64, float16 or bfloat16, got ",
             torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_beside(const char *op, const char *name, const Tensor &tensor,
                         const char *first_name, const Tensor &first) {
  ATTN_CHECK(same_device(tensor, first), op, "expected ", name, " on the device of ", first_name,
             ", ", device_text(first), ", got ", device_text(tensor));
}

inline void check_shape(const char *op, const char *name, const Tensor &tensor,
                        const Sizes &expected) {
  ATTN_CHECK(sizes_of(tensor) == expected, op, "expected ", name, " of shape ", text(expected),
             ", got ", text(tensor));
}

inline void check_finite(const char *op, const char *name, double value) {
  ATTN_CHECK(std::isfinite(value), op, "expected a finite ", name, ", got ", value);
}

inline void check_dropout(const char *op, double p, const MaybeTensor &rng_state,
                          const Tensor &beside) {
  ATTN_CHECK(p >= 0.0 && p <= 1.0, op, "expected a dropout probability in [0, 1], got ", p);
  if (p == 0.0)
    return;
  ATTN_CHECK(rng_state.has_value(), op, "dropout_p ", p,
             " needs rng_state, an int64 tensor of two random numbers; got None");
  ATTN_CHECK(rng_state->scalar_type() == ScalarType::Long && rng_state->dim() == 1 &&
                 rng_state->size(0) == 2 && rng_state->stride(0) == 1,
             op, "expected rng_state as a contiguous int64 tensor of shape [2], got ",
             torch::headeronly::toString(rng_state->scalar_type()), " ", text(*rng_state));
  check_beside(op, "rng_state", *rng_state, "query", beside);
}

/* A mask of any shape that broadcasts to `shape` (four sizes), by strides: 0 where it broadcasts.
 */
inline attn_mask broadcast_mask(const char *op, const char *name, const Tensor &mask,
                                const Sizes &shape) {
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t rank = mask.dim();
  bool fits = rank <= 4;
  for (int64_t axis = 0; fits && axis < rank; ++axis) {
    int64_t size = mask.size(axis), to = shape[4 - rank + axis];
    fits = size == to || size == 1;
    stride[4 - rank + axis] = size == 1 ? 0 : mask.stride(axis);
  }
  ATTN_CHECK(fits, op, "expected ", name, " broadcastable to ", text(shape), ", got ", text(mask));
  return {const_cast<void *>(mask.const_data_ptr()),
          dtype_of(mask),
          stride[0],
          stride[1],
          stride[2],
          stride[3]};
}

/* What is the same in every attention op, from naive to flash: shapes, dtypes, devices, numbers. */
struct Attention {
  const char *op;
  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim, head_dim_v;
  double scale;
  Sizes scores_shape;

  Attention(const char *op, const Tensor &query, const Tensor &key, const Tensor &value,
            const MaybeTensor &attn_mask, double dropout_p, bool is_causal,
            const MaybeTensor &rng_state, std::optional<double> scale_arg)
      : op(op) {
    check_floating(op, "query", query);
    const Tensor *tensors[] = {&query, &key, &value};
    const char *names[] = {"query", "key", "value"};
    for (int i = 0; i < 3; ++i) {
      ATTN_CHECK(tensors[i]->dim() == 4, op, "expected ", names[i],
                 " with 4 dimensions [batch, heads, length, head_dim], got ", text(*tensors[i]));
      ATTN_CHECK(tensors[i]->scalar_type() == query.scalar_type(), op, "expected ", names[i],
                 " of query's dtype ", torch::headeronly::toString(query.scalar_type()), ", got ",
                 torch::headeronly::toString(tensors[i]->scalar_type()));
      check_beside(op, names[i], *tensors[i], "query", query);
    }
    batch = query.size(0), heads = query.size(1), seq_q = query.size(2), head_dim = query.size(3);
    kv_heads = key.size(1), seq_k = key.size(2), head_dim_v = value.size(3);
    check_shape(op, "key", key, {batch, kv_heads, seq_k, head_dim});
    check_shape(op, "value", value, {batch, kv_heads, seq_k, head_dim_v});
    ATTN_CHECK(kv_heads == heads || (kv_heads > 0 && heads % kv_heads == 0), op,
               "expected query's heads to be a multiple of key's heads, got ", heads, " and ",
               kv_heads);
    int64_t most = std::numeric_limits<int32_t>::max();
    ATTN_CHECK(seq_q <= most && seq_k <= most && (heads == 0 || batch <= most / heads), op,
               "expected lengths and batch * heads below 2^31, got query ", text(query), ", key ",
               text(key));

    scale = scale_arg.value_or(head_dim > 0 ? 1.0 / std::sqrt(double(head_dim)) : 1.0);
    check_finite(op, "scale", scale);
    check_dropout(op, dropout_p, rng_state, query);

    scores_shape = {batch, heads, seq_q, seq_k};
    if (!attn_mask)
      return;
    ATTN_CHECK(!is_causal, op, "Explicit attn_mask should not be set when is_causal=True");
    ScalarType dtype = attn_mask->scalar_type();
    ATTN_CHECK(dtype == ScalarType::Bool || dtype == ScalarType::Float ||
                   dtype == query.scalar_type(),
               op, "expected attn_mask of dtype bool, float32 or query's ",
               torch::headeronly::toString(query.scalar_type()), ", got ",
               torch::headeronly::toString(dtype));
    check_beside(op, "attn_mask", *attn_mask, "query", query);
    broadcast_mask(op, "attn_mask", *attn_mask, scores_shape);
  }

  Sizes out_shape() const { return {batch, heads, seq_q, head_dim_v}; }
};

/* A tensor [B, H, S, D] as kernels see it. The last stride must be 1 (see with_unit_rows). */
inline attn_tensor view_of(const Tensor &tensor) {
  return {const_cast<void *>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

/* One stage's scores, seen as [B, H, R, C]: missing leading axes are 1. */
struct Scores {
  Sizes shape;
  attn_stage stage{};

  Scores(const char *op, const char *name, const Tensor &scores) {
    check_floating(op, name, scores);
    ATTN_CHECK(scores.dim() <= 4, op, "expected ", name, " with at most 4 dimensions, got ",
               text(scores));
    shape = sizes_of(scores);
    shape.insert(shape.begin(), 4 - shape.size(), 1);
    stage.dtype = dtype_of(scores);
    stage.batch = shape[0], stage.heads = shape[1], stage.rows = shape[2], stage.cols = shape[3];
  }

  bool empty() const { return stage.batch * stage.heads * stage.rows * stage.cols == 0; }
};

inline attn_tensor stage_view(const Tensor &tensor) {
  int64_t stride[4] = {0, 0, 0, 1};
  for (int64_t axis = tensor.dim(), to = 4; axis-- > 0;)
    stride[--to] = tensor.stride(axis);
  return {const_cast<void *>(tensor.const_data_ptr()), stride[0], stride[1], stride[2]};
}

} // namespace attn_ext
