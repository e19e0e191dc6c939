# SPDX-License-Identifier: MIT OR Apache-2.0
"""JFA's cpu backend against attention in NumPy (OpenBLAS), in one run on the same cores.

    python3 -m venv venv && venv/bin/pip install -r scripts/compare/requirements.txt
    venv/bin/python scripts/compare/compare.py

builds libjfa (release) and prints, for each workload and pass, the times of

- jfa: one call for the batch, through the C ABI, in f32 and bf16;
- NumPy by sequence: one call of a NumPy attention for each sequence, all heads at once;
- NumPy padded: the batch padded to its longest sequence, keys beyond each length masked by -inf, in chunks of sequences
  (the fastest of several chunk sizes). All chunks have one shape, so a sample of them is timed and scaled up;

and the ratios. The goals are a ratio to NumPy by sequence above 1 and a ratio to NumPy padded of at least the padding
factor (padded pairs over useful pairs), forward and backward; the exit code tells whether f32 meets them.

NumPy gets a fair chance: as many threads as jfa, inputs already split by sequence and contiguous by head, in-place
arithmetic, no masks where nothing is padded, the scale folded into q. It computes in f32 (it has no bf16, and is compared
with jfa's bf16 as it is). Rounds alternate between the candidates; ratios are medians over rounds of ratios within a round.
"""

import argparse
import ctypes as c
import json
import os
import pathlib
import subprocess
import sys
import time

# Settings that some machines carry for other libraries and that make OpenBLAS pick slower kernels than it would itself.
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADS, DIM = 4, 128
SCALE = DIM**-0.5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both (default: all cores)")
    parser.add_argument("--library", help="libjfa.so (default: built by cargo)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=32, help="padded sequences that are timed")
    parser.add_argument("--workload", choices=["real_movielens", "gem_self_half"], help="only this one")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor seconds per thread instead of wall time, for a busy machine; fair to NumPy with --threads 1 only, "
        "since waiting OpenBLAS threads spin",
    )
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


ARGS = arguments()
# Before NumPy loads OpenBLAS.
os.environ["OPENBLAS_NUM_THREADS"] = str(ARGS.threads)

import numpy as np  # noqa: E402

sys.path.insert(0, str(ROOT / "examples" / "python"))
import attention as jfa_h  # noqa: E402  (the structs of jfa.h)

BF16 = 3


def build_library():
    subprocess.run(["cargo", "build", "--release", "-p", "jfa-capi"], cwd=ROOT, check=True)
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT, check=True, capture_output=True
    )
    return str(pathlib.Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "libjfa.so")


class JfaAttention:
    """Forward and backward of a batch through the C ABI. `bf16`: the same values rounded, as raw 16-bit arrays."""

    def __init__(self, library, lengths, arrays, bf16):
        self.jfa = library
        self.keep = []
        rows = int(lengths.sum())
        offsets = self.hold(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        data = {name: self.hold(to_bf16(x) if bf16 else x) for name, x in arrays.items()}
        for name in ("o", "dq", "dk", "dv"):
            data[name] = self.hold(np.zeros_like(data["q"]))
        self.data = data
        lse = self.hold(np.zeros((HEADS, rows), np.float32))
        context, self.plan = c.c_void_p(), c.c_void_p()
        backend = self.hold(c.create_string_buffer(f"cpu:{ARGS.threads}".encode()))
        options = jfa_h.Options(backend=c.addressof(backend), memory_space=jfa_h.MEMORY_HOST)
        self.jfa.context_create(c.byref(options), c.byref(context))
        dtype = BF16 if bf16 else jfa_h.F32
        problem = jfa_h.Problem(
            dtype=dtype, query=jfa_h.QUERY_JAGGED, heads_q=HEADS, heads_kv=HEADS, head_dim=DIM, head_dim_v=DIM,
            batch=len(lengths), kv_batch=len(lengths), total_q=rows, total_kv=rows, mask=1, bias=jfa_h.BIAS_NONE,
            scale=SCALE,
        )  # fmt: skip
        self.jfa.plan_create(context, c.byref(problem), c.byref(self.plan))
        needs = jfa_h.Requirements()
        self.jfa.plan_requirements(self.plan, c.byref(needs))
        self.workspace_bytes = max(needs.forward_bytes, needs.backward_bytes)
        schedule = self.hold(jfa_h.aligned(needs.schedule_bytes, needs.buffer_alignment))
        workspace = self.hold(jfa_h.aligned(self.workspace_bytes, needs.buffer_alignment))
        layout = self.hold(
            jfa_h.Layout(
                batch=len(lengths), kv_batch=len(lengths), q_offsets=offsets.ctypes.data, kv_offsets=offsets.ctypes.data,
                q_offsets_type=2, kv_offsets_type=2,
            )  # fmt: skip
        )
        self.jfa.build_schedule(self.plan, c.byref(layout), schedule.ctypes.data, schedule.size, None)
        self.call = jfa_h.Call(
            layout=c.addressof(layout), schedule=schedule.ctypes.data, schedule_bytes=schedule.size,
            workspace=workspace.ctypes.data, workspace_bytes=workspace.size,
        )  # fmt: skip
        address = {}
        for name, x in data.items():
            view = jfa_h.Tensor(
                data=x.ctypes.data, dtype=dtype, rows=rows, heads=HEADS, dim=DIM, row_stride=HEADS * DIM, head_stride=DIM
            )
            address[name] = c.addressof(self.hold(view))
        address["lse"] = c.addressof(self.hold(jfa_h.Lse(data=lse.ctypes.data, rows=rows, head_stride=rows)))
        self.forward_args = jfa_h.ForwardArgs(**{n: address[n] for n in ("q", "k", "v", "o", "lse")})
        self.backward_args = jfa_h.BackwardArgs(**address)

    def hold(self, x):
        self.keep.append(x)
        return x

    def forward(self):
        self.jfa.forward(self.plan, c.byref(self.call), c.byref(self.forward_args))

    def backward(self):
        self.jfa.backward(self.plan, c.byref(self.call), c.byref(self.backward_args))


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numpy_forward(q, k, v, mask=None):
    """[..., n, d] each. Returns o and lse."""
    s = np.matmul(q * np.float32(SCALE), np.swapaxes(k, -1, -2))
    if mask is not None:
        s += mask
    top = s.max(axis=-1, keepdims=True)
    s -= top
    np.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    o = np.matmul(s, v)
    o /= total
    return o, top + np.log(total)


def numpy_backward(q, k, v, o, lse, d_o, mask=None):
    """dq, dk, dv, recomputing p from lse."""
    p = np.matmul(q * np.float32(SCALE), np.swapaxes(k, -1, -2))
    if mask is not None:
        p += mask
    p -= lse
    np.exp(p, out=p)
    dv = np.matmul(np.swapaxes(p, -1, -2), d_o)
    ds = np.matmul(d_o, np.swapaxes(v, -1, -2))
    ds -= np.einsum("...nd,...nd->...n", o, d_o)[..., None]
    ds *= p
    dq = np.matmul(ds, k)
    dq *= np.float32(SCALE)
    dk = np.matmul(np.swapaxes(ds, -1, -2), q)
    dk *= np.float32(SCALE)
    return dq, dk, dv


class NumpyBySequence:
    def __init__(self, lengths, arrays):
        ends = np.cumsum(lengths)

        def split(x):
            return [np.ascontiguousarray(x[e - n : e].swapaxes(0, 1)) for n, e in zip(lengths, ends)]

        self.q, self.k, self.v, self.d_o = (split(arrays[name]) for name in ("q", "k", "v", "d_o"))

    def forward(self):
        self.saved = [numpy_forward(*x) for x in zip(self.q, self.k, self.v)]

    def backward(self):
        all_of = zip(self.q, self.k, self.v, self.saved, self.d_o)
        self.gradients = [numpy_backward(q, k, v, *saved, d_o) for q, k, v, saved, d_o in all_of]


class NumpyPadded:
    """A sample of a padded batch, evenly spread over it."""

    def __init__(self, lengths, arrays, sample):
        chosen = np.linspace(0, len(lengths) - 1, min(sample, len(lengths))).round().astype(int)
        self.share = len(chosen) / len(lengths)
        longest = int(lengths.max())
        ends = np.cumsum(lengths)

        def pad(x):
            out = np.zeros((len(chosen), HEADS, longest, DIM), np.float32)
            for i, b in enumerate(chosen):
                out[i, :, : lengths[b]] = x[ends[b] - lengths[b] : ends[b]].swapaxes(0, 1)
            return out

        self.q, self.k, self.v, self.d_o = (pad(arrays[name]) for name in ("q", "k", "v", "d_o"))
        beyond = np.arange(longest) >= lengths[chosen][:, None]
        self.mask = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, None, :]
        self.chunk = min((1, 4, 16), key=self.time_of)

    def time_of(self, chunk):
        self.chunk = chunk
        return timed(self.forward)

    def chunks(self):
        return [slice(i, i + self.chunk) for i in range(0, len(self.q), self.chunk)]

    def forward(self):
        self.saved = [numpy_forward(self.q[i], self.k[i], self.v[i], self.mask[i]) for i in self.chunks()]

    def backward(self):
        for i, saved in zip(self.chunks(), self.saved):
            numpy_backward(self.q[i], self.k[i], self.v[i], *saved, self.d_o[i], self.mask[i])


def timed(call):
    clock, threads = (time.process_time, ARGS.threads) if ARGS.cpu_time else (time.perf_counter, 1)
    start = clock()
    call()
    return (clock() - start) / threads


def check(jfa, by_sequence, lengths):
    """Both compute the same thing: relative Frobenius differences."""
    ends = np.cumsum(lengths)

    def difference(name, results):
        mine = jfa.data[name].astype(np.float64)
        theirs = np.empty_like(mine)
        for n, e, x in zip(lengths, ends, results):
            theirs[e - n : e] = x.swapaxes(0, 1)
        return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))

    found = {"o": difference("o", (saved[0] for saved in by_sequence.saved))}
    for i, name in enumerate(("dq", "dk", "dv")):
        found[name] = difference(name, (gradients[i] for gradients in by_sequence.gradients))
    return found


def workloads():
    path = ROOT / "workloads" / "lengths" / "movielens-100k-user-history.txt"
    yield "real_movielens", np.loadtxt(path, dtype=np.int64), "943 sequences, lengths 20..737"
    seed = 2025 + 512
    lengths = np.random.default_rng(seed).integers(1, 513, 64)
    yield "gem_self_half", lengths, f"64 sequences, uniform 1..512, numpy default_rng({seed})"


def main():
    library = jfa_h.Jfa(ARGS.library or build_library())
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    print(f"jfa {library.api.library_version.decode()}; NumPy {np.__version__}, {blas['name']} {blas['version']}")
    what = "processor time" if ARGS.cpu_time else "wall time"
    print(f"{ARGS.threads} threads each, {HEADS} heads, head_dim {DIM}, {what}, medians of {ARGS.rounds} rounds\n")
    report, met = [], True
    for name, lengths, what in workloads():
        if ARGS.workload not in (None, name):
            continue
        rng = np.random.default_rng(1)
        shape = (int(lengths.sum()), HEADS, DIM)
        arrays = {x: rng.standard_normal(shape, np.float32) for x in ("q", "k", "v", "d_o")}
        f32 = JfaAttention(library, lengths, arrays, bf16=False)
        bf16 = JfaAttention(library, lengths, arrays, bf16=True)
        by_sequence = NumpyBySequence(lengths, arrays)
        padded = NumpyPadded(lengths, arrays, ARGS.sample)
        pairs = float((lengths.astype(float) ** 2).sum())
        padding = len(lengths) * float(lengths.max()) ** 2 / pairs
        candidates = {"f32": f32, "bf16": bf16, "by_sequence": by_sequence, "padded": padded}
        times = {(who, which): [] for who in candidates for which in ("forward", "backward")}
        for round_number in range(ARGS.rounds + 1):
            for who, candidate in candidates.items():
                # OpenBLAS's threads spin for a while after their last work.
                time.sleep(0.2)
                for which in ("forward", "backward"):
                    seconds = timed(getattr(candidate, which))
                    if who == "padded":
                        seconds /= padded.share
                    # The first round brings memory and caches up.
                    if round_number > 0:
                        times[who, which].append(seconds)
        differences = check(f32, by_sequence, lengths)
        if max(differences.values()) > 2e-5:
            sys.exit(f"{name}: jfa and NumPy differ: {differences}")

        flops = 4.0 * HEADS * DIM * pairs
        print(f"{name}: {what}, {int(lengths.sum()):,} tokens, padding factor {padding:.2f} (chunks of {padded.chunk})")
        print(f"  relative differences to NumPy: " + ", ".join(f"{n} {x:.1e}" for n, x in differences.items()))
        print(f"  {'pass':10}{'jfa f32':>12}{'jfa bf16':>12}{'by sequence':>14}{'padded':>12}{'ratio':>9}{'ratio':>10}{'over':>9}")
        print(f"  {'':10}{'ms':>12}{'ms':>12}{'ms':>14}{'ms':>12}{'by seq.':>9}{'padded':>10}{'padding':>9}{'':3}useful GFLOP/s (f32, bf16)")
        for which, factor in (("forward", 1.0), ("backward", 2.5)):
            median = {who: float(np.median(times[who, which])) for who in candidates}

            def ratio(who, to="f32"):
                return float(np.median(np.array(times[who, which]) / np.array(times[to, which])))

            ratios = {"by_sequence": ratio("by_sequence"), "padded": ratio("padded")}
            over = ratios["padded"] / padding
            rates = [factor * flops / median[who] / 1e9 for who in ("f32", "bf16")]
            ok = ratios["by_sequence"] > 1 and over >= 1
            met &= ok
            print(
                f"  {which:10}{median['f32'] * 1e3:12.1f}{median['bf16'] * 1e3:12.1f}{median['by_sequence'] * 1e3:14.1f}"
                f"{median['padded'] * 1e3:12.1f}{ratios['by_sequence']:9.2f}{ratios['padded']:10.2f}{over:9.2f}   "
                f"{rates[0]:.0f}, {rates[1]:.0f}{'' if ok else '   MISSED'}"
            )
            report.append(
                {
                    "workload": name, "pass": which, "milliseconds": {w: m * 1e3 for w, m in median.items()},
                    "ratio_by_sequence": ratios["by_sequence"], "ratio_padded": ratios["padded"],
                    "padding_factor": padding, "useful_gflops": {"f32": rates[0], "bf16": rates[1]},
                    "ratio_by_sequence_of_bf16": ratio("by_sequence", "bf16"), "met": ok,
                }  # fmt: skip
            )
        print()
    if ARGS.json:
        pathlib.Path(ARGS.json).write_text(json.dumps({"threads": ARGS.threads, "results": report}, indent=1) + "\n")
    print("every goal met" if met else "a goal was missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
