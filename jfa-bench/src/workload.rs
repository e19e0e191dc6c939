//! The workloads of `workloads/shapes.toml`, spelled out as sequence lengths.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use jfa_core::layout::{PaddingStatistics, visible_pairs};
use jfa_core::{Alignment, DType, Mask};
use serde::Deserialize;

use crate::mt19937::Mt19937;

/// The committed files, so that the binary needs no folder beside it.
const SHAPES: &str = include_str!("../../workloads/shapes.toml");
const LENGTHS: [(&str, &str); 4] = [
    ("movielens-100k-user-history.txt", include_str!("../../workloads/lengths/movielens-100k-user-history.txt")),
    ("azure-llm-2023-conversation.txt", include_str!("../../workloads/lengths/azure-llm-2023-conversation.txt")),
    ("azure-llm-2023-code.txt", include_str!("../../workloads/lengths/azure-llm-2023-code.txt")),
    ("heavy-tail-lognormal.txt", include_str!("../../workloads/lengths/heavy-tail-lognormal.txt")),
];

/// A computation to be timed: lengths and the static parameters, no data.
#[derive(Clone, Debug)]
pub struct Shape {
    /// `SET` or `SET-VARIANT`.
    pub name: String,
    /// The set it belongs to.
    pub set: String,
    /// Query length of each sequence.
    pub q_lens: Vec<i64>,
    /// Length of each key/value sequence.
    pub kv_lens: Vec<i64>,
    /// Which key/value sequence each query sequence attends to.
    pub kv_index: Option<Vec<i32>>,
    /// All query sequences are one and the same.
    pub broadcast_q: bool,
    /// Query heads.
    pub heads_q: i64,
    /// Key/value heads.
    pub heads_kv: i64,
    /// Elements of a head.
    pub head_dim: i64,
    /// Visibility.
    pub mask: Mask,
}

impl Shape {
    /// The key/value sequence of batch item `b`.
    pub fn kv_of(&self, b: usize) -> usize {
        self.kv_index.as_ref().map_or(b, |index| usize::try_from(index[b]).expect("an index of this shape"))
    }

    /// Visible (i, j) pairs of one head in batch item `b`.
    pub fn pairs_of(&self, b: usize) -> f64 {
        let (m, n) = (self.q_lens[b], self.kv_lens[self.kv_of(b)]);
        visible_pairs(self.mask, m, n) as f64
    }

    /// Visible (i, j) pairs of one head, over the batch.
    pub fn pairs(&self) -> f64 {
        // Not `sum`: that of nothing is -0.
        (0..self.q_lens.len()).map(|b| self.pairs_of(b)).fold(0.0, |sum, pairs| sum + pairs)
    }

    /// Useful floating-point operations of a forward: 4 per query head, element and visible pair.
    pub fn forward_flops(&self) -> f64 {
        4.0 * self.heads_q as f64 * self.head_dim as f64 * self.pairs()
    }

    /// The same of a backward: 2.5 times the forward's.
    pub fn backward_flops(&self) -> f64 {
        2.5 * self.forward_flops()
    }

    /// Rows of all query sequences.
    pub fn q_tokens(&self) -> i64 {
        self.q_lens.iter().sum()
    }

    /// Rows of all key/value sequences.
    pub fn kv_tokens(&self) -> i64 {
        self.kv_lens.iter().sum()
    }

    /// Share of a padded batch's rows (every sequence as long as the longest) that the jagged layout does not have.
    pub fn padding_avoided(&self) -> f64 {
        let of = |lens: &[i64]| PaddingStatistics::from_lengths(lens.iter().copied());
        let (q, kv) = (of(&self.q_lens), of(&self.kv_lens));
        let padded = q.padded_rows + kv.padded_rows;
        if padded == 0 { 0.0 } else { (q.rows_avoided() + kv.rows_avoided()) as f64 / padded as f64 }
    }

    /// The first `batch` sequences (with `kv_index`, and the key/value sequences they use).
    pub fn truncate_batch(&mut self, batch: usize) {
        self.q_lens.truncate(batch);
        if let Some(index) = &mut self.kv_index {
            index.truncate(batch);
            let used = index.iter().max().map_or(0, |i| usize::try_from(*i).unwrap_or(0) + 1);
            self.kv_lens.truncate(used);
        } else {
            self.kv_lens.truncate(batch);
        }
    }

    /// No sequence longer than `longest`.
    pub fn clamp_lengths(&mut self, longest: i64) {
        for n in self.q_lens.iter_mut().chain(&mut self.kv_lens) {
            *n = (*n).min(longest);
        }
    }
}

/// One or several values.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    fn to_vec(&self) -> Vec<T> {
        match self {
            OneOrMany::One(v) => vec![v.clone()],
            OneOrMany::Many(v) => v.clone(),
        }
    }
}

/// How the key/value lengths come about: a number, or a word.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum KvRule {
    Length(i64),
    Word(String),
}

/// One table of `shapes.toml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Set {
    batch: Option<usize>,
    heads: Option<i64>,
    heads_q: Option<i64>,
    heads_kv: Option<OneOrMany<i64>>,
    heads_by_dim: BTreeMap<String, i64>,
    head_dim: Option<i64>,
    q: Option<String>,
    q_len: Option<OneOrMany<i64>>,
    broadcast_q: bool,
    kv: Option<KvRule>,
    kv_max: Option<i64>,
    max: Option<OneOrMany<i64>>,
    mask: Option<OneOrMany<String>>,
    lengths: Option<String>,
    take: Option<usize>,
    requests: Option<usize>,
    candidates: Option<usize>,
    seed: Option<u64>,
    // What a "lognormal" file was drawn from; kept beside it for the reader and checked against it where possible.
    median: Option<f64>,
    sigma: Option<f64>,
    clip: Option<[i64; 2]>,
}

/// All workloads, by set.
pub struct Workloads {
    sets: Vec<(String, Set)>,
    folder: Option<PathBuf>,
}

impl Workloads {
    /// The committed workloads, or those of `folder` (a `shapes.toml` and a `lengths` folder).
    pub fn load(folder: Option<&Path>) -> Result<Self> {
        let text = match folder {
            None => SHAPES.to_owned(),
            Some(f) => {
                let path = f.join("shapes.toml");
                std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?
            }
        };
        let table: BTreeMap<String, Set> = toml::from_str(&text).context("shapes.toml")?;
        // A BTreeMap sorts; the file's own order is the order of the tables.
        let position = |name: &str| text.find(&format!("\n[{name}]")).unwrap_or(0);
        let mut sets: Vec<_> = table.into_iter().collect();
        sets.sort_by_key(|(name, _)| position(name));
        Ok(Workloads { sets, folder: folder.map(Path::to_owned) })
    }

    /// Every shape, in the file's order.
    pub fn all(&self) -> Result<Vec<Shape>> {
        let mut out = Vec::new();
        for (name, set) in &self.sets {
            out.extend(self.expand(name, set).with_context(|| format!("set [{name}] of shapes.toml"))?);
        }
        Ok(out)
    }

    /// The shapes whose name or set is in `wanted`, in its order; `all` gives all.
    pub fn select(&self, wanted: &[String]) -> Result<Vec<Shape>> {
        let all = self.all()?;
        let mut picked: Vec<Shape> = Vec::new();
        for w in wanted {
            let hits: Vec<_> = all.iter().filter(|s| w == "all" || *w == s.name || *w == s.set).collect();
            if hits.is_empty() {
                let names: Vec<_> = all.iter().map(|s| s.name.as_str()).collect();
                bail!("no shape or set is named '{w}'; there are: {}", names.join(", "));
            }
            for s in hits {
                if !picked.iter().any(|p| p.name == s.name) {
                    picked.push(s.clone());
                }
            }
        }
        Ok(picked)
    }

    fn lengths(&self, file: &str, take: Option<usize>) -> Result<Vec<i64>> {
        let text = match &self.folder {
            Some(f) => {
                let path = f.join("lengths").join(file);
                std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?
            }
            None => LENGTHS
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, text)| (*text).to_owned())
                .ok_or_else(|| anyhow!("there is no lengths file '{file}'"))?,
        };
        let mut lengths = parse_lengths(&text).with_context(|| file.to_owned())?;
        if let Some(n) = take {
            lengths.truncate(n);
        }
        Ok(lengths)
    }

    fn expand(&self, name: &str, set: &Set) -> Result<Vec<Shape>> {
        let masks: Vec<(String, Mask)> = match &set.mask {
            None => vec![("full".to_owned(), Mask::Full)],
            Some(m) => m.to_vec().into_iter().map(|w| parse_mask(&w).map(|m| (w, m))).collect::<Result<_>>()?,
        };
        let heads_q = set.heads_q.or(set.heads).unwrap_or(4);
        let head_dim = set.head_dim.unwrap_or(128);
        let shape = |variant: Option<String>, q_lens: Vec<i64>, kv_lens: Vec<i64>, mask: Mask| Shape {
            name: variant.map_or(name.to_owned(), |v| format!("{name}-{v}")),
            set: name.to_owned(),
            q_lens,
            kv_lens,
            kv_index: None,
            broadcast_q: set.broadcast_q,
            heads_q,
            heads_kv: heads_q,
            head_dim,
            mask,
        };
        let mut out = Vec::new();

        if let Some(file) = &set.lengths {
            let n = self.lengths(file, set.take)?;
            if let Some([low, high]) = set.clip {
                ensure!(
                    n.iter().all(|x| (low..=high).contains(x)),
                    "{file} has lengths outside clip = [{low}, {high}]"
                );
            }
            for (word, mask) in &masks {
                out.push(shape((masks.len() > 1).then(|| word.clone()), n.clone(), n.clone(), *mask));
            }
            return Ok(out);
        }

        if let (Some(requests), Some(candidates)) = (set.requests, set.candidates) {
            let kv_max = set.kv_max.ok_or_else(|| anyhow!("kv_max is missing"))?;
            let kv = uniform(requests, kv_max, set.seed);
            let q_len = set.q_len.as_ref().map_or(1, |q| q.to_vec()[0]);
            let mut s = shape(None, vec![q_len; requests * candidates], kv, masks[0].1);
            s.kv_index =
                Some((0..requests * candidates).map(|b| i32::try_from(b / candidates)).collect::<Result<_, _>>()?);
            return Ok(vec![s]);
        }

        let batch = set.batch.ok_or_else(|| anyhow!("batch is missing"))?;
        if let Some(q_len) = &set.q_len {
            let kv_max = set.kv_max.ok_or_else(|| anyhow!("kv_max is missing"))?;
            let kv = uniform(batch, kv_max, set.seed);
            for m in q_len.to_vec() {
                out.push(shape(Some(m.to_string()), vec![m; batch], kv.clone(), masks[0].1));
            }
            return Ok(out);
        }

        let max = set.max.as_ref().ok_or_else(|| anyhow!("max is missing"))?.to_vec();
        for &longest in &max {
            let q_lens = match set.q.as_deref() {
                Some("uniform") => uniform(batch, longest, set.seed),
                Some("full") => vec![longest; batch],
                other => bail!("q = {other:?} is neither \"uniform\" nor \"full\""),
            };
            let kv_lens = match &set.kv {
                Some(KvRule::Length(n)) => vec![*n; batch],
                Some(KvRule::Word(w)) if w == "same" => q_lens.clone(),
                other => bail!("kv = {other:?} is neither \"same\" nor a length"),
            };
            for (word, mask) in &masks {
                let mut variant = String::new();
                let mut add = |part: &str| {
                    let _ = write!(variant, "{}{part}", if variant.is_empty() { "" } else { "-" });
                };
                let by_other = set.heads_kv.is_some() || !set.heads_by_dim.is_empty();
                if max.len() > 1 || !by_other {
                    add(&longest.to_string());
                }
                if masks.len() > 1 {
                    add(word);
                }
                let base = shape(None, q_lens.clone(), kv_lens.clone(), *mask);
                let named = |s: Shape, last: Option<String>| {
                    let parts: Vec<_> =
                        [Some(variant.clone()), last].into_iter().flatten().filter(|p| !p.is_empty()).collect();
                    Shape { name: format!("{name}-{}", parts.join("-")), ..s }
                };
                if let Some(heads_kv) = &set.heads_kv {
                    for kv in heads_kv.to_vec() {
                        out.push(named(Shape { heads_kv: kv, ..base.clone() }, Some(kv.to_string())));
                    }
                } else if !set.heads_by_dim.is_empty() {
                    let mut by_dim: Vec<(i64, i64)> = Vec::new();
                    for (dim, heads) in &set.heads_by_dim {
                        by_dim
                            .push((dim.parse().with_context(|| format!("heads_by_dim has the key '{dim}'"))?, *heads));
                    }
                    by_dim.sort_unstable();
                    for (dim, heads) in by_dim {
                        let s = Shape { heads_q: heads, heads_kv: heads, head_dim: dim, ..base.clone() };
                        out.push(named(s, Some(dim.to_string())));
                    }
                } else {
                    out.push(named(base, None));
                }
            }
        }
        Ok(out)
    }
}

/// One length per line; blank lines and `#` comments are skipped.
pub fn parse_lengths(text: &str) -> Result<Vec<i64>> {
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let n: i64 = line.parse().with_context(|| format!("line {}: '{line}' is not a length", i + 1))?;
        ensure!(n >= 0, "line {}: {n} is negative", i + 1);
        out.push(n);
    }
    Ok(out)
}

/// `full`, `causal`, `causal-top-left`, or `window:LEFT,RIGHT[,top-left]` with -1 for unbounded.
pub fn parse_mask(word: &str) -> Result<Mask> {
    match word {
        "full" => return Ok(Mask::Full),
        "causal" => return Ok(Mask::Causal(Alignment::BottomRight)),
        "causal-top-left" => return Ok(Mask::Causal(Alignment::TopLeft)),
        _ => {}
    }
    let parse = || {
        let rest = word.strip_prefix("window:")?;
        let mut parts = rest.split(',');
        let mut side = || match parts.next()?.trim().parse::<i64>().ok()? {
            -1 => Some(None),
            n => u32::try_from(n).ok().map(Some),
        };
        let (left, right) = (side()?, side()?);
        let alignment = match parts.next().map(str::trim) {
            None => Alignment::BottomRight,
            Some("top-left") => Alignment::TopLeft,
            Some(_) => return None,
        };
        parts.next().is_none().then_some(Mask::Window { left, right, alignment })
    };
    parse().ok_or_else(|| {
        anyhow!("'{word}' is no mask; there are: full, causal, causal-top-left, window:LEFT,RIGHT[,top-left] (-1: unbounded)")
    })
}

/// `f32`, `f16` or `bf16`.
pub fn parse_dtype(word: &str) -> Result<DType> {
    DType::ALL
        .into_iter()
        .find(|d| d.to_string() == word)
        .ok_or_else(|| anyhow!("'{word}' is no element type; there are: f32, f16, bf16"))
}

/// Whole numbers, uniform on `1..=longest`, as `torch.randint(1, longest + 1)` draws them on the CPU.
fn uniform(count: usize, longest: i64, seed: Option<u64>) -> Vec<i64> {
    let mut generator = Mt19937::new(seed.unwrap_or(2025 + longest.unsigned_abs()));
    (0..count).map(|_| 1 + i64::from(generator.next_u32()) % longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str) -> Shape {
        Workloads::load(None).unwrap().select(&[name.to_owned()]).unwrap().remove(0)
    }

    #[test]
    fn every_set_expands_to_the_shapes_its_name_promises() {
        let names: Vec<_> = Workloads::load(None).unwrap().all().unwrap().into_iter().map(|s| s.name).collect();
        let expected = "gem_self_half-256 gem_self_half-512 gem_self_half-1024 gem_self_half-2048 gem_self_full-256 \
            gem_self_full-512 gem_self_full-1024 gem_self_full-2048 gem_cross_short_kv-256 gem_cross_short_kv-512 \
            gem_cross_short_kv-1024 gem_cross_short_kv-2048 gem_pma-32 gem_pma-128 heavy_tail-full heavy_tail-causal \
            request_shared_kv real_movielens real_conversation-full real_conversation-causal head_dims-32 head_dims-64 \
            head_dims-96 head_dims-128 head_dims-256 gqa-1 gqa-4 causal-1024 causal-2048 window-2048";
        assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
    }

    /// Useful FLOPs that other implementations were measured with on the same lengths, from torch and numpy themselves.
    #[test]
    fn lengths_are_those_that_torch_and_numpy_draw() {
        for (name, flops) in [
            ("real_movielens", 41_371_262_976.0),
            ("real_conversation-full", 9_132_206_092_288.0),
            ("real_conversation-causal", 4_568_419_540_992.0),
            ("gem_pma-32", 78_887_976_960.0),
            ("gem_pma-128", 315_551_907_840.0),
            ("gem_self_half-256", 51_928_139_776.0),
            ("gem_self_half-1024", 837_999_982_592.0),
            ("heavy_tail-full", 3_139_127_515_136.0),
            ("window-2048", 552_733_597_696.0),
            ("gqa-1", 1_454_299_136_000.0),
            ("gqa-4", 1_454_299_136_000.0),
        ] {
            let s = one(name);
            assert!((s.forward_flops() - flops).abs() < 0.5, "{name}: {} instead of {flops}", s.forward_flops());
        }
    }

    #[test]
    fn shared_histories_keep_their_index_when_cut() {
        let mut s = one("request_shared_kv");
        assert_eq!((s.q_lens.len(), s.kv_lens.len()), (64 * 512, 64));
        assert_eq!((s.kv_of(511), s.kv_of(512)), (0, 1));
        s.truncate_batch(600);
        assert_eq!((s.q_lens.len(), s.kv_lens.len()), (600, 2));
        s.clamp_lengths(100);
        assert!(s.kv_lens.iter().all(|n| *n <= 100));
    }

    #[test]
    fn padding_is_counted_in_rows() {
        let mut s = one("real_movielens");
        s.q_lens = vec![1, 3];
        s.kv_lens = vec![1, 3];
        assert!((s.padding_avoided() - (1.0 - 8.0 / 12.0)).abs() < 1e-12);
        s.q_lens.clear();
        s.kv_lens.clear();
        assert_eq!(s.padding_avoided(), 0.0);
    }

    #[test]
    fn masks_and_lengths_are_parsed_or_named_in_the_error() {
        assert_eq!(
            parse_mask("window:256,-1,top-left").unwrap(),
            Mask::Window { left: Some(256), right: None, alignment: Alignment::TopLeft }
        );
        for bad in ["window:1", "window:1,2,3", "window:-2,0", "causality", "window:1,2,top-left,"] {
            assert!(parse_mask(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
        assert_eq!(parse_lengths("3\n\n# none\n0 # empty\n").unwrap(), [3, 0]);
        assert!(parse_lengths("1\n-4\n").unwrap_err().to_string().contains("line 2: -4"));
        let unknown = Workloads::load(None).unwrap().select(&["gem".to_owned()]).unwrap_err().to_string();
        assert!(unknown.contains("'gem'") && unknown.contains("gem_pma-32"), "{unknown}");
    }
}
