/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Mistakes that programs make with a schedule, and surroundings that a library meets in theirs: a schedule of another
 * batch or plan, a process made by fork, a thread with a small stack. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "jfa.h"
#include "util.h"

enum { SEQUENCES = 4, ROWS = 2048, HEADS = 4, DIM = 64, WIDTH = HEADS * DIM };

static const jfa_api *api;
static float q[ROWS * WIDTH], k[ROWS * WIDTH], v[ROWS * WIDTH], o[ROWS * WIDTH], lse[HEADS * ROWS];
static int32_t offsets[SEQUENCES + 1] = {0, 500, 500, 1200, ROWS};

static jfa_problem a_problem(void) { return self_attention(HEADS, DIM, SEQUENCES, ROWS, 0.125f); }

static jfa_plan *a_plan(const char *backend, const jfa_problem *p) {
    jfa_context_options options = {.struct_size = sizeof options, .backend = backend, .memory_space = JFA_MEMORY_HOST};
    jfa_context *context = NULL;
    jfa_plan *plan = NULL;
    EXPECT(api->context_create(&options, &context) == JFA_OK);
    EXPECT(api->plan_create(context, p, &plan) == JFA_OK);
    EXPECT(api->context_release(context) == JFA_OK);
    return plan;
}

typedef struct {
    jfa_layout layout;
    jfa_call call;
} batch;

/* Memory for a plan, as large as the caller likes beyond what it needs. */
static batch memory_for(const jfa_plan *plan) {
    jfa_requirements r = {.struct_size = sizeof r};
    EXPECT(api->plan_requirements(plan, &r) == JFA_OK);
    batch b = {.layout = {.struct_size = sizeof(jfa_layout)}, .call = {.struct_size = sizeof(jfa_call)}};
    b.layout.batch = b.layout.kv_batch = SEQUENCES;
    b.layout.q_offsets = b.layout.kv_offsets = offsets;
    b.layout.q_offsets_type = b.layout.kv_offsets_type = JFA_INDEX_I32;
    b.call.schedule_bytes = b.call.workspace_bytes = (size_t)64 << 20;
    EXPECT(r.schedule_bytes <= b.call.schedule_bytes && r.forward_bytes <= b.call.workspace_bytes);
    EXPECT(posix_memalign(&b.call.schedule, r.buffer_alignment, b.call.schedule_bytes) == 0);
    EXPECT(posix_memalign(&b.call.workspace, r.buffer_alignment, b.call.workspace_bytes) == 0);
    return b;
}

static jfa_status build(const jfa_plan *plan, batch *b) {
    return api->build_schedule(plan, &b->layout, b->call.schedule, b->call.schedule_bytes, NULL);
}

static jfa_status forward(const jfa_plan *plan, batch *b, int64_t heads, int64_t dim) {
    b->call.layout = &b->layout;
    jfa_tensor views[4];
    float *const data[4] = {q, k, v, o};
    for (int i = 0; i < 4; ++i) {
        views[i] = (jfa_tensor){sizeof(jfa_tensor), data[i], JFA_DTYPE_F32, 0, ROWS, heads, dim, WIDTH, dim};
    }
    jfa_lse l = {sizeof l, lse, ROWS, ROWS};
    jfa_forward_args args = {sizeof args, &views[0], &views[1], &views[2], NULL, &views[3], &l};
    return api->forward(plan, &b->call, &args);
}

static void other_schedules(void) {
    jfa_problem p = a_problem();
    jfa_plan *plan = a_plan("cpu", &p);
    batch b = memory_for(plan);
    memset(b.call.schedule, 0, 256);
    EXPECT_ERROR(forward(plan, &b, HEADS, DIM), JFA_ERROR_INVALID_ARGUMENT, "schedule = ", "not built");
    EXPECT(build(plan, &b) == JFA_OK && forward(plan, &b, HEADS, DIM) == JFA_OK);

    /* The next batch's offsets with this batch's schedule: longer sequences, shorter ones. */
    const int32_t next[2][SEQUENCES + 1] = {{0, 1, 2, 3, ROWS}, {0, 10, 20, 30, 40}};
    int32_t kept[SEQUENCES + 1];
    memcpy(kept, offsets, sizeof offsets);
    for (int i = 0; i < 2; ++i) {
        memcpy(offsets, next[i], sizeof offsets);
        o[0] = 7.0f;
        EXPECT_ERROR(forward(plan, &b, HEADS, DIM), JFA_ERROR_INVALID_ARGUMENT, "schedule = ", "another layout");
        EXPECT(o[0] == 7.0f);
    }
    /* The same lengths elsewhere need no new schedule. */
    for (int i = 0; i <= SEQUENCES; ++i) {
        offsets[i] = kept[i] / 2;
    }
    EXPECT(build(plan, &b) == JFA_OK);
    for (int i = 0; i <= SEQUENCES; ++i) {
        offsets[i] += 100;
    }
    EXPECT(forward(plan, &b, HEADS, DIM) == JFA_OK);
    memcpy(offsets, kept, sizeof offsets);

    /* The schedule of a plan with other heads. */
    EXPECT(build(plan, &b) == JFA_OK);
    p.heads_q = p.heads_kv = 1;
    jfa_plan *narrow = a_plan("cpu", &p);
    EXPECT_ERROR(forward(narrow, &b, 1, DIM), JFA_ERROR_INVALID_ARGUMENT, "schedule = ", "another plan");
    /* Of a plan alike it serves. */
    p = a_problem();
    jfa_plan *twin = a_plan("cpu", &p);
    EXPECT(forward(twin, &b, HEADS, DIM) == JFA_OK);
    jfa_plan *const plans[] = {plan, narrow, twin};
    for (int i = 0; i < 3; ++i) {
        EXPECT(api->plan_release(plans[i]) == JFA_OK);
    }
    free(b.call.schedule);
    free(b.call.workspace);
}

/* A child has the parent's memory but not its threads. */
static void forked(void) {
    const jfa_problem p = a_problem();
    jfa_plan *plan = a_plan("cpu:3", &p);
    batch b = memory_for(plan);
    EXPECT(build(plan, &b) == JFA_OK && forward(plan, &b, HEADS, DIM) == JFA_OK);
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        alarm(60);
        memset(o, 0xff, sizeof o);
        EXPECT(forward(plan, &b, HEADS, DIM) == JFA_OK && isfinite(o[0]) && isfinite(o[ROWS * WIDTH - 1]));
        jfa_plan *own = a_plan("cpu:3", &p);
        EXPECT(forward(own, &b, HEADS, DIM) == JFA_OK);
        EXPECT(api->plan_release(own) == JFA_OK && api->plan_release(plan) == JFA_OK);
        _exit(0);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(forward(plan, &b, HEADS, DIM) == JFA_OK && api->plan_release(plan) == JFA_OK);
    free(b.call.schedule);
    free(b.call.workspace);
}

static void *on_a_small_stack(void *argument) {
    const jfa_plan *plan = argument;
    batch b = memory_for(plan);
    EXPECT(build(plan, &b) == JFA_OK && forward(plan, &b, HEADS, DIM) == JFA_OK);
    EXPECT_ERROR(forward(plan, &b, HEADS, DIM + 1), JFA_ERROR_INVALID_ARGUMENT, "q.dim = 65", "");
    free(b.call.schedule);
    free(b.call.workspace);
    return NULL;
}

static void small_stack(void) {
    const jfa_problem p = a_problem();
    jfa_plan *plan = a_plan("cpu:1", &p);
    pthread_attr_t attributes;
    pthread_t thread;
    EXPECT(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, STACK) == 0);
    EXPECT(pthread_create(&thread, &attributes, on_a_small_stack, plan) == 0 && pthread_join(thread, NULL) == 0);
    EXPECT(api->plan_release(plan) == JFA_OK);
    pthread_attr_destroy(&attributes);
}

int main(void) {
    for (int i = 0; i < ROWS * WIDTH; ++i) {
        q[i] = k[i] = v[i] = 0.01f * (float)(i % 97 - 48);
    }
    api = jfa_get_api(JFA_API_VERSION);
    other_schedules();
    forked();
    small_stack();
    puts("ok");
    return 0;
}
