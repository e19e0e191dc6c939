"""Compiles one kernel of kernels.toml; started by `cargo xtask kernels`, which says what it compares and keeps.

    python compile.py ROW.json FOLDER

ROW.json is one row of kernels.toml for one architecture. FOLDER gets kernel.cubin, kernel.ptx and notes.json: the launch
facts (parameters in the order of the machine code, threads, shared memory, cluster, promises, constants), taken from the
compiler's own launch metadata, and the assembler's figures. Needs no GPU and no driver.

A parameter's name says what it is (arguments.py); the launcher binds by the same names.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

# The assembler's figures; line information would put paths of this machine into the machine code.
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import triton  # noqa: E402
from arguments import ARGUMENTS, TENSORS  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

ELEMENTS = {"bf16": ("bf16", 2), "f16": ("fp16", 2), "f32": ("fp32", 4)}  # Triton's name, bytes
SCALARS = {"i32": ("i32", "i32", 4), "i64": ("i64", "i64", 8), "f32": ("fp32", "f32", 4)}  # Triton's name, manifest kind, bytes
SWIZZLE_BYTES = {1: 32, 2: 64, 3: 128}
# A tensor map has these dimensions, outermost first (params.h of jfa-cuda: JFA_BOUND).
MAP_RANK = 5


class Offline:
    """Stands in for the CUDA driver, which the compiler asks for its target."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def map_python_to_cpp_type(self, ty):
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(ty)

    @property
    def utils(self):
        raise RuntimeError("no device")  # the compiler then takes shared-memory limits from its own table


def constant(text):
    """A constexpr of kernels.toml: a number, true or false, else text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def option(text):
    """A compile option: as a constant, or several separated by commas."""
    return tuple(constant(t.strip()) for t in text.split(",")) if "," in text else constant(text)


def element_of(kind, dtype):
    return ELEMENTS["f32" if kind.endswith("f32") else dtype]


def type_of(name, row):
    """Triton's type of a parameter."""
    if name not in ARGUMENTS:
        raise SystemExit(f"{row['entry']}: parameter '{name}' is not in arguments.py")
    kind = ARGUMENTS[name][0]
    dtype = row["tags"].get("dtype", "")
    if kind.startswith("map"):
        block = [int(n) for n in row["blocks"].get(name, "").split(",") if n.strip()]
        if len(block) != 2:
            raise SystemExit(f"{row['entry']}: blocks of kernels.toml gives no 'rows, columns' for {name}")
        return f"tensordesc<{element_of(kind, dtype)[0]}{[1, 1, 1, *block]}>".replace(" ", "")
    if kind in SCALARS:
        return SCALARS[kind][0]
    if kind == "*i32":
        return "*i32"
    return "*" + element_of(kind, dtype)[0]


def parameters_of(launch, row):
    """The machine code's parameters: those of the signature, tensor maps taken apart, then Triton's own scratch."""
    out = []
    metas = iter(launch["tensordesc_meta"])
    for a in launch["args"]:
        name, kind, divisible = a["name"], *ARGUMENTS[a["name"]]
        if (a.get("divisible_by") or 1) > (divisible or 1):
            raise SystemExit(f"{row['entry']}: '{name}' was compiled to be a multiple of {a['divisible_by']}, promised is {divisible}")
        promise = {"divisible": divisible} if divisible else {}
        if kind.startswith("map"):
            meta = next(metas)
            bytes_of_element = element_of(kind, row["tags"].get("dtype", ""))[1]
            *outer, rows, cols = meta["block_size"]
            span = SWIZZLE_BYTES.get(meta["swizzle"])
            if any(n != 1 for n in outer) or len(outer) != MAP_RANK - 2 or meta["elem_size"] != bytes_of_element:
                raise SystemExit(f"{row['entry']}: the box of '{name}' is not one of rows and columns: {meta}")
            if span != cols * bytes_of_element or meta["fp4_padded"] or meta["is_im2col"]:
                raise SystemExit(f"{row['entry']}: a row of the box of '{name}' is no swizzle span: {meta}")
            out.append({"name": name, "kind": "tensor_map", "bytes": 128, "tile": {"cols": cols, "rows": rows, "heads": 1}})
            out += [{"name": f"{name}.shape{i}", "kind": "i32", "bytes": 4} for i in range(MAP_RANK)]
            out += [{"name": f"{name}.stride{i}", "kind": "i64", "bytes": 8} for i in range(MAP_RANK)]
        elif kind in SCALARS:
            _, manifest, size = SCALARS[kind]
            out.append({"name": name, "kind": manifest, "bytes": size} | promise)
        else:
            out.append({"name": name, "kind": "pointer", "bytes": 8} | promise)
    for scratch in ("global", "profile"):
        if launch[f"{scratch}_scratch_size"]:
            raise SystemExit(f"{row['entry']}: needs {launch[f'{scratch}_scratch_size']} bytes of {scratch} scratch; nobody allocates it")
        out.append({"name": f"{scratch}_scratch", "kind": "pointer", "bytes": 8})
    return out


def promises_of(parameters):
    """What the machine code assumes of a tensor, in bytes, for the check of the problem's views."""
    names = {p["name"] for p in parameters}
    used = [t for t in TENSORS if t in names or f"{t}_map" in names]
    # Strides are multiples of 8 elements of 2 bytes; tensor maps need the same.
    return [{"argument": t, "base": 16, "row_stride": 16, "head_stride": 16} for t in used]


def assembler_figures(log, entry):
    """`ptxas -v`, for the one kernel there is."""
    def number(words):
        found = re.findall(rf"(\d+) {words}", log)
        return max(map(int, found)) if found else 0

    if f"'{entry}'" not in log or "Used " not in log:
        raise SystemExit(f"{entry}: the assembler gave no figures:\n{log}")
    if re.search("wgmma.*serialized", log):
        raise SystemExit(f"{entry}: the assembler serialises matrix products:\n{log}")
    return {
        "registers": number("registers"),
        "stack_bytes": number("bytes stack frame"),
        "spill_store_bytes": number("bytes spill stores"),
        "spill_load_bytes": number("bytes spill loads"),
        "local_bytes": 0,
        "constant_bytes": 0,
        "barriers": number("barriers"),
        "code_bytes": 0,
        "shared_static": number("bytes smem"),
    }


def captured(work):
    """Runs `work` and returns its result and what it, or a program it starts, prints."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile(mode="w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            result = work()
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            text = file.read()
    return result, text


def main(request, folder):
    row = json.loads(Path(request).read_text())
    folder = Path(folder)
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    module = __import__(Path(row["source"]).stem)
    function = getattr(module, row["entry"])
    constants = {k: constant(v) for k, v in row["constants"].items()}
    unknown = sorted(set(constants) - set(function.arg_names))
    if unknown:
        raise SystemExit(f"{row['entry']}: no parameter {', '.join(unknown)} (defines of kernels.toml)")
    types = {}
    for p in function.params:
        if p.name in constants or p.is_constexpr:
            if p.name not in constants:
                if not p.has_default:
                    raise SystemExit(f"{row['entry']}: defines of kernels.toml gives no {p.name}")
                constants[p.name] = p.default
            types[p.name] = "constexpr"
        else:
            types[p.name] = type_of(p.name, row)
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", ARGUMENTS[name][1]]]
        for name, ty in types.items()
        if ty != "constexpr" and ARGUMENTS[name][1]
    }
    match = re.fullmatch(r"sm_(\d+)a", row["arch"])
    if not match:
        raise SystemExit(f"architecture {row['arch']}: Triton makes sm_90a and sm_100a")
    target = GPUTarget("cuda", int(match[1]), 32)
    triton.runtime.driver.set_active(Offline(target))
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    options = {k: option(v) for k, v in row["options"].items()}
    kernel, log = captured(lambda: triton.compile(source, target=target, options=options))

    launch = json.loads(kernel.asm["launch_metadata"])
    entry = launch["entry_name"]
    parameters = parameters_of(launch, row)
    cluster = [max(1, n) for n in launch["cluster_dims"]]
    if launch["num_ctas"] != 1:
        raise SystemExit(f"{entry}: num_ctas = {launch['num_ctas']}; give clusters as ctas_per_cga")
    if launch["launch_cooperative_grid"] or any(launch["preferred_cluster_dims"]):
        raise SystemExit(f"{entry}: cooperative launches and preferred clusters are not what the launcher does")
    imported = {Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    notes = {
        "resources": {entry: assembler_figures(log, entry)},
        "derived": {
            "entry": entry,
            "parameters": parameters,
            "threads": 32 * launch["num_warps"],
            "shared_dynamic": launch["shared_mem"],
            "cluster": cluster,
            "programmatic": launch["launch_pdl"],
            "promises": promises_of(parameters),
            "constants": {k.lower(): int(v) for k, v in constants.items() if isinstance(v, int) and 0 <= int(v) < 1 << 32},
            "tensor_memory_columns": launch["tmem_size"],
            "modules": sorted(p.name for p in imported if p.parent == here and p.name != Path(__file__).name),
        },
    }
    ptx = kernel.asm["ptx"]
    if str(here) in ptx or str(folder) in ptx:
        raise SystemExit(f"{entry}: the PTX names a folder of this machine")
    folder.joinpath("kernel.cubin").write_bytes(kernel.asm["cubin"])
    folder.joinpath("kernel.ptx").write_text(ptx)
    folder.joinpath("notes.json").write_text(json.dumps(notes, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
