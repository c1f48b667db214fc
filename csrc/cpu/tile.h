/* tile.h: what the fused kernels do with tiles in scratch: load them, multiply them.
 *
 * Two kinds of tile
 *   rows   [n][ld]                as in memory, widened to REAL; ld a multiple of VL, then zeros
 *   panels [n / PANEL][d][PANEL]  transposed: a panel holds PANEL positions, one for each lane
 * Rows times a panel gives products [streamed position][lane]. In the forward pass queries lie on
 * the lanes and keys stream by, so maxima and sums run down a tile and never across a vector. In
 * the backward pass keys lie on the lanes and queries stream by.
 *
 * Exact zeros: a pair that attention does not see has a weight of exactly 0, and must add nothing
 * even if the row that it would multiply holds NaN or inf. Loading tells whether a tile is finite;
 * one that is not goes through a product that skips zero weights.
 */
#ifndef ATTN_CPU_TILE_H
#define ATTN_CPU_TILE_H

#include "rows.h"

/* Rows first .. first + n - 1 of one head -> to[rows][ld], zeros up to ld and up to rows.
 * Returns whether all of them are finite. */
static inline bool load_rows(REAL *to, int64_t ld, int64_t rows, const struct attn_tensor *from,
                             enum attn_dtype dtype, int64_t b, int64_t h, int64_t first, int64_t n,
                             int64_t cols) {
  vec odd = {0}; /* x - x: 0, or NaN where x is not finite */
  for (int64_t r = 0; r < rows; ++r, to += ld) {
    const int64_t filled = r < n ? cols : 0;
    if (filled)
      load_row(to, row_of(from, dtype, b, h, first + r), dtype, filled);
    if (filled < ld)
      memset(to + filled, 0, (size_t)(ld - filled) * sizeof *to);
    for (int64_t c = 0; c < ld; c += VL) {
      const vec x = vec_load(to + c);
      odd += x - x;
    }
  }
  return vec_sum(odd) == 0;
}

static inline void store_rows(const REAL *from, int64_t ld, const struct attn_tensor *to,
                              enum attn_dtype dtype, int64_t b, int64_t h, int64_t first, int64_t n,
                              int64_t cols) {
  for (int64_t r = 0; cols && r < n; ++r)
    store_row(row_of(to, dtype, b, h, first + r), from + r * ld, dtype, cols);
}

/* Rows first .. first + n - 1 -> panels [panels][cols][PANEL]; lanes past n are zeros. */
static inline void load_panels(REAL *to, int64_t panels, const struct attn_tensor *from,
                               enum attn_dtype dtype, int64_t b, int64_t h, int64_t first,
                               int64_t n, int64_t cols) {
  REAL row[ATTN_MAX_HEAD_DIM];
  for (int64_t r = 0; r < panels * PANEL; ++r) {
    REAL *lane = to + r / PANEL * cols * PANEL + r % PANEL;
    if (r < n && cols)
      load_row(row, row_of(from, dtype, b, h, first + r), dtype, cols);
    for (int64_t c = 0; c < cols; ++c)
      lane[c * PANEL] = r < n ? row[c] : 0;
  }
}

/* c [MR][nv * VL] = factor [MR] * c + a [MR][depth] * b [depth][nv * VL], c in registers on the
 * way. An element of a lies at a[row * a_row + k * a_col]. OVERWRITE ignores the old c, ADD has no
 * factor. */
enum old_contents { OVERWRITE, ADD, SCALE };

ATTN_INLINE void multiply_block(const REAL *a, int64_t a_row, int64_t a_col, const REAL *b,
                                int64_t b_row, REAL *c, int64_t c_row, int64_t depth, const int nv,
                                enum old_contents old, const REAL *factor) {
  vec sum[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < nv; ++v) {
      sum[r][v] = old == OVERWRITE ? (vec){0} : vec_load(c + r * c_row + v * VL);
      if (old == SCALE)
        sum[r][v] *= vec_splat(factor[r]);
    }
  for (int64_t k = 0; k < depth; ++k) {
    vec right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < nv; ++v)
      right[v] = vec_load(b + k * b_row + v * VL);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const vec left = vec_splat(a[r * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int v = 0; v < nv; ++v)
        sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < nv; ++v)
      vec_store(c + r * c_row + v * VL, sum[r][v]);
}

/* The same for rows, a multiple of MR. */
ATTN_INLINE void multiply_strip(const REAL *a, int64_t a_row, int64_t a_col, const REAL *b,
                                int64_t b_row, REAL *c, int64_t c_row, int64_t rows, int64_t depth,
                                const int nv, enum old_contents old, const REAL *factor) {
  for (int64_t r = 0; r < rows; r += MR)
    multiply_block(a + r * a_row, a_row, a_col, b, b_row, c + r * c_row, c_row, depth, nv, old,
                   factor + r);
}

/* The same for rows, a multiple of MR, and cols, a multiple of VL. */
ATTN_INLINE void multiply_blocks(const REAL *a, int64_t a_row, int64_t a_col, const REAL *b,
                                 int64_t b_row, REAL *c, int64_t c_row, int64_t rows, int64_t depth,
                                 int64_t cols, enum old_contents old, const REAL *factor) {
  for (int64_t left = cols / VL, nv; left > 0; left -= nv, b += nv * VL, c += nv * VL) {
    /* What is left in blocks as even as can be: 4 vectors are 2 + 2, not 3 + 1. */
    nv = tiles_of(left, tiles_of(left, NV));
    if (nv == 1)
      multiply_strip(a, a_row, a_col, b, b_row, c, c_row, rows, depth, 1, old, factor);
    else if (nv == 2)
      multiply_strip(a, a_row, a_col, b, b_row, c, c_row, rows, depth, 2, old, factor);
    else if (nv == NV)
      multiply_strip(a, a_row, a_col, b, b_row, c, c_row, rows, depth, NV, old, factor);
    else
      multiply_strip(a, a_row, a_col, b, b_row, c, c_row, rows, depth, NV - 1, old, factor);
  }
}

/* c [rows][c_row] = factor [rows] * c + a * b, where what has a weight of 0 in a adds nothing. */
static inline void multiply_nonzero(const REAL *a, int64_t a_row, int64_t a_col, const REAL *b,
                                    int64_t b_row, REAL *c, int64_t c_row, int64_t rows,
                                    int64_t depth, int64_t cols, const REAL *factor) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t col = 0; factor && col < cols; ++col)
      c[r * c_row + col] *= factor[r];
    for (int64_t k = 0; k < depth; ++k) {
      const REAL weight = a[r * a_row + k * a_col];
      for (int64_t col = 0; weight != 0 && col < cols; ++col)
        c[r * c_row + col] += weight * b[k * b_row + col];
    }
  }
}

/* products [n][PANEL] = rows [n][ld] * panel [depth][PANEL]; n is rounded up to MR. */
static void multiply_panel(const REAL *rows, int64_t ld, const REAL *panel, REAL *products,
                           int64_t n, int64_t depth) {
  multiply_strip(rows, ld, 1, panel, PANEL, products, PANEL, round_up(n, MR), depth, NV, OVERWRITE,
                 NULL);
}

#endif
