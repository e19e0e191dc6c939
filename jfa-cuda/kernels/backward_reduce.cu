// dq of a broadcast query, after backward.cu: the sums that its CTAs kept, added in the order of the CTAs and rounded once.
//
//   grid        query heads * row blocks * 8 (the eight consumer warps of backward.cu), 256 threads: one float4 each
//   order       slice 0, 1, 2, ... for every element: the same bits in every run
#include "params.h"
#include "ptx/types.cuh"

#ifndef JFA_HEAD_DIM
#define JFA_HEAD_DIM 128
#endif
#ifndef JFA_TYPE
#define JFA_TYPE bf16
#endif
#ifndef JFA_ENTRY
#define JFA_ENTRY jfa_backward_reduce_128_bf16
#endif

namespace jfa {
namespace {

using T = JFA_TYPE;

constexpr int q_tile = JFA_HEAD_DIM <= 64 ? 128 : 64;
constexpr int columns_of_warp = JFA_HEAD_DIM <= 64 ? 64 : JFA_HEAD_DIM / 2;
constexpr int block_vectors = JFA_BACKWARD_BLOCK_BYTES / 16;

}  // namespace

extern "C" __global__ void __launch_bounds__(256) JFA_ENTRY(const __grid_constant__ JfaBackwardParams p) {
    const int warp8 = blockIdx.x % 8, block = blockIdx.x / 8 % p.blocks, head = blockIdx.x / 8 / p.blocks;
    const int group8 = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int heads = p.heads_kv * p.group, kv_head = head / p.group;
    const int slices = p.heads_kv >= p.ctas ? 1 : (p.ctas - 1 - kv_head) / p.heads_kv + 1;

    // backward.cu, partial_of: block, warp, group of eight columns, lane
    const float4* from = reinterpret_cast<const float4*>(p.partial) + (static_cast<long long>(head) * p.blocks + block) * block_vectors +
                         (warp8 * (columns_of_warp / 8) + group8) * 32 + lane;
    const long long slice_vectors = static_cast<long long>(heads) * p.blocks * block_vectors;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int s = 0; s < slices; ++s) {
        const float4 f = from[s * slice_vectors];
        sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
    }

    const int row = block * q_tile + 16 * (warp8 % 4) + (q_tile == 128 ? 64 * (warp8 / 4) : 0) + lane / 4;
    const int column = (q_tile == 128 ? 0 : columns_of_warp * (warp8 / 4)) + 8 * group8 + 2 * (lane % 4);
    if (column >= 8 * p.vectors_qk) return;
    char* to = static_cast<char*>(p.dq) + head * p.dq_head_bytes + column * 2;
    if (row < p.broadcast) *reinterpret_cast<uint32_t*>(to + row * p.dq_row_bytes) = ptx::pack<T>(sum.x * p.scale, sum.y * p.scale);
    if (row + 8 < p.broadcast) *reinterpret_cast<uint32_t*>(to + (row + 8) * p.dq_row_bytes) = ptx::pack<T>(sum.z * p.scale, sum.w * p.scale);
}

}  // namespace jfa
