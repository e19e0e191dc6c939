// Split backward: dq of a broadcast query, from the sums that backward_dq.cu kept, added slice by slice and rounded once.
//
//   grid        packed heads * pairs of blocks * head_dim / 8, 256 threads: one float4 each
//   order       slice 0, 1, 2, ... for every element: the same bits in every run
#include "split.cuh"

#ifndef JFA_HEAD_DIM
#define JFA_HEAD_DIM 256
#endif
#ifndef JFA_TYPE
#define JFA_TYPE bf16
#endif
#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_backward_dq_sum_256_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int threads = 256;
constexpr int groups = JFA_HEAD_DIM / 8;            // of eight columns
constexpr int pair_vectors = 2 * 4 * groups * 32;   // of a pair of blocks: block, warp, group, lane

}  // namespace

extern "C" __constant__ unsigned jfa_ctas_per_pair = pair_vectors / threads;

extern "C" __global__ void __launch_bounds__(threads) JFA_ENTRY(const __grid_constant__ JfaSplitParams p) {
    const long long at = static_cast<long long>(blockIdx.x) * threads + threadIdx.x;
    const int vector = at % pair_vectors, item = static_cast<int>(at / pair_vectors);
    const int packed_head = item % p.heads, pair = item / p.heads;
    const int lane = vector % 32, group = vector / 32 % groups, warp = vector / 32 / groups % 4, block = vector / 32 / groups / 4;

    const float4* from = reinterpret_cast<const float4*>(p.partial) + at;
    const long long slice_vectors = static_cast<long long>(p.pairs) * p.heads * pair_vectors;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int s = 0; s < p.slices; ++s) {
        const float4 f = from[s * slice_vectors];
        sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
    }

    if (group >= p.vectors_qk) return;
    const int rows_log2 = 6 - p.packed_log2, column = 8 * group + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int of_block = 16 * warp + lane / 4 + 8 * half;
        const int row = ((2 * pair + block) << rows_log2) + (of_block & ((1 << rows_log2) - 1));
        const int head = (packed_head << p.packed_log2) + (of_block >> rows_log2);
        if (row >= p.broadcast || row >= p.q_rows) continue;
        char* to = static_cast<char*>(p.dq) + row * p.dq_row_bytes + head * p.dq_head_bytes + column * 2;
        *reinterpret_cast<uint32_t*>(to) = half ? ptx::pack<T>(sum.z * p.scale, sum.w * p.scale) : ptx::pack<T>(sum.x * p.scale, sum.y * p.scale);
    }
}

}  // namespace jfa
