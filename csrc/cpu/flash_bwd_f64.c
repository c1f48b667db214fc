/* flash_bwd_f64.c: flash_bwd.c for operands in fp64. */
#define ATTN_DOUBLE
#include "flash_bwd.c"
