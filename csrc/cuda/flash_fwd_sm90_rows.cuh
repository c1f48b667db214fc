/* flash_fwd_sm90_rows.cuh: what a warpgroup of flash_fwd_sm90.cuh does with its 64 rows in
 * registers, between the products.
 *
 * A warp holds 16 rows, and each thread parts of two of them, r = 0 and r = 1, 8 rows apart. Of a
 * row it holds two neighbours of every 8 columns, and the 4 threads of a quad hold the row:
 *
 *   x[4 j + 2 r + e]   row lane / 4 + 8 r, column 8 j + lane % 4 * 2 + e
 *
 * That is how a product leaves its sum, and, rounded and in pairs, how the next product wants its
 * first factor (wgmma in ptx_sm90.cuh): probabilities never leave the registers.
 */
#ifndef ATTN_FLASH_FWD_SM90_ROWS_CUH
#define ATTN_FLASH_FWD_SM90_ROWS_CUH

static __device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/* Scores of keys that this thread's two rows do not see become -inf. first: the key of s[0] of the
 * quad's first thread; row: the thread's first. */
static __device__ __forceinline__ void mask(const struct fwd_sm90 *f, float *s, int first,
                                            int row) {
  first += threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int low = keys_begin(f, row + 8 * r) - first, high = keys_end(f, row + 8 * r) - first;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e >= high || 8 * j + e < low)
          s[4 * j + 2 * r + e] = -INFINITY;
  }
}

/* Scores to probabilities 2^(scale_log2 * (score - top)), in place, and their sum. Each thread sums
 * its own columns only; the quad adds up once, at the end of the tile.
 *
 * top follows a row's maximum only when that has grown by more than SLACK powers of two in one of
 * the warp's rows. Up to there the probabilities stay below 2^SLACK, which costs neither range nor
 * precision, and what was summed so far need not be rescaled. Returns whether top moved; then sums
 * under the old top weigh alpha. */
static __device__ __forceinline__ bool softmax(float *s, float *top, float *sum, float *alpha,
                                               float scale_log2) {
  float now[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < KEYS / 8; ++j) {
      even = fmaxf(even, s[4 * j + 2 * r]);
      odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
    }
    now[r] = fmaxf(top[r], quad_max(fmaxf(even, odd)));
  }
  bool moved = __any_sync(~0u, (now[0] - top[0]) * scale_log2 > SLACK ||
                                   (now[1] - top[1]) * scale_log2 > SLACK);
  alpha[0] = alpha[1] = 1.0f;
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) { /* equal: both may be -inf, whose difference is no number */
      alpha[r] = ex2(top[r] == now[r] ? 0.0f : (top[r] - now[r]) * scale_log2);
      top[r] = now[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float shift = top[r] == -INFINITY ? 0.0f : top[r] * scale_log2; /* -inf: no key seen yet */
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
      float *x = s + 4 * j + 2 * r;
      x[0] = ex2(fmaf(x[0], scale_log2, -shift));
      x[1] = ex2(fmaf(x[1], scale_log2, -shift));
      even += x[0];
      odd += x[1];
    }
    sum[r] = sum[r] * alpha[r] + (even + odd);
  }
  return moved;
}

/* Whether each of the warp's rows has seen a key, and so has a reference. */
static __device__ __forceinline__ bool has_reference(const float *top) {
  return !__any_sync(~0u, top[0] == -INFINITY || top[1] == -INFINITY);
}

/* The same on the references as they are, without a look for the maximum: a third of the chain of
 * instructions from one product to the next. Any reference will do that keeps the probabilities in
 * the range of their dtype, and small ones are as precise as large ones; so it is enough to look at
 * the sums behind, which come back in part. Returns whether all of them are in range. */
static __device__ __forceinline__ bool softmax_on_reference(float *s, const float *top, float *part,
                                                            float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float shift = top[r] * scale_log2, even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
      float *x = s + 4 * j + 2 * r;
      x[0] = ex2(fmaf(x[0], scale_log2, -shift));
      x[1] = ex2(fmaf(x[1], scale_log2, -shift));
      even += x[0];
      odd += x[1];
    }
    part[r] = even + odd;
  }
  return !__any_sync(~0u, !(part[0] + part[1] <= LARGEST_SUM)); /* NaN is out of range */
}

/* The scores of a block once more, s = q k^T for the warp's 16 rows. A wgmma in a branch would make
 * ptxas wait for every product where the branches meet; this instruction is done when it returns.
 * q [slab][64 rows], k [slab][KEYS rows] of 64 columns, swizzled as the copy engine wrote them. */
static __device__ __forceinline__ void scores_again(float *s, const uint8_t *q, const uint8_t *k) {
  int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  int key = lane / 16 * 8 + lane % 8;
  uint32_t q_row = shared_address(q + row * 128), k_row = shared_address(k + key * 128);
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i)
    s[i] = 0.0f;
#pragma unroll 1
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    int chunk = step % 4 * 2; /* of 16 bytes, in the slab's row */
    uint32_t a[4];
    ldmatrix(a, q_row + step / 4 * Q_SLAB + ((chunk + lane / 16) ^ row % 8) * 16);
    uint32_t k_step = k_row + step / 4 * KV_SLAB + ((chunk + lane / 8 % 2) ^ key % 8) * 16;
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
      uint32_t b[4]; /* keys 16 j ... + 7, then the 8 behind them */
      ldmatrix(b, k_step + j * 16 * 128);
      mma(s + 8 * j, a, b);
      mma(s + 8 * j + 4, a, b + 2);
    }
  }
}

static __device__ __forceinline__ void rescale(float *o, const float *alpha) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; ++j) {
    o[4 * j] *= alpha[0];
    o[4 * j + 1] *= alpha[0];
    o[4 * j + 2] *= alpha[1];
    o[4 * j + 3] *= alpha[1];
  }
}

/* Probabilities to the first factor of the next product, [KEYS / 16][4]. */
static __device__ __forceinline__ void to_factor(uint32_t *p, const float *s) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i)
    p[i] = pack(s[2 * i], s[2 * i + 1]);
}

/* Transposes 4 x 4 registers of a quad: x[i] of lane q becomes x[q] of lane i. */
static __device__ __forceinline__ void quad_transpose(uint32_t *x) {
  int lane = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
    x[i] = lane & 1 ? got : x[i];
    x[i + 1] = lane & 1 ? x[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
    x[i] = lane & 2 ? got : x[i];
    x[i + 2] = lane & 2 ? x[i + 2] : got;
  }
}

/* Writes out and logsumexp; row: this thread's first, counted in the tile. The transpose gives each
 * thread 8 neighbouring columns, so that a quad writes 64 bytes of a row at a time. */
static __device__ __forceinline__ void store(const struct fwd_sm90 *f, const struct tile *tile,
                                             int row, const float *o, const float *top,
                                             const float *sum) {
  int quad = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int i = tile->row + row + 8 * r;
    bool inside = i < tile->row_end;
    float total = quad_sum(sum[r]);
    float inverse = total == 0.0f ? 0.0f : rcp(total); /* 0: the row sees no key */
    store_if(quad == 0 && inside,
             f->logsumexp + ((int64_t)tile->batch * f->heads + tile->head) * f->seq_q + i,
             total == 0.0f ? -INFINITY : (top[r] * f->scale_log2 + lg2(total)) * LN2);
    SCALAR *out = f->out + tile->batch * f->stride_b + tile->head * f->stride_h + i * f->stride_s;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j += 4) {
      uint32_t x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        x[c] = pack(o[4 * (j + c) + 2 * r] * inverse, o[4 * (j + c) + 2 * r + 1] * inverse);
      quad_transpose(x);
      store_if(inside, out + 8 * (j + quad), make_uint4(x[0], x[1], x[2], x[3]));
    }
  }
}

#endif
