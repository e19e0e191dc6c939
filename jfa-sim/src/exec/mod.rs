//! Runs a kernel: clusters in parallel, the warps of a cluster interleaved by a seeded scheduler.

mod access;
mod engine;
mod matrix;
mod step;
mod sync;
mod tcgen;
mod warp;

use crate::clock::Knowledge;
use crate::counters::Counters;
use crate::findings::{Collector, Kind, Place, finding};
use crate::ir::Kernel;
use crate::machine::Config;
use crate::mbarrier::MBarrier;
use crate::memory::DeviceMemory;
use crate::order::{Order, Strength};
use crate::rng::Rng;
use crate::shared::{Readers, Shared};
use engine::Engine;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tcgen::TensorMemory;
use warp::{State, Warp};

/// Generic address of a CTA-cluster shared address.
pub(crate) const SHARED_WINDOW: u64 = 0x7f00_0000_0000;
/// Generic addresses of local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x7e00_0000_0000;
/// Generic addresses of parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x7d00_0000_0000;
/// Size of each window.
pub(crate) const WINDOW: u64 = 1 << 32;

/// What all clusters of a launch share.
pub(crate) struct Launch<'a> {
    pub kernel: &'a Kernel,
    pub mem: &'a DeviceMemory,
    pub cfg: &'a Config,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    pub dynamic_smem: u32,
    pub params: &'a [u8],
    /// Next cluster to start.
    pub next: AtomicU64,
    pub clusters: u64,
    pub findings: Mutex<Collector>,
    /// Changes of device memory by any cluster, which tell spinning from progress.
    pub activity: AtomicU64,
    /// Writes to device memory, and what releases carry.
    pub order: Order,
    pub blackwell: bool,
}

impl Launch<'_> {
    /// Coordinates of the CTA of rank `rank` in cluster `n`.
    pub(crate) fn cta_of(&self, n: u64, rank: u32) -> [u32; 3] {
        let first = self.first_cta(n);
        let c = self.cluster;
        let at = [rank % c[0], rank / c[0] % c[1], rank / c[0] / c[1]];
        std::array::from_fn(|d| first[d] + at[d])
    }

    /// Coordinates of the first CTA of cluster `n`.
    fn first_cta(&self, n: u64) -> [u32; 3] {
        let per: [u64; 3] = std::array::from_fn(|d| u64::from(self.grid[d] / self.cluster[d]));
        let c = [n % per[0], n / per[0] % per[1], n / per[0] / per[1]];
        std::array::from_fn(|d| c[d] as u32 * self.cluster[d])
    }
}

/// A named barrier of a CTA.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedBarrier {
    /// Lanes of each warp that arrived in this use.
    arrived: HashMap<usize, u32>,
    /// Threads that the first arrival asked for; `None` is the whole CTA.
    expect: Option<u32>,
    /// Uses completed.
    generation: u64,
    know: Knowledge,
    done: Knowledge,
    popc: u32,
    all: bool,
    any: bool,
    result: (u32, bool, bool),
    first_line: u32,
}

/// A CTA.
pub(crate) struct Cta {
    pub id: [u32; 3],
    pub rank: u32,
    pub smem: Shared,
    pub mbars: BTreeMap<u32, MBarrier>,
    pub bars: Vec<NamedBarrier>,
    pub warps: std::ops::Range<usize>,
    pub tmem: TensorMemory,
    /// What atomics on each shared address carry between threads.
    pub sync_know: HashMap<u32, Knowledge>,
}

/// A cluster and everything in it.
pub(crate) struct Cluster<'a> {
    pub l: &'a Launch<'a>,
    /// Its number in the grid.
    pub number: u32,
    /// How the access at hand orders.
    pub strength: Strength,
    pub ctas: Vec<Cta>,
    pub warps: Vec<Option<Box<Warp>>>,
    pub readers: Readers,
    pub engine: Engine,
    pub rng: Rng,
    pub tick: u64,
    /// Changes of state that others can see; spinning makes none.
    pub progress: u64,
    pub counters: Counters,
    slots: u32,
    cluster_arrived: Vec<(usize, u32)>,
    cluster_generation: u64,
    cluster_know: Knowledge,
    cluster_done: Knowledge,
    hint: usize,
    steps: u64,
    last_progress: (u64, u64, u64),
    cursor: usize,
}

/// How a turn of a cluster ended.
pub(crate) enum Turn {
    /// All threads left.
    Done,
    /// Nothing but spinning: another cluster should run.
    Spinning,
    /// The cluster cannot continue; a finding says why.
    Dead,
}

impl<'a> Cluster<'a> {
    pub(crate) fn new(l: &'a Launch<'a>, n: u64) -> Cluster<'a> {
        let first = l.first_cta(n);
        let threads = l.block.iter().product::<u32>();
        let warps_per = threads.div_ceil(32) as usize;
        let size: u32 = l.cluster.iter().product();
        let bytes = (l.kernel.dynamic_offset + l.dynamic_smem)
            .max(l.kernel.static_shared + crate::lower::RESERVED_SHARED) as usize;
        let bytes = bytes.next_multiple_of(16);
        let total = warps_per * size as usize;
        let mut ctas = vec![];
        let mut warps = vec![];
        for rank in 0..size {
            let c = [rank % l.cluster[0], rank / l.cluster[0] % l.cluster[1], rank / l.cluster[0] / l.cluster[1]];
            let id = std::array::from_fn(|d| first[d] + c[d]);
            let start = warps.len();
            for w in 0..warps_per {
                warps.push(Some(Box::new(Warp::new(l, start + w, rank as usize, w as u32, threads))));
            }
            ctas.push(Cta {
                id,
                rank,
                smem: Shared::new(bytes, l.cfg.detect),
                mbars: BTreeMap::new(),
                bars: vec![NamedBarrier::default(); 16],
                warps: start..start + warps_per,
                tmem: TensorMemory::default(),
                sync_know: HashMap::new(),
            });
        }
        Cluster {
            l,
            number: n as u32,
            strength: Strength::Weak,
            ctas,
            warps,
            readers: Readers::default(),
            engine: Engine::default(),
            rng: Rng::new(l.cfg.seed.wrapping_mul(0x1000_0001).wrapping_add(n)),
            tick: 0,
            progress: 0,
            counters: Counters { ctas: u64::from(size), ..Counters::default() },
            // Per warp: itself, its matrix products, bulk reads, element copies, tensor memory loads and stores; per CTA: its
            // tensor core.
            slots: total as u32 * 6 + size,
            cluster_arrived: vec![],
            cluster_generation: 0,
            cluster_know: Knowledge::default(),
            cluster_done: Knowledge::default(),
            hint: 0,
            steps: 0,
            last_progress: (0, 0, 0),
            cursor: 0,
        }
    }

    /// CPU time of this thread in nanoseconds where matrix arithmetic is timed, else 0.
    pub(crate) fn matrix_clock(&self) -> u64 {
        if self.l.cfg.time_matrix { crate::clock::cpu_nanos() } else { 0 }
    }

    pub(crate) fn wgmma_slot(&self, w: usize) -> u32 {
        (self.warps.len() + w) as u32
    }

    pub(crate) fn bulk_slot(&self, w: usize) -> u32 {
        (self.warps.len() * 2 + w) as u32
    }

    pub(crate) fn copy_slot(&self, w: usize) -> u32 {
        (self.warps.len() * 3 + w) as u32
    }

    pub(crate) fn tmem_load_slot(&self, w: usize) -> u32 {
        (self.warps.len() * 4 + w) as u32
    }

    pub(crate) fn tmem_store_slot(&self, w: usize) -> u32 {
        (self.warps.len() * 5 + w) as u32
    }

    pub(crate) fn tcgen_slot(&self, cta: usize) -> u32 {
        (self.warps.len() * 6 + cta) as u32
    }

    pub(crate) fn new_slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots - 1
    }

    /// Reports a fault of lane `lane` of `w` at its current instruction.
    pub(crate) fn report(&self, w: &Warp, lane: u32, kind: Kind, address: Option<u64>, message: String) {
        let at = Place { line: w.line, cta: self.ctas[w.cta].id, thread: w.id * 32 + lane };
        self.report_at(at, kind, address, message);
    }

    pub(crate) fn report_at(&self, at: Place, kind: Kind, address: Option<u64>, message: String) {
        self.l.findings.lock().expect("no holder panics").add(finding(self.l.kernel, kind, at, address, message));
    }

    /// Runs until the cluster ends, dies, or does nothing but wait for others.
    pub(crate) fn run(&mut self) -> Turn {
        let n = self.warps.len();
        let mut stuck_rounds = 0;
        loop {
            let mut ran = false;
            let mut alive = false;
            let start = if self.l.cfg.shuffle { self.rng.below(n as u64) as usize } else { self.cursor };
            self.cursor = self.cursor.wrapping_add(1) % n;
            for k in 0..n {
                let wi = (start + k) % n;
                let mut w = self.warps[wi].take().expect("warps are put back after their turn");
                if !w.frags.is_empty() {
                    alive = true;
                    let quantum = if self.l.cfg.shuffle { 16 + self.rng.below(96) } else { 64 };
                    ran |= self.run_warp(&mut w, quantum);
                }
                self.warps[wi] = Some(w);
                if self.l.cfg.shuffle && self.rng.below(8) == 0 {
                    self.pump();
                }
            }
            if !alive {
                self.drain();
                return Turn::Done;
            }
            self.pump();
            if ran {
                stuck_rounds = 0;
                let seen = (self.progress, self.l.activity.load(Ordering::Relaxed));
                if seen != (self.last_progress.0, self.last_progress.1) {
                    self.last_progress = (seen.0, seen.1, self.steps);
                } else if self.steps - self.last_progress.2 > self.l.cfg.spin_limit {
                    self.deadlock("threads only spin: nothing changed for a long time");
                    return Turn::Dead;
                } else if self.steps - self.last_progress.2 > 100_000 && self.engine.is_empty() {
                    return Turn::Spinning;
                }
                continue;
            }
            // Everyone waits: let the earliest asynchronous operation finish, then let waits time out.
            if let Some(due) = self.next_due() {
                self.tick = self.tick.max(due);
                self.pump();
                continue;
            }
            if let Some(t) = self.next_wakeup() {
                self.tick = self.tick.max(t);
                continue;
            }
            stuck_rounds += 1;
            let mut woke = false;
            if stuck_rounds <= 2 {
                for w in self.warps.iter_mut().flatten() {
                    woke |= w.time_out();
                }
            }
            if !woke {
                self.deadlock("every warp waits");
                return Turn::Dead;
            }
            // Timed-out waits run again; if all come back unchanged, the counter of rounds ends this.
            let before = self.progress;
            for wi in 0..n {
                let mut w = self.warps[wi].take().expect("warps are put back after their turn");
                self.run_warp(&mut w, 10_000);
                self.warps[wi] = Some(w);
            }
            if self.progress != before {
                stuck_rounds = 0;
            }
        }
    }

    fn next_wakeup(&self) -> Option<u64> {
        self.warps
            .iter()
            .flatten()
            .flat_map(|w| &w.frags)
            .filter_map(|f| if let State::Sleep(t) = f.state { Some(t) } else { None })
            .min()
    }

    /// Reports that the cluster cannot continue, with every waiter and every barrier that matters.
    fn deadlock(&mut self, why: &str) {
        let mut text = format!("{why}.");
        let mut place: Option<Place> = None;
        for w in self.warps.iter().flatten() {
            for f in &w.frags {
                let line = self.l.kernel.code[(f.pc as usize).min(self.l.kernel.code.len() - 1)].line;
                let line = if f.wait_line != 0 { f.wait_line } else { line };
                let what = self.describe_wait(w, &f.state);
                let _ = write!(
                    text,
                    "\n  CTA {:?} warp {} lanes {:#010x}, line {line}: {what}",
                    self.ctas[w.cta].id, w.id, f.mask
                );
                if place.is_none() && !matches!(f.state, State::Ready) {
                    place = Some(Place { line, cta: self.ctas[w.cta].id, thread: w.id * 32 + f.mask.trailing_zeros() });
                }
            }
        }
        for c in &self.ctas {
            for (off, b) in &c.mbars {
                let _ = write!(
                    text,
                    "\n  CTA {:?} mbarrier {off:#x}: phase {} (parity {}), {} of {} arrivals and {} bytes pending",
                    c.id,
                    b.phase,
                    b.phase & 1,
                    b.pending,
                    b.expected,
                    b.tx
                );
            }
            for (id, b) in c.bars.iter().enumerate().filter(|(_, b)| !b.arrived.is_empty()) {
                let threads: u32 = self.arrived_threads(c, b);
                let _ = write!(
                    text,
                    "\n  CTA {:?} barrier {id}: {threads} threads arrived of {}",
                    c.id,
                    self.expected_threads(c, b)
                );
            }
        }
        let place = place.unwrap_or(Place { line: 0, cta: self.ctas[0].id, thread: 0 });
        self.report_at(place, Kind::Deadlock, None, text);
        self.leftover_bytes();
    }

    fn describe_wait(&self, w: &Warp, s: &State) -> String {
        match s {
            State::Ready => "runs".into(),
            State::Bar { id, .. } => format!("waits at barrier {id}"),
            State::Mbar { cta, off, phase, .. } => {
                format!(
                    "waits for phase {phase} (parity {}) of mbarrier {off:#x} of CTA {:?}",
                    phase & 1,
                    self.ctas[*cta].id
                )
            }
            State::Sync { need, .. } => {
                format!("waits for lanes {:#010x} of its warp at a warp-synchronous instruction", need & w.live())
            }
            State::ClusterBar { .. } => {
                format!("waits at the cluster barrier, where {} arrivals are counted", self.cluster_arrived.len())
            }
            State::Bulk { n, read, .. } => {
                format!("waits until {n} bulk groups are left ({})", if *read { "reads" } else { "all" })
            }
            State::CopyGroups(n) => format!("waits until {n} cp.async groups are left"),
            State::Sleep(_) => "sleeps".into(),
            State::Tmem(_) => "waits for tensor memory to allocate".into(),
        }
    }
}

impl Cluster<'_> {
    /// Last checks after all threads left.
    fn finish(&mut self) {
        for c in 0..self.ctas.len() {
            self.tcgen_end(c);
        }
    }
}

/// Runs all clusters of a launch on `threads` workers.
pub(crate) fn run_all(l: &Launch<'_>, threads: usize) -> Counters {
    let total = Mutex::new(Counters::default());
    let live = AtomicU64::new(l.clusters);
    let work = || {
        let mut sum = Counters::default();
        let mut parked: std::collections::VecDeque<Box<Cluster<'_>>> = Default::default();
        loop {
            let started = l.next.fetch_add(1, Ordering::Relaxed);
            let mut c = if started < l.clusters {
                Box::new(Cluster::new(l, started))
            } else {
                l.next.fetch_sub(1, Ordering::Relaxed);
                match parked.pop_front() {
                    Some(c) => c,
                    None => break,
                }
            };
            match c.run() {
                Turn::Spinning => {
                    let elsewhere = live.load(Ordering::Relaxed) > parked.len() as u64 + 1;
                    if l.next.load(Ordering::Relaxed) >= l.clusters && elsewhere {
                        // Whoever this one waits for runs on another worker, which may have to wait for a CPU itself: rounds
                        // meanwhile must not add up to what counts as deadlock. Where nobody else is left, they must.
                        if parked.is_empty() {
                            std::thread::sleep(std::time::Duration::from_micros(100));
                        } else {
                            std::thread::yield_now();
                        }
                    }
                    parked.push_back(c);
                }
                Turn::Done | Turn::Dead => {
                    live.fetch_sub(1, Ordering::Relaxed);
                    c.finish();
                    sum.add(&c.counters);
                }
            }
        }
        total.lock().expect("no holder panics").add(&sum);
    };
    if threads <= 1 {
        work();
    } else {
        rayon::scope(|s| {
            for _ in 0..threads {
                s.spawn(|_| work());
            }
        });
    }
    total.into_inner().expect("no holder panics")
}
