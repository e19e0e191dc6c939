// The bulk tensor copy engine.
#pragma once
#include <cuda.h>
#include <cstdint>
#include "../params.h"
#include "barrier.cuh"

namespace jfa::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Rows [first, first + rows) of a head, then zeros up to the box's height; `rows` may be 0. (The map: params.h, JFA_BOUND.)
__device__ __forceinline__ void tma_load_rows(const CUtensorMap* map, uint64_t* bar, void* smem, int column, int first, int rows, int head) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(smem_address(smem)), "l"(map), "r"(smem_address(bar)), "r"(column), "r"(JFA_BOUND - rows), "r"(first + rows), "r"(head),
                 "r"(JFA_BOUND) : "memory");
}
// Into the L2 what tma_load_rows would read.
__device__ __forceinline__ void tma_prefetch_rows(const CUtensorMap* map, int column, int first, int rows, int head) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];"
                 ::"l"(map), "r"(column), "r"(JFA_BOUND - rows), "r"(first + rows), "r"(head), "r"(JFA_BOUND) : "memory");
}
// Stores rows [first, first + rows) of a head; the rest of the box is dropped.
__device__ __forceinline__ void tma_store_rows(const CUtensorMap* map, const void* smem, int column, int first, int rows, int head) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(map), "r"(smem_address(smem)), "r"(column), "r"(JFA_BOUND - rows), "r"(first + rows), "r"(head), "r"(JFA_BOUND) : "memory");
}
// What comes by once, as the keys of a tile: the first to leave the L2 again, before what is used by many.
__device__ __forceinline__ uint64_t used_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// What is kept as long as anything.
__device__ __forceinline__ uint64_t used_again() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void tma_load_rows(const CUtensorMap* map, uint64_t* bar, void* smem, int column, int first, int rows, int head, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(smem_address(smem)), "l"(map), "r"(smem_address(bar)), "r"(column), "r"(JFA_BOUND - rows), "r"(first + rows), "r"(head),
                 "r"(JFA_BOUND), "l"(policy) : "memory");
}
__device__ __forceinline__ void tma_store_rows(const CUtensorMap* map, const void* smem, int column, int first, int rows, int head, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5, %6}], [%1], %7;"
                 ::"l"(map), "r"(smem_address(smem)), "r"(column), "r"(JFA_BOUND - rows), "r"(first + rows), "r"(head), "r"(JFA_BOUND), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(smem_address(smem)), "l"(global), "r"(bytes), "r"(smem_address(bar)) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `pending` groups still read their shared memory.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory"); }
// Until at most `pending` groups are unfinished (their writes visible to this thread).
template <int pending>
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory"); }

// Shared memory written by ordinary stores will be read by the copy engine or the tensor cores.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of device memory, on the way there or back.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements from registers to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// The same, every matrix transposed on its way: lane l gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_trans_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// The reverse: element (lane / 4, 2 * (lane % 4)) and the next one of matrix m in r[m].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem) : "memory");
}

}  // namespace jfa::ptx
