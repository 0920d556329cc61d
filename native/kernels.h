/* What an update is made of, as Python hands it over (src/zeepo/optim/kernels.py: _Update). */

#ifndef ZEEPO_KERNELS_H
#define ZEEPO_KERNELS_H

#include <stdint.h>

enum { BLOCK = 16, BLOCK_BYTES = 20 };
/* Elements between two looks at memory: all they need stays in the first cache. */
enum { TILE = 512, LARGE_TILE = 1 << 15 };
enum { MAX_STATES = 3 };

enum { ADAM, SGD, ADAGRAD, LION };
enum { FP32, BF16, PACKED };
enum {
    GRAD_IS_BF16 = 1,
    UNSCALES = 2,
    CLIPS = 4,
    MAXIMIZES = 8,
    DECAYS_GRAD = 16,
    DECAYS_PARAM = 32,
    AMSGRAD = 64,
    NESTEROV = 128,
    FIRST = 256, /* SGD: there is no momentum yet */
};

typedef struct {
    float *values;    /* fp32 parameters, or the master of narrow ones; or null */
    uint16_t *narrow; /* bf16 parameters; or null */
    const void *grad;
    void *states[MAX_STATES];
    int32_t algorithm;
    int32_t format; /* of all states */
    int32_t flags;
    uint32_t salts[MAX_STATES];
    float grad_scale;
    float clip_factor;
    float weight_decay; /* times the parameter is added to the gradient */
    float decay;        /* parameters are multiplied by it */
    float rate;         /* the negative step size */
    float weight1;      /* 1 - beta1; SGD: 1 - dampening */
    float weight2;      /* 1 - beta2 */
    float beta2;        /* SGD: momentum */
    float correction;   /* square root of Adam's second bias correction */
    float eps;
} Update;

#endif
