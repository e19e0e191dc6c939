//! What a run reports about the kernel.

use crate::ir::Kernel;
use std::collections::HashMap;
use std::fmt;

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Kind {
    /// An access outside every allocation, or outside the CTA's shared memory.
    OutOfBounds,
    /// An address that is not a multiple of the access size, or of what a copy demands.
    Misaligned,
    /// A read of bytes that nothing wrote.
    Uninitialised,
    /// Bytes of an asynchronous operation touched before its completion was observed.
    UseBeforeCompletion,
    /// Bytes that crossed from the generic to the asynchronous proxy without a proxy fence.
    MissingProxyFence,
    /// Two accesses to shared or device memory, one of them a write, that nothing orders.
    Race,
    /// Registers of a matrix product touched while it runs, or written without a fence before it.
    TensorRegisters,
    /// A descriptor or operand that the hardware does not accept.
    BadOperand,
    /// An mbarrier used before its initialisation, over-arrived, or touched as data.
    Mbarrier,
    /// A byte count of an mbarrier that does not match what arrives.
    TransactionCount,
    /// A barrier of the CTA used inconsistently.
    Barrier,
    /// An instruction that the whole warp must execute together, executed by a part of it.
    Divergence,
    /// Tensor memory used outside its allocation, before its allocation or after its release, or never released.
    TensorMemory,
    /// A tensor-core result read, or its operands overwritten, without the wait or fence that orders it.
    TensorOrder,
    /// A thread left while asynchronous work that it started was not waited for.
    UnfinishedWork,
    /// Nothing can run any more.
    Deadlock,
    /// `trap`.
    Trap,
}

/// A fault, where it happened first, and how often it happened.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// Kernel name.
    pub kernel: String,
    /// Line of the PTX text.
    pub line: u32,
    /// CTA in the grid.
    pub cta: [u32; 3],
    /// Linear thread in the CTA, where one can be named.
    pub thread: u32,
    /// Address.
    pub address: Option<u64>,
    /// What happened.
    pub message: String,
    /// Occurrences at this line.
    pub count: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} in {} at PTX line {}, CTA {:?}, thread {}",
            self.kind, self.kernel, self.line, self.cta, self.thread
        )?;
        if let Some(a) = self.address {
            write!(f, ", address {a:#x}")?;
        }
        write!(f, ": {}", self.message)?;
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        Ok(())
    }
}

/// Collects findings, one per kind and line.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    by_place: HashMap<(Kind, u32), Finding>,
}

impl Collector {
    pub(crate) fn add(&mut self, f: Finding) {
        self.by_place.entry((f.kind, f.line)).and_modify(|e| e.count += 1).or_insert(f);
    }

    pub(crate) fn into_sorted(self) -> Vec<Finding> {
        let mut v: Vec<_> = self.by_place.into_values().collect();
        v.sort_by_key(|f| (f.kind, f.line));
        v
    }
}

/// Where an instruction runs; enough to make a finding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub line: u32,
    pub cta: [u32; 3],
    pub thread: u32,
}

pub(crate) fn finding(k: &Kernel, kind: Kind, at: Place, address: Option<u64>, message: String) -> Finding {
    Finding { kind, kernel: k.name.clone(), line: at.line, cta: at.cta, thread: at.thread, address, message, count: 1 }
}
