// SPDX-License-Identifier: MIT OR Apache-2.0
// Eight threads share one context, one plan and one schedule, each with a workspace of its own, and each gets, bit for
// bit, what one thread gets alone. Meanwhile each makes plans and errors of its own: nobody sees another's text.
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "jfa.hpp"
#include "util.h"

namespace {

constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kDim = 40;

using vector = std::vector<float>;

struct Results {
    vector o, lse, dq, dk, dv;

    explicit Results(std::size_t elements, std::size_t rows)
        : o(elements), lse(rows * kHeads), dq(elements), dk(elements), dv(elements) {}

    bool operator==(const Results &other) const {
        const auto same = [](const vector &a, const vector &b) {
            return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
        };
        return same(o, other.o) && same(lse, other.lse) && same(dq, other.dq) && same(dk, other.dk) && same(dv, other.dv);
    }
};

} // namespace

int main() {
    const std::vector<std::int32_t> lengths{5, 0, 130, 17, 1, 64, 65, 90};
    std::vector<std::int32_t> offsets{0};
    for (const std::int32_t n : lengths) {
        offsets.push_back(offsets.back() + n);
    }
    const std::int64_t rows = offsets.back();
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    vector in[4];
    for (vector &x : in) {
        x.resize(static_cast<std::size_t>(rows * kHeads * kDim));
        for (float &value : x) {
            value = normal(random);
        }
    }

    std::atomic<int> messages{0};
    jfa::options options;
    options.log_level = JFA_LOG_TRACE;
    options.log = [&](jfa_log_level, const char *) { messages++; };
    const jfa::context context(JFA_MEMORY_HOST, options);
    const jfa::problem problem = jfa::problem(JFA_DTYPE_F32, kHeads, kDim, 0.2F)
                                     .capacity(static_cast<std::int64_t>(lengths.size()), rows, rows)
                                     .causal(JFA_ALIGNMENT_BOTTOM_RIGHT)
                                     .deterministic();
    const jfa::plan plan = context.plan(problem);
    const jfa::layout layout = jfa::layout::self(offsets);
    const jfa_requirements &needs = plan.requirements();
    const jfa::host_buffer schedule(needs.schedule_bytes, needs.buffer_alignment);
    plan.build_schedule(layout, {schedule.data(), schedule.bytes()});

    const auto run = [&](const jfa::plan &with, const jfa::host_buffer &workspace, Results &r) {
        const jfa::memory shared{schedule.data(), schedule.bytes()};
        const jfa::memory own{workspace.data(), workspace.bytes()};
        const jfa::tensor q(in[0], kHeads, kDim), k(in[1], kHeads, kDim), v(in[2], kHeads, kDim), d_o(in[3], kHeads, kDim);
        const jfa::tensor o(r.o, kHeads, kDim);
        const jfa::lse lse(r.lse, kHeads);
        with.forward(layout, shared, own, {q, k, v, o, lse});
        with.backward(layout, shared, own,
                      {q, k, v, o, lse, d_o, jfa::tensor(r.dq, kHeads, kDim), jfa::tensor(r.dk, kHeads, kDim),
                       jfa::tensor(r.dv, kHeads, kDim)});
    };
    const std::size_t scratch = std::max(needs.forward_bytes, needs.backward_bytes);
    const auto elements = static_cast<std::size_t>(rows * kHeads * kDim);
    Results alone(elements, static_cast<std::size_t>(rows));
    run(plan, jfa::host_buffer(scratch, needs.buffer_alignment), alone);

    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; t++) {
        threads.emplace_back([&, t] {
            const jfa::host_buffer workspace(scratch, needs.buffer_alignment);
            for (int round = 0; round < 10; round++) {
                Results r(elements, static_cast<std::size_t>(rows));
                run(plan, workspace, r);
                wrong += !(r == alone);
                const jfa::plan own = context.plan(problem);
                wrong += own.backend() != plan.backend() || plan.report().empty();
                try {
                    static_cast<void>(context.plan(jfa::problem(JFA_DTYPE_F32, 1, 8, 1).capacity(-1 - t, 0, 0)));
                    wrong++;
                } catch (const jfa::error &e) {
                    wrong += std::string(e.what()).find("batch = " + std::to_string(-1 - t)) == std::string::npos;
                }
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    EXPECT(wrong == 0);
    EXPECT(messages > 0);
    std::puts("ok");
}
