/* Reads and writes the blocks of one part of an extent and checks them. Plain C, called through
 * ctypes (src/zeepo/memory/native_blocks.py), which lets go of the interpreter's lock meanwhile.
 * Checksums are taken by a team (checking.c) while the next blocks are read or written.
 *
 * Memory that is aligned as the file demands moves without a copy; the rest (unaligned memory,
 * blocks with gaps, an end that is not a whole page) goes through `staging`, room for one grain. */

#define _GNU_SOURCE
#include "checking.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { FILE_ENDED = -1, WRONG_CHECKSUM = -2 };

typedef struct {
    int32_t fd;
    int32_t alignment;
    int64_t offset;      /* of the part's first block in the file */
    int64_t block_bytes; /* of every block but an extent's last */
    int64_t grain_bytes; /* of every grain but a block's last: each has a checksum */
    int64_t nbytes;      /* of the extent */
    int64_t num_blocks;  /* of the part */
    const int64_t *blocks;
    uint64_t *checksums; /* of the extent's blocks: as many for each as a block has grains */
} Part;

/* Bytes [low, high) of the extent lie at `memory`; sorted, not overlapping. */
typedef struct {
    int64_t low, high;
    const char *memory;
} Piece;

uint64_t zeepo_checksum_base(const void *bytes, size_t count);
uint64_t zeepo_checksum_avx2(const void *bytes, size_t count);

int64_t zeepo_part_bytes(void) { return (int64_t)sizeof(Part); }

uint64_t zeepo_checksum(const void *bytes, int64_t count) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) return zeepo_checksum_avx2(bytes, (size_t)count);
#endif
    return zeepo_checksum_base(bytes, (size_t)count);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/* If not all bytes came, `failure` is the error of the system or FILE_ENDED. */
static void read_all(int fd, char *memory, int64_t count, int64_t offset, int32_t *failure) {
    int64_t done = 0;
    while (done < count) {
        const ssize_t now = pread(fd, memory + done, (size_t)(count - done), offset + done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            *failure = now < 0 ? errno : FILE_ENDED;
            break;
        }
        done += now;
    }
}

static void write_all(int fd, const char *memory, int64_t count, int64_t offset,
                      int32_t *failure) {
    int64_t done = 0;
    while (done < count) {
        const ssize_t now = pwrite(fd, memory + done, (size_t)(count - done), offset + done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            *failure = now < 0 ? errno : ENOSPC;
            break;
        }
        done += now;
    }
}

static int is_aligned(const Part *part, const char *memory) {
    return (uintptr_t)memory % (uintptr_t)part->alignment == 0;
}

/* Bytes of the extent before the end of the part's block number `i`. */
static int64_t end_of(const Part *part, int64_t i) {
    return smaller((part->blocks[i] + 1) * part->block_bytes, part->nbytes);
}

/* Where block number `i` is in the file. */
static int64_t place_of(const Part *part, int64_t i) {
    return part->offset + i * part->block_bytes;
}

static int64_t start_of(const Part *part, int64_t i) { return part->blocks[i] * part->block_bytes; }

static uint64_t *checksums_of(const Part *part, int64_t i) {
    const int64_t num_grains = padded(part->block_bytes, part->grain_bytes) / part->grain_bytes;
    return part->checksums + part->blocks[i] * num_grains;
}

/* Read block number `i`, checked later; why not all of it came. */
static int32_t read_block(const Part *part, int64_t i, char *target, char *staging, Round *round) {
    const int64_t low = start_of(part, i), count = end_of(part, i) - low;
    char *memory = target + low;
    int64_t at = is_aligned(part, memory) ? count / part->alignment * part->alignment : 0;
    int32_t failure = 0;
    read_all(part->fd, memory, at, place_of(part, i), &failure);
    while (!failure && at < count) {
        const int64_t some = smaller(part->grain_bytes, count - at);
        const int64_t whole = padded(some, part->alignment);
        read_all(part->fd, staging, whole, place_of(part, i) + at, &failure);
        if (!failure) memcpy(memory + at, staging, (size_t)some);
        at += some;
    }
    if (!failure) compare_checksums(round, memory, count, checksums_of(part, i), i);
    return failure;
}

/* How many blocks came back right; if not all, `failure` says why the next did not. */
int64_t zeepo_read_blocks(const Part *part, Team *team, char *target, char *staging,
                          int32_t *failure) {
    Round round = new_round(team, part->grain_bytes);
    int64_t done = 0;
    *failure = 0;
    while (done < part->num_blocks && !*failure) {
        *failure = read_block(part, done, target, staging, &round);
        if (!*failure) done++;
    }
    const int64_t wrong = finish(&round);
    if (wrong < 0) return done;
    *failure = WRONG_CHECKSUM;
    return wrong;
}

/* The first piece that ends after `low`. */
static int64_t first_after(const Piece *pieces, int64_t num_pieces, int64_t low) {
    int64_t below = 0, above = num_pieces;
    while (below < above) {
        const int64_t middle = (below + above) / 2;
        if (pieces[middle].high > low)
            above = middle;
        else
            below = middle + 1;
    }
    return below;
}

/* Bytes [low, high) of the extent to `target`, zeros where no piece is. */
static void assemble(const Piece *pieces, int64_t num_pieces, int64_t low, int64_t high,
                     char *target) {
    int64_t at = low;
    for (int64_t i = first_after(pieces, num_pieces, low); at < high; i++) {
        const int64_t start = i < num_pieces ? smaller(larger(pieces[i].low, at), high) : high;
        memset(target + (at - low), 0, (size_t)(start - at));
        at = start;
        if (at == high) break;
        const int64_t end = smaller(pieces[i].high, high);
        memcpy(target + (at - low), pieces[i].memory + (at - pieces[i].low), (size_t)(end - at));
        at = end;
    }
}

/* The memory of [low, high) if one piece has all of it, aligned as the file demands. */
static const char *direct_source(const Part *part, const Piece *pieces, int64_t num_pieces,
                                 int64_t low, int64_t high) {
    const int64_t first = first_after(pieces, num_pieces, low);
    if (first == num_pieces || pieces[first].low > low || pieces[first].high < high) return NULL;
    const char *memory = pieces[first].memory + (low - pieces[first].low);
    return is_aligned(part, memory) ? memory : NULL;
}

/* Write block number `i` and take its checksums; why not all of it was written. */
static int32_t write_block(const Part *part, int64_t i, const Piece *pieces, int64_t num_pieces,
                           char *staging, Round *round) {
    const int64_t low = start_of(part, i), high = end_of(part, i), count = high - low;
    const char *source = direct_source(part, pieces, num_pieces, low, high);
    int64_t at = 0;
    int32_t failure = 0;
    if (source) {
        take_checksums(round, source, count, checksums_of(part, i));
        at = count / part->alignment * part->alignment;
        write_all(part->fd, source, at, place_of(part, i), &failure);
    }
    while (!failure && at < count) { /* the end that is not a whole page, or grain by grain */
        const int64_t some = smaller(part->grain_bytes, count - at);
        const int64_t whole = padded(some, part->alignment);
        assemble(pieces, num_pieces, low + at, low + at + some, staging);
        memset(staging + some, 0, (size_t)(whole - some));
        if (!source) checksums_of(part, i)[at / part->grain_bytes] = zeepo_checksum(staging, some);
        write_all(part->fd, staging, whole, place_of(part, i) + at, &failure);
        at += some;
    }
    return failure;
}

/* How many blocks were written; if not all, `failure` says why the next was not. */
int64_t zeepo_write_blocks(const Part *part, Team *team, const Piece *pieces, int64_t num_pieces,
                           char *staging, int32_t *failure) {
    Round round = new_round(team, part->grain_bytes);
    int64_t done = 0;
    *failure = 0;
    while (done < part->num_blocks && !*failure) {
        *failure = write_block(part, done, pieces, num_pieces, staging, &round);
        if (!*failure) done++;
    }
    finish(&round);
    return done;
}
