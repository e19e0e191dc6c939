//! A warp: registers, divergence, and what its asynchronous work left behind.

use super::Launch;
use super::tcgen::TensorView;
use crate::alu::Lanes;
use crate::clock::{Foreign, Knowledge};
use crate::ir::{Dst, NONE};
use std::collections::VecDeque;

/// Why a fragment does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a named barrier; `red` writes a result on wake-up.
    Bar {
        id: u32,
        generation: u64,
        red: bool,
    },
    /// At an mbarrier whose phase `phase` is not complete.
    Mbar {
        cta: usize,
        off: u32,
        phase: u32,
    },
    /// At a warp-synchronous instruction, for the other lanes.
    Sync {
        need: u32,
        exec: u32,
    },
    ClusterBar {
        generation: u64,
    },
    Bulk {
        lanes: u32,
        n: u32,
        read: bool,
    },
    CopyGroups(u32),
    Sleep(u64),
    /// For tensor memory, until something changes after this point.
    Tmem(u64),
}

/// Lanes that run together.
#[derive(Clone, Debug)]
pub(crate) struct Frag {
    pub pc: u32,
    pub mask: u32,
    /// Where they wait for the rest; [`NONE`] for nothing.
    pub join: u32,
    pub state: State,
    /// Line of the wait, for reports.
    pub wait_line: u32,
    /// The mbarrier phase it waits for: CTA, offset, phase.
    pub awaited: Option<(usize, u32, u32)>,
    /// A wait gave up once; the next try returns false instead of blocking.
    pub timed_out: bool,
}

/// A meeting point of diverged lanes.
#[derive(Clone, Debug)]
struct Join {
    pc: u32,
    parent: u32,
    total: u32,
    arrived: u32,
}

/// A matrix product in flight.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub inst: u32,
    pub desc_a: u64,
    pub desc_b: u64,
    /// A from registers.
    pub a: Option<Box<[Lanes; 4]>>,
    pub keep: bool,
    /// Group it belongs to.
    pub group: u32,
    /// Computed already; only the wait is outstanding.
    pub done: bool,
}

/// A warp.
pub(crate) struct Warp {
    /// Index in the cluster; also its clock slot.
    pub index: usize,
    pub cta: usize,
    /// Index in the CTA.
    pub id: u32,
    pub regs: Vec<Lanes>,
    pub preds: Vec<u32>,
    /// Carry flag per lane.
    pub cc: u32,
    pub frags: Vec<Frag>,
    pub cur: usize,
    joins: Vec<Join>,
    free_joins: Vec<u32>,
    /// Lanes that exist.
    exist: u32,
    pub exited: u32,
    /// Line of the instruction at hand.
    pub line: u32,
    /// Local memory, one block per lane.
    pub local: Vec<u8>,
    pub local_init: Vec<bool>,
    pub know: Knowledge,
    /// Time up to which all lanes are ordered with each other, and the lanes that used shared memory since.
    pub synced: u32,
    pub touched: u32,
    /// What the last fence released, for strong stores and atomics after it.
    pub released: Option<Box<Knowledge>>,
    /// What the last `fence.mbarrier_init` released, for a relaxed arrival at the cluster barrier after it.
    pub inits: Option<Box<Knowledge>>,
    /// What strong loads saw released, for a fence after them.
    pub observed: Foreign,
    /// Products in flight, oldest first.
    pub products: VecDeque<Product>,
    /// Group that the next product joins, counted from 1.
    pub wg_group: u32,
    /// State of registers of products in flight: 1 accumulator, 2 operand.
    pub busy: Vec<u8>,
    /// Fence epoch in which each register was last written.
    pub written: Vec<u32>,
    pub fence_epoch: u32,
    /// `cp.async` groups: committed ones, and the clock of the open one.
    pub copy_open: u32,
    pub copy_groups: VecDeque<u32>,
    pub tid: [[u32; 32]; 3],
    /// Number of `tcgen05.ld` not waited for: their destination registers have `busy` bit 4.
    pub tmem_loads: u32,
    /// Number of the last `tcgen05.ld` and `tcgen05.st`.
    pub tmem_load_seq: u32,
    pub tmem_store_seq: u32,
    /// What `tcgen05.fence::after_thread_sync` let it see.
    pub tensor_view: TensorView,
    pub cluster_arrived: bool,
    /// Lanes of each register whose value comes from memory that nothing wrote.
    pub undefined: Vec<u32>,
    /// The same of each predicate.
    pub unsure: Vec<u32>,
    /// Some register had such a value; and where the last one was loaded: line and address.
    pub undefined_from: Option<(u32, u64)>,
    /// Progress of the cluster when a blocking wait last gave up.
    pub gave_up: u64,
    /// A round of a wait loop ended its turn.
    pub polled: bool,
}

/// All lanes.
pub(crate) const FULL: u32 = u32::MAX;

impl Warp {
    pub(crate) fn new(l: &Launch<'_>, index: usize, cta: usize, id: u32, threads: u32) -> Warp {
        let k = l.kernel;
        let left = threads - id * 32;
        let exist = if left >= 32 { FULL } else { (1 << left) - 1 };
        let mut tid = [[0; 32]; 3];
        for lane in 0..32u32 {
            let t = id * 32 + lane;
            tid[0][lane as usize] = t % l.block[0];
            tid[1][lane as usize] = t / l.block[0] % l.block[1];
            tid[2][lane as usize] = t / l.block[0] / l.block[1];
        }
        let mut know = Knowledge::default();
        know.all.set(index as u32, 1);
        Warp {
            index,
            cta,
            id,
            regs: vec![[0; 32]; k.regs as usize],
            preds: vec![0; k.preds as usize],
            cc: 0,
            frags: vec![Frag {
                pc: 0,
                mask: exist,
                join: NONE,
                state: State::Ready,
                wait_line: 0,
                timed_out: false,
                awaited: None,
            }],
            cur: 0,
            joins: vec![],
            free_joins: vec![],
            exist,
            exited: 0,
            line: 0,
            local: vec![0xcd; k.local_bytes as usize * 32],
            local_init: vec![false; if l.cfg.detect { k.local_bytes as usize * 32 } else { 0 }],
            know,
            synced: 0,
            touched: 0,
            released: None,
            inits: None,
            observed: Foreign::default(),
            products: VecDeque::new(),
            wg_group: 1,
            busy: vec![0; k.regs as usize],
            written: vec![u32::MAX; k.regs as usize],
            fence_epoch: 0,
            copy_open: 1,
            copy_groups: VecDeque::new(),
            tid,
            tmem_loads: 0,
            tmem_load_seq: 0,
            tmem_store_seq: 0,
            tensor_view: TensorView::default(),
            cluster_arrived: false,
            undefined: vec![0; k.regs as usize],
            unsure: vec![0; k.preds as usize],
            undefined_from: None,
            gave_up: u64::MAX,
            polled: false,
        }
    }

    /// Lanes that exist and have not left.
    pub(crate) fn live(&self) -> u32 {
        self.exist & !self.exited
    }

    /// This warp's time.
    pub(crate) fn clock(&self) -> u32 {
        self.know.all.get(self.index as u32)
    }

    /// Begins a new epoch after a release, so that later accesses are not covered by it.
    pub(crate) fn advance(&mut self) {
        let c = self.clock();
        self.know.all.set(self.index as u32, c + 1);
    }

    /// All lanes wait for each other here.
    pub(crate) fn sync_lanes(&mut self) {
        self.synced = self.clock();
        self.touched = 0;
        self.advance();
    }

    #[inline]
    pub(crate) fn set(&mut self, d: Dst, mask: u32, v: &Lanes) {
        if d == NONE {
            return;
        }
        self.written[d as usize] = self.fence_epoch;
        let r = &mut self.regs[d as usize];
        if mask == FULL {
            *r = *v;
        } else {
            for i in 0..32 {
                if mask >> i & 1 == 1 {
                    r[i] = v[i];
                }
            }
        }
    }

    #[inline]
    pub(crate) fn set_lane(&mut self, d: Dst, lane: usize, v: u64) {
        if d != NONE {
            self.written[d as usize] = self.fence_epoch;
            self.regs[d as usize][lane] = v;
        }
    }

    #[inline]
    pub(crate) fn set_pred(&mut self, p: u32, mask: u32, v: u32) {
        if p != NONE {
            let r = &mut self.preds[p as usize];
            *r = (*r & !mask) | (v & mask);
            self.unsure[p as usize] &= !mask;
        }
    }

    /// Splits the current fragment: each `(pc, mask)` runs on its own until `rec`.
    pub(crate) fn diverge(&mut self, parts: &[(u32, u32)], rec: u32) {
        let f = self.frags[self.cur].clone();
        let join = if rec == NONE || (f.join != NONE && self.joins[f.join as usize].pc == rec) {
            f.join
        } else {
            let j = Join { pc: rec, parent: f.join, total: f.mask, arrived: 0 };
            match self.free_joins.pop() {
                Some(i) => {
                    self.joins[i as usize] = j;
                    i
                }
                None => {
                    self.joins.push(j);
                    self.joins.len() as u32 - 1
                }
            }
        };
        for (k, &(pc, mask)) in parts.iter().enumerate() {
            let part = Frag { pc, mask, join, state: State::Ready, wait_line: 0, timed_out: false, awaited: None };
            if k == 0 {
                self.frags[self.cur] = part;
            } else {
                self.frags.push(part);
            }
        }
        // Parts that are at the meeting point already, last first so that indices stay valid.
        let mut k = self.frags.len();
        while k > 0 {
            k -= 1;
            if k < self.frags.len() {
                self.settle(k);
            }
        }
    }

    /// Lets fragment `k` join the others if it is where they meet.
    pub(crate) fn settle(&mut self, k: usize) {
        let f = &self.frags[k];
        if f.join == NONE || f.state != State::Ready || self.joins[f.join as usize].pc != f.pc {
            return;
        }
        let (j, mask) = (f.join, f.mask);
        self.remove(k);
        self.joins[j as usize].arrived |= mask;
        self.check_join(j);
    }

    fn remove(&mut self, k: usize) {
        self.frags.swap_remove(k);
        if self.cur >= self.frags.len() || self.cur == k {
            self.cur = 0;
        }
    }

    fn check_join(&mut self, j: u32) {
        let join = self.joins[j as usize].clone();
        if join.arrived != join.total {
            return;
        }
        self.free_joins.push(j);
        // A recycled entry must not match any fragment; no fragment refers to it now.
        self.joins[j as usize].total = 0;
        if join.total != 0 {
            self.frags.push(Frag {
                pc: join.pc,
                mask: join.total,
                join: join.parent,
                state: State::Ready,
                wait_line: 0,
                timed_out: false,
                awaited: None,
            });
            let k = self.frags.len() - 1;
            self.settle(k);
        }
    }

    /// Lanes `mask` of the current fragment leave for good.
    pub(crate) fn exit(&mut self, mask: u32) {
        self.exited |= mask;
        let f = &mut self.frags[self.cur];
        f.mask &= !mask;
        let mut chain = vec![];
        let mut j = f.join;
        let gone = f.mask == 0;
        while j != NONE {
            chain.push(j);
            self.joins[j as usize].total &= !mask;
            j = self.joins[j as usize].parent;
        }
        if gone {
            let k = self.cur;
            self.remove(k);
        }
        // Inner meeting points first; lanes that left cannot be among those that arrived.
        for j in chain {
            let join = &self.joins[j as usize];
            if join.total != 0 && join.arrived == join.total {
                self.check_join(j);
            }
        }
    }

    /// Makes timed waits give up; true if there was one.
    pub(crate) fn time_out(&mut self) -> bool {
        let mut any = false;
        for f in &mut self.frags {
            if matches!(f.state, State::Mbar { .. }) {
                f.state = State::Ready;
                f.timed_out = true;
                any = true;
            }
        }
        any
    }
}
