// Jagged attention backward, Hopper (sm_90a): dq, dk, dv in one launch, persistent, deterministic.
//
//   tile        128 keys of one sequence and key/value head, walked over blocks of query rows (64 at head_dim 128, 128 at 64) from
//               the last one down, for every query head of the group; dk and dv stay in registers
//   pair        two CTAs (a cluster) take two neighbouring tiles at a time, one each, over the same rows; of an odd number of tiles
//               the last one alone, each CTA with a head of its own. `cluster` is 1 where the query is broadcast
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q, dq = ds k; p^T and ds^T never leave the registers as
//               left operands, ds^T goes to shared memory once for dq. s^T starts from -lse: what the product leaves is the exponent of
//               p^T. delta is added to dp^T when it is there: it is the last thing a step waits for (head_dim 64: dp^T starts from it)
//   roles       producer warpgroup: warp 0: schedule and TMA; warps 1, 2: delta = rowsum(o * do), once per block of rows; warp 3: lse,
//               waits for flags, asks for the next item and for the keys of one-step tiles into the L2. Warpgroup of dq. Two consumer
//               warpgroups of 64 keys each, which go their own ways: they meet nobody but through barriers of buffers
//   delta       of a pair, each CTA multiplies half of the rows of o do^T and sends what it has to its neighbour. Whatever is added to these
//               two warps' work in a step, the step waits for (docs/performance.md)
//   dq          a step's dq is multiplied in two halves (32 registers). Of a pair, each CTA sends one half to its neighbour, multiplies the
//               other and adds what the neighbour sends. Where the pass has all keys of the sequence it leaves for good; else the
//               first pass leaves its share in `partial` (L2), the others add theirs there, the last one takes the sum along and
//               stores dq. A pair does the passes of a sequence in their order, hence the same threads add in the same order. Only
//               sequences too long for one pair have passes on many: they wait for flags
//   buffers     k: 2 stages (dk leaves through them); v: 1; q, do: 2; o: 2 halves; ds^T: 2 (dv leaves through them); the received
//               half of dq. do's stage is given back in the middle of a step, q's at the end
//   overlap     behind dp^T and dv nothing but the other consumer; ds^T is written behind dk, whose left operand is registers: products of
//               64 x 64 take all of shared memory's bandwidth, and whatever else is read or written there waits for them
//               (docs/performance.md). The next step's s^T is issued at the end of a step, also across tiles
//   registers   consumers 208, dq 64, producers 32: all 65,536. One array holds s^T, p^T and dp^T in turn: in two the assembler
//               finds no room and serializes all products (C7512)
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
constexpr int ds_chunks = q_tile / 64;        // of 64 query rows
constexpr int ds_stages = 2;
constexpr bool delta_behind = head_dim > 64;  // delta is loaded behind dp^T's product, if there are registers, else in front of it
constexpr int chain_stages = 4;               // lse is up to three steps ahead of dq
constexpr int segments = 4;
constexpr int cluster = JFA_CLUSTER;          // CTAs that share a sequence
constexpr bool pairs = cluster == 2;
constexpr int threads = 512;
constexpr int producer_registers = 32, dq_registers = 64, consumer_registers = 208;
static_assert(128 * (producer_registers + dq_registers + 2 * consumer_registers) <= 65536);
static_assert(cluster == 1 || cluster == 2);
static_assert(q_tile * (head_dim + 2) * 4 <= JFA_BACKWARD_BLOCK_BYTES, "params.h");
static_assert(q_tile * head_dim == 2 * 64 * 64, "dq of a step is two halves of 64 x 64");

constexpr int kv_chunk = keys * 128;          // bytes
constexpr int q_chunk = q_tile * 128;
constexpr int kv_bytes = chunks * kv_chunk;
constexpr int q_bytes = chunks * q_chunk;
constexpr int half_rows = q_tile / 2;         // of a block, as o comes and delta is computed
constexpr int half_bytes = half_rows * head_dim * 2, half_chunk = half_rows * 128;
constexpr int ds_chunk = keys * 128;          // ds^T: rows are keys, 64 query rows to a chunk

// Query rows of one head that a tile walks over. A pass is one tile or, where a pair of CTAs works together, two neighbouring ones,
// one in each CTA. owned: the CTA does all passes of the sequence that it takes part in; waits, raises: other CTAs' share of the sums is
// waited for, the own one announced; exchange: a pass of two tiles.
enum : int {
    last_of_tile = 1, no_steps = 2, the_end = 4, zero_keys = 8, zero_queries = 16, owned = 32, waits = 64, raises = 128, exchange = 256
};
struct Work {              // what the consumers need of a segment
    int flags;
    int lo, hi;            // query blocks, walked from hi - 1 down to lo
    int q_len, kv_len;
    int key0;              // first key of the CTA's tile
    int kv_row, kv_head;
    int whole_lo, whole_hi; // of these query blocks no mask cuts anything
};
struct Segment : Work {
    int q_row, o_row;
    int head;
    int block;             // row block of query block 0
    int earlier_end;       // to query blocks before it an earlier pass adds too
    int later_begin;       // to query blocks from it on a later pass adds too
    int tile, tile_end;    // tiles of the pass
    int zero_lo, zero_hi;  // zero_queries: rows [0, zero_lo) and [zero_hi, q_len) see no key
    int look_at;           // the query block with whose step the following item is asked for; -1: with none of this segment
};

// One unit and `cluster` key/value heads: what the schedule thread works on and what follows. Of a pair one thread asks for both.
struct alignas(16) Item {
    int q_row, o_row, q_len, kv_row, kv_len;  // the sequence
    int row_block;        // of the sequence's query block 0, for query head 0
    int kv_head, heads;   // heads [kv_head, kv_head + heads)
    int tile, tile_end;   // tiles of the unit
    int flags;            // `owned`, or `waits` and `raises`; `the_end`: there is no further item
    int reserved;
};

// One pass of an item, with every query head of a key/value head.
struct Pass {
    int tile, count;      // tiles of the pass
    int member_tile;      // the CTA's among them
    int kv_head;
    int flags;            // Segment::flags
    int after;            // passes of this CTA's item after it
};

// Where the thread that schedules and loads is.
struct Progress {
    uint32_t items, tiles, segments, v_segment;  // v_segment: of the tile whose v is not loaded yet
    int looked;              // whether a segment of the item asks for the following one
    int pass, member;        // in the item: the pass and the query head of the group
    int head, number;        // the pass' key/value head and, among its passes, its number
};

struct SharedMemory {
    uint8_t k[2][kv_bytes], v[kv_bytes];
    uint8_t q[2][q_bytes], d_o[2][q_bytes];
    uint8_t ds[ds_stages][ds_chunks][ds_chunk];
    uint8_t o[2][half_bytes];
    float4 received[pairs ? 8 * 4 * 32 : 1];  // the neighbour's share of this CTA's half of a step's dq, as it lay in the registers
    float lse[2][q_tile];    // -lse in units of the scores; whatever makes p 0 where it must be. At place_of(row)
    float delta[2][q_tile];  // -delta, likewise
    float received_delta[pairs ? half_rows : 1];  // what the neighbour has computed of a pair's delta
    Segment segment[segments];
    Item item[2];
    Pass pass;               // not in registers: they are scarce in the producer
    Progress progress;       // likewise
    int4 content[2];         // whose rows a stage of q and do holds: row of q, row of o, rows, head
    Work held[8][2];         // every consumer warp's own copies of the segment it works on and the next one
    int segment_known[2][2]; // per consumer: whether the segment after this one is there
    uint32_t asked, last_asked;  // in the first CTA of the cluster: how many items have been asked for, the last one
    uint64_t segment_full[segments], segment_empty[segments];
    uint64_t k_full[2], v_full, k_empty[2], v_empty;
    uint64_t q_full[2], q_empty[2], do_full[2], do_empty[2];
    uint64_t o_full[2], o_empty[2];
    uint64_t delta_full[2], lse_full[2], chain_full[chain_stages];
    uint64_t ds_full[ds_stages], ds_empty[ds_stages];
    uint64_t dq_left[2];     // of steps whose flag is raised
    uint64_t item_full, item_begun;                 // item_begun, in the first CTA: the other of `item` is free
    uint64_t received_full, neighbour_ready;        // neighbour_ready: it has taken what it received
    uint64_t delta_received, delta_taken;           // the same for delta
};

static_assert(sizeof(SharedMemory) <= 232448, "shared memory of a CTA");

__device__ __forceinline__ int stage_of(uint32_t n) { return n & 1; }
__device__ __forceinline__ uint32_t phase_of(uint32_t n) { return (n >> 1) & 1; }
__device__ __forceinline__ uint64_t* segment_full(SharedMemory& shared, uint32_t n) { return &shared.segment_full[n % segments]; }
__device__ __forceinline__ uint64_t* segment_empty(SharedMemory& shared, uint32_t n) { return &shared.segment_empty[n % segments]; }
__device__ __forceinline__ uint32_t segment_phase(uint32_t n) { return (n / segments) & 1; }

// Waits for several phases at once: a look at a barrier takes 90 cycles also where nothing is to be waited for.
__device__ __forceinline__ void wait_for(uint64_t* a, uint32_t phase_a, uint64_t* b, uint32_t phase_b) {
    while (!ptx::mbarrier_try_wait(a, phase_a, b, phase_b)) {}
}
__device__ __forceinline__ void wait_for(uint64_t* a, uint32_t phase_a, uint64_t* b, uint32_t phase_b, uint64_t* c, uint32_t phase_c) {
    while (!ptx::mbarrier_try_wait(a, phase_a, b, phase_b, c, phase_c)) {}
}

__device__ __forceinline__ int rank() { return pairs ? ptx::cluster_rank() : 0; }

// Pairs have no broadcast query.
__device__ __forceinline__ bool is_broadcast(const JfaBackwardParams& p) { return !pairs && p.broadcast; }

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

// Registers are scarce in the producer: what follows from this is not computed ahead of its loops and kept.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Groups of `cluster` key/value heads.
__device__ __forceinline__ uint32_t groups_of(const JfaBackwardParams& p) { return (opaque(p.heads_kv) + cluster - 1) / cluster; }

__device__ __forceinline__ uint32_t next_item(const JfaBackwardParams& p, uint32_t units, uint32_t before) {
    if (!is_broadcast(p)) {
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

// Asks for the next item and puts it in `item` of all CTAs of the cluster: one thread of the first one.
__device__ __forceinline__ void ask_for_item(SharedMemory& shared, const JfaBackwardParams& p) {
    const uint32_t n = shared.asked;
    shared.asked = n + 1;
    if (n > 0) ptx::mbarrier_wait(&shared.item_begun, (n - 1) & 1);
    const uint32_t id = next_item(p, p.header->backward_units, shared.last_asked);
    shared.last_asked = id;
    Item item{};
    item.flags = the_end;
    if (id != no_item) {
        const uint32_t groups = groups_of(p);
        const JfaUnit unit = p.units[id / groups];
        const JfaSequence s = p.sequences[unit.sequence];
        const int tiles = max(1, (s.kv_len + keys - 1) / keys), kv_head = id % groups * cluster, tile = max(0, unit.first) / keys;
        const bool all = unit.first < 0;  // all tiles of the sequence, or those of one pass
        item = {s.q_row, s.o_row, s.q_len, s.kv_row, s.kv_len, s.o_row / q_tile + unit.sequence, kv_head, min(cluster, p.heads_kv - kv_head),
                tile, all ? tiles : min(tiles, tile + cluster), all ? owned : waits | raises, 0};
    }
    if (pairs) {
        for (int r = 0; r < cluster; ++r) {
            const uint32_t to = ptx::map_to_rank(&shared.item[n & 1], r), full = ptx::map_to_rank(&shared.item_full, r);
            const auto send = [&](int at, int a, int b, int c, int d) {
                ptx::store_async(to + at, float4{__int_as_float(a), __int_as_float(b), __int_as_float(c), __int_as_float(d)}, full);
            };
            send(0, item.q_row, item.o_row, item.q_len, item.kv_row);
            send(16, item.kv_len, item.row_block, item.kv_head, item.heads);
            send(32, item.tile, item.tile_end, item.flags, 0);
        }
    } else {
        shared.item[n & 1] = item;
    }
}

// The first query block from row x on.
constexpr int all_blocks = 1 << 25;
__device__ __forceinline__ int block_from(int x) { return x <= 0 ? 0 : x / q_tile + (x % q_tile != 0); }

// The pass has `count` tiles from `tile` on, the CTA works on number `member_tile`. What is read of shared memory is read first.
__device__ __forceinline__ void fill_segment(Segment& g, const JfaBackwardParams& p, const Item& item, const Pass& pass, int member, int& looked) {
    const int q_row = item.q_row, o_row = item.o_row, q_len = item.q_len, kv_row = item.kv_row, kv_len = item.kv_len, row_block = item.row_block;
    const int tile = pass.tile, count = pass.count, member_tile = pass.member_tile, kv_head = pass.kv_head, head = kv_head * p.group + member;
    int flags = pass.flags;
    const int left = opaque(p.mask.left), right = opaque(p.mask.right);
    const int begin = tile * keys, pass_end = begin + count * keys, end = min(pass_end, kv_len), key0 = begin + member_tile * keys;
    // Row r sees keys r + shift - left .. r + shift + right. From row top(key) on (not before row 0) a row sees keys from `key` on, before
    // bottom(key) it sees keys before `key`. Lengths and sides may be close to 2^31: nothing here may overflow.
    const auto middle = [&](int key) { return p.mask.bottom_right ? key - kv_len + q_len : key; };
    const auto top = [&](int key) { return middle(key) <= right ? 0 : middle(key) - right; };
    const auto bottom = [&](int key) {
        const int row = middle(key);
        return row > 0 && left > 0x7FFFFFFF - row ? 0x7FFFFFFF : max(row + left, -1 << 30);
    };
    const auto first_row = [&](int key) { return right < 0 ? 0 : top(key); };
    const auto end_row = [&](int key) { return left < 0 || bottom(key) >= q_len ? q_len : max(0, bottom(key) + 1); };
    g.q_row = q_row;
    g.o_row = o_row;
    g.kv_row = kv_row;
    g.q_len = q_len;
    g.kv_len = kv_len;
    g.key0 = key0;
    g.tile = tile;
    g.tile_end = tile + count;
    g.kv_head = kv_head;
    g.head = head;
    g.block = is_broadcast(p) ? (slice_of(p) * p.heads_kv * p.group + head) * p.blocks : head * p.blocks + row_block;
    // Query blocks that see the pass.
    const int row_lo = first_row(begin), row_hi = end_row(end - 1);
    const bool empty = end <= begin || row_lo >= row_hi;
    const int lo = empty ? 0 : row_lo / q_tile, hi = empty ? 0 : block_from(row_hi);
    g.lo = lo, g.hi = hi;
    // Not before the last steps: an item asked for early waits behind this one while others have nothing to do, and all later passes of its
    // sequence wait with it.
    const int after = (pass.after * p.group + p.group - 1 - member) * max(1, hi - lo);
    const bool looks = !looked && after < 4;
    g.look_at = looks ? max(lo, min(hi - 1, lo + 3 - after)) : -1;
    if (looks) looked = 1;
    g.earlier_end = begin == 0 ? 0 : left < 0 ? all_blocks : block_from(bottom(begin));
    g.later_begin = kv_len <= pass_end ? all_blocks : right < 0 ? 0 : q_len <= top(pass_end) ? all_blocks : block_from(top(pass_end) - q_tile + 1);
    g.whole_hi = left < 0 ? all_blocks : block_from(bottom(key0) - q_tile + 2);
    g.whole_lo = kv_len < key0 + keys ? all_blocks : right < 0 ? 0 : block_from(top(key0 + keys) - 1);
    flags |= empty ? no_steps | (member == 0 ? zero_keys : 0) : member == p.group - 1 ? last_of_tile : 0;
    if (count > 1) flags |= exchange;
    // Rows that no tile has: the first tile makes their dq zero.
    if (key0 == 0 && !is_broadcast(p)) {
        const int see_lo = first_row(0), see_hi = kv_len ? end_row(kv_len - 1) : 0;
        const int zero_lo = see_lo < see_hi ? see_lo / q_tile * q_tile : q_len;
        const int zero_hi = see_lo < see_hi ? min(q_len, block_from(see_hi) * q_tile) : q_len;
        g.zero_lo = zero_lo, g.zero_hi = zero_hi;
        if (zero_lo > 0 || zero_hi < q_len) flags |= zero_queries;
    }
    g.flags = flags;
}

__device__ void produce(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_o, const CUtensorMap* map_do) {
    // What every step needs is kept in registers, the rest in shared memory: beside the consumers' products an access takes 150 cycles.
    Progress& at = shared.progress;
    at = {};
    uint32_t step = 0, halves_of_o = 0;
    bool v_due = false;
    shared.content[0] = shared.content[1] = int4{0, 0, -1, 0};

    // `rows` rows from `row` on as boxes of 64 rows, zeros after them. Keys, values, o and what leaves come by once: the first to leave the L2, so that a
    // later pass finds q, do and the sums there.
    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int tile_rows, int row, int rows, int head, uint64_t policy) {
        ptx::mbarrier_arrive_expect_tx(barrier, tile_rows * head_dim * 2);
#pragma unroll
        for (int y = 0; y < tile_rows; y += 64)
#pragma unroll
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map, barrier, to + x * tile_rows * 128 + y * 128, 64 * x, row + y, max(0, min(64, rows - y)), head, policy);
    };

    const auto load_o = [&](int half, int row, int rows, int head) {
        const int stage = stage_of(halves_of_o);
        ptx::mbarrier_wait(&shared.o_empty[stage], phase_of(halves_of_o) ^ 1);
        ptx::mbarrier_arrive_expect_tx(&shared.o_full[stage], half_bytes);
        const int first = half_rows * half;
#pragma unroll
        for (int y = 0; y < half_rows; y += 32)
#pragma unroll
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map_o, &shared.o_full[stage], shared.o[stage] + x * half_chunk + y * 128, 64 * x, row + first + y,
                                   max(0, min(32, rows - first - y)), head, ptx::used_once());
        ++halves_of_o;
    };
    const auto load_v = [&] {
        if (!v_due) return;
        v_due = false;
        const Segment& g = shared.segment[at.v_segment % segments];
        const int row = g.kv_row + g.key0, rows = g.kv_len - g.key0, head = g.kv_head;
        ptx::mbarrier_wait(&shared.v_empty, at.tiles & 1);  // of the tile before
        load(map_v, &shared.v_full, shared.v, keys, row, rows, head, ptx::used_once());
    };
    // The steps of a pass with one query head of the group.
    const auto walk = [&] {
        const uint32_t n = at.segments;
        const int member = at.member;
        Segment& g = shared.segment[n % segments];
        at.segments = n + 1;
        ptx::mbarrier_wait(segment_empty(shared, n), segment_phase(n) ^ 1);
        fill_segment(g, p, shared.item[at.items & 1], shared.pass, member, at.looked);
        ptx::mbarrier_arrive(segment_full(shared, n));
        bool first = member == 0;
#pragma unroll 1
        for (int i = g.hi - 1; i >= g.lo; --i, ++step) {
            const int stage = stage_of(step), q0 = i * q_tile, rows = min(q_tile, g.q_len - q0), q_row = g.q_row + q0, o_row = g.o_row + q0;
            const int head = g.head;
            // The last of several passes is the last one to ask for these rows; a broadcast query's, the next sequence asks for.
            const uint64_t policy = pairs && i < g.later_begin && i < g.earlier_end ? ptx::used_once() : ptx::used_again();
            const bool computes = computes_delta(g, i), shares = g.flags & exchange;
            // A stage that holds the rows already, as with few queries and many keys, is not loaded again.
            const int4 there = shared.content[stage];
            const bool same = there.z == rows && there.w == head, same_q = same && there.x == q_row, same_do = same && there.y == o_row;
            shared.content[stage] = int4{q_row, o_row, rows, head};
            // In the order in which the stages become free, lest a load waits behind another one's stage: a half of o's when delta of two steps
            // before is there, do's and v's in the middle of a step, both halves' when delta of the step before is there, q's at a step's end, k's
            // long before, unless tiles have a step or two.
            if (pairs && computes && shares) load_o(rank(), o_row, rows, head);
            ptx::mbarrier_wait(&shared.do_empty[stage], phase_of(step) ^ 1);
            if (same_do) {
                ptx::mbarrier_arrive(&shared.do_full[stage]);
            } else {
                load(map_do, &shared.do_full[stage], shared.d_o[stage], q_tile, o_row, rows, head, policy);
            }
            load_v();
            if (computes && !shares)
#pragma unroll 1
                for (int half = 0; half < 2; ++half) load_o(half, o_row, rows, head);
            ptx::mbarrier_wait(&shared.q_empty[stage], phase_of(step) ^ 1);
            if (same_q) {
                ptx::mbarrier_arrive(&shared.q_full[stage]);
            } else {
                load(map_q, &shared.q_full[stage], shared.q[stage], q_tile, q_row, rows, head, policy);
            }
            if (first) {
                const uint32_t tile = at.tiles;
                const int kv_row = g.kv_row + g.key0, kv_rows = g.kv_len - g.key0, kv_head = g.kv_head, k_stage = stage_of(tile);
                at.tiles = tile + 1;
                at.v_segment = n;
                ptx::mbarrier_wait(&shared.k_empty[k_stage], phase_of(tile) ^ 1);
                load(map_k, &shared.k_full[k_stage], shared.k[k_stage], keys, kv_row, kv_rows, kv_head, ptx::used_once());
                first = false;
                v_due = true;
            }
        }
    };
    for (;; ++at.items) {
        if (pairs) ptx::mbarrier_arrive_expect_tx(&shared.item_full, sizeof(Item));
        ptx::mbarrier_wait(&shared.item_full, at.items & 1);
        if (shared.item[at.items & 1].flags & the_end) break;
        if (pairs) ptx::mbarrier_arrive_at(ptx::map_to_rank(&shared.item_begun, 0));
        else ptx::mbarrier_arrive(&shared.item_begun);
        at.looked = at.pass = at.head = at.number = 0;
        for (;;) {
            const Item& it = shared.item[at.items & 1];
            const int heads = it.heads, tile = it.tile, tile_end = it.tile_end, flags = it.flags, kv_head = it.kv_head;
            // A pair takes two tiles at a time, one in each CTA, head by head. What is left of an odd number: every CTA a head of its
            // own; half of the sums then comes from the other CTA.
            const int count = tile_end - tile, whole = pairs ? count / 2 : count, passes = whole * heads + (pairs && count % 2 && rank() < heads);
            int number = at.number, head = at.head;
            if (at.pass == passes) break;
            if (number == whole && whole > 0) number = 0, ++head;
            const bool rest = whole == 0 || head == heads;
            if (rest) number = whole;
            Pass pass;
            pass.tile = tile + number * (pairs ? 2 : 1);
            pass.count = pairs && !rest ? 2 : 1;
            pass.member_tile = pairs && !rest ? rank() : 0;
            pass.kv_head = kv_head + (rest ? rank() : head);
            pass.flags = flags;
            // The rest waits for what both CTAs added in the last pass before it (or in other units).
            if (rest) pass.flags = (flags & owned) | (tile + number > 0 ? waits : 0);
            if (pairs && !rest && number + 1 == whole && count % 2) pass.flags |= raises;
            pass.after = passes - 1 - at.pass;
            shared.pass = pass;
            at.head = head, at.number = number + 1, at.pass = passes - pass.after;
#pragma unroll 1
            for (at.member = 0; at.member < p.group; ++at.member) walk();
        }
        load_v();  // the next item may take its time
    }
    ptx::mbarrier_wait(segment_empty(shared, at.segments), segment_phase(at.segments) ^ 1);
    shared.segment[at.segments % segments] = Segment{{no_steps | the_end}};
    ptx::mbarrier_arrive(segment_full(shared, at.segments));
}

// ------------------------------------------------------------------------------------------------ the producer's other warps
// Calls visit(segment, query block, step) for every step of the CTA; `begin(segment)` once for every segment before; `idle` where the next
// segment is not there yet. Returns the number of steps.
template <class Idle, class Begin, class Visit>
__device__ __forceinline__ uint32_t every_step(SharedMemory& shared, Idle idle, Begin begin, Visit visit) {
    const int lane = ptx::lane_id();
    uint32_t step = 0;
    for (uint32_t n = 0;; ++n) {
        if (!__all_sync(~0u, ptx::mbarrier_test_wait(segment_full(shared, n), segment_phase(n)))) idle();
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
    int leaving = -1, tiles = 0;  // row block whose sum moves on after the last step, tiles in it
    int flags = 0, compute_from = 0;  // of the segment: blocks from `compute_from` on are computed here
    uint32_t halves = 0, exchanged = 0, raised = 0;
    const auto raise = [&](bool wait) {
        if (leaving < 0) return;
        uint64_t* left = &shared.dq_left[stage_of(raised)];
        if (!wait && !__all_sync(~0u, ptx::mbarrier_test_wait(left, phase_of(raised)))) return;
        ptx::mbarrier_wait(left, phase_of(raised));
        ++raised;
        if (ptx::lane_id() == 0) ptx::store_release(flag_of(p, leaving, rank()), tiles);
        leaving = -1;
    };
    every_step(
        shared,
        // Who will say what comes next may wait for the flag of the last step.
        [&] {
            if (me == 1) raise(true);
        },
        [&](const Segment& s) {
            flags = s.flags;
            compute_from = flags & owned ? s.earlier_end : 0;
            if (flags & zero_keys) {
                const int from = s.kv_row + s.key0, to = min(p.kv_rows, s.kv_row + min(s.key0 + keys, s.kv_len));
                zero_rows(p.dk, p.dk_row_bytes, p.dk_head_bytes, from, to, s.kv_head, p.vectors_qk, me);
                zero_rows(p.dv, p.dv_row_bytes, p.dv_head_bytes, from, to, s.kv_head, p.vectors_v, me);
            }
            if (flags & zero_queries) {
                const auto zero = [&](int from, int to) {
                    zero_rows(p.dq, p.dq_row_bytes, p.dq_head_bytes, s.q_row + from, min(p.o_rows, s.q_row + to), s.head, p.vectors_qk, me);
                };
                zero(0, s.zero_lo);
                zero(max(s.zero_lo, s.zero_hi), s.q_len);
            }
        },
        [&](const Segment& s, int i, uint32_t step) {
            const int stage = stage_of(step);
            const bool computes = i >= compute_from;
            // This lane's places of a block, where the warp has written: `own` and, at head_dim 64, 64 after it.
            const auto own = [&] { return q_tile == 64 ? ptx::lane_id() / 16 * 32 + 16 * me + ptx::lane_id() % 16 : 32 * me + ptx::lane_id(); };
            float value[q_tile / 64] = {};
            if (!computes) {
                const float* kept = partial_delta(p, s.block + i);
#pragma unroll
                for (int r = 0; r < q_tile / 64; ++r) value[r] = ptx::load_l2(kept + static_cast<uint32_t>(own() + 64 * r));
            }
            // The consumers have left do's stage, hence delta's. (Also lest a wait by parity below misses a phase.)
            ptx::mbarrier_wait(&shared.do_empty[stage], phase_of(step) ^ 1);
            if (computes) {
                const bool shares = pairs && (flags & exchange);
                ptx::mbarrier_wait(&shared.do_full[stage], phase_of(step));
                if (shares) ptx::mbarrier_wait(&shared.delta_taken, (exchanged & 1) ^ 1);
                // A warp has a half of the rows of a half.
                constexpr int warp_rows = half_rows / 2;
#pragma unroll 1
                for (int half = shares ? rank() : 0; half < (shares ? rank() + 1 : 2); ++half, ++halves) {
                    ptx::mbarrier_wait(&shared.o_full[stage_of(halves)], phase_of(halves));
                    // The diagonal of o do^T, 16 rows at a time: fewer loads from shared memory, which the consumers' products fill, and a
                    // tenth of the instructions of an elementwise sum.
#pragma unroll 1
                    for (int row0 = warp_rows * me; row0 < warp_rows * (me + 1); row0 += 16) {
                        float low[4] = {}, high[4] = {};  // rows 0..7 and 8..15
                        // 8 x 8 elements each. o: rows 0..7 and 8..15 of columns 0..7, then of columns 8..15, as a left operand wants them; do:
                        // both halves of the columns of rows 0..7, then of rows 8..15, as a right one wants them.
                        const auto place = [&](int row, int group) { return row * 128 + ((group ^ row & 7) << 4); };
                        const uint32_t o = ptx::smem_address(shared.o[stage_of(halves)]) + place(row0 + ptx::lane_id() % 16, ptx::lane_id() / 16);
                        const uint32_t d_o = ptx::smem_address(shared.d_o[stage]) + half * half_chunk +
                                             place(row0 + ptx::lane_id() / 16 * 8 + ptx::lane_id() % 8, ptx::lane_id() / 8 % 2);
#pragma unroll
                        for (int k = 0; k < head_dim / 16; k += 2) {
                            uint32_t a[2][4], b[2][4];  // two at a time: a load takes 150 cycles beside the consumers' products
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                ptx::ldmatrix_x4(a[j], (o ^ 32 * ((k + j) % 4)) + k / 4 * half_chunk);
                                ptx::ldmatrix_x4(b[j], (d_o ^ 32 * ((k + j) % 4)) + k / 4 * q_chunk);
                            }
#pragma unroll
                            for (int j = 0; j < 2; ++j) ptx::mma_16x8x16<T>(low, a[j], b[j][0], b[j][1]), ptx::mma_16x8x16<T>(high, a[j], b[j][2], b[j][3]);
                        }
                        // Lane 9j has rows 2j and 2j + 8 of the diagonal, lane 9j + 4 the next ones: together the four places from 4j on (place_of).
                        const float4 sum{-low[0], -__shfl_xor_sync(~0u, low[1], 4), -high[2], -__shfl_xor_sync(~0u, high[3], 4)};
                        const int lane = ptx::lane_id(), at = row0 + lane / 8 * 4;
                        if (lane == lane / 8 * 9) {
                            if (shares)
                                ptx::store_async(ptx::map_to_rank(&shared.received_delta[at], rank() ^ 1), sum,
                                                 ptx::map_to_rank(&shared.delta_received, rank() ^ 1));
                            *reinterpret_cast<float4*>(&shared.delta[stage][half_rows * half + at]) = sum;
                        }
                    }
                    __syncwarp();
                    if (ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.o_empty[stage_of(halves)]);
                }
                if (shares) {
                    uint64_t* received = &shared.delta_received;
                    if (ptx::lane_id() == 0) ptx::mbarrier_arrive_expect_tx(received, warp_rows * sizeof(float));
                    // A flag must not wait for the neighbour: it may wait for the flag, in a pass of its own before this one.
                    while (!__all_sync(~0u, ptx::mbarrier_try_wait(received, (exchanged & 1))))
                        if (me == 1) raise(false);
                    const int at = warp_rows * me + ptx::lane_id();
                    if (ptx::lane_id() < warp_rows) shared.delta[stage][half_rows * (rank() ^ 1) + at] = shared.received_delta[at];
                    __syncwarp();
                    if (ptx::lane_id() == 0) ptx::mbarrier_arrive_at(ptx::map_to_rank(&shared.delta_taken, rank() ^ 1));
                    ++exchanged;
                }
                if ((flags & owned) && keeps_delta(s, i)) {
                    float* kept = partial_delta(p, s.block + i);
#pragma unroll
                    for (int r = 0; r < q_tile / 64; ++r) kept[static_cast<uint32_t>(own() + 64 * r)] = shared.delta[stage][own() + 64 * r];
                }
            } else {
#pragma unroll
                for (int r = 0; r < q_tile / 64; ++r) shared.delta[stage][own() + 64 * r] = value[r];
            }
            __syncwarp();
            if (ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.delta_full[stage]);
            // The step before: once its share of dq is in `partial`, the flag says so to the CTAs of the next tiles. Raised here, because
            // it costs a round trip to the L2 that the warpgroup of dq need not wait for.
            if (me == 1) {
                raise(true);
                leaving = -1;
                if ((flags & raises) && i >= s.later_begin) leaving = s.block + i, tiles = s.tile_end;
            }
        });
    if (me == 1) raise(true);
}

__device__ void lse_warp(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_k, const CUtensorMap* map_v) {
    uint32_t chained = 0;
    // The following item is asked for here: three answers of the L2, one after the other, that the producer must not wait for.
    if (ptx::lane_id() == 0) shared.asked = 0, shared.last_asked = no_item;
    const auto ask = [&] {
        if (rank() == 0 && ptx::lane_id() == 0) ask_for_item(shared, p);
        __syncwarp();
        if (!pairs && ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.item_full);
    };
    ask();
    // What the scores of a row start from, so that scale * score is log2(p). Rows that see no key: minus infinity behind the scale.
    const float factor = -1.44269504088896341f / p.scale_log2;
    every_step(
        shared, [] {},
        [&](const Segment& s) {
            // Where tiles have one step, the next keys come too late when they are asked for once their buffer is free: from the L2 they come
            // in half the time. Not where a pass has all keys: nothing repeats there, and it would only delay what else is asked for.
            if (pairs && s.hi - s.lo == 1 && s.kv_len > cluster * keys && s.head == s.kv_head * p.group) {
                const int lane = ptx::lane_id(), key0 = s.key0 + lane / 2 % 2 * 64, rows = min(64, s.kv_len - key0);
                if (lane < 8 && lane % 2 < chunks && rows > 0)
                    ptx::tma_prefetch_rows(lane < 4 ? map_k : map_v, 64 * (lane % 2), s.kv_row + key0, rows, s.kv_head);
                __syncwarp();
            }
            if (s.lo >= s.hi && s.look_at >= 0) ask();
        },
        [&](const Segment& s, int i, uint32_t step) {
            const int stage = stage_of(step), q0 = i * q_tile;
            const float* lse = p.lse + s.head * p.lse_head_stride + s.o_row + q0;
            const int rows = min(s.q_len, p.o_rows - s.o_row) - q0;
            float value[q_tile / 32];
#pragma unroll
            for (int r = 0; r < q_tile / 32; ++r) value[r] = 32 * r + ptx::lane_id() < rows ? lse[32 * r + ptx::lane_id()] : -INFINITY;
            ptx::mbarrier_wait(&shared.q_empty[stage], phase_of(step) ^ 1);  // the consumers have left q's stage, hence lse's
#pragma unroll
            for (int r = 0; r < q_tile / 32; ++r) shared.lse[stage][place_of(32 * r + ptx::lane_id())] = value[r] * (value[r] == -INFINITY ? -factor : factor);
            __syncwarp();
            if (ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.lse_full[stage]);
            if (i == s.look_at) ask();

            if ((s.flags & waits) && i < s.earlier_end) {
                const int own = (s.flags & exchange) ? rank() : 0;
                while (ptx::load_acquire(flag_of(p, s.block + i, own)) < s.tile) {}
                if (pairs && !(s.flags & exchange))
                    while (ptx::load_acquire(flag_of(p, s.block + i, 1)) < s.tile) {}
                __syncwarp();
                if (ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.chain_full[chained % chain_stages]);
                ++chained;
            }
        });
}

// Where this lane's row of two 8-column groups (the first of them even) stands, for stmatrix. Opaque, lest the compiler keep all of these
// addresses over the loop and spill them.
__device__ __forceinline__ uint32_t fragment_rows(uint32_t base, int group) {
    const int lane = ptx::lane_id();
    uint32_t row;
    asm volatile("mov.u32 %0, %1;" : "=r"(row) : "r"((lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4)));
    return base + (row ^ (group << 4));
}

// Rows `first`, `first` + 8 of a tensor in its own type, straight from the registers: `groups` of eight columns from `from` on stand from
// `first_column` on. Neighbouring lanes swap halves, so that four of them write 32 bytes side by side.
__device__ __forceinline__ void store_rows(char* base, long long row_bytes, int first, int rows, int first_column, int columns, const float* from,
                                           int groups, float factor) {
    const int lane = ptx::lane_id();
    const bool odd = lane & 1;
    const int own_column = first_column + (odd ? 8 : 0) + (lane & 2) * 2;
    char* to = base + first * row_bytes + own_column * 2;
#pragma unroll
    for (int x = 0; x < groups; x += 2) {
        const float* values = from + 4 * x;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t here = ptx::pack<T>(values[2 * half] * factor, values[2 * half + 1] * factor);
            const uint32_t there = ptx::pack<T>(values[4 + 2 * half] * factor, values[5 + 2 * half] * factor);
            const uint32_t other = __shfl_xor_sync(~0u, odd ? here : there, 1);
            if (first + 8 * half < rows && own_column + 8 * x < columns)
                *reinterpret_cast<uint2*>(to + 8 * half * row_bytes + 16 * x) = odd ? uint2{other, there} : uint2{here, other};
        }
    }
}

// Descriptors are broadcast from lane 0, so that the compiler knows them to be uniform.
__device__ __forceinline__ uint64_t operand(const uint8_t* tile, uint32_t chunk_bytes = 16) {
    return ptx::matrix_descriptor(__shfl_sync(~0u, ptx::smem_address(tile), 0), chunk_bytes);
}

// ------------------------------------------------------------------------------------------------------- the warpgroup of dq
// dq = ds k of every step, a half at a time: half the columns at head_dim 128, half the rows at 64. Of a pair first the neighbour's half,
// which goes there, then the own one, to which the neighbour's share is added. Then it leaves: to `partial`, or for good.
__device__ void sum_query_gradients(SharedMemory& shared, const JfaBackwardParams& p) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    float dq[32];
    // A half's sums of a row block lie in `partial` as they lie in the registers.
    const auto partial_of = [&](int row_block, int half) {
        return reinterpret_cast<float4*>(partial_block(p, row_block) + (4 * half + warp) * 4096) + ptx::lane_id();
    };
    // A broadcast query: this CTA's sums start from zero.
    if (is_broadcast(p)) {
        for (int kv_head = blockIdx.x % p.heads_kv; kv_head < p.heads_kv; kv_head += gridDim.x)
            for (int b = 0; b < p.group * p.blocks; ++b)
                for (int x = 0; x < 16; ++x)
                    partial_of((slice_of(p) * p.heads_kv + kv_head) * p.group * p.blocks + b, x / 8)[32 * (x % 8)] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    uint32_t step = 0, unit = 0, chained = 0;
    uint32_t counts = 0;  // bit 0: parity of the exchanges; above: steps announced (scarce registers)
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        ptx::mbarrier_wait(segment_full(shared, n), segment_phase(n));
        const Segment& s = shared.segment[n % segments];
        const int flags = __shfl_sync(~0u, s.flags, 0);
        if (flags & the_end) break;
        const bool exchanges_dq = pairs && (flags & exchange);
        const int first_half = exchanges_dq ? rank() ^ 1 : 0;
        const auto uniform = [](int x) { return __shfl_sync(~0u, x, 0); };
        const int row_block0 = uniform(s.block), earlier_end = uniform(s.earlier_end), later_begin = uniform(s.later_begin);
        // In registers what a step needs: a load from shared memory takes 150 cycles beside the consumers' products.
        const int rows_end = min(uniform(s.q_len), p.o_rows - uniform(s.q_row)), own_end = warp == 0 ? 0x7FFFFFFF : rows_end - 16 * warp;
        char* const dq_rows = static_cast<char*>(p.dq) + uniform(s.q_row) * p.dq_row_bytes + uniform(s.head) * p.dq_head_bytes;
        int block = uniform(s.hi) - 1;
        const int lo = uniform(s.lo);  // at head_dim 64 there is no register for it
        const auto remains = [&] { return block >= (q_tile == 64 ? lo : uniform(static_cast<const volatile Segment&>(s).lo)); };
        if (remains()) ptx::mbarrier_wait(&shared.k_full[stage_of(unit)], phase_of(unit));
#pragma unroll 1
        for (; remains(); --block, ++step) {
            const int stage = stage_of(step);
            const bool adds_earlier = is_broadcast(p) || block < earlier_end, adds_later = is_broadcast(p) || block >= later_begin;
            // Of a sequence's last block a warp may have no rows: then it multiplies with the others, and nothing comes or leaves. Never the first warp,
            // also where the call has no rows of the block at all: else an exchange could be done before the neighbour has sent its part of it, and
            // one further on be waited for with the wrong parity. (At head_dim 64 the halves are rows, and everything is moved.)
            const auto has_rows = [&] { return q_tile == 128 || block * q_tile < own_end; };
            // What passes before have added, the last one takes along. The L2 answers after 2,000 cycles: what of it the registers hold is asked for ahead of
            // both products, unless others' share is still waited for; the rest behind the second one.
            constexpr int first_part = 5;  // of eight
            float4 part[first_part];
            const bool takes_sum = adds_earlier && !adds_later, early = takes_sum && exchanges_dq && !(flags & waits) && has_rows();
            const auto load_sum = [&](int half, int begin, int end) {
                const float4* const sum = partial_of(row_block0 + block, half);
#pragma unroll
                for (int x = begin; x < end; ++x) part[x - begin] = ptx::load_l2(sum + 32 * x);
            };
            const auto add_sum = [&](int begin, int end) {
#pragma unroll
                for (int x = begin; x < end; ++x) {
                    const float4 f = part[x - begin];
                    dq[4 * x] += f.x, dq[4 * x + 1] += f.y, dq[4 * x + 2] += f.z, dq[4 * x + 3] += f.w;
                }
            };
            if (early) load_sum(rank(), 0, first_part);
            ptx::mbarrier_wait(&shared.ds_full[stage], phase_of(step));
#pragma unroll 1
            for (int turn = 0; turn < 2; ++turn) {
                const int half = first_half ^ turn;
                const bool goes_over = exchanges_dq && turn == 0, takes = takes_sum && !goes_over && has_rows();
                if ((flags & waits) && adds_earlier && (turn == 1) == exchanges_dq) {
                    ptx::mbarrier_wait(&shared.chain_full[chained % chain_stages], chained / chain_stages & 1);
                    ++chained;
                }
                float4* sums = partial_of(row_block0 + block, half);
                const uint64_t a = operand(shared.ds[stage][q_tile == 128 ? half : 0], ds_chunk);
                const uint64_t b = operand(shared.k[stage_of(unit)] + (q_tile == 128 ? 0 : half * kv_chunk), kv_chunk);
                ptx::wgmma_fence();
#pragma unroll
                for (int x = 0; x < keys / 16; ++x) ptx::Wgmma<64, T, 1, 1>::ss(dq, ptx::advance(a, x * 2048), ptx::advance(b, x * 2048), x != 0);
                ptx::wgmma_commit();
                if (takes && !early) load_sum(half, 0, first_part);
                // Where there is no sum to take, what the neighbour has sent by now is asked for behind the product likewise: as much at a time as
                // the registers hold.
                const bool receives = exchanges_dq && !goes_over;
                const int at = warp * 32 * 8 + ptx::lane_id();
                const auto load_received = [&](int begin, int end) {
#pragma unroll
                    for (int x = begin; x < end; ++x) part[x - begin] = ptx::load_shared(&shared.received[at + 32 * x].x);
                };
                const bool there = receives && !takes && __all_sync(~0u, ptx::mbarrier_test_wait(&shared.received_full, counts & 1));
                if (there) load_received(0, first_part);
                if (goes_over) ptx::mbarrier_wait(&shared.neighbour_ready, (counts & 1) ^ 1);
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(dq);
                if (turn == 1 && ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.ds_empty[stage]);

                if (goes_over) {
                    if (ptx::lane_id() == 0) ptx::mbarrier_arrive_expect_tx(&shared.received_full, has_rows() ? 4096 : 0);
                    if (!has_rows()) continue;
                    const uint32_t to = ptx::map_to_rank(shared.received + at, half), full = ptx::map_to_rank(&shared.received_full, half);
#pragma unroll
                    for (int x = 0; x < 8; ++x) ptx::store_async(to + 512 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]}, full);
                    continue;
                }
                if (receives && !takes && !there) {
                    ptx::mbarrier_wait(&shared.received_full, counts & 1);
                    load_received(0, first_part);
                }
                if (takes || receives) add_sum(0, first_part);
                if (takes) load_sum(half, first_part, 8);
                if (receives) {
                    const auto add_received = [&](int begin, int end) {
#pragma unroll
                        for (int x = begin; x < end; ++x) {
                            const float4 f = ptx::load_shared(&shared.received[at + 32 * x].x);
                            dq[4 * x] += f.x, dq[4 * x + 1] += f.y, dq[4 * x + 2] += f.z, dq[4 * x + 3] += f.w;
                        }
                    };
                    if (takes) {
                        ptx::mbarrier_wait(&shared.received_full, counts & 1);
                        add_received(0, first_part);
                    }
                    add_received(first_part, 8);
                    counts ^= 1;
                    __syncwarp();
                    if (ptx::lane_id() == 0) ptx::mbarrier_arrive_at(ptx::map_to_rank(&shared.neighbour_ready, half ^ 1));
                }
                if (takes) add_sum(first_part, 8);
                if (!has_rows()) continue;
                if (adds_later) {
                    const auto values = [&](int x) { return float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]}; };
                    if (adds_earlier) {
#pragma unroll
                        for (int x = 0; x < 8; ++x) ptx::add_l2(sums + 32 * x, values(x));
                    } else {
#pragma unroll
                        for (int x = 0; x < 8; ++x) ptx::store_l2(sums + 32 * x, values(x));
                    }
                } else {
                    if (adds_earlier) ptx::discard_l2(reinterpret_cast<const char*>(sums - ptx::lane_id()) + 128 * ptx::lane_id());
                    const int row = 16 * warp + (q_tile == 128 ? 64 * half : 0) + ptx::lane_id() / 4;
                    store_rows(dq_rows + static_cast<long long>(block * q_tile) * p.dq_row_bytes, p.dq_row_bytes, row, rows_end - block * q_tile,
                               q_tile == 128 ? 0 : 64 * half, 8 * p.vectors_qk, dq, 8, p.scale);
                }
            }
            if ((flags & raises) && adds_later) {
                __syncwarp();
                if (ptx::lane_id() == 0) ptx::mbarrier_arrive(&shared.dq_left[stage_of(counts >> 1)]);
                counts += 2;
            }
        }
        if (flags & last_of_tile) ++unit;
        __syncwarp();
        if (ptx::lane_id() == 0) ptx::mbarrier_arrive(segment_empty(shared, n));
    }
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_dk, const CUtensorMap* map_dv, int me) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = ptx::lane_id();
    const int own_row = 64 * me + 16 * warp;           // the warp's 16 rows of k, v, ds^T; a thread has two of them
    const int column = 2 * (lane % 4);

    float s[q_tile / 2];                               // s^T, p^T, then dp^T: 64 keys x q_tile
    float dk[head_dim / 2], dv[head_dim / 2];          // 64 keys x head_dim

    // ---- products
    // to (+)= 64 rows of a * q_tile rows of b
    const auto row_products = [&](float(&to)[q_tile / 2], const uint8_t* a_rows, const uint8_t* b_rows, bool from_zero) {
        const uint64_t a = operand(a_rows), b = operand(b_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < head_dim / 16; ++x)
            ptx::Wgmma<q_tile, T>::ss(to, ptx::advance(a, x / 4 * kv_chunk + x % 4 * 32), ptx::advance(b, x / 4 * q_chunk + x % 4 * 32), x != 0 || !from_zero);
        ptx::wgmma_commit();
    };
    // The value of each column (a query row): of 16 rows, a thread's are neighbours (place_of).
    const auto of_rows = [&](float4(&to)[q_tile / 16], const float* values, int begin, int end) {
#pragma unroll
        for (int x = begin; x < end; ++x) to[x] = ptx::load_shared(values + 16 * x + 2 * column);
    };
    const auto start_from = [&](float(&to)[q_tile / 2], const float* values) {
        float4 of[q_tile / 16];
        of_rows(of, values, 0, q_tile / 16);
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x) {
            const float4 f = of[x];
            to[8 * x] = to[8 * x + 2] = f.x, to[8 * x + 1] = to[8 * x + 3] = f.y;
            to[8 * x + 4] = to[8 * x + 6] = f.z, to[8 * x + 5] = to[8 * x + 7] = f.w;
        }
        ptx::wgmma_hold(to);  // in registers of their own before the fence
    };
    const auto scores = [&](uint32_t unit, uint32_t step) {
        row_products(s, shared.k[stage_of(unit)] + me * 64 * 128, shared.q[stage_of(step)], false);
    };
    const auto score_gradients = [&](uint32_t step) { row_products(s, shared.v + me * 64 * 128, shared.d_o[stage_of(step)], delta_behind); };
    // to (+)= fragments (64 keys x q_tile) * rows (q_tile x head_dim)
    const auto accumulate = [&](float(&to)[head_dim / 2], const uint32_t(&fragments)[q_tile / 16][4], const uint8_t* rows, bool first) {
        const uint64_t b = operand(rows, q_chunk);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x)
            ptx::Wgmma<head_dim, T, 0, 1>::rs(to, fragments[x], ptx::advance(b, x * 2048), x != 0 || !first);
        ptx::wgmma_commit();
    };

    // ---- the stream of steps
    uint32_t unit = 0, step = 0, segment = 0, held = 0;
    // Of the current segment, its query block and what every step needs: behind products an access to shared memory takes 160 cycles.
    int block = 0, flags = 0, lo = 0, whole_lo = 0, whole_hi = 0;
    // Takes the next segment with products, or the end, from the ring to held[..][held % 2]. Values are broadcast from lane 0:
    // uniform for the compiler, so that products may stand behind branches.
    const auto fetch = [&] {
        ++held;
        do {
            ptx::mbarrier_wait(segment_full(shared, segment), segment_phase(segment));
            const Work& next = shared.segment[segment % segments];
            const int* from = reinterpret_cast<const int*>(&next);
            const auto uniform = [](int x) { return __shfl_sync(~0u, x, 0); };
            flags = uniform(next.flags), block = uniform(next.hi) - 1, lo = uniform(next.lo), whole_lo = uniform(next.whole_lo), whole_hi = uniform(next.whole_hi);
            if (lane < int(sizeof(Work) / sizeof(int))) reinterpret_cast<int*>(&shared.held[4 * me + warp][held % 2])[lane] = from[lane];
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(segment_empty(shared, segment));
            ++segment;
        } while ((flags & no_steps) && !(flags & the_end));
    };
    const auto wait_k_q_lse = [&](uint32_t u, uint32_t n) {
        wait_for(&shared.k_full[stage_of(u)], phase_of(u), &shared.q_full[stage_of(n)], phase_of(n), &shared.lse_full[stage_of(n)], phase_of(n));
    };

    bool first = true, keys_leave = false;
    // Two loops: the inner one goes on as long as the next segment is known before a step ends.
    for (;;) {
        fetch();
        if (flags & the_end) break;
        wait_k_q_lse(unit, step);
        start_from(s, shared.lse[stage_of(step)]);
        scores(unit, step);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
        for (bool more = true; more;) {
            const Work& g = shared.held[4 * me + warp][held % 2];
            const int stage = stage_of(step);
            uint32_t fragments[q_tile / 16][4];  // p^T, then ds^T, as left operands

            // p^T = exp2(s^T * scale) of what started from -lse; at most 1
#pragma unroll
            for (int x = 0; x < q_tile / 2; ++x) s[x] = ptx::exp2_approx(ptx::min_nan(s[x] * p.scale_log2, 0.0f));
            if (block < whole_lo || block >= whole_hi) {
                const int q0 = block * q_tile, shift = diagonal_shift(p.mask, g.q_len, g.kv_len), key = g.key0 + own_row + lane / 4;
                // Of one of the thread's two keys, what is not in [from, to) of the thread's rows.
                const auto cut = [&](int half, int from, int to) {
#pragma unroll
                    for (int x = 0; x < q_tile / 8; ++x)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& value = s[4 * x + 2 * half + e];
                            value = 8 * x + e >= from && 8 * x + e < to ? value : 0.0f;
                        }
                };
                constexpr int everywhere = 1 << 20;
                if (block < whole_lo) {  // rows in front of those that see a key, or no key at all: the sequence ends
                    if (p.mask.right < 0) {
#pragma unroll
                        for (int x = 0; x < q_tile / 2; ++x) s[x] = key + (x & 2 ? 8 : 0) < g.kv_len ? s[x] : 0.0f;
                    } else {
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            cut(half, key + 8 * half < g.kv_len ? first_row(p.mask, key + 8 * half, shift) - q0 - column : everywhere, everywhere);
                    }
                }
                if (block >= whole_hi) {  // rows behind them
#pragma unroll
                    for (int half = 0; half < 2; ++half) cut(half, -everywhere, end_row(p.mask, key + 8 * half, shift, 0x7FFFFFFF) - q0 - column);
                }
            }
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
#pragma unroll
                for (int r = 0; r < 4; ++r) fragments[x][r] = ptx::pack<T>(s[8 * x + 2 * r], s[8 * x + 2 * r + 1]);

            // dp^T = v do^T (less delta, unless that comes behind), dv += p^T do, then ds^T = p^T (dp^T - delta)
            if (delta_behind) {
                wait_for(&shared.v_full, unit & 1, &shared.do_full[stage], phase_of(step));
            } else {
                wait_for(&shared.delta_full[stage], phase_of(step), &shared.v_full, unit & 1, &shared.do_full[stage], phase_of(step));
                start_from(s, shared.delta[stage]);
            }
            score_gradients(step);
            accumulate(dv, fragments, shared.d_o[stage], first);
            // Behind these products: the keys before, which left through k and ds^T, are given back; where the segment ends, whether the next one is
            // there, and what it is. One thread looks, so that all decide alike.
            if (keys_leave) {
                if (lane == 0) {
                    ptx::bulk_wait_read<0>();
                    ptx::mbarrier_arrive(&shared.k_empty[stage_of(unit) ^ 1]);
                }
                keys_leave = false;
                __syncwarp();
            }
            const bool segment_ends = block == lo, last = segment_ends && (flags & last_of_tile);
            --block;
            if (segment_ends) {
                int* known = &shared.segment_known[me][held % 2];
                if (warp == 0 && lane == 0)
                    *known = ptx::mbarrier_test_wait(segment_full(shared, segment), segment_phase(segment)) &&
                             !(shared.segment[segment % segments].flags & no_steps);
                ptx::named_barrier_sync(1 + me, 128);
                more = __shfl_sync(~0u, *known, 0);
                if (more) fetch();
            }
            float4 delta[q_tile / 16];
            if (delta_behind) {
                ptx::mbarrier_wait(&shared.delta_full[stage], phase_of(step));
                of_rows(delta, shared.delta[stage], 0, q_tile / 32);
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
            if (delta_behind) of_rows(delta, shared.delta[stage], q_tile / 32, q_tile / 16);  // not all before: registers
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(&shared.do_empty[stage]);
                if (last) ptx::mbarrier_arrive(&shared.v_empty);
            }
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    // p as it entered dv, in 16 bits: holding it in fp32 until here would cost registers that are not there.
                    const float2 a = ptx::unpack<T>(fragments[x][r]);
                    float2 b{s[8 * x + 2 * r], s[8 * x + 2 * r + 1]};
                    if (delta_behind) b.x += r < 2 ? delta[x].x : delta[x].z, b.y += r < 2 ? delta[x].y : delta[x].w;
                    fragments[x][r] = ptx::pack<T>(a.x * b.x, a.y * b.y);
                }

            // dk += ds^T q; behind it ds^T goes to the warpgroup of dq
            accumulate(dk, fragments, shared.q[stage], first);
            ptx::mbarrier_wait(&shared.ds_empty[stage], phase_of(step) ^ 1);
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
                ptx::stmatrix_x4(fragment_rows(ptx::smem_address(shared.ds[stage][x / 4]) + own_row * 128, x % 4 * 2), fragments[x][0], fragments[x][1],
                                 fragments[x][2], fragments[x][3]);
            ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.ds_full[stage]);

            // The next step's scores; where there is none (yet) this one's once more, and nobody looks (a product behind a branch would
            // make the assembler serialize all of them).
            const uint32_t next_unit = unit + last;
            if (more) wait_k_q_lse(next_unit, step + 1);
            ptx::wgmma_wait<0>();  // dk
            __syncwarp();
            if (more) {
                start_from(s, shared.lse[stage_of(step + 1)]);
                if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            }
            scores(more ? next_unit : unit, step + more);
            if (!more) {
                ptx::wgmma_wait<0>();  // the product that nobody looks at reads k and q
                if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            }

            // dk and dv leave through rows of shared memory that nobody reads any more: dk through k's, dv through both stages of ds^T.
            if (last) {
                const int rows = min(16, g.kv_len - g.key0 - own_row), row = g.kv_row + g.key0 + own_row;
                // 64 columns from registers `from` on
                const auto put = [&](uint8_t* chunk, const float* from, float factor) {
#pragma unroll
                    for (int x = 0; x < 8; x += 2)
                        ptx::stmatrix_x4(fragment_rows(ptx::smem_address(chunk) + own_row * 128, x), ptx::pack<T>(from[4 * x] * factor, from[4 * x + 1] * factor),
                                         ptx::pack<T>(from[4 * x + 2] * factor, from[4 * x + 3] * factor),
                                         ptx::pack<T>(from[4 * x + 4] * factor, from[4 * x + 5] * factor),
                                         ptx::pack<T>(from[4 * x + 6] * factor, from[4 * x + 7] * factor));
                };
                uint8_t* const values[2] = {shared.ds[stage ^ 1][0], shared.ds[stage][0]};
                ptx::mbarrier_wait(&shared.ds_empty[stage ^ 1], phase_of(step + 1) ^ 1);  // dq of the step before has been multiplied
                put(values[0], dv, 1.0f);
                ptx::mbarrier_wait(&shared.ds_empty[stage], phase_of(step));              // and this one
                if (chunks > 1) put(values[1], dv + 32 * (chunks - 1), 1.0f);
#pragma unroll
                for (int x = 0; x < chunks; ++x) put(shared.k[stage_of(unit)] + x * kv_chunk, dk + 32 * x, p.scale);
                ptx::fence_async_shared();
                __syncwarp();
                if (lane == 0 && rows > 0) {
#pragma unroll
                    for (int x = 0; x < chunks; ++x) {
                        ptx::tma_store_rows(map_dv, values[x] + own_row * 128, 64 * x, row, rows, g.kv_head, ptx::used_once());
                        ptx::tma_store_rows(map_dk, shared.k[stage_of(unit)] + x * kv_chunk + own_row * 128, 64 * x, row, rows, g.kv_head, ptx::used_once());
                    }
                    ptx::bulk_commit();
                }
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

extern "C" __global__ void __launch_bounds__(threads, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_o, const __grid_constant__ CUtensorMap map_do, const __grid_constant__ CUtensorMap map_dk,
          const __grid_constant__ CUtensorMap map_dv,
          const __grid_constant__ JfaBackwardParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    // Broadcast, so that the compiler knows the roles to be uniform.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int i = 0; i < segments; ++i) {
            ptx::mbarrier_init(&shared.segment_full[i], 1);
            ptx::mbarrier_init(&shared.segment_empty[i], 8 + 4 + 3);
        }
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&shared.k_full[i], 1);
            ptx::mbarrier_init(&shared.k_empty[i], 8);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], 8);
            ptx::mbarrier_init(&shared.do_empty[i], 8);
            ptx::mbarrier_init(&shared.delta_full[i], 2);
            ptx::mbarrier_init(&shared.lse_full[i], 1);
            ptx::mbarrier_init(&shared.dq_left[i], 4);
            ptx::mbarrier_init(&shared.o_full[i], 1);
            ptx::mbarrier_init(&shared.o_empty[i], 2);
        }
        for (int i = 0; i < chain_stages; ++i) ptx::mbarrier_init(&shared.chain_full[i], 1);
        for (int i = 0; i < ds_stages; ++i) {
            ptx::mbarrier_init(&shared.ds_full[i], 8);
            ptx::mbarrier_init(&shared.ds_empty[i], 4);
        }
        ptx::mbarrier_init(&shared.v_full, 1);
        ptx::mbarrier_init(&shared.v_empty, 8);
        ptx::mbarrier_init(&shared.item_full, 1);
        ptx::mbarrier_init(&shared.item_begun, cluster);
        ptx::mbarrier_init(&shared.received_full, 4);
        ptx::mbarrier_init(&shared.neighbour_ready, 4);
        ptx::mbarrier_init(&shared.delta_received, 2);
        ptx::mbarrier_init(&shared.delta_taken, 2);
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
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            if (!ptx::elect_one()) return;  // lest 31 lanes look again and again whether the one is back
            produce(shared, p, &map_q, &map_k, &map_v, &map_o, &map_do);
            return;
        } else if (warp == 3) {
            lse_warp(shared, p, &map_k, &map_v);
        } else {
            delta_warp(shared, p, warp - 1);
        }
    } else if (warpgroup == 1) {
        ptx::registers_release<dq_registers>();
        sum_query_gradients(shared, p);
    } else {
        ptx::registers_acquire<consumer_registers>();
        consume(shared, p, &map_dk, &map_dv, warpgroup - 2);
    }
    if (pairs) {
        __syncwarp();
        ptx::cluster_sync();  // nothing is on its way to the neighbour any more
    }
}

}  // namespace jfa
