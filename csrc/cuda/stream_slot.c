/* stream_slot.c: a table of the streams seen so far, in which an entry is written once. */
#include "stream_slot.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>

int attn_stream_slot(int *slot, void *stream) {
  static unsigned long long streams[ATTN_STREAM_SLOTS]; /* 1 + the stream's number; 0: free */
  enum cudaStreamCaptureStatus capture;
  unsigned long long id;
  *slot = -1;
  cudaError_t error = cudaStreamIsCapturing((cudaStream_t)stream, &capture);
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone)
    return (int)error;
  error = cudaStreamGetId((cudaStream_t)stream, &id); /* unlike the handle, never used again */
  if (error != cudaSuccess)
    return (int)error;
  for (int i = 0; i < ATTN_STREAM_SLOTS; ++i) {
    unsigned long long found = __atomic_load_n(&streams[i], __ATOMIC_ACQUIRE);
    /* Where another thread takes the entry first, `found` becomes what that wrote. */
    if (found == 0 && __atomic_compare_exchange_n(&streams[i], &found, id + 1, false,
                                                  __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      found = id + 1;
    if (found == id + 1) {
      *slot = i;
      break;
    }
  }
  return 0;
}
