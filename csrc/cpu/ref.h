/* ref.h: every operation of attn.h by its formula, slow and obvious: the oracle of the C tests.
 *
 * The structs are those of attn.h with dtype ATTN_F64 (a mask is ATTN_F64 or ATTN_BOOL, logsumexp
 * double). Whole operations: no tiles, no phases, no workspace. Not part of the library.
 */
#ifndef ATTN_CPU_REF_H
#define ATTN_CPU_REF_H

#include "attn.h"

void attn_ref_scale(const struct attn_stage *stage);
void attn_ref_masked_fill(const struct attn_stage *stage);
void attn_ref_softmax(const struct attn_stage *stage);
void attn_ref_softmax_backward(const struct attn_stage *stage);
void attn_ref_dropout(const struct attn_stage *stage);

/* Writes out and logsumexp. */
void attn_ref_flash_fwd(const struct attn_args *args);

/* Writes the gradients whose data is not NULL; reads neither out nor logsumexp. */
void attn_ref_flash_bwd(const struct attn_args *args);

#endif
