"""What the backward kernels of all generations share: units, masks, the elementwise part, and the small passes around the products.

Masks. Row i of a sequence sees key j when i + d - left <= j <= i + d + right. For a block of rows from `row` on and a tile of keys
from `key` on, with ii and jj counted from there, that is `least <= jj - ii <= most`; `least` and `most` are scalars, computed in 64
bits and clamped, so that no sum of rows and window overflows.

Rows and keys past a sequence arrive as zeros (a load's mask, or the copy engine). For them nothing needs to be masked: a row past
the end has lse = +inf, hence p = 0; a key past the end has k = v = 0, hence adds ds * 0 to dq, and its own dk and dv are not stored.
The exponent is clamped at 0, so that ds stays finite there.
"""

import triton
import triton.language as tl

from common import LOG2_E

# What is masked by selection: nothing (full attention), the diagonals of causal and window masks, or every boundary there is.
NONE = tl.constexpr(0)
DIAGONALS = tl.constexpr(1)
ALL = tl.constexpr(2)

FAR = tl.constexpr(1 << 20)  # farther than any tile is wide


@triton.jit
def sequence_fields(sequences, index, o_rows, kv_rows):
    """(q_row, o_row, q_len, kv_row, kv_len, rows of q that exist in this call, keys that exist in this call)"""
    at = sequences + index.to(tl.int64) * 8
    q_row = tl.load(at)
    o_row = tl.load(at + 1)
    q_len = tl.load(at + 2)
    kv_row = tl.load(at + 3)
    kv_len = tl.load(at + 4)
    q_end = tl.maximum(0, tl.minimum(q_len, o_rows - o_row))
    kv_end = tl.maximum(0, tl.minimum(kv_len, kv_rows - kv_row))
    return q_row, o_row, q_len, kv_row, kv_len, q_end, kv_end


@triton.jit
def diagonal(bottom_right, q_len, kv_len):
    return tl.where(bottom_right != 0, kv_len - q_len, 0).to(tl.int64)


@triton.jit
def clamp_to(x, least, most):
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def key_range(row, rows_end, shift, left, right, kv_len):
    """Keys that rows [row, rows_end) see: [first, end), empty when end <= first."""
    first = tl.where(left < 0, 0, row + shift - left)
    end = tl.where(right < 0, kv_len.to(tl.int64), rows_end + shift + right)
    return clamp_to(first, 0, kv_len), clamp_to(end, 0, kv_len)


@triton.jit
def row_range(key, keys_end, shift, left, right, q_len):
    """Rows that see any of the keys [key, keys_end)."""
    first = tl.where(right < 0, 0, key - shift - right)
    end = tl.where(left < 0, q_len.to(tl.int64), keys_end - shift + left)
    return clamp_to(first, 0, q_len), clamp_to(end, 0, q_len)


@triton.jit
def mask_bounds(row, key, shift, left, right):
    """`least` and `most` of jj - ii."""
    base = row + shift - key
    least = tl.where(left < 0, -FAR, clamp_to(base - left, -FAR, FAR))
    most = tl.where(right < 0, FAR, clamp_to(base + right, -FAR, FAR))
    return least, most


@triton.jit
def steps_between(lo, hi, least, most, STEP: tl.constexpr):
    """Of lo, lo + STEP, ... below hi, those in [least, most] (64 bits): begin and end of that part of the walk."""
    end = lo + tl.cdiv(tl.maximum(hi - lo, 0), STEP) * STEP
    first = lo + tl.maximum(least - lo + STEP - 1, 0) // STEP * STEP
    after = lo + tl.maximum(most - lo + STEP, 0) // STEP * STEP
    first = tl.minimum(first, end)
    return first.to(tl.int32), tl.maximum(tl.minimum(after, end), first).to(tl.int32)


@triton.jit
def uncut_keys(lo, hi, row, shift, left, right, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of the tiles at lo, lo + BLOCK_K, ..., those that no diagonal cuts for rows [row, row + BLOCK_Q): [first, end)."""
    none = tl.zeros((), tl.int64)
    least = tl.where(left < 0, none, row + shift - left + (BLOCK_Q - 1))
    most = tl.where(right < 0, none + hi, row + shift + right - (BLOCK_K - 1))
    return steps_between(lo, hi, least, most, BLOCK_K)


@triton.jit
def uncut_rows(lo, hi, key, shift, left, right, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of the blocks at lo, lo + BLOCK_Q, ..., those that no diagonal cuts for keys [key, key + BLOCK_K): [first, end)."""
    none = tl.zeros((), tl.int64)
    least = tl.where(right < 0, none, key - shift - right + (BLOCK_K - 1))
    most = tl.where(left < 0, none + hi, key - shift + left - (BLOCK_Q - 1))
    return steps_between(lo, hi, least, most, BLOCK_Q)


@triton.jit
def load_rows(base, row_stride, first, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows [first, first + ROWS) of one head; rows from `end` on are zeros and not read."""
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)
    return tl.load(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=(rows < end)[:, None], other=0.0)


@triton.jit
def store_rows(base, row_stride, first, end, x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)
    tl.store(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], x.to(base.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def load_lse(base, first, end, ROWS: tl.constexpr):
    """lse in log2; +inf where p must be 0: rows past the end and blind rows."""
    rows = first + tl.arange(0, ROWS)
    x = tl.load(base + rows, mask=rows < end, other=float("inf")) * LOG2_E
    return tl.where(x == float("-inf"), float("inf"), x)


@triton.jit
def load_delta(base, first, end, ROWS: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    return tl.load(base + rows, mask=rows < end, other=0.0)


@triton.jit
def probabilities(s, scale_log2, lse):
    """exp(s - lse), lse in log2 and of the shape of s (broadcast). A NaN stays one."""
    return tl.math.exp2(tl.minimum(s * scale_log2 - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def place_in_table(kv_table, place, kv_batch, KEY_ROWS: tl.constexpr):
    """Place p of the list of all key tiles: sequence c owns the places first_row(c) / KEY_ROWS + c and following, enough for its rows.
    Returns the last sequence whose places begin at or before p, and the first key."""
    lo = place * 0
    hi = kv_batch - 1
    while lo < hi:
        middle = (lo + hi + 1) // 2
        begins = tl.load(kv_table + middle.to(tl.int64) * 4) // KEY_ROWS + middle
        below = begins <= place
        lo = tl.where(below, middle, lo)
        hi = tl.where(below, hi, middle - 1)
    return lo, (place - tl.load(kv_table + lo.to(tl.int64) * 4) // KEY_ROWS - lo) * KEY_ROWS


# ------------------------------------------------------------------------------------------------------------------ small passes
@triton.jit
def backward_delta(o, d_o, delta, o_row, o_head, d_o_row, d_o_head, delta_head, heads_q, o_rows, HEAD_DIM: tl.constexpr, GRID_ROWS: tl.constexpr):
    """delta = rowsum(o * do). Rows of gaps and tails give garbage that nobody reads."""
    item = tl.program_id(0)
    first = item // heads_q * GRID_ROWS
    head = item % heads_q
    a = load_rows(o + head * o_head, o_row, first, o_rows, GRID_ROWS, HEAD_DIM).to(tl.float32)
    b = load_rows(d_o + head * d_o_head, d_o_row, first, o_rows, GRID_ROWS, HEAD_DIM).to(tl.float32)
    rows = first + tl.arange(0, GRID_ROWS)
    tl.store(delta + head * delta_head + rows, tl.sum(a * b, 1), mask=rows < o_rows)


@triton.jit
def backward_reduce(partial, dq, dq_row, dq_head, slices, heads_q, q_rows, scale, HEAD_DIM: tl.constexpr, GRID_ROWS: tl.constexpr):
    """dq of a broadcast query: the slices' sums, added in their order."""
    item = tl.program_id(0)
    first = item // heads_q * GRID_ROWS
    head = item % heads_q
    rows = first + tl.arange(0, GRID_ROWS)
    columns = tl.arange(0, HEAD_DIM)
    place = rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    mask = (rows < q_rows)[:, None]
    total = tl.zeros((GRID_ROWS, HEAD_DIM), tl.float32)
    for s in range(slices):
        total += tl.load(partial + (s.to(tl.int64) * heads_q + head) * q_rows * HEAD_DIM + place, mask=mask, other=0.0)
    store_rows(dq + head * dq_head, dq_row, first, q_rows, total * scale, GRID_ROWS, HEAD_DIM)


@triton.jit
def backward_index(sequences, kv_offsets, kv_offsets_64, kv_lengths, kv_table, batch, kv_batch, kv_rows, GRID_ROWS: tl.constexpr):
    """kv_table[c] = (first row, rows, batch - first sequence that refers to c, one past the last one); zeros when none does.

    Offsets are clamped as the schedule does. The table is zero before, so that maxima serve for both ends.
    """
    at = tl.program_id(0) * GRID_ROWS + tl.arange(0, GRID_ROWS)
    is_kv = at < kv_batch
    step = 1 + kv_offsets_64
    place = at.to(tl.int64)
    start = tl.load(kv_offsets + place * step, mask=is_kv, other=0)
    end = tl.load(kv_offsets + (place + 1) * step, mask=is_kv, other=0)
    start = tl.minimum(tl.maximum(start, 0), kv_rows)
    length = tl.minimum(tl.maximum(end, start), kv_rows) - start
    if kv_lengths.to(tl.int64) != 0:
        given = tl.load(kv_lengths + at, mask=is_kv, other=0)
        length = tl.minimum(tl.maximum(given, 0), length)
    tl.store(kv_table + place * 4, start, mask=is_kv)
    tl.store(kv_table + place * 4 + 1, length, mask=is_kv)
    is_q = at < batch
    c = tl.load(sequences + place * 8 + 5, mask=is_q, other=0).to(tl.int64)
    tl.atomic_max(kv_table + c * 4 + 2, batch - at, mask=is_q)
    tl.atomic_max(kv_table + c * 4 + 3, at + 1, mask=is_q)
