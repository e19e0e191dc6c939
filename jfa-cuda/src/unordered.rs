//! The unordered backward: every tile of keys is work of its own, which any block may do at any time. A tile adds its share of dq
//! in fp32 in the workspace; whoever is the last to add to a block of rows stores its dq. dk and dv are one block's own. For long
//! sequences whose dq need not have the same bits in every run.
//!
//! A kernel before it reads o and d_o once, for lse and delta of every row as the products want them.

use jfa_core::{Error, Problem, Result};
use jfa_driver::schedule::{Units, aligned, constant};
use jfa_driver::{CachedMap, KernelSet};

use crate::kernels::{ALIGNMENT, Wanted, choose, map_of, no_backward};

/// Bytes of `control` (kernels/params.h): counters, rounding, and what every row block has there.
const COUNTERS_BYTES: i64 = 128 + 16;
const BLOCK_BYTES: i64 = 24;

/// Kind of the kernel, as its tags have it.
const KIND: &str = "backward_unordered";

/// The kernels on one device, as indices into its bundle.
pub(crate) struct Kernels {
    pub(crate) prepare: usize,
    pub(crate) backward: usize,
    /// Maps of q, k, v, d_o, dk, dv.
    pub(crate) maps: [CachedMap; 6],
    /// Blocks of the first kernel that a multiprocessor has room for.
    pub(crate) prepare_blocks: u32,
    pub(crate) sizes: Sizes,
}

/// What schedule and workspace depend on; the same on every device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) units: Units,
    /// Bytes of a block of rows in the workspace: its sums and what its rows start from.
    block_bytes: i32,
}

/// Where the parts of the workspace stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Row blocks per query head.
    pub(crate) blocks: i32,
    /// Bytes of the counters at the start, zero before every launch.
    pub(crate) control_bytes: usize,
    /// The row blocks.
    pub(crate) partial: usize,
    /// Bytes of the workspace.
    pub(crate) bytes: usize,
}

impl Kernels {
    /// Whether there are any for a problem, of heads no wider than those of the backward in pairs: products of zeros cost as much.
    pub(crate) fn exist(set: &KernelSet, device: usize, wanted: Wanted) -> bool {
        let width = |kind| {
            let kernel = choose(set, device, Wanted { kind, ..wanted }).ok()?;
            set.bundle(device).ok()?.kernels()[kernel].tag("head_dim").parse::<i64>().ok()
        };
        width(KIND).is_some_and(|unordered| width("backward").is_none_or(|pairs| unordered <= pairs))
    }

    /// The kernels for a problem.
    pub(crate) fn choose(
        name: &str,
        set: &KernelSet,
        device: usize,
        wanted: Wanted,
        problem: &Problem,
    ) -> Result<Self> {
        let lacks = no_backward(name, problem);
        let of_kind = |kind| choose(set, device, Wanted { kind, ..wanted }).map_err(lacks);
        let (prepare, backward) = (of_kind("backward_prepare")?, of_kind(KIND)?);
        let kernels = set.bundle(device).map_err(|e| e.for_backend(name))?.kernels();
        let info = &kernels[backward];
        info.assumes_at_most(ALIGNMENT)?;
        kernels[prepare].assumes_at_most(ALIGNMENT)?;
        let map = |parameter| map_of(info, parameter, |t| t).map(CachedMap::new);
        Ok(Kernels {
            prepare,
            backward,
            maps: [map("q")?, map("k")?, map("v")?, map("d_o")?, map("dk")?, map("dv")?],
            prepare_blocks: constant(&kernels[prepare], "ctas_per_multiprocessor")?.unsigned_abs(),
            sizes: Sizes {
                units: Units {
                    rows: constant(info, "unit_rows")?,
                    tile: constant(info, "q_tile")?,
                    heads: problem.heads_kv,
                    blocks: 1,
                },
                block_bytes: constant(&kernels[prepare], "block_bytes")?,
            },
        })
    }
}

impl Parts {
    /// The parts for any batch within the problem's capacities: 24 bytes and `q_tile * (head_dim + 2)` floats, rounded up to 128
    /// bytes, for every block of `q_tile` rows of a head, of which a batch has at most `total_q / q_tile + batch`.
    pub(crate) fn of(name: &str, problem: &Problem, sizes: Sizes) -> Result<Self> {
        let too_large = || Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' has no room for the partial sums of its backward"),
        };
        let blocks = problem.total_q / i64::from(sizes.units.tile) + problem.batch;
        // The kernels number counters with 32 bits.
        let all =
            problem.heads_q.checked_mul(blocks).filter(|n| *n <= i64::from(i32::MAX) / 8).ok_or_else(too_large)?;
        let bytes = |n: i64| usize::try_from(n).map_err(|_| too_large());
        let control_bytes = bytes(COUNTERS_BYTES + BLOCK_BYTES * all)?;
        let partial = aligned(control_bytes);
        let partial_bytes = bytes(all.checked_mul(i64::from(sizes.block_bytes)).ok_or_else(too_large)?)?;
        Ok(Parts {
            blocks: i32::try_from(blocks).map_err(|_| too_large())?,
            control_bytes,
            partial,
            bytes: aligned(partial + partial_bytes),
        })
    }
}
