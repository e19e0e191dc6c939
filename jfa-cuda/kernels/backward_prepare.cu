// Unordered backward, before backward_unordered.cu: lse and delta of every row, where the products want them.
//
//   item        the row blocks of a unit's share and one query head: tile t of a sequence's T has blocks [n t / T, n (t + 1) / T) of its
//               n, so that long sequences are spread. Neighbouring CTAs take the heads of the same rows: their bytes are neighbours
//   row         head_dim / 8 lanes, 16 bytes of o and of do each; a row block's loads are all issued before the first is used
//   bound       memory: o and do are read once
#include "params.h"
#include "ptx/global.cuh"
#include "ptx/types.cuh"
#include "unordered.cuh"

#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_backward_prepare_128_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int threads = 256;
constexpr int ctas_per_multiprocessor = 4;
constexpr int lanes = head_dim / 8;            // of a row
constexpr int rows_at_once = threads / lanes;
constexpr int turns = q_tile / rows_at_once;
static_assert(turns * rows_at_once == q_tile && q_tile <= threads);

// Of eight columns.
__device__ __forceinline__ float product(const uint4& a, const uint4& b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = ptx::unpack<T>(x[i]), g = ptx::unpack<T>(y[i]);
        sum = fmaf(f.x, g.x, fmaf(f.y, g.y, sum));
    }
    return sum;
}

__device__ __forceinline__ void prepare(const JfaPrepareParams& p, const JfaSequence& s, int head, int row_block0, int block) {
    const int t = threadIdx.x, own_row = t / lanes, lane = t % lanes;
    const int q0 = block * q_tile, rows = min(s.q_len, p.o_rows - s.o_row) - q0;
    const long long row0 = static_cast<long long>(s.o_row) + q0;
    const TileRange tiles = tiles_of_block(p.mask, s.q_len, s.kv_len, block);
    if (tiles.first == tiles.end) {  // nobody comes here again
        char* const dq = static_cast<char*>(p.dq) + head * p.dq_head_bytes + row0 * p.dq_row_bytes;
        for (int row = own_row; row < min(rows, q_tile); row += rows_at_once)
            if (lane < p.vectors_qk) *reinterpret_cast<uint4*>(dq + row * p.dq_row_bytes + lane * 16) = uint4{0, 0, 0, 0};
        return;
    }

    const char* const o = static_cast<const char*>(p.o) + head * p.o_head_bytes + row0 * p.o_row_bytes + lane * 16;
    const char* const d_o = static_cast<const char*>(p.d_o) + head * p.do_head_bytes + row0 * p.do_row_bytes + lane * 16;
    uint4 a[turns], b[turns];
#pragma unroll
    for (int i = 0; i < turns; ++i) {
        const int row = i * rows_at_once + own_row;
        a[i] = b[i] = uint4{0, 0, 0, 0};
        if (row < rows && lane < p.vectors_v) {
            a[i] = __ldg(reinterpret_cast<const uint4*>(o + row * p.o_row_bytes));
            b[i] = __ldg(reinterpret_cast<const uint4*>(d_o + row * p.do_row_bytes));
        }
    }
    const float lse = t < min(rows, q_tile) ? __ldg(p.lse + head * p.lse_head_stride + row0 + t) : -INFINITY;

    char* const out = block_at(p.partial, row_block0 + block);
    float* const start = reinterpret_cast<float*>(out + sums_bytes);
    // Minus infinity also where lse is: rows that see no key.
    if (t < q_tile) start[place_of(t)] = lse == -INFINITY ? lse : lse * -1.44269504088896341f;
#pragma unroll
    for (int i = 0; i < turns; ++i) {
        float sum = product(a[i], b[i]);
#pragma unroll
        for (int d = 1; d < lanes; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane == 0) start[q_tile + place_of(i * rows_at_once + own_row)] = -sum;
    }
}

}  // namespace

// Read by the build from the cubin: one source of truth for the launch.
extern "C" __constant__ unsigned jfa_ctas_per_multiprocessor = ctas_per_multiprocessor;
extern "C" __constant__ unsigned jfa_block_bytes = block_bytes;

extern "C" __global__ void __launch_bounds__(threads, ctas_per_multiprocessor) JFA_ENTRY(const __grid_constant__ JfaPrepareParams p) {
    const long long items = static_cast<long long>(p.header->backward_units) * p.heads;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const JfaUnit unit = p.units[item / p.heads];
        const int head = static_cast<int>(item % p.heads);
        const JfaSequence s = p.sequences[unit.sequence];
        const long long blocks = (s.q_len + q_tile - 1) / q_tile;
        const int tiles = max(1, (s.kv_len + keys - 1) / keys), tile = unit.first / keys;
        const int row_block0 = head * p.blocks + first_block(s.o_row, unit.sequence);
        const int end = static_cast<int>(blocks * (tile + 1) / tiles);
        for (int block = static_cast<int>(blocks * tile / tiles); block < end; ++block) prepare(p, s, head, row_block0, block);
    }
}

}  // namespace jfa
