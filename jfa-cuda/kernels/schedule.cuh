// What the schedule and the kernels that follow it agree on: visible key ranges and the order in which units are dealt.
#pragma once
#include "params.h"
#include "ptx/global.cuh"

namespace jfa {

// The shift d of a mask's diagonal.
__device__ __forceinline__ int diagonal_shift(const JfaMask& mask, int q_len, int kv_len) {
    return mask.bottom_right ? kv_len - q_len : 0;
}

// First and one-past-last visible key of row i (0 <= i < q_len), clamped to the sequence; first >= last: a blind row.
__device__ __forceinline__ int first_key(const JfaMask& mask, int i, int shift) {
    return mask.left < 0 ? 0 : max(0, min(i + shift, 0x3FFFFFFF) - mask.left);
}
__device__ __forceinline__ int end_key(const JfaMask& mask, int i, int shift, int kv_len) {
    if (mask.right < 0) return kv_len;
    const long long end = static_cast<long long>(i) + shift + mask.right + 1;
    return static_cast<int>(end < 0 ? 0 : (end > kv_len ? kv_len : end));
}
// First and one-past-last row that sees key j.
__device__ __forceinline__ int first_row(const JfaMask& mask, int j, int shift) {
    if (mask.right < 0) return 0;
    const long long row = static_cast<long long>(j) - shift - mask.right;
    return static_cast<int>(row < 0 ? 0 : (row > 0x7FFFFFFF ? 0x7FFFFFFF : row));
}
__device__ __forceinline__ int end_row(const JfaMask& mask, int j, int shift, int q_len) {
    if (mask.left < 0) return q_len;
    const long long end = static_cast<long long>(j) - shift + mask.left + 1;
    return static_cast<int>(end < 0 ? 0 : (end > q_len ? q_len : end));
}

// The queue of a launch: CTA i begins with item i, every further one is drawn. A CTA draws until it gets none, once for every item it
// has and once more, so that the last number drawn is known. Called by one thread of the CTA.
__device__ __forceinline__ void open_queue(JfaQueue* queue, unsigned long long key) {
    unsigned long long* const word = reinterpret_cast<unsigned long long*>(&queue->key);
    for (unsigned long long seen = ptx::load_acquire(word); seen != key; seen = ptx::load_acquire(word)) {
        // key - 1: another CTA is setting the number up.
        if (seen == key - 1 || atomicCAS(word, seen, key - 1) != seen) continue;
        atomicExch(&queue->next, gridDim.x);
        ptx::store_release(word, key);
    }
}
__device__ __forceinline__ int drawn_item(JfaQueue* queue, unsigned long long key, int items) {
    const uint32_t i = atomicAdd(&queue->next, 1u);
    if (i + 1 == 2 * gridDim.x + static_cast<uint32_t>(items)) ptx::store_release(reinterpret_cast<unsigned long long*>(&queue->key), 0ull);
    return i < static_cast<uint32_t>(items) ? static_cast<int>(i) : -1;
}

}  // namespace jfa
