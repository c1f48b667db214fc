/* check_cpu.c: every CPU kernel in every build that this CPU runs. `check_cpu [percent]` scales the
 * number of random cases. The last line counts; the exit status is 1 if anything failed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dropout.h"

/* The known answers that Random123 publishes for philox4x32-10, through the fields of dropout.h. */
void check_philox(void) {
  static const struct {
    uint32_t counter[4], key[2], answer[4];
  } known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (int n = 0; n < 3; ++n) {
    const int64_t state[] = {(int64_t)((uint64_t)known[n].key[1] << 32 | known[n].key[0]),
                             known[n].counter[3]};
    const struct attn_philox draw =
        attn_philox(state, known[n].counter[0], known[n].counter[1], known[n].counter[2]);
    check_result(memcmp(draw.word, known[n].answer, sizeof draw.word) == 0,
                 "philox known answer %d: %08x %08x %08x %08x", n, draw.word[0], draw.word[1],
                 draw.word[2], draw.word[3]);
  }
  /* group and index: 8 columns share a draw, and no two of 64 share a number. */
  bool used[8][8] = {{false}};
  bool once = true;
  for (int64_t col = 0; col < 64; ++col) {
    bool *number = &used[attn_dropout_group(col)][attn_dropout_index(col)];
    once &= !*number;
    *number = true;
  }
  check_result(once, "dropout.h: two columns share a number");
}

/* The chosen build is the fastest that runs, or the one that ATTN_EXT_ISA names. */
void check_select(void) {
  const char *forced = getenv("ATTN_EXT_ISA"), *isa = attn_isa_cpu();
  const char *fastest = NULL;
  bool forced_runs = false;
  for (int n = 0; n < attn_cpu_build_count; ++n)
    if (attn_cpu_build_runs(n)) {
      fastest = attn_cpu_builds[n].name;
      forced_runs |= forced && strcmp(forced, fastest) == 0;
    }
  const char *want = !forced || !*forced ? fastest : forced_runs ? forced : NULL;
  check_result(want == isa || (want && isa && strcmp(want, isa) == 0), "isa %s, expected %s",
               isa ? isa : "NULL", want ? want : "NULL");
  setenv("ATTN_EXT_ISA", "vax", 1);
  check_result(attn_isa_cpu() == NULL, "ATTN_EXT_ISA=vax gave %s", attn_isa_cpu());
  if (forced)
    setenv("ATTN_EXT_ISA", forced, 1);
  else
    unsetenv("ATTN_EXT_ISA");
}

int main(int argc, char **argv) {
  const int percent = argc > 1 ? atoi(argv[1]) : 100;
  check_philox();
  check_select();
  check_stages(30 * percent / 100);
  check_flash(120 * percent / 100);
  printf("builds:");
  for (int n = 0; n < attn_cpu_build_count; ++n)
    if (attn_cpu_build_runs(n))
      printf(" %s", attn_cpu_builds[n].name);
  printf("\n%d passed, %d failed\n", check_passed, check_failed);
  return check_failed != 0;
}
