//! `cargo xtask kernels`: compiles every row and writes, or compares, the bundles.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use jfa_driver::bundle::{ImageKind, ImageRange, Parameter};
use jfa_driver::{Arch, Bundle, KernelInfo, cubin};

use crate::Places;
use crate::rows::{Family, Row};
use crate::sass;
use crate::toolchain::{self, Compiled, Notes, Toolchain, Usage};

/// A source states numbers for the launcher in `__constant__ unsigned` variables with this prefix.
const CONSTANT_PREFIX: &str = "jfa_";
/// The one among them that is its dynamic shared memory, in bytes.
const SHARED_SYMBOL: &str = "jfa_dynamic_shared";
/// File of the table of loops, beside the bundles.
const LOOPS_TABLE: &str = "loops.md";
/// Shared memory a block can have beside what the system keeps, on every architecture compiled for.
const MOST_SHARED: u32 = 232_448;

#[derive(clap::Args)]
pub struct Options {
    /// Compare the committed bundles with what the sources give, byte by byte, instead of writing them.
    #[arg(long)]
    check: bool,
    /// With --check: compile one kernel in N, drawn by the digests of the sources (so that each change draws others), and
    /// compare the digests of sources, options and compilers that the bundles record for all of them.
    #[arg(long, value_name = "N", requires = "check", conflicts_with = "only", default_value_t = 1)]
    sample: u32,
    /// Compile only kernels whose name, crate/name or architecture contains this (repeatable); the others stay as they
    /// are in the bundles.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Compilations at once (default: one per processor).
    #[arg(long, short)]
    jobs: Option<usize>,
    /// Ignore earlier results.
    #[arg(long)]
    fresh: bool,
    /// Write every kernel alone instead of the bundles: DIR/CRATE/ARCH/NAME.cubin, and NAME.json with its tags and what its compiler
    /// derived. That is what the device tests (`jfa-*/tests/*_device.py`, `jfa-cuda/tests/device.py`) take.
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// List the kernels and exit.
    #[arg(long)]
    list: bool,
}

impl Options {
    fn wants(&self, family: &Family, row: &Row, arch: Arch) -> bool {
        let name = format!("{}/{}", family.owner, row.name);
        self.only.is_empty() || self.only.iter().any(|o| name.contains(o.as_str()) || arch.to_string() == *o)
    }
}

/// One compilation: a row for an architecture.
struct Job<'a> {
    row: &'a Row,
    arch: Arch,
    key: String,
}

pub fn run(places: &Places, options: &Options) -> Result<()> {
    let families = Family::find_all(&places.root)?;
    ensure!(!families.is_empty(), "no crate has a kernels/kernels.toml");
    if options.list {
        for f in &families {
            for r in &f.rows {
                let archs: Vec<_> = r.archs.iter().map(ToString::to_string).collect();
                println!("{}/{}  {}  {}", f.owner, r.name, f.toolchain, archs.join(" "));
            }
        }
        return Ok(());
    }
    let mut differences = Vec::new();
    let mut matched = false;
    for family in &families {
        let wanted = |r: &Row| r.archs.iter().any(|a| options.wants(family, r, *a));
        if family.rows.iter().any(wanted) {
            matched = true;
            differences.extend(build_family(places, options, family)?);
        }
    }
    ensure!(matched, "no kernel matches {}", options.only.join(", "));
    if differences.is_empty() {
        return Ok(());
    }
    bail!("committed bundles differ from the sources (run `cargo xtask kernels`):\n  {}", differences.join("\n  "))
}

/// Returns what differs, when checking.
fn build_family(places: &Places, options: &Options, family: &Family) -> Result<Vec<String>> {
    let start = Instant::now();
    let toolchain = toolchain::of(places, &family.toolchain)?;
    let mut jobs = Vec::new();
    for row in &family.rows {
        for &arch in row.archs.iter().filter(|a| options.wants(family, row, **a)) {
            let key = toolchain.key(family, row, arch).with_context(|| format!("kernel '{}'", row.name))?;
            jobs.push(Job { row, arch, key });
        }
    }
    let mut differences = Vec::new();
    if options.sample > 1 {
        differences.extend(compare_digests(family, &jobs)?);
        jobs.retain(|job| drawn(&job.key, options.sample));
    }
    // What is compiled now is not everything: the rest of a bundle stays as it is.
    let partial = !options.only.is_empty() || options.sample > 1;
    let (compiled, fresh) = compile_all(places, options, family, &*toolchain, &jobs)?;

    // One list of kernels per architecture and kind.
    let mut lists: BTreeMap<String, (Arch, Vec<(KernelInfo, Compiled)>)> = BTreeMap::new();
    let mut failures = Vec::new();
    for job in &jobs {
        let output = &compiled[&job.key];
        match describe(&*toolchain, job, output) {
            Ok(info) => {
                let list = lists.entry(job.arch.to_string()).or_insert((job.arch, Vec::new()));
                list.1.push((info, output.clone()));
            }
            Err(e) => failures.push(format!("{} for {}: {e:#}", job.row.name, job.arch)),
        }
    }
    ensure!(
        failures.is_empty(),
        "{} of {} kernels are not fit:\n  {}",
        failures.len(),
        jobs.len(),
        failures.join("\n  ")
    );

    if let Some(folder) = &options.out {
        write_alone(&folder.join(&family.owner), &jobs, &compiled)?;
        println!("{}: {} kernels in {}", family.owner, jobs.len(), folder.display());
        return Ok(Vec::new());
    }
    let versions = toolchain.versions();
    let mut outputs: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    let mut table = Vec::new();
    for arch in family.archs() {
        let new = lists.remove(&arch.to_string()).map(|l| l.1).unwrap_or_default();
        for kind in [ImageKind::Cubin, ImageKind::Ptx] {
            let path = bundle_path(family, arch, kind);
            let image = |c: &Compiled| if kind == ImageKind::Cubin { c.cubin.clone() } else { c.ptx.clone() };
            let mut kernels: Vec<_> = new.iter().map(|(i, c)| (i.clone(), image(c))).collect();
            if partial {
                let old = std::fs::read(&path).ok().map(Bundle::from_vec).transpose()?;
                if options.check {
                    differences.extend(compare_some(&path, old.as_ref(), &kernels)?);
                    continue;
                }
                if let Some(old) = old {
                    keep_others(family, arch, &old, &mut kernels)?;
                }
            }
            if kind == ImageKind::Cubin {
                table.extend(kernels.iter().map(|(i, _)| (arch, i.clone())));
            }
            outputs.push((path, Bundle::write(kind, &family.owner, arch, &versions, kernels)?));
        }
    }
    if options.check && partial {
        println!("{}: {} kernels compared in {:.1} s", family.owner, jobs.len(), start.elapsed().as_secs_f32());
        return Ok(differences);
    }
    outputs.push((family.bundles.join("resources.md"), resources(family, table).into_bytes()));
    let loops_path = family.bundles.join(LOOPS_TABLE);
    let mut rows: Vec<_> = jobs
        .iter()
        .filter_map(|job| {
            let loops = compiled[&job.key].notes.loops.as_ref()?;
            let name = job.row.name.as_str();
            Some((job.arch, name, sass::table_rows(&job.arch.to_string(), name, loops)))
        })
        .collect();
    if partial && loops_path.exists() {
        rows.extend(kept_loops(family, &jobs, &std::fs::read_to_string(&loops_path)?));
    }
    if !rows.is_empty() {
        outputs.push((loops_path, work_loops(family, rows).into_bytes()));
    }
    if options.check {
        for (path, bytes) in &outputs {
            differences.extend(compare_whole(path, bytes));
        }
        differences.extend(strays(family, &outputs)?);
    } else {
        std::fs::create_dir_all(&family.bundles)?;
        for (path, bytes) in &outputs {
            std::fs::write(path, bytes)?;
        }
        for stray in strays(family, &outputs)? {
            eprintln!("warning: {stray}");
        }
    }
    let bytes: usize = outputs.iter().map(|o| o.1.len()).sum();
    println!(
        "{}: {} kernels ({fresh} compiled now) in {:.1} s, {} in {} files {}",
        family.owner,
        jobs.len(),
        start.elapsed().as_secs_f32(),
        size(bytes),
        outputs.len(),
        if options.check { "compared" } else { "written" }
    );
    Ok(differences)
}

/// Every kernel in files of its own.
fn write_alone(folder: &Path, jobs: &[Job], compiled: &BTreeMap<String, Compiled>) -> Result<()> {
    for job in jobs {
        let (output, folder) = (&compiled[&job.key], folder.join(job.arch.to_string()));
        std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let place = |ending: &str| folder.join(format!("{}.{ending}", job.row.name));
        std::fs::write(place("cubin"), &output.cubin)?;
        let notes = serde_json::json!({ "tags": job.row.tags, "derived": output.notes.derived });
        std::fs::write(place("json"), serde_json::to_vec_pretty(&notes)?)?;
    }
    Ok(())
}

fn size(bytes: usize) -> String {
    format!("{} KiB", bytes.div_ceil(1024))
}

fn bundle_path(family: &Family, arch: Arch, kind: ImageKind) -> PathBuf {
    let kind = match kind {
        ImageKind::Cubin => "cubin",
        ImageKind::Ptx => "ptx",
    };
    family.bundles.join(format!("{}.{arch}.{kind}.bundle", family.bundle))
}

/// Compiles what the cache does not have; returns everything by key, and how many were compiled.
fn compile_all(
    places: &Places,
    options: &Options,
    family: &Family,
    toolchain: &dyn Toolchain,
    jobs: &[Job],
) -> Result<(BTreeMap<String, Compiled>, usize)> {
    let cache = places.target.join("kernels");
    let mut todo: BTreeMap<&str, &Job> = BTreeMap::new();
    let mut done = BTreeMap::new();
    for job in jobs {
        if done.contains_key(&job.key) || todo.contains_key(job.key.as_str()) {
            continue;
        }
        match read_cached(&cache.join(&job.key)) {
            Some(c) if !options.fresh => {
                done.insert(job.key.clone(), c);
            }
            _ => {
                todo.insert(&job.key, job);
            }
        }
    }
    let todo: Vec<_> = todo.into_values().collect();
    let fresh = todo.len();
    let done = Mutex::new(done);
    let failures = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let threads = options.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into)).max(1);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(fresh) {
            scope.spawn(|| {
                while let Some(job) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = Instant::now();
                    match compile_one(&cache, family, toolchain, job) {
                        Ok(c) => {
                            let seconds = start.elapsed().as_secs_f32();
                            eprintln!("  {} for {}: {seconds:.1} s, {}", job.row.name, job.arch, size(c.cubin.len()));
                            lock(&done).insert(job.key.clone(), c);
                        }
                        Err(e) => lock(&failures).push(format!("{} for {}: {e:#}", job.row.name, job.arch)),
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    failures.sort();
    ensure!(failures.is_empty(), "{} of {fresh} compilations failed:\n{}", failures.len(), failures.join("\n"));
    Ok((done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner), fresh))
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn read_cached(folder: &Path) -> Option<Compiled> {
    let notes: Notes = serde_json::from_slice(&std::fs::read(folder.join("notes.json")).ok()?).ok()?;
    let read = |name| std::fs::read(folder.join(name)).ok();
    Some(Compiled { cubin: read("kernel.cubin")?, ptx: read("kernel.ptx")?, notes })
}

fn compile_one(cache: &Path, family: &Family, toolchain: &dyn Toolchain, job: &Job) -> Result<Compiled> {
    let scratch = cache.join(format!("{}.{}", job.key, std::process::id()));
    let _ = std::fs::remove_dir_all(&scratch);
    std::fs::create_dir_all(&scratch)?;
    let compiled = toolchain.compile(family, job.row, job.arch, &scratch);
    let _ = std::fs::remove_dir_all(&scratch);
    let compiled = compiled?;
    // Kept under the digest of its sources: they must still be these.
    ensure!(toolchain.key(family, job.row, job.arch)? == job.key, "a source changed during the compilation");
    // Complete folders only: written aside, then renamed.
    std::fs::create_dir_all(&scratch)?;
    std::fs::write(scratch.join("kernel.cubin"), &compiled.cubin)?;
    std::fs::write(scratch.join("kernel.ptx"), &compiled.ptx)?;
    std::fs::write(scratch.join("notes.json"), serde_json::to_vec_pretty(&compiled.notes)?)?;
    let place = cache.join(&job.key);
    let _ = std::fs::remove_dir_all(&place);
    std::fs::rename(&scratch, &place)?;
    Ok(compiled)
}

/// The manifest entry: what the row declares, compared with what the cubin says of itself.
fn describe(toolchain: &dyn Toolchain, job: &Job, compiled: &Compiled) -> Result<KernelInfo> {
    let (row, notes) = (job.row, &compiled.notes);
    let derived = notes.derived.as_ref();
    let entry = derived.map_or(&row.entry, |d| &d.entry);
    let code = cubin::parse(&compiled.cubin)?;
    let found = code.kernels.get(entry).with_context(|| {
        let names: Vec<_> = code.kernels.keys().map(String::as_str).collect();
        format!("no kernel '{entry}' in the cubin, there are: {}", names.join(", "))
    })?;
    ensure!(
        String::from_utf8_lossy(&compiled.ptx).contains(&format!(".entry {entry}(")),
        "no kernel '{entry}' in the PTX"
    );
    let parameters = parameters(toolchain, row, notes, found)?;
    let threads = match (found.threads, derived.map(|d| d.threads)) {
        (Some([x, 1, 1]), None) => x,
        (Some([x, 1, 1]), Some(d)) if x == d => x,
        (None, Some(d)) => d,
        (Some(t), Some(d)) => bail!("{d} threads by the metadata, {t:?} in the cubin"),
        (Some(t), None) => bail!("blocks of {t:?} threads are not supported"),
        (None, None) => bail!("no __launch_bounds__, so that nothing says how many threads a block has"),
    };
    let declared_cluster = derived.map_or(row.cluster, |d| d.cluster);
    let cluster = match found.cluster {
        Some(c) if declared_cluster == [1, 1, 1] || declared_cluster == c => c,
        Some(c) => bail!("cluster {declared_cluster:?} declared, {c:?} compiled in"),
        None => declared_cluster,
    };
    let shared_dynamic = match (code.constants.get(SHARED_SYMBOL), derived.map(|d| d.shared_dynamic)) {
        (Some(&c), None) => c,
        (Some(&c), Some(d)) if c == d => c,
        (Some(c), Some(d)) => {
            bail!("dynamic shared memory: {d} bytes declared, {c} in the source's {SHARED_SYMBOL}")
        }
        (None, d) => d.unwrap_or(0),
    };
    let usage = notes.resources.get(entry).copied().unwrap_or_default();
    let Usage { mut figures, shared_static } = usage;
    figures.code_bytes = found.code_bytes;
    if figures.registers == 0 {
        figures.registers = found.registers;
    }
    figures.tensor_memory_columns = derived.map_or(0, |d| d.tensor_memory_columns);
    ensure!(
        shared_static + shared_dynamic <= MOST_SHARED,
        "{} bytes of shared memory, {MOST_SHARED} exist",
        shared_static + shared_dynamic
    );
    if let Some(loops) = &notes.loops {
        // Where the loops are known, they are what counts.
        for l in loops {
            let local = l.count("local");
            ensure!(
                local <= row.allow_local,
                "{local} accesses to local memory in the loop at {:#x} of {} instructions, allowed are {}",
                l.address,
                l.instructions,
                row.allow_local
            );
        }
    } else {
        for (what, bytes) in [
            ("spill stores", figures.spill_store_bytes),
            ("spill loads", figures.spill_load_bytes),
            ("stack", figures.stack_bytes),
            ("local memory", figures.local_bytes),
        ] {
            ensure!(bytes == 0, "{bytes} bytes of {what} per thread; registers must hold everything");
        }
    }
    Ok(KernelInfo {
        name: row.name.clone(),
        entry: entry.clone(),
        tags: row.tags.clone(),
        constants: match derived {
            Some(d) => d.constants.clone(),
            None => code
                .constants
                .iter()
                .filter(|(name, _)| *name != SHARED_SYMBOL)
                .filter_map(|(name, value)| Some((name.strip_prefix(CONSTANT_PREFIX)?.to_owned(), *value)))
                .collect(),
        },
        parameters,
        threads,
        shared_static,
        shared_dynamic,
        cluster,
        cluster_compiled: found.cluster.is_some(),
        programmatic: derived.is_some_and(|d| d.programmatic),
        promises: derived.map_or(&row.promises, |d| &d.promises).clone(),
        resources: figures,
        source_sha256: job.key.clone(),
        image: ImageRange { offset: 0, bytes: 0, sha256: String::new() },
    })
}

fn parameters(
    toolchain: &dyn Toolchain,
    row: &Row,
    notes: &Notes,
    found: &cubin::CubinKernel,
) -> Result<Vec<Parameter>> {
    // Name, kind, box, the size where it is claimed, and the promise.
    let listed: Vec<_> = match (toolchain.declared(row), &notes.derived) {
        (Some(p), _) => p.iter().map(|p| (&p.name, p.kind, &p.tile, p.kind.bytes(), 1)).collect(),
        (None, Some(d)) => {
            d.parameters.iter().map(|p| (&p.name, p.kind, &p.tile, Some(p.bytes), p.divisible)).collect()
        }
        (None, None) => bail!("the compiler left no parameter list"),
    };
    ensure!(
        listed.len() == found.parameters.len(),
        "{} parameters listed, the cubin has {}",
        listed.len(),
        found.parameters.len()
    );
    listed
        .into_iter()
        .zip(&found.parameters)
        .enumerate()
        .map(|(i, ((name, kind, tile, bytes, divisible), real))| {
            ensure!(
                bytes.is_none_or(|b| b == real.bytes),
                "parameter {i} '{name}' ({kind:?}) has {} bytes in the cubin, {} by its kind",
                real.bytes,
                bytes.unwrap_or_default()
            );
            Ok(Parameter { name: name.clone(), kind, bytes: real.bytes, offset: real.offset, tile: *tile, divisible })
        })
        .collect()
}

/// Takes over every kernel that was not compiled now and is still listed.
fn keep_others(family: &Family, arch: Arch, old: &Bundle, kernels: &mut Vec<(KernelInfo, Vec<u8>)>) -> Result<()> {
    for (i, k) in old.kernels().iter().enumerate() {
        let listed = family.rows.iter().any(|r| r.name == k.name && r.archs.contains(&arch));
        if listed && kernels.iter().all(|(n, _)| n.name != k.name) {
            kernels.push((k.clone(), old.image(i)?.to_vec()));
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a kernel is among the one in `n` that are compiled; `key` is hexadecimal.
fn drawn(key: &str, n: u32) -> bool {
    key.get(..8).and_then(|k| u32::from_str_radix(k, 16).ok()).is_none_or(|k| k % n == 0)
}

/// Differences of the kernels' names and digests of sources from those the committed bundles record.
fn compare_digests(family: &Family, jobs: &[Job]) -> Result<Vec<String>> {
    let mut out = Vec::new();
    for arch in family.archs() {
        let new: BTreeMap<_, _> =
            jobs.iter().filter(|j| j.arch == arch).map(|j| (j.row.name.as_str(), j.key.as_str())).collect();
        for kind in [ImageKind::Cubin, ImageKind::Ptx] {
            let path = bundle_path(family, arch, kind);
            let Ok(file) = std::fs::read(&path) else {
                out.push(format!("{} does not exist", path.display()));
                continue;
            };
            let bundle = Bundle::from_vec(file)?;
            bundle.verify()?;
            let old: BTreeMap<_, _> =
                bundle.kernels().iter().map(|k| (k.name.as_str(), k.source_sha256.as_str())).collect();
            let names: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
            let differ = names.into_iter().filter(|n| old.get(*n) != new.get(*n));
            out.extend(differ.map(|n| format!("{}: the sources of kernel '{n}' differ", name_of(&path))));
        }
    }
    Ok(out)
}

/// Differences of some kernels from those in a committed bundle.
fn compare_some(path: &Path, old: Option<&Bundle>, kernels: &[(KernelInfo, Vec<u8>)]) -> Result<Vec<String>> {
    let Some(old) = old else { return Ok(vec![format!("{} does not exist", path.display())]) };
    let mut out = Vec::new();
    for (info, image) in kernels {
        let Some(i) = old.kernels().iter().position(|k| k.name == info.name) else {
            out.push(format!("{}: kernel '{}' is missing", name_of(path), info.name));
            continue;
        };
        let mut expected = info.clone();
        expected.image = old.kernels()[i].image.clone();
        if old.image(i)? != image || expected != old.kernels()[i] {
            out.push(format!("{}: kernel '{}' differs", name_of(path), info.name));
        }
    }
    Ok(out)
}

/// Byte comparison of a file; where it fails, which kernels are the cause.
fn compare_whole(path: &Path, bytes: &[u8]) -> Option<String> {
    let name = name_of(path);
    let old = match std::fs::read(path) {
        Ok(old) if old == bytes => return None,
        Ok(old) => old,
        Err(e) => return Some(format!("{name}: {e}")),
    };
    let (Ok(old), Ok(new)) = (Bundle::from_vec(old), Bundle::from_vec(bytes.to_vec())) else {
        return Some(format!("{name} differs"));
    };
    let find = |b: &Bundle, n: &str| b.kernels().iter().find(|k| k.name == n).cloned();
    let mut names: Vec<_> = old.kernels().iter().chain(new.kernels()).map(|k| k.name.clone()).collect();
    names.sort();
    names.dedup();
    let same = |n: &String| match (find(&old, n), find(&new, n)) {
        (Some(a), Some(b)) => {
            KernelInfo { image: b.image.clone(), ..a.clone() } == b && a.image.sha256 == b.image.sha256
        }
        _ => false,
    };
    names.retain(|n| !same(n));
    Some(if names.is_empty() { format!("{name} differs") } else { format!("{name} differs in {}", names.join(", ")) })
}

/// Files among the bundles that no kernel accounts for.
fn strays(family: &Family, outputs: &[(PathBuf, Vec<u8>)]) -> Result<Vec<String>> {
    let mut out = Vec::new();
    if family.bundles.is_dir() {
        for entry in std::fs::read_dir(&family.bundles)? {
            let path = entry?.path();
            if outputs.iter().all(|o| o.0 != path) && !path.ends_with(LOOPS_TABLE) {
                out.push(format!("{}: made by no kernel of {}", name_of(&path), family.owner));
            }
        }
    }
    out.sort();
    Ok(out)
}

/// Of the table of work loops as it is, the rows of kernels that are not compiled now.
fn kept_loops<'a>(family: &'a Family, jobs: &[Job], table: &str) -> Vec<(Arch, &'a str, String)> {
    let of = |line: &str| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let (arch, kernel) = (cells.next()?, cells.next()?);
        // A kernel may have a row of its own for every architecture.
        let mut named =
            family.rows.iter().filter(|r| r.name == kernel).flat_map(|r| r.archs.iter().map(move |a| (r, *a)));
        let (row, arch) = named.find(|(_, a)| a.to_string() == arch)?;
        let compiled = jobs.iter().any(|job| job.arch == arch && job.row.name == kernel);
        (!compiled).then(|| (arch, row.name.as_str(), format!("{line}\n")))
    };
    table.lines().filter_map(of).collect()
}

/// The table of what the work loops of each kernel are made of, from the rows of each: those of one kernel in their order.
fn work_loops(family: &Family, mut rows: Vec<(Arch, &str, String)>) -> String {
    rows.sort_by(|a, b| (a.0.capability, a.1).cmp(&(b.0.capability, b.1)));
    let mut out = format!(
        "# Work loops of the kernels of {}\n\nWritten by `cargo xtask kernels`, from the disassembler's listing: every innermost \
         loop with matrix products, exponentials or bulk copies, by the address of its first instruction. Counts are \
         instructions of one warp and one trip, all branches of the loop together. Local memory in any of them fails the \
         build, beyond what `allow_local` of kernels.toml grants a kernel.\n\n{}",
        family.owner,
        sass::table_head()
    );
    out.extend(rows.into_iter().map(|(_, _, text)| text));
    out
}

/// The table of what each kernel uses.
fn resources(family: &Family, mut rows: Vec<(Arch, KernelInfo)>) -> String {
    rows.sort_by(|a, b| (a.0.capability, &a.1.name).cmp(&(b.0.capability, &b.1.name)));
    let tensor_memory = rows.iter().any(|(_, k)| k.resources.tensor_memory_columns > 0);
    let rule = if family.toolchain == "triton" {
        "Local memory in a work loop fails the build ([loops.md](loops.md)); elsewhere it is listed here."
    } else {
        "Spills, stack and local memory are 0 everywhere: anything else fails the build."
    };
    let mut columns = vec![
        "arch",
        "kernel",
        "threads",
        "registers",
        "spill st+ld, B",
        "stack, B",
        "local, B",
        "shared static, B",
        "shared dynamic, B",
        "cluster",
        "code, B",
    ];
    if tensor_memory {
        columns.push("tensor memory, columns");
    }
    let mut out = format!(
        "# What the kernels of {} use\n\nWritten by `cargo xtask kernels`, from the assembler's and the disassembler's \
         figures. Registers are those at launch; kernels with warp roles redistribute them. {rule}\n\n| {} |\n|{}\n",
        family.owner,
        columns.join(" | "),
        "---|".repeat(columns.len())
    );
    for (arch, k) in rows {
        let r = &k.resources;
        let cluster = k.cluster.map(|c| c.to_string()).join("x");
        let _ = write!(
            out,
            "| {arch} | {} | {} | {} | {}+{} | {} | {} | {} | {} | {cluster} | {} |",
            k.name,
            k.threads,
            r.registers,
            r.spill_store_bytes,
            r.spill_load_bytes,
            r.stack_bytes,
            r.local_bytes,
            k.shared_static,
            k.shared_dynamic,
            r.code_bytes
        );
        out += &if tensor_memory { format!(" {} |\n", r.tensor_memory_columns) } else { "\n".to_owned() };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use jfa_driver::bundle::Resources;

    fn info(name: &str, key: &str) -> KernelInfo {
        KernelInfo {
            name: name.to_owned(),
            entry: name.to_owned(),
            tags: BTreeMap::new(),
            constants: BTreeMap::new(),
            parameters: Vec::new(),
            threads: 128,
            shared_static: 0,
            shared_dynamic: 0,
            cluster: [1, 1, 1],
            cluster_compiled: false,
            programmatic: false,
            promises: Vec::new(),
            resources: Resources::default(),
            source_sha256: key.to_owned(),
            image: ImageRange { offset: 0, bytes: 0, sha256: String::new() },
        }
    }

    fn row(name: &str) -> Row {
        Row {
            name: name.to_owned(),
            source: PathBuf::from("a.py"),
            entry: name.to_owned(),
            archs: vec![Arch::SM_90A],
            defines: BTreeMap::new(),
            options: BTreeMap::new(),
            blocks: BTreeMap::new(),
            tags: BTreeMap::new(),
            parameters: Vec::new(),
            promises: Vec::new(),
            cluster: [1, 1, 1],
            allow_local: 0,
        }
    }

    fn family_in(folder: &Path, rows: Vec<Row>) -> Family {
        Family {
            owner: "owner".to_owned(),
            folder: folder.to_owned(),
            bundles: folder.to_owned(),
            bundle: "b".to_owned(),
            toolchain: "triton".to_owned(),
            flags: Vec::new(),
            rows,
        }
    }

    #[test]
    fn work_loops_of_kernels_that_are_not_compiled_stay() {
        let mut one_elsewhere = row("one");
        one_elsewhere.archs = vec![Arch::SM_100A];
        let family = family_in(Path::new("."), vec![row("one"), row("two"), one_elsewhere]);
        let line =
            |arch: Arch, name: &str, at: &str| (arch, name.to_owned(), format!("| {arch} | {name} | {at} | 5 |\n"));
        let old = [
            line(Arch::SM_90A, "gone", "0x10"),
            line(Arch::SM_90A, "one", "0x20"),
            line(Arch::SM_90A, "one", "0x08"),
            line(Arch::SM_90A, "two", "0x30"),
            line(Arch::SM_100A, "one", "0x40"),
        ];
        let table = |lines: &[(Arch, String, String)]| {
            work_loops(&family, lines.iter().map(|(a, n, t)| (*a, n.as_str(), t.clone())).collect())
        };
        let jobs = [Job { row: &family.rows[1], arch: Arch::SM_90A, key: "01".to_owned() }];
        let mut rows = vec![(Arch::SM_90A, "two", "| sm_90a | two | 0x99 | 6 |\n".to_owned())];
        rows.extend(kept_loops(&family, &jobs, &table(&old)));
        let new = work_loops(&family, rows);
        let expected = [old[1].clone(), old[2].clone(), line(Arch::SM_90A, "two", "0x99"), old[4].clone()];
        assert_eq!(new, table(&expected).replace("| two | 0x99 | 5 |", "| two | 0x99 | 6 |"));
    }

    #[test]
    fn digests_of_all_kernels_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let family = family_in(folder.path(), vec![row("one"), row("two")]);
        let job = |i: usize, key: &str| Job { row: &family.rows[i], arch: Arch::SM_90A, key: key.to_owned() };
        let jobs = [job(0, "01"), job(1, "02")];
        let missing = compare_digests(&family, &jobs).unwrap();
        assert_eq!(missing.len(), 2, "{missing:?}");
        let write = |keys: &[(&str, &str)]| {
            for kind in [ImageKind::Cubin, ImageKind::Ptx] {
                let kernels = keys.iter().map(|(name, key)| (info(name, key), vec![1])).collect();
                let bytes = Bundle::write(kind, "owner", Arch::SM_90A, &[], kernels).unwrap();
                std::fs::write(bundle_path(&family, Arch::SM_90A, kind), bytes).unwrap();
            }
        };
        write(&[("one", "01"), ("two", "02")]);
        assert!(compare_digests(&family, &jobs).unwrap().is_empty());
        write(&[("one", "01"), ("two", "03"), ("three", "04")]);
        let differ = compare_digests(&family, &jobs).unwrap();
        let of = |name: &str| differ.iter().filter(|d| d.contains(&format!("'{name}'"))).count();
        assert_eq!((of("one"), of("two"), of("three")), (0, 2, 2), "{differ:?}");
    }

    #[test]
    fn one_in_n_is_drawn_by_the_digest() {
        assert!(drawn("00000008ff", 4) && !drawn("00000009ff", 4));
        assert!(drawn("anything", 4), "what cannot be drawn is compiled");
        let all = (0..1000u32).filter(|i| drawn(&format!("{:08x}", i.wrapping_mul(2_654_435_761)), 4)).count();
        assert!((200..300).contains(&all), "{all}");
    }
}
