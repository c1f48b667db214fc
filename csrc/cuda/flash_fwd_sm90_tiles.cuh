/* flash_fwd_sm90_tiles.cuh: which tile of queries a block of flash_fwd_sm90.cuh does next.
 *
 * A tile is ROWS queries of one head, the first tile of a head less where ROWS does not divide
 * their number: under a causal mask the first has the fewest keys, so it is the one to waste lanes
 * in. Its keys are the blocks of KEYS that any of its rows sees. A stream is one head of one batch
 * entry. The order over all tiles:
 *
 *   section 0: the last `band` tiles of stream 0, last first, then those of the streams up to
 *              section - 1, then the `band` tiles before those of each, ...
 *   section 1: the same for the streams section ... 2 section - 1, and so on
 *
 * Under a causal mask the last tiles are the heaviest, so that light ones fill the gaps at the end;
 * a section's keys and values fit in the L2 cache. Without a mask all tiles weigh the same: a
 * section is one stream.
 *
 * A block's first tile is that of its number. Then it draws: a counter in memory hands out the rest
 * in order, so a block that was given light tiles gets more of them. There is one counter for each
 * CUDA stream, whose launches follow each other, and the block that draws the last number of a
 * launch sets it back to 0: no memset before, one device event a call. Where a stream has none (it
 * is being captured into a graph, which may run beside others; or there are too many streams),
 * blocks take turns at the order instead, every other round backwards (snake) under a causal mask,
 * so that who did the heaviest of one round does the lightest of the next; that wants one section
 * and bands of some tiles.
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
  int tiles_m, tiles;                   /* of a stream, of all streams */
  int section, band, snake;             /* the order */
  int counter;                          /* of the CUDA stream, or negative: none */
};

/* Numbers drawn by the launch that a CUDA stream is running; 0 between launches. */
static __device__ unsigned counters[ATTN_STREAM_SLOTS];

struct tile {
  int row, row_end, head, batch; /* rows [row, row_end) */
  int begin, end;                /* blocks of keys */
};

static __device__ __forceinline__ int keys_begin(const struct fwd_sm90 *f, int row) {
  return max(0, row + f->left);
}

static __device__ __forceinline__ int keys_end(const struct fwd_sm90 *f, int row) {
  return max(0, min(f->seq_k, row + f->right));
}

/* The place in the order of this block's tile of a round; from f->tiles on there is none. One
 * thread of a block asks, once for each round. */
static __device__ __forceinline__ int draw(const struct fwd_sm90 *f, int round) {
  int block = blockIdx.x, blocks = gridDim.x;
  if (round == 0)
    return block;
  if (f->counter < 0)
    return round * blocks + (f->snake && (round & 1) ? blocks - 1 - block : block);
  unsigned number = atomicAdd(&counters[f->counter], 1u);
  if (number == (unsigned)f->tiles - 1) /* one draw after each tile: this was the last */
    counters[f->counter] = 0;
  return blocks + (int)number;
}

/* Behind the last tile comes one without rows. */
static __device__ __forceinline__ bool is_end(const struct tile *tile) {
  return tile->row_end == 0;
}

static __device__ __forceinline__ struct tile tile_at(const struct fwd_sm90 *f, int index) {
  struct tile tile = {};
  if (index >= f->tiles)
    return tile;
  int streams = f->tiles / f->tiles_m;
  int first = index / (f->section * f->tiles_m) * f->section; /* stream of the section */
  int rest = index - first * f->tiles_m;
  int width = min(f->section, streams - first);
  int later = rest / (f->band * width) * f->band; /* tiles of a stream in the bands before */
  rest -= later * width;
  int high = min(f->band, f->tiles_m - later);
  int stream = first + rest / high;
  int m = f->tiles_m - 1 - later - rest % high;
  tile.row_end = f->seq_q - (f->tiles_m - 1 - m) * ROWS;
  tile.row = max(0, tile.row_end - ROWS);
  tile.head = stream % f->heads;
  tile.batch = stream / f->heads;
  tile.begin = keys_begin(f, tile.row) / KEYS;
  tile.end = (keys_end(f, tile.row_end - 1) + KEYS - 1) / KEYS;
  return tile;
}

/* The blocks of keys that a warpgroup walks through in a tile, from the last to the first. */
struct walk {
  int begin, end;             /* of the tile */
  int visible;                /* blocks from here on are seen by none of the warpgroup's rows */
  int clear_begin, clear_end; /* blocks between these need no mask */
  bool is_end;                /* no tile is left */
};

static __device__ __forceinline__ struct walk walk_of(const struct fwd_sm90 *f,
                                                      const struct tile *tile, int w) {
  int row = warp_uniform(tile->row), row_end = warp_uniform(tile->row_end);
  int begin = warp_uniform(tile->begin), end = warp_uniform(tile->end);
  int first = row + 64 * w, last = min(first + 64, row_end) - 1;
  return (struct walk){.begin = begin,
                       .end = end,
                       .visible = last < first ? begin : (keys_end(f, last) + KEYS - 1) / KEYS,
                       .clear_begin = (keys_begin(f, last) + KEYS - 1) / KEYS,
                       .clear_end = keys_end(f, first) / KEYS,
                       .is_end = row_end == 0};
}

#endif
