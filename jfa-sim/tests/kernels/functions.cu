// Kernels whose results can be computed by hand, one per mechanism of sm_90a.
#include "ptx.cuh"

DEV void store_tile(float* out, const float (&d)[8]) {
    // 64x16 accumulators of a warpgroup, row-major.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = 0; j < 2; j++)
        for (int h = 0; h < 2; h++)
            for (int e = 0; e < 2; e++) out[(warp * 16 + lane / 4 + 8 * h) * 16 + 8 * j + (lane % 4) * 2 + e] = d[4 * j + 2 * h + e];
}

// 64x16x64 products with every operand major: A is [64, 64] or its transpose, B [16, 64] or [64, 64] (16 columns used).
template <int TransA, int TransB>
DEV void wgmma_major(const TensorMap* a, const TensorMap* b, float* out) {
    __shared__ __align__(1024) unsigned char sa[64 * 128], sb[64 * 128];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
        mbar_expect(smem(&bar), 64 * 128 + (TransB ? 64 : 16) * 128);
        tma_load_2d(smem(sa), a, smem(&bar), 0, 0);
        tma_load_2d(smem(sb), b, smem(&bar), 0, 0);
    }
    __syncthreads();
    mbar_wait(smem(&bar), 0);
    float d[8];
    wgmma_fence();
    for (int k = 0; k < 4; k++)
        wgmma_m64n16k16<TransA, TransB>(d, desc_128b(smem(sa) + k * (TransA ? 2048 : 32), 8192, 1024),
                                        desc_128b(smem(sb) + k * (TransB ? 2048 : 32), 8192, 1024), k);
    wgmma_commit();
    wgmma_wait<0>();
    store_tile(out, d);
}
#define MAJOR(name, ta, tb)                                                                                                   \
    extern "C" __global__ void name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out) { \
        wgmma_major<ta, tb>(&a, &b, out);                                                                                     \
    }
MAJOR(wgmma_tn, 0, 0)
MAJOR(wgmma_nn, 0, 1)
MAJOR(wgmma_tt, 1, 0)
MAJOR(wgmma_nt, 1, 1)

// A from registers, 64x16x16.
extern "C" __global__ void wgmma_registers(const uint32_t* a, const __grid_constant__ TensorMap b, float* out) {
    __shared__ __align__(1024) unsigned char sb[16 * 128];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
        mbar_expect(smem(&bar), 16 * 128);
        tma_load_2d(smem(sb), &b, smem(&bar), 0, 0);
    }
    __syncthreads();
    mbar_wait(smem(&bar), 0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t r[4];
    for (int i = 0; i < 4; i++) r[i] = a[(warp * 16 + lane / 4 + 8 * (i & 1)) * 8 + lane % 4 + 4 * (i >> 1)];
    float d[8];
    wgmma_fence();
    wgmma_m64n16k16_rs<0>(d, r, desc_128b(smem(sb), 16, 1024), 0);
    wgmma_commit();
    wgmma_wait<0>();
    store_tile(out, d);
}

// Stores and adds a tile that leaves the tensor on two sides.
extern "C" __global__ void tensor_store(const __grid_constant__ TensorMap to, const __grid_constant__ TensorMap sum, int x, int y) {
    __shared__ __align__(1024) float tile[8 * 32];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = i;
    fence_async();
    __syncwarp();
    if (threadIdx.x == 0) {
        tma_store_2d(&to, smem(tile), x, y);
        tma_reduce_2d(&sum, smem(tile), x, y);
        tma_reduce_2d(&sum, smem(tile), x, y);
        bulk_commit();
        bulk_wait<0>();
    }
}

// Each CTA of a pair loads half a tile for both; then each reads its neighbour's memory and arrives at its barrier.
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_exchange(const __grid_constant__ TensorMap in, int* out) {
    __shared__ __align__(1024) int tile[2][32];
    __shared__ __align__(8) uint64_t bar, done;
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        mbar_init(smem(&done), 32);
        fence_init();
    }
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x == 0) {
        mbar_expect(smem(&bar), 256);
        tma_load_2d_multicast(smem(tile[rank]), &in, smem(&bar), 0, rank, 3);
    }
    mbar_wait(smem(&bar), 0);
    out[rank * 96 + threadIdx.x] = tile[0][threadIdx.x];
    out[rank * 96 + 32 + threadIdx.x] = tile[1][threadIdx.x];
    __syncwarp();
    tile[rank][threadIdx.x] = 1000 * (rank + 1) + threadIdx.x;
    mbar_arrive_remote(smem(&done), rank ^ 1);
    mbar_wait(smem(&done), 0);
    uint32_t v;
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %1, %2;\nld.shared::cluster.u32 %0, [r];\n}"
                 : "=r"(v)
                 : "r"(smem(&tile[rank ^ 1][threadIdx.x])), "r"(rank ^ 1)
                 : "memory");
    out[rank * 96 + 64 + threadIdx.x] = v;
    cluster_arrive();
    cluster_wait();
}

// Control flow that splits and joins, with shuffles inside.
extern "C" __global__ void diverge(int* out) {
    int t = threadIdx.x, v = 0;
    for (int i = 0; i < t % 5; i++) {
        v += i;
        if (v > 3) {
            v *= 2;
            if (t & 1) break;
        }
    }
    switch (t % 4) {
        case 0: v += 100; break;
        case 1: v += __popc(__activemask()); break;
        case 2: v = -v;
        default: v -= 1;
    }
    if (t < 16)
        v += __shfl_xor_sync(0xffff, v, 1);
    else
        v += __shfl_down_sync(0xffff0000, v, 2);
    out[t] = v + __reduce_add_sync(0xffffffff, t);
}

// Atomics from every CTA; the last one to arrive sees the sum (a grid-wide wait that needs fair scheduling).
extern "C" __global__ void atomics(unsigned* state, float* sum, unsigned* out) {
    atomicAdd(sum, 1.0f);
    atomicMax(state + 1, blockIdx.x * blockDim.x + threadIdx.x);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(state, 1);
        while (*(volatile unsigned*)state < gridDim.x) {}
        out[blockIdx.x] = atomicCAS(state + 2, 0, blockIdx.x + 1) == 0;
    }
}

// stmatrix against ldmatrix, plain and transposed.
extern "C" __global__ void matrix_moves(uint32_t* out) {
    __shared__ __align__(16) uint32_t buf[4 * 32];
    uint32_t r[4], q[4];
    for (int i = 0; i < 4; i++) r[i] = threadIdx.x * 4 + i;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem(buf + 4 * threadIdx.x)), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
    __syncwarp();
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q[0]), "=r"(q[1]), "=r"(q[2]), "=r"(q[3])
                 : "r"(smem(buf + 4 * threadIdx.x))
                 : "memory");
    for (int i = 0; i < 4; i++) out[i * 32 + threadIdx.x] = q[i];
}
