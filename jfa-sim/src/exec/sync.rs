//! Barriers of every kind, and what waiting at them teaches.

use super::warp::{State, Warp};
use super::{Cluster, Cta, NamedBarrier};
use crate::alu::Lanes;
use crate::findings::Kind;
use crate::ir::{BarKind, Bool, Fence, Mbar, NONE, PSrc};
use crate::mbarrier::MBarrier;

impl Cluster<'_> {
    pub(super) fn arrived_threads(&self, c: &Cta, b: &NamedBarrier) -> u32 {
        b.arrived
            .iter()
            .map(|(&w, &m)| {
                // Hardware counts whole warps: lanes that do not exist or have left count with the others.
                let gone = match &self.warps[w] {
                    Some(warp) => !warp.live(),
                    None => !m,
                };
                debug_assert!(c.warps.contains(&w));
                (m | gone).count_ones()
            })
            .sum()
    }

    pub(super) fn expected_threads(&self, c: &Cta, b: &NamedBarrier) -> u32 {
        match b.expect {
            Some(n) => n,
            None => {
                c.warps.clone().filter(|&w| self.warps[w].as_ref().is_none_or(|w| w.live() != 0)).count() as u32 * 32
            }
        }
    }

    /// Arrives at a named barrier; true if the fragment must wait.
    pub(super) fn bar(
        &mut self,
        w: &mut Warp,
        mask: u32,
        kind: BarKind,
        aligned: bool,
        id: u64,
        count: Option<u64>,
    ) -> bool {
        let lane = mask.trailing_zeros();
        if id > 15 {
            self.report(w, lane, Kind::Barrier, None, format!("barrier {id} does not exist"));
            return false;
        }
        if let Some(c) = count
            && (c == 0 || c % 32 != 0 || c as usize > self.ctas[w.cta].warps.len() * 32)
        {
            self.report(
                w,
                lane,
                Kind::Barrier,
                None,
                format!("barrier {id} with {c} threads: a multiple of 32, at most the CTA, is needed"),
            );
        }
        let pred = match kind {
            BarKind::Red(_, _, p) | BarKind::RedPopc(_, p) => self.pred(w, p),
            _ => 0,
        };
        let live = w.live();
        let counted = if aligned { live } else { mask };
        let cta = w.cta;
        let b = &mut self.ctas[cta].bars[id as usize];
        let mut problem = None;
        if b.arrived.is_empty() {
            b.expect = count.map(|c| c as u32);
            b.first_line = w.line;
            (b.popc, b.all, b.any) = (0, true, false);
        } else if b.expect != count.map(|c| c as u32) {
            problem = Some(format!(
                "barrier {id} with {count:?} threads, while its first arrival (PTX line {}) asked for {:?}",
                b.first_line, b.expect
            ));
        }
        let before = b.arrived.get(&w.index).copied().unwrap_or(0);
        if before & counted != 0 {
            problem = Some(format!("warp {} arrives twice at barrier {id} before it completes", w.id));
        }
        b.arrived.insert(w.index, before | counted);
        b.popc += (pred & mask).count_ones();
        b.all &= pred & mask == mask;
        b.any |= pred & mask != 0;
        b.know.join(&w.know);
        let generation = b.generation;
        if let Some(p) = problem {
            self.report(w, lane, Kind::Barrier, None, p);
        }
        if counted == live {
            w.sync_lanes();
        } else {
            w.advance();
        }
        self.progress += 1;
        self.counters.barrier_waits += 1;
        let (complete, over) = self.bar_state(w, id as usize);
        if over {
            self.report(w, lane, Kind::Barrier, None, format!("more threads arrive at barrier {id} than it waits for"));
        }
        if complete {
            self.bar_complete(cta, id as usize);
        }
        match kind {
            BarKind::Arrive => false,
            _ if complete => {
                self.bar_finish(w, mask, kind, id as usize);
                false
            }
            _ => {
                let red = !matches!(kind, BarKind::Sync);
                let cur = w.cur;
                w.frags[cur].state = State::Bar { id: id as u32, generation, red };
                true
            }
        }
    }

    /// Whether barrier `id` of the CTA of `w` (which is taken out of the list) is complete, and whether it has too many.
    fn bar_state(&self, w: &Warp, id: usize) -> (bool, bool) {
        let c = &self.ctas[w.cta];
        let b = &c.bars[id];
        let live = |i: usize| if i == w.index { w.live() } else { self.warps[i].as_ref().map_or(0, |x| x.live()) };
        let arrived: u32 = b.arrived.iter().map(|(&i, &m)| (m | !live(i)).count_ones()).sum();
        let want = match b.expect {
            Some(n) => n,
            None => c.warps.clone().filter(|&i| live(i) != 0 || b.arrived.contains_key(&i)).count() as u32 * 32,
        };
        (arrived >= want && !b.arrived.is_empty(), arrived > want)
    }

    fn bar_complete(&mut self, cta: usize, id: usize) {
        let b = &mut self.ctas[cta].bars[id];
        b.generation += 1;
        b.arrived.clear();
        b.result = (b.popc, b.all, b.any);
        let k = std::mem::take(&mut b.know);
        b.done.join(&k);
        self.progress += 1;
    }

    fn bar_finish(&mut self, w: &mut Warp, mask: u32, kind: BarKind, id: usize) {
        let b = &self.ctas[w.cta].bars[id];
        w.know.join(&b.done);
        let (popc, all, any) = b.result;
        match kind {
            BarKind::RedPopc(d, _) => w.set(d, mask, &[u64::from(popc); 32]),
            BarKind::Red(op, p, _) => {
                let v = if op == Bool::And { all } else { any };
                w.set_pred(p, mask, if v { mask } else { 0 });
            }
            _ => {}
        }
    }

    /// A warp lost lanes: barriers that wait for the whole CTA may be complete now.
    pub(super) fn recheck_barriers(&mut self, w: &Warp) {
        for id in 0..16 {
            if !self.ctas[w.cta].bars[id].arrived.is_empty() && self.bar_state(w, id).0 {
                self.bar_complete(w.cta, id);
            }
        }
    }

    pub(super) fn pred(&self, w: &Warp, p: PSrc) -> u32 {
        let v = if p.id == NONE { u32::MAX } else { w.preds[p.id as usize] };
        if p.neg { !v } else { v }
    }

    /// Whether a waiting fragment can go on; does what waking up means.
    pub(super) fn try_wake(&mut self, w: &mut Warp, k: usize) -> bool {
        let state = w.frags[k].state.clone();
        let ready = match state {
            State::Ready => true,
            State::Bar { id, generation, red } => {
                let done = self.ctas[w.cta].bars[id as usize].generation > generation;
                if done {
                    let (mask, pc) = (w.frags[k].mask, w.frags[k].pc);
                    let kind = match &self.l.kernel.code[pc as usize - 1].op {
                        crate::ir::Op::Bar { kind, .. } if red => *kind,
                        _ => BarKind::Sync,
                    };
                    self.bar_finish(w, mask, kind, id as usize);
                }
                done
            }
            State::Mbar { cta, off, phase } => match self.ctas[cta].mbars.get(&off) {
                Some(b) => b.phase > phase,
                None => true,
            },
            State::Sync { .. } => false,
            State::ClusterBar { generation } => {
                let done = self.cluster_generation > generation;
                if done {
                    w.know.join(&self.cluster_done);
                }
                done
            }
            State::Bulk { lanes, n, read } => self.bulk_ready(w, lanes, n, read),
            State::CopyGroups(n) => self.copy_ready(w, n),
            State::Sleep(t) => self.tick >= t,
            State::Tmem(since) => self.progress > since,
        };
        if ready {
            w.frags[k].state = State::Ready;
            w.frags[k].wait_line = 0;
            if k == w.cur || w.frags[k].join != NONE {
                w.settle(k);
            }
        }
        ready
    }

    pub(super) fn cluster_arrive(&mut self, w: &mut Warp, mask: u32, relaxed: bool) {
        if w.cluster_arrived {
            self.report(
                w,
                mask.trailing_zeros(),
                Kind::Barrier,
                None,
                "arrives twice at the cluster barrier without waiting".into(),
            );
        }
        w.cluster_arrived = true;
        if !relaxed {
            self.cluster_know.join(&w.know);
        } else if let Some(inits) = w.inits.take() {
            // `fence.mbarrier_init.release.cluster` and a relaxed arrival: what the warp initialised before the fence is ordered.
            self.cluster_know.join(&inits);
        }
        w.advance();
        let i = w.index;
        match self.cluster_arrived.iter_mut().find(|a| a.0 == i) {
            Some(a) => a.1 |= mask,
            None => self.cluster_arrived.push((i, mask)),
        }
        self.progress += 1;
        self.check_cluster_barrier(w);
    }

    /// Completes the cluster barrier if every live lane arrived; `w` is out of the list.
    pub(super) fn check_cluster_barrier(&mut self, w: &Warp) {
        let live = |i: usize| if i == w.index { w.live() } else { self.warps[i].as_ref().map_or(0, |x| x.live()) };
        let ok = !self.cluster_arrived.is_empty()
            && (0..self.warps.len()).all(|i| {
                let m = self.cluster_arrived.iter().find(|a| a.0 == i).map_or(0, |a| a.1);
                live(i) & !m == 0
            });
        if ok {
            self.cluster_arrived.clear();
            self.cluster_generation += 1;
            let k = std::mem::take(&mut self.cluster_know);
            self.cluster_done.join(&k);
            self.progress += 1;
        }
    }

    /// Waits for the cluster barrier; true if the fragment must wait.
    pub(super) fn cluster_wait(&mut self, w: &mut Warp, mask: u32) -> bool {
        if !w.cluster_arrived {
            self.report(
                w,
                mask.trailing_zeros(),
                Kind::Barrier,
                None,
                "waits at the cluster barrier without having arrived".into(),
            );
            return false;
        }
        w.cluster_arrived = false;
        let outstanding = self.cluster_arrived.iter().any(|a| a.0 == w.index);
        if outstanding {
            let g = self.cluster_generation;
            let cur = w.cur;
            w.frags[cur].state = State::ClusterBar { generation: g };
            return true;
        }
        w.know.join(&self.cluster_done);
        false
    }

    pub(super) fn fence(&mut self, w: &mut Warp, f: Fence) {
        // What the warp writes from here on is not covered.
        match f {
            Fence::ProxyAsync { shared, global } => {
                if shared {
                    w.know.fence_shared();
                }
                if global {
                    w.know.fence_device();
                }
                w.advance();
            }
            Fence::MbarrierInit => {
                w.know.fence_shared();
                w.inits = Some(Box::new(w.know.clone()));
                w.advance();
            }
            Fence::ProxyTensormap { acquire: true } => {
                w.know.fence_maps();
                w.advance();
            }
            Fence::Memory { wide: true } => {
                let observed = std::mem::take(&mut w.observed);
                w.know.acquire(&observed, self.number);
                w.released = Some(Box::new(w.know.clone()));
                w.advance();
            }
            Fence::Memory { wide: false } | Fence::ProxyTensormap { acquire: false } | Fence::Other => {}
        }
    }

    /// An mbarrier operation of the lanes of `mask`; true if the fragment must wait and try again.
    pub(super) fn mbar(&mut self, w: &mut Warp, mask: u32, m: &Mbar, space: crate::ptx::Space, addrs: &Lanes) -> bool {
        let mut result = 0u32;
        let mut blocked: Option<State> = None;
        let mut know =
            if matches!(m, Mbar::Arrive { .. }) { w.know.clone() } else { crate::clock::Knowledge::default() };
        if self.l.cfg.lanes && matches!(m, Mbar::Arrive { .. }) && w.touched & !mask != 0 {
            know.all.set(w.index as u32, w.synced);
        }
        for lane in 0..32u32 {
            if mask >> lane & 1 == 0 {
                continue;
            }
            let addr = addrs[lane as usize];
            let Some(super::access::Loc::Shared(cta, off)) = self.resolve(w, lane, space, addr, 8, 8) else {
                if matches!(m, Mbar::Wait { .. }) {
                    result |= 1 << lane;
                }
                continue;
            };
            let off = off as u32;
            match *m {
                Mbar::Init(count) => {
                    let n = self.lane_src(w, count, lane) as u32;
                    if n == 0 || n >= 1 << 20 {
                        self.report(w, lane, Kind::Mbarrier, Some(addr), format!("count {n} is outside 1..2^20"));
                    }
                    if self.ctas[cta].mbars.contains_key(&off) {
                        self.report(
                            w,
                            lane,
                            Kind::Mbarrier,
                            Some(addr),
                            "initialised again without mbarrier.inval".into(),
                        );
                        self.ctas[cta].smem.set_barrier(off as usize, false);
                    }
                    self.note_shared_write(w, lane, cta, off as usize, 8, false, false);
                    self.ctas[cta].smem.set_barrier(off as usize, true);
                    let slot = self.new_slot();
                    let mut b = MBarrier::new(n, slot);
                    b.init_by = (w.index as u32, w.clock());
                    self.ctas[cta].mbars.insert(off, b);
                    self.progress += 1;
                    continue;
                }
                Mbar::Inval => {
                    match self.ctas[cta].mbars.remove(&off) {
                        Some(_) => self.ctas[cta].smem.set_barrier(off as usize, false),
                        None => self.report(
                            w,
                            lane,
                            Kind::Mbarrier,
                            Some(addr),
                            "invalidates what is not an mbarrier".into(),
                        ),
                    }
                    continue;
                }
                _ => {}
            }
            let Some(b) = self.ctas[cta].mbars.get(&off) else {
                self.report(w, lane, Kind::Mbarrier, Some(addr), "used before mbarrier.init".into());
                if matches!(m, Mbar::Wait { .. }) {
                    result |= 1 << lane;
                }
                continue;
            };
            let (init_slot, init_clock) = b.init_by;
            if w.know.all.get(init_slot) < init_clock {
                self.report(
                    w,
                    lane,
                    Kind::Mbarrier,
                    Some(addr),
                    "used without being ordered after its mbarrier.init (a barrier is missing)".into(),
                );
            }
            match *m {
                Mbar::Arrive { d, count, expect, drop, no_complete } => {
                    let n = self.lane_src(w, count, lane) as u32;
                    let tx = expect.map(|e| self.lane_src(w, e, lane) as u32);
                    let b = self.ctas[cta].mbars.get_mut(&off).expect("found above");
                    let token = u64::from(b.phase) << 32 | u64::from(b.pending);
                    if drop {
                        b.expected = b.expected.saturating_sub(n);
                    }
                    let mut problem = None;
                    if let Some(t) = tx {
                        b.last_line = w.line;
                        if let Err(e) = b.add_tx_quietly(i64::from(t)) {
                            problem = Some((Kind::TransactionCount, e));
                        }
                    }
                    match b.arrive(n, Some(&know)) {
                        Err(e) => problem = Some((Kind::Mbarrier, e)),
                        Ok(true) if no_complete => {
                            problem = Some((Kind::Mbarrier, "an arrive.noComplete completes the phase".into()));
                        }
                        Ok(_) => {}
                    }
                    if let Some((k, e)) = problem {
                        self.report(w, lane, k, Some(addr), e);
                    }
                    w.set_lane(d, lane as usize, token);
                    self.progress += 1;
                }
                Mbar::ExpectTx(tx) => {
                    let t = self.lane_src(w, tx, lane) as u32;
                    let b = self.ctas[cta].mbars.get_mut(&off).expect("found above");
                    b.last_line = w.line;
                    if let Err(e) = b.add_tx(i64::from(t)) {
                        self.report(w, lane, Kind::TransactionCount, Some(addr), e);
                    }
                    self.progress += 1;
                }
                Mbar::CompleteTx(tx) => {
                    let t = self.lane_src(w, tx, lane) as u32;
                    self.complete_tx(cta, off, u64::from(t), None);
                }
                Mbar::Wait { phase, parity, block, .. } => {
                    let v = self.lane_src(w, phase, lane);
                    let cur = w.cur;
                    let now = self.ctas[cta].mbars[&off].phase;
                    if let Some((c, o, p)) = w.frags[cur].awaited
                        && (c, o) == (cta, off)
                        && now >= p + 2
                        && parity
                    {
                        w.frags[cur].awaited = None;
                        self.report(
                            w,
                            lane,
                            Kind::Mbarrier,
                            Some(addr),
                            format!("phase {p} and the next one completed before this wait saw the first: it can miss its phase"),
                        );
                    }
                    let b = &self.ctas[cta].mbars[&off];
                    let target = if parity {
                        // Parity P asks for the completion of the phase of that parity: true once the current phase differs.
                        if u64::from(now & 1) != (v & 1) { None } else { Some(now) }
                    } else {
                        let p = (v >> 32) as u32;
                        if now > p { None } else { Some(p) }
                    };
                    match target {
                        None => {
                            result |= 1 << lane;
                            w.know.join(&b.done);
                        }
                        Some(p) => {
                            if block {
                                blocked.get_or_insert(State::Mbar { cta, off, phase: p });
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        if !matches!(m, Mbar::Wait { .. }) {
            w.advance();
            return false;
        }
        let Mbar::Wait { p, .. } = *m else { return false };
        let cur = w.cur;
        let timed_out = std::mem::take(&mut w.frags[cur].timed_out);
        if let Some(s) = blocked {
            // The hardware may give up early; once per change of state is enough to see whether the kernel tries again.
            let give_up = self.l.cfg.shuffle && w.gave_up != self.progress && self.rng.below(8) == 0;
            if give_up {
                w.gave_up = self.progress;
            }
            if result == 0 && !timed_out && !give_up {
                self.counters.mbarrier_waits += 1;
                if let State::Mbar { cta, off, phase } = s {
                    w.frags[cur].awaited = Some((cta, off, phase));
                }
                w.frags[cur].state = s;
                return true;
            }
        }
        if result != 0 {
            w.frags[cur].awaited = None;
        }
        w.set_pred(p, mask, result);
        false
    }

    /// `bytes` arrived for mbarrier `off` of CTA `cta`.
    pub(super) fn complete_tx(&mut self, cta: usize, off: u32, bytes: u64, at: Option<crate::findings::Place>) {
        self.progress += 1;
        let r = match self.ctas[cta].mbars.get_mut(&off) {
            Some(b) => b.add_tx(-(bytes as i64)).map(|_| ()),
            None => Err("an asynchronous copy completes on what is not an mbarrier (any more)".to_string()),
        };
        if let (Err(e), Some(p)) = (r, at) {
            let a = self.shared_addr(cta, off as usize);
            self.report_at(p, Kind::TransactionCount, Some(a), e);
        }
    }
}
