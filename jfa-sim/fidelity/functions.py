"""Special functions of a Hopper GPU over whole octaves: every result, the rule behind them, and its tables.

    python functions.py device DIR    # on the GPU machine (cupy): every argument of some octaves of each function -> DIR
    python functions.py derive DIR    # anywhere: finds the coefficients again and prints src/mufu/tables.rs
    python functions.py check DIR     # anywhere: the rule with the tables of src/mufu against every result in DIR

`src/mufu.rs` states the rule. `derive` needs nothing but it: in each segment least squares give `c1` and `c2` to within a
unit, since they are integers, and every result is an interval for `c0`; of their intersection, which is not empty, it takes
the roundest number. DIR holds, per set, differences from the rounded exact result as compressed bytes; both machines have to
round NumPy's functions alike, which a checksum of the results tells.
"""

import itertools
import json
import lzma
import re
import sys
import zlib
from pathlib import Path

import numpy as np

FUNCTIONS = {"ex2": "ex2.approx.ftz.f32", "rcp": "rcp.approx.ftz.f32", "lg2": "lg2.approx.ftz.f32", "rsqrt": "rsqrt.approx.ftz.f32",
             "sqrt": "sqrt.approx.ftz.f32", "sin": "sin.approx.ftz.f32", "cos": "cos.approx.ftz.f32", "tanh": "tanh.approx.f32"}
HALVES = {"ex2h": "ex2.approx.f16x2", "ex2b": "ex2.approx.ftz.bf16x2", "tanhh": "tanh.approx.f16x2", "tanhb": "tanh.approx.bf16x2"}
EXACT = {"ex2": np.exp2, "rcp": lambda x: 1 / x, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "sin": np.sin,
         "cos": np.cos, "tanh": np.tanh}
ONE, NAN, INF = 0x3f800000, 0x7fffffff, 0x7f800000
TURN = np.float64(np.uint32(0x3e22f983).view(np.float32))


# ---- arguments

def octave(low, step=1):
    first = int(np.float32(low).view(np.uint32))
    return lambda: np.arange(first, first + (1 << 23), step, dtype=np.uint32)


def steps(quadrant):
    """For each of the 2^23 steps of a quadrant an angle that falls into it, where f32 has one (else 0)."""
    def make():
        k = np.arange(1 << 23, dtype=np.float64) + (quadrant << 23)
        best = np.zeros(1 << 23, np.uint32)
        left = np.ones(1 << 23, bool)
        for part in (0.5, 0.25, 0.75, 0.1, 0.9, 0.4, 0.6, 0.0, 0.99):
            x = ((k + part) * 2.0**-25 / TURN).astype(np.float32)
            mantissa, e = np.frexp(x.astype(np.float64) * TURN)
            ok = left & (np.trunc(np.ldexp(np.trunc(mantissa * 2**24), e - 24) * 2.0**25) == k)
            best[ok] = x.view(np.uint32)[ok]
            left &= ~ok
        return best
    return make


def exponents(low, high, n, signs):
    """Of every exponent some neighbours of powers of two and random mantissas."""
    def make():
        rng = np.random.default_rng(5)
        e = np.arange(low, high)
        b = ((e[:, None] + 127).astype(np.uint32) << 23) | rng.integers(0, 1 << 23, (len(e), n), dtype=np.uint32)
        edge = np.array([0, 1, 2, 3, 0x7fffff, 0x7ffffe, 0x400000, 0x3fffff, 0x400001], np.uint32)
        b[:, :len(edge)] = ((e[:, None] + 127).astype(np.uint32) << 23) | edge
        return (np.concatenate([b, b | np.uint32(0x80000000)]) if signs else b).ravel()
    return make


def special():
    return np.concatenate([
        np.array([0, 0x80000000, INF, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff, 0x007fffff, 0x807fffff, 1, 0x80000001, 0x00800000,
                  0x80800000, 0x7f7fffff, 0xff7fffff], np.uint32),
        np.arange(0x42fe0000, 0x43200000, 64, dtype=np.uint32), np.arange(0xc2f80000, 0xc3200000, 64, dtype=np.uint32)])


SETS = {}
for name, low in (("1", 1.0), ("h", 0.5), ("q", 0.25), ("m1", -1.0), ("mh", -0.5), ("4", 4.0)):
    SETS["ex2_" + name] = "ex2", octave(low)
SETS["rcp_1"], SETS["rcp_m2"] = ("rcp", octave(1.0)), ("rcp", octave(-2.0))
for f in ("rsqrt", "sqrt"):
    SETS[f + "_1"], SETS[f + "_2"] = (f, octave(1.0)), (f, octave(2.0))
for name, low in (("1", 1.0), ("h", 0.5), ("2", 2.0), ("q", 0.25), ("16", 16.0)):
    SETS["lg2_" + name] = "lg2", octave(low)
for f in ("sin", "cos"):
    SETS[f + "_q0"], SETS[f + "_q1"] = (f, steps(0)), (f, steps(1))
SETS["tanh_h"], SETS["tanh_1"] = ("tanh", octave(0.5)), ("tanh", octave(1.0))
SETS["tanh_all"] = "tanh", lambda: np.concatenate([octave(2.0**e, 16)() for e in range(-14, 5)])
for f, low, high, signs in (("ex2", -40, 128, True), ("rcp", -126, 128, True), ("lg2", -126, 128, False), ("rsqrt", -126, 128, False),
                            ("sqrt", -126, 128, False), ("sin", -30, 16, True), ("cos", -30, 16, True), ("tanh", -40, 8, True)):
    SETS[f + "_any"] = f, exponents(low, high, 4096 if high - low > 100 else 8192, signs)
    SETS[f + "_special"] = f, special


# ---- storage

def reference(f, bits):
    with np.errstate(all="ignore"):
        r = EXACT[f](bits.view(np.float32).astype(np.float64)).astype(np.float32).view(np.uint32)
    return np.where((r & 0x7fffffff) > INF, NAN, r).astype(np.uint32).view(np.int32)


def stepped(name):
    """Stored as differences of neighbours instead: steps too coarse for a reference to help."""
    return name in ("tanh_h", "tanh_1", "tanh_all")


def encode(name, folder, bits, y):
    base = np.concatenate([[0], y[:-1]]).astype(np.uint32).view(np.int32) if stepped(name) else reference(SETS[name][0], bits)
    d = y.view(np.int32) - base
    kind = np.int8 if d.min() >= -128 and d.max() < 128 else np.int16 if d.min() >= -32768 and d.max() < 32768 else np.int32
    v = d.astype(kind)
    (folder / (name + ".xz")).write_bytes(lzma.compress(v.view(np.uint8).reshape(-1, v.itemsize).T.tobytes(), preset=4))
    return {"type": np.dtype(kind).name, "crc": zlib.crc32(y.tobytes())}


def load(name, folder):
    """Arguments and results of a set."""
    info = json.loads((folder / "info.json").read_text())[name]
    f, arguments = SETS[name]
    bits = arguments()
    kind = np.dtype(info["type"])
    planes = np.frombuffer(lzma.decompress((folder / (name + ".xz")).read_bytes()), np.uint8).reshape(kind.itemsize, -1)
    d = np.ascontiguousarray(planes.T).view(kind).ravel()
    y = np.cumsum(d, dtype=np.int64).astype(np.uint32) if stepped(name) else (reference(f, bits) + d.astype(np.int32)).view(np.uint32)
    if zlib.crc32(y.tobytes()) != info["crc"]:
        print(f"{name}: the two machines do not round alike, some differences may be theirs", file=sys.stderr)
    return bits, y


def device(folder):
    import cupy

    text = ".version 8.4\n.target sm_90a\n.address_size 64\n"
    for name, op in {**FUNCTIONS, **HALVES}.items():
        text += f""".visible .entry {name}(.param .u64 x, .param .u64 y, .param .u32 n) {{
.reg .b64 r<4>; .reg .b32 t<6>; .reg .b32 f, g; .reg .pred p;
ld.param.u64 r1, [x]; ld.param.u64 r2, [y]; ld.param.u32 t5, [n];
mov.u32 t1, %ctaid.x; mov.u32 t2, %ntid.x; mov.u32 t3, %tid.x; mad.lo.u32 t4, t1, t2, t3;
setp.ge.u32 p, t4, t5; @p ret;
mul.wide.u32 r3, t4, 4; add.s64 r1, r1, r3; add.s64 r2, r2, r3;
ld.global.b32 f, [r1]; {op} g, f; st.global.b32 [r2], g; ret; }}
"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "functions.ptx").write_text(text)
    module = cupy.RawModule(path=str(folder / "functions.ptx"))

    def call(name, bits):
        x = cupy.asarray(bits)
        y = cupy.empty_like(x)
        module.get_function(name)(((x.size + 255) // 256,), (256,), (x, y, np.uint32(x.size)))
        return cupy.asnumpy(y)

    info = {}
    for name, (f, arguments) in SETS.items():
        bits = arguments()
        info[name] = encode(name, folder, bits, call(f, bits))
    (folder / "info.json").write_text(json.dumps(info))
    every = np.arange(65536, dtype=np.uint32)
    np.savez_compressed(folder / "halves.npz", **{name: call(name, every) & 0xffff for name in HALVES})
    print(f"{len(SETS)} sets")


# ---- the rule (src/mufu.rs)

POINT = 41
T = np.arange(1 << 17, dtype=np.int64)


def square(t):
    """The square of 17 bits without the partial products below 2^19, divided by 2^19."""
    s = np.zeros_like(t)
    for j in range(10, 17):
        row = ((t & ((1 << j) - 1) & ~((1 << (18 - j)) - 1)) << (j + 1)) + (1 << (2 * j))
        s += np.where(t >> j & 1, row, 0)
    return s >> 19


def quadratic(segments, t):
    c0, c1, c2 = segments[..., 0], segments[..., 1], segments[..., 2]
    return c0 + c1 * t + ((c2 * square(t)) << 2)


def value(table, x):
    bits = len(table).bit_length() - 1
    x = x.astype(np.int64)
    return quadratic(table[x >> (23 - bits)], (x & ((1 << (23 - bits)) - 1)) << (bits - 6))


def parts(x):
    """Sign, biased exponent and mantissa, and what is zero (or subnormal), infinite, NaN."""
    s, e, m = (x >> 31).astype(np.int64), ((x >> 23) & 255).astype(np.int64), (x & 0x7fffff).astype(np.int64)
    return s, e, m, e == 0, (e == 255) & (m == 0), (e == 255) & (m != 0)


def normalise(v, point):
    _, top = np.frexp(v.astype(np.float64))
    q = np.where(top >= 24, v >> np.maximum(top - 24, 0), v << np.maximum(24 - top, 0))
    return np.where(v == 0, 0, ((top.astype(np.int64) - 1 - point + 127) << 23) | (q & 0x7fffff))


def ex2(x, tables):
    s, e, m, zero, inf, nan = parts(x)
    far = (e >= 135) & ~nan
    whole = np.where(zero | far | nan, 0, m | 0x800000)
    n = np.where(e >= 127, whole << np.clip(e - 127, 0, 8), whole >> np.clip(127 - e, 0, 40))
    n = np.where(s == 0, n, np.where(n & 0x7fffff, ~n, -n))
    exponent = (n >> 23) + 127
    r = (exponent << 23) | (value(tables["EX2"], n & 0x7fffff) >> (POINT - 23))
    r = np.where(exponent <= 0, 0, np.where(exponent >= 255, INF, r))
    return np.where(nan, NAN, np.where(far, np.where(s, 0, INF), r))


def rcp(x, tables):
    s, e, m, zero, inf, nan = parts(x)
    exponent = np.where(m == 0, 254 - e, 253 - e)
    r = (exponent << 23) | np.where(m == 0, 0, (value(tables["RCP"], m) >> (POINT - 24)) & 0x7fffff)
    r = np.where((exponent <= 0) | inf, 0, np.where(zero, INF, r))
    return np.where(nan, NAN, r | s << 31)


def roots(x, even, odd):
    s, e, m, zero, inf, nan = parts(x)
    is_odd = (e - 127) & 1
    return s, e, m, zero, inf, nan, is_odd, (e - 127) >> 1, np.where(is_odd, value(odd, m), value(even, m))


def rsqrt(x, tables):
    s, e, m, zero, inf, nan, odd, half, v = roots(x, tables["RSQRT_EVEN"], tables["RSQRT_ODD"])
    r = np.where((m == 0) & (odd == 0), (127 - half) << 23, ((126 - half) << 23) | ((v >> (POINT - 24)) & 0x7fffff))
    return np.where(nan | (s == 1) & ~zero, NAN, np.where(zero, INF | s << 31, np.where(inf, 0, r)))


def sqrt(x, tables):
    s, e, m, zero, inf, nan, _, half, v = roots(x, tables["SQRT_EVEN"], tables["SQRT_ODD"])
    r = ((127 + half) << 23) + (v >> (POINT - 23))
    return np.where(nan | (s == 1) & ~zero, NAN, np.where(zero, s << 31, np.where(inf, INF, r)))


def lg2(x, tables):
    s, e, m, zero, inf, nan = parts(x)
    v = (value(tables["LG2"], m) >> (POINT - 36)) + ((e - 127) << 36)
    r = normalise(np.where(v < 0, ~v, v), 36) | np.where(v < 0, 1 << 31, 0)
    r = np.where((m == 0) & (e == 127), 0, r)
    return np.where(nan | (s == 1) & ~zero, NAN, np.where(zero, 0xff800000, np.where(inf, INF, r)))


def turn(x, tables, ahead):
    with np.errstate(invalid="ignore"):
        exact = x.view(np.float32).astype(np.float64) * TURN
        rounded = exact.astype(np.float32)
    cut = rounded.view(np.uint32) - (np.abs(rounded.astype(np.float64)) > np.abs(exact)).astype(np.uint32)
    s, e, m, zero, inf, nan = parts(cut)
    with np.errstate(invalid="ignore"):
        size = np.where(zero | inf | nan, 0, np.abs(cut.view(np.float32).astype(np.float64)))
    step = np.mod(np.trunc(size * 2.0**25), 2.0**25).astype(np.int64)
    quadrant, i = (step >> 23) + ahead, step & 0x7fffff
    back = quadrant & 1 == 1
    r = normalise(value(tables["SIN"], np.where(back, ~i & 0x7fffff, i)) >> (POINT - 37), 37)
    r = np.where(i == 0, np.where(back, ONE, 0), r) | (((quadrant >> 1) & 1) ^ (0 if ahead else s)) << 31
    return np.where(inf | nan, NAN, r)


OCTAVES = {-8: (0, 0), -7: (1, 0), -6: (2, 0), -5: (3, 1), -4: (5, 1), -3: (7, 2), -2: (11, 2), -1: (15, 2), 0: (19, 3), 1: (27, 4), 2: (43, 3)}


def tanh_segment(x):
    """Exponent, segment and place in it."""
    e, m = ((x >> 23) & 255).astype(np.int64) - 127, (x & 0x7fffff).astype(np.int64)
    first, bits = np.array([OCTAVES[k] for k in range(-8, 3)]).T[:, np.clip(e, -8, 2) + 8]
    return e, first + (m >> (23 - bits)), (m >> (6 - bits)) & 0x1ffff


def tanh(x, tables):
    s, _, _, _, _, nan = parts(x)
    e, segment, t = tanh_segment(x)
    r = normalise(quadratic(tables["TANH"][segment], t), POINT)
    r = np.where(e < -8, x & np.uint32(0x7fffffff), np.where(e >= 3, ONE, r)) | s << 31
    return np.where(nan, NAN, r)


RULE = {"ex2": ex2, "rcp": rcp, "rsqrt": rsqrt, "sqrt": sqrt, "lg2": lg2, "tanh": tanh, "sin": lambda x, t: turn(x, t, 0),
        "cos": lambda x, t: turn(x, t, 1)}


# ---- tables

def read_tables():
    text = (Path(__file__).parent.parent / "src/mufu/tables.rs").read_text()
    return {name: np.array(re.findall(r"\((-?\d+), (-?\d+), (-?\d+)\)", body), np.int64)
            for name, body in re.findall(r"const (\w+): .*?= \[\n(.*?)\];", text, re.S)}


def interval(y, least):
    """Results as intervals of the value in units of 2^-41; `least`: units that the unit keeps."""
    low = (y.view(np.float32).astype(np.float64) * 2.0**POINT).astype(np.int64)
    ulp = np.where(y == 0, 0, 2.0**((y >> 23).astype(np.float64) - 127 - 23 + POINT)).astype(np.int64)
    return low, low + np.maximum(ulp, least) - 1


def fit(t, intervals):
    """Coefficients for places `t`: of each set of results (of the same places) the interval of every value."""
    low, high = intervals[0]
    g = square(t)
    a = np.stack([np.ones(len(t)), t / 2.0**17, g / 2.0**15], 1)
    scale = 2.0**(POINT - 24)
    _, c1, c2 = np.rint(np.linalg.lstsq(a, (low + (high - low + 1) / 2) / scale, rcond=None)[0]).astype(np.int64)
    for d1, d2 in sorted(itertools.product(range(-2, 3), repeat=2), key=lambda d: abs(d[0]) + abs(d[1])):
        p = (c1 + d1) * t + (((c2 + d2) * g) << 2)
        least, most = max((low - p).max() for low, _ in intervals), min((high - p).min() for _, high in intervals)
        if least <= most:
            k = max(k for k in range(45) if (-(-least >> k) << k) <= most)
            return int(-(-least >> k) << k), int(c1 + d1), int(c2 + d2)
    sys.exit("no coefficients fit: the rule is another one")


def derive(folder):
    def positive(name, offset=0, least=1, skip=False):
        low, high = interval(load(name, folder)[1], least)
        if skip:
            # Exact by a rule of its own.
            low[0], high[0] = -(1 << 60), 1 << 60
        return low + (offset << POINT), high + (offset << POINT)

    def negative(name, offset):
        """The one's complement of a value that was cut to 36 bits."""
        low, high = interval(load(name, folder)[1] & np.uint32(0x7fffffff), 32)
        return (~(high >> 5) << 5) + (offset << POINT), (~(low >> 5) << 5) + 31 + (offset << POINT)

    def halved(pair):
        return pair[0] // 2, pair[1] // 2

    out = {}

    def table(name, bits, *sets):
        t = np.arange(1 << (23 - bits), dtype=np.int64) << (bits - 6)
        cut = [(low.reshape(1 << bits, -1), high.reshape(1 << bits, -1)) for low, high in sets]
        rows = []
        for s in range(1 << bits):
            intervals = [(low[s], high[s]) for low, high in cut]
            if intervals[0][0][0] < -(1 << 59):
                rows.append(fit(t[1:], [(low[1:], high[1:]) for low, high in intervals]))
            else:
                rows.append(fit(t, intervals))
        out[name] = rows

    one = 1 << POINT
    low, high = halved(positive("ex2_1"))
    table("EX2", 6, (low - one, high - one))
    table("RCP", 7, positive("rcp_1", skip=True))
    table("RSQRT_EVEN", 6, positive("rsqrt_1", skip=True))
    table("RSQRT_ODD", 6, positive("rsqrt_2"))
    table("SQRT_EVEN", 6, positive("sqrt_1", -1))
    table("SQRT_ODD", 6, positive("sqrt_2", -1))
    table("LG2", 6, positive("lg2_1", 0, 32, True), positive("lg2_2", -1, 32), positive("lg2_16", -4, 32), negative("lg2_h", 1), negative("lg2_q", 2))
    table("SIN", 6, positive("sin_q0", 0, 16))
    x, y = (np.concatenate(v) for v in zip(*(load(name, folder) for name in ("tanh_h", "tanh_1", "tanh_all"))))
    e, segment, t = tanh_segment(x)
    inside = (e >= -8) & (e <= 2)
    out["TANH"] = [fit(t[k], [interval(y[k], 1)]) for k in (inside & (segment == s) for s in range(51))]
    print("//! Coefficients of the special function unit of an H200, as `fidelity/functions.py derive` found them.\n\n"
          "// Four to a line.\n#![cfg_attr(rustfmt, rustfmt_skip)]\n\nuse super::Segment;")
    for name, rows in out.items():
        print(f"\npub(super) const {name}: [Segment; {len(rows)}] = [")
        for i in range(0, len(rows), 4):
            print("    " + ", ".join(str(r) for r in rows[i:i + 4]) + ",")
        print("];")


def check(folder):
    tables, bad = read_tables(), 0
    for name, (f, _) in SETS.items():
        if not (folder / (name + ".xz")).exists():
            continue
        x, y = load(name, folder)
        r = RULE[f](x, tables).astype(np.uint32)
        bad += int((r != y).sum())
        print(f"{FUNCTIONS[f]:24} {name:14} {len(x):9} arguments, {(r != y).sum()} differ", flush=True)
    halves = np.load(folder / "halves.npz")
    bits = np.arange(65536, dtype=np.uint32)
    with np.errstate(all="ignore"):
        wide = bits.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    for name, op in HALVES.items():
        r = RULE[name[:-1]](wide if name.endswith("h") else bits << 16, tables).astype(np.uint32)
        if name.endswith("h"):
            v = r.view(np.float32).astype(np.float64)
            with np.errstate(all="ignore"):
                h = v.astype(np.float16)
                cut = h.view(np.uint16) - (np.abs(h.astype(np.float64)) > np.abs(v)).astype(np.uint16)
            r = np.where(np.isnan(v), 0x7fff, np.where(v >= 65536, 0x7c00, cut))
        else:
            r = r >> 16
        wrong = int((r != (halves[name] & 0xffff)).sum())
        bad += wrong
        print(f"{op:24} {'all':14} {65536:9} arguments, {wrong} differ")
    return bad


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("device", "derive", "check"):
        sys.exit(__doc__)
    sys.exit({"device": device, "derive": derive, "check": check}[sys.argv[1]](Path(sys.argv[2])) or 0)
