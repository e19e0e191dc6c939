// Jagged attention backward, Hopper (sm_90a), for long sequences whose sums may be added in any order: dq, dk, dv in one launch, persistent.
//
//   item        a tile of 128 keys of one sequence and key/value head, walked over row blocks (q_tile query rows), for every query head of
//               the group; dk and dv stay in registers. Items come from a queue, tiles of a sequence one after another, so that whoever
//               reads its rows at the same time finds them in the L2. Each begins at another row block and goes round, so that they
//               add to different sums at a time, and each is the last one to add to some
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q, dq^T = k^T ds^T; p^T and ds^T never leave the registers as left
//               operands, ds goes to shared memory once for dq. lse and delta come from backward_prepare.cu
//   dq          is multiplied a step late, when the other consumer's ds has come, and goes straight from the registers to fp32 sums in the L2,
//               16 bytes at a time. Who comes first to a row block stores, the others add; who adds last hands the sum to a warp that stores
//               dq. So nobody writes zeros, and sums stay in the L2 until they are thrown away. A sequence of one tile needs no sum
//   turns       a CTA claims a turn at a row block a step before it adds, and is counted there when it has: two halves of a counter. Whoever
//               comes second waits until somebody is counted. Who is first waits for nobody, so no wait can be endless
//   roles       producer warpgroup: warp 0 takes items and loads; warp 1 claims, counts and lists finished row blocks; warps 2 and 3 store
//               what is listed by any CTA: a tile may finish all of its row blocks, others none. Two consumer warpgroups of 64 keys
//               each; for dq each has half the columns of all keys. They meet in nothing but ds, which has two stages
//   overlap     dp^T runs behind the exponentials, dv behind ds; dq of the step before and dk behind ds' way to shared memory and dq's way out.
//               dv leaves through v, dk through a place of its own. Rows of 80, not 64: products of 64 x 64 take all of shared memory's
//               bandwidth and everything else waits for them (docs/performance.md)
//   registers   consumers 240, the producer warpgroup 24
#include <type_traits>
#include "ptx/barrier.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "unordered.cuh"

#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_backward_unordered_128_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int chunks = head_dim / 64;  // 64-column chunks of 128-byte rows in shared memory
constexpr int threads = 384;
constexpr int producer_registers = 24, consumer_registers = 240;
static_assert(128 * (producer_registers + 2 * consumer_registers) <= 65536);
static_assert(head_dim == 128, "for dq a consumer has 64 columns");

constexpr int kv_chunk = keys * 128;  // bytes
constexpr int q_chunk = q_tile * 128;
constexpr int kv_bytes = chunks * kv_chunk;
constexpr int q_bytes = chunks * q_chunk;
constexpr int ds_bytes = 2 * q_chunk;  // rows are query rows; a chunk of 64 keys per consumer
constexpr int share = 16 * q_tile * 4;  // bytes of a step's dq that a warp has: 16 columns
constexpr int turn_stages = 8;
constexpr int finishing_stages = 2;

// Of a tile its stage, whether it is none but the end, and whether its dq goes to sums; of a step the same, and whether it is its item's last one.
enum : int { second_stage = 1, the_end = 2, summed = 4, ends_item = 8 };
struct Tile {
    int flags;
    int lo, hi, first;       // row blocks, walked from `first` down to lo and then from hi - 1 down
    int q_row, q_len;        // rows of q, o and do alike: the query is not broadcast
    int kv_row, kv_len, key0;
    int kv_head;
    int block;               // row block 0 in a head
    int whole_lo, whole_hi;  // of these row blocks no mask cuts anything
};

// What a step does with its dq: it is first at the row block and stores, or adds, or adds once the first one is counted.
enum : int { adds, begins, waits };
struct alignas(16) Turn {
    int block;   // the row block among all; -1: there is no further step
    int number;  // in its sequence
    int flags;
    int dq;
};

// A row block of which nothing more comes.
struct alignas(16) Finished {
    int block;  // among all, and 1: 0 is nothing yet
    int head, q_row, rows;
};

// Where the thread that takes items is: not in registers, which are scarce there.
struct Progress {
    uint32_t items, item, tiles, step;
};

struct SharedMemory {
    uint8_t k[kv_bytes], v[kv_bytes];
    uint8_t q[2][q_bytes], d_o[2][q_bytes];
    uint8_t ds[2][ds_bytes];
    uint8_t finishing[2][finishing_stages][share];  // per warp that stores: sums on their way to dq, of 16 columns
    uint8_t leaving[8][16 * 128];  // of a warp: at the end of a tile 64 columns of its rows of dk
    float lse[2][q_tile];       // -lse * log2(e), -inf: p is 0; at place_of(row)
    float delta[2][q_tile];     // -delta, likewise
    Tile tile[2];
    Finished taken[2];  // per warp that stores
    Turn turns[turn_stages];
    Progress progress;
    uint64_t tile_full[2], tile_empty[2];
    uint64_t k_full, k_empty, v_full, v_empty;
    uint64_t q_full[2], q_empty[2], do_full[2], do_empty[2], ds_full[2], ds_empty[2];
    uint64_t turn_known[turn_stages];                    // but for `dq`
    uint64_t admitted[turn_stages], added[turn_stages];  // a step's dq may go, has gone to the sums
    uint64_t finishing_full[2][finishing_stages];
};
static_assert(sizeof(SharedMemory) <= 232448, "shared memory of a CTA");

// Words of `control`; then per row block its turns, then the list of finished ones.
enum : int { next_item = 0, done_items = 1, listed_blocks = 2, taken_blocks = 3, counters = 32 };
__device__ __forceinline__ int row_blocks(const JfaBackwardParams& p) { return p.heads_kv * p.group * p.blocks; }
__device__ __forceinline__ Finished* finished_list(const JfaBackwardParams& p) {
    return reinterpret_cast<Finished*>(p.control + (counters + 2ll * row_blocks(p) + 3) / 4 * 4);
}

// x, but for the compiler not the same in every round of a loop, lest it keep what is worked out from it in registers, or spill that.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    uint32_t y;
    asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ int stage_of(uint32_t n) { return n & 1; }
__device__ __forceinline__ uint32_t phase_of(uint32_t n) { return (n >> 1) & 1; }

// Of a row block: in the lower half how many steps have claimed a turn, in the upper one how many are in the sums.
__device__ __forceinline__ unsigned long long* turns_of(const JfaBackwardParams& p, int block) {
    return reinterpret_cast<unsigned long long*>(p.control + counters) + block;
}
constexpr unsigned long long one_claim = 1, one_added = 1ull << 32;

// ---------------------------------------------------------------------------------------------------------------- producer
// The first row block from row x on.
constexpr int all_blocks = 1 << 25;
__device__ __forceinline__ int tiles_of(int kv_len) { return max(1, kv_len / keys + (kv_len % keys != 0)); }
__device__ __forceinline__ int block_from(long long x) { return x <= 0 ? 0 : static_cast<int>(min((x + q_tile - 1) / q_tile, 1ll * all_blocks)); }

// Item i: a unit and a key/value head. The tiles of a sequence and head are items one after another. Registers are scarce: what is known goes to
// shared memory and is read again, and nothing that follows from the mask is worked out ahead of the producer's loop and kept.
__device__ __forceinline__ void fill_tile(Tile& t, const JfaBackwardParams& p, uint32_t i, int stage) {
    {
        const uint32_t place = i / p.heads_kv;  // in the list; of this sequence's units some one, since they are neighbours there
        const JfaUnit unit = p.units[place];
        const JfaSequence& s = p.sequences[unit.sequence];
        const int kv_len = s.kv_len, tiles = tiles_of(kv_len);
        const uint32_t n = i - (place - max(0, unit.first) / keys) * p.heads_kv;
        t.flags = stage * second_stage + (kv_len > keys) * summed;
        t.kv_head = n / tiles;
        t.key0 = n % tiles * keys;
        t.kv_row = s.kv_row, t.kv_len = kv_len;
        t.q_row = s.q_row, t.q_len = s.q_len;
        t.block = first_block(s.o_row, unit.sequence);
    }
    asm volatile("" ::: "memory");
    JfaMask mask = p.mask;
    mask.left = opaque(mask.left), mask.right = opaque(mask.right);
    const int q_len = t.q_len, kv_len = t.kv_len, key0 = t.key0, shift = diagonal_shift(mask, q_len, kv_len), end = min(key0 + keys, kv_len);
    const int row_lo = first_row(mask, key0, shift), row_hi = min(q_len, end_row(mask, end - 1, shift, q_len));
    const bool empty = end <= key0 || row_lo >= row_hi;
    const int lo = empty ? 0 : row_lo / q_tile, hi = empty ? 0 : (row_hi + q_tile - 1) / q_tile;
    t.lo = lo, t.hi = hi;
    // The tiles of a sequence begin at different blocks.
    const float before = static_cast<float>(key0 / keys) / static_cast<float>(tiles_of(kv_len));
    t.first = hi - 1 - min(max(0, hi - lo - 1), static_cast<int>(static_cast<float>(hi - lo) * before));
    // Row r sees keys r + shift - left .. r + shift + right.
    t.whole_hi = mask.left < 0 ? all_blocks : block_from(key0 - 1ll * shift + mask.left - q_tile + 2);
    t.whole_lo = kv_len < key0 + keys ? all_blocks : mask.right < 0 ? 0 : block_from(key0 + keys - 1ll * shift - mask.right - 1);
}

__device__ void produce(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_do) {
    // Behind products an access takes 300 cycles: what every step needs is in registers.
    volatile Progress& at = shared.progress;
    at.items = static_cast<uint32_t>(p.header->backward_units) * static_cast<uint32_t>(p.heads_kv);
    at.tiles = at.step = 0;
    at.item = ptx::atomic_add(p.control + next_item, 1);
    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int tile_rows, int row, int rows, int head) {
#pragma unroll
        for (int x = 0; x < chunks; ++x) ptx::tma_load_rows(map, barrier, to + x * tile_rows * 128, 64 * x, row, max(0, min(tile_rows, rows)), head);
    };
    for (;;) {
        if (at.item >= at.items) break;
        ptx::mbarrier_wait(&shared.tile_empty[stage_of(at.tiles)], phase_of(at.tiles) ^ 1);
        Tile& t = shared.tile[stage_of(at.tiles)];
        fill_tile(t, p, at.item, stage_of(at.tiles));
        ptx::mbarrier_arrive(&shared.tile_full[stage_of(at.tiles)]);
        const auto load_once = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to) {
#pragma unroll
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map, barrier, to + x * kv_chunk, 64 * x, t.kv_row + t.key0, max(0, min(keys, t.kv_len - t.key0)), t.kv_head, ptx::used_once());
        };
        uint32_t step = at.step;
        bool first = true, drawn = false;
#pragma unroll 1
        for (int member = 0; member < p.group; ++member) {
            const int head = t.kv_head * p.group + member;
#pragma unroll 1
            for (int i = t.first, left = t.hi - t.lo; left > 0; --left, ++step, i = i > t.lo ? i - 1 : t.hi - 1) {
                const int stage = stage_of(step), row = i * q_tile, rows = t.q_len - row;
                const uint32_t free = phase_of(step) ^ 1;
                const int block = head * p.blocks + t.block + i;
                const auto starts = [&] { return block_at(p.partial, opaque(block)) + sums_bytes; };
                const int tensor_row = t.q_row + row;
                const bool ends = left == 1 && member == p.group - 1;
                shared.turns[step % turn_stages] = {block, i, t.flags + ends * ends_item, adds};
                ptx::mbarrier_arrive(&shared.turn_known[step % turn_stages]);
                ptx::mbarrier_wait(&shared.q_empty[stage], free);
                ptx::mbarrier_arrive_expect_tx(&shared.q_full[stage], q_bytes + sizeof(shared.lse[0]));
                ptx::bulk_load(shared.lse[stage], starts(), sizeof(shared.lse[0]), &shared.q_full[stage]);
                load(map_q, &shared.q_full[stage], shared.q[stage], q_tile, tensor_row, rows, head);
                if (first) {
                    ptx::mbarrier_wait(&shared.k_empty, (at.tiles & 1) ^ 1);
                    ptx::mbarrier_arrive_expect_tx(&shared.k_full, kv_bytes);
                    load_once(map_k, &shared.k_full, shared.k);
                }
                ptx::mbarrier_wait(&shared.do_empty[stage], free);
                ptx::mbarrier_arrive_expect_tx(&shared.do_full[stage], q_bytes + sizeof(shared.delta[0]));
                ptx::bulk_load(shared.delta[stage], starts() + sizeof(shared.lse[0]), sizeof(shared.delta[0]), &shared.do_full[stage]);
                load(map_do, &shared.do_full[stage], shared.d_o[stage], q_tile, tensor_row, rows, head);
                if (first) {
                    ptx::mbarrier_wait(&shared.v_empty, (at.tiles & 1) ^ 1);
                    ptx::mbarrier_arrive_expect_tx(&shared.v_full, kv_bytes);
                    load_once(map_v, &shared.v_full, shared.v);
                    first = false;
                }
                // Not before the last steps: what is drawn early waits behind this tile while others have nothing to do.
                if (!drawn && member == p.group - 1 && left <= 2) at.item = ptx::atomic_add(p.control + next_item, 1), drawn = true;
            }
        }
        // A tile that no row sees has no steps, but its turn of k and v.
        if (first) {
            ptx::atomic_add(p.control + done_items, 1);
            ptx::mbarrier_arrive(&shared.tile_empty[stage_of(at.tiles)]);  // for the warp that counts
            ptx::mbarrier_wait(&shared.k_empty, (at.tiles & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(&shared.k_full, kv_bytes);
            load_once(map_k, &shared.k_full, shared.k);  // a product whose result nobody takes reads it
            ptx::mbarrier_wait(&shared.v_empty, (at.tiles & 1) ^ 1);
            ptx::mbarrier_arrive(&shared.v_full);
        }
        if (!drawn) at.item = ptx::atomic_add(p.control + next_item, 1);
        at.step = step, at.tiles = at.tiles + 1;
    }
    const uint32_t tiles = at.tiles, step = at.step;
    ptx::mbarrier_wait(&shared.tile_empty[stage_of(tiles)], phase_of(tiles) ^ 1);
    shared.tile[stage_of(tiles)].flags = the_end;
    ptx::mbarrier_arrive(&shared.tile_full[stage_of(tiles)]);
    shared.turns[step % turn_stages] = {-1, 0, 0, adds};
    ptx::mbarrier_arrive(&shared.turn_known[step % turn_stages]);
}

// ------------------------------------------------------------------------------------------------------------------- dq
// Where a lane stores what it has of 16 columns of 8 rows of dq^T, and how much of it there is.
struct Place {
    char* to;
    int rows, columns;  // from its row and its first column on
};
__device__ __forceinline__ Place place_in(const JfaBackwardParams& p, int q_row, int head, int rows, int column0) {
    const int lane = ptx::lane_id(), row = 2 * (lane % 4) + lane / 4 % 2, column = column0 + lane / 8 * 2;
    return {static_cast<char*>(p.dq) + (q_row + row) * p.dq_row_bytes + head * p.dq_head_bytes + column * 2, rows - row, 8 * p.vectors_qk - column};
}
// `f`: columns lane / 4 (x, y) and lane / 4 + 8 (z, w) of rows 2 * (lane % 4) (x, z) and the next one (y, w). Lanes 4 apart swap rows, so
// that each has two neighbouring columns of one. Rows: `row` past the place's.
__device__ __forceinline__ void store_columns(const Place& place, long long row_bytes, int row, float4 f, float scale) {
    const bool odd = ptx::lane_id() & 4;
    const float low = __shfl_xor_sync(~0u, odd ? f.x : f.y, 4), high = __shfl_xor_sync(~0u, odd ? f.z : f.w, 4);
    const float a0 = odd ? low : f.x, a1 = odd ? f.y : low, b0 = odd ? high : f.z, b1 = odd ? f.w : high;
    const uint32_t a = ptx::pack<T>(a0 * scale, a1 * scale), b = ptx::pack<T>(b0 * scale, b1 * scale);
    char* const to = place.to + row * row_bytes;
    if (row < place.rows && place.columns > 0) *reinterpret_cast<uint32_t*>(to) = a;
    if (row < place.rows && place.columns > 8) *reinterpret_cast<uint32_t*>(to + 16) = b;
}

// Claims turns for the CTA's steps and counts them; lists row blocks to which nothing more comes.
__device__ void take_turns(SharedMemory& shared, const JfaBackwardParams& p) {
    const int lane = ptx::lane_id();
    const auto turn_of = [&](uint32_t step) -> Turn& { return shared.turns[step % turn_stages]; };
    const auto claimed_as = [&](unsigned long long turns) { return static_cast<uint32_t>(turns) == 0 ? begins : turns < one_added ? waits : adds; };
    const auto list_if_last = [&](const Turn& turn, int added) {
        const Tile& t = shared.tile[turn.flags & second_stage];
        const TileRange all = tiles_of_block(p.mask, t.q_len, t.kv_len, turn.number);
        if (added != all.end - all.first) return;
        Finished* const f = finished_list(p) + ptx::atomic_add(p.control + listed_blocks, 1);
        const int first = turn.number * q_tile, row = t.q_row + first;
        f->head = (turn.block - turn.number - t.block) / p.blocks, f->q_row = row, f->rows = min(min(t.q_len - first, p.o_rows - row), q_tile);
        ptx::store_release(&f->block, turn.block + 1);
    };
    bool claimed = false, admitted = false;  // the step
    for (uint32_t step = 0;; ++step) {
        if (!claimed) {  // the first one, or the producer was late
            ptx::mbarrier_wait(&shared.turn_known[step % turn_stages], step / turn_stages & 1);
            if (__shfl_sync(~0u, turn_of(step).block, 0) < 0) break;
            if (lane == 1 && turn_of(step).flags & summed)
                turn_of(step).dq = claimed_as(ptx::atomic_add_acq_rel(turns_of(p, turn_of(step).block), one_claim));
            __syncwarp();
        }
        if (!admitted && lane == 1) {
            if (turn_of(step).dq == waits)
                while (ptx::load_acquire(turns_of(p, turn_of(step).block)) < one_added) {}
            ptx::mbarrier_arrive(&shared.admitted[step % turn_stages]);
        }
        __syncwarp();
        ptx::mbarrier_wait(&shared.added[step % turn_stages], step / turn_stages & 1);
        // Lane 0 counts the step while lane 1 claims the next one's turn: they share the fence and the way to the L2. Not claimed earlier, lest
        // others wait for it.
        const bool known = __all_sync(~0u, ptx::mbarrier_test_wait(&shared.turn_known[(step + 1) % turn_stages], (step + 1) / turn_stages & 1));
        const Turn turn = turn_of(step + (known && lane == 1));
        claimed = lane == 1 && known && turn.block >= 0;
        unsigned long long turns = 0;
        if ((lane == 0 || claimed) && turn.flags & summed) turns = ptx::atomic_add_acq_rel(turns_of(p, turn.block), lane == 0 ? one_added : one_claim);
        admitted = false;
        if (claimed) {
            const int dq = turn.flags & summed ? claimed_as(turns) : adds;
            turn_of(step + 1).dq = dq;
            admitted = dq != waits;
        }
        __syncwarp();
        if (admitted) ptx::mbarrier_arrive(&shared.admitted[(step + 1) % turn_stages]);
        claimed = __shfl_sync(~0u, claimed, 1), admitted = __shfl_sync(~0u, admitted, 1);
        if (lane == 0 && turn.flags & summed) list_if_last(turn, static_cast<int>(turns >> 32) + 1);
        __syncwarp();
        if (lane == 0 && turn.flags & ends_item) {
            ptx::mbarrier_arrive(&shared.tile_empty[turn.flags & second_stage]);
            ptx::atomic_add_release(p.control + done_items, 1);
        }
    }
}

// Takes a row block from the list; false: nothing more can come.
__device__ __forceinline__ bool take_finished(const JfaBackwardParams& p, Finished& taken) {
    const int n = ptx::atomic_add(p.control + taken_blocks, 1);
    // Looked at without the order that an acquire brings: that empties the L1 every time.
    while (n >= ptx::load_relaxed(p.control + listed_blocks) && ptx::load_relaxed(p.control + done_items) != p.header->backward_units * p.heads_kv)
        ptx::pause();
    // Done first: what is listed before the last item is done is seen then.
    ptx::load_acquire(p.control + done_items);
    if (n >= ptx::load_acquire(p.control + listed_blocks)) return false;
    Finished* const listed = finished_list(p) + n;
    int block;
    while ((block = ptx::load_acquire(&listed->block)) == 0) {}
    taken = {block, listed->head, listed->q_row, listed->rows};
    ptx::fence_async_global();
    return true;
}

// Stores what is listed.
__device__ void finish_query_gradients(SharedMemory& shared, const JfaBackwardParams& p, int me) {
    const int lane = ptx::lane_id();
    Finished& f = shared.taken[me];  // registers are scarce
    const auto sums = [&] { return block_at(p.partial, f.block - 1); };
    const auto fetch = [&](int part) {
        uint64_t* const full = &shared.finishing_full[me][part % finishing_stages];
        ptx::mbarrier_arrive_expect_tx(full, share);
        ptx::bulk_load(shared.finishing[me][part % finishing_stages], sums() + part * share, share, full);
    };
    for (;;) {
        bool more = false;
        if (lane == 0) more = take_finished(p, f);
        if (!__shfl_sync(~0u, more, 0)) return;
        if (lane == 0)
            for (int part = 0; part < finishing_stages; ++part) fetch(part);
        __syncwarp();
        static_assert(8 % (2 * finishing_stages) == 0, "every block begins with the same phases");
#pragma unroll 1
        for (int part = 0; part < 8; ++part) {
            const Place place = place_in(p, f.q_row, f.head, f.rows, 16 * part);
            ptx::mbarrier_wait(&shared.finishing_full[me][part % finishing_stages], part / finishing_stages & 1);
            const float* from = reinterpret_cast<const float*>(shared.finishing[me][part % finishing_stages]) + 4 * opaque(lane);
#pragma unroll 1
            for (int x = 0; x < q_tile / 8; x += 2) {
                const float4 a = ptx::load_shared(from + 128 * x), b = ptx::load_shared(from + 128 * x + 128);
                store_columns(place, p.dq_row_bytes, 8 * x, a, p.scale);
                store_columns(place, p.dq_row_bytes, 8 * x + 8, b, p.scale);
            }
            __syncwarp();
            if (lane == 0 && part + finishing_stages < 8) fetch(part + finishing_stages);
        }
        // The L2 need not write the sums to memory.
#pragma unroll 1
        for (int x = opaque(lane); x < sums_bytes / 128; x += 32) ptx::discard_l2(sums() + 128 * x);
        __syncwarp();
    }
}

// ---------------------------------------------------------------------------------------------------------------- consumer
// Descriptors are broadcast from lane 0, so that the compiler knows them to be uniform.
__device__ __forceinline__ uint64_t operand(const uint8_t* tile, uint32_t chunk_bytes = 16) {
    return ptx::matrix_descriptor(__shfl_sync(~0u, ptx::smem_address(tile), 0), chunk_bytes);
}

__device__ void consume(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_dk, const CUtensorMap* map_dv, int me) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = ptx::lane_id();
    const int own_row = 64 * me + 16 * warp;       // the warp's 16 rows of k, v, s^T; a thread has two of them
    const int column = 2 * (lane % 4);
    uint8_t* const leaving = shared.leaving[4 * me + warp];

    float s[q_tile / 2], dp[q_tile / 2];           // s^T, then p^T; dp^T: 64 keys x q_tile
    float dk[head_dim / 2], dv[head_dim / 2];      // 64 keys x head_dim
    float dq[q_tile / 2];                          // dq^T: 64 columns x q_tile

    // ---- products
    // to = 64 rows of a * q_tile rows of b
    const auto row_products = [&](float(&to)[q_tile / 2], const uint8_t* a_rows, const uint8_t* b_rows) {
        const uint64_t a = operand(a_rows), b = operand(b_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < head_dim / 16; ++x)
            ptx::Wgmma<q_tile, T>::ss(to, ptx::advance(a, x / 4 * kv_chunk + x % 4 * 32), ptx::advance(b, x / 4 * q_chunk + x % 4 * 32), x != 0);
        ptx::wgmma_commit();
    };
    // The values of a thread's columns (query rows): of 16 rows four, which are neighbours (place_of).
    const auto of_columns = [&](float4(&to)[q_tile / 16], const float* values) {
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x) to[x] = ptx::load_shared(values + 16 * x + 2 * column);
    };
    // to += fragments (64 keys x q_tile) * rows (q_tile x head_dim)
    const auto accumulate = [&](float(&to)[head_dim / 2], const uint32_t(&fragments)[q_tile / 16][4], const uint8_t* rows) {
        const uint64_t b = operand(rows, q_chunk);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < q_tile / 16; ++x) ptx::Wgmma<head_dim, T, 0, 1>::rs(to, fragments[x], ptx::advance(b, x * 2048), 1);
        ptx::wgmma_commit();
    };
    // dq^T = k^T ds^T
    const auto query_gradients = [&](const uint8_t* ds) {
        const uint64_t a = operand(shared.k + me * kv_chunk, kv_chunk), b = operand(ds);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < keys / 16; ++x)
            ptx::Wgmma<q_tile, T, 1, 0>::ss(dq, ptx::advance(a, x * 2048), ptx::advance(b, x / 4 * q_chunk + x % 4 * 32), x != 0);
        ptx::wgmma_commit();
    };
    uint32_t step = 0;
    for (uint32_t tiles = 0;; ++tiles) {
        ptx::mbarrier_wait(&shared.tile_full[stage_of(tiles)], phase_of(tiles));
        const Tile& t = shared.tile[stage_of(tiles)];
        const auto uniform = [](int x) { return __shfl_sync(~0u, x, 0); };
        if (uniform(t.flags) & the_end) break;
        // In registers: behind products a load from shared memory takes 300 cycles.
        const int lo = uniform(t.lo), hi = uniform(t.hi), first = uniform(t.first), whole_lo = uniform(t.whole_lo), whole_hi = uniform(t.whole_hi);
        const bool alone = uniform(t.kv_len) <= keys;
#pragma unroll
        for (int x = 0; x < head_dim / 2; ++x) dk[x] = dv[x] = 0.0f;
        ptx::mbarrier_wait(&shared.k_full, tiles & 1);
        int block = first, left = (hi - lo) * p.group;
        bool begun = false;  // whether there was a step before
        float4 of_rows[q_tile / 16];
        // Step n's turn at its row block, once it has it.
        struct Admitted {
            int block, dq;
        };
        const auto admitted = [&](uint32_t n) {
            ptx::mbarrier_wait(&shared.admitted[n % turn_stages], n / turn_stages & 1);
            const Turn& turn = shared.turns[n % turn_stages];
            return Admitted{turn.block, turn.dq};
        };
        // dq of step n, the last one, leaves.
        const auto leave_dq = [&](uint32_t n, Admitted turn) {
            if (lane == 0) ptx::mbarrier_arrive(&shared.ds_empty[stage_of(n)]);
            if (!alone) {
                float4* const own = reinterpret_cast<float4*>(block_at(p.partial, uniform(turn.block)) + (4 * me + warp) * share) + lane;
                if (uniform(turn.dq) == begins) {
#pragma unroll
                    for (int x = 0; x < q_tile / 8; ++x) ptx::store_l2(own + 32 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]});
                } else {
#pragma unroll
                    for (int x = 0; x < q_tile / 8; ++x) ptx::add_l2(own + 32 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]});
                }
            } else {
                const int done = block < hi - 1 ? block + 1 : lo, row = t.q_row + done * q_tile;  // without a mask: walked down, and round
                const int head = t.kv_head * p.group + p.group - 1 - left / (hi - lo);
                const Place place = place_in(p, row, head, min(t.q_len - done * q_tile, p.o_rows - row), own_row);
#pragma unroll
                for (int x = 0; x < q_tile / 8; ++x)
                    store_columns(place, p.dq_row_bytes, 8 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]}, p.scale);
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.added[n % turn_stages]);
            __syncwarp();
        };
#pragma unroll 1
        for (; left > 0; --left) {
            const int stage = stage_of(step);
            uint32_t p_fragments[q_tile / 16][4], ds_fragments[q_tile / 16][4];

            // No branch between the products: at one everything that is on its way from shared memory is waited for.
            if (!begun) ptx::mbarrier_wait(&shared.v_full, tiles & 1);
            while (!ptx::mbarrier_try_wait(&shared.q_full[stage], phase_of(step), &shared.do_full[stage], phase_of(step))) {}
            of_columns(of_rows, shared.lse[stage]);
            row_products(s, shared.k + me * 64 * 128, shared.q[stage]);
            row_products(dp, shared.v + me * 64 * 128, shared.d_o[stage]);

            // p^T = exp2(s^T * scale - lse), at most 1
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(s);
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x) {
                const auto probability = [&](float& value, float lse) { value = ptx::exp2_approx(ptx::min_nan(fmaf(value, p.scale_log2, lse), 0.0f)); };
                const float4 l = of_rows[x];
                probability(s[8 * x], l.x), probability(s[8 * x + 1], l.y), probability(s[8 * x + 2], l.x), probability(s[8 * x + 3], l.y);
                probability(s[8 * x + 4], l.z), probability(s[8 * x + 5], l.w), probability(s[8 * x + 6], l.z), probability(s[8 * x + 7], l.w);
            }
            if (block < whole_lo || block >= whole_hi) {
                const int q0 = block * q_tile, shift = diagonal_shift(p.mask, t.q_len, t.kv_len);
                const auto mask_row = [&](int key, int half) {  // its columns worked out here: registers
                    const int from = key < t.kv_len ? first_row(p.mask, key, shift) - q0 - 2 * int(opaque(lane) % 4) : 1 << 20;
                    const int to = end_row(p.mask, key, shift, 0x7FFFFFFF) - q0 - 2 * int(opaque(lane) % 4);
#pragma unroll
                    for (int x = 0; x < q_tile / 8; ++x)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& value = s[4 * x + 2 * half + e];
                            value = 8 * x + e >= from && 8 * x + e < to ? value : 0.0f;
                        }
                };
                mask_row(t.key0 + own_row + lane / 4, 0);
                mask_row(t.key0 + own_row + lane / 4 + 8, 1);
            }
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
#pragma unroll
                for (int r = 0; r < 4; ++r) p_fragments[x][r] = ptx::pack<T>(s[8 * x + 2 * r], s[8 * x + 2 * r + 1]);

            // dv += p^T do; behind it ds^T = p^T (dp^T - delta), and ds to shared memory
            of_columns(of_rows, shared.delta[stage]);
            accumulate(dv, p_fragments, shared.d_o[stage]);
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(dp);
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x) {
                // p as it entered dv, in 16 bits: holding it in fp32 until here would cost registers that are not there.
                const auto gradient = [&](int r, float d0, float d1) {
                    const float2 a = ptx::unpack<T>(p_fragments[x][r]);
                    ds_fragments[x][r] = ptx::pack<T>(a.x * (dp[8 * x + 2 * r] + d0), a.y * (dp[8 * x + 2 * r + 1] + d1));
                };
                const float4 d = of_rows[x];
                gradient(0, d.x, d.y), gradient(1, d.x, d.y), gradient(2, d.z, d.w), gradient(3, d.z, d.w);
            }
            // dq of the step before; in a tile's first step a product whose result nobody takes, since behind a branch it would serialize all.
            if (begun) ptx::mbarrier_wait(&shared.ds_full[stage_of(step - 1)], phase_of(step - 1));
            query_gradients(begun ? shared.ds[stage_of(step - 1)] : shared.k);
            accumulate(dk, ds_fragments, shared.q[stage]);
            ptx::mbarrier_wait(&shared.ds_empty[stage], phase_of(step) ^ 1);
            const uint32_t own_place = ptx::smem_address(shared.ds[stage]) + me * q_chunk +
                                       opaque((lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2 ^ lane % 8) << 4));
#pragma unroll
            for (int x = 0; x < q_tile / 16; ++x)
                ptx::stmatrix_trans_x4(own_place + x * 2048, ds_fragments[x][0], ds_fragments[x][1], ds_fragments[x][2], ds_fragments[x][3]);
            ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.ds_full[stage]);
            Admitted turn{};
            if (begun) turn = admitted(step - 1);  // behind dq and dk
            ptx::wgmma_wait<2>();  // dv
            if (lane == 0) ptx::mbarrier_arrive(&shared.do_empty[stage]);
            ptx::wgmma_wait<1>();  // dq
            ptx::wgmma_hold(dq);
            if (begun) leave_dq(step - 1, turn);
            ptx::wgmma_wait<0>();  // dk
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            block = block > lo ? block - 1 : hi - 1;
            begun = true;
            ++step;
        }
        ptx::wgmma_hold(dk);
        ptx::wgmma_hold(dv);
        // 16 rows of dv or dk leave, `width` columns of them from `first` on.
        const auto leave = [&](const CUtensorMap* map, const float(&from)[head_dim / 2], float factor, auto first, auto width, uint8_t* to, int chunk) {
            const uint32_t l = opaque(lane), own_place = ptx::smem_address(to) + l % 16 * 128;
            constexpr int begin = decltype(first)::value / 8, end = begin + decltype(width)::value / 8;
#pragma unroll
            for (int x = begin; x < end; x += 2)
                ptx::stmatrix_x4(own_place + (x - begin) / 8 * chunk + ((x % 8 + l / 16 ^ l % 8) << 4), ptx::pack<T>(from[4 * x] * factor, from[4 * x + 1] * factor),
                                 ptx::pack<T>(from[4 * x + 2] * factor, from[4 * x + 3] * factor),
                                 ptx::pack<T>(from[4 * x + 4] * factor, from[4 * x + 5] * factor),
                                 ptx::pack<T>(from[4 * x + 6] * factor, from[4 * x + 7] * factor));
            ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0) {
                const int rows = min(16, t.kv_len - t.key0 - own_row), row = t.kv_row + t.key0 + own_row;
#pragma unroll
                for (int x = begin; x < end; x += 8)
                    if (rows > 0) ptx::tma_store_rows(map, to + (x - begin) / 8 * chunk, 8 * x, row, rows, t.kv_head, ptx::used_once());
                ptx::bulk_commit();
            }
        };
        using std::integral_constant;
        if (hi == lo) ptx::mbarrier_wait(&shared.v_full, tiles & 1);
        // dv leaves through the warp's rows of v, dk through its own place.
        ptx::named_barrier_sync(1 + me, 128);  // all of the consumer's warps have read v
        leave(map_dv, dv, 1.0f, integral_constant<int, 0>{}, integral_constant<int, head_dim>{}, shared.v + own_row * 128, kv_chunk);
        if (hi > lo) ptx::mbarrier_wait(&shared.ds_full[stage_of(step - 1)], phase_of(step - 1));
        query_gradients(hi > lo ? shared.ds[stage_of(step - 1)] : shared.k);
        if (lane == 0) {
            ptx::bulk_wait_read<0>();
            ptx::mbarrier_arrive(&shared.v_empty);
        }
        __syncwarp();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(dq);
        if (lane == 0) ptx::mbarrier_arrive(&shared.k_empty);
        if (hi > lo) leave_dq(step - 1, admitted(step - 1));
        leave(map_dk, dk, p.scale, integral_constant<int, 0>{}, integral_constant<int, 64>{}, leaving, 0);
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
        leave(map_dk, dk, p.scale, integral_constant<int, 64>{}, integral_constant<int, 64>{}, leaving, 0);
        if (lane == 0) ptx::mbarrier_arrive(&shared.tile_empty[stage_of(tiles)]);
    }
    if (lane == 0) ptx::bulk_wait<0>();
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = keys;  // keys of a unit
extern "C" __constant__ unsigned jfa_q_tile = q_tile;

extern "C" __global__ void __launch_bounds__(threads, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_do, const __grid_constant__ CUtensorMap map_dk, const __grid_constant__ CUtensorMap map_dv,
          const __grid_constant__ JfaBackwardParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    // Broadcast, so that the compiler knows the roles to be uniform.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int i = 0; i < turn_stages; ++i) {
            ptx::mbarrier_init(&shared.turn_known[i], 1);
            ptx::mbarrier_init(&shared.admitted[i], 1);
            ptx::mbarrier_init(&shared.added[i], 8);
        }
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&shared.tile_full[i], 1);
            ptx::mbarrier_init(&shared.tile_empty[i], 8 + 1);
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], 8);
            ptx::mbarrier_init(&shared.do_empty[i], 8);
            ptx::mbarrier_init(&shared.ds_full[i], 8);
            ptx::mbarrier_init(&shared.ds_empty[i], 8);
        }
        ptx::mbarrier_init(&shared.k_full, 1);
        ptx::mbarrier_init(&shared.k_empty, 8);
        for (int i = 0; i < 2 * finishing_stages; ++i) ptx::mbarrier_init(&shared.finishing_full[0][0] + i, 1);
        ptx::mbarrier_init(&shared.v_full, 1);
        ptx::mbarrier_init(&shared.v_empty, 8);
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_do);
        ptx::tma_prefetch_map(&map_dk);
        ptx::tma_prefetch_map(&map_dv);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            if (ptx::elect_one()) produce(shared, p, &map_q, &map_k, &map_v, &map_do);
        } else {
            if (warp == 1) take_turns(shared, p);
            else finish_query_gradients(shared, p, warp - 2);
        }
    } else {
        ptx::registers_acquire<consumer_registers>();
        consume(shared, p, &map_dk, &map_dv, warpgroup - 1);
    }
}

}  // namespace jfa
