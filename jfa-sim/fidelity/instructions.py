"""One instruction at a time: the simulator against a Hopper GPU, bit for bit.

    python instructions.py device DIR             # on the GPU machine (cupy): runs every case, writes DIR/cases.npz
    python instructions.py compare DIR RUNNER     # anywhere: runs the simulator (path of jfa-sim-run) on the same, prints a table
    python instructions.py rows DIR RUNNER        # anywhere: prints operands and GPU results where they differ, as tests/h200.txt keeps them

A case is one PTX instruction with three random operands per thread, among them zeros, infinities, NaN, subnormals and
neighbours of powers of two.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

THREADS, BLOCKS = 256, 64
N = THREADS * BLOCKS

INT = ["add.s32 d, a, b", "sub.s32 d, a, b", "mul.lo.s32 d, a, b", "mul.hi.s32 d, a, b", "mul.hi.u32 d, a, b", "mad.lo.s32 d, a, b, c",
       "mad.hi.u32 d, a, b, c", "mul24.lo.s32 d, a, b", "mul24.lo.u32 d, a, b", "sad.s32 d, a, b, c", "sad.u32 d, a, b, c",
       "div.s32 d, a, b", "div.u32 d, a, b", "rem.s32 d, a, b", "rem.u32 d, a, b", "abs.s32 d, a", "neg.s32 d, a", "min.s32 d, a, b",
       "max.u32 d, a, b", "and.b32 d, a, b", "or.b32 d, a, b", "xor.b32 d, a, b", "not.b32 d, a", "cnot.b32 d, a",
       "shl.b32 d, a, b", "shr.u32 d, a, b", "shr.s32 d, a, b", "popc.b32 d, a", "clz.b32 d, a", "brev.b32 d, a",
       "bfind.u32 d, a", "bfind.s32 d, a", "bfind.shiftamt.u32 d, a", "bfe.u32 d, a, b, c", "bfe.s32 d, a, b, c", "bfi.b32 d, a, b, c, s",
       "prmt.b32 d, a, b, c", "prmt.b32.f4e d, a, b, c", "prmt.b32.b4e d, a, b, c", "prmt.b32.rc8 d, a, b, c", "prmt.b32.ecl d, a, b, c",
       "prmt.b32.ecr d, a, b, c", "prmt.b32.rc16 d, a, b, c", "shf.l.wrap.b32 d, a, b, c", "shf.r.wrap.b32 d, a, b, c",
       "shf.l.clamp.b32 d, a, b, c", "shf.r.clamp.b32 d, a, b, c", "lop3.b32 d, a, b, c, 0x96", "lop3.b32 d, a, b, c, 0xE2",
       "add.sat.s32 d, a, b", "sub.sat.s32 d, a, b", "bmsk.clamp.b32 d, a, b", "bmsk.wrap.b32 d, a, b",
       "cvt.s32.s16 d, ah", "cvt.u32.u8 d, ah", "cvt.s32.s8 d, ah"]
F32 = [f"{op}.{m}f32 d, a, b" for op in ("add", "sub", "mul") for m in ("", "rn.", "rz.", "rm.", "rp.", "ftz.", "rz.ftz.", "sat.", "ftz.sat.")]
F32 += [f"fma.{m}f32 d, a, b, c" for m in ("rn.", "rz.", "rm.", "rp.", "rn.ftz.", "rn.sat.", "rz.ftz.")]
F32 += ["div.rn.f32 d, a, b", "rcp.rn.f32 d, a", "sqrt.rn.f32 d, a", "min.f32 d, a, b", "max.f32 d, a, b", "min.NaN.f32 d, a, b",
        "max.NaN.f32 d, a, b", "max.ftz.f32 d, a, b", "abs.f32 d, a", "neg.f32 d, a", "copysign.f32 d, a, b",
        "max.xorsign.abs.f32 d, a, b", "min.xorsign.abs.f32 d, a, b"]
CVT = [f"cvt.{r}.{t}.f32 d, a" for r in ("rni", "rzi", "rmi", "rpi") for t in ("s32", "u32")]
CVT += ["cvt.rni.f32.f32 d, a", "cvt.rzi.f32.f32 d, a", "cvt.rmi.f32.f32 d, a", "cvt.rpi.f32.f32 d, a", "cvt.sat.f32.f32 d, a"]
CVT += [f"cvt.{r}.f32.{t} d, a" for r in ("rn", "rz", "rm", "rp") for t in ("s32", "u32")]
CVT += ["cvt.rn.bf16x2.f32 d, a, b", "cvt.rz.bf16x2.f32 d, a, b", "cvt.rn.relu.bf16x2.f32 d, a, b", "cvt.rn.f16x2.f32 d, a, b",
        "cvt.rz.f16x2.f32 d, a, b", "cvt.rn.relu.f16x2.f32 d, a, b", "cvt.rna.tf32.f32 d, a", "cvt.f32.f16 d, ah", "cvt.f32.bf16 d, ah"]
HALF = [f"{op}.{t} d, a, b" for t in ("f16x2", "bf16x2") for op in ("add", "sub", "mul", "min", "max", "min.NaN", "max.NaN")]
HALF += [f"fma.rn.{t} d, a, b, c" for t in ("f16x2", "bf16x2")] + [f"fma.rn.relu.{t} d, a, b, c" for t in ("f16x2", "bf16x2")]
HALF += [f"{op}.{t} d, a" for t in ("f16x2", "bf16x2") for op in ("neg", "abs")]
APPROX = ["ex2.approx.f32 d, a", "ex2.approx.ftz.f32 d, a", "lg2.approx.f32 d, a", "rcp.approx.f32 d, a", "rcp.approx.ftz.f32 d, a",
          "rsqrt.approx.f32 d, a", "sqrt.approx.f32 d, a", "sin.approx.f32 d, a", "cos.approx.f32 d, a", "tanh.approx.f32 d, a",
          "div.approx.f32 d, a, b", "div.full.f32 d, a, b"]
CMP = [f"setp.{op}.{t} p, a, b" for t in ("s32", "u32") for op in ("eq", "ne", "lt", "le", "gt", "ge")]
CMP += [f"setp.{op}.f32 p, a, b" for op in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")]
WARP = [f"shfl.sync.{m}.b32 d|p, a, b, {c}, 0xffffffff" for m, c in
        (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("up", 0x1000), ("down", 0x181f), ("idx", 0x1c1f), ("bfly", 0x180f))]
WARP += ["vote.sync.ballot.b32 d, pa, 0xffffffff", "match.any.sync.b32 d, n, 0xffffffff", "match.all.sync.b32 d|p, n, 0xffffffff",
         "redux.sync.add.s32 d, a, 0xffffffff", "redux.sync.min.s32 d, a, 0xffffffff", "redux.sync.max.u32 d, a, 0xffffffff",
         "redux.sync.xor.b32 d, a, 0xffffffff"]
GROUPS = {"integer": INT, "f32": F32, "convert": CVT, "half": HALF, "compare": CMP, "warp": WARP, "approximate": APPROX}
CASES = [(g, i) for g, items in GROUPS.items() for i in items]


def ptx():
    """One kernel a case: in[3][N] -> out[N] (and a predicate mixed in)."""
    out = [".version 8.4\n.target sm_90a\n.address_size 64\n"]
    for k, (_, text) in enumerate(CASES):
        out.append(f""".visible .entry case{k}(.param .u64 x, .param .u64 y) {{
.reg .b32 a, b, c, d, s, n, t<9>;
.reg .b16 ah;
.reg .b64 r<9>;
.reg .pred p, pa;
ld.param.u64 r1, [x];
ld.param.u64 r2, [y];
mov.u32 t1, %tid.x;
mov.u32 t2, %ctaid.x;
mov.u32 t3, %ntid.x;
mad.lo.u32 t1, t2, t3, t1;
mul.wide.u32 r3, t1, 4;
add.s64 r1, r1, r3;
add.s64 r2, r2, r3;
ld.global.b32 a, [r1];
ld.global.b32 b, [r1+{4 * N}];
ld.global.b32 c, [r1+{8 * N}];
and.b32 s, b, 63;
and.b32 n, a, 3;
cvt.u16.u32 ah, a;
setp.lt.s32 pa, a, b;
mov.b32 d, 0;
setp.ne.s32 p, d, 0;
{text};
selp.b32 t4, 0x5a5a5a5a, 0, p;
xor.b32 d, d, t4;
st.global.b32 [r2], d;
ret;
}}
""")
    return "\n".join(out)


def operands():
    rng = np.random.default_rng(7)
    x = rng.integers(0, 1 << 32, (3, N), dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1, 2, 31, 32, 33, 63, 64, 255, 0x7fffffff, 0x80000000, 0xffffffff, 0x3f800000, 0xbf800000, 0x7f800000,
                        0xff800000, 0x7fc00000, 0x00000001, 0x007fffff, 0x00800000, 0x7f7fffff, 0x3f7fffff, 0x3f800001, 0x4b000000,
                        0x4f000000, 0xcf000000, 0x4effffff, 0x33800000, 0x7c007c00, 0xfc00fc00, 0x7e007e00, 0x00010001, 0x03ff03ff,
                        0x04000400, 0x7bff7bff, 0x3c003c00, 0x7f807f80, 0x3f803f80, 0x00800080, 0x477fefff, 0x477ff000], np.uint32)
    for row in x:
        # A quarter special, a quarter floats of moderate size, a quarter small integers.
        pick = rng.integers(0, 4, N)
        row[pick == 0] = rng.choice(special, (pick == 0).sum())
        m = pick == 1
        row[m] = (rng.standard_normal(m.sum()) * np.exp2(rng.integers(-12, 12, m.sum()))).astype(np.float32).view(np.uint32)
        m = pick == 2
        row[m] = rng.integers(-70, 70, m.sum()).astype(np.int32).view(np.uint32)
    return x


def device(folder):
    import cupy

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.ptx").write_text(ptx())
    module = cupy.RawModule(path=str(folder / "cases.ptx"))
    x = cupy.asarray(operands())
    results = []
    for k in range(len(CASES)):
        y = cupy.zeros(N, cupy.uint32)
        module.get_function(f"case{k}")((BLOCKS,), (THREADS,), (x, y))
        results.append(cupy.asnumpy(y))
    np.savez_compressed(folder / "cases.npz", results=np.stack(results), names=np.array([t for _, t in CASES]))
    print(f"{len(CASES)} cases of {N} threads")


def simulate(folder, runner):
    """For every case: its group, its text, the simulator's results and the GPU's."""
    stored = np.load(folder / "cases.npz")
    assert list(stored["names"]) == [t for _, t in CASES], "the cases have changed since the device ran"
    want = stored["results"]
    (folder / "cases.ptx").write_text(ptx())
    np.save(folder / "x.npy", operands())
    launches, buffers = [], {"x": {"file": "x.npy"}}
    for k in range(len(CASES)):
        buffers[f"y{k}"] = {"dtype": "u32", "shape": [N], "fill": "zero", "out": f"y{k}.npy"}
        launches.append({"kernel": f"case{k}", "grid": [BLOCKS], "block": [THREADS], "params": [{"ptr": "x"}, {"ptr": f"y{k}"}]})
    job = folder / "job.json"
    job.write_text(json.dumps({"ptx": "cases.ptx", "detect": False, "buffers": buffers, "launches": launches}))
    r = subprocess.run([runner, "--quiet", str(job)], capture_output=True, text=True)
    if r.returncode == 2:
        sys.exit(r.stderr)
    for k, (group, text) in enumerate(CASES):
        got = np.load(folder / f"y{k}.npy")
        (folder / f"y{k}.npy").unlink()
        yield group, text, got, want[k]


def compare(folder, runner):
    bad = 0
    for group, text, got, want in simulate(folder, runner):
        differ = got != want
        if differ.any():
            bad += 1
            i = int(np.argmax(differ))
            x = operands()[:, i]
            print(f"{group:12} {text:45} {differ.sum()} differ, e.g. a={x[0]:08x} b={x[1]:08x} c={x[2]:08x}: {got[i]:08x}, GPU {want[i]:08x}")
    print(f"{len(CASES)} cases, {bad} with differences")
    return bad


def kind(v):
    """Sign and sort of f32 bits; the extremes of a sort count on their own."""
    m = v & 0x7fffffff
    sort = 0 if m == 0 else 1 if m < 0x00800000 else 2 if m == 0x00800000 else 3 if m < 0x7e800000 else 4 if m < 0x7f800000 else 5 if m == 0x7f800000 else 6
    return sort, v >> 31


def rows(folder, runner, limit=8):
    """A few operands of every case with differences: some with, some without, different sorts first."""
    x = operands()
    for group, text, got, want in simulate(folder, runner):
        differ = got != want
        if group == "warp" or not differ.any():
            continue
        used = [i for i, name in enumerate("abc") if any(w in (name, name + "h") for w in text.replace(",", " ").split()[1:])]
        chosen = []
        for where in np.flatnonzero(differ), np.flatnonzero(~differ):
            seen, some = set(), []
            for new_sort in (True, False):
                for i in where:
                    key = tuple((kind if new_sort else int)(x[u][i]) for u in used)
                    if key not in seen and len(some) < limit and i not in some:
                        seen.add(key)
                        some.append(i)
            chosen += some
        print(f"= {text}")
        for i in sorted(chosen):
            print(" ".join(f"{x[u][i] if u in used else 0:08x}" for u in range(3)), f"{want[i]:08x}")


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[1] == "device":
        device(Path(sys.argv[2]))
    elif len(sys.argv) >= 4 and sys.argv[1] == "compare":
        sys.exit(1 if compare(Path(sys.argv[2]), sys.argv[3]) else 0)
    elif len(sys.argv) >= 4 and sys.argv[1] == "rows":
        rows(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(__doc__)
