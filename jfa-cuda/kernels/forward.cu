// Jagged attention forward, Hopper (sm_90a): o = softmax(scale * q k^T + mask) v and lse, one launch, persistent.
//
//   tile        a unit is 128 query rows of one sequence and head (two blocks of 64), walked over tiles of 128 keys (64 above
//               head_dim 128); a last tile of at most half the keys runs at half width. With three consumers
//               (head_dim 96 and 128): 192 rows over tiles of 64 keys, cut anew out of the schedule's units of 128
//   roles       warp 0: keys and values; warp 1: items and queries (warps 2 and 3 idle); two or three consumer warpgroups, one block
//               of 64 rows each. Long loops are bound by what a warp can issue: a third one per scheduler pays
//   buffers     q: 2 stages per consumer (1 above 128 and of three); k and v: one ring of `slots` tiles in the order K0 K1 V0 K2 V1
//               ... V(n-1); o: 16-row staging per consumer warp
//   softmax     in place of the scores, beside the product with the tile before, which is still in flight
//   barriers    q_full/q_empty per consumer and stage, kv_full/kv_empty per slot; the ring runs on across units, so the next
//               unit's loads and (of two consumers) its first product overlap this unit's epilogue; no barrier joins the consumers
//   odd blocks  blocks go to the consumers in turn; one that gets none of a unit walks along the ring and is ahead
//   registers   producers 56, consumers 224, of three 152 (their sum over the CTA is what the launch allocates: 384 x 168, 512 x 128)
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
#ifndef JFA_SUBTRACT
#define JFA_SUBTRACT 0
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;                     // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = (head_dim + 63) / 64;               // 64-column chunks of 128-byte rows in shared memory
constexpr int block_rows = 64;                             // query rows of a consumer
constexpr bool subtract = JFA_SUBTRACT;                    // variant g1: see `surplus` below
constexpr bool three = head_dim > 64 && head_dim <= 128 && !subtract;  // consumers; other widths lack the registers or the gain
constexpr int kv_tile = head_dim <= 128 && !three ? 128 : 64; // keys of a tile
constexpr bool has_half = kv_tile == 128;                  // loads come in boxes of 64 rows
constexpr int q_stages = head_dim <= 128 && !three ? 2 : 1;
constexpr int slots = head_dim <= 64 || three ? 8 : 4;
constexpr int consumers = three ? 3 : 2;
constexpr int list_blocks = 2;                             // blocks in a unit of the schedule's list
constexpr bool early = q_stages == 2;                      // next product before this epilogue: two blocks' state in registers
constexpr bool in_place = !subtract;                       // probabilities take the place of scores
constexpr int o_chunks = chunks < 2 ? chunks : 2;          // staged at a time

constexpr int q_chunk_bytes = block_rows * 128;
constexpr int kv_chunk_bytes = kv_tile * 128;
constexpr int q_bytes = chunks * q_chunk_bytes;
constexpr int slot_bytes = chunks * kv_chunk_bytes;
constexpr int box_bytes = 64 * 128;                        // what one TMA load delivers
constexpr int o_chunk_bytes = 16 * 128;

// One consumer's part of a unit, written by the producer beside the queries.
struct alignas(16) Block {
    int o_row;       // first row in o and lse
    int rows;        // rows that exist; 0: nothing to do but walk along the ring; -1: no more work
    int first;       // row within the sequence
    int shift;       // diagonal
    int kv_len;
    int head;        // first query head
    int tile0;       // first key tile of the unit
    int tiles;       // key tiles of the unit
    int begin, end;  // this block's share of them
    int whole_begin, whole_end;  // of these no mask cuts anything
    int half;        // 1: the last tile of its share has work in its first half only
    int places;      // slots of the ring that the unit takes: two a tile, or one (compact)
    int pad[2];
};

// What the key/value producer needs of a unit.
struct Job {
    int tile0, tiles;  // tiles < 0: no more work
    int places;
    int hi;            // one past the last key that any row sees
    int kv_row, kv_head;
};
constexpr int jobs = 4;

struct SharedMemory {
    uint8_t q[consumers][q_stages][q_bytes];
    uint8_t kv[slots][slot_bytes];
    uint8_t o[consumers][4][o_chunks * o_chunk_bytes];
    Block block[consumers][q_stages];
    Job job[jobs];
    uint64_t q_full[consumers][q_stages], q_empty[consumers][q_stages];
    uint64_t kv_full[slots], kv_empty[slots];
    uint64_t job_full[jobs], job_empty[jobs];
};

// Place of a tile's keys and values in the ring, counted from the unit's first.
__device__ __forceinline__ uint32_t key_place(int j) { return j == 0 ? 0 : 2 * j - 1; }
__device__ __forceinline__ uint32_t value_place(int j, int tiles) { return j == tiles - 1 ? 2 * tiles - 1 : 2 * j + 2; }

// ---------------------------------------------------------------------------------------------------------------- producers
// Draws items, tells the consumers and the key/value producer about them, and loads queries. A warp of its own: queries are
// asked for as soon as a stage is free, not when the keys before them have been loaded.
__device__ void produce_queries(SharedMemory& shared, const JfaForwardParams& p, const CUtensorMap* map_q) {
    const int items = p.header->forward_units * p.heads;
    const int rows_per_block = block_rows >> p.packed_log2;
    const auto draw = [&] { return drawn_item(p.queue, p.queue_key, items); };
    const auto unit_of = [&](int item) { return item < 0 ? JfaUnit{0, 0} : p.units[item / p.heads]; };
    const auto sequence_of = [&](int item, const JfaUnit& unit) { return item < 0 ? JfaSequence{} : p.sequences[unit.sequence]; };

    uint32_t use = 0;
    int turn = 0;  // consumer of the next block
    // Two rounds ahead for units, one for sequences: their latency hides behind the wait for a stage. The first item is dealt.
    int item = static_cast<int>(blockIdx.x) < items ? static_cast<int>(blockIdx.x) : -1;
    JfaUnit unit = unit_of(item);
    open_queue(p.queue, p.queue_key);
    int next_item = draw();
    JfaUnit next_unit = unit_of(next_item);
    JfaSequence s = sequence_of(item, unit);
    while (item >= 0) {
        const int head = item % p.heads;
        if (consumers != list_blocks) {
            // The i-th unit of a sequence in the list becomes the i-th of ours, in the same order, or nothing: ours are fewer.
            const int listed = list_blocks * rows_per_block, rows = consumers * rows_per_block, n = (s.q_len + rows - 1) / rows;
            const bool descending = p.mask.right >= 0;
            const int at = unit.first / listed, i = descending ? (s.q_len + listed - 1) / listed - 1 - at : at;
            if (i >= n) {
                const int after_item = draw();
                item = next_item, unit = next_unit, s = sequence_of(next_item, next_unit);
                next_item = after_item, next_unit = unit_of(after_item);
                continue;
            }
            unit.first = (descending ? n - 1 - i : i) * rows;
        }
        // Key range of the unit.
        const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
        const int unit_rows = min(consumers * rows_per_block, s.q_len - unit.first);
        const int lo = first_key(p.mask, unit.first, shift), hi = end_key(p.mask, unit.first + unit_rows - 1, shift, s.kv_len);
        const int tile0 = lo / kv_tile, tiles = hi > lo ? (hi - 1) / kv_tile - tile0 + 1 : 0;
        int q_head = p.group;
        asm volatile("" : "+r"(q_head));  // else the assembler keeps the factor of `head` from item to item, and spills it
        q_head = p.packed_log2 ? head * q_head : head;
        // At most half a tile of keys: keys and values share a slot (below), so that the ring holds four such units.
        const int places = has_half && tiles == 1 && hi - tile0 * kv_tile <= kv_tile / 2 ? 1 : 2 * tiles;

        // Keys and values first: they are the longer wait.
        const int place = use % jobs;
        ptx::mbarrier_wait(&shared.job_empty[place], ((use / jobs) & 1) ^ 1);
        shared.job[place] = {tile0, tiles, places, hi, s.kv_row, p.packed_log2 ? head : head / p.group};
        ptx::mbarrier_arrive(&shared.job_full[place]);

        const int after_item = draw();
        const JfaSequence next_s = sequence_of(next_item, next_unit);

        const int stage = use % q_stages;
#pragma unroll (three ? 1 : consumers)
        for (int c = 0; c < consumers; ++c) {
            const int slice = c >= turn ? c - turn : c - turn + consumers;
            const int first = unit.first + slice * rows_per_block;
            const int rows = max(0, min(rows_per_block, s.q_len - first));
            ptx::mbarrier_wait(&shared.q_empty[c][stage], ((use / q_stages) & 1) ^ 1);
            Block block = {};
            block.rows = rows;
            block.tiles = tiles;
            block.tile0 = tile0;
            block.places = places;
            if (rows > 0) {
                const int own_lo = first_key(p.mask, first, shift), own_hi = end_key(p.mask, first + rows - 1, shift, s.kv_len);
                if (own_hi > own_lo) {
                    const int end = (own_hi - 1) / kv_tile + 1, rest = own_hi - (end - 1) * kv_tile;
                    const bool half = has_half && rest <= kv_tile / 2;
                    const int every_hi = end_key(p.mask, first, shift, s.kv_len);
                    block.begin = own_lo / kv_tile - tile0;
                    block.end = end - tile0;
                    block.half = half;
                    block.whole_begin = (first_key(p.mask, first + rows - 1, shift) + kv_tile - 1) / kv_tile - tile0;
                    block.whole_end = half && every_hi == own_hi && rest == kv_tile / 2 ? end - tile0 : every_hi / kv_tile - tile0;
                }
                block.o_row = s.o_row + first;
                block.first = first;
                block.shift = shift;
                block.kv_len = s.kv_len;
                block.head = q_head;
            }
            shared.block[c][stage] = block;
            if (block.end > block.begin) {
                ptx::mbarrier_arrive_expect_tx(&shared.q_full[c][stage], q_bytes);
                for (int x = 0; x < chunks; ++x)
                    ptx::tma_load_rows(map_q, &shared.q_full[c][stage], shared.q[c][stage] + x * q_chunk_bytes, 64 * x, s.q_row + first, rows, q_head);
            } else {
                ptx::mbarrier_arrive(&shared.q_full[c][stage]);
            }
        }
        turn = (turn + (unit_rows + rows_per_block - 1) / rows_per_block) % consumers;
        ++use;

        item = next_item, unit = next_unit, s = next_s;
        next_item = after_item, next_unit = unit_of(after_item);
    }
    ptx::mbarrier_wait(&shared.job_empty[use % jobs], ((use / jobs) & 1) ^ 1);
    shared.job[use % jobs] = {0, -1, 0, 0, 0, 0};
    ptx::mbarrier_arrive(&shared.job_full[use % jobs]);
    const int stage = use % q_stages;
    for (int c = 0; c < consumers; ++c) {
        ptx::mbarrier_wait(&shared.q_empty[c][stage], ((use / q_stages) & 1) ^ 1);
        Block end = {};
        end.rows = -1;
        shared.block[c][stage] = end;
        ptx::mbarrier_arrive(&shared.q_full[c][stage]);
    }
}

// Keys and values, in the order in which the consumers need them: the ring runs on from unit to unit.
__device__ void produce_keys_and_values(SharedMemory& shared, const CUtensorMap* map_k, const CUtensorMap* map_v) {
    uint32_t place = 0;
    for (uint32_t use = 0;; ++use) {
        ptx::mbarrier_wait(&shared.job_full[use % jobs], (use / jobs) & 1);
        const Job job = shared.job[use % jobs];
        ptx::mbarrier_arrive(&shared.job_empty[use % jobs]);
        if (job.tiles < 0) break;
        // Keys are always loaded at full width (zeros past the last visible one), values by halves.
        const auto load_tile = [&](const CUtensorMap* map, int j, bool whole) {
            const int slot = place % slots;
            ptx::mbarrier_wait(&shared.kv_empty[slot], ((place / slots) & 1) ^ 1);
            const int row = (job.tile0 + j) * kv_tile;
            const int boxes = whole || job.hi - row > kv_tile / 2 ? kv_tile / 64 : 1;
            ptx::mbarrier_arrive_expect_tx(&shared.kv_full[slot], boxes * chunks * box_bytes);
            for (int y = 0; y < boxes; ++y) {
                const int rows = max(0, min(64, job.hi - row - 64 * y));
                for (int x = 0; x < chunks; ++x)
                    ptx::tma_load_rows(map, &shared.kv_full[slot], shared.kv[slot] + x * kv_chunk_bytes + y * box_bytes, 64 * x,
                                       job.kv_row + row + 64 * y, rows, job.kv_head);
            }
            ++place;
        };
        if (job.places == 1) {
            // Compact: of each chunk of the slot, keys fill the first 64 rows and values the other 64.
            const int slot = place % slots, row = job.tile0 * kv_tile, rows = job.hi - row;
            ptx::mbarrier_wait(&shared.kv_empty[slot], ((place / slots) & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(&shared.kv_full[slot], 2 * chunks * box_bytes);
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map_k, &shared.kv_full[slot], shared.kv[slot] + x * kv_chunk_bytes, 64 * x, job.kv_row + row, rows, job.kv_head);
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map_v, &shared.kv_full[slot], shared.kv[slot] + x * kv_chunk_bytes + box_bytes, 64 * x, job.kv_row + row, rows,
                                   job.kv_head);
            ++place;
            continue;
        }
        for (int j = 0; j < job.tiles; ++j) {
            if (j == 0) load_tile(map_k, 0, true);
            if (j + 1 < job.tiles) load_tile(map_k, j + 1, true);
            load_tile(map_v, j, !has_half);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaForwardParams& p, const CUtensorMap* map_o, int me) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int rows_per_block = block_rows >> p.packed_log2;
    // This thread's two rows of the 64-row block: which query row and which head of the packed group.
    const int row_a = 16 * warp + lane / 4, row_b = row_a + 8;
    const int i_a = row_a & (rows_per_block - 1), i_b = row_b & (rows_per_block - 1);
    const int64_t lse_a = (row_a >> (6 - p.packed_log2)) * p.lse_head_stride + i_a, lse_b = (row_b >> (6 - p.packed_log2)) * p.lse_head_stride + i_b;
    const int column = 2 * (lane % 4);
    constexpr float ln2 = 0.693147180559945309f;
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
        __syncwarp();  // all lanes have read the block's description
        if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[me][which % q_stages]);
    };
    const auto walk = [&](uint32_t from, const Block& b, int first, int last) {
        for (int j = first; j < last; ++j) {
            wait_slot(from + key_place(j));
            release_slot(from + key_place(j));
            if (b.places == 1) continue;
            wait_slot(from + value_place(j, b.tiles));
            release_slot(from + value_place(j, b.tiles));
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
    // From lane 0, so that descriptors are computed on the uniform datapath.
    const uint32_t q_address = __shfl_sync(~0u, ptx::smem_address(shared.q[me][0]), 0), kv_address = __shfl_sync(~0u, ptx::smem_address(shared.kv[0]), 0);
    const uint64_t q_descriptor = ptx::matrix_descriptor(q_address), k_descriptor = ptx::matrix_descriptor(kv_address),
                   v_descriptor = ptx::matrix_descriptor(kv_address, kv_chunk_bytes);
    // s = q k^T of a tile, always at full width (a product in a branch of its own would cost the overlap: the assembler
    // serializes all of them); columns past the half are zeros or masked, and nobody reads them.
    const auto scores = [&](uint32_t which, uint32_t place) {
        uint64_t a = ptx::advance(q_descriptor, which % q_stages * q_bytes);
        const uint64_t b = ptx::advance(k_descriptor, place % slots * slot_bytes);
        if (q_stages == 1) asm volatile("" : "+l"(a));  // else sixteen loop-invariant descriptors are kept, and spilled
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < head_dim / 16; ++k)
            ptx::Wgmma<kv_tile, T>::ss(s, ptx::advance(a, k / 4 * q_chunk_bytes + k % 4 * 32), ptx::advance(b, k / 4 * kv_chunk_bytes + k % 4 * 32), k != 0);
        ptx::wgmma_commit();
    };
    // o (+)= p v of tile j; keys past the half were never loaded, so they must not be multiplied.
    const auto accumulate = [&](uint32_t place, bool half, bool compact, bool first) {
        const uint64_t b = ptx::advance(v_descriptor, place % slots * slot_bytes + (compact ? box_bytes : 0));
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

    const auto prescale = [&] {
        if (p.has_prescale) {
#pragma unroll
            for (int i = 0; i < kv_tile / 2; ++i) s[i] *= p.prescale;
        }
    };
    const auto is_cut = [&](const Block& b, int j) { return j < b.whole_begin || j >= b.whole_end; };
    // One bit for each of this thread's columns of a row that are keys before `key`: pairs of neighbours, eight columns apart.
    const auto bits_before = [](int key) {
        const int n = 2 * (key >> 3) + min(key & 7, 2);
        return key <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
    };
    // Masks what the diagonal, the window's edge or the sequence's end cuts off tile j.
    const auto mask = [&](const Block& b, int j) {
        if (is_cut(b, j)) {
            const int key0 = (b.tile0 + j) * kv_tile + column;
            const auto visible = [&](int i) {
                return bits_before(end_key(p.mask, i, b.shift, b.kv_len) - key0) & ~bits_before(first_key(p.mask, i, b.shift) - key0);
            };
            const uint32_t bits_a = visible(b.first + i_a), bits_b = visible(b.first + i_b);
#pragma unroll
            for (int g = 0; g < kv_tile / 8; ++g) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[4 * g + e] = bits_a >> (2 * g + e) & 1 ? s[4 * g + e] : -INFINITY;
                    s[4 * g + 2 + e] = bits_b >> (2 * g + e) & 1 ? s[4 * g + 2 + e] : -INFINITY;
                }
            }
        }
    };
    // This thread's maxima of the tile's two rows. Two chains a row: a single one would wait for each maximum.
    const auto maxima = [&](int from, int to, float& top_a, float& top_b) {
        float other_a = s[4 * from], other_b = s[4 * from + 2];
#pragma unroll
        for (int g = from; g < to; g += 2) {
            top_a = fmaxf(top_a, fmaxf(s[4 * g], s[4 * g + 1]));
            top_b = fmaxf(top_b, fmaxf(s[4 * g + 2], s[4 * g + 3]));
            other_a = fmaxf(other_a, fmaxf(s[4 * g + 4], s[4 * g + 5]));
            other_b = fmaxf(other_b, fmaxf(s[4 * g + 6], s[4 * g + 7]));
        }
        top_a = fmaxf(top_a, other_a);
        top_b = fmaxf(top_b, other_b);
    };
    // The reference maximum moves only when it would be exceeded by more than 2^8: o and the sum then rarely need rescaling, and
    // the result is the same (FlashAttention-4's lazy rescaling). From -inf every finite value is a move.
    const auto moves = [&](float top, float reference) { return (top - reference) * scale_log2 > 8.0f; };
    // Moves the maxima of this warp's rows where they must; returns the factors by which earlier sums shrink.
    const auto move_maxima = [&](float top_a, float top_b, float& shrink_a, float& shrink_b) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            top_a = fmaxf(top_a, __shfl_xor_sync(~0u, top_a, d));
            top_b = fmaxf(top_b, __shfl_xor_sync(~0u, top_b, d));
        }
        const bool move_a = moves(top_a, max_a), move_b = moves(top_b, max_b);
        shrink_a = move_a ? ptx::exp2_approx((max_a - top_a) * scale_log2) : 1.0f;
        shrink_b = move_b ? ptx::exp2_approx((max_b - top_b) * scale_log2) : 1.0f;
        max_a = move_a ? top_a : max_a;
        max_b = move_b ? top_b : max_b;
    };
    // Columns 8 * from .. 8 * to of the scores -> probabilities, summed in fp32 and rounded to A fragments, which must be free: no
    // product reads them.
    const auto exponentials = [&](int from, int to, float& tile_a, float& tile_b) {
        // A row that has seen no key keeps maximum -inf; subtracting 0 instead keeps exp2(-inf) = 0 free of NaN.
        const float zero_a = max_a == -INFINITY ? 0.0f : -max_a * scale_log2, zero_b = max_b == -INFINITY ? 0.0f : -max_b * scale_log2;
#pragma unroll
        for (int k = from / 2; k < to / 2; ++k) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float* x = s + 8 * k + 4 * h;
                const float a0 = ptx::exp2_approx(fmaf(x[0], scale_log2, zero_a)), a1 = ptx::exp2_approx(fmaf(x[1], scale_log2, zero_a));
                const float b0 = ptx::exp2_approx(fmaf(x[2], scale_log2, zero_b)), b1 = ptx::exp2_approx(fmaf(x[3], scale_log2, zero_b));
                tile_a += a0 + a1;
                tile_b += b0 + b1;
                pr[k][2 * h] = ptx::pack<T>(a0, a1);
                pr[k][2 * h + 1] = ptx::pack<T>(b0, b1);
            }
        }
    };
    // The same in place of the scores, in three steps: powers, their sums, their fragments. A sum beside its power would wait for it.
    const auto powers = [&](int from, int to) {
        const float zero_a = max_a == -INFINITY ? 0.0f : -max_a * scale_log2, zero_b = max_b == -INFINITY ? 0.0f : -max_b * scale_log2;
#pragma unroll
        for (int i = 4 * from; i < 4 * to; i += 4) {
            s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, zero_a)), s[i + 1] = ptx::exp2_approx(fmaf(s[i + 1], scale_log2, zero_a));
            s[i + 2] = ptx::exp2_approx(fmaf(s[i + 2], scale_log2, zero_b)), s[i + 3] = ptx::exp2_approx(fmaf(s[i + 3], scale_log2, zero_b));
        }
    };
    const auto sums = [&](int from, int to, float& tile_a, float& tile_b) {
        float other_a = 0.0f, other_b = 0.0f;
#pragma unroll
        for (int i = 4 * from; i < 4 * to; i += 4) {
            tile_a += s[i], other_a += s[i + 1];
            tile_b += s[i + 2], other_b += s[i + 3];
        }
        tile_a += other_a, tile_b += other_b;
    };
    const auto fragments = [&](int from, int to) {
#pragma unroll
        for (int g = from; g < to; ++g) {
            pr[g / 2][g % 2 * 2] = ptx::pack<T>(s[4 * g], s[4 * g + 1]);
            pr[g / 2][g % 2 * 2 + 1] = ptx::pack<T>(s[4 * g + 2], s[4 * g + 3]);
        }
    };
    constexpr int all_groups = kv_tile / 8, half_groups = has_half ? all_groups / 2 : all_groups;  // of eight columns

    // Generation 1 of the kernels: the last tile of a sequence is not masked. Keys past the end are zeros, so their scores are 0, their
    // values add nothing to o, and each adds exp(0 - maximum) to the sum, which is taken off again. Exact algebra; in floating point
    // the sum loses log2(surplus / rest) bits, so the rest of every row must be at least 1/256 of its surplus (an error of 2^-16),
    // or the tile is masked after all. Takes the surplus off and returns whether that was safe for every row of the warp.
    const auto surplus_removed = [&](const Block& b, int j, bool half, float& tile_a, float& tile_b) {
        const int end = b.kv_len - (b.tile0 + j) * kv_tile, width = half ? kv_tile / 2 : kv_tile;
        const uint32_t in_play = half ? (1u << half_groups * 2) - 1 : static_cast<uint32_t>((1ull << all_groups * 2) - 1);
        const float mine = static_cast<float>(__popc(in_play & ~bits_before(end - column))), all = static_cast<float>(width - end);
        const float one_a = ptx::exp2_approx(-max_a * scale_log2), one_b = ptx::exp2_approx(-max_b * scale_log2);
        tile_a = fmaf(-mine, one_a, tile_a);
        tile_b = fmaf(-mine, one_b, tile_b);
        float rest_a = tile_a, rest_b = tile_b;
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            rest_a += __shfl_xor_sync(~0u, rest_a, d);
            rest_b += __shfl_xor_sync(~0u, rest_b, d);
        }
        return !__any_sync(~0u, all * one_a > 256.0f * rest_a || all * one_b > 256.0f * rest_b);
    };
    const bool may_subtract = subtract && p.mask.left < 0 && p.mask.right < 0;

    // Softmax of a block's first tile: the maximum, then the exponentials.
    const auto first_softmax = [&](const Block& b, int j, bool half) {
        const auto all = [&] {
            float shrink_a, shrink_b, top_a = -INFINITY, top_b = -INFINITY;
            max_a = max_b = -INFINITY;
            sum_a = sum_b = 0.0f;
            maxima(0, half_groups, top_a, top_b);
            if (has_half && !half) maxima(half_groups, all_groups, top_a, top_b);
            move_maxima(top_a, top_b, shrink_a, shrink_b);
            if (!in_place) {
                exponentials(0, half_groups, sum_a, sum_b);
                if (has_half && !half) exponentials(half_groups, all_groups, sum_a, sum_b);
                return;
            }
            powers(0, half_groups);
            if (has_half && !half) powers(half_groups, all_groups);
            ptx::wgmma_hold(s);  // keeps the steps apart
            sums(0, half_groups, sum_a, sum_b);
            fragments(0, half_groups);
            if (has_half && !half) {
                sums(half_groups, all_groups, sum_a, sum_b);
                fragments(half_groups, all_groups);
            }
        };
        prescale();
        if (subtract && may_subtract && is_cut(b, j)) {
            all();
            if (surplus_removed(b, j, half, sum_a, sum_b)) return;
        }
        mask(b, j);
        all();
    };
    const auto shrink_output = [&](float shrink_a, float shrink_b) {
        sum_a *= shrink_a;
        sum_b *= shrink_b;
#pragma unroll
        for (int i = 0; i < head_dim / 2; i += 4) {
            o[i] *= shrink_a, o[i + 1] *= shrink_a;
            o[i + 2] *= shrink_b, o[i + 3] *= shrink_b;
        }
    };
    // Softmax of a later tile, while the product with the tile before still reads the fragments and adds to o; `finish` waits for it.
    [[maybe_unused]] const auto overlapped_softmax = [&](const Block& b, int j, bool half, const auto& finish) {
        float top_a = -INFINITY, top_b = -INFINITY, tile_a = 0.0f, tile_b = 0.0f, shrink_a = 1.0f, shrink_b = 1.0f;
        prescale();
        mask(b, j);
        maxima(0, half_groups, top_a, top_b);
        if (has_half && !half) maxima(half_groups, all_groups, top_a, top_b);
        const bool moved = __any_sync(~0u, moves(top_a, max_a) || moves(top_b, max_b));
        if (moved) move_maxima(top_a, top_b, shrink_a, shrink_b);
        powers(0, half_groups);
        if (has_half && !half) powers(half_groups, all_groups);
        ptx::wgmma_hold(s);
        sums(0, half_groups, tile_a, tile_b);
        if (has_half && !half) sums(half_groups, all_groups, tile_a, tile_b);
        ptx::wgmma_hold(s);
        finish();
        if (moved) shrink_output(shrink_a, shrink_b);
        sum_a += tile_a;
        sum_b += tile_b;
        fragments(0, half_groups);
        if (has_half && !half) fragments(half_groups, all_groups);
    };
    // The same after that product, with the scores kept: exponentials against the maximum so far, beside them this tile's maxima; in
    // the rare case that the maximum moves for a row of this warp, once more against the new one. (Knowing the maximum first costs
    // its latency each time.)
    [[maybe_unused]] const auto next_softmax = [&](const Block& b, int j, bool half) {
        float top_a, top_b, tile_a, tile_b;
        const auto all = [&] {
            top_a = top_b = -INFINITY;
            tile_a = tile_b = 0.0f;
            maxima(0, half_groups, top_a, top_b);
            exponentials(0, half_groups, tile_a, tile_b);
            if (has_half && !half) {
                maxima(half_groups, all_groups, top_a, top_b);
                exponentials(half_groups, all_groups, tile_a, tile_b);
            }
            return __any_sync(~0u, moves(top_a, max_a) || moves(top_b, max_b));
        };
        prescale();
        if (subtract && may_subtract && is_cut(b, j)) {
            if (!all() && surplus_removed(b, j, half, tile_a, tile_b)) {
                sum_a += tile_a;
                sum_b += tile_b;
                return;
            }
        }
        mask(b, j);
        if (all()) {
            float shrink_a, shrink_b;
            move_maxima(top_a, top_b, shrink_a, shrink_b);
            tile_a = tile_b = 0.0f;
            exponentials(0, half_groups, tile_a, tile_b);
            if (has_half && !half) exponentials(half_groups, all_groups, tile_a, tile_b);
            shrink_output(shrink_a, shrink_b);
        }
        sum_a += tile_a;
        sum_b += tile_b;
    };

    // Divides by the sum and writes o (through shared memory, 16 rows a warp) and lse.
    const auto store_output = [&](const Block& b) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            sum_a += __shfl_xor_sync(~0u, sum_a, d);
            sum_b += __shfl_xor_sync(~0u, sum_b, d);
        }
        // No maximum means no visible key: o is exactly 0 and lse -inf, whatever v holds.
        const bool blind_a = max_a == -INFINITY && sum_a == sum_a, blind_b = max_b == -INFINITY && sum_b == sum_b;
        const float inverse_a = blind_a ? 0.0f : ptx::reciprocal_approx(sum_a), inverse_b = blind_b ? 0.0f : ptx::reciprocal_approx(sum_b);
        if (__any_sync(~0u, blind_a || blind_b)) {
#pragma unroll
            for (int i = 0; i < head_dim / 2; i += 4) {
                o[i] = blind_a ? 0.0f : o[i], o[i + 1] = blind_a ? 0.0f : o[i + 1];
                o[i + 2] = blind_b ? 0.0f : o[i + 2], o[i + 3] = blind_b ? 0.0f : o[i + 3];
            }
        }
        const int heads_log2 = p.packed_log2;
        uint8_t* staging = shared.o[me][warp];
        const uint32_t address = ptx::smem_address(staging);
        const int matrix_row = lane % 16;  // row of the 16 whose address this lane gives to stmatrix
#pragma unroll
        for (int x0 = 0; x0 < chunks; x0 += o_chunks) {
            if (ptx::elect_one()) ptx::bulk_wait_read<0>();  // the previous store has left the staging buffer
            __syncwarp();
#pragma unroll
            for (int g = x0 * 8; g < (x0 + o_chunks) * 8; g += 2) {
                if (4 * g >= head_dim / 2) break;
                uint32_t r[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int i = 4 * (g + h);
                    r[2 * h] = ptx::pack<T>(o[i] * inverse_a, o[i + 1] * inverse_a);
                    r[2 * h + 1] = ptx::pack<T>(o[i + 2] * inverse_b, o[i + 3] * inverse_b);
                }
                const int group = g % 8 + lane / 16;  // 16-byte column of the chunk
                ptx::stmatrix_x4(address + (g / 8 - x0) * o_chunk_bytes + matrix_row * 128 + ((group ^ (matrix_row % 8)) << 4), r[0], r[1], r[2], r[3]);
            }
            ptx::fence_async_shared();
            __syncwarp();
            if (ptx::elect_one()) {
                // The warp's 16 rows: box_rows rows of one or more heads.
                const int box_rows = min(rows_per_block, 16);
                const int i = (16 * warp) & (rows_per_block - 1);
                const int rows = min(box_rows, b.rows - i);
                if (rows > 0) {
                    const int head = b.head + ((16 * warp) >> (6 - heads_log2));
#pragma unroll
                    for (int x = 0; x < o_chunks; ++x)
                        ptx::tma_store_rows(map_o, staging + x * o_chunk_bytes, 64 * (x0 + x), b.o_row + i, rows, head);
                }
                ptx::bulk_commit();
            }
        }
        if (lane % 4 == 0) {
            float* lse = p.lse + b.head * p.lse_head_stride + b.o_row;
            const int rows = min(b.rows, p.o_rows - b.o_row);
            if (i_a < rows) lse[lse_a] = blind_a ? -INFINITY : fmaf(max_a, scale_log2, ptx::log2_approx(sum_a)) * ln2;
            if (i_b < rows) lse[lse_b] = blind_b ? -INFINITY : fmaf(max_b, scale_log2, ptx::log2_approx(sum_b)) * ln2;
        }
    };
    // Passes over units in which this consumer has no product to do: walks their slots, writes zeros for rows without keys.
    // `b` becomes the next block with work, or the end mark.
    const auto skip_idle = [&](Block& b) {
        while (b.rows >= 0 && b.begin == b.end) {
            release_q(use);
            if (b.rows > 0) {
                max_a = max_b = -INFINITY;
                sum_a = sum_b = 0.0f;
                store_output(b);
            }
            walk(base, b, 0, b.tiles);
            base += b.places;
            b = fetch(++use);
        }
    };

    Block b = fetch(0);
    skip_idle(b);
    if (b.rows < 0) {
        if (ptx::elect_one()) ptx::bulk_wait<0>();
        return;
    }
    walk(base, b, 0, b.begin);
    wait_slot(base + key_place(b.begin));
    scores(use, base + key_place(b.begin));
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(s);
    if (b.places != 1) release_slot(base + key_place(b.begin));
    for (;;) {
        // Tile by tile: the next tile's scores first, so that its softmax overlaps this tile's p v.
        const auto half_at = [&](int tile) { return b.half && tile + 1 == b.end; };
        int j = b.begin;
        first_softmax(b, j, half_at(j));
        for (; j + 1 < b.end; ++j) {
            const uint32_t keys = base + 2 * j + 1, values = keys + 1;  // key_place(j + 1), value_place(j)
            wait_slot(keys);
            scores(use, keys);
            wait_slot(values);
            accumulate(values, false, false, j == b.begin);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(s);
            release_slot(keys);
            const auto finish = [&] {
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(o);
                release_slot(values);
            };
            if (in_place) {
                overlapped_softmax(b, j + 1, half_at(j + 1), finish);
            } else {
                finish();
                next_softmax(b, j + 1, half_at(j + 1));
            }
        }
        release_q(use);
        const uint32_t values = base + (b.places == 1 ? 0 : value_place(j, b.tiles));
        wait_slot(values);

        // The next block's first product goes to the tensor cores right behind this block's last and before its epilogue; where
        // slots or idle units must be walked over first, this block is finished before. (Both products of a path stand in one
        // straight line: otherwise the assembler serializes all of them.)
        Block next = b;
        const bool trailing = b.end < b.tiles;
        if (early && !trailing) {
            next = fetch(++use);
            base += b.places;
        }
        if (!early || trailing || next.begin == next.end || next.begin > 0) {
            accumulate(values, b.half, b.places == 1, j == b.begin);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(o);
            release_slot(values);
            store_output(b);
            if (!early || trailing) {
                walk(base, b, b.end, b.tiles);
                base += b.places;
                next = fetch(++use);
            }
            skip_idle(next);
            if (next.rows < 0) break;
            walk(base, next, 0, next.begin);
            wait_slot(base + key_place(next.begin));
            scores(use, base + key_place(next.begin));
        } else {
            wait_slot(base + key_place(0));
            accumulate(values, b.half, b.places == 1, j == b.begin);
            scores(use, base + key_place(0));
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(o);
            release_slot(values);
            store_output(b);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
        if (next.places != 1) release_slot(base + key_place(next.begin));
        b = next;
    }
    if (ptx::elect_one()) ptx::bulk_wait<0>();
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = list_blocks * block_rows;  // of the schedule's list, of one head
extern "C" __constant__ unsigned jfa_kv_tile = kv_tile;

extern "C" __global__ void __launch_bounds__(128 * (1 + consumers), 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_o, const __grid_constant__ JfaForwardParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform to the compiler too

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
        for (int i = 0; i < jobs; ++i) {
            ptx::mbarrier_init(&shared.job_full[i], 1);
            ptx::mbarrier_init(&shared.job_empty[i], 1);
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_o);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<56>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (ptx::elect_one()) produce_keys_and_values(shared, &map_k, &map_v);
        } else if (warp == 1) {
            if (ptx::elect_one()) produce_queries(shared, p, &map_q);
        }
    } else {
        ptx::registers_acquire<three ? 152 : 224>();
        consume(shared, p, &map_o, warpgroup - 1);
    }
}

}  // namespace jfa
