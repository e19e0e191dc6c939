// What the kernels of the split backward share.
#pragma once
#include <cstdint>
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "schedule.cuh"
#include "split.h"

namespace jfa {

constexpr int block_rows = JFA_SPLIT_ROWS;
constexpr int box_bytes = 64 * 128;  // 64 rows of a 64-column chunk: what one TMA load delivers

// Where a row's statistics stand: the four values that a thread needs of 16 rows are neighbours.
__device__ __forceinline__ int row_place(int row) { return row / 16 * 16 + row / 2 % 4 * 4 + row / 8 % 2 * 2 + row % 2; }

__device__ __forceinline__ float* statistics_of(const JfaSplitParams& p, int head, long long block) {
    return p.statistics + (static_cast<long long>(head) * p.blocks + block) * (JFA_SPLIT_STATISTICS_BYTES / 4);
}
// The number of a sequence's first block.
__device__ __forceinline__ int first_block(const JfaSplitParams& p, int o_row, int sequence) {
    return o_row / (block_rows >> p.packed_log2) + sequence;
}

// Whether no mask cuts anything of rows [row, row_end) x keys [key, key_end).
__device__ __forceinline__ bool all_visible(const JfaMask& mask, int shift, int row, int row_end, int key, int key_end) {
    return (mask.right < 0 || key_end - 1 <= static_cast<long long>(row) + shift + mask.right) &&
           (mask.left < 0 || key >= static_cast<long long>(row_end) - 1 + shift - mask.left);
}

// Four words of four lanes each, transposed: lane i of a quad gets word i of its four lanes.
__device__ __forceinline__ uint4 transpose_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int quad) {
    const auto swap = [](uint32_t& keep, uint32_t& give, bool upper, int lanes) {
        // The lower lane keeps `keep` and gives `give`, the upper one the other way round.
        const uint32_t got = __shfl_xor_sync(~0u, upper ? keep : give, lanes);
        (upper ? keep : give) = got;
    };
    swap(a, b, quad & 1, 1);
    swap(c, d, quad & 1, 1);
    swap(a, c, quad & 2, 2);
    swap(b, d, quad & 2, 2);
    return {a, b, c, d};
}

// Rows of an accumulator (wgmma.cuh), rounded, as 16-byte pieces: row `lane / 4` of the warp to `to[0]`, row `lane / 4 + 8` to
// `to[1]`; null: nowhere.
template <class T, int n>
__device__ __forceinline__ void store_rows(char* const (&to)[2], const float (&from)[n], float factor, int vectors) {
    const int quad = ptx::lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int x = 0; x < n / 4; x += 4) {
            const auto word = [&](int y) { return ptx::pack<T>(from[4 * y + 2 * half] * factor, from[4 * y + 2 * half + 1] * factor); };
            const uint4 piece = transpose_quad(word(x), word(x + 1), word(x + 2), word(x + 3), quad);
            if (to[half] && x + quad < vectors) *reinterpret_cast<uint4*>(to[half] + 16 * (x + quad)) = piece;
        }
    }
}

}  // namespace jfa
