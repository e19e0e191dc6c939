// Jagged attention backward, Hopper (sm_90a): dq, dk, dv in one launch, persistent, deterministic.
//
//   tile        128 keys of one sequence and key/value head, walked over blocks of query rows (64 at head_dim 128, 128 at 64) from
//               the last one down, for every query head of the group; dk and dv stay in registers
//   pair        two CTAs (a cluster) take two neighbouring tiles at a time, one each, over the same rows; of an odd number of tiles
//               the last one alone, each CTA with a head of its own. `cluster` is 1 where the query is broadcast
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q, dq = ds k; p^T and ds^T never leave the registers as
//               left operands, ds^T goes to shared memory once for dq
//   dq          of a pair, each CTA keeps one half of a step's dq and sends the other to its neighbour; half a step later both halves
//               are added and leave. Where the pass has all keys of the sequence, for good; else the first pass leaves its share in
//               `partial` (L2), the others add theirs there, the last one takes the sum along and stores dq. A pair does the passes
//               of a sequence in their order, hence the same threads add in the same order. Only sequences too long for one pair
//               have passes on many: they wait for flags
//   roles       warp 0: schedule and TMA; warps 1, 2: delta = rowsum(o * do), once per block of rows; warp 3: lse, waits for
//               flags; two consumer warpgroups of 64 keys each
//   buffers     k: 2 stages (dk leaves through them); v: 1 (2 without pairs: dv leaves through them); q, do: 2 stages; o: 1; ds^T: 1;
//               the kept and the received half of dq
//   overlap     the next step's s^T is issued behind this step's dq, also across tiles; dp^T once lse is in registers. The products
//               of 64 x 64 take all of shared memory's bandwidth: whatever else is read or written there waits for them, so that
//               its place in the step counts (docs/performance.md)
//   registers   consumers 224, producer warpgroup 56
#include "params.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
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
#ifndef JFA_CLUSTER
#define JFA_CLUSTER 2
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;        // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = head_dim / 64;         // 64-column chunks of 128-byte rows in shared memory
constexpr int keys = JFA_BACKWARD_KEYS;       // keys of a tile, 64 per consumer
constexpr int q_tile = head_dim <= 64 ? 128 : 64;
constexpr int dq_columns = head_dim <= 64 ? head_dim : head_dim / 2;  // a consumer's share of dq is 64 rows of these columns
constexpr int segments = 3;
constexpr int cluster = JFA_CLUSTER;          // CTAs that share a sequence
constexpr bool pairs = cluster == 2;
constexpr int v_stages = pairs ? 1 : 2;       // pairs: the other stage's place holds what they exchange
static_assert(cluster == 1 || cluster == 2);
static_assert(q_tile * (head_dim + 2) * 4 <= JFA_BACKWARD_BLOCK_BYTES, "params.h");

constexpr int kv_chunk = keys * 128;          // bytes
constexpr int q_chunk = q_tile * 128;
constexpr int kv_bytes = chunks * kv_chunk;
constexpr int q_bytes = chunks * q_chunk;
constexpr int ds_chunk = keys * 128;          // ds^T: rows are keys, 64 query rows to a chunk

// Query rows of one head that a tile walks over. A pass is one tile or, where a pair of CTAs works together, two neighbouring ones,
// one in each CTA. owned: the CTA does all passes of the sequence that it takes part in; waits, raises: other CTAs' share of the sums is
// waited for, the own one announced; exchange: a pass of two tiles.
enum : int {
    first_of_tile = 1, last_of_tile = 2, no_steps = 4, the_end = 8, zero_keys = 16, zero_queries = 32, owned = 64, waits = 128,
    raises = 256, exchange = 512
};
struct Work {              // what the consumers need of a segment
    int flags;
    int lo, hi;            // query blocks, walked from hi - 1 down to lo
    int q_len, kv_len;
    int key0;              // first key of the CTA's tile
    int q_row, kv_row;
    int head, kv_head;
    int block;             // row block of query block 0
    int earlier_end;       // to query blocks before it an earlier pass adds too
    int later_begin;       // to query blocks from it on a later pass adds too
    int whole_lo, whole_hi; // of these query blocks no mask cuts anything
};
struct Segment : Work {
    int o_row;
    int tile, tile_end;    // tiles of the pass
    int zero_lo, zero_hi;  // zero_queries: rows [0, zero_lo) and [zero_hi, q_len) see no key
};

// One unit and `cluster` key/value heads: what the schedule thread works on and, looked ahead, what follows.
struct Item {
    JfaSequence sequence;
    int unit_sequence;
    int kv_head, heads;   // heads [kv_head, kv_head + heads)
    int row_block;        // of the sequence's query block 0, for query head 0
    int tile, tile_end;   // tiles of the unit
    int whole, passes;    // passes of a head that all CTAs of the cluster share; of the item in this CTA
    int flags;            // `owned`, or `waits` and `raises`
};

// One pass of an item, with every query head of a key/value head.
struct Pass {
    int tile, count;      // tiles of the pass
    int member_tile;      // the CTA's among them
    int kv_head;
    int flags;            // Segment::flags
    int last;             // of this CTA's item
};

// Where a step's share of dq goes (a warp's own note, so that nothing has to be looked up behind the products).
enum : int { adds_earlier = 1, adds_later = 2, is_awaited = 4 };  // passes before and after it that add too; somebody waits for it
struct Leaving {
    int flags;
    int block;             // row block
    int row, rows, head;   // first row of q, rows that exist
};

// Whose rows a stage of q and do holds.
struct Content {
    int q_row, o_row, rows, head;
};

struct SharedMemory {
    uint8_t k[2][kv_bytes], v[v_stages][kv_bytes];
    uint8_t q[2][q_bytes], d_o[2][q_bytes];
    uint8_t ds[q_tile / 64][ds_chunk];
    uint8_t o[q_bytes];
    // Pairs: of a step's dq the CTA keeps one half and gets the same half of its neighbour's. Both as they lay in the registers.
    float4 kept[pairs ? 8 * 4 * 32 : 1], received[pairs ? 8 * 4 * 32 : 1];
    float lse[2][q_tile];    // -lse * log2(e); -inf where p must be 0. At place_of(row)
    float delta[2][q_tile];  // likewise
    Segment segment[segments];
    Item item[2];
    Pass pass;               // not in registers: they are scarce in the producer
    uint32_t o_count;        // likewise: loads of o
    Content content[2];
    Work held[8][2];         // every consumer warp's own copies of the segment it works on and the next one
    Leaving leaving[8][2];   // every consumer warp's own, of two steps
    int segment_known[2];    // whether the segment after this one is there, decided in the middle of the step
    uint32_t claimed;        // item, written by the first CTA of the cluster
    uint64_t segment_full[segments], segment_empty[segments];
    uint64_t k_full[2], v_full[v_stages], k_empty[2], v_empty[v_stages];
    uint64_t q_full[2], do_full[2], q_empty[2];     // q_empty: q and do
    uint64_t o_full, o_empty;
    uint64_t delta_full[2], lse_full[2], chain_full[2];
    uint64_t dq_left;        // of steps whose flag is raised
    uint64_t ds_empty;
    uint64_t claim_full, claim_empty;               // claim_empty: in the first CTA
    uint64_t received_full, neighbour_ready;        // neighbour_ready: it has taken what it received
};

static_assert(sizeof(SharedMemory) <= 232448, "shared memory of a CTA");

__device__ __forceinline__ int stage_of(uint32_t n) { return n & 1; }
__device__ __forceinline__ uint32_t phase_of(uint32_t n) { return (n >> 1) & 1; }
__device__ __forceinline__ uint64_t* segment_full(SharedMemory& shared, uint32_t n) { return &shared.segment_full[n % segments]; }
__device__ __forceinline__ uint64_t* segment_empty(SharedMemory& shared, uint32_t n) { return &shared.segment_empty[n % segments]; }
__device__ __forceinline__ uint32_t segment_phase(uint32_t n) { return (n / segments) & 1; }

__device__ __forceinline__ int v_stage(uint32_t unit) { return unit % v_stages; }
__device__ __forceinline__ uint32_t v_phase(uint32_t unit) { return unit / v_stages & 1; }
__device__ __forceinline__ int rank() { return pairs ? ptx::cluster_rank() : 0; }

// Where a row's lse and delta stand: the four values that a thread needs of 16 rows are neighbours.
__device__ __forceinline__ int place_of(int row) { return row / 16 * 16 + row / 2 % 4 * 4 + row / 8 % 2 * 2 + row % 2; }

// Whether delta of a query block is computed in this pass; later ones of the CTA that owns the sequence find it in `partial`.
__device__ __forceinline__ bool computes_delta(const Segment& s, int block) { return !(s.flags & owned) || block >= s.earlier_end; }
__device__ __forceinline__ bool keeps_delta(const Segment& s, int block) { return (s.flags & owned) && block >= s.later_begin; }
__device__ __forceinline__ char* partial_block(const JfaBackwardParams& p, int row_block) {
    return reinterpret_cast<char*>(p.partial) + static_cast<long long>(row_block) * JFA_BACKWARD_BLOCK_BYTES;
}
__device__ __forceinline__ float* partial_delta(const JfaBackwardParams& p, int row_block) {
    return reinterpret_cast<float*>(partial_block(p, row_block) + q_tile * head_dim * 4) + rank() * q_tile;  // every CTA its own
}

// ---------------------------------------------------------------------------------------------------------------- producer
// The next item of the cluster; none: all bits set. An item is a unit and `cluster` key/value heads. Items come from a queue, longest first, so
// that a tile never starts before the tiles whose flags it waits for. A broadcast query needs a fixed share: one of `slices`
// equal parts of a head's units.
constexpr uint32_t no_item = ~0u;

__device__ __forceinline__ int slice_of(const JfaBackwardParams& p) { return blockIdx.x / p.heads_kv; }

// Groups of `cluster` key/value heads.
__device__ __forceinline__ uint32_t groups_of(const JfaBackwardParams& p) { return (p.heads_kv + cluster - 1) / cluster; }

__device__ __forceinline__ uint32_t next_item(const JfaBackwardParams& p, uint32_t units, uint32_t before) {
    if (!p.broadcast) {
        const uint32_t item = ptx::atomic_add(p.control, 1);
        return item < units * groups_of(p) ? item : no_item;
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

// Everything but the row block and the item's flags. The pass has `count` tiles from `tile` on, the CTA works on number `member_tile`.
__device__ __forceinline__ void fill_segment(Segment& g, const JfaBackwardParams& p, const JfaSequence& s, int tile, int count, int member_tile,
                                             int kv_head, int member) {
    const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
    const int left = p.mask.left, right = p.mask.right;
    const int begin = tile * keys, end = min(begin + count * keys, s.kv_len), key0 = begin + member_tile * keys;
    // Row r sees keys r + shift - left .. r + shift + right. From row top(key) on a row sees keys from `key` on, before bottom(key) it
    // sees keys before `key`.
    const auto top = [&](int key) { return key - static_cast<long long>(shift) - right; };
    const auto bottom = [&](int key) { return key - static_cast<long long>(shift) + left; };
    g.q_row = s.q_row;
    g.o_row = s.o_row;
    g.kv_row = s.kv_row;
    g.q_len = s.q_len;
    g.kv_len = s.kv_len;
    g.key0 = key0;
    g.tile = tile;
    g.tile_end = tile + count;
    g.kv_head = kv_head;
    g.head = kv_head * p.group + member;
    // Query blocks that see the pass.
    const int row_lo = first_row(p.mask, begin, shift), row_hi = min(s.q_len, end_row(p.mask, end - 1, shift, s.q_len));
    const bool empty = end <= begin || row_lo >= row_hi;
    g.lo = empty ? 0 : row_lo / q_tile;
    g.hi = empty ? 0 : (row_hi + q_tile - 1) / q_tile;
    const int pass_end = begin + count * keys;
    g.earlier_end = begin == 0 ? 0 : left < 0 ? all_blocks : block_from(bottom(begin));
    g.later_begin = s.kv_len <= pass_end ? all_blocks : right < 0 ? 0 : s.q_len <= top(pass_end) ? all_blocks : block_from(top(pass_end) - q_tile + 1);
    g.whole_hi = left < 0 ? all_blocks : block_from(bottom(key0) - q_tile + 2);
    g.whole_lo = s.kv_len < key0 + keys ? all_blocks : right < 0 ? 0 : block_from(top(key0 + keys) - 1);
    int flags = empty ? no_steps | (member == 0 ? zero_keys : 0) : (member == 0 ? first_of_tile : 0) | (member == p.group - 1 ? last_of_tile : 0);
    if (count > 1) flags |= exchange;
    // Rows that no tile has: the first tile makes their dq zero.
    g.zero_lo = g.zero_hi = 0;
    if (key0 == 0 && !p.broadcast) {
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
    uint32_t tile_count = 0, step = 0, segment = 0;
    shared.o_count = 0;
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

    // The following item, its unit, its sequence: asked for one after another, a step apart, so that nobody waits for them. Of a pair the
    // first CTA asks and tells both.
    uint32_t item = no_item;
    int looked = 0, now = 1;  // now: which of the two items is worked on; toggles, hence also the parity of the claims
    const auto look_ahead = [&](bool wait) {
        Item& next = shared.item[now ^ 1];
        if (looked == 0) {
            if (!pairs) {
                item = next_item(p, p.header->backward_units, item);
            } else {
                ptx::mbarrier_arrive_expect_tx(&shared.claim_full, sizeof(uint32_t));
                if (rank() == 0) {
                    ptx::mbarrier_wait(&shared.claim_empty, now);
                    const uint32_t claimed = next_item(p, p.header->backward_units, item);
                    for (int r = 0; r < cluster; ++r)
                        ptx::store_async(ptx::map_to_rank(&shared.claimed, r), claimed, ptx::map_to_rank(&shared.claim_full, r));
                }
            }
        } else if (looked == 1) {
            if (pairs) {
                if (!wait && !ptx::mbarrier_test_wait(&shared.claim_full, now ^ 1)) return;
                ptx::mbarrier_wait(&shared.claim_full, now ^ 1);
                item = *static_cast<volatile uint32_t*>(&shared.claimed);
                ptx::mbarrier_arrive_at(ptx::map_to_rank(&shared.claim_empty, 0));
            }
            if (item != no_item) {
                const JfaUnit unit = p.units[item / groups_of(p)];
                next.unit_sequence = unit.sequence;
                next.kv_head = item % groups_of(p) * cluster;
                next.heads = min(cluster, p.heads_kv - next.kv_head);
                next.tile = unit.first < 0 ? -1 : unit.first / keys;
            }
        } else if (item != no_item) {
            const JfaSequence s = p.sequences[next.unit_sequence];
            next.sequence = s;
            next.row_block = s.o_row / q_tile + next.unit_sequence;
            const bool all = next.tile < 0;  // all tiles of the sequence, or those of one pass
            const int tiles = max(1, (s.kv_len + keys - 1) / keys);
            next.flags = all ? owned : waits | raises;
            next.tile_end = all ? tiles : min(tiles, next.tile + cluster);
            next.tile = max(0, next.tile);
            // A pair takes two tiles at a time, one in each CTA, head by head. What is left of an odd number: every CTA a head of its
            // own; half of the sums then comes from the other CTA.
            const int count = next.tile_end - next.tile;
            next.whole = pairs ? count / 2 : count;
            next.passes = next.whole * next.heads + (pairs && count % 2 && rank() < next.heads);
        }
        ++looked;
    };
    const auto walk = [&](const Item& it, const Pass& pass) {
#pragma unroll 1
        for (int member = 0; member < p.group; ++member) {
            ptx::mbarrier_wait(segment_empty(shared, segment), segment_phase(segment) ^ 1);
            Segment& g = shared.segment[segment % segments];
            fill_segment(g, p, it.sequence, pass.tile, pass.count, pass.member_tile, pass.kv_head, member);
            g.flags |= pass.flags;
            g.block = p.broadcast ? (slice_of(p) * p.heads_kv * p.group + g.head) * p.blocks : g.head * p.blocks + it.row_block;
            ptx::mbarrier_arrive(segment_full(shared, segment));
            ++segment;
#pragma unroll 1
            for (int i = g.hi - 1; i >= g.lo; --i, ++step) {
                const int q0 = i * q_tile, stage = stage_of(step);
                const bool first = member == 0 && i == g.hi - 1;
                const int k_stage = stage_of(tile_count);
                if (first) {
                    ptx::mbarrier_wait(&shared.k_empty[k_stage], phase_of(tile_count) ^ 1);
                    load(map_k, &shared.k_full[k_stage], shared.k[k_stage], keys, g.kv_row + g.key0, g.kv_len - g.key0, g.kv_head);
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
                if (same_do) {
                    ptx::mbarrier_arrive(&shared.do_full[stage]);
                } else {
                    load(map_do, &shared.do_full[stage], shared.d_o[stage], q_tile, g.o_row + q0, rows, g.head);
                }
                if (computes_delta(g, i)) {
                    ptx::mbarrier_wait(&shared.o_empty, (shared.o_count & 1) ^ 1);
                    load(map_o, &shared.o_full, shared.o, q_tile, g.o_row + q0, g.q_len - q0, g.head);
                    ++shared.o_count;
                }
                // v last: of a pair it waits for the end of the tile before.
                if (first) {
                    ptx::mbarrier_wait(&shared.v_empty[v_stage(tile_count)], v_phase(tile_count) ^ 1);
                    load(map_v, &shared.v_full[v_stage(tile_count)], shared.v[v_stage(tile_count)], keys, g.kv_row + g.key0, g.kv_len - g.key0, g.kv_head);
                    ++tile_count;
                }
                // Not before the last steps: an item claimed early waits behind this one while others have nothing to do, and all
                // later passes of its sequence wait with it.
                const int left = (p.group - 1 - member) * (g.hi - g.lo) + i - g.lo;
                if (pass.last && looked < 3 && left < 4) look_ahead(false);
            }
        }
    };
    for (;;) {
        while (looked < 3) look_ahead(true);
        looked = 0;
        now ^= 1;
        if (item == no_item) break;
        const Item& it = shared.item[now];
#pragma unroll 1
        for (int n = 0; n < it.passes; ++n) {
            const bool rest = n == it.whole * it.heads;
            const int head = rest ? rank() : n / it.whole, number = rest ? it.whole : n % it.whole;
            Pass& pass = shared.pass;
            pass.tile = it.tile + number * (pairs ? 2 : 1);
            pass.count = pairs && !rest ? 2 : 1;
            pass.member_tile = pairs && !rest ? rank() : 0;
            pass.kv_head = it.kv_head + head;
            pass.flags = it.flags;
            // The rest waits for what both CTAs added in the last pass before it (or in other units).
            if (rest) pass.flags = (it.flags & owned) | (it.tile + number > 0 ? waits : 0);
            if (pairs && !rest && number + 1 == it.whole && (it.tile_end - it.tile) % 2) pass.flags |= raises;
            pass.last = n + 1 == it.passes;
            walk(it, pass);
        }
    }
    ptx::mbarrier_wait(segment_empty(shared, segment), segment_phase(segment) ^ 1);
    shared.segment[segment % segments] = Segment{{no_steps | the_end}};
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

// The number of tiles that are in a CTA's half of the sum of a row block (without pairs: in the sum).
__device__ __forceinline__ int* flag_of(const JfaBackwardParams& p, int row_block, int half) { return p.control + 32 + cluster * row_block + half; }

__device__ void delta_warp(SharedMemory& shared, const JfaBackwardParams& p, int me) {
    const int lane = ptx::lane_id(), quad = lane % 4;
    int leaving = -1, tiles = 0;  // row block whose sum moves on after the last step, tiles in it
    uint32_t o_count = 0, raised = 0;
    const auto raise = [&] {
        if (leaving < 0) return;
        ptx::mbarrier_wait(&shared.dq_left, raised++ & 1);
        if (lane == 0) ptx::store_release(flag_of(p, leaving, rank()), tiles);
    };
    every_step(
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
                // The diagonal of o do^T, 16 rows at a time: fewer loads from shared memory, which the consumers' products fill, and a
                // tenth of the instructions of an elementwise sum.
#pragma unroll 1
                for (int row0 = first_row_of_warp; row0 < first_row_of_warp + q_tile / 2; row0 += 16) {
                    float low[4] = {}, high[4] = {};  // rows 0..7 and 8..15
                    const int row = row0 + lane % 16, at = row * 128 + ((lane / 16 ^ row & 7) << 4);
                    uint32_t o = ptx::smem_address(shared.o) + at, d_o = ptx::smem_address(shared.d_o[stage]) + at;
#pragma unroll 1
                    for (int chunk = 0; chunk < chunks; ++chunk, o += q_chunk, d_o += q_chunk) {
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            uint32_t a[4], b[4];  // 8 x 8: rows 0..7 and 8..15 of columns 0..7, then of columns 8..15
                            ptx::ldmatrix_x4(a, o ^ 32 * k);
                            ptx::ldmatrix_x4(b, d_o ^ 32 * k);
                            ptx::mma_16x8x16<T>(low, a, b[0], b[2]);
                            ptx::mma_16x8x16<T>(high, a, b[1], b[3]);
                        }
                    }
                    if (quad == lane / 8) {
                        const bool odd = lane / 4 % 2;
                        const int place = row0 + lane / 4;
                        const float sum[2] = {odd ? low[1] : low[0], odd ? high[3] : high[2]};
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            shared.delta[stage][place_of(place + 8 * h)] = sum[h];
                            if (keeps_delta(s, i)) partial_delta(p, s.block + i)[place + 8 * h] = sum[h];
                        }
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
            // The step before: its share of dq is in `partial`, with pairs in the middle of this step. The flag says so to the CTAs of
            // the next tiles; raised here, because it costs a round trip to the L2 that the consumers need not wait for.
            if (me == 1) {
                raise();
                leaving = (s.flags & raises) && i >= s.later_begin ? s.block + i : -1;
                tiles = s.tile_end;
            }
        });
    if (me == 1) raise();
}

__device__ void lse_warp(SharedMemory& shared, const JfaBackwardParams& p) {
    const int lane = ptx::lane_id();
    uint32_t chained = 0;
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

            if ((s.flags & waits) && i < s.earlier_end) {
                const int own = (s.flags & exchange) ? rank() : 0;
                while (ptx::load_acquire(flag_of(p, s.block + i, own)) < s.tile) {}
                if (pairs && !(s.flags & exchange))
                    while (ptx::load_acquire(flag_of(p, s.block + i, 1)) < s.tile) {}
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(&shared.chain_full[stage_of(chained)]);
                ++chained;
            }
        });
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_dk, const CUtensorMap* map_dv, int me) {
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
        row_products(dp, shared.v[v_stage(unit)] + me * 64 * 128, shared.d_o[stage_of(step)]);
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
            if (lane < int(sizeof(Work) / sizeof(int))) reinterpret_cast<int*>(&shared.held[4 * me + warp][held % 2])[lane] = from[lane];
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
        ptx::mbarrier_wait(&shared.v_full[v_stage(u)], v_phase(u));
        ptx::mbarrier_wait(&shared.do_full[stage_of(n)], phase_of(n));
    };
    // stmatrix: where this lane's row of two 8-column groups (the first of them even) stands. Opaque, lest the compiler keep all of
    // these addresses over the loop and spill them.
    const auto fragment_rows = [&](uint32_t base, int group) {
        uint32_t row;
        asm volatile("mov.u32 %0, %1;" : "=r"(row) : "r"((lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4)));
        return base + (row ^ (group << 4));
    };
    // The thread's sums of a row block lie in `partial` as they lie in its registers; the warp's rows are 4 KB.
    const auto partial_of = [&](int row_block) {
        static_assert(dq_columns == 64);
        return reinterpret_cast<float4*>(partial_block(p, row_block) + (4 * me + warp) * 4096) + lane;
    };

    // Rows `first`, `first` + 8 of a tensor in its own type, straight from the registers: groups of eight columns from number `group` of
    // `from` on stand from `first_column` on.
    // Neighbouring lanes swap halves, so that four of them write 32 bytes side by side.
    const auto store_rows = [&](char* base, long long row_bytes, int first, int rows, int first_column, int columns, const auto& from, int group, int groups, float factor) {
        const bool odd = lane & 1;
        const int own_column = first_column + (odd ? 8 : 0) + (lane & 2) * 2;
        char* to = base + first * row_bytes + own_column * 2;
#pragma unroll
        for (int x = 0; x < groups; x += 2) {
            const float* values = from + 4 * (group + x);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t here = ptx::pack<T>(values[2 * half] * factor, values[2 * half + 1] * factor);
                const uint32_t there = ptx::pack<T>(values[4 + 2 * half] * factor, values[5 + 2 * half] * factor);
                const uint32_t other = __shfl_xor_sync(~0u, odd ? here : there, 1);
                if (first + 8 * half < rows && own_column + 8 * x < columns)
                    *reinterpret_cast<uint2*>(to + 8 * half * row_bytes + 16 * x) = odd ? uint2{other, there} : uint2{here, other};
            }
        }
    };
    // A share of dq leaves: to `partial`, or for good. `from`: groups of eight columns from number `group` of the consumer's on.
    const auto leave_dq = [&](const Leaving& l, int group, const auto& from) {
        constexpr int groups = int(sizeof(from) / sizeof(from[0])) / 4;
        float4* sums = partial_of(l.block) + 32 * group;
        if (l.flags & adds_later) {
            if (l.flags & adds_earlier) {
#pragma unroll
                for (int x = 0; x < groups; ++x) ptx::add_l2(sums + 32 * x, float4{from[4 * x], from[4 * x + 1], from[4 * x + 2], from[4 * x + 3]});
            } else {
#pragma unroll
                for (int x = 0; x < groups; ++x) ptx::store_l2(sums + 32 * x, float4{from[4 * x], from[4 * x + 1], from[4 * x + 2], from[4 * x + 3]});
            }
        } else {
            if ((l.flags & adds_earlier) && lane < 4 * groups) ptx::discard_l2(reinterpret_cast<const char*>(sums - lane) + 128 * lane);
            const int row = (q_tile == 128 ? own_row : 16 * warp) + lane / 4;
            store_rows(static_cast<char*>(p.dq) + l.row * p.dq_row_bytes + l.head * p.dq_head_bytes, p.dq_row_bytes, row, l.rows,
                       (q_tile == 128 ? 0 : 64 * me) + 8 * group, 8 * p.vectors_qk, from, 0, groups, p.scale);
        }
        __syncwarp();
        if ((l.flags & is_awaited) && lane == 0) ptx::mbarrier_arrive(&shared.dq_left);
    };
    // The half of a step's dq that this CTA kept, and the same half of its neighbour's: together they leave.
    const int half = rank();
    uint32_t counts = 0;      // bit 0: parity of the exchanges; above: waits for other CTAs' sums
    bool exchanged = false;  // dq of the step before has not left yet
    const auto take_exchanged = [&](float(&sum)[16]) {
        ptx::mbarrier_wait(&shared.received_full, (counts & 1) ^ 1);
        const int at = (4 * me + warp) * 128 + ptx::lane_id();
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float4 a = shared.kept[at + 32 * x], b = shared.received[at + 32 * x];
            sum[4 * x] = a.x + b.x, sum[4 * x + 1] = a.y + b.y, sum[4 * x + 2] = a.z + b.z, sum[4 * x + 3] = a.w + b.w;
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive_at(ptx::map_to_rank(&shared.neighbour_ready, half ^ 1));
    };
    const auto finish_exchange = [&](int stage) {
        if (!exchanged) return;
        exchanged = false;
        float sum[16];
        take_exchanged(sum);
        leave_dq(shared.leaving[4 * me + warp][stage], 4 * half, sum);
    };

    // A broadcast query: this CTA's sums start from zero.
    if (!pairs && p.broadcast) {
        for (int kv_head = blockIdx.x % p.heads_kv; kv_head < p.heads_kv; kv_head += gridDim.x)
            for (int b = 0; b < p.group * p.blocks; ++b)
                for (int x = 0; x < dq_columns / 8; ++x)
                    partial_of((slice_of(p) * p.heads_kv + kv_head) * p.group * p.blocks + b)[32 * x] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }

    bool first = true, keys_leave = false;
    // Two loops: the inner one goes on as long as the next segment is known before a step ends. Where it is not, dq must leave first:
    // who will say what comes next may wait for it.
    for (;;) {
        if (pairs) finish_exchange(stage_of(step - 1));
        fetch();
        if (flags & the_end) break;
        wait_k_q(unit, step);
        scores(unit, step);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
        wait_v_do(unit, step);
        for (bool more = true; more;) {
            const Work& g = shared.held[4 * me + warp][held % 2];
            const int stage = stage_of(step);
            uint32_t p_fragments[q_tile / 16][4], ds_fragments[q_tile / 16][4];

            // lse of this thread's columns. Read before the next product occupies shared memory: behind it a load takes 300 cycles.
            ptx::mbarrier_wait(&shared.lse_full[stage], phase_of(step));
            float4 lse[q_tile / 16];  // of two groups of eight columns: two columns of both
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x) lse[x] = ptx::load_shared(&shared.lse[stage][16 * x + 2 * column]);

            // What this step does with its share of dq, in one register: Segment::flags and the two below.
            enum : int { earlier = 1 << 29, later = 1 << 30 };
            const int now = flags | (p.broadcast || block < g.earlier_end ? earlier : 0) | (p.broadcast || block >= g.later_begin ? later : 0);
            const bool exchanges_dq = pairs && (now & exchange);
            Leaving& out = shared.leaving[4 * me + warp][stage];
            if (lane == 0)
                out = {(now & earlier ? adds_earlier : 0) | (now & later ? adds_later : 0) | (now & later && now & raises ? is_awaited : 0), g.block + block,
                       g.q_row + block * q_tile, min(g.q_len, p.o_rows - g.q_row) - block * q_tile, g.head};

            // dp^T = v do^T, behind it p^T = exp2(s^T * scale - lse), at most 1
            score_gradients(unit, step);
#pragma unroll
            for (int x = 0; x < q_tile / 8; x += 2) {
                const float4 l = lse[x / 2];
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
            if (pairs && lane == 0 && block == g.lo && (now & last_of_tile)) ptx::mbarrier_arrive(&shared.v_empty[v_stage(unit)]);
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
            if (keys_leave && lane == 0) {
                ptx::mbarrier_arrive(&shared.k_empty[stage_of(unit) ^ 1]);
                if (!pairs) ptx::mbarrier_arrive(&shared.v_empty[v_stage(unit + 1)]);
            }
            keys_leave = false;
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
                ptx::stmatrix_x4(fragment_rows(ptx::smem_address(shared.ds[x / 4]) + own_row * 128, x % 4 * 2), ds_fragments[x][0], ds_fragments[x][1],
                                 ds_fragments[x][2], ds_fragments[x][3]);

            ptx::fence_async_shared();

            // The sum of the passes before comes in where this is the last one to add. dq of the step before may belong to it (few rows,
            // many keys), and so may what is waited for.
            const bool takes = (now & (earlier | later)) == earlier;
            if (pairs && (takes || now & waits)) finish_exchange(stage ^ 1);
            if (now & earlier && now & waits) {
                const uint32_t chained = counts >> 1;
                ptx::mbarrier_wait(&shared.chain_full[stage_of(chained)], phase_of(chained));
                counts += 2;
            }
            if (takes) {
                const float4* sums = partial_of(g.block + block);
#pragma unroll
                for (int x = 0; x < dq_columns / 8; ++x) {
                    float4 f{0.0f, 0.0f, 0.0f, 0.0f};
                    if (!exchanges_dq || x / 4 == half) f = ptx::load_l2(sums + 32 * x);
                    dq[4 * x] = f.x, dq[4 * x + 1] = f.y, dq[4 * x + 2] = f.z, dq[4 * x + 3] = f.w;
                }
            } else {
#pragma unroll
                for (int x = 0; x < dq_columns / 2; ++x) dq[x] = 0.0f;
            }
            // dq of the step before: here the products leave shared memory some time for loads, and there are registers.
            if (pairs) finish_exchange(stage ^ 1);
            ptx::wgmma_wait<1>();  // dv: its fragments leave their registers

            // One thread looks whether the next segment is there, so that all decide alike.
            const bool segment_ends = block == g.lo, last = segment_ends && (flags & last_of_tile);
            if (segment_ends && me == 0 && warp == 0 && lane == 0)
                shared.segment_known[stage] = ptx::mbarrier_test_wait(segment_full(shared, segment), segment_phase(segment)) &&
                                              !(shared.segment[segment % segments].flags & no_steps);
            ptx::named_barrier_sync(1, 256);  // ds^T is complete
            query_gradients(unit);

            // The next step's scores run behind it; where there is none (yet) this one's once more, and nobody looks (a product behind a
            // branch would make the assembler serialize all of them).
            --block;
            if (segment_ends) {
                more = __shfl_sync(~0u, shared.segment_known[stage], 0);
                if (more) fetch();
            }
            const uint32_t next_unit = unit + last;
            if (more) wait_k_q(next_unit, step + 1);
            ptx::wgmma_wait<1>();  // dk
            scores(more ? next_unit : unit, step + more);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(dq);
            if (!more) ptx::wgmma_wait<0>();  // the product that nobody looks at reads k and q
            if (lane == 0) ptx::mbarrier_arrive(&shared.ds_empty);

            // dq leaves: a half of it to the neighbour, or all of it to where it belongs
            if (exchanges_dq) {
                if (lane == 0) ptx::mbarrier_arrive_expect_tx(&shared.received_full, 2048);
                ptx::mbarrier_wait(&shared.neighbour_ready, (counts & 1) ^ 1);
                float4* kept = shared.kept + (4 * me + warp) * 128 + ptx::lane_id();
                const uint32_t neighbour_received = ptx::map_to_rank(shared.received + (4 * me + warp) * 128 + ptx::lane_id(), half ^ 1);
                const uint32_t neighbour_full = ptx::map_to_rank(&shared.received_full, half ^ 1);
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float4 low{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]};
                    const float4 high{dq[4 * x + 16], dq[4 * x + 17], dq[4 * x + 18], dq[4 * x + 19]};
                    kept[32 * x] = half ? high : low;
                    ptx::store_async(neighbour_received + 512 * x, half ? low : high, neighbour_full);
                }
                counts ^= 1;
                exchanged = true;
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            } else {
                leave_dq(out, 0, dq);
                if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            }
            if (more) wait_v_do(next_unit, step + 1);

            // dk and dv leave through rows of shared memory that this warp owned: those of k, v and, of a pair, whose v is being replaced, ds^T;
            // what finds no room there goes straight from the registers.
            if (last) {
                const int rows = min(16, g.kv_len - g.key0 - own_row), row = g.kv_row + g.key0 + own_row;
                const auto leave = [&](const CUtensorMap* map, uint8_t* chunk0, int chunk_bytes, int count, const float(&from)[head_dim / 2], float factor) {
#pragma unroll
                    for (int x = 0; x < 8 * count; x += 2)
                        ptx::stmatrix_x4(fragment_rows(ptx::smem_address(chunk0) + x / 8 * chunk_bytes + own_row * 128, x % 8),
                                         ptx::pack<T>(from[4 * x] * factor, from[4 * x + 1] * factor),
                                         ptx::pack<T>(from[4 * x + 2] * factor, from[4 * x + 3] * factor),
                                         ptx::pack<T>(from[4 * x + 4] * factor, from[4 * x + 5] * factor),
                                         ptx::pack<T>(from[4 * x + 6] * factor, from[4 * x + 7] * factor));
                    ptx::fence_async_shared();
                    __syncwarp();
                    if (lane == 0 && rows > 0) {
#pragma unroll
                        for (int x = 0; x < count; ++x)
                            ptx::tma_store_rows(map, chunk0 + x * chunk_bytes + own_row * 128, 64 * x, row, rows, g.kv_head);
                        ptx::bulk_commit();
                    }
                };
                if (!pairs) leave(map_dv, shared.v[v_stage(unit)], kv_chunk, chunks, dv, 1.0f);
                if (pairs && chunks > 1)
                    store_rows(static_cast<char*>(p.dv) + (g.kv_row + g.key0) * p.dv_row_bytes + g.kv_head * p.dv_head_bytes, p.dv_row_bytes,
                               own_row + lane / 4, min(g.kv_len, p.kv_rows - g.kv_row) - g.key0, 64, 8 * p.vectors_v, dv, 8, 8 * (chunks - 1), 1.0f);
                ptx::mbarrier_wait(&shared.ds_empty, step & 1);  // both consumers have read k and ds^T
                if (pairs) leave(map_dv, shared.ds[0], ds_chunk, 1, dv, 1.0f);
                leave(map_dk, shared.k[stage_of(unit)], kv_chunk, chunks, dk, p.scale);
                keys_leave = true;
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
            first = last;
            unit = next_unit;
            ++step;
        }
    }
    if (lane == 0) ptx::bulk_wait<0>();
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = cluster * keys;  // keys of a unit that is not a whole sequence
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
            ptx::mbarrier_init(&shared.k_empty[i], 8);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], 8);
            ptx::mbarrier_init(&shared.delta_full[i], 2);
            ptx::mbarrier_init(&shared.lse_full[i], 1);
            ptx::mbarrier_init(&shared.chain_full[i], 1);
        }
        for (int i = 0; i < v_stages; ++i) {
            ptx::mbarrier_init(&shared.v_full[i], 1);
            ptx::mbarrier_init(&shared.v_empty[i], 8);
        }
        ptx::mbarrier_init(&shared.dq_left, 8);
        ptx::mbarrier_init(&shared.claim_full, 1);
        ptx::mbarrier_init(&shared.claim_empty, cluster);
        ptx::mbarrier_init(&shared.received_full, 8);
        ptx::mbarrier_init(&shared.neighbour_ready, 8);
        ptx::mbarrier_init(&shared.o_full, 1);
        ptx::mbarrier_init(&shared.o_empty, 2);
        ptx::mbarrier_init(&shared.ds_empty, 8);
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_o);
        ptx::tma_prefetch_map(&map_do);
        ptx::tma_prefetch_map(&map_dk);
        ptx::tma_prefetch_map(&map_dv);
    }
    if (pairs) {
        ptx::cluster_sync();  // the neighbour's barriers exist
    } else {
        __syncthreads();
    }

    if (warpgroup == 0) {
        ptx::registers_release<56>();
        if (warp == 0) {
            if (ptx::elect_one()) produce(shared, p, &map_q, &map_k, &map_v, &map_o, &map_do);
        } else if (warp == 3) {
            lse_warp(shared, p);
        } else {
            delta_warp(shared, p, warp - 1);
        }
    } else {
        ptx::registers_acquire<224>();
        consume(shared, p, &map_dk, &map_dv, warpgroup - 1);
    }
    if (pairs) {
        __syncwarp();
        ptx::cluster_sync();  // nothing is on its way to the neighbour any more
    }
}

}  // namespace jfa
