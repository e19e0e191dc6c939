//! A throughput model: what each unit of a streaming multiprocessor can do in a cycle, and the least number of cycles
//! that a run's counts therefore need.
//!
//! It is a lower bound, not a prediction: latencies, dependencies, instruction-cache misses, power limits and uneven
//! work among multiprocessors only add to it. Rates per multiprocessor and cycle:
//!
//! | unit | sm_90 | sm_100 | source |
//! |---|---|---|---|
//! | issue, warp instructions | 4 | 4 | four schedulers, one instruction each (white papers of both architectures) |
//! | f32 lanes | 128 | 128 | CUDA programming guide, throughput of native arithmetic, capabilities 9.0 and 10.0 |
//! | packed f32 (`f32x2`), lanes | - | 64 | two results a lane at the same f32 rate |
//! | integer lanes | 64 | 64 | the same table |
//! | exponentials and other special functions | 16 | 16 | the same table |
//! | conversions | 64 | 64 | the same table, from and to 16-bit types |
//! | tensor core, 16-bit multiply-adds | 2,048 | 4,096 | data sheets: 989 TFLOP/s over 132 cores at 1.83 GHz; 2.25 PFLOP/s over 148 at 1.85 |
//! | tensor core, TF32 multiply-adds | 1,024 | 2,048 | the same: half of the 16-bit rates |
//! | shared memory, bytes | 128 | 128 | 32 banks of four bytes |
//! | copies to and from memory, bytes | 64 | 64 | the port of a multiprocessor to L2; all together get about 27 of it on an H200 (docs/performance.md) |
//!
//! Moves are left out, since the machine-code compiler removes most of them. Figures for sm_100 are from documents alone:
//! there was no such device to measure.

use crate::{Arch, Class, Counters};

/// Rates of one multiprocessor per cycle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Warp instructions issued.
    pub issue: f64,
    /// f32 lane operations.
    pub float: f64,
    /// Integer and logic lane operations.
    pub integer: f64,
    /// Special functions.
    pub special: f64,
    /// Conversions.
    pub convert: f64,
    /// Multiply-adds of 16-bit operands.
    pub mma_16: f64,
    /// Multiply-adds of TensorFloat-32 operands.
    pub mma_tf32: f64,
    /// Bytes of shared memory.
    pub shared: f64,
    /// Bytes between L2 and the multiprocessor.
    pub memory: f64,
}

impl Rates {
    /// Rates of an architecture.
    pub fn of(arch: Arch) -> Rates {
        let hopper = Rates {
            issue: 4.0,
            float: 128.0,
            integer: 64.0,
            special: 16.0,
            convert: 64.0,
            mma_16: 2048.0,
            mma_tf32: 1024.0,
            shared: 128.0,
            memory: 64.0,
        };
        match arch {
            Arch::Sm90 => hopper,
            Arch::Sm100 => Rates { mma_16: 4096.0, mma_tf32: 2048.0, ..hopper },
        }
    }
}

/// Cycles that each unit needs, summed over all multiprocessors.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Units with their cycles, the slowest first.
    pub units: Vec<(&'static str, f64)>,
}

impl Bound {
    /// The bound of a run on `sms` multiprocessors that share its work evenly.
    pub fn cycles(&self, sms: u32) -> f64 {
        self.units.first().map_or(0.0, |u| u.1) / f64::from(sms.max(1))
    }

    /// The unit that sets it.
    pub fn limiter(&self) -> &'static str {
        self.units.first().map_or("nothing", |u| u.0)
    }
}

/// The bound that a run's counts imply.
pub fn bound(arch: Arch, c: &Counters) -> Bound {
    let r = Rates::of(arch);
    let warp = |class: Class| c.class(class) as f64;
    let lanes = |class: Class| 32.0 * warp(class);
    let issued = c.warp_instructions() as f64 - warp(Class::Move);
    let shared =
        c.shared_passes as f64 * 128.0 + c.shared_tensor as f64 + (c.copied_in + c.copied_out + c.reduced_out) as f64;
    let memory = (c.copied_in + c.copied_out + c.reduced_out + c.global_read + c.global_written) as f64;
    let mut units = vec![
        ("issue", issued / r.issue),
        ("f32", (lanes(Class::Float) + 2.0 * lanes(Class::Packed)) / r.float),
        ("integer", (lanes(Class::Integer) + lanes(Class::Predicate)) / r.integer),
        ("special functions", (c.exponentials as f64 + lanes(Class::Special)) / r.special),
        ("conversions", lanes(Class::Convert) / r.convert),
        ("tensor core", c.mma_16 as f64 / r.mma_16 + c.mma_tf32 as f64 / r.mma_tf32),
        ("shared memory", shared / r.shared),
        ("memory", memory / r.memory),
    ];
    units.sort_by(|a, b| b.1.total_cmp(&a.1));
    Bound { units }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attention_tile_is_bound_by_products_or_exponentials() {
        // A 128x128 tile of scores at head_dim 128: two products and 16,384 exponentials.
        let tile = |dim: u64| Counters { mma_16: 2 * 128 * 128 * dim, exponentials: 128 * 128, ..Counters::default() };
        let hopper = bound(Arch::Sm90, &tile(128));
        assert_eq!((hopper.limiter(), hopper.cycles(1)), ("tensor core", 2048.0));
        assert_eq!(bound(Arch::Sm90, &tile(32)).limiter(), "special functions");
        assert_eq!(bound(Arch::Sm90, &tile(32)).cycles(1), 1024.0);
        assert_eq!(bound(Arch::Sm100, &tile(128)).cycles(4), 256.0);
    }

    #[test]
    fn conflicts_cost_shared_memory_cycles() {
        let c = Counters { shared_passes: 64, bank_conflicts: 62, ..Counters::default() };
        assert_eq!(bound(Arch::Sm90, &c).units[0], ("shared memory", 64.0));
    }
}
