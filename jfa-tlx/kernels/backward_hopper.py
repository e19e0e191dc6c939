"""Backward for Hopper with warp roles (TLX): the bodies of generations 3 and 4.

Both passes have one shape. A block of 128 rows stays ("resident": q and do in the dq pass, k and v in the dk/dv pass), tiles of 64
rows pass by ("streamed": k and v, or q and do), and what is summed stays in registers.

  dq pass     s = q k^T, dp = do v^T, dq += ds k         64 query rows per consumer; ds never leaves the registers
  dk/dv pass  s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q      64 keys per consumer; p^T and ds^T never leave the registers
  roles       two consumer warpgroups, independent of each other; a warp that draws items, writes records and loads; a warp that
              fetches lse and delta (backward_roles.py)
  buffers     resident: 2 blocks (results leave through them); streamed: a ring of STAGES pairs; o passes through it, a half in
              either place, before the keys of its block: the consumers take delta from it
  barriers    item_full/item_empty: records; a_full, b_full per resident half, resident_empty; x_full, y_full, ring_empty per pair;
              vector_full/vector_empty: lse and delta
  bounds      tensor maps with a movable row bound: rows past a sequence's end arrive as zeros and are dropped by a store. Selection
              only in tiles that a diagonal cuts
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from backward_common import clamp_to
from backward_roles import (BULK, FIELDS, HEAD, HI, LEAST, LO, MORE, MOST, RECORDS, REST, ROW, ROWS, STATE, VECTOR_ROW, cut_tiles,
                            dkdv_producer, dkdv_vectors, dq_producer, dq_vectors, field, place_of, release)
from common import BOUND

HALF = tl.constexpr(64)  # resident rows of a consumer
TILE = tl.constexpr(64)  # streamed rows


@triton.jit
def uniform(x):
    """x, the same in all lanes, known as such to the assembler, and computed anew wherever this stands: descriptors of the products that
    depend on it come from the uniform datapath and are not kept in registers."""
    return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def anew(x):
    """x, computed where this stands: a loop's invariants in the shape of a tile would fill the registers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def dq_step(acc, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, place, lse_rows, delta_rows, scale_log2, least, most, key,
            above, dtype: tl.constexpr, STAGES: tl.constexpr, CUT: tl.constexpr):
    stage = place % STAGES
    phase = place // STAGES & 1
    # All waits before the products: a loop between them would make the assembler finish one before the next.
    tlx.barrier_wait(x_full[stage], phase)
    tlx.barrier_wait(y_full[stage], phase)
    mine = uniform(mine)
    s = tlx.async_dot(a_tiles[mine], tlx.local_trans(x_tiles[stage]))
    dp = tlx.async_dot(b_tiles[mine], tlx.local_trans(y_tiles[stage]))
    s = tlx.async_dot_wait(1, s)
    p = tl.math.exp2(tl.minimum(s * scale_log2 - lse_rows[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
    dp = tlx.async_dot_wait(0, dp)
    ds = p * (dp - delta_rows[:, None])
    if CUT:
        jj = tl.arange(0, TILE)[None, :] + uniform(key * 0)
        ii = above + tl.arange(0, HALF)[:, None]
        first = ii + clamp_to(least.to(tl.int64) - key, -1024, 1024)
        last = ii + clamp_to(most.to(tl.int64) - key, -1024, 1024)
        ds = tl.where((jj >= first) & (jj <= last), ds, 0.0)
    acc = tlx.async_dot(ds.to(dtype), x_tiles[stage], acc)
    acc = tlx.async_dot_wait(0, acc)
    release(ring_empty[stage])
    return acc


@triton.jit
def walk(x_full, y_full, ring_empty, begin, end, STAGES: tl.constexpr):
    """Passes over tiles in which this consumer has nothing to do."""
    for place in tl.range(begin, end):
        tlx.barrier_wait(x_full[place % STAGES], place // STAGES & 1)
        tlx.barrier_wait(y_full[place % STAGES], place // STAGES & 1)
        release(ring_empty[place % STAGES])


@triton.jit
def dq_consumer(me: tl.constexpr, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices,
                cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty,
                lse_tiles, delta_tiles, sum_tiles, vector_full, vector_empty, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr, BROADCAST: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(dq_map)
    record = 0
    place = 0
    total = tl.zeros((HALF, HEAD_DIM), tl.float32)  # of a broadcast query
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        head = field(cells, record, HEAD)
        row = field(cells, record, ROW)
        rows = field(cells, record, ROWS) - me * HALF
        lo = field(cells, record, LO)
        bulk = field(cells, record, BULK)
        rest = field(cells, record, REST)
        hi = field(cells, record, HI)
        least = field(cells, record, LEAST)
        most = field(cells, record, MOST)
        vector_row = field(cells, record, VECTOR_ROW)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        slot = record % 2
        mine = me * 2 + slot
        stage = place % STAGES
        phase = record // 2 & 1
        end = place + 1 + tl.cdiv(hi - lo, TILE)
        if rows > 0:
            # delta of these rows; their o stands where keys (first half) or values (second half) stand later.
            tlx.barrier_wait(b_full[mine], phase)
            # Both, though one is read: a barrier that is not waited for in every use may be a step behind when it is.
            tlx.barrier_wait(x_full[stage], place // STAGES & 1)
            tlx.barrier_wait(y_full[stage], place // STAGES & 1)
            if me == 0:
                o_tile = tlx.local_load(x_tiles[stage])
            else:
                o_tile = tlx.local_load(y_tiles[stage])
            sums = tl.sum(o_tile.to(tl.float32) * tlx.local_load(b_tiles[mine]).to(tl.float32), 1)
            release(ring_empty[stage])
            # Through shared memory: in this layout it would draw every score into it.
            tlx.local_store(delta_tiles[me], sums)
            i = tl.arange(0, HALF)
            tl.store(delta + head.to(tl.int64) * delta_head + (vector_row + me * HALF) + i, tlx.local_load(delta_tiles[me]), mask=i < rows)
            delta_rows = tlx.local_load(delta_tiles[me])
            tlx.barrier_wait(vector_full[slot], phase)
            lse_rows = tlx.local_load(lse_tiles[mine])
            release(vector_empty[slot])
            tlx.barrier_wait(a_full[mine], phase)
            place += 1
            if BROADCAST:
                acc = total
            else:
                acc = tl.zeros((HALF, HEAD_DIM), tl.float32)
            cut = cut_tiles(lo, bulk, rest, hi, TILE)
            for index in tl.range(0, cut):
                acc = dq_step(acc, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, place, lse_rows, delta_rows,
                              scale_log2, least, most, place_of(index, lo, bulk, rest, hi, TILE), me * HALF, dtype, STAGES, True)
                place += 1
            for index in tl.range(cut, tl.cdiv(hi - lo, TILE)):
                acc = dq_step(acc, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, place, lse_rows, delta_rows,
                              scale_log2, least, most, 0, me * HALF, dtype, STAGES, False)
                place += 1
            if BROADCAST:
                total = acc
            else:
                # dq leaves through the place of its q, which nobody reads any more.
                tlx.local_store(a_tiles[mine], (acc * scale).to(dtype))
                tlx.fence("async_shared")
                n = tl.minimum(rows, HALF)
                tlx.async_descriptor_store(dq_map, a_tiles[mine], [BOUND, head, row + me * HALF + n, BOUND - n, 0])
                tlx.async_descriptor_store_wait(0)
        else:
            tlx.barrier_wait(vector_full[slot], phase)
            release(vector_empty[slot])
            tlx.barrier_wait(a_full[mine], phase)
            tlx.barrier_wait(b_full[mine], phase)
            walk(x_full, y_full, ring_empty, place, end, STAGES)
        place = end
        release(resident_empty[slot])
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    if BROADCAST:
        item = tl.program_id(0)
        rows = item // heads_q // slices * (2 * HALF) + me * HALF + tl.arange(0, HALF)
        base = partial + ((item // heads_q % slices).to(tl.int64) * heads_q + item % heads_q) * broadcast * HEAD_DIM
        # Through the places of this consumer's q, which nobody reads any more: whole rows leave together.
        tlx.local_store(sum_tiles[me], total)
        total = tlx.local_load(sum_tiles[me])
        tl.store(base + rows.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], total, mask=(rows < broadcast)[:, None])


@triton.jit
def dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, partial, lse, delta, header, sequences, backward_units, counter, lse_head,
            delta_head, scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
            KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr, BROADCAST: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    a_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    sum_tiles = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 2, reuse=a_tiles)
    b_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    x_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    lse_tiles = tlx.local_alloc((HALF, ), tl.float32, 4)
    delta_tiles = tlx.local_alloc((HALF, ), tl.float32, 2)
    cells = tlx.local_alloc((1, ), tl.int32, RECORDS * FIELDS)
    item_full = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=3)
    a_full = tlx.alloc_barriers(num_barriers=4, arrive_count=1)
    b_full = tlx.alloc_barriers(num_barriers=4, arrive_count=1)
    resident_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=2)
    x_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    y_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    ring_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=2)
    vector_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    vector_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dq_consumer(0, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                        a_tiles, b_tiles, a_full, b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles,
                        delta_tiles, sum_tiles, vector_full, vector_empty, STAGES, HEAD_DIM, BROADCAST)
        with tlx.async_task(num_warps=4, registers=232):
            dq_consumer(1, dq_map, partial, delta, delta_head, scale, scale_log2, heads_q, broadcast, slices, cells, item_full, item_empty,
                        a_tiles, b_tiles, a_full, b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles,
                        delta_tiles, sum_tiles, vector_full, vector_empty, STAGES, HEAD_DIM, BROADCAST)
        with tlx.async_task(num_warps=1, registers=40):
            dq_producer(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, counter, heads_q, group, left, right,
                        bottom_right, o_rows, kv_rows, batch, slices, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                        resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, x_tiles, x_full, ring_empty, KEY_ROWS, 2, STAGES, TILE, HEAD_DIM,
                        False, PERSISTENT, BROADCAST)
        with tlx.async_task(num_warps=1, registers=40):
            dq_vectors(lse, lse_head, cells, item_full, item_empty, lse_tiles, vector_full, vector_empty, TILE)


@triton.jit
def backward_dq_tlx(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
                    scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows,
                    KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, dq_map, lse, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, 1, KEY_ROWS, HEAD_DIM, STAGES, PERSISTENT,
            False)


@triton.jit
def backward_dq_broadcast_tlx(q_map, k_map, v_map, o_map, d_o_map, partial, lse, delta, sequences, lse_head, delta_head,
                              scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices,
                              HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    dq_pass(q_map, k_map, v_map, o_map, d_o_map, q_map, partial, lse, delta, sequences, sequences, sequences, sequences, lse_head, delta_head,
            scale, scale_log2, heads_q, group, left, right, bottom_right, o_rows, kv_rows, batch, broadcast, slices, 128, HEAD_DIM, STAGES,
            False, True)


@triton.jit
def dkdv_step(dk, dv, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles, vector_full,
              vector_empty, place, scale_log2, cells, record, row, above, dtype: tl.constexpr, STAGES: tl.constexpr, CUT: tl.constexpr):
    stage = place % STAGES
    phase = place // STAGES & 1
    # All waits before the products: a loop between them would make the assembler finish one before the next.
    tlx.barrier_wait(x_full[stage], phase)
    tlx.barrier_wait(y_full[stage], phase)
    tlx.barrier_wait(vector_full[stage], phase)
    mine = uniform(mine)
    s = tlx.async_dot(a_tiles[mine], tlx.local_trans(x_tiles[stage]))
    dp = tlx.async_dot(b_tiles[mine], tlx.local_trans(y_tiles[stage]))
    s = tlx.async_dot_wait(1, s)
    p = tl.math.exp2(tl.minimum(s * scale_log2 - tlx.local_load(lse_tiles[stage])[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
    if CUT:
        jj = above + tl.arange(0, HALF)[:, None]
        ii = anew(tl.arange(0, TILE))[None, :]
        first = jj - clamp_to(field(cells, record, MOST).to(tl.int64) + row, -1024, 1024)
        last = jj - clamp_to(field(cells, record, LEAST).to(tl.int64) + row, -1024, 1024)
        p = tl.where((ii >= first) & (ii <= last), p, 0.0)
    dp = tlx.async_dot_wait(0, dp)
    ds = p * (dp - tlx.local_load(delta_tiles[stage])[None, :])
    release(vector_empty[stage])
    if CUT:  # where p is 0 the other factor need not be finite
        ds = tl.where((ii >= first) & (ii <= last), ds, 0.0)
    dv = tlx.async_dot(p.to(dtype), y_tiles[stage], dv)
    dk = tlx.async_dot(ds.to(dtype), x_tiles[stage], dk)
    dv = tlx.async_dot_wait(1, dv)
    dk = tlx.async_dot_wait(0, dk)
    release(ring_empty[stage])
    return dk, dv


@triton.jit
def dkdv_consumer(me: tl.constexpr, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                  resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles, vector_full, vector_empty,
                  STAGES: tl.constexpr, HEAD_DIM: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(dk_map)
    record = 0
    place = 0
    resident = 0
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        rows = field(cells, record, ROWS) - me * HALF
        slot = resident % 2
        mine = me * 2 + slot
        tlx.barrier_wait(a_full[mine], resident // 2 & 1)
        tlx.barrier_wait(b_full[mine], resident // 2 & 1)
        dk = tl.zeros((HALF, HEAD_DIM), tl.float32)
        dv = tl.zeros((HALF, HEAD_DIM), tl.float32)
        more = state + 0
        while more >= 0:
            lo = field(cells, record, LO)
            if rows > 0:
                bulk = field(cells, record, BULK)
                rest = field(cells, record, REST)
                hi = field(cells, record, HI)
                cut = cut_tiles(lo, bulk, rest, hi, TILE)
                for index in tl.range(0, cut):
                    dk, dv = dkdv_step(dk, dv, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles,
                                       vector_full, vector_empty, place, scale_log2, cells, record,
                                       place_of(index, lo, bulk, rest, hi, TILE), me * HALF, dtype, STAGES, True)
                    place += 1
                for index in tl.range(cut, tl.cdiv(hi - lo, TILE)):
                    dk, dv = dkdv_step(dk, dv, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles,
                                       vector_full, vector_empty, place, scale_log2, cells, record, 0, me * HALF, dtype, STAGES, False)
                    place += 1
            else:
                end = place + tl.cdiv(field(cells, record, HI) - lo, TILE)
                for at in tl.range(place, end):
                    tlx.barrier_wait(x_full[at % STAGES], at // STAGES & 1)
                    tlx.barrier_wait(y_full[at % STAGES], at // STAGES & 1)
                    tlx.barrier_wait(vector_full[at % STAGES], at // STAGES & 1)
                    release(ring_empty[at % STAGES])
                    release(vector_empty[at % STAGES])
                place = end
            # The record is kept to the end of its last segment: what it holds need not be in registers.
            more = -1 + (field(cells, record, STATE) & MORE)
            if more >= 0:
                tlx.barrier_arrive(item_empty[record % RECORDS])
                record += 1
                tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        if rows > 0:
            # dk and dv leave through the places of their k and v, which nobody reads any more.
            n = tl.minimum(rows, HALF)
            head = field(cells, record, HEAD)
            end = field(cells, record, ROW) + me * HALF + n
            tlx.local_store(b_tiles[mine], dv.to(dtype))
            tlx.local_store(a_tiles[mine], (dk * scale).to(dtype))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dv_map, b_tiles[mine], [BOUND, head, end, BOUND - n, 0])
            tlx.async_descriptor_store(dk_map, a_tiles[mine], [BOUND, head, end, BOUND - n, 0])
            tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        release(resident_empty[slot])
        resident += 1
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


@triton.jit
def dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter, kv_table, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch,
              KEY_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr, INDEXED: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    a_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    b_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    x_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    lse_tiles = tlx.local_alloc((TILE, ), tl.float32, STAGES)
    delta_tiles = tlx.local_alloc((TILE, ), tl.float32, STAGES)
    cells = tlx.local_alloc((1, ), tl.int32, RECORDS * FIELDS)
    item_full = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=RECORDS, arrive_count=3)
    a_full = tlx.alloc_barriers(num_barriers=4, arrive_count=1)
    b_full = tlx.alloc_barriers(num_barriers=4, arrive_count=1)
    resident_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=2)
    x_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    y_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    vector_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    vector_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=2)
    ring_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dkdv_consumer(0, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                          resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles, vector_full, vector_empty, STAGES,
                          HEAD_DIM)
        with tlx.async_task(num_warps=4, registers=232):
            dkdv_consumer(1, dk_map, dv_map, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                          resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, lse_tiles, delta_tiles, vector_full, vector_empty, STAGES,
                          HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=40):
            dkdv_producer(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, counter, kv_table, heads_kv, group, left, right,
                          bottom_right, o_rows, kv_rows, batch, kv_batch, cells, item_full, item_empty, a_tiles, b_tiles, a_full,
                          b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, KEY_ROWS, 2, STAGES, TILE, HEAD_DIM,
                          PERSISTENT, INDEXED)
        with tlx.async_task(num_warps=1, registers=40):
            dkdv_vectors(lse, lse_head, delta, delta_head, cells, item_full, item_empty, lse_tiles, delta_tiles, vector_full, vector_empty, STAGES, TILE)


@triton.jit
def backward_dkdv_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter, lse_head, delta_head,
                      scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
                      KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter + 1, sequences, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, 0, 0, KEY_ROWS, HEAD_DIM,
              STAGES, PERSISTENT, False)


@triton.jit
def backward_dkdv_index_tlx(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, counter, kv_table,
                            lse_head, delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch,
                            kv_batch, KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
                            PERSISTENT: tl.constexpr):
    dkdv_pass(q_map, k_map, v_map, d_o_map, dk_map, dv_map, lse, delta, sequences, sequences, sequences, counter + 1, kv_table, lse_head,
              delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows, batch, kv_batch, KEY_ROWS,
              HEAD_DIM, STAGES, PERSISTENT, True)
