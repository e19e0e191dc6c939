"""Drives the forward kernels through the CUDA driver API with PyTorch tensors, beside those of jfa-cuda.

    python3 forward_device.py FOLDER [check] [time] [--variants g1,g4,cuda] [--shapes a,b] [--cases a,b]

FOLDER (DIR/jfa-tlx/sm_90a of `cargo xtask kernels --out DIR`, and what is of jfa-cuda beside it) holds schedule.cubin (jfa-cuda) and NAME.cubin with NAME.json, the notes of compile.py, for NAME = forward_<variant>_<dim>_<type>;
for the variant `cuda` forward_<dim>_<type>.cubin. Problems, references and shapes are those of jfa-cuda/tests/device.py.
"""
import argparse
import ctypes as C
import json
import math
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../jfa-cuda/tests"))
import device  # noqa: E402
from device import Kernel, Problem, f32, i32, i64, ptr, schedule_params, tensor_map  # noqa: E402

_kernels = {}


def load(folder, name):
    if name not in _kernels:
        with open(os.path.join(folder, name + ".json")) as f:
            notes = json.load(f)["derived"]
        kernel = Kernel(os.path.join(folder, name + ".cubin"), notes["entry"])
        kernel.shared = notes["shared_dynamic"]
        device.ok(device.cuda.cuFuncSetAttribute(kernel.function, 8, kernel.shared), f"{name}: shared {kernel.shared}")
        _kernels[name] = kernel, notes
    return _kernels[name]


class Forward:
    """One forward of a problem by a variant."""

    variant = "g4"

    def __init__(self, p, folder):
        if p.dim != p.dim_v:
            raise ValueError("head_dim_v differs")
        name = f"forward_{self.variant}_{p.dim}_{'bf16' if p.dtype == torch.bfloat16 else 'f16'}"
        self.p = p
        self.kernel, self.notes = load(folder, name)
        self.schedule_kernel = device.kernel(folder, "schedule")
        constants, names = self.notes["constants"], {x["name"] for x in self.notes["parameters"]}
        group = p.heads // p.heads_kv
        packed = group.bit_length() - 1 if group > 1 and group & (group - 1) == 0 and group <= 64 else 0
        self.s = schedule_params(p, constants["unit_rows"] >> packed, constants["kv_tile"])
        self.o = torch.full((p.rows_o, p.heads, p.dim_v), float("nan"), dtype=p.dtype, device="cuda")
        self.lse = torch.full((p.heads, p.rows_o), float("nan"), dtype=torch.float32, device="cuda")
        self.counter = torch.zeros(64, dtype=torch.int32, device="cuda")
        heads = p.heads_kv if packed else p.heads
        tensors = dict(q=p.q, k=p.k, v=p.v, o=self.o)
        values = dict(lse=ptr(self.lse.data_ptr()), lse_head=i64(max(p.rows_o, 1)), header=ptr(self.s.header), sequences=ptr(self.s.sequences),
                      forward_units=ptr(self.s.forward_list), counter=ptr(self.counter.data_ptr()), scale_log2=f32(p.scale * 1.4426950408889634),
                      heads=i32(heads), group=i32(group), packed_log2=i32(packed), left=i32(p.mask.left), right=i32(p.mask.right),
                      bottom_right=i32(p.mask.bottom_right), q_rows=i32(p.rows_q), kv_rows=i32(p.k.shape[0]), o_rows=i32(p.rows_o),
                      global_scratch=ptr(None), profile_scratch=ptr(None))
        for t, x in tensors.items():
            values |= {t: ptr(x.data_ptr()), f"{t}_row": i64(x.stride(0)), f"{t}_head": i64(x.stride(1))}
        self.params = []
        for x in self.notes["parameters"]:
            if x["kind"] == "tensor_map":
                t = x["name"][:-4]
                pack = packed if t in "qo" else 0
                self.params.append(tensor_map(tensors[t], x["tile"]["rows"] >> pack, 1 << pack))
            elif "." in x["name"]:
                self.params.append({"i32": i32, "i64": i64}[x["kind"]](1))
            else:
                self.params.append(values[x["name"]])
        self.persistent = "counter" in names
        self.grid = device.SMS if self.persistent else self.s.forward_capacity * heads

    schedule = device.Forward.schedule

    def run(self):
        if self.persistent:
            self.counter.zero_()
        array = (ptr * len(self.params))(*[C.cast(C.byref(x), ptr) for x in self.params])
        config = device.LaunchConfig((self.grid, 1, 1), (self.notes["threads"], 1, 1), self.kernel.shared,
                                     torch.cuda.current_stream().cuda_stream, None, 0)
        device.ok(device.cuda.cuLaunchKernelEx(C.byref(config), self.kernel.function, array, None), "launch")


CudaForward = device.Forward


def time_variants(folder, variants, wanted):
    """Milliseconds of every variant on every shape, one after the other within a shape."""
    ratios = {v: [] for v in variants}
    print("  shape          floor " + "".join(f"{v:>10s}" for v in variants) + "   times the floor")
    for name, make in device.shapes():
        if wanted and not any(name.startswith(w) for w in wanted):
            continue
        p = make()
        line, over = "", ""
        for v in variants:
            Forward.variant = v
            f = CudaForward(p, folder) if v == "cuda" else Forward(p, folder)
            f.schedule()
            ms = device.timed(f.run, reps=int(os.environ.get("REPS", "10")), warm=2)
            size = 2 * (p.q.numel() + p.k.numel() + p.v.numel() + f.o.numel()) + 4 * f.lse.numel()
            floor = max(p.flops() / 680e12, size / 4.27e12) * 1e3
            ratios[v].append(ms / floor)
            line += f"{ms:10.3f}"
            over += f"{ms / floor:7.2f}"
            del f
        print(f"  {name:12s} {floor:8.3f}{line}  {over}", flush=True)
        del p
        torch.cuda.empty_cache()
    for v in variants:
        if ratios[v]:
            print(f"  {v}: geometric mean over floor, {len(ratios[v])} shapes: {math.exp(sum(map(math.log, ratios[v])) / len(ratios[v])):.3f}")


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("folder")
    a.add_argument("what", nargs="*", default=["check", "time"])
    a.add_argument("--variants", default="g1,g4")
    a.add_argument("--shapes", default="")
    a.add_argument("--cases", default="")
    args = a.parse_args()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    split = lambda s: [x for x in s.split(",") if x]
    status = 0
    if "check" in args.what:
        for variant in split(args.variants):
            if variant != "cuda":
                print(variant)
                Forward.variant = variant
                device.Forward = Forward
                status += device.check_forward(args.folder, split(args.cases))
        print(f"check: {status} wrong")
    device.Forward = CudaForward
    if "time" in args.what:
        time_variants(args.folder, split(args.variants), split(args.shapes))
    sys.exit(1 if status else 0)
