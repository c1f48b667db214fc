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

enum { STREAMED = 64 }; /* most streamed positions, and most lanes, of a tile */

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

/* bias [n][PANEL] of a tile. A mask whose rows lie along the lanes is read lane by lane, which is
 * along its rows, and turned on the way. */
static inline void load_bias_tile(REAL *bias, const struct scores *s, int64_t streamed, int64_t n,
                                  int64_t lane, int64_t lanes) {
  const int64_t offset = streamed * s->mask_streamed + lane * s->mask_lane;
  if (s->mask_lane == 0 || s->mask_lane == 1 || s->mask_streamed == 0) {
    for (int64_t a = 0; a < n; ++a)
      load_bias(bias + a * PANEL, s, offset + a * s->mask_streamed, s->mask_lane, lanes);
    return;
  }
  REAL line[STREAMED];
  for (int64_t l = 0; l < lanes; ++l) {
    load_bias(line, s, offset + l * s->mask_lane, s->mask_streamed, n);
    for (int64_t a = 0; a < n; ++a)
      bias[a * PANEL + l] = line[a];
  }
}

/* Asks for a tile's mask ahead of its use. Rows of a mask lie far apart, a page and more: left to
 * itself the CPU waits for each, a quarter of the time of a forward pass with a float mask. */
static inline void prefetch_mask(const struct scores *s, int64_t streamed, int64_t n, int64_t lane,
                                 int64_t lanes) {
  if (!s->mask || s->mask_streamed != 1)
    return;
  const int64_t size = dtype_size(s->mask_dtype);
  for (int64_t l = 0; l < lanes; ++l) {
    const char *row = s->mask + (streamed + (lane + l) * s->mask_lane) * size;
    for (int64_t byte = 0; byte < n * size; byte += 64)
      __builtin_prefetch(row + byte);
  }
}

/* Adds the mask. A bias of -inf makes a score -inf whatever it was, NaN too. */
static inline void add_mask(REAL *tile, const struct scores *s, int64_t streamed, int64_t n,
                            int64_t lane, int64_t lanes) {
  _Alignas(64) REAL bias[STREAMED * PANEL];
  if (lanes < PANEL)
    memset(bias, 0, (size_t)(n * PANEL) * sizeof *bias);
  load_bias_tile(bias, s, streamed, n, lane, lanes);
  for (int64_t i = 0; i < n * PANEL; i += VL) {
    const vec add = vec_load(bias + i), sum = vec_load(tile + i) + add;
    const vec_bits dead = (vec_bits)(add == MINUS_INF);
    vec_store(tile + i, vec_where(~dead, sum) + vec_where(dead, add));
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

/* One draw for each of n rows: word [4][STREAMED]. Apart, so that it becomes vectors of rows. */
static inline void draw_rows(uint32_t word[restrict 4][STREAMED], const int64_t *rng_state,
                             uint32_t group, uint32_t row, uint32_t head, int64_t n) {
  const int64_t state[2] = {rng_state[0], rng_state[1]};
  for (int64_t r = 0; r < n; ++r) {
    const struct attn_philox draw = attn_philox(state, group, row + (uint32_t)r, head);
    for (int w = 0; w < 4; ++w)
      word[w][r] = draw.word[w];
  }
}

/* keep [n][PANEL]: what dropout multiplies each weight by. Lanes and positions as above; a draw
 * serves eight columns (dropout.h), of which those outside the tile are left. */
static inline void draw_dropout(REAL *keep, const struct scores *s, int64_t streamed, int64_t n,
                                int64_t lane) {
  const bool keys = s->lanes == LANES_ARE_KEYS;
  const int64_t row = keys ? streamed : lane, rows = keys ? n : PANEL;
  const int64_t col = keys ? lane : streamed, cols = keys ? PANEL : n;
  const int64_t row_step = keys ? PANEL : 1, col_step = keys ? 1 : PANEL;
  uint32_t word[4][STREAMED];
  for (int64_t block = col / 32 * 32; block < col + cols; block += 32)
    for (int64_t pair = 0; pair < 8; pair += 2) {
      draw_rows(word, s->rng_state, attn_dropout_group(block + pair), (uint32_t)row, s->head, rows);
      for (int i = 0; i < 8; ++i) {
        const int64_t c = block + pair + i / 2 * 8 + i % 2 - col;
        if (c < 0 || c >= cols)
          continue;
        REAL *to = keep + c * col_step;
        const uint32_t *from = word[i / 2];
        const int shift = i % 2 * 16;
        if (row_step == 1) /* apart, so that it becomes vectors */
          for (int64_t r = 0; r < rows; ++r)
            to[r] = (from[r] >> shift & 0xFFFF) >= s->threshold ? s->kept : 0;
        else
          for (int64_t r = 0; r < rows; ++r)
            to[r * PANEL] = (from[r] >> shift & 0xFFFF) >= s->threshold ? s->kept : 0;
      }
    }
}

#endif
