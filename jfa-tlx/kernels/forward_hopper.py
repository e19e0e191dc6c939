"""Forward for Hopper with warp roles (TLX): the bodies of generations 3 and 4.

  unit        128 query rows of one sequence and head in two blocks of 64, walked over tiles of KV_TILE keys
  roles       two consumer warpgroups, a block each; a warp that draws items and loads queries; a warp that loads keys and values
  buffers     q: a ring of 2 Q_STAGES blocks; k and v: a ring of KV_STAGES tiles each; o: one block per consumer
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


# Numbers of an item in shared memory: tiles (-1: no more items), first query head, key/value head, first key row, one past the last key
# that a row sees, last tile, keys; per consumer rows (0: none), first row of o, first row plus the mask's shift, first place, the one
# behind the last, first and end of the whole ones, flags (how the first tile is masked, 4: some row sees no key, 8: begins at place 0),
# place of its queries.
FIELDS = tl.constexpr(25)
MASK_NONE = tl.constexpr(0)
MASK_RIGHT = tl.constexpr(1)
MASK_BOTH = tl.constexpr(2)
KV_TILE_LOG2 = tl.constexpr(7)


@triton.jit
def release(bar):
    """Of a block of threads: each warp's first lane stands for its 32 (no barrier among the warps)."""
    tlx.barrier_arrive(bar, 32, pred=tlx.thread_id(0) % 32 == 0)


@triton.jit
def draw(counter, items, PERSISTENT: tl.constexpr, DRAWN: tl.constexpr):
    """Next item, -1 after the last one."""
    if PERSISTENT:
        item = tl.atomic_add(counter, 1, sem="relaxed")  # else every item would empty the L1
    else:
        item = tl.program_id(0) if DRAWN == 0 else items
    return tl.where(item < items, item, -1)


@triton.jit
def unit_keys(first, rows, q_len, kv_len, left, right, shift, KV_TILE: tl.constexpr):
    """Of `rows` rows from `first`: first visible key, one past the last; first tile, tiles."""
    last = tl.minimum(first + rows, q_len) - 1
    lo = first_key(first, left, shift)
    hi = end_key(last, right, shift, kv_len)
    tl.static_assert(KV_TILE == 128)
    tile0 = lo >> KV_TILE_LOG2
    return lo, hi, tile0, tl.where(hi > lo, ((hi - 1) >> KV_TILE_LOG2) - tile0 + 1, 0)


@triton.jit
def put(cell, value):
    """Writes a number to shared memory."""
    tlx.local_store(cell, tl.zeros([1], tl.int32) + value)


@triton.jit
def get(cell):
    """Reads it."""
    return tl.sum(tlx.local_load(cell), 0)


@triton.jit
def produce_queries(q_map, header, sequences, forward_units, counter, heads, group, packed_log2, left, right, bottom_right, factor,
                    cells, item_full, item_empty, q_tiles, q_full, q_empty,
                    BLOCK: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr, ITEMS: tl.constexpr,
                    PERSISTENT: tl.constexpr):
    """Draws items, tells the consumers and the other producer what they need of them (`cells`, see FIELDS), loads queries."""
    items = tl.load(header) * heads
    rows = BLOCK >> packed_log2
    item = draw(counter, items, PERSISTENT, 0)
    use = 0
    lone = 0
    blocks = 0
    while item >= 0:
        following = draw(counter, items, PERSISTENT, 1)
        sequence, first = load_unit(forward_units, item // heads)
        q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
        head = item % heads
        q_head = tl.where(packed_log2 > 0, head * group, head)
        shift = diagonal_shift(bottom_right, q_len, kv_len)
        lo, hi, tile0, tiles = unit_keys(first, 2 * rows, q_len, kv_len, left, right, shift, KV_TILE)
        last_tile = tile0 + tiles - 1
        both = q_len - first > rows
        # The places of its queries are free before an item is announced: a lone block's place changes hands, and who has not waited for the
        # copy before in that place must know it complete, or the barrier's parity would tell of the one before that.
        tlx.barrier_wait(q_empty[blocks % (2 * Q_STAGES)], (blocks // (2 * Q_STAGES) & 1) ^ 1)
        if both:
            tlx.barrier_wait(q_empty[(blocks + 1) % (2 * Q_STAGES)], ((blocks + 1) // (2 * Q_STAGES) & 1) ^ 1)
        tlx.barrier_wait(item_empty[use % ITEMS], (use // ITEMS & 1) ^ 1)
        at = use % ITEMS * FIELDS
        put(cells[at], tiles)
        put(cells[at + 1], q_head)
        put(cells[at + 2], tl.where(packed_log2 > 0, head, head // group))
        put(cells[at + 3], kv0)
        put(cells[at + 4], hi)
        put(cells[at + 5], last_tile)
        put(cells[at + 6], kv_len)
        for consumer in tl.static_range(2):
            mine = both | ((lone & 1) == consumer)  # a lone block goes to the consumers in turn
            f = first + tl.where(both, consumer * rows, 0)
            count = tl.where(mine, tl.minimum(rows, q_len - f), 0)
            own_lo, own_hi, own_tile, own_tiles = unit_keys(f, rows, q_len, kv_len, left, right, shift, KV_TILE)
            own_tiles = tl.where(mine, own_tiles, 0)
            begin = tl.where(own_tiles > 0, last_tile + 1 - own_tile - own_tiles, 0)
            end = begin + own_tiles
            # Places (tile t stands at last_tile - t): behind the first, cut ones from the right, whole ones up to whole_end, cut ones
            # from the left.
            every_end = end_key(f, right, shift, kv_len)
            every_first = first_key(f + count - 1, left, shift)
            right_cut = last_tile + 1 - (every_end >> KV_TILE_LOG2)
            cut_left = last_tile + 1 - ((every_first + KV_TILE - 1) >> KV_TILE_LOG2)
            whole = tl.minimum(tl.maximum(tl.where(factor != 1.0, end, right_cut), begin + 1), end)
            whole_end = tl.minimum(tl.maximum(cut_left, whole), end)
            # How the first tile is masked.
            kind = tl.where((factor != 1.0) | (begin >= cut_left), MASK_BOTH, tl.where(begin < right_cut, MASK_RIGHT, MASK_NONE))
            blind = (every_end <= 0) | (every_first >= kv_len)
            direct = (own_tiles > 0) & (begin == 0)
            block = at + 7 + consumer * 9
            put(cells[block], count)
            put(cells[block + 1], o0 + f)
            put(cells[block + 2], f + shift)
            put(cells[block + 3], begin)
            put(cells[block + 4], end)
            put(cells[block + 5], whole)
            put(cells[block + 6], whole_end)
            put(cells[block + 7], kind + tl.where(blind, 4, 0) + tl.where(direct, 8, 0))
            put(cells[block + 8], blocks + tl.where(both, consumer, 0))
        tlx.barrier_arrive(item_full[use % ITEMS])

        for row in tl.range(first, tl.minimum(first + 2 * rows, q_len), rows):
            n = tl.minimum(rows, q_len - row)
            stage = blocks % (2 * Q_STAGES)
            tlx.barrier_expect_bytes(q_full[stage], 2 * BLOCK * HEAD_DIM)
            tlx.async_descriptor_load(q_map, q_tiles[stage], [BOUND, q_head, q0 + row + n, BOUND - n, 0], q_full[stage])
            blocks += 1
        lone += tl.where(both, 0, 1)
        use += 1
        item = following
    tlx.barrier_wait(item_empty[use % ITEMS], (use // ITEMS & 1) ^ 1)
    put(cells[use % ITEMS * FIELDS], -1)
    put(cells[use % ITEMS * FIELDS + 14], 0)
    put(cells[use % ITEMS * FIELDS + 23], 0)
    tlx.barrier_arrive(item_full[use % ITEMS])


@triton.jit
def produce_keys_and_values(k_map, v_map, cells, item_full, item_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
                            KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, KV_STAGES: tl.constexpr, ITEMS: tl.constexpr):
    use = 0
    base = 0
    tlx.barrier_wait(item_full[0], 0)
    tiles = get(cells[0])
    while tiles >= 0:
        at = use % ITEMS * FIELDS
        kv_head = get(cells[at + 2])
        kv0 = get(cells[at + 3])
        hi = get(cells[at + 4])
        last_tile = get(cells[at + 5])
        tlx.barrier_arrive(item_empty[use % ITEMS])  # every thread: each has read its own copy
        # The last tile first: it is the one that the end of the sequence, or a diagonal, cuts. In the order k0 k1 v0 k2 v1 ... v(n-1).
        for j in tl.range(0, tl.where(tiles > 0, tiles + 1, 0)):
            if j < tiles:
                slot = (base + j) % KV_STAGES
                row = (last_tile - j) * KV_TILE
                n = tl.minimum(KV_TILE, hi - row)
                tlx.barrier_wait(k_empty[slot], ((base + j) // KV_STAGES & 1) ^ 1)
                tlx.barrier_expect_bytes(k_full[slot], 2 * KV_TILE * HEAD_DIM)
                tlx.async_descriptor_load(k_map, k_tiles[slot], [BOUND, kv_head, kv0 + row + n, BOUND - n, 0], k_full[slot])
            if j > 0:
                slot = (base + j - 1) % KV_STAGES
                row = (last_tile - j + 1) * KV_TILE
                n = tl.minimum(KV_TILE, hi - row)
                tlx.barrier_wait(v_empty[slot], ((base + j - 1) // KV_STAGES & 1) ^ 1)
                tlx.barrier_expect_bytes(v_full[slot], 2 * KV_TILE * HEAD_DIM)
                tlx.async_descriptor_load(v_map, v_tiles[slot], [BOUND, kv_head, kv0 + row + n, BOUND - n, 0], v_full[slot])
        base += tiles
        use += 1
        tlx.barrier_wait(item_full[use % ITEMS], use // ITEMS & 1)
        tiles = get(cells[use % ITEMS * FIELDS])


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
def finish(acc, top, total, scale, me: tl.constexpr, o_head, o_row, n_rows, blind_rows, o_map, o_tiles, lse, lse_head, o_rows, rows,
           BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Divides by the sum; stores o and lse."""
    # No maximum means no visible key: o is exactly 0 and lse -inf, whatever v holds.
    blind = (top == float("-inf")) & (total == total)
    acc = acc * (1.0 / tl.where(blind, 1.0, total))[:, None]
    if blind_rows:
        acc = tl.where(blind[:, None], 0.0, acc)
    tlx.async_descriptor_store_wait(0)  # the store before has left its buffer
    tlx.local_store(o_tiles[me], acc.to(dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(o_map, o_tiles[me], [BOUND, o_head, o_row + n_rows, BOUND - n_rows, 0])
    r = tl.arange(0, BLOCK)
    value = tl.where(blind, float("-inf"), (top * scale + tl.math.log2(total)) * LN_2)
    at = lse + (o_head + r // rows).to(tl.int64) * lse_head + (o_row + r % rows)
    tl.store(at, value, mask=r % rows < tl.minimum(n_rows, o_rows - o_row))


@triton.jit
def consume(me: tl.constexpr, o_map, lse, lse_head, scale_log2, packed_log2, left, right, o_rows, cells, item_full, item_empty,
            q_tiles, q_full, q_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, o_tiles,
            BLOCK: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr, KV_STAGES: tl.constexpr,
            ITEMS: tl.constexpr):
    dtype: tl.constexpr = tlx.dtype_of(o_map)
    TURNS: tl.constexpr = 16
    rows = BLOCK >> packed_log2
    factor, scale = split_scale(scale_log2)
    r = tl.arange(0, BLOCK)
    use = 0
    base = 0
    tlx.barrier_wait(item_full[0], 0)
    tiles = get(cells[0])
    while tiles >= 0:
        # Scores of a block's first tile: from the end of the block before, where that was possible. (The compiler carries them in
        # registers from turn to turn of this loop, but not of the outer one.)
        s = tl.zeros([BLOCK, KV_TILE], tl.float32)
        early = 0
        for turn in tl.range(0, TURNS):
            if tiles >= 0:
                at = use % ITEMS * FIELDS
                q_head = get(cells[at + 1])
                to_tile = base + get(cells[at + 5])
                kv_len = get(cells[at + 6])
                block = at + 7 + me * 9
                n_rows = get(cells[block])
                o_row = get(cells[block + 1])
                x = get(cells[block + 2]) + r % rows
                begin = base + get(cells[block + 3])
                end = base + get(cells[block + 4])
                whole = base + get(cells[block + 5])
                whole_end = base + get(cells[block + 6])
                flags = get(cells[block + 7])
                q_place = get(cells[block + 8])
                tlx.barrier_arrive(item_empty[use % ITEMS])  # every thread: each has read its own copy
                after = base + tiles
                use += 1
                if n_rows > 0:
                    first_visible = first_key(x, left, 0)
                    end_visible = end_key(x, right, 0, kv_len)
                    q_stage = q_place % (2 * Q_STAGES)
                    q_tile = q_tiles[q_stage]
                    top = tl.full([BLOCK], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK], tl.float32)
                    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
                    if early == 0:
                        tlx.barrier_wait(q_full[q_stage], q_place // (2 * Q_STAGES) & 1)
                        walk(k_full, k_empty, v_full, v_empty, base, begin, KV_STAGES)
                    if end > begin:
                        if early == 0:
                            slot = begin % KV_STAGES
                            tlx.barrier_wait(k_full[slot], begin // KV_STAGES & 1)
                            s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[slot]))
                            s = tlx.async_dot_wait(0, s)
                            release(k_empty[slot])
                        if flags & 3 == MASK_RIGHT:
                            s = masked_right(s, to_tile - begin, end_visible, KV_TILE)
                        if flags & 3 == MASK_BOTH:
                            s = masked(s, to_tile - begin, first_visible, end_visible, factor, KV_TILE)
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
                        tlx.barrier_wait(item_full[use % ITEMS], use // ITEMS & 1)
                        next_at = use % ITEMS * FIELDS
                        more = get(cells[next_at]) >= 0
                        direct = get(cells[next_at + 14 + me * 9]) & 8 != 0
                        early = (more & direct & (end == after) & (turn + 1 < TURNS)).to(tl.int32)
                        slot = (end - 1) % KV_STAGES
                        tlx.barrier_wait(v_full[slot], (end - 1) // KV_STAGES & 1)
                        # The next block's first product goes to the tensor cores right behind this block's last and before its epilogue, where
                        # no tile must be walked over before. (Both products of a path stand in one straight line: the assembler would join
                        # them.)
                        if early != 0:
                            next_q_place = get(cells[next_at + 15 + me * 9])
                            next_stage = next_q_place % (2 * Q_STAGES)
                            next_slot = after % KV_STAGES
                            tlx.barrier_wait(q_full[next_stage], next_q_place // (2 * Q_STAGES) & 1)
                            tlx.barrier_wait(k_full[next_slot], after // KV_STAGES & 1)
                            acc = tlx.async_dot(weights, v_tiles[slot], acc)
                            s = tlx.async_dot(q_tiles[next_stage], tlx.local_trans(k_tiles[next_slot]))
                            acc = tlx.async_dot_wait(1, acc)
                            release(v_empty[slot])
                            finish(acc, top, total, scale, me, q_head, o_row, n_rows, flags & 4 != 0, o_map, o_tiles, lse, lse_head, o_rows, rows, BLOCK, dtype)
                            s = tlx.async_dot_wait(0, s)
                            release(k_empty[next_slot])
                        else:
                            s = tl.zeros([BLOCK, KV_TILE], tl.float32)  # no registers for it until then
                            acc = tlx.async_dot(weights, v_tiles[slot], acc)
                            acc = tlx.async_dot_wait(0, acc)
                            release(v_empty[slot])
                    else:
                        s = tl.zeros([BLOCK, KV_TILE], tl.float32)
                        release(q_empty[q_stage])
                    if early == 0:
                        walk(k_full, k_empty, v_full, v_empty, end, after, KV_STAGES)
                        finish(acc, top, total, scale, me, q_head, o_row, n_rows, flags & 4 != 0, o_map, o_tiles, lse, lse_head, o_rows, rows, BLOCK, dtype)
                else:
                    s = tl.zeros([BLOCK, KV_TILE], tl.float32)
                    walk(k_full, k_empty, v_full, v_empty, base, after, KV_STAGES)
                base = after
                tlx.barrier_wait(item_full[use % ITEMS], use // ITEMS & 1)
                tiles = get(cells[use % ITEMS * FIELDS])
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
    cells = tlx.local_alloc((1, ), tl.int32, ITEMS * 25)
    item_full = tlx.alloc_barriers(num_barriers=ITEMS, arrive_count=1)
    item_empty = tlx.alloc_warp_barrier(num_barriers=ITEMS, num_warps=9)
    q_full = tlx.alloc_barriers(num_barriers=2 * Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=2 * Q_STAGES, num_warps=4)
    k_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=2)
    v_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=2)

    factor, positive = split_scale(scale_log2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            consume(0, o_map, lse, lse_head, scale_log2, packed_log2, left, right, o_rows, cells, item_full, item_empty, q_tiles, q_full, q_empty,
                    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, o_tiles, BLOCK, KV_TILE, HEAD_DIM, Q_STAGES, KV_STAGES, ITEMS)
        with tlx.async_task(num_warps=4, registers=224):
            consume(1, o_map, lse, lse_head, scale_log2, packed_log2, left, right, o_rows, cells, item_full, item_empty, q_tiles, q_full, q_empty,
                    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, o_tiles, BLOCK, KV_TILE, HEAD_DIM, Q_STAGES, KV_STAGES, ITEMS)
        with tlx.async_task(num_warps=1, registers=56):
            produce_queries(q_map, header, sequences, forward_units, counter, heads, group, packed_log2, left, right, bottom_right, factor,
                            cells, item_full, item_empty, q_tiles, q_full, q_empty, BLOCK, KV_TILE, HEAD_DIM, Q_STAGES, ITEMS, PERSISTENT)
        with tlx.async_task(num_warps=1, registers=56):
            produce_keys_and_values(k_map, v_map, cells, item_full, item_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
                                    KV_TILE, HEAD_DIM, KV_STAGES, ITEMS)


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
