/* flash_fwd_place.cuh: where a block of flash_fwd_sm80 finds its tile, in the plan of the host. */
#ifndef ATTN_FLASH_FWD_PLACE_CUH
#define ATTN_FLASH_FWD_PLACE_CUH

#include "flash_fwd_plan.h"
#include "softmax.cuh"

/* What a block works on; in shared memory, since all its threads agree on it. */
struct place {
  int64_t b, q_row;            /* q_row: where the sequence's queries start in packed tensors */
  const uint16_t *key, *value; /* key 0 of the sequence and kv head */
  uint32_t tile;               /* its number in the slice */
  int split;
  int q_head;       /* the first of pack */
  int row_0, row_1; /* rows [row_0, row_1), numbered through the pack heads */
  int seq_q, seq_k;
  int first, last; /* key blocks, walked from last down to first */
  int masked_end;  /* blocks above this one need masking (at the right edge), */
  int whole_end;   /* then those above this one do not, the rest (at the left edge) do */
};

/* A row of a tile. */
struct row {
  int position, head;
};

/* Row row of head h, of a tensor of 16-bit elements. */
static __device__ __forceinline__ uint16_t *row_in(const struct attn_tensor *tensor, int64_t b,
                                                   int64_t h, int64_t row) {
  return (uint16_t *)tensor->data + b * tensor->stride_b + h * tensor->stride_h +
         row * tensor->stride_s;
}

static __device__ __forceinline__ struct place place_of(const struct plan *p, uint32_t index,
                                                        uint32_t slice, int block_q, int block_k) {
  const struct attn_args *a = &p->args;
  const uint32_t heads = (uint32_t)a->heads / p->pack; /* of a batch */
  const int64_t first_batch = (int64_t)slice * p->slice;
  const uint32_t batches = (uint32_t)min((int64_t)p->slice, a->batch - first_batch);
  struct place at;
  at.tile = index / p->splits;
  at.split = (int)(index % p->splits);
  if (at.tile >= batches * heads * p->row_tiles) { /* the last slice may have fewer batches */
    at.row_0 = at.row_1 = 0;
    return at;
  }
  const uint32_t section = at.tile / (p->section * p->row_tiles);
  const uint32_t in_section = at.tile % (p->section * p->row_tiles);
  const uint32_t width = min((uint32_t)p->section, batches * heads - section * p->section);
  const uint32_t head = section * p->section + in_section % width;
  at.b = first_batch + head / heads;
  at.q_head = (int)(head % heads) * p->pack;
  const int kv_head = at.q_head / ((int)a->heads / (int)a->kv_heads);
  at.q_row = a->cu_seq_q == NULL ? 0 : a->cu_seq_q[at.b];
  at.seq_q = (int)(a->cu_seq_q == NULL ? a->seq_q : a->cu_seq_q[at.b + 1] - at.q_row);
  const int64_t k_row = a->cu_seq_k == NULL ? 0 : a->cu_seq_k[at.b];
  at.seq_k = (int)(a->cu_seq_k == NULL ? a->seq_k : a->cu_seq_k[at.b + 1] - k_row);
  at.key = row_in(&a->key, at.b, kv_head, k_row);
  at.value = row_in(&a->value, at.b, kv_head, k_row);
  at.row_0 = (p->row_tiles - 1 - (int)(in_section / width)) * block_q;
  at.row_1 = min(at.row_0 + block_q, at.seq_q * p->pack);

  const struct key_band band = key_band_of(a, at.seq_q, at.seq_k);
  const int top = at.row_0 / p->pack, bottom = (at.row_1 - 1) / p->pack;
  const int first_key = max(0, top + band.low), last_key = min(at.seq_k - 1, bottom + band.high);
  const int first = first_key / block_k;
  const int blocks =
      at.row_1 <= at.row_0 || last_key < first_key ? 0 : last_key / block_k - first + 1;
  const int share = blocks / p->splits, rest = blocks % p->splits; /* the first rest get one more */
  at.first = first + at.split * share + min(at.split, rest);
  at.last = at.first + share + (at.split < rest) - 1;
  const int whole_first = (max(0, bottom + band.low) + block_k - 1) / block_k;
  const int whole_last = (min(at.seq_k - 1, top + band.high) + 1) / block_k - 1;
  at.masked_end = max(whole_last, at.first - 1);
  at.whole_end = max(whole_first, at.first) - 1;
  return at;
}

/* packed: the row's number among those of the pack heads. */
static __device__ __forceinline__ struct row row_of(const struct plan *p, const struct place *at,
                                                    int packed) {
  if (p->pack == 1)
    return {packed, at->q_head};
  return {packed / p->pack, at->q_head + packed % p->pack};
}

static __device__ __forceinline__ float *logsumexp_of(const struct plan *p, const struct place *at,
                                                      struct row row) {
  const struct attn_args *a = &p->args;
  const int64_t before =
      a->cu_seq_q == NULL ? (at->b * a->heads + row.head) * a->seq_q : row.head * a->total_q;
  return (float *)a->logsumexp + before + at->q_row + row.position;
}

#endif
