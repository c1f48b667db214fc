/* flash_fwd_plan.h: how one call of flash_fwd_sm80 is cut into blocks. The host fills a plan, a
 * block finds its place in it (flash_fwd_place.cuh).
 *
 * Tile     BLOCK_Q rows of one head. With pack > 1 the rows are those of a kv head's whole group,
 *          row r being query r / pack of head r % pack, so that few queries share K and V.
 * Order    Heads are cut into sections whose K and V fit in L2 together; in a section the tiles
 *          with the most keys (the last rows) of all heads come first. Without a right bound all
 *          tiles weigh the same, a section is one head, and K and V are read from DRAM once.
 * Split    Where tiles are too few to fill the GPU, splits neighbouring blocks share the keys of a
 *          tile, write partial rows, wait for the grid, and share out the rows to merge them. The
 *          wait is that of cooperative launch: all blocks are resident, and the driver owns the
 *          barrier's memory and keeps it apart for each launch. A counter of ours could not be: the
 *          workspace is unwritten memory, and a counter in the library would be shared by launches
 *          that run at once on two streams or in two replayed graphs.
 */
#ifndef ATTN_FLASH_FWD_PLAN_H
#define ATTN_FLASH_FWD_PLAN_H

#include "../attn.h"
#include "score.h"

#ifdef __cplusplus
extern "C" {
#endif

struct plan {
  struct attn_args args;
  struct attn_score score;
  int pack;        /* query heads that lie in a tile's rows: 1, or a kv head's whole group */
  int row_tiles;   /* tiles of pack heads */
  int section;     /* groups of pack heads whose tiles are walked together */
  int splits;      /* blocks of a tile */
  int slice;       /* batches of one blockIdx.y, 1 unless blockIdx.x could not count all */
  bool aligned;    /* every row starts at 16 bytes and has a multiple of 8 columns */
  float *partials; /* [tile][split][BLOCK_Q][HEAD_DIM + 2] where splits > 1 */
};

/* One kernel of an instance, and its tile. */
struct flash_fwd_kernel {
  const void *function;
  int block_q, block_k, threads, shared, partial_row; /* shared in bytes, partial_row in floats */
  signed char *blocks_per_sm;                         /* [ATTN_MOST_DEVICES] 0: not asked yet */
};

enum { ATTN_MOST_DEVICES = 64 };

/* The three kernels of a head size and dtype. */
struct flash_fwd_instance {
  struct flash_fwd_kernel plain;   /* aligned rows; no mask, soft cap, dropout, negative scale */
  struct flash_fwd_kernel general; /* everything */
  struct flash_fwd_kernel few;     /* everything, for up to its block_q rows of a kv head */
};

int64_t attn_flash_fwd_sm80_workspace(const struct flash_fwd_instance *instance,
                                      const struct attn_args *args);
int attn_flash_fwd_sm80_launch(const struct flash_fwd_instance *instance,
                               const struct attn_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif
