"""Forward for Blackwell with warp roles (TLX): the bodies of generations 3 and 4.

  unit        256 query rows of one sequence and head in two blocks of 128, walked over tiles of KV_TILE keys, the last tile first
  roles       softmax, rescaling and epilogue of each block (two warpgroups); products (one warp issues all of them); a warp that draws
              items and loads queries; a warp that loads keys and values
  tensor      per block 128 columns of scores, whose upper half the weights take over, and HEAD_DIM columns of o
  shared      q: Q_STAGES per block; k and v: a ring of KV_STAGES tiles each; o: 64 columns per block; a column of factors,
              through which a group agrees whether to rescale
  barriers    s_full: scores of a tile, and with them the product before, are done; p_full: its weights are stored and o is rescaled;
              o_full: the last product of a block is done
  o           rescaled only where a maximum has grown by more than 2^8: until then weights are taken against the older one
  odd blocks  a unit with one block gives it to the softmax groups in turn
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from common import BOUND, LN_2, diagonal_shift, end_key, first_key, load_sequence, load_unit, split_scale
from forward_hopper import draw, masked, unit_keys
from tickets import next_item, opening_item


@triton.jit
def read_number(cell):
    """The number in a one-element buffer of shared memory."""
    return tl.sum(tlx.local_load(cell), 0)


@triton.jit
def produce_queries(q_map, header, sequences, forward_units, answer, answer_full, heads, group, packed_log2,
                    item_cell, item_full, item_empty, q_tiles, q_full, q_empty,
                    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr, ITEMS: tl.constexpr, PERSISTENT: tl.constexpr):
    items = tl.load(header) * heads
    rows = BLOCK >> packed_log2
    # Two rounds ahead for units, one for sequences: their latency hides behind the wait for a stage.
    if PERSISTENT:
        item, taken = opening_item(items, answer, answer_full, answer_full, 1)
        following, taken = next_item(item, taken, items, answer, answer_full, answer_full, 1)
    else:
        item = draw(header, items, False, 0)
        following = draw(header, items, False, 1)
    sequence, first = load_unit(forward_units, tl.maximum(item, 0) // heads)
    q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
    next_sequence, next_first = load_unit(forward_units, tl.maximum(following, 0) // heads)
    use = 0
    lone = 0
    uses_0 = 0
    uses_1 = 0
    while item >= 0:
        tlx.barrier_wait(item_empty[use % ITEMS], (use // ITEMS & 1) ^ 1)
        tlx.local_store(item_cell[use % ITEMS], tl.full([1], 0, tl.int32) + item)
        tlx.barrier_arrive(item_full[use % ITEMS])

        after = draw(header, items, False, 2)
        if PERSISTENT:
            after, taken = next_item(following, taken, items, answer, answer_full, answer_full, 1)
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
def open_item(item, sequences, forward_units, heads, packed_log2, left, right, bottom_right, BLOCK: tl.constexpr, KV_TILE: tl.constexpr):
    """Of an item: first row in o, rows and keys of the sequence, the mask's shift, first row, rows of a block, first tile, tiles, and
    whether it has two blocks."""
    rows = BLOCK >> packed_log2
    sequence, first = load_unit(forward_units, item // heads)
    q0, o0, q_len, kv0, kv_len = load_sequence(sequences, sequence)
    shift = diagonal_shift(bottom_right, q_len, kv_len)
    lo, hi, tile0, tiles = unit_keys(first, 2 * rows, q_len, kv_len, left, right, shift, KV_TILE)
    return o0, q_len, kv_len, shift, first, rows, tile0, tiles, q_len - first > rows


@triton.jit
def open_block(c: tl.constexpr, lone, unit_first, both, rows, q_len, kv_len, left, right, shift, tile0, tiles, KV_TILE: tl.constexpr):
    """Of a block: whether it exists, its first row, the place of its first tile counted from the item's, its tiles."""
    mine = both | ((lone & 1) == c)
    first = unit_first + tl.where(both, c * rows, 0)
    lo, hi, tile, count = unit_keys(first, rows, q_len, kv_len, left, right, shift, KV_TILE)
    count = tl.where(mine, count, 0)
    return mine, first, tl.where(count > 0, tile0 + tiles - tile - count, 0), count


@triton.jit
def issue(sequences, forward_units, heads, packed_log2, left, right, bottom_right, item_cell, item_full, item_empty,
          q_tiles, q_full, q_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, s_tiles, p_tiles, o_sums, s_full, p_full, o_full,
          finished, BLOCK: tl.constexpr, KV_TILE: tl.constexpr, Q_STAGES: tl.constexpr, KV_STAGES: tl.constexpr, ITEMS: tl.constexpr):
    """All products, in the order p v of the tile before, then q k^T, block by block."""
    use = 0
    base = 0
    lone = 0
    uses_0 = 0
    uses_1 = 0
    done_0 = 0
    done_1 = 0
    item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    while item >= 0:
        o0, q_len, kv_len, shift, unit_first, rows, tile0, tiles, both = open_item(item, sequences, forward_units, heads, packed_log2, left,
                                                                                  right, bottom_right, BLOCK, KV_TILE)
        mine_0, first_0, begin_0, count_0 = open_block(0, lone, unit_first, both, rows, q_len, kv_len, left, right, shift, tile0, tiles, KV_TILE)
        mine_1, first_1, begin_1, count_1 = open_block(1, lone, unit_first, both, rows, q_len, kv_len, left, right, shift, tile0, tiles, KV_TILE)
        if mine_0:
            tlx.barrier_wait(q_full[uses_0 % Q_STAGES], uses_0 // Q_STAGES & 1)
        if mine_1:
            tlx.barrier_wait(q_full[Q_STAGES + uses_1 % Q_STAGES], uses_1 // Q_STAGES & 1)
        for index in tl.range(0, tl.where(tiles > 0, tiles + 1, 0)):
            k_slot = (base + index) % KV_STAGES
            v_slot = (base + index + KV_STAGES - 1) % KV_STAGES
            if index < tiles:
                tlx.barrier_wait(k_full[k_slot], (base + index) // KV_STAGES & 1)
            if index > 0:
                tlx.barrier_wait(v_full[v_slot], (base + index - 1) // KV_STAGES & 1)
            for c in tl.static_range(2):
                begin = begin_0 if c == 0 else begin_1
                count = count_0 if c == 0 else count_1
                done = done_0 if c == 0 else done_1
                uses = uses_0 if c == 0 else uses_1
                before = index - 1 - begin
                if (before >= 0) & (before < count):
                    tlx.barrier_wait(p_full[c], (done + before) & 1)
                    tlx.async_dot(p_tiles[2 * c + 1], v_tiles[v_slot], o_sums[c], use_acc=before > 0, force_async=True)
                    if before == count - 1:
                        tlx.tcgen05_commit(o_full[c])
                if (index >= begin) & (index < begin + count):
                    tlx.async_dot(q_tiles[c * Q_STAGES + uses % Q_STAGES], tlx.local_trans(k_tiles[k_slot]), s_tiles[c], use_acc=False,
                                  mBarriers=[s_full[c]])
            if index < tiles:
                tlx.tcgen05_commit(k_empty[k_slot])
            if index > 0:
                tlx.tcgen05_commit(v_empty[v_slot])
        if mine_0:
            tlx.tcgen05_commit(q_empty[uses_0 % Q_STAGES])
        if mine_1:
            tlx.tcgen05_commit(q_empty[Q_STAGES + uses_1 % Q_STAGES])
        uses_0 += tl.where(mine_0, 1, 0)
        uses_1 += tl.where(mine_1, 1, 0)
        done_0 += count_0
        done_1 += count_1
        lone += tl.where(both, 0, 1)
        base += tiles
        use += 1
        item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    # Nothing may be on its way to a barrier when the program ends.
    tlx.tcgen05_commit(finished[0])
    tlx.barrier_wait(finished[0], 0)


@triton.jit
def weigh(c: tl.constexpr, j, done, tile, top, total, scale, first_visible, end_visible, factor, s_tiles, p_tiles, o_sums, factors, s_full,
          p_full, dtype: tl.constexpr, MASKED: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Weights of tile j of an item's block, by quarters of its columns, so that no more than a quarter needs registers beside the scores."""
    PART: tl.constexpr = KV_TILE // 4
    tlx.barrier_wait(s_full[c], (done + j) & 1)
    s0 = tlx.local_load(tlx.subslice(s_tiles[c], 0, PART))
    s1 = tlx.local_load(tlx.subslice(s_tiles[c], PART, PART))
    s2 = tlx.local_load(tlx.subslice(s_tiles[c], 2 * PART, PART))
    s3 = tlx.local_load(tlx.subslice(s_tiles[c], 3 * PART, PART))
    if MASKED:
        s0 = masked(s0, 4 * tile, first_visible, end_visible, factor, PART)
        s1 = masked(s1, 4 * tile + 1, first_visible, end_visible, factor, PART)
        s2 = masked(s2, 4 * tile + 2, first_visible, end_visible, factor, PART)
        s3 = masked(s3, 4 * tile + 3, first_visible, end_visible, factor, PART)
    largest = tl.maximum(tl.maximum(tl.maximum(tl.max(s0, 1), tl.max(s1, 1)), tl.maximum(tl.max(s2, 1), tl.max(s3, 1))), top)
    # The maximum moves only when it would be exceeded by more than 2^8. From -inf every finite value is a move.
    new_top = tl.where((largest - top) * scale > 8.0, largest, top)
    zero = tl.where(new_top == float("-inf"), 0.0, new_top * scale)  # a row that has seen no key must not give -inf - -inf
    shrink = tl.math.exp2(top * scale - zero)
    total = total * shrink
    # The weights take the place of the second half of the scores.
    for x in tl.static_range(4):
        s = s0 if x == 0 else (s1 if x == 1 else (s2 if x == 2 else s3))
        p = tl.math.exp2(s * scale - zero[:, None])
        tlx.local_store(tlx.subslice(p_tiles[2 * c + 1], x * PART, PART), p.to(dtype))
        total += tl.sum(p, 1)
    if j > 0:
        tlx.local_store(factors[c], shrink)
        if tl.min(tlx.local_load(factors[c]), 0) < 1.0:
            for x in tl.static_range(HEAD_DIM // 32):
                part = tlx.subslice(o_sums[c], x * 32, 32)
                tlx.local_store(part, tlx.local_load(part) * shrink[:, None])
    tlx.barrier_arrive(p_full[c])
    return new_top, total


@triton.jit
def soften(c: tl.constexpr, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right,
           bottom_right, o_rows, item_cell, item_full, item_empty, s_tiles, p_tiles, o_sums, factors, s_full, p_full, o_full,
           o_tiles, BLOCK: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ITEMS: tl.constexpr):
    """Weights of the tiles of block c, o and lse."""
    dtype: tl.constexpr = tlx.dtype_of(o_map)
    factor, scale = split_scale(scale_log2)
    r = tl.arange(0, BLOCK)
    use = 0
    uses = 0
    lone = 0
    done = 0
    item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    while item >= 0:
        o0, q_len, kv_len, shift, unit_first, rows, tile0, tiles, both = open_item(item, sequences, forward_units, heads, packed_log2, left,
                                                                                  right, bottom_right, BLOCK, KV_TILE)
        mine, first, begin, count = open_block(c, lone, unit_first, both, rows, q_len, kv_len, left, right, shift, tile0, tiles, KV_TILE)
        if mine:
            n_rows = tl.minimum(rows, q_len - first)
            i = first + r % rows
            first_visible = first_key(i, left, shift)
            end_visible = end_key(i, right, shift, kv_len)
            # Tiles between these are cut by nothing.
            whole_begin = tl.where(factor != 1.0, 0x3FFFFFFF, (first_key(first + n_rows - 1, left, shift) + KV_TILE - 1) // KV_TILE)
            whole_end = end_key(first, right, shift, kv_len) // KV_TILE
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            to_tile = tile0 + tiles - 1 - begin
            for j in tl.range(0, count):
                tile = to_tile - j
                if (tile < whole_begin) | (tile >= whole_end):
                    top, total = weigh(c, j, done, tile, top, total, scale, first_visible, end_visible, factor, s_tiles, p_tiles, o_sums, factors,
                                       s_full, p_full, dtype, True, KV_TILE, HEAD_DIM)
                else:
                    top, total = weigh(c, j, done, tile, top, total, scale, first_visible, end_visible, factor, s_tiles, p_tiles, o_sums, factors,
                                       s_full, p_full, dtype, False, KV_TILE, HEAD_DIM)
            # Once more, so that these numbers do not occupy registers beside the scores.
            o0, q_len, kv_len, shift, unit_first, rows, tile0, tiles, both = open_item(item, sequences, forward_units, heads, packed_log2, left,
                                                                                      right, bottom_right, BLOCK, KV_TILE)
            mine, first, begin, count = open_block(c, lone, unit_first, both, rows, q_len, kv_len, left, right, shift, tile0, tiles, KV_TILE)
            n_rows = tl.minimum(rows, q_len - first)
            # No maximum means no visible key: o is exactly 0 and lse -inf, whatever v holds.
            blind = (top == float("-inf")) & (total == total)
            inverse = 1.0 / tl.where(blind, 1.0, total)
            o_head = tl.where(packed_log2 > 0, item % heads * group, item % heads)
            if count > 0:
                tlx.barrier_wait(o_full[c], uses & 1)
            for x in tl.static_range(HEAD_DIM // 64):
                tlx.async_descriptor_store_wait(0)  # the store before has left its buffer
                if count > 0:
                    sums = tlx.local_load(tlx.subslice(o_sums[c], x * 64, 64))
                    tlx.local_store(o_tiles[c], tl.where(blind[:, None], 0.0, sums * inverse[:, None]).to(dtype))
                else:
                    tlx.local_store(o_tiles[c], tl.zeros([BLOCK, 64], dtype))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(o_map, o_tiles[c], [BOUND, o_head, o0 + first + n_rows, BOUND - n_rows, x * 64])
            value = tl.where(blind, float("-inf"), (top * scale + tl.math.log2(total)) * LN_2)
            at = lse + (o_head + r // rows).to(tl.int64) * lse_head + (o0 + first + r % rows)
            tl.store(at, value, mask=r % rows < tl.minimum(n_rows, o_rows - o0 - first))
            uses += tl.where(count > 0, 1, 0)
        done += count
        lone += tl.where(both, 0, 1)
        use += 1
        item = fetch(item_cell, item_full, item_empty, use, ITEMS)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
            PERSISTENT: tl.constexpr):
    BLOCK: tl.constexpr = UNIT_ROWS // 2
    Q_STAGES: tl.constexpr = 2 if HEAD_DIM == 64 else 1
    KV_STAGES: tl.constexpr = 2 if HEAD_DIM > 64 else 4
    ITEMS: tl.constexpr = 2
    dtype: tl.constexpr = tlx.dtype_of(q_map)
    q_tiles = tlx.local_alloc((BLOCK, HEAD_DIM), dtype, 2 * Q_STAGES)
    k_tiles = tlx.local_alloc((KV_TILE, HEAD_DIM), dtype, KV_STAGES)
    v_tiles = tlx.local_alloc((KV_TILE, HEAD_DIM), dtype, KV_STAGES)
    o_tiles = tlx.local_alloc((BLOCK, 64), dtype, 2)
    factors = tlx.local_alloc((BLOCK, ), tl.float32, 2)
    s_tiles = tlx.local_alloc((BLOCK, KV_TILE), tl.float32, 2, tlx.storage_kind.tmem)
    p_tiles = tlx.local_alloc((BLOCK, KV_TILE), dtype, 4, tlx.storage_kind.tmem, reuse=s_tiles)
    o_sums = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, 2, tlx.storage_kind.tmem)
    item_cell = tlx.local_alloc((1, ), tl.int32, ITEMS)
    item_full = tlx.alloc_barriers(num_barriers=ITEMS, arrive_count=1)
    item_empty = tlx.alloc_barriers(num_barriers=ITEMS, arrive_count=4)
    q_full = tlx.alloc_barriers(num_barriers=2 * Q_STAGES)
    q_empty = tlx.alloc_barriers(num_barriers=2 * Q_STAGES)
    k_full = tlx.alloc_barriers(num_barriers=KV_STAGES)
    k_empty = tlx.alloc_barriers(num_barriers=KV_STAGES)
    v_full = tlx.alloc_barriers(num_barriers=KV_STAGES)
    v_empty = tlx.alloc_barriers(num_barriers=KV_STAGES)
    s_full = tlx.alloc_barriers(num_barriers=2)
    p_full = tlx.alloc_barriers(num_barriers=2)
    o_full = tlx.alloc_barriers(num_barriers=2)
    finished = tlx.alloc_barriers(num_barriers=1)
    answer = tlx.local_alloc((2, ), tl.int64, 1)
    answer_full = tlx.alloc_barriers(num_barriers=1)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            soften(0, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right, bottom_right, o_rows,
                   item_cell, item_full, item_empty, s_tiles, p_tiles, o_sums, factors, s_full, p_full, o_full, o_tiles, BLOCK, KV_TILE,
                   HEAD_DIM, ITEMS)
        with tlx.async_task(num_warps=4, registers=208):
            soften(1, o_map, lse, lse_head, sequences, forward_units, scale_log2, heads, group, packed_log2, left, right, bottom_right, o_rows,
                   item_cell, item_full, item_empty, s_tiles, p_tiles, o_sums, factors, s_full, p_full, o_full, o_tiles, BLOCK, KV_TILE,
                   HEAD_DIM, ITEMS)
        with tlx.async_task(num_warps=1, registers=88):
            issue(sequences, forward_units, heads, packed_log2, left, right, bottom_right, item_cell, item_full, item_empty,
                  q_tiles, q_full, q_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, s_tiles, p_tiles, o_sums, s_full, p_full,
                  o_full, finished, BLOCK, KV_TILE, Q_STAGES, KV_STAGES, ITEMS)
        with tlx.async_task(num_warps=1, registers=88):
            produce_queries(q_map, header, sequences, forward_units, answer, answer_full, heads, group, packed_log2, item_cell, item_full, item_empty,
                            q_tiles, q_full, q_empty, BLOCK, HEAD_DIM, Q_STAGES, ITEMS, PERSISTENT)
        with tlx.async_task(num_warps=1, registers=88):
            produce_keys_and_values(k_map, v_map, sequences, forward_units, heads, group, packed_log2, left, right, bottom_right,
                                    item_cell, item_full, item_empty, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
                                    BLOCK, KV_TILE, HEAD_DIM, KV_STAGES, ITEMS)


@triton.jit
def forward_g3(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
               left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One program per unit and head."""
    forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS, KV_TILE, HEAD_DIM, False)


@triton.jit
def forward_g4(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
               left, right, bottom_right, o_rows, UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Persistent: a program takes the items of others that have not started, longest first (tickets.py)."""
    forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS, KV_TILE, HEAD_DIM, True)
