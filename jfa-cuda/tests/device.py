"""Drives the kernels straight through the CUDA driver API (ctypes) with PyTorch tensors: the kernels' own test bench.

    python3 device.py CUBIN_DIR [check] [time] [--shapes a,b]

CUBIN_DIR is DIR/jfa-cuda/sm_90a of `cargo xtask kernels --out DIR`. Runs on a machine with a GPU and PyTorch; needs schedule.cubin and forward_<dim>_<type>.cubin in CUBIN_DIR. Structures mirror
../kernels/params.h. `check` compares with float64 on ugly lengths with NaN-poisoned outputs; `time` prints milliseconds against
the floor (useful FLOPs / 680 TFLOP/s, bytes / 4.27 TB/s).
"""
import argparse
import ctypes as C
import math
import os
import sys

import torch

cuda = C.CDLL("libcuda.so.1")
i32, i64, f32, ptr = C.c_int32, C.c_int64, C.c_float, C.c_void_p


def ok(status, what):
    if status:
        s = C.c_char_p()
        cuda.cuGetErrorString(status, C.byref(s))
        raise RuntimeError(f"{what}: {status} {s.value}")


class Mask(C.Structure):
    _fields_ = [("left", i32), ("right", i32), ("bottom_right", i32)]


def struct(name, fields):
    return type(name, (C.Structure,), {"_fields_": fields})


ScheduleParams = struct("ScheduleParams", [
    ("q_offsets", ptr), ("kv_offsets", ptr), ("q_lengths", ptr), ("kv_lengths", ptr), ("kv_index", ptr), ("header", ptr),
    ("sequences", ptr), ("forward_list", ptr), ("backward_list", ptr), ("total_q", i64), ("total_kv", i64), ("batch", i32),
    ("kv_batch", i32), ("q64", i32), ("kv64", i32), ("broadcast_q_len", i32), ("forward_rows", i32), ("forward_kv_tile", i32),
    ("forward_capacity", i32), ("backward_rows", i32), ("backward_q_tile", i32), ("backward_capacity", i32), ("merge", i32),
    ("mask", Mask), ("backward_share", i32)])
ForwardParams = struct("ForwardParams", [
    ("header", ptr), ("sequences", ptr), ("units", ptr), ("queue", ptr), ("queue_key", C.c_uint64), ("lse", ptr), ("lse_head_stride", i64), ("scale_log2", f32), ("prescale", f32),
    ("heads", i32), ("group", i32), ("packed_log2", i32), ("has_prescale", i32), ("mask", Mask), ("o_rows", i32)])


class LaunchAttribute(C.Structure):
    _fields_ = [("id", C.c_uint), ("pad", C.c_uint), ("value", C.c_uint * 16)]


class LaunchConfig(C.Structure):
    _fields_ = [("grid", C.c_uint * 3), ("block", C.c_uint * 3), ("shared", C.c_uint), ("stream", ptr), ("attrs", ptr), ("count", C.c_uint)]


class Kernel:
    def __init__(self, path, entry):
        self.module, self.function = ptr(), ptr()
        with open(path, "rb") as f:
            image = f.read()
        ok(cuda.cuModuleLoadData(C.byref(self.module), image), f"load {path}")
        ok(cuda.cuModuleGetFunction(C.byref(self.function), self.module, entry.encode()), entry)
        self.shared = 0
        address, size = C.c_uint64(), C.c_size_t()
        if cuda.cuModuleGetGlobal_v2(C.byref(address), C.byref(size), self.module, b"jfa_dynamic_shared") == 0:
            value = C.c_uint()
            ok(cuda.cuMemcpyDtoH_v2(C.byref(value), address, C.c_size_t(4)), "read")
            self.shared = value.value
            ok(cuda.cuFuncSetAttribute(self.function, 8, self.shared), f"shared {self.shared}")
        threads = C.c_int()
        ok(cuda.cuFuncGetAttribute(C.byref(threads), 0, self.function), "threads")
        self.threads = threads.value

    def word(self, symbol):
        """A number that the source states."""
        address, size, value = C.c_uint64(), C.c_size_t(), C.c_uint()
        ok(cuda.cuModuleGetGlobal_v2(C.byref(address), C.byref(size), self.module, symbol.encode()), symbol)
        ok(cuda.cuMemcpyDtoH_v2(C.byref(value), address, C.c_size_t(4)), "read")
        return value.value

    def launch(self, grid, block, params, cluster=1):
        array = (ptr * len(params))(*[C.cast(C.byref(p) if isinstance(p, C.Structure) else p, ptr) for p in params])
        attrs = LaunchAttribute(4, 0, (C.c_uint * 16)(cluster, 1, 1))
        config = LaunchConfig((grid, 1, 1), (block, 1, 1), self.shared, torch.cuda.current_stream().cuda_stream,
                              C.cast(C.byref(attrs), ptr), 1 if cluster > 1 else 0)
        ok(cuda.cuLaunchKernelEx(C.byref(config), self.function, array, None), "launch")


def launch_schedule(kernel, params):
    """As its source says: `jfa_ctas` blocks of as many threads as it is compiled for."""
    if not hasattr(kernel, "shape"):
        kernel.shape = kernel.word("jfa_ctas"), kernel.threads
    kernel.launch(*kernel.shape, [params])


BOUND = 1 << 25


def tensor_map(t, box_rows, box_heads=1, l2_bytes=256):
    """The map of a [rows, heads, dim] tensor with a movable row bound (params.h, JFA_BOUND). `l2_bytes`: its L2 promotion, 128 or 256; by
    default the library's."""
    rows, heads, dim = t.shape
    stride, head_stride = t.stride(0) * 2, t.stride(1) * 2
    raw = C.create_string_buffer(128 + 64)
    address = (C.addressof(raw) + 63) & ~63
    u64, u32 = C.c_uint64, C.c_uint32
    dims = (u64 * 5)(dim, BOUND, rows + 1, heads, BOUND + 1)
    strides = (u64 * 4)(stride, stride, head_stride if heads > 1 else max(head_stride, 16), (1 << 39) - stride)
    box = (u32 * 5)(64, box_rows, 1, box_heads, 1)
    one = (u32 * 5)(1, 1, 1, 1, 1)
    kind = {torch.bfloat16: 9, torch.float16: 6}[t.dtype]
    promotion = {128: 2, 256: 3}[l2_bytes]
    ok(cuda.cuTensorMapEncodeTiled(ptr(address), kind, 5, C.c_uint64(t.data_ptr()), dims, strides, box, one, 0, 3, promotion, 0),
       "cuTensorMapEncodeTiled")
    out = (C.c_char * 128).from_address(address)
    out.keep = raw
    return out


SMS = 132
# Rows of NaN allocated before and after every tensor.
SLACK = tuple(int(x) for x in os.environ.get("SLACK", "0,0").split(","))
FORWARD_WIDTHS = (32, 64, 96, 128, 256)


class Problem:
    """Jagged attention inputs on the GPU; lengths are Python lists."""

    def __init__(self, lq, lk, heads, heads_kv=None, dim=128, dim_v=None, causal=False, window=None, bottom=False, dtype=torch.bfloat16,
                 kv_index=None, broadcast=None, scale=None, gap=0, seed=1, fused=False, amplitude=1.0):
        g = torch.Generator("cuda").manual_seed(seed)
        heads_kv, dim_v = heads_kv or heads, dim_v or dim
        self.lq, self.lk, self.heads, self.heads_kv, self.dim, self.dim_v = list(lq), list(lk), heads, heads_kv, dim, dim_v
        self.batch, self.kv_batch = len(self.lq), len(self.lk)
        self.kv_index = kv_index if kv_index is not None else list(range(self.batch))
        self.broadcast, self.dtype = broadcast, dtype
        self.scale = dim ** -0.5 if scale is None else scale
        left, right = (-1, 0) if causal else (window or (-1, -1))
        self.mask = Mask(left, right, int(bottom))

        def offsets(lengths):
            out = [0]
            for n in lengths:
                out.append(out[-1] + n + gap)
            return out
        self.off_q, self.off_k = offsets(self.lq), offsets(self.lk)
        self.rows_q = broadcast if broadcast is not None else self.off_q[-1]
        self.rows_o = broadcast * self.batch if broadcast is not None else self.off_q[-1]
        if broadcast is not None:
            self.off_q = [broadcast * i for i in range(self.batch + 1)]
        rows_k = self.off_k[-1]

        def new(rows, h, d):
            before, after = SLACK
            t = torch.randn(before + max(rows, 1) + after, h, d, generator=g, device="cuda", dtype=torch.float32).mul_(amplitude).to(dtype)
            t[:before], t[before + rows:] = float("nan"), float("nan")
            return t[before:before + rows]
        if fused:
            assert heads == heads_kv and dim == dim_v and self.rows_q == rows_k
            packed = new(rows_k, 3 * heads, dim)
            self.q, self.k, self.v = (packed[:, i * heads:(i + 1) * heads] for i in range(3))
        else:
            self.q, self.k, self.v = new(self.rows_q, heads, dim), new(rows_k, heads_kv, dim), new(rows_k, heads_kv, dim_v)
        self.do = new(self.rows_o, heads, dim_v)
        if gap:
            for b in range(self.batch):
                if broadcast is None:
                    self.q[self.off_q[b] + self.lq[b]:self.off_q[b + 1]] = float("nan")
                    self.do[self.off_q[b] + self.lq[b]:self.off_q[b + 1]] = float("nan")
            for b in range(self.kv_batch):
                self.k[self.off_k[b] + self.lk[b]:self.off_k[b + 1]] = float("nan")
                self.v[self.off_k[b] + self.lk[b]:self.off_k[b + 1]] = float("nan")
        self.gap = gap
        dev = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")
        self.dev = dict(oq=dev(self.off_q), ok=dev(self.off_k), lq=dev(self.lq), lk=dev(self.lk), ix=dev(self.kv_index))
        self.uses_index = kv_index is not None

    def visible(self, m, n):
        i, j = torch.arange(m, device="cuda")[:, None], torch.arange(n, device="cuda")[None]
        p = i + (n - m if self.mask.bottom_right else 0)
        see = torch.ones(m, n, dtype=torch.bool, device="cuda")
        if self.mask.left >= 0:
            see &= j >= p - self.mask.left
        if self.mask.right >= 0:
            see &= j <= p + self.mask.right
        return see

    def sequence(self, b):
        rq = slice(0, self.broadcast) if self.broadcast is not None else slice(self.off_q[b], self.off_q[b] + self.lq[b])
        m = self.broadcast if self.broadcast is not None else self.lq[b]
        ro = slice(self.off_q[b], self.off_q[b] + m)
        x = self.kv_index[b]
        return rq, ro, slice(self.off_k[x], self.off_k[x] + self.lk[x])

    def reference(self, b):
        """o [m, heads, dim_v] and lse [heads, m] of sequence b in float64."""
        rq, _, rk = self.sequence(b)
        group = self.heads // self.heads_kv
        q = self.q[rq].double()
        k, v = (t[rk].double().repeat_interleave(group, 1) for t in (self.k, self.v))
        s = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        s.masked_fill_(~self.visible(q.shape[0], k.shape[0]), -math.inf)
        lse = torch.logsumexp(s, -1) if k.shape[0] else torch.full(s.shape[:2], -math.inf, device="cuda", dtype=torch.float64)
        p = torch.where(torch.isfinite(lse)[..., None], torch.exp(s - torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))[..., None]),
                        torch.zeros_like(s))
        return torch.einsum("hij,jhd->ihd", p, v), lse

    def flops(self):
        pairs = 0
        for b in range(self.batch):
            m = self.broadcast if self.broadcast is not None else self.lq[b]
            n = self.lk[self.kv_index[b]]
            if self.mask.left < 0 and self.mask.right < 0:
                pairs += m * n
            elif self.mask.left < 0 and self.mask.right == 0 and m == n:
                pairs += m * (m + 1) / 2
            elif m == n and self.mask.right == 0:
                short = min(m, self.mask.left)
                pairs += short * (short + 1) / 2 + (m - short) * (self.mask.left + 1)
            else:
                pairs += int(self.visible(m, n).sum())
        return 2 * self.heads * (self.dim + self.dim_v) * pairs


def schedule_params(p, rows, kv_tile):
    capacity = p.rows_o // rows + p.batch + 1
    buffer = torch.full((256 + 32 * max(p.batch, 1) + 8 * capacity,), 0x7f, dtype=torch.uint8, device="cuda")
    base = buffer.data_ptr()
    full = p.mask.left < 0 and p.mask.right < 0
    s = ScheduleParams(
        None if p.broadcast is not None else p.dev["oq"].data_ptr(), p.dev["ok"].data_ptr(),
        p.dev["lq"].data_ptr() if p.gap and p.broadcast is None else None, p.dev["lk"].data_ptr() if p.gap else None,
        p.dev["ix"].data_ptr() if p.uses_index else None, base, base + 256, base + 256 + 32 * p.batch, None,
        p.rows_o, p.k.shape[0], p.batch, p.kv_batch, 0, 0, -1 if p.broadcast is None else p.broadcast, rows, kv_tile, capacity,
        128, 64, 0, int(p.uses_index and full and p.broadcast is None), p.mask, 0)
    s.buffer = buffer
    return s


class Forward:
    def __init__(self, p, directory, pack=True):
        width = min(d for d in FORWARD_WIDTHS if d >= max(p.dim, p.dim_v))
        name = f"forward_{width}_{'bf16' if p.dtype == torch.bfloat16 else 'f16'}"
        self.p, self.kernel = p, kernel(directory, name)
        self.schedule_kernel = kernel(directory, "schedule")
        group = p.heads // p.heads_kv
        packed = group.bit_length() - 1 if pack and group > 1 and group & (group - 1) == 0 and group <= 64 else 0
        rows = 64 >> packed
        self.s = schedule_params(p, self.kernel.word("jfa_unit_rows") >> packed, self.kernel.word("jfa_kv_tile"))
        before, after = SLACK
        self.o = torch.full((p.rows_o + before + after, p.heads, p.dim_v), float("nan"), dtype=p.dtype, device="cuda")[before:before + p.rows_o]
        self.lse = torch.full((p.heads, p.rows_o), float("nan"), dtype=torch.float32, device="cuda")
        box = min(rows, 16)
        self.maps = [tensor_map(p.q, rows, 1 << packed), tensor_map(p.k, 64), tensor_map(p.v, 64), tensor_map(self.o, box, 16 // box)]
        self.queue = torch.full((64,), -1, dtype=torch.int32, device="cuda")
        positive = p.scale > 0
        log2e = 1.4426950408889634
        self.params = ForwardParams(self.s.header, self.s.sequences, self.s.forward_list, self.queue.data_ptr(), 0x9e3779b97f4a7c15, self.lse.data_ptr(), max(p.rows_o, 1),
                                    p.scale * log2e if positive else log2e, 1.0 if positive else p.scale,
                                    p.heads_kv if packed else p.heads, group, packed, int(not positive), p.mask, p.rows_o)

    def schedule(self):
        launch_schedule(self.schedule_kernel, self.s)

    def run(self):
        self.kernel.launch(SMS, self.kernel.threads, [*self.maps, self.params])


_kernels = {}


def kernel(directory, name):
    path = os.path.join(directory, name + ".cubin")
    if path not in _kernels:
        _kernels[path] = Kernel(path, "jfa_" + name)
    return _kernels[path]


def timed(fn, reps=20, warm=3):
    flush = timed.__dict__.setdefault("flush", torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    for _ in range(warm):
        fn()
    pairs = []
    for _ in range(reps):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    ms = sorted(a.elapsed_time(b) for a, b in pairs)
    return ms[len(ms) // 2]


# ---------------------------------------------------------------------------------------------------------------- check
UGLY = [0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 300]


def check_forward(directory, wanted=()):
    ugly2 = [(a, b) for a in UGLY for b in UGLY]
    lq, lk = [a for a, _ in ugly2], [b for _, b in ugly2]
    cases = {
        "self": Problem(UGLY, UGLY, 4),
        "cross": Problem(lq, lk, 2),
        "gaps": Problem(lq, lk, 2, gap=5),
        "causal-tl": Problem(lq, lk, 2, causal=True),
        "causal-br": Problem(lq, lk, 2, causal=True, bottom=True),
        "window": Problem(lq, lk, 2, window=(50, 20)),
        "window-br": Problem(lq, lk, 2, window=(70, 0), bottom=True),
        "window-left": Problem([700], [700], 2, window=(130, -1)),
        "gqa4": Problem(UGLY, UGLY, 8, 2, causal=True, bottom=True),
        "mqa": Problem(lq, lk, 16, 1),
        "gqa3": Problem(UGLY, UGLY, 6, 2),
        "fused": Problem(UGLY, UGLY, 3, fused=True),
        "kv_index": Problem([1] * 200 + UGLY, UGLY, 4, kv_index=[8] * 100 + [10] * 100 + list(range(11))),
        "broadcast": Problem([0] * 11, UGLY, 4, broadcast=32),
        "broadcast130": Problem([0] * 11, UGLY, 4, broadcast=130),
        "scale0": Problem(UGLY, UGLY, 2, scale=0.0),
        "negative": Problem(UGLY, UGLY, 2, scale=-0.2),
        "huge": Problem(UGLY, UGLY, 2, amplitude=30.0),
        "long": Problem([5000, 3, 4097], [5000, 3, 4097], 2, causal=True),
        "long-full": Problem([300, 129, 64, 65], [1100, 900, 1030, 5000], 2),
        "long-cross": Problem([1000, 200, 65, 64, 130], [1000, 900, 1300, 800, 700], 2, causal=True, bottom=True),
        "long-blind": Problem([1000, 1400], [900, 800], 2, causal=True, bottom=True),
        "long-window": Problem([1300, 130], [1300, 900], 2, window=(900, 40)),
        "long-gqa4": Problem([900, 33, 70], [900, 1100, 1200], 8, 2, causal=True, bottom=True),
        "long-huge": Problem([200], [3000], 2, amplitude=30.0),
        "f16": Problem(lq, lk, 2, dtype=torch.float16),
    }
    for d in (8, 32, 40, 64, 96, 256):
        cases[f"d{d}"] = Problem(lq, lk, 2, dim=d, causal=True)
    cases["d64v128"] = Problem(lq, lk, 2, dim=64, dim_v=128)
    bad = 0
    for name, p in cases.items():
        if wanted and name not in wanted:
            continue
        try:
            f = Forward(p, directory)
        except Exception as e:
            print(f"  {name:14s} {e}")
            continue
        f.schedule()
        torch.cuda.synchronize()
        f.run()
        torch.cuda.synchronize()
        off = size = lse_err = 0.0
        wrong = 0
        for b in range(p.batch):
            _, ro, _ = p.sequence(b)
            o, lse = p.reference(b)
            mine, mine_lse = f.o[ro].double(), f.lse[:, ro].double()
            wrong += int((~torch.isfinite(mine)).sum()) + int((torch.isneginf(lse) != torch.isneginf(mine_lse)).sum())
            off += float((mine - o).square().sum())
            size += float(o.square().sum())
            fin = torch.isfinite(lse)
            if fin.any():
                lse_err = max(lse_err, float((mine_lse - lse)[fin].abs().max()))
        gap_rows = torch.ones(p.rows_o, dtype=torch.bool, device="cuda")
        for b in range(p.batch):
            gap_rows[p.sequence(b)[1]] = False
        touched = int(torch.isfinite(f.o[gap_rows]).sum()) if bool(gap_rows.any()) else 0
        err = math.sqrt(off / size) if size else 0.0
        limit = 3e-3 if p.dtype == torch.bfloat16 else 4e-4
        verdict = "ok" if wrong == 0 and touched == 0 and err <= limit and lse_err <= 2e-3 else "WRONG"
        bad += verdict != "ok"
        print(f"  {name:14s} units {int(f.s.buffer[:4].view(torch.int32))} err {err:.2e} lse {lse_err:.1e} not finite {wrong} gaps touched {touched} {verdict}", flush=True)
    return bad


# ---------------------------------------------------------------------------------------------------------------- time
def shapes():
    def uniform(n, m, seed):
        return torch.randint(1, m + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    for m in (256, 512, 1024, 2048):
        yield f"half-{m}", lambda m=m: Problem(*(2 * [uniform(1152, m, 2025 + m)]), 4)
    for m in (256, 512, 1024, 2048):
        yield f"full-{m}", lambda m=m: Problem([m] * 1152, [m] * 1152, 4)
    for m in (256, 512, 1024, 2048):
        yield f"cross-{m}", lambda m=m: Problem([m] * 1152, [256] * 1152, 4)
    for m in (256, 512):
        yield f"causal-{m}", lambda m=m: Problem(*(2 * [uniform(1152, m, 2025 + m)]), 4, causal=True)
    for m in (32, 128):
        yield f"pma-{m}", lambda m=m: Problem([0] * 1152, uniform(1152, 2048, 7), 4, broadcast=m)
    for m in (32, 128):  # the same with a copy of the query for every sequence, as other libraries take it
        yield f"copied-pma-{m}", lambda m=m: Problem([m] * 1152, uniform(1152, 2048, 7), 4)
    import numpy
    tail = numpy.clip(numpy.round(700 * numpy.exp(1.2 * numpy.random.default_rng(0).standard_normal(256))), 200, 16384).astype(int).tolist()
    yield "tail-full", lambda: Problem(tail, tail, 4)
    yield "tail-causal", lambda: Problem(tail, tail, 4, causal=True)
    root = os.environ.get("LENGTHS", os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../workloads/lengths"))
    read = lambda n: [int(x) for x in open(os.path.join(root, n)) if x.strip()]
    yield "movielens", lambda: Problem(*(2 * [read("movielens-100k-user-history.txt")]), 4)
    conversation = lambda **kw: Problem(*(2 * [read("azure-llm-2023-conversation.txt")[:2048]]), 4, **kw)
    yield "conv-full", conversation
    yield "conv-causal", lambda: conversation(causal=True)
    yield "window", lambda: Problem(*(2 * [uniform(1152, 2048, 2025 + 2048)]), 4, window=(256, 0))
    yield "gqa-1", lambda: Problem(*(2 * [uniform(256, 2048, 2025 + 2048)]), 16, 1, causal=True)
    yield "gqa-4", lambda: Problem(*(2 * [uniform(256, 2048, 2025 + 2048)]), 16, 4, causal=True)


def time_forward(directory, wanted, compare=None):
    ratios = []
    for name, make in shapes():
        if wanted and not any(name.startswith(w) for w in wanted):
            continue
        p = make()
        f = Forward(p, directory)
        f.schedule()
        ms = timed(f.run)
        schedule_us = timed(f.schedule) * 1e3
        flops = p.flops()
        size = 2 * (p.q.numel() + p.k.numel() + p.v.numel() + f.o.numel()) + 4 * f.lse.numel()
        floor = max(flops / 680e12, size / 4.27e12) * 1e3
        ratios.append(ms / floor)
        print(f"  {name:12s} {ms:8.3f} ms  {flops / ms / 1e9:6.1f} T  floor {floor:7.3f}  x {ms / floor:5.2f}  schedule {schedule_us:5.1f} us", flush=True)
        del p, f
        torch.cuda.empty_cache()
    if ratios:
        print(f"  geometric mean over floor, first 16: {math.exp(sum(map(math.log, ratios[:16])) / len(ratios[:16])):.3f}")


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("directory")
    a.add_argument("what", nargs="*", default=["check", "time"])
    a.add_argument("--shapes", default="")
    a.add_argument("--cases", default="")
    args = a.parse_args()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    status = 0
    if "check" in args.what:
        status = check_forward(args.directory, [c for c in args.cases.split(",") if c])
        print(f"check: {status} wrong")
    if "time" in args.what:
        time_forward(args.directory, [s for s in args.shapes.split(",") if s])
    sys.exit(1 if status else 0)
