/* Reads and writes the blocks of one part of an extent and checks them, one block after the other,
 * so that a block's checksum is taken while it is in the cache. Plain C, called through ctypes
 * (src/zeepo/memory/native_blocks.py), which lets go of the interpreter's lock meanwhile.
 *
 * Memory that is aligned as the file demands moves without a copy; the rest (unaligned memory,
 * blocks with gaps, an end that is not a whole page) goes through `staging`, room for one block. */

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
    int64_t offset;      /* of the part's first block in the file */
    int64_t block_bytes; /* of every block but an extent's last */
    int64_t nbytes;      /* of the extent */
    int64_t num_blocks;  /* of the part */
    const int64_t *blocks;
    uint64_t *checksums; /* of the extent's blocks */
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

/* 0, the error of the system, or FILE_ENDED. */
static int32_t read_all(int fd, char *memory, int64_t count, int64_t offset) {
    while (count > 0) {
        const ssize_t done = pread(fd, memory, (size_t)count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return FILE_ENDED;
        memory += done, offset += done, count -= done;
    }
    return 0;
}

static int32_t write_all(int fd, const char *memory, int64_t count, int64_t offset) {
    while (count > 0) {
        const ssize_t done = pwrite(fd, memory, (size_t)count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return ENOSPC;
        memory += done, offset += done, count -= done;
    }
    return 0;
}

/* How many of `count` bytes at `memory` can move without staging. */
static int64_t direct_bytes(const Part *part, const char *memory, int64_t count) {
    if ((uintptr_t)memory % (uintptr_t)part->alignment) return 0;
    return count / part->alignment * part->alignment;
}

static int32_t read_block(const Part *part, int64_t offset, char *target, int64_t count,
                          char *staging) {
    const int64_t direct = direct_bytes(part, target, count), rest = count - direct;
    int32_t failure = read_all(part->fd, target, direct, offset);
    if (failure || rest == 0) return failure;
    failure = read_all(part->fd, staging, padded(rest, part->alignment), offset + direct);
    if (!failure) memcpy(target + direct, staging, (size_t)rest);
    return failure;
}

/* How many blocks came back right; if not all, `failure` says why the next did not. */
int64_t zeepo_read_blocks(const Part *part, char *target, char *staging, int32_t *failure) {
    for (int64_t i = 0; i < part->num_blocks; i++) {
        const int64_t block = part->blocks[i], low = block * part->block_bytes;
        const int64_t count = smaller(part->block_bytes, part->nbytes - low);
        const int64_t offset = part->offset + i * part->block_bytes;
        *failure = read_block(part, offset, target + low, count, staging);
        if (!*failure && zeepo_checksum(target + low, count) != part->checksums[block])
            *failure = WRONG_CHECKSUM;
        if (*failure) return i;
    }
    return part->num_blocks;
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

static int32_t write_block(const Part *part, int64_t offset, const Piece *pieces,
                           int64_t num_pieces, int64_t low, int64_t count, char *staging,
                           uint64_t *checksum) {
    const int64_t first = first_after(pieces, num_pieces, low);
    const Piece *piece = pieces + first;
    int64_t direct = 0;
    if (first < num_pieces && piece->low <= low && piece->high >= low + count) {
        const char *source = piece->memory + (low - piece->low);
        direct = direct_bytes(part, source, count);
        if (direct) {
            *checksum = zeepo_checksum(source, count);
            const int32_t failure = write_all(part->fd, source, direct, offset);
            if (failure) return failure;
        }
    }
    const int64_t rest = count - direct;
    if (rest == 0) return 0;
    assemble(pieces, num_pieces, low + direct, low + count, staging);
    const int64_t whole = padded(rest, part->alignment);
    memset(staging + rest, 0, (size_t)(whole - rest));
    if (!direct) *checksum = zeepo_checksum(staging, count);
    return write_all(part->fd, staging, whole, offset + direct);
}

/* How many blocks were written; if not all, `failure` says why the next was not. */
int64_t zeepo_write_blocks(const Part *part, const Piece *pieces, int64_t num_pieces,
                           char *staging, int32_t *failure) {
    for (int64_t i = 0; i < part->num_blocks; i++) {
        const int64_t block = part->blocks[i], low = block * part->block_bytes;
        const int64_t count = smaller(part->block_bytes, part->nbytes - low);
        *failure = write_block(part, part->offset + i * part->block_bytes, pieces, num_pieces, low,
                               count, staging, part->checksums + block);
        if (*failure) return i;
    }
    return part->num_blocks;
}
