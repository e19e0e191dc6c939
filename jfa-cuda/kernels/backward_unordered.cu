// Jagged attention backward, Hopper (sm_90a), for long sequences whose sums may be added in any order: dq, dk, dv in one launch, persistent.
//
//   item        a tile of 128 keys of one sequence and key/value head, walked over row blocks (q_tile query rows), for every query head of
//               the group; dk and dv stay in registers. Items come from a queue, tiles of a sequence one after another, so that whoever
//               reads its rows at the same time finds them in the L2. Each begins at another row block and goes round, so that they
//               add to different sums at a time, and each is the last one to add to some
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q, dq^T = k^T ds^T; p^T and ds^T never leave the registers as left
//               operands, ds goes to shared memory once for dq. lse and delta come from backward_prepare.cu
//   dq          is multiplied a step late, when the other consumer's ds has come, and added at the L2 in fp32 straight from the registers, 16
//               bytes a reduction. Who adds last to a row block, by a counter, takes the sum and stores dq. A sequence of one tile needs no
//               sum: its dq is stored
//   zeros       are written where sums begin about a hundred items before their tiles come, not for all rows before all tiles: so they stay in
//               the L2, and so do the sums, which are thrown away once they are stored. Who takes item i zeroes its share of the sequence of
//               item i + lead; who comes to a row block that nobody has begun to zero does it itself, hence no wait can be endless
//   roles       producer warpgroup: warp 0 takes items and loads; warp 1 zeroes, counts additions and lists finished row blocks; warps 2
//               and 3 store what is listed by any CTA: a tile may finish all of its row blocks, others none. Two consumer warpgroups of 64
//               keys each; for dq each has half the columns of all keys. They meet in nothing but ds, which has two stages
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
constexpr int added_stages = 8;
constexpr int finishing_stages = 2;

enum : int { the_end = 1 };
struct Tile {
    int flags;
    int item;
    int lo, hi, first;       // row blocks, walked from `first` down to lo and then from hi - 1 down
    int q_row, o_row, q_len;
    int kv_row, kv_len, key0;
    int kv_head;
    int block;               // row block 0 in a head
    int whole_lo, whole_hi;  // of these row blocks no mask cuts anything
};

// A row block of which nothing more comes.
struct alignas(16) Finished {
    int block;  // among all, and 1: 0 is nothing yet
    int head, q_row, rows;
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
    uint64_t tile_full[2], tile_empty[2];
    uint64_t k_full, k_empty, v_full, v_empty;
    uint64_t q_full[2], q_empty[2], do_full[2], do_empty[2], ds_full[2], ds_empty[2];
    uint64_t added_full[added_stages], added_empty[added_stages];  // a step's dq is in the sums
    uint64_t finishing_full[2][finishing_stages];
};
static_assert(sizeof(SharedMemory) <= 232448, "shared memory of a CTA");

// Words of `control`; then per row block the number of tiles that have added to it, then whether its sums are zero, then the list of finished ones.
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

// ------------------------------------------------------------------------------------------------------------------- zeros
enum : int { unzeroed, being_zeroed, zeroed };
__device__ __forceinline__ int* state_of(const JfaBackwardParams& p, int block) { return p.control + counters + row_blocks(p) + block; }

// The sums of a row block become zero, unless somebody has begun that. By a warp, or by one thread.
template <int lanes>
__device__ __forceinline__ void zero_sums(const JfaBackwardParams& p, int block) {
    const int lane = lanes == 1 ? 0 : ptx::lane_id();
    int before = 0;
    if (lane == 0) before = atomicCAS(state_of(p, block), unzeroed, being_zeroed);
    if (lanes > 1) before = __shfl_sync(~0u, before, 0);
    if (before != unzeroed) return;
    float4* const sums = reinterpret_cast<float4*>(block_at(p.partial, block));
#pragma unroll 4
    for (int x = lane; x < sums_bytes / 16; x += lanes) ptx::store_l2(sums + x, float4{0.0f, 0.0f, 0.0f, 0.0f});
    if (lanes > 1) __syncwarp();
    if (lane == 0) ptx::store_release(state_of(p, block), zeroed);
}

// Item i: a unit and a key/value head. The tiles of a sequence and head are items one after another.
struct Item {
    JfaSequence sequence;
    int unit_sequence, tile, tiles, kv_head;
};
__device__ __forceinline__ Item item_of(const JfaBackwardParams& p, uint32_t i) {
    Item item;
    const uint32_t place = i / p.heads_kv;  // in the list; of this sequence's units some one, since they are neighbours there
    const JfaUnit unit = p.units[place];
    item.unit_sequence = unit.sequence;
    item.sequence = p.sequences[unit.sequence];
    item.tiles = max(1, (item.sequence.kv_len + keys - 1) / keys);
    const uint32_t first = (place - max(0, unit.first) / keys) * p.heads_kv;
    item.kv_head = (i - first) / item.tiles;
    item.tile = (i - first) % item.tiles;
    return item;
}

// What is to be zeroed for an item: of the n row blocks of a sequence of T tiles those where tile t begins, [n - n (t + 1) / T, n - n t / T).
struct Share {
    int head, block;   // of the first query head, its first row block
    int width, count;  // row blocks of a head, of all heads
};
__device__ __forceinline__ Share share_of(const JfaBackwardParams& p, uint32_t item) {
    Share share{0, 0, 1, 0};
    if (item >= static_cast<uint32_t>(p.header->backward_units) * static_cast<uint32_t>(p.heads_kv)) return share;
    const Item it = item_of(p, item);
    if (it.sequence.kv_len <= keys) return share;
    const long long blocks = (it.sequence.q_len + q_tile - 1) / q_tile;
    const int from = static_cast<int>(blocks - blocks * (it.tile + 1) / it.tiles);
    share.head = it.kv_head * p.group;
    share.block = first_block(it.sequence.o_row, it.unit_sequence) + from;
    share.width = static_cast<int>(blocks - blocks * it.tile / it.tiles) - from;
    share.count = share.width * p.group;
    return share;
}
__device__ __forceinline__ void zero_for(const JfaBackwardParams& p, uint32_t item) {
    const Share share = share_of(p, item);
    for (int n = 0; n < share.count; ++n) zero_sums<32>(p, (share.head + n / share.width) * p.blocks + share.block + n % share.width);
}
// How many items ahead: as many as the first, longest sequence has, so that its row blocks are zero when its tiles come to them, and some that
// begin meanwhile. More would push the sums in use out of the L2.
__device__ __forceinline__ uint32_t lead_of(const JfaBackwardParams& p) {
    const int tiles = p.header->backward_units ? (p.sequences[p.units[0].sequence].kv_len + keys - 1) / keys : 0;
    return 64 + min(tiles * p.heads_kv, 128);
}
// Of the first items, dealt to three warps of every CTA.
__device__ __forceinline__ void zero_first(const JfaBackwardParams& p, int me) {
    const uint32_t lead = lead_of(p);
    for (uint32_t item = blockIdx.x + gridDim.x * me; item < lead; item += 3 * gridDim.x) zero_for(p, item);
}

// ---------------------------------------------------------------------------------------------------------------- producer
// The first row block from row x on.
constexpr int all_blocks = 1 << 25;
__device__ __forceinline__ int block_from(long long x) { return x <= 0 ? 0 : static_cast<int>(min((x + q_tile - 1) / q_tile, 1ll * all_blocks)); }

__device__ __forceinline__ void fill_tile(Tile& t, const JfaBackwardParams& p, const Item& it, uint32_t item) {
    const JfaSequence& s = it.sequence;
    const int key0 = it.tile * keys, shift = diagonal_shift(p.mask, s.q_len, s.kv_len), end = min(key0 + keys, s.kv_len);
    const int row_lo = first_row(p.mask, key0, shift), row_hi = min(s.q_len, end_row(p.mask, end - 1, shift, s.q_len));
    const bool empty = end <= key0 || row_lo >= row_hi;
    t.flags = 0;
    t.item = item;
    t.lo = empty ? 0 : row_lo / q_tile;
    t.hi = empty ? 0 : (row_hi + q_tile - 1) / q_tile;
    // Under a mask tiles have different rows anyway.
    const bool goes_round = p.mask.left < 0 && p.mask.right < 0;
    t.first = t.hi - 1 - (goes_round ? static_cast<int>(static_cast<long long>(t.hi) * it.tile / it.tiles) : 0);
    t.q_row = s.q_row, t.o_row = s.o_row, t.q_len = s.q_len;
    t.kv_row = s.kv_row, t.kv_len = s.kv_len, t.key0 = key0;
    t.kv_head = it.kv_head;
    t.block = first_block(s.o_row, it.unit_sequence);
    // Row r sees keys r + shift - left .. r + shift + right.
    t.whole_hi = p.mask.left < 0 ? all_blocks : block_from(key0 - 1ll * shift + p.mask.left - q_tile + 2);
    t.whole_lo = s.kv_len < key0 + keys ? all_blocks : p.mask.right < 0 ? 0 : block_from(key0 + keys - 1ll * shift - p.mask.right - 1);
}

__device__ void produce(SharedMemory& shared, const JfaBackwardParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_do) {
    const uint32_t items = static_cast<uint32_t>(p.header->backward_units) * static_cast<uint32_t>(p.heads_kv);
    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int tile_rows, int row, int rows, int head) {
#pragma unroll
        for (int x = 0; x < chunks; ++x) ptx::tma_load_rows(map, barrier, to + x * tile_rows * 128, 64 * x, row, max(0, min(tile_rows, rows)), head);
    };
    uint32_t tiles = 0, step = 0;
    uint32_t item = ptx::atomic_add(p.control + next_item, 1);
    for (; item < items; ++tiles) {
        const Item it = item_of(p, item);
        ptx::mbarrier_wait(&shared.tile_empty[stage_of(tiles)], phase_of(tiles) ^ 1);
        Tile& t = shared.tile[stage_of(tiles)];
        fill_tile(t, p, it, item);
        ptx::mbarrier_arrive(&shared.tile_full[stage_of(tiles)]);
        const auto load_once = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to) {
#pragma unroll
            for (int x = 0; x < chunks; ++x)
                ptx::tma_load_rows(map, barrier, to + x * kv_chunk, 64 * x, t.kv_row + t.key0, max(0, min(keys, t.kv_len - t.key0)), t.kv_head, ptx::used_once());
        };
        bool first = true, drawn = false;
#pragma unroll 1
        for (int member = 0; member < p.group; ++member) {
            const int head = t.kv_head * p.group + member, blocks = t.hi - t.lo;
#pragma unroll 1
            for (int n = 0, i = t.first; n < blocks; ++n, ++step, i = i > t.lo ? i - 1 : t.hi - 1) {
                const int stage = stage_of(step), row = i * q_tile, rows = t.q_len - row;
                const uint32_t free = phase_of(step) ^ 1;
                const int block = head * p.blocks + t.block + i;
                const char* starts = block_at(p.partial, block) + sums_bytes;
                if (t.kv_len > keys) {
                    for (int state = ptx::load_acquire(state_of(p, block)); state != zeroed; state = ptx::load_acquire(state_of(p, block)))
                        if (state == unzeroed) zero_sums<1>(p, block);
                }
                ptx::mbarrier_wait(&shared.q_empty[stage], free);
                ptx::mbarrier_arrive_expect_tx(&shared.q_full[stage], q_bytes + sizeof(shared.lse[0]));
                ptx::bulk_load(shared.lse[stage], starts, sizeof(shared.lse[0]), &shared.q_full[stage]);
                load(map_q, &shared.q_full[stage], shared.q[stage], q_tile, t.q_row + row, rows, head);
                if (first) {
                    ptx::mbarrier_wait(&shared.k_empty, (tiles & 1) ^ 1);
                    ptx::mbarrier_arrive_expect_tx(&shared.k_full, kv_bytes);
                    load_once(map_k, &shared.k_full, shared.k);
                }
                ptx::mbarrier_wait(&shared.do_empty[stage], free);
                ptx::mbarrier_arrive_expect_tx(&shared.do_full[stage], q_bytes + sizeof(shared.delta[0]));
                ptx::bulk_load(shared.delta[stage], starts + sizeof(shared.lse[0]), sizeof(shared.delta[0]), &shared.do_full[stage]);
                load(map_do, &shared.do_full[stage], shared.d_o[stage], q_tile, t.o_row + row, rows, head);
                if (first) {
                    ptx::mbarrier_wait(&shared.v_empty, (tiles & 1) ^ 1);
                    ptx::mbarrier_arrive_expect_tx(&shared.v_full, kv_bytes);
                    load_once(map_v, &shared.v_full, shared.v);
                    first = false;
                }
                // Not before the last steps: what is drawn early waits behind this tile while others have nothing to do.
                if (!drawn && member == p.group - 1 && n + 2 >= blocks) item = ptx::atomic_add(p.control + next_item, 1), drawn = true;
            }
        }
        // A tile that no row sees has no steps, but its turn of k and v.
        if (first) {
            ptx::mbarrier_wait(&shared.k_empty, (tiles & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(&shared.k_full, kv_bytes);
            load_once(map_k, &shared.k_full, shared.k);  // a product whose result nobody takes reads it
            ptx::mbarrier_wait(&shared.v_empty, (tiles & 1) ^ 1);
            ptx::mbarrier_arrive(&shared.v_full);
        }
        if (!drawn) item = ptx::atomic_add(p.control + next_item, 1);
    }
    ptx::mbarrier_wait(&shared.tile_empty[stage_of(tiles)], phase_of(tiles) ^ 1);
    shared.tile[stage_of(tiles)].flags = the_end;
    ptx::mbarrier_arrive(&shared.tile_full[stage_of(tiles)]);
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
    const uint32_t a = odd ? ptx::pack<T>(low * scale, f.y * scale) : ptx::pack<T>(f.x * scale, low * scale);
    const uint32_t b = odd ? ptx::pack<T>(high * scale, f.w * scale) : ptx::pack<T>(f.z * scale, high * scale);
    char* const to = place.to + row * row_bytes;
    if (row < place.rows && place.columns > 0) *reinterpret_cast<uint32_t*>(to) = a;
    if (row < place.rows && place.columns > 8) *reinterpret_cast<uint32_t*>(to + 16) = b;
}

// Counts what has been added to every row block of the CTA's steps; lists those to which nothing more comes.
__device__ void count_additions(SharedMemory& shared, const JfaBackwardParams& p) {
    const int lane = ptx::lane_id();
    const uint32_t lead = lead_of(p);
    uint32_t steps = 0;
    for (uint32_t tiles = 0;; ++tiles) {
        ptx::mbarrier_wait(&shared.tile_full[stage_of(tiles)], phase_of(tiles));
        const Tile& t = shared.tile[stage_of(tiles)];
        if (t.flags & the_end) break;
        zero_for(p, t.item + lead);
#pragma unroll 1
        for (int member = 0; member < p.group; ++member) {
            const int head = t.kv_head * p.group + member, blocks = t.hi - t.lo;
#pragma unroll 1
            for (int n = 0, i = t.first; n < blocks; ++n, ++steps, i = i > t.lo ? i - 1 : t.hi - 1) {
                const TileRange all = tiles_of_block(p.mask, t.q_len, t.kv_len, i);
                const int block = head * p.blocks + t.block + i, row = t.q_row + i * q_tile;
                ptx::mbarrier_wait(&shared.added_full[steps % added_stages], steps / added_stages & 1);
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(&shared.added_empty[steps % added_stages]);
                if (t.kv_len <= keys) continue;  // nothing was added
                int before = 0;
                if (lane == 0) before = ptx::atomic_add_release(p.control + counters + block, 1);
                if (lane == 0 && before + 1 == all.end - all.first) {
                    ptx::fence_acquire();
                    Finished* const f = finished_list(p) + ptx::atomic_add(p.control + listed_blocks, 1);
                    f->head = head, f->q_row = row, f->rows = min(min(t.q_len - i * q_tile, p.o_rows - row), q_tile);
                    ptx::store_release(&f->block, block + 1);
                }
            }
        }
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(&shared.tile_empty[stage_of(tiles)]);
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
        int sums = uniform(t.kv_head) * p.group * p.blocks + uniform(t.block) + first;  // the row block's place
#pragma unroll
        for (int x = 0; x < head_dim / 2; ++x) dk[x] = dv[x] = 0.0f;
        ptx::mbarrier_wait(&shared.k_full, tiles & 1);
        int block = first, left = (hi - lo) * p.group;
        const int steps = left;
        int before = 0;
        float4 of_rows[q_tile / 16];
        // dq of step n, the last one, leaves.
        const auto leave_dq = [&](uint32_t n) {
            if (!alone) {
                float4* const own = reinterpret_cast<float4*>(block_at(p.partial, before) + (4 * me + warp) * share) + lane;
#pragma unroll
                for (int x = 0; x < q_tile / 8; ++x) ptx::add_l2(own + 32 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]});
            } else {
                const int done = block < hi - 1 ? block + 1 : lo, row = t.q_row + done * q_tile;  // without a mask: walked down, and round
                const int head = t.kv_head * p.group + p.group - 1 - left / (hi - lo);
                const Place place = place_in(p, row, head, min(t.q_len - done * q_tile, p.o_rows - row), own_row);
#pragma unroll
                for (int x = 0; x < q_tile / 8; ++x)
                    store_columns(place, p.dq_row_bytes, 8 * x, float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]}, p.scale);
            }
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(&shared.ds_empty[stage_of(n)]);
                ptx::mbarrier_wait(&shared.added_empty[n % added_stages], (n / added_stages & 1) ^ 1);
                ptx::mbarrier_arrive(&shared.added_full[n % added_stages]);
            }
            __syncwarp();
        };
#pragma unroll 1
        for (; left > 0; --left) {
            const int stage = stage_of(step);
            uint32_t p_fragments[q_tile / 16][4], ds_fragments[q_tile / 16][4];

            ptx::mbarrier_wait(&shared.q_full[stage], phase_of(step));
            of_columns(of_rows, shared.lse[stage]);
            row_products(s, shared.k + me * 64 * 128, shared.q[stage]);
            ptx::mbarrier_wait(&shared.v_full, tiles & 1);
            ptx::mbarrier_wait(&shared.do_full[stage], phase_of(step));
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
                const auto mask_row = [&](int key, int half) {
                    const int from = key < t.kv_len ? first_row(p.mask, key, shift) - q0 - column : 1 << 20;
                    const int to = end_row(p.mask, key, shift, 0x7FFFFFFF) - q0 - column;
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
            accumulate(dv, p_fragments, shared.d_o[stage]);
            of_columns(of_rows, shared.delta[stage]);
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
            if (left < steps) ptx::mbarrier_wait(&shared.ds_full[stage_of(step - 1)], phase_of(step - 1));
            query_gradients(left < steps ? shared.ds[stage_of(step - 1)] : shared.k);
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
            ptx::wgmma_wait<2>();  // dv
            if (lane == 0) ptx::mbarrier_arrive(&shared.do_empty[stage]);
            ptx::wgmma_wait<1>();  // dq
            ptx::wgmma_hold(dq);
            if (left < steps) leave_dq(step - 1);
            ptx::wgmma_wait<0>();  // dk
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
            before = sums;
            const int went = block > lo ? -1 : hi - 1 - lo;
            block += went, sums += went;
            if (block == first) sums += p.blocks;
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
        if (hi > lo) leave_dq(step - 1);
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
        for (int i = 0; i < added_stages; ++i) {
            ptx::mbarrier_init(&shared.added_full[i], 8);
            ptx::mbarrier_init(&shared.added_empty[i], 1);
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
            zero_first(p, warp - 1);
            if (warp == 1) count_additions(shared, p);
            else finish_query_gradients(shared, p, warp - 2);
        }
    } else {
        ptx::registers_acquire<consumer_registers>();
        consume(shared, p, &map_dk, &map_dv, warpgroup - 1);
    }
}

}  // namespace jfa
