/* staged.h: attention stage by stage, as most people write it first. Every step is an op of its
 * own, called through the dispatcher, so that a trace of one call reads
 *
 *   naive_attention    matmul, scale, masked_fill (clone + masked_fill_), softmax, matmul
 *   inplace_attention  matmul, scale, masked_fill_,                       softmax, matmul
 *
 * Both matmuls are aten's. S x S scores live in memory several times over: that is the lesson.
 */
#pragma once

#include "checks.h"

namespace attn_ext {

enum class Fill { out_of_place, in_place };

inline Tensor reshaped(const Tensor &tensor, const Sizes &sizes) {
  return call("aten::reshape", "", tensor, sizes);
}

/* Grouped heads without a copy of key or value: the group's query heads become rows of one matrix,
 * [B, Hq, S, X] -> [B, Hkv, Hq / Hkv * S, X]. A view where heads and rows are adjacent in memory.
 */
inline Tensor group_rows(const Attention &attention, const Tensor &tensor) {
  if (attention.heads == attention.kv_heads)
    return tensor;
  int64_t group = attention.heads / attention.kv_heads;
  return reshaped(tensor,
                  {tensor.size(0), attention.kv_heads, group * tensor.size(2), tensor.size(3)});
}

inline Tensor ungroup_rows(const Attention &attention, const Tensor &tensor) {
  if (attention.heads == attention.kv_heads)
    return tensor;
  return reshaped(tensor, {attention.batch, attention.heads, attention.seq_q, tensor.size(3)});
}

template <Fill fill>
std::tuple<Tensor, Tensor>
staged_attention(const Tensor &query, const Tensor &key, const Tensor &value,
                 const MaybeTensor &attn_mask, double dropout_p, bool is_causal,
                 const MaybeTensor &rng_state, std::optional<double> scale_arg) {
  const char *op = fill == Fill::in_place ? "inplace_attention" : "naive_attention";
  Attention attention(op, query, key, value, attn_mask, dropout_p, is_causal, rng_state, scale_arg);

  Tensor key_t = torch::stable::transpose(key, 2, 3);
  Tensor scores = call("aten::matmul", "", group_rows(attention, query), key_t);
  scores = call("attn_ext::scale", "", ungroup_rows(attention, scores), attention.scale);

  bool bool_mask = attn_mask && attn_mask->scalar_type() == ScalarType::Bool;
  if (is_causal || bool_mask) {
    MaybeTensor filled; /* attn_mask says what takes part, masked_fill what does not */
    if (bool_mask)
      filled = call("aten::logical_not", "", *attn_mask);
    double minus_inf = -std::numeric_limits<double>::infinity();
    if (fill == Fill::in_place)
      dispatch("attn_ext::masked_fill_", "", scores, filled, minus_inf, is_causal);
    else
      scores = call("attn_ext::masked_fill", "", scores, filled, minus_inf, is_causal);
  } else if (attn_mask) {
    /* scores - (-1) * mask: the one addition that the stable headers offer. */
    scores =
        torch::stable::subtract(scores, torch::stable::to(*attn_mask, scores.scalar_type()), -1.0);
  }

  Tensor attn_weights = call("attn_ext::softmax", "", scores);
  Tensor weights = attn_weights;
  if (dropout_p > 0.0)
    weights = call("attn_ext::dropout", "", attn_weights, dropout_p, *rng_state);
  Tensor out = call("aten::matmul", "", group_rows(attention, weights), value);
  return {ungroup_rows(attention, out), attn_weights};
}

} // namespace attn_ext
