/* stages_softmax.cuh: safe softmax over the last axis of [B, H, R, C], and its backward.
 *
 * Formulas
 *   softmax           out_j = exp(in_j - max) / sum_k exp(in_k - max); a row of -inf gives 0
 *   softmax_backward  out_j = probs_j * (in_j - sum_k probs_k * in_k), in the gradient of probs
 * Architecture: any from sm_80 on; nothing here needs more.
 * Grid: struct deal in stages.cuh; threadIdx.y is a row of the block's, rows ascending.
 * Warps: no roles. Up to 32 lanes a row lies inside a warp and needs no barrier.
 * Tiles: PACKS packs a thread, so 512 lanes hold a row of 32 KiB in registers: it is read once.
 *   A longer row takes the _long kernels, which read it twice. The second reading finds it in L2,
 *   where the rows in work fit together; shared memory would hold less.
 * Shared memory: partial [16], what each warp found.
 * Barriers: all of the block's threads, once after partial is written, once before it is reused.
 * Numerics: fp32 for fp16 and bf16, else the dtype's own. A warp subtracts its own maximum first
 *   and is corrected by one factor after the exchange, which saves a barrier. NaN and +inf make
 *   the row NaN, as in aten.
 * The caller has checked: sizes and strides. No size is 0 (stages.c).
 * Bound by: memory.
 * Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
 */
#include "stages.cuh"

enum { MOST_LANES = 512, HELD = MOST_LANES * PACKS * PACK /* columns */ };

#define MINUS_INF ((REAL)(-INFINITY))

/* A part of a row: its maximum and sum of exp(x - max), -inf and 0 when it has no finite key. */
struct part {
  REAL max, sum;
};

/* The maximum as something to subtract: -inf - (-inf) must not become NaN. */
static __device__ REAL base_of(REAL max) {
  return max == MINUS_INF ? 0 : max;
}

static __device__ REAL warp_max(REAL x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2)
    x = fmax(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

static __device__ REAL warp_sum(REAL x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2)
    x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/* Joins the warps of each row of the block; all threads of a warp hold the same mine. */
static __device__ struct part join_warps(struct part mine) {
  __shared__ struct part partial[MOST_LANES / 32]; /* [warp of the block] */
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int first = threadIdx.y * warps;

  __syncthreads(); /* the readers of the row before are done with partial */
  if (lane == 0)
    partial[first + threadIdx.x / 32] = mine;
  __syncthreads(); /* each warp wrote its part; all warps of the row read them */

  struct part other = lane < warps ? partial[first + lane] : (struct part){MINUS_INF, 0};
  struct part whole;
  whole.max = warp_max(other.max, 32);
  whole.sum = warp_sum(other.sum * EXP(other.max, base_of(whole.max)), 32);
  return whole;
}

static __device__ REAL inverse(REAL sum) {
  return sum == 0 ? 0 : 1 / sum;
}

static __device__ __forceinline__ void soften_rows(const struct attn_stage *s, bool whole) {
  const int lanes = blockDim.x, in_warp = min(lanes, 32);
  /* All threads take part in the exchanges, so a row past the end is walked as an empty one. */
  const int64_t at = row_of_block(1) + threadIdx.y, row = min(at, s->rows - 1);
  const int64_t cols = at < s->rows ? s->cols : 0;

  FOR_EACH_HEAD(*s, b, h, 1) {
    const SCALAR *in = row_of(&s->in, b, h, row);
    SCALAR *out = row_of(&s->out, b, h, row);
    const int64_t col = (int64_t)threadIdx.x * PACK - (whole ? 0 : shift_of(out));
    struct pack raw[PACKS];
#pragma unroll
    for (int u = 0; u < PACKS; ++u)
      raw[u] = load_pack(in, col + u * lanes * PACK, cols, whole, scalar_of(MINUS_INF));

    REAL x[PACKS][PACK];
    REAL max = MINUS_INF, sum = 0;
#pragma unroll
    for (int i = 0; i < PACKS * PACK; ++i) {
      x[i / PACK][i % PACK] = TO_REAL(raw[i / PACK].at[i % PACK]);
      max = fmax(max, x[i / PACK][i % PACK]);
    }
    max = warp_max(max, in_warp);
    const REAL base = base_of(max);
#pragma unroll
    for (int i = 0; i < PACKS * PACK; ++i) {
      x[i / PACK][i % PACK] = EXP(x[i / PACK][i % PACK], base);
      sum += x[i / PACK][i % PACK];
    }
    sum = warp_sum(sum, in_warp);

    REAL factor = inverse(sum);
    if (lanes > 32) {
      struct part all = join_warps((struct part){max, sum});
      factor = EXP(max, base_of(all.max)) * inverse(all.sum);
    }
#pragma unroll
    for (int u = 0; u < PACKS; ++u) {
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        x[u][e] *= factor;
      store_pack(out, col + u * lanes * PACK, cols, whole, pack_of(x[u]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(MOST_LANES, 2)
    NAME(softmax, _kernel)(const __grid_constant__ struct attn_stage s,
                           const __grid_constant__ struct deal deal) {
  if (deal.whole)
    soften_rows(&s, true);
  else
    soften_rows(&s, false);
}

extern "C" __global__ void __launch_bounds__(MOST_LANES)
    NAME(softmax, _long_kernel)(const __grid_constant__ struct attn_stage s,
                                const __grid_constant__ struct deal deal) {
  const int64_t row = row_of_block(1);
  FOR_EACH_HEAD(s, b, h, 1) {
    const SCALAR *in = row_of(&s.in, b, h, row);
    SCALAR *out = row_of(&s.out, b, h, row);
    const int64_t start = (int64_t)threadIdx.x * PACK - shift_of(out);

    struct part mine = {MINUS_INF, 0};
    for (int64_t col = start; col < s.cols; col += HELD) {
      struct pack raw[PACKS];
      REAL max = mine.max, sum = 0;
#pragma unroll
      for (int u = 0; u < PACKS; ++u)
        raw[u] =
            load_pack(in, col + u * MOST_LANES * PACK, s.cols, deal.whole, scalar_of(MINUS_INF));
#pragma unroll
      for (int i = 0; i < PACKS * PACK; ++i)
        max = fmax(max, TO_REAL(raw[i / PACK].at[i % PACK]));
#pragma unroll
      for (int i = 0; i < PACKS * PACK; ++i)
        sum += EXP(TO_REAL(raw[i / PACK].at[i % PACK]), base_of(max));
      mine.sum = mine.sum * EXP(mine.max, base_of(max)) + sum;
      mine.max = max;
    }
    const REAL max = warp_max(mine.max, 32);
    const REAL sum = warp_sum(mine.sum * EXP(mine.max, base_of(max)), 32);
    const struct part all = join_warps((struct part){max, sum});
    const REAL base = base_of(all.max), factor = inverse(all.sum);

    for (int64_t col = start; col < s.cols; col += HELD) {
      struct pack raw[PACKS];
#pragma unroll
      for (int u = 0; u < PACKS; ++u)
        raw[u] = load_pack(in, col + u * MOST_LANES * PACK, s.cols, deal.whole, scalar_of(0));
#pragma unroll
      for (int u = 0; u < PACKS; ++u) {
        REAL x[PACK];
#pragma unroll
        for (int e = 0; e < PACK; ++e)
          x[e] = EXP(TO_REAL(raw[u].at[e]), base) * factor;
        store_pack(out, col + u * MOST_LANES * PACK, s.cols, deal.whole, pack_of(x));
      }
    }
  }
}

/* Sums over the lanes of each row of the block. */
static __device__ __forceinline__ REAL row_sum(REAL mine, int lanes) {
  mine = warp_sum(mine, min(lanes, 32));
  return lanes > 32 ? join_warps((struct part){0, mine}).sum : mine;
}

/* in and out may be one row: a thread writes only what it alone has read. */
static __device__ __forceinline__ void differentiate_rows(const struct attn_stage *s, bool whole) {
  const int lanes = blockDim.x;
  const int64_t at = row_of_block(1) + threadIdx.y, row = min(at, s->rows - 1);
  const int64_t cols = at < s->rows ? s->cols : 0;

  FOR_EACH_HEAD(*s, b, h, 1) {
    const SCALAR *grad = row_of(&s->in, b, h, row), *probs = row_of(&s->probs, b, h, row);
    SCALAR *out = row_of(&s->out, b, h, row);
    const int64_t col = (int64_t)threadIdx.x * PACK - (whole ? 0 : shift_of(out));
    struct pack p[PACKS], g[PACKS];
    REAL dot = 0;
#pragma unroll
    for (int u = 0; u < PACKS; ++u) {
      p[u] = load_pack(probs, col + u * lanes * PACK, cols, whole, scalar_of(0));
      g[u] = load_pack(grad, col + u * lanes * PACK, cols, whole, scalar_of(0));
    }
#pragma unroll
    for (int i = 0; i < PACKS * PACK; ++i)
      dot += TO_REAL(p[i / PACK].at[i % PACK]) * TO_REAL(g[i / PACK].at[i % PACK]);
    dot = row_sum(dot, lanes);

#pragma unroll
    for (int u = 0; u < PACKS; ++u) {
      REAL x[PACK];
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        x[e] = TO_REAL(p[u].at[e]) * (TO_REAL(g[u].at[e]) - dot);
      store_pack(out, col + u * lanes * PACK, cols, whole, pack_of(x));
    }
  }
}

extern "C" __global__ void __launch_bounds__(MOST_LANES, 2)
    NAME(softmax_backward, _kernel)(const __grid_constant__ struct attn_stage s,
                                    const __grid_constant__ struct deal deal) {
  if (deal.whole)
    differentiate_rows(&s, true);
  else
    differentiate_rows(&s, false);
}

extern "C" __global__ void __launch_bounds__(MOST_LANES)
    NAME(softmax_backward, _long_kernel)(const __grid_constant__ struct attn_stage s,
                                         const __grid_constant__ struct deal deal) {
  const int64_t row = row_of_block(1);
  FOR_EACH_HEAD(s, b, h, 1) {
    const SCALAR *grad = row_of(&s.in, b, h, row), *probs = row_of(&s.probs, b, h, row);
    SCALAR *out = row_of(&s.out, b, h, row);
    const int64_t start = (int64_t)threadIdx.x * PACK - shift_of(out);

    REAL dot = 0;
#pragma unroll PACKS
    for (int64_t col = start; col < s.cols; col += MOST_LANES * PACK) {
      struct pack p = load_pack(probs, col, s.cols, deal.whole, scalar_of(0));
      struct pack g = load_pack(grad, col, s.cols, deal.whole, scalar_of(0));
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        dot += TO_REAL(p.at[e]) * TO_REAL(g.at[e]);
    }
    dot = row_sum(dot, MOST_LANES);

#pragma unroll PACKS
    for (int64_t col = start; col < s.cols; col += MOST_LANES * PACK) {
      struct pack p = load_pack(probs, col, s.cols, deal.whole, scalar_of(0));
      struct pack g = load_pack(grad, col, s.cols, deal.whole, scalar_of(0));
      REAL x[PACK];
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        x[e] = TO_REAL(p.at[e]) * (TO_REAL(g.at[e]) - dot);
      store_pack(out, col, s.cols, deal.whole, pack_of(x));
    }
  }
}

/* Rows of up to 32 lanes share blocks; where warps must meet, a row has a block for itself. */
static int launch_rows(const void *held, const void *longer, const struct attn_stage *s,
                       bool at_boundary, void *stream) {
  struct deal deal = {.pieces = 1, .whole = s->cols % PACK == 0 && at_boundary, .group = 1};
  int lanes = lanes_for(s->cols, deal.whole, MOST_LANES);
  bool fits = s->cols + (deal.whole ? 0 : PACK - 1) <= HELD;
  void *args[] = {(void *)s, &deal};
  return launch(fits ? held : longer, s, &deal, args, lanes, lanes > 32 ? lanes : BLOCK, stream);
}

extern "C" int NAME(softmax, )(const struct attn_stage *s, void *stream) {
  return launch_rows((const void *)NAME(softmax, _kernel),
                     (const void *)NAME(softmax, _long_kernel), s,
                     at_boundaries(&s->in) && at_boundaries(&s->out), stream);
}

extern "C" int NAME(softmax_backward, )(const struct attn_stage *s, void *stream) {
  return launch_rows((const void *)NAME(softmax_backward, _kernel),
                     (const void *)NAME(softmax_backward, _long_kernel), s,
                     at_boundaries(&s->in) && at_boundaries(&s->out) && at_boundaries(&s->probs),
                     stream);
}
