//! Loops that only wait: they read memory or a barrier until it has changed.

use crate::ir::{Inst, Kernel, Mbar, NONE, Op, PSrc, Poll, VoteMode};
use crate::ptx::Space;
use std::collections::{BTreeSet, HashSet};

/// Most instructions of a loop that is looked at.
const LONGEST: usize = 64;

/// For each branch that closes a wait loop the cost of a round.
///
/// A loop waits if its rounds carry nothing to the next one (no register or predicate is read before the round has written
/// it), change nothing that others see, and look at memory or at an mbarrier: then a round that does not end the loop has
/// done nothing but wait, and how many there are says nothing about the kernel's work. Only rounds without branches other
/// than out of the loop are recognised, which is how compilers leave such loops.
pub(super) fn find(k: &Kernel) -> Vec<Option<Box<Poll>>> {
    let code = &k.code;
    let mut targets = BTreeSet::new();
    for inst in code {
        match &inst.op {
            Op::Bra(t) => {
                targets.insert(*t as usize);
            }
            Op::BrxIdx(_, ts) => targets.extend(ts.iter().map(|t| *t as usize)),
            _ => {}
        }
    }
    let candidate = |first: usize, last: usize| {
        // Nobody enters in the middle.
        first <= last && last - first < LONGEST && targets.range(first + 1..=last).next().is_none()
    };
    (0..code.len())
        .map(|i| match code[i].op {
            Op::Bra(t) if candidate(t as usize, i) => round(k, t as usize, i).map(Box::new),
            _ => None,
        })
        .collect()
}

/// The cost of a round from `first` to the branch at `last`, if the loop waits.
fn round(k: &Kernel, first: usize, last: usize) -> Option<Poll> {
    let code = &k.code;
    let mut poll = Poll::default();
    let mut looks = false;
    // What unguarded instructions of the round have written, and what the round has read before that.
    let (mut written, mut early) = (HashSet::new(), HashSet::new());
    let mut touched = HashSet::new();
    for (pc, inst) in code.iter().enumerate().take(last + 1).skip(first) {
        looks |= match &inst.op {
            Op::Bra(t) if pc == last || !(first..=last).contains(&(*t as usize)) => false,
            Op::Ld { space, .. } if *space != Space::Local => true,
            Op::Mbar(Mbar::Wait { .. }, ..) => true,
            Op::Nop
            | Op::A1(..)
            | Op::A2(..)
            | Op::A3(..)
            | Op::Mov(..)
            | Op::Cvt(..)
            | Op::Lop3 { .. }
            | Op::Setp { .. }
            | Op::Selp(..)
            | Op::PLogic(..)
            | Op::PMov(..)
            | Op::CvtaShared { .. }
            | Op::Sreg(..)
            | Op::Fence(_)
            | Op::WarpSync(_)
            | Op::Vote { .. }
            | Op::Nanosleep(_) => false,
            _ => return None,
        };
        let (mut reads, mut writes) = (vec![], vec![]);
        for u in &k.uses[k.use_start[pc] as usize..k.use_start[pc + 1] as usize] {
            let name = (false, u & 0x7fff_ffff);
            if u >> 31 == 1 { writes.push(name) } else { reads.push(name) }
        }
        predicates(inst, |p, write| {
            if p != NONE {
                if write { writes.push((true, p)) } else { reads.push((true, p)) }
            }
        });
        early.extend(reads.into_iter().filter(|r| !written.contains(r)));
        touched.extend(writes.iter().copied());
        if inst.guard.id == NONE {
            written.extend(writes);
            poll.unguarded += 1;
            if let Op::Ld { space, d, bytes, .. } = &inst.op {
                let n = d.len() as u64 * u64::from(*bytes);
                match space {
                    Space::Shared => {
                        poll.shared += n;
                        poll.shared_loads += 1;
                    }
                    // A generic address may lead elsewhere; wait loops use it for global memory.
                    _ => poll.global += n,
                }
            }
        }
        poll.by_class[inst.class as usize] += 1;
    }
    // The branch itself is counted as one more lane instruction where it is taken.
    poll.unguarded += u64::from(code[last].guard.id != NONE);
    (looks && early.is_disjoint(&touched)).then_some(poll)
}

/// Calls `f(predicate, written)` for the predicates of an instruction that may stand in a wait loop.
fn predicates(inst: &Inst, mut f: impl FnMut(u32, bool)) {
    let mut read = |p: &PSrc| f(p.id, false);
    read(&inst.guard);
    match &inst.op {
        Op::Selp(.., p) | Op::PMov(_, p) | Op::Setp { with: Some((_, p)), .. } | Op::Vote { p, .. } => read(p),
        Op::Lop3 { p: Some((_, _, p)), .. } => read(p),
        Op::PLogic(_, _, p, q) => {
            read(p);
            read(q);
        }
        _ => {}
    }
    match &inst.op {
        Op::Setp { p, q, .. } => {
            f(*p, true);
            f(*q, true);
        }
        Op::Mbar(Mbar::Wait { p, .. }, ..) => f(*p, true),
        Op::PLogic(_, p, ..) | Op::PMov(p, _) => f(*p, true),
        Op::Lop3 { p: Some((p, ..)), .. } => f(*p, true),
        Op::Vote { d, mode, .. } if *mode != VoteMode::Ballot => f(*d, true),
        _ => {}
    }
}
