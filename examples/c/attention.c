/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Attention over real jagged lengths from C, with nothing but jfa.h: the library is loaded at run time.
 *
 *     cargo build --release -p jfa-capi
 *     cc -std=c11 -I include -o attention examples/c/attention.c -ldl -lm
 *     ./attention target/release/libjfa.so workloads/lengths/movielens-100k-user-history.txt 24
 *
 * Runs causal self-attention, forward and backward, over the first sequences of the file, and checks both: the output
 * of some rows against the formula in fp64, and the gradients against the change of a loss along a random direction.
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jfa.h"

enum { HEADS = 2, DIM = 32, MAX_SEQUENCES = 64 };

static const char *(*last_error)(void);

/* Ends the program with the library's words. */
static void check(jfa_status status, const char *call) {
    if (status != JFA_OK) {
        fprintf(stderr, "%s failed (%d): %s\n", call, (int)status, last_error());
        exit(1);
    }
}

static void fail(const char *text) {
    fprintf(stderr, "%s\n", text);
    exit(1);
}

/* Numbers in [-1, 1), the same on every run. */
static float random_number(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) / 2147483648.0f;
}

static float *random_tensor(size_t elements, uint64_t *state) {
    float *data = malloc(elements * sizeof *data);
    if (!data) {
        fail("out of memory");
    }
    for (size_t i = 0; i < elements; i++) {
        data[i] = random_number(state);
    }
    return data;
}

static void *aligned(size_t bytes, size_t alignment) {
    if (bytes == 0) {
        return NULL;
    }
    void *data = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!data) {
        fail("out of memory");
    }
    return data;
}

static jfa_tensor view(float *data, int64_t rows) {
    jfa_tensor tensor = {sizeof tensor, data, JFA_DTYPE_F32, 0, rows, HEADS, DIM, HEADS * DIM, DIM};
    return tensor;
}

static double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

/* One batch with all that its passes need. */
struct batch {
    const jfa_api *api;
    jfa_plan *plan;
    jfa_layout layout;
    jfa_call call;
    int64_t rows;
    size_t elements;
    float scale;
};

static void forward(const struct batch *b, float *q, float *k, float *v, float *o, float *lse) {
    jfa_tensor tq = view(q, b->rows), tk = view(k, b->rows), tv = view(v, b->rows), to = view(o, b->rows);
    jfa_lse tl = {sizeof tl, lse, b->rows, b->rows};
    jfa_forward_args args = {sizeof args, &tq, &tk, &tv, NULL, &to, &tl};
    check(b->api->forward(b->plan, &b->call, &args), "forward");
}

/* The loss: a weighted sum of the outputs at q, k, v moved by `step` along the direction u. */
static double loss_at(const struct batch *b, float step, float *const x[3], float *const u[3], const float *weights) {
    float *moved[3];
    for (int t = 0; t < 3; t++) {
        moved[t] = malloc(b->elements * sizeof(float));
        if (!moved[t]) {
            fail("out of memory");
        }
        for (size_t i = 0; i < b->elements; i++) {
            moved[t][i] = x[t][i] + step * u[t][i];
        }
    }
    float *o = calloc(b->elements, sizeof *o);
    float *lse = calloc((size_t)b->rows * HEADS, sizeof *lse);
    if (!o || !lse) {
        fail("out of memory");
    }
    forward(b, moved[0], moved[1], moved[2], o, lse);
    const double loss = dot(o, weights, b->elements);
    for (int t = 0; t < 3; t++) {
        free(moved[t]);
    }
    free(o);
    free(lse);
    return loss;
}

/* Largest error of row i of a sequence that starts at `start`, against the formula. */
static double row_error(const struct batch *b, const float *q, const float *k, const float *v, const float *o,
                        const float *lse, int64_t start, int64_t i) {
    double worst = 0;
    for (int h = 0; h < HEADS; h++) {
        const size_t at = (size_t)((start + i) * HEADS + h) * DIM;
        double out[DIM] = {0}, total = 0;
        for (int64_t j = 0; j <= i; j++) {
            const size_t key = (size_t)((start + j) * HEADS + h) * DIM;
            const double weight = exp((double)b->scale * dot(q + at, k + key, DIM));
            total += weight;
            for (int c = 0; c < DIM; c++) {
                out[c] += weight * v[key + (size_t)c];
            }
        }
        for (int c = 0; c < DIM; c++) {
            worst = fmax(worst, fabs(out[c] / total - o[at + (size_t)c]));
        }
        worst = fmax(worst, fabs(log(total) - lse[h * b->rows + start + i]));
    }
    return worst;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s libjfa.so lengths.txt [sequences]\n", argv[0]);
        return 2;
    }

    /* The library: two symbols, and the table. */
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const jfa_api *(*get_api)(uint32_t);
    *(void **)&get_api = dlsym(library, "jfa_get_api");
    *(void **)&last_error = dlsym(library, "jfa_last_error");
    if (!get_api || !last_error) {
        fail("not libjfa");
    }
    const jfa_api *api = get_api(JFA_API_VERSION);
    if (!api) {
        fail(last_error());
    }

    /* The batch: prefix sums of the lengths. */
    FILE *file = fopen(argv[2], "r");
    if (!file) {
        fail("cannot open the lengths");
    }
    const int64_t wanted = argc > 3 ? atoll(argv[3]) : 24;
    int64_t offsets[MAX_SEQUENCES + 1] = {0};
    int64_t sequences = 0;
    long long length;
    while (sequences < wanted && sequences < MAX_SEQUENCES && fscanf(file, "%lld", &length) == 1) {
        offsets[sequences + 1] = offsets[sequences] + length;
        sequences++;
    }
    fclose(file);

    struct batch b = {.api = api, .rows = offsets[sequences], .scale = 1.0f / sqrtf(DIM)};
    b.elements = (size_t)b.rows * HEADS * DIM;

    /* The plan, from capacities alone. */
    jfa_context *context;
    jfa_context_options options = {.struct_size = sizeof options, .memory_space = JFA_MEMORY_HOST};
    check(api->context_create(&options, &context), "context_create");
    jfa_problem problem = {.struct_size = sizeof problem};
    problem.dtype = JFA_DTYPE_F32;
    problem.query = JFA_QUERY_JAGGED;
    problem.heads_q = problem.heads_kv = HEADS;
    problem.head_dim = problem.head_dim_v = DIM;
    problem.batch = problem.kv_batch = sequences;
    problem.total_q = problem.total_kv = b.rows;
    problem.mask = JFA_MASK_CAUSAL;
    problem.alignment = JFA_ALIGNMENT_BOTTOM_RIGHT;
    problem.bias = JFA_BIAS_NONE;
    problem.scale = b.scale;
    check(api->plan_create(context, &problem, &b.plan), "plan_create");
    check(api->context_release(context), "context_release");
    const char *backend;
    check(api->plan_backend(b.plan, &backend), "plan_backend");
    jfa_requirements needs = {.struct_size = sizeof needs};
    check(api->plan_requirements(b.plan, &needs), "plan_requirements");

    /* The schedule, once for all passes over this batch; one workspace for both passes. */
    const size_t scratch = needs.forward_bytes > needs.backward_bytes ? needs.forward_bytes : needs.backward_bytes;
    b.layout = (jfa_layout){.struct_size = sizeof b.layout};
    b.layout.batch = b.layout.kv_batch = sequences;
    b.layout.q_offsets = b.layout.kv_offsets = offsets;
    b.layout.q_offsets_type = b.layout.kv_offsets_type = JFA_INDEX_I64;
    b.call = (jfa_call){.struct_size = sizeof b.call};
    b.call.layout = &b.layout;
    b.call.schedule = aligned(needs.schedule_bytes, needs.buffer_alignment);
    b.call.schedule_bytes = needs.schedule_bytes;
    b.call.workspace = aligned(scratch, needs.buffer_alignment);
    b.call.workspace_bytes = scratch;
    check(api->build_schedule(b.plan, &b.layout, b.call.schedule, b.call.schedule_bytes, NULL), "build_schedule");

    /* Forward. */
    uint64_t state = 1;
    float *x[3], *u[3], *dx[3];
    for (int t = 0; t < 3; t++) {
        x[t] = random_tensor(b.elements, &state);
        u[t] = random_tensor(b.elements, &state);
        dx[t] = calloc(b.elements, sizeof(float));
        if (!dx[t]) {
            fail("out of memory");
        }
    }
    float *d_o = random_tensor(b.elements, &state);
    float *o = random_tensor(b.elements, &state);
    float *lse = random_tensor((size_t)b.rows * HEADS, &state);
    forward(&b, x[0], x[1], x[2], o, lse);

    double worst = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t n = offsets[s + 1] - offsets[s];
        const int64_t picked[] = {0, n / 2, n - 1};
        for (int r = 0; r < 3 && n > 0; r++) {
            worst = fmax(worst, row_error(&b, x[0], x[1], x[2], o, lse, offsets[s], picked[r]));
        }
    }

    /* Backward. */
    jfa_tensor tq = view(x[0], b.rows), tk = view(x[1], b.rows), tv = view(x[2], b.rows), to = view(o, b.rows);
    jfa_tensor tdq = view(dx[0], b.rows), tdk = view(dx[1], b.rows), tdv = view(dx[2], b.rows), td_o = view(d_o, b.rows);
    jfa_lse tl = {sizeof tl, lse, b.rows, b.rows};
    jfa_backward_args args = {sizeof args, &tq, &tk, &tv, NULL, &to, &tl, &td_o, &tdq, &tdk, &tdv, NULL};
    check(api->backward(b.plan, &b.call, &args), "backward");

    const float step = 4e-3f;
    const double measured = (loss_at(&b, step, x, u, d_o) - loss_at(&b, -step, x, u, d_o)) / (2.0 * (double)step);
    double computed = 0;
    for (int t = 0; t < 3; t++) {
        computed += dot(dx[t], u[t], b.elements);
    }

    /* An error is told, and leaves nothing behind. */
    offsets[sequences] += 1;
    const jfa_status refused = api->build_schedule(b.plan, &b.layout, b.call.schedule, b.call.schedule_bytes, NULL);
    offsets[sequences] -= 1;
    const int told = refused == JFA_ERROR_INVALID_ARGUMENT && strstr(last_error(), "offsets") != NULL;

    printf("library %s, backend %s: %lld sequences, %lld tokens\n", api->library_version, backend, (long long)sequences,
           (long long)b.rows);
    printf("largest error of o and lse: %.2g\n", worst);
    printf("change of the loss: %.5f measured, %.5f by the gradients\n", measured, computed);
    printf("an offset past the buffer: %s\n", last_error());

    check(api->plan_release(b.plan), "plan_release");
    free(b.call.schedule);
    free(b.call.workspace);
    for (int t = 0; t < 3; t++) {
        free(x[t]);
        free(u[t]);
        free(dx[t]);
    }
    free(d_o);
    free(o);
    free(lse);
    if (worst > 1e-5 || !(fabs(measured - computed) < 1e-3 * fabs(measured) + 3e-3) || !told) {
        fail("WRONG");
    }
    printf("ok\n");
    return 0;
}
