/* flash_fwd_f64.c: flash_fwd.c for operands in fp64. */
#define ATTN_DOUBLE
#include "flash_fwd.c"
