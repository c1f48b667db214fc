/* rows.h: rows of tensors in memory <-> rows of REAL in scratch, whatever the dtype. */
#ifndef ATTN_CPU_ROWS_H
#define ATTN_CPU_ROWS_H

#include "attn.h"
#include "vec.h"

static inline int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t at_least(int64_t a, int64_t b) {
  return a > b ? a : b;
}
static inline int64_t tiles_of(int64_t n, int64_t tile) {
  return (n + tile - 1) / tile;
}
static inline int64_t round_up(int64_t n, int64_t to) {
  return tiles_of(n, to) * to;
}

static inline int64_t dtype_size(enum attn_dtype dtype) {
  switch (dtype) {
  case ATTN_F64:
    return 8;
  case ATTN_F32:
    return 4;
  case ATTN_BOOL:
    return 1;
  default:
    return 2;
  }
}

/* Row s of head h of batch b. Not to be read where the tensor is empty. */
static inline void *row_of(const struct attn_tensor *tensor, enum attn_dtype dtype, int64_t b,
                           int64_t h, int64_t s) {
  int64_t offset = b * tensor->stride_b + h * tensor->stride_h + s * tensor->stride_s;
  return tensor->data ? (char *)tensor->data + offset * dtype_size(dtype) : NULL;
}

/* Rows are too short for memcpy to pay; the empty asm keeps the compiler from making it one. */
ATTN_INLINE void copy_row(REAL *to, const REAL *from, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    vec_store(to + i, vec_load(from + i));
    __asm__ volatile("" ::: "memory");
  }
  for (; i < n; ++i)
    to[i] = from[i];
}

static inline void load_row(REAL *to, const void *from, enum attn_dtype dtype, int64_t n) {
#ifdef ATTN_DOUBLE
  if (dtype == ATTN_F64) {
    copy_row(to, from, n);
  } else { /* an fp32 mask */
    for (int64_t i = 0; i < n; ++i)
      to[i] = ((const float *)from)[i];
  }
#else
  if (dtype == ATTN_F32) {
    copy_row(to, from, n);
  } else if (dtype == ATTN_BF16) {
    for (int64_t i = 0; i < n; ++i)
      to[i] = bf16_widen(((const uint16_t *)from)[i]);
  } else {
    f16_load(to, from, n);
  }
#endif
}

static inline void store_row(void *to, const REAL *from, enum attn_dtype dtype, int64_t n) {
#ifdef ATTN_DOUBLE
  if (dtype == ATTN_F64) {
    copy_row(to, from, n);
  } else { /* the gradient of an fp32 mask */
    for (int64_t i = 0; i < n; ++i)
      ((float *)to)[i] = (float)from[i];
  }
#else
  if (dtype == ATTN_F32) {
    copy_row(to, from, n);
  } else if (dtype == ATTN_BF16) {
    for (int64_t i = 0; i < n; ++i)
      ((uint16_t *)to)[i] = bf16_round(from[i]);
  } else {
    f16_store(to, from, n);
  }
#endif
}

#endif
