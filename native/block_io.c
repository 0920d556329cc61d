/* Reads and writes the blocks of one part of an extent and checks them. Plain C, called through
 * ctypes (src/zeepo/memory/native_blocks.py), which lets go of the interpreter's lock meanwhile.
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

/* How many bytes were read; if not all, `failure` is the error of the system or FILE_ENDED. */
static int64_t read_all(int fd, char *memory, int64_t count, int64_t offset, int32_t *failure) {
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
    return done;
}

static int64_t write_all(int fd, const char *memory, int64_t count, int64_t offset,
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
    return done;
}

static int is_aligned(const Part *part, const char *memory) {
    return (uintptr_t)memory % (uintptr_t)part->alignment == 0;
}

/* Bytes of the extent before the end of the part's block number `i`. */
static int64_t end_of(const Part *part, int64_t i) {
    return smaller((part->blocks[i] + 1) * part->block_bytes, part->nbytes);
}

/* The number of the first block of the part, from `i` on, that is not the extent's next one. */
static int64_t end_of_run(const Part *part, int64_t i) {
    int64_t end = i + 1;
    while (end < part->num_blocks && part->blocks[end] == part->blocks[end - 1] + 1) end++;
    return end;
}

/* Where block number `i` is in the file. */
static int64_t place_of(const Part *part, int64_t i) {
    return part->offset + i * part->block_bytes;
}

/* How many blocks came back right; if not all, `failure` says why the next did not. */
int64_t zeepo_read_blocks(const Part *part, char *target, char *staging, int32_t *failure) {
    *failure = 0;
    for (int64_t i = 0, end; i < part->num_blocks; i = end) {
        const int64_t low = part->blocks[i] * part->block_bytes;
        char *memory = target + low;
        const int has_staging_only = !is_aligned(part, memory);
        end = has_staging_only ? i + 1 : end_of_run(part, i);
        const int64_t count = end_of(part, end - 1) - low;
        const int64_t direct = has_staging_only ? 0 : count / part->alignment * part->alignment;
        const int64_t rest = count - direct;
        int64_t done = read_all(part->fd, memory, direct, place_of(part, i), failure);
        if (!*failure && rest) {
            const int64_t whole = padded(rest, part->alignment);
            read_all(part->fd, staging, whole, place_of(part, i) + direct, failure);
            if (!*failure) memcpy(memory + direct, staging, (size_t)rest);
        }
        if (*failure) return i + done / part->block_bytes;
        for (int64_t k = i; k < end; k++) {
            const int64_t start = part->blocks[k] * part->block_bytes;
            const uint64_t found = zeepo_checksum(target + start, end_of(part, k) - start);
            if (found == part->checksums[part->blocks[k]]) continue;
            *failure = WRONG_CHECKSUM;
            return k;
        }
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

/* The memory of [low, high) if one piece has all of it, aligned as the file demands. */
static const char *direct_source(const Part *part, const Piece *pieces, int64_t num_pieces,
                                 int64_t low, int64_t high) {
    const int64_t first = first_after(pieces, num_pieces, low);
    if (first == num_pieces || pieces[first].low > low || pieces[first].high < high) return NULL;
    const char *memory = pieces[first].memory + (low - pieces[first].low);
    return is_aligned(part, memory) ? memory : NULL;
}

/* How many blocks were written; if not all, `failure` says why the next was not. */
int64_t zeepo_write_blocks(const Part *part, const Piece *pieces, int64_t num_pieces,
                           char *staging, int32_t *failure) {
    *failure = 0;
    for (int64_t i = 0, end; i < part->num_blocks; i = end) {
        const int64_t low = part->blocks[i] * part->block_bytes;
        end = end_of_run(part, i);
        const char *source =
            direct_source(part, pieces, num_pieces, low, end_of(part, end - 1));
        if (!source) { /* block by block: there is staging for one */
            end = i + 1;
            source = direct_source(part, pieces, num_pieces, low, end_of(part, i));
        }
        const int64_t count = end_of(part, end - 1) - low;
        int64_t direct = 0, done = 0;
        if (source) {
            for (int64_t k = i; k < end; k++) {
                const int64_t start = part->blocks[k] * part->block_bytes;
                part->checksums[part->blocks[k]] =
                    zeepo_checksum(source + (start - low), end_of(part, k) - start);
            }
            direct = count / part->alignment * part->alignment;
            done = write_all(part->fd, source, direct, place_of(part, i), failure);
        }
        const int64_t rest = count - direct;
        if (!*failure && rest) {
            const int64_t whole = padded(rest, part->alignment);
            assemble(pieces, num_pieces, low + direct, low + count, staging);
            memset(staging + rest, 0, (size_t)(whole - rest));
            if (!source) part->checksums[part->blocks[i]] = zeepo_checksum(staging, count);
            write_all(part->fd, staging, whole, place_of(part, i) + direct, failure);
        }
        if (*failure) return i + done / part->block_bytes;
    }
    return part->num_blocks;
}
