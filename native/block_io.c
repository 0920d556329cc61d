/* Reads and writes one block of an extent and checks it. Plain C, called through ctypes
 * (src/zeepo/memory/native_blocks.py), which lets go of the interpreter's lock meanwhile.
 *
 * A block that is aligned as the file demands moves in one call of the system and without a copy;
 * the rest (unaligned memory, a block with gaps, an end that is not a whole page) goes through
 * `staging`, room for one grain. Every grain has a checksum. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { FILE_ENDED = -1, WRONG_CHECKSUM = -2 };

typedef struct {
    int32_t fd;
    int32_t alignment;
    int64_t offset;      /* of the block in the file */
    int64_t low, high;   /* the bytes of the extent that it holds */
    int64_t grain_bytes; /* of every grain but the last */
    uint64_t *checksums; /* one for each grain */
} Block;

/* Bytes [low, high) of the extent lie at `memory`; sorted, not overlapping. */
typedef struct {
    int64_t low, high;
    const char *memory;
} Piece;

uint64_t zeepo_checksum_base(const void *bytes, size_t count);
uint64_t zeepo_checksum_avx2(const void *bytes, size_t count);

int64_t zeepo_block_bytes(void) { return (int64_t)sizeof(Block); }

uint64_t zeepo_checksum(const void *bytes, int64_t count) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) return zeepo_checksum_avx2(bytes, (size_t)count);
#endif
    return zeepo_checksum_base(bytes, (size_t)count);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/* What went wrong, or 0. */
static int32_t read_all(int fd, char *memory, int64_t count, int64_t offset) {
    for (int64_t done = 0; done < count;) {
        const ssize_t now = pread(fd, memory + done, (size_t)(count - done), offset + done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return now < 0 ? errno : FILE_ENDED;
        done += now;
    }
    return 0;
}

static int32_t write_all(int fd, const char *memory, int64_t count, int64_t offset) {
    for (int64_t done = 0; done < count;) {
        const ssize_t now = pwrite(fd, memory + done, (size_t)(count - done), offset + done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return now < 0 ? errno : ENOSPC;
        done += now;
    }
    return 0;
}

/* How many bytes of a block move without a copy when its memory is here. */
static int64_t direct_bytes(const Block *block, const char *memory) {
    const int is_aligned = (uintptr_t)memory % (uintptr_t)block->alignment == 0;
    return is_aligned ? (block->high - block->low) / block->alignment * block->alignment : 0;
}

static int has_its_checksums(const Block *block, const char *memory) {
    const int64_t count = block->high - block->low;
    const uint64_t *checksum = block->checksums;
    for (int64_t at = 0; at < count; at += block->grain_bytes)
        if (zeepo_checksum(memory + at, smaller(block->grain_bytes, count - at)) != *checksum++)
            return 0;
    return 1;
}

/* 0, or an error of the system, or one of the above. */
int32_t zeepo_read_block(const Block *block, char *target, char *staging) {
    char *memory = target + block->low;
    const int64_t count = block->high - block->low;
    int64_t at = direct_bytes(block, memory);
    int32_t failure = read_all(block->fd, memory, at, block->offset);
    while (!failure && at < count) {
        const int64_t some = smaller(block->grain_bytes, count - at);
        const int64_t whole = padded(some, block->alignment);
        failure = read_all(block->fd, staging, whole, block->offset + at);
        if (!failure) memcpy(memory + at, staging, (size_t)some);
        at += some;
    }
    if (failure) return failure;
    return has_its_checksums(block, memory) ? 0 : WRONG_CHECKSUM;
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

/* The block's memory if one piece has all of it, aligned as the file demands. */
static const char *direct_source(const Block *block, const Piece *pieces, int64_t num_pieces) {
    const int64_t i = first_after(pieces, num_pieces, block->low);
    if (i == num_pieces || pieces[i].low > block->low || pieces[i].high < block->high) return NULL;
    const char *memory = pieces[i].memory + (block->low - pieces[i].low);
    return direct_bytes(block, memory) ? memory : NULL;
}

/* 0 or an error of the system. */
int32_t zeepo_write_block(const Block *block, const Piece *pieces, int64_t num_pieces,
                          char *staging) {
    const int64_t count = block->high - block->low;
    const char *source = direct_source(block, pieces, num_pieces);
    uint64_t *checksum = block->checksums;
    int64_t at = 0;
    int32_t failure = 0;
    if (source) {
        for (; at < count; at += block->grain_bytes)
            *checksum++ = zeepo_checksum(source + at, smaller(block->grain_bytes, count - at));
        at = direct_bytes(block, source);
        failure = write_all(block->fd, source, at, block->offset);
    }
    while (!failure && at < count) { /* the end that is not a whole page, or grain by grain */
        const int64_t some = smaller(block->grain_bytes, count - at);
        const int64_t whole = padded(some, block->alignment);
        assemble(pieces, num_pieces, block->low + at, block->low + at + some, staging);
        memset(staging + some, 0, (size_t)(whole - some));
        if (!source) *checksum++ = zeepo_checksum(staging, some);
        failure = write_all(block->fd, staging, whole, block->offset + at);
        at += some;
    }
    return failure;
}
