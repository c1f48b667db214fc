/* flash_bwd_sm80.cuh: fused attention, backward, f16 and bf16, mma.sync.
 *
 * Formulas, with P = exp(S - logsumexp), K what dropout multiplies a weight by (1 without)
 *   delta = rowsum(dO * O)    dP = dO . V^T    dS = P (K dP - delta)
 *   dV = (K P)^T . dO    dK = scale dS^T . Q    dQ = scale dS . K; softcap: dS times its slope
 * Operands: attn.h; here S^T [keys, queries], so that P^T and dS^T lie in registers as mma wants
 *   its first factor.
 * Architecture: sm_80 and later; the only backward kernel for halves.
 * Grid: a block a block of BLOCK_K keys of one key head (order: flash_bwd_plan.h). It walks the row
 *   blocks of every query head of its group, so dK and dV are summed here and written once.
 * Roles: warps 0 to 3 make S, P and dV, warps 4 to 7 dP, dS and dK, each of 16 M keys; P goes from
 *   the first to the second through shared memory. All eight then add dS . K to dq, by fp32
 *   atomics laid out so that a warp's 32 fall side by side; the first group after its next P, the
 *   second before its next dP, so that the atomics of one lie under the products of the other.
 * Tiles: struct tile in flash_bwd_tile.cuh; 256 threads, one block an SM.
 * Shared memory: K, [STAGES] of Q and dO, V (in the place of dS and P where it is KEPT in
 *   registers), [2] dS^T, P^T, slopes of the soft cap, [STAGES] of logsumexp and delta.
 * Barriers: struct barriers in flash_bwd_tile.cuh. P_READY: the warp of S arrives, the warp of dP
 *   waits, for a part of P. SPLIT_READY: the two warps of the same keys. TURN: a group of four
 *   warps round its turn at dq. Number 0 ends each row block: rows, dS and P change hands.
 * Numerics: fp32 sums. A row without keys has logsumexp stored as +inf, so its P is 0. With
 *   deterministic, key blocks add to a row block of dq in order (turns); the blocks of a head start
 *   in that order too, so the one that is waited for is running.
 * The caller has checked: everything in attn.h.
 * What bounds it: latency; the tensor cores are half busy at D = 64. There full 16k: 313 TFLOP/s
 *   where FA2 has 283 (README.md).
 * Sources: Dao, "FlashAttention-2", 2023.
 */
#ifndef HEAD_DIM
#  error "an instance sets HEAD_DIM, DTYPE and NAME before it includes this file"
#endif

#include "flash_bwd_ends.cuh"
#include "flash_bwd_pairs.cuh"
#include "flash_bwd_tile.cuh"

/* Sums of dV or dK: C fragments [16 keys, 8 columns]. */
template <int KIND> using sums = float[tile<KIND>::M][tile<KIND>::WARP_D / 8][4];
/* K or V of the warp's keys: A fragments [16 keys, 16 columns]. */
template <int KIND> using fragments = uint32_t[tile<KIND>::M][HEAD_DIM / 16][4];

/* S^T = K . Q^T, or dP^T = V . dO^T. kept: K or V, else a_lane: this lane's address in it; b_lane:
 * in the rows of Q or dO. */
template <int KIND>
static __device__ __forceinline__ void multiply(pairs<KIND> &s, const fragments<KIND> &kept,
                                                uint32_t a_lane, uint32_t b_lane) {
  using T = tile<KIND>;
#pragma unroll
  for (int m = 0; m < T::M; ++m)
#pragma unroll
    for (int n = 0; n < T::SUB / 8; ++n)
      s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; ++d) {
    uint32_t a[T::M][4];
#pragma unroll
    for (int m = 0; m < T::M; ++m) {
      if (T::KEPT) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = kept[m][d][i];
      } else {
        ldmatrix_x4(a[m], swizzled(a_lane, 16 * m, 2 * d));
      }
    }
#pragma unroll
    for (int n = 0; n < T::SUB / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4(b, swizzled(b_lane, 16 * n, 2 * d));
#pragma unroll
      for (int m = 0; m < T::M; ++m) {
        MMA(s[m][2 * n], a[m], b);
        MMA(s[m][2 * n + 1], a[m], b + 2);
      }
    }
  }
}

/* sums += a . rows, for 16 queries. Warps that split the columns take every other 16 of them. */
template <int KIND>
static __device__ __forceinline__ void
add_rows(sums<KIND> &sum, const uint32_t (&a)[tile<KIND>::M][4], uint32_t rows_lane, int row) {
  using T = tile<KIND>;
#pragma unroll
  for (int n = 0; n < T::WARP_D / 16; ++n) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, swizzled(rows_lane, row, 2 * T::SPLIT * n));
#pragma unroll
    for (int m = 0; m < T::M; ++m) {
      MMA(sum[m][2 * n], a[m], b);
      MMA(sum[m][2 * n + 1], a[m], b + 2);
    }
  }
}

/* Waits until the key blocks before this one have added to a row block's dq. */
static __device__ __forceinline__ void await_turn(const int *turn, int mine, int barrier) {
  if (threadIdx.x % 128 == 0)
    while (*(const volatile int *)turn != mine)
      ;
  barrier_sync(barrier, 128); /* the first thread saw the turn; the group adds */
  __threadfence();
}

static __device__ __forceinline__ void pass_turn(int *turn, int mine, int barrier) {
  __threadfence();
  barrier_sync(barrier, 128); /* the group has added; its first thread says so */
  if (threadIdx.x % 128 == 0)
    *(volatile int *)turn = mine + 1;
}

/* This warp's part of dq += dS . K. Lane addresses: of dS^T, transposed, and of K. */
template <int KIND>
static __device__ __forceinline__ void add_dq(const struct plan *p, const struct place *at,
                                              int64_t row_block, int number, uint32_t ds_lane,
                                              uint32_t k_lane) {
  using T = tile<KIND>;
  const int warp = threadIdx.x / 32, group = warp / 4;
  float dq[T::DQ_M][2 * T::DQ_N][4];
#pragma unroll
  for (int m = 0; m < T::DQ_M; ++m)
#pragma unroll
    for (int n = 0; n < 2 * T::DQ_N; ++n)
      dq[m][n][0] = dq[m][n][1] = dq[m][n][2] = dq[m][n][3] = 0;
#pragma unroll
  for (int k = 0; k < T::BLOCK_K / 16; ++k) {
    uint32_t a[T::DQ_M][4];
#pragma unroll
    for (int m = 0; m < T::DQ_M; ++m)
      ldmatrix_x4_trans(a[m], (ds_lane ^ 32 * m) + 16 * k * T::DS_PITCH);
#pragma unroll
    for (int n = 0; n < T::DQ_N; ++n) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, swizzled(k_lane, 16 * k, 2 * T::DQ_D_WARPS * n));
#pragma unroll
      for (int m = 0; m < T::DQ_M; ++m) {
        MMA(dq[m][2 * n], a[m], b);
        MMA(dq[m][2 * n + 1], a[m], b + 2);
      }
    }
  }

  int *turn = p->turns + 2 * row_block + group;
  const int mine =
      at->block - max(0, number * T::BLOCK_Q + at->band.low) / T::BLOCK_K; /* none: the first */
  if (p->turns != NULL)
    await_turn(turn, mine, barriers<KIND>::TURN + group);
  float *to = p->dq + row_block * (T::BLOCK_Q * HEAD_DIM) + warp * (T::BLOCK_Q * HEAD_DIM / 8) +
              threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < T::DQ_M; ++m)
#pragma unroll
    for (int n = 0; n < 2 * T::DQ_N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        atomicAdd(to + ((m * T::DQ_N * 2 + n) * 4 + e) * 32, dq[m][n][e]);
  if (p->turns != NULL)
    pass_turn(turn, mine, barriers<KIND>::TURN + group);
}

/* A warp's rows of dV or dK. */
template <int KIND>
static __device__ __forceinline__ void store_sums(const sums<KIND> &sum, const struct plan *p,
                                                  const struct place *at, bool is_key, int key_0,
                                                  int split) {
  using T = tile<KIND>;
  const struct attn_tensor *grad = is_key ? &p->args.grad_key : &p->args.grad_value;
  const int columns = (int)(is_key ? p->args.head_dim : p->args.head_dim_v);
  const float factor = is_key ? p->score.scale : p->score.keep_scale;
  const int lane = threadIdx.x % 32;
  if (KIND != PLAIN && grad->data == NULL)
    return;
#pragma unroll
  for (int m = 0; m < T::M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key_0 + 16 * m + 8 * half + lane / 4;
      uint16_t *row = row_in(grad, at->b, at->kv_head, at->k_row + key);
#pragma unroll
      for (int n = 0; n < T::WARP_D / 8; n += 4) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          r[i] = PACK(sum[m][n + i][2 * half] * factor, sum[m][n + i][2 * half + 1] * factor);
        const uint4 eight = quad_transpose(r[0], r[1], r[2], r[3]);
        const int column = 16 * ((n / 2 + lane % 4 / 2) * T::SPLIT + split) + lane % 2 * 8;
        if (key < at->seq_k)
          store_columns(row, column, columns, eight, KIND == PLAIN || p->aligned);
      }
    }
}

/* The row block at hand: its query head within the group, and its number in that head. */
struct step {
  int head, number;
};

/* Row block t of a key block: computed anew where it is needed, since registers are short. */
static __device__ __forceinline__ struct step step_at(const struct place *at, int t, int group) {
  if (group == 1)
    return {0, at->first + t};
  return {t / at->count, at->first + t % at->count};
}

template <int KIND>
static __device__ __forceinline__ void load_step(const struct plan *p, const struct place *at,
                                                 struct step step, uint32_t rows, uint32_t stats) {
  using T = tile<KIND>;
  const struct attn_args *a = &p->args;
  const int row_0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const int h = at->kv_head * (int)(a->heads / a->kv_heads) + step.head;
  const int row = step.number * T::BLOCK_Q + row_0;
  const int64_t block = row_block_0(p, at, h, T::BLOCK_Q) + step.number;
  const uint32_t to = lane_address(rows, row_0, chunk);
  const bool aligned = KIND == PLAIN || p->aligned;
  load_rows<ATTN_FLASH_BWD_THREADS, T::BLOCK_Q>(
      true, to, row_in(&a->query, at->b, h, at->q_row + row) + 8 * chunk, a->query.stride_s,
      at->seq_q - row, (int)a->head_dim - 8 * chunk, aligned);
  load_rows<ATTN_FLASH_BWD_THREADS, T::BLOCK_Q>(
      true, to + T::Q_BYTES, row_in(&a->grad_out, at->b, h, at->q_row + row) + 8 * chunk,
      a->grad_out.stride_s, at->seq_q - row, (int)a->head_dim_v - 8 * chunk, aligned);
  if (threadIdx.x < T::BLOCK_Q / 2)
    cp_async_16(stats + 16 * threadIdx.x, p->stats + block * (2 * T::BLOCK_Q) + 4 * threadIdx.x,
                16);
}

template <int KIND> static __device__ __forceinline__ void backward(const struct plan *p) {
  using T = tile<KIND>;
  using bar = barriers<KIND>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  const struct attn_args *a = &p->args;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool is_key = warp >= 4; /* the group of dK */
  const int key_warp = warp % 4 / T::SPLIT, split = warp % T::SPLIT;
  __shared__ struct place at; /* all threads agree on it, and registers are short */
  if (threadIdx.x == 0)
    at = place_of(p, blockIdx.x, T::BLOCK_Q, T::BLOCK_K);
  __syncthreads(); /* thread 0 wrote the place; all read it */
  if (at.key_0 >= at.seq_k)
    return;
  const int group = (int)(a->heads / a->kv_heads), steps = at.count * group;
  const bool aligned = KIND == PLAIN || p->aligned;
  const bool want_dq = KIND == PLAIN || p->dq != NULL;
  const bool want_ds = want_dq || a->grad_key.data != NULL || p->dmask.data != NULL;
  const bool want_sum = KIND == PLAIN || (is_key ? a->grad_key : a->grad_value).data != NULL;

  {
    const int row_0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const int64_t key = at.k_row + at.key_0 + row_0;
    const int left = at.seq_k - at.key_0 - row_0;
    load_rows<ATTN_FLASH_BWD_THREADS, T::BLOCK_K>(
        true, lane_address(base, row_0, chunk), row_in(&a->key, at.b, at.kv_head, key) + 8 * chunk,
        a->key.stride_s, left, (int)a->head_dim - 8 * chunk, aligned);
    load_rows<ATTN_FLASH_BWD_THREADS, T::BLOCK_K>(
        true, lane_address(base + T::AT_V, row_0, chunk),
        row_in(&a->value, at.b, at.kv_head, key) + 8 * chunk, a->value.stride_s, left,
        (int)a->head_dim_v - 8 * chunk, aligned);
  }
  if (steps > 0)
    load_step<KIND>(p, &at, step_at(&at, 0, group), base + T::AT_Q, base + T::AT_STATS);
  cp_async_commit();

  sums<KIND> sum;
#pragma unroll
  for (int m = 0; m < T::M; ++m)
#pragma unroll
    for (int n = 0; n < T::WARP_D / 8; ++n)
      sum[m][n][0] = sum[m][n][1] = sum[m][n][2] = sum[m][n][3] = 0;

  /* Lane addresses. K or V, as A; rows of Q and dO, as B of S and transposed as B of the sums. */
  const uint32_t a_lane =
      lane_address(base + (is_key ? T::AT_V : 0), key_warp * T::WARP_K + lane % 16, lane / 16);
  const uint32_t b_lane = lane_address(base + T::AT_Q + (is_key ? T::Q_BYTES : 0),
                                       split * T::WARP_Q + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t rows_lane =
      lane_address(base + T::AT_Q + (is_key ? 0 : T::Q_BYTES), lane % 16, 2 * split + lane / 16);
  const uint32_t k_lane = lane_address(base, lane % 16, 2 * (warp / T::DQ_Q_WARPS) + lane / 16);
  /* dS^T [BLOCK_K][BLOCK_Q], 16-byte chunks swizzled as those of the tiles are. */
  const auto ds_address = [&](int key, int chunk) {
    const int swizzle = T::BLOCK_Q >= 64 ? key & 7 : key >> 1 & 3;
    return base + T::AT_DS + key * T::DS_PITCH + (chunk ^ swizzle) * 16;
  };
  const uint32_t ds_store =
      ds_address(key_warp * T::WARP_K + lane / 4, split * (T::WARP_Q / 8)) + lane % 4 * 4;
  const uint32_t ds_load = ds_address(key_warp * T::WARP_K + lane % 16, lane / 16);
  const uint32_t dq_load =
      ds_address(lane / 16 * 8 + lane % 8, warp % T::DQ_Q_WARPS * (2 * T::DQ_M) + lane / 8 % 2);
  constexpr int P_WARP = T::M * (T::WARP_Q / 16) * 512; /* bytes of a warp's part of P */
  const uint32_t p_warp = base + T::AT_P + key_warp * (T::SPLIT * P_WARP) + lane * 16;
  const uint32_t stats_lane =
      base + T::AT_STATS + (is_key ? 4 * T::BLOCK_Q : 0) + 4 * (split * T::WARP_Q + lane % 4 * 2);
  const int key_lane = at.key_0 + key_warp * T::WARP_K + lane / 4;

  cp_async_wait<0>();
  __syncthreads(); /* all wrote K, V and the first rows; all read them */
  fragments<KIND> kept;
  if (T::KEPT) {
#pragma unroll
    for (int m = 0; m < T::M; ++m)
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d)
        ldmatrix_x4(kept[m][d], swizzled(a_lane, 16 * m, 2 * d));
    __syncthreads(); /* V is in registers; dS and P overwrite it */
  }

  const auto add_step_dq = [&](int t) {
    const struct step step = step_at(&at, t, group);
    const int h = at.kv_head * group + step.head;
    add_dq<KIND>(p, &at, row_block_0(p, &at, h, T::BLOCK_Q) + step.number, step.number,
                 dq_load + (t & 1) * T::DS_BYTES, k_lane);
  };

#pragma unroll 1
  for (int t = 0; t < steps; ++t) {
    const uint32_t stage = T::STAGES == 1 ? 0 : t & 1;
    const uint32_t rows = stage * (2 * T::Q_BYTES), stats = stage * (8 * T::BLOCK_Q);
    const uint32_t ds_tile = (t & 1) * T::DS_BYTES;
    if (T::STAGES == 2 && t + 1 < steps) {
      load_step<KIND>(p, &at, step_at(&at, t + 1, group), base + T::AT_Q + (2 * T::Q_BYTES - rows),
                      base + T::AT_STATS + (8 * T::BLOCK_Q - stats));
      cp_async_commit();
    }
    const struct step now = step_at(&at, t, group);
    const int query_0 = now.number * T::BLOCK_Q, query_1 = query_0 + T::BLOCK_Q - 1;
    const bool masked = at.key_0 + T::BLOCK_K > at.seq_k ||
                        at.key_0 + T::BLOCK_K - 1 - query_0 > at.band.high ||
                        at.key_0 - query_1 < at.band.low;
    struct corner corner = {at.kv_head * group + now.head,
                            query_0 + split * T::WARP_Q + lane % 4 * 2, key_lane};

    if (is_key && t > 0 && want_dq)
      add_step_dq(t - 1);
#pragma unroll
    for (int sub = 0; sub < T::SUBS; ++sub, corner.query += T::SUB) {
      const uint32_t p_lane = p_warp + split * P_WARP + sub * (P_WARP / T::SUBS);
      const int p_ready = bar::P_READY + key_warp * T::SUBS + sub;
      pairs<KIND> s;
      packed<KIND> pack_s;
      if (KIND == PLAIN || want_ds || !is_key)
        multiply<KIND>(s, kept, a_lane, b_lane + rows + sub * (T::SUB * PITCH));
      if (!is_key) {
        if (KIND != PLAIN) {
          packed<KIND> slope;
          finish<KIND>(s, slope, p, &at, corner);
          if (p->score.softcap != 0)
            put<KIND>(p_lane + (T::AT_SLOPE - T::AT_P), slope);
        }
        if (masked)
          hide<KIND>(s, &at, corner);
        exponentiate<KIND>(s, stats_lane + stats + 4 * sub * T::SUB,
                           KIND == PLAIN ? p->score.scale_log2 : 1);
        if (KIND != PLAIN && a->rng_state != NULL)
          drop<KIND>(s, p, &at, corner);
        pack<KIND>(pack_s, s);
        put<KIND>(p_lane, pack_s);
        if (KIND == PLAIN || want_ds)
          barrier_arrive(p_ready, 64 * T::SPLIT); /* P is written, for the group of dK */
        if (T::SPLIT > 1)
          barrier_sync(bar::SPLIT_READY + key_warp, 32 * T::SPLIT); /* P of the keys' other warps */
      } else if (KIND == PLAIN || want_ds) {
        barrier_sync(p_ready, 64 * T::SPLIT); /* P was written by the group of dV; this reads it */
        get<KIND>(pack_s, p_lane);
        differentiate<KIND>(s, pack_s, stats_lane + stats + 4 * sub * T::SUB,
                            p_lane + (T::AT_SLOPE - T::AT_P), p, &at, corner);
        pack<KIND>(pack_s, s);
#pragma unroll
        for (int m = 0; m < T::M; ++m)
#pragma unroll
          for (int i = 0; i < T::SUB / 4; ++i)
            st_shared_4((ds_store ^ 16 * (sub * (T::SUB / 8) + i / 2)) + ds_tile +
                            (16 * m + i % 2 * 8) * T::DS_PITCH,
                        pack_s[m][i / 4][i % 4]);
        if (T::SPLIT > 1) /* dS of the keys' other warps */
          barrier_sync(bar::SPLIT_READY + T::KEY_WARPS + key_warp, 32 * T::SPLIT);
      }
      if (!want_sum)
        continue;
      constexpr int K = (T::SPLIT > 1 ? T::BLOCK_Q : T::SUB) / 16;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        uint32_t a16[T::M][4];
#pragma unroll
        for (int m = 0; m < T::M; ++m) {
          if (T::SPLIT == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              a16[m][i] = pack_s[m][k][i];
          } else if (is_key) {
            ldmatrix_x4(a16[m], (ds_load ^ 32 * k) + ds_tile + 16 * m * T::DS_PITCH);
          } else {
            constexpr int W = T::WARP_Q / 16;
            const uint4 v = ld_shared_16(p_warp + k / W * P_WARP + (m * W + k % W) * 512);
            a16[m][0] = v.x, a16[m][1] = v.y, a16[m][2] = v.z, a16[m][3] = v.w;
          }
          if (KIND != PLAIN && !is_key) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              a16[m][i] = kept_pair(a16[m][i]);
          }
        }
        add_rows<KIND>(sum, a16, rows_lane + rows, sub * T::SUB + 16 * k);
      }
    }
    if (!is_key && t > 0 && want_dq)
      add_step_dq(t - 1);
    cp_async_wait<0>();
    __syncthreads(); /* all wrote the next rows and dS, and have read these rows, P, the last dS */
    if (T::STAGES == 1 && t + 1 < steps) {
      load_step<KIND>(p, &at, step_at(&at, t + 1, group), base + T::AT_Q, base + T::AT_STATS);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads(); /* all wrote the next rows; all read them */
    }
  }
  if (steps > 0 && want_dq)
    add_step_dq(steps - 1);
  store_sums<KIND>(sum, p, &at, is_key, at.key_0 + key_warp * T::WARP_K, split);
}

#define KERNELS(kind, tail)                                                                        \
  extern "C" __global__ void __launch_bounds__(ATTN_FLASH_BWD_THREADS)                             \
      NAME(tail##_before)(const __grid_constant__ struct plan plan) {                              \
    before<kind>(&plan);                                                                           \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(ATTN_FLASH_BWD_THREADS, 1)                          \
      NAME(tail)(const __grid_constant__ struct plan plan) {                                       \
    backward<kind>(&plan);                                                                         \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(ATTN_FLASH_BWD_THREADS)                             \
      NAME(tail##_after)(const __grid_constant__ struct plan plan) {                               \
    after<kind>(&plan);                                                                            \
  }
#define DESCRIBE(kind, tail)                                                                       \
  {(const void *)NAME(tail),                                                                       \
   tile<kind>::BLOCK_Q,                                                                            \
   tile<kind>::BLOCK_K,                                                                            \
   tile<kind>::SHARED,                                                                             \
   (const void *)NAME(tail##_before),                                                              \
   (const void *)NAME(tail##_after)}

KERNELS(PLAIN, _kernel)
#ifndef ONLY_PLAIN
KERNELS(GENERAL, _general_kernel)
KERNELS(SMALL, _small_kernel)
static const struct flash_bwd_instance instance = {HEAD_DIM, DESCRIBE(PLAIN, _kernel),
                                                   DESCRIBE(GENERAL, _general_kernel),
                                                   DESCRIBE(SMALL, _small_kernel)};
#else
static const struct flash_bwd_instance instance = {
    HEAD_DIM, DESCRIBE(PLAIN, _kernel), DESCRIBE(PLAIN, _kernel), DESCRIBE(PLAIN, _kernel)};
#endif

extern "C" int64_t NAME(_workspace)(const struct attn_args *args) {
  return attn_flash_bwd_sm80_workspace(args, HEAD_DIM);
}

extern "C" int NAME()(const struct attn_args *args, void *stream) {
  return attn_flash_bwd_sm80_launch(&instance, args, stream);
}
