/* ptx_sm80.cuh: one function per PTX instruction of sm_80 that C has no name for. Section numbers
 * are those of the PTX ISA 9.0.
 *
 * Fragments of mma.m16n8k16, for lane l with g = l / 4, t = l % 4 (9.7.15.5.8):
 *   A [16, 16]  a[0] row g, columns 2t, 2t + 1     a[1] row g + 8      a[2], a[3] columns + 8
 *   B [16, 8]   b[0] rows 2t, 2t + 1, column g     b[1] rows + 8
 *   C [16, 8]   c[0], c[1] row g, columns 2t, 2t + 1                   c[2], c[3] row g + 8
 * A and B hold two 16-bit elements a register, the lower index in the lower half. So a C fragment
 * pair [16, 16], packed to 16 bits, is an A fragment: that is how P = exp(S) feeds P.V.
 */
#ifndef ATTN_PTX_SM80_CUH
#define ATTN_PTX_SM80_CUH

#include <stdint.h>

#define PTX static __device__ __forceinline__

/* 9.7.15.5.14 mma: c += a . b, fp32 accumulation. */
PTX void mma_m16n8k16_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PTX void mma_m16n8k16_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* 9.7.15.5.15 ldmatrix: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row
 * l % 8 of matrix l / 8. Lane l receives row l / 4, columns 2 (l % 4) and the next, of each. */
PTX void ldmatrix_x4(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/* The same, each matrix transposed. */
PTX void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/* 9.7.9.25.3.1 cp.async: 16 bytes from global to shared memory past L1; only the first size bytes
 * (0 to 16) are read, the rest of the 16 become zero. */
PTX void cp_async_16(uint32_t to, const void *from, uint32_t size) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(size)
               : "memory");
}

/* The same where on, else nothing; without a branch, so that it can lie amid mma. */
PTX void cp_async_16_if(bool on, uint32_t to, const void *from, uint32_t size) {
  asm volatile("{\n\t"
               ".reg .pred on;\n\t"
               "setp.ne.b32 on, %3, 0;\n\t"
               "@on cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n\t"
               "}" ::"r"(to),
               "l"(from), "r"(size), "r"((int)on)
               : "memory");
}

/* 9.7.9.25.3.2 cp.async.commit_group */
PTX void cp_async_commit(void) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* 9.7.9.25.3.3 cp.async.wait_group: all but the newest PENDING groups of this thread are done. */
template <int PENDING> PTX void cp_async_wait(void) {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* 9.7.1.4 mad.wide: from + n * size bytes, in one instruction where C's 64-bit product takes four.
 */
PTX const uint16_t *mad_wide(int n, int size, const uint16_t *from) {
  const uint16_t *to;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "r"(size), "l"(from));
  return to;
}

/* 9.7.9.11 st.shared */
PTX void st_shared_16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

/* 9.7.9.22 cvt: two fp32 to a packed pair, lo in the lower half. */
PTX uint32_t pack_bf16(float lo, float hi) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

PTX uint32_t pack_f16(float lo, float hi) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

/* bf16 is the upper half of fp32. */
PTX float unpack_bf16(uint16_t x) {
  return __uint_as_float((uint32_t)x << 16);
}

PTX float unpack_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

/* 9.7.3.22 ex2: 2^x, 2 ulp; -inf gives 0. */
PTX float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* 9.7.3.15 rcp: 1 / x, 1 ulp; inf gives 0. */
PTX float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* 9.7.13.1 bar: waits until threads threads (a multiple of 32) of the block have come to barrier
 * id, by barrier_sync or barrier_arrive; what those wrote before is then seen. */
PTX void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The same without waiting. */
PTX void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* 9.7.9.8 ld, st: a 16-byte vector in shared memory. */
PTX uint4 ld_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

PTX float2 ld_shared_float2(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}

PTX void st_shared_4(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

/* The address of shared memory as the instructions above take it. */
PTX uint32_t shared_address(const void *pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

#undef PTX
#endif
