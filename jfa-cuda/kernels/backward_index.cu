// Split backward: the sequences of the schedule by key/value sequence, and the tiles of keys, most work first. Once per batch, behind
// the schedule; no host copy, O(batch + kv_batch + tiles).
//
//   launch      one CTA of 1,024 threads
//   members     sequences with rows, stably sorted by key/value sequence: a radix sort of 8 bits a pass, none where the batch is in
//               order already. Every pass counts digits per warp (a warp has a stretch of its own), scans, and moves
//   units       binned by the blocks of query rows that a key/value sequence has; tiles of one stay neighbours
//   safety      what the schedule left is clamped; offsets are clamped here as there, and where they decrease there is no unit: tiles
//               of keys would overlap, or the query side has no units either
//   code        kept short on purpose: it is fetched from memory at every launch
#include "split.cuh"

namespace jfa {
namespace {

constexpr int threads = 1024;
constexpr int warps = threads / 32;
constexpr int digit_bits = 8;
constexpr int digits = 1 << digit_bits;
constexpr int bins = threads;

struct SharedMemory {
    int count[warps][digits];
    int bin[bins];
    int warp_sum[warps];
};

// Sum over the CTA's threads before this one, and over all.
struct Sums {
    int before, total;
};
__device__ Sums scan(int value, SharedMemory& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto up_to_lane = [&](int v) {
#pragma unroll 1
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, v, d);
            if (lane >= d) v += n;
        }
        return v;
    };
    const int up_to = up_to_lane(value);
    if (lane == 31) shared.warp_sum[warp] = up_to;
    __syncthreads();
    if (warp == 0) shared.warp_sum[lane] = up_to_lane(shared.warp_sum[lane]);
    __syncthreads();
    const Sums sums = {up_to - value + (warp ? shared.warp_sum[warp - 1] : 0), shared.warp_sum[warps - 1]};
    __syncthreads();
    return sums;
}

// Calls move(i, place) for every i < n that has a digit (not negative), where places follow the digits and, among equal ones, i.
// Returns how many have one.
template <class Digit, class Move>
__device__ int distribute(SharedMemory& shared, int n, Digit digit, Move move) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long stretch = (static_cast<long long>(n) + warps - 1) / warps;
    const int begin = static_cast<int>(min(warp * stretch, static_cast<long long>(n))), end = static_cast<int>(min((warp + 1) * stretch, static_cast<long long>(n)));
    int(&own)[digits] = shared.count[warp];
    // Walks over the warp's stretch in order: visit(i, own[digit]), and own[digit] grows by one each time.
    const auto every = [&](auto visit) {
#pragma unroll 1
        for (int base = begin; base < end; base += 32) {
            const int i = base + lane, d = i < end ? digit(i) : -1;
            const unsigned equal = __match_any_sync(~0u, d);
            const int at = d >= 0 ? own[d] : 0;
            __syncwarp();
            if (d >= 0 && lane == 31 - __clz(equal)) own[d] = at + __popc(equal);
            __syncwarp();
            if (d >= 0) visit(i, at + __popc(equal & ((1u << lane) - 1)));
        }
    };

#pragma unroll 1
    for (int i = threadIdx.x; i < warps * digits; i += threads) shared.count[i / digits][i % digits] = 0;
    __syncthreads();
    every([](int, int) {});
    __syncthreads();
    // A thread has the counts of one digit in a quarter of the warps.
    constexpr int part = warps * digits / threads;
    const int d = threadIdx.x * part / warps, first_warp = threadIdx.x * part % warps;
    int sum = 0;
#pragma unroll
    for (int w = 0; w < part; ++w) sum += shared.count[first_warp + w][d];
    const Sums sums = scan(sum, shared);
    int place = sums.before;
#pragma unroll
    for (int w = 0; w < part; ++w) {
        const int here = shared.count[first_warp + w][d];
        shared.count[first_warp + w][d] = place;
        place += here;
    }
    __syncthreads();
    every(move);
    __syncthreads();
    return sums.total;
}

__device__ long long entry(const void* offsets, int is_64bit, long long i) {
    return is_64bit ? static_cast<const long long*>(offsets)[i] : static_cast<const int*>(offsets)[i];
}

// 32 bins to a factor of two, most work first.
__device__ int bin_of(int work) {
    const int b = static_cast<int>(__float_as_uint(1.0f + static_cast<float>(work)) >> 18) - (127 << 5);
    return bins - 1 - min(b, bins - 1);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(threads, 1) jfa_backward_index(const __grid_constant__ JfaIndexParams p) {
    __shared__ SharedMemory shared;
    int* number = p.scratch;
    int* key = number + p.batch;
    int* next_number = key + p.batch;
    int* next_key = next_number + p.batch;
    int* blocks = p.scratch + 4ll * p.batch;

    // Key/value sequences, without members as yet.
    bool decreasing = false;
#pragma unroll 1
    for (int s = threadIdx.x; s < p.kv_batch; s += threads) {
        long long start = entry(p.kv_offsets, p.kv_offsets_are_64bit, s), end = entry(p.kv_offsets, p.kv_offsets_are_64bit, s + 1ll);
        decreasing |= end < start;
        start = max(0ll, min(start, static_cast<long long>(p.total_kv)));
        end = max(start, min(end, static_cast<long long>(p.total_kv)));
        const long long length = p.kv_lengths ? max(0ll, min(static_cast<long long>(p.kv_lengths[s]), end - start)) : end - start;
        p.keys[s] = {static_cast<int>(start), static_cast<int>(length), 0, 0};
        blocks[s] = 0;
    }

    // Members: first those with rows, as they come, then digit by digit where that is not their order. One loop for both, so
    // that its code is there once.
    int members = p.batch;
#pragma unroll 1
    for (int shift = -digit_bits;;) {
        const auto digit = [&](int i) {
            if (shift >= 0) return key[i] >> shift & (digits - 1);
            const JfaSequence& s = p.sequences[i];
            return s.q_len > 0 && static_cast<unsigned>(s.kv_sequence) < static_cast<unsigned>(p.kv_batch) ? 0 : -1;
        };
        members = distribute(shared, members, digit, [&](int i, int place) {
            next_number[place] = shift < 0 ? i : number[i];
            next_key[place] = shift < 0 ? p.sequences[i].kv_sequence : key[i];
        });
        int* t = number;
        number = next_number, next_number = t;
        t = key;
        key = next_key, next_key = t;
        shift += digit_bits;
        if (shift == 0) {
            bool in_order = true;
#pragma unroll 1
            for (int i = threadIdx.x + 1; i < members; i += threads) in_order &= key[i - 1] <= key[i];
            if (__syncthreads_and(in_order)) break;
        }
        if (shift >= 32 || (p.kv_batch - 1) >> shift == 0) break;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < members; i += threads) {
        const JfaSequence s = p.sequences[number[i]];
        const int k = key[i];
        p.members[i] = {s.q_row, s.o_row, s.q_len, number[i]};
        if (i == 0 || key[i - 1] != k) p.keys[k].begin = i;
        if (i == members - 1 || key[i + 1] != k) p.keys[k].end = i + 1;
        atomicAdd(&blocks[k], (s.q_len + p.block_rows - 1) / p.block_rows);
    }

    // Units.
    shared.bin[threadIdx.x] = 0;
    __syncthreads();
    const auto tiles_of = [&](int s) { return (p.keys[s].kv_len + p.unit_keys - 1) / p.unit_keys; };
#pragma unroll 1
    for (int s = threadIdx.x; s < p.kv_batch; s += threads) atomicAdd(&shared.bin[bin_of(blocks[s])], tiles_of(s));
    __syncthreads();
    const Sums sums = scan(shared.bin[threadIdx.x], shared);
    shared.bin[threadIdx.x] = sums.before;
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = threadIdx.x - lane; base < p.kv_batch; base += threads) {
        // A lane writes its sequence's tiles, or its warp does where they are many.
        const int s = base + lane, tiles = s < p.kv_batch ? tiles_of(s) : 0;
        const int place = tiles ? atomicAdd(&shared.bin[bin_of(blocks[s])], tiles) : 0;
        constexpr int many = 8;
        if (tiles <= many) {
#pragma unroll 1
            for (int t = 0; t < tiles && place + t < p.capacity; ++t) p.units[place + t] = {s, t * p.unit_keys};
        }
#pragma unroll 1
        for (unsigned some = __ballot_sync(~0u, tiles > many); some; some &= some - 1) {
            const int from = __ffs(some) - 1;
            const int n = __shfl_sync(~0u, tiles, from), at = __shfl_sync(~0u, place, from);
#pragma unroll 1
            for (int t = lane; t < n && at + t < p.capacity; t += 32) p.units[at + t] = {base + from, t * p.unit_keys};
        }
    }
    const bool is_void = __syncthreads_or(decreasing) || (members > 0 && p.schedule->forward_units == 0);
    if (threadIdx.x == 0) p.header->units = is_void ? 0 : min(sums.total, p.capacity);
}

}  // namespace jfa
