/* ptx_sm90.cuh: the Hopper instructions that CUDA C cannot say, one function each.
 *
 * The comment above a function names its section of the PTX ISA (by title: the numbers move with
 * each release). Shared memory is addressed by 32-bit shared-window addresses throughout.
 *
 * The includer defines WGMMA_TYPE, "bf16" or "f16": the type of both factors of every product.
 */
#ifndef ATTN_PTX_SM90_CUH
#define ATTN_PTX_SM90_CUH

#include <cuda.h> /* CUtensorMap */
#include <stdint.h>

#define PTX static __device__ __forceinline__

/* ---- shared memory, registers, arithmetic ---- */

/* "Data Movement and Conversion Instructions: cvta" */
PTX uint32_t shared_address(const void *pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* "Miscellaneous Instructions: setmaxnreg": a warpgroup gives registers back to the SM, or waits
 * until the SM has enough for it. The count is a multiple of 8 between 24 and 256. */
#define setmaxnreg_dec(count)                                                                      \
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)(count)))
#define setmaxnreg_inc(count)                                                                      \
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)(count)))

/* "Floating Point Instructions: ex2": 2^x, to 2 ulp; 2^-inf is 0. */
PTX float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* "Floating Point Instructions: lg2" */
PTX float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* "Floating Point Instructions: rcp": 1 / x, to 1 ulp, in one instruction. C's division has a slow
 * path, a call, in the way of the loop around it (README.md). */
PTX float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* "Data Movement and Conversion Instructions: cvt": low and high half of a register, rounded to
 * nearest even. */
PTX uint32_t pack(float low, float high) {
  uint32_t packed;
  asm volatile("cvt.rn." WGMMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/* No need for data to move: the shuffle tells the compiler that x is the same in the whole warp.
 * Else every branch on it counts as divergent, ptxas puts a wait behind each product, and what is
 * computed from it, such as the addresses of factors, leaves the uniform registers. */
PTX int warp_uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

/* "Data Movement and Conversion Instructions: st", predicated. A branch in its place, inside the
 * loop over keys, would count as divergent too. */
PTX void store_if(bool condition, float *to, float x) {
  asm volatile("{\n"
               ".reg .pred condition;\n"
               "setp.ne.b32 condition, %0, 0;\n"
               "@condition st.global.f32 [%1], %2;\n"
               "}" ::"r"((int)condition),
               "l"(to), "f"(x)
               : "memory");
}

PTX void store_if(bool condition, void *to, uint4 x) {
  asm volatile("{\n"
               ".reg .pred condition;\n"
               "setp.ne.b32 condition, %0, 0;\n"
               "@condition st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
               "}" ::"r"((int)condition),
               "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

/* ---- barriers ---- */

/* "Parallel Synchronization and Communication Instructions: barrier": wait until `threads` threads
 * have arrived at barrier `id`, this warp's among them. */
PTX void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The same, arriving without a wait. */
PTX void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* "mbarrier.init": a phase of the barrier is over after `arrivals` arrivals, and after every byte
 * that the phase expects has landed. */
PTX void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* "membar / fence": initialised barriers become visible to the copy engine. */
PTX void fence_mbarrier_init(void) {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* "mbarrier.arrive" */
PTX void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* The same, predicated, for the reason of store_if. */
PTX void mbarrier_arrive_if(bool condition, uint32_t barrier) {
  asm volatile("{\n"
               ".reg .pred condition;\n"
               "setp.ne.b32 condition, %1, 0;\n"
               "@condition mbarrier.arrive.shared::cta.b64 _, [%0];\n"
               "}" ::"r"(barrier),
               "r"((int)condition)
               : "memory");
}

/* "mbarrier.arrive", with expect_tx: arrive, and make the phase wait for `bytes` more bytes. */
PTX void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/* "mbarrier.test_wait / mbarrier.try_wait": until the phase of this parity is over. The hardware
 * suspends the warp for a while in each try. */
PTX void mbarrier_wait(uint32_t barrier, int parity) {
  uint32_t done;
  do
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  while (!done);
}

/* Whether the phase of this parity is over, asked once, of a barrier that the warp's threads may
 * all see so. */
PTX bool mbarrier_test(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n"
               ".reg .pred done;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.u32 %0, 1, 0, done;\n"
               "}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return __all_sync(~0u, done);
}

/* ---- copy engine ---- */

/* "cp.async.bulk.tensor": one box of a 4-D tensor, at (column, row, head, batch), to shared memory.
 * Parts of the box outside of the tensor arrive as zeros and count as bytes. `barrier` hears of all
 * bytes of the box. */
PTX void tma_load(uint32_t to, const CUtensorMap *map, int column, int row, int head, int batch,
                  uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
               "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
               : "memory");
}

/* ---- wgmma: products of a warpgroup ---- */

/* "Matrix Descriptor Format" of "Asynchronous Warpgroup Level Matrix Shared Memory Layout", for
 * tiles that the copy engine wrote with its 128-byte swizzle: rows of 64 elements (128 bytes),
 * 8 rows an atom of 1024 bytes, atoms of further rows behind it, and the next 64 columns `slab`
 * bytes on. Sizes and addresses are in units of 16 bytes.
 *
 *   bits 0-13  start address
 *        16-29 leading offset: to the next 64 columns where columns are the N dimension (the
 *              second factor transposed); unused where columns are the K dimension
 *        32-45 stride offset: to the next 8 rows
 *        62-63 1: 128-byte swizzle
 *
 * A descriptor of a later row, or of a later column of the same 64, is this plus the distance. */
PTX uint64_t descriptor(uint32_t address, int slab) {
  return (uint64_t)1 << 62 | (uint64_t)(1024 / 16) << 32 | (uint64_t)(slab / 16) << 16 |
         (address & 0x3ffff) / 16;
}

/* "wgmma.fence": registers that the warpgroup wrote become visible to its next products. */
PTX void wgmma_fence(void) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* "wgmma.commit_group": the products since the last commit become one group. */
PTX void wgmma_commit(void) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* "wgmma.wait_group": until at most `pending` groups, the youngest, are unfinished. */
#define wgmma_wait(pending)                                                                        \
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/* No instruction: tells the compiler that the registers of d change here, so that it moves no use
 * of them from behind a wait to before it. count is known where this is inlined. */
PTX void wgmma_landed(float *d, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i)
    asm volatile("" : "+f"(d[i])::"memory");
}

/* ---- products of a warp ---- */

/* "ldmatrix": four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. */
PTX void ldmatrix(uint32_t *x, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

/* "mma": d [16, 8] += a [16, 16] b [16, 8], with d laid out as 8 columns of wgmma's. */
PTX void mma(float *d, const uint32_t *a, const uint32_t *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." WGMMA_TYPE "." WGMMA_TYPE
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- wgmma: sums ---- */

/* The registers of a sum: as operands from %0 on, and their constraints. */
#define OPERANDS_32                                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"                          \
  ",%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPERANDS_40                                                                                \
  OPERANDS_32                                                                                      \
  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define OPERANDS_48                                                                                \
  OPERANDS_40                                                                                      \
  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define OPERANDS_56                                                                                \
  OPERANDS_48                                                                                      \
  ",%48,%49,%50,%51,%52,%53,%54,%55"
#define OPERANDS_64                                                                                \
  OPERANDS_56                                                                                      \
  ",%56,%57,%58,%59,%60,%61,%62,%63"
#define OPERANDS_96                                                                                \
  OPERANDS_64                                                                                      \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81"                       \
  ",%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define OPERANDS_128                                                                               \
  OPERANDS_96                                                                                      \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110"                        \
  ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124"                         \
  ",%125,%126,%127"
#define SUM_8(i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUM_32  SUM_8(0), SUM_8(8), SUM_8(16), SUM_8(24)
#define SUM_40  SUM_32, SUM_8(32)
#define SUM_48  SUM_40, SUM_8(40)
#define SUM_56  SUM_48, SUM_8(48)
#define SUM_64  SUM_56, SUM_8(56)
#define SUM_96  SUM_64, SUM_8(64), SUM_8(72), SUM_8(80), SUM_8(88)
#define SUM_128 SUM_96, SUM_8(96), SUM_8(104), SUM_8(112), SUM_8(120)

/* "wgmma.mma_async": d [64, N] = a [64, 16] b [N, 16]^T, plus d where `add`. Both factors lie in
 * shared memory, K (16) contiguous. Thread t holds of d
 *   d[4 j + e], d[4 j + 2 + e] = rows 16 (t / 32) + t % 32 / 4 and 8 below, column 8 j + t % 4 * 2
 * + e C is N / 2, the registers of d; A, B, ADD are the operands behind them. */
#define WGMMA_SS(N, C, A, B, ADD)                                                                  \
  PTX void wgmma_ss_n##N(float *d, uint64_t a, uint64_t b, int add) {                              \
    asm volatile("{\n"                                                                             \
                 ".reg .pred add;\n"                                                               \
                 "setp.ne.b32 add, %" #ADD ", 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE       \
                 " {" OPERANDS_##C "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n"                       \
                                   "}"                                                             \
                 : SUM_##C                                                                         \
                 : "l"(a), "l"(b), "r"(add));                                                      \
  }
WGMMA_SS(80, 40, 40, 41, 42)
WGMMA_SS(112, 56, 56, 57, 58)
WGMMA_SS(128, 64, 64, 65, 66)

/* "wgmma.mma_async": d [64, N] += a [64, 16] b [16, N], N contiguous in shared memory. a lies in
 * registers: thread t holds of it, two columns a register, rows as of d above,
 *   a[0], a[1]  the upper and the lower row, columns t % 4 * 2 and the next
 *   a[2], a[3]  the same, 8 columns on */
#define WGMMA_RS(N, C, A0, A1, A2, A3, B)                                                          \
  PTX void wgmma_rs_n##N(float *d, const uint32_t *a, uint64_t b) {                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE       \
                 " {" OPERANDS_##C "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B             \
                                   ", 1, 1, 1, 1;"                                                 \
                 : SUM_##C                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }
WGMMA_RS(64, 32, 32, 33, 34, 35, 36)
WGMMA_RS(96, 48, 48, 49, 50, 51, 52)
WGMMA_RS(128, 64, 64, 65, 66, 67, 68)
WGMMA_RS(192, 96, 96, 97, 98, 99, 100)
WGMMA_RS(256, 128, 128, 129, 130, 131, 132)

#endif
