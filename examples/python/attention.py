# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention over real jagged lengths from Python: ctypes and NumPy, no build step.

    python attention.py path/to/libjfa.so workloads/lengths/movielens-100k-user-history.txt 24

Runs sliding-window attention in f16, forward and backward, on q, k and v that are views of one fused buffer, and checks
every output and gradient against NumPy in fp64.
"""

import ctypes as c
import sys

import numpy as np

# From jfa.h.
API_VERSION = 1
F32, F16 = 1, 2
INDEX_I32 = 1
QUERY_JAGGED = 1
MASK_WINDOW = 3
ALIGNMENT_BOTTOM_RIGHT = 2
BIAS_NONE = 1
MEMORY_HOST = 1


class Struct(c.Structure):
    """A struct of jfa.h: knows its size, and is zero where nothing is given."""

    def __init__(self, **fields):
        super().__init__(struct_size=c.sizeof(self), **fields)


def struct(name, fields):
    """`fields`: "name type" in the order of the header."""
    types = dict(i32=c.c_int32, i64=c.c_int64, u64=c.c_uint64, f32=c.c_float, size=c.c_size_t, ptr=c.c_void_p)
    pairs = [f.split() for f in ("struct_size size, " + fields).split(", ")]
    return type(name, (Struct,), {"_fields_": [(n, types[t]) for n, t in pairs]})


Tensor = struct(
    "Tensor",
    "data ptr, dtype i32, reserved i32, rows i64, heads i64, dim i64, row_stride i64, head_stride i64",
)
Lse = struct("Lse", "data ptr, rows i64, head_stride i64")
Problem = struct(
    "Problem",
    "dtype i32, query i32, heads_q i64, heads_kv i64, head_dim i64, head_dim_v i64, batch i64, total_q i64, "
    "total_kv i64, kv_batch i64, q_len i64, mask i32, alignment i32, window_left i64, window_right i64, bias i32, "
    "bias_dtype i32, bias_row_align i32, bias_shared_by_heads i32, bias_radius i64, bias_capacity i64, flags u64, "
    "scale f32, reserved i32, max_q_len_hint i64, max_kv_len_hint i64",
)
Layout = struct(
    "Layout",
    "batch i64, kv_batch i64, q_offsets ptr, q_lengths ptr, kv_offsets ptr, kv_lengths ptr, kv_index ptr, "
    "bias_offsets ptr, q_offsets_type i32, kv_offsets_type i32",
)
Call = struct("Call", "layout ptr, schedule ptr, schedule_bytes size, workspace ptr, workspace_bytes size, stream ptr")
ForwardArgs = struct("ForwardArgs", "q ptr, k ptr, v ptr, bias ptr, o ptr, lse ptr")
BackwardArgs = struct(
    "BackwardArgs",
    "q ptr, k ptr, v ptr, bias ptr, o ptr, lse ptr, d_o ptr, dq ptr, dk ptr, dv ptr, dbias ptr",
)
Requirements = struct(
    "Requirements",
    "schedule_bytes size, forward_bytes size, backward_bytes size, buffer_alignment size, base_alignment size, "
    "stride_alignment size, memory_space i32, reserved i32",
)
Options = struct("Options", "backend ptr, memory_space i32, log_level i32, log ptr, log_data ptr")


def function(*arguments):
    return c.CFUNCTYPE(c.c_int32, *arguments)


P = c.c_void_p


class Api(c.Structure):
    """The function table."""

    _fields_ = [
        ("struct_size", c.c_size_t),
        ("version", c.c_uint32),
        ("reserved", c.c_uint32),
        ("library_version", c.c_char_p),
        ("status_name", function(c.c_int32, P)),
        ("context_create", function(P, P)),
        ("context_release", function(P)),
        ("context_report", function(P, c.c_int32, P)),
        ("plan_create", function(P, P, P)),
        ("plan_release", function(P)),
        ("plan_requirements", function(P, P)),
        ("plan_backend", function(P, P)),
        ("plan_report", function(P, c.c_int32, P)),
        ("build_schedule", function(P, P, P, c.c_size_t, P)),
        ("forward", function(P, P, P)),
        ("backward", function(P, P, P)),
    ]


class Jfa:
    """The library. Calls a function of the table by name and raises what it reports."""

    def __init__(self, path):
        self.library = c.CDLL(path)
        self.library.jfa_get_api.restype = c.POINTER(Api)
        self.library.jfa_last_error.restype = c.c_char_p
        table = self.library.jfa_get_api(c.c_uint32(API_VERSION))
        if not table:
            raise RuntimeError(self.library.jfa_last_error().decode())
        self.api = table.contents

    def __getattr__(self, name):
        def call(*arguments):
            status = getattr(self.api, name)(*arguments)
            if status != 0:
                raise RuntimeError(f"{name} failed ({status}): {self.library.jfa_last_error().decode()}")

        return call


def view(array):
    """A `[rows, heads, dim]` array of any row and head strides."""
    size = array.itemsize
    assert array.strides[2] == size
    dtype = {np.float32: F32, np.float16: F16}[array.dtype.type]
    rows, heads, dim = array.shape
    return Tensor(
        data=array.ctypes.data, dtype=dtype, rows=rows, heads=heads, dim=dim,
        row_stride=array.strides[0] // size, head_stride=array.strides[1] // size,
    )  # fmt: skip


def aligned(size, alignment):
    """Memory at a multiple of `alignment`; the array keeps it alive."""
    block = np.empty(size + alignment, np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + size]


def reference(q, k, v, d_o, left, scale):
    """One sequence, `[rows, heads, dim]` each, in fp64: o, lse and the gradients."""
    q, k, v, d_o = (x.astype(np.float64) for x in (q, k, v, d_o))
    n = len(q)
    i, j = np.indices((n, n))
    visible = (j <= i) & (j >= i - left)
    s = np.where(visible, scale * np.einsum("ihd,jhd->hij", q, k), -np.inf)
    top = s.max(axis=2, keepdims=True)
    lse = (top + np.log(np.exp(s - top).sum(axis=2, keepdims=True)))[..., 0]
    p = np.exp(s - lse[..., None])
    o = np.einsum("hij,jhd->ihd", p, v)
    ds = p * (np.einsum("ihd,jhd->hij", d_o, v) - np.einsum("ihd,ihd->hi", o, d_o)[..., None])
    dq = scale * np.einsum("hij,jhd->ihd", ds, k)
    dk = scale * np.einsum("hij,ihd->jhd", ds, q)
    dv = np.einsum("hij,ihd->jhd", p, d_o)
    return o, lse, dq, dk, dv


def main():
    library, lengths_file = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 24
    lengths = np.loadtxt(lengths_file, dtype=np.int32, max_rows=count, ndmin=1)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    rows, heads, dim, left = int(offsets[-1]), 2, 32, 15
    scale = np.float32(dim**-0.5)

    # q, k and v stand side by side in each row of one buffer, as a fused projection leaves them.
    random = np.random.default_rng(1)
    fused = random.standard_normal((rows, 3, heads, dim)).astype(np.float16)
    q, k, v = (fused[:, t] for t in range(3))
    d_o = random.standard_normal((rows, heads, dim)).astype(np.float16)
    o, dq, dk, dv = (np.full((rows, heads, dim), np.nan, np.float16) for _ in range(4))
    lse = np.full((heads, rows), np.nan, np.float32)

    jfa = Jfa(library)
    context, plan = c.c_void_p(), c.c_void_p()
    options = Options(memory_space=MEMORY_HOST)
    jfa.context_create(c.byref(options), c.byref(context))
    problem = Problem(
        dtype=F16, query=QUERY_JAGGED, heads_q=heads, heads_kv=heads, head_dim=dim, head_dim_v=dim,
        batch=len(lengths), kv_batch=len(lengths), total_q=rows, total_kv=rows,
        mask=MASK_WINDOW, alignment=ALIGNMENT_BOTTOM_RIGHT, window_left=left, window_right=0,
        bias=BIAS_NONE, scale=scale,
    )  # fmt: skip
    jfa.plan_create(context, c.byref(problem), c.byref(plan))
    backend = c.c_char_p()
    jfa.plan_backend(plan, c.byref(backend))
    backend = backend.value.decode()  # a copy: the text goes with the plan
    needs = Requirements()
    jfa.plan_requirements(plan, c.byref(needs))

    layout = Layout(
        batch=len(lengths), kv_batch=len(lengths), q_offsets=offsets.ctypes.data, kv_offsets=offsets.ctypes.data,
        q_offsets_type=INDEX_I32, kv_offsets_type=INDEX_I32,
    )  # fmt: skip
    schedule = aligned(needs.schedule_bytes, needs.buffer_alignment)
    workspace = aligned(max(needs.forward_bytes, needs.backward_bytes), needs.buffer_alignment)
    jfa.build_schedule(plan, c.byref(layout), schedule.ctypes.data, schedule.size, None)
    call = Call(
        layout=c.addressof(layout), schedule=schedule.ctypes.data, schedule_bytes=schedule.size,
        workspace=workspace.ctypes.data, workspace_bytes=workspace.size,
    )  # fmt: skip

    views = {name: view(x) for name, x in dict(q=q, k=k, v=v, o=o, d_o=d_o, dq=dq, dk=dk, dv=dv).items()}
    views["lse"] = Lse(data=lse.ctypes.data, rows=rows, head_stride=rows)
    address = {name: c.addressof(x) for name, x in views.items()}
    jfa.forward(plan, c.byref(call), c.byref(ForwardArgs(**{n: address[n] for n in ("q", "k", "v", "o", "lse")})))
    jfa.backward(plan, c.byref(call), c.byref(BackwardArgs(**address)))

    results = dict(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    squares = {name: [0.0, 0.0] for name in results}
    for first, last in zip(offsets[:-1], offsets[1:]):
        part = slice(first, last)
        expected = reference(q[part], k[part], v[part], d_o[part], left, float(scale))
        for (name, actual), exact in zip(results.items(), expected):
            actual = actual[:, part] if name == "lse" else actual[part]
            squares[name][0] += ((actual - exact) ** 2).sum()
            squares[name][1] += (exact**2).sum()
    errors = {name: float(np.sqrt(error / norm)) for name, (error, norm) in squares.items()}

    # A mistake is an exception that names the argument.
    problem.mask = 9
    try:
        jfa.plan_create(context, c.byref(problem), c.byref(c.c_void_p()))
        told = ""
    except RuntimeError as mistake:
        told = str(mistake)
    jfa.plan_release(plan)
    jfa.context_release(context)

    version = jfa.api.library_version.decode()
    print(f"library {version}, backend {backend}: {len(lengths)} sequences, {rows} tokens")
    print("relative errors: " + ", ".join(f"{name} {error:.2g}" for name, error in errors.items()))
    print(f"mask 9: {told}")
    if not all(error < 6e-4 for error in errors.values()) or "mask = 9" not in told:
        sys.exit("WRONG")
    print("ok")


if __name__ == "__main__":
    main()
