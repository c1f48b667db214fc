/* plain.c: see check.h. Products and sums of numbers of fp32, rounded to fp32 from double, are
 * those of fp32 arithmetic: double has more than twice its digits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dropout.h"

static double *at(const struct attn_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  return (double *)t->data + b * t->stride_b + h * t->stride_h + s * t->stride_s + d;
}

/* The result of one operation of arithmetic. */
static double step(enum attn_dtype dtype, double x) {
  return dtype == ATTN_F64 ? x : (float)x;
}

static double plain_exp(enum attn_dtype dtype, double x) {
  return dtype == ATTN_F64 ? exp(x) : expf((float)x);
}

static double dropout_factor(double p, const int64_t *rng_state, int64_t head, int64_t row,
                             int64_t col) {
  struct attn_philox draw =
      attn_philox(rng_state, attn_dropout_group(col), (uint32_t)row, (uint32_t)head);
  return attn_philox_u16(draw, attn_dropout_index(col)) >= attn_dropout_threshold(p)
             ? attn_dropout_scale(p)
             : 0;
}

void plain_stage(const char *op, const struct attn_stage *st, const struct attn_tensor *sizes,
                 enum attn_dtype dtype) {
  for (int64_t row = 0; row < st->batch * st->heads * st->rows; ++row) {
    const int64_t b = row / st->rows / st->heads, h = row / st->rows % st->heads;
    const int64_t r = row % st->rows;
    double max = -INFINITY, sum = 0, sum_size = 0;
    for (int64_t c = 0; c < st->cols; ++c)
      max = fmax(max, *at(&st->in, b, h, r, c));
    for (int64_t c = 0; c < st->cols; ++c) {
      const double x = *at(&st->in, b, h, r, c);
      if (strcmp(op, "softmax") == 0)
        sum = step(dtype, sum + plain_exp(dtype, step(dtype, x - max)));
      if (strcmp(op, "softmax_backward") == 0) {
        const double term = x * *at(&st->probs, b, h, r, c);
        sum = step(dtype, sum + step(dtype, term));
        sum_size += fabs(term);
      }
    }
    for (int64_t c = 0; c < st->cols; ++c) {
      double x = *at(&st->in, b, h, r, c), size = 0;
      if (strcmp(op, "softmax") == 0)
        x = step(dtype, plain_exp(dtype, step(dtype, x - max)) / sum);
      else if (strcmp(op, "softmax_backward") == 0) {
        const double prob = *at(&st->probs, b, h, r, c);
        size = fabs(prob) * (fabs(x) + sum_size);
        x = step(dtype, prob * step(dtype, x - sum));
      } else if (strcmp(op, "scale") == 0)
        x = step(dtype, x * step(dtype, st->value));
      else
        x = step(dtype, x * step(dtype, dropout_factor(st->value, st->rng_state, b * st->heads + h,
                                                       r, c)));
      *at(&st->out, b, h, r, c) = round_to(dtype, x);
      *at(sizes, b, h, r, c) = fmax(size, fabs(x));
    }
  }
}

static int64_t mask_offset(const struct attn_mask *m, int64_t b, int64_t h, int64_t i, int64_t j) {
  return b * m->stride_b + h * m->stride_h + i * m->stride_q + j * m->stride_k;
}

/* One head: matrices [Sq][Sk] that the staged evaluation stores. */
struct head {
  const struct attn_args *a, *sizes; /* sizes: results are sums of absolute values */
  enum attn_dtype dtype;
  int64_t b, h, kv_head;
  double *probs, *dropped, *slope;
};

static double dot(enum attn_dtype dtype, const double *x, const double *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i)
    sum = step(dtype, sum + step(dtype, x[i] * y[i]));
  return sum;
}

static double size_of_dot(const double *x, const double *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i)
    sum += fabs(x[i] * y[i]);
  return sum;
}

/* The score of a pair as stored; -inf where it is not seen. */
static double plain_score(const struct head *m, int64_t i, int64_t j, double *slope) {
  const struct attn_args *a = m->a;
  const struct attn_mask *mask = &a->mask;
  const int64_t offset = mask_offset(mask, m->b, m->h, i, j);
  const int64_t distance = j - i - (a->bottom_right ? a->seq_k - a->seq_q : 0);
  *slope = 1;
  if ((a->window_left >= 0 && distance < -a->window_left) ||
      (a->window_right >= 0 && distance > a->window_right) ||
      (mask->data && mask->dtype == ATTN_BOOL && !((const bool *)mask->data)[offset]) ||
      (mask->data && mask->dtype != ATTN_BOOL && ((const double *)mask->data)[offset] == -INFINITY))
    return -INFINITY;
  double s = dot(m->dtype, at(&a->query, m->b, m->h, i, 0), at(&a->key, m->b, m->kv_head, j, 0),
                 a->head_dim);
  s = round_to(m->dtype, step(m->dtype, round_to(m->dtype, s) * a->scale));
  if (a->softcap != 0) {
    const double t = round_to(m->dtype, tanh(round_to(m->dtype, s / a->softcap)));
    *slope = round_to(m->dtype, step(m->dtype, 1 - step(m->dtype, t * t)));
    s = round_to(m->dtype, step(m->dtype, t * a->softcap));
  }
  if (mask->data && mask->dtype != ATTN_BOOL)
    s = round_to(m->dtype, step(m->dtype, s + ((const double *)mask->data)[offset]));
  return s;
}

static void plain_forward_row(const struct head *m, int64_t i) {
  const struct attn_args *a = m->a;
  const enum attn_dtype dtype = m->dtype;
  double *row = m->probs + i * a->seq_k, *dropped = m->dropped + i * a->seq_k;
  double max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < a->seq_k; ++j) {
    row[j] = plain_score(m, i, j, m->slope + i * a->seq_k + j);
    max = fmax(max, row[j]);
  }
  for (int64_t j = 0; j < a->seq_k; ++j) {
    row[j] = row[j] == -INFINITY ? 0 : plain_exp(dtype, step(dtype, row[j] - max));
    sum = step(dtype, sum + row[j]);
  }
  for (int64_t j = 0; j < a->seq_k; ++j) {
    row[j] = max == -INFINITY ? 0 : round_to(dtype, step(dtype, row[j] / sum));
    dropped[j] = row[j];
    if (a->dropout_p > 0)
      dropped[j] =
          round_to(dtype, row[j] * dropout_factor(a->dropout_p, a->rng_state,
                                                  a->first_head + m->b * a->heads + m->h, i, j));
  }
  for (int64_t d = 0; d < a->head_dim_v; ++d) {
    double out = 0, size = 0;
    for (int64_t j = 0; j < a->seq_k; ++j)
      if (dropped[j] != 0) {
        const double value = *at(&a->value, m->b, m->kv_head, j, d);
        out = step(dtype, out + step(dtype, dropped[j] * value));
        size += fabs(dropped[j] * value);
      }
    *at(&a->out, m->b, m->h, i, d) = round_to(dtype, out);
    *at(&m->sizes->out, m->b, m->h, i, d) = size;
  }
  const double log_sum = dtype == ATTN_F64 ? log(sum) : logf((float)sum);
  const int64_t at_row = (m->b * a->heads + m->h) * a->seq_q + i;
  ((double *)a->logsumexp)[at_row] = step(dtype, max + log_sum);
  ((double *)m->sizes->logsumexp)[at_row] = fabs(max) + fabs(log_sum);
}

/* to += x * y, where x is not 0; size gets |size_of_x * y|. */
static void add(enum attn_dtype dtype, double *to, double x, double y, double *size,
                double size_of_x) {
  if (x != 0)
    *to = step(dtype, *to + step(dtype, x * y));
  *size += fabs(size_of_x * y);
}

static void plain_backward_row(const struct head *m, int64_t i) {
  const struct attn_args *a = m->a, *z = m->sizes;
  const enum attn_dtype dtype = m->dtype;
  const int64_t b = m->b, h = m->h, kv = m->kv_head;
  const double *probs = m->probs + i * a->seq_k, *dropped = m->dropped + i * a->seq_k;
  const double *grad_out = at(&a->grad_out, b, h, i, 0), *out = at(&a->out, b, h, i, 0);
  const double delta = dot(dtype, grad_out, out, a->head_dim_v);
  const double delta_size = size_of_dot(grad_out, out, a->head_dim_v);
  for (int64_t j = 0; j < a->seq_k; ++j) {
    const double *value = at(&a->value, b, kv, j, 0);
    if (probs[j] == 0)
      continue;
    double kept = 1;
    if (a->dropout_p > 0)
      kept = dropout_factor(a->dropout_p, a->rng_state, a->first_head + b * a->heads + h, i, j);
    double grad = round_to(dtype, dot(dtype, grad_out, value, a->head_dim_v));
    grad = round_to(dtype, step(dtype, grad * kept));
    grad = round_to(dtype, step(dtype, probs[j] * step(dtype, grad - delta)));
    const double size =
        probs[j] * (kept * size_of_dot(grad_out, value, a->head_dim_v) + delta_size);
    const double slope = m->slope[i * a->seq_k + j];
    const double slope_size = 2 - slope; /* slope is 1 - tanh^2, of terms 1 and tanh^2 */
    const double scaled =
        round_to(dtype, step(dtype, round_to(dtype, step(dtype, grad * slope)) * a->scale));

    if (a->grad_mask.data) {
      const int64_t offset = mask_offset(&a->grad_mask, b, h, i, j);
      add(dtype, (double *)a->grad_mask.data + offset, grad, 1,
          (double *)z->grad_mask.data + offset, size);
    }
    for (int64_t d = 0; d < a->head_dim; ++d) {
      add(dtype, at(&a->grad_query, b, h, i, d), scaled, *at(&a->key, b, kv, j, d),
          at(&z->grad_query, b, h, i, d), size * slope_size * a->scale);
      add(dtype, at(&a->grad_key, b, kv, j, d), scaled, *at(&a->query, b, h, i, d),
          at(&z->grad_key, b, kv, j, d), size * slope_size * a->scale);
    }
    for (int64_t d = 0; d < a->head_dim_v; ++d)
      add(dtype, at(&a->grad_value, b, kv, j, d), dropped[j], grad_out[d],
          at(&z->grad_value, b, kv, j, d), dropped[j]);
  }
}

/* All gradients set to 0 or, in the end, rounded to the dtypes that they are stored in. */
static void clear_or_round(const struct attn_args *a, enum attn_dtype dtype,
                           enum attn_dtype mask_dtype, bool round) {
  const struct attn_tensor *grads[] = {&a->grad_query, &a->grad_key, &a->grad_value};
  const int64_t dims[] = {a->head_dim, a->head_dim, a->head_dim_v};
  for (int n = 0; n < 3; ++n)
    for (int64_t b = 0; b < a->batch; ++b)
      for (int64_t h = 0; h < (n ? a->kv_heads : a->heads); ++h)
        for (int64_t s = 0; s < (n ? a->seq_k : a->seq_q); ++s)
          for (int64_t d = 0; d < dims[n]; ++d) {
            double *x = at(grads[n], b, h, s, d);
            *x = round ? round_to(dtype, *x) : 0;
          }
  const struct attn_mask *m = &a->grad_mask; /* a broadcast axis has one element, of any size */
  for (int64_t b = 0; m->data && b < (m->stride_b ? a->batch : 1); ++b)
    for (int64_t h = 0; h < (m->stride_h ? a->heads : 1); ++h)
      for (int64_t i = 0; i < (m->stride_q ? a->seq_q : 1); ++i)
        for (int64_t j = 0; j < (m->stride_k ? a->seq_k : 1); ++j) {
          double *x = (double *)m->data + mask_offset(m, b, h, i, j);
          *x = round ? round_to(mask_dtype, *x) : 0;
        }
}

void plain_flash(const struct attn_args *a, const struct attn_args *sizes, enum attn_dtype dtype,
                 enum attn_dtype mask_dtype) {
  double *memory[3];
  for (int i = 0; i < 3; ++i)
    memory[i] = malloc((size_t)(a->seq_q * a->seq_k + 1) * sizeof(double));
  clear_or_round(a, dtype, mask_dtype, false);
  clear_or_round(sizes, ATTN_F64, ATTN_F64, false);
  for (int64_t head = 0; head < a->batch * a->heads; ++head) {
    const int64_t h = head % a->heads;
    const struct head m = {
        a,         sizes,     dtype,    head / a->heads, h, h / (a->heads / a->kv_heads),
        memory[0], memory[1], memory[2]};
    for (int64_t i = 0; i < a->seq_q; ++i) {
      plain_forward_row(&m, i);
      plain_backward_row(&m, i);
    }
  }
  clear_or_round(a, dtype, mask_dtype, true);
  for (int i = 0; i < 3; ++i)
    free(memory[i]);
}
