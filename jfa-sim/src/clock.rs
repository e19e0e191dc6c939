//! Vector clocks. Every agent of a cluster has a slot: each warp, each warp's tensor core and copy engine, each mbarrier.

/// A vector clock; missing entries are zero.
#[derive(Clone, Debug, Default)]
pub(crate) struct VClock(Vec<u32>);

impl VClock {
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> u32 {
        self.0.get(slot as usize).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, slot: u32, v: u32) {
        let s = slot as usize;
        if s >= self.0.len() {
            self.0.resize(s + 1, 0);
        }
        self.0[s] = v;
    }

    pub(crate) fn raise(&mut self, slot: u32, v: u32) {
        if self.get(slot) < v {
            self.set(slot, v);
        }
    }

    pub(crate) fn join(&mut self, other: &VClock) {
        if other.0.len() > self.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a = (*a).max(*b);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// What an agent knows: everything that happened before, and the part of it that proxy fences made visible to the
/// asynchronous proxy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Knowledge {
    /// Happened before.
    pub all: VClock,
    /// Happened before, and a proxy fence stands in between.
    pub fenced: VClock,
}

impl Knowledge {
    pub(crate) fn join(&mut self, other: &Knowledge) {
        self.all.join(&other.all);
        self.fenced.join(&other.fenced);
    }

    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.fenced.clear();
    }
}
