// Jagged attention backward, Hopper (sm_90a): dq, dk, dv in one launch, persistent, deterministic.
//
//   tile        128 keys of one sequence and key/value head, walked over blocks of query rows (64 at head_dim 128, 128 at 64) from
//               the last one down, for every query head of the group; dk and dv stay in registers
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q, dq = ds k; p^T and ds^T never leave the registers as
//               left operands, ds^T goes to shared memory once for dq
//   dq          one tile: stored at once. More: the first one leaves its share in `partial` (L2), the others add theirs there, the
//               last one takes the sum along and stores dq. One CTA does the tiles of a sequence in their order, hence the same
//               threads add in the same order. Only sequences too long for one CTA have tiles on many: they wait for flags
//   roles       warp 0: schedule and TMA; warps 1, 2: delta = rowsum(o * do), once per block of rows; warp 3: lse, waits for
//               flags; two consumer warpgroups of 64 keys each
//   buffers     k, v: 2 stages (their tile's dk, dv leave through them); q, do: 2 stages; o: 1; ds^T: 1 (dq leaves through it)
//   overlap     the next step's s^T is issued behind this step's dq, also across tiles; dp^T right after dq left its registers
//   registers   consumers 232, producer warpgroup 40
//   rate        docs/performance.md
#include "params.h"
#include "ptx/barrier.cuh"
#include "ptx/global.cuh"
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
#define JFA_ENTRY jfa_backward_128_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;        // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = head_dim / 64;         // 64-column chunks of 128-byte rows in shared memory
constexpr int keys = JFA_BACKWARD_KEYS;       // keys of a tile, 64 per consumer
constexpr int q_tile = head_dim <= 64 ? 128 : 64;
constexpr int dq_columns = head_dim <= 64 ? head_dim : head_dim / 2;  // a consumer's share of dq is 64 rows of these columns
constexpr int segments = 4;
static_assert(q_tile * (head_dim + 1) * 4 <= JFA_BACKWARD_BLOCK_BYTES, "params.h");

constexpr int kv_chunk = keys * 128;          // bytes
constexpr int q_chunk = q_tile * 128;
constexpr int kv_bytes = chunks * kv_chunk;
constexpr int q_bytes = chunks * q_chunk;
constexpr int ds_chunk = keys * 128;          // ds^T: rows are keys, 64 query rows to a chunk

// Query rows of one head that a tile walks over. owned: the CTA does all tiles of the sequence; chained: other CTAs do some.
enum : int { first_of_tile = 1, last_of_tile = 2, no_steps = 4, the_end = 8, zero_keys = 16, zero_queries = 32, owned = 64, chained = 128 };
struct Segment {
    int flags;
    int lo, hi;            // query blocks, walked from hi - 1 down to lo
    int q_len, kv_len;
    int key0, tile;        // first key, number of the tile
    int q_row, o_row, kv_row;
    int head, kv_head;
    int block;             // row block of query block 0
    int zero_lo, zero_hi;  // zero_queries: rows [0, zero_lo) and [zero_hi, q_len) see no key
    int earlier_end;       // to query blocks before it an earlier tile adds too
    int later_begin;       // to query blocks from it on a later tile adds too
    int whole_lo, whole_hi; // of these query blocks no mask cuts anything
    int pad;
};

// One key/value head of a unit: what the schedule thread works on and, looked ahead, what follows.
struct Item {
    JfaSequence sequence;
    int unit_sequence;
    int kv_head;
    int row_block;        // of the sequence's query block 0, for query head 0
    int tile, tile_end;   // tiles of the unit
    int flag;             // `owned`, `chained` or 0
};

// Whose rows a stage of q and do holds.
struct Content {
    int q_row, o_row, rows, head;
};

struct SharedMemory {
    uint8_t k[2][kv_bytes], v[2][kv_bytes];
    uint8_t q[2][q_bytes], d_o[2][q_bytes];
    uint8_t ds[q_tile / 64][ds_chunk];
    uint8_t o[q_bytes];
    float lse[2][q_tile];    // -lse * log2(e); -inf where p must be 0. At place_of(row)
    float delta[2][q_tile];  // likewise
    Segment segment[segments];
    Item item[2];
    Content content[2];
    Segment held[8][2];      // every consumer warp's own copies of the segment it works on and the next one
    uint64_t segment_full[segments], segment_empty[segments];
    uint64_t k_full[2], v_full[2], kv_empty[2];
    uint64_t q_full[2], do_full[2], q_empty[2];     // q_empty: q and do
    uint64_t o_full, o_empty;
    uint64_t delta_full[2], lse_full[2], chain_full[2];
    uint64_t ds_empty;
};

__device__ __forceinline__ int stage_of(uint32_t n) { return n & 1; }
__device__ __forceinline__ uint32_t phase_of(uint32_t n) { return (n >> 1) & 1; }
__device__ __forceinline__ uint64_t* segment_full(SharedMemory& shared, uint32_t n) { return &shared.segment_full[n % segments]; }
__device__ __forceinline__ uint64_t* segment_empty(SharedMemory& shared, uint32_t n) { return &shared.segment_empty[n % segments]; }
__device__ __forceinline__ uint32_t segment_phase(uint32_t n) { return (n / segments) & 1; }

// Where a row's lse and delta stand: the four values that a thread needs of 16 rows are neighbours.
__device__ __forceinline__ int place_of(int row) { return row / 16 * 16 + row / 2 % 4 * 4 + row / 8 % 2 * 2 + row % 2; }

// Whether delta of a query block is computed with this tile; other tiles of the CTA that owns the sequence find it in `partial`.
__device__ __forceinline__ bool computes_delta(const Segment& s, int block) { return !(s.flags & owned) || block >= s.earlier_end; }
__device__ __forceinline__ bool keeps_delta(const Segment& s, int block) { return (s.flags & owned) && block >= s.later_begin; }
__device__ __forceinline__ char* partial_block(const JfaBackwardParams& p, int row_block) {
    return reinterpret_cast<char*>(p.partial) + static_cast<long long>(row_block) * JFA_BACKWARD_BLOCK_BYTES;
}
__device__ __forceinline__ float* partial_delta(const JfaBackwardParams& p, int row_block) {
    return reinterpret_cast<float*>(partial_block(p, row_block) + q_tile * head_dim * 4);
}

// ---------------------------------------------------------------------------------------------------------------- producer
// The next item (unit * heads_kv + key/value head) of this CTA; none: all bits set. Items come from a queue, longest first, so
// that a tile never starts before the tiles whose flags it waits for. A broadcast query needs a fixed share: one of `slices`
// equal parts of a head's units.
constexpr uint32_t no_item = ~0u;

__device__ __forceinline__ int slice_of(const JfaBackwardParams& p) { return blockIdx.x / p.heads_kv; }

__device__ __forceinline__ uint32_t next_item(const JfaBackwardParams& p, uint32_t units, uint32_t before) {
    if (!p.broadcast) {
        const uint32_t item = ptx::atomic_add(p.control, 1);
        return item < units * p.heads_kv ? item : no_item;
    }
    const uint32_t grid = gridDim.x, heads = p.heads_kv;
    uint32_t head = blockIdx.x % heads, unit = slice_of(p);
    if (before != no_item) {
        head = before % heads;
        // The list is sorted by work: dealt in snake order.
        const uint32_t slices = heads >= grid ? 1 : (grid - 1 - head) / heads + 1, round = before / heads / slices + 1;
        unit = round * slices + (round % 2 ? slices - 1 - slice_of(p) : slice_of(p));
        if (unit >= units) head += grid;  // a CTA with several heads has them alone
        if (unit >= units) unit = 0;
    }
    return head < heads && unit < units ? unit * heads + head : no_item;
}

// The first query block from row x on.
constexpr int all_blocks = 1 << 25;
__device__ __forceinline__ int block_from(long long x) { return x <= 0 ? 0 : static_cast<int>(min((x + q_tile - 1) / q_tile, 1ll * all_blocks)); }

// Everything but the row block, `owned` and `chained`.
__device__ __forceinline__ void fill_segment(Segment& g, const JfaBackwardParams& p, const JfaSequence& s, int tile, int kv_head, int member) {
    const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    const int left = p.mask.left, right = p.mask.right;
    const int key0 = tile * keys, end = min(key0 + keys, s.kv_len);
    const long long top = key0 + keys - static_cast<long long>(shift) - right, bottom = key0 - static_cast<long long>(shift) + left;
    g.q_row = s.q_row;
    g.o_row = s.o_row;
    g.kv_row = s.kv_row;
    g.q_len = s.q_len;
    g.kv_len = s.kv_len;
    g.key0 = key0;
    g.tile = tile;
    g.kv_head = kv_head;
    g.head = kv_head * p.group + member;
    // Query blocks that see the tile.
    const int row_lo = first_row(p.mask, key0, shift), row_hi = min(s.q_len, end_row(p.mask, end - 1, shift, s.q_len));
    const bool empty = end <= key0 || row_lo >= row_hi;
    g.lo = empty ? 0 : row_lo / q_tile;
    g.hi = empty ? 0 : (row_hi + q_tile - 1) / q_tile;
    // Row r sees keys r + shift - left .. r + shift + right.
    g.earlier_end = key0 == 0 ? 0 : left < 0 ? all_blocks : block_from(bottom);
    g.later_begin = s.kv_len <= key0 + keys ? all_blocks : right < 0 ? 0 : s.q_len <= top ? all_blocks : block_from(top - q_tile + 1);
    g.whole_hi = left < 0 ? all_blocks : block_from(bottom - q_tile + 2);
    g.whole_lo = s.kv_len < key0 + keys ? all_blocks : right < 0 ? 0 : block_from(top - 1);
    int flags = empty ? no_steps | (member == 0 ? zero_keys : 0) : (member == 0 ? first_of_tile : 0) | (member == p.group - 1 ? last_of_tile : 0);
    // Rows that no tile has: the first tile makes their dq zero.
    g.zero_lo = g.zero_hi = g.pad = 0;
    if (tile == 0 && !p.broadcast) {
        const int see_lo = first_row(p.mask, 0, shift);
        const int see_hi = s.kv_len ? min(s.q_len, end_row(p.mask, s.kv_len - 1, shift, s.q_len)) : 0;
        g.zero_lo = see_lo < see_hi ? see_lo / q_tile * q_tile : s.q_len;
        g.zero_hi = see_lo < see_hi ? min(s.q_len, (see_hi + q_tile - 1) / q_tile * q_tile) : s.q_len;
        if (g.zero_lo > 0 || g.zero_hi < s.q_len) flags |= zero_queries;
    }
    g.flags = flags;
}

__device__ void produce(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_o, const CUtensorMap* map_do) {
    uint32_t tile_count = 0, step = 0, o_count = 0, segment = 0;
    shared.content[0] = shared.content[1] = {0, 0, -1, 0};

    // `rows` rows from `row` on as boxes of 64 rows, zeros after them.
    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int tile_rows, int row, int rows, int head) {
        ptx::mbarrier_arrive_expect_tx(barrier, tile_rows * head_dim * 2);
#pragma unroll
        for (int y = 0; y < tile_rows; y += 64)
#pragma unroll
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map, barrier, to + x * tile_rows * 128 + y * 128, 64 * x, row + y, max(0, min(64, rows - y)), head);
    };

    // The following item, its unit, its sequence: asked for one after another, a step apart, so that nobody waits for them.
    uint32_t item = no_item;
    int looked = 0, now = 1;
    const auto look_ahead = [&] {
        Item& next = shared.item[now ^ 1];
        if (looked == 0) {
            item = next_item(p, p.header->backward_units, item);
        } else if (item != no_item && looked == 1) {
            const JfaUnit unit = p.units[item / p.heads_kv];
            next.unit_sequence = unit.sequence;
            next.kv_head = item % p.heads_kv;
            next.tile = unit.first < 0 ? -1 : unit.first / keys;
        } else if (item != no_item) {
            const JfaSequence s = p.sequences[next.unit_sequence];
            next.sequence = s;
            next.row_block = s.o_row / q_tile + next.unit_sequence;
            const bool all = next.tile < 0;  // all tiles of the sequence, or one
            next.flag = all ? owned : chained;
            next.tile_end = all ? max(1, (s.kv_len + keys - 1) / keys) : next.tile + 1;
            next.tile = max(0, next.tile);
        }
        ++looked;
    };
    for (;;) {
        while (looked < 3) look_ahead();
        looked = 0;
        now ^= 1;
        if (item == no_item) break;
        const Item& it = shared.item[now];
#pragma unroll 1
        for (int tile = it.tile; tile < it.tile_end; ++tile) {
#pragma unroll 1
            for (int member = 0; member < p.group; ++member) {
                ptx::mbarrier_wait(segment_empty(shared, segment), segment_phase(segment) ^ 1);
                Segment& g = shared.segment[segment % segments];
                fill_segment(g, p, it.sequence, tile, it.kv_head, member);
                g.flags |= it.flag;
                g.block = p.broadcast ? (slice_of(p) * p.heads_kv * p.group + g.head) * p.blocks : g.head * p.blocks + it.row_block;
                ptx::mbarrier_arrive(segment_full(shared, segment));
                ++segment;
#pragma unroll 1
                for (int i = g.hi - 1; i >= g.lo; --i, ++step) {
                    const int q0 = i * q_tile, stage = stage_of(step);
                    const bool first = member == 0 && i == g.hi - 1;
                    const int kv_stage = stage_of(tile_count);
                    if (first) {
                        ptx::mbarrier_wait(&shared.kv_empty[kv_stage], phase_of(tile_count) ^ 1);
                        load(map_k, &shared.k_full[kv_stage], shared.k[kv_stage], keys, g.kv_row + g.key0, g.kv_len - g.key0, g.kv_head);
                    }
                    ptx::mbarrier_wait(&shared.q_empty[stage], phase_of(step) ^ 1);
                    // A stage that holds the rows already, as with few queries and many keys, is not loaded again.
                    Content& content = shared.content[stage];
                    const int rows = min(q_tile, g.q_len - q0);
                    const bool same_q = content.q_row == g.q_row + q0 && content.rows == rows && content.head == g.head;
                    const bool same_do = same_q && content.o_row == g.o_row + q0;
                    content = {g.q_row + q0, g.o_row + q0, rows, g.head};
                    if (same_q) {
                        ptx::mbarrier_arrive(&shared.q_full[stage]);
                    } else {
                        load(map_q, &shared.q_full[stage], shared.q[stage], q_tile, g.q_row + q0, rows, g.head);
                    }
                    if (first) {
                        load(map_v, &shared.v_full[kv_stage], shared.v[kv_stage], keys, g.kv_row + g.key0, g.kv_len - g.key0, g.kv_head);
                        ++tile_count;
                    }
                    if (same_do) {
                        ptx::mbarrier_arrive(&shared.do_full[stage]);
                    } else {
                        load(map_do, &shared.do_full[stage], shared.d_o[stage], q_tile, g.o_row + q0, rows, g.head);
                    }
                    if (computes_delta(g, i)) {
                        ptx::mbarrier_wait(&shared.o_empty, (o_count & 1) ^ 1);
                        load(map_o, &shared.o_full, shared.o, q_tile, g.o_row + q0, g.q_len - q0, g.head);
                        ++o_count;
                    }
                    if (tile + 1 == it.tile_end && looked < 3) look_ahead();
                }
            }
        }
    }
    ptx::mbarrier_wait(segment_empty(shared, segment), segment_phase(segment) ^ 1);
    shared.segment[segment % segments] = Segment{no_steps | the_end};
    ptx::mbarrier_arrive(segment_full(shared, segment));
}

// ------------------------------------------------------------------------------------------------ the producer's other warps
// Calls visit(segment, query block, step) for every step of the CTA; `begin(segment)` once for every segment before. Returns the
// number of steps.
template <class Begin, class Visit>
__device__ __forceinline__ uint32_t every_step(SharedMemory& shared, Begin begin, Visit visit) {
    const int lane = ptx::lane_id();
    uint32_t step = 0;
    for (uint32_t n = 0;; ++n) {
        ptx::mbarrier_wait(segment_full(shared, n), segment_phase(n));
        const Segment& s = shared.segment[n % segments];
        if (s.flags & the_end) return step;
        begin(s);
        for (int i = s.hi - 1; i >= s.lo; --i) visit(s, i, step++);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(segment_empty(shared, n));
    }
}

// Zeros for rows [from, to) of a head; two warps share the work.
__device__ void zero_rows(void* base, long long row_bytes, long long head_bytes, int from, int to, int head, int vectors, int me) {
    char* head_base = static_cast<char*>(base) + head * head_bytes;
#pragma unroll 1
    for (long long i = from; i < to; ++i) {
        uint4* row = reinterpret_cast<uint4*>(head_base + i * row_bytes);
#pragma unroll 1
        for (int x = ptx::lane_id() + 32 * me; x < vectors; x += 64) row[x] = uint4{0, 0, 0, 0};
    }
}

// The number of tiles that are in the sum of a row block.
__device__ __forceinline__ int* flag_of(const JfaBackwardParams& p, int row_block) { return p.control + 32 + row_block; }

__device__ void delta_warp(SharedMemory& shared, const JfaBackwardParams& p, int me) {
    const int lane = ptx::lane_id(), quad = lane % 4;
    int leaving = -1, tiles = 0;  // row block whose sum moves on after the last step, tiles in it
    uint32_t o_count = 0;
    const auto raise = [&](uint32_t steps) {
        if (leaving < 0) return;
        ptx::mbarrier_wait(&shared.q_empty[stage_of(steps - 1)], phase_of(steps - 1));
        if (lane == 0) ptx::store_release(flag_of(p, leaving), tiles);
    };
    const uint32_t steps = every_step(
        shared,
        [&](const Segment& s) {
            if (s.flags & zero_keys) {
                const int from = s.kv_row + s.key0, to = min(p.kv_rows, s.kv_row + min(s.key0 + keys, s.kv_len));
                zero_rows(p.dk, p.dk_row_bytes, p.dk_head_bytes, from, to, s.kv_head, p.vectors_qk, me);
                zero_rows(p.dv, p.dv_row_bytes, p.dv_head_bytes, from, to, s.kv_head, p.vectors_v, me);
            }
            if (s.flags & zero_queries) {
                const auto zero = [&](int from, int to) {
                    zero_rows(p.dq, p.dq_row_bytes, p.dq_head_bytes, s.q_row + from, min(p.o_rows, s.q_row + to), s.head, p.vectors_qk, me);
                };
                zero(0, s.zero_lo);
                zero(max(s.zero_lo, s.zero_hi), s.q_len);
            }
        },
        [&](const Segment& s, int i, uint32_t step) {
            const int stage = stage_of(step);
            const int first_row_of_warp = me * (q_tile / 2);
            if (computes_delta(s, i)) {
                ptx::mbarrier_wait(&shared.o_full, o_count & 1);
                ptx::mbarrier_wait(&shared.do_full[stage], phase_of(step));
#pragma unroll 1
                for (int batch = 0; batch < q_tile / 16; ++batch) {
                    const int row = first_row_of_warp + 8 * batch + lane / 4;
                    float sum = 0.0f;
#pragma unroll 2
                    for (int k = 0; k < head_dim / 32; ++k) {
                        // Odd rows take the 16-byte columns of a chunk in the other order: no bank conflicts.
                        const int column = 4 * (k ^ (row & 1)) + quad;
                        const int at = column / 8 * q_chunk + row * 128 + ((column % 8 ^ (row & 7)) << 4);
                        const uint4 a = *reinterpret_cast<const uint4*>(shared.o + at);
                        const uint4 b = *reinterpret_cast<const uint4*>(shared.d_o[stage] + at);
                        const auto add = [&](uint32_t x, uint32_t y) {
                            const float2 f = ptx::unpack<T>(x), g = ptx::unpack<T>(y);
                            sum = fmaf(f.x, g.x, sum);
                            sum = fmaf(f.y, g.y, sum);
                        };
                        add(a.x, b.x);
                        add(a.y, b.y);
                        add(a.z, b.z);
                        add(a.w, b.w);
                    }
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if (quad == 0) {
                        shared.delta[stage][place_of(row)] = sum;
                        if (keeps_delta(s, i)) partial_delta(p, s.block + i)[row] = sum;
                    }
                }
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(&shared.o_empty);
                ++o_count;
            } else {
                const float* kept = partial_delta(p, s.block + i);
                float value[q_tile / 64];
#pragma unroll
                for (int r = 0; r < q_tile / 64; ++r) value[r] = ptx::load_l2(kept + first_row_of_warp + 32 * r + lane);
                // So the consumers have left this stage. (The barrier that the other branch waits on: a wait by parity must not
                // miss a phase.)
                ptx::mbarrier_wait(&shared.do_full[stage], phase_of(step));
#pragma unroll
                for (int r = 0; r < q_tile / 64; ++r) shared.delta[stage][place_of(first_row_of_warp + 32 * r + lane)] = value[r];
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.delta_full[stage]);
            // The step before: its share of dq is in `partial` when the consumers have left the stage. The flag says so to the CTA
            // of the next tile; raised here, because it costs a round trip to the L2 that the consumers need not wait for.
            if (me == 1) {
                raise(step);
                leaving = (s.flags & chained) && i >= s.later_begin ? s.block + i : -1;
                tiles = s.tile + 1;
            }
        });
    if (me == 1) raise(steps);
}

__device__ void lse_warp(SharedMemory& shared, const JfaBackwardParams& p) {
    const int lane = ptx::lane_id();
    every_step(
        shared, [](const Segment&) {},
        [&](const Segment& s, int i, uint32_t step) {
            const int stage = stage_of(step), q0 = i * q_tile;
            const float* lse = p.lse + s.head * p.lse_head_stride + s.o_row + q0;
            const int rows = min(s.q_len, p.o_rows - s.o_row) - q0;
            float value[q_tile / 32];
#pragma unroll
            for (int r = 0; r < q_tile / 32; ++r) value[r] = 32 * r + lane < rows ? lse[32 * r + lane] * 1.44269504088896341f : -INFINITY;
            ptx::mbarrier_wait(&shared.q_full[stage], phase_of(step));  // so the consumers have left this stage
#pragma unroll
            for (int r = 0; r < q_tile / 32; ++r) shared.lse[stage][place_of(32 * r + lane)] = value[r] == -INFINITY ? -INFINITY : -value[r];
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.lse_full[stage]);

            if ((s.flags & chained) && i < s.earlier_end) {
                const int* flag = flag_of(p, s.block + i);
                while (ptx::load_acquire(flag) < s.tile) {}
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.chain_full[stage]);
        });
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_dq, const CUtensorMap* map_dk,
                        const CUtensorMap* map_dv, int me) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = ptx::lane_id();
    const int own_row = 64 * me + 16 * warp;           // the warp's 16 rows of k, v, ds^T; a thread has two of them
    const int column = 2 * (lane % 4);

    float s[q_tile / 2], dp[q_tile / 2];               // s^T then p^T, dp^T: 64 keys x q_tile
    float dk[head_dim / 2], dv[head_dim / 2];          // 64 keys x head_dim
    float dq[dq_columns / 2];                          // 64 query rows x dq_columns

    // ---- products. Descriptors are broadcast from lane 0, so that the compiler knows them to be uniform.
    const auto operand = [](const uint8_t* tile, uint32_t chunk_bytes = 16) {
        return ptx::matrix_descriptor(__shfl_sync(~0u, ptx::smem_address(tile), 0), chunk_bytes);
    };
    // to = 64 rows of a * q_tile rows of b
    const auto row_products = [&](float(&to)[q_tile / 2], const uint8_t* a_rows, const uint8_t* b_rows) {
        const uint64_t a = operand(a_rows), b = operand(b_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < head_dim / 16; ++x)
            ptx::Wgmma<q_tile, T>::ss(to, ptx::advance(a, x / 4 * kv_chunk + x % 4 * 32), ptx::advance(b, x / 4 * q_chunk + x % 4 * 32), x != 0);
        ptx::wgmma_commit();
    };
    const auto scores = [&](uint32_t unit, uint32_t step) {
        row_products(s, shared.k[stage_of(unit)] + me * 64 * 128, shared.q[stage_of(step)]);
    };
    const auto score_gradients = [&](uint32_t unit, uint32_t step) {
        row_products(dp, shared.v[stage_of(unit)] + me * 64 * 128, shared.d_o[stage_of(step)]);
    };
    // to (+)= fragments (64 keys x q_tile) * rows (q_tile x head_dim)
    const auto accumulate = [&](float(&to)[head_dim / 2], const uint32_t(&fragments)[q_tile / 16][4], const uint8_t* rows, bool first) {
        const uint64_t b = operand(rows, q_chunk);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x)
            ptx::Wgmma<head_dim, T, 0, 1>::rs(to, fragments[x], ptx::advance(b, x * 2048), x != 0 || !first);
        ptx::wgmma_commit();
    };
    // dq += ds k: at head_dim 128 each consumer has half the columns, at 64 half the rows.
    const auto query_gradients = [&](uint32_t unit) {
        const uint64_t a = operand(shared.ds[q_tile == 128 ? me : 0], ds_chunk);
        const uint64_t b = operand(shared.k[stage_of(unit)] + (q_tile == 128 ? 0 : me * kv_chunk), kv_chunk);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < keys / 16; ++x) ptx::Wgmma<dq_columns, T, 1, 1>::ss(dq, ptx::advance(a, x * 2048), ptx::advance(b, x * 2048), 1);
        ptx::wgmma_commit();
    };

    // ---- the stream of steps
    uint32_t unit = 0, step = 0, segment = 0, held = 0;
    int block = 0, flags = 0;  // of the current segment: query block, Segment::flags
    // Takes the next segment with products, or the end, from the ring to held[..][held % 2]. Values are broadcast from lane 0:
    // uniform for the compiler, so that products may stand behind branches.
    const auto fetch = [&] {
        ++held;
        do {
            ptx::mbarrier_wait(segment_full(shared, segment), segment_phase(segment));
            const int* from = reinterpret_cast<const int*>(&shared.segment[segment % segments]);
            flags = __shfl_sync(~0u, from[0], 0);
            if (lane < int(sizeof(Segment) / sizeof(int))) reinterpret_cast<int*>(&shared.held[4 * me + warp][held % 2])[lane] = from[lane];
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(segment_empty(shared, segment));
            ++segment;
        } while ((flags & no_steps) && !(flags & the_end));
        block = __shfl_sync(~0u, shared.held[4 * me + warp][held % 2].hi, 0) - 1;
    };
    const auto wait_k_q = [&](uint32_t u, uint32_t n) {
        ptx::mbarrier_wait(&shared.k_full[stage_of(u)], phase_of(u));
        ptx::mbarrier_wait(&shared.q_full[stage_of(n)], phase_of(n));
    };
    const auto wait_v_do = [&](uint32_t u, uint32_t n) {
        ptx::mbarrier_wait(&shared.v_full[stage_of(u)], phase_of(u));
        ptx::mbarrier_wait(&shared.do_full[stage_of(n)], phase_of(n));
    };
    const auto fragment_rows = [&](uint32_t base, int group) {  // stmatrix: where this lane's row of two 8-column groups stands
        return base + (lane % 16) * 128 + (((group + lane / 16) ^ (lane % 8)) << 4);
    };
    // The thread's sums of a row block lie in `partial` as they lie in its registers; the warp's rows are 4 KB.
    const auto partial_of = [&](int row_block) {
        static_assert(dq_columns == 64);
        return reinterpret_cast<float4*>(partial_block(p, row_block) + (4 * me + warp) * 4096) + lane;
    };

    // A broadcast query: this CTA's sums start from zero.
    if (p.broadcast) {
        for (int kv_head = blockIdx.x % p.heads_kv; kv_head < p.heads_kv; kv_head += gridDim.x)
            for (int b = 0; b < p.group * p.blocks; ++b)
                for (int x = 0; x < dq_columns / 8; ++x)
                    partial_of((slice_of(p) * p.heads_kv + kv_head) * p.group * p.blocks + b)[32 * x] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }

    fetch();
    if (flags & the_end) return;
    wait_k_q(unit, step);
    scores(unit, step);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(s);
    wait_v_do(unit, step);
    bool first = true, keys_leave = false;
    for (;;) {
        const Segment& g = shared.held[4 * me + warp][held % 2];
        const int stage = stage_of(step);
        uint32_t p_fragments[q_tile / 16][4], ds_fragments[q_tile / 16][4];

        // dp^T = v do^T, behind it p^T = exp2(s^T * scale - lse), at most 1
        score_gradients(unit, step);
        ptx::mbarrier_wait(&shared.lse_full[stage], phase_of(step));
#pragma unroll
        for (int x = 0; x < q_tile / 8; x += 2) {
            // Two groups of eight columns: lse of this thread's columns x, x + 1 of both.
            const float4 l = *reinterpret_cast<const float4*>(&shared.lse[stage][8 * x + 2 * column]);
            const auto probability = [&](float& value, float at) { value = ptx::exp2_approx(ptx::min_nan(fmaf(value, p.scale_log2, at), 0.0f)); };
            probability(s[4 * x], l.x), probability(s[4 * x + 1], l.y), probability(s[4 * x + 2], l.x), probability(s[4 * x + 3], l.y);
            probability(s[4 * x + 4], l.z), probability(s[4 * x + 5], l.w), probability(s[4 * x + 6], l.z), probability(s[4 * x + 7], l.w);
        }
        if (block < g.whole_lo || block >= g.whole_hi) {
            const int q0 = block * q_tile, shift = diagonal_shift(p.mask, g.q_len, g.kv_len);
            const auto mask_row = [&](int key, int half) {
                const int from = key < g.kv_len ? first_row(p.mask, key, shift) - q0 - column : 1 << 20;
                const int to = end_row(p.mask, key, shift, 0x7FFFFFFF) - q0 - column;
#pragma unroll
                for (int x = 0; x < q_tile / 8; ++x)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = s[4 * x + 2 * half + e];
                        value = 8 * x + e >= from && 8 * x + e < to ? value : 0.0f;
                    }
            };
            mask_row(g.key0 + own_row + lane / 4, 0);
            mask_row(g.key0 + own_row + lane / 4 + 8, 1);
        }
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x)
#pragma unroll
            for (int r = 0; r < 4; ++r) p_fragments[x][r] = ptx::pack<T>(s[8 * x + 2 * r], s[8 * x + 2 * r + 1]);

        // dv += p^T do, behind it ds^T = p^T (dp^T - delta)
        accumulate(dv, p_fragments, shared.d_o[stage], first);
        ptx::mbarrier_wait(&shared.delta_full[stage], phase_of(step));
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(dp);
#pragma unroll
        for (int x = 0; x < q_tile / 8; x += 2) {
            const float4 d = *reinterpret_cast<const float4*>(&shared.delta[stage][8 * x + 2 * column]);
            // p as it entered dv, in 16 bits: holding it in fp32 until here would cost the registers that the overlap needs.
            const auto gradient = [&](int r, float left, float right) {
                const float2 a = ptx::unpack<T>(p_fragments[x / 2][r]);
                ds_fragments[x / 2][r] = ptx::pack<T>(a.x * (dp[4 * x + 2 * r] - left), a.y * (dp[4 * x + 2 * r + 1] - right));
            };
            gradient(0, d.x, d.y), gradient(1, d.x, d.y), gradient(2, d.z, d.w), gradient(3, d.z, d.w);
        }

        // dk += ds^T q
        accumulate(dk, ds_fragments, shared.q[stage], first);

        // Behind it ds^T goes to shared memory, once the other consumer has read the last one and the stores that leave through it
        // are done.
        if (lane == 0) ptx::bulk_wait_read<0>();
        ptx::mbarrier_wait(&shared.ds_empty, (step & 1) ^ 1);
        __syncwarp();
        if (keys_leave && lane == 0) ptx::mbarrier_arrive(&shared.kv_empty[stage_of(unit) ^ 1]);
        keys_leave = false;
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x)
            ptx::stmatrix_x4(fragment_rows(ptx::smem_address(shared.ds[x / 4]) + own_row * 128, x % 4 * 2), ds_fragments[x][0], ds_fragments[x][1],
                             ds_fragments[x][2], ds_fragments[x][3]);

        ptx::fence_async_shared();

        // What this step does with its share of dq: the sum of the tiles before comes in where this is the last one to add.
        const bool earlier = p.broadcast || block < g.earlier_end, later = p.broadcast || block >= g.later_begin, takes = earlier && !later;
        if (takes) {
            const float4* sums = partial_of(g.block + block);
            if (flags & chained) ptx::mbarrier_wait(&shared.chain_full[stage], phase_of(step));
#pragma unroll
            for (int x = 0; x < dq_columns / 8; ++x) {
                const float4 f = ptx::load_l2(sums + 32 * x);
                dq[4 * x] = f.x, dq[4 * x + 1] = f.y, dq[4 * x + 2] = f.z, dq[4 * x + 3] = f.w;
            }
        } else {
#pragma unroll
            for (int x = 0; x < dq_columns / 2; ++x) dq[x] = 0.0f;
        }
        ptx::wgmma_wait<1>();  // dv: its fragments leave their registers

        ptx::named_barrier_sync(1, 256);  // ds^T is complete
        query_gradients(unit);

        // The next step's scores run behind it; after the last step this one's once more, and nobody looks (a product behind a
        // branch would make the assembler serialize all of them).
        const int this_block = block, these_flags = flags;
        const bool segment_ends = block == g.lo, last = segment_ends && (flags & last_of_tile);
        --block;
        if (segment_ends) fetch();
        const bool more = !(flags & the_end);
        const uint32_t next_unit = unit + last;
        if (more) wait_k_q(next_unit, step + 1);
        ptx::wgmma_wait<1>();  // dk
        scores(more ? next_unit : unit, step + more);
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(dq);
        if (lane == 0) ptx::mbarrier_arrive(&shared.ds_empty);

        // dq leaves: to `partial`, or for good through the warp's rows of the ds^T buffer
        if (later) {
            float4* sums = partial_of(g.block + this_block);
            if (earlier) {
                if (these_flags & chained) ptx::mbarrier_wait(&shared.chain_full[stage], phase_of(step));
#pragma unroll
                for (int x = 0; x < dq_columns / 8; ++x) ptx::add_l2(sums + 32 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]});
            } else {
#pragma unroll
                for (int x = 0; x < dq_columns / 8; ++x) ptx::store_l2(sums + 32 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]});
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);  // also tells warp 2 to raise the flag
        } else {
            if (takes) ptx::discard_l2(reinterpret_cast<const char*>(partial_of(g.block + this_block) - lane) + 128 * lane);
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            ptx::mbarrier_wait(&shared.ds_empty, step & 1);
            const uint8_t* staging = shared.ds[0] + own_row * 128;
#pragma unroll
            for (int x = 0; x < dq_columns / 8; x += 2)
                ptx::stmatrix_x4(fragment_rows(ptx::smem_address(staging), x), ptx::pack<T>(dq[4 * x] * p.scale, dq[4 * x + 1] * p.scale),
                                 ptx::pack<T>(dq[4 * x + 2] * p.scale, dq[4 * x + 3] * p.scale),
                                 ptx::pack<T>(dq[4 * x + 4] * p.scale, dq[4 * x + 5] * p.scale),
                                 ptx::pack<T>(dq[4 * x + 6] * p.scale, dq[4 * x + 7] * p.scale));
            ptx::fence_async_shared();
            __syncwarp();
            const int row = this_block * q_tile + (q_tile == 128 ? own_row : 16 * warp), rows = min(16, g.q_len - row);
            if (lane == 0 && rows > 0) {
                ptx::tma_store_rows(map_dq, staging, q_tile == 128 ? 0 : 64 * me, g.q_row + row, rows, g.head);
                ptx::bulk_commit();
            }
        }
        if (more) wait_v_do(next_unit, step + 1);

        // dk and dv leave through the rows of k and v that this warp owned
        if (last) {
            const int rows = min(16, g.kv_len - g.key0 - own_row);
            const auto leave = [&](const CUtensorMap* map, uint8_t* tile, const float(&from)[head_dim / 2], float factor) {
#pragma unroll
                for (int x = 0; x < head_dim / 8; x += 2)
                    ptx::stmatrix_x4(fragment_rows(ptx::smem_address(tile) + x / 8 * kv_chunk + own_row * 128, x % 8),
                                     ptx::pack<T>(from[4 * x] * factor, from[4 * x + 1] * factor),
                                     ptx::pack<T>(from[4 * x + 2] * factor, from[4 * x + 3] * factor),
                                     ptx::pack<T>(from[4 * x + 4] * factor, from[4 * x + 5] * factor),
                                     ptx::pack<T>(from[4 * x + 6] * factor, from[4 * x + 7] * factor));
                ptx::fence_async_shared();
                __syncwarp();
                if (lane == 0 && rows > 0) {
#pragma unroll
                    for (int x = 0; x < chunks; ++x)
                        ptx::tma_store_rows(map, tile + x * kv_chunk + own_row * 128, 64 * x, g.kv_row + g.key0 + own_row, rows, g.kv_head);
                    ptx::bulk_commit();
                }
            };
            if (!more) ptx::wgmma_wait<0>();  // the product that nobody looks at reads k
            leave(map_dv, shared.v[stage_of(unit)], dv, 1.0f);
            ptx::mbarrier_wait(&shared.ds_empty, step & 1);  // both consumers have read k for the last time
            leave(map_dk, shared.k[stage_of(unit)], dk, p.scale);
            keys_leave = true;
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
        if (!more) break;
        first = last;
        unit = next_unit;
        ++step;
    }
    if (lane == 0) ptx::bulk_wait<0>();
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = keys;  // of one key/value head
extern "C" __constant__ unsigned jfa_q_tile = q_tile;

extern "C" __global__ void __launch_bounds__(384, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_o, const __grid_constant__ CUtensorMap map_do, const __grid_constant__ CUtensorMap map_dq,
          const __grid_constant__ CUtensorMap map_dk, const __grid_constant__ CUtensorMap map_dv,
          const __grid_constant__ JfaBackwardParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    // Broadcast, so that the compiler knows the roles to be uniform.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int i = 0; i < segments; ++i) {
            ptx::mbarrier_init(&shared.segment_full[i], 1);
            ptx::mbarrier_init(&shared.segment_empty[i], 8 + 3);
        }
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&shared.k_full[i], 1);
            ptx::mbarrier_init(&shared.v_full[i], 1);
            ptx::mbarrier_init(&shared.kv_empty[i], 8);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], 8);
            ptx::mbarrier_init(&shared.delta_full[i], 2);
            ptx::mbarrier_init(&shared.lse_full[i], 1);
            ptx::mbarrier_init(&shared.chain_full[i], 1);
        }
        ptx::mbarrier_init(&shared.o_full, 1);
        ptx::mbarrier_init(&shared.o_empty, 2);
        ptx::mbarrier_init(&shared.ds_empty, 8);
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_o);
        ptx::tma_prefetch_map(&map_do);
        ptx::tma_prefetch_map(&map_dq);
        ptx::tma_prefetch_map(&map_dk);
        ptx::tma_prefetch_map(&map_dv);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<40>();
        if (warp == 0) {
            if (ptx::elect_one()) produce(shared, p, &map_q, &map_k, &map_v, &map_o, &map_do);
        } else if (warp == 3) {
            lse_warp(shared, p);
        } else {
            delta_warp(shared, p, warp - 1);
        }
    } else {
        ptx::registers_acquire<232>();
        consume(shared, p, &map_dq, &map_dk, &map_dv, warpgroup - 1);
    }
}

}  // namespace jfa
