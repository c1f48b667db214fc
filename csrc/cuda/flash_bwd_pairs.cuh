/* flash_bwd_pairs.cuh: what flash_bwd_sm80 does element by element to its fragments of S^T and
 * dP^T.
 *
 * Both lie in a lane as s[m][n][e]: key 16m + 8 (e / 2) of the lane's first, query 8n + e % 2 of
 * its first. P and the slope of the soft cap travel from the warp of S to that of dP as packed
 * pairs, one uint4 a lane and [16 keys, 16 queries], which is the A fragment that dV += P^T . dO
 * takes.
 */
#ifndef ATTN_FLASH_BWD_PAIRS_CUH
#define ATTN_FLASH_BWD_PAIRS_CUH

#include "flash_bwd_tile.cuh"

template <int KIND> using pairs = float[tile<KIND>::M][tile<KIND>::SUB / 8][4];
template <int KIND> using packed = uint32_t[tile<KIND>::M][tile<KIND>::SUB / 16][4];

/* The pair of a lane: its first query and key. */
struct corner {
  int h, query, key;
};

/* Scores that the band or the end of the keys hides become -inf. */
template <int KIND>
static __device__ __forceinline__ void hide(pairs<KIND> &s, const struct place *at,
                                            struct corner at_0) {
  const int ahead = at_0.key - at_0.query, keys = at->seq_k - at_0.key;
#pragma unroll
  for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
    for (int n = 0; n < tile<KIND>::SUB / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 16 * m + e / 2 * 8, further = key - 8 * n - e % 2;
        if (ahead + further < at->band.low || ahead + further > at->band.high || key >= keys)
          s[m][n][e] = MINUS_INFINITY;
      }
}

/* Raw products to scores in log2 units by soft cap and mask; slope: the soft cap's derivative. */
template <int KIND>
static __device__ __forceinline__ void finish(pairs<KIND> &s, packed<KIND> &slope,
                                              const struct plan *p, const struct place *at,
                                              struct corner at_0) {
  const struct attn_score *score = &p->score;
  const struct attn_mask *mask = &p->args.mask;
#pragma unroll
  for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
    for (int n = 0; n < tile<KIND>::SUB / 8; ++n) {
      float tilt[4] = {1, 1, 1, 1};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float *x = &s[m][n][e];
        const int query = at_0.query + 8 * n + e % 2, key = at_0.key + 16 * m + e / 2 * 8;
        if (score->softcap != 0) {
          const float y = soft_capped(score, *x * score->scale) * score->softcap_inverse;
          tilt[e] = 1 - y * y;
        }
        if (mask->data == NULL)
          *x = score_log2(score, *x);
        else if (query < at->seq_q && key < at->seq_k)
          *x = score_log2_masked(score, *x, mask->dtype,
                                 mask_at(mask, mask_row(mask, at->b, at_0.h, query), key));
      }
      slope[m][n / 2][n % 2 * 2] = PACK(tilt[0], tilt[1]);
      slope[m][n / 2][n % 2 * 2 + 1] = PACK(tilt[2], tilt[3]);
    }
}

/* Probabilities that dropout drops become negative. The lanes of keys 8i + 2j and 8i + 2j + 1 need
 * the same draws for the lane's two queries: each draws for one query and they swap. */
template <int KIND>
static __device__ __forceinline__ void drop(pairs<KIND> &s, const struct plan *p,
                                            const struct place *at, struct corner at_0) {
  const int odd = at_0.key & 1;
  const uint32_t head = (uint32_t)(at->b * p->args.heads + at_0.h);
#pragma unroll
  for (int n = 0; n < tile<KIND>::SUB / 8; ++n) {
    const struct attn_philox own = attn_philox(p->args.rng_state, attn_dropout_group(at_0.key),
                                               at_0.query + 8 * n + odd, head);
    uint32_t word[2][4]; /* [query][8 keys of 32] */
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_xor_sync(~0u, own.word[i], 4);
      word[0][i] = (odd ? other : own.word[i]) >> 16 * odd;
      word[1][i] = (odd ? own.word[i] : other) >> 16 * odd;
    }
#pragma unroll
    for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool upper = tile<KIND>::M == 1 && (at_0.key & 16);
        const uint32_t *words = word[e % 2];
        const uint32_t number = upper ? words[2 + e / 2] : words[2 * m + e / 2];
        if ((number & 0xffff) < p->score.keep_threshold)
          s[m][n][e] = -s[m][n][e];
      }
  }
}

/* A pair with its negative halves made zero. */
static __device__ __forceinline__ uint32_t kept_pair(uint32_t pair) {
  const uint32_t signs = pair >> 15 & 0x00010001;
  return pair & ~(signs * 0xffff);
}

/* P = 2^(S - log2(e) logsumexp), packed. lse: shared address of the lane's first query's. */
template <int KIND>
static __device__ __forceinline__ void exponentiate(pairs<KIND> &s, uint32_t lse, float factor) {
#pragma unroll
  for (int n = 0; n < tile<KIND>::SUB / 8; ++n) {
    const float2 sum = ld_shared_float2(lse + 32 * n);
#pragma unroll
    for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = s[m][n][e] * factor - (e % 2 ? sum.y : sum.x);
        if (KIND != PLAIN)
          x = x > 0 ? 0 : x; /* rounding of scores near LOWEST_SCORE must not become infinite */
        s[m][n][e] = exp2_approx(x);
      }
  }
}

template <int KIND>
static __device__ __forceinline__ void pack(packed<KIND> &a, const pairs<KIND> &s) {
#pragma unroll
  for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
    for (int n = 0; n < tile<KIND>::SUB / 8; ++n) {
      a[m][n / 2][n % 2 * 2] = PACK(s[m][n][0], s[m][n][1]);
      a[m][n / 2][n % 2 * 2 + 1] = PACK(s[m][n][2], s[m][n][3]);
    }
}

/* Packed pairs to and from the lane's place in shared memory. */
template <int KIND> static __device__ __forceinline__ void put(uint32_t to, const packed<KIND> &a) {
  constexpr int K = tile<KIND>::SUB / 16;
#pragma unroll
  for (int i = 0; i < tile<KIND>::M * K; ++i)
    st_shared_16(to + 512 * i, make_uint4(a[i / K][i % K][0], a[i / K][i % K][1],
                                          a[i / K][i % K][2], a[i / K][i % K][3]));
}

template <int KIND> static __device__ __forceinline__ void get(packed<KIND> &a, uint32_t from) {
  constexpr int K = tile<KIND>::SUB / 16;
#pragma unroll
  for (int i = 0; i < tile<KIND>::M * K; ++i) {
    const uint4 v = ld_shared_16(from + 512 * i);
    a[i / K][i % K][0] = v.x, a[i / K][i % K][1] = v.y;
    a[i / K][i % K][2] = v.z, a[i / K][i % K][3] = v.w;
  }
}

/* Adds dS of one pair to the mask's gradient. */
static __device__ __forceinline__ void add_dmask(const struct plan *p, const struct place *at,
                                                 int h, int query, int key, float ds) {
  const struct attn_mask *to = &p->dmask;
  if (query >= at->seq_q || key >= at->seq_k)
    return;
  const int64_t offset =
      at->b * to->stride_b + h * to->stride_h + query * to->stride_q + key * to->stride_k;
  if (p->dmask_shared)
    atomicAdd((float *)to->data + offset, ds);
  else
    store_as(to->dtype, to->data, offset, ds);
}

/* dS = P * (keep dP - delta), in place of dP; delta: shared address of the lane's first query's. */
template <int KIND>
static __device__ __forceinline__ void
differentiate(pairs<KIND> &dp, const packed<KIND> &prob, uint32_t delta, uint32_t slopes,
              const struct plan *p, const struct place *at, struct corner at_0) {
#pragma unroll
  for (int n = 0; n < tile<KIND>::SUB / 8; ++n) {
    const float2 mean = ld_shared_float2(delta + 32 * n);
#pragma unroll
    for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t pair = prob[m][n / 2][n % 2 * 2 + e / 2];
        const float x = UNPACK((uint16_t)(e % 2 ? pair >> 16 : pair));
        float *ds = &dp[m][n][e];
        if (KIND == PLAIN) {
          *ds = x * (*ds - (e % 2 ? mean.y : mean.x));
          continue;
        }
        const bool keep = __float_as_int(x) >= 0;
        *ds = fabsf(x) * ((keep ? *ds * p->score.keep_scale : 0) - (e % 2 ? mean.y : mean.x));
        if (p->dmask.data != NULL)
          add_dmask(p, at, at_0.h, at_0.query + 8 * n + e % 2, at_0.key + 16 * m + e / 2 * 8, *ds);
      }
  }
  if (KIND != PLAIN && p->score.softcap != 0) {
    packed<KIND> slope;
    get<KIND>(slope, slopes);
#pragma unroll
    for (int m = 0; m < tile<KIND>::M; ++m)
#pragma unroll
      for (int n = 0; n < tile<KIND>::SUB / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t pair = slope[m][n / 2][n % 2 * 2 + e / 2];
          dp[m][n][e] *= UNPACK((uint16_t)(e % 2 ? pair >> 16 : pair));
        }
  }
}

#endif
