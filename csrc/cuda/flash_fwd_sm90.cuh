/* flash_fwd_sm90.cuh: fused attention, forward, for Hopper.
 *
 * Formula  out_i = sum_j exp(s_ij - lse_i) v_j over the keys j that row i sees, with
 *          s_ij = scale (q_i . k_j) and lse_i = ln sum_j exp(s_ij); attn.h has the rest
 *          query [B, Hq, Sq, D]  key, value [B, Hkv, Sk, D]  out [B, Hq, Sq, D]  lse [B, Hq, Sq]
 *
 * Architecture  sm_90a. flash_fwd_sm80.cuh runs here too, but its tensor core instructions take
 *          both factors from registers and hold up the warp. wgmma takes them from shared memory
 *          and runs on its own while the warps that issued it compute; the copy engine (TMA) fills
 *          shared memory without any of them; registers move from warps that need few to warps
 *          that need many. What this file is about: the tensor cores never run out of work.
 *
 * Grid     one block on each multiprocessor; each does tile after tile of ROWS queries, in the
 *          order of flash_fwd_sm90_tiles.cuh. A tile walks its keys from the last block to the
 *          first: those at the diagonal or the end, which need a mask, come first, and the many
 *          that need none follow.
 *
 * Roles    warpgroup 0        two producers, one thread each: queries and keys; values
 *          warpgroups 1 ...   compute, 64 rows of the tile each
 *
 * Tiles    D     rows   keys a block   stages of q, k, v   threads   registers (producer, others)
 *          64    192    128            2, 2, 2             512       32, 160
 *          128   128    128            2, 2, 2             384       24, 240
 *          256   128    80             1, 2, 2             384       24, 240
 *          A thread that computes holds D / 2 registers of o, KEYS / 2 of scores and KEYS / 4 of
 *          probabilities. Shared memory: 2 D (stages of q * rows + 4 KEYS) bytes, and barriers.
 *
 * Shared memory, in this order
 *          q [stage][warpgroup][slab][64 rows]   D 64: 48 KB   128: 64 KB   256: 64 KB
 *          k [stage][slab][KEYS rows]                  32 KB        64 KB        80 KB
 *          v [stage][slab][KEYS rows]                  32 KB        64 KB        80 KB
 *          barriers
 *          A row of a slab is 64 columns, 128 bytes; its 16-byte chunk c lies at c ^ row % 8,
 *          which is how the copy engine writes and wgmma reads without bank conflicts.
 *
 * Timeline of two warpgroups, A and B. S n is the product q k^T with block n of the keys, O n the
 *          product p v with block n of the values, e n what lies between: max, exp, sum.
 *
 *          tensor cores   A: S n  O n+1   B: S n  O n+1   A: S n-1  O n   B: S n-1  O n   ...
 *          A computes             e n -----------------|            e n-1 ----------------|
 *          B computes                             e n -----------------|          e n-1 ----
 *
 *          Two overlaps. Within a warpgroup e n runs while O n+1 does: both products are issued
 *          together, and only S is waited for. Between warpgroups one computes while the other
 *          multiplies; the turn keeps their products from interleaving, so that S comes early.
 *          At D 256 there is less to compute for each product, and no turn.
 *
 * Barriers A full barrier's phase is over when the bytes that its one arrival announced have
 *          landed, an empty one's when all that read the stage have arrived.
 *                    arrivals                         waits            protects
 *          q_full    1, and the copy engine's bytes   its warpgroup    q from early reads
 *          q_empty   the 4 warps of its warpgroup     query producer   q from overwriting
 *          k_full    1, and the copy engine's bytes   all warpgroups   k from early reads
 *          k_empty   every computing warp             key producer     k from overwriting
 *          v_full    1, and the copy engine's bytes   all warpgroups   v from early reads
 *          v_empty   every computing warp             value producer   v from overwriting
 *          1 + w     (named) warpgroup w and the      warpgroup w      the turn: products of one
 *                    one before it                                     warpgroup stay together
 *
 * Numerics Products sum in fp32. Probabilities are rounded to the dtype of the values for the
 *          second product, not for their sum. A row's reference may lag its maximum by SLACK
 *          powers of two. No sum depends on which block does a tile: bit-equal from run to run.
 *
 * The caller has checked (select.c)  no mask tensor, softcap, dropout or packing; D = Dv, one of
 *          64, 128, 256; rows that start at 16 bytes, no axis of stride 0; scale > 0; Sk at least
 *          1; fewer than 2^30 rows, keys and tiles.
 *
 * Bound by the chain of instructions of one warpgroup from its scores to its next products. At
 *          D 128, S 4096, no mask, a block of keys takes 2735 cycles, of which the tensor cores
 *          work 2048 and max, exp and sum take 1400. README.md beside this has what was tried.
 *
 * Sources  FlashAttention-3, arXiv 2407.08608, for both overlaps; the PTX ISA for instructions.
 */
#ifndef ATTN_FLASH_FWD_SM90_CUH
#define ATTN_FLASH_FWD_SM90_CUH

#include "../attn.h"
#include "ptx_sm90.cuh"
#include "tma.h"

/* The tile table. Plain numbers, since KEYS is part of a name. */
#if HEAD_DIM == 64
#  define WARPGROUPS         3 /* that compute, 64 rows each */
#  define PRODUCER_REGISTERS 32
#  define CONSUMER_REGISTERS 160
#else
#  define WARPGROUPS         2
#  define PRODUCER_REGISTERS 24
#  define CONSUMER_REGISTERS 240
#endif
#if HEAD_DIM == 256
#  define KEYS 80
#else
#  define KEYS 128
#endif

/* Warpgroups take turns at the tensor cores. */
#define TURNS (HEAD_DIM <= 128)
/* When the reference moved, o is rescaled before the scores' product is issued, or, with 128
 * registers of o to multiply, while it runs. */
#define RESCALE_LATE (HEAD_DIM > 128)
/* Powers of two by which a row's maximum may outgrow its reference. */
#define SLACK 8.0f
#define LN2   0.693147180559945309f

enum {
  STAGES = 2,                        /* blocks of keys, and of values, in shared memory */
  Q_STAGES = HEAD_DIM > 128 ? 1 : 2, /* tiles of queries */
  ROWS = 64 * WARPGROUPS,
  THREADS = 128 * (1 + WARPGROUPS),
  SLABS = HEAD_DIM / 64, /* of 64 columns: 128 bytes a row, what the swizzle spans */
  Q_SLAB = 64 * 128,     /* bytes */
  KV_SLAB = KEYS * 128,
  Q_BYTES = SLABS * Q_SLAB, /* one warpgroup's queries */
  KV_BYTES = SLABS * KV_SLAB
};

#include "flash_fwd_sm90_tiles.cuh"

#include "flash_fwd_sm90_rows.cuh"

struct __align__(1024) fwd_shared {
  uint8_t q[Q_STAGES][WARPGROUPS][Q_BYTES]; /* [slab][64 rows][64 columns], swizzled */
  uint8_t k[STAGES][KV_BYTES];              /* [slab][KEYS rows][64 columns], swizzled */
  uint8_t v[STAGES][KV_BYTES];              /* the same */
  uint64_t q_full[Q_STAGES][WARPGROUPS], q_empty[Q_STAGES][WARPGROUPS];
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

/* ---- producers: one thread fetches queries and keys, one values ---- */

static __device__ __forceinline__ void produce_qk(const struct fwd_sm90 *f,
                                                  const CUtensorMap *q_map,
                                                  const CUtensorMap *k_map, struct fwd_shared *sh) {
  struct tile tile;
  int kt = 0; /* blocks of keys so far */
  for (int round = 0; next_tile(f, round, &tile); ++round) {
    int slot = round % Q_STAGES, parity = round / Q_STAGES & 1;
    for (int w = 0; w < WARPGROUPS; ++w) {
      uint32_t full = shared_address(&sh->q_full[slot][w]);
      /* Warpgroup w is through with the slot's last queries; at first, the slot is free. */
      mbarrier_wait(shared_address(&sh->q_empty[slot][w]), parity ^ 1);
      mbarrier_expect(full, Q_BYTES);
      tma_load(shared_address(sh->q[slot][w]), q_map, tile.row + 64 * w, tile.head, tile.batch,
               full);
    }
    for (int n = tile.end - 1; n >= tile.begin; --n, ++kt) {
      int stage = kt % STAGES;
      uint32_t full = shared_address(&sh->k_full[stage]);
      /* Every computing warp is through with the stage's last keys. */
      mbarrier_wait(shared_address(&sh->k_empty[stage]), (kt / STAGES & 1) ^ 1);
      mbarrier_expect(full, KV_BYTES);
      tma_load(shared_address(sh->k[stage]), k_map, n * KEYS, tile.head / f->group, tile.batch,
               full);
    }
  }
}

static __device__ __forceinline__ void produce_v(const struct fwd_sm90 *f, const CUtensorMap *v_map,
                                                 struct fwd_shared *sh) {
  struct tile tile;
  int vt = 0; /* blocks of values so far */
  for (int round = 0; next_tile(f, round, &tile); ++round)
    for (int n = tile.end - 1; n >= tile.begin; --n, ++vt) {
      int stage = vt % STAGES;
      uint32_t full = shared_address(&sh->v_full[stage]);
      /* Every computing warp is through with the stage's last values. */
      mbarrier_wait(shared_address(&sh->v_empty[stage]), (vt / STAGES & 1) ^ 1);
      mbarrier_expect(full, KV_BYTES);
      tma_load(shared_address(sh->v[stage]), v_map, n * KEYS, tile.head / f->group, tile.batch,
               full);
    }
}

/* ---- consumers ---- */

/* The turn goes round the warpgroups, once for each block of keys of a tile but the first. 256: the
 * 128 threads of warpgroup w, and the 128 of the one before, which pass the turn on. */
static __device__ __forceinline__ void turn_wait(int w) {
  if (TURNS)
    named_sync(1 + w, 256);
}

static __device__ __forceinline__ void turn_pass(int w) {
  if (TURNS)
    named_arrive(1 + (w + 1) % WARPGROUPS, 256);
}

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

/* s = q k^T: [64, KEYS] = [64, HEAD_DIM] [KEYS, HEAD_DIM]^T, 16 columns of both at a time. */
static __device__ __forceinline__ void multiply_qk(float *s, uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    int slab = step / 4, within = step % 4 * 32;
    JOIN(wgmma_ss_n, KEYS)(s, q + (slab * Q_SLAB + within) / 16, k + (slab * KV_SLAB + within) / 16,
                           step > 0);
  }
}

/* o += p v: [64, HEAD_DIM] += [64, KEYS] [KEYS, HEAD_DIM], 16 keys at a time. */
static __device__ __forceinline__ void multiply_pv(float *o, const uint32_t *p, uint64_t v) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step)
    JOIN(wgmma_rs_n, HEAD_DIM)(o, p + 4 * step, v + step * 16 * 128 / 16);
}

static __device__ __forceinline__ void consume(const struct fwd_sm90 *f, struct fwd_shared *sh,
                                               int w) {
  int lane = threadIdx.x % 32;
  int row_in_group = threadIdx.x % 128 / 32 * 16 + lane / 4;
  bool leader = lane == 0; /* arrives for its warp */
  uint64_t q_first = descriptor(shared_address(sh->q[0][w]), Q_SLAB);
  uint64_t k_first = descriptor(shared_address(sh->k[0]), KV_SLAB);
  uint64_t v_first = descriptor(shared_address(sh->v[0]), KV_SLAB);
  float o[HEAD_DIM / 2];          /* probabilities times values, so far */
  float s[KEYS / 2];              /* scores of one block, then its probabilities */
  uint32_t p[KEYS / 4];           /* those, as the factor of the product with the values */
  float top[2], sum[2], alpha[2]; /* of this thread's two rows */
  struct tile tile;
  int kt = 0, vt = 0; /* blocks of keys and of values that this warpgroup is through with */

#define K_STAGE (k_first + kt % STAGES * (KV_BYTES / 16))
#define V_STAGE (v_first + vt % STAGES * (KV_BYTES / 16))
#define K_FULL  shared_address(&sh->k_full[kt % STAGES]), kt / STAGES & 1
#define V_FULL  shared_address(&sh->v_full[vt % STAGES]), vt / STAGES & 1
#define K_EMPTY shared_address(&sh->k_empty[kt % STAGES])
#define V_EMPTY shared_address(&sh->v_empty[vt % STAGES])

  if (w == WARPGROUPS - 1)
    turn_pass(w); /* the first turn is warpgroup 0's */

  for (int round = 0; next_tile(f, round, &tile); ++round) {
    int first_row = tile.row + 64 * w, last_row = min(first_row + 64, f->seq_q) - 1;
    int row = first_row + row_in_group;
    int begin[2] = {keys_begin(f, row), keys_begin(f, row + 8)};
    int end[2] = {keys_end(f, row), keys_end(f, row + 8)};
    /* Blocks of keys: from visible on none is seen; between the clear ones none needs a mask. */
    int visible = first_row < f->seq_q ? (keys_end(f, last_row) + KEYS - 1) / KEYS : tile.begin;
    int clear_begin = (keys_begin(f, last_row) + KEYS - 1) / KEYS;
    int clear_end = keys_end(f, first_row) / KEYS;
    int slot = round % Q_STAGES;
    uint64_t q = q_first + slot * WARPGROUPS * Q_BYTES / 16;
    uint32_t q_empty = shared_address(&sh->q_empty[slot][w]);
    int n = tile.end - 1;

#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i)
      o[i] = 0.0f;
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;

    mbarrier_wait(shared_address(&sh->q_full[slot][w]), round / Q_STAGES & 1); /* q has landed */
    for (; n >= max(visible, tile.begin); --n, ++kt, ++vt) { /* pass over what others need */
      if (n > tile.begin) {
        turn_wait(w);
        turn_pass(w);
      }
      mbarrier_wait(K_FULL); /* else the arrivals below would count for the stage's last round */
      mbarrier_wait(V_FULL);
      if (leader) {
        mbarrier_arrive(K_EMPTY);
        mbarrier_arrive(V_EMPTY);
      }
    }
    if (n < tile.begin) { /* these rows see no key at all */
      if (leader)
        mbarrier_arrive(q_empty);
    } else {
      mbarrier_wait(K_FULL); /* the tile's last keys have landed */
      wgmma_fence();
      multiply_qk(s, q, K_STAGE);
      wgmma_commit();
      wgmma_wait(0);
      wgmma_landed(s, KEYS / 2);
      if (leader) {
        mbarrier_arrive(K_EMPTY); /* to the producer: this warp's part of the product is done */
        if (n == tile.begin)
          mbarrier_arrive(q_empty);
      }
      ++kt;
      if (n < clear_begin || n >= clear_end)
        mask(s, n * KEYS + lane % 4 * 2, begin, end);
      bool moved = softmax(s, top, sum, alpha, f->scale_log2), pending = false;

      for (--n; n >= tile.begin; --n) {
        /* The product of block n + 2 with its values ran under the exponentials of n + 1. The wait
         * stands here, behind the loop's back edge, because the compiler moves it up to the start
         * of its basic block, and so past all exponentials, wherever it can. */
        wgmma_wait(0);
        wgmma_landed(o, HEAD_DIM / 2);
        if (leader && pending)
          mbarrier_arrive(V_EMPTY);
        vt += pending;
        to_factor(p, s); /* not before the wait: that product read p */
        if (!RESCALE_LATE && moved && pending)
          rescale(o, alpha);

        mbarrier_wait(K_FULL); /* the keys of n have landed */
        turn_wait(w);          /* the warpgroup before has issued its products */
        wgmma_fence();
        multiply_qk(s, q, K_STAGE);
        wgmma_commit();
        if (RESCALE_LATE && moved && pending)
          rescale(o, alpha);
        mbarrier_wait(V_FULL); /* the values of n + 1 have landed */
        wgmma_fence();
        multiply_pv(o, p, V_STAGE);
        wgmma_commit();
        pending = true;
        turn_pass(w);

        wgmma_wait(1); /* the scores are there; the other product goes on */
        wgmma_landed(s, KEYS / 2);
        if (leader) {
          mbarrier_arrive(K_EMPTY);
          if (n == tile.begin)
            mbarrier_arrive(q_empty);
        }
        ++kt;
        if (n < clear_begin || n >= clear_end)
          mask(s, n * KEYS + lane % 4 * 2, begin, end);
        moved = softmax(s, top, sum, alpha, f->scale_log2);
      }

      wgmma_wait(0);
      wgmma_landed(o, HEAD_DIM / 2);
      if (leader && pending)
        mbarrier_arrive(V_EMPTY);
      vt += pending;
      to_factor(p, s);
      if (moved && pending)
        rescale(o, alpha);
      mbarrier_wait(V_FULL); /* the values of the tile's first block have landed */
      wgmma_fence();
      multiply_pv(o, p, V_STAGE);
      wgmma_commit();
      wgmma_wait(0);
      wgmma_landed(o, HEAD_DIM / 2);
      if (leader)
        mbarrier_arrive(V_EMPTY);
      ++vt;
    }
    store(f, &tile, row, o, top, sum);
  }
}

/* ---- kernel and launcher ---- */

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(_kernel)(const __grid_constant__ struct fwd_sm90 f,
                  const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  struct fwd_shared *sh = (struct fwd_shared *)shared_bytes;
  /* The shuffle tells the compiler that the number is the same in the whole warp. Without it, every
   * branch on a warpgroup's rows counts as divergent, and ptxas puts a wait behind each product. */
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Q_STAGES; ++slot)
      for (int w = 0; w < WARPGROUPS; ++w) {
        mbarrier_init(shared_address(&sh->q_full[slot][w]), 1);
        mbarrier_init(shared_address(&sh->q_empty[slot][w]), 4);
      }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared_address(&sh->k_full[stage]), 1);
      mbarrier_init(shared_address(&sh->v_full[stage]), 1);
      mbarrier_init(shared_address(&sh->k_empty[stage]), 4 * WARPGROUPS);
      mbarrier_init(shared_address(&sh->v_empty[stage]), 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
  __syncthreads(); /* thread 0 has set up the barriers that all use from here on */

  if (warp < 4) {
    setmaxnreg_dec(PRODUCER_REGISTERS);
    if (threadIdx.x == 0)
      produce_qk(&f, &q_map, &k_map, sh);
    if (threadIdx.x == 32)
      produce_v(&f, &v_map, sh);
  } else {
    setmaxnreg_inc(CONSUMER_REGISTERS);
    consume(&f, sh, warp / 4 - 1);
  }
}

enum { FAR = 1 << 30 }; /* further than any two rows are apart */

static int near(int64_t distance) {
  return distance < -FAR ? -FAR : distance > FAR ? FAR : (int)distance;
}

extern "C" int NAME()(const struct attn_args *args, void *stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute((const void *)NAME(_kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(struct fwd_shared));

  CUtensorMap q_map, k_map, v_map;
  int status = (int)error;
  if (status == 0)
    status = attn_tma_map(&q_map, &args->query, args->dtype, args->batch, args->heads, args->seq_q,
                          SLABS, 64);
  if (status == 0)
    status = attn_tma_map(&k_map, &args->key, args->dtype, args->batch, args->kv_heads, args->seq_k,
                          SLABS, KEYS);
  if (status == 0)
    status = attn_tma_map(&v_map, &args->value, args->dtype, args->batch, args->kv_heads,
                          args->seq_k, SLABS, KEYS);

  if (status == 0) {
    int64_t shift = args->bottom_right ? args->seq_k - args->seq_q : 0;
    int64_t tiles_m = (args->seq_q + ROWS - 1) / ROWS, tiles = tiles_m * args->heads * args->batch;
    bool even = args->window_left < 0 && args->window_right < 0; /* all tiles weigh the same */
    struct fwd_sm90 f = {
        .out = (SCALAR *)args->out.data,
        .logsumexp = (float *)args->logsumexp,
        .stride_b = args->out.stride_b,
        .stride_h = args->out.stride_h,
        .stride_s = args->out.stride_s,
        .scale_log2 = (float)(args->scale / 0.693147180559945309417),
        .heads = (int)args->heads,
        .group = (int)(args->heads / args->kv_heads),
        .seq_q = (int)args->seq_q,
        .seq_k = (int)args->seq_k,
        .left = args->window_left < 0 ? -FAR : near(shift - args->window_left),
        .right = args->window_right < 0 ? FAR : near(shift + args->window_right + 1),
        .tiles_m = (int)tiles_m,
        .tiles = (int)tiles,
        .band = (int)(even || tiles_m < 4 ? tiles_m : 4),
        .snake = !even,
    };
    void *arguments[] = {&f, &q_map, &k_map, &v_map};
    error =
        cudaLaunchKernel((const void *)NAME(_kernel),
                         dim3((unsigned)(tiles < multiprocessors ? tiles : multiprocessors)),
                         dim3(THREADS), arguments, sizeof(struct fwd_shared), (cudaStream_t)stream);
    status = (int)error;
  }
  if (status > 0)
    cudaGetLastError(); /* it is reported here, so it must not wait for the next caller */
  return status == cudaErrorNoKernelImageForDevice ? ATTN_NO_DEVICE_CODE : status;
}

#endif
