/* flash_fwd_sm80.cuh: fused attention, forward, for fp16 and bf16 on every GPU from sm_80 on.
 *
 * Formula: attn.h. query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], out
 *   [B, Hq, Sq, Dv]; the instance's HEAD_DIM is the next of 32 ... 256 at or above D and Dv, and
 *   columns beyond them are zero in shared memory.
 * Architecture: mma.m16n8k16, ldmatrix, cp.async: sm_80 and later. It takes every call that attn.h
 *   allows; kernels of newer architectures take what they are faster at (select.c).
 * Grid: one block a tile of BLOCK_Q rows, or splits blocks where tiles are few; order, packing of
 *   grouped heads and splits: flash_fwd_plan.h. Three kernels, plain, general and few:
 *   flash_fwd_tile.cuh.
 * Roles: none; a warp owns 16 or 32 rows, with O in registers. In the kernel for few rows all warps
 *   own the same 16 and split each block's keys, so that one decoded token still uses four warps.
 * Registers: O [rows, HEAD_DIM] and two blocks of S in fp32, up to 192 a thread: hence 255 at most,
 *   two blocks an SM.
 * Tile table: flash_fwd_tile.cuh.
 * Shared memory: K [2][BLOCK_K][HEAD_DIM], V [2][BLOCK_K][HEAD_DIM], Q [BLOCK_Q][HEAD_DIM]; 16-byte
 *   chunks of K and V rows are swizzled, Q lies in the order of its fragments (tile_sm80.cuh).
 *   Where warps split keys, their partial rows overwrite K and V at the end. Beside these: where
 *   the block stands (struct place), and each row's position and head, which are the same for all
 *   threads, and registers are short.
 * Barriers: one a key block, between its arrival and its use: all threads wrote the new blocks, and
 *   all have read the old ones whose slots are filled next. Splits wait for the grid once.
 *
 * The pipeline of a warp, block n of keys (walked from right to left):
 *   ahead:  S(n - 1) = Q . K(n - 1)   beside   P(n) = 2^(S(n) - max)
 *           O += P(n) . V(n)          beside   maxima of S(n - 1)
 *   alone:  S(n) = Q . K(n);  then O += P(n) . V(n), 16 keys at a time, beside P of the next 16
 * So exponentials run while the tensor cores do, in the same warp. Masked blocks come first (right
 * edge, end of sequence), then whole ones in a loop of their own, then the left edge of a window.
 *
 * Numerics: fp32 accumulation; exponents relative to a row maximum that is raised only when a score
 *   passes it by 2^8, which spares O a rescaling in nearly every block; P is rounded to 16 bits;
 *   sums are of P before rounding and before dropout. A row without keys has sum 0. Scores below
 *   -1.5e38 count as -1.5e38, also in logsumexp; -inf stays -inf.
 * The caller has checked: attn.h.
 * Bound by: latency. On an H200 at 64 columns the loop keeps the tensor cores about half busy, and
 *   mma.sync alone reaches 635 TFLOP/s there (README.md).
 * Sources: Dao, "FlashAttention-2", arXiv 2307.08691; FlashAttention-4 for the rare rescaling; the
 *   PTX ISA.
 */
#ifndef HEAD_DIM
#  error "an instance sets HEAD_DIM and DTYPE before it includes this file"
#endif

#include <cooperative_groups.h>

#include "flash_fwd_rows.cuh"

template <int KIND> static __device__ __forceinline__ void forward(const struct plan *p) {
  using T = tile<KIND>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t slots = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const struct attn_args *a = &p->args;
  const bool aligned = KIND == PLAIN || p->aligned;
  const float factor = KIND == PLAIN ? p->score.scale_log2 : 1;

  __shared__ struct place at;
  __shared__ struct row rows[T::BLOCK_Q];
  if (threadIdx.x == 0)
    at = place_of(p, blockIdx.x, blockIdx.y, T::BLOCK_Q, T::BLOCK_K);
  __syncthreads(); /* thread 0 wrote at, all read it */
  if (threadIdx.x < T::BLOCK_Q)
    rows[threadIdx.x] = row_of(p, &at, at.row_0 + threadIdx.x);
  static_assert(T::BLOCK_Q <= T::THREADS, "a thread for each row");
  __syncthreads(); /* each row's thread wrote it, all read them */
  if (at.row_1 <= at.row_0 && p->splits == 1)
    return; /* a sequence shorter than the longest */
  const int warp_row = T::KEY_WARPS > 1 ? 0 : warp * 16 * T::M_TILES;
  const int lane_row = warp_row + lane / 4; /* in the tile */

  /* Slots K, K, V, V. All threads fill a slot together, or where warps split the keys each warp its
   * own keys: then the slot concerns no other warp. */
  constexpr int LOADERS = T::KEY_WARPS > 1 ? 32 : T::THREADS;
  const int warp_key = T::KEY_WARPS > 1 ? warp * T::WARP_K : 0;
  const int loader = T::KEY_WARPS > 1 ? lane : threadIdx.x;
  const int load_row = loader / CHUNKS, load_column = loader % CHUNKS * 8;
  const uint32_t load_to = lane_address(slots + warp_key * PITCH, load_row, loader % CHUNKS);
  /* This thread's first element of the next block of K and of V. */
  const int first_key = at.last * T::BLOCK_K + warp_key + load_row;
  const uint16_t *key = rows_on(at.key, first_key, a->key.stride_s, aligned) + load_column;
  const uint16_t *value = rows_on(at.value, first_key, a->value.stride_s, aligned) + load_column;
  auto load_key = [&](int block, int slot, int rows_left) {
    load_rows<LOADERS, T::WARP_K>(block >= at.first, load_to + slot, key, a->key.stride_s,
                                  rows_left, (int)a->head_dim - load_column, aligned);
    key = rows_on(key, -T::BLOCK_K, a->key.stride_s, aligned);
  };
  auto load_value = [&](int block, int slot, int rows_left) {
    load_rows<LOADERS, T::WARP_K>(block >= at.first, load_to + 2 * T::SLOT + slot, value,
                                  a->value.stride_s, rows_left, (int)a->head_dim_v - load_column,
                                  aligned);
    value = rows_on(value, -T::BLOCK_K, a->value.stride_s, aligned);
  };

  /* Each warp brings its own rows of Q, in the order of fragments: [M_TILES][HEAD_DIM / 16] of 512
   * bytes, lane l's 16 bytes of each being half l / 16 of row l % 16. Warps that share rows share
   * the work. */
  const uint32_t q_lane = slots + 4 * T::SLOT + warp_row * PITCH + lane * 16;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m) {
    const int r = warp_row + 16 * m + lane % 16;
    const int column = lane / 16 * 8;
    const uint16_t *from =
        row_in(&a->query, at.b, rows[r].head, at.q_row + rows[r].position) + column;
    const int columns = at.row_0 + r < at.row_1 ? (int)a->head_dim - column : 0;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d)
      if (T::KEY_WARPS == 1 || d % T::KEY_WARPS == warp)
        load_chunk(true, q_lane + q_offset(m, d), from + 16 * d, columns - 16 * d, aligned);
  }
  int block = at.last, slot = 0; /* slot: of the block's K and V, in bytes from the first */
  load_key(block, 0, at.seq_k - first_key);
  if (T::AHEAD) {
    cp_async_commit();
    load_key(block - 1, T::SLOT, T::WARP_K);
  }
  load_value(block, 0, at.seq_k - first_key);
  cp_async_commit();

  warp_state<KIND> w;
#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      w.o[m][n][0] = w.o[m][n][1] = w.o[m][n][2] = w.o[m][n][3] = 0;
    w.max[m][0] = w.max[m][1] = LOWEST_MAX;
    w.sum[m][0] = w.sum[m][1] = 0;
  }

  /* Lane addresses in slot 0: K as B fragments of [16 keys, 16 columns], V transposed. */
  const uint32_t k_lane = lane_address(slots, warp_key + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_lane = lane_address(slots + 2 * T::SLOT, warp_key + lane % 16, lane / 16);

  scores<KIND> exponents; /* of block */
  probabilities<KIND> pr;
  kept<KIND> keep;
  const auto nothing = [](int) {};
  /* The raw products of block to exponents. */
  auto finish = [&](scores<KIND> &s, bool masked) {
    const int key_0 = block * T::BLOCK_K + warp_key;
    if (KIND != PLAIN)
      finish_scores<KIND>(s, p, &at, rows + lane_row, key_0 + lane % 4 * 2);
    if (masked)
      mask_range<KIND>(s, p, &at, rows + lane_row, key_0 + lane % 4 * 2);
    raise_maxima<KIND>(w, s, factor);
    make_exponents<KIND>(exponents, s, w, factor);
    if (KIND != PLAIN)
      draw_dropout<KIND>(keep, p, &at, rows + lane_row, key_0);
  };
  /* Waits for the blocks loaded last. */
  auto acquire = [&]() {
    cp_async_wait<0>();
    if (T::KEY_WARPS > 1)
      __syncwarp(); /* the warp wrote these slots, and has read those it fills next */
    else
      __syncthreads(); /* all wrote these slots, and all have read those filled next */
  };

  /* Ahead: S of the block before, while the exponents of block become P; then O += P . V. */
  auto step_ahead = [&](bool masked) {
    scores<KIND> s;
    acquire(); /* K of the block before, V of block */
    multiply_qk<KIND>(s, q_lane, k_lane + (slot ^ T::SLOT), [&](int group) {
      exponentiate<KIND>(pr, w, exponents, keep, group, T::GROUPS);
      if (group == 0)
        load_key(block - 2, slot, T::WARP_K);
      if (group == T::GROUPS / 2) {
        load_value(block - 1, slot ^ T::SLOT, T::WARP_K);
        cp_async_commit();
      }
    });
    multiply_pv<KIND>(w, pr, v_lane + slot, nothing);
    --block;
    slot ^= T::SLOT;
    finish(s, masked);
  };
  /* Else: S of block; then O += P . V, while the exponents of the next 16 keys become P. */
  auto step_alone = [&](bool masked) {
    scores<KIND> s;
    acquire(); /* K and V of block */
    multiply_qk<KIND>(s, q_lane, k_lane + slot, [&](int group) {
      if (group == 0)
        load_key(block - 1, slot ^ T::SLOT, T::WARP_K);
      if (group == T::GROUPS / 2) {
        load_value(block - 1, slot ^ T::SLOT, T::WARP_K);
        cp_async_commit();
      }
    });
    finish(s, masked);
    constexpr int STEPS = T::WARP_K / 16, IN_STEP = T::GROUPS / STEPS;
    exponentiate<KIND>(pr, w, exponents, keep, 0, STEPS);
    multiply_pv<KIND>(w, pr, v_lane + slot, [&](int group) {
      if (group < T::GROUPS - IN_STEP)
        exponentiate<KIND>(pr, w, exponents, keep, group + IN_STEP, T::GROUPS);
    });
    --block;
    slot ^= T::SLOT;
  };
  auto step = [&](bool masked) {
    if (T::AHEAD)
      step_ahead(masked);
    else
      step_alone(masked);
  };

  auto is_masked = [&](int b) { return b > at.masked_end || b <= at.whole_end; };
  constexpr int LAST = T::AHEAD ? 1 : 0; /* blocks left for after the loops */
  if (T::AHEAD && block >= at.first) {
    scores<KIND> s;
    cp_async_wait<1>();
    __syncthreads(); /* all wrote Q and the first K, all read them */
    multiply_qk<KIND>(s, q_lane, k_lane, nothing);
    finish(s, is_masked(block));
  }
  if (KIND == PLAIN) {
    /* block - LAST is the one whose scores a step makes: masked at the right edge, then whole, then
     * masked at the left edge. */
    int stop = at.masked_end + LAST;
    while (block >= at.first + LAST) {
#pragma unroll 1
      while (block > stop)
        step(true);
#pragma unroll 1
      while (block - LAST > at.whole_end)
        step(false);
      stop = at.first + LAST - 1;
    }
  } else {
#pragma unroll 1
    while (block >= at.first + LAST)
      step(is_masked(block - LAST));
  }
  if (T::AHEAD && block == at.first) {
    acquire(); /* V of the last block */
    exponentiate<KIND>(pr, w, exponents, keep, 0, 1);
    multiply_pv<KIND>(w, pr, v_lane + slot, nothing);
  }
  cp_async_wait<0>(); /* where there was no block; none may be in flight when the block ends */

#pragma unroll
  for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      w.sum[m][h] = quad_sum(w.sum[m][h]);

  constexpr int PARTIAL = T::BLOCK_Q * T::ROW;
  float *partial = p->partials + ((int64_t)at.tile * p->splits + at.split) * PARTIAL;
  if (T::KEY_WARPS > 1) {
    float *parts = (float *)shared; /* [warp][BLOCK_Q][ROW] */
    __syncthreads();                /* all have read their last slot; the partials overwrite it */
    store_partial<KIND>(w, parts + warp * PARTIAL, lane / 4, at.row_1 - at.row_0);
    __syncthreads(); /* each warp wrote its partials; the rows are shared out to read them */
    for (int r = warp; r < at.row_1 - at.row_0; r += T::WARPS)
      merge_row<KIND>(p, &at, rows[r], parts + r * T::ROW, PARTIAL, T::WARPS,
                      p->splits > 1 ? partial + r * T::ROW : NULL);
  } else if (p->splits > 1) {
    store_partial<KIND>(w, partial, lane_row, at.row_1 - at.row_0);
  } else {
    store_rows<KIND>(w, p, &at, rows + lane_row);
  }
  if (p->splits > 1) {
    cooperative_groups::this_grid().sync(); /* all partials are written; the rows are shared out */
    merge_splits<KIND>(p);
  }
}

/* A kernel, and what the host has to know of it. */
#define KERNEL(kind, tail)                                                                         \
  extern "C" __global__ void __launch_bounds__(tile<kind>::THREADS, 2)                             \
      NAME(tail)(const __grid_constant__ struct plan plan) {                                       \
    forward<kind>(&plan);                                                                          \
  }                                                                                                \
  static signed char NAME(tail##_blocks)[ATTN_MOST_DEVICES];
#define DESCRIBE(kind, tail)                                                                       \
  {(const void *)NAME(tail), tile<kind>::BLOCK_Q, tile<kind>::BLOCK_K, tile<kind>::THREADS,        \
   tile<kind>::SHARED,       tile<kind>::ROW,     NAME(tail##_blocks)}

KERNEL(PLAIN, _kernel)
KERNEL(GENERAL, _general_kernel)
KERNEL(FEW, _few_kernel)
static const struct flash_fwd_instance instance = {
    DESCRIBE(PLAIN, _kernel), DESCRIBE(GENERAL, _general_kernel), DESCRIBE(FEW, _few_kernel)};

extern "C" int64_t NAME(_workspace)(const struct attn_args *args) {
  return attn_flash_fwd_sm80_workspace(&instance, args);
}

extern "C" int NAME()(const struct attn_args *args, void *stream) {
  return attn_flash_fwd_sm80_launch(&instance, args, stream);
}
