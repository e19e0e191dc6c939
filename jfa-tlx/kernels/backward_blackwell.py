"""Backward for Blackwell with warp roles (TLX): the bodies of generations 3 and 4.

Two passes as on Hopper (backward_hopper.py), with tiles of 128 x 128 whose sums stand in tensor memory.

  dq pass     s = q k^T, dp = do v^T, dq += ds k                       128 query rows stay, 128 keys pass by
  dk/dv pass  s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q    128 keys stay, 128 query rows pass by
  roles       two warpgroups for the elementwise part, each a half of the columns of every tile (64 of a row per thread); a warp that
              issues all products; a warp that draws items, writes records and loads; a warp for lse and delta (backward_roles.py)
  tensor      dq: s twice, dp, dq; dk/dv: s, dp, dk, dv. p takes the place of s and ds that of dp, each half in the first columns of
              its own: a warp overwrites nothing but what it has read itself. 512 columns at head_dim 128
  order       dk/dv: dv of a step, s of the next, dk, dp of the next; dq: s of the next, dq, dp of the next. Products run while the
              warpgroups are at work on the other half
  results     leave through the places of the resident block, a warpgroup 64 columns at a time
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from backward_common import clamp_to, diagonal, key_range, row_range, sequence_fields, uncut_keys, uncut_rows
from backward_roles import (BLOCK, BULK, FIELDS, HEAD, HI, LEAST, LO, MAX, MORE, MOST, RECORDS, REST, ROW, ROWS, STATE, VECTOR_ROW, cut_tiles,
                            dkdv_producer, dq_producer, dq_vectors, field, finish, kept, place_of, publish, vectors_of)
from common import BOUND, LOG2_E
from tickets import next_item, opening_item

TILE = tl.constexpr(128)  # streamed rows
PART = tl.constexpr(64)   # columns of a warpgroup
FOLD = tl.constexpr(16)   # a product's step along the summed dimension


@triton.jit
def next_record(item_full, record):
    tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)


@triton.jit
def meet(CTAS: tl.constexpr):
    """At the start of a task other than the default one: the compiler lets its warps arrive at the cluster's first barrier and not wait
    for it, although they arrive at another one when they end."""
    if CTAS > 1:
        tl.inline_asm_elementwise("barrier.cluster.wait.aligned; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def can_fold(scale_log2):
    """Whether lse can be subtracted before the scores are scaled: lse / scale must be a number."""
    return tl.abs(scale_log2) > 7.9e-31


@triton.jit
def signal(bar, CTAS: tl.constexpr):
    """Arrives where the products are issued from."""
    if CTAS > 1:
        tlx.barrier_arrive(bar, 1, remote_cta_rank=0)
    else:
        tlx.barrier_arrive(bar)


@triton.jit
def add(weights, rows, sums, fresh, HEAD_DIM: tl.constexpr, CTAS: tl.constexpr):
    """sums (+)= weights * rows, a half of the 128 rows at a time, as the halves of the weights stand apart. Of a pair each has its share of
    the columns of `rows`."""
    tlx.async_dot(weights[0], tlx.local_slice(rows, [0, 0], [PART, HEAD_DIM // CTAS]), sums, use_acc=fresh == 0, two_ctas=CTAS > 1,
                  force_async=True)
    tlx.async_dot(weights[2], tlx.local_slice(rows, [PART, 0], [PART, HEAD_DIM // CTAS]), sums, use_acc=True, two_ctas=CTAS > 1,
                  force_async=True)


@triton.jit
def store_columns(map, stage, sums, factor, column, head, row, rows, fresh, dtype: tl.constexpr):
    """64 columns of sums (zeros where nothing was added), times factor, through `stage`."""
    if fresh:
        tlx.local_store(stage, tl.zeros([BLOCK, PART], dtype))
    else:
        tlx.local_store(stage, (tlx.local_load(tlx.subslice(sums, column, PART)) * factor).to(dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(map, stage, [BOUND, head, row + rows, BOUND - rows, column])


# ------------------------------------------------------------------------------------------------------------------- dq pass
@triton.jit
def dq_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, z_tiles, x_full, y_full, ring_empty, s_sums,
             dp_sums, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, finished, SLOTS: tl.constexpr, STAGES: tl.constexpr,
             HEAD_DIM: tl.constexpr, BROADCAST: tl.constexpr, CTAS: tl.constexpr):
    """All products. A step's dq is issued with the next one's s and dp around it."""
    record = 0
    place = 0
    blocks = 0  # with keys
    fresh = 1
    next_record(item_full, record)
    state = field(cells, record, STATE)
    while state >= 0:
        lo = field(cells, record, LO)
        hi = field(cells, record, HI)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        slot = record % SLOTS
        if CTAS > 1:
            tlx.barrier_wait(ready[0], record & 1)
        else:
            tlx.barrier_wait(a_full[slot], record // SLOTS & 1)
            tlx.barrier_wait(b_full[slot], record // SLOTS & 1)
        if not BROADCAST:
            fresh = 1
        steps = tl.cdiv(hi - lo, TILE)
        if steps > 0:
            if not BROADCAST:
                tlx.barrier_wait(sums_empty[0], (blocks & 1) ^ 1)
            blocks += 1
        for step in range(0, tl.where(steps > 0, steps + 1, 0)):
            stage = place % STAGES
            if step < steps:
                tlx.barrier_wait(x_full[stage], place // STAGES & 1)
                tlx.async_dot(a_tiles[slot], tlx.local_trans(x_tiles[stage]), s_sums[place % 2], use_acc=False, two_ctas=CTAS > 1,
                              mBarriers=[s_full[place % 2]])
            if step > 0:
                before = place - 1
                tlx.barrier_wait(ds_full[0], before & 1)
                add(ds_tiles, z_tiles[before % STAGES], dq_sums[0], fresh, HEAD_DIM, CTAS)
                fresh = 0
                tlx.tcgen05_commit(ring_empty[before % STAGES], two_ctas=CTAS > 1)
            if step < steps:
                tlx.barrier_wait(y_full[stage], place // STAGES & 1)
                tlx.async_dot(b_tiles[slot], tlx.local_trans(y_tiles[stage]), dp_sums[0], use_acc=False, two_ctas=CTAS > 1, mBarriers=[dp_full[0]])
                place += 1
        if not BROADCAST:
            if steps > 0:
                tlx.tcgen05_commit(sums_full[0], two_ctas=CTAS > 1)
        record += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    if BROADCAST:
        tlx.tcgen05_commit(sums_full[0], two_ctas=CTAS > 1)
    # Nothing may be on its way to a barrier when the program ends.
    tlx.tcgen05_commit(finished[0], two_ctas=CTAS > 1)
    tlx.barrier_wait(finished[0], 0)


@triton.jit
def stand_by(cells, item_full, item_empty):
    """Of a pair the one that issues no products: gives back its records."""
    record = 0
    next_record(item_full, record)
    while field(cells, record, STATE) >= 0:
        tlx.barrier_arrive(item_empty[record % RECORDS])
        record += 1
        next_record(item_full, record)
    tlx.barrier_arrive(item_empty[record % RECORDS])


@triton.jit
def load_block(map, tile, full, head, row, rows, BYTES: tl.constexpr):
    """Up to BLOCK rows that begin at `row`; without any the tile becomes zeros."""
    n = tl.minimum(tl.maximum(rows, 0), BLOCK)
    tlx.barrier_expect_bytes(full, BYTES)
    tlx.async_descriptor_load(map, tile, [BOUND, head, row + n, BOUND - n, 0], full)


@triton.jit
def load_part(map, tile, full, head, row, rows, column):
    """Up to PART rows that begin at `row`, zeros past them, for the pair: the first program's barrier counts the bytes of both."""
    n = tl.minimum(tl.maximum(rows, 0), PART)
    tlx.async_descriptor_load(map, tile, [BOUND, head, row + n, BOUND - n, column], full, two_ctas=True)


@triton.jit
def dq_pairs(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, heads_q, group, left, right, bottom_right, o_rows, kv_rows,
             cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_parts, y_parts, z_parts, x_full, y_full,
             ring_empty, o_tiles, o_full, o_empty, answer, answer_full, answer_empty, KEY_ROWS: tl.constexpr, STAGES: tl.constexpr,
             HEAD_DIM: tl.constexpr, CTAS: tl.constexpr):
    """Draws items, writes records and loads, of a pair: two blocks of query rows of one head that walk the same keys, those that any row of
    the two sees. Behind the last row of a sequence the second block is a sentinel: rows of zeros that see nothing and are not stored."""
    PARTS: tl.constexpr = HEAD_DIM // PART
    rank = tlx.cluster_cta_rank()
    record = 0
    place = 0
    items = tl.load(header + 1) * heads_q
    item, taken = opening_item(items, answer, answer_full, answer_empty, CTAS)
    while item >= 0:
        unit = item // heads_q
        head = item % heads_q
        index = tl.load(backward_units + unit * 2)
        first_key = tl.load(backward_units + unit * 2 + 1)
        q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
        following, taken = next_item(item, taken, items, answer, answer_full, answer_empty, CTAS)
        kv_head = head // group
        shift = diagonal(bottom_right, q_len, kv_len)
        # The unit of key tile t of n takes the pairs of blocks t, t + n, ...; without a tile of its own all of them.
        pair = tl.where(first_key < 0, 0, first_key // KEY_ROWS)
        step = tl.where(first_key < 0, 1, tl.maximum(1, tl.cdiv(kv_len, KEY_ROWS)))
        for top in range(pair * (CTAS * BLOCK), q_end, step * (CTAS * BLOCK)):
            lo, hi = key_range(top, tl.minimum(top + CTAS * BLOCK, q_len), shift, left, right, kv_end)
            hi = tl.maximum(lo, hi)
            bulk, rest = uncut_keys(lo, hi, top, shift, left, right, CTAS * BLOCK, TILE)
            row = tl.minimum(top + rank * BLOCK, q_end)
            rows = tl.minimum(BLOCK, q_end - row)
            least = tl.where(left < 0, -MAX, kept(row + shift - left))
            most = tl.where(right < 0, MAX, kept(row + shift + right))
            publish(cells, item_full, item_empty, record, 0, head, q0 + row, rows, lo, bulk, rest, hi, least, most, head, o0 + row, rows)
            tlx.barrier_wait(resident_empty[0], (record & 1) ^ 1)
            load_block(q_map, a_tiles[0], a_full[0], head, q0 + row, rows, 2 * BLOCK * HEAD_DIM)
            load_block(d_o_map, b_tiles[0], b_full[0], head, o0 + row, rows, 2 * BLOCK * HEAD_DIM)
            tlx.barrier_wait(o_empty[0], (record & 1) ^ 1)
            load_block(o_map, o_tiles[0], o_full[0], head, o0 + row, rows, 2 * BLOCK * HEAD_DIM)
            for index in range(0, tl.cdiv(hi - lo, TILE)):
                key = place_of(index, lo, bulk, rest, hi, TILE)
                stage = place % STAGES
                tlx.barrier_wait(ring_empty[stage], (place // STAGES & 1) ^ 1)
                mine = key + rank * PART
                if rank == 0:
                    tlx.barrier_expect_bytes(x_full[stage], 2 * TILE * HEAD_DIM)
                    tlx.barrier_expect_bytes(y_full[stage], 4 * TILE * HEAD_DIM)
                for c in tl.static_range(PARTS):
                    load_part(k_map, x_parts[stage * PARTS + c], x_full[stage], kv_head, k0 + mine, kv_end - mine, c * PART)
                for c in tl.static_range(PARTS):
                    load_part(v_map, y_parts[stage * PARTS + c], y_full[stage], kv_head, k0 + mine, kv_end - mine, c * PART)
                for c in tl.static_range(TILE // PART):
                    load_part(k_map, z_parts[stage * (TILE // PART) + c], y_full[stage], kv_head, k0 + key + c * PART, kv_end - key - c * PART, rank * PART)
                place += 1
            record += 1
        item = following
    finish(cells, item_full, item_empty, record)


@triton.jit
def dq_weigh(me: tl.constexpr, place, key, s_parts, dp_parts, ds_tiles, s_full, dp_full, ds_full, lse_rows, delta_rows, scale_log2, least,
             most, cut, dtype: tl.constexpr, CTAS: tl.constexpr):
    tlx.barrier_wait(s_full[place % 2], place // 2 & 1)
    s = tlx.local_load(s_parts[place % 2 * 2 + me])
    p = tl.math.exp2(tl.minimum(s * scale_log2 - lse_rows[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
    tlx.barrier_wait(dp_full[0], place & 1)
    ds = p * (tlx.local_load(dp_parts[me]) - delta_rows[:, None])
    if cut:
        jj = me * PART + tl.arange(0, PART)[None, :]
        ii = tl.arange(0, BLOCK)[:, None]
        first = ii + clamp_to(least.to(tl.int64) - key, -1024, 1024)
        last = ii + clamp_to(most.to(tl.int64) - key, -1024, 1024)
        ds = tl.where((jj >= first) & (jj <= last), ds, 0.0)
    tlx.local_store(ds_tiles[2 * me], ds.to(dtype))
    signal(ds_full[0], CTAS)


@triton.jit
def dq_weights(me: tl.constexpr, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full,
               item_empty, a_tiles, b_tiles, a_full, b_full, ready, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
               vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, out_tiles,
               sum_tiles, SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, BROADCAST: tl.constexpr, CTAS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(dq_map)
    record = 0
    place = 0
    blocks = 0
    next_record(item_full, record)
    state = field(cells, record, STATE)
    while state >= 0:
        head = field(cells, record, HEAD)
        row = field(cells, record, ROW)
        rows = field(cells, record, ROWS)
        lo = field(cells, record, LO)
        bulk = field(cells, record, BULK)
        rest = field(cells, record, REST)
        hi = field(cells, record, HI)
        least = field(cells, record, LEAST)
        most = field(cells, record, MOST)
        vector_row = field(cells, record, VECTOR_ROW)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        slot = record % SLOTS
        # delta: each warpgroup takes half of the rows.
        tlx.barrier_wait(b_full[slot], record // SLOTS & 1)
        if CTAS > 1:
            tlx.barrier_wait(a_full[slot], record // SLOTS & 1)
            if me == 0:
                signal(ready[0], CTAS)
        tlx.barrier_wait(o_full[0], record & 1)
        i = me * PART + tl.arange(0, PART)
        sums = tl.sum(tlx.local_load(tlx.local_slice(o_tiles[0], [me * PART, 0], [PART, HEAD_DIM])).to(tl.float32) *
                      tlx.local_load(tlx.local_slice(b_tiles[slot], [me * PART, 0], [PART, HEAD_DIM])).to(tl.float32), 1)
        tlx.barrier_arrive(o_empty[0])
        mine = tlx.local_slice(delta_tiles[slot], [me * PART], [PART])
        tlx.local_store(mine, sums)
        tl.store(delta + head.to(tl.int64) * delta_head + vector_row + i, tlx.local_load(mine), mask=i < rows)
        tlx.barrier_arrive(delta_full[0])
        tlx.barrier_wait(delta_full[0], record & 1)
        delta_rows = tlx.local_load(delta_tiles[slot])
        tlx.barrier_wait(vector_full[record % 2], record // 2 & 1)
        lse_rows = tlx.local_load(lse_tiles[record % 2])
        tlx.barrier_arrive(vector_empty[record % 2])
        if CTAS == 1:
            tlx.barrier_wait(a_full[slot], record // SLOTS & 1)
        for index in tl.range(0, tl.cdiv(hi - lo, TILE)):
            dq_weigh(me, place, place_of(index, lo, bulk, rest, hi, TILE), s_parts, dp_parts, ds_tiles, s_full, dp_full, ds_full, lse_rows,
                     delta_rows, scale_log2, least, most, index < cut_tiles(lo, bulk, rest, hi, TILE), dtype, CTAS)
            place += 1
        if BROADCAST:
            tlx.barrier_arrive(resident_empty[slot])
        else:
            fresh = hi <= lo
            if hi > lo:
                tlx.barrier_wait(sums_full[0], blocks & 1)
            for x in tl.static_range(HEAD_DIM // PART):
                if x == me:
                    store_columns(dq_map, out_tiles[slot * (HEAD_DIM // PART) + x], dq_sums[0], scale, x * PART, head, row,
                                  tl.minimum(rows, BLOCK), fresh, dtype)
            if hi > lo:
                signal(sums_empty[0], CTAS)
                blocks += 1
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(resident_empty[slot])
        record += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    if BROADCAST:
        tlx.barrier_wait(sums_full[0], 0)
        item = tl.program_id(0)
        at = item // heads_q // slices * BLOCK + tl.arange(0, BLOCK)
        base = partial + ((item // heads_q % slices).to(tl.int64) * heads_q + item % heads_q) * broadcast * HEAD_DIM
        for x in tl.static_range(HEAD_DIM // PART):
            if x == me:
                # Through the place of q, or of keys, which nobody reads any more: whole rows leave together.
                if place > 0:
                    tlx.local_store(sum_tiles[0], tlx.local_load(tlx.subslice(dq_sums[0], x * PART, PART)))
                else:
                    tlx.local_store(sum_tiles[0], tl.zeros([BLOCK, PART], tl.float32))
                columns = x * PART + tl.arange(0, PART)
                tl.store(base + at.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], tlx.local_load(sum_tiles[0]), mask=(at < broadcast)[:, None])


@triton.jit
def dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, partial, lse, delta, header, sequences, backward_units, lse_head,
            delta_head, scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
            KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, BROADCAST: tl.constexpr,
            CTAS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    SLOTS: tl.constexpr = 1 if HEAD_DIM > 64 else 2
    STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 3
    a_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    out_tiles = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=a_tiles)
    b_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    x_tiles = tlx.local_alloc((TILE // CTAS, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE // CTAS, HEAD_DIM), dtype, STAGES)
    z_tiles = x_tiles
    if CTAS > 1:
        z_tiles = tlx.local_alloc((TILE, HEAD_DIM // CTAS), dtype, STAGES)
        x_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (HEAD_DIM // PART), reuse=x_tiles)
        y_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (HEAD_DIM // PART), reuse=y_tiles)
        z_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (TILE // PART), reuse=z_tiles)
    o_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, 1)
    sum_tiles_0 = tlx.local_alloc((BLOCK, PART), tl.float32, 1, reuse=a_tiles)
    sum_tiles_1 = tlx.local_alloc((BLOCK, PART), tl.float32, 1, reuse=x_tiles)
    lse_tiles = tlx.local_alloc((BLOCK, ), tl.float32, 2)
    delta_tiles = tlx.local_alloc((BLOCK, ), tl.float32, SLOTS)
    s_sums = tlx.local_alloc((BLOCK, TILE), tl.float32, 2, tlx.storage_kind.tmem)
    s_parts = tlx.local_alloc((BLOCK, PART), tl.float32, 4, tlx.storage_kind.tmem, reuse=s_sums)
    dp_sums = tlx.local_alloc((BLOCK, TILE), tl.float32, 1, tlx.storage_kind.tmem)
    dp_parts = tlx.local_alloc((BLOCK, PART), tl.float32, 2, tlx.storage_kind.tmem, reuse=dp_sums)
    ds_tiles = tlx.local_alloc((BLOCK, PART), dtype, 4, tlx.storage_kind.tmem, reuse=dp_sums)
    dq_sums = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    cells = tlx.local_alloc((1, ), tl.int32, RECORDS * FIELDS)
    item_full = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=4)
    a_full = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=1)
    b_full = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=1)
    resident_empty = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=2)
    x_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    y_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    ring_empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    o_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    o_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    delta_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    vector_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    vector_empty = tlx.alloc_barriers(num_barriers=2, arrive_count=2)
    s_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    dp_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    ds_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2 * CTAS)
    sums_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    sums_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2 * CTAS)
    ready = tlx.alloc_barriers(num_barriers=1, arrive_count=CTAS)
    finished = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    answer = None
    answer_full = None
    if PERSISTENT:
        answer = tlx.local_alloc((2, ), tl.int64, 1)
        answer_full = tlx.alloc_barriers(num_barriers=1)
        answer_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=CTAS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dq_weights(0, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                       a_tiles, b_tiles, a_full, b_full, ready, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
                       vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty,
                       out_tiles, sum_tiles_0, SLOTS, HEAD_DIM, BROADCAST, CTAS)
        with tlx.async_task(num_warps=4, registers=208):
            meet(CTAS)
            dq_weights(1, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                       a_tiles, b_tiles, a_full, b_full, ready, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
                       vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty,
                       out_tiles, sum_tiles_1, SLOTS, HEAD_DIM, BROADCAST, CTAS)
        with tlx.async_task(num_warps=1, registers=88):
            meet(CTAS)
            if CTAS == 1:
                dq_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, z_tiles, x_full, y_full,
                         ring_empty, s_sums, dp_sums, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, finished, SLOTS,
                         STAGES, HEAD_DIM, BROADCAST, CTAS)
            elif tlx.cluster_cta_rank() == 0:
                dq_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, z_tiles, x_full, y_full,
                         ring_empty, s_sums, dp_sums, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, finished, SLOTS,
                         STAGES, HEAD_DIM, BROADCAST, CTAS)
            else:
                stand_by(cells, item_full, item_empty)
        with tlx.async_task(num_warps=1, registers=88):
            meet(CTAS)
            if CTAS > 1:
                dq_pairs(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, heads_q, group, left, right, bottom_right,
                         o_rows, kv_rows, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_parts, y_parts,
                         z_parts, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, answer, answer_full, answer_empty, KEY_ROWS, STAGES,
                         HEAD_DIM, CTAS)
            else:
                dq_producer(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, header, heads_q, group, left, right,
                            bottom_right, o_rows, kv_rows, batch, slices, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                            resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, KEY_ROWS, SLOTS, STAGES, TILE,
                            HEAD_DIM, True, PERSISTENT, BROADCAST, answer, answer_full)
        # A twelfth warp without a task would arrive and never wait.
        with tlx.async_task(num_warps=CTAS, registers=88):
            meet(CTAS)
            dq_vectors(lse, lse_head, cells, item_full, item_empty, lse_tiles, vector_full, vector_empty, TILE)


@triton.jit
def backward_dq_tlx(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, delta, header, sequences, backward_units, lse_head, delta_head,
                    scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows,
                    KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, CTAS: tl.constexpr = 1):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, lse, delta, header, sequences, backward_units, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, 1, KEY_ROWS, HEAD_DIM, PERSISTENT, False, CTAS)


@triton.jit
def backward_dq_broadcast_tlx(q_map, k_map, v_map, o_map, d_o_map, partial, lse, delta, sequences, lse_head, delta_head,
                              scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
                              HEAD_DIM: tl.constexpr):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, q_map, partial, lse, delta, sequences, sequences, sequences, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices, 128, HEAD_DIM, False, True, 1)


# ------------------------------------------------------------------------------------------------------------------- dk/dv pass
@triton.jit
def split(x):
    """x as the sum of three bf16, exact but for what is below 2^-24 of it."""
    high = x.to(tl.bfloat16)
    # An infinity stands alone.
    rest = tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float32), 0.0)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def terms(x):
    """The columns that, times ones, add x to every row of a product. A thread has all columns of its row, in whatever order."""
    high, middle, low = split(x)
    four = tl.join(tl.join(high, middle), tl.join(low, tl.zeros_like(low)))
    eight = tl.join(four, tl.zeros_like(four))
    return tl.reshape(tl.join(eight, tl.zeros_like(eight)), [x.shape[0], FOLD])


@triton.jit
def fold_vectors(lse, lse_head, delta, delta_head, scale_log2, cells, item_full, item_empty, ones, lse_terms, delta_terms, lse_tiles, lse_full,
                 fold_full, vector_empty, STAGES: tl.constexpr, CTAS: tl.constexpr):
    """lse (base 2, +inf where p must be 0) and delta of every streamed tile's rows, as columns that the products subtract (of a pair each
    has its half of the rows); lse of all rows as numbers where the scale is so small that it cannot be divided by."""
    folded = can_fold(scale_log2)
    # Without folding the terms are 0, and p becomes 0 by lse itself.
    divisor = tl.where(folded, scale_log2, float("inf"))
    far = tl.where(folded, tl.where(scale_log2 < 0, float("-inf"), float("inf")), 0.0)
    tlx.local_store(ones[0], tl.full([BLOCK, FOLD], 1.0, tl.bfloat16))
    SHARE: tl.constexpr = TILE // CTAS
    share = 0
    if CTAS > 1:
        share = tlx.cluster_cta_rank() * SHARE
    record = 0
    place = 0
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        lse_base, delta_base, end, lo, bulk, rest, hi = vectors_of(cells, item_empty, record, lse, lse_head, delta, delta_head)
        for index in range(0, tl.cdiv(hi - lo, TILE)):
            row = place_of(index, lo, bulk, rest, hi, TILE)
            stage = place % STAGES
            tlx.barrier_wait(vector_empty[stage], (place // STAGES & 1) ^ 1)
            for part in tl.static_range(SHARE // PART):
                i = row + share + part * PART + tl.arange(0, PART)
                x = tl.load(lse_base + i, mask=i < end, other=float("inf")) * LOG2_E
                y = tl.load(delta_base + i, mask=i < end, other=0.0)
                x = tl.where(tl.abs(x) < float("inf"), x / divisor, tl.where(x == x, far, x))
                tlx.local_store(tlx.local_slice(lse_terms[stage], [part * PART, 0], [PART, FOLD]), terms(-x))
                tlx.local_store(tlx.local_slice(delta_terms[stage], [part * PART, 0], [PART, FOLD]), terms(-y))
            if not folded:
                rows = row + tl.arange(0, TILE)
                z = tl.load(lse_base + rows, mask=rows < end, other=float("inf")) * LOG2_E
                tlx.local_store(lse_tiles[stage], tl.where(z == float("-inf"), float("inf"), z))
            tlx.fence("async_shared")
            tlx.barrier_arrive(lse_full[stage])
            signal(fold_full[stage], CTAS)
            place += 1
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


@triton.jit
def dkdv_pairs(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
               cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_parts, y_parts, zx_parts, zy_parts, x_full,
               y_full, ring_empty, answer, answer_full, answer_empty, KEY_ROWS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr,
               CTAS: tl.constexpr):
    """As dq_pairs: two tiles of keys of one head that walk the same query rows. The unit of an even tile takes the one after it along; behind
    the last key of a sequence the second tile is a sentinel: keys of zeros whose sums are not stored."""
    PARTS: tl.constexpr = HEAD_DIM // PART
    rank = tlx.cluster_cta_rank()
    record = 0
    place = 0
    resident = 0
    items = tl.load(header + 1) * heads_kv
    item, taken = opening_item(items, answer, answer_full, answer_empty, CTAS)
    while item >= 0:
        unit = item // heads_kv
        kv_head = item % heads_kv
        index = tl.load(backward_units + unit * 2)
        first_key = tl.load(backward_units + unit * 2 + 1)
        q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
        following, taken = next_item(item, taken, items, answer, answer_full, answer_empty, CTAS)
        shift = diagonal(bottom_right, q_len, kv_len)
        end = tl.where(first_key < 0, kv_end, tl.where(first_key // KEY_ROWS % CTAS == 0, tl.minimum(kv_end, first_key + KEY_ROWS), 0))
        for top in range(tl.maximum(first_key, 0), end, CTAS * BLOCK):
            lo, hi = row_range(top, tl.minimum(top + CTAS * BLOCK, kv_len), shift, left, right, q_end)
            hi = tl.maximum(lo, hi)
            bulk, rest = uncut_rows(lo, hi, top, shift, left, right, TILE, CTAS * BLOCK)
            key = tl.minimum(top + rank * BLOCK, kv_end)
            keys = tl.minimum(BLOCK, kv_end - key)
            least = tl.where(left < 0, -MAX, kept(shift - key - left))
            most = tl.where(right < 0, MAX, kept(shift - key + right))
            tlx.barrier_wait(resident_empty[0], (resident & 1) ^ 1)
            load_block(k_map, a_tiles[0], a_full[0], kv_head, k0 + key, keys, 2 * BLOCK * HEAD_DIM)
            load_block(v_map, b_tiles[0], b_full[0], kv_head, k0 + key, keys, 2 * BLOCK * HEAD_DIM)
            resident += 1
            for member in range(group):
                head = kv_head * group + member
                publish(cells, item_full, item_empty, record, tl.where(member + 1 < group, MORE, 0), kv_head, k0 + key, keys, lo, bulk, rest, hi,
                        least, most, head, o0, q_end)
                record += 1
                for step in range(0, tl.cdiv(hi - lo, TILE)):
                    row = place_of(step, lo, bulk, rest, hi, TILE)
                    stage = place % STAGES
                    tlx.barrier_wait(ring_empty[stage], (place // STAGES & 1) ^ 1)
                    mine = row + rank * PART
                    if rank == 0:
                        tlx.barrier_expect_bytes(x_full[stage], 2 * TILE * HEAD_DIM)
                        tlx.barrier_expect_bytes(y_full[stage], 6 * TILE * HEAD_DIM)
                    for c in tl.static_range(PARTS):
                        load_part(q_map, x_parts[stage * PARTS + c], x_full[stage], head, q0 + mine, q_end - mine, c * PART)
                    for c in tl.static_range(PARTS):
                        load_part(d_o_map, y_parts[stage * PARTS + c], y_full[stage], head, o0 + mine, q_end - mine, c * PART)
                    for c in tl.static_range(TILE // PART):
                        load_part(d_o_map, zy_parts[stage * (TILE // PART) + c], y_full[stage], head, o0 + row + c * PART, q_end - row - c * PART, rank * PART)
                    for c in tl.static_range(TILE // PART):
                        load_part(q_map, zx_parts[stage * (TILE // PART) + c], y_full[stage], head, q0 + row + c * PART, q_end - row - c * PART, rank * PART)
                    place += 1
        item = following
    finish(cells, item_full, item_empty, record)


@triton.jit
def dkdv_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, zx_tiles, zy_tiles, x_full, y_full, ring_empty, ones,
               lse_terms, delta_terms, fold_full,
               s_sums, p_tiles, dp_sums, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full, ds_full, sums_full, sums_empty, finished,
               SLOTS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr, CTAS: tl.constexpr):
    """All products of a tile's segments: dv of a step, s of the next, dk, dp of the next."""
    record = 0
    place = 0
    resident = 0
    worked = 0  # tiles with rows
    next_record(item_full, record)
    state = field(cells, record, STATE)
    while state >= 0:
        slot = resident % SLOTS
        if CTAS > 1:
            tlx.barrier_wait(ready[0], resident & 1)
        else:
            tlx.barrier_wait(a_full[slot], resident // SLOTS & 1)
            tlx.barrier_wait(b_full[slot], resident // SLOTS & 1)
        begin = place
        more = state + 0
        while more >= 0:
            steps = tl.cdiv(field(cells, record, HI) - field(cells, record, LO), TILE)
            more = -1 + (field(cells, record, STATE) & MORE)
            tlx.barrier_arrive(item_empty[record % RECORDS])
            for step in range(0, steps):
                stage = place % STAGES
                before = place - 1
                if place > begin:
                    if before == begin:
                        tlx.barrier_wait(sums_empty[0], (worked & 1) ^ 1)
                    tlx.barrier_wait(p_full[0], before & 1)
                    add(p_tiles, zy_tiles[before % STAGES], dv_sums[0], (before == begin).to(tl.int32), HEAD_DIM, CTAS)
                tlx.barrier_wait(x_full[stage], place // STAGES & 1)
                tlx.async_dot(a_tiles[slot], tlx.local_trans(x_tiles[stage]), s_sums[0], use_acc=False, two_ctas=CTAS > 1, force_async=True)
                tlx.barrier_wait(fold_full[stage], place // STAGES & 1)
                tlx.async_dot(ones[0], tlx.local_trans(lse_terms[stage]), s_sums[0], use_acc=True, two_ctas=CTAS > 1, mBarriers=[s_full[0]])
                if place > begin:
                    tlx.barrier_wait(ds_full[0], before & 1)
                    add(ds_tiles, zx_tiles[before % STAGES], dk_sums[0], (before == begin).to(tl.int32), HEAD_DIM, CTAS)
                    tlx.tcgen05_commit(ring_empty[before % STAGES], two_ctas=CTAS > 1)
                tlx.barrier_wait(y_full[stage], place // STAGES & 1)
                tlx.async_dot(b_tiles[slot], tlx.local_trans(y_tiles[stage]), dp_sums[0], use_acc=False, two_ctas=CTAS > 1, force_async=True)
                tlx.async_dot(ones[0], tlx.local_trans(delta_terms[stage]), dp_sums[0], use_acc=True, two_ctas=CTAS > 1,
                              mBarriers=[dp_full[0]])
                place += 1
            record += 1
            if more >= 0:
                next_record(item_full, record)
        if place > begin:
            before = place - 1
            if before == begin:
                tlx.barrier_wait(sums_empty[0], (worked & 1) ^ 1)
            tlx.barrier_wait(p_full[0], before & 1)
            add(p_tiles, zy_tiles[before % STAGES], dv_sums[0], (before == begin).to(tl.int32), HEAD_DIM, CTAS)
            tlx.barrier_wait(ds_full[0], before & 1)
            add(ds_tiles, zx_tiles[before % STAGES], dk_sums[0], (before == begin).to(tl.int32), HEAD_DIM, CTAS)
            tlx.tcgen05_commit(ring_empty[before % STAGES], two_ctas=CTAS > 1)
            tlx.tcgen05_commit(sums_full[0], two_ctas=CTAS > 1)
            worked += 1
        resident += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    # Nothing may be on its way to a barrier when the program ends.
    tlx.tcgen05_commit(finished[0], two_ctas=CTAS > 1)
    tlx.barrier_wait(finished[0], 0)


@triton.jit
def select(me: tl.constexpr, row, cells, record, x):
    """x where a diagonal leaves it, else 0."""
    jj = tl.arange(0, BLOCK)[:, None]
    ii = me * PART + tl.arange(0, PART)[None, :]
    first = jj - clamp_to(field(cells, record, MOST).to(tl.int64) + row, -1024, 1024)
    last = jj - clamp_to(field(cells, record, LEAST).to(tl.int64) + row, -1024, 1024)
    return tl.where((ii >= first) & (ii <= last), x, 0.0)


@triton.jit
def dkdv_weigh(me: tl.constexpr, place, index, s_parts, p_tiles, dp_parts, ds_tiles, s_full, p_full, dp_full, ds_full, lse_tiles,
               lse_full, vector_empty, cells, record, scale_log2, dtype: tl.constexpr, STAGES: tl.constexpr, CTAS: tl.constexpr):
    stage = place % STAGES
    tlx.barrier_wait(s_full[0], place & 1)
    s = tlx.local_load(s_parts[me]) * scale_log2
    if not can_fold(scale_log2):
        tlx.barrier_wait(lse_full[stage], place // STAGES & 1)
        s -= tlx.local_load(tlx.local_slice(lse_tiles[stage], [me * PART], [PART]))[None, :]
    p = tl.math.exp2(tl.minimum(s, 0.0, propagate_nan=tl.PropagateNan.ALL))
    lo = field(cells, record, LO)
    bulk = field(cells, record, BULK)
    rest = field(cells, record, REST)
    hi = field(cells, record, HI)
    cut = index < cut_tiles(lo, bulk, rest, hi, TILE)
    row = place_of(index, lo, bulk, rest, hi, TILE)
    if cut:
        p = select(me, row, cells, record, p)
    tlx.local_store(p_tiles[2 * me], p.to(dtype))
    signal(p_full[0], CTAS)
    tlx.barrier_wait(dp_full[0], place & 1)
    ds = p * tlx.local_load(dp_parts[me])
    if cut:  # where p is 0 the other factor need not be finite
        ds = select(me, row, cells, record, ds)
    tlx.local_store(ds_tiles[2 * me], ds.to(dtype))
    signal(ds_full[0], CTAS)
    tlx.barrier_arrive(vector_empty[stage])


@triton.jit
def dkdv_weights(me: tl.constexpr, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, ready, resident_empty,
                 lse_tiles, lse_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full,
                 ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr,
                 CTAS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(dk_map)
    CHUNKS: tl.constexpr = HEAD_DIM // PART
    record = 0
    place = 0
    resident = 0
    worked = 0
    next_record(item_full, record)
    state = field(cells, record, STATE)
    while state >= 0:
        slot = resident % SLOTS
        if CTAS > 1:
            tlx.barrier_wait(a_full[slot], resident // SLOTS & 1)
            tlx.barrier_wait(b_full[slot], resident // SLOTS & 1)
            if me == 0:
                signal(ready[0], CTAS)
        begin = place
        more = state + 0
        while more >= 0:
            for index in tl.range(0, tl.cdiv(field(cells, record, HI) - field(cells, record, LO), TILE)):
                dkdv_weigh(me, place, index, s_parts, p_tiles, dp_parts, ds_tiles, s_full, p_full, dp_full, ds_full, lse_tiles, lse_full,
                           vector_empty, cells, record, scale_log2, dtype, STAGES, CTAS)
                place += 1
            # The record is kept to the end of its last segment: the results are stored by it.
            more = -1 + (field(cells, record, STATE) & MORE)
            if more >= 0:
                tlx.barrier_arrive(item_empty[record % RECORDS])
                record += 1
                next_record(item_full, record)
        head = field(cells, record, HEAD)
        first = field(cells, record, ROW)
        rows = field(cells, record, ROWS)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        if CTAS == 1:
            tlx.barrier_wait(a_full[slot], resident // SLOTS & 1)
            tlx.barrier_wait(b_full[slot], resident // SLOTS & 1)
        fresh = place == begin
        if place > begin:
            tlx.barrier_wait(sums_full[0], worked & 1)
        for x in tl.static_range(CHUNKS):
            if x % 2 == me:
                store_columns(dv_map, dv_out[slot * CHUNKS + x], dv_sums[0], 1.0, x * PART, head, first, rows, fresh, dtype)
            else:
                store_columns(dk_map, dk_out[slot * CHUNKS + x], dk_sums[0], scale, x * PART, head, first, rows, fresh, dtype)
        if place > begin:
            signal(sums_empty[0], CTAS)
            worked += 1
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(resident_empty[slot])
        resident += 1
        record += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


@triton.jit
def dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter, kv_table, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch,
              KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, INDEXED: tl.constexpr, CTAS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    SLOTS: tl.constexpr = 1 if HEAD_DIM > 64 else 2
    STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 3
    a_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    b_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    dk_out = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=a_tiles)
    dv_out = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=b_tiles)
    x_tiles = tlx.local_alloc((TILE // CTAS, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE // CTAS, HEAD_DIM), dtype, STAGES)
    zx_tiles = x_tiles
    zy_tiles = y_tiles
    if CTAS > 1:
        zx_tiles = tlx.local_alloc((TILE, HEAD_DIM // CTAS), dtype, STAGES)
        zy_tiles = tlx.local_alloc((TILE, HEAD_DIM // CTAS), dtype, STAGES)
        x_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (HEAD_DIM // PART), reuse=x_tiles)
        y_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (HEAD_DIM // PART), reuse=y_tiles)
        zx_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (TILE // PART), reuse=zx_tiles)
        zy_parts = tlx.local_alloc((PART, PART), dtype, STAGES * (TILE // PART), reuse=zy_tiles)
    lse_tiles = tlx.local_alloc((TILE, ), tl.float32, STAGES)
    ones = tlx.local_alloc((BLOCK, FOLD), tl.bfloat16, 1)
    lse_terms = tlx.local_alloc((TILE // CTAS, FOLD), tl.bfloat16, STAGES)
    delta_terms = tlx.local_alloc((TILE // CTAS, FOLD), tl.bfloat16, STAGES)
    s_sums = tlx.local_alloc((BLOCK, TILE), tl.float32, 1, tlx.storage_kind.tmem)
    s_parts = tlx.local_alloc((BLOCK, PART), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_sums)
    p_tiles = tlx.local_alloc((BLOCK, PART), dtype, 4, tlx.storage_kind.tmem, reuse=s_sums)
    dp_sums = tlx.local_alloc((BLOCK, TILE), tl.float32, 1, tlx.storage_kind.tmem)
    dp_parts = tlx.local_alloc((BLOCK, PART), tl.float32, 2, tlx.storage_kind.tmem, reuse=dp_sums)
    ds_tiles = tlx.local_alloc((BLOCK, PART), dtype, 4, tlx.storage_kind.tmem, reuse=dp_sums)
    dk_sums = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dv_sums = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    cells = tlx.local_alloc((1, ), tl.int32, RECORDS * FIELDS)
    item_full = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=4)
    a_full = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=1)
    b_full = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=1)
    resident_empty = tlx.alloc_barriers(num_barriers=SLOTS, arrive_count=2)
    x_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    y_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    ring_empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    lse_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    fold_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=CTAS)
    vector_empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    s_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    p_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2 * CTAS)
    dp_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    ds_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2 * CTAS)
    sums_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    sums_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2 * CTAS)
    ready = tlx.alloc_barriers(num_barriers=1, arrive_count=CTAS)
    finished = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    answer = None
    answer_full = None
    if PERSISTENT and not INDEXED:
        answer = tlx.local_alloc((2, ), tl.int64, 1)
        answer_full = tlx.alloc_barriers(num_barriers=1)
        answer_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=CTAS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dkdv_weights(0, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, ready, resident_empty,
                         lse_tiles, lse_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full,
                         dp_full, ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS, STAGES, HEAD_DIM, CTAS)
        with tlx.async_task(num_warps=4, registers=208):
            meet(CTAS)
            dkdv_weights(1, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, ready, resident_empty,
                         lse_tiles, lse_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full,
                         dp_full, ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS, STAGES, HEAD_DIM, CTAS)
        with tlx.async_task(num_warps=1, registers=88):
            meet(CTAS)
            if CTAS == 1:
                dkdv_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, zx_tiles, zy_tiles, x_full,
                           y_full, ring_empty, ones, lse_terms, delta_terms, fold_full, s_sums, p_tiles, dp_sums, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full, ds_full,
                           sums_full, sums_empty, finished, SLOTS, STAGES, HEAD_DIM, CTAS)
            elif tlx.cluster_cta_rank() == 0:
                dkdv_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, ready, x_tiles, y_tiles, zx_tiles, zy_tiles, x_full,
                           y_full, ring_empty, ones, lse_terms, delta_terms, fold_full, s_sums, p_tiles, dp_sums, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full, ds_full,
                           sums_full, sums_empty, finished, SLOTS, STAGES, HEAD_DIM, CTAS)
            else:
                stand_by(cells, item_full, item_empty)
        with tlx.async_task(num_warps=1, registers=88):
            meet(CTAS)
            if CTAS > 1:
                dkdv_pairs(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, heads_kv, group, left, right, bottom_right, o_rows,
                           kv_rows, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_parts, y_parts, zx_parts,
                           zy_parts, x_full, y_full, ring_empty, answer, answer_full, answer_empty, KEY_ROWS, STAGES, HEAD_DIM, CTAS)
            else:
                dkdv_producer(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, counter, kv_table, heads_kv, group, left, right,
                              bottom_right, o_rows, kv_rows, batch, kv_batch, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                              resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, KEY_ROWS, SLOTS, STAGES, TILE, HEAD_DIM, PERSISTENT,
                              INDEXED, answer, answer_full)
        # Of a pair a twelfth warp without a task would arrive and never wait.
        with tlx.async_task(num_warps=2, registers=88):
            meet(CTAS)
            fold_vectors(lse, lse_head, delta, delta_head, scale_log2, cells, item_full, item_empty, ones, lse_terms, delta_terms, lse_tiles,
                         lse_full, fold_full, vector_empty, STAGES, CTAS)


@triton.jit
def backward_dkdv_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, lse_head, delta_head,
                      scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
                      KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, CTAS: tl.constexpr = 1):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, header, sequences, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, KEY_ROWS, HEAD_DIM, PERSISTENT,
              False, CTAS)


@triton.jit
def backward_dkdv_index_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, counter, kv_table,
                            lse_head, delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch,
                            kv_batch, KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, sequences, sequences, counter + 1, kv_table, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch, KEY_ROWS, HEAD_DIM,
              PERSISTENT, True, 1)
