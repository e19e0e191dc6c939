// Kernels beside the computation: the device check of a layout, and zeros for rows that belong to no sequence.
//
//   jfa_validate   one CTA of 1,024 threads; reads every offset, length and index; the first bad entry (by array, then by
//                  position) goes to `finding`. Used with JFA_VALIDATE=1 only, before the schedule
//   jfa_zero_rows  a warp takes 32 rows, each lane finds its row's sequence by binary search, then the warp writes the unused
//                  ones together; O(rows log sequences), no matter how the gaps are spread
#include "support.h"

namespace jfa {
namespace {

__device__ long long entry(const void* offsets, int is_64bit, long long i) {
    return is_64bit ? static_cast<const long long*>(offsets)[i] : static_cast<const int*>(offsets)[i];
}

constexpr int validate_threads = 1024;
constexpr int zero_threads = 256;

// Calls bad(index) for every offset that is negative, decreasing, or past the buffer.
template <class Bad>
__device__ void check_offsets(const void* offsets, int is_64bit, long long sequences, long long rows, Bad bad) {
    for (long long i = threadIdx.x; i <= sequences; i += validate_threads) {
        const long long value = entry(offsets, is_64bit, i), before = i ? entry(offsets, is_64bit, i - 1) : 0;
        if (value < before || value > rows) bad(i);
    }
}

template <class Bad>
__device__ void check_lengths(const int32_t* lengths, const void* offsets, int is_64bit, long long sequences, Bad bad) {
    for (long long i = threadIdx.x; i < sequences; i += validate_threads) {
        const long long slot = entry(offsets, is_64bit, i + 1) - entry(offsets, is_64bit, i);
        if (lengths[i] < 0 || lengths[i] > slot) bad(i);
    }
}

// Whether a row belongs to no sequence.
__device__ bool is_unused(const JfaZeroParams& p, long long row) {
    if (!p.offsets) return row >= p.sequences * p.fixed_length;
    if (p.sequences == 0 || row < entry(p.offsets, p.offsets_are_64bit, 0)) return true;
    // The last sequence that starts at or before the row.
    long long low = 0, high = p.sequences;
    while (high - low > 1) {
        const long long middle = (low + high) / 2;
        if (entry(p.offsets, p.offsets_are_64bit, middle) <= row) low = middle;
        else high = middle;
    }
    const long long start = entry(p.offsets, p.offsets_are_64bit, low), end = entry(p.offsets, p.offsets_are_64bit, low + 1);
    if (row >= end) return true;
    return p.lengths && row - start >= p.lengths[low];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(validate_threads, 1) jfa_validate(const __grid_constant__ JfaValidateParams p) {
    // Array and index in one number, so that the smallest is the first.
    __shared__ unsigned long long first;
    if (threadIdx.x == 0) first = ~0ull;
    __syncthreads();
    const auto bad_in = [&](int array) {
        return [=](long long index) { atomicMin(&first, static_cast<unsigned long long>(array) << 56 | static_cast<unsigned long long>(index)); };
    };
    if (p.q_offsets) check_offsets(p.q_offsets, p.q_offsets_are_64bit, p.batch, p.total_q, bad_in(JFA_ARRAY_Q_OFFSETS));
    check_offsets(p.kv_offsets, p.kv_offsets_are_64bit, p.kv_batch, p.total_kv, bad_in(JFA_ARRAY_KV_OFFSETS));
    if (p.q_lengths && p.q_offsets)
        check_lengths(p.q_lengths, p.q_offsets, p.q_offsets_are_64bit, p.batch, bad_in(JFA_ARRAY_Q_LENGTHS));
    if (p.kv_lengths) check_lengths(p.kv_lengths, p.kv_offsets, p.kv_offsets_are_64bit, p.kv_batch, bad_in(JFA_ARRAY_KV_LENGTHS));
    if (p.kv_index) {
        const auto bad = bad_in(JFA_ARRAY_KV_INDEX);
        for (long long i = threadIdx.x; i < p.batch; i += validate_threads)
            if (p.kv_index[i] < 0 || p.kv_index[i] >= p.kv_batch) bad(i);
    }
    __syncthreads();
    if (threadIdx.x) return;
    JfaFinding f = {};
    if (first != ~0ull) {
        f.array = static_cast<int>(first >> 56);
        f.index = static_cast<long long>(first & ((1ull << 56) - 1));
        const bool is_q = f.array == JFA_ARRAY_Q_OFFSETS || f.array == JFA_ARRAY_Q_LENGTHS;
        const void* offsets = is_q ? p.q_offsets : p.kv_offsets;
        const int is_64bit = is_q ? p.q_offsets_are_64bit : p.kv_offsets_are_64bit;
        if (f.array == JFA_ARRAY_KV_INDEX) {
            f.value = p.kv_index[f.index];
            f.limit = p.kv_batch;
        } else if (f.array == JFA_ARRAY_Q_LENGTHS || f.array == JFA_ARRAY_KV_LENGTHS) {
            f.value = (is_q ? p.q_lengths : p.kv_lengths)[f.index];
            f.limit = entry(offsets, is_64bit, f.index + 1) - entry(offsets, is_64bit, f.index);
        } else {
            const long long before = f.index ? entry(offsets, is_64bit, f.index - 1) : 0;
            f.value = entry(offsets, is_64bit, f.index);
            f.limit = f.value < before ? before : (is_q ? p.total_q : p.total_kv);
        }
    }
    *p.finding = f;
}

extern "C" __global__ void __launch_bounds__(zero_threads) jfa_zero_rows(const __grid_constant__ JfaZeroParams p) {
    const int lane = threadIdx.x % 32;
    const long long warp = (static_cast<long long>(blockIdx.x) * zero_threads + threadIdx.x) / 32;
    const long long warps = static_cast<long long>(gridDim.x) * (zero_threads / 32);
    for (long long base = warp * 32; base < p.rows; base += warps * 32) {
        const long long mine = base + lane;
        const bool unused = mine < p.rows && is_unused(p, mine);
        if (p.lse && unused)
            for (int h = 0; h < p.lse_heads; ++h) p.lse[h * p.lse_head_stride + mine] = __int_as_float(0xff800000);
        for (unsigned rest = __ballot_sync(~0u, unused); rest; rest &= rest - 1) {
            const long long row = base + __ffs(rest) - 1;
            for (const JfaZeroTensor& t : p.tensors) {
                if (!t.data) continue;
                char* const start = static_cast<char*>(t.data) + row * t.row_bytes;
                for (int i = lane; i < t.heads * t.vectors; i += 32)
                    *reinterpret_cast<int4*>(start + i / t.vectors * t.head_bytes + i % t.vectors * 16) = int4{0, 0, 0, 0};
            }
        }
    }
}

}  // namespace jfa
