/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Every function of the table with what no caller should pass: a status, a text that names the argument and its value,
 * nothing written. And what is allowed although it looks wrong. */
#include <math.h>
#include <stdint.h>

#include "jfa.h"
#include "util.h"

enum { ROWS = 6, DIM = 4 };

static float q[ROWS * DIM], k[ROWS * DIM], v[ROWS * DIM], o[ROWS * DIM], lse[ROWS], d_o[ROWS * DIM], dq[ROWS * DIM],
    dk[ROWS * DIM], dv[ROWS * DIM];

static jfa_problem a_problem(void) { return self_attention(1, DIM, 2, ROWS, 0.5f); }

static jfa_tensor view(float *data) {
    jfa_tensor t = {sizeof t, data, JFA_DTYPE_F32, 0, ROWS, 1, DIM, DIM, DIM};
    return t;
}

#define PROBLEM_ERROR(status, change, word, other)                                                                     \
    do {                                                                                                               \
        jfa_problem p = a_problem();                                                                                   \
        change;                                                                                                        \
        plan = (jfa_plan *)1;                                                                                          \
        EXPECT_ERROR(api->plan_create(context, &p, &plan), status, word, other);                                       \
        EXPECT(plan == NULL);                                                                                          \
    } while (0)

int main(void) {
    /* The table. */
    EXPECT(strcmp(jfa_last_error(), "") == 0);
    EXPECT(jfa_get_api(0) == NULL && strstr(jfa_last_error(), "version = 0"));
    EXPECT(jfa_get_api(JFA_API_VERSION + 1) == NULL && strstr(jfa_last_error(), "version = 2"));
    const jfa_api *api = jfa_get_api(JFA_API_VERSION);
    EXPECT(api && api->version == JFA_API_VERSION && api->struct_size >= sizeof *api && api->reserved == 0);
    EXPECT(JFA_HAS(api, backward));
    const char *text = "";
    EXPECT(api->status_name(JFA_ERROR_UNSUPPORTED, &text) == JFA_OK && !strcmp(text, "JFA_ERROR_UNSUPPORTED"));
    EXPECT_ERROR(api->status_name(7000, &text), JFA_ERROR_INVALID_ARGUMENT, "status = 7000", "");
    EXPECT(text == NULL);
    EXPECT_ERROR(api->status_name(0, NULL), JFA_ERROR_NULL_POINTER, "name is NULL", "");

    /* Contexts. */
    jfa_context *context = (jfa_context *)1;
    jfa_context_options options = {.struct_size = sizeof options, .memory_space = JFA_MEMORY_HOST};
    EXPECT_ERROR(api->context_create(NULL, &context), JFA_ERROR_NULL_POINTER, "options is NULL", "");
    EXPECT(context == NULL);
    EXPECT_ERROR(api->context_create(&options, NULL), JFA_ERROR_NULL_POINTER, "context is NULL", "");
    options.struct_size = 0;
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_STRUCT_SIZE, "options.struct_size = 0",
                 "jfa_context_options");
    options.struct_size = sizeof options;
    options.memory_space = 0;
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_INVALID_ARGUMENT, "options.memory_space = 0",
                 "JFA_MEMORY_HOST = 1");
    options.memory_space = JFA_MEMORY_HOST;
    options.log_level = 9;
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_INVALID_ARGUMENT, "log_level = 9", "");
    options.log_level = 0;
    options.backend = "nonsense";
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_UNKNOWN_BACKEND, "'nonsense'", "cpu");
    options.backend = "\xff\xfe";
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_INVALID_ARGUMENT, "options.backend", "UTF-8");
    options.backend = "/no/such/library.so";
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_PLUGIN, "/no/such/library.so", "");
    options.backend = "cpu:none";
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_INVALID_ARGUMENT, "none", "threads");
    options.backend = "cpu";
    options.memory_space = JFA_MEMORY_CUDA;
    EXPECT_ERROR(api->context_create(&options, &context), JFA_ERROR_BACKEND_UNAVAILABLE, "'cpu'", "host memory");
    options.memory_space = JFA_MEMORY_HOST;
    EXPECT(api->context_create(&options, &context) == JFA_OK && context);
    EXPECT(api->context_release(NULL) == JFA_OK);
    EXPECT_ERROR(api->context_report(context, 3, &text), JFA_ERROR_INVALID_ARGUMENT, "format = 3", "JFA_REPORT_JSON");
    EXPECT(text == NULL);
    EXPECT_ERROR(api->context_report(NULL, JFA_REPORT_TEXT, &text), JFA_ERROR_NULL_POINTER, "context is NULL", "");
    EXPECT(api->context_report(context, JFA_REPORT_TEXT, &text) == JFA_OK && strstr(text, "cpu: "));
    EXPECT(api->context_report(context, JFA_REPORT_JSON, &text) == JFA_OK && strstr(text, "\"name\":\"cpu\""));

    /* Problems. */
    jfa_plan *plan = NULL;
    jfa_problem good = a_problem();
    EXPECT_ERROR(api->plan_create(NULL, &good, &plan), JFA_ERROR_NULL_POINTER, "context is NULL", "");
    EXPECT_ERROR(api->plan_create(context, NULL, &plan), JFA_ERROR_NULL_POINTER, "problem is NULL", "");
    EXPECT_ERROR(api->plan_create(context, &good, NULL), JFA_ERROR_NULL_POINTER, "plan is NULL", "");
    PROBLEM_ERROR(JFA_ERROR_STRUCT_SIZE, p.struct_size = 96, "problem.struct_size = 96", "window_left");
    PROBLEM_ERROR(JFA_ERROR_STRUCT_SIZE, p.struct_size = SIZE_MAX, "problem.struct_size = ", "sizeof(jfa_problem)");
    PROBLEM_ERROR(JFA_ERROR_STRUCT_TOO_NEW, p.reserved = 5, "problem.reserved = 5", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.dtype = 0, "dtype = 0", "JFA_DTYPE_F32");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.dtype = 77, "dtype = 77", "JFA_DTYPE_F32");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.query = 0, "query = 0", "JFA_QUERY_JAGGED");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.mask = 0, "mask = 0", "JFA_MASK_FULL");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.mask = JFA_MASK_CAUSAL, "alignment = 0", "JFA_ALIGNMENT_TOP_LEFT");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.bias = 0, "bias = 0", "JFA_BIAS_NONE");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.bias = JFA_BIAS_ALIBI, "alignment = 0", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, (p.bias = JFA_BIAS_DENSE, p.bias_dtype = JFA_DTYPE_F32, p.bias_row_align = 3),
                  "row_align = 3", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.heads_q = 0, "heads_q = 0", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, (p.heads_q = 3, p.heads_kv = 2), "heads_q = 3", "2");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.batch = -1, "batch = -1", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.total_kv = -5, "total_kv = -5", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.kv_batch = 1, "kv_batch = 1", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.scale = NAN, "scale = NaN", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.scale = INFINITY, "scale = inf", "");
    PROBLEM_ERROR(JFA_ERROR_INVALID_ARGUMENT, p.flags = 1u << 20, "flags = 0x100000", "");
    PROBLEM_ERROR(JFA_ERROR_UNSUPPORTED, p.head_dim = 100000, "head_dim 100000", "'cpu'");

    /* Plans. */
    EXPECT(api->plan_create(context, &good, &plan) == JFA_OK && plan);
    EXPECT(api->context_release(context) == JFA_OK); /* the plan stays */
    EXPECT(api->plan_release(NULL) == JFA_OK);
    EXPECT_ERROR(api->plan_backend(NULL, &text), JFA_ERROR_NULL_POINTER, "plan is NULL", "");
    EXPECT_ERROR(api->plan_backend(plan, NULL), JFA_ERROR_NULL_POINTER, "name is NULL", "");
    EXPECT(api->plan_backend(plan, &text) == JFA_OK && !strcmp(text, "cpu"));
    EXPECT(api->plan_report(plan, JFA_REPORT_JSON, &text) == JFA_OK && strstr(text, "\"requirements\""));
    EXPECT_ERROR(api->plan_report(plan, 0, &text), JFA_ERROR_INVALID_ARGUMENT, "format = 0", "");
    jfa_requirements needs = {.struct_size = 8};
    EXPECT_ERROR(api->plan_requirements(plan, &needs), JFA_ERROR_STRUCT_SIZE, "requirements.struct_size = 8", "");
    needs.struct_size = sizeof needs;
    EXPECT_ERROR(api->plan_requirements(plan, NULL), JFA_ERROR_NULL_POINTER, "requirements is NULL", "");
    EXPECT(api->plan_requirements(plan, &needs) == JFA_OK);
    EXPECT(needs.struct_size == sizeof needs && needs.buffer_alignment == 256 && needs.memory_space == JFA_MEMORY_HOST);
    EXPECT(needs.base_alignment >= 4 && needs.stride_alignment >= 4);

    /* Schedules. */
    const size_t alignment = needs.buffer_alignment;
    const size_t scratch = needs.forward_bytes > needs.backward_bytes ? needs.forward_bytes : needs.backward_bytes;
    char *schedule = aligned_alloc(alignment, (needs.schedule_bytes / alignment + 2) * alignment);
    char *workspace = aligned_alloc(alignment, (scratch / alignment + 2) * alignment);
    EXPECT(schedule && workspace);
    int64_t offsets[3] = {0, 2, 6};
    jfa_layout layout = {.struct_size = sizeof layout, .batch = 2, .kv_batch = 2};
    layout.q_offsets = layout.kv_offsets = offsets;
    layout.q_offsets_type = layout.kv_offsets_type = JFA_INDEX_I64;
#define SCHEDULE() api->build_schedule(plan, &layout, schedule, needs.schedule_bytes, NULL)
    EXPECT_ERROR(api->build_schedule(NULL, &layout, schedule, needs.schedule_bytes, NULL), JFA_ERROR_NULL_POINTER,
                 "plan is NULL", "");
    EXPECT_ERROR(api->build_schedule(plan, NULL, schedule, needs.schedule_bytes, NULL), JFA_ERROR_NULL_POINTER,
                 "layout is NULL", "");
    layout.q_offsets_type = 0;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_INVALID_ARGUMENT, "q_offsets_type = 0", "JFA_INDEX_I64");
    layout.q_offsets_type = JFA_INDEX_I64;
    offsets[0] = -1;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_INVALID_ARGUMENT, "_offsets[0] = -1", "");
    offsets[0] = 3;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_INVALID_ARGUMENT, "_offsets[1] = 2", "");
    offsets[0] = 0;
    offsets[2] = 7;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_INVALID_ARGUMENT, "_offsets[2] = 7", "");
    offsets[2] = 6;
    layout.batch = layout.kv_batch = 3;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_INVALID_ARGUMENT, "batch = 3", "");
    layout.batch = layout.kv_batch = 2;
    layout.q_offsets = NULL;
    EXPECT_ERROR(SCHEDULE(), JFA_ERROR_NULL_POINTER, "q_offsets", "");
    layout.q_offsets = offsets;
    if (needs.schedule_bytes > 0) {
        EXPECT_ERROR(api->build_schedule(plan, &layout, schedule, needs.schedule_bytes - 1, NULL),
                     JFA_ERROR_BUFFER_TOO_SMALL, "schedule", "");
        EXPECT_ERROR(api->build_schedule(plan, &layout, NULL, needs.schedule_bytes, NULL), JFA_ERROR_NULL_POINTER,
                     "schedule", "");
        EXPECT_ERROR(api->build_schedule(plan, &layout, schedule + 8, needs.schedule_bytes, NULL), JFA_ERROR_MISALIGNED,
                     "schedule", "");
    }
    EXPECT(SCHEDULE() == JFA_OK);

    /* Passes. On an error nothing is written: the outputs keep their mark. */
    jfa_call call = {sizeof call, &layout, schedule, needs.schedule_bytes, workspace, scratch, NULL};
    jfa_tensor tq = view(q), tk = view(k), tv = view(v), to = view(o), td_o = view(d_o), tdq = view(dq), tdk = view(dk),
               tdv = view(dv);
    jfa_lse tl = {sizeof tl, lse, ROWS, ROWS};
    jfa_forward_args args = {sizeof args, &tq, &tk, &tv, NULL, &to, &tl};
    jfa_backward_args back = {sizeof back, &tq, &tk, &tv, NULL, &to, &tl, &td_o, &tdq, &tdk, &tdv, NULL};
    for (int i = 0; i < ROWS * DIM; i++) {
        q[i] = k[i] = v[i] = d_o[i] = (float)(i % 5) - 2.0f;
        o[i] = dq[i] = dk[i] = dv[i] = 1234.0f;
        lse[i / DIM] = 1234.0f;
    }
#define FORWARD_ERROR(status, change, undo, word, other)                                                               \
    do {                                                                                                               \
        change;                                                                                                        \
        EXPECT_ERROR(api->forward(plan, &call, &args), status, word, other);                                           \
        EXPECT_ERROR(api->backward(plan, &call, &back), status, word, other);                                          \
        undo;                                                                                                          \
    } while (0)
    EXPECT_ERROR(api->forward(NULL, &call, &args), JFA_ERROR_NULL_POINTER, "plan is NULL", "");
    EXPECT_ERROR(api->forward(plan, NULL, &args), JFA_ERROR_NULL_POINTER, "call is NULL", "");
    EXPECT_ERROR(api->forward(plan, &call, NULL), JFA_ERROR_NULL_POINTER, "args is NULL", "");
    EXPECT_ERROR(api->backward(plan, &call, NULL), JFA_ERROR_NULL_POINTER, "args is NULL", "");
    FORWARD_ERROR(JFA_ERROR_NULL_POINTER, call.layout = NULL, call.layout = &layout, "call.layout is NULL", "");
    FORWARD_ERROR(JFA_ERROR_NULL_POINTER, args.q = back.q = NULL, args.q = back.q = &tq, "q is NULL", "");
    FORWARD_ERROR(JFA_ERROR_NULL_POINTER, args.lse = back.lse = NULL, args.lse = back.lse = &tl, "lse is NULL", "");
    FORWARD_ERROR(JFA_ERROR_NULL_POINTER, tk.data = NULL, tk.data = k, "k.data is null", "");
    FORWARD_ERROR(JFA_ERROR_INVALID_ARGUMENT, tv.dtype = 9, tv.dtype = JFA_DTYPE_F32, "v.dtype = 9", "JFA_DTYPE_BF16");
    FORWARD_ERROR(JFA_ERROR_INVALID_ARGUMENT, tv.dtype = JFA_DTYPE_F16, tv.dtype = JFA_DTYPE_F32, "v", "f16");
    FORWARD_ERROR(JFA_ERROR_INVALID_ARGUMENT, to.dim = 5, to.dim = DIM, "o", "5");
    FORWARD_ERROR(JFA_ERROR_INVALID_ARGUMENT, tq.rows = 7, tq.rows = ROWS, "q", "7");
    FORWARD_ERROR(JFA_ERROR_INVALID_ARGUMENT, tk.row_stride = -4, tk.row_stride = DIM, "k", "-4");
    FORWARD_ERROR(JFA_ERROR_MISALIGNED, tq.data = (char *)q + 2, tq.data = q, "q", "4");
    FORWARD_ERROR(JFA_ERROR_STRUCT_TOO_NEW, tq.reserved = 1, tq.reserved = 0, "q.reserved = 1", "");
    FORWARD_ERROR(JFA_ERROR_STRUCT_SIZE, tq.struct_size = 9, tq.struct_size = sizeof tq, "q.struct_size = 9", "data");
    if (scratch > 0 && needs.forward_bytes > 0) {
        FORWARD_ERROR(JFA_ERROR_BUFFER_TOO_SMALL, call.workspace_bytes = 0, call.workspace_bytes = scratch, "workspace",
                      "");
    }
    EXPECT_ERROR((back.dv = NULL, api->backward(plan, &call, &back)), JFA_ERROR_NULL_POINTER, "dv is NULL", "");
    back.dv = &tdv;
    for (int i = 0; i < ROWS * DIM; i++) {
        EXPECT(o[i] == 1234.0f && dq[i] == 1234.0f && dk[i] == 1234.0f && dv[i] == 1234.0f && lse[i / DIM] == 1234.0f);
    }
    EXPECT(api->forward(plan, &call, &args) == JFA_OK && api->backward(plan, &call, &back) == JFA_OK);
    for (int i = 0; i < ROWS * DIM; i++) {
        EXPECT(o[i] != 1234.0f && dq[i] != 1234.0f && dk[i] != 1234.0f && dv[i] != 1234.0f && lse[i / DIM] != 1234.0f);
    }

    /* An empty batch: every pointer may be NULL, and nothing is written. */
    jfa_layout empty = {.struct_size = sizeof empty};
    jfa_tensor none = {sizeof none, NULL, JFA_DTYPE_F32, 0, 0, 1, DIM, DIM, DIM};
    jfa_lse no_lse = {sizeof no_lse, NULL, 0, 0};
    jfa_call nothing = {sizeof nothing, &empty, NULL, 0, NULL, 0, NULL};
    jfa_forward_args no_args = {sizeof no_args, &none, &none, &none, NULL, &none, &no_lse};
    jfa_backward_args no_back = {sizeof no_back, &none, &none, &none, NULL, &none, &no_lse, &none, &none, &none, &none, NULL};
    EXPECT(api->build_schedule(plan, &empty, NULL, 0, NULL) == JFA_OK);
    EXPECT(api->forward(plan, &nothing, &no_args) == JFA_OK && api->backward(plan, &nothing, &no_back) == JFA_OK);

    EXPECT(api->plan_release(plan) == JFA_OK);
    free(schedule);
    free(workspace);
    puts("ok");
    return 0;
}
