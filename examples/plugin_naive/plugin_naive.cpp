// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A backend of JFA outside of JFA: every feature, straight from the formulas, in fp64, one thread, no tricks. It is
// the starting point of a new backend, a second opinion on results, and a slow opponent in comparisons. To build and use
// it:
//
//     c++ -std=c++17 -O2 -shared -fPIC -fvisibility=hidden -I include -o libjfa_backend_naive.so
//         examples/plugin_naive/plugin_naive.cpp
//     JFA_BACKEND_PATH=. JFA_BACKEND=naive your-program
//
// Forward goes row by row with the online softmax, so it needs no scratch. Backward makes three passes over all pairs
// (dq, then dk and dv, then the bias), each of which sums one output element in fp64 and rounds it once. Its workspace
// holds delta, and the schedule the query sequences of each key/value sequence.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "jfa_backend.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMaxDim = 512;

// ---------------------------------------------------------------------------------------------------------- elements

float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::uint32_t float_to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct F32 {
    float raw;
    double load() const { return raw; }
    void store(double value) { raw = static_cast<float>(value); }
};

struct BF16 {
    std::uint16_t raw;
    double load() const { return bits_to_float(static_cast<std::uint32_t>(raw) << 16); }
    void store(double value) {
        // By way of float: rounding twice differs from rounding once only next to a tie.
        const std::uint32_t bits = float_to_bits(static_cast<float>(value));
        if ((bits & 0x7fffffff) > 0x7f800000) {
            raw = static_cast<std::uint16_t>((bits >> 16) | 0x40); // a quiet NaN
        } else {
            raw = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
    }
};

struct F16 {
    std::uint16_t raw;
    double load() const {
        const std::uint32_t sign = static_cast<std::uint32_t>(raw & 0x8000) << 16;
        const std::uint32_t exponent = (raw >> 10) & 0x1f;
        const std::uint32_t fraction = raw & 0x3ff;
        if (exponent == 0x1f) {
            return bits_to_float(sign | 0x7f800000 | (fraction << 13));
        }
        const double magnitude = exponent == 0 ? std::ldexp(fraction, -24)
                                               : std::ldexp(fraction + 1024, static_cast<int>(exponent) - 25);
        return sign ? -magnitude : magnitude;
    }
    void store(double value) {
        const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        const double magnitude = std::fabs(value);
        if (std::isnan(value)) {
            raw = static_cast<std::uint16_t>(sign | 0x7e00);
        } else if (magnitude >= 65520) { // halfway from the largest value to the next power of two
            raw = static_cast<std::uint16_t>(sign | 0x7c00);
        } else if (magnitude < std::ldexp(1, -14)) {
            // Subnormal: a multiple of 2^-24. Rounding up to 1024 gives the smallest normal number, as it should.
            raw = static_cast<std::uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(magnitude, 24))));
        } else {
            int exponent;
            const double fraction = std::frexp(magnitude, &exponent); // in [0.5, 1)
            const int scaled = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))); // in [1024, 2048]
            // A carry out of the fraction moves into the exponent by itself.
            raw = static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + (scaled - 1024)));
        }
    }
};

template <class T>
T *row(const jfa_tensor &tensor, std::int64_t r, std::int64_t h) {
    return static_cast<T *>(tensor.data) + r * tensor.row_stride + h * tensor.head_stride;
}

float &lse_at(const jfa_lse &lse, std::int64_t r, std::int64_t h) { return lse.data[h * lse.head_stride + r]; }

template <class T>
double dot(const T *a, const T *b, std::int64_t n) {
    // Four sums, since one would wait for each addition in turn.
    double sum[4] = {};
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int u = 0; u < 4; u++) {
            sum[u] += a[i + u].load() * b[i + u].load();
        }
    }
    for (; i < n; i++) {
        sum[0] += a[i].load() * b[i].load();
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <class T>
void store_row(T *to, const double *from, std::int64_t n, double factor) {
    for (std::int64_t c = 0; c < n; c++) {
        to[c].store(factor * from[c]);
    }
}

// ---------------------------------------------------------------------------------------------------------- sequences

struct Rows {
    std::int64_t start;
    std::int64_t length;
};

std::int64_t index_at(const void *data, std::int32_t type, std::int64_t i) {
    return type == JFA_INDEX_I32 ? static_cast<const std::int32_t *>(data)[i]
                                 : static_cast<const std::int64_t *>(data)[i];
}

Rows rows_at(const void *offsets, std::int32_t type, const std::int32_t *lengths, std::int64_t i) {
    const std::int64_t start = index_at(offsets, type, i);
    return {start, lengths ? lengths[i] : index_at(offsets, type, i + 1) - start};
}

/// One batch: the problem with its layout.
struct Batch {
    const jfa_problem &problem;
    const jfa_layout &layout;

    bool broadcast() const { return problem.query == JFA_QUERY_BROADCAST; }

    Rows q(std::int64_t b) const {
        return broadcast() ? Rows{0, problem.q_len}
                           : rows_at(layout.q_offsets, layout.q_offsets_type, layout.q_lengths, b);
    }

    /// Rows of o, lse and d_o.
    Rows o(std::int64_t b) const { return broadcast() ? Rows{b * problem.q_len, problem.q_len} : q(b); }

    std::int64_t kv_of(std::int64_t b) const { return layout.kv_index ? layout.kv_index[b] : b; }

    Rows kv(std::int64_t c) const { return rows_at(layout.kv_offsets, layout.kv_offsets_type, layout.kv_lengths, c); }

    /// Distance of the diagonal of an m by n matrix.
    std::int64_t shift(std::int64_t m, std::int64_t n) const {
        return problem.alignment == JFA_ALIGNMENT_BOTTOM_RIGHT ? n - m : 0;
    }

    /// Calls f(first, last) for every run of the `rows` rows of a buffer that belongs to no sequence.
    template <class Sequence, class F>
    static void unused(std::int64_t sequences, std::int64_t rows, Sequence sequence, F f) {
        std::int64_t next = 0;
        for (std::int64_t b = 0; b < sequences; b++) {
            const Rows r = sequence(b);
            if (r.length > 0) {
                f(next, r.start);
                next = r.start + r.length;
            }
        }
        f(next, rows);
    }
};

/// Where rows, heads and lengths of one pair of sequences stand.
struct Pair {
    std::int64_t b;
    Rows q, o, kv;
};

Pair pair_of(const Batch &batch, std::int64_t b) { return {b, batch.q(b), batch.o(b), batch.kv(batch.kv_of(b))}; }

// ------------------------------------------------------------------------------------------------------ mask and bias

/// The keys that row i sees: [first, last).
std::pair<std::int64_t, std::int64_t> visible(const Batch &batch, std::int64_t i, std::int64_t m, std::int64_t n) {
    const jfa_problem &p = batch.problem;
    std::int64_t first = 0;
    std::int64_t last = n;
    const std::int64_t center = i + batch.shift(m, n);
    if (p.mask == JFA_MASK_CAUSAL) {
        last = center + 1;
    } else if (p.mask == JFA_MASK_WINDOW) {
        first = p.window_left < 0 ? 0 : center - p.window_left;
        last = p.window_right < 0 ? n : center + p.window_right + 1;
    }
    first = first < 0 ? 0 : first;
    last = last > n ? n : last;
    return {first, last < first ? first : last};
}

std::int64_t dense_index(const Batch &batch, const Pair &s, std::int64_t h, std::int64_t i, std::int64_t j) {
    const jfa_problem &p = batch.problem;
    const std::int64_t ld = (s.kv.length + p.bias_row_align - 1) / p.bias_row_align * p.bias_row_align;
    return batch.layout.bias_offsets[s.b] + ((p.bias_shared_by_heads ? 0 : h) * s.q.length + i) * ld + j;
}

/// Entries of an alibi or relative bias per head, and the entry of (i, j) with its factor.
std::int64_t entries(const jfa_problem &p) {
    return p.bias == JFA_BIAS_ALIBI ? 1 : p.bias == JFA_BIAS_RELATIVE ? 2 * p.bias_radius + 1 : 0;
}

std::pair<std::int64_t, double> entry(const Batch &batch, const Pair &s, std::int64_t i, std::int64_t j) {
    const jfa_problem &p = batch.problem;
    const std::int64_t distance = j - i - batch.shift(s.q.length, s.kv.length);
    if (p.bias == JFA_BIAS_ALIBI) {
        return {0, -std::fabs(static_cast<double>(distance))};
    }
    const std::int64_t r = p.bias_radius;
    return {(distance < -r ? -r : distance > r ? r : distance) + r, 1.0};
}

double bias_at(const Batch &batch, const Pair &s, const void *data, std::int64_t h, std::int64_t i, std::int64_t j) {
    const jfa_problem &p = batch.problem;
    if (p.bias == JFA_BIAS_NONE) {
        return 0;
    }
    if (p.bias != JFA_BIAS_DENSE) {
        const auto [at, factor] = entry(batch, s, i, j);
        return factor * static_cast<const float *>(data)[h * entries(p) + at];
    }
    const std::int64_t at = dense_index(batch, s, h, i, j);
    switch (p.bias_dtype) {
    case JFA_DTYPE_F16:
        return static_cast<const F16 *>(data)[at].load();
    case JFA_DTYPE_BF16:
        return static_cast<const BF16 *>(data)[at].load();
    default:
        return static_cast<const F32 *>(data)[at].load();
    }
}

// ------------------------------------------------------------------------------------------------------------ forward

template <class T>
void forward_row(const Batch &batch, const jfa_forward_args &args, const Pair &s, std::int64_t h, std::int64_t i) {
    const jfa_problem &p = batch.problem;
    const std::int64_t g = h * p.heads_kv / p.heads_q;
    const T *q = row<T>(*args.q, s.q.start + i, h);
    double sum[kMaxDim] = {};
    double max = -kInfinity;
    double total = 0;
    bool blind = true;
    const auto [first, last] = visible(batch, i, s.q.length, s.kv.length);
    for (std::int64_t j = first; j < last; j++) {
        const double bias = bias_at(batch, s, args.bias, h, i, j);
        if (bias == -kInfinity) {
            continue;
        }
        const T *k = row<T>(*args.k, s.kv.start + j, g);
        const double score = static_cast<double>(p.scale) * dot(q, k, p.head_dim) + bias;
        blind = blind && score == -kInfinity;
        if (score > max) {
            const double factor = max == -kInfinity ? 0 : std::exp(max - score);
            if (max != -kInfinity) {
                total *= factor;
                for (std::int64_t c = 0; c < p.head_dim_v; c++) {
                    sum[c] *= factor;
                }
            }
            max = score;
        }
        // While every score is -inf there is nothing to weigh with; NaN goes through.
        const double weight = score == -kInfinity ? 0 : std::exp(score - max);
        const T *v = row<T>(*args.v, s.kv.start + j, g);
        total += weight;
        for (std::int64_t c = 0; c < p.head_dim_v; c++) {
            sum[c] += weight * v[c].load();
        }
    }
    if (blind) {
        for (std::int64_t c = 0; c < p.head_dim_v; c++) {
            sum[c] = 0;
        }
    }
    T *o = row<T>(*args.o, s.o.start + i, h);
    for (std::int64_t c = 0; c < p.head_dim_v; c++) {
        o[c].store(blind ? 0 : sum[c] / total);
    }
    lse_at(*args.lse, s.o.start + i, h) = static_cast<float>(blind ? -kInfinity : max + std::log(total));
}

template <class T>
void zero_rows(const jfa_tensor &tensor, std::int64_t first, std::int64_t last) {
    for (std::int64_t r = first; r < last; r++) {
        for (std::int64_t h = 0; h < tensor.heads; h++) {
            T *to = row<T>(tensor, r, h);
            for (std::int64_t c = 0; c < tensor.dim; c++) {
                to[c].store(0);
            }
        }
    }
}

template <class T>
void forward(const Batch &batch, const jfa_forward_args &args) {
    const jfa_problem &p = batch.problem;
    for (std::int64_t b = 0; b < batch.layout.batch; b++) {
        const Pair s = pair_of(batch, b);
        for (std::int64_t h = 0; h < p.heads_q; h++) {
            for (std::int64_t i = 0; i < s.q.length; i++) {
                forward_row<T>(batch, args, s, h, i);
            }
        }
    }
    if (p.flags & JFA_FLAG_ZERO_UNUSED_ROWS) {
        const auto rows_of = [&](std::int64_t b) { return batch.o(b); };
        Batch::unused(batch.layout.batch, args.o->rows, rows_of, [&](std::int64_t first, std::int64_t last) {
            zero_rows<T>(*args.o, first, last);
            for (std::int64_t r = first; r < last; r++) {
                for (std::int64_t h = 0; h < p.heads_q; h++) {
                    lse_at(*args.lse, r, h) = -std::numeric_limits<float>::infinity();
                }
            }
        });
    }
}

// ----------------------------------------------------------------------------------------------------------- backward

/// A batch in its backward. delta: `[heads_q, o_rows]`.
template <class T>
struct Backward {
    const Batch &batch;
    const jfa_backward_args &args;
    double *delta;

    double &delta_at(std::int64_t r, std::int64_t h) const { return delta[h * args.o->rows + r]; }

    /// Whether key j has any part in row i: what the masks, a bias of -inf or a blind row leave out must not bring the
    /// NaN of a row that it does not see.
    bool counts(const Pair &s, std::int64_t h, std::int64_t i, std::int64_t j) const {
        const auto [first, last] = visible(batch, i, s.q.length, s.kv.length);
        return j >= first && j < last && lse_at(*args.lse, s.o.start + i, h) != -kInfinity &&
               bias_at(batch, s, args.bias, h, i, j) != -kInfinity;
    }

    /// p and ds of a pair that counts.
    std::pair<double, double> at(const Pair &s, std::int64_t h, std::int64_t i, std::int64_t j) const {
        const jfa_problem &p = batch.problem;
        const std::int64_t g = h * p.heads_kv / p.heads_q;
        const std::int64_t key = s.kv.start + j;
        const T *q = row<T>(*args.q, s.q.start + i, h);
        const double score = static_cast<double>(p.scale) * dot(q, row<T>(*args.k, key, g), p.head_dim) +
                             bias_at(batch, s, args.bias, h, i, j);
        // Rounding of lse may leave a little above 0; NaN goes through.
        const double exponent = score - lse_at(*args.lse, s.o.start + i, h);
        const double weight = exponent > 0 ? 1 : std::exp(exponent);
        const double dp = dot(row<T>(*args.d_o, s.o.start + i, h), row<T>(*args.v, key, g), p.head_dim_v);
        return {weight, weight * (dp - delta_at(s.o.start + i, h))};
    }

    void fill_delta() const {
        const jfa_problem &p = batch.problem;
        for (std::int64_t b = 0; b < batch.layout.batch; b++) {
            const Rows rows = batch.o(b);
            for (std::int64_t h = 0; h < p.heads_q; h++) {
                for (std::int64_t r = rows.start; r < rows.start + rows.length; r++) {
                    delta_at(r, h) = dot(row<T>(*args.o, r, h), row<T>(*args.d_o, r, h), p.head_dim_v);
                }
            }
        }
    }

    /// Adds row i of a sequence to a row of dq.
    void add_dq(const Pair &s, std::int64_t h, std::int64_t i, double *sum) const {
        const jfa_problem &p = batch.problem;
        for (std::int64_t j = 0; j < s.kv.length; j++) {
            if (!counts(s, h, i, j)) {
                continue;
            }
            const double ds = at(s, h, i, j).second;
            const T *k = row<T>(*args.k, s.kv.start + j, h * p.heads_kv / p.heads_q);
            for (std::int64_t c = 0; c < p.head_dim; c++) {
                sum[c] += ds * k[c].load();
            }
        }
    }

    void fill_dq() const {
        const jfa_problem &p = batch.problem;
        const std::int64_t own = batch.broadcast() ? 1 : batch.layout.batch;
        for (std::int64_t b = 0; b < own && batch.layout.batch > 0; b++) {
            const Rows rows = batch.q(b);
            for (std::int64_t h = 0; h < p.heads_q; h++) {
                for (std::int64_t i = 0; i < rows.length; i++) {
                    double sum[kMaxDim] = {};
                    if (batch.broadcast()) {
                        for (std::int64_t item = 0; item < batch.layout.batch; item++) {
                            add_dq(pair_of(batch, item), h, i, sum);
                        }
                    } else {
                        add_dq(pair_of(batch, b), h, i, sum);
                    }
                    store_row(row<T>(*args.dq, rows.start + i, h), sum, p.head_dim, p.scale);
                }
            }
        }
    }

    /// first and items: the query sequences of key/value sequence c are items[first[c] .. first[c + 1]].
    void fill_dk_dv(const std::int64_t *first, const std::int64_t *items) const {
        const jfa_problem &p = batch.problem;
        const std::int64_t group = p.heads_q / p.heads_kv;
        for (std::int64_t c = 0; c < batch.layout.kv_batch; c++) {
            const Rows kv = batch.kv(c);
            for (std::int64_t g = 0; g < p.heads_kv; g++) {
                for (std::int64_t j = 0; j < kv.length; j++) {
                    double dk[kMaxDim] = {};
                    double dv[kMaxDim] = {};
                    for (std::int64_t item = first[c]; item < first[c + 1]; item++) {
                        const Pair s = pair_of(batch, items[item]);
                        for (std::int64_t h = g * group; h < (g + 1) * group; h++) {
                            add_dk_dv(s, h, j, dk, dv);
                        }
                    }
                    store_row(row<T>(*args.dk, kv.start + j, g), dk, p.head_dim, p.scale);
                    store_row(row<T>(*args.dv, kv.start + j, g), dv, p.head_dim_v, 1);
                }
            }
        }
    }

    void add_dk_dv(const Pair &s, std::int64_t h, std::int64_t j, double *dk, double *dv) const {
        const jfa_problem &p = batch.problem;
        for (std::int64_t i = 0; i < s.q.length; i++) {
            if (!counts(s, h, i, j)) {
                continue;
            }
            const auto [weight, ds] = at(s, h, i, j);
            const T *q = row<T>(*args.q, s.q.start + i, h);
            const T *d_o = row<T>(*args.d_o, s.o.start + i, h);
            for (std::int64_t c = 0; c < p.head_dim; c++) {
                dk[c] += ds * q[c].load();
            }
            for (std::int64_t c = 0; c < p.head_dim_v; c++) {
                dv[c] += weight * d_o[c].load();
            }
        }
    }

    /// sums: one fp64 element for each of a positional bias.
    void fill_dbias(double *sums) const {
        const jfa_problem &p = batch.problem;
        float *to = static_cast<float *>(args.dbias);
        const std::int64_t count = p.heads_q * entries(p);
        for (std::int64_t e = 0; e < count; e++) {
            sums[e] = 0;
        }
        for (std::int64_t b = 0; b < batch.layout.batch; b++) {
            const Pair s = pair_of(batch, b);
            for (std::int64_t i = 0; i < s.q.length; i++) {
                for (std::int64_t j = 0; j < s.kv.length; j++) {
                    double shared = 0;
                    for (std::int64_t h = 0; h < p.heads_q; h++) {
                        const bool counted = counts(s, h, i, j);
                        const double ds = counted ? at(s, h, i, j).second : 0;
                        if (p.bias != JFA_BIAS_DENSE) {
                            const auto [e, factor] = entry(batch, s, i, j);
                            sums[h * entries(p) + e] += counted ? factor * ds : 0;
                        } else if (p.bias_shared_by_heads) {
                            shared += ds;
                        } else {
                            to[dense_index(batch, s, h, i, j)] = static_cast<float>(ds);
                        }
                    }
                    if (p.bias == JFA_BIAS_DENSE && p.bias_shared_by_heads) {
                        to[dense_index(batch, s, 0, i, j)] = static_cast<float>(shared);
                    }
                }
            }
        }
        for (std::int64_t e = 0; e < count; e++) {
            to[e] = static_cast<float>(sums[e]);
        }
    }

    void zero_unused() const {
        const auto q = [&](std::int64_t b) { return batch.q(b); };
        const auto kv = [&](std::int64_t c) { return batch.kv(c); };
        if (!batch.broadcast()) {
            Batch::unused(batch.layout.batch, args.dq->rows, q, [&](std::int64_t first, std::int64_t last) {
                zero_rows<T>(*args.dq, first, last);
            });
        }
        const std::int64_t sequences = batch.layout.kv_offsets ? batch.layout.kv_batch : 0;
        Batch::unused(sequences, args.dk->rows, kv, [&](std::int64_t first, std::int64_t last) {
            zero_rows<T>(*args.dk, first, last);
            zero_rows<T>(*args.dv, first, last);
        });
    }
};

// ---------------------------------------------------------------------------------------------------------- the table

thread_local std::string last_error_text;

jfa_status fail(jfa_status status, std::string text) {
    last_error_text = std::move(text);
    return status;
}

/// No exception may leave a plugin.
template <class F>
jfa_status guarded(F f) noexcept {
    try {
        return f();
    } catch (const std::exception &e) {
        return fail(JFA_ERROR_INTERNAL, e.what());
    } catch (...) {
        return fail(JFA_ERROR_INTERNAL, "an exception of unknown type");
    }
}

const std::int64_t kHeadDims[][3] = {{1, kMaxDim, 1}};

std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count) * 8; }

} // namespace

// The handles: a backend has nothing to remember, a plan has its problem.
struct jfa_backend {
    char unused;
};

struct jfa_backend_plan {
    jfa_problem problem;
};

namespace {

const char *last_error() { return last_error_text.c_str(); }

jfa_status create(const jfa_backend_options *options, jfa_backend **backend) {
    return guarded([&]() -> jfa_status {
        if (options->variant) {
            return fail(JFA_ERROR_INVALID_ARGUMENT, std::string("variant = ") + options->variant + ": there are none");
        }
        *backend = new jfa_backend();
        options->log(options->log_data, JFA_LOG_DEBUG, "created");
        return JFA_OK;
    });
}

void release(jfa_backend *backend) { delete backend; }

jfa_status description(const jfa_backend *, const char **text) {
    *text = "plain formulas in fp64, one thread";
    return JFA_OK;
}

jfa_status capabilities(const jfa_backend *, jfa_capabilities *c) {
    c->memory_space = JFA_MEMORY_HOST;
    c->dtypes = 1U << JFA_DTYPE_F32 | 1U << JFA_DTYPE_F16 | 1U << JFA_DTYPE_BF16;
    c->biases = 1U << JFA_BIAS_ALIBI | 1U << JFA_BIAS_RELATIVE | 1U << JFA_BIAS_DENSE;
    c->features = JFA_FEATURE_CAUSAL | JFA_FEATURE_WINDOW | JFA_FEATURE_GQA | JFA_FEATURE_KV_INDEX |
                  JFA_FEATURE_BROADCAST_QUERY | JFA_FEATURE_UNEQUAL_HEAD_DIMS | JFA_FEATURE_BACKWARD |
                  JFA_FEATURE_DETERMINISTIC | JFA_FEATURE_ZERO_UNUSED_ROWS;
    c->head_dims = kHeadDims[0];
    c->num_head_dims = 1;
    c->head_dims_v = kHeadDims[0];
    c->num_head_dims_v = 1;
    c->base_alignment = 1;
    c->stride_alignment = 1;
    return JFA_OK;
}

jfa_status plan_create(const jfa_backend *, const jfa_problem *problem, jfa_backend_plan **plan) {
    return guarded([&]() -> jfa_status {
        *plan = new jfa_backend_plan();
        // A newer library's problem is longer; what it has beyond ours concerns features that we did not declare.
        std::memcpy(&(*plan)->problem, problem, sizeof(jfa_problem));
        return JFA_OK;
    });
}

void plan_release(jfa_backend_plan *plan) { delete plan; }

std::int64_t o_rows(const jfa_problem &p) { return p.query == JFA_QUERY_BROADCAST ? p.batch * p.q_len : p.total_q; }

jfa_status plan_requirements(const jfa_backend_plan *plan, jfa_requirements *r) {
    const jfa_problem &p = plan->problem;
    r->schedule_bytes = bytes(p.kv_batch + 1 + p.batch);
    r->forward_bytes = 0;
    r->backward_bytes = bytes(p.heads_q * (o_rows(p) + entries(p)));
    return JFA_OK;
}

jfa_status plan_description(const jfa_backend_plan *, const char **text) {
    *text = "row by row";
    return JFA_OK;
}

/// The query sequences of each key/value sequence, in order: `[kv_batch + 1]` starts, then `[batch]` sequences.
jfa_status build_schedule(const jfa_backend_plan *plan, const jfa_layout *layout, void *schedule, std::size_t, void *) {
    const Batch batch{plan->problem, *layout};
    std::int64_t *first = static_cast<std::int64_t *>(schedule);
    std::int64_t *items = first + layout->kv_batch + 1;
    for (std::int64_t c = 0; c <= layout->kv_batch; c++) {
        first[c] = 0;
    }
    for (std::int64_t b = 0; b < layout->batch; b++) {
        first[batch.kv_of(b) + 1]++;
    }
    for (std::int64_t c = 0; c < layout->kv_batch; c++) {
        first[c + 1] += first[c];
    }
    for (std::int64_t b = layout->batch - 1; b >= 0; b--) {
        // From the back, so that each start ends where it began and the order of the batch is kept.
        items[--first[batch.kv_of(b) + 1]] = b;
    }
    // Now every start has moved to its predecessor's place.
    for (std::int64_t c = 0; c < layout->kv_batch; c++) {
        first[c] = first[c + 1];
    }
    first[layout->kv_batch] = layout->batch;
    return JFA_OK;
}

jfa_status forward(const jfa_backend_plan *plan, const jfa_call *call, const jfa_forward_args *args) {
    return guarded([&]() -> jfa_status {
        const Batch batch{plan->problem, *call->layout};
        switch (plan->problem.dtype) {
        case JFA_DTYPE_F32:
            forward<F32>(batch, *args);
            return JFA_OK;
        case JFA_DTYPE_F16:
            forward<F16>(batch, *args);
            return JFA_OK;
        default:
            forward<BF16>(batch, *args);
            return JFA_OK;
        }
    });
}

template <class T>
void run_backward(const Batch &batch, const jfa_call &call, const jfa_backward_args &args) {
    double *delta = static_cast<double *>(call.workspace);
    const Backward<T> backward{batch, args, delta};
    const std::int64_t *first = static_cast<const std::int64_t *>(call.schedule);
    backward.fill_delta();
    backward.fill_dq();
    if (batch.layout.batch > 0) {
        backward.fill_dk_dv(first, first + batch.layout.kv_batch + 1);
    }
    if (args.dbias && batch.layout.batch > 0) {
        backward.fill_dbias(delta + batch.problem.heads_q * args.o->rows);
    }
    if (batch.problem.flags & JFA_FLAG_ZERO_UNUSED_ROWS) {
        backward.zero_unused();
    }
}

jfa_status backward(const jfa_backend_plan *plan, const jfa_call *call, const jfa_backward_args *args) {
    return guarded([&]() -> jfa_status {
        const Batch batch{plan->problem, *call->layout};
        switch (plan->problem.dtype) {
        case JFA_DTYPE_F32:
            run_backward<F32>(batch, *call, *args);
            return JFA_OK;
        case JFA_DTYPE_F16:
            run_backward<F16>(batch, *call, *args);
            return JFA_OK;
        default:
            run_backward<BF16>(batch, *call, *args);
            return JFA_OK;
        }
    });
}

const jfa_backend_api kApi = {
    sizeof(jfa_backend_api), JFA_BACKEND_VERSION, 0,
    "naive",
    last_error,
    create,
    release,
    description,
    capabilities,
    plan_create,
    plan_release,
    plan_requirements,
    plan_description,
    build_schedule,
    forward,
    backward,
};

} // namespace

extern "C" jfa_status jfa_backend_get_api(std::uint32_t version, const jfa_backend_api **api) {
    if (version != JFA_BACKEND_VERSION) {
        return JFA_ERROR_UNSUPPORTED_VERSION;
    }
    *api = &kApi;
    return JFA_OK;
}
