// Tensor memory without products: faults of its life cycle and its order, and cluster launch control.
#include "ptx.cuh"

enum { Leak = 1, Columns = 2, After = 4, WaitLd = 8, WaitSt = 16, Lanes = 32, Fence = 64, Unwritten = 128 };

DEV void tmem_alloc(uint32_t dst, uint32_t cols) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst), "r"(cols) : "memory");
}
DEV void tmem_dealloc(uint32_t addr, uint32_t cols) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(addr), "r"(cols) : "memory");
}
DEV void tmem_st(uint32_t addr, uint32_t v) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(addr), "r"(v) : "memory");
}
DEV uint32_t tmem_ld(uint32_t addr) {
    uint32_t v;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}
DEV void wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DEV void wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
DEV void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEV void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Warps 0 and 4 share lanes 0-31: one stores, the other loads after a barrier.
template <int F>
DEV void tmem_case(uint32_t* out) {
    __shared__ uint32_t slot;
    const int warp = threadIdx.x / 32;
    if (warp == 0) tmem_alloc(smem(&slot), 32);
    __syncthreads();
    const uint32_t base = slot + ((F & Columns) ? 32 : 0);
    if (warp == 0) {
        if (!(F & Unwritten)) tmem_st(base, threadIdx.x * 3);
        if (!(F & WaitSt)) wait_st();
        fence_before();
    }
    __syncthreads();
    if (warp == 4) {
        if (!(F & Fence)) fence_after();
        uint32_t v = tmem_ld(base + ((F & Lanes) ? 32u << 16 : 0));
        if (!(F & WaitLd)) wait_ld();
        out[threadIdx.x - 128] = v;
        wait_ld();
        fence_before();
    }
    __syncthreads();
    if (warp == 0) {
        if (!(F & Leak)) tmem_dealloc(slot, 32);
        if (F & After) {
            fence_after();
            out[threadIdx.x] = tmem_ld(slot);
            wait_ld();
        }
    }
}
extern "C" __global__ void tmem_good(uint32_t* out) { tmem_case<0>(out); }
extern "C" __global__ void tmem_leak(uint32_t* out) { tmem_case<Leak>(out); }
extern "C" __global__ void tmem_columns(uint32_t* out) { tmem_case<Columns>(out); }
extern "C" __global__ void tmem_after_free(uint32_t* out) { tmem_case<After>(out); }
extern "C" __global__ void tmem_wait_ld(uint32_t* out) { tmem_case<WaitLd>(out); }
extern "C" __global__ void tmem_wait_st(uint32_t* out) { tmem_case<WaitSt>(out); }
extern "C" __global__ void tmem_lanes(uint32_t* out) { tmem_case<Lanes>(out); }
extern "C" __global__ void tmem_fence(uint32_t* out) { tmem_case<Fence>(out); }
extern "C" __global__ void tmem_unwritten(uint32_t* out) { tmem_case<Unwritten>(out); }

// Each CTA works on its own place and on those of clusters that it takes over; every place is counted once.
extern "C" __global__ void steal(uint32_t* count) {
    __shared__ __align__(16) uint4 answer;
    __shared__ __align__(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    uint32_t x = blockIdx.x, phase = 0, more = 1;
    while (more) {
        if (threadIdx.x == 0) {
            atomicAdd(count + x, 1);
            mbar_expect(smem(&bar), 16);
            asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(smem(&answer)),
                         "r"(smem(&bar))
                         : "memory");
        }
        mbar_wait(smem(&bar), phase);
        phase ^= 1;
        asm volatile(
            "{\n.reg .b128 handle;\n.reg .pred p;\nld.shared.b128 handle, [%2];\n"
            "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, handle;\nselp.u32 %0, 1, 0, p;\n"
            "mov.u32 %1, 0;\n@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, handle;\n}"
            : "=r"(more), "=r"(x)
            : "r"(smem(&answer))
            : "memory");
        __syncthreads();
    }
}

// Packed arithmetic and three-operand maxima of sm_100.
extern "C" __global__ void packed(const float2* in, float2* out) {
    float2 a = in[threadIdx.x], b = in[threadIdx.x + 32], r;
    asm("{\n.reg .b64 a, b, c;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nfma.rn.f32x2 c, a, b, a;\nmul.rn.f32x2 c, c, b;\n"
        "mov.b64 {%0, %1}, c;\n}"
        : "=f"(r.x), "=f"(r.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    asm("max.f32 %0, %0, %1, %2;" : "+f"(r.x) : "f"(a.x), "f"(b.y));
    out[threadIdx.x] = r;
}

DEV uint64_t desc_plain(uint32_t addr, uint32_t lead, uint32_t stride) {
    return static_cast<uint64_t>((addr & 0x3ffff) >> 4) | static_cast<uint64_t>(lead >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
           static_cast<uint64_t>(1) << 46;
}
DEV void tensor_commit(uint32_t bar) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
}

// Copies 32 rows of 16 bytes to the lanes of all four warps, which load them; the fault is chosen by F.
enum { CpProxy = 1, CpWait = 2, CpColumns = 4 };
template <int F>
DEV void cp_case(uint32_t* out) {
    __shared__ __align__(128) uint32_t rows[32 * 4];
    __shared__ uint32_t slot;
    __shared__ __align__(8) uint64_t bar;
    rows[threadIdx.x] = threadIdx.x * 5;
    if (!(F & CpProxy)) fence_async();
    if (threadIdx.x < 32) tmem_alloc(smem(&slot), 32);
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    fence_after();
    if (threadIdx.x == 0) {
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(slot + ((F & CpColumns) ? 30u : 4u)),
                     "l"(desc_plain(smem(rows), 16, 128))
                     : "memory");
        tensor_commit(smem(&bar));
    }
    if (!(F & CpWait)) mbar_wait(smem(&bar), 0);
    fence_after();
    for (int c = 0; c < 4; c++) {
        uint32_t v = tmem_ld(slot + 4 + c + (threadIdx.x / 32 << 21));
        wait_ld();
        out[4 * threadIdx.x + c] = v;
    }
    mbar_wait(smem(&bar), 0);
    fence_before();
    __syncthreads();
    fence_after();
    if (threadIdx.x < 32) tmem_dealloc(slot, 32);
}
extern "C" __global__ void cp_good(uint32_t* out) { cp_case<0>(out); }
extern "C" __global__ void cp_proxy_bad(uint32_t* out) { cp_case<CpProxy>(out); }
extern "C" __global__ void cp_wait_bad(uint32_t* out) { cp_case<CpWait>(out); }
extern "C" __global__ void cp_columns_bad(uint32_t* out) { cp_case<CpColumns>(out); }

// d[128, 16] = a[128, 8] b[16, 8]^T in TensorFloat-32; the fault is chosen by F.
enum { TfWait = 1, TfTypes = 2, TfProxy = 4 };
template <int F>
DEV void tf32_case(const float* ga, const float* gb, float* out) {
    // Blocks of 8 rows by 16 bytes, the two halves of K one after the other.
    __shared__ __align__(128) float a[2][128][4], b[2][16][4];
    __shared__ uint32_t slot;
    __shared__ __align__(8) uint64_t bar;
    for (int k = 0; k < 8; k++) {
        a[k / 4][threadIdx.x][k % 4] = ga[threadIdx.x * 8 + k];
        if (threadIdx.x < 16) b[k / 4][threadIdx.x][k % 4] = gb[threadIdx.x * 8 + k];
    }
    if (!(F & TfProxy)) fence_async();
    if (threadIdx.x < 32) tmem_alloc(smem(&slot), 32);
    if (threadIdx.x == 0) {
        mbar_init(smem(&bar), 1);
        fence_init();
    }
    __syncthreads();
    fence_after();
    if (threadIdx.x == 0) {
        const uint32_t types = (F & TfTypes) ? 1u << 7 | 1u << 10 : 2u << 7 | 2u << 10;
        const uint32_t idesc = 1u << 4 | types | (16u / 8) << 17 | (128u / 16) << 24;
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, 0, 0;\ntcgen05.mma.cta_group::1.kind::tf32 [%0], %1, %2, %3, p;\n}" ::"r"(slot),
                     "l"(desc_plain(smem(a), 2048, 128)), "l"(desc_plain(smem(b), 256, 128)), "r"(idesc)
                     : "memory");
        tensor_commit(smem(&bar));
    }
    if (!(F & TfWait)) mbar_wait(smem(&bar), 0);
    fence_after();
    for (int c = 0; c < 16; c++) {
        uint32_t v = tmem_ld(slot + c + (threadIdx.x / 32 << 21));
        wait_ld();
        out[16 * threadIdx.x + c] = __uint_as_float(v);
    }
    mbar_wait(smem(&bar), 0);
    fence_before();
    __syncthreads();
    fence_after();
    if (threadIdx.x < 32) tmem_dealloc(slot, 32);
}
extern "C" __global__ void tf32_good(const float* a, const float* b, float* out) { tf32_case<0>(a, b, out); }
extern "C" __global__ void tf32_wait_bad(const float* a, const float* b, float* out) { tf32_case<TfWait>(a, b, out); }
extern "C" __global__ void tf32_types_bad(const float* a, const float* b, float* out) { tf32_case<TfTypes>(a, b, out); }
extern "C" __global__ void tf32_proxy_bad(const float* a, const float* b, float* out) { tf32_case<TfProxy>(a, b, out); }
