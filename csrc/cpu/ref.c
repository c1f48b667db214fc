/* ref.c: the oracle. One loop for each index of the formula; sums in long double, results in
 * double. A pair that is not seen takes no part, whatever its key and value hold. */
#include "ref.h"

#include <math.h>
#include <stdlib.h>

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
          long double weight =
              expl(score(a, b, h, i, j, &slope) + bias - lse) *
              keep(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j);
          for (int64_t d = 0; d < a->head_dim_v; ++d)
            out[d] += weight * *at(&a->value, b, kv_head, j, d);
        }
        for (int64_t d = 0; d < a->head_dim_v; ++d)
          *at(&a->out, b, h, i, d) = (double)out[d];
        ((double *)a->logsumexp)[(b * a->heads + h) * a->seq_q + i] = (double)lse;
      }
}

/* grad_out . value of a pair: the derivative by its weight after dropout. */
static long double weight_gradient(const struct attn_args *a, int64_t b, int64_t h, int64_t i,
                                   int64_t j) {
  int64_t kv_head = h / (a->heads / a->kv_heads);
  long double sum = 0;
  for (int64_t d = 0; d < a->head_dim_v; ++d)
    sum += (long double)*at(&a->grad_out, b, h, i, d) * *at(&a->value, b, kv_head, j, d);
  return sum;
}

/* What the gradients are sums of, for each pair [B, Hq, Sq, Sk]; 0 where it is not seen. */
struct pairs {
  long double *weight;     /* after dropout */
  long double *grad_score; /* by the score with its bias */
  long double *grad_dot;   /* by query . key */
};

static int64_t pair(const struct attn_args *a, int64_t b, int64_t h, int64_t i, int64_t j) {
  return ((b * a->heads + h) * a->seq_q + i) * a->seq_k + j;
}

static void differentiate_row(const struct attn_args *a, struct pairs *p, int64_t b, int64_t h,
                              int64_t i) {
  const long double lse = logsumexp(a, b, h, i);
  long double delta = 0; /* sum over keys of weight * its gradient */
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t j = 0; j < a->seq_k; ++j) {
      double bias;
      long double slope;
      if (!sees(a, b, h, i, j, &bias) || lse == -INFINITY)
        continue;
      double kept = keep(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j);
      long double weight = expl(score(a, b, h, i, j, &slope) + bias - lse);
      long double grad = kept * weight_gradient(a, b, h, i, j);
      if (pass == 0) {
        delta += weight * grad;
        continue;
      }
      p->weight[pair(a, b, h, i, j)] = weight * kept;
      p->grad_score[pair(a, b, h, i, j)] = weight * (grad - delta);
      p->grad_dot[pair(a, b, h, i, j)] = weight * (grad - delta) * slope * a->scale;
    }
}

/* weight * x, where what has no weight adds nothing even if x is NaN. */
static long double term(long double weight, double x) {
  return weight == 0 ? 0 : weight * x;
}

static void sum_grad_query(const struct attn_args *a, const struct pairs *p) {
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h)
      for (int64_t i = 0; i < a->seq_q; ++i)
        for (int64_t d = 0; d < a->head_dim; ++d) {
          int64_t kv_head = h / (a->heads / a->kv_heads);
          long double sum = 0;
          for (int64_t j = 0; j < a->seq_k; ++j)
            sum += term(p->grad_dot[pair(a, b, h, i, j)], *at(&a->key, b, kv_head, j, d));
          *at(&a->grad_query, b, h, i, d) = (double)sum;
        }
}

/* grad [B, Hkv, Sk, dim] = sum over the query heads of a key head, and their rows, of
 * weight^T * rows [B, Hq, Sq, dim]: grad_key and grad_value. */
static void sum_over_rows(const struct attn_args *a, const struct attn_tensor *grad,
                          const long double *weight, const struct attn_tensor *rows, int64_t dim) {
  int64_t group = a->kv_heads ? a->heads / a->kv_heads : 1;
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t kv_head = 0; kv_head < a->kv_heads; ++kv_head)
      for (int64_t j = 0; j < a->seq_k; ++j)
        for (int64_t d = 0; d < dim; ++d) {
          long double sum = 0;
          for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
            for (int64_t i = 0; i < a->seq_q; ++i)
              sum += term(weight[pair(a, b, h, i, j)], *at(rows, b, h, i, d));
          *at(grad, b, kv_head, j, d) = (double)sum;
        }
}

/* Each element of the mask's own shape: the sum over the pairs that it is added to. */
static void sum_grad_mask(const struct attn_args *a, const struct pairs *p) {
  const struct attn_mask *m = &a->grad_mask;
  const int64_t stride[4] = {m->stride_b, m->stride_h, m->stride_q, m->stride_k};
  const int64_t full[4] = {a->batch, a->heads, a->seq_q, a->seq_k};
  int64_t own[4], shared[4]; /* positions of an element, and pairs of each */
  for (int axis = 0; axis < 4; ++axis) {
    own[axis] = stride[axis] ? full[axis] : 1;
    shared[axis] = stride[axis] ? 1 : full[axis];
  }
  for (int64_t b = 0; b < own[0]; ++b)
    for (int64_t h = 0; h < own[1]; ++h)
      for (int64_t i = 0; i < own[2]; ++i)
        for (int64_t j = 0; j < own[3]; ++j) {
          long double sum = 0;
          for (int64_t b2 = b; b2 < b + shared[0]; ++b2)
            for (int64_t h2 = h; h2 < h + shared[1]; ++h2)
              for (int64_t i2 = i; i2 < i + shared[2]; ++i2)
                for (int64_t j2 = j; j2 < j + shared[3]; ++j2)
                  sum += p->grad_score[pair(a, b2, h2, i2, j2)];
          ((double *)m->data)[mask_offset(m, b, h, i, j)] = (double)sum;
        }
}

void attn_ref_flash_bwd(const struct attn_args *a) {
  size_t count = (size_t)(a->batch * a->heads * a->seq_q * a->seq_k) + 1;
  struct pairs p = {calloc(count, sizeof(long double)), calloc(count, sizeof(long double)),
                    calloc(count, sizeof(long double))};
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h)
      for (int64_t i = 0; i < a->seq_q; ++i)
        differentiate_row(a, &p, b, h, i);
  if (a->grad_query.data)
    sum_grad_query(a, &p);
  if (a->grad_key.data)
    sum_over_rows(a, &a->grad_key, p.grad_dot, &a->query, a->head_dim);
  if (a->grad_value.data)
    sum_over_rows(a, &a->grad_value, p.weight, &a->grad_out, a->head_dim_v);
  if (a->grad_mask.data)
    sum_grad_mask(a, &p);
  free(p.weight);
  free(p.grad_score);
  free(p.grad_dot);
}
