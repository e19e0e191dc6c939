"""The split backward (kv_index, wide heads) on a GPU, straight through the driver API: backward_device.py's counterpart for it.

    python3 split_device.py CUBIN_DIR [check] [repeat] [time] [bench] [index] [--cases a,b] [--shapes a,b]

CUBIN_DIR is DIR/jfa-cuda/sm_90a of `cargo xtask kernels --out DIR`. Needs schedule.cubin, backward_index.cubin, backward_{dq,dkdv,dq_sum}_<dim>_<type>.cubin and, for `time`, forward_<dim>_<type>.cubin in
CUBIN_DIR. Outputs, workspace and rows between sequences are NaN before every case. A launch without an end within 20 s is reported as
HANG and ends the program.

    check    gradients against float64 on ugly lengths
    repeat   200 runs, bit by bit
    time     milliseconds against the floor (FLOPs x 2.5 / 680 TFLOP/s, bytes / 4.27 TB/s), and the parts of it
    bench    the same for the shapes of device.py, for which the backward in one kernel is there
    index    microseconds of the index kernel, sorted and unsorted
"""
import argparse
import math
import os
import sys
import time

import torch

import device as D
from backward_device import reference
from device import C, Problem, UGLY, f32, i32, i64, kernel, ptr, struct, tensor_map, timed

IndexParams = struct("IndexParams", [
    ("schedule", ptr), ("sequences", ptr), ("kv_offsets", ptr), ("kv_lengths", ptr), ("header", ptr), ("keys", ptr), ("members", ptr), ("units", ptr), ("scratch", ptr),
    ("total_kv", i64), ("batch", i32), ("kv_batch", i32), ("kv64", i32), ("unit_keys", i32), ("block_rows", i32), ("capacity", i32)])
SplitParams = struct("SplitParams", [
    ("header", ptr), ("sequences", ptr), ("query_units", ptr), ("index", ptr), ("keys", ptr), ("members", ptr), ("key_units", ptr), ("lse", ptr), ("o", ptr),
    ("dq", ptr), ("dk", ptr), ("dv", ptr), ("control", ptr), ("statistics", ptr), ("partial", ptr), ("lse_head_stride", i64), ("o_row", i64), ("o_head", i64),
    ("dq_row", i64), ("dq_head", i64), ("dk_row", i64), ("dk_head", i64), ("dv_row", i64), ("dv_head", i64), ("scale", f32), ("scale_log2", f32),
    ("heads", i32), ("heads_kv", i32), ("packed_log2", i32), ("blocks", i32), ("batch", i32), ("broadcast", i32), ("pairs", i32), ("slices", i32),
    ("vectors_qk", i32), ("vectors_v", i32), ("mask", D.Mask), ("q_rows", i32), ("o_rows", i32), ("kv_rows", i32)])


def scratch(count):
    """Bytes that are NaN in every type."""
    return torch.full((max(count, 16),), 0xff, dtype=torch.uint8, device="cuda")


def wait(name):
    end = time.time() + 20
    while not torch.cuda.current_stream().query():
        if time.time() > end:
            print(f"  {name:14s} HANG", flush=True)
            os._exit(3)
        time.sleep(0.001)


class Split:
    def __init__(self, p, directory, o, lse):
        top = max(p.dim, p.dim_v)
        self.tile = tile = 64 if top <= 64 else 128 if top <= 128 else 256
        kind = "bf16" if p.dtype == torch.bfloat16 else "f16"
        self.p, self.o, self.lse_kept = p, o, lse
        self.index_kernel, self.schedule_kernel = kernel(directory, "backward_index"), kernel(directory, "schedule")
        self.dq_kernel, self.dkdv_kernel, self.sum_kernel = (kernel(directory, f"backward_{n}_{tile}_{kind}") for n in ("dq", "dkdv", "dq_sum"))
        group = p.heads // p.heads_kv
        packed = group.bit_length() - 1 if group & (group - 1) == 0 and group <= 16 else 0
        rows, heads, unit_keys = 64 >> packed, p.heads >> packed, 128 if tile <= 128 else 64
        self.s = D.schedule_params(p, 2 * rows, 128)
        capacity = p.k.shape[0] // unit_keys + p.kv_batch
        self.keys, self.members, self.units, self.index_header = scratch(16 * p.kv_batch), scratch(16 * p.batch), scratch(8 * capacity), scratch(256)
        self.index_scratch = scratch(4 * (4 * p.batch + p.kv_batch))
        self.index = IndexParams(self.s.header, self.s.sequences, p.dev["ok"].data_ptr(), p.dev["lk"].data_ptr() if p.gap else None, self.index_header.data_ptr(),
                                 self.keys.data_ptr(), self.members.data_ptr(), self.units.data_ptr(), self.index_scratch.data_ptr(), p.k.shape[0],
                                 p.batch, p.kv_batch, 0, unit_keys, rows, capacity)
        blocks = p.rows_o // rows + p.batch
        pairs = -(-p.broadcast // (2 * rows)) if p.broadcast else 0
        slices = max(1, min(p.batch, -(-D.SMS // (heads * pairs)))) if pairs else 0
        self.sum_grid = heads * pairs * tile // 8
        self.statistics, self.partial = scratch(heads * blocks * 512), scratch(slices * heads * pairs * 128 * tile * 4)
        self.control = torch.zeros(64, dtype=torch.int32, device="cuda")
        fresh = lambda t: torch.full_like(t, float("nan"), memory_format=torch.contiguous_format)
        if p.q.stride(0) > p.heads * p.dim:  # a fused buffer
            whole = torch.full((p.q.shape[0], 3 * p.heads, p.dim), float("nan"), dtype=p.dtype, device="cuda")
            self.dq, self.dk, self.dv = (whole[:, i * p.heads:(i + 1) * p.heads] for i in range(3))
        else:
            self.dq, self.dk, self.dv = fresh(p.q), fresh(p.k), fresh(p.v)
        self.maps = [tensor_map(p.q, rows, 1 << packed), tensor_map(p.k, 64), tensor_map(p.v, 64), tensor_map(p.do, rows, 1 << packed)]
        strides = [2 * s for t in (o, self.dq, self.dk, self.dv) for s in t.stride()[:2]]
        self.params = SplitParams(
            self.s.header, self.s.sequences, self.s.forward_list, self.index.header, self.index.keys, self.index.members, self.index.units, lse.data_ptr(),
            o.data_ptr(), self.dq.data_ptr(), self.dk.data_ptr(), self.dv.data_ptr(), self.control.data_ptr(), self.statistics.data_ptr(),
            self.partial.data_ptr(), lse.stride(0), *strides, p.scale, p.scale * 1.4426950408889634, heads, p.heads_kv, packed, blocks, p.batch,
            p.broadcast or 0, pairs, slices, p.dim // 8, p.dim_v // 8, p.mask, self.dq.shape[0], p.rows_o, p.k.shape[0])

    def schedule(self):
        D.launch_schedule(self.schedule_kernel, self.s)
        self.build_index()

    def build_index(self):
        self.index_kernel.launch(1, 1024, [self.index])

    def run_dq(self):
        self.control.zero_()
        self.dq_kernel.launch(D.SMS, 384, [*self.maps, self.params])

    def run_dkdv(self):
        self.control.zero_()
        self.dkdv_kernel.launch(D.SMS, 384, [*self.maps, self.params])

    def run(self):
        self.control.zero_()
        self.dq_kernel.launch(D.SMS, 384, [*self.maps, self.params])
        self.dkdv_kernel.launch(D.SMS, 384, [*self.maps, self.params])
        if self.sum_grid:
            self.sum_kernel.launch(self.sum_grid, 256, [self.params])


def cases():
    pairs = [(a, b) for a in UGLY for b in UGLY]
    lq, lk = [a for a, _ in pairs], [b for _, b in pairs]
    yield "one256", lambda: Problem([64], [64], 1, dim=256)
    yield "cross256", lambda: Problem(lq, lk, 2, dim=256)
    yield "gaps256", lambda: Problem(lq, lk, 2, dim=256, gap=5)
    yield "causal-tl256", lambda: Problem(lq, lk, 2, dim=256, causal=True)
    yield "causal-br256", lambda: Problem(lq, lk, 2, dim=256, causal=True, bottom=True)
    yield "window256", lambda: Problem(lq, lk, 2, dim=256, window=(50, 20))
    yield "window-br256", lambda: Problem(lq, lk, 2, dim=256, window=(70, 0), bottom=True)
    yield "gqa4-256", lambda: Problem(UGLY, UGLY, 8, 2, dim=256, causal=True, bottom=True)
    yield "mqa256", lambda: Problem(UGLY, UGLY, 16, 1, dim=256)
    yield "gqa3-256", lambda: Problem(UGLY, UGLY, 6, 2, dim=256)
    yield "fused256", lambda: Problem(UGLY, UGLY, 3, dim=256, fused=True)
    yield "d136v200", lambda: Problem(lq, lk, 2, dim=136, dim_v=200)
    yield "d256v8", lambda: Problem(lq, lk, 2, dim=256, dim_v=8)
    yield "f16-256", lambda: Problem(lq, lk, 2, dim=256, dtype=torch.float16)
    yield "negative256", lambda: Problem(UGLY, UGLY, 2, dim=256, scale=-0.1)
    yield "long256", lambda: Problem([2500, 3, 2049], [2500, 3, 2049], 2, dim=256, causal=True)
    yield "broadcast256", lambda: Problem([0] * 11, UGLY, 4, dim=256, broadcast=32)
    yield "broadcast130", lambda: Problem([0] * 11, UGLY, 6, 2, dim=256, broadcast=130)
    many = [1] * 200 + UGLY
    shared = [8] * 100 + [10] * 100 + list(range(11))
    mixed = [(7 * i + i * i) % 11 for i in range(len(many))]
    for dim in (64, 128, 256):
        yield f"index{dim}", lambda dim=dim: Problem(many, UGLY, 4, dim=dim, kv_index=shared)
        yield f"mixed{dim}", lambda dim=dim: Problem(many, UGLY, 4, dim=dim, kv_index=mixed)
        yield f"mixed-causal{dim}", lambda dim=dim: Problem(many, UGLY, 4, 2, dim=dim, kv_index=mixed, causal=True, bottom=True, gap=3)
    yield "mixed-f16", lambda: Problem(many, UGLY, 4, kv_index=mixed, dtype=torch.float16)
    yield "mixed-window", lambda: Problem(lq, UGLY, 6, 2, kv_index=[i % 11 for i in range(121)], window=(40, 10))
    yield "unused", lambda: Problem([5, 0, 130], [70, 20, 300, 40], 2, kv_index=[2, 1, 2])
    yield "broadcast-index", lambda: Problem([0] * 22, UGLY, 4, kv_index=mixed[:22], broadcast=40)
    yield "plain128", lambda: Problem(lq, lk, 2)


def check(directory, names):
    bad = 0
    for name, make in cases():
        if names and name not in names:
            continue
        p = make()
        o, lse, *gradients, q_rows, k_rows, q_zero, k_zero = reference(p)
        b = Split(p, directory, o, lse)
        b.schedule()
        b.run()
        wait(name)
        torch.cuda.synchronize()
        text, wrong = [], False
        for what, mine, exact, rows, zero in zip(("dq", "dk", "dv"), (b.dq, b.dk, b.dv), gradients, (q_rows, k_rows, k_rows), (q_zero, k_zero, k_zero)):
            x, y = mine[rows].double(), exact[rows]
            odd, touched, loose = int((~torch.isfinite(x)).sum()), int((~torch.isnan(mine[~rows])).sum()), int((mine[zero] != 0).sum())
            size = float(y.square().sum())
            err = math.sqrt(float((x.nan_to_num() - y).square().sum()) / size) if size else float(x.nan_to_num().abs().max()) if x.numel() else 0.0
            wrong |= odd > 0 or touched > 0 or loose > 0 or not err <= (4e-3 if p.dtype == torch.bfloat16 else 6e-4)
            text.append(f"{what} {err:.2e}" + (f" not finite {odd}" if odd else "") + (f" gaps touched {touched}" if touched else "") + (f" not zero {loose}" if loose else ""))
        bad += wrong
        print(f"  {name:16s} units {int(b.index_header[:4].view(torch.int32))} {'; '.join(text)} {'WRONG' if wrong else 'ok'}", flush=True)
    return bad


def repeat(directory, names):
    """The same bits in every run."""
    g = torch.Generator().manual_seed(5)
    bad = 0
    for name, p in (("wide", Problem(*(2 * [torch.randint(0, 700, (100,), generator=g).tolist()]), 2, dim=256)),
                    ("shared", Problem([20] * 300, [300] * 40, 4, kv_index=torch.randint(0, 40, (300,), generator=g).tolist(), causal=True)),
                    ("broadcast", Problem([0] * 100, [300] * 100, 4, dim=256, broadcast=70))):
        o, lse, *_ = reference(p)
        b = Split(p, directory, o, lse)
        b.schedule()
        b.run()
        wait(name)
        first = [t.clone().view(torch.int16) for t in (b.dq, b.dk, b.dv)]
        different = 0
        for _ in range(200):
            b.schedule()
            b.run()
            different += any(not torch.equal(x, t.view(torch.int16)) for x, t in zip(first, (b.dq, b.dk, b.dv)))
        print(f"  repeat {name}: {different} of 200 runs differ", flush=True)
        bad += different
    return bad


def shapes():
    def uniform(n, m, seed):
        return torch.randint(1, m + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    yield "256-full-256", lambda: Problem([256] * 576, [256] * 576, 4, dim=256)
    yield "256-half-512", lambda: Problem(*(2 * [uniform(576, 512, 1)]), 4, dim=256)
    yield "256-full-2048", lambda: Problem([2048] * 72, [2048] * 72, 4, dim=256)
    yield "256-causal-2048", lambda: Problem([2048] * 72, [2048] * 72, 4, dim=256, causal=True)
    yield "256-pma-32", lambda: Problem([0] * 576, uniform(576, 2048, 7), 4, dim=256, broadcast=32)
    users = lambda n, each: [u for u in range(n) for _ in range(each)]
    yield "index-32x16", lambda: Problem([32] * 2048, uniform(128, 2048, 3), 4, kv_index=users(128, 16))
    yield "index-32x16-causal", lambda: Problem([32] * 2048, uniform(128, 2048, 3), 4, kv_index=users(128, 16), causal=True, bottom=True)
    yield "index-1x100", lambda: Problem([1] * 25600, uniform(256, 2048, 3), 4, kv_index=users(256, 100))
    yield "128-full-256", lambda: Problem([256] * 1152, [256] * 1152, 4)
    yield "128-half-512", lambda: Problem(*(2 * [uniform(1152, 512, 2025 + 512)]), 4)
    yield "128-full-1024", lambda: Problem([1024] * 288, [1024] * 288, 4)
    yield "128-causal-1024", lambda: Problem([1024] * 288, [1024] * 288, 4, causal=True)
    yield "64-full-1024", lambda: Problem([1024] * 288, [1024] * 288, 4, dim=64)


def time_shapes(directory, names, shapes=shapes):
    ratios = []
    for name, make in shapes():
        if names and not any(name.startswith(n) for n in names):
            continue
        p = make()
        f = D.Forward(p, directory)
        f.schedule()
        f.run()
        o, lse = f.o, f.lse
        del f
        b = Split(p, directory, o, lse)
        b.schedule()
        b.run()
        wait(name)
        ms, dq, dkdv = (timed(x, reps=7, warm=1) for x in (b.run, b.run_dq, b.run_dkdv))
        index = timed(b.build_index, reps=7) * 1e3
        odd = sum(int((~torch.isfinite(t)).sum()) for t in (b.dq, b.dk, b.dv))
        flops = 2.5 * p.flops()
        rows = p.rows_o * p.heads
        size = 2 * (2 * (p.dim + p.dim_v) * rows + 2 * (p.k.numel() + p.v.numel())) + 8 * rows
        floor = max(flops / 680e12, size / 4.27e12) * 1e3
        ratios.append(ms / floor)
        print(f"  {name:18s} {ms:8.3f} ms (dq {dq:7.3f}, dkdv {dkdv:7.3f})  {flops / ms / 1e9:6.1f} T  floor {floor:7.3f}  x {ms / floor:5.2f}  index {index:5.1f} us"
              + (f"  NOT FINITE {odd}" if odd else ""), flush=True)
        del p, b, o, lse
        torch.cuda.empty_cache()
    if ratios:
        print(f"  geometric mean over floor, first 16: {math.exp(sum(map(math.log, ratios[:16])) / len(ratios[:16])):.3f}", flush=True)
    return 0


def time_index(directory, names):
    g = torch.Generator().manual_seed(1)
    for batch, kv_batch in ((1152, 72), (8192, 512), (1 << 20, 1 << 14)):
        for order in ("sorted", "mixed"):
            to = torch.randint(0, kv_batch, (batch,), generator=g)
            p = Problem([1] * batch, [8] * kv_batch, 1, dim=8, kv_index=(to.sort().values if order == "sorted" else to).tolist(), causal=True)
            b = Split(p, directory, p.do, torch.zeros(1, batch, device="cuda"))
            b.schedule()
            wait("index")
            members = b.members.view(torch.int32).view(-1, 4)[:, 3]
            right = torch.equal(members.cpu().long(), torch.sort(torch.tensor(p.kv_index), stable=True).indices)
            print(f"  index batch {batch} over {kv_batch}, {order}: {timed(b.build_index, reps=7) * 1e3:7.1f} us{'' if right else '  WRONG'}", flush=True)
    return 0


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("directory")
    a.add_argument("what", nargs="*", default=["check", "repeat", "time", "index"])
    a.add_argument("--cases", default="")
    a.add_argument("--shapes", default="")
    args = a.parse_args()
    split = lambda s: [x for x in s.split(",") if x]
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    run = {"check": (check, args.cases), "repeat": (repeat, ""), "time": (time_shapes, args.shapes),
           "bench": (lambda directory, names: time_shapes(directory, names, D.shapes), args.shapes), "index": (time_index, "")}
    status = 0
    for what in args.what or ["check", "repeat", "time", "index"]:
        function, names = run[what]
        bad = function(args.directory, split(names))
        print(f"{what}: {bad} wrong", flush=True)
        status += bad
    sys.exit(1 if status else 0)
