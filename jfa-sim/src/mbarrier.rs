//! The state of an mbarrier.

use crate::clock::Knowledge;

/// Largest byte count a phase can track.
const MAX_TX: i64 = (1 << 20) - 1;

/// An initialised mbarrier.
#[derive(Clone, Debug)]
pub(crate) struct MBarrier {
    /// Arrivals of the next phases.
    pub expected: u32,
    /// Arrivals this phase still needs.
    pub pending: u32,
    /// Bytes this phase still needs.
    pub tx: i64,
    /// Phases completed.
    pub phase: u32,
    /// Its slot in vector clocks.
    pub slot: u32,
    /// What the arrivals of this phase know.
    pub current: Knowledge,
    /// What a waiter learns.
    pub done: Knowledge,
    /// Slot and clock of the warp that initialised it.
    pub init_by: (u32, u32),
    /// Line of the last change of the byte count by a thread.
    pub last_line: u32,
}

impl MBarrier {
    pub(crate) fn new(count: u32, slot: u32) -> MBarrier {
        MBarrier {
            expected: count,
            pending: count,
            tx: 0,
            phase: 0,
            slot,
            current: Knowledge::default(),
            done: Knowledge::default(),
            init_by: (0, 0),
            last_line: 0,
        }
    }

    /// Arrives `count` times; true if that completes the phase.
    pub(crate) fn arrive(&mut self, count: u32, know: Option<&Knowledge>) -> Result<bool, String> {
        if count > self.pending {
            return Err(format!(
                "{count} arrivals where the phase needs {} more (of {}): arrivals of the next phase would count in this one",
                self.pending, self.expected
            ));
        }
        self.pending -= count;
        if let Some(k) = know {
            self.current.join(k);
        }
        Ok(self.settle())
    }

    /// Changes the pending bytes; true if that completes the phase.
    pub(crate) fn add_tx(&mut self, delta: i64) -> Result<bool, String> {
        self.tx += delta;
        if self.tx.abs() > MAX_TX {
            return Err(format!("{} pending bytes exceed what an mbarrier can count", self.tx));
        }
        Ok(self.settle())
    }

    /// Expects bytes as part of an arrival, which itself decides about the phase.
    pub(crate) fn add_tx_quietly(&mut self, delta: i64) -> Result<(), String> {
        self.tx += delta;
        if self.tx.abs() > MAX_TX {
            return Err(format!("{} pending bytes exceed what an mbarrier can count", self.tx));
        }
        Ok(())
    }

    fn settle(&mut self) -> bool {
        if self.pending != 0 || self.tx != 0 {
            return false;
        }
        self.phase += 1;
        self.pending = self.expected;
        self.done.join(&self.current);
        self.current.clear();
        self.done.all.set(self.slot, self.phase);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_arrivals_complete_a_phase_together() {
        let mut b = MBarrier::new(1, 9);
        assert!(!b.add_tx(64).unwrap());
        assert!(!b.arrive(1, None).unwrap());
        assert!(b.add_tx(-64).unwrap());
        assert_eq!((b.phase, b.pending, b.done.all.get(9)), (1, 1, 1));
        // Bytes may arrive before they are expected.
        assert!(!b.add_tx(-64).unwrap());
        assert!(!b.add_tx(64).unwrap());
        assert!(b.arrive(1, None).unwrap());
        assert!(b.arrive(2, None).is_err());
    }
}
