/* stream_slot.h: a small number for each CUDA stream, to index memory that its launches share. */
#ifndef ATTN_STREAM_SLOT_H
#define ATTN_STREAM_SLOT_H

enum { ATTN_STREAM_SLOTS = 256 };

#ifdef __cplusplus
extern "C" {
#endif

/* Sets *slot to the number of a stream (a cudaStream_t), which no other stream of this process will
 * ever have: launches of one stream follow each other, so they may use what is indexed by it in
 * turn. -1 while the stream is captured, since its launches may then run beside any others, and for
 * streams after the first ATTN_STREAM_SLOTS. Any thread may call. Returns 0 or a cudaError_t. */
int attn_stream_slot(int *slot, void *stream);

#ifdef __cplusplus
}
#endif
#endif
