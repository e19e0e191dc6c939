/* SPDX-License-Identifier: MIT OR Apache-2.0
 * What the C and C++ test programs share. */
#ifndef UTIL_H
#define UTIL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jfa.h"

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, jfa_last_error()); \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A call that must fail with a status and a text that contains every one of up to two words. */
#define EXPECT_ERROR(call, status, word, other)                                                                        \
    do {                                                                                                               \
        const int32_t got_ = (int32_t)(call);                                                                          \
        if (got_ != (int32_t)(status) || !strstr(jfa_last_error(), word) || !strstr(jfa_last_error(), other)) {         \
            fprintf(stderr, "%s:%d: %s gave %d: %s\n", __FILE__, __LINE__, #call, (int)got_, jfa_last_error());        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* f32 self-attention, full mask, no bias: `rows` rows for at most `batch` sequences. */
static inline jfa_problem self_attention(int64_t heads, int64_t dim, int64_t batch, int64_t rows, float scale) {
    jfa_problem p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    p.dtype = JFA_DTYPE_F32;
    p.query = JFA_QUERY_JAGGED;
    p.heads_q = p.heads_kv = heads;
    p.head_dim = p.head_dim_v = dim;
    p.batch = p.kv_batch = batch;
    p.total_q = p.total_kv = rows;
    p.mask = JFA_MASK_FULL;
    p.bias = JFA_BIAS_NONE;
    p.scale = scale;
    return p;
}

#endif
