// What the kernels of the unordered backward (backward_prepare.cu, backward_unordered.cu) agree on.
//
//   row block   q_tile query rows of one sequence and head. Its place in `partial`: sums of dq (q_tile x head_dim floats, in an order that
//               only backward_unordered.cu knows), then -lse * log2(e) of every row and -delta of every row
//   tile        JFA_BACKWARD_KEYS keys of one sequence and key/value head
#pragma once
#include "params.h"
#include "schedule.cuh"

#ifndef JFA_TYPE
#define JFA_TYPE bf16
#endif

namespace jfa {

constexpr int head_dim = 128;  // columns of the products; wider than the tensors' by zero fill
constexpr int q_tile = 80;     // a multiple of 16
constexpr int keys = JFA_BACKWARD_KEYS;
constexpr int sums_bytes = q_tile * head_dim * 4;
constexpr int block_bytes = JFA_UNORDERED_BLOCK_BYTES(q_tile, head_dim);
static_assert(q_tile % 16 == 0 && sums_bytes % 128 == 0 && block_bytes % 128 == 0);

// Row block 0 of a sequence (number `sequence` of the batch, rows from o_row on) in a head.
__device__ __forceinline__ int first_block(int o_row, int sequence) { return o_row / q_tile + sequence; }
__device__ __forceinline__ char* block_at(void* partial, int row_block) { return static_cast<char*>(partial) + static_cast<long long>(row_block) * block_bytes; }

// Where a row's two values stand: the four that a thread of the products needs of 16 rows are neighbours.
__device__ __forceinline__ int place_of(int row) { return row / 16 * 16 + row / 2 % 4 * 4 + row / 8 % 2 * 2 + row % 2; }

// Tiles that see a row of row block `block` of a sequence: [first, end).
struct TileRange {
    int first, end;
};
__device__ __forceinline__ TileRange tiles_of_block(const JfaMask& mask, int q_len, int kv_len, int block) {
    const int shift = diagonal_shift(mask, q_len, kv_len), row0 = block * q_tile, row1 = min(q_len, row0 + q_tile) - 1;
    const int first = first_key(mask, row0, shift), end = end_key(mask, row1, shift, kv_len);
    return first < end && row0 <= row1 ? TileRange{first / keys, (end + keys - 1) / keys} : TileRange{0, 0};
}

}  // namespace jfa
