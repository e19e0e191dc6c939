"""Work by cluster launch control (Blackwell): programs that run take those that have not started yet.

A launch has a ticket per cluster of CTAS programs. The hardware starts clusters in their order; a running one that needs work asks it to
cancel the next one not yet started and does that ticket's work instead, until the answer is that none is left. There is no counter in
memory to clear, and programs start only on multiprocessors that are free.

The launcher knows the capacity of the list of items, not how many there are, and bounds the tickets to some dozens a multiprocessor:

  as many tickets as items, or more   a ticket is an item. Whoever gets one without an item asks on at once, so that what is surplus is
                                      cancelled by programs that run, not started
  more items than tickets             the first half of the tickets takes 15/16 of the list (longest items first), each every so manyth
                                      of it; the other half the rest, likewise: their shares are a fifteenth as large, so that they level
                                      out what the first ones leave uneven

The answer arrives in every program of a cluster. The first one asks; before it does, all have read the answer before.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def shares(items, tickets):
    """(Tickets of the first part of the list, its end)."""
    return (tickets + 1) // 2, tl.where(tickets > 1, items - items // 16, items)


@triton.jit
def first_item(ticket, items, tickets):
    """First item of a ticket; `items` or more when it has none."""
    first, end = shares(items, tickets)
    return tl.where((items <= tickets) | (ticket < first), ticket, end + ticket - first)


@triton.jit
def item_after(item, items, tickets):
    """The ticket's item after `item`; `items` after the last one."""
    first, end = shares(items, tickets)
    step = tl.where(item < end, first, tickets - first)
    stop = tl.where(item < end, end, items)
    return tl.where((items <= tickets) | (item < 0) | (item + step >= stop), items, item + step)


@tl.core.builtin
def answer_in(cell, _semantic=None):
    """A place of 16 bytes, as what the compiler calls a response (which cannot be an argument of a function)."""
    return tlx.clc_response(cell.handle, 1, cell.type.layout)


@triton.jit
def request(answer, full):
    """Asks for another ticket."""
    tlx.barrier_expect_bytes(full[0], 16)
    tlx._clc_issue(answer_in(answer[0]), full[0])


@triton.jit
def settle(item, taken, items, answer, full, empty, CTAS: tl.constexpr):
    """Draws tickets until one has an item."""
    while (item >= items) & (taken > 0):
        tlx.barrier_wait(full[0], (taken & 1) ^ 1)
        program = tlx._clc_query(answer_in(answer[0]))[0]
        if program >= 0:
            tlx.fence("async_shared")  # the answer has been read before the next one is written
            if CTAS > 1:
                tlx.barrier_arrive(empty[0], 1, remote_cta_rank=0)
                if tlx.cluster_cta_rank() == 0:
                    tlx.barrier_wait(empty[0], (taken & 1) ^ 1)
            request(answer, full)
            item = first_item(program // CTAS, items, tl.num_programs(0) // CTAS)
            taken += 1
        else:
            taken = taken * 0  # a request after this answer would be an error
    return tl.where(item < items, item, -1), taken


@triton.jit
def opening_item(items, answer, full, empty, CTAS: tl.constexpr):
    """(First item of this cluster, -1 without any; requests made, 0 once nothing is left)."""
    request(answer, full)
    item = first_item(tl.program_id(0) // CTAS, items, tl.num_programs(0) // CTAS)
    return settle(item, tl.full((), 1, tl.int32), items, answer, full, empty, CTAS)


@triton.jit
def next_item(item, taken, items, answer, full, empty, CTAS: tl.constexpr):
    """The same after `item`; -1 after -1."""
    return settle(item_after(item, items, tl.num_programs(0) // CTAS), taken, items, answer, full, empty, CTAS)
