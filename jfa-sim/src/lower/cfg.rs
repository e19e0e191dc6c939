//! Immediate post-dominators of branches: where diverged lanes meet again.

use crate::ir::{Inst, NONE, Op};

/// For each instruction, the first instruction that every path from it passes; [`NONE`] where that is only the exit, or one that exits.
/// Entries of instructions that cannot diverge are [`NONE`] too.
pub(super) fn reconvergence(code: &[Inst]) -> Vec<u32> {
    let n = code.len();
    let mut leader = vec![false; n + 1];
    leader[0] = true;
    let targets = |i: usize| -> Vec<usize> {
        match &code[i].op {
            Op::Bra(t) => vec![*t as usize],
            Op::BrxIdx(_, ts) => ts.iter().map(|t| *t as usize).collect(),
            _ => vec![],
        }
    };
    for i in 0..n {
        let t = targets(i);
        if !t.is_empty() || matches!(code[i].op, Op::Exit) {
            leader[i + 1] = true;
        }
        for t in t {
            leader[t] = true;
        }
    }
    let starts: Vec<usize> = (0..n).filter(|&i| leader[i]).collect();
    let mut block_of = vec![0usize; n + 1];
    for (b, &s) in starts.iter().enumerate() {
        let e = starts.get(b + 1).copied().unwrap_or(n);
        block_of[s..e].fill(b);
    }
    let nb = starts.len();
    let exit = nb;
    // Successors; a guarded exit or a trap counts as falling through, since it takes no lane anywhere else.
    let mut succ = vec![vec![]; nb + 1];
    for b in 0..nb {
        let last = starts.get(b + 1).copied().unwrap_or(n) - 1;
        let inst = &code[last];
        let guarded = inst.guard.id != NONE;
        let mut out = vec![];
        let mut falls = true;
        match &inst.op {
            Op::Bra(t) => {
                out.push(block_of[*t as usize]);
                falls = guarded;
            }
            Op::BrxIdx(_, ts) => {
                out.extend(ts.iter().map(|t| block_of[*t as usize]));
                falls = guarded;
            }
            Op::Exit if !guarded => {
                out.push(exit);
                falls = false;
            }
            _ => {}
        }
        if falls {
            out.push(if last + 1 < n { block_of[last + 1] } else { exit });
        }
        out.dedup();
        succ[b] = out;
    }
    let idom = post_dominators(&succ, exit);
    let mut rec = vec![NONE; n];
    for b in 0..nb {
        let last = starts.get(b + 1).copied().unwrap_or(n) - 1;
        if succ[b].len() > 1 {
            let d = idom[b];
            // Lanes do not meet at an exit: who comes there ends.
            let ends = |d: usize| matches!(code[starts[d]].op, Op::Exit) && code[starts[d]].guard.id == NONE;
            rec[last] = if d == usize::MAX || d == exit || ends(d) { NONE } else { starts[d] as u32 };
        }
    }
    rec
}

/// Immediate post-dominators by the iteration of Cooper, Harvey and Kennedy on the reversed graph.
fn post_dominators(succ: &[Vec<usize>], exit: usize) -> Vec<usize> {
    let n = succ.len();
    let mut pred = vec![vec![]; n];
    for (b, ss) in succ.iter().enumerate() {
        for &s in ss {
            pred[s].push(b);
        }
    }
    // Post-order of the reversed graph from the exit.
    let mut order = vec![];
    let mut seen = vec![false; n];
    let mut stack = vec![(exit, 0usize)];
    seen[exit] = true;
    while let Some((b, k)) = stack.pop() {
        if k < pred[b].len() {
            stack.push((b, k + 1));
            let p = pred[b][k];
            if !seen[p] {
                seen[p] = true;
                stack.push((p, 0));
            }
        } else {
            order.push(b);
        }
    }
    let mut number = vec![usize::MAX; n];
    for (k, &b) in order.iter().enumerate() {
        number[b] = k;
    }
    let mut idom = vec![usize::MAX; n];
    idom[exit] = exit;
    let mut changed = true;
    while changed {
        changed = false;
        for &b in order.iter().rev() {
            if b == exit {
                continue;
            }
            let mut new = usize::MAX;
            for &s in &succ[b] {
                if idom[s] == usize::MAX {
                    continue;
                }
                new = if new == usize::MAX {
                    s
                } else {
                    let (mut x, mut y) = (new, s);
                    while x != y {
                        while number[x] < number[y] {
                            x = idom[x];
                        }
                        while number[y] < number[x] {
                            y = idom[y];
                        }
                    }
                    x
                };
            }
            if new != idom[b] {
                idom[b] = new;
                changed = true;
            }
        }
    }
    idom
}
