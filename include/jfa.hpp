// SPDX-License-Identifier: MIT OR Apache-2.0
/**
 * jfa.hpp - the C++17 face of JFA: header-only, over jfa.h.
 *
 *     jfa::context context(JFA_MEMORY_HOST);                     // a backend for host memory, as JFA_BACKEND says
 *     auto plan = context.plan(jfa::problem(JFA_DTYPE_F32, heads, dim, scale).capacity(batch, rows, rows).causal(
 *         JFA_ALIGNMENT_BOTTOM_RIGHT));
 *     auto batch = plan.batch(jfa::layout::self(offsets));       // checks the offsets, builds the schedule
 *     batch.forward({q, k, v, o, lse});                          // q, k, v, o: jfa::tensor; lse: jfa::lse
 *
 * Errors are exceptions of type jfa::error, which carry the status and the text (std::bad_alloc where there is no memory
 * for a batch). Handles are movable, and released by
 * their destructors. `const` members may be called by many threads at once; a batch owns its workspace and therefore
 * serves one thread at a time (plan::batch gives each thread one of its own).
 *
 * A program that links libjfa needs nothing else. One that loads it at run time gives the table it got to the
 * constructor of jfa::context.
 */
#ifndef JFA_HPP
#define JFA_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "jfa.h"
#include "jfa_dlpack.h"

namespace jfa {

/** What a failed call reported. */
class error : public std::runtime_error {
public:
    error(jfa_status status, const std::string &text) : std::runtime_error(text), status_(status) {}

    /** The code. */
    jfa_status status() const noexcept { return status_; }

private:
    jfa_status status_;
};

/** A pointer and a count: what C++20 calls std::span, as far as it is needed here. */
template <class T>
class span {
public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}

    /** Anything with data() and size(): std::vector, std::array, std::span, a string. */
    template <class C, class D = decltype(std::declval<C &>().data()), class S = decltype(std::declval<C &>().size()),
              class = std::enable_if_t<std::is_convertible_v<D, T *> && std::is_convertible_v<S, std::size_t>>>
    constexpr span(C &&container) noexcept
        : data_(container.data()), size_(static_cast<std::size_t>(container.size())) {}

    template <std::size_t N>
    constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

namespace detail {

inline std::int64_t signed_size(std::size_t size) { return static_cast<std::int64_t>(size); }

[[noreturn]] inline void fail(jfa_status status, const char *text) { throw error(status, text ? text : ""); }

[[noreturn]] inline void invalid(const std::string &text) { throw error(JFA_ERROR_INVALID_ARGUMENT, text); }

/** Elements of a row; the largest number, which no tensor has, where they cannot be counted. */
inline std::int64_t row(std::int64_t heads, std::int64_t dim) {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    if (heads <= 0 || dim <= 0) {
        return heads == 0 || dim == 0 ? 0 : most;
    }
    return dim > most / heads ? most : heads * dim;
}

} // namespace detail

/** A `[rows, heads, dim]` view of memory. Strides count elements. */
class tensor {
public:
    /** Contiguous. */
    tensor(void *data, jfa_dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim)
        : tensor(data, dtype, rows, heads, dim, detail::row(heads, dim), dim) {}

    /** With free row and head strides: a part of a fused buffer, for example. */
    tensor(void *data, jfa_dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim,
           std::int64_t row_stride, std::int64_t head_stride)
        : c_{sizeof(jfa_tensor), data,  static_cast<std::int32_t>(dtype), 0, rows, heads, dim,
             row_stride,         head_stride} {}

    /** Contiguous f32, over exactly the elements of a container of floats (or a span, also of const floats). */
    template <class C, class D = decltype(std::declval<C &>().data()),
              class = std::enable_if_t<std::is_convertible_v<D, const float *>>>
    tensor(C &&data, std::int64_t heads, std::int64_t dim)
        : tensor(const_cast<float *>(static_cast<const float *>(data.data())), JFA_DTYPE_F32,
                 rows_of(static_cast<std::size_t>(data.size()), heads, dim), heads, dim) {}

    /** From the struct of the C interface. */
    explicit tensor(const jfa_tensor &c) : c_(c) {}

    const jfa_tensor &c() const noexcept { return c_; }
    void *data() const noexcept { return c_.data; }
    std::int64_t rows() const noexcept { return c_.rows; }
    std::int64_t heads() const noexcept { return c_.heads; }
    std::int64_t dim() const noexcept { return c_.dim; }

private:
    static std::int64_t rows_of(std::size_t size, std::int64_t heads, std::int64_t dim) {
        const std::int64_t row = heads < 1 || dim < 1 ? 0 : detail::row(heads, dim);
        if (row == 0 || detail::signed_size(size) % row != 0) {
            detail::invalid("data has " + std::to_string(size) + " elements: no whole number of rows of " +
                            std::to_string(heads) + " heads of " + std::to_string(dim));
        }
        return detail::signed_size(size) / row;
    }

    jfa_tensor c_;
};

/** The log-sum-exp, `[heads, rows]`, f32. */
class lse {
public:
    lse(float *data, std::int64_t rows, std::int64_t head_stride)
        : c_{sizeof(jfa_lse), data, rows, head_stride} {}

    /** Contiguous, over exactly the elements of `data`. */
    lse(span<float> data, std::int64_t heads) : c_{sizeof(jfa_lse), data.data(), 0, 0} {
        if (heads < 1 || detail::signed_size(data.size()) % heads != 0) {
            detail::invalid("data has " + std::to_string(data.size()) + " elements: no whole number of rows for " +
                            std::to_string(heads) + " heads");
        }
        c_.rows = c_.head_stride = detail::signed_size(data.size()) / heads;
    }

    explicit lse(const jfa_lse &c) : c_(c) {}

    const jfa_lse &c() const noexcept { return c_; }

private:
    jfa_lse c_;
};

namespace detail {

template <class DL>
const jfa_dl_tensor *dl_tensor(const DL &tensor) {
    static_assert(sizeof(DL) == sizeof(jfa_dl_tensor) && alignof(DL) == alignof(jfa_dl_tensor), "not a DLTensor");
    // Naming the members keeps other types of this size out.
    static_assert(std::is_pointer_v<decltype(tensor.data)> && std::is_pointer_v<decltype(tensor.shape)> &&
                      std::is_pointer_v<decltype(tensor.strides)> && sizeof(tensor.byte_offset) == 8,
                  "not a DLTensor");
    return reinterpret_cast<const jfa_dl_tensor *>(&tensor);
}

inline void expect_space(std::int32_t space, jfa_memory_space expected) {
    if (expected != JFA_MEMORY_ANY && space != static_cast<std::int32_t>(expected)) {
        invalid(std::string("device: the tensor lives in ") + (space == JFA_MEMORY_HOST ? "host" : "CUDA") +
                " memory, the other kind is expected");
    }
}

} // namespace detail

/**
 * The view of a DLPack tensor (`DLTensor` of dlpack.h or `jfa_dl_tensor`), `[rows, heads, dim]`. `expected` rejects
 * tensors of other memory.
 */
template <class DL>
tensor from_dlpack(const DL &dl, jfa_memory_space expected = JFA_MEMORY_ANY) {
    jfa_tensor view{};
    std::int32_t space = 0;
    char text[200];
    const jfa_status status = jfa_tensor_from_dlpack(detail::dl_tensor(dl), &view, &space, text, sizeof text);
    if (status != JFA_OK) {
        detail::fail(status, text);
    }
    detail::expect_space(space, expected);
    return tensor(view);
}

/** The same for a log-sum-exp, `[heads, rows]`. */
template <class DL>
lse lse_from_dlpack(const DL &dl, jfa_memory_space expected = JFA_MEMORY_ANY) {
    jfa_lse view{};
    std::int32_t space = 0;
    char text[200];
    const jfa_status status = jfa_lse_from_dlpack(detail::dl_tensor(dl), &view, &space, text, sizeof text);
    if (status != JFA_OK) {
        detail::fail(status, text);
    }
    detail::expect_space(space, expected);
    return lse(view);
}

/** A description of a computation. What has no default in C is an argument here. */
class problem {
public:
    /** `heads` query heads of `head_dim` elements, as many key/value heads, full mask, no bias. */
    problem(jfa_dtype dtype, std::int64_t heads, std::int64_t head_dim, float scale) {
        c_.struct_size = sizeof c_;
        c_.dtype = dtype;
        c_.query = JFA_QUERY_JAGGED;
        c_.heads_q = c_.heads_kv = heads;
        c_.head_dim = c_.head_dim_v = head_dim;
        c_.mask = JFA_MASK_FULL;
        c_.bias = JFA_BIAS_NONE;
        c_.scale = scale;
    }

    /** Grouped queries: fewer key/value heads. */
    problem &heads_kv(std::int64_t heads) { return set(&jfa_problem::heads_kv, heads); }
    /** Width of a value head. */
    problem &head_dim_v(std::int64_t dim) { return set(&jfa_problem::head_dim_v, dim); }

    /** Most sequences, query rows and key/value rows of any batch. */
    problem &capacity(std::int64_t batch, std::int64_t total_q, std::int64_t total_kv) {
        c_.batch = batch;
        c_.total_q = total_q;
        c_.total_kv = total_kv;
        if ((c_.flags & JFA_FLAG_KV_INDEX) == 0) {
            c_.kv_batch = batch;
        }
        return *this;
    }

    /** Layouts carry kv_index, over at most `kv_batch` key/value sequences. */
    problem &kv_index(std::int64_t kv_batch) {
        c_.kv_batch = kv_batch;
        return flag(JFA_FLAG_KV_INDEX, true);
    }

    /** One query sequence of `q_len` rows for the whole batch. */
    problem &broadcast_query(std::int64_t q_len) {
        c_.query = JFA_QUERY_BROADCAST;
        return set(&jfa_problem::q_len, q_len);
    }

    problem &causal(jfa_alignment alignment) {
        c_.mask = JFA_MASK_CAUSAL;
        return set(&jfa_problem::alignment, static_cast<std::int32_t>(alignment));
    }

    /** Keys from `left` before to `right` after the diagonal; -1 is unbounded. */
    problem &window(std::int64_t left, std::int64_t right, jfa_alignment alignment) {
        c_.mask = JFA_MASK_WINDOW;
        c_.window_left = left;
        c_.window_right = right;
        return set(&jfa_problem::alignment, static_cast<std::int32_t>(alignment));
    }

    problem &alibi(jfa_alignment alignment) {
        c_.bias = JFA_BIAS_ALIBI;
        return set(&jfa_problem::alignment, static_cast<std::int32_t>(alignment));
    }

    problem &relative_bias(std::int64_t radius, jfa_alignment alignment) {
        c_.bias = JFA_BIAS_RELATIVE;
        c_.bias_radius = radius;
        return set(&jfa_problem::alignment, static_cast<std::int32_t>(alignment));
    }

    /** `capacity`: elements of the bias buffer. */
    problem &dense_bias(jfa_dtype dtype, std::int32_t row_align, bool shared_by_heads, std::int64_t capacity) {
        c_.bias = JFA_BIAS_DENSE;
        c_.bias_dtype = dtype;
        c_.bias_row_align = row_align;
        c_.bias_shared_by_heads = shared_by_heads;
        return set(&jfa_problem::bias_capacity, capacity);
    }

    problem &deterministic(bool on = true) { return flag(JFA_FLAG_DETERMINISTIC, on); }
    problem &zero_unused_rows(bool on = true) { return flag(JFA_FLAG_ZERO_UNUSED_ROWS, on); }

    /** Longest sequences expected, 0 if unknown: for speed alone. */
    problem &max_len_hint(std::int64_t q, std::int64_t kv) {
        c_.max_q_len_hint = q;
        return set(&jfa_problem::max_kv_len_hint, kv);
    }

    const jfa_problem &c() const noexcept { return c_; }

private:
    template <class T>
    problem &set(T jfa_problem::*field, T value) {
        c_.*field = value;
        return *this;
    }

    problem &flag(std::uint64_t bit, bool on) {
        c_.flags = on ? c_.flags | bit : c_.flags & ~bit;
        return *this;
    }

    jfa_problem c_{};
};

/** Prefix sums of i32 or i64, with one entry more than there are sequences. */
class offsets {
public:
    offsets(const std::int32_t *data, std::size_t entries) : data_(data), entries_(entries), type_(JFA_INDEX_I32) {}
    offsets(const std::int64_t *data, std::size_t entries) : data_(data), entries_(entries), type_(JFA_INDEX_I64) {}

    /** From a container of either type. */
    template <class C, class = decltype(std::declval<const C &>().data()),
              class = decltype(std::declval<const C &>().size())>
    offsets(const C &container) : offsets(container.data(), static_cast<std::size_t>(container.size())) {}

    const void *data() const noexcept { return data_; }
    std::int64_t sequences() const noexcept { return entries_ == 0 ? 0 : detail::signed_size(entries_) - 1; }
    jfa_index_type type() const noexcept { return type_; }

private:
    const void *data_;
    std::size_t entries_;
    jfa_index_type type_;
};

/** Where the sequences of a batch stand. Borrows every array. */
class layout {
public:
    /** Self-attention: queries, keys and values share their offsets. */
    static layout self(const offsets &both) { return layout(both, both); }

    /** Queries and key/values with offsets of their own. */
    layout(const offsets &q, const offsets &kv) : layout(kv) {
        c_.batch = q.sequences();
        c_.q_offsets = q.data();
        c_.q_offsets_type = q.type();
    }

    /** A broadcast query: only key/values have offsets. */
    static layout broadcast(const offsets &kv) { return layout(kv); }

    /** Lengths shorter than the space between the offsets. */
    layout &q_lengths(span<const std::int32_t> lengths) {
        c_.q_lengths = lengths.data();
        return given(q_lengths_, lengths.size());
    }
    layout &kv_lengths(span<const std::int32_t> lengths) {
        c_.kv_lengths = lengths.data();
        return given(kv_lengths_, lengths.size());
    }

    /** Sequence b attends to key/value sequence `index[b]`. With a broadcast query the batch is as long as the index. */
    layout &kv_index(span<const std::int32_t> index) {
        if (!c_.q_offsets) {
            c_.batch = detail::signed_size(index.size());
        }
        c_.kv_index = index.data();
        return given(kv_index_, index.size());
    }

    layout &bias_offsets(span<const std::int64_t> offsets) {
        c_.bias_offsets = offsets.data();
        return given(bias_offsets_, offsets.size());
    }

    /** The struct of the C interface. Arrays of a length that does not fit the batch are an error, in whatever order
     * they were given. */
    const jfa_layout &c() const {
        check("q_lengths", q_lengths_, c_.batch);
        check("kv_lengths", kv_lengths_, c_.kv_batch);
        check("kv_index", kv_index_, c_.batch);
        check("bias_offsets", bias_offsets_, c_.batch + 1);
        return c_;
    }

private:
    explicit layout(const offsets &kv) {
        c_.struct_size = sizeof c_;
        c_.batch = c_.kv_batch = kv.sequences();
        c_.kv_offsets = kv.data();
        c_.kv_offsets_type = kv.type();
    }

    layout &given(std::int64_t &entries, std::size_t size) {
        entries = detail::signed_size(size);
        return *this;
    }

    static void check(const char *name, std::int64_t has, std::int64_t wants) {
        if (has >= 0 && has != wants) {
            detail::invalid(std::string(name) + " has " + std::to_string(has) + " entries, the batch needs " +
                            std::to_string(wants));
        }
    }

    jfa_layout c_{};
    // Entries of the arrays that were given.
    std::int64_t q_lengths_ = -1, kv_lengths_ = -1, kv_index_ = -1, bias_offsets_ = -1;
};

/** Host memory at a multiple of an alignment. */
class host_buffer {
public:
    host_buffer() = default;
    host_buffer(std::size_t bytes, std::size_t alignment) : bytes_(bytes) {
        if (bytes != 0) {
            data_ = pointer(::operator new(bytes, std::align_val_t(alignment)), deleter{alignment});
        }
    }

    void *data() const noexcept { return data_.get(); }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    struct deleter {
        std::size_t alignment;
        void operator()(void *p) const noexcept { ::operator delete(p, std::align_val_t(alignment)); }
    };
    using pointer = std::unique_ptr<void, deleter>;

    pointer data_{nullptr, deleter{alignof(std::max_align_t)}};
    std::size_t bytes_ = 0;
};

/** Memory of the caller's, for schedule or workspace. */
struct memory {
    void *data = nullptr;
    std::size_t bytes = 0;
};

/** Tensors of a forward; `bias` as the problem's bias describes it. */
struct forward_args {
    tensor q, k, v, o;
    jfa::lse lse;
    const void *bias = nullptr;
};

/** Tensors of a backward; `dbias` may stay null when it is not wanted. */
struct backward_args {
    tensor q, k, v, o;
    jfa::lse lse;
    tensor d_o, dq, dk, dv;
    const void *bias = nullptr;
    void *dbias = nullptr;
};

namespace detail {

using log_function = std::function<void(jfa_log_level, const char *)>;

/** The table and where its errors are told; the same for every handle of one library. */
struct library {
    const jfa_api *api = nullptr;
    const char *(*last_error)() = nullptr;

    void check(jfa_status status) const {
        if (status != JFA_OK) {
            fail(status, last_error());
        }
    }
};

} // namespace detail

class host_batch;

/** A problem bound to a backend. Copies share it. */
class plan {
public:
    /** Memory and alignment that calls need. */
    const jfa_requirements &requirements() const noexcept { return requirements_; }

    /** Name of the backend. */
    std::string backend() const {
        const char *name = nullptr;
        library_.check(library_.api->plan_backend(handle_.get(), &name));
        return name;
    }

    /** Backend, kernels, memory, and why other backends were not taken. */
    std::string report(jfa_report_format format = JFA_REPORT_TEXT) const {
        const char *text = nullptr;
        library_.check(library_.api->plan_report(handle_.get(), format, &text));
        return text;
    }

    /** Builds the schedule of a batch in memory of the caller's. */
    void build_schedule(const layout &where, memory schedule, void *stream = nullptr) const {
        library_.check(
            library_.api->build_schedule(handle_.get(), &where.c(), schedule.data, schedule.bytes, stream));
    }

    void forward(const layout &where, memory schedule, memory workspace, const forward_args &args,
                 void *stream = nullptr) const {
        const jfa_call call = call_of(where, schedule, workspace, stream);
        const jfa_forward_args c{sizeof c,    &args.q.c(), &args.k.c(),  &args.v.c(),
                                 args.bias,   &args.o.c(), &args.lse.c()};
        library_.check(library_.api->forward(handle_.get(), &call, &c));
    }

    void backward(const layout &where, memory schedule, memory workspace, const backward_args &args,
                  void *stream = nullptr) const {
        const jfa_call call = call_of(where, schedule, workspace, stream);
        const jfa_backward_args c{sizeof c,       &args.q.c(),   &args.k.c(),  &args.v.c(),  args.bias,    &args.o.c(),
                                  &args.lse.c(),  &args.d_o.c(), &args.dq.c(), &args.dk.c(), &args.dv.c(), args.dbias};
        library_.check(library_.api->backward(handle_.get(), &call, &c));
    }

    /** A batch with memory of its own, for backends that compute in host memory. */
    inline host_batch batch(const layout &where) const;

    /** The handle of the C interface. */
    const jfa_plan *c() const noexcept { return handle_.get(); }

private:
    friend class context;
    struct release {
        const jfa_api *api;
        // Receives the plan's messages as long as there is a plan.
        std::shared_ptr<detail::log_function> log;
        void operator()(jfa_plan *plan) const noexcept { static_cast<void>(api->plan_release(plan)); }
    };

    plan(detail::library library, std::shared_ptr<detail::log_function> log, const jfa_context *context, const problem &what)
        : library_(library) {
        jfa_plan *raw = nullptr;
        library_.check(library_.api->plan_create(context, &what.c(), &raw));
        handle_ = std::shared_ptr<jfa_plan>(raw, release{library.api, std::move(log)});
        requirements_.struct_size = sizeof requirements_;
        library_.check(library_.api->plan_requirements(raw, &requirements_));
    }

    static jfa_call call_of(const layout &where, memory schedule, memory workspace, void *stream) {
        return {sizeof(jfa_call), &where.c(),      schedule.data, schedule.bytes,
                workspace.data,   workspace.bytes, stream};
    }

    detail::library library_;
    std::shared_ptr<jfa_plan> handle_;
    jfa_requirements requirements_{};
};

/** One batch: a layout, its schedule and a workspace, all in host memory. */
class host_batch {
public:
    inline void forward(const forward_args &args);
    inline void backward(const backward_args &args);

private:
    friend class plan;
    inline host_batch(plan of, const layout &where);

    plan plan_;
    layout layout_;
    host_buffer schedule_;
    host_buffer workspace_;
};

inline host_batch plan::batch(const layout &where) const { return host_batch(*this, where); }

inline host_batch::host_batch(plan of, const layout &where) : plan_(std::move(of)), layout_(where) {
    const jfa_requirements &needs = plan_.requirements();
    if (needs.memory_space != JFA_MEMORY_HOST) {
        throw error(JFA_ERROR_UNSUPPORTED, "backend " + plan_.backend() + " does not compute in host memory");
    }
    const std::size_t bytes = needs.forward_bytes > needs.backward_bytes ? needs.forward_bytes : needs.backward_bytes;
    schedule_ = host_buffer(needs.schedule_bytes, needs.buffer_alignment);
    workspace_ = host_buffer(bytes, needs.buffer_alignment);
    plan_.build_schedule(layout_, {schedule_.data(), schedule_.bytes()});
}

inline void host_batch::forward(const forward_args &args) {
    plan_.forward(layout_, {schedule_.data(), schedule_.bytes()}, {workspace_.data(), workspace_.bytes()}, args);
}

inline void host_batch::backward(const backward_args &args) {
    plan_.backward(layout_, {schedule_.data(), schedule_.bytes()}, {workspace_.data(), workspace_.bytes()}, args);
}

/** What to choose backends by; the defaults follow the environment. */
struct options {
    /** A name, a path or `auto`; empty: `JFA_BACKEND`. */
    std::string backend;
    /** Receives messages, on the threads that call; several at once if several call. Must not throw. */
    detail::log_function log;
    jfa_log_level log_level = JFA_LOG_DEFAULT;
};

/** The chosen backends. `tensors` says where the tensors of all calls live. */
class context {
public:
#ifndef JFA_HPP_NO_LINK
    /** Over the linked library. */
    explicit context(jfa_memory_space tensors, options how = {})
        : context(jfa_get_api(JFA_API_VERSION), jfa_last_error, tensors, std::move(how)) {}
#endif

    /** Over a table that was loaded at run time; `last_error` is jfa_last_error of the same library. */
    context(const jfa_api *api, const char *(*last_error)(), jfa_memory_space tensors, options how = {})
        : library_{api, last_error}, log_(std::make_shared<detail::log_function>(std::move(how.log))),
          handle_(nullptr, release{api}) {
        if (!api) {
            detail::fail(JFA_ERROR_UNSUPPORTED_VERSION, last_error());
        }
        jfa_context_options c{};
        c.struct_size = sizeof c;
        c.backend = how.backend.empty() ? nullptr : how.backend.c_str();
        c.memory_space = tensors;
        c.log_level = how.log_level;
        if (*log_) {
            c.log = [](void *data, std::int32_t level, const char *message) {
                (*static_cast<detail::log_function *>(data))(static_cast<jfa_log_level>(level), message);
            };
            c.log_data = log_.get();
        }
        jfa_context *raw = nullptr;
        library_.check(api->context_create(&c, &raw));
        handle_.reset(raw);
    }

    /** A plan on the first backend that supports the problem. It may outlive the context. */
    jfa::plan plan(const problem &what) const { return jfa::plan(library_, log_, handle_.get(), what); }

    /** Backends, capabilities, what was skipped and why. */
    std::string report(jfa_report_format format = JFA_REPORT_TEXT) const {
        const char *text = nullptr;
        library_.check(library_.api->context_report(handle_.get(), format, &text));
        return text;
    }

    /** Version of the library, "major.minor.patch". */
    std::string version() const { return library_.api->library_version; }

    /** The handle of the C interface. */
    const jfa_context *c() const noexcept { return handle_.get(); }

private:
    struct release {
        const jfa_api *api;
        void operator()(jfa_context *context) const noexcept { static_cast<void>(api->context_release(context)); }
    };

    detail::library library_;
    // Behind a pointer, so that its address stays when the context moves; plans use it too.
    std::shared_ptr<detail::log_function> log_;
    std::unique_ptr<jfa_context, release> handle_;
};

} // namespace jfa

#endif /* JFA_HPP */
