/* flash_bwd_plan.h: how one call of flash_bwd_sm80 is cut into blocks, and what its workspace
 * holds.
 *
 * Rows     The queries of each head are cut into row blocks of BLOCK_Q, numbered over all heads;
 *          packed sequences b = 0, 1, ... of a head start at row block cu_seq[b] / BLOCK_Q + b.
 * Order    Heads are cut into sections whose queries, output gradients and dQ fit in L2 together;
 *          in a section the key blocks that most queries see come first. Where all key blocks weigh
 *          the same a section is one head.
 * Workspace
 *   stats  [row block][2][BLOCK_Q]: log2(e) * logsumexp, and delta; +inf and 0 past the last row
 *          and for rows without keys, so that their P is 0 with no test
 *   dq     [row block][BLOCK_Q * HEAD_DIM]: fp32 sums, in the order of the fragments that add to it
 *   turns  [row block][2]: which key block adds to dq next, where sums must be deterministic
 *   dmask  fp32 sums of the mask's gradient, where the mask is broadcast
 */
#ifndef ATTN_FLASH_BWD_PLAN_H
#define ATTN_FLASH_BWD_PLAN_H

#include "../attn.h"
#include "score.h"

#ifdef __cplusplus
extern "C" {
#endif

struct plan {
  struct attn_args args;
  struct attn_score score;
  int q_blocks, k_blocks; /* of the longest sequence */
  int section;            /* key heads whose key blocks are walked together */
  int64_t packed_blocks;  /* row blocks of a head, where sequences are packed */
  bool aligned;           /* every row starts at 16 bytes and has a multiple of 8 columns */

  float *stats, *dq;
  int *turns;             /* NULL: in any order */
  struct attn_mask dmask; /* where the kernel adds the mask's gradient; data NULL: not asked for */
  bool dmask_shared;      /* several pairs add to one element of it */
  int64_t dmask_sizes[4]; /* of its axes, 1 where it is broadcast */
  int64_t dmask_sums[4];  /* how many of its elements make one of grad_mask, by axis */
};

/* A key block's kernel and its tile. */
struct flash_bwd_kernel {
  const void *function;
  int block_q, block_k, shared; /* shared in bytes */
  const void *before, *after;   /* kernels that prepare and that convert, of the same block_q */
};

/* The kernels of a head size and dtype. plain: aligned rows; every gradient but the mask's; no
 * mask, soft cap, dropout, negative scale. small: for GPUs whose blocks have 99 KB of shared
 * memory. */
struct flash_bwd_instance {
  int head_dim;
  struct flash_bwd_kernel plain, general, small;
};

enum { ATTN_FLASH_BWD_THREADS = 256 };

int64_t attn_flash_bwd_sm80_workspace(const struct attn_args *args, int head_dim);
int attn_flash_bwd_sm80_launch(const struct flash_bwd_instance *instance,
                               const struct attn_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif
