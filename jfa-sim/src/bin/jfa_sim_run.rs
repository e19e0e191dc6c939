//! Runs kernels in the simulator as a JSON file describes; see the crate's README for the format.

use jfa_sim::{Arch, Config, DataType, LaunchConfig, Machine, Module, ParamValue, Program, Swizzle, TensorMap, model};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

type Res<T> = Result<T, String>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Job {
    /// PTX file.
    ptx: PathBuf,
    #[serde(default)]
    arch: Option<String>,
    #[serde(default)]
    seed: u64,
    #[serde(default = "yes")]
    shuffle: bool,
    #[serde(default = "yes")]
    detect: bool,
    #[serde(default = "yes")]
    strict_fences: bool,
    #[serde(default)]
    lanes: bool,
    #[serde(default)]
    threads: usize,
    #[serde(default)]
    spin_limit: Option<u64>,
    #[serde(default)]
    buffers: BTreeMap<String, Buffer>,
    /// Launches in order; or one launch in the fields of the file itself.
    #[serde(default)]
    launches: Vec<Launch>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Buffer {
    /// `.npy` or raw bytes to start from.
    #[serde(default)]
    file: Option<PathBuf>,
    /// Size, when there is no file.
    #[serde(default)]
    bytes: Option<usize>,
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    shape: Option<Vec<usize>>,
    /// `zero`, `nan` (all bits set), `none` (counts as never written), or a byte such as `0x7f`.
    #[serde(default)]
    fill: Option<String>,
    /// Written after the last launch, `.npy` or raw.
    #[serde(default)]
    out: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Launch {
    kernel: String,
    #[serde(default)]
    ptx: Option<PathBuf>,
    grid: Vec<u32>,
    block: Vec<u32>,
    #[serde(default)]
    cluster: Vec<u32>,
    #[serde(default)]
    smem: u32,
    #[serde(default)]
    params: Vec<Param>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Param {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    /// A buffer's address, or `{"buffer": name, "offset": bytes}`.
    Ptr(Pointer),
    TensorMap(Map),
    /// Hexadecimal bytes.
    Hex(String),
    /// Members with C layout, padded to a multiple of the widest.
    Struct(Vec<Param>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Pointer {
    Null(()),
    Name(String),
    At {
        buffer: String,
        #[serde(default)]
        offset: i64,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Map {
    buffer: String,
    #[serde(default)]
    offset: i64,
    dtype: DataType,
    dims: Vec<u64>,
    /// Bytes, without the innermost dimension.
    strides: Vec<u64>,
    #[serde(rename = "box")]
    boxes: Vec<u32>,
    #[serde(default)]
    swizzle: Swizzle,
    #[serde(default)]
    element_strides: Vec<u32>,
    #[serde(default)]
    nan_fill: bool,
}

fn yes() -> bool {
    true
}

struct Loaded {
    addr: u64,
    size: usize,
    descr: String,
    shape: Vec<usize>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut file = None;
    let mut seeds = None;
    let mut quiet = false;
    let mut it = args.iter();
    while let Some(a) = it.next() {
        match a.as_str() {
            "--seed" => seeds = it.next().and_then(|s| s.parse::<u64>().ok()),
            "--quiet" => quiet = true,
            "-h" | "--help" => {
                println!("usage: jfa-sim-run [--seed N] [--quiet] LAUNCH.json");
                return ExitCode::SUCCESS;
            }
            f => file = Some(f.to_string()),
        }
    }
    let Some(file) = file else {
        eprintln!("usage: jfa-sim-run [--seed N] [--quiet] LAUNCH.json");
        return ExitCode::from(2);
    };
    match run(Path::new(&file), seeds, quiet) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

fn run(file: &Path, seed: Option<u64>, quiet: bool) -> Res<usize> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut value: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?;
    // One launch may stand in the file itself.
    if let Some(o) = value.as_object_mut()
        && o.contains_key("kernel")
    {
        let mut l = serde_json::Map::new();
        for k in ["kernel", "grid", "block", "cluster", "smem", "params"] {
            if let Some(v) = o.remove(k) {
                l.insert(k.into(), v);
            }
        }
        o.insert("launches".into(), serde_json::Value::Array(vec![l.into()]));
    }
    let job: Job = serde_json::from_value(value).map_err(|e| format!("{}: {e}", file.display()))?;
    let base = file.parent().unwrap_or(Path::new("."));
    let mut programs: BTreeMap<PathBuf, Program> = BTreeMap::new();
    let main_text = read_text(&base.join(&job.ptx))?;
    let module = Module::parse(&main_text).map_err(|e| e.to_string())?;
    let arch = match job.arch.as_deref().unwrap_or(module.target()) {
        a if a.starts_with("sm_90") => Arch::Sm90,
        a if a.starts_with("sm_10") => Arch::Sm100,
        a => return Err(format!("unknown architecture {a}")),
    };
    let mut cfg = Config {
        seed: seed.unwrap_or(job.seed),
        shuffle: job.shuffle,
        detect: job.detect,
        strict_fences: job.strict_fences,
        lanes: job.lanes,
        threads: job.threads,
        ..Config::default()
    };
    if let Some(n) = job.spin_limit {
        cfg.spin_limit = n;
    }
    let mut m = Machine::new(arch, cfg);
    programs.insert(job.ptx.clone(), m.load(&module).map_err(|e| e.to_string())?);
    let mut bufs = BTreeMap::new();
    for (name, b) in &job.buffers {
        let loaded = load_buffer(&mut m, base, b).map_err(|e| format!("buffer {name}: {e}"))?;
        bufs.insert(name.clone(), loaded);
    }
    let mut total = 0;
    let mut reports = vec![];
    for l in &job.launches {
        let path = l.ptx.clone().unwrap_or_else(|| job.ptx.clone());
        if !programs.contains_key(&path) {
            let module = Module::parse(&read_text(&base.join(&path))?).map_err(|e| e.to_string())?;
            programs.insert(path.clone(), m.load(&module).map_err(|e| e.to_string())?);
        }
        let params = l.params.iter().map(|p| param(p, &bufs)).collect::<Res<Vec<_>>>()?;
        let shape = LaunchConfig {
            grid: dims(&l.grid)?,
            block: dims(&l.block)?,
            cluster: dims(&l.cluster)?,
            dynamic_smem: l.smem,
        };
        let r = m.launch(&programs[&path], &l.kernel, shape, &params).map_err(|e| e.to_string())?;
        total += r.findings.len();
        if !quiet {
            for f in &r.findings {
                eprintln!("{f}");
            }
        }
        let bound = model::bound(arch, &r.counters);
        let rate = r.counters.thread_instructions as f64 / r.seconds.max(1e-9) / 1e6;
        reports.push(serde_json::json!({
            "kernel": l.kernel,
            "seconds": r.seconds,
            "million_thread_instructions_per_second": rate,
            "bound_cycles": bound.cycles(1),
            "bound_by": bound.limiter(),
            "findings": r.findings,
            "counters": r.counters.named().into_iter().collect::<BTreeMap<_, _>>(),
        }));
    }
    for (name, b) in &job.buffers {
        if let Some(out) = &b.out {
            store_buffer(&m, &base.join(out), &bufs[name]).map_err(|e| format!("buffer {name}: {e}"))?;
        }
    }
    println!("{}", serde_json::to_string_pretty(&reports).map_err(|e| e.to_string())?);
    Ok(total)
}

fn read_text(p: &Path) -> Res<String> {
    std::fs::read_to_string(p).map_err(|e| format!("{}: {e}", p.display()))
}

fn dims(v: &[u32]) -> Res<[u32; 3]> {
    if v.len() > 3 {
        return Err(format!("{} dimensions", v.len()));
    }
    let mut d = [1; 3];
    d[..v.len()].copy_from_slice(v);
    Ok(d)
}

fn element_size(dtype: &str) -> Res<(usize, &'static str)> {
    Ok(match dtype {
        "u8" => (1, "|u1"),
        "i8" => (1, "|i1"),
        "f16" => (2, "<f2"),
        // NumPy has no bfloat16: the bits travel as unsigned integers.
        "bf16" | "u16" => (2, "<u2"),
        "i16" => (2, "<i2"),
        "f32" => (4, "<f4"),
        "u32" => (4, "<u4"),
        "i32" => (4, "<i4"),
        "f64" => (8, "<f8"),
        "u64" => (8, "<u8"),
        "i64" => (8, "<i8"),
        d => return Err(format!("unknown dtype {d}")),
    })
}

fn load_buffer(m: &mut Machine, base: &Path, b: &Buffer) -> Res<Loaded> {
    let (mut descr, mut shape) = ("|u1".to_string(), vec![]);
    let mut data = None;
    if let Some(f) = &b.file {
        let p = base.join(f);
        let raw = std::fs::read(&p).map_err(|e| format!("{}: {e}", p.display()))?;
        if raw.starts_with(b"\x93NUMPY") {
            let (d, s, at) = npy_header(&raw)?;
            (descr, shape) = (d, s);
            data = Some(raw[at..].to_vec());
        } else {
            shape = vec![raw.len()];
            data = Some(raw);
        }
    }
    if let Some(d) = &b.dtype {
        let (size, name) = element_size(d)?;
        descr = name.into();
        if let Some(s) = &b.shape {
            shape.clone_from(s);
        } else if data.is_none() {
            shape = vec![b.bytes.ok_or("needs a file, bytes, or dtype and shape")? / size];
        }
    }
    let want: usize = match b.bytes {
        Some(n) => n,
        None => match (&data, &b.dtype) {
            (Some(d), _) => d.len(),
            (None, Some(d)) => shape.iter().product::<usize>() * element_size(d)?.0,
            _ => return Err("needs a file, bytes, or dtype and shape".into()),
        },
    };
    if b.dtype.is_none() && data.is_none() {
        shape = vec![want];
    }
    let addr = m.alloc(want.max(1));
    match b.fill.as_deref() {
        Some("none") => {}
        None if data.is_some() => {}
        None | Some("zero") => m.write(addr, &vec![0; want]).map_err(|e| e.to_string())?,
        Some("nan") => m.write(addr, &vec![0xff; want]).map_err(|e| e.to_string())?,
        Some(x) => {
            let v =
                x.strip_prefix("0x").and_then(|h| u8::from_str_radix(h, 16).ok()).ok_or_else(|| format!("fill {x}"))?;
            m.write(addr, &vec![v; want]).map_err(|e| e.to_string())?;
        }
    }
    if let Some(d) = data {
        if d.len() > want {
            return Err(format!("the file has {} bytes, more than {want}", d.len()));
        }
        m.write(addr, &d).map_err(|e| e.to_string())?;
    }
    Ok(Loaded { addr, size: want, descr, shape })
}

fn npy_header(raw: &[u8]) -> Res<(String, Vec<usize>, usize)> {
    let bad = || "not a .npy file this program reads (C order, little endian)".to_string();
    let (len, at) = match raw.get(6) {
        Some(1) => (usize::from(u16::from_le_bytes([raw[8], raw[9]])), 10),
        Some(_) => (u32::from_le_bytes([raw[8], raw[9], raw[10], raw[11]]) as usize, 12),
        None => return Err(bad()),
    };
    let h = std::str::from_utf8(raw.get(at..at + len).ok_or_else(bad)?).map_err(|_| bad())?;
    if h.contains("'fortran_order': True") {
        return Err(bad());
    }
    let descr = h.split("'descr':").nth(1).and_then(|s| s.split('\'').nth(1)).ok_or_else(bad)?;
    let shape = h
        .split("'shape':")
        .nth(1)
        .and_then(|s| s.split('(').nth(1))
        .and_then(|s| s.split(')').next())
        .ok_or_else(bad)?;
    let shape = shape
        .split(',')
        .map(str::trim)
        .filter(|s| !s.is_empty())
        .map(|s| s.parse().map_err(|_| bad()))
        .collect::<Res<_>>()?;
    Ok((descr.into(), shape, at + len))
}

fn store_buffer(m: &Machine, path: &Path, b: &Loaded) -> Res<()> {
    let mut data = vec![0; b.size];
    m.read(b.addr, &mut data).map_err(|e| e.to_string())?;
    let mut out = vec![];
    if path.extension().is_some_and(|e| e == "npy") {
        let dims: String = b.shape.iter().map(|d| format!("{d},")).collect();
        let mut h = format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({dims}), }}", b.descr);
        while (h.len() + 11) % 64 != 0 {
            h.push(' ');
        }
        h.push('\n');
        out.extend_from_slice(b"\x93NUMPY\x01\x00");
        out.extend_from_slice(&(h.len() as u16).to_le_bytes());
        out.extend_from_slice(h.as_bytes());
    }
    out.extend_from_slice(&data);
    std::fs::write(path, out).map_err(|e| format!("{}: {e}", path.display()))
}

fn param(p: &Param, bufs: &BTreeMap<String, Loaded>) -> Res<ParamValue> {
    Ok(ParamValue::bytes(&param_bytes(p, bufs)?.0))
}

/// Bytes of a parameter and its alignment.
fn param_bytes(p: &Param, bufs: &BTreeMap<String, Loaded>) -> Res<(Vec<u8>, usize)> {
    let find = |n: &str| bufs.get(n).ok_or_else(|| format!("no buffer {n}"));
    let scalar = |b: Vec<u8>| {
        let n = b.len();
        (b, n)
    };
    Ok(match p {
        Param::U8(v) => scalar(v.to_le_bytes().to_vec()),
        Param::I8(v) => scalar(v.to_le_bytes().to_vec()),
        Param::U16(v) => scalar(v.to_le_bytes().to_vec()),
        Param::I16(v) => scalar(v.to_le_bytes().to_vec()),
        Param::U32(v) => scalar(v.to_le_bytes().to_vec()),
        Param::I32(v) => scalar(v.to_le_bytes().to_vec()),
        Param::U64(v) => scalar(v.to_le_bytes().to_vec()),
        Param::I64(v) => scalar(v.to_le_bytes().to_vec()),
        Param::F32(v) => scalar(v.to_le_bytes().to_vec()),
        Param::F64(v) => scalar(v.to_le_bytes().to_vec()),
        Param::Ptr(Pointer::Null(())) => scalar(0u64.to_le_bytes().to_vec()),
        Param::Ptr(Pointer::Name(n)) => scalar(find(n)?.addr.to_le_bytes().to_vec()),
        Param::Ptr(Pointer::At { buffer, offset }) => {
            scalar(find(buffer)?.addr.wrapping_add_signed(*offset).to_le_bytes().to_vec())
        }
        Param::Hex(h) => {
            let h: Vec<char> = h.chars().filter(|c| !c.is_whitespace()).collect();
            let b = h
                .chunks(2)
                .map(|c| u8::from_str_radix(&c.iter().collect::<String>(), 16).map_err(|e| format!("hex: {e}")))
                .collect::<Res<Vec<u8>>>()?;
            (b, 1)
        }
        Param::TensorMap(t) => {
            let addr = find(&t.buffer)?.addr.wrapping_add_signed(t.offset);
            let mut map =
                TensorMap::tiled(t.dtype, addr, &t.dims, &t.strides, &t.boxes, t.swizzle).map_err(|e| e.to_string())?;
            for (d, s) in map.element_strides.iter_mut().zip(&t.element_strides) {
                *d = *s;
            }
            map.nan_fill = t.nan_fill;
            map.validate().map_err(|e| e.to_string())?;
            (map.encode().to_vec(), 64)
        }
        Param::Struct(members) => {
            let (mut out, mut widest) = (vec![], 1);
            for m in members {
                let (b, align) = param_bytes(m, bufs)?;
                out.resize(out.len().next_multiple_of(align), 0);
                out.extend_from_slice(&b);
                widest = widest.max(align);
            }
            out.resize(out.len().next_multiple_of(widest), 0);
            (out, widest)
        }
    })
}
