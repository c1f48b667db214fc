/* stages_f64.c: stages.c for operands in fp64. */
#define ATTN_DOUBLE
#include "stages.c"
