/* A team of threads with one list of grains. Checksums run at the speed of memory, so a disk that is
 * nearly as fast would stand still while its threads take them; and a thread that takes one holds
 * up all that compute in step with the core it is on, so many short turns on all cores at once are
 * better than a long one on one. Who waits for grains helps. */

#define _GNU_SOURCE
#include "checking.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

uint64_t zeepo_checksum(const void *bytes, int64_t count);

enum { TAKE = -1, MAX_THREADS = 8, MAX_GRAINS = 128 };

typedef struct {
    Round *round;
    const char *bytes;
    int64_t count;
    uint64_t *checksum;
    int64_t block; /* TAKE, or the block it belongs to */
} Grain;

struct Team {
    pthread_mutex_t lock;
    pthread_cond_t has_grains, has_done;
    pthread_t threads[MAX_THREADS];
    Grain grains[MAX_GRAINS]; /* a ring */
    int32_t num_threads, first, num_grains, is_over;
};

/* Whether the grain is right. */
static int check(const Grain *grain) {
    const uint64_t found = zeepo_checksum(grain->bytes, grain->count);
    if (grain->block != TAKE) return found == *grain->checksum;
    *grain->checksum = found;
    return 1;
}

static void note(Round *round, const Grain *grain, int is_right) {
    if (!is_right && (round->wrong < 0 || grain->block < round->wrong)) round->wrong = grain->block;
}

/* Take a grain from the list and do it. With the lock held, which is let go meanwhile. */
static void do_next(Team *team) {
    const Grain grain = team->grains[team->first];
    team->first = (team->first + 1) % MAX_GRAINS;
    team->num_grains--;
    pthread_mutex_unlock(&team->lock);
    const int is_right = check(&grain);
    pthread_mutex_lock(&team->lock);
    note(grain.round, &grain, is_right);
    if (--grain.round->num_left == 0) pthread_cond_broadcast(&team->has_done);
}

static void *work(void *of) {
    Team *team = of;
    pthread_mutex_lock(&team->lock);
    while (!team->is_over) {
        if (team->num_grains)
            do_next(team);
        else
            pthread_cond_wait(&team->has_grains, &team->lock);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* NULL when no thread can be had: then everybody checks for himself. */
Team *zeepo_team_new(int32_t num_threads) {
    Team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->has_grains, NULL);
    pthread_cond_init(&team->has_done, NULL);
    sigset_t others, before; /* signals are for Python's threads, but for those of a fault here */
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    while (team->num_threads < num_threads && team->num_threads < MAX_THREADS &&
           !pthread_create(&team->threads[team->num_threads], NULL, work, team))
        team->num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (team->num_threads) return team;
    zeepo_team_free(team);
    return NULL;
}

void zeepo_team_free(Team *team) {
    if (!team) return;
    pthread_mutex_lock(&team->lock);
    team->is_over = 1;
    pthread_cond_broadcast(&team->has_grains);
    pthread_mutex_unlock(&team->lock);
    for (int32_t i = 0; i < team->num_threads; i++) pthread_join(team->threads[i], NULL);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->has_grains);
    pthread_cond_destroy(&team->has_done);
    free(team);
}

Round new_round(Team *team, int64_t grain_bytes) {
    return (Round){.team = team, .grain_bytes = grain_bytes, .num_left = 0, .wrong = -1};
}

/* Onto the list; what has no place there is done here. */
static void give(Round *round, const char *bytes, int64_t count, uint64_t *checksums,
                 int64_t block) {
    Team *team = round->team;
    if (team) pthread_mutex_lock(&team->lock);
    const int64_t most = round->grain_bytes;
    for (int64_t low = 0; low < count; low += most) {
        const int64_t left = count - low;
        const Grain grain = {round, bytes + low, left < most ? left : most, checksums++, block};
        if (!team) {
            note(round, &grain, check(&grain));
            continue;
        }
        while (team->num_grains == MAX_GRAINS) do_next(team);
        team->grains[(team->first + team->num_grains++) % MAX_GRAINS] = grain;
        round->num_left++;
    }
    if (!team) return;
    pthread_cond_broadcast(&team->has_grains);
    pthread_mutex_unlock(&team->lock);
}

void take_checksums(Round *round, const char *bytes, int64_t count, uint64_t *checksums) {
    give(round, bytes, count, checksums, TAKE);
}

void compare_checksums(Round *round, const char *bytes, int64_t count, uint64_t *checksums,
                       int64_t block) {
    give(round, bytes, count, checksums, block);
}

int64_t finish(Round *round) {
    Team *team = round->team;
    if (!team) return round->wrong;
    pthread_mutex_lock(&team->lock);
    while (round->num_left) {
        if (team->num_grains)
            do_next(team);
        else
            pthread_cond_wait(&team->has_done, &team->lock);
    }
    pthread_mutex_unlock(&team->lock);
    return round->wrong;
}
