// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A plugin with one thing wrong, chosen by BROKEN. Where nothing is wrong (0) it starts, and plans and passes fail.

#include "jfa_backend.h"

#if BROKEN == 1
extern "C" __attribute__((visibility("default"))) int some_other_symbol() { return 0; }
#else

struct jfa_backend {
    jfa_log_fn log;
    void *log_data;
};
struct jfa_backend_plan {};

namespace {

const int64_t kDims[] = {8, 64, 8};
thread_local const char *error = "";

jfa_status fail(jfa_status status, const char *text) {
    error = text;
    return status;
}

const char *last_error() { return error; }

jfa_status create(const jfa_backend_options *options, jfa_backend **backend) {
#if BROKEN == 2
    (void)backend;
    (void)options;
    return fail(JFA_ERROR_DEVICE, "no luck today");
#elif BROKEN == 3
    (void)backend;
    (void)options;
    return fail(JFA_ERROR_BACKEND_UNAVAILABLE, "no such device here");
#elif BROKEN == 4
    (void)backend;
    (void)options;
    return JFA_OK;
#else
    *backend = new jfa_backend{options->log, options->log_data};
    options->log(options->log_data, JFA_LOG_INFO, options->variant ? options->variant : "no variant");
    return JFA_OK;
#endif
}

void release(jfa_backend *backend) {
    backend->log(backend->log_data, JFA_LOG_INFO, "released");
    delete backend;
}

jfa_status text(const jfa_backend *, const char **out) {
    *out = "fails on purpose";
    return JFA_OK;
}

jfa_status capabilities(const jfa_backend *, jfa_capabilities *c) {
    c->memory_space = JFA_MEMORY_HOST;
    c->dtypes = 1U << JFA_DTYPE_F32;
    c->features = 0;
    c->head_dims = c->head_dims_v = kDims;
    c->num_head_dims = c->num_head_dims_v = 1;
    c->base_alignment = c->stride_alignment = 16;
#if BROKEN == 5
    c->base_alignment = 12;
#elif BROKEN == 6
    c->num_head_dims = 0;
#elif BROKEN == 7
    c->memory_space = JFA_MEMORY_ANY;
#elif BROKEN == 8
    c->dtypes = 1ULL << 40;
#elif BROKEN == 9
    return fail(JFA_ERROR_INTERNAL, "what can I do");
#endif
    return JFA_OK;
}

[[maybe_unused]] jfa_status plan_create(const jfa_backend *, const jfa_problem *problem, jfa_backend_plan **plan) {
    if (problem->batch == 7) {
        return fail(static_cast<jfa_status>(9999), "seven is too many");
    }
    *plan = new jfa_backend_plan();
    return JFA_OK;
}

void plan_release(jfa_backend_plan *plan) { delete plan; }

jfa_status plan_requirements(const jfa_backend_plan *, jfa_requirements *r) {
    r->schedule_bytes = 0;
    r->forward_bytes = 100;
    r->backward_bytes = 0;
    return JFA_OK;
}

jfa_status plan_text(const jfa_backend_plan *, const char **out) {
    *out = "nothing to see";
    return JFA_OK;
}

jfa_status build_schedule(const jfa_backend_plan *, const jfa_layout *, void *, size_t, void *) { return JFA_OK; }

jfa_status forward(const jfa_backend_plan *, const jfa_call *, const jfa_forward_args *) {
    return fail(JFA_ERROR_DEVICE, "the forward fell over");
}

jfa_status backward(const jfa_backend_plan *, const jfa_call *, const jfa_backward_args *) {
    return fail(JFA_ERROR_INTERNAL, "never called");
}

const jfa_backend_api kApi = {
#if BROKEN == 10
    sizeof(jfa_backend_api) - 16,
#else
    sizeof(jfa_backend_api),
#endif
#if BROKEN == 11
    JFA_BACKEND_VERSION + 1,
#elif BROKEN == 12
    JFA_BACKEND_VERSION - 1,
#else
    JFA_BACKEND_VERSION,
#endif
    0,
#if BROKEN == 13
    "Bad Name",
#elif BROKEN == 14
    "other",
#else
    "broken",
#endif
    last_error,
    create,
    release,
    text,
    capabilities,
#if BROKEN == 15
    nullptr,
#else
    plan_create,
#endif
    plan_release,
    plan_requirements,
    plan_text,
    build_schedule,
    forward,
    backward,
};

} // namespace

#if BROKEN == 16
// A newer plugin: the table has grown.
struct Newer {
    jfa_backend_api base;
    void (*extra[4])();
};
const Newer kNewer = [] {
    Newer newer{kApi, {}};
    newer.base.struct_size = sizeof newer;
    return newer;
}();
#endif

extern "C" jfa_status jfa_backend_get_api(uint32_t version, const jfa_backend_api **api) {
#if BROKEN == 17
    (void)version;
    (void)api;
    return JFA_ERROR_UNSUPPORTED_VERSION;
#elif BROKEN == 18
    (void)version;
    *api = nullptr;
    return JFA_OK;
#elif BROKEN == 16
    (void)version;
    *api = &kNewer.base;
    return JFA_OK;
#else
    (void)version;
    *api = &kApi;
    return JFA_OK;
#endif
}
#endif
