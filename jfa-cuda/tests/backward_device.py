"""The backward kernels on a GPU, straight through the driver API: gradients against float64, determinism, times.

    python3 backward_device.py CUBIN_DIR [check] [repeat] [time] [beside] [--others DIR,DIR] [--kernel unordered] [--cases a,b] [--shapes a,b]

CUBIN_DIR is DIR/jfa-cuda/sm_90a of `cargo xtask kernels --out DIR`. Needs schedule.cubin, backward_<dim>_<type>.cubin, backward_broadcast_<dim>_<type>.cubin, backward_reduce_<dim>_<type>.cubin and, for `time`, forward_<dim>_<type>.cubin in
CUBIN_DIR; with `--kernel unordered` instead of the backward's three backward_prepare_128_<type>.cubin and backward_unordered_128_<type>.cubin; it leaves out
broadcast queries and heads that fit the narrower kernel. dq is then the same to rounding in every run, dk and dv bit by bit. Outputs, the sums in the workspace and rows between sequences are NaN before every case. The work runs in a child
process; a case without an answer for 20 s (a shape: 40 s) is reported as HANG and the child is replaced.

`beside` times the kernel of every folder of --others beside CUBIN_DIR's: on the same buffers, a few calls at a time in turn, after a load that brings
the clock down to what it stays at. (Alone one after the other, each with memory of its own, a kernel differs from itself by up to 12 %.) A folder needs
only the cubins that differ. Gradients are compared with those of CUBIN_DIR first.
"""
import argparse
import math
import os
import sys
import time

from supervise import supervise

if __name__ == "__main__" and "--child" not in sys.argv:
    a = argparse.ArgumentParser()
    a.add_argument("directory")
    a.add_argument("what", nargs="*", default=["check", "repeat", "time"])
    a.add_argument("--shapes", default="")
    a.add_argument("--cases", default="")
    a.add_argument("--kernel", choices=["pairs", "unordered"], default="pairs")
    a.add_argument("--others", default="")
    args = a.parse_args()
    sys.exit(supervise(__file__, args.directory, args.what, [args.kernel, args.cases, args.shapes, args.others]))

import torch

import device as D
from device import C, Problem, UGLY, f32, i32, i64, kernel, ptr, struct, tensor_map, timed

BLOCK_BYTES, KEYS = 33792, 128
AVERAGED = ("half-", "full-", "cross-", "pma-", "tail-")
BackwardParams = struct("BackwardParams", [
    ("header", ptr), ("sequences", ptr), ("units", ptr), ("lse", ptr), ("control", ptr), ("partial", ptr), ("dq", ptr), ("dk", ptr), ("dv", ptr),
    ("lse_head_stride", i64), ("dq_row", i64), ("dq_head", i64), ("dk_row", i64), ("dk_head", i64), ("dv_row", i64), ("dv_head", i64),
    ("scale", f32), ("scale_log2", f32), ("heads_kv", i32), ("group", i32), ("blocks", i32), ("broadcast", i32), ("vectors_qk", i32),
    ("vectors_v", i32), ("mask", D.Mask), ("o_rows", i32), ("kv_rows", i32), ("ctas", i32)])
PrepareParams = struct("PrepareParams", [
    ("header", ptr), ("sequences", ptr), ("units", ptr), ("lse", ptr), ("o", ptr), ("d_o", ptr), ("partial", ptr), ("dq", ptr), ("lse_head_stride", i64),
    ("o_row", i64), ("o_head", i64), ("do_row", i64), ("do_head", i64), ("dq_row", i64), ("dq_head", i64), ("heads", i32),
    ("blocks", i32), ("vectors_qk", i32), ("vectors_v", i32), ("mask", D.Mask), ("o_rows", i32)])


def scale_log2(scale):
    return math.copysign(max(abs(scale) * 1.4426950408889634, 2.0 ** -60), scale)


def strides(*tensors):
    """Bytes between rows and between heads."""
    return [2 * s for t in tensors for s in t.stride()[:2]]


class Gradients:
    """What both kernels are launched with; gradients are NaN at first."""

    def __init__(self, p, directory, o, lse, unit_rows, q_tile):
        self.p, self.o, self.lse, self.q_tile = p, o, lse, q_tile
        self.schedule_kernel = kernel(directory, "schedule")
        self.s = D.schedule_params(p, 128, 128)
        self.capacity = p.k.shape[0] // unit_rows + max(p.batch, p.kv_batch)
        self.list = torch.full((8 * max(self.capacity, 1),), 0x7f, dtype=torch.uint8, device="cuda")
        self.s.backward_list, self.s.backward_capacity, self.s.backward_rows, self.s.backward_q_tile = self.list.data_ptr(), self.capacity, unit_rows, q_tile
        self.blocks = -(-p.broadcast // q_tile) if p.broadcast else p.rows_o // q_tile + p.batch
        self.control = torch.zeros(36 + 6 * p.heads * self.blocks, dtype=torch.int32, device="cuda")
        fresh = lambda t: torch.full_like(t, float("nan"), memory_format=torch.contiguous_format)
        if p.q.stride(0) > p.heads * p.dim:  # a fused buffer
            packed = torch.full((p.q.shape[0], 3 * p.heads, p.dim), float("nan"), dtype=p.dtype, device="cuda")
            self.dq, self.dk, self.dv = (packed[:, i * p.heads:(i + 1) * p.heads] for i in range(3))
        else:
            self.dq, self.dk, self.dv = fresh(p.q), fresh(p.k), fresh(p.v)

    def params(self, ctas):
        p = self.p
        return BackwardParams(
            self.s.header, self.s.sequences, self.list.data_ptr(), self.lse.data_ptr(), self.control.data_ptr(), self.partial.data_ptr(),
            self.dq.data_ptr(), self.dk.data_ptr(), self.dv.data_ptr(), self.lse.stride(0), *strides(self.dq, self.dk, self.dv), p.scale, scale_log2(p.scale),
            p.heads_kv, p.heads // p.heads_kv, self.blocks, p.broadcast or 0, p.dim // 8, p.dim_v // 8, p.mask, p.rows_o, p.k.shape[0], ctas)

    def schedule(self):
        D.launch_schedule(self.schedule_kernel, self.s)

    def take(self, directory):
        """The kernels of a folder; what it lacks stays."""
        for attribute, name in self.cubins.items():
            if not hasattr(self, attribute) or os.path.exists(os.path.join(directory, name + ".cubin")):
                setattr(self, attribute, kernel(directory, name))


class Backward(Gradients):
    """In pairs of CTAs, the same bits in every run."""

    dq_is_free = False

    def __init__(self, p, directory, o, lse):
        tile = 64 if max(p.dim, p.dim_v) <= 64 else 128
        kind = "bf16" if p.dtype == torch.bfloat16 else "f16"
        # Pairs of CTAs share a sequence, but for a broadcast query.
        self.cluster = 1 if p.broadcast else 2
        super().__init__(p, directory, o, lse, self.cluster * KEYS, 128 if tile == 64 else 64)
        self.cubins = {"kernel": f"backward_{'broadcast_' if p.broadcast else ''}{tile}_{kind}"}
        self.take(directory)
        self.reduce = kernel(directory, f"backward_reduce_{tile}_{kind}") if p.broadcast else None
        self.ctas = D.SMS // self.cluster * self.cluster
        # SHARE: as if so many CTAs worked on a key/value head; large: the tiles of every sequence are spread, 0: of none.
        self.s.backward_share = int(os.environ.get("SHARE", -(-(self.ctas // self.cluster) // -(-p.heads_kv // self.cluster))))
        slices = -(-D.SMS // p.heads_kv) if p.broadcast else 1
        longest = max(p.lk, default=0)
        blocks = p.heads * self.blocks * slices if longest > KEYS or p.broadcast else 0
        self.partial = torch.full((max(blocks, 1) * BLOCK_BYTES // 4,), float("nan"), device="cuda")
        self.maps = [tensor_map(t, rows, l2_bytes=128) for t, rows in ((p.q, 64), (p.k, 64), (p.v, 64), (o, 32), (p.do, 64), (self.dk, 16), (self.dv, 16))]
        self.launched_with = self.params(self.ctas)

    def run(self):
        self.control.zero_()
        self.kernel.launch(self.ctas, self.kernel.threads, [*self.maps, self.launched_with], cluster=self.cluster)
        if self.reduce:
            self.reduce.launch(self.p.heads * self.blocks * 8, 256, [self.launched_with])


class Unordered(Gradients):
    """Every tile of keys by itself, dq in any order."""

    dq_is_free = True
    Q_TILE, HEAD_DIM = 80, 128

    def __init__(self, p, directory, o, lse):
        kind = "bf16" if p.dtype == torch.bfloat16 else "f16"
        super().__init__(p, directory, o, lse, KEYS, self.Q_TILE)
        self.cubins = {"kernel": f"backward_unordered_{self.HEAD_DIM}_{kind}", "prepare_kernel": f"backward_prepare_{self.HEAD_DIM}_{kind}"}
        self.take(directory)
        self.s.backward_share = 0x7fffffff
        self.ctas = max(1, min(D.SMS, p.heads_kv * self.capacity))
        self.prepare_ctas = D.SMS * self.prepare_kernel.word("jfa_ctas_per_multiprocessor")
        self.partial = torch.full((max(p.heads * self.blocks, 1) * self.prepare_kernel.word("jfa_block_bytes") // 4,), float("nan"), device="cuda")
        self.maps = [tensor_map(p.q, self.Q_TILE), tensor_map(p.k, KEYS), tensor_map(p.v, KEYS), tensor_map(p.do, self.Q_TILE), tensor_map(self.dk, 16), tensor_map(self.dv, 16)]
        self.launched_with = self.params(self.ctas)
        self.prepared_with = PrepareParams(
            self.s.header, self.s.sequences, self.list.data_ptr(), lse.data_ptr(), o.data_ptr(), p.do.data_ptr(), self.partial.data_ptr(), self.dq.data_ptr(),
            lse.stride(0), *strides(o, p.do, self.dq), p.heads, self.blocks, p.dim // 8, p.dim_v // 8, p.mask, p.rows_o)

    @staticmethod
    def serves(p):
        return not p.broadcast and max(p.dim, p.dim_v) > 64

    def prepare(self):
        self.prepare_kernel.launch(self.prepare_ctas, self.prepare_kernel.threads, [self.prepared_with])

    def run(self):
        self.control.zero_()
        self.prepare()
        self.kernel.launch(self.ctas, self.kernel.threads, [*self.maps, self.launched_with])


def reference(p):
    """o (rounded), lse, dq, dk, dv in float64; which rows of dq and dk, dv belong to a sequence; and which of them must be zero
    exactly because nothing is summed: rows that see no key, keys that no row sees."""
    o = torch.full_like(p.do, float("nan"))
    lse = torch.full((p.heads, max(p.rows_o, 1)), float("nan"), device="cuda")
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device="cuda") for t in (p.q, p.k, p.v))
    q_rows, k_rows = torch.zeros(p.q.shape[0], dtype=torch.bool, device="cuda"), torch.zeros(p.k.shape[0], dtype=torch.bool, device="cuda")
    q_seeing, k_seen = torch.zeros_like(q_rows), torch.zeros_like(k_rows)
    group = p.heads // p.heads_kv
    for c in range(p.kv_batch):
        k_rows[p.off_k[c]:p.off_k[c] + p.lk[c]] = True
    for b in range(p.batch):
        rq, ro, rk = p.sequence(b)
        q_rows[rq] = True
        out, l = p.reference(b)
        o[ro], lse[:, ro] = out.to(p.dtype), l.float()
        q, do = p.q[rq].double(), p.do[ro].double()
        if not q.shape[0] or rk.start == rk.stop:
            continue
        k, v = (t[rk].double().repeat_interleave(group, 1) for t in (p.k, p.v))
        s = torch.einsum("ihd,jhd->hij", q, k) * p.scale
        see = p.visible(q.shape[0], k.shape[0])
        q_seeing[rq] |= see.any(1)
        k_seen[rk] |= see.any(0)
        prob = torch.where(see & torch.isfinite(l)[..., None], torch.exp(s - l.nan_to_num(neginf=0.0)[..., None]), torch.zeros_like(s))
        delta = (o[ro].double() * do).sum(-1).t()[..., None]
        ds = prob * (torch.einsum("ihd,jhd->hij", do, v) - delta)
        fold = lambda t: t.reshape(t.shape[0], p.heads_kv, group, t.shape[2]).sum(2)
        dq[rq] += p.scale * torch.einsum("hij,jhd->ihd", ds, k)
        dk[rk] += fold(p.scale * torch.einsum("hij,ihd->jhd", ds, q))
        dv[rk] += fold(torch.einsum("hij,ihd->jhd", prob, do))
    return o, lse, dq, dk, dv, q_rows, k_rows, q_rows & ~q_seeing, k_rows & ~k_seen


def cases():
    pairs = [(a, b) for a in UGLY for b in UGLY]
    lq, lk = [a for a, _ in pairs], [b for _, b in pairs]
    yield "one", lambda: Problem([64], [128], 1)
    yield "self", lambda: Problem(UGLY, UGLY, 4)
    yield "cross", lambda: Problem(lq, lk, 2)
    yield "gaps", lambda: Problem(lq, lk, 2, gap=5)
    yield "causal-tl", lambda: Problem(lq, lk, 2, causal=True)
    yield "causal-br", lambda: Problem(lq, lk, 2, causal=True, bottom=True)
    yield "window", lambda: Problem(lq, lk, 2, window=(50, 20))
    yield "window-br", lambda: Problem(lq, lk, 2, window=(70, 0), bottom=True)
    yield "window-left", lambda: Problem([700], [700], 2, window=(130, -1))
    yield "gqa4", lambda: Problem(UGLY, UGLY, 8, 2, causal=True, bottom=True)
    yield "mqa", lambda: Problem(UGLY, UGLY, 16, 1)
    yield "gqa3", lambda: Problem(UGLY, UGLY, 6, 2)
    yield "fused", lambda: Problem(UGLY, UGLY, 3, fused=True)
    yield "broadcast", lambda: Problem([0] * 11, UGLY, 4, broadcast=32)
    yield "broadcast130", lambda: Problem([0] * 11, UGLY, 6, 2, broadcast=130)
    yield "scale0", lambda: Problem(UGLY, UGLY, 2, scale=0.0)
    yield "negative", lambda: Problem(UGLY, UGLY, 2, scale=-0.1)
    yield "long", lambda: Problem([2500, 3, 2049], [2500, 3, 2049], 2, causal=True)
    yield "spread", lambda: Problem([300] * 3, [1100, 600, 700], 4, 2, causal=True, bottom=True)
    yield "long-full", lambda: Problem([2500, 3, 1100], [2500, 3, 3049], 2)
    yield "long-gqa", lambda: Problem([1500, 0, 900, 40], [1500, 700, 0, 2100], 8, 2, window=(300, 50))
    yield "long-blind", lambda: Problem([1000, 300, 90], [300, 200, 10], 2, causal=True, bottom=True)
    yield "long-d64", lambda: Problem([700, 90, 1100], [900, 1200, 1100], 4, 2, dim=64)
    yield "long-d96", lambda: Problem([700, 90, 1100], [900, 1200, 1100], 4, 2, dim=96)
    # One block of rows, many keys, more sequences than pairs of CTAs: a pair does all passes of a sequence one after the other.
    yield "few-rows", lambda: Problem([20, 64, 1] * 400, [700, 520, 300] * 400, 4)
    # One head, odd numbers of tiles, then sequences of one tile: one CTA of a pair has nothing to do in those.
    yield "one-head", lambda: Problem([300, 60, 40, 20] * 300, [300, 60, 40, 20] * 300, 1)
    yield "few-rows-gqa", lambda: Problem([20, 64, 1] * 400, [700, 520, 650] * 400, 4, 2, causal=True, bottom=True)
    yield "f16", lambda: Problem(lq, lk, 2, dtype=torch.float16)
    for d in (8, 32, 40, 64, 96):
        yield f"d{d}", lambda d=d: Problem(lq, lk, 2, dim=d, causal=True)
    yield "d64f16", lambda: Problem(lq, lk, 2, dim=64, dtype=torch.float16)
    yield "f16-long", lambda: Problem([700, 90, 1100], [900, 1200, 1100], 4, 2, causal=True, dtype=torch.float16)
    yield "d64v128", lambda: Problem(lq, lk, 2, dim=64, dim_v=128)


def check(directory, kind, names, skip):
    bad = 0
    for name, make in cases():
        if name in skip or (names and name not in names):
            continue
        print("@" + name, flush=True)
        p = make()
        if kind is Unordered and not kind.serves(p):
            continue
        o, lse, *gradients, q_rows, k_rows, q_zero, k_zero = reference(p)
        b = kind(p, directory, o, lse)
        try:
            b.schedule()
            torch.cuda.synchronize()
            b.run()
            torch.cuda.synchronize()
        except RuntimeError as e:
            print(f"  {name:14s} {e}", flush=True)
            sys.exit(3)
        text, wrong = [], False
        for what, mine, exact, rows, zero in zip(("dq", "dk", "dv"), (b.dq, b.dk, b.dv), gradients, (q_rows, k_rows, k_rows), (q_zero, k_zero, k_zero)):
            x, y = mine[rows].double(), exact[rows]
            odd = int((~torch.isfinite(x)).sum())
            touched = int((~torch.isnan(mine[~rows])).sum())
            loose = int((mine[zero] != 0).sum())
            size = float(y.square().sum())
            err = math.sqrt(float((x.nan_to_num() - y).square().sum()) / size) if size else float(x.nan_to_num().abs().max()) if x.numel() else 0.0
            wrong |= odd > 0 or touched > 0 or loose > 0 or not err <= (4e-3 if p.dtype == torch.bfloat16 else 6e-4)
            text.append(f"{what} {err:.2e}" + (f" not finite {odd}" if odd else "") + (f" gaps touched {touched}" if touched else "") + (f" not zero {loose}" if loose else ""))
        bad += wrong
        print(f"  {name:14s} units {int(b.s.buffer[4:8].view(torch.int32))} {'; '.join(text)} {'WRONG' if wrong else 'ok'}", flush=True)
        del p, b, o, lse, gradients
    return bad


RUNS = 1000


def repeat(directory, kind, names, skip):
    """The same bits in every run and wherever a sequence stands in the batch; of a dq whose order is free the same values but for the last bits."""
    print("@repeat", flush=True)
    g = torch.Generator().manual_seed(5)
    lq = torch.randint(0, 700, (200,), generator=g).tolist()
    p = Problem(lq, lq, 4)
    o, lse, *_ = reference(p)
    b = kind(p, directory, o, lse)
    b.schedule()
    b.run()
    first = [t.clone() for t in (b.dq, b.dk, b.dv)]
    farthest = 0.0

    def different(x, y, free):
        nonlocal farthest
        if not free:
            return not torch.equal(x.view(torch.int16), y.view(torch.int16))
        x, y = x.float(), y.float()
        far = float((x - y).norm() / x.norm())
        farthest = max(farthest, far)
        # fp32 sums in another order, then one rounding: neighbours, now and then.
        return not (far <= 1e-3 and bool(((x - y).abs() <= 2.0 ** -7 * x.abs() + 1e-4 * x.abs().mean()).all()))
    free = (kind.dq_is_free, False, False)
    runs = 0
    for _ in range(RUNS):
        b.run()
        runs += any([different(*each) for each in zip(first, (b.dq, b.dk, b.dv), free)])
    order = torch.randperm(len(lq), generator=g).tolist()
    rows = torch.cat([torch.arange(p.off_q[i], p.off_q[i + 1]) for i in order]).cuda()
    other = Problem([lq[i] for i in order], [lq[i] for i in order], 4)
    for name in ("q", "k", "v", "do"):
        setattr(other, name, getattr(p, name)[rows].contiguous())
    c = kind(other, directory, o[rows].contiguous(), lse[:, rows].contiguous())
    c.schedule()
    c.run()
    torch.cuda.synchronize()
    moved = sum(different(x[rows], t, f) for x, t, f in zip(first, (c.dq, c.dk, c.dv), free))
    print(f"  repeat: {runs} of {RUNS} runs differ; permuted batch: {moved} of 3 gradients differ" + (f"; dq within {farthest:.1e}" if kind.dq_is_free else ""), flush=True)
    return runs + moved


def each_shape(directory, kind, names, skip):
    """Name, problem and a backward behind its forward, for every shape that is wanted. Who asks for the next one has let go of these."""
    for name, make in D.shapes():
        if name in skip or (names and not any(name.startswith(n) for n in names)):
            continue
        print("@" + name, flush=True)
        p = make()
        if kind is Unordered and not kind.serves(p):
            continue
        f = D.Forward(p, directory)
        f.schedule()
        f.run()
        b = kind(p, directory, f.o, f.lse)
        del f
        b.schedule()
        torch.cuda.synchronize()
        yield name, p, b
        del p, b
        torch.cuda.empty_cache()


def time_shapes(directory, kind, names, skip):
    ratios = []
    for name, p, b in each_shape(directory, kind, names, skip):
        ms = timed(b.run, reps=9, warm=2)
        prepare_us = timed(b.prepare, reps=9) * 1e3 if kind is Unordered else 0.0
        schedule_us = timed(b.schedule, reps=9) * 1e3
        odd = sum(int((~torch.isfinite(t)).sum()) for t in (b.dq, b.dk, b.dv))
        flops = 2.5 * p.flops()
        rows = p.rows_o * p.heads
        size = 2 * (2 * (p.dim + p.dim_v) * rows + 2 * (p.k.numel() + p.v.numel())) + 8 * rows
        floor = max(flops / 680e12, size / 4.27e12) * 1e3
        if name.startswith(AVERAGED):
            ratios.append(ms / floor)
        print(f"  {name:12s} {ms:8.3f} ms  {flops / ms / 1e9:6.1f} T  floor {floor:7.3f}  x {ms / floor:5.2f}  schedule {schedule_us:5.1f} us"
              + (f"  prepare {prepare_us:6.1f} us, {2 * rows * 2 * p.dim_v / prepare_us / 1e6:5.2f} TB/s" if kind is Unordered else "")
              + (f"  NOT FINITE {odd}" if odd else ""), flush=True)
        del p, b
    if ratios:
        print(f"  geometric mean over floor, {len(ratios)} gem and heavy_tail shapes: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}", flush=True)
    return 0


ROUNDS, CALLS, LOAD = 12, 3, 0.4  # of every folder in turn, calls of a turn; seconds of calls before


def beside(directory, kind, names, skip, others):
    folders = [directory, *others]
    print("  " + " " * 16 + "".join(f"{os.path.basename(os.path.normpath(f))[-12:]:>13s}" for f in folders) + "  ms, then ratios to the first", flush=True)
    bad = 0
    for name, p, b in each_shape(directory, kind, names, skip):
        def take(folder):
            b.take(directory)
            b.take(folder)
        first, wrong = None, []
        for folder in folders:
            for t in (b.dq, b.dk, b.dv, b.partial):
                t.fill_(float("nan"))
            take(folder)
            b.run()
            torch.cuda.synchronize()
            mine = [t.clone() for t in (b.dq, b.dk, b.dv)]
            first = first or mine
            errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(mine, first)]
            if not all(e <= 4e-3 for e in errors):  # NaN is no number that is small enough
                wrong.append(f"{folder} WRONG: {errors}")
        bad += len(wrong)
        del first, mine
        begin = time.time()
        while time.time() - begin < LOAD:
            for folder in folders:
                take(folder)
                b.run()
            torch.cuda.synchronize()
        taken = [[] for _ in folders]
        for turn in range(ROUNDS):
            for i in range(len(folders)):
                j = (i + turn) % len(folders)
                take(folders[j])
                taken[j].append(timed(b.run, reps=CALLS, warm=1))
        ms = [sorted(t)[len(t) // 2] for t in taken]
        print(f"  {name:16s}" + "".join(f"{x:13.4f}" for x in ms) + "  " + "".join(f" {x / ms[0]:.3f}" for x in ms[1:]) + "".join("  " + w for w in wrong), flush=True)
        del p, b, take
    return bad


if __name__ == "__main__":
    directory, what, kind, cases_wanted, shapes_wanted, others, skipped = sys.argv[2:9]
    split = lambda s: [x for x in s.split(",") if x]
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    wanted = split(shapes_wanted if what in ("time", "beside") else cases_wanted)
    run = {"check": check, "repeat": repeat, "time": time_shapes, "beside": lambda *args: beside(*args, split(others))}[what]
    status = run(directory, {"pairs": Backward, "unordered": Unordered}[kind], wanted, split(skipped))
    if what != "time":
        print(f"{what}: {status} wrong", flush=True)
    sys.exit(1 if status else 0)
