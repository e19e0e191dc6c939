"""Forward, generations 1 and 2: plain Triton, one program per unit (UNIT_ROWS query rows of one sequence) and head.

Keys and values come through pointers, zeros past the last visible key. Packing puts 1 << packed_log2 query heads of a group into the
rows: row r is query row r % rows of head r / rows.

Generation 1 (SELECT) masks every score by selection. Generation 2 masks in boundary tiles only, and not at all for the end of a
sequence under a full mask: there keys past the end are zeros, their scores are 0, their values add nothing to o, and each adds
exp(0 - maximum) to the sum, which is taken off again. Exact algebra; in floating point the sum loses log2(surplus / rest) bits, so
the rest of every row must be at least 1/256 of its surplus (an error of 2^-16), or the tile is masked by selection after all.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from common import LN_2, diagonal_shift, end_key, first_key, load_sequence, load_unit, split_scale


@triton.jit
def weights_of(s, top, scale):
    """Weights of a tile against the new maximum of its rows, their sums, that maximum, what shrinks everything before, the maximum's
    share of the exponent."""
    new_top = tl.maximum(top, tl.max(s, 1))
    zero = tl.where(new_top == float("-inf"), 0.0, new_top * scale)  # a row that has seen no key must not give -inf - -inf
    p = tl.math.exp2(s * scale - zero[:, None])
    return p, tl.sum(p, 1), new_top, tl.math.exp2(top * scale - zero), zero


@triton.jit
def forward_plain(q, k, v, o, lse, header, sequences, forward_units,
                  q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, lse_head,
                  scale_log2, heads, group, packed_log2, left, right, bottom_right, q_rows, kv_rows, o_rows,
                  UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, SELECT: tl.constexpr, FENCE: tl.constexpr = False):
    item = tl.program_id(0)
    unit = item // heads
    if unit >= tl.load(header):
        return
    head = item % heads
    sequence, first = load_unit(forward_units, unit)
    q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
    shift = diagonal_shift(bottom_right, q_len, kv_len)
    rows = UNIT_ROWS >> packed_log2
    last = tl.minimum(first + rows, q_len) - 1
    lo = first_key(first, left, shift)
    hi = end_key(last, right, shift, kv_len)
    factor, scale = split_scale(scale_log2)
    subtract = (left < 0) & (right < 0) & (factor == 1.0)
    # Tiles between these keys are cut by nothing.
    whole_begin = tl.where(factor == 1.0, first_key(last, left, shift), 0x7FFFFFFF)
    whole_end = end_key(first, right, shift, kv_len)

    # Rows of the tile.
    r = tl.arange(0, UNIT_ROWS)
    i = first + r % rows
    of_head = tl.where(packed_log2 > 0, head * group + r // rows, head).to(tl.int64)
    kv_head = (tl.where(packed_log2 > 0, head, head // group)).to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KV_TILE)
    begin = first_key(i, left, shift)[:, None]
    end = end_key(i, right, shift, kv_len)[:, None]
    inside = i < q_len
    q_at = q + ((q0 + i).to(tl.int64) * q_row + of_head * q_head)[:, None] + d[None, :]
    q_tile = tl.load(q_at, mask=(inside & (q0 + i < q_rows))[:, None], other=0.0)
    k_base = k + kv_head * k_head + kv0.to(tl.int64) * k_row
    v_base = v + kv_head * v_head + kv0.to(tl.int64) * v_row
    readable = tl.minimum(hi, kv_rows - kv0)

    top = tl.full([UNIT_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([UNIT_ROWS], tl.float32)
    acc = tl.zeros([UNIT_ROWS, HEAD_DIM], tl.float32)
    for key in tl.range(lo // KV_TILE * KV_TILE, hi, KV_TILE):
        j = key + n
        exists = (j < readable)[:, None]
        k_tile = tl.load(k_base + j.to(tl.int64)[:, None] * k_row + d[None, :], mask=exists, other=0.0)
        s = tl.dot(q_tile, k_tile.T)
        cut = (key < whole_begin) | (key + KV_TILE > whole_end)
        if SELECT:
            s = tl.where((j[None, :] >= begin) & (j[None, :] < end), s * factor, float("-inf"))
        elif cut & (subtract == 0):
            s = tl.where((j[None, :] >= begin) & (j[None, :] < end), s * factor, float("-inf"))
        p, added, new_top, shrink, zero = weights_of(s, top, scale)
        if not SELECT and cut & subtract:
            surplus = (key + KV_TILE - kv_len).to(tl.float32) * tl.math.exp2(-zero)
            added -= surplus
            if tl.max((surplus > 256.0 * added).to(tl.int32), 0) > 0:
                p, added, new_top, shrink, zero = weights_of(tl.where(j[None, :] < kv_len, s, float("-inf")), top, scale)
        total = total * shrink + added
        v_tile = tl.load(v_base + j.to(tl.int64)[:, None] * v_row + d[None, :], mask=exists, other=0.0)
        if FENCE:
            tlx.fence("async_shared")  # for the product's read of v; on Hopper the compiler leaves it out behind the branch above
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        top = new_top

    # No maximum means no visible key: o is exactly 0 and lse -inf, whatever v holds.
    blind = (top == float("-inf")) & (total == total)
    acc = tl.where(blind[:, None], 0.0, acc / tl.where(blind, 1.0, total)[:, None])
    written = inside & (o0 + i < o_rows)
    o_at = o + ((o0 + i).to(tl.int64) * o_row + of_head * o_head)[:, None] + d[None, :]
    tl.store(o_at, acc.to(o.dtype.element_ty), mask=written[:, None])
    value = (top * scale + tl.math.log2(total)) * LN_2
    tl.store(lse + of_head * lse_head + o0 + i, tl.where(blind, float("-inf"), value), mask=written)
