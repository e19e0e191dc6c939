"""Matrix products: the simulator against a Hopper GPU, bit for bit.

    python products.py device DIR             # on the GPU machine (cupy): runs every case, writes DIR/products.npz
    python products.py compare DIR RUNNER     # anywhere: runs the simulator (path of jfa-sim-run) on the same, prints a table
    python products.py rule DIR               # anywhere: the rule of jfa-sim's README in NumPy against the GPU's results
    python products.py rows DIR               # anywhere: prints dot products and GPU results, as tests/products.txt keeps them
    python products.py ptx                    # anywhere: prints the kernels, as tests/kernels/products.sm_90a.ptx keeps them

A form is one instruction (or a chain of four); a family is a way to draw operands: exponents far apart, cancellation, subnormal
numbers, infinities and NaN, overflow, powers of two that show where the sum is cut. Every form and family has 16 tiles of
64 rows and 8 columns, 8,192 dot products.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

TILES, M, N = 16, 64, 8
# Exponent, mantissa and all bits; tf32 operands are f32 patterns whose low 13 bits the hardware ignores.
TYPES = {"bf16": (8, 7, 16), "f16": (5, 10, 16), "tf32": (8, 23, 32, "tf32")}
# Name: instruction, type, K, instructions in a chain, keeps the accumulators, f16 accumulators.
FORMS = {
    "wgmma.bf16": ("wgmma", "bf16", 16, 1, True, False), "wgmma.f16": ("wgmma", "f16", 16, 1, True, False),
    "wgmma.tf32": ("wgmma", "tf32", 8, 1, True, False), "wgmma.f16.f16": ("wgmma", "f16", 16, 1, True, True),
    "wgmma.bf16, no accumulator": ("wgmma", "bf16", 16, 1, False, False), "wgmma.bf16 x 4": ("wgmma", "bf16", 16, 4, True, False),
    "mma.bf16": ("mma", "bf16", 16, 1, True, False), "mma.f16": ("mma", "f16", 16, 1, True, False),
    "mma.bf16.k8": ("mma", "bf16", 8, 1, True, False), "mma.f16.k8": ("mma", "f16", 8, 1, True, False),
    "mma.tf32": ("mma", "tf32", 8, 1, True, False)}
FAMILIES = ["normal", "wide", "sparse", "cancel", "cancel_c", "subnormal", "special", "huge", "pass", "powers"]


class Words:
    """The same 64-bit words under every version of NumPy."""

    def __init__(self, seed):
        self.state = np.uint64(seed)

    def __call__(self, *shape):
        n = int(np.prod(shape))
        with np.errstate(over="ignore"):
            z = self.state + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self.state = z[-1]
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).reshape(shape)

    def below(self, n, *shape):
        return ((self(*shape) >> np.uint64(33)) % np.uint64(n)).astype(np.int64)


def draw(w, shape, kind, low, high, zeros=0.0):
    """Bits of numbers with unbiased exponents from `low` to `high`, below the normal range subnormal ones, a share of them zero."""
    exp, man = kind[:2]
    bias = (1 << (exp - 1)) - 1
    e = np.clip(low + w.below(high - low + 1, *shape) + bias, 0, (1 << exp) - 2)
    bits = w.below(2, *shape) << (exp + man) | e << man | w.below(1 << man, *shape)
    return np.where(w.below(1000, *shape) < 1000 * zeros, bits & 1 << (exp + man), bits)


def powers(w, shape, kind, low, high, zeros):
    return draw(w, shape, kind, low, high, zeros) & ~((1 << kind[1]) - 1)


def sprinkle(w, bits, kind):
    exp, man = kind[:2]
    inf = ((1 << exp) - 1) << man
    r = w.below(100, *bits.shape)
    sign = bits & 1 << (exp + man)
    bits = np.where(r < 3, inf | sign, bits)
    bits = np.where(r == 3, inf | bits & ((1 << man) - 1), bits)
    return np.where((r > 3) & (r < 12), sign, bits)


F32 = (8, 23, 32)
F16 = (5, 10, 16)


def value(bits, kind):
    """Bits as float64; tf32 operands without the bits that are ignored."""
    exp, man, width = kind[:3]
    if width == 16 and exp == 5:
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    wide = bits << 16 if width == 16 else bits & ~0x1fff if len(kind) == 4 else bits
    return wide.astype(np.uint32).view(np.float32).astype(np.float64)


def operands(form, family):
    """a [tile, step, row, k], b [tile, step, column, k], c [tile, row, column] as bits."""
    _, ty, k, steps, _, half = FORMS[form]
    kind, acc = TYPES[ty], F16 if half else F32
    w = Words(1 + 1000 * list(FORMS).index(form) + FAMILIES.index(family))
    sa, sb, sc = (TILES, steps, M, k), (TILES, steps, N, k), (TILES, M, N)
    narrow = kind[0] == 5
    if family == "normal":
        return draw(w, sa, kind, -3, 1), draw(w, sb, kind, -3, 1), draw(w, sc, acc, -3, 3)
    if family == "wide":
        e, f = (12, 14) if half else (14, 24)
        return draw(w, sa, kind, -e, e if not half else 4), draw(w, sb, kind, -e, e if not half else 4), draw(w, sc, acc, -f, f)
    if family == "sparse":
        return draw(w, sa, kind, -9, 6, 0.6), draw(w, sb, kind, -9, 6, 0.3), draw(w, sc, acc, -14 if half else -20, 12, 0.3)
    if family in ("cancel", "cancel_c"):
        a, b = draw(w, sa, kind, -13, -4), draw(w, sb, kind, -6, 1)
        c = draw(w, sc, acc, -14, 1, 0.5)
        if family == "cancel":
            # Pairs of large products that cancel exactly, at places that change from tile to tile.
            big = draw(w, sa, kind, 2, 5)
            order = np.argsort(w(TILES, steps, k), axis=-1)
            for p in range(3):
                i, j = order[..., 2 * p, None, None], order[..., 2 * p + 1, None, None]
                x = np.take_along_axis(big, np.broadcast_to(i, sa[:3] + (1,)), 3)
                np.put_along_axis(a, np.broadcast_to(i, sa[:3] + (1,)), x, 3)
                np.put_along_axis(a, np.broadcast_to(j, sa[:3] + (1,)), x ^ 1 << (kind[0] + kind[1]), 3)
                y = np.take_along_axis(b, np.broadcast_to(i, sb[:3] + (1,)), 3)
                np.put_along_axis(b, np.broadcast_to(j, sb[:3] + (1,)), y, 3)
        else:
            exact = np.einsum("tsmk,tsnk->tmn", value(a, kind), value(b, kind))
            near = -exact
            c = near.astype(np.float16).view(np.uint16).astype(np.int64) if half else near.astype(np.float32).view(np.uint32).astype(np.int64)
            c = c + w.below(9, *sc) - 4
        return a, b, c
    if family == "subnormal":
        if narrow:
            return draw(w, sa, kind, -20, -12), draw(w, sb, kind, -20, 2), draw(w, sc, acc, -24, -12) if half else draw(w, sc, acc, -135, -30)
        return draw(w, sa, kind, -132, -60), draw(w, sb, kind, -70, 1), draw(w, sc, acc, -140, -100)
    if family == "special":
        a, b, c = draw(w, sa, kind, -3, 3), draw(w, sb, kind, -3, 3), draw(w, sc, acc, -3, 3)
        # Few enough that most results are numbers or infinities.
        rare = w.below(5, TILES, steps, 1, 1) == 0
        return np.where(rare, sprinkle(w, a, kind), a), np.where(~rare, sprinkle(w, b, kind), b), sprinkle(w, c, acc)
    if family == "huge":
        e = 15 if narrow else 64
        c = draw(w, sc, acc, 10, 15) if half else draw(w, sc, acc, 120, 127)
        return draw(w, sa, kind, e - 4, e), draw(w, sb, kind, e - 4, e, 0.5), c
    if family == "pass":
        sign = 1 << (kind[0] + kind[1])
        a, b = draw(w, sa, kind, -3, 3, 1.0), draw(w, sb, kind, -3, 3, 0.3)
        del sign
        c = (w(*sc) >> np.uint64(64 - acc[2])).astype(np.int64)
        return a, b, np.where(w.below(4, *sc) == 0, c & 1 << (acc[2] - 1), c)
    return powers(w, sa, kind, -8, 8, 0.5), powers(w, sb, kind, -8, 8, 0.2), powers(w, sc, acc, -14 if half else -20, 14 if half else 20, 0.3)


def packed(form, family):
    _, ty, _, _, _, half = FORMS[form]
    a, b, c = operands(form, family)
    t = np.uint32 if ty == "tf32" else np.uint16
    return a.astype(t), b.astype(t), c.astype(np.uint16 if half else np.uint32)


def kernel(name, form):
    """`name(a, b, c, out)`: CTA i multiplies tile i with 128 threads."""
    inst, ty, k, steps, keep, half = FORMS[form]
    head = f""".visible .entry {name}(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 po) {{
.reg .b32 t, cta, lane, warp, r<9>, a<5>, b<3>, d<5>, sa, sb;
.reg .f32 f<5>;
.reg .b64 ga, gb, gc, go, q<5>, da, db;
.reg .pred p, first;
ld.param.u64 ga, [pa]; ld.param.u64 gb, [pb]; ld.param.u64 gc, [pc]; ld.param.u64 go, [po];
mov.u32 t, %tid.x; mov.u32 cta, %ctaid.x;
and.b32 lane, t, 31; shr.u32 warp, t, 5;
shr.u32 r1, lane, 2; shl.b32 r2, warp, 4; add.s32 r1, r1, r2;
and.b32 r2, lane, 3; shl.b32 r2, r2, 1;
shl.b32 r3, r1, 3; add.s32 r3, r3, r2;
mad.lo.u32 r3, cta, {M * N}, r3;
mul.wide.u32 q1, r3, {2 if half else 4};
add.s64 gc, gc, q1; add.s64 go, go, q1;
"""
    if half:
        head += f"ld.global.b32 d1, [gc]; ld.global.b32 d2, [gc+{8 * N * 2}];\n"
        store = f"st.global.b32 [go], d1; st.global.b32 [go+{8 * N * 2}], d2;\nret;\n}}\n"
    else:
        head += f"ld.global.v2.f32 {{f1, f2}}, [gc]; ld.global.v2.f32 {{f3, f4}}, [gc+{8 * N * 4}];\n"
        store = f"st.global.v2.f32 [go], {{f1, f2}}; st.global.v2.f32 [go+{8 * N * 4}], {{f3, f4}};\nret;\n}}\n"
    size = 4 if ty == "tf32" else 2
    row = k * size
    if inst == "mma":
        body = f"mad.lo.u32 r4, cta, {M}, r1; mul.wide.u32 q1, r4, {row}; add.s64 ga, ga, q1;\n"
        body += f"and.b32 r5, lane, 3; mul.wide.u32 q2, r5, 4; add.s64 ga, ga, q2;\n"
        body += f"shr.u32 r6, lane, 2; mad.lo.u32 r6, cta, {N}, r6; mul.wide.u32 q1, r6, {row}; add.s64 gb, gb, q1; add.s64 gb, gb, q2;\n"
        body += f"ld.global.b32 a1, [ga]; ld.global.b32 a2, [ga+{8 * row}];\n"
        body += "ld.global.b32 b1, [gb];\n"
        if row == 32:
            body += f"ld.global.b32 a3, [ga+16]; ld.global.b32 a4, [ga+{8 * row + 16}]; ld.global.b32 b2, [gb+16];\n"
        av, bv = ("{a1, a2, a3, a4}", "{b1, b2}") if row == 32 else ("{a1, a2}", "{b1}")
        body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{ty}.{ty}.f32 {{f1, f2, f3, f4}}, {av}, {bv}, {{f1, f2, f3, f4}};\n"
        return head + body + store
    body = f".shared .align 128 .b8 ta_{name}[{2048 * steps}];\n.shared .align 128 .b8 tb_{name}[{256 * steps}];\n"
    body += f"mov.u32 sa, ta_{name}; mov.u32 sb, tb_{name};\n"
    # Core matrices of 8 rows by 16 bytes, first the eight (or one) of the first half of K.
    body += f"shr.u32 r4, t, 1; and.b32 r5, t, 1; shl.b32 r6, r4, 4; mad.lo.u32 r7, r5, 1024, r6; add.s32 r7, r7, sa;\n"
    body += f"mad.lo.u32 r8, r5, 128, r6; add.s32 r8, r8, sb;\n"
    body += f"mul.wide.u32 q1, cta, {2048 * steps}; add.s64 ga, ga, q1; mul.wide.u32 q1, t, 16; add.s64 ga, ga, q1;\n"
    body += f"mul.wide.u32 q2, cta, {256 * steps}; add.s64 gb, gb, q2; add.s64 gb, gb, q1;\nsetp.lt.u32 first, t, 16;\n"
    for s in range(steps):
        body += f"ld.global.v4.b32 {{a1, a2, a3, a4}}, [ga+{2048 * s}]; st.shared.v4.b32 [r7+{2048 * s}], {{a1, a2, a3, a4}};\n"
        body += f"@first ld.global.v4.b32 {{a1, a2, a3, a4}}, [gb+{256 * s}];\n@first st.shared.v4.b32 [r8+{256 * s}], {{a1, a2, a3, a4}};\n"
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    body += f"setp.{'eq' if keep else 'ne'}.u32 p, cta, cta;\nwgmma.fence.sync.aligned;\n"
    for s in range(steps):
        for r, d, lead, stride, at in (("sa", "da", 1024, 128, 2048 * s), ("sb", "db", 128, 256, 256 * s)):
            body += f"add.s32 r4, {r}, {at}; shr.u32 r4, r4, 4; and.b32 r4, r4, 0x3fff; cvt.u64.u32 {d}, r4;\n"
            body += f"or.b64 {d}, {d}, {(lead >> 4) << 16 | (stride >> 4) << 32};\n"
        acc = "{d1, d2}" if half else "{f1, f2, f3, f4}"
        major = "" if ty == "tf32" else ", 0, 0"
        body += f"wgmma.mma_async.sync.aligned.m64n8k{k}.{'f16' if half else 'f32'}.{ty}.{ty} {acc}, da, db, p, 1, 1{major};\n"
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    return head + body + store


def ptx():
    return ".version 8.4\n.target sm_90a\n.address_size 64\n" + "".join(kernel(f"form{i}", f) for i, f in enumerate(FORMS))


def cases():
    return [(i, form, family) for i, form in enumerate(FORMS) for family in FAMILIES]


def checksum(arrays):
    return np.uint64(sum(int(x.astype(np.uint64).sum()) * (i + 1) for i, x in enumerate(arrays)) & (1 << 63) - 1)


def device(folder):
    import cupy

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "products.ptx").write_text(ptx())
    module = cupy.RawModule(path=str(folder / "products.ptx"))
    results = {}
    for i, form, family in cases():
        arrays = packed(form, family)
        a, b, c = (cupy.asarray(x) for x in arrays)
        out = cupy.zeros_like(c)
        module.get_function(f"form{i}")((TILES,), (128,), (a, b, c, out))
        results[f"{form}/{family}"] = cupy.asnumpy(out)
        results[f"{form}/{family}/inputs"] = checksum(arrays)
    np.savez_compressed(folder / "products.npz", **results)
    print(f"{len(cases())} cases of {TILES * M * N} dot products")


def stored(folder):
    z = np.load(folder / "products.npz")
    for i, form, family in cases():
        assert z[f"{form}/{family}/inputs"] == checksum(packed(form, family)), "operands differ from those the device saw"
        yield i, form, family, z[f"{form}/{family}"]


def simulate(folder, runner):
    (folder / "products.ptx").write_text(ptx())
    launches, buffers, files = [], {}, []
    for n, (i, form, family) in enumerate(cases()):
        for name, x in zip("abc", packed(form, family)):
            np.save(folder / f"{name}{n}.npy", x)
            buffers[f"{name}{n}"] = {"file": f"{name}{n}.npy"}
            files.append(f"{name}{n}.npy")
        buffers[f"o{n}"] = {"dtype": "u16" if FORMS[form][5] else "u32", "shape": [TILES, M, N], "fill": "zero", "out": f"o{n}.npy"}
        files.append(f"o{n}.npy")
        launches.append({"kernel": f"form{i}", "grid": [TILES], "block": [128], "params": [{"ptr": f"{x}{n}"} for x in "abco"]})
    job = folder / "job.json"
    job.write_text(json.dumps({"ptx": "products.ptx", "buffers": buffers, "launches": launches}))
    r = subprocess.run([runner, str(job)], capture_output=True, text=True)
    if r.returncode:
        sys.exit(r.stderr)
    got = [np.load(folder / f"o{n}.npy") for n in range(len(cases()))]
    for f in files:
        (folder / f).unlink()
    return got


def table(rows):
    bad = 0
    for form, family, got, want in rows:
        n = (got != want).sum()
        bad += n > 0
        if n:
            i = np.unravel_index(int(np.argmax(got != want)), got.shape)
            print(f"{form:28} {family:10} {n:6} of {got.size} differ, e.g. tile {i[0]} row {i[1]} column {i[2]}: {got[i]:08x}, GPU {want[i]:08x}")
    print(f"{len(cases())} cases, {bad} with differences")
    return bad


def compare(folder, runner):
    got = simulate(folder, runner)
    return table((form, family, got[n], want) for n, (_, form, family, want) in enumerate(stored(folder)))


def parts(bits, kind):
    """Sign, exponent, significand, whether infinite or NaN, whether NaN."""
    exp, man = kind[:2]
    bits = bits & ~0x1fff if len(kind) == 4 else bits
    e, m = bits >> man & (1 << exp) - 1, bits & (1 << man) - 1
    special = e == (1 << exp) - 1
    return bits >> (exp + man) & 1, np.maximum(e, 1) - (1 << (exp - 1)) + 1, np.where(e == 0, m, m | 1 << man), special, special & (m != 0)


def rounded(total, unit, kind, nearest):
    """Bits of total * 2^unit, towards zero or to nearest even; zeros are positive."""
    exp, man = kind[:2]
    size = np.abs(total)
    length = np.frexp(size.astype(np.float64))[1]
    least = 2 - (1 << (exp - 1))
    drop = np.maximum(unit + length - 1, least) - man - unit
    right = np.clip(drop, 0, 62)
    q = np.where(drop >= 0, size >> right, size << np.clip(-drop, 0, 40))
    rest, half = np.where(drop > 0, size & (np.int64(1) << right) - 1, 0), np.where(drop > 0, np.int64(1) << np.maximum(right - 1, 0), 1)
    q = q + (nearest & ((rest > half) | (rest == half) & (q & 1 == 1) & (drop > 0)))
    out = np.minimum(q + (np.maximum(unit + length - 1 - least, 0) << man), ((1 << exp) - 1) << man)
    return np.where((out == 0) | (total == 0), 0, out | np.where(total < 0, 1 << (exp + man), 0))


def rule(form, family, kept=25):
    """What the form gives, by the rule of src/product.rs with `kept` bits behind the point."""
    _, ty, _, steps, keep, half = FORMS[form]
    kind, acc = TYPES[ty], F16 if half else F32
    a, b, c = operands(form, family)
    c = c if keep else np.zeros_like(c)
    n, inf = 1 << (acc[0] + acc[1]), ((1 << acc[0]) - 1) << acc[1]
    for s in range(steps):
        sa, ea, ma, xa, na = (x[:, :, None] for x in parts(a[:, s], kind))
        sb, eb, mb, xb, nb = (x[:, None] for x in parts(b[:, s], kind))
        sc, ec, mc, xc, nc = parts(c, acc)
        sign, e, m = sa ^ sb, ea + eb, ma * mb
        top = np.maximum(np.where(m == 0, -9999, e).max(-1), np.where(mc == 0, -9999, ec))
        top = np.where(top == -9999, 0, top)

        def cut(m, e, bits):
            by = e + kept - bits
            return np.where(by >= 0, m << np.clip(by, 0, 40), m >> np.clip(-by, 0, 62))
        terms, last = cut(m, e - top[..., None], 2 * kind[1]), cut(mc, ec - top, acc[1])
        total = np.where(sign == 1, -terms, terms).sum(-1) + np.where(sc == 1, -last, last)
        out = rounded(total, top - kept, acc, half)
        plus, minus = (((xa | xb) & (sign == w)).any(-1) | xc & (sc == w) for w in (0, 1))
        invalid = (xa & (mb == 0) | xb & (ma == 0) | na | nb).any(-1) | nc | plus & minus
        c = np.where(invalid, n - 1, np.where(plus, inf, np.where(minus, inf | n, out)))
    return c


def check_rule(folder):
    return table((form, family, rule(form, family), want) for _, form, family, want in stored(folder))


def rows(folder, limit=3):
    """Dot products that another rule would miss, first those that one bit more or less would change."""
    for i, form, family, want in stored(folder):
        a, b, c = operands(form, family)
        want = want.astype(np.int64)
        other = sum((rule(form, family, kept) != want).astype(int) for kept in (23, 24, 26))
        order = np.argsort(-other, axis=None, kind="stable")[:limit]
        print(f"= form{i} {family}")
        for t, m, n in zip(*np.unravel_index(order, want.shape)):
            words = [*a[t, :, m].ravel(), *b[t, :, n].ravel(), c[t, m, n], want[t, m, n]]
            print(" ".join(f"{x:x}" for x in words))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "device":
        device(Path(sys.argv[2]))
    elif len(sys.argv) == 4 and sys.argv[1] == "compare":
        sys.exit(1 if compare(Path(sys.argv[2]), sys.argv[3]) else 0)
    elif len(sys.argv) == 3 and sys.argv[1] == "rule":
        sys.exit(1 if check_rule(Path(sys.argv[2])) else 0)
    elif len(sys.argv) == 3 and sys.argv[1] == "rows":
        rows(Path(sys.argv[2]))
    elif sys.argv[1:] == ["ptx"]:
        print(ptx(), end="")
    else:
        sys.exit(__doc__)
