"""Forward for Hopper with warp roles (TLX): the bodies of generations 3 and 4.

  unit        128 query rows of one sequence and head in two blocks of 64, walked over tiles of KV_TILE keys
  roles       two consumer warpgroups, a block each; a warp that draws items and loads queries; a warp that loads keys and values
  buffers     q: Q_STAGES per consumer; k and v: a ring of KV_STAGES tiles each; o: one block per consumer
  barriers    item_full/item_empty: items drawn; q_full/q_empty per consumer and stage; k_full/k_empty, v_full/v_empty per slot. The
              rings run on across items: the next one's loads, and the other consumer's products, overlap an epilogue
  odd blocks  a unit with one block gives it to the consumers in turn; the other one walks along the rings and is ahead
  bounds      tensor maps with a movable row bound (params.h, JFA_BOUND): rows past a sequence's end, or past the last visible key,
              arrive as zeros and are dropped by a store. Scores are masked by selection, in tiles that the mask or the end cuts
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from common import BOUND, LN_2, diagonal_shift, end_key, first_key, load_sequence, load_unit, split_scale


@triton.jit
def read_number(cell):
    """The number in a one-element buffer of shared memory."""
    return tl.sum(tlx.local_load(cell), 0)


@triton.jit
def release(bar):
    """Of a block of threads: each warp's first lane stands for its 32 (no barrier among the warps)."""
    tlx.barrier_arrive(bar, 32, pred=tlx.thread_id(0) % 32 == 0)


@triton.jit
def draw(counter, items, PERSISTENT: tl.constexpr, DRAWN: tl.constexpr):
    """Next item, -1 after the last one."""
    if PERSISTENT:
        item = tl.atomic_add(counter, 1)
    else:
        item = tl.program_id(0) if DRAWN == 0 else items
    return tl.where(item < items, item, -1)


@triton.jit
def unit_keys(first, rows, q_len, kv_len, left, right, shift, KV_TILE: tl.constexpr):
    """Of `rows` rows from `first`: first visible key, one past the last; first tile, tiles."""
    last = tl.minimum(first + rows, q_len) - 1
    lo = first_key(first, left, shift)
    hi = end_key(last, right, shift, kv_len)
    tile0 = lo // KV_TILE
    return lo, hi, tile0, tl.where(hi > lo, (hi - 1) // KV_TILE - tile0 + 1, 0)


@triton.jit
def produce_queries(q_map, header, sequences, forward_units, counter, heads, group, packed_log2,
                    item_cell, item_full, item_empty, q_tiles, q_full, q_empty,
                    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr, ITEMS: tl.constexpr, PERSISTENT: tl.constexpr):
    items = tl.load(header) * heads
    rows = BLOCK >> packed_log2
    # Two rounds ahead for units, one for sequences: their latency hides behind the wait for a stage.
    item = draw(counter, items, PERSISTENT, 0)
    sequence, first = load_unit(forward_units, tl.maximum(item, 0) // heads)
    q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
    following = draw(counter, items, PERSISTENT, 1)
    next_sequence, next_first = load_unit(forward_units, tl.maximum(following, 0) // heads)
    use = 0
    lone = 0
    uses_0 = 0
    uses_1 = 0
    while item >= 0:
        tlx.barrier_wait(item_empty[use % ITEMS], (use // ITEMS & 1) ^ 1)
        tlx.local_store(item_cell[use % ITEMS], tl.full([1], 0, tl.int32) + item)
        tlx.barrier_arrive(item_full[use % ITEMS])

        after = draw(counter, items, PERSISTENT, 2)
        next_q0, next_o0, next_q_len, next_kv0, next_kv_len = load_sequence(sequences, next_sequence)

        q_head = tl.where(packed_log2 > 0, item % heads * group, item % heads)
        both = q_len - first > rows
        for consumer in tl.static_range(2):
            if both | ((lone & 1) == consumer):  # a lone block goes to the consumers in turn
                at = first + tl.where(both, consumer * rows, 0)
                n = tl.minimum(rows, q_len - at)
                uses = uses_0 if consumer == 0 else uses_1
                stage = consumer * Q_STAGES + uses % Q_STAGES
                tlx.barrier_wait(q_empty[stage], (uses // Q_STAGES & 1) ^ 1)
                tlx.barrier_expect_bytes(q_full[stage], 2 * BLOCK * HEAD_DIM)
                tlx.async_descriptor_load(q_map, q_tiles[stage], [BOUND, q_head, q0 + at + n, BOUND - n, 0], q_full[stage])
        uses_0 += tl.where(both | (lone & 1 == 0), 1, 0)
        uses_1 += tl.where(both | (lone & 1 == 1), 1, 0)
        lone += tl.where(both, 0, 1)
        use += 1
        item = following
        first = next_first
        q0 = next_q0
        q_len = next_q_len
        following = after
        next_sequence, next_first = load_unit(forward_units, tl.maximum(after, 0) // heads)
    tlx.barrier_wait(item_empty[use % ITEMS], (use // ITEMS & 1) ^ 1)
    tlx.local_store(item_cell[use % ITEMS], tl.full([1], -1, tl.int32))
    tlx.barrier_arrive(item_full[use % ITEMS])


@triton.jit
def fetch(item_cell, item_full, item_empty, use, ITEMS: tl.constexpr):
    """Item `use` of this block of threads."""
    tlx.barrier_wait(item_full[use % ITEMS], use // ITEMS & 1)
    item = read_number(item_cell[use % ITEMS])
    tlx.barrier_arrive(item_empty[use % ITEMS])
    return item


@triton.jit
def produce_keys_and_values(k_map, v_map, sequences, forward_units, heads, group, packed_log2, left, right, bottom_right,
                            item_cell, item_full, item_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
                            BLOCK: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, KV_STAGES: tl.constexpr,
                            ITEMS: tl.constexpr):
    rows = BLOCK >> packed_log2
    use = 0
    base = 0
    item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    while item >= 0:
        sequence, first = load_unit(forward_units, item // heads)
        q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
        shift = diagonal_shift(bottom_right, q_len, kv_len)
        lo, hi, tile0, tiles = unit_keys(first, 2 * rows, q_len, kv_len, left, right, shift, KV_TILE)
        kv_head = tl.where(packed_log2 > 0, item % heads, item % heads // group)
        # The last tile first: it is the one that the end of the sequence, or a diagonal, cuts. In the order k0 k1 v0 k2 v1 ... v(n-1).
        for j in tl.range(0, tl.where(tiles > 0, tiles + 1, 0)):
            if j < tiles:
                slot = (base + j) % KV_STAGES
                row = (tile0 + tiles - 1 - j) * KV_TILE
                n = tl.minimum(KV_TILE, hi - row)
                tlx.barrier_wait(k_empty[slot], ((base + j) // KV_STAGES & 1) ^ 1)
                tlx.barrier_expect_bytes(k_full[slot], 2 * KV_TILE * HEAD_DIM)
                tlx.async_descriptor_load(k_map, k_tiles[slot], [BOUND, kv_head, kv0 + row + n, BOUND - n, 0], k_full[slot])
            if j > 0:
                slot = (base + j - 1) % KV_STAGES
                row = (tile0 + tiles - j) * KV_TILE
                n = tl.minimum(KV_TILE, hi - row)
                tlx.barrier_wait(v_empty[slot], ((base + j - 1) // KV_STAGES & 1) ^ 1)
                tlx.barrier_expect_bytes(v_full[slot], 2 * KV_TILE * HEAD_DIM)
                tlx.async_descriptor_load(v_map, v_tiles[slot], [BOUND, kv_head, kv0 + row + n, BOUND - n, 0], v_full[slot])
        base += tiles
        use += 1
        item = fetch(item_cell, item_full, item_empty, use, ITEMS)


@triton.jit
def walk(k_full, k_empty, v_full, v_empty, begin, end, KV_STAGES: tl.constexpr):
    """Passes over tiles in which this consumer has nothing to do."""
    for place in tl.range(begin, end):
        slot = place % KV_STAGES
        phase = place // KV_STAGES & 1
        tlx.barrier_wait(k_full[slot], phase)
        release(k_empty[slot])
        tlx.barrier_wait(v_full[slot], phase)
        release(v_empty[slot])


@triton.jit
def masked(s, tile, first_visible, end_visible, factor, KV_TILE: tl.constexpr):
    """Scores of a tile that something cuts."""
    j = tile * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    return tl.where((j >= first_visible[:, None]) & (j < end_visible[:, None]), s * factor, float("-inf"))


@triton.jit
def masked_left(s, tile, first_visible, KV_TILE: tl.constexpr):
    """Scores of a tile that only a window's left edge cuts."""
    j = tile * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    return tl.where(j >= first_visible[:, None], s, float("-inf"))


@triton.jit
def masked_right(s, tile, end_visible, KV_TILE: tl.constexpr):
    """Scores of a tile that only a diagonal or the sequence's end cuts."""
    j = tile * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    return tl.where(j < end_visible[:, None], s, float("-inf"))


@triton.jit
def softmax(s, top, scale):
    """Probabilities of a tile against the new maximum of the rows; what shrinks everything before."""
    new_top = tl.maximum(top, tl.max(s, 1))
    zero = tl.where(new_top == float("-inf"), 0.0, new_top * scale)  # a row that has seen no key must not give -inf - -inf
    p = tl.math.exp2(s * scale - zero[:, None])
    return p, new_top, tl.math.exp2(top * scale - zero)


@triton.jit
def step(q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, place, acc, weights, top, total, scale, tile, first_visible,
         end_visible, factor, dtype: tl.constexpr, MASK: tl.constexpr, KV_TILE: tl.constexpr, KV_STAGES: tl.constexpr):
    """Scores and probabilities of the tile at `place` while the product of the one before with its values runs. (A branch between
    the two waits would make the assembler join them.)"""
    slot = place % KV_STAGES
    tlx.barrier_wait(k_full[slot], place // KV_STAGES & 1)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[slot]))
    before = (place - 1) % KV_STAGES
    tlx.barrier_wait(v_full[before], (place - 1) // KV_STAGES & 1)
    acc = tlx.async_dot(weights, v_tiles[before], acc)
    s = tlx.async_dot_wait(1, s)
    release(k_empty[slot])
    if MASK == "both":
        s = masked(s, tile, first_visible, end_visible, factor, KV_TILE)
    elif MASK == "left":
        s = masked_left(s, tile, first_visible, KV_TILE)
    p, top, shrink = softmax(s, top, scale)
    total = total * shrink + tl.sum(p, 1)
    weights = p.to(dtype)
    acc = tlx.async_dot_wait(0, acc)
    release(v_empty[before])
    return acc * shrink[:, None], weights, top, total


@triton.jit
def block_of(me: tl.constexpr, lone, unit_first, q_len, kv_len, left, right, bottom_right, rows, base, KV_TILE: tl.constexpr):
    """This consumer's block of a unit whose first tile stands at place `base`: whether there is one, its first row, the place of tile t
    plus t, its first place and the one behind its last, the one behind the unit's last."""
    shift = diagonal_shift(bottom_right, q_len, kv_len)
    lo, hi, tile0, tiles = unit_keys(unit_first, 2 * rows, q_len, kv_len, left, right, shift, KV_TILE)
    both = q_len - unit_first > rows
    mine = both | ((lone & 1) == me)  # a lone block goes to the consumers in turn
    first = unit_first + tl.where(both, me * rows, 0)
    own_lo, own_hi, own_tile, own_tiles = unit_keys(first, rows, q_len, kv_len, left, right, shift, KV_TILE)
    to_tile = base + tile0 + tiles - 1
    begin = tl.where(own_tiles > 0, to_tile + 1 - own_tile - own_tiles, base)
    return mine, both, shift, first, to_tile, begin, begin + own_tiles, base + tiles


@triton.jit
def finish(acc, top, total, scale, me: tl.constexpr, item, o_row, n_rows, blind_rows, o_map, o_tiles, lse, lse_head, o_rows, heads, group,
           packed_log2, rows, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Divides by the sum; stores o and lse."""
    # No maximum means no visible key: o is exactly 0 and lse -inf, whatever v holds.
    blind = (top == float("-inf")) & (total == total)
    acc = acc * (1.0 / tl.where(blind, 1.0, total))[:, None]
    if blind_rows:
        acc = tl.where(blind[:, None], 0.0, acc)
    tlx.async_descriptor_store_wait(0)  # the store before has left its buffer
    tlx.local_store(o_tiles[me], acc.to(dtype))
    tlx.fence("async_shared")
    o_head = tl.where(packed_log2 > 0, item % heads * group, item % heads)
    tlx.async_descriptor_store(o_map, o_tiles[me], [BOUND, o_head, o_row + n_rows, BOUND - n_rows, 0])
    r = tl.arange(0, BLOCK)
    value = tl.where(blind, float("-inf"), (top * scale + tl.math.log2(total)) * LN_2)
    at = lse + (o_head + r // rows).to(tl.int64) * lse_head + (o_row + r % rows)
    tl.store(at, value, mask=r % rows < tl.minimum(n_rows, o_rows - o_row))


@triton.jit
def consume(me: tl.constexpr, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right,
            bottom_right, o_rows, item_cell, item_full, item_empty, q_tiles, q_full, q_empty, k_tiles, k_full, k_empty,
            v_tiles, v_full, v_empty, o_tiles,
            BLOCK: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr,
            KV_STAGES: tl.constexpr, ITEMS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(o_map)
    TURNS: tl.constexpr = 16
    rows = BLOCK >> packed_log2
    factor, scale = split_scale(scale_log2)
    r = tl.arange(0, BLOCK)
    use = 0
    uses = 0
    lone = 0
    base = 0
    item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    sequence, unit_first = load_unit(forward_units, tl.maximum(item, 0) // heads)
    q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
    while item >= 0:
        # Scores of a block's first tile: from the end of the block before, where that was possible. (The compiler carries them in
        # registers from turn to turn of this loop, but not of the outer one.)
        s = tl.zeros([BLOCK, KV_TILE], tl.float32)
        has_scores = 0
        for turn in tl.range(0, TURNS):
            if item >= 0:
                # The next item, in time.
                use += 1
                next_item = fetch(item_cell, item_full, item_empty, use, ITEMS)
                sequence, next_first = load_unit(forward_units, tl.maximum(next_item, 0) // heads)
                q0, next_o0, next_q_len, kv0, next_kv_len = load_sequence(sequences, sequence)

                mine, both, shift, first, to_tile, begin, end, after = block_of(me, lone, unit_first, q_len, kv_len, left, right, bottom_right, rows,
                                                                                base, KV_TILE)
                lone += tl.where(both, 0, 1)
                if mine:
                    n_rows = tl.minimum(rows, q_len - first)
                    # Behind the first tile, cut ones from the right, whole ones up to whole_end, cut ones from the left.
                    whole = to_tile + 1 - end_key(first, right, shift, kv_len) // KV_TILE
                    whole = tl.minimum(tl.maximum(tl.where(factor != 1.0, end, whole), begin + 1), end)
                    cut_left = to_tile + 1 - (first_key(first + n_rows - 1, left, shift) + KV_TILE - 1) // KV_TILE
                    whole_end = tl.minimum(tl.maximum(cut_left, whole), end)
                    i = first + r % rows
                    first_visible = first_key(i, left, shift)
                    end_visible = end_key(i, right, shift, kv_len)
                    blind_rows = (end_key(first, right, shift, kv_len) <= 0) | (first_key(first + n_rows - 1, left, shift) >= kv_len)

                    q_stage = me * Q_STAGES + uses % Q_STAGES
                    q_tile = q_tiles[q_stage]
                    if has_scores == 0:
                        tlx.barrier_wait(q_full[q_stage], uses // Q_STAGES & 1)
                        walk(k_full, k_empty, v_full, v_empty, base, begin, KV_STAGES)
                    uses += 1
                    if end > begin:
                        if has_scores == 0:
                            slot = begin % KV_STAGES
                            tlx.barrier_wait(k_full[slot], begin // KV_STAGES & 1)
                            s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[slot]))
                            s = tlx.async_dot_wait(0, s)
                            release(k_empty[slot])
                        if (factor == 1.0) & (begin < cut_left):
                            s = masked_right(s, to_tile - begin, end_visible, KV_TILE)
                        else:
                            s = masked(s, to_tile - begin, first_visible, end_visible, factor, KV_TILE)
                        top = tl.full([BLOCK], float("-inf"), tl.float32)
                        acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
                        p, top, shrink = softmax(s, top, scale)
                        total = tl.sum(p, 1)
                        weights = p.to(dtype)
                        for place in tl.range(begin + 1, whole):
                            acc, weights, top, total = step(q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, place, acc, weights, top, total,
                                                            scale, to_tile - place, first_visible, end_visible, factor, dtype, "both", KV_TILE, KV_STAGES)
                        for place in tl.range(whole, whole_end):
                            acc, weights, top, total = step(q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, place, acc, weights, top, total,
                                                            scale, to_tile - place, first_visible, end_visible, factor, dtype, "none", KV_TILE, KV_STAGES)
                        for place in tl.range(whole_end, end):
                            acc, weights, top, total = step(q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, place, acc, weights, top, total,
                                                            scale, to_tile - place, first_visible, end_visible, factor, dtype, "left", KV_TILE, KV_STAGES)
                        release(q_empty[q_stage])
                        slot = (end - 1) % KV_STAGES
                        tlx.barrier_wait(v_full[slot], (end - 1) // KV_STAGES & 1)
                        next_mine, next_both, next_shift, x_first, x_tile, next_begin, next_end, x_after = block_of(
                            me, lone, next_first, next_q_len, next_kv_len, left, right, bottom_right, rows, after, KV_TILE)
                        has_scores = ((next_item >= 0) & next_mine & (next_end > next_begin) & (next_begin == after) & (end == after) & (turn + 1 < TURNS)).to(tl.int32)
                        # The next block's first product goes to the tensor cores right behind this block's last and before its epilogue, where no
                        # tile must be walked over before. (Both products of a path stand in one straight line: the assembler would join them.)
                        if has_scores != 0:
                            next_stage = me * Q_STAGES + uses % Q_STAGES
                            next_slot = next_begin % KV_STAGES
                            tlx.barrier_wait(q_full[next_stage], uses // Q_STAGES & 1)
                            tlx.barrier_wait(k_full[next_slot], next_begin // KV_STAGES & 1)
                            acc = tlx.async_dot(weights, v_tiles[slot], acc)
                            s = tlx.async_dot(q_tiles[next_stage], tlx.local_trans(k_tiles[next_slot]))
                            acc = tlx.async_dot_wait(1, acc)
                            release(v_empty[slot])
                            finish(acc, top, total, scale, me, item, o0 + first, n_rows, blind_rows, o_map, o_tiles, lse, lse_head, o_rows, heads, group,
                                   packed_log2, rows, BLOCK, dtype)
                            s = tlx.async_dot_wait(0, s)
                            release(k_empty[next_slot])
                        else:
                            s = tl.zeros([BLOCK, KV_TILE], tl.float32)  # no registers for it until then
                            acc = tlx.async_dot(weights, v_tiles[slot], acc)
                            acc = tlx.async_dot_wait(0, acc)
                            release(v_empty[slot])
                            finish(acc, top, total, scale, me, item, o0 + first, n_rows, blind_rows, o_map, o_tiles, lse, lse_head, o_rows, heads, group,
                                   packed_log2, rows, BLOCK, dtype)
                    else:
                        s = tl.zeros([BLOCK, KV_TILE], tl.float32)
                        release(q_empty[q_stage])
                        finish(tl.zeros([BLOCK, HEAD_DIM], tl.float32), tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32), scale, me,
                               item, o0 + first, n_rows, blind_rows, o_map, o_tiles, lse, lse_head, o_rows, heads, group, packed_log2, rows, BLOCK, dtype)
                    walk(k_full, k_empty, v_full, v_empty, end, after, KV_STAGES)
                else:
                    s = tl.zeros([BLOCK, KV_TILE], tl.float32)
                    walk(k_full, k_empty, v_full, v_empty, base, after, KV_STAGES)
                base = after
                item = next_item
                unit_first = next_first
                o0 = next_o0
                q_len = next_q_len
                kv_len = next_kv_len
    tlx.async_descriptor_store_wait(0)


@triton.jit
def forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, counter, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
            PERSISTENT: tl.constexpr):
    BLOCK: tl.constexpr = UNIT_ROWS // 2
    Q_STAGES: tl.constexpr = 2 if PERSISTENT else 1
    KV_STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 4
    ITEMS: tl.constexpr = 4
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    q_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, 2 * Q_STAGES)
    k_tiles = tlx.local_alloc((KV_TILE, HEAD_DIM), dtype, KV_STAGES)
    v_tiles = tlx.local_alloc((KV_TILE, HEAD_DIM), dtype, KV_STAGES)
    o_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, 2)
    item_cell = tlx.local_alloc((1, ), tl.int32, ITEMS)
    item_full = tlx.alloc_barriers(num_barriers=ITEMS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=ITEMS, arrive_count=3)
    q_full = tlx.alloc_barriers(num_barriers=2 * Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=2 * Q_STAGES, num_warps=4)
    k_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=2)
    v_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            consume(0, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right, bottom_right,
                    o_rows, item_cell, item_full, item_empty, q_tiles, q_full, q_empty, k_tiles, k_full, k_empty, v_tiles, v_full,
                    v_empty, o_tiles, BLOCK, KV_TILE, HEAD_DIM, Q_STAGES, KV_STAGES, ITEMS)
        with tlx.async_task(num_warps=4, registers=232):
            consume(1, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right, bottom_right,
                    o_rows, item_cell, item_full, item_empty, q_tiles, q_full, q_empty, k_tiles, k_full, k_empty, v_tiles, v_full,
                    v_empty, o_tiles, BLOCK, KV_TILE, HEAD_DIM, Q_STAGES, KV_STAGES, ITEMS)
        with tlx.async_task(num_warps=1, registers=40):
            produce_queries(q_map, header, sequences, forward_units, counter, heads, group, packed_log2, item_cell, item_full, item_empty,
                            q_tiles, q_full, q_empty, BLOCK, HEAD_DIM, Q_STAGES, ITEMS, PERSISTENT)
        with tlx.async_task(num_warps=1, registers=40):
            produce_keys_and_values(k_map, v_map, sequences, forward_units, heads, group, packed_log2, left, right, bottom_right,
                                    item_cell, item_full, item_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
                                    BLOCK, KV_TILE, HEAD_DIM, KV_STAGES, ITEMS)


@triton.jit
def forward_g3(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
               left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One program per unit and head."""
    forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, header, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS, KV_TILE, HEAD_DIM, False)


@triton.jit
def forward_g4(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, counter, scale_log2, heads, group, packed_log2,
               left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One persistent program per multiprocessor; items are drawn from a counter, longest first."""
    forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, counter, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS, KV_TILE, HEAD_DIM, True)
