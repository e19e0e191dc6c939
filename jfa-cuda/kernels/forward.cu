// Jagged attention forward, Hopper (sm_90a): o = softmax(scale * q k^T + mask) v and lse, one launch, persistent.
//
//   tile        a unit is 128 query rows of one sequence and head (two blocks of 64), walked over tiles of 128 keys (64 above
//               head_dim 128); a last tile of at most half the keys runs at half width
//   roles       warp 0 of the producer warpgroup: schedule and TMA; two consumer warpgroups, one block of 64 rows each
//   buffers     q: 2 stages per consumer (1 above 128); k and v: one ring of `slots` tiles in the order K0 K1 V0 K2 V1 ... V(n-1);
//               o: 16-row staging per consumer warp
//   barriers    q_full/q_empty per consumer and stage, kv_full/kv_empty per slot; the ring runs on across units, so the next
//               unit's loads and its first product overlap this unit's epilogue; no barrier joins the two consumers
//   odd blocks  a unit with one block gives it to the consumers in turn; the other one walks along the ring and is ahead
//   registers   consumers 232, producer 40 (their sum over the CTA is what the launch allocates: 384 x 168)
//   rate        docs/performance.md
#include "params.h"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "schedule.cuh"

#ifndef JFA_HEAD_DIM
#define JFA_HEAD_DIM 128
#endif
#ifndef JFA_TYPE
#define JFA_TYPE bf16
#endif
#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_forward_128_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;                     // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = (head_dim + 63) / 64;               // 64-column chunks of 128-byte rows in shared memory
constexpr int block_rows = 64;                             // query rows of a consumer
constexpr int kv_tile = head_dim <= 128 ? 128 : 64;        // keys of a tile
constexpr bool has_half = kv_tile == 128;                  // loads come in boxes of 64 rows
constexpr int q_stages = head_dim <= 128 ? 2 : 1;
constexpr int slots = head_dim <= 64 ? 8 : 4;
constexpr int consumers = 2;
constexpr int o_chunks = chunks < 2 ? chunks : 2;          // staged at a time

constexpr int q_chunk_bytes = block_rows * 128;
constexpr int kv_chunk_bytes = kv_tile * 128;
constexpr int q_bytes = chunks * q_chunk_bytes;
constexpr int slot_bytes = chunks * kv_chunk_bytes;
constexpr int box_bytes = 64 * 128;                        // what one TMA load delivers
constexpr int o_chunk_bytes = 16 * 128;

// One consumer's part of a unit, written by the producer beside the queries.
struct Block {
    int o_row;       // first row in o and lse
    int rows;        // rows that exist; 0: nothing to do but walk along the ring; -1: no more work
    int first;       // row within the sequence
    int shift;       // diagonal
    int kv_len;
    int head;        // first query head
    int tile0;       // first key tile of the unit
    int tiles;       // key tiles of the unit
    int begin, end;  // this block's share of them
    int pad[2];
};

struct SharedMemory {
    uint8_t q[consumers][q_stages][q_bytes];
    uint8_t kv[slots][slot_bytes];
    uint8_t o[consumers][4][o_chunks * o_chunk_bytes];
    Block block[consumers][q_stages];
    uint64_t q_full[consumers][q_stages], q_empty[consumers][q_stages];
    uint64_t kv_full[slots], kv_empty[slots];
};

// Place of a tile's keys and values in the ring, counted from the unit's first.
__device__ __forceinline__ uint32_t key_place(int j) { return j == 0 ? 0 : 2 * j - 1; }
__device__ __forceinline__ uint32_t value_place(int j, int tiles) { return j == tiles - 1 ? 2 * tiles - 1 : 2 * j + 2; }

// ---------------------------------------------------------------------------------------------------------------- producer
struct Item {
    JfaUnit unit;
    int head;
};

__device__ void produce(SharedMemory& shared, const JfaForwardParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v) {
    const int items = p.header->forward_units * p.heads;
    const int rows_per_block = block_rows >> p.packed_log2;
    const int ctas = gridDim.x, cta = blockIdx.x;
    const auto item_at = [&](int round) {
        const long long i = dealt_item(round, cta, ctas);
        return i < items ? static_cast<int>(i) : -1;
    };
    const auto unit_of = [&](int item) { return item < 0 ? JfaUnit{0, 0} : p.units[item / p.heads]; };
    const auto sequence_of = [&](int item, const JfaUnit& unit) { return item < 0 ? JfaSequence{} : p.sequences[unit.sequence]; };

    uint32_t place = 0, use = 0, lone = 0;
    // Two rounds ahead for units, one for sequences: their latency hides behind the loads of the current one.
    int item = item_at(0), next_item = item_at(1);
    JfaUnit unit = unit_of(item), next_unit = unit_of(next_item);
    JfaSequence s = sequence_of(item, unit);
    for (int round = 0; item >= 0; ++round) {
        const int after_item = item_at(round + 2);
        const JfaUnit after_unit = unit_of(after_item);
        const JfaSequence next_s = sequence_of(next_item, next_unit);

        // Key range of the unit and of each block.
        const int head = item % p.heads;
        const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
        const int unit_rows = min(consumers * rows_per_block, s.q_len - unit.first);
        const int lo = first_key(p.mask, unit.first, shift), hi = end_key(p.mask, unit.first + unit_rows - 1, shift, s.kv_len);
        const int tile0 = lo / kv_tile, tiles = hi > lo ? (hi - 1) / kv_tile - tile0 + 1 : 0;
        const bool both = unit_rows > rows_per_block;
        const int q_head = p.packed_log2 ? head * p.group : head;
        const int kv_head = p.packed_log2 ? head : head / p.group;

        const int stage = use % q_stages;
        for (int c = 0; c < consumers; ++c) {
            // A lone block goes to the consumers in turn.
            const int slice = both ? c : (c == static_cast<int>(lone & 1) ? 0 : 1);
            const int first = unit.first + slice * rows_per_block;
            const int rows = max(0, min(rows_per_block, s.q_len - first));
            ptx::mbarrier_wait(&shared.q_empty[c][stage], ((use / q_stages) & 1) ^ 1);
            Block& block = shared.block[c][stage];
            block.rows = rows;
            block.tiles = tiles;
            block.tile0 = tile0;
            block.begin = block.end = 0;
            if (rows > 0) {
                const int own_lo = first_key(p.mask, first, shift), own_hi = end_key(p.mask, first + rows - 1, shift, s.kv_len);
                if (own_hi > own_lo) {
                    block.begin = own_lo / kv_tile - tile0;
                    block.end = (own_hi - 1) / kv_tile + 1 - tile0;
                }
                block.o_row = s.o_row + first;
                block.first = first;
                block.shift = shift;
                block.kv_len = s.kv_len;
                block.head = q_head;
            }
            if (block.end > block.begin) {
                ptx::mbarrier_arrive_expect_tx(&shared.q_full[c][stage], q_bytes);
                const int row = s.q_row + first;
                for (int x = 0; x < chunks; ++x)
                    ptx::tma_load_rows(map_q, &shared.q_full[c][stage], shared.q[c][stage] + x * q_chunk_bytes, 64 * x, row, rows, rows_per_block, q_head);
            } else {
                ptx::mbarrier_arrive(&shared.q_full[c][stage]);
            }
        }
        ++use;
        lone += !both;

        // Keys and values, in the order in which the consumers need them.
        const auto load_tile = [&](const CUtensorMap* map, int j, bool whole) {
            const int slot = place % slots;
            ptx::mbarrier_wait(&shared.kv_empty[slot], ((place / slots) & 1) ^ 1);
            const int row = (tile0 + j) * kv_tile;
            const int boxes = whole || hi - row > kv_tile / 2 ? kv_tile / 64 : 1;
            ptx::mbarrier_arrive_expect_tx(&shared.kv_full[slot], boxes * chunks * box_bytes);
            for (int y = 0; y < boxes; ++y) {
                const int rows = max(0, min(64, hi - row - 64 * y));
                for (int x = 0; x < chunks; ++x)
                    ptx::tma_load_rows(map, &shared.kv_full[slot], shared.kv[slot] + x * kv_chunk_bytes + y * box_bytes, 64 * x,
                                       s.kv_row + row + 64 * y, rows, 64, kv_head);
            }
            ++place;
        };
        // Keys are always loaded at full width (zeros past the last visible one), values by halves.
        for (int j = 0; j < tiles; ++j) {
            if (j == 0) load_tile(map_k, 0, true);
            if (j + 1 < tiles) load_tile(map_k, j + 1, true);
            load_tile(map_v, j, !has_half);
        }

        item = next_item, unit = next_unit, s = next_s;
        next_item = after_item, next_unit = after_unit;
    }
    const int stage = use % q_stages;
    for (int c = 0; c < consumers; ++c) {
        ptx::mbarrier_wait(&shared.q_empty[c][stage], ((use / q_stages) & 1) ^ 1);
        shared.block[c][stage].rows = -1;
        shared.block[c][stage].begin = shared.block[c][stage].end = 0;
        ptx::mbarrier_arrive(&shared.q_full[c][stage]);
    }
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaForwardParams& p, const CUtensorMap* map_o, int me) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int rows_per_block = block_rows >> p.packed_log2;
    // This thread's two rows of the 64-row block: which query row and which head of the packed group.
    const int row_a = 16 * warp + lane / 4, row_b = row_a + 8;
    const int column = 2 * (lane % 4);
    const float scale_log2 = p.scale_log2;

    float s[kv_tile / 2];             // scores, then probabilities
    float o[head_dim / 2];
    uint32_t pr[kv_tile / 16][4];     // probabilities as A fragments
    float max_a = 0.0f, max_b = 0.0f, sum_a = 0.0f, sum_b = 0.0f; // running maximum (raw scores) and this thread's share of the sum

    // Ring and stage bookkeeping.
    uint32_t base = 0, use = 0;
    const auto wait_slot = [&](uint32_t place) { ptx::mbarrier_wait(&shared.kv_full[place % slots], (place / slots) & 1); };
    const auto release_slot = [&](uint32_t place) {
        if (lane == 0) ptx::mbarrier_arrive(&shared.kv_empty[place % slots]);
    };
    const auto release_q = [&](uint32_t which) {
        if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[me][which % q_stages]);
    };
    const auto walk = [&](uint32_t from, int tiles, int first, int last) {
        for (int j = first; j < last; ++j) {
            wait_slot(from + key_place(j));
            release_slot(from + key_place(j));
            wait_slot(from + value_place(j, tiles));
            release_slot(from + value_place(j, tiles));
        }
    };
    // Broadcast from lane 0, so that the compiler knows the block's fields to be uniform: products may then stand in branches.
    const auto fetch = [&](uint32_t which) {
        ptx::mbarrier_wait(&shared.q_full[me][which % q_stages], (which / q_stages) & 1);
        Block b = shared.block[me][which % q_stages];
        int* field = reinterpret_cast<int*>(&b);
#pragma unroll
        for (int i = 0; i < int(sizeof(Block) / sizeof(int)); ++i) field[i] = __shfl_sync(~0u, field[i], 0);
        return b;
    };
    // Whether a tile has work in its first half only.
    const auto is_half = [&](const Block& b, int j) {
        return has_half && end_key(p.mask, b.first + b.rows - 1, b.shift, b.kv_len) - (b.tile0 + j) * kv_tile <= kv_tile / 2;
    };

    // s = q k^T of a tile, always at full width (a product in a branch of its own would cost the overlap: the assembler
    // serializes all of them); columns past the half are zeros or masked, and nobody reads them.
    const auto scores = [&](uint32_t which, uint32_t place) {
        const uint64_t a = ptx::matrix_descriptor(ptx::smem_address(shared.q[me][which % q_stages]));
        const uint64_t b = ptx::matrix_descriptor(ptx::smem_address(shared.kv[place % slots]));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < head_dim / 16; ++k)
            ptx::Wgmma<kv_tile, T>::ss(s, ptx::advance(a, k / 4 * q_chunk_bytes + k % 4 * 32), ptx::advance(b, k / 4 * kv_chunk_bytes + k % 4 * 32), k != 0);
        ptx::wgmma_commit();
    };
    // o (+)= p v of tile j; keys past the half were never loaded, so they must not be multiplied.
    const auto accumulate = [&](uint32_t place, bool half, bool first) {
        const uint64_t b = ptx::matrix_descriptor(ptx::smem_address(shared.kv[place % slots]), kv_chunk_bytes);
        if (has_half && half) {
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kv_tile / 32; ++k) ptx::Wgmma<head_dim, T, 0, 1>::rs(o, pr[k], ptx::advance(b, k * 2048), k != 0 || !first);
            ptx::wgmma_commit();
        } else {
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kv_tile / 16; ++k) ptx::Wgmma<head_dim, T, 0, 1>::rs(o, pr[k], ptx::advance(b, k * 2048), k != 0 || !first);
            ptx::wgmma_commit();
        }
    };

    // Scores -> probabilities in place, and the factors by which earlier sums must shrink.
    const auto softmax = [&](const Block& b, int j, bool half, float& shrink_a, float& shrink_b) {
        const int key0 = (b.tile0 + j) * kv_tile;
        const int groups = has_half && half ? kv_tile / 16 : kv_tile / 8;  // of eight columns
        if (p.has_prescale) {
#pragma unroll
            for (int i = 0; i < kv_tile / 2; ++i) s[i] *= p.prescale;
        }
        // Only tiles that the diagonal, the window's edge or the sequence's end cuts are masked.
        const int last = b.first + b.rows - 1;
        const bool whole = key0 >= first_key(p.mask, last, b.shift) && key0 + 8 * groups <= end_key(p.mask, b.first, b.shift, b.kv_len);
        if (!whole) {
            const int i_a = b.first + (row_a & (rows_per_block - 1)), i_b = b.first + (row_b & (rows_per_block - 1));
            const int lo_a = first_key(p.mask, i_a, b.shift) - key0 - column, hi_a = end_key(p.mask, i_a, b.shift, b.kv_len) - key0 - column;
            const int lo_b = first_key(p.mask, i_b, b.shift) - key0 - column, hi_b = end_key(p.mask, i_b, b.shift, b.kv_len) - key0 - column;
#pragma unroll
            for (int g = 0; g < kv_tile / 8; ++g) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int c = 8 * g + e;
                    s[4 * g + e] = c >= lo_a && c < hi_a ? s[4 * g + e] : -INFINITY;
                    s[4 * g + 2 + e] = c >= lo_b && c < hi_b ? s[4 * g + 2 + e] : -INFINITY;
                }
            }
        }

        // Row maxima over the columns of this tile, then over the quad that shares the row.
        float top_a = max_a, top_b = max_b;
        const auto maxima = [&](int from, int to) {
#pragma unroll
            for (int g = from; g < to; ++g) {
                top_a = fmaxf(top_a, fmaxf(s[4 * g], s[4 * g + 1]));
                top_b = fmaxf(top_b, fmaxf(s[4 * g + 2], s[4 * g + 3]));
            }
        };
        maxima(0, kv_tile / 16);
        if (!(has_half && half)) maxima(kv_tile / 16, kv_tile / 8);
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            top_a = fmaxf(top_a, __shfl_xor_sync(~0u, top_a, d));
            top_b = fmaxf(top_b, __shfl_xor_sync(~0u, top_b, d));
        }
        // The reference maximum moves only when it would be exceeded by more than 2^8: o and sum then rarely need rescaling,
        // and the result is the same (FlashAttention-4's lazy rescaling). From -inf every finite value is a move.
        const bool move_a = (top_a - max_a) * scale_log2 > 8.0f, move_b = (top_b - max_b) * scale_log2 > 8.0f;
        shrink_a = move_a ? ptx::exp2_approx((max_a - top_a) * scale_log2) : 1.0f;
        shrink_b = move_b ? ptx::exp2_approx((max_b - top_b) * scale_log2) : 1.0f;
        max_a = move_a ? top_a : max_a;
        max_b = move_b ? top_b : max_b;
        // A row that has seen no key keeps maximum -inf; subtracting 0 instead keeps exp2(-inf) = 0 free of NaN.
        const float zero_a = max_a == -INFINITY ? 0.0f : max_a * scale_log2, zero_b = max_b == -INFINITY ? 0.0f : max_b * scale_log2;
        sum_a *= shrink_a;
        sum_b *= shrink_b;
        const auto exponentials = [&](int from, int to) {
#pragma unroll
            for (int g = from; g < to; ++g) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[4 * g + e] = ptx::exp2_approx(fmaf(s[4 * g + e], scale_log2, -zero_a));
                    s[4 * g + 2 + e] = ptx::exp2_approx(fmaf(s[4 * g + 2 + e], scale_log2, -zero_b));
                    sum_a += s[4 * g + e];
                    sum_b += s[4 * g + 2 + e];
                }
            }
        };
        exponentials(0, kv_tile / 16);
        if (!(has_half && half)) exponentials(kv_tile / 16, kv_tile / 8);
    };
    const auto to_fragments = [&](bool half) {
        const auto convert = [&](int from, int to) {
#pragma unroll
            for (int k = from; k < to; ++k)
#pragma unroll
                for (int r = 0; r < 4; ++r) pr[k][r] = ptx::pack<T>(s[8 * k + 2 * r], s[8 * k + 2 * r + 1]);
        };
        convert(0, kv_tile / 32);
        if (!(has_half && half)) convert(kv_tile / 32, kv_tile / 16);
    };

    // Divides by the sum and writes o (through shared memory, 16 rows a warp) and lse.
    const auto store_output = [&](const Block& b) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            sum_a += __shfl_xor_sync(~0u, sum_a, d);
            sum_b += __shfl_xor_sync(~0u, sum_b, d);
        }
        // A sum of zero means no visible key: o is exactly 0 and lse -inf, whatever v holds.
        const bool blind_a = sum_a == 0.0f, blind_b = sum_b == 0.0f;
        const float inverse_a = 1.0f / sum_a, inverse_b = 1.0f / sum_b;
        const int heads_log2 = p.packed_log2;
        if (lane % 4 == 0) {
            const auto store_lse = [&](int row, float top, float sum, bool blind) {
                const int i = row & (rows_per_block - 1);
                if (i < b.rows && b.o_row + i < p.o_rows) {
                    const int head = b.head + (row >> (6 - heads_log2));
                    p.lse[head * p.lse_head_stride + b.o_row + i] =
                        blind ? -INFINITY : fmaf(top, scale_log2, ptx::log2_approx(sum)) * 0.693147180559945309f;
                }
            };
            store_lse(row_a, max_a, sum_a, blind_a);
            store_lse(row_b, max_b, sum_b, blind_b);
        }
        uint8_t* staging = shared.o[me][warp];
        const uint32_t address = ptx::smem_address(staging);
        const int matrix_row = lane % 16;  // row of the 16 whose address this lane gives to stmatrix
#pragma unroll
        for (int x0 = 0; x0 < chunks; x0 += o_chunks) {
            if (lane == 0) ptx::bulk_wait_read<0>();  // the previous store has left the staging buffer
            __syncwarp();
#pragma unroll
            for (int g = x0 * 8; g < (x0 + o_chunks) * 8; g += 2) {
                if (4 * g >= head_dim / 2) break;
                uint32_t r[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int i = 4 * (g + h);
                    r[2 * h] = ptx::pack<T>(blind_a ? 0.0f : o[i] * inverse_a, blind_a ? 0.0f : o[i + 1] * inverse_a);
                    r[2 * h + 1] = ptx::pack<T>(blind_b ? 0.0f : o[i + 2] * inverse_b, blind_b ? 0.0f : o[i + 3] * inverse_b);
                }
                const int group = g % 8 + lane / 16;  // 16-byte column of the chunk
                ptx::stmatrix_x4(address + (g / 8 - x0) * o_chunk_bytes + matrix_row * 128 + ((group ^ (matrix_row % 8)) << 4), r[0], r[1], r[2], r[3]);
            }
            ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0) {
                // The warp's 16 rows: box_rows rows of one or more heads.
                const int box_rows = min(rows_per_block, 16);
                const int i = (16 * warp) & (rows_per_block - 1);
                const int rows = min(box_rows, b.rows - i);
                if (rows > 0) {
                    const int head = b.head + ((16 * warp) >> (6 - heads_log2));
#pragma unroll
                    for (int x = 0; x < o_chunks; ++x)
                        ptx::tma_store_rows(map_o, staging + x * o_chunk_bytes, 64 * (x0 + x), b.o_row + i, rows, box_rows, head);
                }
                ptx::bulk_commit();
            }
        }
    };

    // Passes over units in which this consumer has no product to do: walks their slots, writes zeros for rows without keys.
    // `b` becomes the next block with work, or the end mark.
    const auto skip_idle = [&](Block& b) {
        while (b.rows >= 0 && b.begin == b.end) {
            release_q(use);
            if (b.rows > 0) {
                sum_a = sum_b = 0.0f;
                store_output(b);
            }
            walk(base, b.tiles, 0, b.tiles);
            base += 2 * b.tiles;
            b = fetch(++use);
        }
    };

    Block b = fetch(0);
    skip_idle(b);
    if (b.rows < 0) {
        if (lane == 0) ptx::bulk_wait<0>();
        return;
    }
    walk(base, b.tiles, 0, b.begin);
    wait_slot(base + key_place(b.begin));
    scores(use, base + key_place(b.begin));
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(s);
    release_slot(base + key_place(b.begin));
    for (;;) {
        max_a = max_b = -INFINITY;
        sum_a = sum_b = 0.0f;

        // Tile by tile; the next tile's scores and this tile's p v run while the next softmax waits or works.
        float shrink_a, shrink_b;
        int j = b.begin;
        softmax(b, j, is_half(b, j), shrink_a, shrink_b);
        to_fragments(is_half(b, j));
        for (; j + 1 < b.end; ++j) {
            const uint32_t keys = base + key_place(j + 1), values = base + value_place(j, b.tiles);
            wait_slot(keys);
            scores(use, keys);
            wait_slot(values);
            accumulate(values, false, j == b.begin);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(s);
            release_slot(keys);
            softmax(b, j + 1, is_half(b, j + 1), shrink_a, shrink_b);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(o);
            release_slot(values);
            if (__any_sync(~0u, shrink_a != 1.0f || shrink_b != 1.0f)) {
#pragma unroll
                for (int i = 0; i < head_dim / 2; i += 4) {
                    o[i] *= shrink_a, o[i + 1] *= shrink_a;
                    o[i + 2] *= shrink_b, o[i + 3] *= shrink_b;
                }
            }
            to_fragments(is_half(b, j + 1));
        }
        release_q(use);
        const uint32_t values = base + value_place(j, b.tiles);
        const bool half = is_half(b, j);
        wait_slot(values);

        // The next block's first product goes to the tensor cores before this block's epilogue; where slots or idle units must
        // be walked over first, this block is finished before. (Both products of a path stand in one straight line: otherwise
        // the assembler serializes them.)
        Block next = b;
        const bool trailing = b.end < b.tiles;
        if (!trailing) {
            next = fetch(++use);
            base += 2 * b.tiles;
        }
        if (trailing || next.begin == next.end || next.begin > 0) {
            accumulate(values, half, j == b.begin);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(o);
            release_slot(values);
            store_output(b);
            if (trailing) {
                walk(base, b.tiles, b.end, b.tiles);
                base += 2 * b.tiles;
                next = fetch(++use);
            }
            skip_idle(next);
            if (next.rows < 0) break;
            walk(base, next.tiles, 0, next.begin);
            wait_slot(base + key_place(next.begin));
            scores(use, base + key_place(next.begin));
        } else {
            accumulate(values, half, j == b.begin);
            wait_slot(base + key_place(0));
            scores(use, base + key_place(0));
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(o);
            release_slot(values);
            store_output(b);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
        release_slot(base + key_place(next.begin));
        b = next;
    }
    if (lane == 0) ptx::bulk_wait<0>();
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);

extern "C" __global__ void __launch_bounds__(384, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_o, const __grid_constant__ JfaForwardParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        for (int c = 0; c < consumers; ++c) {
            for (int i = 0; i < q_stages; ++i) {
                ptx::mbarrier_init(&shared.q_full[c][i], 1);
                ptx::mbarrier_init(&shared.q_empty[c][i], 4);
            }
        }
        for (int i = 0; i < slots; ++i) {
            ptx::mbarrier_init(&shared.kv_full[i], 1);
            ptx::mbarrier_init(&shared.kv_empty[i], 4 * consumers);
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_o);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<40>();
        if (threadIdx.x == 0) produce(shared, p, &map_q, &map_k, &map_v);
    } else {
        ptx::registers_acquire<232>();
        consume(shared, p, &map_o, warpgroup - 1);
    }
}

}  // namespace jfa
