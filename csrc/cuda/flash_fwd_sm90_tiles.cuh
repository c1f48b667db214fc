/* flash_fwd_sm90_tiles.cuh: which tile of queries a block of flash_fwd_sm90.cuh does in each round.
 *
 * A tile is ROWS queries of one head; its keys are the blocks of KEYS that any of its rows sees. A
 * stream is one head of one batch entry. The order over all tiles:
 *
 *   band 0: the last `band` tiles of stream 0, last first, then those of stream 1, ...
 *   band 1: the `band` tiles before those of each stream, and so on
 *
 * Blocks take tiles in this order, round by round. Under a causal mask the last tiles are the
 * heaviest, so the light ones come at the end, where a whole round is not full; every other round
 * goes backwards through the blocks (snake), so that who did the heaviest of one round does the
 * lightest of the next. Tiles of a band share their keys and values in the L2 cache. Without a mask
 * all tiles weigh the same: one band, no snake, and a stream's keys are read from memory once.
 */
#ifndef ATTN_FLASH_FWD_SM90_TILES_CUH
#define ATTN_FLASH_FWD_SM90_TILES_CUH

/* What the kernel is told, besides its three tensor maps. */
struct fwd_sm90 {
  SCALAR *out;
  float *logsumexp;                     /* [batch, heads, seq_q] */
  int64_t stride_b, stride_h, stride_s; /* of out */
  float scale_log2;                     /* scale / ln 2: exp(scale * x) is 2^(scale_log2 * x) */
  int heads, group, seq_q, seq_k;       /* group: query heads of one key head */
  int left, right;                      /* row i sees the keys i + left <= j < i + right */
  int tiles_m, tiles, band, snake;      /* tiles_m: tiles of a stream; tiles: of all streams */
};

struct tile {
  int row, head, batch; /* row: the first of the tile */
  int begin, end;       /* blocks of keys */
};

static __device__ __forceinline__ int keys_begin(const struct fwd_sm90 *f, int row) {
  return max(0, row + f->left);
}

static __device__ __forceinline__ int keys_end(const struct fwd_sm90 *f, int row) {
  return max(0, min(f->seq_k, row + f->right));
}

/* This block's tile in a round, or false where it has none. */
static __device__ __forceinline__ bool next_tile(const struct fwd_sm90 *f, int round,
                                                 struct tile *tile) {
  int block = blockIdx.x, blocks = gridDim.x;
  int index = round * blocks + (f->snake && (round & 1) ? blocks - 1 - block : block);
  if (index >= f->tiles)
    return false;
  int streams = f->tiles / f->tiles_m;
  int band = index / (f->band * streams);
  int width = min(f->band, f->tiles_m - band * f->band);
  int rest = index - band * f->band * streams;
  int stream = rest / width;
  int m = f->tiles_m - 1 - (band * f->band + rest % width);
  tile->row = m * ROWS;
  tile->head = stream % f->heads;
  tile->batch = stream / f->heads;
  tile->begin = keys_begin(f, tile->row) / KEYS;
  tile->end = (keys_end(f, min(tile->row + ROWS, f->seq_q) - 1) + KEYS - 1) / KEYS;
  return true;
}

#endif
