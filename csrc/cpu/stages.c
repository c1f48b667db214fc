/* stages.c: the stages of unfused attention on the CPU, each over rows of scores [B, H, R, C].
 *
 * Formulas
 *   scale             out = in * value
 *   masked_fill       out = value where mask is true or, if is_causal, where column > row; else in
 *   softmax           out_j = exp(in_j - max) / sum_k exp(in_k - max); a row of -inf gives 0
 *   softmax_backward  out_j = probs_j * (in_j - sum_k probs_k * in_k)
 *   dropout           out = in / (1 - p) where the pattern of dropout.h keeps it, else 0
 * Architecture: any, through vec.h; built for each ISA and for REAL float and double.
 * Grid: a call does rows [begin, end) of B * H * R.
 * Roles: none.
 * Tiles: a row is walked in chunks of CHUNK numbers, widened to REAL; softmax walks it three times
 *   (maximum, sum, result), which finds all but the first time in cache.
 * Scratch, on the stack: two chunks.
 * Barriers: none.
 * Numerics: REAL throughout, one rounding at the end. A chunk is summed by itself, so that few
 *   small terms meet a large sum. NaN and +inf make a row NaN, as in aten.
 * The caller has checked: sizes, strides, dtypes. in and out may be the same memory.
 * Bound by: memory, but for dropout, which its random numbers bound.
 * Sources: none.
 */
#include "dropout.h"
#include "rows.h"

enum { CHUNK = 1024 };

/* One row of a stage: which one, and where its tensors hold it. */
struct row {
  int64_t b, h, r;
  const char *in, *probs;
  char *out;
};

static struct row nth_row(const struct attn_stage *s, int64_t n) {
  const int64_t head = n / s->rows;
  struct row row = {.b = head / s->heads, .h = head % s->heads, .r = n % s->rows};
  row.in = row_of(&s->in, s->dtype, row.b, row.h, row.r);
  row.out = row_of(&s->out, s->dtype, row.b, row.h, row.r);
  row.probs = row_of(&s->probs, s->dtype, row.b, row.h, row.r);
  return row;
}

/* Columns col .. of a row as REAL, filled up to a whole vector; returns how many columns it took.
 */
static int64_t load_chunk(REAL *to, const struct attn_stage *s, const char *row, int64_t col,
                          REAL fill) {
  const int64_t n = at_most(CHUNK, s->cols - col);
  load_row(to, row + col * dtype_size(s->dtype), s->dtype, n);
  for (int64_t i = n; i < round_up(n, VL); ++i)
    to[i] = fill;
  return n;
}

static void store_chunk(const REAL *from, const struct attn_stage *s, char *row, int64_t col,
                        int64_t n) {
  store_row(row + col * dtype_size(s->dtype), from, s->dtype, n);
}

void ATTN_NAME(scale)(const struct attn_stage *s, int64_t begin, int64_t end) {
  _Alignas(64) REAL x[CHUNK];
  for (int64_t row = begin; row < end; ++row) {
    const struct row at = nth_row(s, row);
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(x, s, at.in, col, 0);
      for (int64_t i = 0; i < n; ++i)
        x[i] *= (REAL)s->value;
      store_chunk(x, s, at.out, col, n);
    }
  }
}

/* Writes the fill where mask (elements step apart; NULL: everywhere) is true. */
#define DEFINE_FILL(type)                                                                          \
  static void fill_##type(type *out, type fill, const uint8_t *mask, int64_t step, int64_t n) {    \
    if (!mask) {                                                                                   \
      for (int64_t i = 0; i < n; ++i)                                                              \
        out[i] = fill;                                                                             \
    } else if (step == 1) { /* apart, so that it becomes vectors */                                \
      for (int64_t i = 0; i < n; ++i)                                                              \
        out[i] = mask[i] ? fill : out[i];                                                          \
    } else {                                                                                       \
      for (int64_t i = 0; i < n; ++i)                                                              \
        out[i] = mask[i * step] ? fill : out[i];                                                   \
    }                                                                                              \
  }
DEFINE_FILL(REAL)
#ifndef ATTN_DOUBLE
DEFINE_FILL(uint16_t)
#endif

static void fill(char *out, const struct attn_stage *s, int64_t col, const uint8_t *mask,
                 int64_t step, int64_t n) {
  const REAL value = (REAL)s->value;
  out += col * dtype_size(s->dtype);
#ifndef ATTN_DOUBLE
  if (s->dtype != ATTN_F32) {
    uint16_t rounded[sizeof(REAL) / sizeof(uint16_t)];
    store_row(rounded, &value, s->dtype, 1);
    fill_uint16_t((uint16_t *)out, rounded[0], mask, step, n);
    return;
  }
#endif
  fill_REAL((REAL *)out, value, mask, step, n);
}

void ATTN_NAME(masked_fill)(const struct attn_stage *s, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const struct row at = nth_row(s, row);
    const struct attn_mask *m = &s->mask;
    const int64_t first_dead = s->is_causal ? at_most(at.r + 1, s->cols) : s->cols;
    if (at.out != at.in)
      memcpy(at.out, at.in, (size_t)(s->cols * dtype_size(s->dtype)));
    if (m->data) {
      const uint8_t *mask =
          (const uint8_t *)m->data + at.b * m->stride_b + at.h * m->stride_h + at.r * m->stride_q;
      fill(at.out, s, 0, mask, m->stride_k, first_dead);
    }
    fill(at.out, s, first_dead, NULL, 0, s->cols - first_dead);
  }
}

static REAL row_max(const struct attn_stage *s, const char *row) {
  _Alignas(64) REAL x[CHUNK];
  vec max = vec_splat(-(REAL)INFINITY);
  for (int64_t col = 0; col < s->cols; col += CHUNK) {
    const int64_t n = load_chunk(x, s, row, col, -(REAL)INFINITY);
    for (int64_t i = 0; i < n; i += VL)
      max = vec_max(vec_load(x + i), max);
  }
  REAL most = max[0];
  for (int i = 1; i < VL; ++i)
    most = max[i] > most ? max[i] : most;
  return most;
}

void ATTN_NAME(softmax)(const struct attn_stage *s, int64_t begin, int64_t end) {
  _Alignas(64) REAL x[CHUNK];
  for (int64_t row = begin; row < end; ++row) {
    const struct row at = nth_row(s, row);
    const REAL max = row_max(s, at.in);
    const REAL base = max == -(REAL)INFINITY ? 0 : max; /* -inf - -inf would be NaN */
    vec total = {0};
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(x, s, at.in, col, -(REAL)INFINITY);
      vec part = {0};
      for (int64_t i = 0; i < n; i += VL)
        part += vec_exp(vec_load(x + i) - base);
      total += part;
    }
    const REAL sum = vec_sum(total), factor = sum == 0 ? 0 : 1 / sum;
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(x, s, at.in, col, 0);
      for (int64_t i = 0; i < n; i += VL)
        vec_store(x + i, vec_exp(vec_load(x + i) - base) * factor);
      store_chunk(x, s, at.out, col, n);
    }
  }
}

void ATTN_NAME(softmax_backward)(const struct attn_stage *s, int64_t begin, int64_t end) {
  _Alignas(64) REAL grad[CHUNK], probs[CHUNK];
  for (int64_t row = begin; row < end; ++row) {
    const struct row at = nth_row(s, row);
    vec total = {0};
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(grad, s, at.in, col, 0);
      load_chunk(probs, s, at.probs, col, 0);
      vec part = {0};
      for (int64_t i = 0; i < n; i += VL)
        part += vec_load(grad + i) * vec_load(probs + i);
      total += part;
    }
    const REAL sum = vec_sum(total);
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(grad, s, at.in, col, 0);
      load_chunk(probs, s, at.probs, col, 0);
      for (int64_t i = 0; i < n; i += VL)
        vec_store(grad + i, vec_load(probs + i) * (vec_load(grad + i) - sum));
      store_chunk(grad, s, at.out, col, n);
    }
  }
}

/* One draw for each group of a chunk: word [4][group]. Apart, so that it becomes vectors. */
enum { GROUPS = CHUNK / 8 };

static void draw_groups(uint32_t word[restrict 4][GROUPS], const int64_t *rng_state, uint32_t group,
                        uint32_t row, uint32_t head, int64_t n) {
  const int64_t state[2] = {rng_state[0], rng_state[1]};
  for (int64_t g = 0; g < n; ++g) {
    const struct attn_philox draw = attn_philox(state, group + (uint32_t)g, row, head);
    for (int w = 0; w < 4; ++w)
      word[w][g] = draw.word[w];
  }
}

/* Columns 8w + 2t and 8w + 2t + 1 of a block of 32 take the two halves of word w of draw t. */
static void drop_block(REAL x[32], const uint32_t word[4][GROUPS], int64_t group,
                       uint32_t threshold, REAL kept) {
  for (int w = 0; w < 4; ++w)
    for (int t = 0; t < 4; ++t) {
      REAL *pair = x + w * 8 + t * 2;
      const uint32_t numbers = word[w][group + t];
      pair[0] = (numbers & 0xFFFF) >= threshold ? pair[0] * kept : 0;
      pair[1] = numbers >> 16 >= threshold ? pair[1] * kept : 0;
    }
}

void ATTN_NAME(dropout)(const struct attn_stage *s, int64_t begin, int64_t end) {
  _Alignas(64) REAL x[CHUNK] = {0};
  uint32_t word[4][GROUPS];
  const uint32_t threshold = attn_dropout_threshold(s->value);
  const REAL kept = (REAL)attn_dropout_scale(s->value);
  for (int64_t row = begin; row < end; ++row) {
    const struct row at = nth_row(s, row);
    const uint32_t head = (uint32_t)(at.b * s->heads + at.h);
    for (int64_t col = 0; col < s->cols; col += CHUNK) {
      const int64_t n = load_chunk(x, s, at.in, col, 0), blocks = tiles_of(n, 32);
      draw_groups(word, s->rng_state, attn_dropout_group(col), (uint32_t)at.r, head, blocks * 4);
      for (int64_t block = 0; block < blocks; ++block)
        drop_block(x + block * 32, word, block * 4, threshold, kept);
      store_chunk(x, s, at.out, col, n);
    }
  }
}
