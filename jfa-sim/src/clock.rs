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

/// What is known of one other cluster: everything that happened before, and of it what the copy engines and what the
/// readers of tensor maps can see.
#[derive(Clone, Debug, Default)]
struct Other {
    cluster: u32,
    all: VClock,
    device: VClock,
    mapped: VClock,
}

/// What is known of other clusters, from releases in device memory; usually nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Foreign(Vec<Other>);

impl Foreign {
    fn entry(&mut self, cluster: u32) -> &mut Other {
        let i = match self.0.binary_search_by_key(&cluster, |o| o.cluster) {
            Ok(i) => i,
            Err(i) => {
                self.0.insert(i, Other { cluster, ..Other::default() });
                i
            }
        };
        &mut self.0[i]
    }

    /// Clocks of a slot of a cluster: all, seen by copy engines, seen by readers of tensor maps.
    pub(crate) fn get(&self, cluster: u32, slot: u32) -> (u32, u32, u32) {
        match self.0.binary_search_by_key(&cluster, |o| o.cluster) {
            Ok(i) => (self.0[i].all.get(slot), self.0[i].device.get(slot), self.0[i].mapped.get(slot)),
            Err(_) => (0, 0, 0),
        }
    }

    pub(crate) fn join(&mut self, other: &Foreign) {
        for o in &other.0 {
            let e = self.entry(o.cluster);
            e.all.join(&o.all);
            e.device.join(&o.device);
            e.mapped.join(&o.mapped);
        }
    }

    /// Adds what an agent of `cluster` knows of its own.
    pub(crate) fn add(&mut self, cluster: u32, know: &Knowledge) {
        let e = self.entry(cluster);
        e.all.join(&know.all);
        e.device.join(&know.device);
        e.mapped.join(&know.mapped);
    }
}

/// What an agent knows: everything that happened before, and the parts of it that proxy fences made visible to the
/// asynchronous proxy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Knowledge {
    /// Happened before.
    pub all: VClock,
    /// Happened before, and a proxy fence for shared memory stands in between.
    pub fenced: VClock,
    /// The same for device memory.
    pub device: VClock,
    /// The same for tensor maps.
    pub mapped: VClock,
    /// Of other clusters.
    pub foreign: Foreign,
}

impl Knowledge {
    pub(crate) fn join(&mut self, other: &Knowledge) {
        self.all.join(&other.all);
        self.fenced.join(&other.fenced);
        self.device.join(&other.device);
        self.mapped.join(&other.mapped);
        self.foreign.join(&other.foreign);
    }

    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.fenced.clear();
        self.device.clear();
        self.mapped.clear();
        self.foreign.0.clear();
    }

    /// Learns what was released in device memory; of that, what concerns the own cluster becomes its own knowledge.
    pub(crate) fn acquire(&mut self, released: &Foreign, cluster: u32) {
        self.foreign.join(released);
        if let Ok(i) = self.foreign.0.binary_search_by_key(&cluster, |o| o.cluster) {
            let own = self.foreign.0.remove(i);
            self.all.join(&own.all);
            self.device.join(&own.device);
            self.mapped.join(&own.mapped);
        }
    }

    /// A proxy fence over shared memory.
    pub(crate) fn fence_shared(&mut self) {
        self.fenced.join(&self.all);
    }

    /// A proxy fence over device memory.
    pub(crate) fn fence_device(&mut self) {
        self.device.join(&self.all);
        for o in &mut self.foreign.0 {
            o.device.join(&o.all);
        }
    }

    /// An acquiring fence of the tensor map proxy.
    pub(crate) fn fence_maps(&mut self) {
        self.mapped.join(&self.all);
        for o in &mut self.foreign.0 {
            o.mapped.join(&o.all);
        }
    }
}

/// CPU time of the calling thread in nanoseconds; 0 where the system does not tell.
pub(crate) fn cpu_nanos() -> u64 {
    #[cfg(unix)]
    {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `t` is a timespec that the call may write.
        if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) } == 0 {
            return t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64;
        }
    }
    0
}
