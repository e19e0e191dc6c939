// SPDX-License-Identifier: MIT OR Apache-2.0
// jfa.hpp: ownership, spans, exceptions, and the DLPack helpers with and without a dlpack.h beside them.
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#ifdef DLPACK_FIRST
#include "fake_dlpack.h"
#endif
#include "jfa.hpp"
#ifdef DLPACK_LAST
#include "fake_dlpack.h"
#endif
#include "util.h"

namespace {

template <class F>
void expect_error(jfa_status status, const char *word, F f) {
    try {
        f();
    } catch (const jfa::error &e) {
        if (e.status() != status || !std::strstr(e.what(), word)) {
            std::fprintf(stderr, "got %d: %s; expected %d: %s\n", e.status(), e.what(), status, word);
            std::exit(1);
        }
        return;
    }
    std::fprintf(stderr, "no exception; expected %d: %s\n", status, word);
    std::exit(1);
}

void views() {
    std::vector<float> data(24);
    const std::vector<float> constant(24);
    EXPECT(jfa::tensor(data, 2, 3).rows() == 4);
    EXPECT(jfa::tensor(constant, 2, 3).data() == constant.data());
    EXPECT(jfa::tensor(jfa::span<const float>(data.data(), 12), 2, 3).rows() == 2);
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "24 elements", [&] { jfa::tensor(data, 5, 1); });
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "24 elements", [&] { jfa::tensor(data, 0, 1); });
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "24 elements", [&] { jfa::lse(data, 5); });
    const std::int64_t root = std::int64_t{1} << 32; // whose square does not fit
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "24 elements", [&] { jfa::tensor(data, root, root); });
    EXPECT(jfa::tensor(data.data(), JFA_DTYPE_F32, 1, root, root).c().row_stride == INT64_MAX);
    std::array<int, 3> array{1, 2, 3};
    int plain[2] = {4, 5};
    int sum = 0;
    for (const int x : jfa::span<const int>(array)) {
        sum += x;
    }
    for (const int x : jfa::span<int>(plain)) {
        sum += x;
    }
    EXPECT(sum == 15 && jfa::span<int>().empty());
}

void handles() {
    jfa::context made(JFA_MEMORY_HOST);
    EXPECT(made.version() == std::to_string(JFA_VERSION_MAJOR) + "." + std::to_string(JFA_VERSION_MINOR) + "." +
                                 std::to_string(JFA_VERSION_PATCH));
    EXPECT(made.report(JFA_REPORT_JSON).front() == '{' && made.report().find("jfa ") == 0);
    jfa::context context = std::move(made);
    std::vector<jfa::plan> plans;
    for (int i = 0; i < 3; i++) { // grows, and so moves
        plans.push_back(context.plan(jfa::problem(JFA_DTYPE_F32, 1, 8, 1).capacity(2, 4, 4)));
    }
    EXPECT(plans[0].backend() == plans[2].backend() && !plans[1].report().empty());
    const std::vector<std::int64_t> offsets{0, 1, 4};
    auto first = plans[0].batch(jfa::layout::self(offsets));
    auto batch = std::move(first);
    std::vector<float> x(32, 0.5F), o(32), lse(4);
    const jfa::tensor in(x, 1, 8);
    batch.forward({in, in, in, jfa::tensor(o, 1, 8), jfa::lse(lse, 1)});
    EXPECT(std::fabs(o[31] - 0.5F) < 1e-6F && std::fabs(lse[0] - 2.0F) < 1e-6F);
    const std::vector<std::int32_t> lengths{1};
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "q_lengths has 1 entries",
                 [&] { static_cast<void>(plans[0].batch(jfa::layout::self(offsets).q_lengths(lengths))); });
    // Arrays in any order: what counts is the batch that all of them make.
    const std::vector<std::int32_t> index{0, 1, 1};
    const std::vector<std::int64_t> few{0, 4}, right{0, 4, 8, 12};
    const auto broadcast = [&] { return jfa::layout::broadcast(offsets); };
    EXPECT(broadcast().bias_offsets(right).kv_index(index).c().batch == 3);
    EXPECT(broadcast().kv_index(index).bias_offsets(right).c().batch == 3);
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "bias_offsets has 2 entries, the batch needs 4",
                 [&] { broadcast().bias_offsets(few).kv_index(index).c(); });
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "kv_index has 3 entries, the batch needs 2",
                 [&] { jfa::layout::self(offsets).kv_index(index).c(); });
    // Sizes that cannot be counted, under the sanitizers too.
    EXPECT(jfa::tensor(nullptr, JFA_DTYPE_F32, 0, -3, INT64_MAX).c().row_stride == INT64_MAX);
    std::int64_t shape[3] = {0, std::int64_t{1} << 40, std::int64_t{1} << 40};
    jfa_dl_tensor dl{};
    dl.device.device_type = 1;
    dl.ndim = 3;
    dl.dtype = {JFA_DL_FLOAT, 32, 1};
    expect_error(JFA_ERROR_NULL_POINTER, "shape is NULL", [&] { jfa::from_dlpack(dl); });
    dl.shape = shape;
    EXPECT(jfa::from_dlpack(dl).c().row_stride == INT64_MAX);
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "offsets", [&] {
        const std::vector<std::int64_t> bad{0, 3, 2};
        static_cast<void>(plans[0].batch(jfa::layout::self(bad)));
    });
    expect_error(JFA_ERROR_UNSUPPORTED_VERSION, "version = 99", [] {
        const jfa::context c(jfa_get_api(99), jfa_last_error, JFA_MEMORY_HOST);
    });
    jfa::options options;
    options.backend = "nonsense";
    expect_error(JFA_ERROR_UNKNOWN_BACKEND, "'nonsense'", [&] { const jfa::context c(JFA_MEMORY_HOST, options); });
    options.backend = "cpu";
    options.log_level = JFA_LOG_INFO;
    std::vector<std::string> messages;
    options.log = [&](jfa_log_level level, const char *text) {
        EXPECT(level <= JFA_LOG_TRACE);
        messages.emplace_back(text);
    };
    const auto all_that_is_left = [&] {
        options.log_level = JFA_LOG_TRACE;
        const jfa::context logged(JFA_MEMORY_HOST, options);
        EXPECT(!messages.empty() && messages.back().find("cpu") != std::string::npos);
        const auto plan = logged.plan(jfa::problem(JFA_DTYPE_F32, 1, 8, 1).capacity(2, 4, 4));
        const auto copy = plan;
        return copy.batch(jfa::layout::self(offsets));
    };
    auto lone = all_that_is_left();
    options.log = nullptr;
    o[31] = 0;
    lone.forward({in, in, in, jfa::tensor(o, 1, 8), jfa::lse(lse, 1)});
    EXPECT(std::fabs(o[31] - 0.5F) < 1e-6F);
    EXPECT(messages.back().find("forward ") == 0 && messages.back().find("backend=cpu") != std::string::npos);
}

void dlpack() {
    std::vector<float> data(60);
    std::int64_t shape[3] = {5, 2, 3}, strides[3] = {12, 3, 1};
    jfa_dl_tensor dl{data.data(), {JFA_DL_CPU, 0}, 3, {JFA_DL_FLOAT, 32, 1}, shape, strides, 8};
    const jfa::tensor strided = jfa::from_dlpack(dl, JFA_MEMORY_HOST);
    EXPECT(strided.data() == data.data() + 2 && strided.rows() == 5 && strided.heads() == 2 && strided.dim() == 3);
    EXPECT(strided.c().row_stride == 12 && strided.c().head_stride == 3 && strided.c().dtype == JFA_DTYPE_F32);
    dl.strides = nullptr;
    EXPECT(jfa::from_dlpack(dl).c().row_stride == 6 && jfa::from_dlpack(dl).c().head_stride == 3);
    dl.strides = strides;
    dl.dtype = {JFA_DL_BFLOAT, 16, 1};
    EXPECT(jfa::from_dlpack(dl).c().dtype == JFA_DTYPE_BF16);
    dl.dtype = {JFA_DL_FLOAT, 16, 1};
    EXPECT(jfa::from_dlpack(dl).c().dtype == JFA_DTYPE_F16);
    dl.dtype = {JFA_DL_FLOAT, 64, 1};
    expect_error(JFA_ERROR_UNSUPPORTED, "dtype = {code 2, bits 64, lanes 1}", [&] { jfa::from_dlpack(dl); });
    dl.dtype = {JFA_DL_FLOAT, 32, 4};
    expect_error(JFA_ERROR_UNSUPPORTED, "lanes 4", [&] { jfa::from_dlpack(dl); });
    dl.dtype = {JFA_DL_FLOAT, 32, 1};
    dl.device.device_type = JFA_DL_CUDA;
    EXPECT(jfa::from_dlpack(dl, JFA_MEMORY_CUDA).rows() == 5);
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "CUDA memory", [&] { jfa::from_dlpack(dl, JFA_MEMORY_HOST); });
    dl.device.device_type = 4;
    expect_error(JFA_ERROR_UNSUPPORTED, "device_type = 4", [&] { jfa::from_dlpack(dl); });
    dl.device.device_type = JFA_DL_CPU;
    strides[2] = 2;
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "strides[2] = 2", [&] { jfa::from_dlpack(dl); });
    shape[2] = 1; // then its stride means nothing
    EXPECT(jfa::from_dlpack(dl).dim() == 1);
    shape[0] = -1;
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "shape[0] = -1", [&] { jfa::from_dlpack(dl); });
    dl.ndim = 2;
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "ndim = 2", [&] { jfa::from_dlpack(dl); });
    shape[0] = 2;
    shape[1] = 7;
    strides[0] = 9;
    strides[1] = 1;
    const jfa::lse lse = jfa::lse_from_dlpack(dl);
    EXPECT(lse.c().data == data.data() + 2 && lse.c().rows == 7 && lse.c().head_stride == 9);
    dl.ndim = 3;
    expect_error(JFA_ERROR_INVALID_ARGUMENT, "ndim = 3", [&] { jfa::lse_from_dlpack(dl); });
    char text[4];
    std::int32_t space;
    jfa_tensor view;
    EXPECT(jfa_tensor_from_dlpack(nullptr, &view, &space, text, sizeof text) == JFA_ERROR_NULL_POINTER);
    EXPECT(std::strcmp(text, "ten") == 0);
    EXPECT(jfa_tensor_from_dlpack(nullptr, &view, &space, nullptr, 0) == JFA_ERROR_NULL_POINTER);
#ifdef DLPACK_DLPACK_H_
    DLTensor other{};
    std::int64_t other_shape[3] = {4, 1, 2};
    other.data = data.data();
    other.device = {kDLCPU, 0};
    other.ndim = 3;
    other.dtype = {kDLFloat, 32, 1};
    other.shape = other_shape;
    EXPECT(jfa::from_dlpack(other).rows() == 4);
    EXPECT(jfa_tensor_from_dlpack(JFA_DL_TENSOR(&other), &view, &space, nullptr, 0) == JFA_OK && view.rows == 4);
#endif
}

} // namespace

int main() {
    views();
    handles();
    dlpack();
    std::puts("ok");
}
