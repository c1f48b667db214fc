/* check.h: what the C tests share: guarded tensors, random numbers, comparison, plain evaluation.
 */
#ifndef ATTN_TESTS_CHECK_H
#define ATTN_TESTS_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#include "attn.h"
#include "cpu/select.h"

/* Counting. A case that fails prints its name and parameters, once for each build. */
extern int check_passed, check_failed;
void check_result(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Random numbers, the same in every run. */
uint64_t random_bits(void);
double random_normal(void);
int64_t random_below(int64_t n);
int64_t random_of(const int64_t *choices, int count);
#define RANDOM_OF(...)                                                                             \
  random_of((const int64_t[]){__VA_ARGS__},                                                        \
            (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

/* x rounded to the nearest number of a dtype, ties to even. */
double round_to(enum attn_dtype dtype, double x);
/* The distance from 1 to the next number. */
double epsilon_of(enum attn_dtype dtype);
extern const char *const dtype_names[];

enum layout {
  CONTIGUOUS,   /* [B, H, S, D] */
  HEADS_INSIDE, /* [B, S, H, D] in memory */
  GAPS,         /* unused elements after each row, head and batch */
  STEP_2,       /* last stride 2 (masks) */
  EXPANDED,     /* batch, head and row strides 0 (inputs) */
};

/* Four-dimensional, in memory of its own between guard bands. All bytes start as 0xFF: a NaN in any
 * floating dtype. Guards, and gaps between elements, must keep those bytes. */
struct tensor {
  enum attn_dtype dtype;
  int64_t size[4], stride[4], count; /* count: elements of the memory, gaps included */
  unsigned char *data;
};

struct tensor tensor_new(enum attn_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d,
                         enum layout layout);
void tensor_free(struct tensor *t);
double tensor_get(const struct tensor *t, int64_t b, int64_t h, int64_t s, int64_t d);
/* Stores x rounded to the dtype. */
void tensor_set(struct tensor *t, int64_t b, int64_t h, int64_t s, int64_t d, double x);
bool tensor_guards_hold(const struct tensor *t);
/* A contiguous copy in fp64; a bool tensor stays bool. */
struct tensor tensor_widened(const struct tensor *t);

struct attn_tensor view_of(const struct tensor *t);
/* Stride 0 on axes of size 1. */
struct attn_mask mask_of(const struct tensor *t);

#define FOR_EACH(t)                                                                                \
  for (int64_t b = 0; b < (t)->size[0]; ++b)                                                       \
    for (int64_t h = 0; h < (t)->size[1]; ++h)                                                     \
      for (int64_t s = 0; s < (t)->size[2]; ++s)                                                   \
        for (int64_t d = 0; d < (t)->size[3]; ++d)

/* Whether the largest error of ours against truth is at most twice that of plain, plus the rounding
 * floor: two last digits in ours' dtype, and drift, of the largest of sizes (the sums of absolute
 * values that results are made of), and the smallest number. NaN and inf must be where truth has
 * them. Writes the error and what is allowed. */
bool close_enough(const struct tensor *ours, const struct tensor *plain, const struct tensor *truth,
                  const struct tensor *sizes, double drift, double *error, double *allowed);

/* plain.c: operations as a careful person writes them in a dtype: each product and sum rounded to
 * fp32 (fp64 for fp64), each stored intermediate rounded to the dtype. Operands are in fp64 and
 * hold numbers of that dtype; results are in fp64. sizes gets, for each result, the sum of the
 * absolute values of its terms. */
void plain_stage(const char *op, const struct attn_stage *stage, const struct attn_tensor *sizes,
                 enum attn_dtype dtype);
void plain_flash(const struct attn_args *args, const struct attn_args *sizes, enum attn_dtype dtype,
                 enum attn_dtype mask_dtype);

void check_philox(void);
void check_select(void);
void check_stages(int cases);
void check_flash(int cases);

#endif
