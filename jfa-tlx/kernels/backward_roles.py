"""The roles around the products that Hopper and Blackwell share: who draws items, writes records, loads, and fetches lse and delta.

A block of BLOCK rows of one head stays ("resident": q and do in the dq pass, k and v in the dk/dv pass), tiles of TILE rows pass by
("streamed": k and v, or q and do).

  segment     what is walked without a change of the resident block's rows, head and sequence. A record of it in shared memory tells
              the roles what to do. Segments that add to the same sums follow each other (heads of a group; sequences that share
              keys; sequences of a broadcast query); MORE says that another one does
  resident    SLOTS places of BLOCK / TILE tiles each, one tile per consumer on Hopper; a_full, b_full per tile, resident_empty per place
  streamed    a ring of STAGES pairs; x_full, y_full, ring_empty per pair. The o of a block passes through it too, before the keys (of 64-row
              halves the first in x, the second in y), unless it has a place of its own (O_APART)
  bounds      tensor maps with a movable row bound: rows past a sequence's end arrive as zeros
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from backward_common import clamp_to, diagonal, key_range, place_in_table, row_range, sequence_fields, uncut_keys, uncut_rows
from common import BOUND, LOG2_E
from tickets import next_item, opening_item

# Fields of a record.
STATE = tl.constexpr(0)      # 0 or MORE; -1: no more work
HEAD = tl.constexpr(1)       # of the resident block
ROW = tl.constexpr(2)        # its first row in its tensor
ROWS = tl.constexpr(3)       # its rows, at least 1
LO = tl.constexpr(4)         # streamed rows of the sequence: [LO, HI) in tiles of TILE; of these [BULK, REST) are cut by no diagonal
BULK = tl.constexpr(5)
REST = tl.constexpr(6)
HI = tl.constexpr(7)
LEAST = tl.constexpr(8)      # bounds of jj - ii: LEAST - key and MOST - key (dq), LEAST + row and MOST + row (dk/dv)
MOST = tl.constexpr(9)
VECTOR_HEAD = tl.constexpr(10)  # query head
VECTOR_ROW = tl.constexpr(11)   # row of o where the vectors' rows begin (dq: of the block; dk/dv: of the sequence)
VECTOR_END = tl.constexpr(12)   # rows from there that exist
FIELDS = tl.constexpr(13)

MORE = tl.constexpr(1)
RECORDS = tl.constexpr(4)
BLOCK = tl.constexpr(128)    # resident rows
MAX = tl.constexpr(2147483647)


@triton.jit
def release(bar):
    """Each warp's first lane stands for its 32, which meet before (no barrier among the warps)."""
    lane = tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; and.b32 $0, $1, 31;", "=r,r", [tlx.thread_id(0)], dtype=tl.int32,
                                     is_pure=False, pack=1)
    tlx.barrier_arrive(bar, 32, pred=lane == 0)


@triton.jit
def field(cells, record, which: tl.constexpr):
    return tl.sum(tlx.local_load(cells[record % RECORDS * FIELDS + which]), 0)


@triton.jit
def put(cells, record, which: tl.constexpr, value):
    tlx.local_store(cells[record % RECORDS * FIELDS + which], tl.full([1], 0, tl.int32) + value)


@triton.jit
def publish(cells, item_full, item_empty, record, state, head, row, rows, lo, bulk, rest, hi, least, most, vector_head, vector_row, vector_end):
    tlx.barrier_wait(item_empty[record % RECORDS], (record // RECORDS & 1) ^ 1)
    put(cells, record, STATE, state)
    put(cells, record, HEAD, head)
    put(cells, record, ROW, row)
    put(cells, record, ROWS, rows)
    put(cells, record, LO, lo)
    put(cells, record, BULK, bulk)
    put(cells, record, REST, rest)
    put(cells, record, HI, hi)
    put(cells, record, LEAST, least)
    put(cells, record, MOST, most)
    put(cells, record, VECTOR_HEAD, vector_head)
    put(cells, record, VECTOR_ROW, vector_row)
    put(cells, record, VECTOR_END, vector_end)
    tlx.barrier_arrive(item_full[record % RECORDS])


@triton.jit
def finish(cells, item_full, item_empty, record):
    tlx.barrier_wait(item_empty[record % RECORDS], (record // RECORDS & 1) ^ 1)
    put(cells, record, STATE, -1)
    tlx.barrier_arrive(item_full[record % RECORDS])


@triton.jit
def load_tile(map, tile, full, head, row, rows, TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Up to TILE rows that begin at `row`; nothing but the barrier's step without any."""
    if rows > 0:
        n = tl.minimum(rows, TILE)
        tlx.barrier_expect_bytes(full, 2 * TILE * HEAD_DIM)
        tlx.async_descriptor_load(map, tile, [BOUND, head, row + n, BOUND - n, 0], full)
    else:
        tlx.barrier_arrive(full)


@triton.jit
def load_resident(a_map, b_map, a_tiles, b_tiles, a_full, b_full, resident_empty, resident, head, a_row, b_row, rows, SLOTS: tl.constexpr,
                  TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    slot = resident % SLOTS
    tlx.barrier_wait(resident_empty[slot], (resident // SLOTS & 1) ^ 1)
    for half in tl.static_range(BLOCK // TILE):
        at = half * SLOTS + slot
        load_tile(a_map, a_tiles[at], a_full[at], head, a_row + half * TILE, rows - half * TILE, TILE, HEAD_DIM)
    for half in tl.static_range(BLOCK // TILE):
        at = half * SLOTS + slot
        load_tile(b_map, b_tiles[at], b_full[at], head, b_row + half * TILE, rows - half * TILE, TILE, HEAD_DIM)


@triton.jit
def load_streamed(x_map, y_map, x_tiles, y_tiles, x_full, y_full, ring_empty, place, head, x_row, y_row, rows, STAGES: tl.constexpr,
                  TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    stage = place % STAGES
    tlx.barrier_wait(ring_empty[stage], (place // STAGES & 1) ^ 1)
    load_tile(x_map, x_tiles[stage], x_full[stage], head, x_row, rows, TILE, HEAD_DIM)
    load_tile(y_map, y_tiles[stage], y_full[stage], head, y_row, rows, TILE, HEAD_DIM)


@triton.jit
def cut_tiles(lo, bulk, rest, hi, TILE: tl.constexpr):
    """How many of a segment's tiles a diagonal cuts. They are walked first: those before BULK, those from REST on, then the others."""
    return tl.cdiv(bulk - lo, TILE) + tl.cdiv(hi - rest, TILE)


@triton.jit
def place_of(index, lo, bulk, rest, hi, TILE: tl.constexpr):
    """First row of the segment's tile that is walked as number `index`."""
    before = tl.cdiv(bulk - lo, TILE)
    cut = cut_tiles(lo, bulk, rest, hi, TILE)
    return tl.where(index < before, lo + index * TILE, tl.where(index < cut, rest + (index - before) * TILE, bulk + (index - cut) * TILE))


@triton.jit
def draw(counter, items, drawn, PERSISTENT: tl.constexpr):
    """Next item, -1 after the last one."""
    if PERSISTENT:
        item = tl.atomic_add(counter, 1, sem="relaxed")
    else:
        item = tl.where(drawn == 0, tl.program_id(0), items)
    return tl.where(item < items, item, -1)


@triton.jit
def draw_first(counter, items, answer, answer_full, PERSISTENT: tl.constexpr):
    """(First item, -1 without any; state of the draws). With a place for answers items come by tickets (tickets.py), else from the counter."""
    if answer is not None:
        item, taken = opening_item(items, answer, answer_full, answer_full, 1)
    else:
        item = draw(counter, items, 0, PERSISTENT)
        taken = 0
    return item, taken


@triton.jit
def draw_next(counter, items, item, taken, answer, answer_full, PERSISTENT: tl.constexpr):
    """The same after `item`."""
    if answer is not None:
        item, taken = next_item(item, taken, items, answer, answer_full, answer_full, 1)
    else:
        item = draw(counter, items, 1, PERSISTENT)
    return item, taken


@triton.jit
def kept(x):
    """x in 32 bits: so far out that no tile notices the difference."""
    return clamp_to(x, -2147483647, MAX)


# ------------------------------------------------------------------------------------------------------------------- dq pass
@triton.jit
def dq_segment(q_map, k_map, v_map, o_map, d_o_map, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty,
               x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, record, resident, place, state, head, group, row, q0, o0, q_len, k0, kv_len, q_end, kv_end,
               left, right, bottom_right, SLOTS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
               O_APART: tl.constexpr):
    shift = diagonal(bottom_right, q_len, kv_len)
    lo, hi = key_range(row, tl.minimum(row + BLOCK, q_len), shift, left, right, kv_end)
    hi = tl.maximum(lo, hi)
    bulk, rest = uncut_keys(lo, hi, row, shift, left, right, BLOCK, TILE)
    least = tl.where(left < 0, -MAX, kept(row + shift - left))
    most = tl.where(right < 0, MAX, kept(row + shift + right))
    rows = tl.minimum(BLOCK, q_end - row)
    publish(cells, item_full, item_empty, record, state, head, q0 + row, rows, lo, bulk, rest, hi, least, most, head, o0 + row, rows)
    load_resident(q_map, d_o_map, a_tiles, b_tiles, a_full, b_full, resident_empty, resident, head, q0 + row, o0 + row, rows, SLOTS, TILE, HEAD_DIM)
    if O_APART:
        tlx.barrier_wait(o_empty[0], (resident & 1) ^ 1)
        load_tile(o_map, o_tiles[0], o_full[0], head, o0 + row, rows, TILE, HEAD_DIM)
    else:
        stage = place % STAGES
        tlx.barrier_wait(ring_empty[stage], (place // STAGES & 1) ^ 1)
        load_tile(o_map, x_tiles[stage], x_full[stage], head, o0 + row, rows, TILE, HEAD_DIM)
        load_tile(o_map, y_tiles[stage], y_full[stage], head, o0 + row + TILE, rows - TILE, TILE, HEAD_DIM)
        place += 1
    for index in range(0, tl.cdiv(hi - lo, TILE)):
        key = place_of(index, lo, bulk, rest, hi, TILE)
        load_streamed(k_map, v_map, x_tiles, y_tiles, x_full, y_full, ring_empty, place, head // group, k0 + key, k0 + key, kv_end - key,
                      STAGES, TILE, HEAD_DIM)
        place += 1
    return place


@triton.jit
def dq_producer(q_map, k_map, v_map, o_map, d_o_map, header, sequences, backward_units, counter, heads_q, group, left, right, bottom_right,
                o_rows, kv_rows, batch, slices, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full, resident_empty,
                x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, KEY_ROWS: tl.constexpr, SLOTS: tl.constexpr,
                STAGES: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, O_APART: tl.constexpr, PERSISTENT: tl.constexpr,
                BROADCAST: tl.constexpr, answer=None, answer_full=None):
    record = 0
    place = 0
    if BROADCAST:
        # One slice of the sequences for one query block and head.
        item = tl.program_id(0)
        head = item % heads_q
        row = item // heads_q // slices * BLOCK
        for index in range(item // heads_q % slices, batch, slices):
            q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
            if q_end > row:
                place = dq_segment(q_map, k_map, v_map, o_map, d_o_map, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                                   resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, record, record, place, MORE, head,
                                   group, row, q0, o0,
                                   q_len, k0, kv_len, q_end, kv_end, left, right, bottom_right, SLOTS, STAGES, TILE,
                                   HEAD_DIM, O_APART)
                record += 1
    else:
        items = tl.load(header + 1) * heads_q
        item, taken = draw_first(counter, items, answer, answer_full, PERSISTENT)
        while item >= 0:
            unit = item // heads_q
            head = item % heads_q
            index = tl.load(backward_units + unit * 2)
            first_key = tl.load(backward_units + unit * 2 + 1)
            q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
            following, taken = draw_next(counter, items, item, taken, answer, answer_full, PERSISTENT)
            # The unit of key tile t of n takes the query blocks t, t + n, ...; without a tile of its own all of them.
            block = tl.where(first_key < 0, 0, first_key // KEY_ROWS)
            step = tl.where(first_key < 0, 1, tl.maximum(1, tl.cdiv(kv_len, KEY_ROWS)))
            for row in range(block * BLOCK, q_end, step * BLOCK):
                place = dq_segment(q_map, k_map, v_map, o_map, d_o_map, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                                   resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, o_tiles, o_full, o_empty, record, record, place, 0, head,
                                   group, row, q0, o0,
                                   q_len, k0, kv_len, q_end, kv_end, left, right, bottom_right, SLOTS, STAGES, TILE,
                                   HEAD_DIM, O_APART)
                record += 1
            item = following
    finish(cells, item_full, item_empty, record)


@triton.jit
def dq_vectors(lse, lse_head, cells, item_full, item_empty, lse_tiles, vector_full, vector_empty, TILE: tl.constexpr):
    """lse of a block's rows in base 2, +inf where p must be 0: rows past the end and blind rows."""
    record = 0
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        head = field(cells, record, VECTOR_HEAD)
        row = field(cells, record, VECTOR_ROW)
        end = field(cells, record, VECTOR_END)
        tlx.barrier_arrive(item_empty[record % RECORDS])
        slot = record % 2
        tlx.barrier_wait(vector_empty[slot], (record // 2 & 1) ^ 1)
        for half in tl.static_range(BLOCK // TILE):
            i = half * TILE + tl.arange(0, TILE)
            x = tl.load(lse + head.to(tl.int64) * lse_head + row + i, mask=i < end, other=float("inf")) * LOG2_E
            tlx.local_store(lse_tiles[half * 2 + slot], tl.where(x == float("-inf"), float("inf"), x))
        tlx.barrier_arrive(vector_full[slot])
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


# ------------------------------------------------------------------------------------------------------------------- dk/dv pass
@triton.jit
def dkdv_segments(q_map, d_o_map, cells, item_full, item_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, record, place, more, kv_head,
                  group, key, k0, kv_len, keys, q0, o0, q_len, q_end, left, right, bottom_right, STAGES: tl.constexpr, TILE: tl.constexpr,
                  HEAD_DIM: tl.constexpr):
    """One sequence: a segment for every head of the group. `more`: other sequences follow."""
    shift = diagonal(bottom_right, q_len, kv_len)
    lo, hi = row_range(key, tl.minimum(key + BLOCK, kv_len), shift, left, right, q_end)
    hi = tl.maximum(lo, hi)
    bulk, rest = uncut_rows(lo, hi, key, shift, left, right, TILE, BLOCK)
    least = tl.where(left < 0, -MAX, kept(shift - key - left))
    most = tl.where(right < 0, MAX, kept(shift - key + right))
    for member in range(group):
        head = kv_head * group + member
        state = tl.where((member + 1 < group) | (more != 0), MORE, 0)
        publish(cells, item_full, item_empty, record, state, kv_head, k0 + key, keys, lo, bulk, rest, hi, least, most, head, o0, q_end)
        record += 1
        for index in range(0, tl.cdiv(hi - lo, TILE)):
            row = place_of(index, lo, bulk, rest, hi, TILE)
            load_streamed(q_map, d_o_map, x_tiles, y_tiles, x_full, y_full, ring_empty, place, head, q0 + row, o0 + row, q_end - row, STAGES,
                          TILE, HEAD_DIM)
            place += 1
    return record, place


@triton.jit
def dkdv_producer(q_map, k_map, v_map, d_o_map, header, sequences, backward_units, counter, kv_table, heads_kv, group, left, right,
                  bottom_right, o_rows, kv_rows, batch, kv_batch, cells, item_full, item_empty, a_tiles, b_tiles, a_full, b_full,
                  resident_empty, x_tiles, y_tiles, x_full, y_full, ring_empty, KEY_ROWS: tl.constexpr, SLOTS: tl.constexpr,
                  STAGES: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PERSISTENT: tl.constexpr, INDEXED: tl.constexpr,
                  answer=None, answer_full=None):
    record = 0
    place = 0
    resident = 0
    if INDEXED:
        items = (kv_rows // KEY_ROWS + kv_batch) * heads_kv
    else:
        items = tl.load(header + 1) * heads_kv
    item, taken = draw_first(counter, items, answer, answer_full, PERSISTENT)
    while item >= 0:
        kv_head = item % heads_kv
        if INDEXED:
            c, key = place_in_table(kv_table, item // heads_kv, kv_batch, KEY_ROWS)
            at = kv_table + c.to(tl.int64) * 4
            k0 = tl.load(at)
            kv_len = tl.load(at + 1)
            index = batch - tl.load(at + 2)
            last = tl.load(at + 3)
            kv_end = tl.minimum(kv_len, kv_rows - k0)
            following, taken = draw_next(counter, items, item, taken, answer, answer_full, PERSISTENT)
            if key < kv_end:
                keys = tl.minimum(BLOCK, kv_end - key)
                load_resident(k_map, v_map, a_tiles, b_tiles, a_full, b_full, resident_empty, resident, kv_head, k0 + key, k0 + key, keys,
                              SLOTS, TILE, HEAD_DIM)
                resident += 1
                if index >= last:  # nobody refers to these keys: dk = dv = 0
                    publish(cells, item_full, item_empty, record, 0, kv_head, k0 + key, keys, 0, 0, 0, 0, 0, 0, 0, 0, 0)
                    record += 1
                while index < last:
                    q0, o0, q_len, _k0, _kv_len, q_end, _kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
                    index += 1
                    while refers_elsewhere(sequences, index, last, c):
                        index += 1
                    record, place = dkdv_segments(q_map, d_o_map, cells, item_full, item_empty, x_tiles, y_tiles, x_full, y_full, ring_empty,
                                                  record, place, (index < last).to(tl.int32), kv_head, group, key, k0, kv_len, keys, q0, o0,
                                                  q_len, q_end, left, right, bottom_right, STAGES, TILE, HEAD_DIM)
        else:
            unit = item // heads_kv
            index = tl.load(backward_units + unit * 2)
            first_key = tl.load(backward_units + unit * 2 + 1)
            q0, o0, q_len, k0, kv_len, q_end, kv_end = sequence_fields(sequences, index, o_rows, kv_rows)
            following, taken = draw_next(counter, items, item, taken, answer, answer_full, PERSISTENT)
            end = tl.where(first_key < 0, kv_end, tl.minimum(kv_end, first_key + KEY_ROWS))
            for key in range(tl.maximum(first_key, 0), end, BLOCK):
                keys = tl.minimum(BLOCK, kv_end - key)
                load_resident(k_map, v_map, a_tiles, b_tiles, a_full, b_full, resident_empty, resident, kv_head, k0 + key, k0 + key, keys,
                              SLOTS, TILE, HEAD_DIM)
                resident += 1
                record, place = dkdv_segments(q_map, d_o_map, cells, item_full, item_empty, x_tiles, y_tiles, x_full, y_full, ring_empty,
                                              record, place, 0, kv_head, group, key, k0, kv_len, keys, q0, o0, q_len, q_end, left, right,
                                              bottom_right, STAGES, TILE, HEAD_DIM)
        item = following
    finish(cells, item_full, item_empty, record)


@triton.jit
def refers_elsewhere(sequences, index, last, c):
    """Whether sequence `index` exists and does not refer to key/value sequence c. (The last one that does comes before `last`.)"""
    inside = index < last
    at = tl.load(sequences + tl.where(inside, index, 0).to(tl.int64) * 8 + 5)
    return inside & (at != c)


@triton.jit
def vectors_of(cells, item_empty, record, lse, lse_head, delta, delta_head):
    """What a warp that provides lse and delta needs of an item, whose place it gives back: where its rows' values stand, how many rows
    there are, and the streamed tiles."""
    head = field(cells, record, VECTOR_HEAD).to(tl.int64)
    first = field(cells, record, VECTOR_ROW)
    end = field(cells, record, VECTOR_END)
    lo = field(cells, record, LO)
    bulk = field(cells, record, BULK)
    rest = field(cells, record, REST)
    hi = field(cells, record, HI)
    tlx.barrier_arrive(item_empty[record % RECORDS])
    return lse + head * lse_head + first, delta + head * delta_head + first, end, lo, bulk, rest, hi


@triton.jit
def dkdv_vectors(lse, lse_head, delta, delta_head, cells, item_full, item_empty, lse_tiles, delta_tiles, vector_full, vector_empty,
                 STAGES: tl.constexpr, TILE: tl.constexpr):
    """lse (base 2, +inf where p must be 0) and delta of every streamed tile's rows."""
    record = 0
    place = 0
    tlx.barrier_wait(item_full[0], 0)
    state = field(cells, record, STATE)
    while state >= 0:
        lse_base, delta_base, end, lo, bulk, rest, hi = vectors_of(cells, item_empty, record, lse, lse_head, delta, delta_head)
        for index in range(0, tl.cdiv(hi - lo, TILE)):
            i = place_of(index, lo, bulk, rest, hi, TILE) + tl.arange(0, TILE)
            x = tl.load(lse_base + i, mask=i < end, other=float("inf")) * LOG2_E
            y = tl.load(delta_base + i, mask=i < end, other=0.0)
            stage = place % STAGES
            tlx.barrier_wait(vector_empty[stage], (place // STAGES & 1) ^ 1)
            tlx.local_store(lse_tiles[stage], tl.where(x == float("-inf"), float("inf"), x))
            tlx.local_store(delta_tiles[stage], y)
            tlx.barrier_arrive(vector_full[stage])
            place += 1
        record += 1
        tlx.barrier_wait(item_full[record % RECORDS], record // RECORDS & 1)
        state = field(cells, record, STATE)
    tlx.barrier_arrive(item_empty[record % RECORDS])


