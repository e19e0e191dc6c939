// Split backward, query side, Hopper (sm_90a): dq, and the statistics of every row (lse, delta) for the key side.
//
//   unit        a unit of the forward: two blocks of 64 query rows of one sequence and head (or of fewer rows of a packed group of
//               heads), walked over tiles of 64 keys. Broadcast query: the same rows against every `slices`-th sequence
//   products    s = q k^T, dp = do v^T, dq += ds k; ds never leaves the registers
//   delta       rowsum(o * do), o straight from memory while q and do are on their way
//   roles       warp 0: schedule and TMA (warps 1 to 3 idle); two consumer warpgroups of one block each
//   buffers     q, do: 2 stages (1 above head_dim 128); k and v: one ring of tiles in the order V0 K0 V1 K1 ...: a value tile is done
//               with first, so that the next keys are loaded into its slot while this tile's dq is computed
//   registers   consumers 232, producer warpgroup 40
//   rate        docs/performance.md
#include "ptx/global.cuh"
#include "ptx/wgmma.cuh"
#include "split.cuh"

#ifndef JFA_HEAD_DIM
#define JFA_HEAD_DIM 256
#endif
#ifndef JFA_TYPE
#define JFA_TYPE bf16
#endif
#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_backward_dq_256_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;     // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = head_dim / 64;      // 64-column chunks of 128-byte rows in shared memory
constexpr int keys = 64;                   // keys of a tile
constexpr int stages = head_dim <= 128 ? 2 : 1;
constexpr int slots = head_dim <= 128 ? 6 : 3;
constexpr int tile_bytes = chunks * box_bytes;

// The rows of a unit and the keys of one sequence they are walked over.
enum : int { first_of_unit = 1, last_of_unit = 2, the_end = 4 };
struct Segment {
    int flags;
    int tile0, tiles;
    int whole_begin, whole_end;  // of these tiles no mask cuts anything
    int first;                   // row of its first block within the sequence
    int q_len, kv_len;
    int q_row, o_row;            // of the sequence
    int head, packed_head;       // first query head, number of the packed one
    int block;                   // number of the first block
    int item;
};

struct SharedMemory {
    uint8_t q[stages][2][tile_bytes], d_o[stages][2][tile_bytes];
    uint8_t kv[slots][tile_bytes];
    Segment segment[2];
    uint64_t segment_full[2], segment_empty[2];
    uint64_t q_full[stages], do_full[stages], q_empty[stages];
    uint64_t kv_full[slots], kv_empty[slots];
};

// ---------------------------------------------------------------------------------------------------------------- producer
__device__ void produce(SharedMemory& shared, const JfaSplitParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_do) {
    const int rows_per_block = block_rows >> p.packed_log2, group = p.heads / p.heads_kv;
    const int items = p.broadcast ? p.slices * p.heads * p.pairs : p.header->forward_units * p.heads;
    uint32_t count = 0, loaded = 0, place = 0;

    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int row, int rows, int head) {
#pragma unroll
        for (int x = 0; x < chunks; ++x) ptx::tma_load_rows(map, barrier, to + x * box_bytes, 64 * x, row, rows, head);
    };
    // Rows of a unit against one sequence.
    const auto walk = [&](int flags, int item, const JfaSequence& s, int sequence, int first, int packed_head) {
        const int shift = diagonal_shift(p.mask, s.q_len, s.kv_len);
        const int rows = min(2 * rows_per_block, s.q_len - first);
        const int lo = first_key(p.mask, first, shift), hi = rows > 0 ? end_key(p.mask, first + rows - 1, shift, s.kv_len) : 0;
        const int place_of_segment = count % 2;
        ptx::mbarrier_wait(&shared.segment_empty[place_of_segment], ((count / 2) & 1) ^ 1);
        Segment& g = shared.segment[place_of_segment];
        g.flags = flags;
        g.tile0 = lo / keys;
        g.tiles = hi > lo ? (hi - 1) / keys - lo / keys + 1 : 0;
        g.whole_begin = (first_key(p.mask, first + rows - 1, shift) + keys - 1) / keys;
        g.whole_end = p.mask.right < 0 ? 0x7FFFFFFF : end_key(p.mask, first, shift, s.kv_len) / keys;
        g.first = first;
        g.q_len = s.q_len;
        g.kv_len = s.kv_len;
        g.q_row = s.q_row;
        g.o_row = s.o_row;
        g.packed_head = packed_head;
        g.head = packed_head << p.packed_log2;
        g.block = first_block(p, s.o_row, sequence) + first / rows_per_block;
        g.item = item;
        const int tile0 = g.tile0, tiles = g.tiles;
        ptx::mbarrier_arrive(&shared.segment_full[place_of_segment]);
        ++count;
        if (tiles == 0) return;

        const int stage = loaded % stages;
        ptx::mbarrier_wait(&shared.q_empty[stage], ((loaded / stages) & 1) ^ 1);
        const auto block_rows_of = [&](int b) { return max(0, min(rows_per_block, rows - b * rows_per_block)); };
        ptx::mbarrier_arrive_expect_tx(&shared.do_full[stage], 2 * tile_bytes);
        for (int b = 0; b < 2; ++b)
            load(map_do, &shared.do_full[stage], shared.d_o[stage][b], s.o_row + first + b * rows_per_block, block_rows_of(b), g.head);
        ptx::mbarrier_arrive_expect_tx(&shared.q_full[stage], 2 * tile_bytes);
        for (int b = 0; b < 2; ++b)
            load(map_q, &shared.q_full[stage], shared.q[stage][b], s.q_row + first + b * rows_per_block, block_rows_of(b), g.head);
        ++loaded;

        const int kv_head = packed_head / group;
#pragma unroll 1
        for (int i = 0; i < 2 * tiles; ++i, ++place) {
            const int slot = place % slots, key = (tile0 + i / 2) * keys;
            ptx::mbarrier_wait(&shared.kv_empty[slot], ((place / slots) & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(&shared.kv_full[slot], tile_bytes);
            load(i % 2 ? map_k : map_v, &shared.kv_full[slot], shared.kv[slot], s.kv_row + key, min(keys, s.kv_len - key), kv_head);
        }
    };

    for (;;) {
        const int item = ptx::atomic_add(p.control, 1);
        if (item >= items) break;
        const int packed_head = item % p.heads;
        if (!p.broadcast) {
            const JfaUnit unit = p.query_units[item / p.heads];
            walk(first_of_unit | last_of_unit, item, p.sequences[unit.sequence], unit.sequence, unit.first, packed_head);
        } else {
            const int slice = item / p.heads / p.pairs, first = item / p.heads % p.pairs * 2 * rows_per_block;
            if (slice >= p.batch) walk(first_of_unit | last_of_unit, item, JfaSequence{}, 0, 0, packed_head);
#pragma unroll 1
            for (int b = slice; b < p.batch; b += p.slices)
                walk((b == slice ? first_of_unit : 0) | (b + p.slices >= p.batch ? last_of_unit : 0), item, p.sequences[b], b, first, packed_head);
        }
    }
    ptx::mbarrier_wait(&shared.segment_empty[count % 2], ((count / 2) & 1) ^ 1);
    shared.segment[count % 2] = Segment{the_end};
    ptx::mbarrier_arrive(&shared.segment_full[count % 2]);
}

// ---------------------------------------------------------------------------------------------------------------- consumer
__device__ void consume(SharedMemory& shared, const JfaSplitParams& p, int me) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = ptx::lane_id(), quad = lane % 4;
    const int own_row = 16 * warp + lane / 4;  // the thread's rows of the block: own_row and own_row + 8
    const int rows_log2 = 6 - p.packed_log2, rows_per_block = 1 << rows_log2;

    float dq[head_dim / 2];          // 64 rows x head_dim
    float s[keys / 2], dp[keys / 2]; // 64 rows x keys

    // ---- products. Descriptors are broadcast from lane 0, so that the compiler knows them to be uniform.
    const auto operand = [](const uint8_t* tile, uint32_t chunk_bytes = 16) {
        return ptx::matrix_descriptor(__shfl_sync(~0u, ptx::smem_address(tile), 0), chunk_bytes);
    };
    const auto row_products = [&](float(&to)[keys / 2], const uint8_t* a_rows, const uint8_t* b_rows) {
        const uint64_t a = operand(a_rows), b = operand(b_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < head_dim / 16; ++x)
            ptx::Wgmma<keys, T>::ss(to, ptx::advance(a, x / 4 * box_bytes + x % 4 * 32), ptx::advance(b, x / 4 * box_bytes + x % 4 * 32), x != 0);
        ptx::wgmma_commit();
    };

    uint32_t place = 0, loaded = 0;
    for (uint32_t count = 0;; ++count) {
        ptx::mbarrier_wait(&shared.segment_full[count % 2], (count / 2) & 1);
        const Segment& g = shared.segment[count % 2];
        const int flags = __shfl_sync(~0u, g.flags, 0), tiles = __shfl_sync(~0u, g.tiles, 0);
        if (flags & the_end) break;
        if (flags & first_of_unit) {
#pragma unroll
            for (int x = 0; x < head_dim / 2; ++x) dq[x] = 0.0f;
        }
        const bool works = __shfl_sync(~0u, g.first + me * rows_per_block < g.q_len, 0);
        // The thread's two rows, within the sequence, and their heads: read again where they are needed, registers are scarce.
        const auto row_of = [&](int r) { return g.first + me * rows_per_block + ((own_row + 8 * r) & (rows_per_block - 1)); };
        const auto head_of = [&](int r) { return g.head + ((own_row + 8 * r) >> rows_log2); };

        const int stage = loaded % stages;
        const uint32_t phase = (loaded / stages) & 1;
        const auto leave_stage = [&] {
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[stage]);
        };
        const auto wait_tile = [&](uint32_t n) { ptx::mbarrier_wait(&shared.kv_full[n % slots], (n / slots) & 1); };
        const auto leave_tile = [&](uint32_t n) {
            if (lane == 0) ptx::mbarrier_arrive(&shared.kv_empty[n % slots]);
        };
        if (tiles > 0) ++loaded;
        if (tiles > 0 && !works) {
            // A lone block is the other consumer's; this one walks along, for it must not give back what is not full yet.
            ptx::mbarrier_wait(&shared.do_full[stage], phase);
            ptx::mbarrier_wait(&shared.q_full[stage], phase);
            leave_stage();
#pragma unroll 1
            for (int i = 0; i < 2 * tiles; ++i, ++place) {
                wait_tile(place);
                __syncwarp();
                leave_tile(place);
            }
        } else if (tiles > 0) {
            // lse and delta of the thread's rows, the latter over a quarter of the columns: pieces `quad` and `4 + quad` of every chunk, in
            // the other order for odd rows, so that there are no bank conflicts.
            float lse[2], delta[2];
            const int pieces[2] = {quad + (own_row & 1) * 4, quad + (~own_row & 1) * 4};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = own_row + 8 * r;
                const int row = row_of(r);
                const bool readable = row < g.q_len && g.o_row + row < p.o_rows;
                const long long o_row = static_cast<long long>(g.o_row) + row;
                const char* from = static_cast<const char*>(p.o) + o_row * p.o_row_bytes + head_of(r) * p.o_head_bytes;
                uint4 o[head_dim / 32];
#pragma unroll
                for (int x = 0; x < head_dim / 32; ++x) {
                    const bool inside = readable && pieces[x % 2] < p.vectors_v - x / 2 * 8;
                    o[x] = inside ? *reinterpret_cast<const uint4*>(from + 16 * pieces[x % 2] + x / 2 * 128) : uint4{0, 0, 0, 0};
                }
                const float l = readable ? p.lse[head_of(r) * p.lse_head_stride + o_row] * 1.44269504088896341f : -INFINITY;
                if (r == 0) ptx::mbarrier_wait(&shared.do_full[stage], phase);
                const uint8_t* d_o_rows = shared.d_o[stage][me] + at * 128;
                float sum = 0.0f;
#pragma unroll
                for (int x = 0; x < head_dim / 32; ++x) {
                    const uint4 d_o = *reinterpret_cast<const uint4*>(d_o_rows + ((pieces[x % 2] ^ (own_row & 7)) << 4) + x / 2 * box_bytes);
                    const auto add = [&](uint32_t u, uint32_t v) {
                        const float2 f = ptx::unpack<T>(u), h = ptx::unpack<T>(v);
                        sum = fmaf(f.x, h.x, sum);
                        sum = fmaf(f.y, h.y, sum);
                    };
                    add(o[x].x, d_o.x);
                    add(o[x].y, d_o.y);
                    add(o[x].z, d_o.z);
                    add(o[x].w, d_o.w);
                }
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                delta[r] = sum;
                lse[r] = l == -INFINITY ? -INFINITY : -l;
                if (quad == 0) {
                    float* statistics = statistics_of(p, g.packed_head, g.block + me) + row_place(at);
                    statistics[0] = lse[r];
                    statistics[block_rows] = sum;
                }
            }

            ptx::mbarrier_wait(&shared.q_full[stage], phase);
            wait_tile(place + 1);
            row_products(s, shared.q[stage][me], shared.kv[(place + 1) % slots]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
#pragma unroll 1
            for (int j = 0; j < tiles; ++j, place += 2) {
                const uint32_t value_place = place, key_place = place + 1;
                const uint8_t* v_tile = shared.kv[value_place % slots];
                const uint8_t* k_tile = shared.kv[key_place % slots];
                wait_tile(value_place);
                row_products(dp, shared.d_o[stage][me], v_tile);

                // p = exp2(s * scale - lse), at most 1; 0 where masked
#pragma unroll
                for (int x = 0; x < keys / 2; ++x)
                    s[x] = ptx::exp2_approx(ptx::min_nan(fmaf(s[x], p.scale_log2, lse[x / 2 % 2]), 0.0f));
                if (g.tile0 + j < g.whole_begin || g.tile0 + j >= g.whole_end) {
                    const int shift = diagonal_shift(p.mask, g.q_len, g.kv_len), key0 = (g.tile0 + j) * keys + 2 * quad;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int from = first_key(p.mask, row_of(r), shift) - key0, to = end_key(p.mask, row_of(r), shift, g.kv_len) - key0;
#pragma unroll
                        for (int x = 0; x < keys / 8; ++x)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                float& value = s[4 * x + 2 * r + e];
                                value = 8 * x + e >= from && 8 * x + e < to ? value : 0.0f;
                            }
                    }
                }

                // ds = p (dp - delta)
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(dp);
                leave_tile(value_place);
                uint32_t ds[keys / 16][4];
#pragma unroll
                for (int x = 0; x < keys / 4; ++x) {
                    const float d = delta[x % 2];
                    ds[x / 4][x % 4] = ptx::pack<T>(s[2 * x] * (dp[2 * x] - d), s[2 * x + 1] * (dp[2 * x + 1] - d));
                }

                // dq += ds k
                const uint64_t b = operand(k_tile, box_bytes);
                ptx::wgmma_fence();
#pragma unroll
                for (int x = 0; x < keys / 16; ++x) ptx::Wgmma<head_dim, T, 0, 1>::rs(dq, ds[x], ptx::advance(b, x * 2048), 1);
                ptx::wgmma_commit();
                // Behind it the next tile's scores; after the last tile this one's once more, and nobody looks (a product behind a branch
                // would make the assembler serialize all of them).
                const bool more = j + 1 < tiles;
                if (more) wait_tile(key_place + 2);
                row_products(s, shared.q[stage][me], shared.kv[(more ? key_place + 2 : key_place) % slots]);
                ptx::wgmma_wait<1>();
                ptx::wgmma_hold(dq);
                if (more) leave_tile(key_place);
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(s);
                if (!more) leave_tile(key_place), leave_stage();
            }
        }

        if (!(flags & last_of_unit)) {
            // More of it follows.
        } else if (p.broadcast) {
            float4* to = reinterpret_cast<float4*>(p.partial) + ((static_cast<long long>(g.item) * 2 + me) * 4 + warp) * (head_dim / 8 * 32) + lane;
#pragma unroll
            for (int x = 0; x < head_dim / 8; ++x) to[32 * x] = float4{dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]};
        } else if (works) {
            char* to[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const long long row = static_cast<long long>(g.q_row) + row_of(r);
                const bool writable = row_of(r) < g.q_len && row < p.q_rows;
                to[r] = writable ? static_cast<char*>(p.dq) + row * p.dq_row_bytes + head_of(r) * p.dq_head_bytes : nullptr;
            }
            store_rows<T>(to, dq, p.scale, p.vectors_qk);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.segment_empty[count % 2]);
    }
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = 2 * block_rows;  // of a packed head

extern "C" __global__ void __launch_bounds__(384, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_do, const __grid_constant__ JfaSplitParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    // Broadcast, so that the compiler knows the roles to be uniform.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(&shared.segment_full[i], 1);
            ptx::mbarrier_init(&shared.segment_empty[i], 8);
        }
        for (int i = 0; i < stages; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], 8);
        }
        for (int i = 0; i < slots; ++i) {
            ptx::mbarrier_init(&shared.kv_full[i], 1);
            ptx::mbarrier_init(&shared.kv_empty[i], 8);
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_do);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<40>();
        if (warp == 0 && ptx::elect_one()) produce(shared, p, &map_q, &map_k, &map_v, &map_do);
    } else {
        ptx::registers_acquire<232>();
        consume(shared, p, warpgroup - 1);
    }
}

}  // namespace jfa
