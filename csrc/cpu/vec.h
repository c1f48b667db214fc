/* vec.h: the vector unit, seen through GCC's vector types: the only file that asks for the ISA.
 *
 * A kernel file is compiled once for each ATTN_ISA with the flags of that ISA, and once for each
 * REAL, the type that it computes in:
 *   REAL float    operands in fp32, fp16 or bf16
 *   REAL double   operands in fp64 (the files *_f64.c define ATTN_DOUBLE)
 *
 *   ISA      VEC_BYTES  registers  a block of products (MR rows x NV vectors) fills
 *   base     16         16         2 x 4 + 4 + 1
 *   avx2     32         16         4 x 3 + 3 + 1
 *   avx512   64         32         8 x 3 + 3 + broadcasts from memory
 * MR divides 64 and 32; PANEL = NV * VL lanes are what one pass of scores covers.
 * fp16 and bf16 are widened once for a tile. There is no build for the dot product of AVX512_BF16:
 * on Xeons vdpbf16ps does half as many products a second as fp32 FMA, and P need not be rounded.
 *
 * Numerics of the exponential: ln 2 is split so that r = x - n ln 2 is exact to the last bit of
 * REAL, |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 P(r), P a Chebyshev fit whose error is 2^-27
 * (float, degree 4) or 2^-62 (double, degree 10) of exp(r). With the rounding of its steps the
 * result is within 1.1 ulp, and that of tanh within 2.5. Below the smallest normal number the
 * result is 0; exp(-inf) is 0.
 */
#ifndef ATTN_CPU_VEC_H
#define ATTN_CPU_VEC_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VEC_BYTES = 64, MR = 8, NV = 3 };
#elif defined(__AVX2__)
enum { VEC_BYTES = 32, MR = 4, NV = 3 };
#else
enum { VEC_BYTES = 16, MR = 2, NV = 4 };
#endif

/* attn_<op>_<isa>_<f32 or f64>, with <isa> from the command line. */
#define ATTN_JOIN_(op, isa, real) attn_##op##_##isa##_##real
#define ATTN_JOIN(op, isa, real)  ATTN_JOIN_(op, isa, real)
#ifdef ATTN_DOUBLE
typedef double REAL;
typedef uint64_t REAL_BITS;
#  define ATTN_NAME(op) ATTN_JOIN(op, ATTN_ISA, f64)
#  define REAL_LOG      log
#else
typedef float REAL;
typedef uint32_t REAL_BITS;
#  define ATTN_NAME(op) ATTN_JOIN(op, ATTN_ISA, f32)
#  define REAL_LOG      logf
#endif

enum { VL = VEC_BYTES / sizeof(REAL), PANEL = NV * VL };

typedef REAL vec __attribute__((vector_size(VEC_BYTES)));
typedef REAL_BITS vec_bits __attribute__((vector_size(VEC_BYTES)));
typedef REAL vec_unaligned
    __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));

#define ATTN_INLINE static inline __attribute__((always_inline))

ATTN_INLINE vec vec_load(const REAL *from) {
  return *(const vec_unaligned *)from;
}

ATTN_INLINE void vec_store(REAL *to, vec x) {
  *(vec_unaligned *)to = x;
}

ATTN_INLINE vec vec_splat(REAL x) {
  return x - (vec){0};
}

/* The larger; b where either is NaN. */
ATTN_INLINE vec vec_max(vec a, vec b) {
#if defined(__AVX512F__) && defined(ATTN_DOUBLE)
  return _mm512_max_pd(a, b);
#elif defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__) && defined(ATTN_DOUBLE)
  return _mm256_max_pd(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__) && defined(ATTN_DOUBLE)
  return _mm_max_pd(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  for (int i = 0; i < VL; ++i)
    b[i] = a[i] > b[i] ? a[i] : b[i];
  return b;
#endif
}

/* x where the lanes of which are all ones, +0 where they are zero. */
ATTN_INLINE vec vec_where(vec_bits which, vec x) {
  return (vec)((vec_bits)x & which);
}

ATTN_INLINE REAL vec_sum(vec x) {
  REAL sum = 0;
  for (int i = 0; i < VL; ++i)
    sum += x[i];
  return sum;
}

#ifdef ATTN_DOUBLE
#  define ROUNDER     (0x1.8p52 + 1023)
#  define MANTISSA    52
#  define LN2_HIGH    0x1.62e42fee00000p-1
#  define LN2_LOW     1.908214929270587816144266e-10
#  define EXP_NOTHING (-709.1)
#else
#  define ROUNDER     (0x1.8p23f + 127)
#  define MANTISSA    23
#  define LN2_HIGH    0x1.63p-1f
#  define LN2_LOW     -2.1219444005469058277e-4f
#  define EXP_NOTHING (-88.1f)
#endif

/* exp(x) = power (1 + result), power a power of 2. x at most the logarithm of the largest REAL;
 * EXP_NOTHING rounds to the exponent whose bit pattern is that of 0. NaN passes through.
 * Adding ROUNDER rounds x / ln 2 to an integer n and leaves the biased exponent n + 127 (1023) in
 * the lowest bits. */
ATTN_INLINE vec vec_exp_parts(vec x, vec *power) {
  x = vec_max(vec_splat(EXP_NOTHING), x);
  vec shifted = x * (REAL)1.44269504088896340736 + ROUNDER;
  vec n = shifted - ROUNDER;
  vec r = x - n * LN2_HIGH - n * LN2_LOW;
  *power = (vec)((vec_bits)shifted << MANTISSA);
#ifdef ATTN_DOUBLE
  vec p = 2.0914717341716375952e-9 * r + 2.5105259538448493419e-8;
  p = p * r + 2.7557273570102139673e-7;
  p = p * r + 2.7557255297969644392e-6;
  p = p * r + 2.4801587325605322782e-5;
  p = p * r + 1.9841269874901259234e-4;
  p = p * r + 1.3888888888883731828e-3;
  p = p * r + 8.3333333333261120526e-3;
  p = p * r + 4.1666666666666669767e-2;
  p = p * r + 1.6666666666666671008e-1;
#else
  vec p = 1.3926213466332443037e-3f * r + 8.3632029715758549465e-3f;
  p = p * r + 4.1666554437685938899e-2f;
  p = p * r + 1.6666576845993976311e-1f;
#endif
  p = p * r + (REAL)0.5;
  return p * (r * r) + r;
}

ATTN_INLINE vec vec_exp(vec x) {
  vec power, rest = vec_exp_parts(x, &power);
  return power * rest + power;
}

/* tanh(x) = e / (e + 2), e = exp(2 |x|) - 1 without cancellation; past 20 it is 1 in any REAL. */
ATTN_INLINE vec vec_tanh(vec x) {
  const vec_bits sign = (vec_bits)x & (vec_bits)vec_splat(-(REAL)0.0);
  const vec size = (vec)((vec_bits)x ^ sign);
  vec power, rest = vec_exp_parts(-vec_max(vec_splat(-20), -size) * 2, &power);
  const vec e = power * rest + (power - 1);
  return (vec)((vec_bits)(e / (e + 2)) | sign);
}

#ifndef ATTN_DOUBLE

/* fp16 and bf16 <-> fp32, rounding to nearest even. */

ATTN_INLINE float bf16_widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

ATTN_INLINE uint16_t bf16_round(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  return (uint16_t)(x == x ? rounded : 0x7FC0u);
}

#  if defined(__F16C__)

ATTN_INLINE float f16_widen(uint16_t x) {
  return _cvtsh_ss(x);
}

ATTN_INLINE uint16_t f16_round(float x) {
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

#  else

ATTN_INLINE float f16_widen(uint16_t x) {
  uint32_t bits = (uint32_t)(x & 0x7FFF) << 13;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  wide *= 0x1p112f; /* moves the exponent's bias, and makes subnormal numbers normal */
  memcpy(&bits, &wide, sizeof bits);
  if ((x & 0x7C00) == 0x7C00) /* inf and NaN keep the largest exponent */
    bits = 0x7F800000u | (uint32_t)(x & 0x3FF) << 13;
  bits |= (uint32_t)(x & 0x8000) << 16;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

ATTN_INLINE uint16_t f16_round(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000u)
    return sign | 0x7E00;
  if (bits >= 0x47800000u) /* 2^16 and more */
    return sign | 0x7C00;
  if (bits < 0x38800000u) { /* below 2^-14: the float adder rounds at the right place */
    float size;
    memcpy(&size, &bits, sizeof size);
    size += 0.5f;
    memcpy(&bits, &size, sizeof bits);
    return sign | (uint16_t)(bits - 0x3F000000u);
  }
  bits += 0xFFFu + (bits >> 13 & 1);
  return sign | (uint16_t)((bits - 0x38000000u) >> 13); /* a carry past 65504 gives inf */
}

#  endif

/* n fp16 numbers -> fp32 and back. */
ATTN_INLINE void f16_load(float *to, const uint16_t *from, int64_t n) {
  int64_t i = 0;
#  if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#  endif
  for (; i < n; ++i)
    to[i] = f16_widen(from[i]);
}

ATTN_INLINE void f16_store(uint16_t *to, const float *from, int64_t n) {
  int64_t i = 0;
#  if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#  endif
  for (; i < n; ++i)
    to[i] = f16_round(from[i]);
}

#endif
#endif
