// The device schedule: offsets -> sequences and unit lists, longest work first. One launch, no host copy, O(units).
//
//   launch      8 CTAs of 1,024 threads that know nothing of each other: every one counts all sequences (a cluster that shares the
//               counting spends more on its barriers and histograms than the counting takes), and writes what it owns
//   owner       sequence b belongs to CTA b % 8: its entry in `sequences` and its units in both lists
//   count       a thread takes every 1,024th sequence; a bin of work has one counter per owner, which tells a CTA where its own units
//               of the bin begin, and keeps equal lengths from queueing at one address
//   scan        a thread per bin and list, heaviest bin first
//   scatter     eight threads write the units of a sequence; they stay neighbours
//   backward    a sequence is one unit, or its key tiles are units where it is too long for one CTA; then it is counted a second time
//   output      header, sequences[batch], forward and backward lists (params.h)
//   safety      every offset, length and index is clamped into the buffers, and offsets that decrease give no unit at all: bad input
//               can give wrong numbers, never a fault
//   code        kept short on purpose: fetched from memory once per launch, it costs more than what it computes
#include "params.h"
#include "schedule.cuh"

namespace jfa {
namespace {

constexpr int threads = 1024;
constexpr int ctas = 8;
constexpr int bins = 512;
constexpr int octet = 8;                         // threads that write the units of one sequence
constexpr int kept = 1024;                       // sequences of a CTA whose bins stay in shared memory between the two walks
constexpr int units_bits = 23;                   // of a kept word, below its bin
constexpr uint32_t many_units = (1u << units_bits) - 1;  // or more

enum : int { forward_list, backward_list, lists };
static_assert(lists * bins == threads, "a thread per bin and list");

struct SharedMemory {
    int histogram[lists][bins][ctas];  // by owner. Forward: units; backward: sequences, or tiles where `split`
    int cursor[lists][bins];           // this CTA's next place
    uint2 kept[kept];                  // forward and backward: bin << units_bits | units
    int sums[lists][bins / 32];
    float work[bins / 32];
    bool split[bins];                  // backward: the tiles of these sequences are units of their own
};

// Bins: 16 to a factor of two, heaviest first.
__device__ int bin_of(float work) {
    const int b = static_cast<int>(__float_as_uint(work) >> 19) - (127 << 4);
    return bins - 1 - min(b, bins - 1);
}
__device__ float work_of(int bin) { return __uint_as_float(static_cast<uint32_t>(bins - 1 - bin + (127 << 4)) << 19); }

// An offset as it stands in memory: fetched long before it is looked at.
struct Word {
    int low, high;
};
__device__ Word fetch(const void* offsets, int is_64bit, long long i) {
    const int* const words = static_cast<const int*>(offsets) + (i << is_64bit);
    Word w = {__ldg(words), 0};
    if (is_64bit) w.high = __ldg(words + 1);
    return w;
}
__device__ int clamped(Word w, int is_64bit, int total) {
    const int high = is_64bit ? w.high : w.low >> 31;
    if (high) return high < 0 ? 0 : total;
    return static_cast<int>(min(static_cast<uint32_t>(w.low), static_cast<uint32_t>(total)));
}

// What memory says of a sequence.
struct Entries {
    Word q_start, q_end, kv_start, kv_end;
    int q_length, kv_length, kv_sequence;
};
__device__ Entries fetch(const JfaScheduleParams& p, int b) {
    Entries e = {};
    e.kv_sequence = p.kv_index ? max(0, min(__ldg(p.kv_index + b), p.kv_batch - 1)) : b;
    if (p.broadcast_q_len < 0) {
        e.q_start = fetch(p.q_offsets, p.q_offsets_are_64bit, b);
        e.q_end = fetch(p.q_offsets, p.q_offsets_are_64bit, b + 1ll);
        if (p.q_lengths) e.q_length = __ldg(p.q_lengths + b);
    }
    if (p.kv_batch > 0) {
        e.kv_start = fetch(p.kv_offsets, p.kv_offsets_are_64bit, e.kv_sequence);
        e.kv_end = fetch(p.kv_offsets, p.kv_offsets_are_64bit, e.kv_sequence + 1ll);
        if (p.kv_lengths) e.kv_length = __ldg(p.kv_lengths + e.kv_sequence);
    }
    return e;
}

// The sequence, inside the buffers; `decreasing` is set where its offsets do.
__device__ JfaSequence resolve(const JfaScheduleParams& p, int b, const Entries& e, bool& decreasing) {
    const auto length = [](int start, int end, const int32_t* lengths, int given) {
        const int slot = max(end - start, 0);
        return lengths ? max(0, min(given, slot)) : slot;
    };
    JfaSequence s = {};
    if (p.broadcast_q_len >= 0) {
        s.q_len = p.broadcast_q_len;
        s.o_row = b * p.broadcast_q_len;
    } else {
        const int total = static_cast<int>(p.total_q);
        const int start = clamped(e.q_start, p.q_offsets_are_64bit, total), end = clamped(e.q_end, p.q_offsets_are_64bit, total);
        s.q_row = s.o_row = start;
        s.q_len = length(start, end, p.q_lengths, e.q_length);
        decreasing |= end < start;
    }
    s.kv_sequence = e.kv_sequence;
    if (p.kv_batch > 0) {
        const int total = static_cast<int>(p.total_kv);
        const int start = clamped(e.kv_start, p.kv_offsets_are_64bit, total), end = clamped(e.kv_end, p.kv_offsets_are_64bit, total);
        s.kv_row = start;
        s.kv_len = length(start, end, p.kv_lengths, e.kv_length);
        decreasing |= end < start;
    }
    return s;
}

// Sequences that continue the rows and share the keys of the one before are one sequence to a full mask: the first takes all rows.
// A whole warp calls it, lane l with sequence b0 + l.
__device__ void merge_shared_kv(const JfaScheduleParams& p, int b0, JfaSequence& s) {
    const int lane = threadIdx.x % 32;
    const auto sequence = [&](int b) {
        bool ignored = false;
        return resolve(p, b, fetch(p, b), ignored);
    };
    // Which of sequences b .. b + 31, one per lane, continue their predecessors; the first lane's is given.
    const auto continuing = [&](int b, const JfaSequence& mine, int end, int kv) {
        const int up_end = __shfl_up_sync(~0u, mine.q_row + mine.q_len, 1), up_kv = __shfl_up_sync(~0u, mine.kv_sequence, 1);
        if (lane) end = up_end, kv = up_kv;
        return __ballot_sync(~0u, b + lane > 0 && b + lane < p.batch && mine.q_row == end && mine.kv_sequence == kv);
    };
    const JfaSequence before = sequence(max(b0 - 1, 0));
    const unsigned heads = ~continuing(b0, s, before.q_row + before.q_len, before.kv_sequence);
    if (heads == 0) {  // also the first lane continues the warp before
        s.q_len = 0;
        return;
    }
    // A run ends before the next head; the warp's last one may go on behind the warp.
    const unsigned later = heads & ~((2u << lane) - 1);
    const int end_of_run = __shfl_sync(~0u, s.q_row + s.q_len, later ? __ffs(later) - 2 : 31);
    int end = __shfl_sync(~0u, end_of_run, 31), kv = __shfl_sync(~0u, s.kv_sequence, 31);
    for (int b = b0 + 32; b < p.batch; b += 32) {
        const JfaSequence next = sequence(min(b + lane, p.batch - 1));
        const unsigned stop = ~continuing(b, next, end, kv);
        const int last = stop ? __ffs(stop) - 2 : 31;
        const int its_end = __shfl_sync(~0u, next.q_row + next.q_len, max(last, 0));
        if (last >= 0) end = its_end;
        if (stop) break;
    }
    if (heads >> lane & 1) s.q_len = (later ? end_of_run : end) - s.q_row;
    else s.q_len = 0;
}

// What both lists hold of a sequence. Work is an estimate, in tiles: it only orders the units.
struct Places {
    int forward_bin, units, backward_bin, tiles;
};
__device__ Places places_of(const JfaScheduleParams& p, const JfaSequence& s) {
    const bool full = p.mask.left < 0 && p.mask.right < 0;
    const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    Places out = {};
    // Forward: blocks of half a unit's rows times tiles, and a fixed part. The heaviest unit stands for the sequence: its units stay
    // neighbours, so that the CTAs which work on them at the same time find their keys and values in the L2 (sorting single units
    // by work read them twice from memory: an L2 hit rate of 19 % for 1,152 sequences of 256).
    out.units = static_cast<int>((static_cast<uint32_t>(s.q_len) + p.forward_rows - 1) / static_cast<uint32_t>(p.forward_rows));
    const float per_key = __fdividef(1.0f, static_cast<float>(p.forward_kv_tile));
    const auto unit_work = [&](int unit) {
        const int first = unit * p.forward_rows, last = min(first + p.forward_rows, s.q_len) - 1;
        const int keys = full ? s.kv_len : max(0, end_key(p.mask, last, shift, s.kv_len) - first_key(p.mask, first, shift));
        return 1.0f + (2 * (last - first) >= p.forward_rows ? 2.0f : 1.0f) * ceilf(static_cast<float>(keys) * per_key);
    };
    float work = unit_work(0);
    if (!full) work = fmaxf(work, fmaxf(unit_work(out.units / 2), unit_work(out.units - 1)));
    out.forward_bin = bin_of(work);
    // Backward: blocks of query rows over all key tiles, each with a fixed part. Without keys there is one tile, for the zeros in dq.
    if (!p.backward_list) return out;
    out.tiles = static_cast<int>((static_cast<uint32_t>(s.kv_len) + p.backward_rows - 1) / static_cast<uint32_t>(p.backward_rows));
    if (out.tiles == 0) out.tiles = s.q_len ? 1 : 0;
    const float per_row = __fdividef(1.0f, static_cast<float>(p.backward_q_tile));
    const auto tile_work = [&](int tile) {
        const int first = tile * p.backward_rows, last = min(first + p.backward_rows, s.kv_len) - 1;
        const int rows = full ? s.q_len : max(0, min(s.q_len, end_row(p.mask, last, shift, s.q_len)) - first_row(p.mask, first, shift));
        return 1.0f + ceilf(static_cast<float>(rows) * per_row);
    };
    work = tile_work(0);
    if (!full) {
        const float last = tile_work(out.tiles - 1);
        work = out.tiles > 2 ? (work + 4.0f * tile_work(out.tiles / 2) + last) * (1.0f / 6.0f) : (work + last) * 0.5f;
    }
    out.backward_bin = bin_of(fmaxf(work * static_cast<float>(out.tiles), 1.0f));
    return out;
}

// Sums over the 32 lanes up to this one.
template <class V>
__device__ V up_to_lane(V value) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const V n = __shfl_up_sync(~0u, value, d);
        if (threadIdx.x % 32 >= d) value += n;
    }
    return value;
}

}  // namespace

// Blocks of a launch.
extern "C" __constant__ unsigned jfa_ctas = ctas;

extern "C" __global__ void __launch_bounds__(threads, 1) jfa_schedule(const __grid_constant__ JfaScheduleParams p) {
    __shared__ SharedMemory shared;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, rank = blockIdx.x;
    Entries next = fetch(p, min(t, p.batch - 1));
    for (int i = t; i < lists * bins * ctas / 4; i += threads) reinterpret_cast<int4*>(shared.histogram)[i] = {0, 0, 0, 0};
    if (t < bins) shared.split[t] = false;
    __syncthreads();

    bool decreasing = false;
    int units = 0;  // of list t / bins
    for (int pass = 0; pass < 2; ++pass) {
        // Count. In a second pass: the further tiles of what is split.
        for (int b0 = warp * 32; b0 < p.batch; b0 += threads) {
            const int b = b0 + lane;
            const Entries entries = pass ? fetch(p, min(b, p.batch - 1)) : next;
            next = fetch(p, min(b + threads, p.batch - 1));
            JfaSequence s = resolve(p, min(b, p.batch - 1), entries, decreasing);
            if (p.merge_shared_kv) merge_shared_kv(p, b0, s);
            if (b >= p.batch) continue;
            const Places at = places_of(p, s);
            if (pass) {
                if (at.tiles > 1 && shared.split[at.backward_bin]) atomicAdd(&shared.histogram[backward_list][at.backward_bin][b % ctas], at.tiles - 1);
                continue;
            }
            atomicAdd(&shared.histogram[forward_list][at.forward_bin][b % ctas], at.units);
            if (at.tiles) atomicAdd(&shared.histogram[backward_list][at.backward_bin][b % ctas], 1);
            if (b % ctas != rank) continue;
            int4* const out = reinterpret_cast<int4*>(p.sequences + b);
            out[0] = {s.q_row, s.o_row, s.q_len, s.kv_row};
            out[1] = {s.kv_len, s.kv_sequence, 0, 0};
            const auto word = [](int bin, int n) { return static_cast<uint32_t>(bin) << units_bits | min(static_cast<uint32_t>(n), many_units); };
            if (b / ctas < kept) shared.kept[b / ctas] = {word(at.forward_bin, at.units), word(at.backward_bin, at.tiles)};
        }
        const bool is_void = __syncthreads_or(decreasing);

        // Scan: a thread per bin of a list.
        const int list = t / bins, bin = t % bins, part = warp % (bins / 32);
        int sum = 0, before = 0;
#pragma unroll
        for (int r = 0; r < ctas; ++r) {
            const int n = shared.histogram[list][bin][r];
            sum += n;
            before += r < rank ? n : 0;
        }
        const int up_to = up_to_lane(sum);
        if (lane == 31) shared.sums[list][part] = up_to;
        float work_up_to = 0.0f;
        if (list == backward_list && pass == 0) {
            work_up_to = up_to_lane(static_cast<float>(sum) * work_of(bin));
            if (lane == 31) shared.work[part] = work_up_to;
        }
        __syncthreads();
        const int others = lane < bins / 32 ? shared.sums[list][lane] : 0;
        const int earlier = __reduce_add_sync(~0u, lane < part ? others : 0);
        units = __reduce_add_sync(~0u, others);
        shared.cursor[list][bin] = earlier + up_to - sum + before;
        if (list == forward_list ? units > p.forward_capacity : units > p.backward_capacity) units = 0;
        if (is_void) units = 0;
        bool split = false;
        if (list == backward_list && pass == 0) {
            // A sequence belongs to one CTA (always with a broadcast query, whose units are dealt), unless it would still be at work
            // when the others have nothing left: begun after all heavier ones, it must fit into its share of the lighter ones, or
            // into a thirty-second part of everything.
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < bins / 32; ++i) {
                total += shared.work[i];
                work_up_to += i < part ? shared.work[i] : 0.0f;
            }
            const float share = work_of(bin) * static_cast<float>(p.backward_share);
            split = sum > 0 && (p.backward_share == 0x7fffffff || (p.broadcast_q_len < 0 && share > total - work_up_to + total * (1.0f / 32.0f)));
            if (split) shared.split[bin] = true;
        }
        if (!__syncthreads_or(split)) break;
    }
    if (rank == 0 && t % bins == 0) (t ? p.header->backward_units : p.header->forward_units) = units;

    // Scatter: eight threads per sequence.
    const int e = lane % octet, first_of = lane - e;
    const unsigned mates = 0xffu << first_of;
    for (int slot = t / octet; slot * ctas + rank < p.batch; slot += threads / octet) {
        const int b = slot * ctas + rank;
        const auto places = [&]() -> Places {
            if (slot < kept) {
                const uint2 w = shared.kept[slot];
                if ((w.x & many_units) != many_units && (w.y & many_units) != many_units)
                    return {static_cast<int>(w.x >> units_bits), static_cast<int>(w.x & many_units), static_cast<int>(w.y >> units_bits), static_cast<int>(w.y & many_units)};
            }
            return places_of(p, p.sequences[b]);
        };
        const Places at = places();
        const bool split = shared.split[at.backward_bin];
        const int tiles = split ? at.tiles : min(at.tiles, 1);
        int place = 0;
        if (e < lists) place = atomicAdd(&shared.cursor[e][e ? at.backward_bin : at.forward_bin], e ? tiles : at.units);
        const auto write = [&](JfaUnit* out, int capacity, int place, int n, int height, bool reversed) {
            for (int u = e; u < n && static_cast<uint32_t>(place + u) < static_cast<uint32_t>(capacity); u += octet)
                out[place + u] = {b, height < 0 ? -1 : (reversed ? n - 1 - u : u) * height};
        };
        // Heaviest first: a diagonal leaves the last rows the most keys.
        write(p.forward_list, p.forward_capacity, __shfl_sync(mates, place, first_of), at.units, p.forward_rows, p.mask.right >= 0);
        if (p.backward_list) write(p.backward_list, p.backward_capacity, __shfl_sync(mates, place, first_of + 1), tiles, split ? p.backward_rows : -1, false);
    }
}

}  // namespace jfa
