/* scores.h: from products query . key to scores: scale, softcap, mask, band; and dropout.
 *
 * A tile of scores is [streamed position][PANEL lanes] (tile.h). Queries lie on the lanes in the
 * forward pass, keys in the backward pass; struct scores says it in strides and bounds, so that one
 * text serves both.
 */
#ifndef ATTN_CPU_SCORES_H
#define ATTN_CPU_SCORES_H

#include "dropout.h"
#include "tile.h"

#define MINUS_INF ((REAL)(-INFINITY))

enum lanes { LANES_ARE_QUERIES, LANES_ARE_KEYS };

struct scores {
  REAL scale, softcap;
  int64_t lowest, highest; /* a pair is in the band if lane - streamed is in [lowest, highest] */
  const char *mask;        /* of this head; NULL: none */
  enum attn_dtype mask_dtype;
  int64_t mask_lane, mask_streamed; /* strides */
  const int64_t *rng_state;         /* NULL: no dropout */
  uint32_t head, threshold;
  REAL kept; /* what dropout multiplies a kept weight by */
  enum lanes lanes;
};

/* The scores of head h of batch b. */
static inline struct scores scores_of(const struct attn_args *args, enum lanes lanes, int64_t b,
                                      int64_t h) {
  const int64_t far = (int64_t)1 << 40; /* more than any length */
  const int64_t shift = args->bottom_right ? args->seq_k - args->seq_q : 0;
  /* A query i sees keys i + shift - left .. i + shift + right. */
  const int64_t left = args->window_left < 0 ? far : at_most(args->window_left, far);
  const int64_t right = args->window_right < 0 ? far : at_most(args->window_right, far);
  const struct attn_mask *mask = &args->mask;
  const bool keys = lanes == LANES_ARE_KEYS, drop = args->dropout_p > 0;
  struct scores s = {
      .scale = (REAL)args->scale,
      .softcap = (REAL)args->softcap,
      .lowest = keys ? shift - left : -shift - right,
      .highest = keys ? shift + right : -shift + left,
      .mask_dtype = mask->dtype,
      .mask_lane = keys ? mask->stride_k : mask->stride_q,
      .mask_streamed = keys ? mask->stride_q : mask->stride_k,
      .rng_state = drop ? args->rng_state : NULL,
      .head = (uint32_t)(args->first_head + b * args->heads + h),
      .threshold = attn_dropout_threshold(args->dropout_p),
      .kept = drop ? (REAL)attn_dropout_scale(args->dropout_p) : 1,
      .lanes = lanes,
  };
  if (mask->data)
    s.mask = (const char *)mask->data +
             (b * mask->stride_b + h * mask->stride_h) * dtype_size(mask->dtype);
  return s;
}

/* The streamed positions in [0, n) that some lane of lane .. lane + lanes - 1 sees in the band. */
struct range {
  int64_t begin, end;
};

static inline struct range seen_by(const struct scores *s, int64_t lane, int64_t lanes, int64_t n) {
  return (struct range){at_least(0, at_most(n, lane - s->highest)),
                        at_least(0, at_most(n, lane + lanes - s->lowest))};
}

/* n mask elements, step apart, as what is added to scores. */
static inline void load_bias(REAL *bias, const struct scores *s, int64_t offset, int64_t step,
                             int64_t n) {
  const char *from = s->mask + offset * dtype_size(s->mask_dtype);
  if (s->mask_dtype == ATTN_BOOL) {
    for (int64_t i = 0; i < n; ++i)
      bias[i] = ((const uint8_t *)from)[i * step] ? 0 : MINUS_INF;
  } else if (step == 1) {
    load_row(bias, from, s->mask_dtype, n);
  } else if (s->mask_dtype == ATTN_F32) {
    for (int64_t i = 0; i < n; ++i)
      bias[i] = ((const float *)from)[i * step];
  } else {
    for (int64_t i = 0; i < n; ++i)
      load_row(bias + i, from + i * step * dtype_size(s->mask_dtype), s->mask_dtype, 1);
  }
}

/* Adds the mask. A bias of -inf makes a score -inf whatever it was, NaN too. */
static inline void add_mask(REAL *tile, const struct scores *s, int64_t streamed, int64_t n,
                            int64_t lane, int64_t lanes) {
  REAL bias[PANEL] = {0};
  for (int64_t a = 0; a < n; ++a) {
    if (a == 0 || s->mask_streamed)
      load_bias(bias, s, (streamed + a) * s->mask_streamed + lane * s->mask_lane, s->mask_lane,
                lanes);
    for (int v = 0; v < PANEL; v += VL) {
      const vec add = vec_load(bias + v), sum = vec_load(tile + a * PANEL + v) + add;
      const vec_bits dead = (vec_bits)(add == MINUS_INF);
      vec_store(tile + a * PANEL + v, vec_where(~dead, sum) + vec_where(dead, add));
    }
  }
}

/* -inf where a pair is outside the band or its lane is past the last one. */
static inline void cut_band(REAL *tile, const struct scores *s, int64_t streamed, int64_t n,
                            int64_t lane, int64_t lanes) {
  if (lanes == PANEL && streamed + n - 1 + s->lowest <= lane &&
      streamed + s->highest >= lane + PANEL - 1)
    return;
  for (int64_t a = 0; a < n; ++a, tile += PANEL) {
    const int64_t first = streamed + a + s->lowest - lane, last = streamed + a + s->highest - lane;
    for (int64_t l = 0; l < at_most(first, PANEL); ++l)
      tile[l] = MINUS_INF;
    for (int64_t l = at_least(0, at_most(last + 1, lanes)); l < PANEL; ++l)
      tile[l] = MINUS_INF;
  }
}

/* Products tile [n][PANEL] -> scores, in place. streamed and lane are the positions of tile[0][0];
 * slope [n][PANEL], where asked for, gets the derivative of the soft cap. */
static inline void finish_scores(REAL *tile, const struct scores *s, int64_t streamed, int64_t n,
                                 int64_t lane, int64_t lanes, REAL *slope) {
  if (s->softcap == 0) {
    for (int64_t i = 0; i < n * PANEL; i += VL)
      vec_store(tile + i, vec_load(tile + i) * s->scale);
  } else {
    const REAL inner = s->scale / s->softcap;
    for (int64_t i = 0; i < n * PANEL; i += VL) {
      const vec t = vec_tanh(vec_load(tile + i) * inner);
      vec_store(tile + i, t * s->softcap);
      if (slope)
        vec_store(slope + i, (1 - t) * (1 + t));
    }
  }
  if (s->mask)
    add_mask(tile, s, streamed, n, lane, lanes);
  cut_band(tile, s, streamed, n, lane, lanes);
}

static inline void scale_by(REAL *tile, const REAL *by, int64_t n) {
  for (int64_t i = 0; i < n * PANEL; i += VL)
    vec_store(tile + i, vec_load(tile + i) * vec_load(by + i));
}

/* keep [n][PANEL]: what dropout multiplies each weight by. Lanes and positions as above; a draw
 * serves eight columns (dropout.h), of which those outside the tile are left. */
static inline void draw_dropout(REAL *keep, const struct scores *s, int64_t streamed, int64_t n,
                                int64_t lane) {
  const bool keys = s->lanes == LANES_ARE_KEYS;
  const int64_t row = keys ? streamed : lane, rows = keys ? n : PANEL;
  const int64_t col = keys ? lane : streamed, cols = keys ? PANEL : n;
  const int64_t row_step = keys ? PANEL : 1, col_step = keys ? 1 : PANEL;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t block = col / 32 * 32; block < col + cols; block += 32)
      for (int64_t pair = 0; pair < 8; pair += 2) {
        const struct attn_philox draw = attn_philox(
            s->rng_state, attn_dropout_group(block + pair), (uint32_t)(row + r), s->head);
        for (int i = 0; i < 8; ++i) {
          const int64_t c = block + pair + i / 2 * 8 + i % 2 - col;
          if (c >= 0 && c < cols)
            keep[r * row_step + c * col_step] =
                attn_philox_u16(draw, i) >= s->threshold ? s->kept : 0;
        }
      }
}

#endif
