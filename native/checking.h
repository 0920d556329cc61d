/* Threads that take and compare checksums while others read and write. */

#include <stdint.h>

typedef struct Team Team;

/* What one call has given to a team, and what came out of it. */
typedef struct {
    Team *team;          /* NULL: the caller does it all, at once */
    int64_t grain_bytes; /* a block is checked in such grains, so that several threads share it */
    int64_t num_left;    /* grains that are not done */
    int64_t wrong;       /* the lowest block with a grain that has another checksum; -1: none */
} Round;

Team *zeepo_team_new(int32_t num_threads);
void zeepo_team_free(Team *team);

/* Not for Python, and not to be mixed up with other libraries' functions of such names. */
#pragma GCC visibility push(hidden)
Round new_round(Team *team, int64_t grain_bytes);
/* The checksums of a block's grains, taken from `bytes`, which stay as they are until `finish`... */
void take_checksums(Round *round, const char *bytes, int64_t count, uint64_t *checksums);
/* ...or compared with those that are there; `block` is what `wrong` will be. */
void compare_checksums(Round *round, const char *bytes, int64_t count, uint64_t *checksums,
                       int64_t block);
/* Everything given is done; the round's `wrong`. */
int64_t finish(Round *round);
#pragma GCC visibility pop
