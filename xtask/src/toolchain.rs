//! Compilers: each in its own virtual environment with pinned, hash-checked wheels.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use jfa_driver::Arch;
use jfa_driver::bundle::{Promise, Resources, hex};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Places;
use crate::rows::{Family, Parameter, Row};
use crate::sass::{self, WorkLoop};

/// What a compilation gives.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// PTX text.
    pub ptx: Vec<u8>,
    /// What only the compiler knows.
    pub notes: Notes,
}

/// What only the compiler knows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notes {
    /// Figures, per kernel symbol.
    pub resources: std::collections::BTreeMap<String, Usage>,
    /// Facts that replace the row's, where the compiler derives them.
    #[serde(default)]
    pub derived: Option<Derived>,
    /// Work loops of the kernel, where the compiler's output is looked at that closely.
    #[serde(default)]
    pub loops: Option<Vec<WorkLoop>>,
}

/// What a kernel uses.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Figures for the manifest.
    #[serde(flatten)]
    pub figures: Resources,
    /// Static shared memory, in bytes.
    pub shared_static: u32,
}

/// Launch facts a compiler derives from the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Derived {
    /// Symbol.
    pub entry: String,
    /// Parameters in order.
    pub parameters: Vec<DerivedParameter>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared_dynamic: u32,
    /// Blocks of a cluster, where the launch decides.
    pub cluster: [u32; 3],
    /// May start before its predecessor has ended.
    pub programmatic: bool,
    /// What the host must check.
    pub promises: Vec<Promise>,
    /// Numbers the launcher needs.
    pub constants: std::collections::BTreeMap<String, u32>,
    /// Columns of tensor memory a block allocates.
    pub tensor_memory_columns: u32,
    /// Files of the kernels' folder that took part.
    pub modules: Vec<String>,
}

/// A parameter with the size the compiler's metadata give.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DerivedParameter {
    /// Name.
    pub name: String,
    /// What it is.
    pub kind: jfa_driver::bundle::ParameterKind,
    /// Size in bytes, compared with the cubin's own.
    pub bytes: u32,
    /// The box of a tensor map.
    #[serde(default)]
    pub tile: Option<jfa_driver::bundle::Tile>,
    /// What a pointer or integer was compiled to be a multiple of.
    #[serde(default = "one")]
    pub divisible: u32,
}

const fn one() -> u32 {
    1
}

/// A compiler.
pub trait Toolchain: Sync {
    /// Names and versions, for the manifest.
    fn versions(&self) -> Vec<String>;

    /// Digest of everything a compilation's output depends on.
    fn key(&self, family: &Family, row: &Row, arch: Arch) -> Result<String>;

    /// Compiles one row for one architecture; `scratch` is an empty folder.
    fn compile(&self, family: &Family, row: &Row, arch: Arch, scratch: &Path) -> Result<Compiled>;

    /// Parameters a row must declare, or `None` when the compiler derives them.
    fn declared<'a>(&self, row: &'a Row) -> Option<&'a [Parameter]>;
}

/// The toolchain a family names.
pub fn of(places: &Places, name: &str) -> Result<Box<dyn Toolchain>> {
    Ok(match name {
        "nvcc" => Box::new(Nvcc { venv: Venv::new(places, "nvcc")? }),
        "triton" => Box::new(Triton { venv: Venv::new(places, "triton")?, nvcc: Venv::new(places, "nvcc")? }),
        other => bail!("no toolchain '{other}'"),
    })
}

/// Runs a program and returns what it printed; a failure carries that text.
fn output(command: &mut Command) -> Result<String> {
    let shown = command.get_program().to_string_lossy().into_owned();
    let out = command.output().with_context(|| format!("starting {shown}"))?;
    let text = [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    ensure!(out.status.success(), "{shown} failed ({}):\n{}", out.status, text.trim_end());
    Ok(text)
}

/// A virtual environment made from a requirements file with hashes.
struct Venv {
    folder: PathBuf,
    requirements: PathBuf,
    text: String,
    ready: OnceLock<Result<(), String>>,
}

impl Venv {
    fn new(places: &Places, name: &str) -> Result<Self> {
        let requirements = places.root.join(format!("xtask/requirements-{name}.txt"));
        let text =
            std::fs::read_to_string(&requirements).with_context(|| format!("reading {}", requirements.display()))?;
        let digest = hex(&Sha256::digest(text.as_bytes()));
        Ok(Venv {
            folder: places.target.join(format!("toolchains/{name}-{}", &digest[..16])),
            requirements,
            text,
            ready: OnceLock::new(),
        })
    }

    /// `name version` of every pinned package, without the hashes.
    fn versions(&self) -> Vec<String> {
        let lines = self.text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with(['#', '-']));
        lines.map(|l| l.split([' ', ';']).next().unwrap_or(l).replace("==", " ")).collect()
    }

    /// Makes it if it is not there.
    fn prepare(&self) -> Result<&Path> {
        let result = self.ready.get_or_init(|| self.make().map_err(|e| format!("{e:#}")));
        result.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?;
        Ok(&self.folder)
    }

    fn make(&self) -> Result<()> {
        let done = self.folder.join("complete");
        if done.is_file() {
            return Ok(());
        }
        eprintln!("installing {}", self.versions().join(", "));
        if self.folder.exists() {
            std::fs::remove_dir_all(&self.folder)?;
        }
        output(Command::new("python3").args(["-m", "venv"]).arg(&self.folder))
            .context("making a virtual environment (Debian: apt install python3-venv)")?;
        output(
            Command::new(self.folder.join("bin/python"))
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"])
                .args(["--require-hashes", "--only-binary", ":all:", "-r"])
                .arg(&self.requirements),
        )?;
        std::fs::write(done, "")?;
        Ok(())
    }

    /// `site-packages`.
    fn packages(&self) -> Result<PathBuf> {
        let lib = self.prepare()?.join("lib");
        for entry in std::fs::read_dir(&lib)? {
            let packages = entry?.path().join("site-packages");
            if packages.is_dir() {
                return Ok(packages);
            }
        }
        bail!("{} has no site-packages", lib.display());
    }
}

/// A program of the CUDA wheels.
fn cuda_tool(venv: &Venv, name: &str) -> Result<PathBuf> {
    let tool = venv.packages()?.join("nvidia/cu13/bin").join(name);
    ensure!(tool.is_file(), "{} does not exist", tool.display());
    Ok(tool)
}

/// Adds stack and local memory, as the disassembler sees them, to what the assembler said.
fn add_cuobjdump(cuobjdump: &Path, cubin: &Path, notes: &mut Notes) -> Result<()> {
    let text = output(Command::new(cuobjdump).arg("-res-usage").arg(cubin))?;
    let mut function = None;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Function ").and_then(|l| l.strip_suffix(':')) {
            function = Some(name.to_owned());
        } else if let (Some(name), true) = (&function, line.starts_with("REG:")) {
            let field = |key: &str| {
                line.split_whitespace()
                    .find_map(|f| f.strip_prefix(key))
                    .and_then(|v| v.parse::<u32>().ok())
                    .with_context(|| format!("no {key} in '{line}'"))
            };
            let usage = notes.resources.entry(name.clone()).or_default();
            usage.figures.registers = field("REG:")?;
            usage.figures.stack_bytes = usage.figures.stack_bytes.max(field("STACK:")?);
            usage.figures.local_bytes = field("LOCAL:")?;
            usage.figures.constant_bytes = field("CONSTANT[0]:")?;
        }
    }
    ensure!(function.is_some(), "cuobjdump lists no function:\n{text}");
    Ok(())
}

/// NVIDIA's CUDA compiler.
struct Nvcc {
    venv: Venv,
}

impl Nvcc {
    fn flags(family: &Family, row: &Row) -> Vec<String> {
        let defines = row.defines.iter().map(|(k, v)| format!("-D{k}={v}"));
        family.flags.iter().cloned().chain(defines).collect()
    }
}

impl Toolchain for Nvcc {
    fn versions(&self) -> Vec<String> {
        self.venv.versions()
    }

    fn key(&self, family: &Family, row: &Row, arch: Arch) -> Result<String> {
        let mut digest = Sha256::new();
        let mut add = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        add(b"nvcc 1");
        add(self.venv.text.as_bytes());
        add(arch.to_string().as_bytes());
        for flag in Self::flags(family, row) {
            add(flag.as_bytes());
        }
        for (name, text) in sources(&family.folder, &row.source)? {
            add(name.to_string_lossy().as_bytes());
            add(&text);
        }
        Ok(hex(&digest.finalize()))
    }

    fn compile(&self, family: &Family, row: &Row, arch: Arch, scratch: &Path) -> Result<Compiled> {
        let (ptx, cubin) = (scratch.join("kernel.ptx"), scratch.join("kernel.cubin"));
        let virtual_arch = format!("compute_{}", arch.number());
        // Compiled from within the folder, by relative names: no path of this machine gets into the output.
        output(
            Command::new(cuda_tool(&self.venv, "nvcc")?)
                .current_dir(&family.folder)
                .arg("-ptx")
                .arg(format!("-gencode=arch={virtual_arch},code={virtual_arch}"))
                .args(Self::flags(family, row))
                .arg(&row.source)
                .arg("-o")
                .arg(&ptx),
        )?;
        // -v always, so that the figures are of these very bytes: the flags are recorded in the cubin.
        let log = output(
            Command::new(cuda_tool(&self.venv, "ptxas")?)
                .args(["-v", "-O3"])
                .arg(format!("-arch={arch}"))
                .arg(&ptx)
                .arg("-o")
                .arg(&cubin),
        )?;
        let mut notes = assembler_notes(&log)?;
        add_cuobjdump(&cuda_tool(&self.venv, "cuobjdump")?, &cubin, &mut notes)?;
        Ok(Compiled { cubin: std::fs::read(cubin)?, ptx: std::fs::read(ptx)?, notes })
    }

    fn declared<'a>(&self, row: &'a Row) -> Option<&'a [Parameter]> {
        Some(&row.parameters)
    }
}

/// Reads `ptxas -v`. Fails on anything that makes a kernel slow without making it wrong.
fn assembler_notes(log: &str) -> Result<Notes> {
    let mut notes = Notes::default();
    let mut properties_of = None;
    let mut entry: Option<String> = None;
    let number_before = |line: &str, words: &str| -> Option<u32> {
        let head = &line[..line.find(words)?];
        head.trim_end().rsplit([' ', ',']).next()?.parse().ok()
    };
    for line in log.lines() {
        if line.contains("wgmma") && line.contains("serialized") {
            bail!("the assembler serialises matrix products: {}", line.trim());
        }
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            notes.resources.insert(name.clone(), Usage::default());
            entry = Some(name);
        } else if let Some(rest) = line.split("Function properties for ").nth(1) {
            properties_of = Some(rest.trim().to_owned());
        } else if line.contains("bytes stack frame") {
            // Device functions that were not inlined count towards the entry that is being compiled.
            let name = entry.as_ref().or(properties_of.as_ref()).context("figures before any function")?;
            let u = notes.resources.entry(name.clone()).or_default();
            let get = |words| number_before(line, words).with_context(|| format!("no '{words}' in '{line}'"));
            u.figures.stack_bytes = u.figures.stack_bytes.max(get("bytes stack frame")?);
            u.figures.spill_store_bytes += get("bytes spill stores")?;
            u.figures.spill_load_bytes += get("bytes spill loads")?;
        } else if let Some(at) = line.find("Used ") {
            let name = entry.as_ref().context("figures before any function")?;
            let u = notes.resources.entry(name.clone()).or_default();
            let used = &line[at..];
            u.figures.registers =
                number_before(used, "registers").with_context(|| format!("no registers: '{line}'"))?;
            u.figures.barriers = number_before(used, "barriers").unwrap_or(0);
            u.shared_static = number_before(used, "bytes smem").unwrap_or(0);
        }
    }
    ensure!(!notes.resources.is_empty(), "the assembler named no entry function:\n{log}");
    Ok(notes)
}

/// A source and every file it includes by a quoted name, by path relative to the folder.
fn sources(folder: &Path, source: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut seen = BTreeSet::new();
    let mut todo = vec![source.to_owned()];
    let mut out = Vec::new();
    while let Some(name) = todo.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let path = folder.join(&name);
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        for line in String::from_utf8_lossy(&text).lines() {
            let Some(rest) = line.trim_start().strip_prefix('#') else { continue };
            let Some(rest) = rest.trim_start().strip_prefix("include") else { continue };
            let Some(file) = rest.trim_start().strip_prefix('"').and_then(|r| r.split('"').next()) else { continue };
            let beside = name.parent().unwrap_or(Path::new("")).join(file);
            let included = [normal(&beside), PathBuf::from(file)];
            let Some(found) = included.iter().find(|f| folder.join(f).is_file()) else {
                bail!("{} includes \"{file}\", which does not exist", path.display());
            };
            todo.push(found.clone());
        }
        out.push((name, text));
    }
    out.sort();
    Ok(out)
}

/// Resolves `..` by text.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        if part.as_os_str() == OsStr::new("..") && out.pop() {
            continue;
        }
        out.push(part);
    }
    out
}

/// Python files and those they import from the folder, by plain statements at the beginning of a line.
fn modules<'a>(
    folder: &Path,
    roots: impl IntoIterator<Item = &'a (impl AsRef<Path> + ?Sized + 'a)>,
) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut todo: Vec<PathBuf> = roots.into_iter().map(|r| r.as_ref().to_owned()).collect();
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    while let Some(name) = todo.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let path = folder.join(&name);
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        for line in String::from_utf8_lossy(&text).lines() {
            let imported: Vec<&str> = if let Some(rest) = line.strip_prefix("from ") {
                rest.split_whitespace().take(1).collect()
            } else if let Some(rest) = line.strip_prefix("import ") {
                rest.split(',').filter_map(|m| m.split_whitespace().next()).collect()
            } else {
                continue;
            };
            let files = imported.iter().map(|m| PathBuf::from(format!("{m}.py")));
            todo.extend(files.filter(|f| folder.join(f).is_file()));
        }
        out.push((name, text));
    }
    out.sort();
    Ok(out)
}

/// What compiles a row, in a crate's folder of kernels.
const COMPILE: &str = "compile.py";

/// Triton with TLX. The crate's `kernels/compile.py` compiles one row: it gets a JSON file with the row and an empty
/// folder, and leaves `kernel.cubin`, `kernel.ptx` and `notes.json` ([`Notes`], with [`Derived`]) there.
struct Triton {
    venv: Venv,
    nvcc: Venv,
}

#[derive(Serialize)]
struct TritonRow<'a> {
    name: &'a str,
    source: &'a Path,
    entry: &'a str,
    arch: String,
    constants: &'a std::collections::BTreeMap<String, String>,
    options: &'a std::collections::BTreeMap<String, String>,
    blocks: &'a std::collections::BTreeMap<String, String>,
    tags: &'a std::collections::BTreeMap<String, String>,
}

impl Toolchain for Triton {
    fn versions(&self) -> Vec<String> {
        self.venv.versions()
    }

    fn key(&self, family: &Family, row: &Row, arch: Arch) -> Result<String> {
        let mut digest = Sha256::new();
        let mut add = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        add(b"triton 2");
        add(self.venv.text.as_bytes());
        add(&Self::row(row, arch)?);
        for (name, text) in modules(&family.folder, [Path::new(COMPILE), &row.source])? {
            add(name.to_string_lossy().as_bytes());
            add(&text);
        }
        Ok(hex(&digest.finalize()))
    }

    fn compile(&self, family: &Family, row: &Row, arch: Arch, scratch: &Path) -> Result<Compiled> {
        let request = scratch.join("row.json");
        std::fs::write(&request, Self::row(row, arch)?)?;
        output(
            Command::new(self.venv.prepare()?.join("bin/python"))
                .current_dir(&family.folder)
                // Line information would put this machine's paths into the output.
                .env("TRITON_DISABLE_LINE_INFO", "1")
                .env("TRITON_ALWAYS_COMPILE", "1")
                .env("TRITON_CACHE_DIR", scratch.join("cache"))
                .env("PYTHONHASHSEED", "0")
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .arg(COMPILE)
                .arg(&request)
                .arg(scratch),
        )?;
        let cubin = scratch.join("kernel.cubin");
        let notes = std::fs::read(scratch.join("notes.json")).context("compile.py left no notes.json")?;
        let mut notes: Notes = serde_json::from_slice(&notes).context("notes.json")?;
        let derived = notes.derived.as_ref().context("notes.json says nothing of the launch")?;
        let known = modules(&family.folder, [Path::new(COMPILE), &row.source])?;
        for module in &derived.modules {
            ensure!(
                known.iter().any(|(name, _)| name == Path::new(module)),
                "{module} took part, but no plain `import` at the top of a file names it: its changes would go unnoticed"
            );
        }
        let listing = output(Command::new(cuda_tool(&self.nvcc, "nvdisasm")?).arg("-c").arg(&cubin))?;
        notes.loops = Some(sass::work_loops(&listing, &derived.entry)?);
        add_cuobjdump(&cuda_tool(&self.nvcc, "cuobjdump")?, &cubin, &mut notes)?;
        Ok(Compiled { cubin: std::fs::read(cubin)?, ptx: std::fs::read(scratch.join("kernel.ptx"))?, notes })
    }

    fn declared<'a>(&self, _: &'a Row) -> Option<&'a [Parameter]> {
        None
    }
}

impl Triton {
    fn row(row: &Row, arch: Arch) -> Result<Vec<u8>> {
        Ok(serde_json::to_vec(&TritonRow {
            name: &row.name,
            source: &row.source,
            entry: &row.entry,
            arch: arch.to_string(),
            constants: &row.defines,
            options: &row.options,
            blocks: &row.blocks,
            tags: &row.tags,
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem, 4 bytes cmem[3]\n\
        ptxas info    : Compiling entry function 'jfa_a' for 'sm_90a'\n\
        ptxas info    : Function properties for jfa_a\n\
        \x20   16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 168 registers, used 3 barriers, 128 bytes smem\n\
        ptxas info    : Compile time = 3.261 ms\n\
        ptxas info    : Compiling entry function 'jfa_b' for 'sm_90a'\n\
        ptxas info    : Function properties for jfa_b\n\
        \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 14 registers\n";

    #[test]
    fn assembler_figures() {
        let notes = assembler_notes(LOG).unwrap();
        let a = notes.resources["jfa_a"];
        assert_eq!((a.figures.stack_bytes, a.figures.spill_store_bytes, a.figures.spill_load_bytes), (16, 8, 12));
        assert_eq!((a.figures.registers, a.figures.barriers, a.shared_static), (168, 3, 128));
        let b = notes.resources["jfa_b"];
        assert_eq!((b.figures.registers, b.figures.barriers, b.shared_static), (14, 0, 0));
        assert!(assembler_notes("nothing").is_err());
    }

    #[test]
    fn serialised_products_fail() {
        let log = format!(
            "{LOG}ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
             ill formed pipeline stage in the function 'jfa_a'\n"
        );
        assert!(assembler_notes(&log).unwrap_err().to_string().contains("C7510"));
    }

    #[test]
    fn includes_are_followed_once_and_missing_ones_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a.cu", "#include \"ptx/b.h\"\n#include <cuda.h>\n  # include \"c.h\"\n");
        write("ptx/b.h", "#include \"../c.h\"\n#include \"d.h\"\n");
        write("ptx/d.h", "");
        write("c.h", "#include \"ptx/b.h\"\n");
        write("unused.h", "");
        let names: Vec<_> = sources(folder.path(), Path::new("a.cu")).unwrap().into_iter().map(|s| s.0).collect();
        assert_eq!(names, ["a.cu", "c.h", "ptx/b.h", "ptx/d.h"].map(PathBuf::from));
        write("c.h", "#include \"gone.h\"\n");
        let e = sources(folder.path(), Path::new("a.cu")).unwrap_err().to_string();
        assert!(e.contains("\"gone.h\""), "{e}");
    }

    #[test]
    fn imports_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.py", "import triton, b\nfrom c import x, y\nimport triton.language as tl\n    import e\n");
        write("b.py", "import a\nimport d as dd\n");
        for name in ["c.py", "d.py", "e.py", "f.py"] {
            write(name, "");
        }
        let names: Vec<_> = modules(folder.path(), ["a.py"]).unwrap().into_iter().map(|m| m.0).collect();
        assert_eq!(names, ["a.py", "b.py", "c.py", "d.py"].map(PathBuf::from));
        assert!(modules(folder.path(), ["gone.py"]).unwrap_err().to_string().contains("gone.py"));
    }

    #[test]
    fn requirements_are_pinned_with_hashes() {
        for name in ["nvcc", "triton"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("requirements-{name}.txt"));
            let text = std::fs::read_to_string(path).unwrap();
            for line in text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
                assert!(line.contains("==") && line.contains("--hash=sha256:"), "{line}");
            }
        }
    }
}
