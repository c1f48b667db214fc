/* flash_fwd_sm90_load.cuh: what lies in the shared memory of flash_fwd_sm90.cuh, and the two
 * threads that fill it: one draws the block's tiles and fetches queries and keys, one fetches
 * values.
 */
#ifndef ATTN_FLASH_FWD_SM90_LOAD_CUH
#define ATTN_FLASH_FWD_SM90_LOAD_CUH

struct __align__(1024) fwd_shared {
  uint8_t q[Q_STAGES][WARPGROUPS][Q_BYTES]; /* [slab][64 rows][64 columns], swizzled */
  uint8_t k[STAGES][KV_BYTES];              /* [slab][KEYS rows][64 columns], swizzled */
  uint8_t v[STAGES][KV_BYTES];              /* the same */
  uint64_t q_full[Q_STAGES][WARPGROUPS], q_empty[Q_STAGES][WARPGROUPS];
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t tile_full[TILES], tile_empty[TILES];
  struct tile tiles[TILES]; /* round r is in r % TILES; a tile without rows is the end */
};

static __device__ __forceinline__ void load(uint8_t *to, int slab_bytes, const CUtensorMap *map,
                                            int row, int head, int batch, uint32_t full) {
  mbarrier_expect(full, SLABS * slab_bytes);
  for (int slab = 0; slab < SLABS; ++slab)
    tma_load(shared_address(to + slab * slab_bytes), map, 64 * slab, row, head, batch, full);
}

/* Draws the block's tiles, too, and tells the others. No warpgroup lags TILES rounds: before that,
 * all have returned the queries of later tiles. */
static __device__ __forceinline__ void produce_qk(const struct fwd_sm90 *f,
                                                  const CUtensorMap *q_map,
                                                  const CUtensorMap *k_map, struct fwd_shared *sh) {
  int kt = 0; /* blocks of keys so far */
  for (int round = 0;; ++round) {
    struct tile tile = tile_at(f, draw(f, round));
    int slot = round % Q_STAGES, parity = round / Q_STAGES & 1;
    /* The value producer has read the tile of TILES rounds ago. */
    mbarrier_wait(shared_address(&sh->tile_empty[round % TILES]), (round / TILES & 1) ^ 1);
    sh->tiles[round % TILES] = tile;
    mbarrier_arrive(shared_address(&sh->tile_full[round % TILES]));
    for (int w = 0; w < WARPGROUPS; ++w) {
      uint32_t full = shared_address(&sh->q_full[slot][w]);
      /* Warpgroup w is through with the slot's last queries; at first, the slot is free. */
      mbarrier_wait(shared_address(&sh->q_empty[slot][w]), parity ^ 1);
      if (is_end(&tile))
        mbarrier_arrive(full); /* no queries, just the news */
      else
        load(sh->q[slot][w], Q_SLAB, q_map, tile.row + 64 * w, tile.head, tile.batch, full);
    }
    if (is_end(&tile))
      return;
    for (int n = tile.end - 1; n >= tile.begin; --n, ++kt) {
      int stage = kt % STAGES;
      /* Every computing warp is through with the stage's last keys. */
      mbarrier_wait(shared_address(&sh->k_empty[stage]), (kt / STAGES & 1) ^ 1);
      load(sh->k[stage], KV_SLAB, k_map, n * KEYS, tile.head / f->group, tile.batch,
           shared_address(&sh->k_full[stage]));
    }
  }
}

static __device__ __forceinline__ void produce_v(const struct fwd_sm90 *f, const CUtensorMap *v_map,
                                                 struct fwd_shared *sh) {
  int vt = 0; /* blocks of values so far */
  for (int round = 0;; ++round) {
    mbarrier_wait(shared_address(&sh->tile_full[round % TILES]), round / TILES & 1); /* drawn */
    struct tile tile = sh->tiles[round % TILES];
    mbarrier_arrive(shared_address(&sh->tile_empty[round % TILES]));
    if (is_end(&tile))
      return;
    for (int n = tile.end - 1; n >= tile.begin; --n, ++vt) {
      int stage = vt % STAGES;
      /* Every computing warp is through with the stage's last values. */
      mbarrier_wait(shared_address(&sh->v_empty[stage]), (vt / STAGES & 1) ^ 1);
      load(sh->v[stage], KV_SLAB, v_map, n * KEYS, tile.head / f->group, tile.batch,
           shared_address(&sh->v_full[stage]));
    }
  }
}

#endif
