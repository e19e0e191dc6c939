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

from backward_common import clamp_to
from backward_roles import (BLOCK, BULK, FIELDS, HEAD, HI, LEAST, LO, MORE, MOST, RECORDS, REST, ROW, ROWS, STATE, VECTOR_ROW, cut_tiles,
                            dkdv_producer, dkdv_vectors, dq_producer, dq_vectors, field, place_of)
from common import BOUND

TILE = tl.constexpr(128)  # streamed rows
PART = tl.constexpr(64)   # columns of a warpgroup


@triton.jit
def next_record(item_full, record):
    tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)


@triton.jit
def add(weights, rows, sums, fresh, HEAD_DIM: tl.constexpr):
    """sums (+)= weights * rows, a half of the 128 rows at a time, as the halves of the weights stand apart."""
    tlx.async_dot(weights[0], tlx.local_slice(rows, [0, 0], [PART, HEAD_DIM]), sums, use_acc=fresh == 0, force_async=True)
    tlx.async_dot(weights[2], tlx.local_slice(rows, [PART, 0], [PART, HEAD_DIM]), sums, use_acc=True, force_async=True)


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
def dq_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, x_tiles, y_tiles, x_full, y_full, ring_empty, s_sums, dp_sums,
             ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, finished, SLOTS: tl.constexpr, STAGES: tl.constexpr,
             HEAD_DIM: tl.constexpr, BROADCAST: tl.constexpr):
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
                tlx.async_dot(a_tiles[slot], tlx.local_trans(x_tiles[stage]), s_sums[place % 2], use_acc=False, mBarriers=[s_full[place % 2]])
            if step > 0:
                before = place - 1
                tlx.barrier_wait(ds_full[0], before & 1)
                add(ds_tiles, x_tiles[before % STAGES], dq_sums[0], fresh, HEAD_DIM)
                fresh = 0
                tlx.tcgen05_commit(ring_empty[before % STAGES])
            if step < steps:
                tlx.barrier_wait(y_full[stage], place // STAGES & 1)
                tlx.async_dot(b_tiles[slot], tlx.local_trans(y_tiles[stage]), dp_sums[0], use_acc=False, mBarriers=[dp_full[0]])
                place += 1
        if not BROADCAST:
            if steps > 0:
                tlx.tcgen05_commit(sums_full[0])
        record += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    if BROADCAST:
        tlx.tcgen05_commit(sums_full[0])
    # Nothing may be on its way to a barrier when the program ends.
    tlx.tcgen05_commit(finished[0])
    tlx.barrier_wait(finished[0], 0)


@triton.jit
def dq_weigh(me: tl.constexpr, place, key, s_parts, dp_parts, ds_tiles, s_full, dp_full, ds_full, lse_rows, delta_rows, scale_log2, least,
             most, cut, dtype: tl.constexpr):
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
    tlx.barrier_arrive(ds_full[0])


@triton.jit
def dq_weights(me: tl.constexpr, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full,
               item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
               vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, out_tiles,
               sum_tiles, SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, BROADCAST: tl.constexpr):
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
        tlx.barrier_wait(a_full[slot], record // SLOTS & 1)
        for index in tl.range(0, tl.cdiv(hi - lo, TILE)):
            dq_weigh(me, place, place_of(index, lo, bulk, rest, hi, TILE), s_parts, dp_parts, ds_tiles, s_full, dp_full, ds_full, lse_rows,
                     delta_rows, scale_log2, least, most, index < cut_tiles(lo, bulk, rest, hi, TILE), dtype)
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
                tlx.barrier_arrive(sums_empty[0])
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
def dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, partial, lse, delta, header, sequences, backward_units, counter, lse_head,
            delta_head, scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
            KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, BROADCAST: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    SLOTS: tl.constexpr = 1 if HEAD_DIM > 64 else 2
    STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 3
    a_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    out_tiles = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=a_tiles)
    b_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    x_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
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
    ds_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    sums_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    sums_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    finished = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dq_weights(0, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                       a_tiles, b_tiles, a_full, b_full, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
                       vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty,
                       out_tiles, sum_tiles_0, SLOTS, HEAD_DIM, BROADCAST)
        with tlx.async_task(num_warps=4, registers=208):
            dq_weights(1, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                       a_tiles, b_tiles, a_full, b_full, resident_empty, o_tiles, o_full, o_empty, lse_tiles, delta_tiles, delta_full,
                       vector_full, vector_empty, s_parts, dp_parts, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty,
                       out_tiles, sum_tiles_1, SLOTS, HEAD_DIM, BROADCAST)
        with tlx.async_task(num_warps=1, registers=88):
            dq_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, x_tiles, y_tiles, x_full, y_full, ring_empty, s_sums,
                     dp_sums, ds_tiles, dq_sums, s_full, dp_full, ds_full, sums_full, sums_empty, finished, SLOTS, STAGES, HEAD_DIM, BROADCAST)
        with tlx.async_task(num_warps=1, registers=88):
            dq_producer(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, counter, heads_q, group, left, right,
                        bottom_right, o_rows, kv_rows, batch, slices, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                        resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, KEY_ROWS, SLOTS, STAGES, TILE,
                        HEAD_DIM, True, PERSISTENT, BROADCAST)
        with tlx.async_task(num_warps=1, registers=88):
            dq_vectors(lse, lse_head, cells, item_full, item_empty, lse_tiles, vector_full, vector_empty, TILE)


@triton.jit
def backward_dq_tlx(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
                    scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows,
                    KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, 1, KEY_ROWS, HEAD_DIM, PERSISTENT, False)


@triton.jit
def backward_dq_broadcast_tlx(q_map, k_map, v_map, o_map, d_o_map, partial, lse, delta, sequences, lse_head, delta_head,
                              scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
                              HEAD_DIM: tl.constexpr):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, q_map, partial, lse, delta, sequences, sequences, sequences, sequences, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices, 128, HEAD_DIM, False, True)


# ------------------------------------------------------------------------------------------------------------------- dk/dv pass
@triton.jit
def dkdv_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, x_tiles, y_tiles, x_full, y_full, ring_empty, s_sums, p_tiles,
               dp_sums, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full, ds_full, sums_full, sums_empty, finished,
               SLOTS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """All products of a tile's segments: dv of a step, s of the next, dk, dp of the next."""
    record = 0
    place = 0
    resident = 0
    worked = 0  # tiles with rows
    next_record(item_full, record)
    state = field(cells, record, STATE)
    while state >= 0:
        slot = resident % SLOTS
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
                    add(p_tiles, y_tiles[before % STAGES], dv_sums[0], (before == begin).to(tl.int32), HEAD_DIM)
                tlx.barrier_wait(x_full[stage], place // STAGES & 1)
                tlx.async_dot(a_tiles[slot], tlx.local_trans(x_tiles[stage]), s_sums[0], use_acc=False, mBarriers=[s_full[0]])
                if place > begin:
                    tlx.barrier_wait(ds_full[0], before & 1)
                    add(ds_tiles, x_tiles[before % STAGES], dk_sums[0], (before == begin).to(tl.int32), HEAD_DIM)
                    tlx.tcgen05_commit(ring_empty[before % STAGES])
                tlx.barrier_wait(y_full[stage], place // STAGES & 1)
                tlx.async_dot(b_tiles[slot], tlx.local_trans(y_tiles[stage]), dp_sums[0], use_acc=False, mBarriers=[dp_full[0]])
                place += 1
            record += 1
            if more >= 0:
                next_record(item_full, record)
        if place > begin:
            before = place - 1
            if before == begin:
                tlx.barrier_wait(sums_empty[0], (worked & 1) ^ 1)
            tlx.barrier_wait(p_full[0], before & 1)
            add(p_tiles, y_tiles[before % STAGES], dv_sums[0], (before == begin).to(tl.int32), HEAD_DIM)
            tlx.barrier_wait(ds_full[0], before & 1)
            add(ds_tiles, x_tiles[before % STAGES], dk_sums[0], (before == begin).to(tl.int32), HEAD_DIM)
            tlx.tcgen05_commit(ring_empty[before % STAGES])
            tlx.tcgen05_commit(sums_full[0])
            worked += 1
        resident += 1
        next_record(item_full, record)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    # Nothing may be on its way to a barrier when the program ends.
    tlx.tcgen05_commit(finished[0])
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
def dkdv_weigh(me: tl.constexpr, place, index, s_parts, p_tiles, dp_parts, ds_tiles, s_full, p_full, dp_full, ds_full, lse_tiles, delta_tiles,
               vector_full, vector_empty, cells, record, scale_log2, dtype: tl.constexpr, STAGES: tl.constexpr):
    stage = place % STAGES
    tlx.barrier_wait(vector_full[stage], place // STAGES & 1)
    tlx.barrier_wait(s_full[0], place & 1)
    lse_rows = tlx.local_load(tlx.local_slice(lse_tiles[stage], [me * PART], [PART]))
    s = tlx.local_load(s_parts[me])
    p = tl.math.exp2(tl.minimum(s * scale_log2 - lse_rows[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
    lo = field(cells, record, LO)
    bulk = field(cells, record, BULK)
    rest = field(cells, record, REST)
    hi = field(cells, record, HI)
    cut = index < cut_tiles(lo, bulk, rest, hi, TILE)
    row = place_of(index, lo, bulk, rest, hi, TILE)
    if cut:
        p = select(me, row, cells, record, p)
    tlx.local_store(p_tiles[2 * me], p.to(dtype))
    tlx.barrier_arrive(p_full[0])
    tlx.barrier_wait(dp_full[0], place & 1)
    dp = tlx.local_load(dp_parts[me])
    ds = p * (dp - tlx.local_load(tlx.local_slice(delta_tiles[stage], [me * PART], [PART]))[None, :])
    if cut:  # where p is 0 the other factor need not be finite
        ds = select(me, row, cells, record, ds)
    tlx.local_store(ds_tiles[2 * me], ds.to(dtype))
    tlx.barrier_arrive(ds_full[0])
    tlx.barrier_arrive(vector_empty[stage])


@triton.jit
def dkdv_weights(me: tl.constexpr, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, resident_empty, lse_tiles,
                 delta_tiles, vector_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full,
                 ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr):
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
        begin = place
        more = state + 0
        while more >= 0:
            for index in tl.range(0, tl.cdiv(field(cells, record, HI) - field(cells, record, LO), TILE)):
                dkdv_weigh(me, place, index, s_parts, p_tiles, dp_parts, ds_tiles, s_full, p_full, dp_full, ds_full, lse_tiles, delta_tiles,
                           vector_full, vector_empty, cells, record, scale_log2, dtype, STAGES)
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
            tlx.barrier_arrive(sums_empty[0])
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
              KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, INDEXED: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    SLOTS: tl.constexpr = 1 if HEAD_DIM > 64 else 2
    STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 3
    a_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    b_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, SLOTS)
    dk_out = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=a_tiles)
    dv_out = tlx.local_alloc((BLOCK, PART), dtype, SLOTS * (HEAD_DIM // PART), reuse=b_tiles)
    x_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    lse_tiles = tlx.local_alloc((TILE, ), tl.float32, STAGES)
    delta_tiles = tlx.local_alloc((TILE, ), tl.float32, STAGES)
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
    vector_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    vector_empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    s_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    p_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    dp_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    ds_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    sums_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    sums_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    finished = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dkdv_weights(0, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, resident_empty, lse_tiles,
                         delta_tiles, vector_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full,
                         dp_full, ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=4, registers=208):
            dkdv_weights(1, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_full, b_full, resident_empty, lse_tiles,
                         delta_tiles, vector_full, vector_empty, s_parts, p_tiles, dp_parts, ds_tiles, dk_sums, dv_sums, s_full, p_full,
                         dp_full, ds_full, sums_full, sums_empty, dk_out, dv_out, SLOTS, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=88):
            dkdv_issue(cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, x_tiles, y_tiles, x_full, y_full, ring_empty, s_sums,
                       p_tiles, dp_sums, ds_tiles, dk_sums, dv_sums, s_full, p_full, dp_full, ds_full, sums_full, sums_empty, finished,
                       SLOTS, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=88):
            dkdv_producer(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, counter, kv_table, heads_kv, group, left, right,
                          bottom_right, o_rows, kv_rows, batch, kv_batch, 0, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                          resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, KEY_ROWS, SLOTS, STAGES, TILE, HEAD_DIM, PERSISTENT,
                          INDEXED, False)
        with tlx.async_task(num_warps=1, registers=88):
            dkdv_vectors(lse, lse_head, delta, delta_head, cells, item_full, item_empty, lse_tiles, delta_tiles, vector_full, vector_empty,
                         STAGES, TILE)


@triton.jit
def backward_dkdv_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
                      scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
                      KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter + 1, sequences, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, KEY_ROWS, HEAD_DIM, PERSISTENT,
              False)


@triton.jit
def backward_dkdv_index_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, counter, kv_table,
                            lse_head, delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch,
                            kv_batch, KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, sequences, sequences, counter + 1, kv_table, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch, KEY_ROWS, HEAD_DIM,
              PERSISTENT, True)
