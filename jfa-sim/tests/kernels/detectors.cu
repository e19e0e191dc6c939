// Pairs of kernels for the detectors: `x_bad` has one fault, `x_good` differs only by its repair.
#include "ptx.cuh"

#define PAIR(name, params, args)                                     \
    extern "C" __global__ void name##_bad params { name<true> args; } \
    extern "C" __global__ void name##_good params { name<false> args; }

// Writes one element past the end.
template <bool Bad>
DEV void oob_global(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (Bad ? i <= n : i < n) out[i] = i;
}
PAIR(oob_global, (int* out, int n), (out, n))

// Reaches past the CTA's shared memory.
template <bool Bad>
DEV void oob_shared(int* out) {
    extern __shared__ int buf[];
    int at = threadIdx.x + (Bad ? 1 : 0);
    buf[at] = threadIdx.x;
    out[threadIdx.x] = buf[at];
}
PAIR(oob_shared, (int* out), (out))

// Indexes a local array past its end.
template <bool Bad>
DEV void oob_local(int* out, int k) {
    int a[4] = {1, 2, 3, 4};
    a[(k + threadIdx.x) % (Bad ? 5 : 4)] = 7;
    out[threadIdx.x] = a[k & 3];
}
PAIR(oob_local, (int* out, int k), (out, k))

// A 16-byte load at a multiple of 8.
template <bool Bad>
DEV void misaligned(const char* in, float* out) {
    float a, b, c, d;
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(in + (Bad ? 8 : 16)));
    out[threadIdx.x] = a + b + c + d;
}
PAIR(misaligned, (const char* in, float* out), (in, out))

// Reads device memory that the host wrote only partly.
template <bool Bad>
DEV void uninit_global(const int* in, int* out, int n) {
    out[threadIdx.x] = in[threadIdx.x + (Bad ? n : 0)];
}
PAIR(uninit_global, (const int* in, int* out, int n), (in, out, n))

// Reads shared memory that only half the threads wrote.
template <bool Bad>
DEV void uninit_shared(int* out) {
    __shared__ int buf[64];
    if (Bad ? threadIdx.x < 32 : true) buf[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = buf[63 - threadIdx.x];
}
PAIR(uninit_shared, (int* out), (out))

// Exchanges values through shared memory, without the barrier.
template <bool Bad>
DEV void race(int* out) {
    __shared__ int buf[64];
    buf[threadIdx.x] = threadIdx.x;
    if (!Bad) __syncthreads();
    out[threadIdx.x] = buf[(threadIdx.x + 32) & 63];
}
PAIR(race, (int* out), (out))

// Overwrites what another warp still reads.
template <bool Bad>
DEV void race_war(int* out) {
    __shared__ int buf[64];
    buf[threadIdx.x] = threadIdx.x;
    __syncthreads();
    int v = buf[(threadIdx.x + 32) & 63];
    if (!Bad) __syncthreads();
    buf[threadIdx.x] = v + 1;
    __syncthreads();
    out[threadIdx.x] = buf[threadIdx.x];
}
PAIR(race_war, (int* out), (out))

// Reads the destination of a bulk copy without waiting.
template <bool Bad>
DEV void copy_early(const int* in, int* out) {
    __shared__ __align__(128) int buf[64];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbar_expect(smem(&bar), 256);
        bulk_load(smem(buf), in, 256, smem(&bar));
    }
    if (Bad) {
        __syncthreads();
    } else {
        mbar_wait(smem(&bar), 0);
    }
    out[threadIdx.x] = buf[threadIdx.x];
    mbar_wait(smem(&bar), 0);
}
PAIR(copy_early, (const int* in, int* out), (in, out))

// Starts a second copy into a buffer that a warp still reads.
template <bool Bad>
DEV void copy_overwrites(const int* in, int* out) {
    __shared__ __align__(128) int buf[32];
    __shared__ __align__(8) uint64_t full, empty;
    if (threadIdx.x == 0) {
        mbar_init(smem(&full), 1);
        mbar_init(smem(&empty), 32);
        fence_init();
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        for (int i = 0; i < 2; i++) {
            if (i == 1 && !Bad) mbar_wait(smem(&empty), 0);
            mbar_expect(smem(&full), 128);
            bulk_load(smem(buf), in + 32 * i, 128, smem(&full));
            if (Bad) mbar_wait(smem(&full), i);
        }
    } else if (threadIdx.x < 32) {
        for (int i = 0; i < 2; i++) {
            mbar_wait(smem(&full), i);
            out[32 * i + threadIdx.x] = buf[threadIdx.x];
            mbar_arrive(smem(&empty));
        }
    }
}
PAIR(copy_overwrites, (const int* in, int* out), (in, out))

// cp.async used after a barrier but without its wait.
template <bool Bad>
DEV void cp_async_early(const int* in, int* out) {
    __shared__ __align__(16) int buf[64];
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem(&buf[threadIdx.x])), "l"(in + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (!Bad) asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = buf[63 - threadIdx.x];
    asm volatile("cp.async.wait_all;" ::: "memory");
}
PAIR(cp_async_early, (const int* in, int* out), (in, out))

// A bulk store of what threads wrote, without the proxy fence.
template <bool Bad>
DEV void proxy_fence(int* out) {
    __shared__ __align__(128) int buf[64];
    buf[threadIdx.x] = threadIdx.x;
    if (!Bad) fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, smem(buf), 256);
        bulk_commit();
        bulk_wait<0>();
    }
}
PAIR(proxy_fence, (int* out), (out))

// Overwrites the source of a bulk store before its read was waited for.
template <bool Bad>
DEV void store_source(int* out) {
    __shared__ __align__(128) int buf[64];
    for (int i = 0; i < 2; i++) {
        buf[threadIdx.x] = threadIdx.x + i;
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(out + 64 * i, smem(buf), 256);
            bulk_commit();
            if (!Bad) bulk_wait_read<0>();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) bulk_wait<0>();
}
PAIR(store_source, (int* out), (out))

// Leaves while a bulk store still reads its source.
template <bool Bad>
DEV void unfinished(int* out) {
    __shared__ __align__(128) int buf[64];
    buf[threadIdx.x] = threadIdx.x;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, smem(buf), 256);
        bulk_commit();
        if (!Bad) bulk_wait_read<0>();
    }
}
PAIR(unfinished, (int* out), (out))

// The copy engine is to complete on a barrier whose initialisation was not fenced for it.
template <bool Bad>
DEV void init_fence(const int* in, int* out) {
    __shared__ __align__(128) int buf[32];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        if (!Bad) fence_init();
        mbar_expect(smem(&bar), 128);
        bulk_load(smem(buf), in, 128, smem(&bar));
    }
    __syncthreads();
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = buf[threadIdx.x & 31];
}
PAIR(init_fence, (const int* in, int* out), (in, out))

// Expects half the bytes that come.
template <bool Bad>
DEV void tx_count(const int* in, int* out) {
    __shared__ __align__(128) int buf[32];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
        mbar_expect(smem(&bar), Bad ? 64 : 128);
        bulk_load(smem(buf), in, 128, smem(&bar));
    }
    __syncthreads();
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = buf[threadIdx.x & 31];
}
PAIR(tx_count, (const int* in, int* out), (in, out))

// More arrivals at once than the phase has left.
template <bool Bad>
DEV void over_arrive(int* out) {
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) mbar_init(smem(&bar), 2);
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem(&bar)), "n"(Bad ? 3 : 2) : "memory");
    if (!Bad) mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = 1;
}
PAIR(over_arrive, (int* out), (out))

// Two phases complete although a thread may still wait for the first.
template <bool Bad>
DEV void overrun(int* out) {
    __shared__ __align__(8) uint64_t bar, seen;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        mbar_init(smem(&seen), 1);
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        for (int i = 0; i < 3; i++) {
            mbar_arrive(smem(&bar));
            if (!Bad) mbar_wait(smem(&seen), i & 1);
        }
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < 3; i++) {
            mbar_wait(smem(&bar), i & 1);
            mbar_arrive(smem(&seen));
        }
    }
    out[threadIdx.x] = 1;
}
PAIR(overrun, (int* out), (out))

// Uses a barrier that another warp initialises, without ordering.
template <bool Bad>
DEV void init_order(int* out) {
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) mbar_init(smem(&bar), 1);
    if (!Bad) __syncthreads();
    if (threadIdx.x == 32) mbar_arrive(smem(&bar));
    out[threadIdx.x] = 1;
}
PAIR(init_order, (int* out), (out))

// Waits for a phase that nobody completes.
template <bool Bad>
DEV void deadlock(int* out) {
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) mbar_init(smem(&bar), 2);
    __syncthreads();
    if (threadIdx.x < (Bad ? 1 : 2)) mbar_arrive(smem(&bar));
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = 1;
}
PAIR(deadlock, (int* out), (out))

// One warp does not come to a named barrier.
template <bool Bad>
DEV void barrier_count(int* out) {
    if (!Bad || threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = 1;
}
PAIR(barrier_count, (int* out), (out))

// Half a warp at an instruction for the whole warp.
template <bool Bad>
DEV void divergence(int* out) {
    __shared__ __align__(16) uint32_t rows[32 * 4];
    for (int i = 0; i < 4; i++) rows[4 * threadIdx.x + i] = threadIdx.x;
    __syncwarp();
    uint32_t r = 0;
    if (!Bad || threadIdx.x < 16)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(smem(rows + 4 * (threadIdx.x & 7))) : "memory");
    out[threadIdx.x] = r;
}
PAIR(divergence, (int* out), (out))

// All lanes in one bank, or in 32.
template <bool Bad>
DEV void banks(int* out) {
    __shared__ int buf[32 * 33];
    constexpr int pitch = Bad ? 32 : 33;
    buf[threadIdx.x * pitch] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = buf[threadIdx.x * pitch];
}
PAIR(banks, (int* out), (out))

// Products of a tile of ones, 64x16x16; the fault is chosen by F.
enum { Fence = 1, Wait = 2, Commit = 4, Proxy = 8, Registers = 16 };
template <int F>
DEV void wgmma_case(float* out) {
    __shared__ __align__(1024) __nv_bfloat16 a[64 * 64], b[16 * 64];
    for (int i = threadIdx.x; i < 64 * 64; i += 128) a[i] = __float2bfloat16(1.0f);
    for (int i = threadIdx.x; i < 16 * 64; i += 128) b[i] = __float2bfloat16(2.0f);
    if (!(F & Proxy)) fence_async();
    __syncthreads();
    float d[8];
    for (int i = 0; i < 8; i++) d[i] = out[threadIdx.x * 8 + i];
    if (!(F & Fence)) wgmma_fence();
    wgmma_m64n16k16<0, 0>(d, desc_128b(smem(a), 16, 1024), desc_128b(smem(b), 16, 1024), 1);
    if (!(F & Commit)) wgmma_commit();
    if (F & Registers) d[0] += 1.0f;
    if (!(F & Wait)) wgmma_wait<0>();
    for (int i = 0; i < 8; i++) out[threadIdx.x * 8 + i] = d[i];
    wgmma_commit();
    wgmma_wait<0>();
}
extern "C" __global__ void wgmma_good(float* out) { wgmma_case<0>(out); }
extern "C" __global__ void wgmma_fence_bad(float* out) { wgmma_case<Fence>(out); }
extern "C" __global__ void wgmma_wait_bad(float* out) { wgmma_case<Wait>(out); }
extern "C" __global__ void wgmma_commit_bad(float* out) { wgmma_case<Commit>(out); }
extern "C" __global__ void wgmma_proxy_bad(float* out) { wgmma_case<Proxy>(out); }
extern "C" __global__ void wgmma_registers_bad(float* out) { wgmma_case<Registers>(out); }

// Lets the operand be overwritten before the product that reads it was waited for.
template <bool Bad>
DEV void wgmma_operand(float* out) {
    __shared__ __align__(1024) __nv_bfloat16 a[64 * 64], b[16 * 64];
    for (int i = threadIdx.x; i < 64 * 64; i += 128) a[i] = __float2bfloat16(1.0f);
    for (int i = threadIdx.x; i < 16 * 64; i += 128) b[i] = __float2bfloat16(2.0f);
    fence_async();
    __syncthreads();
    float d[8];
    wgmma_fence();
    wgmma_m64n16k16<0, 0>(d, desc_128b(smem(a), 16, 1024), desc_128b(smem(b), 16, 1024), 0);
    wgmma_commit();
    if (!Bad) wgmma_wait<0>();
    __syncthreads();
    b[threadIdx.x] = __float2bfloat16(3.0f);
    if (Bad) wgmma_wait<0>();
    for (int i = 0; i < 8; i++) out[threadIdx.x * 8 + i] = d[i];
}
PAIR(wgmma_operand, (float* out), (out))

// A copy engine reads device memory that threads of the same launch wrote, without a proxy fence.
template <bool Bad>
DEV void global_proxy(int* scratch, int* out) {
    __shared__ __align__(128) int buf[64];
    __shared__ __align__(8) uint64_t bar;
    scratch[threadIdx.x] = threadIdx.x + 1;
    if (!Bad) asm volatile("fence.proxy.async.global;" ::: "memory");
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbar_expect(smem(&bar), 256);
        bulk_load(smem(buf), scratch, 256, smem(&bar));
    }
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = buf[threadIdx.x];
}
PAIR(global_proxy, (int* scratch, int* out), (scratch, out))

// The same through a tensor map.
template <bool Bad>
DEV void tensor_proxy(const TensorMap* map, int* scratch, int* out) {
    __shared__ __align__(128) int buf[64];
    __shared__ __align__(8) uint64_t bar;
    scratch[threadIdx.x] = threadIdx.x + 1;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // After the barrier, the fence of one thread covers what all wrote.
        if (!Bad) asm volatile("fence.proxy.async;" ::: "memory");
        mbar_expect(smem(&bar), 256);
        tma_load_2d(smem(buf), map, smem(&bar), 0, 0);
    }
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = buf[threadIdx.x];
}
extern "C" __global__ void tensor_proxy_bad(const __grid_constant__ TensorMap map, int* scratch, int* out) { tensor_proxy<true>(&map, scratch, out); }
extern "C" __global__ void tensor_proxy_good(const __grid_constant__ TensorMap map, int* scratch, int* out) { tensor_proxy<false>(&map, scratch, out); }

// A CTA hands values to another one through device memory; the flag does not release them.
template <bool Bad>
DEV void hand_over(int* data, int* flag, int* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 1;
        __syncthreads();
        if (threadIdx.x == 0) {
            if (!Bad) __threadfence();
            atomicExch(flag, 1);
        }
    } else {
        if (threadIdx.x == 0) {
            while (*(volatile int*)flag == 0) {}
            __threadfence();
        }
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];
    }
}
PAIR(hand_over, (int* data, int* flag, int* out), (data, flag, out))

// The same with the reader's fence missing, and with release and acquire in the instructions.
template <bool Bad>
DEV void take_over(int* data, int* flag, int* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 1;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
    } else {
        if (threadIdx.x == 0) {
            int v;
            do {
                if (Bad) {
                    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
                } else {
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
                }
            } while (v == 0);
        }
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];
    }
}
PAIR(take_over, (int* data, int* flag, int* out), (data, flag, out))

// Two CTAs write different values to one place.
template <bool Bad>
DEV void same_place(int* out) {
    out[threadIdx.x + (Bad ? 0 : 64 * blockIdx.x)] = blockIdx.x;
}
PAIR(same_place, (int* out), (out))

// Warps of a CTA exchange values through device memory, without the barrier.
template <bool Bad>
DEV void device_exchange(int* scratch, int* out) {
    scratch[threadIdx.x] = threadIdx.x;
    if (!Bad) __syncthreads();
    out[threadIdx.x] = scratch[(threadIdx.x + 32) & 63];
}
PAIR(device_exchange, (int* scratch, int* out), (scratch, out))

// Lanes of one warp exchange values through shared memory, without __syncwarp.
template <bool Bad>
DEV void warp_exchange(int* out) {
    __shared__ volatile int buf[32];
    buf[threadIdx.x] = threadIdx.x;
    if (!Bad) __syncwarp();
    out[threadIdx.x] = buf[threadIdx.x ^ 1];
}
PAIR(warp_exchange, (int* out), (out))

// Both CTAs of a cluster add to the memory of the first by red.async, which then reads without waiting.
template <bool Bad>
DEV void red_async(int* out) {
    __shared__ __align__(16) uint32_t sum[32];
    __shared__ __align__(8) uint64_t bar;
    sum[threadIdx.x] = 100;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
        if (cluster_rank() == 0) mbar_expect(smem(&bar), 2 * 32 * 4);
    }
    cluster_arrive();
    cluster_wait();
    uint32_t to, at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(to) : "r"(smem(sum + threadIdx.x)));
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(at) : "r"(smem(&bar)));
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(to),
                 "r"(threadIdx.x * (cluster_rank() + 1)), "r"(at)
                 : "memory");
    if (cluster_rank() == 0) {
        if (!Bad) mbar_wait(smem(&bar), 0);
        out[threadIdx.x] = sum[threadIdx.x];
        mbar_wait(smem(&bar), 0);
    }
    cluster_arrive();
    cluster_wait();
}
PAIR(red_async, (int* out), (out))

// Changes the address of a tensor map, publishes it, and uses it without the acquiring fence.
template <bool Bad>
DEV void map_replace(const TensorMap* from, TensorMap* map, const int* in, int* out) {
    __shared__ __align__(128) TensorMap copy;
    __shared__ __align__(128) int buf[64];
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    reinterpret_cast<uint32_t*>(&copy)[threadIdx.x] = reinterpret_cast<const uint32_t*>(from)[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0)
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(smem(&copy)), "l"(in) : "memory");
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(map),
                 "r"(smem(&copy))
                 : "memory");
    if (!Bad) asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
    if (threadIdx.x == 0) {
        mbar_expect(smem(&bar), 256);
        tma_load_2d(smem(buf), map, smem(&bar), 0, 0);
    }
    __syncwarp();
    mbar_wait(smem(&bar), 0);
    out[threadIdx.x] = buf[threadIdx.x];
}
extern "C" __global__ void map_replace_bad(const __grid_constant__ TensorMap from, TensorMap* map, const int* in, int* out) { map_replace<true>(&from, map, in, out); }
extern "C" __global__ void map_replace_good(const __grid_constant__ TensorMap from, TensorMap* map, const int* in, int* out) { map_replace<false>(&from, map, in, out); }

// What the Triton compiler does and PTX forbids: moves of accumulators in flight, operands from cp.async without a proxy fence.
enum { Move = 1, Copied = 2 };
template <int F>
DEV void wgmma_lenient(const __nv_bfloat16* in, float* out) {
    __shared__ __align__(1024) __nv_bfloat16 a[64 * 64], b[16 * 64];
    for (int i = threadIdx.x; i < 64 * 8; i += 128)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem(a + 8 * i)), "l"(in) : "memory");
    for (int i = threadIdx.x; i < 16 * 8; i += 128)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem(b + 8 * i)), "l"(in) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (!(F & Copied)) fence_async();
    __syncthreads();
    float d[8], e[8];
    wgmma_fence();
    wgmma_m64n16k16<0, 0>(d, desc_128b(smem(a), 16, 1024), desc_128b(smem(b), 16, 1024), 0);
    wgmma_commit();
    if (F & Move)
        for (int i = 0; i < 8; i++) asm volatile("mov.b32 %0, %1;" : "=f"(e[i]) : "f"(d[i]));
    wgmma_wait<0>();
    for (int i = 0; i < 8; i++) out[threadIdx.x * 8 + i] = (F & Move) ? e[i] : d[i];
}
extern "C" __global__ void lenient_good(const __nv_bfloat16* in, float* out) { wgmma_lenient<0>(in, out); }
extern "C" __global__ void lenient_move(const __nv_bfloat16* in, float* out) { wgmma_lenient<Move>(in, out); }
extern "C" __global__ void lenient_copied(const __nv_bfloat16* in, float* out) { wgmma_lenient<Copied>(in, out); }

// All lanes read a buffer, one of them says so and lets another warp overwrite it; the others are not ordered before that.
template <bool Bad>
DEV void one_arrives(int* out) {
    __shared__ int buf[32];
    __shared__ __align__(8) uint64_t empty;
    if (threadIdx.x < 32) buf[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) mbar_init(smem(&empty), 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        out[threadIdx.x] = buf[31 - threadIdx.x];
        if (!Bad) __syncwarp();
        if (threadIdx.x == 0) mbar_arrive(smem(&empty));
    } else {
        mbar_wait(smem(&empty), 0);
        buf[threadIdx.x - 32] = 7;
    }
}
PAIR(one_arrives, (int* out), (out))
