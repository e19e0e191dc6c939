/* SPDX-License-Identifier: MIT OR Apache-2.0
 * What the C and C++ test programs share. */
#ifndef UTIL_H
#define UTIL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

#endif
