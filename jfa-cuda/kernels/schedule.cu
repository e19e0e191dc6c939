// The device schedule: offsets -> sequences and unit lists, longest work first. One cluster, no host copy, O(units).
//
//   launch      one cluster of 8 CTAs of 1,024 threads; sequence b belongs to warp b % 256
//   count       each thread walks its sequences and counts units per bin of work (local histogram)
//   scan        every CTA reads all eight histograms (two lists) through distributed shared memory and derives its own bin bases
//   scatter     a lane takes a place for its sequence's units, its warp writes them; they stay neighbours
//   output      header, sequences[batch], forward and backward lists (params.h)
//   safety      every offset, length and index is clamped into the buffers: bad input can give wrong numbers, never a fault
#include "params.h"
#include "ptx/cluster.cuh"
#include "schedule.cuh"

namespace jfa {
namespace {

constexpr int threads = 1024;
constexpr int bins = 1024;

// Linear while it matters, coarse above.
__device__ int bin_of(long long work) {
    const long long b = work < 512 ? work : 512 + (work - 512) / 16;
    return bins - 1 - static_cast<int>(b < bins ? b : bins - 1);  // longest first
}

__device__ long long entry(const void* offsets, int is_64bit, long long i) {
    return is_64bit ? static_cast<const long long*>(offsets)[i] : static_cast<const int*>(offsets)[i];
}

// Rows [start, start + length) of sequence s, inside a buffer of `total` rows.
struct Rows {
    int start, length, slot_end;
};
__device__ Rows rows_of(const void* offsets, int is_64bit, const int32_t* lengths, long long s, long long total) {
    long long start = entry(offsets, is_64bit, s), end = entry(offsets, is_64bit, s + 1);
    start = start < 0 ? 0 : (start > total ? total : start);
    end = end < start ? start : (end > total ? total : end);
    long long length = end - start;
    if (lengths) {
        const long long given = lengths[s];
        length = given < 0 ? 0 : (given < length ? given : length);
    }
    return {static_cast<int>(start), static_cast<int>(length), static_cast<int>(end)};
}

__device__ int kv_sequence_of(const JfaScheduleParams& p, int b) {
    if (!p.kv_index) return b;
    const int s = p.kv_index[b];
    return s < 0 ? 0 : (s < p.kv_batch ? s : p.kv_batch - 1);
}

// Whether sequence b continues the rows and shares the keys of sequence b - 1 (then the two are one to a full mask).
__device__ bool continues(const JfaScheduleParams& p, int b) {
    if (b == 0 || kv_sequence_of(p, b) != kv_sequence_of(p, b - 1)) return false;
    const Rows previous = rows_of(p.q_offsets, p.q_offsets_are_64bit, p.q_lengths, b - 1, p.total_q);
    const Rows rows = rows_of(p.q_offsets, p.q_offsets_are_64bit, p.q_lengths, b, p.total_q);
    return previous.start + previous.length == rows.start;
}

__device__ JfaSequence resolve(const JfaScheduleParams& p, int b) {
    JfaSequence s = {};
    if (p.broadcast_q_len >= 0) {
        s.q_len = p.broadcast_q_len;
        s.o_row = b * p.broadcast_q_len;
    } else {
        const Rows rows = rows_of(p.q_offsets, p.q_offsets_are_64bit, p.q_lengths, b, p.total_q);
        s.q_row = s.o_row = rows.start;
        s.q_len = rows.length;
        if (p.merge_shared_kv) {
            if (continues(p, b)) {
                s.q_len = 0;
            } else {
                for (int n = b + 1; n < p.batch && continues(p, n); ++n)
                    s.q_len += rows_of(p.q_offsets, p.q_offsets_are_64bit, p.q_lengths, n, p.total_q).length;
            }
        }
    }
    s.kv_sequence = kv_sequence_of(p, b);
    if (p.kv_batch > 0) {
        const Rows rows = rows_of(p.kv_offsets, p.kv_offsets_are_64bit, p.kv_lengths, s.kv_sequence, p.total_kv);
        s.kv_row = rows.start;
        s.kv_len = rows.length;
    }
    return s;
}

// Work of a forward unit in blocks of 64 rows times tiles, plus its fixed part.
__device__ long long forward_work(const JfaScheduleParams& p, const JfaSequence& s, int first) {
    const int last = min(first + p.forward_rows, s.q_len) - 1, shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    const int lo = first_key(p.mask, first, shift), hi = end_key(p.mask, last, shift, s.kv_len);
    const int tiles = hi > lo ? (hi - 1) / p.forward_kv_tile - lo / p.forward_kv_tile + 1 : 0;
    const int blocks = 2 * (last - first) >= p.forward_rows ? 2 : 1;
    return 1 + static_cast<long long>(blocks) * tiles;
}

// Calls visit(bin, units): the bin of a sequence's heaviest unit and how many units it has. They stay neighbours in the list, so
// that the CTAs which work on them at the same time find their keys and values in the L2 (sorting single units by work read
// them twice from memory: 435 us instead of 300 for 1,152 sequences of 256).
template <class Visit>
__device__ void forward_units(const JfaScheduleParams& p, const JfaSequence& s, Visit visit) {
    const int units = (s.q_len + p.forward_rows - 1) / p.forward_rows;
    if (units == 0) return;
    const long long first = forward_work(p, s, 0), middle = forward_work(p, s, units / 2 * p.forward_rows),
                    last = forward_work(p, s, (units - 1) * p.forward_rows);
    visit(bin_of(max(max(first, middle), last)), units);
}

// Work of a backward unit in query blocks, plus its fixed part.
__device__ long long backward_work(const JfaScheduleParams& p, const JfaSequence& s, int key0) {
    const int end = min(key0 + p.backward_rows, s.kv_len), shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    const int lo = first_row(p.mask, key0, shift), hi = end > key0 ? min(s.q_len, end_row(p.mask, end - 1, shift, s.q_len)) : 0;
    return 1 + (hi > lo ? (hi - 1) / p.backward_q_tile - lo / p.backward_q_tile + 1 : 0);
}

// Calls visit(bin, units) once: the tiles of a sequence stay together, in their order, which is the order of the sums in dq.
// Without keys there is one unit, for the zeros in dq.
template <class Visit>
__device__ void backward_units(const JfaScheduleParams& p, const JfaSequence& s, Visit visit) {
    const int units = s.kv_len ? (s.kv_len + p.backward_rows - 1) / p.backward_rows : (s.q_len ? 1 : 0);
    if (units == 0) return;
    visit(bin_of(max(backward_work(p, s, 0), backward_work(p, s, units / 2 * p.backward_rows))), units);
}

enum : int { forward_list, backward_list, lists };

struct SharedMemory {
    int histogram[lists][bins];
    int cursor[lists][bins];
    int warp_sum[lists][32];
};

// Turns the cluster's histograms into this CTA's place of each bin; returns the number of units of each list.
__device__ int2 place_bins(SharedMemory& shared, int rank, int size) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    int before[lists] = {}, sum[lists] = {}, scan[lists];
    for (int r = 0; r < size; ++r) {
#pragma unroll
        for (int l = 0; l < lists; ++l) {
            const int n = ptx::load_cluster_i32(ptx::map_to_rank(&shared.histogram[l][t], r));
            before[l] += r < rank ? n : 0;
            sum[l] += n;
        }
    }
    ptx::cluster_arrive();  // a CTA may leave when nobody reads its histogram any more: waited for at the end of the kernel
#pragma unroll
    for (int l = 0; l < lists; ++l) {
        scan[l] = sum[l];
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, scan[l], d);
            scan[l] += lane >= d ? n : 0;
        }
        if (lane == 31) shared.warp_sum[l][warp] = scan[l];
    }
    __syncthreads();
    if (warp < lists) {
        int w = shared.warp_sum[warp][lane];
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, w, d);
            w += lane >= d ? n : 0;
        }
        shared.warp_sum[warp][lane] = w;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < lists; ++l) shared.cursor[l][t] = scan[l] - sum[l] + (warp ? shared.warp_sum[l][warp - 1] : 0) + before[l];
    __syncthreads();
    return {shared.warp_sum[forward_list][31], shared.warp_sum[backward_list][31]};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(threads, 1) jfa_schedule(const __grid_constant__ JfaScheduleParams p) {
    __shared__ SharedMemory shared;
    const int rank = ptx::cluster_rank(), size = ptx::cluster_size(), lane = threadIdx.x % 32;
    // Few sequences are spread over many warps: each warp writes the units of its sequences together.
    const int warps = size * (threads / 32), warp = threadIdx.x / 32 * size + rank, round = warps * 32;
    const auto sequence_at = [&](int r) { return static_cast<long long>(r) * round + static_cast<long long>(lane) * warps + warp; };

    // Count.
    for (int l = 0; l < lists; ++l) shared.histogram[l][threadIdx.x] = 0;
    __syncthreads();
    JfaSequence mine = {};
    const int rounds = (p.batch + round - 1) / round;
    for (int r = 0; r < rounds; ++r) {
        const long long b = sequence_at(r);
        if (b >= p.batch) break;
        mine = resolve(p, static_cast<int>(b));
        p.sequences[b] = mine;
        forward_units(p, mine, [&](int bin, int units) { atomicAdd(&shared.histogram[forward_list][bin], units); });
        if (p.backward_list) backward_units(p, mine, [&](int bin, int units) { atomicAdd(&shared.histogram[backward_list][bin], units); });
    }
    ptx::cluster_sync();
    const int2 totals = place_bins(shared, rank, size);

    // Scatter: a lane takes the place of its sequence's units, the warp writes them.
    const auto write = [&](JfaUnit* out, int capacity, int rows, bool reversed, int sequence, int place, int units) {
        for (unsigned some = __ballot_sync(~0u, units > 0); some; some &= some - 1) {
            const int from = __ffs(some) - 1;
            const int n = __shfl_sync(~0u, units, from), at = __shfl_sync(~0u, place, from), b = __shfl_sync(~0u, sequence, from);
            for (int u = lane; u < n && at + u < capacity; u += 32) out[at + u] = {b, (reversed ? n - 1 - u : u) * rows};
        }
    };
    for (int r = 0; r < rounds; ++r) {
        const long long b = sequence_at(r);
        const bool is = b < p.batch;
        if (is && rounds > 1) mine = p.sequences[b];
        int place = 0, count = 0;
        const auto take = [&](int list) {
            return [&, list](int bin, int units) {
                place = atomicAdd(&shared.cursor[list][bin], units);
                count = units;
            };
        };
        if (is) forward_units(p, mine, take(forward_list));
        // Heaviest first: a diagonal leaves the last rows the most keys.
        write(p.forward_list, p.forward_capacity, p.forward_rows, p.mask.right >= 0, static_cast<int>(b), place, count);
        if (p.backward_list) {
            count = 0;
            if (is) backward_units(p, mine, take(backward_list));
            write(p.backward_list, p.backward_capacity, p.backward_rows, false, static_cast<int>(b), place, count);
        }
    }
    if (rank == 0 && threadIdx.x == 0) {
        p.header->forward_units = min(totals.x, p.forward_capacity);
        p.header->backward_units = min(totals.y, p.backward_capacity);
    }
    ptx::cluster_wait();
}

}  // namespace jfa
