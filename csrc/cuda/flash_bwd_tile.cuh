/* flash_bwd_tile.cuh: the tiles of flash_bwd_sm80, and where a block of it stands. */
#ifndef ATTN_FLASH_BWD_TILE_CUH
#define ATTN_FLASH_BWD_TILE_CUH

#include "flash_bwd_plan.h"
#include "ptx_sm80.cuh"
#include "softmax.cuh"
#include "tile_sm80.cuh"

#define PASTE_(a, b) a##b
#define PASTE(a, b)  PASTE_(a, b)
#define MMA          PASTE(mma_m16n8k16_, DTYPE)
#define PACK         PASTE(pack_, DTYPE)
#define UNPACK       PASTE(unpack_, DTYPE)

/* PLAIN and GENERAL: see flash_bwd_plan.h. SMALL: GENERAL with smaller tiles. */
enum kind { PLAIN, GENERAL, SMALL };

/* SPLIT warps share 32 keys and divide the queries of S, then the columns of dV and dK: where one
 * warp's registers could not hold the sums of all columns. */
template <int KIND> struct tile {
  static constexpr bool IS_SMALL = KIND == SMALL;
  static constexpr int SPLIT = HEAD_DIM <= 128 ? 1 : 2;
  static constexpr int KEY_WARPS = 4 / SPLIT;
  static constexpr int M = IS_SMALL && HEAD_DIM >= 96 && HEAD_DIM != 192 ? 1 : 2; /* x 16 keys */
  static constexpr int WARP_K = 16 * M, BLOCK_K = KEY_WARPS * WARP_K;
  static constexpr int BLOCK_Q = IS_SMALL && HEAD_DIM != 32 && HEAD_DIM != 96              ? 32
                                 : KIND == GENERAL && (HEAD_DIM == 128 || HEAD_DIM == 256) ? 32
                                 : KIND == PLAIN && HEAD_DIM == 64                         ? 128
                                                                                           : 64;
  static constexpr int WARP_Q =
      BLOCK_Q / SPLIT; /* queries of a warp's part of S, in steps of SUB */
  static constexpr int SUB = BLOCK_Q >= 128 ? 64 : WARP_Q < 32 ? WARP_Q : 32;
  static constexpr int SUBS = WARP_Q / SUB;
  static constexpr int STAGES = IS_SMALL && HEAD_DIM >= 192 ? 1 : 2;
  /* K or V as fragments in registers, where the sums leave room. */
  static constexpr bool KEPT = HEAD_DIM <= (IS_SMALL ? 128 : 64);
  static constexpr int WARP_D = HEAD_DIM / SPLIT; /* columns of a warp's part of dV or dK */

  /* dQ [BLOCK_Q, HEAD_DIM] is shared out to all 8 warps. */
  static constexpr int DQ_Q_WARPS = BLOCK_Q == 32                                        ? 2
                                    : HEAD_DIM == 32 || HEAD_DIM == 96 || BLOCK_Q == 128 ? 4
                                                                                         : 2;
  static constexpr int DQ_D_WARPS = 8 / DQ_Q_WARPS;
  static constexpr int DQ_M = BLOCK_Q / 16 / DQ_Q_WARPS, DQ_N = HEAD_DIM / 16 / DQ_D_WARPS;
  static_assert(DQ_M * DQ_Q_WARPS * 16 == BLOCK_Q && DQ_N * DQ_D_WARPS * 16 == HEAD_DIM, "dQ");

  /* Shared memory, in bytes. */
  static constexpr int K_BYTES = BLOCK_K * PITCH, Q_BYTES = BLOCK_Q * PITCH;
  static constexpr int DS_PITCH = 2 * BLOCK_Q, DS_BYTES = BLOCK_K * DS_PITCH;
  static constexpr int P_BYTES = DS_BYTES;
  static constexpr int SLOPE_BYTES = KIND == PLAIN ? 0 : DS_BYTES;
  static constexpr int AT_Q = K_BYTES; /* [STAGES] of Q, then dO */
  static constexpr int AT_DS = AT_Q + STAGES * 2 * Q_BYTES + (KEPT ? 0 : K_BYTES); /* [2] */
  static constexpr int AT_P = AT_DS + 2 * DS_BYTES, AT_SLOPE = AT_P + P_BYTES;
  static constexpr int AT_V = KEPT ? AT_DS : AT_DS - K_BYTES; /* KEPT: dS and P overwrite it */
  static constexpr int AT_STATS =
      KEPT && AT_V + K_BYTES > AT_SLOPE + SLOPE_BYTES ? AT_V + K_BYTES : AT_SLOPE + SLOPE_BYTES;
  static constexpr int SHARED = AT_STATS + STAGES * 2 * BLOCK_Q * 4;
  static_assert(SHARED <= (IS_SMALL ? 99 : 227) * 1024, "shared memory");
};

/* Barriers beside number 0, the whole block's. */
template <int KIND> struct barriers {
  static constexpr int P_READY = 1; /* + key warp * SUBS + step */
  static constexpr int SPLIT_READY = P_READY + tile<KIND>::KEY_WARPS * tile<KIND>::SUBS;
  static constexpr int TURN = 14; /* + group */
  static_assert(SPLIT_READY + 4 <= TURN, "16 barriers");
};

/* Where a block works. */
struct place {
  int64_t b, q_row, k_row;   /* q_row, k_row: where the sequence starts in packed tensors */
  int kv_head, block, key_0; /* block: of keys, from key_0 on */
  int seq_q, seq_k;
  struct key_band band;
  int first, count; /* row blocks of a head that see a key of this block */
};

static __device__ __forceinline__ uint16_t *row_in(const struct attn_tensor *tensor, int64_t b,
                                                   int64_t h, int64_t row) {
  return (uint16_t *)tensor->data + b * tensor->stride_b + h * tensor->stride_h +
         row * tensor->stride_s;
}

static __device__ __forceinline__ void set_sequence(struct place *at, const struct attn_args *a) {
  at->q_row = a->cu_seq_q == NULL ? 0 : a->cu_seq_q[at->b];
  at->seq_q = (int)(a->cu_seq_q == NULL ? a->seq_q : a->cu_seq_q[at->b + 1] - at->q_row);
  at->k_row = a->cu_seq_k == NULL ? 0 : a->cu_seq_k[at->b];
  at->seq_k = (int)(a->cu_seq_k == NULL ? a->seq_k : a->cu_seq_k[at->b + 1] - at->k_row);
  at->band = key_band_of(a, at->seq_q, at->seq_k);
}

/* Number of the first row block of query head h. */
static __device__ __forceinline__ int64_t row_block_0(const struct plan *p, const struct place *at,
                                                      int h, int block_q) {
  return p->packed_blocks == 0 ? (at->b * p->args.heads + h) * p->q_blocks
                               : h * p->packed_blocks + at->q_row / block_q + at->b;
}

static __device__ __forceinline__ struct place place_of(const struct plan *p, uint32_t index,
                                                        int block_q, int block_k) {
  const struct attn_args *a = &p->args;
  const uint32_t heads = (uint32_t)(a->batch * a->kv_heads);
  const uint32_t section = index / (p->section * (uint32_t)p->k_blocks);
  const uint32_t in_section = index % (p->section * (uint32_t)p->k_blocks);
  const uint32_t width = min((uint32_t)p->section, heads - section * p->section);
  const uint32_t head = section * p->section + in_section % width;
  struct place at;
  at.b = head / (uint32_t)a->kv_heads;
  at.kv_head = (int)(head % (uint32_t)a->kv_heads);
  at.block = (int)(in_section / width);
  at.key_0 = at.block * block_k;
  set_sequence(&at, a);
  const int key_1 = min(at.key_0 + block_k, at.seq_k) - 1;
  const int query_0 = max(0, at.key_0 - at.band.high);
  const int query_1 = min(at.seq_q - 1, key_1 - at.band.low);
  at.first = query_0 / block_q;
  at.count = key_1 < at.key_0 || query_1 < query_0 ? 0 : query_1 / block_q - at.first + 1;
  return at;
}

#endif
