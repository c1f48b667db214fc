/* tensor.c: guarded tensors of any dtype, numbers rounded to a dtype, random numbers, comparison.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#if defined(__SANITIZE_ADDRESS__)
#  include <sanitizer/asan_interface.h>
#  define FORBID(at, bytes) __asan_poison_memory_region(at, bytes)
#  define PERMIT(at, bytes) __asan_unpoison_memory_region(at, bytes)
#elif __has_include(<valgrind/memcheck.h>)
#  include <valgrind/memcheck.h>
#  define FORBID(at, bytes) ((void)VALGRIND_MAKE_MEM_NOACCESS(at, bytes))
#  define PERMIT(at, bytes) ((void)VALGRIND_MAKE_MEM_DEFINED(at, bytes))
#else
#  define FORBID(at, bytes) ((void)(at), (void)(bytes))
#  define PERMIT(at, bytes) ((void)(at), (void)(bytes))
#endif

enum { GUARD = 4096 }; /* bytes on each side: more than a kernel's widest row */

int check_passed, check_failed;
const char *const dtype_names[] = {"f32", "f64", "f16", "bf16", "bool"};

void check_result(bool ok, const char *format, ...) {
  if (ok) {
    ++check_passed;
    return;
  }
  ++check_failed;
  va_list list;
  va_start(list, format);
  printf("FAILED ");
  vprintf(format, list);
  printf("\n");
  va_end(list);
}

/* splitmix64 */
uint64_t random_bits(void) {
  static uint64_t state = 20240229;
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

double random_normal(void) {
  double u = ((double)(random_bits() >> 11) + 1) * 0x1p-53;
  double v = (double)(random_bits() >> 11) * 0x1p-53;
  return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

int64_t random_below(int64_t n) {
  return (int64_t)(random_bits() % (uint64_t)n);
}

int64_t random_of(const int64_t *choices, int count) {
  return choices[random_below(count)];
}

/* Bits of the significand with the leading one, and the exponent of the smallest normal number. */
static const struct {
  int digits, least;
} formats[] = {{24, -126}, {53, -1022}, {11, -14}, {8, -126}};

double epsilon_of(enum attn_dtype dtype) {
  return ldexp(1, 1 - formats[dtype].digits);
}

double round_to(enum attn_dtype dtype, double x) {
  if (dtype == ATTN_F64 || x == 0 || !isfinite(x))
    return x;
  int exponent = ilogb(x);
  if (exponent < formats[dtype].least)
    exponent = formats[dtype].least;
  double unit = ldexp(1, exponent + 1 - formats[dtype].digits);
  double rounded = nearbyint(x / unit) * unit;
  int most = dtype == ATTN_F16 ? 16 : 128;
  return fabs(rounded) >= ldexp(1, most) ? copysign(INFINITY, x) : rounded;
}

static int64_t size_of(enum attn_dtype dtype) {
  return dtype == ATTN_F64 ? 8 : dtype == ATTN_F32 ? 4 : dtype == ATTN_BOOL ? 1 : 2;
}

struct tensor tensor_new(enum attn_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d,
                         enum layout layout) {
  struct tensor t = {.dtype = dtype, .size = {b, h, s, d}};
  const int gap = layout == GAPS ? 3 : 0, step = layout == STEP_2 ? 2 : 1;
  t.stride[3] = step;
  if (layout == EXPANDED) {
    t.count = d;
  } else if (layout == HEADS_INSIDE) {
    t.stride[1] = d;
    t.stride[2] = h * d;
    t.stride[0] = s * h * d;
    t.count = b * t.stride[0];
  } else {
    t.stride[2] = d * step + gap;
    t.stride[1] = s * t.stride[2] + gap;
    t.stride[0] = h * t.stride[1] + gap;
    t.count = b * t.stride[0];
  }
  const size_t bytes = (size_t)(t.count * size_of(dtype));
  unsigned char *memory = aligned_alloc(256, (bytes + 2 * GUARD + 255) / 256 * 256);
  memset(memory, 0xFF, bytes + 2 * GUARD);
  t.data = memory + GUARD;
  FORBID(memory, GUARD);
  FORBID(t.data + bytes, GUARD);
  return t;
}

void tensor_free(struct tensor *t) {
  if (!t->data)
    return;
  PERMIT(t->data - GUARD, GUARD);
  PERMIT(t->data + t->count * size_of(t->dtype), GUARD);
  free(t->data - GUARD);
  t->data = NULL;
}

static unsigned char *element(const struct tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  int64_t offset = b * t->stride[0] + h * t->stride[1] + s * t->stride[2] + d * t->stride[3];
  return t->data + offset * size_of(t->dtype);
}

double tensor_get(const struct tensor *t, int64_t b, int64_t h, int64_t s, int64_t d) {
  const unsigned char *at = element(t, b, h, s, d);
  float single;
  double number;
  uint32_t bits;
  uint16_t half;
  switch (t->dtype) {
  case ATTN_F64:
    memcpy(&number, at, sizeof number);
    return number;
  case ATTN_F32:
    memcpy(&single, at, sizeof single);
    return single;
  case ATTN_BF16:
    memcpy(&half, at, sizeof half);
    bits = (uint32_t)half << 16;
    memcpy(&single, &bits, sizeof single);
    return single;
  case ATTN_F16: {
    memcpy(&half, at, sizeof half);
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    number = exponent == 31 ? (fraction ? NAN : INFINITY)
             : exponent     ? ldexp(1024 + fraction, exponent - 25)
                            : ldexp(fraction, -24);
    return half >> 15 ? -number : number;
  }
  default:
    return *at;
  }
}

void tensor_set(struct tensor *t, int64_t b, int64_t h, int64_t s, int64_t d, double x) {
  unsigned char *at = element(t, b, h, s, d);
  const float single = (float)x;
  uint32_t bits;
  uint16_t half;
  switch (t->dtype) {
  case ATTN_F64:
    memcpy(at, &x, sizeof x);
    return;
  case ATTN_F32:
    memcpy(at, &single, sizeof single);
    return;
  case ATTN_BF16: {
    const float rounded = (float)round_to(ATTN_BF16, x);
    memcpy(&bits, &rounded, sizeof bits);
    half = isnan(x) ? 0x7FC0 : (uint16_t)(bits >> 16);
    memcpy(at, &half, sizeof half);
    return;
  }
  case ATTN_F16: {
    const double rounded = fabs(round_to(ATTN_F16, x));
    if (isnan(x))
      half = 0x7E00;
    else if (isinf(rounded))
      half = 0x7C00;
    else if (rounded < 0x1p-14)
      half = (uint16_t)(rounded * 0x1p24);
    else
      half = (uint16_t)((ilogb(rounded) + 14) * 1024 + ldexp(rounded, 10 - ilogb(rounded)));
    half |= signbit(x) ? 0x8000 : 0;
    memcpy(at, &half, sizeof half);
    return;
  }
  default:
    *at = x != 0;
  }
}

bool tensor_guards_hold(const struct tensor *t) {
  const int64_t size = size_of(t->dtype), bytes = t->count * size;
  bool hold = true;
  PERMIT(t->data - GUARD, GUARD);
  PERMIT(t->data + bytes, GUARD);
  for (int64_t i = 1; i <= GUARD; ++i)
    hold &= t->data[-i] == 0xFF && t->data[bytes + i - 1] == 0xFF;
  FORBID(t->data - GUARD, GUARD);
  FORBID(t->data + bytes, GUARD);

  unsigned char *used = calloc((size_t)bytes + 1, 1);
  FOR_EACH(t) memset(used + (element(t, b, h, s, d) - t->data), 1, (size_t)size);
  for (int64_t i = 0; i < bytes; ++i)
    hold &= used[i] || t->data[i] == 0xFF;
  free(used);
  return hold;
}

struct tensor tensor_widened(const struct tensor *t) {
  const enum attn_dtype dtype = t->dtype == ATTN_BOOL ? ATTN_BOOL : ATTN_F64;
  struct tensor wide =
      tensor_new(dtype, t->size[0], t->size[1], t->size[2], t->size[3], CONTIGUOUS);
  FOR_EACH(t) tensor_set(&wide, b, h, s, d, tensor_get(t, b, h, s, d));
  return wide;
}

struct attn_tensor view_of(const struct tensor *t) {
  return (struct attn_tensor){t->data, t->stride[0], t->stride[1], t->stride[2]};
}

struct attn_mask mask_of(const struct tensor *t) {
  int64_t stride[4];
  for (int axis = 0; axis < 4; ++axis)
    stride[axis] = t->size[axis] == 1 ? 0 : t->stride[axis];
  return (struct attn_mask){t->data, t->dtype, stride[0], stride[1], stride[2], stride[3]};
}

bool close_enough(const struct tensor *ours, const struct tensor *plain, const struct tensor *truth,
                  const struct tensor *sizes, double drift, double *error, double *allowed) {
  double plain_error = 0, largest = 0;
  bool same_kind = true;
  *error = 0;
  FOR_EACH(truth) {
    const double want = tensor_get(truth, b, h, s, d), got = tensor_get(ours, b, h, s, d);
    const double other = tensor_get(plain, b, h, s, d), size = tensor_get(sizes, b, h, s, d);
    /* A result past the dtype's range is inf there. */
    if (!isfinite(round_to(ours->dtype, want))) {
      same_kind &= isnan(want) ? isnan(got) : got == round_to(ours->dtype, want);
      continue;
    }
    same_kind &= isfinite(got) != 0;
    *error = fmax(*error, fabs(got - want));
    if (isfinite(other))
      plain_error = fmax(plain_error, fabs(other - want));
    if (isfinite(size))
      largest = fmax(largest, fabs(size));
  }
  *allowed = 2 * plain_error + (2 * epsilon_of(ours->dtype) + drift) * largest +
             ldexp(1, formats[ours->dtype].least + 1 - formats[ours->dtype].digits);
  return same_kind && *error <= *allowed;
}
