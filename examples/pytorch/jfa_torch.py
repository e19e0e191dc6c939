# SPDX-License-Identifier: MIT OR Apache-2.0
"""Jagged attention as a differentiable PyTorch function, over the C ABI: tensors of a GPU or of the host, nothing copied.

    attention = JaggedAttention("path/to/libjfa.so", heads=4, head_dim=64, batch=32, total=4096, dtype=torch.bfloat16)
    batch = attention.schedule(offsets)            # once per batch, for all layers and both passes
    o = attention(batch, q, k, v)                  # q, k, v: [rows, heads, head_dim], views of a fused buffer are fine
    o.sum().backward()
"""

import ctypes as c
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import attention as abi  # noqa: E402  the structs of jfa.h

DTYPE = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
INDEX = {torch.int32: 1, torch.int64: 2}
QUERY_JAGGED, QUERY_BROADCAST = 1, 2
MASK_FULL, MASK_CAUSAL, MASK_WINDOW = 1, 2, 3
ALIGNMENT_TOP_LEFT, ALIGNMENT_BOTTOM_RIGHT = 1, 2
MEMORY_HOST, MEMORY_CUDA_DEVICE = 1, 2
FLAG_DETERMINISTIC = 1


def view(t):
    rows, heads, dim = t.shape
    assert t.stride(2) == 1 or dim == 1, "the innermost stride must be 1"
    return abi.Tensor(data=t.data_ptr(), dtype=DTYPE[t.dtype], rows=rows, heads=heads, dim=dim, row_stride=t.stride(0), head_stride=t.stride(1))


def lse_view(t):
    return abi.Lse(data=t.data_ptr(), rows=t.shape[1], head_stride=t.stride(0))


class Batch:
    """The layout of a batch and the schedule built from it."""

    def __init__(self, layout, schedule, keep):
        self.layout, self.schedule, self.keep = layout, schedule, keep


class JaggedAttention:
    """A plan: types, heads, mask and capacities. `backend` None asks JFA_BACKEND."""

    def __init__(self, library, heads, head_dim, batch, total, dtype, *, heads_kv=None, total_kv=None, device="cuda", backend=None,
                 causal=False, window=None, bottom_right=False, scale=None, broadcast_q_len=None, deterministic=False):
        self.device = torch.device(device)
        self.jfa = abi.Jfa(library)
        self.context, self.plan = c.c_void_p(), c.c_void_p()
        space = MEMORY_CUDA_DEVICE if self.device.type == "cuda" else MEMORY_HOST
        name = backend.encode() if backend else None
        self.jfa.context_create(c.byref(abi.Options(backend=c.cast(c.c_char_p(name), c.c_void_p) if name else None, memory_space=space)), c.byref(self.context))
        left, right = window or (-1, -1)
        total_kv = total if total_kv is None else total_kv
        self.o_rows = total if broadcast_q_len is None else batch * broadcast_q_len
        problem = abi.Problem(
            dtype=DTYPE[dtype], query=QUERY_JAGGED if broadcast_q_len is None else QUERY_BROADCAST, q_len=broadcast_q_len or 0, heads_q=heads,
            heads_kv=heads_kv or heads, head_dim=head_dim, head_dim_v=head_dim, batch=batch, kv_batch=batch, total_q=total, total_kv=total_kv,
            mask=MASK_CAUSAL if causal else MASK_WINDOW if window else MASK_FULL,
            alignment=ALIGNMENT_BOTTOM_RIGHT if bottom_right else ALIGNMENT_TOP_LEFT, window_left=left, window_right=right, bias=abi.BIAS_NONE,
            scale=head_dim**-0.5 if scale is None else scale, flags=FLAG_DETERMINISTIC if deterministic else 0)  # fmt: skip
        self.jfa.plan_create(self.context, c.byref(problem), c.byref(self.plan))
        self.needs = abi.Requirements()
        self.jfa.plan_requirements(self.plan, c.byref(self.needs))
        self.heads, self.dtype, self.batch = heads, dtype, batch
        self.workspace = self.memory(max(self.needs.forward_bytes, self.needs.backward_bytes))

    def __del__(self):
        if getattr(self, "plan", None):
            self.jfa.plan_release(self.plan)
        if getattr(self, "context", None):
            self.jfa.context_release(self.context)

    @property
    def backend(self):
        name = c.c_char_p()
        self.jfa.plan_backend(self.plan, c.byref(name))
        return name.value.decode()

    def memory(self, size):
        """Memory of the caller's, aligned as the library asks."""
        block = torch.empty(size + self.needs.buffer_alignment, dtype=torch.uint8, device=self.device)
        start = -block.data_ptr() % self.needs.buffer_alignment
        return block[start : start + size]

    def stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def schedule(self, q_offsets, kv_offsets=None):
        """Prefix sums `[batch + 1]`, int32 or int64, on the plan's device; `q_offsets` None with a broadcast query."""
        kv_offsets = q_offsets if kv_offsets is None else kv_offsets
        batch = kv_offsets.numel() - 1
        layout = abi.Layout(
            batch=batch, kv_batch=batch, q_offsets=None if q_offsets is None else q_offsets.data_ptr(), kv_offsets=kv_offsets.data_ptr(),
            q_offsets_type=INDEX[(kv_offsets if q_offsets is None else q_offsets).dtype], kv_offsets_type=INDEX[kv_offsets.dtype])  # fmt: skip
        out = Batch(layout, self.memory(self.needs.schedule_bytes), (q_offsets, kv_offsets))
        self.rebuild(out)
        return out

    def rebuild(self, batch):
        """The schedule once more from the same arrays, whose contents may have changed."""
        self.jfa.build_schedule(self.plan, c.byref(batch.layout), batch.schedule.data_ptr(), batch.schedule.numel(), self.stream())

    def call(self, batch):
        return abi.Call(layout=c.addressof(batch.layout), schedule=batch.schedule.data_ptr(), schedule_bytes=batch.schedule.numel(),
                        workspace=self.workspace.data_ptr(), workspace_bytes=self.workspace.numel(), stream=self.stream())  # fmt: skip

    def prepare_forward(self, batch, q, k, v, o, lse):
        """A function that queues the forward on the current stream; the structs are made once."""
        views = dict(q=view(q), k=view(k), v=view(v), o=view(o), lse=lse_view(lse))
        arguments = abi.ForwardArgs(**{n: c.addressof(x) for n, x in views.items()})
        call = self.call(batch)
        run = lambda: self.jfa.forward(self.plan, c.byref(call), c.byref(arguments))
        run.keep = (views, arguments, call, batch)
        return run

    def prepare_backward(self, batch, q, k, v, o, lse, d_o, dq, dk, dv):
        """As `prepare_forward`, for the gradients."""
        views = dict(q=view(q), k=view(k), v=view(v), o=view(o), lse=lse_view(lse), d_o=view(d_o), dq=view(dq), dk=view(dk), dv=view(dv))
        arguments = abi.BackwardArgs(**{n: c.addressof(x) for n, x in views.items()})
        call = self.call(batch)
        run = lambda: self.jfa.backward(self.plan, c.byref(call), c.byref(arguments))
        run.keep = (views, arguments, call, batch)
        return run

    def __call__(self, batch, q, k, v):
        """Differentiable `[rows, heads, head_dim]` -> o."""
        return _Function.apply(self, batch, q, k, v)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention, batch, q, k, v):
        rows = q.shape[0] if batch.layout.q_offsets else batch.layout.batch * q.shape[0]
        o = torch.empty(rows, q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], max(rows, 1), dtype=torch.float32, device=q.device)[:, :rows]
        attention.prepare_forward(batch, q, k, v, o, lse)()
        ctx.attention, ctx.batch = attention, batch
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        ctx.attention.prepare_backward(ctx.batch, q, k, v, o, lse, d_o.contiguous(), dq, dk, dv)()
        return None, None, dq, dk, dv
