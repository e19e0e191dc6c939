// The device schedule: offsets -> sequences and unit lists, longest work first. One launch, no host copy, O(units).
//
//   launch      one cluster of 8 CTAs of 1,024 threads (one CTA alone is bound by its stores); sequence b belongs to warp b % 256
//   count       each thread walks its sequences and counts units per bin of work (local histogram)
//   scan        every CTA reads all eight histograms (two lists) through distributed shared memory and derives its own bin bases
//   scatter     a lane takes a place for its sequence's units, its warp writes them; they stay neighbours
//   backward    a sequence is one unit, or its key tiles are units where it is too long for one CTA (place_bins)
//   output      header, sequences[batch], forward and backward lists (params.h)
//   safety      every offset, length and index is clamped into the buffers: bad input can give wrong numbers, never a fault
#include "params.h"
#include "ptx/cluster.cuh"
#include "schedule.cuh"

namespace jfa {
namespace {

constexpr int threads = 1024;
constexpr int bins = 1024;
constexpr int max_ctas = 8;

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
// them twice from memory: an L2 hit rate of 19 % for 1,152 sequences of 256).
template <class Visit>
__device__ void forward_units(const JfaScheduleParams& p, const JfaSequence& s, Visit visit) {
    const int units = (s.q_len + p.forward_rows - 1) / p.forward_rows;
    if (units == 0) return;
    const long long first = forward_work(p, s, 0), middle = forward_work(p, s, units / 2 * p.forward_rows),
                    last = forward_work(p, s, (units - 1) * p.forward_rows);
    visit(bin_of(max(max(first, middle), last)), units);
}

// Work of a backward tile in query blocks, plus its fixed part.
__device__ int tile_work(const JfaScheduleParams& p, const JfaSequence& s, int tile) {
    const int key0 = tile * p.backward_rows, end = min(key0 + p.backward_rows, s.kv_len), shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    const int lo = first_row(p.mask, key0, shift), hi = end > key0 ? min(s.q_len, end_row(p.mask, end - 1, shift, s.q_len)) : 0;
    return 1 + (hi > lo ? (hi - 1) / p.backward_q_tile - lo / p.backward_q_tile + 1 : 0);
}

// Bins of the backward: by the work of a whole sequence, 32 to a factor of two.
__device__ int backward_bin_of(float work) {
    const int b = static_cast<int>(__float_as_uint(work) >> 18) - (127 << 5);
    return bins - 1 - (b < bins ? b : bins - 1);
}
__device__ float work_of_backward_bin(int bin) { return __uint_as_float(static_cast<uint32_t>(bins - 1 - bin + (127 << 5)) << 18); }

// Calls visit(bin, tiles) once. Without keys there is one tile, for the zeros in dq.
template <class Visit>
__device__ void backward_tiles(const JfaScheduleParams& p, const JfaSequence& s, Visit visit) {
    const int tiles = s.kv_len ? (s.kv_len + p.backward_rows - 1) / p.backward_rows : (s.q_len ? 1 : 0);
    if (tiles == 0) return;
    float work = 0.0f;
    if (tiles <= 4) {
        for (int t = 0; t < tiles; ++t) work += tile_work(p, s, t);
    } else {
        work = tiles * (1.0f / 6.0f) * (tile_work(p, s, 0) + 4 * tile_work(p, s, tiles / 2) + tile_work(p, s, tiles - 1));
    }
    visit(backward_bin_of(work), tiles);
}

enum : int { forward_list, backward_list, lists };
enum : int { forward_units_of, sequences_of, tiles_of, histograms };  // the latter two: backward

struct SharedMemory {
    int histogram[histograms][bins];
    int cursor[lists][bins];
    bool split[bins];  // backward: the tiles of these sequences are units of their own
    float warp_sum[2][32];
};

// Sum over the CTA's threads up to this one, and over all.
template <class V>
struct Sums {
    V up_to, total;
};
template <class V>
__device__ Sums<V> scan(V value, float (&room)[32]) {
    static_assert(sizeof(V) == sizeof(float));
    V* sums = reinterpret_cast<V*>(room);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    V up_to = value;
    for (int d = 1; d < 32; d *= 2) {
        const V n = __shfl_up_sync(~0u, up_to, d);
        if (lane >= d) up_to += n;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    if (warp == 0) {
        V w = sums[lane];
        for (int d = 1; d < 32; d *= 2) {
            const V n = __shfl_up_sync(~0u, w, d);
            if (lane >= d) w += n;
        }
        sums[lane] = w;
    }
    __syncthreads();
    if (warp) up_to += sums[warp - 1];
    return {up_to, sums[31]};
}

// Turns the cluster's histograms into this CTA's place of each bin; returns the number of units of each list.
__device__ int2 place_bins(SharedMemory& shared, const JfaScheduleParams& p, int rank, int size) {
    const int t = threadIdx.x;
    int before[histograms] = {}, sum[histograms] = {};
    // All loads before the first use: one after the other they would cost their latency two dozen times.
    int counts[max_ctas][histograms];
#pragma unroll
    for (int r = 0; r < max_ctas; ++r) {
#pragma unroll
        for (int l = 0; l < histograms; ++l) {
            counts[r][l] = 0;
            if (r < size && (l == forward_units_of || p.backward_list)) counts[r][l] = ptx::load_cluster_i32(ptx::map_to_rank(&shared.histogram[l][t], r));
        }
    }
#pragma unroll
    for (int r = 0; r < max_ctas; ++r) {
#pragma unroll
        for (int l = 0; l < histograms; ++l) {
            before[l] += r < rank ? counts[r][l] : 0;
            sum[l] += counts[r][l];
        }
    }
    ptx::cluster_arrive();  // a CTA may leave when nobody reads its histogram any more: waited for at the end of the kernel
    const Sums<int> forward = scan(sum[forward_units_of], shared.warp_sum[0]);
    shared.cursor[forward_list][t] = forward.up_to - sum[forward_units_of] + before[forward_units_of];
    if (!p.backward_list) {
        __syncthreads();
        return {forward.total, 0};
    }
    // Backward: a sequence belongs to one CTA (always with a broadcast query, whose units are dealt), unless it would still be at
    // work when the others have nothing left: begun after all heavier ones, it must fit into its share of the lighter ones, or into
    // a sixteenth of everything.
    const Sums<float> work = scan(sum[sequences_of] * work_of_backward_bin(t), shared.warp_sum[1]);
    const bool split = p.broadcast_q_len < 0 && work_of_backward_bin(t) * p.backward_share > work.total - work.up_to + work.total * (1.0f / 16.0f);
    shared.split[t] = split;
    const int units = split ? sum[tiles_of] : sum[sequences_of];
    __syncthreads();  // before the sums of the first scan are overwritten
    const Sums<int> backward = scan(units, shared.warp_sum[0]);
    shared.cursor[backward_list][t] = backward.up_to - units + (split ? before[tiles_of] : before[sequences_of]);
    __syncthreads();
    return {forward.total, backward.total};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(threads, 1) jfa_schedule(const __grid_constant__ JfaScheduleParams p) {
    __shared__ SharedMemory shared;
    const int rank = ptx::cluster_rank(), size = ptx::cluster_size(), lane = threadIdx.x % 32;
    // Neighbouring sequences go to different warps: their units are written side by side.
    const int warps = size * (threads / 32), warp = threadIdx.x / 32 * size + rank, round = warps * 32;
    const auto sequence_at = [&](int r) { return static_cast<long long>(r) * round + static_cast<long long>(lane) * warps + warp; };

    // Count.
    for (int l = 0; l < histograms; ++l) shared.histogram[l][threadIdx.x] = 0;
    __syncthreads();
    constexpr int kept = 2;  // a thread's first sequences stay in its registers between the two walks
    JfaSequence mine[kept] = {};
    const int rounds = (p.batch + round - 1) / round;
    const auto count = [&](int r, JfaSequence& s) {
        const long long b = sequence_at(r);
        if (b >= p.batch) return;
        s = resolve(p, static_cast<int>(b));
        p.sequences[b] = s;
        forward_units(p, s, [&](int bin, int units) { atomicAdd(&shared.histogram[forward_units_of][bin], units); });
        if (p.backward_list) {
            backward_tiles(p, s, [&](int bin, int tiles) {
                atomicAdd(&shared.histogram[sequences_of][bin], 1);
                atomicAdd(&shared.histogram[tiles_of][bin], tiles);
            });
        }
    };
#pragma unroll
    for (int r = 0; r < kept; ++r) count(r, mine[r]);
    for (int r = kept; r < rounds; ++r) {
        JfaSequence s;
        count(r, s);
    }
    ptx::cluster_sync();
    const int2 totals = place_bins(shared, p, rank, size);

    // Scatter: a lane takes the place of its sequence's units and writes them, or its warp does where they are many: unit u begins
    // at row (u or, reversed, units - 1 - u) * rows, or at -1 where rows is negative.
    const auto write = [&](JfaUnit* out, int capacity, int rows, bool reversed, int sequence, int place, int units) {
        constexpr int many = 32;
        if (units <= many) {
            for (int u = 0; u < units && place + u < capacity; ++u) out[place + u] = {sequence, rows < 0 ? -1 : (reversed ? units - 1 - u : u) * rows};
        }
        for (unsigned some = __ballot_sync(~0u, units > many); some; some &= some - 1) {
            const int from = __ffs(some) - 1;
            const int n = __shfl_sync(~0u, units, from), at = __shfl_sync(~0u, place, from), b = __shfl_sync(~0u, sequence, from);
            const int height = __shfl_sync(~0u, rows, from);
            for (int u = lane; u < n && at + u < capacity; u += 32) out[at + u] = {b, height < 0 ? -1 : (reversed ? n - 1 - u : u) * height};
        }
    };
    const auto scatter = [&](int r, const JfaSequence& s) {
        const long long b = sequence_at(r);
        const bool is = b < p.batch;
        int place = 0, count = 0, rows = 0;
        if (is) {
            forward_units(p, s, [&](int bin, int units) {
                place = atomicAdd(&shared.cursor[forward_list][bin], units);
                count = units;
            });
        }
        // Heaviest first: a diagonal leaves the last rows the most keys.
        write(p.forward_list, p.forward_capacity, p.forward_rows, p.mask.right >= 0, static_cast<int>(b), place, count);
        if (p.backward_list) {
            count = 0;
            if (is) {
                backward_tiles(p, s, [&](int bin, int tiles) {
                    const bool split = shared.split[bin];
                    count = split ? tiles : 1;
                    rows = split ? p.backward_rows : -1;
                    place = atomicAdd(&shared.cursor[backward_list][bin], count);
                });
            }
            write(p.backward_list, p.backward_capacity, rows, false, static_cast<int>(b), place, count);
        }
    };
#pragma unroll
    for (int r = 0; r < kept; ++r) {
        if (r < rounds) scatter(r, mine[r]);
    }
    for (int r = kept; r < rounds; ++r) {
        const long long b = sequence_at(r);
        scatter(r, b < p.batch ? p.sequences[b] : JfaSequence{});
    }
    if (rank == 0 && threadIdx.x == 0) {
        p.header->forward_units = min(totals.x, p.forward_capacity);
        p.header->backward_units = min(totals.y, p.backward_capacity);
    }
    ptx::cluster_wait();
}

}  // namespace jfa
