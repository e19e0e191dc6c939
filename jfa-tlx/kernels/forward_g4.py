"""Forward, generation 4 on Hopper: one persistent program per multiprocessor, items drawn from a counter, longest first."""

import triton
import triton.language as tl

from forward_hopper import forward


@triton.jit
def forward_g4(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, counter, scale_log2, heads, group,
               packed_log2, left, right, bottom_right, o_rows,
               UNIT_ROWS: tl.constexpr, KV_TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    forward(q_map, k_map, v_map, o_map, lse, lse_head, header, sequences, forward_units, counter, scale_log2, heads, group, packed_log2,
            left, right, bottom_right, o_rows, UNIT_ROWS, KV_TILE, HEAD_DIM, True)
