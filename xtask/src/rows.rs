//! `kernels.toml`: kernel variants as data.
//!
//! A `[[kernel]]` table with `axes` stands for every combination of their values; `{axis}` in its strings is replaced
//! by the value. See the `kernels/README.md` of each crate for the fields.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use jfa_driver::Arch;
use jfa_driver::bundle::{ParameterKind, Promise, Tile};
use serde::Deserialize;

/// A whole `kernels.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Name of the bundles.
    bundle: String,
    /// Which compilers: `nvcc` or `triton`.
    toolchain: String,
    /// Flags of every compilation.
    #[serde(default)]
    flags: Vec<String>,
    kernel: Vec<Template>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    name: String,
    source: String,
    entry: String,
    archs: Vec<String>,
    #[serde(default)]
    axes: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    defines: BTreeMap<String, String>,
    /// What is added for some values of the axes, or for one architecture.
    #[serde(default)]
    cases: Vec<Case>,
    #[serde(default)]
    options: BTreeMap<String, String>,
    #[serde(default)]
    blocks: BTreeMap<String, String>,
    #[serde(default)]
    tags: BTreeMap<String, String>,
    #[serde(default)]
    parameters: Vec<Parameter>,
    #[serde(default)]
    promises: Vec<Promise>,
    #[serde(default = "no_cluster")]
    cluster: [u32; 3],
    #[serde(default)]
    allow_local: u32,
}

/// Additions to a row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// Values of axes that must all hold; `arch` is one of them.
    when: BTreeMap<String, String>,
    #[serde(default)]
    defines: BTreeMap<String, String>,
    #[serde(default)]
    options: BTreeMap<String, String>,
    #[serde(default)]
    blocks: BTreeMap<String, String>,
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

/// The name of the architecture among the axes of a case.
const ARCH: &str = "arch";

fn no_cluster() -> [u32; 3] {
    [1, 1, 1]
}

/// A declared parameter; its size and place come from the cubin.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Name, as the host knows it.
    pub name: String,
    /// What it is.
    pub kind: ParameterKind,
    /// The box of a tensor map.
    pub tile: Option<Tile>,
}

/// One kernel variant.
#[derive(Clone, Debug)]
pub struct Row {
    /// Unique name.
    pub name: String,
    /// Source, relative to the folder of `kernels.toml`.
    pub source: PathBuf,
    /// Symbol.
    pub entry: String,
    /// Architectures to compile for.
    pub archs: Vec<Arch>,
    /// Preprocessor definitions (nvcc) or constants (triton).
    pub defines: BTreeMap<String, String>,
    /// Options of the compilation (triton).
    pub options: BTreeMap<String, String>,
    /// Rows and columns of the tensor maps' blocks (triton).
    pub blocks: BTreeMap<String, String>,
    /// What the launcher chooses by.
    pub tags: BTreeMap<String, String>,
    /// Parameters in order; empty when the toolchain derives them.
    pub parameters: Vec<Parameter>,
    /// What the host must check.
    pub promises: Vec<Promise>,
    /// Blocks of a cluster, where the launch decides.
    pub cluster: [u32; 3],
    /// Accesses to local memory a work loop may have, where the compiler insists (triton).
    pub allow_local: u32,
}

/// The kernels of one crate.
#[derive(Debug)]
pub struct Family {
    /// The crate.
    pub owner: String,
    /// Its folder with `kernels.toml` and the sources.
    pub folder: PathBuf,
    /// Where bundles go.
    pub bundles: PathBuf,
    /// Name of the bundles.
    pub bundle: String,
    /// `nvcc` or `triton`.
    pub toolchain: String,
    /// Flags of every compilation.
    pub flags: Vec<String>,
    /// The variants.
    pub rows: Vec<Row>,
}

impl Family {
    /// Every crate of the workspace that has a `kernels/kernels.toml`.
    pub fn find_all(root: &Path) -> Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(root)? {
            let folder = entry?.path().join("kernels");
            if folder.join("kernels.toml").is_file() {
                found.push(Self::read(&folder)?);
            }
        }
        found.sort_by(|a, b| a.owner.cmp(&b.owner));
        Ok(found)
    }

    /// Reads the `kernels.toml` of a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("kernels.toml");
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let krate = folder.parent().context("kernels/ stands in no crate")?;
        let owner = krate.file_name().context("the crate's folder has no name")?.to_string_lossy().into_owned();
        Self::parse(&text, owner, folder, &krate.join("bundles")).with_context(|| path.display().to_string())
    }

    fn parse(text: &str, owner: String, folder: &Path, bundles: &Path) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        ensure!(
            matches!(file.toolchain.as_str(), "nvcc" | "triton"),
            "toolchain = '{}': must be nvcc or triton",
            file.toolchain
        );
        let mut rows = Vec::new();
        for t in &file.kernel {
            expand(t, &mut rows).with_context(|| format!("kernel '{}'", t.name))?;
        }
        let mut names = BTreeSet::new();
        for r in &rows {
            let triton = file.toolchain == "triton";
            ensure!(
                triton || (r.options.is_empty() && r.blocks.is_empty()),
                "kernel '{}': options and blocks are for triton",
                r.name
            );
            ensure!(
                !triton || (file.flags.is_empty() && r.parameters.is_empty() && r.promises.is_empty()),
                "kernel '{}': flags, parameters and promises are not for triton, which has options and derives the rest",
                r.name
            );
            for arch in &r.archs {
                ensure!(names.insert((&r.name, arch.number())), "two kernels are named '{}'", r.name);
            }
        }
        Ok(Family {
            owner,
            folder: folder.to_owned(),
            bundles: bundles.to_owned(),
            bundle: file.bundle,
            toolchain: file.toolchain,
            flags: file.flags,
            rows,
        })
    }

    /// Architectures any kernel is compiled for, in order.
    pub fn archs(&self) -> Vec<Arch> {
        let mut archs: Vec<_> = self.rows.iter().flat_map(|r| r.archs.iter().copied()).collect();
        archs.sort_by_key(|a| (a.capability, a.number()));
        archs.dedup();
        archs
    }
}

fn expand(t: &Template, out: &mut Vec<Row>) -> Result<()> {
    ensure!(!t.archs.is_empty(), "archs is empty");
    let mut combinations = vec![BTreeMap::<&str, &str>::new()];
    for (axis, values) in &t.axes {
        ensure!(!values.is_empty(), "axis '{axis}' is empty");
        combinations = combinations
            .into_iter()
            .flat_map(|c| {
                values.iter().map(move |v| {
                    let mut c = c.clone();
                    c.insert(axis, v);
                    c
                })
            })
            .collect();
    }
    for axis in t.cases.iter().flat_map(|c| c.when.keys()) {
        ensure!(axis == ARCH || t.axes.contains_key(axis), "a case names '{axis}', which is no axis");
    }
    ensure!(!t.axes.contains_key(ARCH), "'{ARCH}' is no axis: archs has its values");
    let archs = t.archs.iter().map(|a| Ok(a.parse()?)).collect::<Result<Vec<Arch>>>()?;
    // One row for all architectures, unless they differ.
    let differ = t.cases.iter().any(|c| c.when.contains_key(ARCH));
    let archs: Vec<Vec<Arch>> = if differ { archs.into_iter().map(|a| vec![a]).collect() } else { vec![archs] };
    for (c, archs) in combinations.iter().flat_map(|c| archs.iter().map(move |a| (c, a))) {
        let fill = |s: &str| fill(s, c);
        let holds = |axis: &str, value: &str| match axis {
            ARCH => archs.iter().all(|a| a.to_string() == value),
            _ => c.get(axis) == Some(&value),
        };
        let cases: Vec<_> =
            t.cases.iter().filter(|case| case.when.iter().all(|(axis, value)| holds(axis, value))).collect();
        // Later cases replace what earlier ones and the row itself say.
        let fill_map = |own: &BTreeMap<String, String>, of: fn(&Case) -> &BTreeMap<String, String>| {
            let all = std::iter::once(own).chain(cases.iter().map(|case| of(case)));
            all.flatten().map(|(k, v)| Ok((k.clone(), fill(v)?))).collect::<Result<BTreeMap<_, _>>>()
        };
        out.push(Row {
            name: fill(&t.name)?,
            source: fill(&t.source)?.into(),
            entry: fill(&t.entry)?,
            archs: archs.clone(),
            defines: fill_map(&t.defines, |case| &case.defines)?,
            options: fill_map(&t.options, |case| &case.options)?,
            blocks: fill_map(&t.blocks, |case| &case.blocks)?,
            tags: fill_map(&t.tags, |case| &case.tags)?,
            parameters: t.parameters.clone(),
            promises: t.promises.clone(),
            cluster: t.cluster,
            allow_local: t.allow_local,
        });
    }
    Ok(())
}

/// Replaces each `{axis}`.
fn fill(text: &str, values: &BTreeMap<&str, &str>) -> Result<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        let close = rest[open..].find('}').with_context(|| format!("'{text}' has an open brace"))? + open;
        let axis = &rest[open + 1..close];
        let Some(value) = values.get(axis) else {
            bail!("'{text}' names '{axis}', which is no axis");
        };
        out.push_str(&rest[..open]);
        out.push_str(value);
        rest = &rest[close + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Family> {
        Family::parse(text, "owner".to_owned(), Path::new("kernels"), Path::new("bundles"))
    }

    const HEAD: &str = "bundle = 'b'\ntoolchain = 'nvcc'\n[[kernel]]\nsource = 'a.cu'\nentry = 'e'\n";

    #[test]
    fn axes_multiply_and_fill() {
        let family = parse(&format!(
            "{HEAD}name = 'f_{{dim}}_{{type}}'\narchs = ['sm_90a', 'sm_100a']\ndefines = {{ D = '{{dim}}' }}\n\
             axes = {{ dim = ['64', '128'], type = ['bf16', 'f16'] }}\n\
             tags = {{ type = '{{type}}' }}\n\
             parameters = [{{ name = 'q', kind = 'tensor_map', tile = {{ cols = 64, rows = 64 }} }}]\n"
        ))
        .unwrap();
        let names: Vec<_> = family.rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["f_64_bf16", "f_64_f16", "f_128_bf16", "f_128_f16"]);
        assert_eq!(family.rows[3].defines["D"], "128");
        assert_eq!(family.rows[3].tags["type"], "f16");
        assert_eq!(family.archs(), [Arch::SM_90A, Arch::SM_100A]);
        assert_eq!(family.rows[0].parameters[0].tile.as_ref().unwrap().heads, 1);
    }

    #[test]
    fn cases_add_to_rows() {
        let family = parse(
            "bundle = 'b'\ntoolchain = 'triton'\n[[kernel]]\nsource = 'a.py'\nentry = 'e'\nname = 'f_{dim}'\n\
             archs = ['sm_90a', 'sm_100a']\naxes = { dim = ['64', '128'] }\n\
             defines = { BLOCK = '128', DIM = '{dim}' }\noptions = { num_stages = '2' }\n\
             cases = [{ when = { dim = '128' }, defines = { BLOCK = '32' }, blocks = { q_map = '64, {dim}' } },\n\
             { when = { arch = 'sm_100a' }, options = { num_stages = '1' } }]\n",
        )
        .unwrap();
        let rows: Vec<_> = family
            .rows
            .iter()
            .map(|r| (r.name.as_str(), r.archs[0], r.defines["BLOCK"].as_str(), r.options["num_stages"].as_str()))
            .collect();
        assert_eq!(
            rows,
            [
                ("f_64", Arch::SM_90A, "128", "2"),
                ("f_64", Arch::SM_100A, "128", "1"),
                ("f_128", Arch::SM_90A, "32", "2"),
                ("f_128", Arch::SM_100A, "32", "1"),
            ]
        );
        assert_eq!(family.rows[2].blocks["q_map"], "64, 128");
        assert!(family.rows[0].blocks.is_empty());
    }

    #[test]
    fn mistakes_name_the_kernel_and_the_value() {
        for (rest, words) in [
            ("name = 'k_{x}'\narchs = ['sm_90a']\n", "names 'x', which is no axis"),
            ("name = 'k_{x'\narchs = ['sm_90a']\n", "open brace"),
            ("name = 'k'\narchs = []\n", "archs is empty"),
            ("name = 'k'\narchs = ['hopper']\n", "'hopper'"),
            ("name = 'k'\narchs = ['sm_90a']\naxes = { x = [] }\n", "axis 'x' is empty"),
            ("name = 'k'\narchs = ['sm_90a']\naxes = { x = ['1', '2'] }\n", "two kernels are named 'k'"),
            ("name = 'k'\narchs = ['sm_90a']\ncases = [{ when = { y = '1' } }]\n", "a case names 'y'"),
            ("name = 'k'\narchs = ['sm_90a']\naxes = { arch = ['1'] }\n", "'arch' is no axis"),
            ("name = 'k'\narchs = ['sm_90a']\nthread = 3\n", "unknown field `thread`"),
            ("name = 'k'\narchs = ['sm_90a']\noptions = { num_warps = '4' }\n", "options and blocks are for triton"),
            ("name = 'k'\narchs = ['sm_90a']\nparameters = [{ name = 'p', kind = 'map' }]\n", "map"),
        ] {
            let e = format!("{:#}", parse(&format!("{HEAD}{rest}")).unwrap_err());
            assert!(e.contains(words), "{e} lacks {words}");
        }
        let e = parse("bundle = 'b'\ntoolchain = 'clang'\nkernel = []\n").unwrap_err().to_string();
        assert!(e.contains("toolchain = 'clang'"), "{e}");
    }
}
