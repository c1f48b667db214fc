/* softmax.cuh: from the raw product query . key to a probability: what forward and backward of the
 * fused kernels must do alike. Everything here is element-wise and knows no tiles.
 *
 * Scores are kept in units of log2, s' = s * log2(e), so that exp is one ex2.
 */
#ifndef ATTN_SOFTMAX_CUH
#define ATTN_SOFTMAX_CUH

#include "../attn.h"
#include "ptx_sm80.cuh"
#include "score.h"

#define LOG2_E         1.4426950408889634f
#define LN_2           0.6931471805599453f
#define MINUS_INFINITY __int_as_float(0xff800000)

/* Finite scores end here: log2(e) times this is still finite, so a float mask of the lowest finite
 * number keeps its meaning, which -inf would not: a row of nothing else is their mean, not 0. */
#define LOWEST_SCORE (-1.5e38f)

/* The query at position i sees keys max(0, i + low) ... min(i + high, seq_k - 1). */
struct key_band {
  int low, high;
};

/* Positions stay below this, so that position + bound fits an int. */
#define MOST_POSITIONS (1 << 30)

static __device__ __forceinline__ int clamp_bound(int64_t bound) {
  return bound < -MOST_POSITIONS  ? -MOST_POSITIONS
         : bound > MOST_POSITIONS ? MOST_POSITIONS
                                  : (int)bound;
}

/* seq_q, seq_k: lengths of the sequence at hand. */
static __device__ __forceinline__ struct key_band key_band_of(const struct attn_args *args,
                                                              int seq_q, int seq_k) {
  const int64_t shift = args->bottom_right ? seq_k - seq_q : 0;
  struct key_band band = {-MOST_POSITIONS, MOST_POSITIONS};
  if (args->window_left >= 0)
    band.low = clamp_bound(shift - clamp_bound(args->window_left));
  if (args->window_right >= 0)
    band.high = clamp_bound(shift + clamp_bound(args->window_right));
  return band;
}

/* softcap * tanh(x / softcap), by 1 - 2 / (e^2x + 1): absolute error of 1e-7 * softcap, where
 * tanh.approx would leave 5e-4 * softcap. */
static __device__ __forceinline__ float soft_capped(const struct attn_score *score, float x) {
  float power = exp2_approx(x * score->softcap_inverse * (2 * LOG2_E));
  return score->softcap - 2 * score->softcap * rcp_approx(power + 1);
}

/* One element of a mask as what it adds to the score: 0 or -inf for bool. */
static __device__ __forceinline__ float mask_value(enum attn_dtype dtype, const void *element) {
  switch (dtype) {
  case ATTN_BOOL:
    return *(const uint8_t *)element ? 0 : MINUS_INFINITY;
  case ATTN_F32:
    return *(const float *)element;
  case ATTN_BF16:
    return unpack_bf16(*(const uint16_t *)element);
  default:
    return unpack_f16(*(const uint16_t *)element);
  }
}

static __device__ __forceinline__ int mask_element_size(enum attn_dtype dtype) {
  return dtype == ATTN_BOOL ? 1 : dtype == ATTN_F32 ? 4 : 2;
}

/* Where row (b, h, i) of the mask starts, in bytes. */
static __device__ __forceinline__ const char *mask_row(const struct attn_mask *mask, int64_t b,
                                                       int64_t h, int64_t i) {
  return (const char *)mask->data + (b * mask->stride_b + h * mask->stride_h + i * mask->stride_q) *
                                        mask_element_size(mask->dtype);
}

/* What the mask adds at one key of a row; the key must exist. */
static __device__ __forceinline__ float mask_at(const struct attn_mask *mask, const char *row,
                                                int64_t key) {
  return mask_value(mask->dtype, row + key * mask->stride_k * mask_element_size(mask->dtype));
}

/* The raw product query . key to a score in units of log2, before mask and window. */
static __device__ __forceinline__ float score_log2(const struct attn_score *score, float product) {
  if (score->softcap == 0)
    return product * score->scale_log2;
  return soft_capped(score, product * score->scale) * LOG2_E;
}

/* The same with what the mask adds. A -inf of the mask wins over NaN of an unseen key only where
 * it is a bool mask: a float mask is added, as in the formula. */
static __device__ __forceinline__ float score_log2_masked(const struct attn_score *score,
                                                          float product, enum attn_dtype dtype,
                                                          float added) {
  float x = product * score->scale;
  if (score->softcap != 0)
    x = soft_capped(score, x);
  x += added;
  if (x == MINUS_INFINITY || (dtype == ATTN_BOOL && added != 0))
    return MINUS_INFINITY;
  return (x < LOWEST_SCORE ? LOWEST_SCORE : x) * LOG2_E; /* written so that NaN stays NaN */
}

#endif
