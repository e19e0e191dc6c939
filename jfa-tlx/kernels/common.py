"""What the kernels share: the layout of the schedule (params.h of jfa-cuda), visible key ranges, rows of the tensor maps."""

import triton
import triton.language as tl

# Tensor maps with a movable row bound (params.h: JFA_BOUND).
BOUND = tl.constexpr(33554432)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_unit(units, unit):
    """Sequence and first row (or key) of a unit."""
    return tl.load(units + 2 * unit), tl.load(units + 2 * unit + 1)


@triton.jit
def load_sequence(sequences, sequence):
    """First row of q, first row of o, query rows, first row of k and v, keys."""
    at = sequences + 8 * sequence.to(tl.int64)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def diagonal_shift(bottom_right, q_len, kv_len):
    """The shift d of the mask's diagonal."""
    return tl.where(bottom_right != 0, kv_len - q_len, 0)


@triton.jit
def first_key(i, left, shift):
    """First visible key of row i (a number or a tensor)."""
    x = i + shift
    return tl.where((left < 0) | (left > x), 0, x - left)


@triton.jit
def end_key(i, right, shift, kv_len):
    """One past the last visible key of row i, at most kv_len; first_key >= end_key: a blind row."""
    end = (i + shift).to(tl.int64) + right + 1
    end = tl.minimum(tl.maximum(end, 0), kv_len).to(tl.int32)
    return tl.where(right < 0, kv_len, end)


@triton.jit
def split_scale(scale_log2):
    """(factor of every score, positive scale in base 2): maxima are taken of unscaled scores where the scale is positive."""
    positive = scale_log2 > 0
    return tl.where(positive, 1.0, scale_log2), tl.where(positive, scale_log2, 1.0)
