// What the schedule and the kernels that follow it agree on: visible key ranges and the order in which units are dealt.
#pragma once
#include "params.h"

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

// Item `round` of CTA `cta`: the list is sorted by work, longest first, and dealt in snake order, so that the sums of the
// CTAs differ by less than one item without a queue (no counter to reset, nothing to race).
__device__ __forceinline__ long long dealt_item(int round, int cta, int ctas) {
    return static_cast<long long>(round) * ctas + ((round & 1) ? ctas - 1 - cta : cta);
}

}  // namespace jfa
