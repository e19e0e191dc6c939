//! Which compiled kernel does what: choices by the tags of the manifest.

use std::collections::BTreeSet;

use jfa_core::{DType, Error, Problem, Result};
use jfa_driver::bundle::Tile;
use jfa_driver::{DriverError, JaggedMap, KernelInfo, KernelSet, Swizzle};

/// Bytes that base addresses and strides are multiples of: what the copy engine needs. The kernels promise the compiler
/// no more.
pub(crate) const ALIGNMENT: usize = 16;

/// The first device that has the kernels of a forward.
pub(crate) fn best_device(set: &KernelSet) -> Option<usize> {
    set.usable_devices().find(|d| set.bundle(*d).is_ok_and(|b| b.kernels().iter().any(|k| k.tag("kind") == "forward")))
}

/// Names of the variants of any kernel on any device.
pub(crate) fn variants(set: &KernelSet) -> BTreeSet<String> {
    set.usable_devices()
        .filter_map(|d| set.bundle(d).ok())
        .flat_map(|b| b.kernels())
        .map(|k| k.tag("variant").to_owned())
        .filter(|v| !v.is_empty())
        .collect()
}

/// What a pass asks of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// Tag `kind`.
    pub kind: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Widest head of the problem.
    pub head_dim: i64,
    /// The variant asked for.
    pub variant: Option<&'a str>,
}

/// Kernels of a kind that a variant may use: its own, where it has any of that kind, else the plain ones. A variant
/// that was asked for is never replaced silently.
pub(crate) fn eligible<'a>(
    all: &'a [KernelInfo],
    kind: &'a str,
    variant: Option<&'a str>,
) -> impl Iterator<Item = (usize, &'a KernelInfo)> {
    let of_kind = move |k: &&KernelInfo| k.tag("kind") == kind;
    let own = variant.filter(|v| all.iter().filter(of_kind).any(|k| k.tag("variant") == *v)).unwrap_or("");
    all.iter().enumerate().filter(move |(_, k)| k.tag("kind") == kind && k.tag("variant") == own)
}

/// What a problem is told whose backward lacks a kernel.
pub(crate) fn no_backward(name: &str, problem: &Problem) -> impl Fn(DriverError) -> Error + Copy {
    move |e| Error::Unsupported { asked: problem.to_string(), lacks: format!("'{name}' lacks a backward: {e}") }
}

/// The narrowest kernel that is wide enough.
pub(crate) fn choose(set: &KernelSet, device: usize, wanted: Wanted) -> jfa_driver::Result<usize> {
    let dtype = wanted.dtype.to_string();
    let best = eligible(set.bundle(device)?.kernels(), wanted.kind, wanted.variant)
        .filter(|(_, k)| k.tag("dtype") == dtype)
        .filter_map(|(i, k)| Some((k.tag("head_dim").parse::<i64>().ok()?, i)))
        .filter(|(dim, _)| *dim >= wanted.head_dim)
        .min();
    match best {
        Some((_, index)) => Ok(index),
        // Nothing fits: the set's own words list what there is.
        None => {
            let variant = wanted.variant.map_or_else(String::new, |v| format!(" (variant {v})"));
            let what = format!("{} of {} with head_dim {}{variant}", wanted.kind, wanted.dtype, wanted.head_dim);
            set.find(device, &what, |_| false)
        }
    }
}

/// The tensor map of a parameter: its box, as the manifest gives it, reshaped for packed heads by `shape`.
pub(crate) fn map_of(info: &KernelInfo, parameter: &str, shape: impl FnOnce(Tile) -> Tile) -> Result<JaggedMap> {
    let bad = |why: &str| Error::Internal(format!("kernel {}: parameter {parameter} {why}", info.name));
    let p = info.parameters.iter().find(|p| p.name == parameter).ok_or_else(|| bad("is missing"))?;
    let tile = shape(p.tile.ok_or_else(|| bad("has no tile"))?);
    // Every tensor of a kernel has 16-bit elements; a row of a box is one swizzle span.
    let swizzle = Swizzle::of_span(u64::from(tile.cols) * 2).ok_or_else(|| bad("has a tile without a swizzle"))?;
    Ok(JaggedMap { box_heads: tile.heads, ..JaggedMap::tile(tile.cols, tile.rows, swizzle) })
}
