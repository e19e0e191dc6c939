/* SPDX-License-Identifier: MIT OR Apache-2.0
 * A caller compiled with a later header, whose structs have grown, on the library at hand: what it leaves unset works as
 * before, what it sets is refused, what it asks for is filled as far as the library knows. */
#include <stdint.h>

#include "jfa.h"
#include "util.h"

#define GROWN(name)                                                                                                    \
    struct name##_grown {                                                                                              \
        name base;                                                                                                     \
        int64_t more[3];                                                                                               \
    }

GROWN(jfa_context_options);
GROWN(jfa_problem);
GROWN(jfa_requirements);
GROWN(jfa_layout);
GROWN(jfa_call);
GROWN(jfa_tensor);
GROWN(jfa_lse);
GROWN(jfa_forward_args);
GROWN(jfa_backward_args);

/* The table of the later header. */
typedef struct {
    jfa_api base;
    jfa_status (*added)(void);
} grown_api;

#define HAS_ADDED(api) ((api)->struct_size >= offsetof(grown_api, added) + sizeof(void *))

int main(void) {
    const jfa_api *api = jfa_get_api(JFA_API_VERSION);
    EXPECT(api && !HAS_ADDED(api));

    struct jfa_context_options_grown options = {.base = {.struct_size = sizeof options}};
    options.base.memory_space = JFA_MEMORY_HOST;
    options.base.backend = "cpu";
    jfa_context *context = NULL;
    EXPECT(api->context_create(&options.base, &context) == JFA_OK);

    struct jfa_problem_grown problem = {.base = {.struct_size = sizeof problem}};
    jfa_problem *p = &problem.base;
    p->dtype = JFA_DTYPE_F32;
    p->query = JFA_QUERY_JAGGED;
    p->heads_q = p->heads_kv = p->batch = p->kv_batch = 1;
    p->head_dim = p->head_dim_v = 2;
    p->total_q = p->total_kv = 3;
    p->mask = JFA_MASK_FULL;
    p->bias = JFA_BIAS_NONE;
    p->scale = 1.0f;
    jfa_plan *plan = NULL;
    problem.more[1] = 1;
    EXPECT_ERROR(api->plan_create(context, p, &plan), JFA_ERROR_STRUCT_TOO_NEW, "problem: byte 184", "jfa_problem");
    problem.more[1] = 0;
    EXPECT(api->plan_create(context, p, &plan) == JFA_OK);

    struct jfa_requirements_grown needs = {.base = {.struct_size = sizeof needs}, .more = {7, 7, 7}};
    EXPECT(api->plan_requirements(plan, &needs.base) == JFA_OK);
    EXPECT(needs.base.buffer_alignment == 256 && needs.base.struct_size == sizeof needs);
    EXPECT(needs.more[0] == 0 && needs.more[1] == 0 && needs.more[2] == 0);

    float q[6] = {1, 2, 3, 4, 5, 6}, v[6] = {1, 2, 3, 4, 5, 6}, o[6], lse[3], d_o[6] = {1, 1, 1, 1, 1, 1}, dq[6], dk[6], dv[6];
    float *data[] = {q, v, o, d_o, dq, dk, dv};
    struct jfa_tensor_grown t[7];
    memset(t, 0, sizeof t);
    for (int i = 0; i < 7; i++) {
        const jfa_tensor base = {sizeof t[i], data[i], JFA_DTYPE_F32, 0, 3, 1, 2, 2, 2};
        t[i].base = base;
    }
    struct jfa_lse_grown l = {.base = {sizeof l, lse, 3, 3}};
    const int32_t offsets[] = {0, 3};
    struct jfa_layout_grown layout = {.base = {.struct_size = sizeof layout, .batch = 1, .kv_batch = 1}};
    layout.base.q_offsets = layout.base.kv_offsets = offsets;
    layout.base.q_offsets_type = layout.base.kv_offsets_type = JFA_INDEX_I32;
    const size_t scratch =
        needs.base.forward_bytes > needs.base.backward_bytes ? needs.base.forward_bytes : needs.base.backward_bytes;
    void *schedule = aligned_alloc(256, (needs.base.schedule_bytes / 256 + 1) * 256);
    void *workspace = aligned_alloc(256, (scratch / 256 + 1) * 256);
    EXPECT(schedule && workspace);
    struct jfa_call_grown call = {
        .base = {sizeof call, &layout.base, schedule, needs.base.schedule_bytes, workspace, scratch, NULL}};
    struct jfa_forward_args_grown forward = {
        .base = {sizeof forward, &t[0].base, &t[0].base, &t[1].base, NULL, &t[2].base, &l.base}};
    struct jfa_backward_args_grown backward = {
        .base = {sizeof backward, &t[0].base, &t[0].base, &t[1].base, NULL, &t[2].base, &l.base, &t[3].base, &t[4].base,
                 &t[5].base, &t[6].base, NULL}};
    EXPECT(api->build_schedule(plan, &layout.base, schedule, needs.base.schedule_bytes, NULL) == JFA_OK);
    EXPECT(api->forward(plan, &call.base, &forward.base) == JFA_OK);
    EXPECT(api->backward(plan, &call.base, &backward.base) == JFA_OK);
    /* dv sums the probabilities of each key: in all, one for each row and column. */
    float total = 0;
    for (int i = 0; i < 6; i++) {
        total += dv[i];
    }
    EXPECT(total > 5.999f && total < 6.001f);

    t[5].more[2] = 1;
    EXPECT_ERROR(api->backward(plan, &call.base, &backward.base), JFA_ERROR_STRUCT_TOO_NEW, "dk: byte 80", "jfa_tensor");
    l.more[0] = 1;
    EXPECT_ERROR(api->forward(plan, &call.base, &forward.base), JFA_ERROR_STRUCT_TOO_NEW, "lse: byte 32", "jfa_lse");
    l.more[0] = 0;
    layout.more[0] = 1;
    EXPECT_ERROR(api->forward(plan, &call.base, &forward.base), JFA_ERROR_STRUCT_TOO_NEW, "layout: byte 80", "jfa_layout");

    EXPECT(api->plan_release(plan) == JFA_OK && api->context_release(context) == JFA_OK);
    free(schedule);
    free(workspace);
    puts("ok");
    return 0;
}
