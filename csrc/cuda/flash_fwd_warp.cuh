/* flash_fwd_warp.cuh: what one warp of flash_fwd_sm80 does with a block of keys, all in registers.
 * Lane l holds rows l / 4 and l / 4 + 8 of each 16, and columns 2 (l % 4), + 1 of each 8. */
#ifndef ATTN_FLASH_FWD_WARP_CUH
#define ATTN_FLASH_FWD_WARP_CUH

#include "flash_fwd_tile.cuh"

template <int KIND> struct warp_state {
  float o[tile<KIND>::M_TILES][HEAD_DIM / 8][4]; /* C fragments [16 rows, 8 columns of V] */
  float max[tile<KIND>::M_TILES][2];             /* what exponents are relative to, log2 units */
  float sum[tile<KIND>::M_TILES][2];             /* this lane's part of the row's sum */
};

/* Scores of the warp's rows and keys: C fragments [16 rows, 8 keys]. */
template <int KIND> using scores = float[tile<KIND>::M_TILES][tile<KIND>::WARP_K / 8][4];

/* Probabilities in 16 bits: A fragments [16 keys][16 rows]. */
template <int KIND> using probabilities = uint32_t[tile<KIND>::WARP_K / 16][tile<KIND>::M_TILES][4];

/* Which of a block's probabilities dropout keeps: bit 4n + 2h + c is column 2t + c of 8 keys n, row
 * half h. */
template <int KIND> using kept = uint32_t[tile<KIND>::M_TILES];

/* S = Q . K^T. After each of the GROUPS groups of mma, between(group) may put other work beside
 * the tensor cores. */
template <int KIND, class Between>
static __device__ __forceinline__ void multiply_qk(scores<KIND> &s, uint32_t q_lane,
                                                   uint32_t k_lane, Between between) {
  using T = tile<KIND>;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < T::WARP_K / 8; ++n)
      s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; ++d) {
    uint32_t a[T::M_TILES][4];
#pragma unroll
    for (int m = 0; m < T::M_TILES; ++m)
      ldmatrix_x4(a[m], q_lane + q_offset(m, d));
#pragma unroll
    for (int n = 0; n < T::WARP_K / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4(b, swizzled(k_lane, 16 * n, 2 * d));
#pragma unroll
      for (int m = 0; m < T::M_TILES; ++m) {
        MMA(s[m][2 * n], a[m], b);
        MMA(s[m][2 * n + 1], a[m], b + 2);
      }
      between(d * (T::WARP_K / 16) + n);
    }
  }
}

/* Raises the row maxima where a score passes them by more than 2^8, which fp16 still holds; O and
 * the sums are only then rescaled. On most data that is once, at the first block. */
template <int KIND>
static __device__ __forceinline__ void raise_maxima(warp_state<KIND> &w, const scores<KIND> &s,
                                                    float factor) {
  using T = tile<KIND>;
  constexpr float SLACK = 8;
  float top[T::M_TILES][2];
  bool raise = false;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[m][h] = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < T::WARP_K / 8; ++n)
        top[m][h] = fmaxf(top[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      raise |= top[m][h] * factor > w.max[m][h] + SLACK;
    }
  if (!__any_sync(~0u, raise))
    return;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float old = w.max[m][h];
      w.max[m][h] = fmaxf(old, quad_max(top[m][h]) * factor);
      const float shrink = exp2_approx(old - w.max[m][h]);
      w.sum[m][h] *= shrink;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        w.o[m][n][2 * h] *= shrink;
        w.o[m][n][2 * h + 1] *= shrink;
      }
    }
}

/* s becomes the exponents of P. Its own pass, since the registers of S are those of the next block
 * once the exponents have been moved out of them. */
template <int KIND>
static __device__ __forceinline__ void make_exponents(scores<KIND> &exponents,
                                                      const scores<KIND> &s,
                                                      const warp_state<KIND> &w, float factor) {
#pragma unroll
  for (int m = 0; m < tile<KIND>::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < tile<KIND>::WARP_K / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        exponents[m][n][i] = s[m][n][i] * factor - w.max[m][i / 2];
}

/* Part part of parts of P = 2^exponents, and of the row sums. keep: see draw_dropout. */
template <int KIND>
static __device__ __forceinline__ void exponentiate(probabilities<KIND> &p, warp_state<KIND> &w,
                                                    const scores<KIND> &exponents,
                                                    const kept<KIND> &keep, int part, int parts) {
  constexpr int M_TILES = tile<KIND>::M_TILES, PAIRS = tile<KIND>::WARP_K / 4 * M_TILES;
#pragma unroll
  for (int pair = part * PAIRS / parts; pair < (part + 1) * PAIRS / parts; ++pair) {
    const int k = pair / (4 * M_TILES), m = pair / 4 % M_TILES, i = pair % 4;
    const int n = 2 * k + i / 2, h = i % 2; /* 8 keys and row half, as in scores */
    const float p0 = exp2_approx(exponents[m][n][2 * h]);
    const float p1 = exp2_approx(exponents[m][n][2 * h + 1]);
    w.sum[m][h] += p0 + p1;
    p[k][m][i] = PACK(p0, p1);
    if (KIND != PLAIN) {
      const uint32_t bits = keep[m] >> (4 * n + 2 * h);
      p[k][m][i] &= (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
    }
  }
}

/* O += P . V */
template <int KIND, class Between>
static __device__ __forceinline__ void
multiply_pv(warp_state<KIND> &w, const probabilities<KIND> &p, uint32_t v_lane, Between between) {
  using T = tile<KIND>;
#pragma unroll
  for (int k = 0; k < T::WARP_K / 16; ++k)
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, swizzled(v_lane, 16 * k, 2 * n));
#pragma unroll
      for (int m = 0; m < T::M_TILES; ++m) {
        MMA(w.o[m][2 * n], p[k][m], b);
        MMA(w.o[m][2 * n + 1], p[k][m], b + 2);
      }
      between(k * (HEAD_DIM / 16) + n);
    }
}

template <int KIND>
static __device__ __forceinline__ void draw_dropout(kept<KIND> &keep, const struct plan *p,
                                                    const struct place *at, const struct row *rows,
                                                    int key_0) {
  using T = tile<KIND>;
  constexpr int DRAW = T::WARP_K < 32 ? T::WARP_K / 8 : 4; /* groups of 8 keys that share a draw */
  const struct attn_args *a = &p->args;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m) {
    keep[m] = ~0u;
    if (a->rng_state == NULL)
      continue;
    keep[m] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const struct row row = rows[16 * m + 8 * h];
      const uint32_t head = (uint32_t)(at->b * a->heads + row.head);
#pragma unroll
      for (int n = 0; n < T::WARP_K / 8; n += DRAW) {
        const int key = key_0 + 8 * n;
        const struct attn_philox draw =
            attn_philox(a->rng_state, attn_dropout_group(key + lane % 4 * 2), row.position, head);
        const bool upper = key % 32 >= 16;
#pragma unroll
        for (int i = 0; i < DRAW; ++i) {
          const uint32_t word = DRAW == 2 && upper ? draw.word[2 + i] : draw.word[i];
          keep[m] |= (uint32_t)((word & 0xffff) >= p->score.keep_threshold)
                     << (4 * (n + i) + 2 * h);
          keep[m] |= (uint32_t)((word >> 16) >= p->score.keep_threshold)
                     << (4 * (n + i) + 2 * h + 1);
        }
      }
    }
  }
}

/* Scores of keys that a row does not see become -inf. rows, key_0: from this lane's first on. */
template <int KIND>
static __device__ __forceinline__ void mask_range(scores<KIND> &s, const struct plan *p,
                                                  const struct place *at, const struct row *rows,
                                                  int key_0) {
  const struct key_band band = key_band_of(&p->args, at->seq_q, at->seq_k);
#pragma unroll
  for (int m = 0; m < tile<KIND>::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = rows[16 * m + 8 * h].position;
      const int first = position + band.low - key_0;
      const int last = min(position + band.high, at->seq_k - 1) - key_0;
#pragma unroll
      for (int n = 0; n < tile<KIND>::WARP_K / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * n + c < first || 8 * n + c > last)
            s[m][n][2 * h + c] = MINUS_INFINITY;
    }
}

/* Raw products to scores in log2 units: scale, soft cap and mask tensor, whichever there are. */
template <int KIND>
static __device__ __forceinline__ void finish_scores(scores<KIND> &s, const struct plan *p,
                                                     const struct place *at, const struct row *rows,
                                                     int key_0) {
  using T = tile<KIND>;
  const struct attn_mask *mask = &p->args.mask;
  if (mask->data == NULL) {
#pragma unroll
    for (int i = 0; i < T::M_TILES * T::WARP_K / 2; ++i) {
      float *x = &s[i / (T::WARP_K / 2)][i / 4 % (T::WARP_K / 8)][i % 4];
      *x = score_log2(&p->score, *x);
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const struct row row = rows[16 * m + 8 * h];
      if (row.position >= at->seq_q)
        continue;
      const char *from = mask_row(mask, at->b, row.head, row.position);
#pragma unroll
      for (int n = 0; n < T::WARP_K / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = key_0 + 8 * n + c;
          float *x = &s[m][n][2 * h + c];
          if (key < at->seq_k)
            *x = score_log2_masked(&p->score, *x, mask->dtype, mask_at(mask, from, key));
        }
    }
}

#endif
