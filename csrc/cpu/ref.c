/* ref.c: the oracle. One loop for each index of the formula; sums in long double, results in
 * double. A pair that is not seen takes no part, whatever its key and value hold. */
#include "ref.h"

#include <math.h>
#include <stddef.h>

#include "dropout.h"

/* Element (b, h, s, d) of a tensor; the last stride is 1. */
static double *at(const struct attn_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  return (double *)t->data + b * t->stride_b + h * t->stride_h + s * t->stride_s + d;
}

static int64_t mask_offset(const struct attn_mask *m, int64_t b, int64_t h, int64_t i, int64_t j) {
  return b * m->stride_b + h * m->stride_h + i * m->stride_q + j * m->stride_k;
}

/* 0 for a dropped pair, 1 / (1 - p) for a kept one. */
static double keep(double p, const int64_t *rng_state, int64_t head, int64_t row, int64_t col) {
  if (p == 0)
    return 1;
  struct attn_philox draw =
      attn_philox(rng_state, attn_dropout_group(col), (uint32_t)row, (uint32_t)head);
  bool kept = attn_philox_u16(draw, attn_dropout_index(col)) >= attn_dropout_threshold(p);
  return kept ? attn_dropout_scale(p) : 0;
}

/* Stages */

#define FOR_EACH_ROW(s)                                                                            \
  for (int64_t b = 0; b < (s)->batch; ++b)                                                         \
    for (int64_t h = 0; h < (s)->heads; ++h)                                                       \
      for (int64_t r = 0; r < (s)->rows; ++r)

void attn_ref_scale(const struct attn_stage *s) {
  FOR_EACH_ROW(s)
  for (int64_t c = 0; c < s->cols; ++c)
    *at(&s->out, b, h, r, c) = *at(&s->in, b, h, r, c) * s->value;
}

void attn_ref_masked_fill(const struct attn_stage *s) {
  const bool *mask = s->mask.data;
  FOR_EACH_ROW(s)
  for (int64_t c = 0; c < s->cols; ++c) {
    bool filled = (mask && mask[mask_offset(&s->mask, b, h, r, c)]) || (s->is_causal && c > r);
    *at(&s->out, b, h, r, c) = filled ? s->value : *at(&s->in, b, h, r, c);
  }
}

void attn_ref_softmax(const struct attn_stage *s) {
  FOR_EACH_ROW(s) {
    double max = -INFINITY;
    for (int64_t c = 0; c < s->cols; ++c)
      max = fmax(max, *at(&s->in, b, h, r, c)); /* fmax ignores NaN; the sum does not */
    long double sum = 0;
    for (int64_t c = 0; c < s->cols && max > -INFINITY; ++c)
      sum += expl((long double)*at(&s->in, b, h, r, c) - max);
    for (int64_t c = 0; c < s->cols; ++c) {
      double x = *at(&s->in, b, h, r, c);
      *at(&s->out, b, h, r, c) = max > -INFINITY ? (double)(expl((long double)x - max) / sum)
                                 : isnan(x)      ? x
                                                 : 0;
    }
  }
}

void attn_ref_softmax_backward(const struct attn_stage *s) {
  FOR_EACH_ROW(s) {
    long double sum = 0;
    for (int64_t c = 0; c < s->cols; ++c)
      sum += (long double)*at(&s->probs, b, h, r, c) * *at(&s->in, b, h, r, c);
    for (int64_t c = 0; c < s->cols; ++c)
      *at(&s->out, b, h, r, c) =
          (double)(*at(&s->probs, b, h, r, c) * (*at(&s->in, b, h, r, c) - sum));
  }
}

void attn_ref_dropout(const struct attn_stage *s) {
  FOR_EACH_ROW(s)
  for (int64_t c = 0; c < s->cols; ++c) {
    double factor = keep(s->value, s->rng_state, b * s->heads + h, r, c);
    *at(&s->out, b, h, r, c) = factor == 0 ? 0 : *at(&s->in, b, h, r, c) * factor;
  }
}

/* Fused attention */

/* What mask and band say of a pair: false if row i does not see key j; else the bias. */
static bool sees(const struct attn_args *a, int64_t b, int64_t h, int64_t i, int64_t j,
                 double *bias) {
  int64_t distance = j - i - (a->bottom_right ? a->seq_k - a->seq_q : 0);
  if (a->window_left >= 0 && distance < -a->window_left)
    return false;
  if (a->window_right >= 0 && distance > a->window_right)
    return false;
  *bias = 0;
  if (!a->mask.data)
    return true;
  int64_t offset = mask_offset(&a->mask, b, h, i, j);
  if (a->mask.dtype == ATTN_BOOL)
    return ((const bool *)a->mask.data)[offset];
  *bias = ((const double *)a->mask.data)[offset];
  return *bias != -INFINITY;
}

/* The score of a pair without its bias, and its derivative by scale * query . key. */
static long double score(const struct attn_args *a, int64_t b, int64_t h, int64_t i, int64_t j,
                         long double *slope) {
  int64_t kv_head = h / (a->heads / a->kv_heads);
  long double s = 0;
  for (int64_t d = 0; d < a->head_dim; ++d)
    s += (long double)*at(&a->query, b, h, i, d) * *at(&a->key, b, kv_head, j, d);
  s *= a->scale;
  *slope = 1;
  if (a->softcap == 0)
    return s;
  long double t = tanhl(s / a->softcap);
  *slope = 1 - t * t;
  return a->softcap * t;
}

/* ln of the sum over the keys that row i sees of exp(score); -inf if it sees none. */
static long double logsumexp(const struct attn_args *a, int64_t b, int64_t h, int64_t i) {
  long double max = -INFINITY, sum = 0, slope;
  double bias;
  for (int64_t j = 0; j < a->seq_k; ++j)
    if (sees(a, b, h, i, j, &bias))
      max = fmaxl(max, score(a, b, h, i, j, &slope) + bias);
  for (int64_t j = 0; j < a->seq_k; ++j)
    if (sees(a, b, h, i, j, &bias))
      sum += expl(score(a, b, h, i, j, &slope) + bias - (max == -INFINITY ? 0 : max));
  return max + logl(sum);
}

void attn_ref_flash_fwd(const struct attn_args *a) {
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h)
      for (int64_t i = 0; i < a->seq_q; ++i) {
        int64_t kv_head = h / (a->heads / a->kv_heads);
        long double out[ATTN_MAX_HEAD_DIM] = {0}, slope;
        long double lse = logsumexp(a, b, h, i);
        for (int64_t j = 0; j < a->seq_k; ++j) {
          double bias;
          if (!sees(a, b, h, i, j, &bias) || lse == -INFINITY)
            continue;
          long double weight = expl(score(a, b, h, i, j, &slope) + bias - lse) *
                               keep(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j);
          for (int64_t d = 0; d < a->head_dim_v; ++d)
            out[d] += weight * *at(&a->value, b, kv_head, j, d);
        }
        for (int64_t d = 0; d < a->head_dim_v; ++d)
          *at(&a->out, b, h, i, d) = (double)out[d];
        ((double *)a->logsumexp)[(b * a->heads + h) * a->seq_q + i] = (double)lse;
      }
}

/* Sets [B, H, S, D] to 0 where it is asked for. */
static void clear(const struct attn_tensor *t, int64_t batch, int64_t heads, int64_t rows,
                  int64_t cols) {
  for (int64_t b = 0; t->data && b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t s = 0; s < rows; ++s)
        for (int64_t d = 0; d < cols; ++d)
          *at(t, b, h, s, d) = 0;
}

/* grad_value . grad_out of a pair: the derivative by its weight after dropout. */
static long double weight_gradient(const struct attn_args *a, int64_t b, int64_t h, int64_t i,
                                   int64_t j) {
  int64_t kv_head = h / (a->heads / a->kv_heads);
  long double sum = 0;
  for (int64_t d = 0; d < a->head_dim_v; ++d)
    sum += (long double)*at(&a->grad_out, b, h, i, d) * *at(&a->value, b, kv_head, j, d);
  return sum;
}

/* What pair (i, j) adds to each gradient. delta: sum over keys of weight * its gradient. */
static void add_pair(const struct attn_args *a, int64_t b, int64_t h, int64_t i, int64_t j,
                     long double lse, long double delta) {
  double bias;
  if (!sees(a, b, h, i, j, &bias) || lse == -INFINITY)
    return;
  int64_t kv_head = h / (a->heads / a->kv_heads);
  double kept = keep(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j);
  long double slope, weight = expl(score(a, b, h, i, j, &slope) + bias - lse);
  long double grad = weight * (kept * weight_gradient(a, b, h, i, j) - delta);
  if (a->grad_mask.data)
    ((double *)a->grad_mask.data)[mask_offset(&a->grad_mask, b, h, i, j)] += (double)grad;
  for (int64_t d = 0; a->grad_value.data && d < a->head_dim_v; ++d)
    *at(&a->grad_value, b, kv_head, j, d) +=
        (double)(kept * weight * *at(&a->grad_out, b, h, i, d));
  for (int64_t d = 0; a->grad_query.data && d < a->head_dim; ++d)
    *at(&a->grad_query, b, h, i, d) +=
        (double)(a->scale * slope * grad * *at(&a->key, b, kv_head, j, d));
  for (int64_t d = 0; a->grad_key.data && d < a->head_dim; ++d)
    *at(&a->grad_key, b, kv_head, j, d) +=
        (double)(a->scale * slope * grad * *at(&a->query, b, h, i, d));
}

void attn_ref_flash_bwd(const struct attn_args *a) {
  clear(&a->grad_query, a->batch, a->heads, a->seq_q, a->head_dim);
  clear(&a->grad_key, a->batch, a->kv_heads, a->seq_k, a->head_dim);
  clear(&a->grad_value, a->batch, a->kv_heads, a->seq_k, a->head_dim_v);
  const struct attn_mask *m = &a->grad_mask; /* a broadcast axis has one element, of any size */
  for (int64_t b = 0; m->data && b < (m->stride_b ? a->batch : 1); ++b)
    for (int64_t h = 0; h < (m->stride_h ? a->heads : 1); ++h)
      for (int64_t i = 0; i < (m->stride_q ? a->seq_q : 1); ++i)
        for (int64_t j = 0; j < (m->stride_k ? a->seq_k : 1); ++j)
          ((double *)m->data)[mask_offset(m, b, h, i, j)] = 0;

  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h)
      for (int64_t i = 0; i < a->seq_q; ++i) {
        long double lse = logsumexp(a, b, h, i), delta = 0, slope;
        double bias;
        for (int64_t j = 0; j < a->seq_k; ++j)
          if (sees(a, b, h, i, j, &bias) && lse != -INFINITY)
            delta += expl(score(a, b, h, i, j, &slope) + bias - lse) *
                     keep(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j) *
                     weight_gradient(a, b, h, i, j);
        for (int64_t j = 0; j < a->seq_k; ++j)
          add_pair(a, b, h, i, j, lse, delta);
      }
}
