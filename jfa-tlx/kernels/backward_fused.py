"""Backward, generation 4 on Hopper: both passes of a sequence by one CTA, right after each other.

Apart, the passes read q, k, v and do from memory twice, which costs short sequences more than their products. A unit that is a whole
sequence (first key -1) and a key/value head is an item here: the dq pass over its query blocks, every head of the group, then the
dk/dv pass over its key tiles, whose reads find the L2. Of a unit that is a key tile of a sequence too long for one CTA, only its
share of the dq pass is done; its dk and dv follow in `backward_dkdv_tlx`, for which counter[2] gets the number of units up to the
last such one.

  roles       as in backward_hopper.py, records of both kinds in one stream; a block or tile of at most 64 rows goes to the consumers in
              turn, and the other one is ahead
  vectors     a ring of VECTORS pairs of 64 numbers: lse of a block's halves, or lse and delta of a streamed tile
  delta       goes through memory to this CTA's own dk/dv pass; delta_full: that of a block is stored
  results     leave while the next record's first products run: the store is waited for, and the place released, only then
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from backward_common import sequence_fields
from backward_hopper import HALF, TILE, dkdv_step, dq_step, walk
from backward_roles import (BLOCK, BULK, FIELDS, HEAD, HI, KEYS, LEAST, LO, MORE, MOST, RECORDS, REST, ROW, ROWS, STATE, VECTOR_END,
                            VECTOR_HEAD, VECTOR_ROW, cut_tiles, dkdv_segments, dq_segment, draw, field, finish, load_resident, place_of,
                            release)
from common import BOUND, LOG2_E

VECTORS = tl.constexpr(2)


@triton.jit
def produce(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, counter, heads_kv, group, left, right, bottom_right,
            o_rows, kv_rows, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_tiles, y_tiles, x_full, y_full,
            ring_empty, KEY_ROWS: tl.constexpr, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr):
    record = 0
    place = 0
    resident = 0
    items = tl.load(header + 1) * heads_kv
    item = draw(counter, items, 0, True)
    while item >= 0:
        unit = item // heads_kv
        kv_head = item % heads_kv
        index = tl.load(backward_units + unit * 2)
        first_key = tl.load(backward_units + unit * 2 + 1)
        q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
        following = draw(counter, items, 1, True)
        block = tl.where(first_key < 0, 0, first_key // KEY_ROWS)
        step = tl.where(first_key < 0, 1, tl.maximum(1, tl.cdiv(kv_len, KEY_ROWS)))
        for row in range(block * BLOCK, q_end, step * BLOCK):
            for member in range(group):
                place = dq_segment(q_map, k_map, v_map, o_map, d_o_map, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                                   resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, x_tiles, x_full, ring_empty, record, resident,
                                   place, 0, kv_head * group + member, group, row, q0, o0, q_len, k0, kv_len, q_end, kv_end, left, right,
                                   bottom_right, 2, STAGES, TILE, HEAD_DIM, False)
                record += 1
                resident += 1
        if first_key >= 0:
            tl.atomic_max(counter + 2, unit + 1, sem="relaxed")
        for key in range(0, tl.where(first_key < 0, kv_end, 0), BLOCK):
            keys = tl.minimum(BLOCK, kv_end - key)
            load_resident(k_map, v_map, a_tiles, b_tiles, a_full, b_full, resident_empty, resident, kv_head, k0 + key, k0 + key, keys, 2, TILE,
                          HEAD_DIM)
            resident += 1
            record, place = dkdv_segments(q_map, d_o_map, cells, item_full, item_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, record,
                                          place, 0, kv_head, group, key, k0, kv_len, keys, q0, o0, q_len, q_end, left, right, bottom_right,
                                          KEYS, STAGES, TILE, HEAD_DIM)
        item = following
    finish(cells, item_full, item_empty, record)


@triton.jit
def fetch_vectors(lse, lse_head, delta, delta_head, cells, item_full, item_empty, first_tiles, second_tiles, vector_full, vector_empty,
                  delta_full):
    """lse in base 2, +inf where p must be 0 (rows past the end and blind rows), and delta."""
    record = 0
    place = 0
    blocks = 0  # of the dq pass
    known = 0   # of these, whose delta is known to be stored
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        head = field(cells, record, VECTOR_HEAD).to(tl.int64)
        row = field(cells, record, VECTOR_ROW)
        end = field(cells, record, VECTOR_END)
        lo = field(cells, record, LO)
        bulk = field(cells, record, BULK)
        rest = field(cells, record, REST)
        hi = field(cells, record, HI)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        lse_base = lse + head * lse_head + row
        delta_base = delta + head * delta_head + row
        keys = (state & KEYS) != 0
        # One behind at most: of a barrier that is two steps ahead a wait knows nothing.
        while known < blocks:
            tlx.barrier_wait(delta_full[0], known & 1)
            known += 1
        for index in range(0, tl.where(keys, tl.cdiv(hi - lo, TILE), 1)):
            i = tl.where(keys, place_of(index, lo, bulk, rest, hi, TILE), 0) + tl.arange(0, TILE)
            x = tl.load(lse_base + i, mask=i < end, other=float("inf")) * LOG2_E
            x = tl.where(x == float("-inf"), float("inf"), x)
            if keys:
                y = tl.load(delta_base + i, mask=i < end, other=0.0, cache_modifier=".cg")
            else:
                y = tl.load(lse_base + HALF + i, mask=HALF + i < end, other=float("inf")) * LOG2_E
                y = tl.where(y == float("-inf"), float("inf"), y)
            slot = place % VECTORS
            tlx.barrier_wait(vector_empty[slot], (place // VECTORS & 1) ^ 1)
            tlx.local_store(first_tiles[slot], x)
            tlx.local_store(second_tiles[slot], y)
            tlx.barrier_arrive(vector_full[slot])
            place += 1
        blocks += tl.where(keys, 0, 1)
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


@triton.jit
def flush(leaving, resident_empty):
    """The results in place `leaving` are gone; it may be loaded again."""
    if leaving >= 0:
        tlx.async_descriptor_store_wait(0)
        release(resident_empty[leaving])


@triton.jit
def consume(me: tl.constexpr, dq_map, dk_map, dv_map, delta, delta_head, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles,
            a_full, b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, first_tiles, second_tiles, vector_full, vector_empty,
            delta_tiles, delta_full, STAGES: tl.constexpr, HEAD_DIM: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(dq_map)
    record = 0
    place = 0
    vector = 0
    resident = 0
    lone = 0
    leaving = -1
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        total = field(cells, record, ROWS)
        both = total > HALF
        active = both | ((lone & 1) == me)
        part = tl.where(both, me, 0)
        above = part * HALF
        n = tl.minimum(total - above, HALF)
        lone += tl.where(both, 0, 1)
        slot = resident % 2
        mine = part * 2 + slot
        phase = resident // 2 & 1
        if (state & KEYS) == 0:
            head = field(cells, record, HEAD)
            end = field(cells, record, ROW) + above + n
            lo = field(cells, record, LO)
            bulk = field(cells, record, BULK)
            rest = field(cells, record, REST)
            hi = field(cells, record, HI)
            least = field(cells, record, LEAST)
            most = field(cells, record, MOST)
            vector_row = field(cells, record, VECTOR_ROW)
            tlx.barrier_arrive(item_empty[record % RECORDS])
            stage = place % STAGES
            after = place + 1 + tl.cdiv(hi - lo, TILE)
            vector_slot = vector % VECTORS
            if active:
                # delta of these rows; their o stands where keys (first half) or values (second half) stand later.
                tlx.barrier_wait(b_full[mine], phase)
                # Both, though one is read: a barrier that is not waited for in every use may be a step behind when it is.
                tlx.barrier_wait(x_full[stage], place // STAGES & 1)
                tlx.barrier_wait(y_full[stage], place // STAGES & 1)
                if part == 0:
                    o_tile = tlx.local_load(x_tiles[stage])
                else:
                    o_tile = tlx.local_load(y_tiles[stage])
                sums = tl.sum(o_tile.to(tl.float32) * tlx.local_load(b_tiles[mine]).to(tl.float32), 1)
                release(ring_empty[stage])
                # Through shared memory: in this layout it would draw every score into it.
                tlx.local_store(delta_tiles[me], sums)
                i = tl.arange(0, HALF)
                tl.store(delta + head.to(tl.int64) * delta_head + (vector_row + above) + i, tlx.local_load(delta_tiles[me]), mask=i < n)
                tlx.barrier_arrive(delta_full[0])
                delta_rows = tlx.local_load(delta_tiles[me])
                tlx.barrier_wait(vector_full[vector_slot], vector // VECTORS & 1)
                if part == 0:
                    lse_rows = tlx.local_load(first_tiles[vector_slot])
                else:
                    lse_rows = tlx.local_load(second_tiles[vector_slot])
                release(vector_empty[vector_slot])
                flush(leaving, resident_empty)
                tlx.barrier_wait(a_full[mine], phase)
                place += 1
                acc = tl.zeros((HALF, HEAD_DIM), tl.float32)
                cut = cut_tiles(lo, bulk, rest, hi, TILE)
                for index in tl.range(0, cut):
                    acc = dq_step(acc, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, place, lse_rows, delta_rows,
                                  scale_log2, least, most, place_of(index, lo, bulk, rest, hi, TILE), above, dtype, STAGES, True)
                    place += 1
                for index in tl.range(cut, tl.cdiv(hi - lo, TILE)):
                    acc = dq_step(acc, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, place, lse_rows, delta_rows,
                                  scale_log2, least, most, 0, above, dtype, STAGES, False)
                    place += 1
                # dq leaves through the place of its q, which nobody reads any more.
                tlx.local_store(a_tiles[mine], (acc * scale).to(dtype))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(dq_map, a_tiles[mine], [BOUND, head, end, BOUND - n, 0])
                leaving = slot
            else:
                tlx.barrier_arrive(delta_full[0])
                flush(leaving, resident_empty)
                leaving = -1
                tlx.barrier_wait(vector_full[vector_slot], vector // VECTORS & 1)
                release(vector_empty[vector_slot])
                tlx.barrier_wait(a_full[me * 2 + slot], phase)
                tlx.barrier_wait(b_full[me * 2 + slot], phase)
                walk(x_full, y_full, ring_empty, place, after, STAGES)
                release(resident_empty[slot])
            place = after
            vector += 1
        else:
            tlx.barrier_wait(a_full[mine], phase)
            tlx.barrier_wait(b_full[mine], phase)
            dk = tl.zeros((HALF, HEAD_DIM), tl.float32)
            dv = tl.zeros((HALF, HEAD_DIM), tl.float32)
            more = state + 0
            while more >= 0:
                lo = field(cells, record, LO)
                if active:
                    bulk = field(cells, record, BULK)
                    rest = field(cells, record, REST)
                    hi = field(cells, record, HI)
                    cut = cut_tiles(lo, bulk, rest, hi, TILE)
                    for index in tl.range(0, cut):
                        dk, dv = dkdv_step(dk, dv, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, first_tiles,
                                           second_tiles, vector_full, vector_empty, place, vector, scale_log2, cells, record,
                                           place_of(index, lo, bulk, rest, hi, TILE), above, dtype, STAGES, VECTORS, True)
                        place += 1
                        vector += 1
                        flush(leaving, resident_empty)
                        leaving = -1
                    for index in tl.range(cut, tl.cdiv(hi - lo, TILE)):
                        dk, dv = dkdv_step(dk, dv, a_tiles, b_tiles, mine, x_tiles, y_tiles, x_full, y_full, ring_empty, first_tiles,
                                           second_tiles, vector_full, vector_empty, place, vector, scale_log2, cells, record, 0, above, dtype,
                                           STAGES, VECTORS, False)
                        place += 1
                        vector += 1
                        flush(leaving, resident_empty)
                        leaving = -1
                else:
                    flush(leaving, resident_empty)
                    leaving = -1
                    steps = tl.cdiv(field(cells, record, HI) - lo, TILE)
                    for at in tl.range(0, steps):
                        stage = (place + at) % STAGES
                        vector_slot = (vector + at) % VECTORS
                        tlx.barrier_wait(x_full[stage], (place + at) // STAGES & 1)
                        tlx.barrier_wait(y_full[stage], (place + at) // STAGES & 1)
                        release(ring_empty[stage])
                        tlx.barrier_wait(vector_full[vector_slot], (vector + at) // VECTORS & 1)
                        release(vector_empty[vector_slot])
                    place += steps
                    vector += steps
                # The record is kept to the end of its last segment: what it holds need not be in registers.
                more = -1 + (field(cells, record, STATE) & MORE)
                if more >= 0:
                    tlx.barrier_arrive(item_empty[record % RECORDS])
                    record += 1
                    tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
            flush(leaving, resident_empty)
            leaving = -1
            if active:
                # dk and dv leave through the places of their k and v, which nobody reads any more.
                head = field(cells, record, HEAD)
                end = field(cells, record, ROW) + above + n
                tlx.local_store(b_tiles[mine], dv.to(dtype))
                tlx.local_store(a_tiles[mine], (dk * scale).to(dtype))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(dv_map, b_tiles[mine], [BOUND, head, end, BOUND - n, 0])
                tlx.async_descriptor_store(dk_map, a_tiles[mine], [BOUND, head, end, BOUND - n, 0])
                leaving = slot
            else:
                tlx.barrier_wait(a_full[me * 2 + slot], phase)
                tlx.barrier_wait(b_full[me * 2 + slot], phase)
                release(resident_empty[slot])
            tlx.barrier_arrive(item_empty[record % RECORDS])
        resident += 1
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def backward_fused(q_map, k_map, v_map, o_map, d_o_map, dq_map, dk_map, dv_map, lse, delta, header, sequences, backward_units, counter,
                   lse_head, delta_head, scale, scale_log2, heads_kv, group, left, right, bottom_right, o_rows, kv_rows,
                   KEY_ROWS: tl.constexpr, Q_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    a_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    b_tiles = tlx.local_alloc((HALF, HEAD_DIM), dtype, 4)
    x_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    y_tiles = tlx.local_alloc((TILE, HEAD_DIM), dtype, STAGES)
    first_tiles = tlx.local_alloc((TILE, ), tl.float32, VECTORS)
    second_tiles = tlx.local_alloc((TILE, ), tl.float32, VECTORS)
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
    vector_full = tlx.alloc_barriers(num_barriers=VECTORS, arrive_count=1)
    vector_empty = tlx.alloc_warp_barrier(num_barriers=VECTORS, num_warps=4, num_arrivals=2)
    delta_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            consume(0, dq_map, dk_map, dv_map, delta, delta_head, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles, a_full,
                    b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, first_tiles, second_tiles, vector_full, vector_empty,
                    delta_tiles, delta_full, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=4, registers=232):
            consume(1, dq_map, dk_map, dv_map, delta, delta_head, scale, scale_log2, cells, item_full, item_empty, a_tiles, b_tiles, a_full,
                    b_full, resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, first_tiles, second_tiles, vector_full, vector_empty,
                    delta_tiles, delta_full, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=40):
            produce(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, counter, heads_kv, group, left, right, bottom_right,
                    o_rows, kv_rows, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty, x_tiles, y_tiles, x_full,
                    y_full, ring_empty, KEY_ROWS, STAGES, HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=40):
            fetch_vectors(lse, lse_head, delta, delta_head, cells, item_full, item_empty, first_tiles, second_tiles, vector_full, vector_empty,
                          delta_full)
