/* dropout.h: which pairs dropout keeps, the same on every device and in every backend.
 *
 * Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by
 * the seed. One draw gives eight 16-bit numbers for eight columns of one row of one head:
 *
 *   key     = { seed low, seed high }
 *   counter = { column group, row, b * Hq + h, offset low ^ offset high }
 *   group of column c = (c / 32) * 4 + (c % 8) / 2,   its number in the draw = (c % 32) / 8 * 2 + c
 * % 2
 *
 * The grouping is that of an mma accumulator: the thread that holds columns 2t, 2t + 1 of each 8
 * finds in one draw the numbers of all its columns of a block of 32.
 * A pair is kept if its number >= round(p * 65536); what is kept is divided by 1 - p.
 */
#ifndef ATTN_DROPOUT_H
#define ATTN_DROPOUT_H

#include <stdint.h>

#ifdef __CUDACC__
#  define ATTN_HOST_DEVICE __host__ __device__
#else
#  define ATTN_HOST_DEVICE
#endif

struct attn_philox {
  uint32_t word[4];
};

ATTN_HOST_DEVICE static inline struct attn_philox
attn_philox(const int64_t rng_state[2], uint32_t group, uint32_t row, uint32_t head) {
  uint32_t key0 = (uint32_t)rng_state[0], key1 = (uint32_t)((uint64_t)rng_state[0] >> 32);
  uint32_t c0 = group, c1 = row, c2 = head;
  uint32_t c3 = (uint32_t)rng_state[1] ^ (uint32_t)((uint64_t)rng_state[1] >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t left = (uint64_t)0xD2511F53u * c0, right = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(right >> 32) ^ c1 ^ key0;
    c2 = (uint32_t)(left >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)right;
    c3 = (uint32_t)left;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  struct attn_philox draw = {{c0, c1, c2, c3}};
  return draw;
}

ATTN_HOST_DEVICE static inline uint32_t attn_dropout_threshold(double p) {
  return (uint32_t)(p * 65536.0 + 0.5);
}

/* What a kept probability is multiplied by; p = 1 keeps nothing. */
ATTN_HOST_DEVICE static inline double attn_dropout_scale(double p) {
  return p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
}

/* The i-th of a draw's eight numbers. */
ATTN_HOST_DEVICE static inline uint32_t attn_philox_u16(struct attn_philox draw, int i) {
  return draw.word[i / 2] >> (i % 2 * 16) & 0xFFFFu;
}

ATTN_HOST_DEVICE static inline uint32_t attn_dropout_group(int64_t col) {
  return (uint32_t)(col / 32 * 4 + col % 8 / 2);
}

ATTN_HOST_DEVICE static inline int attn_dropout_index(int64_t col) {
  return (int)(col % 32 / 8 * 2 + col % 2);
}

#endif
