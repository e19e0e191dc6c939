//! Which kernels make a pass: chosen by the tags of the manifest, in the order of their steps.
//!
//! Tags of a kernel: `kind` (`forward`, `backward`), `variant` (generations, separated by spaces), `step`, `grid`, and where it
//! is not for everything `dtype`, `head_dim`, `when` (words that must all hold: `jagged`, `broadcast`, `kv_index`,
//! `no_kv_index`), `grid_heads` (`q`, `kv`), `packs` (`yes`: takes several query heads in the rows of a unit) and `pairs` (`yes`:
//! two blocks of threads share their products; taken instead of the kernel without where that pays).

use std::collections::BTreeMap;

use jfa_core::{Error, Mask, Problem, Query, Result};
use jfa_driver::bundle::Parameter;
use jfa_driver::schedule::constant;
use jfa_driver::{Bundle, JaggedMap, KernelInfo, Swizzle};

use crate::bind::{self, Int, MOST_MAPS, MapOf, Name, Pointer, Source, Tensor};

/// Bytes that base addresses and strides are multiples of: what the copy engine needs, and what kernels may be compiled to
/// assume.
pub(crate) const ALIGNMENT: usize = 16;

/// Query heads packed into the rows of a unit are at most 2 to this.
const MOST_PACKED_LOG2: u32 = 4;

/// Query rows of a block of the backward of a broadcast query.
pub(crate) const BROADCAST_BLOCK: i64 = 128;

/// Most tickets of a launch per multiprocessor (`kernels/tickets.py`). Those of a plan's capacity that turn out to have no work
/// cost no more than so many answers of the hardware; with more items than tickets the last shares are a 256th of a multiprocessor's work.
pub(crate) const TICKETS: i64 = 32;

/// Whether kernels that pair blocks of threads are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pairs {
    /// Where they pay, but not in a backward that must be deterministic: they are chosen by a plan's capacities.
    #[default]
    WherePays,
    Never,
    WhereTheyExist,
}

/// How many blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grid {
    /// This many per multiprocessor.
    Persistent(i64),
    /// A cluster per unit the forward's list can have, and head, but at most [`TICKETS`] per multiprocessor: running ones
    /// take the work of those that have not started.
    ForwardTickets,
    /// The same of the backward's list, and query head (`true`) or key head.
    BackwardTickets { query_heads: bool },
    /// One per unit the forward's list can have, and head.
    ForwardUnits,
    /// One per unit the backward's list can have, and query head (`true`) or key head.
    BackwardUnits { query_heads: bool },
    /// One per this many rows of o and query head.
    ORows(i64),
    /// One per this many rows of q and query head.
    QRows(i64),
    /// One per this many sequences, of the side that has more.
    Batch(i64),
    /// One per slice of the batch, block of the broadcast query and query head.
    Slices,
    /// One per tile of this many keys that the key sequences can have, and key head.
    KvUnits(i64),
}

/// One launch of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Index of the kernel in its bundle.
    pub kernel: usize,
    pub grid: Grid,
    /// Where its arguments come from.
    pub sources: Vec<Source>,
    /// Tensors whose address and strides it makes assumptions about.
    pub promises: Vec<Tensor>,
}

/// What a pass keeps in its workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub counter: bool,
    pub kv_table: bool,
    pub delta: bool,
    pub partial: bool,
}

/// The launches of a pass on one device.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// The generation.
    pub generation: &'static str,
    pub launches: Vec<Launch>,
    pub maps: Vec<MapOf>,
    pub needs: Needs,
    /// Query rows of the forward's units, before packing; 0 when no kernel follows that list.
    pub unit_rows: i32,
    /// Keys of a forward tile; 0 for other passes.
    pub kv_tile: i32,
    /// Keys of the backward's units and query rows of its tiles; 0 when no kernel follows that list.
    pub key_rows: i32,
    pub q_tile: i32,
    pub packed_log2: u32,
}

fn words(info: &KernelInfo, tag: &str) -> Vec<String> {
    info.tag(tag).split_whitespace().map(str::to_owned).collect()
}

/// Whether a kernel belongs to a generation's pass.
pub(crate) fn belongs(info: &KernelInfo, kind: &str, generation: &str) -> bool {
    info.tag("kind") == kind && info.tag("variant").split_whitespace().any(|v| v == generation)
}

fn holds(word: &str, problem: &Problem) -> bool {
    match word {
        "jagged" => problem.query == Query::Jagged,
        "broadcast" => problem.query != Query::Jagged,
        "kv_index" => problem.uses_kv_index,
        "no_kv_index" => !problem.uses_kv_index,
        // A condition nobody knows is never met: the kernel's pass then lacks it, by name.
        _ => false,
    }
}

/// Log2 of the query heads that share the rows of a unit, where the kernels can: a whole group that is a power of two.
fn packing(problem: &Problem) -> u32 {
    let group = problem.group().unsigned_abs();
    if group.is_power_of_two() && group.ilog2() <= MOST_PACKED_LOG2 { group.ilog2() } else { 0 }
}

/// The tensor map of a parameter: its box, as the manifest gives it, reshaped for packed heads.
fn map_of(info: &KernelInfo, p: &Parameter, packed_log2: u32) -> Result<JaggedMap> {
    let bad = |why: &str| Error::Internal(format!("kernel {}: parameter {} {why}", info.name, p.name));
    let tile = p.tile.ok_or_else(|| bad("has no tile"))?;
    // Every tensor has 16-bit elements; a row of a box is one swizzle span.
    let swizzle = Swizzle::of_span(u64::from(tile.cols) * 2).ok_or_else(|| bad("has a tile without a swizzle"))?;
    if tile.rows >> packed_log2 == 0 {
        return Err(bad("has fewer rows than heads are packed into it"));
    }
    let one_head = JaggedMap::tile(tile.cols, tile.rows >> packed_log2, swizzle);
    Ok(JaggedMap { box_heads: tile.heads << packed_log2, ..one_head })
}

fn grid_of(info: &KernelInfo) -> Result<Grid> {
    let rows = || constant(info, "grid_rows").map(i64::from);
    Ok(match info.tag("grid") {
        "persistent" => Grid::Persistent(info.constants.get("ctas_per_sm").map_or(1, |n| i64::from(*n))),
        "forward_tickets" => Grid::ForwardTickets,
        "backward_tickets" => Grid::BackwardTickets { query_heads: info.tag("grid_heads") == "q" },
        "forward_units" => Grid::ForwardUnits,
        "backward_units" => Grid::BackwardUnits { query_heads: info.tag("grid_heads") == "q" },
        "q_rows" => Grid::ORows(rows()?),
        "dq_rows" => Grid::QRows(rows()?),
        "batch" => Grid::Batch(rows()?),
        "slices" => Grid::Slices,
        "kv_units" => Grid::KvUnits(i64::from(constant(info, "key_rows")?)),
        other => return Err(Error::Internal(format!("kernel {} has the unknown grid '{other}'", info.name))),
    })
}

/// Rows or keys of a block of the backward's kernels.
const BLOCK: f64 = 128.0;

/// Cycles of a tile of 128 x 128 in the kernel that works alone and in one of a pair (docs/performance-tlx-backward.md).
struct Cycles {
    alone: f64,
    paired: f64,
}

/// Alone, shared memory is what a tile of the dq pass waits for; in a pair the tensor cores.
const DQ_CYCLES: Cycles = Cycles { alone: 1792.0, paired: 1536.0 };
const DKDV_CYCLES: Cycles = Cycles { alone: 2272.0, paired: 2176.0 };

/// Whether pairs pay in a backward kernel whose blocks are of query rows or (`of_queries` false) keys: what a tile saves against
/// what is walked in vain, namely the sentinel that completes an odd number of blocks and the tiles that a diagonal leaves to one of
/// the two only. From mean lengths, since a plan knows capacities alone.
fn pairs_pay(problem: &Problem, of_queries: bool, cycles: &Cycles) -> bool {
    let (q_rows, kv_rows) = (problem.o_rows() as f64, problem.total_kv as f64);
    let queries = q_rows / problem.batch.max(1) as f64;
    let keys = kv_rows / problem.kv_batch.max(1) as f64;
    let (stays, passes) = if of_queries { (queries, keys) } else { (keys, queries) };
    // Streamed rows that `rows` resident ones see together.
    let seen = |rows: f64| match problem.mask {
        Mask::Full => passes,
        Mask::Causal(_) => (passes / 2.0 + rows / 2.0).min(passes),
        Mask::Window { left, right, .. } => {
            let side = |n: Option<u32>| n.map_or(passes / 2.0, f64::from);
            (side(left) + side(right) + rows).min(passes)
        }
    };
    // The last of a sequence's blocks is half full on average, the last of its tiles too.
    let blocks = |rows: f64| stays / rows + 0.5;
    let tiles = |rows: f64| seen(rows) / BLOCK + 0.5;
    2.0 * blocks(2.0 * BLOCK) * tiles(2.0 * BLOCK) * cycles.paired < blocks(BLOCK) * tiles(BLOCK) * cycles.alone
}

/// Whether a kernel of pairs is taken.
fn takes_pairs(info: &KernelInfo, problem: &Problem, pairs: Pairs) -> bool {
    match pairs {
        Pairs::Never => false,
        Pairs::WhereTheyExist => true,
        Pairs::WherePays => {
            let of_queries = info.tag("grid_heads") == "q";
            let cycles = if of_queries { DQ_CYCLES } else { DKDV_CYCLES };
            // Capacities say what else is in a batch, and a diagonal's tiles are added in another order by pairs: then a sequence
            // would not keep its bits in every batch.
            !problem.deterministic && pairs_pay(problem, of_queries, &cycles)
        }
    }
}

/// The kernels of a pass, in order, or what lacks.
fn choose<'a>(
    bundle: &'a Bundle,
    kind: &str,
    generation: &str,
    problem: &Problem,
    pairs: Pairs,
) -> Result<Vec<(usize, &'a KernelInfo)>, String> {
    let (dtype, head_dim) = (problem.dtype.to_string(), problem.head_dim.to_string());
    // Kernels of one step with one entry are alternatives.
    let mut groups: BTreeMap<(&str, &str), Vec<(usize, &KernelInfo)>> = BTreeMap::new();
    for (i, k) in bundle.kernels().iter().enumerate().filter(|(_, k)| belongs(k, kind, generation)) {
        if words(k, "when").iter().all(|w| holds(w, problem)) {
            groups.entry((k.tag("step"), &k.entry)).or_default().push((i, k));
        }
    }
    if groups.is_empty() {
        return Err(format!("a {kind} of generation {generation} for {}", bundle.arch()));
    }
    let mut out = Vec::new();
    for ((_, entry), group) in groups {
        let fits = |k: &KernelInfo, tag: &str, value: &str| k.tag(tag).is_empty() || k.tag(tag) == value;
        let best = group
            .iter()
            .filter(|(_, k)| fits(k, "dtype", &dtype) && fits(k, "head_dim", &head_dim))
            .filter(|(_, k)| k.tag("pairs") != "yes" || takes_pairs(k, problem, pairs))
            .max_by_key(|(_, k)| k.tag("pairs") == "yes");
        let Some(&(index, info)) = best else {
            return Err(format!("{entry} of generation {generation} for {dtype}, head_dim {head_dim}"));
        };
        out.push((index, info));
    }
    Ok(out)
}

impl Pass {
    /// The pass of a generation for a problem on a device's bundle. `packed` is the packing other kernels that follow the
    /// forward's list have settled on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what the generation lacks; [`Error::Internal`] when a manifest makes no sense.
    pub(crate) fn new(
        backend: &str,
        bundle: &Bundle,
        kind: &str,
        generation: &'static str,
        problem: &Problem,
        packed: Option<u32>,
        pairs: Pairs,
    ) -> Result<Self> {
        let unsupported = |lacks: String| Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{backend}' lacks {lacks}"),
        };
        let chosen = choose(bundle, kind, generation, problem, pairs).map_err(unsupported)?;
        // A pass is whole when something writes each of its results.
        let results: &[Tensor] = if kind == "forward" { &[Tensor::O] } else { &[Tensor::DQ, Tensor::DK, Tensor::DV] };
        for result in results {
            let named = |n: &str| matches!(Name::parse(n), Some(Name::Data(t) | Name::Map(t)) if t == *result);
            if !chosen.iter().any(|(_, k)| k.parameters.iter().any(|p| named(&p.name))) {
                return Err(unsupported(format!("{} of a {kind} of generation {generation}", result.name())));
            }
        }
        let follows = |info: &KernelInfo, list: &str| info.parameters.iter().any(|p| p.name == list);
        let packs = chosen.iter().all(|(_, k)| k.tag("packs") == "yes" || !follows(k, "forward_units"));
        let packed_log2 = match packed {
            Some(p) if p > 0 && !packs => {
                return Err(unsupported(format!("a {kind} of generation {generation} over packed query heads")));
            }
            Some(p) => p,
            None if packs => packing(problem),
            None => 0,
        };
        let mut pass = Pass {
            generation,
            launches: Vec::new(),
            maps: Vec::new(),
            needs: Needs::default(),
            unit_rows: 0,
            kv_tile: 0,
            key_rows: 0,
            q_tile: 0,
            packed_log2,
        };
        let agree = |info: &KernelInfo, name: &str, value: &mut i32| {
            let stated = constant(info, name)?;
            if *value != 0 && *value != stated {
                return Err(Error::Internal(format!(
                    "kernel {} states {name} = {stated}, others of its pass {value}",
                    info.name
                )));
            }
            *value = stated;
            Ok(())
        };
        for (kernel, info) in chosen {
            info.assumes_at_most(ALIGNMENT)?;
            let mut promises = Vec::new();
            for p in &info.promises {
                let tensor = Tensor::ALL.into_iter().find(|t| t.name() == p.argument);
                promises.push(tensor.ok_or_else(|| {
                    Error::Internal(format!("kernel {} promises something of '{}'", info.name, p.argument))
                })?);
            }
            if follows(info, "forward_units") {
                agree(info, "unit_rows", &mut pass.unit_rows)?;
                if kind == "forward" {
                    agree(info, "kv_tile", &mut pass.kv_tile)?;
                }
            }
            if follows(info, "backward_units") {
                agree(info, "key_rows", &mut pass.key_rows)?;
                agree(info, "q_tile", &mut pass.q_tile)?;
            }
            let maps = &mut pass.maps;
            let packs = info.tag("packs") == "yes";
            let sources = bind::resolve(&info.name, &info.parameters, |tensor, p| {
                let packed = if packs && tensor.of_queries() { packed_log2 } else { 0 };
                let wanted = MapOf { tensor, map: map_of(info, p, packed)? };
                Ok(maps.iter().position(|m| *m == wanted).unwrap_or_else(|| {
                    maps.push(wanted);
                    maps.len() - 1
                }))
            })?;
            if pass.maps.len() > MOST_MAPS {
                return Err(Error::Internal(format!(
                    "the {kind} of generation {generation} uses more than {MOST_MAPS} maps"
                )));
            }
            let uses = |pointer| sources.contains(&Source::Pointer(pointer));
            pass.needs.counter |= uses(Pointer::Counter);
            pass.needs.kv_table |= uses(Pointer::KvTable);
            pass.needs.delta |= uses(Pointer::Delta);
            pass.needs.partial |= uses(Pointer::Partial) || sources.contains(&Source::Int(Int::Slices));
            pass.launches.push(Launch { kernel, grid: grid_of(info)?, sources, promises });
        }
        Ok(pass)
    }
}

#[cfg(test)]
mod tests {
    use jfa_core::{Alignment, DType};

    use super::*;

    fn pays(length: i64, mask: Mask) -> [bool; 2] {
        let problem = Problem::builder(DType::BF16, 4, 128).capacity(10, 10 * length, 10 * length).mask(mask).build();
        let problem = problem.expect("a valid problem");
        [pairs_pay(&problem, true, &DQ_CYCLES), pairs_pay(&problem, false, &DKDV_CYCLES)]
    }

    #[test]
    fn pairs_are_taken_for_long_sequences() {
        // By the number n of blocks alone: 1536 (n + 1) against 1792 (n + 1/2), and 2176 (n + 1) against 2272 (n + 1/2).
        for (length, expected) in
            [(128, [false, false]), (512, [true, false]), (1024, [true, false]), (2048, [true, true])]
        {
            assert_eq!(pays(length, Mask::Full), expected, "full masks, length {length}");
        }
        // Of causal masks a pair also walks half a tile more.
        let causal = Mask::Causal(Alignment::TopLeft);
        for (length, expected) in [(512, [false, false]), (2048, [true, false]), (16384, [true, true])] {
            assert_eq!(pays(length, causal), expected, "causal masks, length {length}");
        }
        // A narrow window leaves one tile in two or three to one of a pair only.
        let narrow = Mask::Window { left: Some(128), right: Some(0), alignment: Alignment::TopLeft };
        assert_eq!(pays(16384, narrow), [false, false]);
    }
}
