/* tma.c: tensor maps through the driver's own entry point, so that libcuda is never linked. */
#include "tma.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

/* The encoder has been in the driver since CUDA 12.0. Threads that race here store one value. */
static int encoder(PFN_cuTensorMapEncodeTiled_v12000 *encode) {
  static void *entry;
  void *found = __atomic_load_n(&entry, __ATOMIC_ACQUIRE);
  if (found == NULL) {
    enum cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result);
    if (error != cudaSuccess)
      return (int)error;
    if (result != cudaDriverEntryPointSuccess)
      return ATTN_UNSUPPORTED;
    __atomic_store_n(&entry, found, __ATOMIC_RELEASE);
  }
  *encode = (PFN_cuTensorMapEncodeTiled_v12000)found;
  return 0;
}

/* An axis of one element is never stepped along, so any stride the encoder takes will do. */
static cuuint64_t bytes(int64_t stride, int64_t size) {
  return size == 1 ? 16 : (cuuint64_t)stride * 2;
}

int attn_tma_map(CUtensorMap *map, const struct attn_tensor *tensor, enum attn_dtype dtype,
                 int64_t batch, int64_t heads, int64_t rows, int head_dim, int box_rows) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
  int status = encoder(&encode);
  if (status != 0)
    return status;

  /* Innermost first: columns, rows, heads, batch. 64 columns are one swizzled row of 128 bytes. */
  const cuuint64_t size[4] = {(cuuint64_t)head_dim, (cuuint64_t)rows, (cuuint64_t)heads,
                              (cuuint64_t)batch};
  const cuuint64_t stride[3] = {bytes(tensor->stride_s, rows), bytes(tensor->stride_h, heads),
                                bytes(tensor->stride_b, batch)};
  const cuuint32_t box[4] = {64, (cuuint32_t)box_rows, 1, 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  CUresult result = encode(
      map, dtype == ATTN_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, tensor->data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : ATTN_UNSUPPORTED;
}
