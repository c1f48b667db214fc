/* tma.h: tensor maps, the copy engine's descriptions of a tensor in memory. */
#ifndef ATTN_TMA_H
#define ATTN_TMA_H

#include "../attn.h"

#include <cuda.h> /* CUtensorMap */

#ifdef __cplusplus
extern "C" {
#endif

/* A map of tensor [batch, heads, rows, head_dim], two bytes an element, for boxes of
 * [box_rows, 64] that land in shared memory with the 128-byte swizzle. What a box has outside of
 * the tensor arrives as zeros. Needs 16-byte aligned data and strides. Returns 0, a cudaError_t, or
 * ATTN_UNSUPPORTED where the driver refuses the map. */
int attn_tma_map(CUtensorMap *map, const struct attn_tensor *tensor, enum attn_dtype dtype,
                 int64_t batch, int64_t heads, int64_t rows, int head_dim, int box_rows);

#ifdef __cplusplus
}
#endif
#endif
