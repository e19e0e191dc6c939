// Split backward, key side, Hopper (sm_90a): dk and dv, summed over every sequence, head and row that refers to a key.
//
//   unit        a tile of 128 keys (64 above head_dim 128) of one key/value sequence and head, walked over blocks of 64 query rows: for
//               every sequence of the index that refers to it, in their order, for every head of the group, from the first row on
//   products    s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q; p^T and ds^T never leave the registers
//   roles       warp 0: schedule and TMA (warps 1 to 3 idle); two consumer warpgroups. Up to head_dim 128 each has 64 keys. Above,
//               the registers hold either dk or dv of 64 keys: one consumer each, and both compute s^T (a fifth of the products)
//   buffers     k, v: 2 stages (1 above 128); q, do and statistics: 2 stages. lse and delta come with the queries (backward_dq.cu)
//   registers   consumers 224, producer warpgroup 56
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
#define JFA_ENTRY jfa_backward_dkdv_256_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int head_dim = JFA_HEAD_DIM;     // columns of the products; wider than the tensors' by zero fill
constexpr int chunks = head_dim / 64;      // 64-column chunks of 128-byte rows in shared memory
constexpr bool one_gradient = head_dim > 128;  // a consumer has dk or dv, of the same keys; otherwise both, of its own
constexpr int keys = one_gradient ? 64 : 128;
constexpr int kv_stages = one_gradient ? 1 : 2;
constexpr int stages = 2;
constexpr bool rounded_p = head_dim == 128;  // ds from p as it entered dv: the registers hold no fp32 copy until then
constexpr int kv_chunk = keys * 128;       // bytes
constexpr int kv_bytes = chunks * kv_chunk;
constexpr int q_bytes = chunks * box_bytes;

// What a stage of q and do is for.
enum : int { masked = 1, store_gradients = 2, the_end = 4 };
struct Step {
    int flags;
    int row;               // store_gradients: the first key's row in dk and dv; else the block's first row within the sequence
    int rows;              // store_gradients: keys
    int head;              // store_gradients: key/value head
    int key;               // first key of the tile
    int shift;             // diagonal
    int pad[2];
};

struct SharedMemory {
    uint8_t k[kv_stages][kv_bytes], v[kv_stages][kv_bytes];
    uint8_t q[stages][q_bytes], d_o[stages][q_bytes];
    float statistics[stages][JFA_SPLIT_STATISTICS_BYTES / 4];
    Step step[stages];
    uint64_t k_full[kv_stages], v_full[kv_stages], kv_empty[kv_stages];
    uint64_t q_full[stages], do_full[stages], empty[stages];  // q_full: the step and the statistics as well
};

// ---------------------------------------------------------------------------------------------------------------- producer
__device__ void produce(SharedMemory& shared, const JfaSplitParams& p, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const CUtensorMap* map_do) {
    const int rows_log2 = 6 - p.packed_log2, rows_per_block = 1 << rows_log2, members = p.heads / p.heads_kv;
    const long long items = static_cast<long long>(p.index->units) * p.heads_kv;
    uint32_t n = 0, tile = 0;

    const auto load = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int chunk_bytes, int row, int rows, int head) {
#pragma unroll
        for (int x = 0; x < chunks; ++x) ptx::tma_load_rows(map, barrier, to + x * chunk_bytes, 64 * x, row, rows, head);
    };
    // Rows of the tile's keys; above 64 in two boxes.
    const auto load_keys = [&](const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int row, int rows, int head) {
        ptx::mbarrier_arrive_expect_tx(barrier, kv_bytes);
#pragma unroll
        for (int y = 0; y < keys; y += 64) load(map, barrier, to + y * 128, kv_chunk, row + y, max(0, min(64, rows - y)), head);
    };
    const auto begin_step = [&](int flags) -> Step& {
        ptx::mbarrier_wait(&shared.empty[n % stages], ((n / stages) & 1) ^ 1);
        Step& step = shared.step[n % stages];
        step.flags = flags;
        return step;
    };
    const auto end_step = [&] {  // without rows
        ptx::mbarrier_arrive(&shared.q_full[n % stages]);
        ptx::mbarrier_arrive(&shared.do_full[n % stages]);
        ++n;
    };

    for (;;) {
        const int item = ptx::atomic_add(p.control + 32, 1);
        if (item >= items) break;
        const JfaUnit unit = p.key_units[item / p.heads_kv];
        const int kv_head = item % p.heads_kv;
        const JfaKeySequence own = p.keys[unit.sequence];
        const int key0 = unit.first, key_rows = min(keys, own.kv_len - key0);
        bool first = true;
        JfaMember next = own.begin < own.end ? p.members[own.begin] : JfaMember{};
#pragma unroll 1
        for (int m = own.begin; m < own.end; ++m) {
            const JfaMember s = next;
            if (m + 1 < own.end) next = p.members[m + 1];  // its latency hides behind this one's rows
            const int shift = diagonal_shift(p.mask, s.q_len, own.kv_len);
            const int lo = first_row(p.mask, key0, shift), hi = min(s.q_len, end_row(p.mask, key0 + key_rows - 1, shift, s.q_len));
            const int block0 = first_block(p, s.o_row, s.sequence);
#pragma unroll 1
            for (int member = 0; member < members; ++member) {
                const int packed_head = kv_head * members + member, head = packed_head << p.packed_log2;
#pragma unroll 1
                for (int row = lo & -rows_per_block; row < hi; row += rows_per_block, ++n) {
                    const int stage = n % stages, rows = min(rows_per_block, s.q_len - row);
                    Step& step = begin_step(all_visible(p.mask, shift, row, row + rows, key0, key0 + key_rows) ? 0 : masked);
                    step.row = row;
                    step.key = key0;
                    step.shift = shift;
                    if (first) {
                        const int kv_stage = tile % kv_stages;
                        ptx::mbarrier_wait(&shared.kv_empty[kv_stage], ((tile / kv_stages) & 1) ^ 1);
                        load_keys(map_k, &shared.k_full[kv_stage], shared.k[kv_stage], own.kv_row + key0, key_rows, kv_head);
                    }
                    ptx::mbarrier_arrive_expect_tx(&shared.q_full[stage], q_bytes + JFA_SPLIT_STATISTICS_BYTES);
                    load(map_q, &shared.q_full[stage], shared.q[stage], box_bytes, s.q_row + row, rows, head);
                    ptx::bulk_load(shared.statistics[stage], statistics_of(p, packed_head, block0 + (row >> rows_log2)), JFA_SPLIT_STATISTICS_BYTES,
                                   &shared.q_full[stage]);
                    if (first) load_keys(map_v, &shared.v_full[tile % kv_stages], shared.v[tile % kv_stages], own.kv_row + key0, key_rows, kv_head);
                    ptx::mbarrier_arrive_expect_tx(&shared.do_full[stage], q_bytes);
                    load(map_do, &shared.do_full[stage], shared.d_o[stage], box_bytes, s.o_row + row, rows, head);
                    first = false;
                }
            }
        }
        tile += !first;
        Step& step = begin_step(store_gradients);
        step.row = own.kv_row + key0;
        step.rows = key_rows;
        step.head = kv_head;
        end_step();
    }
    begin_step(the_end);
    end_step();
}

// ---------------------------------------------------------------------------------------------------------------- consumer
template <bool has_dk, bool has_dv>
__device__ void consume(SharedMemory& shared, const JfaSplitParams& p, int me) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4, lane = ptx::lane_id();
    const int own_row = 16 * warp + lane / 4 + (one_gradient ? 0 : 64 * me);  // the thread's keys of the tile: own_row, own_row + 8
    const int column = 2 * (lane % 4);
    const int own_rows = one_gradient ? 0 : me * box_bytes;  // of the tile's k and v

    float s[block_rows / 2], dp[block_rows / 2];   // s^T then p^T, dp^T: 64 keys x 64 rows
    float dk[head_dim / 2], dv[head_dim / 2];      // 64 keys x head_dim

    // ---- products. Descriptors are broadcast from lane 0, so that the compiler knows them to be uniform.
    const auto operand = [](const uint8_t* tile, uint32_t chunk_bytes = 16) {
        return ptx::matrix_descriptor(__shfl_sync(~0u, ptx::smem_address(tile), 0), chunk_bytes);
    };
    const auto row_products = [&](float(&to)[block_rows / 2], const uint8_t* a_rows, const uint8_t* b_rows) {
        const uint64_t a = operand(a_rows), b = operand(b_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < head_dim / 16; ++x)
            ptx::Wgmma<block_rows, T>::ss(to, ptx::advance(a, x / 4 * kv_chunk + x % 4 * 32), ptx::advance(b, x / 4 * box_bytes + x % 4 * 32), x != 0);
        ptx::wgmma_commit();
    };
    // to += fragments (64 keys x 64 rows) * rows (64 x head_dim)
    const auto accumulate = [&](float(&to)[head_dim / 2], const uint32_t(&fragments)[block_rows / 16][4], const uint8_t* rows) {
        const uint64_t b = operand(rows, box_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int x = 0; x < block_rows / 16; ++x)
            ptx::Wgmma<head_dim, T, 0, 1>::rs(to, fragments[x], ptx::advance(b, x * 2048), 1);
        ptx::wgmma_commit();
    };

    // A tile that no row sees is stored like any other: zeros.
    const auto clear = [&] {
#pragma unroll
        for (int x = 0; x < head_dim / 2; ++x) dk[x] = dv[x] = 0.0f;
    };

    uint32_t tile = 0, n = 0;
    clear();
    const auto wait_step = [&] {
        ptx::mbarrier_wait(&shared.q_full[n % stages], (n / stages) & 1);
        return __shfl_sync(~0u, shared.step[n % stages].flags, 0);
    };
    const auto wait_d_o = [&] { ptx::mbarrier_wait(&shared.do_full[n % stages], (n / stages) & 1); };
    const auto leave_stage = [&](int stage) {
        __syncwarp();  // every lane has read the step and its statistics
        if (lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    };
    for (;;) {
        int flags = wait_step();
        if (flags & the_end) break;
        if (!(flags & store_gradients)) {
            const int kv_stage = tile % kv_stages;
            ptx::mbarrier_wait(&shared.k_full[kv_stage], (tile / kv_stages) & 1);
            if (has_dk) ptx::mbarrier_wait(&shared.v_full[kv_stage], (tile / kv_stages) & 1);
            row_products(s, shared.k[kv_stage] + own_rows, shared.q[n % stages]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
            for (bool more = true; more;) {
                const int stage = n % stages;
                const Step& step = shared.step[stage];
                // dp^T = v do^T
                wait_d_o();
                if (has_dk) row_products(dp, shared.v[kv_stage] + own_rows, shared.d_o[stage]);

                // p^T = exp2(s^T * scale - lse), at most 1; 0 where masked
                uint32_t p_fragments[block_rows / 16][4], ds_fragments[block_rows / 16][4];
#pragma unroll
                for (int x = 0; x < block_rows / 8; x += 2) {
                    // Two groups of eight rows: lse of this thread's rows x, x + 1 of both.
                    const float4 l = *reinterpret_cast<const float4*>(&shared.statistics[stage][8 * x + 2 * column]);
                    const auto probability = [&](float& value, float at) { value = ptx::exp2_approx(ptx::min_nan(fmaf(value, p.scale_log2, at), 0.0f)); };
                    probability(s[4 * x], l.x), probability(s[4 * x + 1], l.y), probability(s[4 * x + 2], l.x), probability(s[4 * x + 3], l.y);
                    probability(s[4 * x + 4], l.z), probability(s[4 * x + 5], l.w), probability(s[4 * x + 6], l.z), probability(s[4 * x + 7], l.w);
                }
                if (flags & masked) {
                    const int row0 = step.row, key0 = step.key + own_row, shift = step.shift, inside = (block_rows >> p.packed_log2) - 1;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int from = first_row(p.mask, key0 + 8 * r, shift) - row0, to = end_row(p.mask, key0 + 8 * r, shift, 0x7FFFFFFF) - row0;
#pragma unroll
                        for (int x = 0; x < block_rows / 8; ++x)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int row = (8 * x + column + e) & inside;
                                float& value = s[4 * x + 2 * r + e];
                                value = row >= from && row < to ? value : 0.0f;
                            }
                    }
                }

                // dv += p^T do
                if (has_dv) {
#pragma unroll
                    for (int x = 0; x < block_rows / 4; ++x) p_fragments[x / 4][x % 4] = ptx::pack<T>(s[2 * x], s[2 * x + 1]);
                    accumulate(dv, p_fragments, shared.d_o[stage]);
                }

                // ds^T = p^T (dp^T - delta), dk += ds^T q
                if (has_dk) {
                    ptx::wgmma_wait<has_dv ? 1 : 0>();
                    ptx::wgmma_hold(dp);
#pragma unroll
                    for (int x = 0; x < block_rows / 8; x += 2) {
                        const float4 d = *reinterpret_cast<const float4*>(&shared.statistics[stage][block_rows + 8 * x + 2 * column]);
                        const auto gradient = [&](int r, float left, float right) {
                            const float2 at = rounded_p ? ptx::unpack<T>(p_fragments[x / 2][r]) : float2{s[4 * x + 2 * r], s[4 * x + 2 * r + 1]};
                            ds_fragments[x / 2][r] = ptx::pack<T>(at.x * (dp[4 * x + 2 * r] - left), at.y * (dp[4 * x + 2 * r + 1] - right));
                        };
                        gradient(0, d.x, d.y), gradient(1, d.x, d.y), gradient(2, d.z, d.w), gradient(3, d.z, d.w);
                    }
                    accumulate(dk, ds_fragments, shared.q[stage]);
                }

                // Behind them the next step's scores; after the tile's last step this one's once more, and nobody looks (a product behind a
                // branch would make the assembler serialize all of them).
                ++n;
                flags = wait_step();
                more = !(flags & store_gradients);
                if (has_dk && has_dv) {
                    ptx::wgmma_wait<1>();  // dv: its fragments leave their registers
                    ptx::wgmma_hold(dv);
                }
                row_products(s, shared.k[kv_stage] + own_rows, shared.q[more ? n % stages : stage]);
                ptx::wgmma_wait<1>();
                if (has_dv) ptx::wgmma_hold(dv);
                if (has_dk) ptx::wgmma_hold(dk);
                if (more) leave_stage(stage);
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(s);
                if (!more) leave_stage(stage);
            }
            if (lane == 0) ptx::mbarrier_arrive(&shared.kv_empty[kv_stage]);
            ++tile;
        }

        // The tile's gradients leave; zeros where no row sees it.
        const int stage = n % stages;
        const Step& step = shared.step[stage];
        const int row = step.row, rows = min(step.rows, p.kv_rows - row), head = step.head;
        wait_d_o();
        leave_stage(stage);
        ++n;
        const auto store = [&](void* base, long long row_bytes, long long head_bytes, const float(&from)[head_dim / 2], float factor, int vectors) {
            char* to[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = own_row + 8 * r;
                to[r] = at < rows ? static_cast<char*>(base) + (static_cast<long long>(row) + at) * row_bytes + head * head_bytes : nullptr;
            }
            store_rows<T>(to, from, factor, vectors);
        };
        if (has_dv) store(p.dv, p.dv_row_bytes, p.dv_head_bytes, dv, 1.0f, p.vectors_v);
        if (has_dk) store(p.dk, p.dk_row_bytes, p.dk_head_bytes, dk, p.scale, p.vectors_qk);
        clear();
    }
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_dynamic_shared = sizeof(SharedMemory);
extern "C" __constant__ unsigned jfa_unit_rows = keys;  // of one key/value head

extern "C" __global__ void __launch_bounds__(384, 1)
JFA_ENTRY(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
          const __grid_constant__ CUtensorMap map_do, const __grid_constant__ JfaSplitParams p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    // Broadcast, so that the compiler knows the roles to be uniform.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kv_stages; ++i) {
            ptx::mbarrier_init(&shared.k_full[i], 1);
            ptx::mbarrier_init(&shared.v_full[i], 1);
            ptx::mbarrier_init(&shared.kv_empty[i], 8);
        }
        for (int i = 0; i < stages; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.do_full[i], 1);
            ptx::mbarrier_init(&shared.empty[i], 8);
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map_q);
        ptx::tma_prefetch_map(&map_k);
        ptx::tma_prefetch_map(&map_v);
        ptx::tma_prefetch_map(&map_do);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::registers_release<56>();
        if (warp == 0 && ptx::elect_one()) produce(shared, p, &map_q, &map_k, &map_v, &map_do);
    } else {
        ptx::registers_acquire<224>();
        if (!one_gradient) {
            consume<true, true>(shared, p, warpgroup - 1);
        } else if (warpgroup == 1) {
            consume<true, false>(shared, p, 0);
        } else {
            consume<false, true>(shared, p, 1);
        }
    }
}

}  // namespace jfa
