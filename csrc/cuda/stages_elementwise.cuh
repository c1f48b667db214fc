/* stages_elementwise.cuh: the stages that look at each score alone, over [B, H, R, C].
 *
 * Formulas
 *   scale        out = in * value
 *   masked_fill  out = value where the mask is true, or column > row if is_causal
 *   dropout      out = in / (1 - p) where dropout.h keeps the pair, else 0
 * Architecture: any from sm_80 on; nothing here needs more.
 * Grid: struct deal in stages.cuh. Rows ascending, which under a causal mask is heaviest first.
 * Warps: no roles. Tiles: PACKS packs a thread. Shared memory: none. Barriers: none.
 * Numerics: fp32 for fp16 and bf16, else the dtype's own; one rounding.
 * The caller has checked: sizes, strides, the mask's dtype. No size is 0 (stages.c).
 * Bound by: memory; dropout also by arithmetic, ten Philox rounds for eight columns.
 * Sources: none.
 */
#include "../dropout.h"
#include "stages.cuh"

enum { ALL = (1 << PACK) - 1 }; /* one bit for each element of a pack */

static __device__ __forceinline__ void scale_rows(const struct attn_stage *s,
                                                  const struct deal *deal, bool whole) {
  const REAL factor = (REAL)s->value;
  const int64_t row = row_of_block(deal->pieces) + threadIdx.y;
  const int lanes = blockDim.x;
  const int64_t first = (int64_t)(blockIdx.x % deal->pieces) * lanes * PACKS + threadIdx.x;
  if (row >= s->rows)
    return;

  FOR_EACH_HEAD(*s, b, h, 1) {
    const SCALAR *in = row_of(&s->in, b, h, row);
    SCALAR *out = row_of(&s->out, b, h, row);
    const int64_t col = first * PACK - (whole ? 0 : shift_of(out));
    struct pack x[PACKS];
#pragma unroll
    for (int u = 0; u < PACKS; ++u)
      x[u] = load_pack(in, col + u * lanes * PACK, s->cols, whole, scalar_of(0));
#pragma unroll
    for (int u = 0; u < PACKS; ++u) {
      REAL scaled[PACK];
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        scaled[e] = TO_REAL(x[u].at[e]) * factor;
      store_pack(out, col + u * lanes * PACK, s->cols, whole, pack_of(scaled));
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    NAME(scale, _kernel)(const __grid_constant__ struct attn_stage s,
                         const __grid_constant__ struct deal deal) {
  if (deal.whole)
    scale_rows(&s, &deal, true);
  else
    scale_rows(&s, &deal, false);
}

/* Axes that follow each other without a gap in both tensors become one, so that a contiguous
 * tensor is a single row: then an odd C costs nothing. */
static void flatten(struct attn_stage *s) {
  if (s->rows == 1 || (s->in.stride_s == s->cols && s->out.stride_s == s->cols)) {
    s->cols *= s->rows;
    s->rows = 1;
  }
  if (s->rows == 1 &&
      (s->heads == 1 || (s->in.stride_h == s->cols && s->out.stride_h == s->cols))) {
    s->cols *= s->heads;
    s->heads = 1;
  }
  if (s->rows == 1 && s->heads == 1 &&
      (s->batch == 1 || (s->in.stride_b == s->cols && s->out.stride_b == s->cols))) {
    s->cols *= s->batch;
    s->batch = 1;
  }
}

extern "C" int NAME(scale, )(const struct attn_stage *stage, void *stream) {
  struct attn_stage s = *stage;
  flatten(&s);
  struct deal deal = {.pieces = 1, .whole = false, .group = 1};
  deal.whole = s.cols % PACK == 0 && at_boundaries(&s.in) && at_boundaries(&s.out);
  int lanes = lanes_for(s.cols, deal.whole, BLOCK);
  deal.pieces =
      (uint32_t)ceil_div(s.cols + (deal.whole ? 0 : PACK - 1), (int64_t)lanes * PACKS * PACK);
  void *args[] = {&s, &deal};
  return launch((const void *)NAME(scale, _kernel), &s, &deal, args, lanes, BLOCK, stream);
}

/* Bit e: is column col + e filled by the mask? mask: of column 0 of the row. */
static __device__ __forceinline__ unsigned mask_bits(const uint8_t *mask, int64_t stride,
                                                     int64_t col, unsigned inside) {
  mask += col * stride;
  if (stride == 1 && inside == ALL && (uintptr_t)mask % PACK == 0) {
    uint64_t bytes = PACK == 8   ? *(const uint64_t *)mask
                     : PACK == 4 ? *(const uint32_t *)mask
                                 : *(const uint16_t *)mask;
    const uint64_t one = 0x0101010101010101 >> (8 - PACK) * 8; /* each element filled */
    if (bytes == 0 || bytes == one)
      return bytes == 0 ? 0 : ALL;
    /* Bit 0 of each byte: is the byte not 0? Then bit 8e of the bytes goes to bit 56 + e. */
    bytes |= bytes >> 4;
    bytes |= bytes >> 2;
    bytes |= bytes >> 1;
    return (unsigned)((bytes & one) * 0x0102040810204080 >> 56);
  }
  unsigned bits = 0;
#pragma unroll
  for (int e = 0; e < PACK; ++e)
    if (inside >> e & 1)
      bits |= mask[e * stride] != 0 ? 1u << e : 0;
  return bits;
}

/* Bit e: is column col + e of the row filled? */
static __device__ __forceinline__ unsigned
fill_bits(const struct attn_stage *s, const uint8_t *mask, int64_t row, int64_t col, bool whole) {
  const int64_t left = s->cols - col, seen = row + 1 - col; /* columns up to the diagonal */
  unsigned inside = left <= 0 ? 0 : left < PACK ? ALL >> (PACK - (int)left) : ALL;
  if (!whole && col < 0)
    inside &= ALL << -(int)col;
  unsigned filled = 0;
  if (s->is_causal)
    filled = inside & (seen <= 0 ? ALL : seen < PACK ? ALL << (int)seen : 0);
  if (mask != NULL && filled != inside)
    filled |= mask_bits(mask, s->mask.stride_k, col, inside);
  return filled;
}

/* Fills what is set of a pack of which some but not all is. Its sector is torn then, and the memory
 * has to read it before it can write it: reading it here is quicker than leaving that to the cache.
 * A pack that is not the row's alone is written element by element. */
static __device__ __forceinline__ void fill_part(SCALAR *at, unsigned filled, bool alone,
                                                 SCALAR value) {
  if (alone) {
    struct pack pack;
    *(uint4 *)&pack = *(const uint4 *)at;
#pragma unroll
    for (int e = 0; e < PACK; ++e)
      pack.at[e] = filled >> e & 1 ? value : pack.at[e];
    __stwb((uint4 *)at, *(uint4 *)&pack);
    return;
  }
#pragma unroll
  for (int e = 0; e < PACK; ++e)
    if (filled >> e & 1)
      at[e] = value;
}

/* What is to be filled is found once for all heads of the group that see the same mask. */
static __device__ __forceinline__ void fill_rows(const struct attn_stage *s,
                                                 const struct deal *deal, bool whole) {
  const int lanes = blockDim.x;
  const int64_t row = row_of_block(deal->pieces) + threadIdx.y;
  if (row >= s->rows)
    return;
  const SCALAR value = scalar_of((REAL)s->value);
  struct pack full;
#pragma unroll
  for (int e = 0; e < PACK; ++e)
    full.at[e] = value;
  /* Without a mask a row's work starts right of the diagonal. */
  const int64_t start = s->mask.data == NULL ? (row + 1) / PACK : 0;
  const int64_t step = (int64_t)deal->pieces * lanes * PACKS;

  FOR_EACH_HEAD(*s, b, h, deal->group) {
    const int heads = (int)min(deal->group, s->heads - h);
    int64_t p = start + (int64_t)(blockIdx.x % deal->pieces) * lanes * PACKS + threadIdx.x;
    for (; p * PACK < s->cols + (whole ? 0 : PACK - 1); p += step) {
      SCALAR *out = row_of(&s->out, b, h, row);
      const uint8_t *mask = (const uint8_t *)s->mask.data;
      if (mask != NULL)
        mask += b * s->mask.stride_b + h * s->mask.stride_h + row * s->mask.stride_q;
      unsigned filled[PACKS];
      int last_shift = -1;
      for (int n = 0; n < heads; ++n) {
        const int shift = whole ? 0 : shift_of(out);
        if (n == 0 || shift != last_shift || s->mask.stride_h != 0) {
#pragma unroll
          for (int u = 0; u < PACKS; ++u)
            filled[u] = fill_bits(s, mask, row, (p + u * lanes) * PACK - shift, whole);
          last_shift = shift;
        }
#pragma unroll
        for (int u = 0; u < PACKS; ++u) {
          const int64_t col = (p + u * lanes) * PACK - shift;
          if (filled[u] == ALL)
            __stwb((uint4 *)(out + col), *(uint4 *)&full);
          else if (filled[u] != 0)
            fill_part(out + col, filled[u], whole || (col >= 0 && col + PACK <= s->cols), value);
        }
        out += s->out.stride_h;
        mask += mask != NULL ? s->mask.stride_h : 0;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    NAME(masked_fill, _kernel)(const __grid_constant__ struct attn_stage s,
                               const __grid_constant__ struct deal deal) {
  if (deal.whole)
    fill_rows(&s, &deal, true);
  else
    fill_rows(&s, &deal, false);
}

/* Threads that fill a large GPU; more would only repeat what a thread does once. */
enum { PLENTY = 1 << 18 };

extern "C" int NAME(masked_fill, )(const struct attn_stage *stage, void *stream) {
  const struct attn_stage *s = stage;
  if (s->mask.data == NULL && !s->is_causal)
    return ATTN_OK;
  struct deal deal = {.pieces = 1, .whole = false, .group = 1};
  deal.whole = s->cols % PACK == 0 && at_boundaries(&s->out);
  int lanes = lanes_for(s->cols, deal.whole, BLOCK);
  int64_t threads = s->batch * s->heads * s->rows * lanes;
  int64_t pieces = ceil_div(s->cols + (deal.whole ? 0 : PACK - 1), (int64_t)lanes * PACKS * PACK);
  /* Without a mask an item walks its row from the diagonal on, unless the rows are too few, so that
   * nothing is launched for what is left of it. */
  if (s->mask.data == NULL)
    pieces = min(pieces, ceil_div(PLENTY, threads));
  deal.pieces = (uint32_t)pieces;
  if (s->mask.data == NULL || s->mask.stride_h == 0)
    deal.group = max((int64_t)1, min(s->heads, threads * pieces / PLENTY));
  void *args[] = {(void *)s, &deal};
  return launch((const void *)NAME(masked_fill, _kernel), s, &deal, args, lanes, BLOCK, stream);
}

/* A piece is 256 columns and a row has a warp: each lane draws once, eight numbers. Lane l draws
 * for block l / 4 of 32 columns, columns 2t, 2t + 1 of each 8 with t = l % 4. */
enum { WARP = 32, DRAWN = 8 * WARP, DROP_PACKS = 8 / PACK, MOST_HEADS = 4 };

struct drop {
  REAL factor;
  uint32_t threshold;
};

static __device__ __forceinline__ void
drop_rows(const struct attn_stage *s, const struct deal *deal, struct drop drop, bool whole) {
  const uint32_t upper = min(drop.threshold, 0xFFFFu) << 16; /* as the upper half of a word */
  const int64_t rng_state[2] = {s->rng_state[0], s->rng_state[1]};
  const int lane = threadIdx.x;
  const int64_t row = row_of_block(deal->pieces) + threadIdx.y;
  const int64_t first = (int64_t)(blockIdx.x % deal->pieces) * DRAWN;
  if (row >= s->rows)
    return;

  FOR_EACH_HEAD(*s, b, h, 1) {
    const SCALAR *in = row_of(&s->in, b, h, row);
    SCALAR *out = row_of(&s->out, b, h, row);
    struct pack x[DROP_PACKS];
#pragma unroll
    for (int u = 0; u < DROP_PACKS; ++u)
      x[u] = load_pack(in, first + (u * WARP + lane) * PACK, s->cols, whole, scalar_of(0));

    struct attn_philox draw =
        attn_philox(rng_state, attn_dropout_group(first + lane / 4 * 32 + lane % 4 * 2),
                    (uint32_t)row, (uint32_t)(b * s->heads + h));
    /* Bit 8t + i: is number i of group t kept? After the exchange each lane has its block's. */
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept |= draw.word[i] << 16 >= upper ? 1u << 2 * i : 0;
      kept |= draw.word[i] >= upper ? 2u << 2 * i : 0;
    }
    kept = drop.threshold > 0xFFFF ? 0 : kept << lane % 4 * 8;
    kept |= __shfl_xor_sync(~0u, kept, 1);
    kept |= __shfl_xor_sync(~0u, kept, 2);

#pragma unroll
    for (int u = 0; u < DROP_PACKS; ++u) {
      const int col = (u * WARP + lane) * PACK;
      unsigned mine = DROP_PACKS == 1 ? kept : __shfl_sync(~0u, kept, col / 32 * 4);
      mine >>= col % 8 / 2 * 8 + col % 32 / 8 * 2;
      REAL scaled[PACK];
#pragma unroll
      for (int e = 0; e < PACK; ++e)
        scaled[e] = mine >> (e / 2 * 8 + e % 2) & 1 ? TO_REAL(x[u].at[e]) * drop.factor : 0;
      store_pack(out, first + col, s->cols, whole, pack_of(scaled));
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    NAME(dropout, _kernel)(const __grid_constant__ struct attn_stage s,
                           const __grid_constant__ struct deal deal, const struct drop drop) {
  if (deal.whole)
    drop_rows(&s, &deal, drop, true);
  else
    drop_rows(&s, &deal, drop, false);
}

extern "C" int NAME(dropout, )(const struct attn_stage *s, void *stream) {
  struct deal deal = {.pieces = (uint32_t)ceil_div(s->cols, DRAWN), .whole = false, .group = 1};
  struct drop drop = {(REAL)attn_dropout_scale(s->value), attn_dropout_threshold(s->value)};
  deal.whole = s->cols % PACK == 0 && at_boundaries(&s->in) && at_boundaries(&s->out);
  /* A thread walks a few heads where there are plenty, to find its place only once. */
  int64_t threads = s->batch * s->heads * s->rows * deal.pieces * WARP;
  deal.group = max((int64_t)1, min((int64_t)MOST_HEADS, threads / PLENTY));
  void *args[] = {(void *)s, &deal, &drop};
  return launch((const void *)NAME(dropout, _kernel), s, &deal, args, WARP, BLOCK, stream);
}
