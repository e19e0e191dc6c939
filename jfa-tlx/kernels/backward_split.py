"""Backward, generations 1 and 2: plain Triton in two passes, without atomics and without a global sum.

  dq pass     a block of BLOCK_Q query rows of one head stays; keys pass by in tiles of BLOCK_K: s, dp and dq += ds k
  dk/dv pass  a tile of KEY_ROWS keys of one key/value head stays; the query rows of every head of the group pass by in blocks of
              BLOCK_Q: s^T, dp^T, dv += p^T do and dk += ds^T q

Seven products instead of five, and every gradient is finished by the program that began it: deterministic, nothing to clear before
and nothing to convert after. Generation 1 (MASK = ALL) masks every score by selection and has a pass of its own for delta; generation 2 leaves rows and
keys past the end to their zeros, selects only where there is a diagonal, and takes delta from the o and do at hand.
"""

import triton
import triton.language as tl

from backward_common import (ALL, DIAGONALS, NONE, diagonal, key_range, load_delta, load_lse, load_rows, mask_bounds, place_in_table, probabilities, row_range, sequence_fields,
                             store_rows)


@triton.jit
def select(x, least, most, rows_left, keys_left, MASK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x where row and key see each other, else 0."""
    if TRANSPOSED:
        jj = tl.arange(0, x.shape[0])[:, None]
        ii = tl.arange(0, x.shape[1])[None, :]
    else:
        ii = tl.arange(0, x.shape[0])[:, None]
        jj = tl.arange(0, x.shape[1])[None, :]
    if MASK == ALL:
        x = tl.where((jj - ii >= least) & (jj - ii <= most) & (ii < rows_left) & (jj < keys_left), x, 0.0)
    elif MASK == DIAGONALS:
        x = tl.where((jj - ii >= least) & (jj - ii <= most), x, 0.0)
    return x


@triton.jit
def dq_of_sequence(acc, q_tile, do_tile, lse_rows, delta_rows, k_base, v_base, k_row, v_row, row, q_len, q_end, kv_len, kv_end, shift,
                   left, right, scale_log2, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    """acc += ds k over the keys that rows [row, row + BLOCK_Q) see."""
    if MASK == NONE:
        lo = 0
        hi = kv_len
    else:
        lo, hi = key_range(row, tl.minimum(row + BLOCK_Q, q_len), shift, left, right, kv_len)
    for key in range(lo, hi, BLOCK_K):
        k_tile = load_rows(k_base, k_row, key, kv_end, BLOCK_K, HEAD_DIM)
        v_tile = load_rows(v_base, v_row, key, kv_end, BLOCK_K, HEAD_DIM)
        s = tl.dot(q_tile, tl.trans(k_tile))
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = probabilities(s, scale_log2, lse_rows[:, None]) * (dp - delta_rows[:, None])
        least, most = mask_bounds(row, key, shift, left, right)
        ds = select(ds, least, most, q_end - row, kv_len - key, MASK, False)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
    return acc


@triton.jit
def rows_delta(o_base, o_row, do_base, d_o_row, delta_base, row, end, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    """delta of rows [row, row + BLOCK_Q) of a sequence: read, or computed and left for the dk/dv pass."""
    if MASK == ALL:
        return load_delta(delta_base, row, end, BLOCK_Q)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for column in tl.static_range(0, HEAD_DIM, 32):  # all columns at once would not fit the registers
        total += tl.sum(load_rows(o_base + column, o_row, row, end, BLOCK_Q, 32).to(tl.float32) *
                        load_rows(do_base + column, d_o_row, row, end, BLOCK_Q, 32).to(tl.float32), 1)
    rows = row + tl.arange(0, BLOCK_Q)
    tl.store(delta_base + rows, total, mask=rows < end)
    return total


@triton.jit
def backward_dq(q, k, v, o, d_o, dq, lse, delta, header, sequences, backward_units,
                q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, d_o_row, d_o_head, dq_row, dq_head, lse_head, delta_head,
                scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows,
                KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
                MASK: tl.constexpr):
    item = tl.program_id(0)
    unit = item // heads_q
    if unit >= tl.load(header + 1):
        return
    head = (item % heads_q).to(tl.int64)
    index = tl.load(backward_units + unit * 2)
    first_key = tl.load(backward_units + unit * 2 + 1)
    q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
    shift = diagonal(bottom_right, q_len, kv_len)
    kv_head = head // group
    q_base = q + head * q_head + q0.to(tl.int64) * q_row
    dq_base = dq + head * dq_head + q0.to(tl.int64) * dq_row
    o_base = o + head * o_head + o0.to(tl.int64) * o_row
    do_base = d_o + head * d_o_head + o0.to(tl.int64) * d_o_row
    k_base = k + kv_head * k_head + k0.to(tl.int64) * k_row
    v_base = v + kv_head * v_head + k0.to(tl.int64) * v_row
    lse_base = lse + head * lse_head + o0
    delta_base = delta + head * delta_head + o0
    # The unit of key tile t of n takes the query blocks t, t + n, ...; without a tile of its own all of them.
    block = tl.where(first_key < 0, 0, first_key // KEY_ROWS)
    step = tl.where(first_key < 0, 1, tl.maximum(1, tl.cdiv(kv_len, KEY_ROWS)))
    for row in range(block * BLOCK_Q, q_end, step * BLOCK_Q):
        q_tile = load_rows(q_base, q_row, row, q_end, BLOCK_Q, HEAD_DIM)
        do_tile = load_rows(do_base, d_o_row, row, q_end, BLOCK_Q, HEAD_DIM)
        lse_rows = load_lse(lse_base, row, q_end, BLOCK_Q)
        delta_rows = rows_delta(o_base, o_row, do_base, d_o_row, delta_base, row, q_end, BLOCK_Q, HEAD_DIM, MASK)
        acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
        acc = dq_of_sequence(acc, q_tile, do_tile, lse_rows, delta_rows, k_base, v_base, k_row, v_row, row, q_len, q_end, kv_len, kv_end,
                             shift, left, right, scale_log2, BLOCK_Q, BLOCK_K, HEAD_DIM, MASK)
        store_rows(dq_base, dq_row, row, q_end, acc * scale, BLOCK_Q, HEAD_DIM)


@triton.jit
def backward_dq_broadcast(q, k, v, o, d_o, partial, lse, delta, sequences,
                          q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, d_o_row, d_o_head, lse_head, delta_head,
                          scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
                          BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    """One query block, head and slice: sums over the sequences slice, slice + slices, ... in this order; unscaled."""
    item = tl.program_id(0)
    head = (item % heads_q).to(tl.int64)
    row = item // heads_q // slices * BLOCK_Q
    slice = item // heads_q % slices
    kv_head = head // group
    q_tile = load_rows(q + head * q_head, q_row, row, broadcast, BLOCK_Q, HEAD_DIM)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    for index in range(slice, batch, slices):
        q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
        shift = diagonal(bottom_right, q_len, kv_len)
        do_base = d_o + head * d_o_head + o0.to(tl.int64) * d_o_row
        do_tile = load_rows(do_base, d_o_row, row, q_end, BLOCK_Q, HEAD_DIM)
        lse_rows = load_lse(lse + head * lse_head + o0, row, q_end, BLOCK_Q)
        delta_rows = rows_delta(o + head * o_head + o0.to(tl.int64) * o_row, o_row, do_base, d_o_row, delta + head * delta_head + o0, row,
                                q_end, BLOCK_Q, HEAD_DIM, MASK)
        acc = dq_of_sequence(acc, q_tile, do_tile, lse_rows, delta_rows, k + kv_head * k_head + k0.to(tl.int64) * k_row,
                             v + kv_head * v_head + k0.to(tl.int64) * v_row, k_row, v_row, row, q_len, q_end, kv_len, kv_end, shift,
                             left, right, scale_log2, BLOCK_Q, BLOCK_K, HEAD_DIM, MASK)
    rows = row + tl.arange(0, BLOCK_Q)
    place = rows.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    base = partial + (slice.to(tl.int64) * heads_q + head) * broadcast * HEAD_DIM
    tl.store(base + place, acc, mask=(rows < broadcast)[:, None])


@triton.jit
def dkdv_of_sequence(dk_acc, dv_acc, k_tile, v_tile, q, d_o, lse, delta, q_row, q_head, d_o_row, d_o_head, lse_head, delta_head, q0, o0,
                     q_len, kv_len, q_end, key, shift, left, right, scale_log2, kv_head, group,
                     KEY_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    """dv_acc += p^T do, dk_acc += ds^T q over the rows, of every head of the group, that see keys [key, key + KEY_ROWS)."""
    if MASK == NONE:
        lo = 0
        hi = q_end
    else:
        lo, hi = row_range(key, tl.minimum(key + KEY_ROWS, kv_len), shift, left, right, q_end)
    for member in range(group):
        head = kv_head * group + member
        q_base = q + head * q_head + q0.to(tl.int64) * q_row
        do_base = d_o + head * d_o_head + o0.to(tl.int64) * d_o_row
        lse_base = lse + head * lse_head + o0
        delta_base = delta + head * delta_head + o0
        for row in range(lo, hi, BLOCK_Q):
            q_tile = load_rows(q_base, q_row, row, q_end, BLOCK_Q, HEAD_DIM)
            do_tile = load_rows(do_base, d_o_row, row, q_end, BLOCK_Q, HEAD_DIM)
            lse_rows = load_lse(lse_base, row, q_end, BLOCK_Q)
            delta_rows = load_delta(delta_base, row, q_end, BLOCK_Q)
            least, most = mask_bounds(row, key, shift, left, right)
            s = tl.dot(k_tile, tl.trans(q_tile))
            p = select(probabilities(s, scale_log2, lse_rows[None, :]), least, most, q_end - row, kv_len - key, MASK, True)
            dp = tl.dot(v_tile, tl.trans(do_tile))
            dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc)
            # Where p is 0 the other factor need not be finite.
            ds = select(p * (dp - delta_rows[None, :]), least, most, q_end - row, kv_len - key, MASK, True)
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc)
    return dk_acc, dv_acc


@triton.jit
def backward_dkdv(q, k, v, d_o, dk, dv, lse, delta, header, sequences, backward_units,
                  q_row, q_head, k_row, k_head, v_row, v_head, d_o_row, d_o_head, dk_row, dk_head, dv_row, dv_head, lse_head, delta_head,
                  scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
                  KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    item = tl.program_id(0)
    unit = item // heads_kv
    if unit >= tl.load(header + 1):
        return
    kv_head = (item % heads_kv).to(tl.int64)
    index = tl.load(backward_units + unit * 2)
    first_key = tl.load(backward_units + unit * 2 + 1)
    q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
    shift = diagonal(bottom_right, q_len, kv_len)
    k_base = k + kv_head * k_head + k0.to(tl.int64) * k_row
    v_base = v + kv_head * v_head + k0.to(tl.int64) * v_row
    dk_base = dk + kv_head * dk_head + k0.to(tl.int64) * dk_row
    dv_base = dv + kv_head * dv_head + k0.to(tl.int64) * dv_row
    end = tl.where(first_key < 0, kv_end, tl.minimum(kv_end, first_key + KEY_ROWS))
    for key in range(tl.maximum(first_key, 0), end, KEY_ROWS):
        k_tile = load_rows(k_base, k_row, key, kv_end, KEY_ROWS, HEAD_DIM)
        v_tile = load_rows(v_base, v_row, key, kv_end, KEY_ROWS, HEAD_DIM)
        dk_acc = tl.zeros((KEY_ROWS, HEAD_DIM), tl.float32)
        dv_acc = tl.zeros((KEY_ROWS, HEAD_DIM), tl.float32)
        dk_acc, dv_acc = dkdv_of_sequence(dk_acc, dv_acc, k_tile, v_tile, q, d_o, lse, delta, q_row, q_head, d_o_row, d_o_head, lse_head,
                                          delta_head, q0, o0, q_len, kv_len, q_end, key, shift, left, right, scale_log2, kv_head, group,
                                          KEY_ROWS, BLOCK_Q, HEAD_DIM, MASK)
        store_rows(dk_base, dk_row, key, kv_end, dk_acc * scale, KEY_ROWS, HEAD_DIM)
        store_rows(dv_base, dv_row, key, kv_end, dv_acc, KEY_ROWS, HEAD_DIM)


@triton.jit
def backward_dkdv_index(q, k, v, d_o, dk, dv, lse, delta, sequences, kv_table,
                        q_row, q_head, k_row, k_head, v_row, v_head, d_o_row, d_o_head, dk_row, dk_head, dv_row, dv_head, lse_head,
                        delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch,
                        KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr):
    """As backward_dkdv, for key/value sequences that several query sequences share: those between the first and the last that refer to
    this one, in their order."""
    item = tl.program_id(0)
    place = item // heads_kv
    kv_head = (item % heads_kv).to(tl.int64)
    c, key = place_in_table(kv_table, place, kv_batch, KEY_ROWS)
    k0 = tl.load(kv_table + c.to(tl.int64) * 4)
    kv_len = tl.load(kv_table + c.to(tl.int64) * 4 + 1)
    if key >= kv_len:
        return
    first = batch - tl.load(kv_table + c.to(tl.int64) * 4 + 2)
    last = tl.load(kv_table + c.to(tl.int64) * 4 + 3)
    kv_end = tl.minimum(kv_len, kv_rows - k0)
    k_tile = load_rows(k + kv_head * k_head + k0.to(tl.int64) * k_row, k_row, key, kv_end, KEY_ROWS, HEAD_DIM)
    v_tile = load_rows(v + kv_head * v_head + k0.to(tl.int64) * v_row, v_row, key, kv_end, KEY_ROWS, HEAD_DIM)
    dk_acc = tl.zeros((KEY_ROWS, HEAD_DIM), tl.float32)
    dv_acc = tl.zeros((KEY_ROWS, HEAD_DIM), tl.float32)
    for index in range(first, last):
        if tl.load(sequences + index.to(tl.int64) * 8 + 5) == c:
            q0, o0, q_len, _k0, _kv_len, q_end, _kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
            shift = diagonal(bottom_right, q_len, kv_len)
            dk_acc, dv_acc = dkdv_of_sequence(dk_acc, dv_acc, k_tile, v_tile, q, d_o, lse, delta, q_row, q_head, d_o_row, d_o_head,
                                              lse_head, delta_head, q0, o0, q_len, kv_len, q_end, key, shift, left, right, scale_log2,
                                              kv_head, group, KEY_ROWS, BLOCK_Q, HEAD_DIM, MASK)
    store_rows(dk + kv_head * dk_head + k0.to(tl.int64) * dk_row, dk_row, key, kv_end, dk_acc * scale, KEY_ROWS, HEAD_DIM)
    store_rows(dv + kv_head * dv_head + k0.to(tl.int64) * dv_row, dv_row, key, kv_end, dv_acc, KEY_ROWS, HEAD_DIM)
