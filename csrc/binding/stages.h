/* stages.h: the stages of unfused attention as ops, each its own kernel. Check, allocate, call.
 * `kernel` is the entry point of one device: attn_scale_cpu or attn_scale_cuda, and so on. */
#pragma once

#include "checks.h"
#include "device.h"

namespace attn_ext {

/* scores * scale. scores: up to 4 dimensions; the result is contiguous. */
template <auto *kernel> Tensor scale(const Tensor &scores, double factor) {
  Scores checked("scale", "scores", scores);
  check_finite("scale", "scale", factor);
  Tensor rows = with_unit_rows(scores), out = empty(scores, sizes_of(scores), scores.scalar_type());
  checked.stage.in = stage_view(rows);
  checked.stage.out = stage_view(out);
  checked.stage.value = factor;
  if (!checked.empty())
    run("scale", kernel, out, checked.stage);
  return out;
}

inline void check_fill(const char *op, const Tensor &scores, const Scores &checked,
                       const MaybeTensor &mask) {
  if (!mask)
    return;
  ATTN_CHECK(mask->scalar_type() == ScalarType::Bool, op, "expected mask of dtype bool, got ",
             torch::headeronly::toString(mask->scalar_type()));
  check_beside(op, "mask", *mask, "scores", scores);
  broadcast_mask(op, "mask", *mask, checked.shape);
}

/* Writes value in place where mask is true (aten's meaning) or, if is_causal, where column > row.
 */
template <auto *kernel>
void masked_fill_(const Tensor &scores, const MaybeTensor &mask, double value, bool is_causal) {
  Scores checked("masked_fill_", "scores", scores);
  check_fill("masked_fill_", scores, checked, mask);
  for (int64_t axis = 0; axis < scores.dim(); ++axis)
    ATTN_CHECK(
        scores.size(axis) <= 1 || scores.stride(axis) != 0, "masked_fill_",
        "scores is expanded: several of its elements share one place in memory, so it cannot "
        "be written in place; clone it first");
  if (checked.empty() || (!mask && !is_causal))
    return;
  Tensor rows = with_unit_rows(scores);
  checked.stage.in = checked.stage.out = stage_view(rows);
  if (mask)
    checked.stage.mask = broadcast_mask("masked_fill_", "mask", *mask, checked.shape);
  checked.stage.is_causal = is_causal;
  checked.stage.value = value;
  run("masked_fill_", kernel, rows, checked.stage);
  if (rows.get() != scores.get()) { /* no unit last stride: the fill went to a copy */
    Tensor target = scores;
    torch::stable::copy_(target, rows);
  }
}

/* The same out of place: a whole copy of scores before the fill, which is what makes the
 * out-of-place form slow. The copy is aten's clone, so that a trace shows it by its own name. */
inline Tensor masked_fill(const Tensor &scores, const MaybeTensor &mask, double value,
                          bool is_causal) {
  Scores checked("masked_fill", "scores", scores);
  check_fill("masked_fill", scores, checked, mask);
  std::optional<int64_t> contiguous_format = 0;
  Tensor out = call("aten::clone", "", scores, contiguous_format);
  dispatch("attn_ext::masked_fill_", "", out, mask, value, is_causal);
  return out;
}

/* Softmax over the last axis; a row with no finite entry gives 0, not NaN. */
template <auto *kernel> Tensor softmax(const Tensor &scores) {
  Scores checked("softmax", "scores", scores);
  Tensor rows = with_unit_rows(scores), out = empty(scores, sizes_of(scores), scores.scalar_type());
  checked.stage.in = stage_view(rows);
  checked.stage.out = stage_view(out);
  if (!checked.empty())
    run("softmax", kernel, out, checked.stage);
  return out;
}

/* output * (grad_output - sum(output * grad_output)) along the last axis. */
template <auto *kernel> Tensor softmax_backward(const Tensor &grad_output, const Tensor &output) {
  const char *op = "softmax_backward";
  Scores checked(op, "grad_output", grad_output);
  check_shape(op, "output", output, sizes_of(grad_output));
  ATTN_CHECK(output.scalar_type() == grad_output.scalar_type(), op,
             "expected output of grad_output's dtype ",
             torch::headeronly::toString(grad_output.scalar_type()), ", got ",
             torch::headeronly::toString(output.scalar_type()));
  check_beside(op, "output", output, "grad_output", grad_output);
  Tensor grad = with_unit_rows(grad_output), probs = with_unit_rows(output);
  Tensor out = empty(grad, sizes_of(grad), grad.scalar_type());
  checked.stage.in = stage_view(grad);
  checked.stage.probs = stage_view(probs);
  checked.stage.out = stage_view(out);
  if (!checked.empty())
    run(op, kernel, out, checked.stage);
  return out;
}

/* Keeps and divides by 1 - p, or zeroes, each probability by the pattern of dropout.h. */
template <auto *kernel> Tensor dropout(const Tensor &probs, double p, const Tensor &rng_state) {
  Scores checked("dropout", "probs", probs);
  check_dropout("dropout", p, rng_state, probs);
  Tensor rows = with_unit_rows(probs), out = empty(probs, sizes_of(probs), probs.scalar_type());
  checked.stage.in = stage_view(rows);
  checked.stage.out = stage_view(out);
  checked.stage.value = p;
  checked.stage.rng_state = static_cast<const int64_t *>(rng_state.const_data_ptr());
  if (!checked.empty())
    run("dropout", kernel, out, checked.stage);
  return out;
}

} // namespace attn_ext
