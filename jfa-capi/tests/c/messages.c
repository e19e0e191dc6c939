/* SPDX-License-Identifier: MIT OR Apache-2.0
 * What a context's log receives at each level: from the choice of a backend, from plans, and from calls on them. */
#define _GNU_SOURCE
#include <stdint.h>

#include "jfa.h"
#include "util.h"

static const jfa_api *api;

/* Lines like "4 text". */
typedef struct {
    char text[1 << 16];
    int count;
} journal;

static void receive(void *data, int32_t level, const char *message) {
    journal *j = data;
    const size_t used = strlen(j->text);
    snprintf(j->text + used, sizeof j->text - used, "%d %s\n", (int)level, message);
    ++j->count;
}

/* The one line that begins with `head` contains both words. */
static void expect_line(const journal *j, int line, const char *head, const char *word, const char *other) {
    const char *found = NULL;
    int times = 0;
    for (const char *at = j->text; *at; at = strchr(at, '\n') + 1) {
        if (strncmp(at, head, strlen(head)) == 0) {
            found = at;
            ++times;
        }
    }
    char text[4096] = "";
    if (found) {
        const size_t length = strcspn(found, "\n");
        snprintf(text, sizeof text, "%.*s", (int)(length < sizeof text ? length : sizeof text - 1), found);
    }
    if (times != 1 || !strstr(text, word) || !strstr(text, other)) {
        fprintf(stderr, "%d: %d lines \"%s...\" with \"%s\" and \"%s\" among:\n%s", line, times, head, word, other, j->text);
        exit(1);
    }
}

#define EXPECT_LINE(journal, head, word, other) expect_line(journal, __LINE__, head, word, other)

static void forget(journal *j) {
    j->text[0] = 0;
    j->count = 0;
}

static jfa_context *a_context(journal *j, int32_t level, const char *backend) {
    jfa_context_options options = {.struct_size = sizeof options, .backend = backend, .memory_space = JFA_MEMORY_HOST};
    options.log = j ? receive : NULL;
    options.log_data = j;
    options.log_level = level;
    jfa_context *context = NULL;
    EXPECT(api->context_create(&options, &context) == JFA_OK);
    return context;
}

static jfa_problem a_problem(void) { return self_attention(1, 4, 2, 8, 0.5f); }

/* Makes a plan and does everything with it that can be done, well and badly. */
static void everything(jfa_context *context, journal *j) {
    jfa_problem p = a_problem();
    jfa_plan *plan = NULL;
    p.dtype = 99;
    EXPECT(api->plan_create(context, &p, &plan) != JFA_OK);
    const int after_conversion = j->count;
    p = a_problem();
    p.heads_q = 0;
    EXPECT(api->plan_create(context, &p, &plan) != JFA_OK);
    EXPECT(j->count == 2 * after_conversion);
    p = a_problem();
    EXPECT(api->plan_create(context, &p, &plan) == JFA_OK);

    jfa_requirements r = {.struct_size = sizeof r};
    EXPECT(api->plan_requirements(plan, &r) == JFA_OK);
    void *schedule = NULL, *workspace = NULL;
    EXPECT(posix_memalign(&schedule, r.buffer_alignment, r.schedule_bytes + 1) == 0);
    EXPECT(posix_memalign(&workspace, r.buffer_alignment, r.forward_bytes + r.backward_bytes + 1) == 0);
    const int32_t offsets[] = {0, 3, 8};
    jfa_layout layout = {.struct_size = sizeof layout, .batch = 2, .kv_batch = 2};
    layout.q_offsets = layout.kv_offsets = offsets;
    layout.q_offsets_type = layout.kv_offsets_type = JFA_INDEX_I32;
    EXPECT(api->build_schedule(plan, &layout, schedule, r.schedule_bytes, NULL) == JFA_OK);

    static float data[8][32];
    float lse[8];
    jfa_tensor t[8];
    for (int i = 0; i < 8; ++i) {
        t[i] = (jfa_tensor){sizeof(jfa_tensor), data[i], JFA_DTYPE_F32, 0, 8, 1, 4, 4, 4};
    }
    const jfa_lse l = {sizeof l, lse, 8, 8};
    jfa_call call = {.struct_size = sizeof call, .layout = &layout, .schedule = schedule, .workspace = workspace};
    call.schedule_bytes = r.schedule_bytes;
    call.workspace_bytes = r.forward_bytes + r.backward_bytes;
    jfa_forward_args f = {sizeof f, &t[0], &t[1], &t[2], NULL, &t[3], &l};
    jfa_backward_args b = {sizeof b, &t[0], &t[1], &t[2], NULL, &t[3], &l, &t[4], &t[5], &t[6], &t[7], NULL};
    EXPECT(api->forward(plan, &call, &f) == JFA_OK);
    EXPECT(api->backward(plan, &call, &b) == JFA_OK);
    /* One that fails in the core, and two that C alone can get wrong. */
    t[1].dim = 5;
    EXPECT(api->forward(plan, &call, &f) != JFA_OK);
    b.dv = NULL;
    EXPECT(api->backward(plan, &call, &b) != JFA_OK);
    EXPECT(api->build_schedule(plan, NULL, schedule, r.schedule_bytes, NULL) != JFA_OK);
    EXPECT(api->plan_release(plan) == JFA_OK);
    free(schedule);
    free(workspace);
}

static void plans_and_calls(void) {
    static journal loud, middle, quiet;
    jfa_context *trace = a_context(&loud, JFA_LOG_TRACE, NULL);
    EXPECT_LINE(&loud, "3 backend chosen", "backend=cpu", "chosen_by=auto");
    EXPECT_LINE(&loud, "3 backend skipped backend=cuda", "reason=", "");
    EXPECT_LINE(&loud, "4 candidate ", "backend=cpu", "place=1");
    jfa_context *debug = a_context(&middle, JFA_LOG_DEBUG, "cpu:2");
    EXPECT_LINE(&middle, "3 backend chosen", "backend=cpu:2", "chosen_by=argument backend=cpu:2");
    jfa_context *warn = a_context(&quiet, JFA_LOG_WARN, NULL);
    forget(&loud);
    forget(&middle);

    everything(trace, &loud);
    EXPECT_LINE(&loud, "4 no plan error=", "dtype = 99", "");
    EXPECT_LINE(&loud, "4 no plan problem=", "heads_q = 0", "");
    EXPECT_LINE(&loud, "4 candidate supports the problem", "backend=cpu", "");
    EXPECT_LINE(&loud, "4 plan made", "backend=cpu", " schedule_bytes=");
    EXPECT_LINE(&loud, "4 plan made", "description=", " backward_bytes=");
    EXPECT_LINE(&loud, "5 build_schedule backend=cpu", " batch=2", " kv_batch=2");
    EXPECT_LINE(&loud, "5 forward backend=cpu", " batch=2", " kv_batch=2");
    EXPECT_LINE(&loud, "5 backward backend=cpu", " batch=2", " kv_batch=2");
    EXPECT_LINE(&loud, "5 forward failed backend=cpu", " batch=2", " error=k.dim = 5");
    EXPECT_LINE(&loud, "5 backward failed backend=cpu", " error=", "dv is NULL");
    EXPECT_LINE(&loud, "5 build_schedule failed backend=cpu", " error=", "layout is NULL");
    EXPECT(loud.count == 10);

    /* The plan's messages without those of its calls; others' loudness changes nothing. */
    everything(debug, &middle);
    EXPECT_LINE(&middle, "4 plan made", "backend=cpu:2", " forward_bytes=");
    EXPECT(middle.count == 4);
    everything(warn, &quiet);
    EXPECT(quiet.count == 0);

    /* A choice that fails says so, too. */
    forget(&loud);
    jfa_context_options options = {.struct_size = sizeof options, .backend = "nope", .memory_space = JFA_MEMORY_HOST};
    options.log = receive;
    options.log_data = &loud;
    options.log_level = JFA_LOG_DEBUG;
    jfa_context *none = NULL;
    EXPECT(api->context_create(&options, &none) != JFA_OK);
    EXPECT_LINE(&loud, "4 no backend chosen error=", "nope", "");
    jfa_context *const contexts[] = {trace, debug, warn};
    for (int i = 0; i < 3; ++i) {
        EXPECT(api->context_release(contexts[i]) == JFA_OK);
    }
}

/* JFA_BANANA is set: the first context that hears warnings hears of it, and no other. */
static void warnings(void) {
    static journal deaf, first, second;
    jfa_context *const contexts[] = {
        a_context(&deaf, JFA_LOG_ERROR, "cpu"),
        a_context(&first, JFA_LOG_DEFAULT, "cpu"),
        a_context(&second, JFA_LOG_DEFAULT, "cpu"),
    };
    EXPECT(deaf.count == 0 && first.count == 1 && second.count == 0);
    EXPECT_LINE(&first, "2 unknown environment variable", "JFA_BANANA", "JFA_BACKEND_PATH");
    for (int i = 0; i < 3; ++i) {
        EXPECT(api->context_release(contexts[i]) == JFA_OK);
    }
}

int main(void) {
    api = jfa_get_api(JFA_API_VERSION);
    if (getenv("JFA_BANANA")) {
        warnings();
    } else {
        plans_and_calls();
    }
    puts("ok");
    return 0;
}
