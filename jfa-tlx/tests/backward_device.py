"""Drives the backward kernels through the CUDA driver API with PyTorch tensors.

    python3 backward_device.py FOLDER [check] [repeat] [time] [--variants g1,g4] [--cases a,b] [--shapes a,b]

FOLDER (DIR/jfa-tlx/sm_90a of `cargo xtask kernels --out DIR`, and what is of jfa-cuda beside it) holds schedule.cubin (jfa-cuda) and for every kernel NAME.cubin with NAME.json: {"tags": its tags in kernels.toml, "derived": the
notes of compile.py}; for `time` also forward_<dim>_<type>.cubin of jfa-cuda. Problems, references and shapes are those of
jfa-cuda/tests. Outputs, workspace and rows between sequences are NaN before every case. The work runs in a child process; a case
without an answer for 20 s (a shape: 40 s) is reported as HANG and the child is replaced.
"""
import argparse
import ctypes as C
import glob
import importlib.util
import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../jfa-cuda/tests"))
from supervise import supervise


def parent():
    a = argparse.ArgumentParser()
    a.add_argument("directory")
    a.add_argument("what", nargs="*", default=["check", "repeat", "time"])
    a.add_argument("--variants", default="g1,g2,g3,g4")
    a.add_argument("--shapes", default="")
    a.add_argument("--cases", default="")
    args = a.parse_args()
    sys.exit(supervise(__file__, args.directory, args.what, [args.variants, args.cases, args.shapes]))


if __name__ == "__main__" and "--child" not in sys.argv:
    parent()

import torch  # noqa: E402

import device as D  # noqa: E402
from device import Problem, UGLY, f32, i32, i64, ptr, tensor_map  # noqa: E402

# Of the same name, hence by its path.
spec = importlib.util.spec_from_file_location("cuda_backward", os.path.join(os.path.dirname(D.__file__), "backward_device.py"))
cuda_backward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda_backward)
reference = cuda_backward.reference
KEY_ROWS = 128


class Launch:
    def __init__(self, path):
        with open(path) as f:
            notes = json.load(f)
        self.tags, self.notes = notes["tags"], notes["derived"]
        self.kernel = D.Kernel(path[:-5] + ".cubin", self.notes["entry"])
        self.kernel.shared = self.notes["shared_dynamic"]
        D.ok(D.cuda.cuFuncSetAttribute(self.kernel.function, 8, self.kernel.shared), f"{path}: shared {self.kernel.shared}")


_launches = {}


def launches(directory, p, variant):
    """The kernels of a pass in their order."""
    kind = "bf16" if p.dtype == torch.bfloat16 else "f16"
    words = {"broadcast" if p.broadcast is not None else "jagged", "kv_index" if p.uses_index else "no_kv_index"}
    out = []
    for path in sorted(glob.glob(os.path.join(directory, "backward_*.json"))):
        with open(path) as f:
            tags = json.load(f)["tags"]
        if variant in tags["variant"].split() and tags.get("dtype", kind) == kind and tags.get("head_dim", str(p.dim)) == str(p.dim) and set(
                tags.get("when", "").split()) <= words:
            if path not in _launches:
                _launches[path] = Launch(path)
            out.append(_launches[path])
    if not out:
        raise ValueError(f"no kernel of {variant} for head_dim {p.dim} {kind}")
    return sorted(out, key=lambda x: x.tags["step"])


class Backward:
    def __init__(self, p, directory, o, lse, variant):
        if p.dim != p.dim_v:
            raise ValueError("head_dim_v differs")
        self.p, self.variant = p, variant
        passes = launches(directory, p, variant)
        self.schedule_kernel = D.kernel(directory, "schedule")
        self.s = D.schedule_params(p, 128, 128)
        rows_k = p.k.shape[0]
        whole = p.uses_index or p.broadcast is not None
        capacity = p.batch if whole else rows_k // KEY_ROWS + p.batch
        self.list = torch.full((8 * max(capacity, 1),), 0x7f, dtype=torch.uint8, device="cuda")
        self.s.backward_list, self.s.backward_capacity, self.s.backward_rows, self.s.backward_q_tile = self.list.data_ptr(), capacity, KEY_ROWS, 64
        # 0: a sequence is one unit; large: every key tile is one; between: key tiles where a sequence is too long for one CTA.
        self.s.backward_share = 0 if whole else int(os.environ.get("SHARE", 1 << 30))
        self.s.merge = 0
        fresh = lambda t: torch.full_like(t, float("nan"), memory_format=torch.contiguous_format)
        if p.q.stride(0) > p.heads * p.dim:  # a fused buffer
            packed = torch.full((p.q.shape[0], 3 * p.heads, p.dim), float("nan"), dtype=p.dtype, device="cuda")
            self.dq, self.dk, self.dv = (packed[:, i * p.heads:(i + 1) * p.heads] for i in range(3))
        else:
            self.dq, self.dk, self.dv = fresh(p.q), fresh(p.k), fresh(p.v)
        delta_head = -(-max(p.rows_o, 1) // 32) * 32
        blocks = -(-(p.broadcast or 0) // 128)
        slices = min(max(1, -(-2 * D.SMS // max(1, blocks * p.heads))), max(1, p.batch))
        nan = lambda n: torch.full((max(n, 1),), float("nan"), device="cuda")
        self.delta, self.partial = nan(p.heads * delta_head), nan(slices * p.heads * (p.broadcast or 0) * p.dim)
        self.zeros = torch.zeros(64 + 4 * p.kv_batch, dtype=torch.int32, device="cuda")
        tensors = dict(q=p.q, k=p.k, v=p.v, o=o, d_o=p.do, dq=self.dq, dk=self.dk, dv=self.dv)
        values = dict(lse=ptr(lse.data_ptr()), lse_head=i64(lse.stride(0)), delta=ptr(self.delta.data_ptr()), delta_head=i64(delta_head),
                      partial=ptr(self.partial.data_ptr()), counter=ptr(self.zeros.data_ptr()), kv_table=ptr(self.zeros.data_ptr() + 256),
                      header=ptr(self.s.header), sequences=ptr(self.s.sequences), backward_units=ptr(self.list.data_ptr()),
                      kv_offsets=ptr(p.dev["ok"].data_ptr()), kv_offsets_64=i32(0), kv_lengths=ptr(p.dev["lk"].data_ptr() if p.gap else None),
                      scale=f32(p.scale), scale_log2=f32(p.scale * 1.4426950408889634), heads_q=i32(p.heads), heads_kv=i32(p.heads_kv),
                      group=i32(p.heads // p.heads_kv), left=i32(p.mask.left), right=i32(p.mask.right), bottom_right=i32(p.mask.bottom_right),
                      batch=i32(p.batch), kv_batch=i32(p.kv_batch), q_rows=i32(p.rows_q), o_rows=i32(p.rows_o), kv_rows=i32(rows_k),
                      broadcast=i32(p.broadcast or 0), slices=i32(slices), global_scratch=ptr(None), profile_scratch=ptr(None))
        for name, t in tensors.items():
            values |= {name: ptr(t.data_ptr()), f"{name}_row": i64(t.stride(0)), f"{name}_head": i64(t.stride(1))}
        self.launches = []
        for x in passes:
            params = []
            for y in x.notes["parameters"]:
                if y["kind"] == "tensor_map":
                    params.append(tensor_map(tensors[y["name"][:-4]], y["tile"]["rows"]))
                elif "." in y["name"]:
                    params.append({"i32": i32, "i64": i64}[y["kind"]](1))
                else:
                    params.append(values[y["name"]])
            rows = x.notes["constants"].get("grid_rows", 1)
            heads = p.heads if x.tags.get("grid_heads") == "q" else p.heads_kv
            grid = {"persistent": D.SMS * x.notes["constants"].get("ctas_per_sm", 1), "batch": -(-max(p.batch, p.kv_batch) // rows),
                    "q_rows": -(-p.rows_o // rows) * p.heads, "dq_rows": -(-p.rows_q // rows) * p.heads, "backward_units": capacity * heads,
                    "slices": slices * blocks * p.heads, "kv_units": (rows_k // KEY_ROWS + p.kv_batch) * p.heads_kv}[x.tags["grid"]]
            array = (ptr * len(params))(*[C.cast(C.byref(y), ptr) for y in params])
            if grid:
                self.launches.append((x, params, array, grid))

    def schedule(self):
        D.launch_schedule(self.schedule_kernel, self.s)

    def run(self):
        self.zeros.zero_()
        for x, _, array, grid in self.launches:
            cluster = x.notes["cluster"][0]
            config = D.LaunchConfig((grid, 1, 1), (x.notes["threads"], 1, 1), x.kernel.shared, torch.cuda.current_stream().cuda_stream, None, 0)
            assert cluster == 1, "clusters are baked into the machine code; this script launches none"
            D.ok(D.cuda.cuLaunchKernelEx(C.byref(config), x.kernel.function, array, None), x.notes["entry"])


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
    yield "kv_index", lambda: Problem([1] * 200 + UGLY, UGLY, 4, kv_index=[8] * 100 + [10] * 100 + list(range(11)))
    yield "index-causal", lambda: Problem(UGLY * 2, UGLY, 4, 2, kv_index=list(range(11)) + list(range(11))[::-1], causal=True, bottom=True, gap=3)
    yield "broadcast", lambda: Problem([0] * 11, UGLY, 4, broadcast=32)
    yield "broadcast130", lambda: Problem([0] * 11, UGLY, 6, 2, broadcast=130)
    yield "negative", lambda: Problem(UGLY, UGLY, 2, scale=-0.1)
    yield "long", lambda: Problem([2500, 3, 2049], [2500, 3, 2049], 2, causal=True)
    yield "long-full", lambda: Problem([2500, 3, 1100], [2500, 3, 3049], 2)
    yield "f16", lambda: Problem(lq, lk, 2, dtype=torch.float16)
    yield "d64", lambda: Problem(lq, lk, 2, dim=64, causal=True)
    yield "d64f16", lambda: Problem(lq, lk, 2, dim=64, dtype=torch.float16)


def check(directory, variants, names, skip):
    bad = 0
    for name, make in cases():
        if names and name not in names:
            continue
        p = None
        for variant in variants:
            if f"{name}/{variant}" in skip:
                continue
            print(f"@{name}/{variant}", flush=True)
            if p is None:
                p = make()
                o, lse, *gradients, q_rows, k_rows, q_zero, k_zero = reference(p)
            b = Backward(p, directory, o, lse, variant)
            try:
                b.schedule()
                torch.cuda.synchronize()
                b.run()
                torch.cuda.synchronize()
            except RuntimeError as e:
                print(f"  {name:14s} {variant} {e}", flush=True)
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
                text.append(f"{what} {err:.2e}" + (f" not finite {odd}" if odd else "") + (f" gaps touched {touched}" if touched else "") + (
                    f" not zero {loose}" if loose else ""))
            bad += wrong
            print(f"  {name:14s} {variant} units {int(b.s.buffer[4:8].view(torch.int32))} {'; '.join(text)} {'WRONG' if wrong else 'ok'}", flush=True)
            del b
    return bad


def repeat(directory, variants, names, skip):
    """The same bits in every run and wherever a sequence stands in the batch."""
    bad = 0
    g = torch.Generator().manual_seed(5)
    lq = torch.randint(0, 700, (200,), generator=g).tolist()
    p = Problem(lq, lq, 4)
    print("@reference", flush=True)
    o, lse, *_ = reference(p)
    order = torch.randperm(len(lq), generator=g).tolist()
    rows = torch.cat([torch.arange(p.off_q[i], p.off_q[i + 1]) for i in order]).cuda()
    other = Problem([lq[i] for i in order], [lq[i] for i in order], 4)
    for name in ("q", "k", "v", "do"):
        setattr(other, name, getattr(p, name)[rows].contiguous())
    for variant in variants:
        if variant in skip:
            continue
        print(f"@{variant}", flush=True)
        b = Backward(p, directory, o, lse, variant)
        b.schedule()
        b.run()
        first = [t.clone().view(torch.int16) for t in (b.dq, b.dk, b.dv)]
        different = 0
        for _ in range(200):
            b.run()
            different += any(not torch.equal(x, t.view(torch.int16)) for x, t in zip(first, (b.dq, b.dk, b.dv)))
        c = Backward(other, directory, o[rows].contiguous(), lse[:, rows].contiguous(), variant)
        c.schedule()
        c.run()
        torch.cuda.synchronize()
        moved = sum(not torch.equal(x[rows], t.view(torch.int16)) for x, t in zip(first, (c.dq, c.dk, c.dv)))
        print(f"  repeat {variant}: {different} of 200 runs differ; permuted batch: {moved} of 3 gradients differ", flush=True)
        bad += different + moved
    return bad


def time_shapes(directory, variants, names, skip):
    ratios = {v: [] for v in variants}
    print("  shape          floor " + "".join(f"{v:>9s}" for v in variants) + "   times the floor; passes of the last", flush=True)
    for name, make in D.shapes():
        if name in skip or (names and not any(name.startswith(n) for n in names)):
            continue
        print("@" + name, flush=True)
        p = make()
        f = D.Forward(p, directory)
        f.schedule()
        f.run()
        o, lse = f.o, f.lse
        del f
        flops = 2.5 * p.flops()
        rows = p.rows_o * p.heads
        size = 2 * (2 * (p.dim + p.dim_v) * rows + 2 * (p.k.numel() + p.v.numel())) + 8 * rows
        floor = max(flops / 680e12, size / 4.27e12) * 1e3
        line = over = ""
        for v in variants:
            b = Backward(p, directory, o, lse, v)
            b.schedule()
            b.run()
            torch.cuda.synchronize()
            odd = sum(int((~torch.isfinite(t)).sum()) for t in (b.dq, b.dk, b.dv))
            ms = D.timed(b.run, reps=int(os.environ.get("REPS", "7")), warm=1)
            ratios[v].append(ms / floor)
            line += f"{ms:9.3f}"
            over += f"{ms / floor:6.2f}" + (f" NOT FINITE {odd}" if odd else "")
        if len(b.launches) > 1:
            def one(i):
                x, _, array, grid = b.launches[i]

                def go():
                    b.zeros.zero_()
                    config = D.LaunchConfig((grid, 1, 1), (x.notes["threads"], 1, 1), x.kernel.shared, torch.cuda.current_stream().cuda_stream, None, 0)
                    D.ok(D.cuda.cuLaunchKernelEx(C.byref(config), x.kernel.function, array, None), "launch")
                return D.timed(go, reps=3, warm=1)
            over += "   " + " ".join(f"{b.launches[i][0].notes['entry'][9:]} {one(i):.3f}" for i in range(len(b.launches)))
        print(f"  {name:12s} {floor:8.3f} {line}  {over}", flush=True)
        del p, b, o, lse
        torch.cuda.empty_cache()
    for v in variants:
        if ratios[v]:
            n = ratios[v][:16]
            print(f"  {v}: geometric mean over floor, first {len(n)}: {math.exp(sum(map(math.log, n)) / len(n)):.3f}", flush=True)
    return 0


if __name__ == "__main__":
    directory, what, variants, cases_wanted, shapes_wanted, skipped = sys.argv[2:8]
    split = lambda s: [x for x in s.split(",") if x]
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    run = {"check": check, "repeat": repeat, "time": time_shapes}[what]
    status = run(directory, split(variants), split(shapes_wanted if what == "time" else cases_wanted), split(skipped))
    if what != "time":
        print(f"{what}: {status} wrong", flush=True)
    sys.exit(1 if status else 0)
