/* Optimizer updates in one pass over memory, for each instruction set, behind a C interface.
 *
 * The body is compiled once for each instruction set. Nothing in it depends on which one runs: no
 * contraction, no reassociation, fused multiply-adds only where they are written (and where torch
 * has them), randomness from the values themselves. So every level gives the same bits.
 */

#include "kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define IN_SET(name) JOIN(name, SET)

/* Short loops are to be vectorised, not unrolled first. */
#if defined(__clang__) || !defined(__GNUC__)
#define KEEP_LOOP
#else
#define KEEP_LOOP _Pragma("GCC unroll 1")
#endif

#if defined(__aarch64__)
#define BASE_NAME "neon"
#else
#define BASE_NAME "scalar"
#endif

#define SET base
#define TARGET
#include "body.inc"
#undef SET
#undef TARGET

#if defined(__x86_64__) && defined(__GNUC__)
#define SET avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "body.inc"
#undef SET
#undef TARGET

#define SET avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "body.inc"
#undef SET
#undef TARGET
#endif

enum { LEVEL_BASE, LEVEL_AVX2, LEVEL_AVX512 };

/* The highest level that this machine has. */
int32_t zeepo_best_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return LEVEL_AVX2;
#endif
    return LEVEL_BASE;
}

const char *zeepo_level_name(int32_t level) {
    return level == LEVEL_AVX512 ? "avx512" : level == LEVEL_AVX2 ? "avx2" : BASE_NAME;
}

/* So that Python can see that both sides mean the same structure. */
int64_t zeepo_update_bytes(void) { return (int64_t)sizeof(Update); }

/* How this thread rounds, and whether it flushes denormal numbers to zero. */
uint64_t zeepo_float_mode(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__) && defined(__GNUC__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

static void set_float_mode(uint64_t mode) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_ldmxcsr((unsigned)mode);
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

static void update_range(const Update *update, int64_t start, int64_t count, int32_t level) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (level == LEVEL_AVX512) {
        update_range_avx512(update, start, count);
        return;
    }
    if (level == LEVEL_AVX2) {
        update_range_avx2(update, start, count);
        return;
    }
#endif
    (void)level;
    update_range_base(update, start, count);
}

/* Update elements [start, start + count); start is a multiple of 16. `mode` is that of the thread
 * that asked for the update, so that it does not matter which thread has which part. */
void zeepo_update(const Update *update, int64_t start, int64_t count, int32_t level,
                  uint64_t mode) {
    const uint64_t own = zeepo_float_mode();
    set_float_mode(mode);
    update_range(update, start, count, level);
    set_float_mode(own);
}
