/* SPDX-License-Identifier: MIT OR Apache-2.0
 * What a forward on an empty batch costs: the median of many rounds, in nanoseconds. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <time.h>

#include "jfa.h"
#include "util.h"

enum { ROUNDS = 301, CALLS = 2000 };

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void) {
    const jfa_api *api = jfa_get_api(JFA_API_VERSION);
    jfa_context_options options = {.struct_size = sizeof options, .memory_space = JFA_MEMORY_HOST, .backend = "cpu"};
    jfa_problem p = self_attention(4, 128, 1024, 1 << 20, 0.1f);
    p.dtype = JFA_DTYPE_BF16;
    p.mask = JFA_MASK_CAUSAL;
    p.alignment = JFA_ALIGNMENT_BOTTOM_RIGHT;
    jfa_context *context = NULL;
    jfa_plan *plan = NULL;
    EXPECT(api && api->context_create(&options, &context) == JFA_OK);
    EXPECT(api->plan_create(context, &p, &plan) == JFA_OK);
    jfa_layout layout = {.struct_size = sizeof layout};
    jfa_tensor none = {sizeof none, NULL, JFA_DTYPE_BF16, 0, 0, 4, 128, 512, 128};
    jfa_lse lse = {sizeof lse, NULL, 0, 0};
    jfa_call call = {sizeof call, &layout, NULL, 0, NULL, 0, NULL};
    jfa_forward_args args = {sizeof args, &none, &none, &none, NULL, &none, &lse};
    static double rounds[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < CALLS; i++) {
            EXPECT(api->forward(plan, &call, &args) == JFA_OK);
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        rounds[r] = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / CALLS;
    }
    qsort(rounds, ROUNDS, sizeof rounds[0], by_value);
    printf("%.1f\n", rounds[ROUNDS / 2]);
    EXPECT(api->plan_release(plan) == JFA_OK && api->context_release(context) == JFA_OK);
    return 0;
}
