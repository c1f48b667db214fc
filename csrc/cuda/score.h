/* score.h: what the fused kernels need of scale, soft cap and dropout, worked out on the host. */
#ifndef ATTN_SCORE_H
#define ATTN_SCORE_H

#include "../attn.h"
#include "../dropout.h"

/* Run-time constants of the score, in fp32: GPUs are slow at the doubles of attn_args. */
struct attn_score {
  float scale, scale_log2;        /* scale_log2 = scale * log2(e) */
  float softcap, softcap_inverse; /* 0: none */
  float keep_scale;               /* dropout: what a kept probability is multiplied by */
  uint32_t keep_threshold;        /* dropout: kept if its 16-bit number is at least this */
};

static inline struct attn_score attn_score_of(const struct attn_args *args) {
  struct attn_score score;
  score.scale = (float)args->scale;
  score.scale_log2 = (float)(args->scale * 1.4426950408889634);
  score.softcap = (float)args->softcap;
  score.softcap_inverse = args->softcap > 0 ? (float)(1 / args->softcap) : 0;
  score.keep_scale = (float)attn_dropout_scale(args->dropout_p);
  score.keep_threshold = attn_dropout_threshold(args->dropout_p);
  return score;
}

#endif
