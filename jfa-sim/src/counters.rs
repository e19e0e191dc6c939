//! What a run counts.

use crate::ir::{CLASSES, Class, Poll};

/// Counts of a launch. Instructions are counted per warp; `thread_instructions` per lane that took part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Warp instructions by class.
    pub by_class: [u64; CLASSES],
    /// Lane instructions.
    pub thread_instructions: u64,
    /// Lane exponentials (`ex2`), packed ones counted twice.
    pub exponentials: u64,
    /// Bytes that threads loaded from global memory.
    pub global_read: u64,
    /// Bytes that threads stored to global memory, atomics included.
    pub global_written: u64,
    /// Bytes that threads loaded from shared memory.
    pub shared_read: u64,
    /// Bytes that threads stored to shared memory.
    pub shared_written: u64,
    /// Bytes that matrix products read from shared memory, as the operands need them.
    pub shared_tensor: u64,
    /// Cycles that shared-memory accesses of threads need (passes over the 32 banks).
    pub shared_passes: u64,
    /// Passes beyond the least that the access width needs: bank conflicts.
    pub bank_conflicts: u64,
    /// Bytes copied by the asynchronous engines from global to shared memory.
    pub copied_in: u64,
    /// Bytes copied from shared to global memory.
    pub copied_out: u64,
    /// Bytes reduced into global memory by the asynchronous engines.
    pub reduced_out: u64,
    /// Multiply-adds of the tensor core with 16-bit operands.
    pub mma_16: u64,
    /// Multiply-adds of the tensor core with TensorFloat-32 operands.
    pub mma_tf32: u64,
    /// Bytes between registers and tensor memory.
    pub tensor_memory: u64,
    /// Waits at CTA barriers.
    pub barrier_waits: u64,
    /// Waits at mbarriers that found the phase incomplete.
    pub mbarrier_waits: u64,
    /// Rounds of wait loops that found nothing changed. None of the other counts contains them.
    pub polls: u64,
    /// CTAs that ran.
    pub ctas: u64,
    /// CPU time that products of matrices took, operands and accumulators included; 0 unless `Config::time_matrix` is set.
    pub matrix_nanos: u64,
}

impl Counters {
    /// Warp instructions of a class.
    pub fn class(&self, c: Class) -> u64 {
        self.by_class[c as usize]
    }

    /// All warp instructions.
    pub fn warp_instructions(&self) -> u64 {
        self.by_class.iter().sum()
    }

    /// Takes back a round of a wait loop by `lanes` lanes of a warp that ended where it began.
    pub(crate) fn take_back(&mut self, p: &Poll, lanes: u64) {
        for (a, b) in self.by_class.iter_mut().zip(&p.by_class) {
            *a -= b;
        }
        self.thread_instructions -= p.unguarded * lanes;
        // Less where an access went wrong, or a generic address led elsewhere.
        self.global_read = self.global_read.saturating_sub(p.global * lanes);
        self.shared_read = self.shared_read.saturating_sub(p.shared * lanes);
        self.shared_passes = self.shared_passes.saturating_sub(p.shared_loads);
        self.polls += 1;
    }

    /// Every count with its name, in a fixed order.
    pub fn named(&self) -> Vec<(String, u64)> {
        let mut v: Vec<(String, u64)> = Class::ALL
            .iter()
            .map(|c| (format!("warp_instructions.{}", format!("{c:?}").to_lowercase()), self.class(*c)))
            .collect();
        let rest = [
            ("thread_instructions", self.thread_instructions),
            ("exponentials", self.exponentials),
            ("global_read", self.global_read),
            ("global_written", self.global_written),
            ("shared_read", self.shared_read),
            ("shared_written", self.shared_written),
            ("shared_tensor", self.shared_tensor),
            ("shared_passes", self.shared_passes),
            ("bank_conflicts", self.bank_conflicts),
            ("copied_in", self.copied_in),
            ("copied_out", self.copied_out),
            ("reduced_out", self.reduced_out),
            ("mma_16", self.mma_16),
            ("mma_tf32", self.mma_tf32),
            ("tensor_memory", self.tensor_memory),
            ("barrier_waits", self.barrier_waits),
            ("mbarrier_waits", self.mbarrier_waits),
            ("polls", self.polls),
            ("ctas", self.ctas),
        ];
        v.extend(rest.iter().map(|(n, c)| ((*n).to_string(), *c)));
        v
    }

    /// Adds another run's counts.
    pub fn add(&mut self, o: &Counters) {
        for (a, b) in self.by_class.iter_mut().zip(&o.by_class) {
            *a += b;
        }
        macro_rules! sum {
            ($($f:ident),*) => { $(self.$f += o.$f;)* };
        }
        sum!(
            thread_instructions,
            exponentials,
            global_read,
            global_written,
            shared_read,
            shared_written,
            shared_tensor,
            shared_passes,
            bank_conflicts,
            copied_in,
            copied_out,
            reduced_out,
            mma_16,
            mma_tf32,
            tensor_memory,
            barrier_waits,
            mbarrier_waits,
            polls,
            ctas,
            matrix_nanos
        );
    }
}
