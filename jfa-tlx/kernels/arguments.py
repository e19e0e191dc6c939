"""Every parameter a kernel may have, by name: its type, and what the launcher promises its value is a multiple of.

A pass takes a subset in any order. Strides are in elements; T is the element type of the problem. The launcher has the same
names (src/bind.rs; a test compares the two lists), README.md says what they mean.
"""

TENSORS = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")

# Name -> (type, multiple of; None: nothing is promised).
ARGUMENTS = (
    {t: ("*T", 16) for t in TENSORS}
    | {f"{t}_{s}": ("i64", 8) for t in TENSORS for s in ("row", "head")}
    | {f"{t}_map": ("map of T", None) for t in TENSORS}
    | {
        "lse": ("*f32", None),
        "lse_head": ("i64", None),
        "header": ("*i32", 16),
        "sequences": ("*i32", 16),
        "forward_units": ("*i32", 16),
        "backward_units": ("*i32", 16),
        "scale": ("f32", None),
        "scale_log2": ("f32", None),
        "heads": ("i32", None),
        "heads_q": ("i32", None),
        "heads_kv": ("i32", None),
        "group": ("i32", None),
        "packed_log2": ("i32", None),
        "left": ("i32", None),
        "right": ("i32", None),
        "bottom_right": ("i32", None),
        "batch": ("i32", None),
        "kv_batch": ("i32", None),
        "q_rows": ("i32", None),
        "o_rows": ("i32", None),
        "kv_rows": ("i32", None),
        "broadcast": ("i32", None),
        "slices": ("i32", None),
        "kv_offsets": ("*i32", None),
        "kv_offsets_64": ("i32", None),
        "kv_lengths": ("*i32", None),
        "counter": ("*i32", 16),
        "kv_table": ("*i32", 16),
        "delta": ("*f32", 16),
        "delta_head": ("i64", 16),
        "partial": ("*f32", 16),
    }
)
