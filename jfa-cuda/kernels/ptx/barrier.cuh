// mbarriers (one phase bit per use, waited on by parity) and named barriers. One instruction per wrapper.
#pragma once
#include <cstdint>

namespace jfa::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
// Arrives and announces `bytes` that asynchronous copies will deliver before the phase may complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(smem_address(bar)), "r"(parity) : "memory");
    return done != 0;
}
// Whether all have completed theirs.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* a, uint32_t phase_a, uint64_t* b, uint32_t phase_b) {
    uint32_t done;
    asm volatile("{\n.reg .pred p, q;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 q, [%3], %4;\nand.pred p, p, q;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(smem_address(a)), "r"(phase_a), "r"(smem_address(b)), "r"(phase_b) : "memory");
    return done != 0;
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* a, uint32_t phase_a, uint64_t* b, uint32_t phase_b, uint64_t* c, uint32_t phase_c) {
    uint32_t done;
    asm volatile("{\n.reg .pred p, q, r;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 q, [%3], %4;\nmbarrier.try_wait.parity.shared::cta.b64 r, [%5], %6;\n"
                 "and.pred p, p, q;\nand.pred p, p, r;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(smem_address(a)), "r"(phase_a), "r"(smem_address(b)), "r"(phase_b), "r"(smem_address(c)), "r"(phase_c) : "memory");
    return done != 0;
}
// Whether it has, without waiting.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(smem_address(bar)), "r"(parity) : "memory");
    return done != 0;
}
// Waits for the phase with this parity to complete. A fresh barrier has "completed" parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {}
}

// Not moved across products and barriers by the compiler.
__device__ __forceinline__ float4 load_shared(const float* p) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(smem_address(p)) : "memory");
    return v;
}

// Between two looks at something: leaves the issue slots and the memory to others for about a microsecond.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 1000;" ::: "memory"); }

// Volatile, so that the compiler reads it where it is used instead of keeping it in a register from the kernel's begin.
__device__ __forceinline__ int lane_id() {
    int r;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
    return r;
}
// True in one lane of a converged warp. Code under it may use the uniform datapath, which one lane chosen by index may not.
__device__ __forceinline__ bool elect_one() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen)::"memory");
    return chosen != 0;
}

// Named barriers 1..15 (0 is __syncthreads): a rendezvous of `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between the roles of a CTA (multiples of 8; each warpgroup calls one of them once).
template <int registers>
__device__ __forceinline__ void registers_release() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers)); }
template <int registers>
__device__ __forceinline__ void registers_acquire() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers)); }

}  // namespace jfa::ptx
