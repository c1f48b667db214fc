/* flash_fwd_tile.cuh: the tiles of flash_fwd_sm80, for the HEAD_DIM and DTYPE of the instance. */
#ifndef ATTN_FLASH_FWD_TILE_CUH
#define ATTN_FLASH_FWD_TILE_CUH

#include "flash_fwd_place.cuh"
#include "ptx_sm80.cuh"
#include "softmax.cuh"
#include "tile_sm80.cuh"

#define PASTE_(a, b) a##b
#define PASTE(a, b)  PASTE_(a, b)
#define MMA          PASTE(mma_m16n8k16_, DTYPE)
#define PACK         PASTE(pack_, DTYPE)

/* PLAIN: aligned rows, no mask tensor, soft cap or dropout. GENERAL: everything. FEW: everything,
 * for at most 16 rows: warps share the rows and split each block's keys. */
enum kind { PLAIN, GENERAL, FEW };

/* Tiles, measured on an H200 (README.md). Larger ones spill: O and two blocks of S fill the
 * registers. Shared memory stays under 99 KB, which every GPU from sm_80 on has. */
template <int KIND> struct tile {
  static constexpr bool WIDE = HEAD_DIM > 128;
  static constexpr int M_TILES = KIND == FEW || WIDE ? 1 : 2; /* of 16 rows a warp holds */
  static constexpr int WARPS = KIND == FEW && WIDE ? 2 : 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int KEY_WARPS = KIND == FEW ? WARPS : 1; /* warps that share rows */
  static constexpr int BLOCK_Q = 16 * M_TILES * WARPS / KEY_WARPS;
  static constexpr int BLOCK_K = KIND == FEW                       ? 16 * WARPS
                                 : KIND == PLAIN && HEAD_DIM <= 64 ? 64
                                                                   : 32;
  static constexpr int WARP_K = BLOCK_K / KEY_WARPS; /* keys of a block that a warp works on */
  /* Whether S of the next block is computed while this block's becomes P (see flash_fwd_sm80.cuh).
   * At 128 columns that spills, and P is made beside P . V instead. */
  static constexpr bool AHEAD = HEAD_DIM != 128 || KIND == FEW;
  static constexpr int SLOT = BLOCK_K * PITCH;                 /* bytes of a block of K or of V */
  static constexpr int SHARED = 4 * SLOT + BLOCK_Q * PITCH;    /* K, K, V, V, Q */
  static constexpr int GROUPS = HEAD_DIM / 16 * (WARP_K / 16); /* of mma, in each product */
  static constexpr int ROW = HEAD_DIM + 2; /* floats of a partial row: O, maximum, sum */
  static_assert(KEY_WARPS == 1 || WARPS * BLOCK_Q * ROW * 4 <= SHARED, "partials do not fit");
  static_assert(SHARED + 1152 <= 99 * 1024, "sm_86 and sm_89 have no more");
};

/* Row maxima start here: below every score, yet finite, so that no -inf meets another. */
#define LOWEST_MAX (-3e38f)

#endif
