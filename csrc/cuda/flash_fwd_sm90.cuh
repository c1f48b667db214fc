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
 * Grid     one block on each multiprocessor; each does tile after tile of ROWS queries, which it
 *          draws as flash_fwd_sm90_tiles.cuh says. A tile walks its keys from the last block to the
 *          first: those at the diagonal or the end, which need a mask, come first, and the many
 *          that need none follow.
 *
 * Roles    warpgroup 0        two producers, one thread each: tiles, queries and keys; values
 *          warpgroups 1 ...   compute, 64 rows of the tile each
 *
 * Tiles    D     rows   keys a block   stages of q, k, v   threads   registers (producer, others)
 *          64    192    128            2, 2, 2             512       32, 160
 *          96    128    128            2, 2, 2             384       24, 240
 *          128   128    128            2, 2, 2             384       24, 240
 *          192   128    112            1, 2, 2             384       24, 240
 *          256   128    80             1, 2, 2             384       24, 240
 *          A thread that computes holds D / 2 registers of o, KEYS / 2 of scores and KEYS / 4 of
 *          probabilities. Shared memory: 128 SLABS (stages of q * rows + 4 KEYS) bytes, barriers.
 *
 * Shared memory, in this order
 *                                                D 64    96, 128   192     256
 *          q [stage][warpgroup][slab][64 rows]   48 KB   64 KB     48 KB   64 KB
 *          k [stage][slab][KEYS rows]            32 KB   64 KB     84 KB   80 KB
 *          v [stage][slab][KEYS rows]            32 KB   64 KB     84 KB   80 KB
 *          barriers, and the last TILES tiles that were drawn
 *          A row of a slab is 64 columns, 128 bytes; its 16-byte chunk c lies at c ^ row % 8,
 *          which is how the copy engine writes and wgmma reads without bank conflicts. At D 96 the
 *          second half of the second slab is zeros, which no product reads.
 *
 * Timeline of two warpgroups, A and B. S n is the product q k^T with block n of the keys, O n the
 *          product p v with block n of the values, e n what lies between: exp and sum.
 *
 *          tensor cores   A: S n  O n+1   B: S n  O n+1   A: S n-1  O n   B: S n-1  O n   ...
 *          A computes             e n -----------------|            e n-1 ----------------|
 *          B computes                             e n -----------------|          e n-1 ----
 *
 *          Two overlaps. Within a warpgroup e n runs while O n+1 does: both products are issued
 *          together, and only S is waited for. Between warpgroups one computes while the other
 *          multiplies; the turn keeps their products from interleaving, so that S comes early.
 *          At D > 128 there is less to compute for each product, and no turn. The chain goes on
 *          from tile to tile: S of the next tile's last keys runs beside O of this one's first.
 *
 * Barriers A full barrier's phase is over when the bytes that its one arrival announced have
 *          landed, an empty one's when all that read the stage have arrived.
 *                    arrivals                         waits            protects
 *          q_full    1, and the copy engine's bytes   its warpgroup    q from early reads; the tile
 *          q_empty   the 4 warps of its warpgroup     query producer   q from overwriting
 *          k_full    1, and the copy engine's bytes   all warpgroups   k from early reads
 *          k_empty   every computing warp             key producer     k from overwriting
 *          v_full    1, and the copy engine's bytes   all warpgroups   v from early reads
 *          v_empty   every computing warp             value producer   v from overwriting
 *          tile_full   1                              value producer   the tile from early reads
 *          tile_empty  1, of the value producer       query producer   the tile from overwriting
 *          1 + w     (named) warpgroup w and the      warpgroup w      the turn: products of one
 *                    one before it                                     warpgroup stay together
 *
 * Numerics Products sum in fp32. Probabilities are 2^(score - reference), rounded to the dtype of
 *          the values for the second product, not for their sum. A row's reference is its maximum
 * in the first block that it sees, and in any block that needs a mask; where sums show that later
 * scores are much larger, the block is done again, with its maximum. No sum depends on which block
 * of the grid does a tile: bit-equal from run to run.
 *
 * The caller has checked (select.c)  no mask tensor, softcap, dropout or packing; D = Dv, one of
 *          64, 96, 128, 192, 256; rows that start at 16 bytes, no axis of stride 0; scale > 0; Sk
 *          at least 1; fewer than 2^30 rows, keys and tiles.
 *
 * Bound by the chain of instructions of one warpgroup from its scores to its next products. At
 *          D 128, S 4096, no mask, a block of keys takes 2490 cycles, of which the tensor cores
 *          work 2048 and exponentials take 840. README.md beside this has what was tried.
 *
 * Sources  FlashAttention-3, arXiv 2407.08608, for both overlaps; the PTX ISA for instructions.
 */
#ifndef ATTN_FLASH_FWD_SM90_CUH
#define ATTN_FLASH_FWD_SM90_CUH

#include "../attn.h"
#include "ptx_sm90.cuh"
#include "stream_slot.h"
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
#elif HEAD_DIM == 192
#  define KEYS 112
#else
#  define KEYS 128
#endif

/* Parts that can be left out to see what each is worth (benchmarks/bench_ablation.py). */
#ifndef TURNS
#  define TURNS (HEAD_DIM <= 128) /* warpgroups take turns at the tensor cores */
#endif
#ifndef OVERLAP
#  define OVERLAP 1 /* a product with values runs under the exponentials of the next block */
#endif
#ifndef CHAIN
#  define CHAIN 1 /* which goes on from tile to tile */
#endif
#ifndef DRAW
#  define DRAW 1 /* tiles are handed out by a counter */
#endif
#ifndef KEEP_REFERENCE
#  define KEEP_REFERENCE 1 /* no look for the maximum where no key needs a mask */
#endif
#ifndef SLACK
#  define SLACK 8.0f /* powers of two by which a maximum may outgrow its reference */
#endif

/* When the reference moved, o is rescaled before the scores' product is issued, or, with 128
 * registers of o to multiply, while it runs. */
#define RESCALE_LATE (HEAD_DIM > 128)
#define UNLIKELY(x)  __builtin_expect(x, 0)
/* Of one thread's probabilities of a row in a block, as long as nobody looks for the maximum. */
#define LARGEST_SUM 16384.0f
#define LN2         0.693147180559945309f

enum {
  STAGES = 2,                        /* blocks of keys, and of values, in shared memory */
  Q_STAGES = HEAD_DIM > 128 ? 1 : 2, /* tiles of queries */
  TILES = 8,                         /* their places, in shared memory */
  ROWS = 64 * WARPGROUPS,
  THREADS = 128 * (1 + WARPGROUPS),
  SLABS = (HEAD_DIM + 63) / 64, /* of 64 columns: 128 bytes a row, what the swizzle spans */
  Q_SLAB = 64 * 128,            /* bytes */
  KV_SLAB = KEYS * 128,
  Q_BYTES = SLABS * Q_SLAB, /* one warpgroup's queries */
  KV_BYTES = SLABS * KV_SLAB
};

#include "flash_fwd_sm90_tiles.cuh"

#include "flash_fwd_sm90_load.cuh"

#include "flash_fwd_sm90_rows.cuh"

/* ---- consumers ---- */

/* The turn goes round the warpgroups, once for each block of keys but the very first. 256: the 128
 * threads of warpgroup w, and the 128 of the one before, which pass the turn on. */
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
  int row_in_tile = 64 * w + threadIdx.x % 128 / 32 * 16 + lane / 4; /* this thread's first */
  bool leader = lane == 0;                                           /* arrives for its warp */
  uint64_t q_first = descriptor(shared_address(sh->q[0][w]), Q_SLAB);
  uint64_t k_first = descriptor(shared_address(sh->k[0]), KV_SLAB);
  uint64_t v_first = descriptor(shared_address(sh->v[0]), KV_SLAB);
  float o[HEAD_DIM / 2];          /* probabilities times values, so far */
  float s[KEYS / 2];              /* scores of one block, then its probabilities */
  uint32_t p[KEYS / 4];           /* those, as the factor of the product with the values */
  float top[2], sum[2], alpha[2]; /* of this thread's two rows */
  int round = 0;                  /* tiles before the one whose scores are in s */
  int kt = 0, vt = 0; /* blocks of keys and of values that this warpgroup is through with */

#define Q_STAGE       (q_first + round % Q_STAGES * (WARPGROUPS * Q_BYTES / 16))
#define K_STAGE       (k_first + kt % STAGES * (KV_BYTES / 16))
#define V_STAGE       (v_first + vt % STAGES * (KV_BYTES / 16))
#define Q_FULL        shared_address(&sh->q_full[round % Q_STAGES][w]), round / Q_STAGES & 1
#define K_FULL_AT(kt) shared_address(&sh->k_full[(kt) % STAGES]), (kt) / STAGES & 1
#define V_FULL_AT(vt) shared_address(&sh->v_full[(vt) % STAGES]), (vt) / STAGES & 1
#define K_FULL        K_FULL_AT(kt)
#define V_FULL        V_FULL_AT(vt)
#define Q_EMPTY       shared_address(&sh->q_empty[round % Q_STAGES][w])
#define K_EMPTY       shared_address(&sh->k_empty[kt % STAGES])
#define V_EMPTY       shared_address(&sh->v_empty[vt % STAGES])
#define TILE          (&sh->tiles[round % TILES])

  if (w == WARPGROUPS - 1)
    turn_pass(w); /* the first turn is warpgroup 0's */

  for (;;) {               /* here nothing is under way */
    mbarrier_wait(Q_FULL); /* the tile is drawn, and its queries have landed */
    struct walk at = walk_of(f, TILE, w);
    if (at.is_end)
      return;
    int n = at.end - 1;
    for (; n >= max(at.visible, at.begin); --n, ++kt, ++vt) { /* pass what others need */
      if (kt > 0) {
        turn_wait(w);
        turn_pass(w);
      }
      mbarrier_wait(K_FULL); /* else the arrivals below would count for the stage's last round */
      mbarrier_wait(V_FULL);
      mbarrier_arrive_if(leader, K_EMPTY);
      mbarrier_arrive_if(leader, V_EMPTY);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i)
      o[i] = 0.0f;
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    if (n < at.begin) { /* these rows see no key at all */
      store(f, TILE, row_in_tile, o, top, sum);
      mbarrier_arrive_if(leader, Q_EMPTY);
      ++round;
      continue;
    }

    mbarrier_wait(K_FULL); /* the tile's last keys have landed */
    if (kt > 0)
      turn_wait(w);
    wgmma_fence();
    multiply_qk(s, Q_STAGE, K_STAGE);
    wgmma_commit();
    if (kt > 0)
      turn_pass(w);
    wgmma_wait(0);
    wgmma_landed(s, KEYS / 2);
    if (n < at.clear_begin || n >= at.clear_end)
      mask(f, s, n * KEYS, TILE->row + row_in_tile);
    float part[2] = {0.0f, 0.0f}; /* of s, not yet in sum; or, once, the sums of the tile before */
    bool moved = softmax(s, top, sum, alpha, f->scale_log2), based = has_reference(top);

    /* One block of keys a round, across tiles as long as this warpgroup sees the last block of the
     * next one. Then the products of a tile's last values and of the next one's last keys run
     * together as any two. */
    bool pending = false, crossed = false; /* o's product is under way; s is of a new tile */
    bool lost = false;                     /* s left the range of its reference */
    bool k_full = false, v_full = false;   /* the next keys and values are known to be there */
    float done_top[2];                     /* of the tile before */
    for (;;) {
      /* The product with the values of the block before ran under the exponentials of s. The wait
       * stands here, behind the loop's back edge, because the compiler moves it up to the start of
       * its basic block, and so past all exponentials, wherever it can. */
      wgmma_wait(0);
      wgmma_landed(o, HEAD_DIM / 2);
      mbarrier_arrive_if(leader && pending, V_EMPTY);
      vt += pending;
      if (UNLIKELY(crossed)) {
        store(f, &sh->tiles[(round - 1) % TILES], row_in_tile, o, done_top, part);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i)
          o[i] = 0.0f;
        part[0] = part[1] = 0.0f;
      }
      to_factor(p, s);      /* not before the wait: that product read p */
      if (UNLIKELY(lost)) { /* the scores are gone, but their factors are still in shared memory */
        scores_again(s, sh->q[round % Q_STAGES][w], sh->k[kt % STAGES]);
        moved = softmax(s, top, sum, alpha, f->scale_log2);
        to_factor(p, s);
      } else {
        sum[0] += part[0];
        sum[1] += part[1];
      }
      bool last = n == at.begin;           /* of the tile */
      mbarrier_arrive_if(leader, K_EMPTY); /* to the producer: this warp's part is done */
      mbarrier_arrive_if(leader && last, Q_EMPTY);
      ++kt;
      bool stale = moved && pending && !crossed; /* o, that is */
      if (!RESCALE_LATE && stale)
        rescale(o, alpha);

      crossed = last;
      if (UNLIKELY(crossed)) {
        ++round;
        mbarrier_wait(Q_FULL); /* the next tile is drawn, and its queries have landed */
        at = walk_of(f, TILE, w);
        n = at.end;
        if (!CHAIN || at.visible < n || n <= at.begin) { /* also where there is no next tile */
          if (RESCALE_LATE && stale)
            rescale(o, alpha);
          break;
        }
      }
      --n;

      if (!k_full)
        mbarrier_wait(K_FULL); /* the keys of n have landed */
      turn_wait(w);            /* the warpgroup before has issued its products */
      wgmma_fence();
      multiply_qk(s, Q_STAGE, K_STAGE);
      wgmma_commit();
      if (RESCALE_LATE && stale)
        rescale(o, alpha);
      if (!v_full)
        mbarrier_wait(V_FULL); /* the values of the block before have landed */
      wgmma_fence();
      multiply_pv(o, p, V_STAGE);
      wgmma_commit();
      pending = true;
      turn_pass(w);
      k_full = mbarrier_test(K_FULL_AT(kt + 1)); /* an answer takes long: ask a round ahead */
      v_full = mbarrier_test(V_FULL_AT(vt + 1));

      wgmma_wait(OVERLAP); /* the scores are there; the other product goes on */
      wgmma_landed(s, KEYS / 2);
      if (UNLIKELY(crossed)) {
        done_top[0] = top[0], done_top[1] = top[1];
        part[0] = sum[0], part[1] = sum[1];
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
      }
      bool masked = n < at.clear_begin || n >= at.clear_end;
      if (UNLIKELY(crossed || masked || !based || !KEEP_REFERENCE)) {
        if (masked)
          mask(f, s, n * KEYS, TILE->row + row_in_tile);
        moved = softmax(s, top, sum, alpha, f->scale_log2);
        based = has_reference(top);
        lost = false;
        if (!crossed)
          part[0] = part[1] = 0.0f;
      } else {
        moved = false;
        lost = !softmax_on_reference(s, top, part, f->scale_log2);
      }
    }

    mbarrier_wait(V_FULL); /* the values of the tile's first block have landed */
    wgmma_fence();
    multiply_pv(o, p, V_STAGE);
    wgmma_commit();
    wgmma_wait(0);
    wgmma_landed(o, HEAD_DIM / 2);
    mbarrier_arrive_if(leader, V_EMPTY);
    ++vt;
    store(f, &sh->tiles[(round - 1) % TILES], row_in_tile, o, top, sum);
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
  int warp = warp_uniform(threadIdx.x / 32);

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Q_STAGES; ++slot)
      for (int w = 0; w < WARPGROUPS; ++w) {
        mbarrier_init(shared_address(&sh->q_full[slot][w]), 1);
        mbarrier_init(shared_address(&sh->q_empty[slot][w]), 4);
      }
    for (int slot = 0; slot < TILES; ++slot) {
      mbarrier_init(shared_address(&sh->tile_full[slot]), 1);
      mbarrier_init(shared_address(&sh->tile_empty[slot]), 1);
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

/* Keys and values that a section of streams may have: they stay in the L2 cache (50 MB). */
enum { L2_BYTES = 32 << 20 };

static int near(int64_t distance) {
  return distance < -FAR ? -FAR : distance > FAR ? FAR : (int)distance;
}

extern "C" int NAME()(const struct attn_args *args, void *stream) {
  int device = 0, multiprocessors = 0, counter = -1;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute((const void *)NAME(_kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(struct fwd_shared));
  if (error == cudaSuccess && DRAW)
    error = (cudaError_t)attn_stream_slot(&counter, stream);

  CUtensorMap q_map, k_map, v_map;
  int status = (int)error;
  if (status == 0)
    status = attn_tma_map(&q_map, &args->query, args->dtype, args->batch, args->heads, args->seq_q,
                          HEAD_DIM, 64);
  if (status == 0)
    status = attn_tma_map(&k_map, &args->key, args->dtype, args->batch, args->kv_heads, args->seq_k,
                          HEAD_DIM, KEYS);
  if (status == 0)
    status = attn_tma_map(&v_map, &args->value, args->dtype, args->batch, args->kv_heads,
                          args->seq_k, HEAD_DIM, KEYS);

  if (status == 0) {
    int64_t shift = args->bottom_right ? args->seq_k - args->seq_q : 0;
    int64_t tiles_m = (args->seq_q + ROWS - 1) / ROWS, streams = args->heads * args->batch;
    int64_t tiles = tiles_m * streams, group = args->heads / args->kv_heads;
    bool even = args->window_left < 0 && args->window_right < 0; /* all tiles weigh the same */
    int64_t fitting = L2_BYTES / (args->seq_k * HEAD_DIM * 4);   /* heads of keys and values */
    int64_t section = even ? 1 : counter < 0 ? streams : (fitting < 1 ? 1 : fitting) * group;
    int64_t band = even ? tiles_m : counter < 0 ? 4 : 1;
    struct fwd_sm90 f = {
        .out = (SCALAR *)args->out.data,
        .logsumexp = (float *)args->logsumexp,
        .stride_b = args->out.stride_b,
        .stride_h = args->out.stride_h,
        .stride_s = args->out.stride_s,
        .scale_log2 = (float)(args->scale / 0.693147180559945309417),
        .heads = (int)args->heads,
        .group = (int)group,
        .seq_q = (int)args->seq_q,
        .seq_k = (int)args->seq_k,
        .left = args->window_left < 0 ? -FAR : near(shift - args->window_left),
        .right = args->window_right < 0 ? FAR : near(shift + args->window_right + 1),
        .tiles_m = (int)tiles_m,
        .tiles = (int)tiles,
        .section = (int)(section < streams ? section : streams),
        .band = (int)(band < tiles_m ? band : tiles_m),
        .snake = !even,
        .counter = counter,
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
