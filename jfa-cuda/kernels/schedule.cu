// The device schedule: offsets -> sequences and unit lists, longest work first. One launch, no host copy, O(units).
//
//   launch      8 CTAs of 512 threads that know nothing of each other: every one counts all sequences (a cluster that shares the
//               counting spends more on its barriers and histograms than the counting takes), and writes what it owns
//   owner       sequence b belongs to CTA b % 8: its entry in `sequences` and its units in both lists
//   count       a thread takes every 512th sequence; a bin of work has one counter per owner, which tells a CTA where its own units
//               of the bin begin, and keeps equal lengths from queueing at one address
//   scan        a thread per bin and list, heaviest bin first
//   scatter     four threads per list write the units of a sequence; they stay neighbours
//   backward    a sequence is one unit, or its key tiles are units where it is too long for one CTA; then it is counted a second time
//   output      header, sequences[batch], forward and backward lists (params.h)
//   safety      every offset, length and index is clamped into the buffers, and offsets that decrease give no unit at all: bad input
//               can give wrong numbers, never a fault
//   code        kept short on purpose: fetched from memory once per launch, it costs more than what it computes
#include "params.h"
#include "schedule.cuh"

namespace jfa {
namespace {

constexpr int threads = 512;
constexpr int ctas = 8;
constexpr int bins = 256;
constexpr int quad = 4;                          // threads that write the units of a sequence in one list
constexpr int kept = 1024;                       // sequences of a CTA whose bins and units stay in shared memory until the scatter
constexpr int units_bits = 24;                   // of a kept word, below its bin
constexpr uint32_t many_units = (1u << units_bits) - 1;  // or more

enum : int { forward_list, backward_list, lists };
static_assert(lists * bins <= threads && bins <= 1 << (32 - units_bits), "a thread per bin and list; a word per bin and units");

struct SharedMemory {
    int histogram[lists][bins][ctas];  // by owner. Forward: units; backward: sequences, or tiles where `split`
    int cursor[lists][bins];           // this CTA's next place
    alignas(8) uint32_t words[kept][lists];     // of this CTA's first sequences: bin << units_bits | units
    int sums[lists][bins / 32];
    float work[bins / 32];
    bool split[bins];                  // backward: the tiles of these sequences are units of their own
};

// Bins: 8 to a factor of two, heaviest first.
__device__ int bin_of(float work) {
    const int b = static_cast<int>(__float_as_uint(work) >> 20) - (127 << 3);
    return bins - 1 - min(b, bins - 1);
}
__device__ float work_of(int bin) { return __uint_as_float(static_cast<uint32_t>(bins - 1 - bin + (127 << 3)) << 20); }

// n / d, rounded up: without a division where the divisor is a power of two, as it is for every tile so far.
__device__ int parts(int n, int d) {
    const uint32_t above = static_cast<uint32_t>(n) + static_cast<uint32_t>(d) - 1;
    return static_cast<int>((d & (d - 1)) == 0 ? above >> (31 - __clz(d)) : above / static_cast<uint32_t>(d));
}

// An offset and the one after it, as they stand in memory: fetched long before they are looked at.
struct Span {
    int low[2], high[2];  // high: of 64-bit offsets
};
__device__ Span fetch(const void* offsets, int is_64bit, int i) {
    const char* const at = static_cast<const char*>(offsets) + static_cast<unsigned long long>(static_cast<uint32_t>(i)) * (4u << is_64bit);
    Span s;
    if (is_64bit) {
        const int2 start = __ldg(reinterpret_cast<const int2*>(at)), end = __ldg(reinterpret_cast<const int2*>(at) + 1);
        s = {{start.x, end.x}, {start.y, end.y}};
    } else {
        s.low[0] = __ldg(reinterpret_cast<const int*>(at));
        s.low[1] = __ldg(reinterpret_cast<const int*>(at) + 1);
    }
    return s;
}
// Rows of a span inside a buffer of `total` rows; `decreasing` is set where they end before they start.
struct Rows {
    int start, length;
};
__device__ Rows rows_of(const Span& s, int is_64bit, int total, bool& decreasing) {
    int value[2] = {s.low[0], s.low[1]};
    if (is_64bit) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (s.high[i] != s.low[i] >> 31) value[i] = s.high[i] < 0 ? 0 : total;
    }
    const int start = max(0, min(value[0], total)), length = max(0, min(value[1], total)) - start;
    decreasing |= length < 0;
    return {start, max(0, length)};
}

// What memory says of a sequence. `special`: there are lengths, an index, or no offsets of one side.
struct Entries {
    Span q, kv;
    int q_length, kv_length, kv_sequence;
};
__device__ bool is_special(const JfaScheduleParams& p) {
    return p.kv_index || p.q_lengths || p.kv_lengths || p.broadcast_q_len >= 0 || p.kv_batch == 0;
}
template <bool special>
__device__ Entries fetch(const JfaScheduleParams& p, int b) {
    Entries e;
    e.kv_sequence = b;
    if constexpr (special) {
        if (p.kv_index) e.kv_sequence = max(0, min(__ldg(p.kv_index + b), p.kv_batch - 1));
        if (p.q_lengths && p.broadcast_q_len < 0) e.q_length = __ldg(p.q_lengths + b);
        if (p.kv_lengths && p.kv_batch) e.kv_length = __ldg(p.kv_lengths + e.kv_sequence);
    }
    if (!special || p.broadcast_q_len < 0) e.q = fetch(p.q_offsets, p.q_offsets_are_64bit, b);
    if (!special || p.kv_batch) e.kv = fetch(p.kv_offsets, p.kv_offsets_are_64bit, e.kv_sequence);
    return e;
}

// The sequence, inside the buffers.
template <bool special>
__device__ JfaSequence resolve(const JfaScheduleParams& p, int b, const Entries& e, bool& decreasing) {
    Rows q = {0, 0}, kv = {0, 0};
    if (!special || p.broadcast_q_len < 0) q = rows_of(e.q, p.q_offsets_are_64bit, static_cast<int>(p.total_q), decreasing);
    if (!special || p.kv_batch) kv = rows_of(e.kv, p.kv_offsets_are_64bit, static_cast<int>(p.total_kv), decreasing);
    JfaSequence s = {q.start, q.start, q.length, kv.start, kv.length, e.kv_sequence, {0, 0}};
    if constexpr (special) {
        if (p.q_lengths) s.q_len = max(0, min(e.q_length, s.q_len));
        if (p.kv_lengths) s.kv_len = max(0, min(e.kv_length, s.kv_len));
        if (p.broadcast_q_len >= 0) s.q_len = p.broadcast_q_len, s.o_row = b * p.broadcast_q_len;
    }
    return s;
}

// Sequences that continue the rows and share the keys of the one before are one sequence to a full mask: the first takes all rows.
// A whole warp calls it, lane l with sequence b0 + l.
__device__ void merge_shared_kv(const JfaScheduleParams& p, int b0, JfaSequence& s) {
    const int lane = threadIdx.x % 32;
    const auto sequence = [&](int b) {
        bool ignored = false;
        return resolve<true>(p, b, fetch<true>(p, b), ignored);
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
    Places out = {};
    out.units = parts(s.q_len, p.forward_rows);
    if (p.backward_list) {
        out.tiles = parts(s.kv_len, p.backward_rows);
        if (out.tiles == 0) out.tiles = min(s.q_len, 1);  // for the zeros in dq
    }
    // Forward: blocks of half a unit's rows times tiles, and a fixed part. The heaviest unit stands for the sequence: its units stay
    // neighbours, so that the CTAs which work on them at the same time find their keys and values in the L2 (sorting single units
    // by work read them twice from memory: an L2 hit rate of 19 % for 1,152 sequences of 256). Backward: blocks of query rows over
    // all key tiles, each with a fixed part.
    float forward, backward;
    if (full) {
        forward = static_cast<float>(1 + (s.q_len > p.forward_rows / 2 ? 2 : 1) * parts(s.kv_len, p.forward_kv_tile));
        backward = static_cast<float>(1 + parts(s.q_len, p.backward_q_tile)) * static_cast<float>(out.tiles);
    } else {
        // In floating point, which is full rate; the middle stands for what lies between the ends (Simpson's rule).
        const float m = s.q_len, n = s.kv_len, d = diagonal_shift(p.mask, s.q_len, s.kv_len), rows = p.forward_rows, keys = p.backward_rows;
        const float left = p.mask.left < 0 ? INFINITY : p.mask.left, right = p.mask.right < 0 ? INFINITY : p.mask.right;
        const float per_key = __fdividef(1.0f, p.forward_kv_tile), per_row = __fdividef(1.0f, p.backward_q_tile);
        const auto unit_work = [&](int unit) {
            const float first = unit * rows, last = fminf(first + rows, m) - 1.0f;
            const float seen = fminf(n, last + d + right + 1.0f) - fmaxf(0.0f, first + d - left);
            return 1.0f + (2.0f * (last - first) >= rows ? 2.0f : 1.0f) * ceilf(fmaxf(0.0f, seen) * per_key);
        };
        const auto tile_work = [&](int tile) {
            const float first = tile * keys, last = fminf(first + keys, n) - 1.0f;
            const float seen = fminf(m, last - d + left + 1.0f) - fmaxf(0.0f, first - d - right);
            return 1.0f + ceilf(fmaxf(0.0f, seen) * per_row);
        };
        forward = fmaxf(unit_work(0), fmaxf(unit_work(out.units / 2), unit_work(out.units - 1)));
        const float ends = tile_work(0) + tile_work(out.tiles - 1);
        backward = static_cast<float>(out.tiles) * (out.tiles > 2 ? (ends + 4.0f * tile_work(out.tiles / 2)) * (1.0f / 6.0f) : ends * 0.5f);
    }
    out.forward_bin = bin_of(forward);
    out.backward_bin = bin_of(fmaxf(backward, 1.0f));
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

// Counts every sequence; in a second pass the further tiles of what is split. Whether offsets decrease.
template <bool special>
__device__ bool count(SharedMemory& shared, const JfaScheduleParams& p, bool again) {
    const uint32_t t = threadIdx.x;
    const int lane = t % 32, rank = blockIdx.x, owner = t % ctas;
    bool decreasing = false;
    Entries next;
    if (static_cast<int>(t & ~31u) < p.batch) next = fetch<special>(p, min(static_cast<int>(t), p.batch - 1));
    if (!again) {
        static_assert(sizeof(shared.histogram) == 2 * threads * sizeof(int4));
        for (int i = 0; i < 2; ++i) reinterpret_cast<int4*>(shared.histogram)[t + i * threads] = {0, 0, 0, 0};
        if (t < bins) shared.split[t] = false;
        __syncthreads();
    }
    for (int b0 = t & ~31u; b0 < p.batch; b0 += threads) {
        const int b = b0 + lane;
        JfaSequence s = resolve<special>(p, min(b, p.batch - 1), next, decreasing);
        if (b0 + threads < p.batch) next = fetch<special>(p, min(b + threads, p.batch - 1));
        if (special && p.merge_shared_kv) merge_shared_kv(p, b0, s);
        if (b >= p.batch) continue;
        const Places at = places_of(p, s);
        int* const forward = &shared.histogram[forward_list][at.forward_bin][owner];
        int* const backward = &shared.histogram[backward_list][at.backward_bin][owner];
        if (again) {
            if (at.tiles > 1 && shared.split[at.backward_bin]) atomicAdd(backward, at.tiles - 1);
            continue;
        }
        atomicAdd(forward, at.units);
        atomicAdd(backward, min(at.tiles, 1));
        if (owner != rank) continue;
        int4* const out = reinterpret_cast<int4*>(p.sequences + b);
        out[0] = {s.q_row, s.o_row, s.q_len, s.kv_row};
        // Remembered until the scatter: in shared memory while there is room.
        const auto word = [](int bin, int n) { return static_cast<int>(static_cast<uint32_t>(bin) << units_bits | min(static_cast<uint32_t>(n), many_units)); };
        const int2 words = {word(at.forward_bin, at.units), word(at.backward_bin, at.tiles)};
        out[1] = {s.kv_len, s.kv_sequence, words.x, words.y};
        if (const uint32_t slot = static_cast<uint32_t>(b) / ctas; slot < kept) *reinterpret_cast<int2*>(shared.words[slot]) = words;
    }
    return decreasing;
}

// Writes the units of this CTA's sequences, four threads per sequence and list.
__device__ void scatter(SharedMemory& shared, const JfaScheduleParams& p) {
    const uint32_t t = threadIdx.x, rank = blockIdx.x;
    const int mine = t / quad % lists, e = t % quad, of_mine = t & 31 & ~(quad - 1);
    JfaUnit* const out = mine == forward_list ? p.forward_list : p.backward_list;
    const uint32_t capacity = mine == forward_list ? p.forward_capacity : p.backward_capacity;
    for (uint32_t slot = t / (lists * quad); slot * ctas + rank < static_cast<uint32_t>(p.batch); slot += threads / (lists * quad)) {
        const int b = slot * ctas + rank;
        const uint32_t word = slot < kept ? shared.words[slot][mine] : p.sequences[b].reserved[mine];
        const int bin = word >> units_bits;
        int n = word & many_units;
        if (n == static_cast<int>(many_units)) n = mine == forward_list ? parts(p.sequences[b].q_len, p.forward_rows) : parts(p.sequences[b].kv_len, p.backward_rows);
        // Heaviest first: a diagonal leaves the last rows the most keys.
        int height = p.forward_rows, begin = 0;
        if (mine == forward_list) {
            if (p.mask.right >= 0) begin = (n - 1) * height, height = -height;
        } else if (shared.split[bin]) {
            height = p.backward_rows;
        } else {
            n = min(n, 1), begin = -1;
        }
        int place = 0;
        if (e == 0) place = atomicAdd(&shared.cursor[mine][bin], n);
        place = __shfl_sync(0xfu << of_mine, place, of_mine);
        for (int u = e; u < n && static_cast<uint32_t>(place + u) < capacity; u += quad) out[place + u] = {b, begin + u * height};
    }
}

}  // namespace

// Blocks of a launch.
extern "C" __constant__ unsigned jfa_ctas = ctas;

extern "C" __global__ void __launch_bounds__(threads, 1) jfa_schedule(const __grid_constant__ JfaScheduleParams p) {
    __shared__ SharedMemory shared;
    const uint32_t t = threadIdx.x;
    const int lane = t % 32, warp = t / 32, rank = blockIdx.x;
    const int list = t / bins, bin = t % bins, part = warp % (bins / 32);  // in the scan, where list < lists
    const bool special = is_special(p);
    for (int pass = 0; pass < 2; ++pass) {
        const bool decreasing = special ? count<true>(shared, p, pass) : count<false>(shared, p, pass);
        const bool is_void = __syncthreads_or(decreasing);

        // Scan: a thread per bin of a list.
        int sum = 0, before = 0, up_to = 0;
        float work_up_to = 0.0f;
        if (list < lists) {
#pragma unroll
            for (int r = 0; r < ctas; ++r) {
                const int n = shared.histogram[list][bin][r];
                sum += n;
                before += r < rank ? n : 0;
            }
            up_to = up_to_lane(sum);
            if (lane == 31) shared.sums[list][part] = up_to;
            if (list == backward_list) {
                work_up_to = up_to_lane(static_cast<float>(sum) * work_of(bin));
                if (lane == 31) shared.work[part] = work_up_to;
            }
        }
        __syncthreads();
        bool split = false;
        if (list < lists) {
            const int others = lane < bins / 32 ? shared.sums[list][lane] : 0;
            shared.cursor[list][bin] = __reduce_add_sync(~0u, lane < part ? others : 0) + up_to - sum + before;
            const int units = __reduce_add_sync(~0u, others);
            if (rank == 0 && bin == 0) {
                const bool fits = !is_void && units <= (list ? p.backward_capacity : p.forward_capacity);
                (list ? p.header->backward_units : p.header->forward_units) = fits ? units : 0;
            }
            if (list == backward_list && pass == 0) {
                // A sequence belongs to one CTA (always with a broadcast query, whose units are dealt), unless it would still be at
                // work when the others have nothing left: begun after all heavier ones, it must fit into its share of the lighter
                // ones, or into a thirty-second part of everything.
                float total = shared.work[lane % (bins / 32)], earlier = lane % (bins / 32) < part ? total : 0.0f;
#pragma unroll
                for (int d = bins / 64; d; d /= 2) {
                    total += __shfl_xor_sync(~0u, total, d);
                    earlier += __shfl_xor_sync(~0u, earlier, d);
                }
                const float share = work_of(bin) * static_cast<float>(p.backward_share), lighter = total - (earlier + work_up_to);
                split = sum > 0 && (p.backward_share == 0x7fffffff || (p.broadcast_q_len < 0 && share > lighter + total * (1.0f / 32.0f)));
                if (split) shared.split[bin] = true;
            }
        }
        if (!__syncthreads_or(split)) break;
    }

    scatter(shared, p);
}

}  // namespace jfa
