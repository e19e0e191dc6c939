//! Executes instructions of one warp.

use super::access::Loc;
use super::warp::{State, Warp};
use super::{Cluster, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW};
use crate::alu::{self, Lanes};
use crate::findings::Kind;
use crate::ir::{Addr, Bool, Class, Dst, Inst, NONE, Op, PSrc, SReg, ShflMode, Src, Tcgen, VoteMode};
use crate::order::Strength;
use crate::ptx::Space;
use crate::tensor_map::TensorMap;
use std::sync::atomic::Ordering;

/// What follows an instruction.
enum Next {
    /// The next one.
    Step,
    /// Control was transferred already.
    Moved,
    /// The fragment waits and tries again.
    Retry,
    /// The fragment waits and then goes on.
    Wait,
    /// The next one, after others had a turn.
    Yield,
    /// A round of a wait loop found nothing changed.
    Polled,
}

impl<'a> Cluster<'a> {
    /// All lanes of a source.
    #[inline]
    pub(super) fn fetch(&self, w: &Warp, s: Src, out: &mut Lanes) {
        match s {
            Src::Reg(r) => *out = w.regs[r as usize],
            Src::Imm(v) => *out = [v; 32],
            Src::Shared(off) => *out = [self.shared_addr(w.cta, off as usize); 32],
        }
    }

    /// The lanes of a source, in place if it is a register.
    #[inline]
    fn lanes<'s>(&self, w: &'s Warp, s: Src, space: &'s mut Lanes) -> &'s Lanes {
        match s {
            Src::Reg(r) => &w.regs[r as usize],
            s => {
                self.fetch(w, s, space);
                space
            }
        }
    }

    /// One lane of a source.
    #[inline]
    pub(super) fn lane_src(&self, w: &Warp, s: Src, lane: u32) -> u64 {
        match s {
            Src::Reg(r) => w.regs[r as usize][lane as usize],
            Src::Imm(v) => v,
            Src::Shared(off) => self.shared_addr(w.cta, off as usize),
        }
    }

    fn addresses(&self, w: &Warp, a: Addr, out: &mut Lanes) {
        self.fetch(w, a.base, out);
        if a.off != 0 {
            for v in out.iter_mut() {
                *v = v.wrapping_add(a.off as u64);
            }
        }
    }

    /// Runs the warp for up to `quantum` instructions; false if nothing of it could run.
    pub(super) fn run_warp(&mut self, w: &mut Warp, quantum: u64) -> bool {
        let mut ran = false;
        let mut left = quantum;
        while left > 0 && !w.frags.is_empty() {
            if !self.select(w) {
                break;
            }
            ran = true;
            let n = self.run_frag(w, left);
            left = left.saturating_sub(n.max(1));
            if std::mem::take(&mut w.polled) {
                break;
            }
        }
        let used = quantum - left;
        self.tick += used;
        self.steps += used;
        ran
    }

    /// Makes a fragment that can run the current one.
    fn select(&mut self, w: &mut Warp) -> bool {
        let n = w.frags.len();
        for i in 0..n {
            let k = (w.cur + i) % n;
            if w.frags[k].state == State::Ready {
                w.cur = k;
                return true;
            }
            w.cur = k;
            let before = w.frags.len();
            if self.try_wake(w, k) {
                // Waking may have merged it with others.
                if w.frags.len() != before || w.frags.get(w.cur).is_none_or(|f| f.state != State::Ready) {
                    return !w.frags.is_empty() && self.select(w);
                }
                return true;
            }
        }
        false
    }

    /// Runs the current fragment until it waits, yields, splits, or the budget ends; returns instructions run.
    fn run_frag(&mut self, w: &mut Warp, budget: u64) -> u64 {
        let kernel = self.l.kernel;
        let mut n = 0;
        while n < budget {
            let pc = w.frags[w.cur].pc;
            let inst: &'a Inst = &kernel.code[pc as usize];
            let mut mask = w.frags[w.cur].mask;
            if inst.guard.id != NONE || inst.guard.neg {
                mask &= self.pred(w, inst.guard);
            }
            n += 1;
            if mask == 0 {
                w.frags[w.cur].pc = pc + 1;
                self.counters.by_class[inst.class as usize] += 1;
                if self.joined(w) {
                    return n;
                }
                continue;
            }
            w.line = inst.line;
            let mut renamed = false;
            if (!w.products.is_empty() || w.tmem_loads > 0) && !matches!(inst.op, Op::Wgmma(_) | Op::WgmmaWait(_)) {
                renamed = !self.l.cfg.strict_fences && self.rename(w, inst, pc);
                if !renamed {
                    self.check_busy(w, pc);
                }
            }
            let before = if renamed { Some(self.sources_written(w, pc)) } else { None };
            let unsure = if w.undefined_from.is_some() { self.check_undefined(w, inst, pc, mask) } else { 0 };
            let next = self.step(w, inst, pc, mask);
            if unsure != 0 {
                for p in written_predicates(&inst.op) {
                    w.unsure[p as usize] |= unsure;
                }
            }
            if let Some(epoch) = before {
                for r in self.written_registers(pc) {
                    w.written[r] = epoch;
                }
            }
            match next {
                Next::Step | Next::Yield => {
                    self.counters.by_class[inst.class as usize] += 1;
                    self.counters.thread_instructions += u64::from(mask.count_ones());
                    w.frags[w.cur].pc = pc + 1;
                    if self.joined(w) || matches!(next, Next::Yield) {
                        return n;
                    }
                }
                Next::Moved => {
                    self.counters.by_class[inst.class as usize] += 1;
                    self.counters.thread_instructions += u64::from(mask.count_ones());
                    return n;
                }
                Next::Polled => {
                    self.counters.by_class[inst.class as usize] += 1;
                    self.counters.thread_instructions += u64::from(mask.count_ones());
                    if let Some(p) = &kernel.polls[pc as usize] {
                        self.counters.take_back(p, u64::from(mask.count_ones()));
                    }
                    // Others had better run now, lanes of the same warp included.
                    w.cur = (w.cur + 1) % w.frags.len().max(1);
                    w.polled = true;
                    return n;
                }
                Next::Retry => {
                    let cur = w.cur;
                    w.frags[cur].wait_line = inst.line;
                    w.cur = (w.cur + 1) % w.frags.len();
                    return n;
                }
                Next::Wait => {
                    self.counters.by_class[inst.class as usize] += 1;
                    self.counters.thread_instructions += u64::from(mask.count_ones());
                    let cur = w.cur;
                    w.frags[cur].pc = pc + 1;
                    w.frags[cur].wait_line = inst.line;
                    w.cur = (w.cur + 1) % w.frags.len();
                    return n;
                }
            }
        }
        n
    }

    /// Lets the current fragment meet others; true if it is gone.
    fn joined(&mut self, w: &mut Warp) -> bool {
        let k = w.cur;
        if w.frags[k].join == NONE {
            return false;
        }
        let before = (w.frags.len(), w.frags[k].pc, w.frags[k].mask);
        w.settle(k);
        w.frags.len() != before.0 || w.frags.get(k).is_none_or(|f| (f.pc, f.mask) != (before.1, before.2)) || w.cur != k
    }

    /// A move of registers in flight. PTX forbids it; the Triton compiler emits it where the machine code has one register
    /// for both, so there it only passes the state on. True if that was the case.
    fn rename(&mut self, w: &mut Warp, inst: &Inst, pc: u32) -> bool {
        if !matches!(inst.op, Op::Mov(..) | Op::Pack(..) | Op::Unpack(..)) {
            return false;
        }
        let k = self.l.kernel;
        let (a, b) = (k.use_start[pc as usize] as usize, k.use_start[pc as usize + 1] as usize);
        let busy = |w: &Warp, write: bool| {
            k.uses[a..b]
                .iter()
                .filter(|u| (*u >> 31 == 1) == write)
                .fold(0, |m, u| m | w.busy[(u & 0x7fff_ffff) as usize])
        };
        let flags = busy(w, false) & 5;
        if flags == 0 || busy(w, true) & 3 != 0 {
            return false;
        }
        if flags & 1 != 0 {
            self.run_products(w, u32::MAX);
        }
        for r in self.written_registers(pc) {
            w.busy[r] |= flags;
        }
        true
    }

    fn written_registers(&self, pc: u32) -> impl Iterator<Item = usize> + use<'a> {
        let k = self.l.kernel;
        let (a, b) = (k.use_start[pc as usize] as usize, k.use_start[pc as usize + 1] as usize);
        k.uses[a..b].iter().filter(|u| *u >> 31 == 1).map(|u| (u & 0x7fff_ffff) as usize)
    }

    /// Fence epoch that counts for a move: the present one if a source was written in it.
    fn sources_written(&self, w: &Warp, pc: u32) -> u32 {
        let k = self.l.kernel;
        let (a, b) = (k.use_start[pc as usize] as usize, k.use_start[pc as usize + 1] as usize);
        let dirty = k.uses[a..b].iter().any(|u| *u >> 31 == 0 && w.written[*u as usize] == w.fence_epoch);
        if dirty { w.fence_epoch } else { w.fence_epoch.wrapping_sub(1) }
    }

    /// Reports the use of registers that belong to asynchronous work.
    fn check_busy(&mut self, w: &mut Warp, pc: u32) {
        let k = self.l.kernel;
        let (a, b) = (k.use_start[pc as usize] as usize, k.use_start[pc as usize + 1] as usize);
        let mut hit = None;
        for &u in &k.uses[a..b] {
            let (r, write) = (u & 0x7fff_ffff, u >> 31 == 1);
            let busy = w.busy[r as usize];
            if busy & 1 != 0 || (busy & 2 != 0 && write) {
                hit = Some((Kind::TensorRegisters, write));
            }
            if busy & 4 != 0 {
                hit = Some((Kind::TensorOrder, write));
            }
        }
        match hit {
            Some((Kind::TensorRegisters, write)) => {
                let verb = if write { "writes" } else { "reads" };
                self.report(
                    w,
                    0,
                    Kind::TensorRegisters,
                    None,
                    format!("{verb} a register of a wgmma that was not waited for (wgmma.wait_group)"),
                );
                self.finish_products(w);
            }
            Some(_) => {
                self.report(
                    w,
                    0,
                    Kind::TensorOrder,
                    None,
                    "uses the result of a tcgen05.ld before tcgen05.wait::ld".into(),
                );
                self.tcgen_finish_loads(w);
            }
            None => {}
        }
    }

    /// Follows values that nothing wrote through arithmetic and predicates, and reports what depends on them: addresses,
    /// branches, everything that others see. Returns the lanes whose predicates the instruction makes unsure.
    fn check_undefined(&mut self, w: &mut Warp, inst: &Inst, pc: u32, mask: u32) -> u32 {
        let k = self.l.kernel;
        let (a, b) = (k.use_start[pc as usize] as usize, k.use_start[pc as usize + 1] as usize);
        let (mut from, mut reg) = (0, NONE);
        let stored_only = |r: u32| match &inst.op {
            Op::St { addr, .. } => !matches!(addr.base, Src::Reg(x) if x == r),
            Op::Tcgen(Tcgen::St { addr, .. }) => !matches!(addr.base, Src::Reg(x) if x == r),
            // The exchange itself passes them on.
            Op::Shfl { a, b, c, mask, .. } => {
                matches!(a, Src::Reg(x) if *x == r) && ![b, c, mask].iter().any(|s| matches!(s, Src::Reg(x) if *x == r))
            }
            _ => false,
        };
        for &u in &k.uses[a..b] {
            if u >> 31 == 0 && !stored_only(u) {
                let bad = w.undefined[u as usize] & mask;
                if bad != 0 {
                    from |= bad;
                    reg = u;
                }
            }
        }
        let follows = matches!(
            inst.op,
            Op::A1(..)
                | Op::A2(..)
                | Op::A3(..)
                | Op::Mov(..)
                | Op::Lop3 { p: None, .. }
                | Op::Bfi { .. }
                | Op::Selp(..)
                | Op::Pack(..)
                | Op::Unpack(..)
                | Op::Cvt(..)
                | Op::CvtPack(..)
                | Op::CvtaShared { .. }
                | Op::CvtaWindow { .. }
                | Op::Set { .. }
                | Op::Setp { .. }
                | Op::SetpX2 { .. }
                | Op::PLogic(..)
                | Op::PMov(..)
        );
        // A selection depends on what it selects only.
        if let (Op::Selp(_, x, y, p), true) = (&inst.op, from != 0) {
            let p = self.pred(w, *p);
            let of = |s: &Src| if let Src::Reg(r) = s { w.undefined[*r as usize] } else { 0 };
            from = ((of(x) & p) | (of(y) & !p)) & mask;
        }
        let unsure = |w: &Warp, p: &PSrc| if p.id == NONE { 0 } else { w.unsure[p.id as usize] };
        let asked = match &inst.op {
            Op::Selp(_, _, _, p) | Op::PMov(_, p) | Op::Vote { p, .. } | Op::Setp { with: Some((_, p)), .. } => {
                unsure(w, p)
            }
            Op::PLogic(_, _, p, q) => unsure(w, p) | unsure(w, q),
            _ => 0,
        };
        // Lanes of which nobody can say whether they execute it.
        let maybe = unsure(w, &inst.guard) & w.frags[w.cur].mask;
        from |= (asked & mask) | maybe;
        for &u in &k.uses[a..b] {
            if u >> 31 == 1 {
                let r = (u & 0x7fff_ffff) as usize;
                w.undefined[r] = (w.undefined[r] & !mask) | if follows { from } else { 0 };
            }
        }
        // The Triton compiler runs the first trip of a pipelined loop even where there is none and drops its results: it may
        // branch on values that nothing wrote.
        let branches =
            matches!(inst.op, Op::Bra(_) | Op::Vote { .. } | Op::Redux { .. } | Op::Match { .. } | Op::Bar { .. });
        if from != 0 && branches && !self.l.cfg.strict_fences {
            return 0;
        }
        if from != 0 && !follows {
            let (line, addr) = w.undefined_from.unwrap_or((0, 0));
            self.report(
                w,
                from.trailing_zeros(),
                Kind::Uninitialised,
                Some(addr),
                format!("uses a value that PTX line {line} loaded from memory that nothing wrote"),
            );
            if reg != NONE {
                w.undefined[reg as usize] = 0;
            }
            w.unsure.iter_mut().for_each(|u| *u = 0);
            return 0;
        }
        from
    }

    /// Waits until the lanes `need` are at this instruction; `Some(lanes)` when the operation can run for all of them,
    /// `None` when this fragment has to wait.
    fn gather(&mut self, w: &mut Warp, need: u32, exec: u32) -> Option<u32> {
        let need = need & w.live();
        if need & !exec == 0 {
            return Some(exec);
        }
        let pc = w.frags[w.cur].pc;
        let mut all = exec;
        for (k, f) in w.frags.iter().enumerate() {
            if k != w.cur
                && f.pc == pc
                && let State::Sync { exec, .. } = f.state
            {
                all |= exec;
            }
        }
        if need & !all != 0 {
            let cur = w.cur;
            w.frags[cur].state = State::Sync { need, exec };
            return None;
        }
        let cur = w.cur;
        let mut moved = vec![];
        for (k, f) in w.frags.iter_mut().enumerate() {
            if k != cur && f.pc == pc && matches!(f.state, State::Sync { .. }) {
                f.state = State::Ready;
                f.pc += 1;
                f.wait_line = 0;
                moved.push(f.mask);
            }
        }
        for mask in moved {
            if let Some(k) = w.frags.iter().position(|f| f.mask == mask) {
                let keep = w.frags[w.cur].mask;
                w.settle(k);
                w.cur = w.frags.iter().position(|f| f.mask == keep && f.pc == pc).unwrap_or(0);
            }
        }
        Some(all)
    }

    /// Collects the whole warp for an aligned instruction, and reports if it was split.
    fn aligned(&mut self, w: &mut Warp, exec: u32) -> Option<u32> {
        let live = w.live();
        if exec != live {
            self.report(
                w,
                exec.trailing_zeros(),
                Kind::Divergence,
                None,
                format!("lanes {exec:#010x} of {live:#010x} execute an instruction that the whole warp must execute together"),
            );
        }
        self.gather(w, live, exec)
    }

    fn step(&mut self, w: &mut Warp, inst: &'a Inst, pc: u32, mask: u32) -> Next {
        let (mut a, mut b, mut c, mut o) = ([0u64; 32], [0u64; 32], [0u64; 32], [0u64; 32]);
        match &inst.op {
            Op::Nop => {}
            Op::A1(f, d, s) => {
                f(self.lanes(w, *s, &mut a), &mut o);
                if inst.class == Class::Exp {
                    self.counters.exponentials += u64::from(mask.count_ones());
                }
                w.set(*d, mask, &o);
            }
            Op::A2(f, d, s, t) => {
                f(self.lanes(w, *s, &mut a), self.lanes(w, *t, &mut b), &mut o);
                w.set(*d, mask, &o);
            }
            Op::A3(f, d, s, t, u) => {
                f(self.lanes(w, *s, &mut a), self.lanes(w, *t, &mut b), self.lanes(w, *u, &mut c), &mut o);
                w.set(*d, mask, &o);
            }
            Op::Mov(d, s) => {
                self.fetch(w, *s, &mut a);
                w.set(*d, mask, &a);
            }
            Op::Lop3 { d, p, s, lut } => {
                self.fetch(w, s[0], &mut a);
                self.fetch(w, s[1], &mut b);
                self.fetch(w, s[2], &mut c);
                let mut nonzero = 0;
                for i in 0..32 {
                    let r = alu::lop3(a[i] as u32, b[i] as u32, c[i] as u32, *lut);
                    o[i] = u64::from(r);
                    nonzero |= u32::from(r != 0) << i;
                }
                w.set(*d, mask, &o);
                if let Some((q, op, with)) = p {
                    let v = combine(*op, nonzero, self.pred(w, *with));
                    w.set_pred(*q, mask, v);
                }
            }
            Op::Bfi { d, s, wide } => {
                let mut e = [0u64; 32];
                self.fetch(w, s[0], &mut a);
                self.fetch(w, s[1], &mut b);
                self.fetch(w, s[2], &mut c);
                self.fetch(w, s[3], &mut e);
                let f = if *wide { alu::bfi64 } else { alu::bfi32 };
                for i in 0..32 {
                    o[i] = f(a[i], b[i], c[i] as u32, e[i] as u32);
                }
                w.set(*d, mask, &o);
            }
            Op::Carry { d, a: s, b: t, mul, sub, wide, use_cc, set_cc } => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                let bits = if *wide { 64 } else { 32 };
                let m = if *wide { u64::MAX } else { 0xffff_ffff };
                if let Some((third, high)) = mul {
                    self.fetch(w, *third, &mut c);
                    for i in 0..32 {
                        let p = u128::from(a[i] & m) * u128::from(b[i] & m);
                        a[i] = if *high { (p >> bits) as u64 & m } else { p as u64 & m };
                        b[i] = c[i];
                    }
                }
                let mut cc = 0;
                for i in 0..32 {
                    let carry = u128::from(*use_cc && w.cc >> i & 1 == 1);
                    let (x, y) = (u128::from(a[i] & m), u128::from(b[i] & m));
                    let r = if *sub { x.wrapping_sub(y).wrapping_sub(carry) } else { x + y + carry };
                    o[i] = r as u64 & m;
                    cc |= u32::from(r >> bits != 0) << i;
                }
                if *set_cc {
                    w.cc = (w.cc & !mask) | (cc & mask);
                }
                w.set(*d, mask, &o);
            }
            Op::Setp { f, p, q, a: s, b: t, with } => {
                let r = f(self.lanes(w, *s, &mut a), self.lanes(w, *t, &mut b));
                let (mut v, mut n) = (r, !r);
                if let Some((op, x)) = with {
                    let x = self.pred(w, *x);
                    (v, n) = (combine(*op, v, x), combine(*op, n, x));
                }
                w.set_pred(*p, mask, v);
                w.set_pred(*q, mask, n);
            }
            Op::SetpX2 { f, p, q, a: s, b: t } => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                let lo = f(&a.map(|v| v & 0xffff), &b.map(|v| v & 0xffff));
                let hi = f(&a.map(|v| v >> 16 & 0xffff), &b.map(|v| v >> 16 & 0xffff));
                w.set_pred(*p, mask, lo);
                w.set_pred(*q, mask, hi);
            }
            Op::Set { f, d, a: s, b: t, ones, x2 } => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                if *x2 {
                    let lo = f(&a.map(|v| v & 0xffff), &b.map(|v| v & 0xffff));
                    let hi = f(&a.map(|v| v >> 16 & 0xffff), &b.map(|v| v >> 16 & 0xffff));
                    for i in 0..32 {
                        o[i] =
                            if lo >> i & 1 == 1 { *ones } else { 0 } | if hi >> i & 1 == 1 { *ones << 16 } else { 0 };
                    }
                } else {
                    let r = f(&a, &b);
                    for (i, o) in o.iter_mut().enumerate() {
                        *o = if r >> i & 1 == 1 { *ones } else { 0 };
                    }
                }
                w.set(*d, mask, &o);
            }
            Op::Selp(d, s, t, p) => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                let p = self.pred(w, *p);
                for i in 0..32 {
                    o[i] = if p >> i & 1 == 1 { a[i] } else { b[i] };
                }
                w.set(*d, mask, &o);
            }
            Op::PLogic(op, d, p, q) => {
                let v = combine(*op, self.pred(w, *p), self.pred(w, *q));
                w.set_pred(*d, mask, v);
            }
            Op::PMov(d, p) => {
                let v = self.pred(w, *p);
                w.set_pred(*d, mask, v);
            }
            Op::Pack(d, parts, bits) => {
                let m = (1u64 << bits) - 1;
                for (k, s) in parts.iter().enumerate() {
                    self.fetch(w, *s, &mut a);
                    for i in 0..32 {
                        o[i] |= (a[i] & m) << (usize::from(*bits) * k);
                    }
                }
                w.set(*d, mask, &o);
            }
            Op::Unpack(parts, s, bits) => {
                let m = (1u64 << bits) - 1;
                self.fetch(w, *s, &mut a);
                for (k, d) in parts.iter().enumerate() {
                    w.set(*d, mask, &a.map(|v| v >> (usize::from(*bits) * k) & m));
                }
            }
            Op::Sreg(d, s) => {
                self.sreg(w, *s, &mut o);
                w.set(*d, mask, &o);
            }
            Op::Cvt(cv, d, s) => {
                self.fetch(w, *s, &mut a);
                for i in 0..32 {
                    o[i] = cv.apply(a[i]);
                }
                w.set(*d, mask, &o);
            }
            Op::CvtPack(cv, d, s, t) => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                for i in 0..32 {
                    o[i] = cv.pack(a[i], b[i]);
                }
                w.set(*d, mask, &o);
            }
            Op::CvtaShared { d, a: s, to } => {
                self.fetch(w, *s, &mut a);
                w.set(
                    *d,
                    mask,
                    &a.map(|v| if *to { v.wrapping_sub(SHARED_WINDOW) } else { (v & 0xffff_ffff) + SHARED_WINDOW }),
                );
            }
            Op::CvtaWindow { d, a: s, to, local } => {
                self.fetch(w, *s, &mut a);
                let base = if *local { LOCAL_WINDOW } else { PARAM_WINDOW };
                w.set(*d, mask, &a.map(|v| if *to { v.wrapping_sub(base) } else { v.wrapping_add(base) }));
            }
            Op::Isspacep(p, s, space, cluster) => {
                self.fetch(w, *s, &mut a);
                let mut r = 0;
                for (i, v) in a.iter().enumerate() {
                    let within = |base: u64| (base..base + WINDOW).contains(v);
                    let yes = match space {
                        Space::Shared => {
                            within(SHARED_WINDOW) && (*cluster || (v >> 24 & 0xff) as u32 == self.ctas[w.cta].rank)
                        }
                        Space::Local => within(LOCAL_WINDOW),
                        Space::Param => within(PARAM_WINDOW),
                        _ => !within(SHARED_WINDOW) && !within(LOCAL_WINDOW) && !within(PARAM_WINDOW),
                    };
                    r |= u32::from(yes) << i;
                }
                w.set_pred(*p, mask, r);
            }
            Op::Mapa { d, a: s, rank, generic } => {
                self.fetch(w, *s, &mut a);
                self.fetch(w, *rank, &mut b);
                for i in 0..32 {
                    let base = if *generic { SHARED_WINDOW } else { 0 };
                    if mask >> i & 1 == 1 && b[i] as usize >= self.ctas.len() {
                        self.report(
                            w,
                            i as u32,
                            Kind::BadOperand,
                            None,
                            format!("mapa to rank {} of a cluster of {}", b[i], self.ctas.len()),
                        );
                    }
                    o[i] = base + ((a[i].wrapping_sub(base) & 0xff_ffff) | (b[i] & 0xff) << 24);
                }
                w.set(*d, mask, &o);
            }
            Op::GetCtaRank { d, a: s, generic } => {
                self.fetch(w, *s, &mut a);
                let base = if *generic { SHARED_WINDOW } else { 0 };
                w.set(*d, mask, &a.map(|v| v.wrapping_sub(base) >> 24 & 0xff));
            }
            Op::Ld { space, d, bytes, signed, addr, strength } => {
                self.addresses(w, *addr, &mut a);
                if *strength == Strength::Weak {
                    self.load(w, mask, *space, d, usize::from(*bytes), *signed, &a);
                } else {
                    self.strength = *strength;
                    self.load(w, mask, *space, d, usize::from(*bytes), *signed, &a);
                    self.strength = Strength::Weak;
                    for addr in distinct(mask, &a) {
                        self.acquire_device(w, addr, *strength);
                    }
                    return Next::Yield;
                }
            }
            Op::St { space, v, bytes, addr, strength } => {
                self.addresses(w, *addr, &mut a);
                if *strength == Strength::Weak {
                    self.store_lanes(w, mask, *space, v, usize::from(*bytes), &a);
                } else {
                    for addr in distinct(mask, &a) {
                        self.release_device(w, addr, *strength);
                    }
                    self.strength = *strength;
                    self.store_lanes(w, mask, *space, v, usize::from(*bytes), &a);
                    self.strength = Strength::Weak;
                }
            }
            Op::Atom { space, d, f, addr, b: operands, c: third, strength } => {
                self.addresses(w, *addr, &mut a);
                self.strength = *strength;
                let n = usize::from(f.bytes);
                for lane in (0..32u32).filter(|l| mask >> l & 1 == 1) {
                    let third = self.lane_src(w, *third, lane);
                    let total = n * operands.len();
                    let Some(loc) = self.resolve(w, lane, *space, a[lane as usize], total, total) else { continue };
                    for (k, s) in operands.iter().enumerate() {
                        let operand = self.lane_src(w, *s, lane);
                        let old = self.atomic(w, lane, loc, k * n, n, |v| (f.f)(v, operand, third));
                        if let Some(d) = d.get(k) {
                            w.set_lane(*d, lane as usize, old);
                        }
                    }
                }
                self.strength = Strength::Weak;
                return Next::Yield;
            }
            Op::Shfl { mode, d, p, a: s, b: t, c: u, mask: m } => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                let Some(exec) = self.gather(w, members, mask) else { return Next::Retry };
                self.fetch(w, *s, &mut a);
                self.fetch(w, *t, &mut b);
                self.fetch(w, *u, &mut c);
                let undefined = match *s {
                    Src::Reg(r) if w.undefined_from.is_some() => w.undefined[r as usize],
                    _ => 0,
                };
                let (mut valid, mut unknown) = (0, 0);
                for i in 0..32usize {
                    let seg = (c[i] >> 8 & 0x1f) as usize;
                    let clamp = (c[i] & 0x1f) as usize;
                    let bv = (b[i] & 0x1f) as usize;
                    let max = (i & seg) | (clamp & !seg);
                    let (j, ok) = match mode {
                        ShflMode::Up => (i.wrapping_sub(bv), i as isize - bv as isize >= max as isize),
                        ShflMode::Down => (i + bv, i + bv <= max),
                        ShflMode::Bfly => (i ^ bv, i ^ bv <= max),
                        ShflMode::Idx => {
                            let j = (i & seg) | (bv & !seg);
                            (j, j <= max)
                        }
                    };
                    let j = if ok { j & 31 } else { i };
                    valid |= u32::from(ok) << i;
                    o[i] = a[j] & 0xffff_ffff;
                    unknown |= (undefined >> j & 1) << i;
                }
                w.set(*d, exec, &o);
                if w.undefined_from.is_some() && *d != NONE {
                    let u = &mut w.undefined[*d as usize];
                    *u = (*u & !exec) | (unknown & exec);
                }
                w.set_pred(*p, exec, valid);
            }
            Op::Vote { mode, d, p, mask: m } => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                let Some(exec) = self.gather(w, members, mask) else { return Next::Retry };
                let v = self.pred(w, *p) & exec;
                match mode {
                    VoteMode::Ballot => w.set(*d, exec, &[u64::from(v); 32]),
                    VoteMode::All => w.set_pred(*d, exec, if v == exec { exec } else { 0 }),
                    VoteMode::Any => w.set_pred(*d, exec, if v != 0 { exec } else { 0 }),
                    VoteMode::Uni => w.set_pred(*d, exec, if v == 0 || v == exec { exec } else { 0 }),
                }
            }
            Op::Match { all, d, p, a: s, mask: m } => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                let Some(exec) = self.gather(w, members, mask) else { return Next::Retry };
                self.fetch(w, *s, &mut a);
                let lanes = || (0..32usize).filter(|i| exec >> i & 1 == 1);
                let mut same = 0;
                for i in lanes() {
                    let eq = lanes().filter(|&j| a[j] == a[i]).fold(0u32, |m, j| m | 1 << j);
                    o[i] = u64::from(if *all { if eq == exec { exec } else { 0 } } else { eq });
                    same |= u32::from(eq == exec) << i;
                }
                w.set(*d, exec, &o);
                w.set_pred(*p, exec, same);
            }
            Op::Redux { f, d, a: s, mask: m } => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                let Some(exec) = self.gather(w, members, mask) else { return Next::Retry };
                self.fetch(w, *s, &mut a);
                let v = (0..32).filter(|i| exec >> i & 1 == 1).map(|i| a[i]).reduce(f).unwrap_or(0);
                w.set(*d, exec, &[v; 32]);
            }
            Op::Activemask(d) => w.set(*d, mask, &[u64::from(mask); 32]),
            Op::Elect { d, p, mask: m } => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                let Some(exec) = self.gather(w, members, mask) else { return Next::Retry };
                let leader = exec.trailing_zeros();
                w.set(*d, exec, &[u64::from(leader); 32]);
                w.set_pred(*p, exec, 1 << leader);
            }
            Op::WarpSync(m) => {
                let members = self.lane_src(w, *m, mask.trailing_zeros()) as u32;
                if self.gather(w, members, mask).is_none() {
                    return Next::Retry;
                }
                // What lanes wrote before is ordered before what others do from here on.
                w.sync_lanes();
            }
            Op::Bra(t) => {
                let all = w.frags[w.cur].mask;
                if mask == all {
                    w.frags[w.cur].pc = *t;
                    self.joined(w);
                    if self.l.kernel.polls[pc as usize].is_some() {
                        return Next::Polled;
                    }
                } else {
                    w.diverge(&[(*t, mask), (pc + 1, all & !mask)], self.l.kernel.reconverge[pc as usize]);
                }
                return Next::Moved;
            }
            Op::BrxIdx(s, targets) => {
                self.fetch(w, *s, &mut a);
                let all = w.frags[w.cur].mask;
                let mut parts: Vec<(u32, u32)> = vec![];
                let mut add = |pc: u32, m: u32| match parts.iter_mut().find(|p| p.0 == pc) {
                    Some(p) => p.1 |= m,
                    None => parts.push((pc, m)),
                };
                for lane in 0..32usize {
                    if mask >> lane & 1 == 1 {
                        match targets.get(a[lane] as u32 as usize) {
                            Some(t) => add(*t, 1 << lane),
                            None => {
                                self.report(
                                    w,
                                    lane as u32,
                                    Kind::BadOperand,
                                    None,
                                    format!("brx.idx {} of {}", a[lane], targets.len()),
                                );
                                add(targets[0], 1 << lane);
                            }
                        }
                    }
                }
                if all & !mask != 0 {
                    add(pc + 1, all & !mask);
                }
                if let [(t, _)] = parts.as_slice() {
                    w.frags[w.cur].pc = *t;
                    self.joined(w);
                } else {
                    w.diverge(&parts, self.l.kernel.reconverge[pc as usize]);
                }
                return Next::Moved;
            }
            Op::Exit => {
                let partial = w.frags[w.cur].mask != mask;
                self.leave(w, mask);
                if partial {
                    w.frags[w.cur].pc = pc + 1;
                    self.joined(w);
                }
                return Next::Moved;
            }
            Op::Trap => {
                self.report(w, mask.trailing_zeros(), Kind::Trap, None, "the kernel executed trap".into());
                w.exit(mask);
                self.recheck_barriers(w);
                return Next::Moved;
            }
            Op::Bar { kind, aligned, id, count } => {
                let exec = if *aligned {
                    match self.aligned(w, mask) {
                        Some(e) => e,
                        None => return Next::Retry,
                    }
                } else {
                    mask
                };
                let lane = exec.trailing_zeros();
                let id = self.lane_src(w, *id, lane) & 0xffff_ffff;
                let count = count.map(|c| self.lane_src(w, c, lane) & 0xffff_ffff);
                if self.bar(w, exec, *kind, *aligned, id, count) {
                    return Next::Wait;
                }
                return Next::Yield;
            }
            Op::ClusterArrive { relaxed } => self.cluster_arrive(w, mask, *relaxed),
            Op::ClusterWait => {
                if self.cluster_wait(w, mask) {
                    return Next::Wait;
                }
            }
            Op::Fence(f) => self.fence(w, *f),
            Op::Mbar(m, space, addr) => {
                self.addresses(w, *addr, &mut a);
                if self.mbar(w, mask, m, *space, &a) {
                    return Next::Retry;
                }
                return Next::Yield;
            }
            Op::MbarPending(d, s) => {
                self.fetch(w, *s, &mut a);
                w.set(*d, mask, &a.map(|v| v & 0xf_ffff));
            }
            Op::Copy(c) => {
                if self.copy(w, mask, c) {
                    return Next::Retry;
                }
            }
            Op::MapReplace { field, space, addr, v } => {
                let lane = mask.trailing_zeros();
                let at = self.lane_addr(w, *addr, lane);
                let v = self.lane_src(w, *v, lane);
                if let Some(loc) = self.resolve(w, lane, *space, at, 128, 128) {
                    let mut bytes = [0u8; 128];
                    self.read_written(w, lane, loc, at, &mut bytes);
                    match TensorMap::replace(&mut bytes, *field, v) {
                        Ok(()) => self.write(w, lane, loc, &bytes),
                        Err(e) => self.report(w, lane, Kind::BadOperand, Some(at), e.to_string()),
                    }
                }
            }
            Op::MapCopy { dst, src } => {
                let lane = mask.trailing_zeros();
                let (d, s) = (self.lane_addr(w, *dst, lane), self.lane_addr(w, *src, lane));
                let from = self.resolve(w, lane, Space::Shared, s, 128, 128);
                let to = self.resolve(w, lane, Space::Global, d, 128, 128);
                if let (Some(from), Some(to)) = (from, to) {
                    let mut bytes = [0u8; 128];
                    self.read_written(w, lane, from, s, &mut bytes);
                    self.write(w, lane, to, &bytes);
                }
            }
            Op::Ldmatrix { trans, d, addr } => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                self.addresses(w, *addr, &mut a);
                self.ldmatrix(w, d, *trans, &a);
            }
            Op::Stmatrix { trans, v, addr } => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                self.addresses(w, *addr, &mut a);
                self.stmatrix(w, v, *trans, &a);
            }
            Op::Movmatrix(d, s) => {
                self.fetch(w, *s, &mut a);
                let at = |r: usize, col: usize| a[r * 4 + col / 2] >> (16 * (col % 2)) & 0xffff;
                for (l, o) in o.iter_mut().enumerate() {
                    let (i, j) = (l / 4, (l % 4) * 2);
                    *o = at(j, i) | at(j + 1, i) << 16;
                }
                w.set(*d, mask, &o);
            }
            Op::MmaSync(g) => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                self.mma_sync(w, g);
            }
            Op::Wgmma(g) => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                self.wgmma(w, pc, g);
            }
            Op::WgmmaFence => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                w.fence_epoch += 1;
            }
            Op::WgmmaCommit => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                w.wg_group += 1;
            }
            Op::WgmmaWait(n) => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                self.wgmma_wait(w, *n);
            }
            Op::SetMaxNReg { n, .. } => {
                if self.aligned(w, mask).is_none() {
                    return Next::Retry;
                }
                if !(24..=256).contains(n) || n % 8 != 0 {
                    self.report(
                        w,
                        0,
                        Kind::BadOperand,
                        None,
                        format!("setmaxnreg {n}: a multiple of 8 from 24 to 256 is needed"),
                    );
                }
            }
            Op::Nanosleep(s) => {
                let t = self.lane_src(w, *s, mask.trailing_zeros()) & 0xffff_ffff;
                let cur = w.cur;
                w.frags[cur].state = State::Sleep(self.tick + t.min(10_000));
                return Next::Wait;
            }
            Op::Griddep => {}
            Op::ClcTryCancel { dst, bar, multicast } => self.clc_try_cancel(w, mask, *dst, *bar, *multicast),
            Op::ClcIsCanceled(p, h) => {
                self.fetch(w, h[1], &mut a);
                let v = (0..32).fold(0u32, |m, i| m | u32::from(a[i] >> 63 == 1) << i);
                w.set_pred(*p, mask, v);
            }
            Op::ClcFirstCta(d, h, dim) => {
                self.fetch(w, h[0], &mut a);
                self.fetch(w, h[1], &mut b);
                let part = |k: u8, lo: u64, hi: u64| match k {
                    0 => lo & 0xffff_ffff,
                    1 => lo >> 32,
                    _ => hi & 0xffff,
                };
                for (k, d) in d.iter().enumerate().take(3) {
                    let k = if *dim == 3 { k as u8 } else { *dim };
                    for i in 0..32 {
                        o[i] = part(k, a[i], b[i]);
                    }
                    w.set(*d, mask, &o);
                }
            }
            Op::Tcgen(t) => {
                if self.tcgen(w, mask, t, pc) {
                    return Next::Retry;
                }
            }
        }
        Next::Step
    }

    /// Lanes leave the kernel.
    fn leave(&mut self, w: &mut Warp, mask: u32) {
        w.exit(mask);
        self.progress += 1;
        if w.live() == 0 && !w.products.is_empty() {
            self.report(
                w,
                0,
                Kind::UnfinishedWork,
                None,
                "the warp left without waiting for its wgmma operations".into(),
            );
            self.finish_products(w);
        }
        self.recheck_barriers(w);
        self.check_cluster_barrier(w);
    }

    fn sreg(&mut self, w: &Warp, s: SReg, o: &mut Lanes) {
        let l = self.l;
        let cta = &self.ctas[w.cta];
        let per: [u32; 3] = std::array::from_fn(|d| l.grid[d] / l.cluster[d]);
        let all = |v: u64| [v; 32];
        *o = match s {
            SReg::Tid(d) => std::array::from_fn(|i| u64::from(w.tid[usize::from(d)][i])),
            SReg::Ntid(d) => all(u64::from(l.block[usize::from(d)])),
            SReg::Ctaid(d) => all(u64::from(cta.id[usize::from(d)])),
            SReg::Nctaid(d) => all(u64::from(l.grid[usize::from(d)])),
            SReg::Clusterid(d) => all(u64::from(cta.id[usize::from(d)] / l.cluster[usize::from(d)])),
            SReg::Nclusterid(d) => all(u64::from(per[usize::from(d)])),
            SReg::ClusterCtaid(d) => all(u64::from(cta.id[usize::from(d)] % l.cluster[usize::from(d)])),
            SReg::ClusterNctaid(d) => all(u64::from(l.cluster[usize::from(d)])),
            SReg::ClusterCtarank => all(u64::from(cta.rank)),
            SReg::ClusterNctarank => all(self.ctas.len() as u64),
            SReg::IsExplicitCluster => all(u64::from(self.ctas.len() > 1)),
            SReg::Laneid => std::array::from_fn(|i| i as u64),
            SReg::Warpid => all(u64::from(w.id)),
            SReg::Nwarpid => all(cta.warps.len() as u64),
            SReg::Smid => all(u64::from(cta.id[0]) % u64::from(l.cfg.sms)),
            SReg::Nsmid => all(u64::from(l.cfg.sms)),
            SReg::Gridid | SReg::Zero => all(0),
            SReg::Lanemask(k) => std::array::from_fn(|i| {
                let eq = 1u64 << i;
                match k {
                    0 => eq,
                    1 => eq - 1,
                    2 => eq | (eq - 1),
                    3 => 0xffff_ffff & !(eq | (eq - 1)),
                    _ => 0xffff_ffff & !(eq - 1),
                }
            }),
            SReg::Clock(k) | SReg::Globaltimer(k) => all(match k {
                0 => self.tick & 0xffff_ffff,
                1 => self.tick >> 32,
                _ => self.tick,
            }),
            SReg::DynamicSmem => all(u64::from(l.dynamic_smem)),
            SReg::TotalSmem => all(cta.smem.data.len() as u64),
        };
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of a load")]
    fn load(&mut self, w: &mut Warp, mask: u32, space: Space, d: &[Dst], bytes: usize, signed: u8, addrs: &Lanes) {
        let total = bytes * d.len();
        let mut buf = [0u8; 64];
        let mut out = [[0u64; 32]; 8];
        let mut undefined = [0u32; 8];
        let mut shared = false;
        for lane in 0..32usize {
            if mask >> lane & 1 == 0 {
                continue;
            }
            match self.resolve(w, lane as u32, space, addrs[lane], total, total.next_power_of_two()) {
                Some(loc) => {
                    shared |= matches!(loc, Loc::Shared(..));
                    if self.read(w, lane as u32, loc, &mut buf[..total]) {
                        w.undefined_from = Some((w.line, addrs[lane]));
                        for (k, u) in undefined.iter_mut().enumerate().take(d.len()) {
                            *u |= u32::from(!self.written(w, loc, k * bytes, bytes)) << lane;
                        }
                    }
                }
                None => buf[..total].fill(0xff),
            }
            for k in 0..d.len() {
                let mut v = [0u8; 8];
                v[..bytes].copy_from_slice(&buf[k * bytes..(k + 1) * bytes]);
                let v = u64::from_le_bytes(v);
                out[k][lane] = match signed {
                    0 => v,
                    64 => alu::sign_extend(v, bytes as u16 * 8) as u64,
                    _ => u64::from(alu::sign_extend(v, bytes as u16 * 8) as u32),
                };
            }
        }
        if shared {
            w.touched |= mask;
            self.count_banks(mask, addrs, total);
        }
        for (k, d) in d.iter().enumerate() {
            w.set(*d, mask, &out[k]);
            if w.undefined_from.is_some() && *d != NONE {
                let u = &mut w.undefined[*d as usize];
                *u = (*u & !mask) | undefined[k];
            }
        }
    }

    fn store_lanes(&mut self, w: &mut Warp, mask: u32, space: Space, v: &[Src], bytes: usize, addrs: &Lanes) {
        let total = bytes * v.len();
        let mut buf = [0u8; 64];
        let mut shared = false;
        for lane in 0..32usize {
            if mask >> lane & 1 == 0 {
                continue;
            }
            for (k, s) in v.iter().enumerate() {
                let x = self.lane_src(w, *s, lane as u32).to_le_bytes();
                buf[k * bytes..(k + 1) * bytes].copy_from_slice(&x[..bytes]);
            }
            if let Some(loc) = self.resolve(w, lane as u32, space, addrs[lane], total, total.next_power_of_two()) {
                shared |= matches!(loc, Loc::Shared(..));
                self.write(w, lane as u32, loc, &buf[..total]);
                if w.undefined_from.is_some() {
                    for (k, s) in v.iter().enumerate() {
                        if matches!(s, Src::Reg(r) if w.undefined[*r as usize] >> lane & 1 == 1) {
                            if matches!(loc, Loc::Global(..)) {
                                let (line, addr) = w.undefined_from.unwrap_or((0, 0));
                                self.report(
                                    w,
                                    lane as u32,
                                    Kind::Uninitialised,
                                    Some(addr),
                                    format!(
                                        "stores a value that PTX line {line} loaded from memory that nothing wrote"
                                    ),
                                );
                            } else {
                                self.forget(w, loc, k * bytes, bytes);
                            }
                        }
                    }
                }
            }
        }
        if shared {
            w.touched |= mask;
            self.count_banks(mask, addrs, total);
        }
    }

    /// Read-modify-write of `n` bytes at `loc + k`.
    fn atomic(&mut self, w: &mut Warp, lane: u32, loc: Loc<'a>, k: usize, n: usize, f: impl Fn(u64) -> u64) -> u64 {
        match loc {
            Loc::Global(a, off) => {
                if a.shadow(off + k, n).0 & crate::memory::INIT == 0 {
                    self.report(
                        w,
                        lane,
                        Kind::Uninitialised,
                        Some(a.base() + off as u64),
                        "an atomic on device memory that nothing wrote".into(),
                    );
                }
                let addr = a.base() + (off + k) as u64;
                let strength = self.strength;
                self.release_device(w, addr, strength);
                self.note_device_write(w, lane, a, off + k, n, true, false);
                let old = a.update(off + k, n, &f);
                self.acquire_device(w, addr, strength);
                if strength == Strength::AcqRel {
                    // What it acquired travels on with what it releases.
                    self.release_device(w, addr, strength);
                }
                if f(old) != old {
                    self.progress += 1;
                    self.l.activity.fetch_add(1, Ordering::Relaxed);
                }
                a.mark(off + k, n, crate::memory::INIT, 0);
                self.counters.global_written += n as u64;
                old
            }
            Loc::Shared(cta, off) => {
                let at = off + k;
                // Atomics on shared memory order the threads that use them.
                let know = self.ctas[cta].sync_know.entry(at as u32).or_default();
                w.know.join(know);
                know.join(&w.know);
                w.advance();
                self.note_shared_read(w, lane, cta, at, n, w.index as u32, w.clock(), false, true);
                self.note_shared_write(w, lane, cta, at, n, true, false);
                let mut old = [0u8; 8];
                let data = &mut self.ctas[cta].smem.data[at..at + n];
                old[..n].copy_from_slice(data);
                let old = u64::from_le_bytes(old);
                let new = f(old);
                data.copy_from_slice(&new.to_le_bytes()[..n]);
                if new != old {
                    self.progress += 1;
                }
                self.counters.shared_written += n as u64;
                old
            }
            _ => {
                self.report(
                    w,
                    lane,
                    Kind::BadOperand,
                    None,
                    "an atomic on memory that is neither global nor shared".into(),
                );
                0
            }
        }
    }
}

/// Predicates that an instruction computes from its operands.
fn written_predicates(op: &Op) -> impl Iterator<Item = u32> {
    let two = match op {
        Op::Setp { p, q, .. } | Op::SetpX2 { p, q, .. } => [*p, *q],
        Op::PLogic(_, p, ..) | Op::PMov(p, _) => [*p, NONE],
        _ => [NONE, NONE],
    };
    two.into_iter().filter(|p| *p != NONE)
}

/// The addresses of the lanes of `mask`, each once.
fn distinct(mask: u32, addrs: &Lanes) -> Vec<u64> {
    let mut v: Vec<u64> = (0..32).filter(|i| mask >> i & 1 == 1).map(|i| addrs[i]).collect();
    v.sort_unstable();
    v.dedup();
    v
}

fn combine(op: Bool, a: u32, b: u32) -> u32 {
    match op {
        Bool::And => a & b,
        Bool::Or => a | b,
        Bool::Xor => a ^ b,
    }
}
