// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Scoring candidates against shared histories from C++: every user has one history of real length (the keys and
// values) and a few candidates (the queries), which all attend to that one history by kv_index. Grouped queries, a
// relative bias, and all gradients. The backend is chosen by JFA_BACKEND.
//
//     cargo build --release -p jfa-capi
//     c++ -std=c++17 -I include -o attention examples/cpp/attention.cpp target/release/libjfa.a -ldl -lpthread -lm
//     JFA_BACKEND=cpu ./attention workloads/lengths/movielens-100k-user-history.txt 24
//
// Checks the output against the formula, and the gradients against the change of a loss along a random direction.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <random>
#include <stdexcept>
#include <vector>

#include "jfa.hpp"

namespace {

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kHeadsKv = 2;
constexpr std::int64_t kDim = 16;
constexpr std::int64_t kRadius = 20;
constexpr std::int64_t kTableRow = 2 * kRadius + 1;

using vector = std::vector<float>;

vector random_vector(std::size_t size, std::mt19937 &random) {
    std::normal_distribution<float> normal;
    vector out(size);
    std::generate(out.begin(), out.end(), [&] { return normal(random); });
    return out;
}

double dot(const vector &a, const vector &b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); i++) {
        sum += static_cast<double>(a[i]) * b[i];
    }
    return sum;
}

std::vector<std::int32_t> read_lengths(const char *path, std::size_t count) {
    std::ifstream file(path);
    std::vector<std::int32_t> lengths;
    for (std::int32_t length; lengths.size() < count && file >> length;) {
        lengths.push_back(length);
    }
    if (lengths.empty()) {
        throw std::runtime_error(std::string("no lengths in ") + path);
    }
    return lengths;
}

/// Users with histories, candidates with lengths.
struct Workload {
    std::vector<std::int32_t> q_offsets{0};
    std::vector<std::int64_t> kv_offsets{0}; // the two types may differ
    std::vector<std::int32_t> kv_index;

    explicit Workload(const std::vector<std::int32_t> &histories) {
        for (std::size_t user = 0; user < histories.size(); user++) {
            kv_offsets.push_back(kv_offsets.back() + histories[user]);
            const std::size_t candidates = user % 4; // some users have none
            for (std::size_t c = 0; c < candidates; c++) {
                q_offsets.push_back(q_offsets.back() + static_cast<std::int32_t>(1 + c));
                kv_index.push_back(static_cast<std::int32_t>(user));
            }
        }
    }

    std::int64_t batch() const { return static_cast<std::int64_t>(kv_index.size()); }
    std::int64_t total_q() const { return q_offsets.back(); }
    std::int64_t total_kv() const { return kv_offsets.back(); }
};

struct Inputs {
    vector q, k, v, table;
};

/// The row of one candidate against the formula; returns the largest error.
double row_error(const Workload &work, const Inputs &in, float scale, const vector &o, std::size_t b, std::int64_t i,
                 std::int64_t h) {
    const std::int64_t g = h * kHeadsKv / kHeads;
    const std::int64_t row = work.q_offsets[b] + i;
    const std::int64_t m = work.q_offsets[b + 1] - work.q_offsets[b];
    const auto user = static_cast<std::size_t>(work.kv_index[b]);
    const std::int64_t first = work.kv_offsets[user];
    const std::int64_t n = work.kv_offsets[user + 1] - first;
    const auto at = [](std::int64_t r, std::int64_t heads, std::int64_t head) {
        return static_cast<std::size_t>((r * heads + head) * kDim);
    };
    std::vector<double> out(kDim);
    double total = 0;
    for (std::int64_t j = 0; j < n; j++) {
        double score = 0;
        for (std::size_t c = 0; c < kDim; c++) {
            score += static_cast<double>(in.q[at(row, kHeads, h) + c]) * in.k[at(first + j, kHeadsKv, g) + c];
        }
        const std::int64_t distance = std::clamp(j - i - (n - m), -kRadius, kRadius);
        const float bias = in.table[static_cast<std::size_t>(h * kTableRow + distance + kRadius)];
        const double weight = std::exp(scale * score + bias);
        total += weight;
        for (std::size_t c = 0; c < kDim; c++) {
            out[c] += weight * in.v[at(first + j, kHeadsKv, g) + c];
        }
    }
    double worst = 0;
    for (std::size_t c = 0; c < kDim; c++) {
        worst = std::max(worst, std::fabs(out[c] / total - o[at(row, kHeads, h) + c]));
    }
    return worst;
}

int run(const char *path, std::size_t users) {
    const Workload work(read_lengths(path, users));
    const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));

    const jfa::context context(JFA_MEMORY_HOST);
    const jfa::plan plan = context.plan(jfa::problem(JFA_DTYPE_F32, kHeads, kDim, scale)
                                            .heads_kv(kHeadsKv)
                                            .kv_index(static_cast<std::int64_t>(users))
                                            .capacity(work.batch(), work.total_q(), work.total_kv())
                                            .relative_bias(kRadius, JFA_ALIGNMENT_BOTTOM_RIGHT));
    auto batch = plan.batch(jfa::layout(work.q_offsets, work.kv_offsets).kv_index(work.kv_index));

    std::mt19937 random(1);
    const auto q_size = static_cast<std::size_t>(work.total_q() * kHeads * kDim);
    const auto kv_size = static_cast<std::size_t>(work.total_kv() * kHeadsKv * kDim);
    Inputs in{random_vector(q_size, random), random_vector(kv_size, random), random_vector(kv_size, random),
              random_vector(static_cast<std::size_t>(kHeads * kTableRow), random)};
    const Inputs direction{random_vector(in.q.size(), random), random_vector(in.k.size(), random),
                           random_vector(in.v.size(), random), random_vector(in.table.size(), random)};
    const vector d_o = random_vector(in.q.size(), random);

    const auto forward = [&](Inputs &inputs, vector &o, vector &lse) {
        batch.forward({jfa::tensor(inputs.q, kHeads, kDim), jfa::tensor(inputs.k, kHeadsKv, kDim),
                       jfa::tensor(inputs.v, kHeadsKv, kDim), jfa::tensor(o, kHeads, kDim), jfa::lse(lse, kHeads),
                       inputs.table.data()});
    };

    vector o(in.q.size());
    vector lse(static_cast<std::size_t>(work.total_q() * kHeads));
    forward(in, o, lse);
    double worst = 0;
    for (std::size_t b = 0; b < work.kv_index.size(); b++) {
        for (std::int64_t h = 0; h < kHeads; h++) {
            for (std::int64_t i = 0; i < work.q_offsets[b + 1] - work.q_offsets[b]; i++) {
                worst = std::max(worst, row_error(work, in, scale, o, b, i, h));
            }
        }
    }

    Inputs gradient{vector(in.q.size()), vector(in.k.size()), vector(in.v.size()), vector(in.table.size())};
    batch.backward({jfa::tensor(in.q, kHeads, kDim), jfa::tensor(in.k, kHeadsKv, kDim),
                    jfa::tensor(in.v, kHeadsKv, kDim), jfa::tensor(o, kHeads, kDim), jfa::lse(lse, kHeads),
                    jfa::tensor(d_o, kHeads, kDim), jfa::tensor(gradient.q, kHeads, kDim),
                    jfa::tensor(gradient.k, kHeadsKv, kDim), jfa::tensor(gradient.v, kHeadsKv, kDim), in.table.data(),
                    gradient.table.data()});

    // The loss is dot(o, d_o).
    const auto loss_at = [&](float step) {
        const auto moved = [step](const vector &x, const vector &u) {
            vector out(x);
            for (std::size_t i = 0; i < x.size(); i++) {
                out[i] += step * u[i];
            }
            return out;
        };
        Inputs at{moved(in.q, direction.q), moved(in.k, direction.k), moved(in.v, direction.v),
                  moved(in.table, direction.table)};
        vector out(o.size());
        vector out_lse(lse.size());
        forward(at, out, out_lse);
        return dot(out, d_o);
    };
    constexpr float kStep = 4e-3F;
    const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2.0 * kStep);
    const double computed = dot(gradient.q, direction.q) + dot(gradient.k, direction.k) +
                            dot(gradient.v, direction.v) + dot(gradient.table, direction.table);

    // Mistakes are exceptions with the status and a text that names the argument.
    bool told = false;
    try {
        static_cast<void>(context.plan(jfa::problem(JFA_DTYPE_F32, 3, kDim, scale).heads_kv(2).capacity(1, 1, 1)));
    } catch (const jfa::error &e) {
        told = e.status() == JFA_ERROR_INVALID_ARGUMENT;
        std::printf("three heads over two: %s\n", e.what());
    }

    std::printf("library %s, backend %s: %lld candidates of %zu users, %lld + %lld tokens\n", context.version().c_str(),
                plan.backend().c_str(), static_cast<long long>(work.batch()), users,
                static_cast<long long>(work.total_q()), static_cast<long long>(work.total_kv()));
    std::printf("largest error of o: %.2g\n", worst);
    std::printf("change of the loss: %.5f measured, %.5f by the gradients\n", measured, computed);
    if (worst > 1e-5 || !(std::fabs(measured - computed) < 1e-3 * std::fabs(measured) + 3e-3) || !told) {
        std::puts("WRONG");
        return 1;
    }
    std::puts("ok");
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s lengths.txt [users]\n", argv[0]);
        return 2;
    }
    try {
        return run(argv[1], argc > 2 ? static_cast<std::size_t>(std::atoi(argv[2])) : 24);
    } catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
