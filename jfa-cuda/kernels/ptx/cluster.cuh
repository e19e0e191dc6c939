// Thread-block clusters: rank, rendezvous, arrivals and stores in a neighbour's shared memory.
#pragma once
#include <cstdint>
#include "barrier.cuh"

namespace jfa::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// Every thread of every CTA of the cluster; writes before it are visible after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t map_to_rank(const void* shared, uint32_t rank) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_address(shared)), "r"(rank));
    return r;
}
// Arrives at a barrier of any CTA of the cluster. What the thread has read before is read; for its writes the default scope, the CTA,
// makes no promise (the scope of the cluster costs 1,700 cycles).
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Stores to another CTA's shared memory that complete bytes of a barrier there; nobody waits here.
__device__ __forceinline__ void store_async(uint32_t to, uint32_t v, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(bar) : "memory");
}
__device__ __forceinline__ void store_async(uint32_t to, float4 v, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}

}  // namespace jfa::ptx
