//! Loops of machine code and what they are made of, from the disassembler's listing.
//!
//! A *work loop* is a loop with matrix products, exponentials or bulk copies of its own, that is outside of work loops
//! within it: the loops over key or query tiles of each warp role. Loops that only wait for a barrier are none.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// Classes of instructions, in the order of the tables.
pub const CLASSES: &[&str] = &[
    "matrix",
    "exp2",
    "fp32",
    "convert",
    "integer",
    "uniform",
    "shared",
    "tensor memory",
    "bulk copy",
    "global",
    "local",
    "sync",
    "branch",
    "other",
];

/// Instructions of one work loop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkLoop {
    /// Address of its first instruction.
    pub address: u64,
    /// Instructions, without those of work loops within it.
    pub instructions: u32,
    /// Instructions by class; classes it has none of are missing.
    pub classes: BTreeMap<String, u32>,
    /// Its matrix products by mnemonic.
    pub products: BTreeMap<String, u32>,
}

impl WorkLoop {
    /// Instructions of a class.
    pub fn count(&self, class: &str) -> u32 {
        self.classes.get(class).copied().unwrap_or(0)
    }
}

#[derive(Debug)]
struct Instruction {
    address: u64,
    mnemonic: String,
    /// Labels it may jump to.
    targets: Vec<String>,
    /// Whether the next instruction may follow.
    falls_through: bool,
}

/// The class of a mnemonic (`HGMMA.64x128x16.F32.BF16`).
fn class_of(mnemonic: &str) -> &'static str {
    let base = mnemonic.split('.').next().unwrap_or(mnemonic);
    match base {
        "HGMMA" | "HMMA" | "IGMMA" | "QGMMA" => "matrix",
        b if b.starts_with("UTC") && b.ends_with("MMA") => "matrix",
        "MUFU" if mnemonic.starts_with("MUFU.EX2") => "exp2",
        "LDTM" | "STTM" | "UTCCP" => "tensor memory",
        "UTMALDG" | "UTMASTG" | "UTMAREDG" | "UTMAPF" | "UBLKCP" | "UBLKRED" | "UBLKPF" => "bulk copy",
        "LDL" | "STL" => "local",
        "LDS" | "STS" | "LDSM" | "STSM" | "ATOMS" | "STAS" | "UVIRTCOUNT" => "shared",
        "LDG" | "STG" | "RED" | "REDG" | "ATOM" | "ATOMG" | "LD" | "ST" | "LDC" | "ULDC" | "LDCU" | "LDGSTS" => {
            "global"
        }
        "SYNCS" | "BAR" | "WARPSYNC" | "BSSY" | "BSYNC" | "FENCE" | "MEMBAR" | "WARPGROUP" | "DEPBAR" | "LDGDEPBAR"
        | "UTCBAR" | "UTMACMDFLUSH" | "UTCATOMSWS" | "ELECT" | "VOTE" | "VOTEU" | "ERRBAR" | "NANOSLEEP" | "CCTL"
        | "UCGABAR_ARV" | "UCGABAR_WAIT" | "USETMAXREG" | "BREAK" | "WARPGROUPSET" => "sync",
        "BRA" | "BRX" | "JMP" | "EXIT" | "RET" | "CALL" | "NOP" | "YIELD" | "BRXU" => "branch",
        "FADD" | "FMUL" | "FFMA" | "FMNMX" | "FSEL" | "FSETP" | "FADD2" | "FMUL2" | "FFMA2" | "FMNMX3" | "FSET"
        | "FCHK" | "FSWZADD" | "UFADD" | "UFMUL" | "UFFMA" | "UFMNMX" | "UFSEL" | "UFSETP" | "MUFU" => "fp32",
        "F2F" | "F2FP" | "F2I" | "I2F" | "I2FP" | "HADD2" | "HMUL2" | "HFMA2" | "UF2FP" | "UI2F" | "UI2FP" | "UF2F"
        | "FRND" | "HMNMX2" | "HSETP2" | "HSET2" => "convert",
        "R2UR" | "S2UR" | "CS2UR" => "uniform",
        b if b.starts_with('U') => "uniform",
        "IADD3" | "IADD" | "VIADD" | "IMAD" | "LOP3" | "SHF" | "ISETP" | "SEL" | "PLOP3" | "LEA" | "PRMT" | "MOV"
        | "IMNMX" | "VIMNMX" | "VIMNMX3" | "VIADDMNMX" | "IABS" | "SHFL" | "S2R" | "CS2R" | "R2P" | "P2R" | "SGXT"
        | "BMSK" | "POPC" | "FLO" | "REDUX" | "IMAD2" | "MATCH" | "LEPC" | "BREV" => "integer",
        _ => "other",
    }
}

fn is_work(mnemonic: &str) -> bool {
    matches!(class_of(mnemonic), "matrix" | "exp2" | "bulk copy")
}

/// The code of one kernel in a listing of `nvdisasm -c`: instructions, and which of them a label stands at.
fn parse(listing: &str, entry: &str) -> Result<(Vec<Instruction>, BTreeMap<String, usize>)> {
    let section = format!(".text.{entry}:");
    let mut inside = false;
    let mut code = Vec::new();
    let mut labels = BTreeMap::new();
    for line in listing.lines() {
        let line = line.trim();
        if line == section {
            inside = true;
        } else if line.starts_with(".section") || line.starts_with("//---") {
            inside = false;
        }
        if !inside {
            continue;
        }
        if let Some(label) = line.strip_suffix(':').filter(|l| l.starts_with(".L_")) {
            labels.insert(label.to_owned(), code.len());
            continue;
        }
        let Some(rest) = line.strip_prefix("/*") else { continue };
        let Some((address, rest)) = rest.split_once("*/") else { continue };
        let Ok(address) = u64::from_str_radix(address, 16) else { continue };
        let Some((text, note)) = rest.split_once(';') else { continue };
        let text = text.trim().trim_start_matches(['{', ' ']).trim();
        let (predicated, text) = match text.strip_prefix('@') {
            Some(t) => {
                let (predicate, t) = t.split_once(char::is_whitespace).unwrap_or((t, ""));
                (predicate != "PT" && predicate != "UPT", t.trim())
            }
            None => (false, text),
        };
        let (mnemonic, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let base = mnemonic.split('.').next().unwrap_or_default();
        let jumps = matches!(base, "BRA" | "BRX" | "BRXU" | "JMP");
        let labels_in = |s: &str| {
            s.match_indices(".L_")
                .map(|(at, _)| {
                    let end =
                        s[at + 1..].find(|c: char| !c.is_alphanumeric() && c != '_').map_or(s.len(), |e| at + 1 + e);
                    s[at..end].to_owned()
                })
                .collect::<Vec<_>>()
        };
        let mut targets = Vec::new();
        if jumps {
            targets = labels_in(operands);
            targets.extend(labels_in(note));
        }
        // `BRA.U !UP0, label` and `BRA.DIV UR4, label` are conditional without a predicate in front.
        let conditional = predicated || (base == "BRA" && operands.trim_start().split(',').count() > 1);
        let ends = jumps || matches!(base, "EXIT" | "RET");
        code.push(Instruction { address, mnemonic: mnemonic.to_owned(), targets, falls_through: !ends || conditional });
    }
    ensure!(!code.is_empty(), "the disassembler lists no code of '{entry}'");
    Ok((code, labels))
}

/// The work loops of a kernel, by address.
pub fn work_loops(listing: &str, entry: &str) -> Result<Vec<WorkLoop>> {
    let (code, labels) = parse(listing, entry)?;
    // Basic blocks: they begin at jump targets and after jumps.
    let mut starts = BTreeSet::from([0]);
    let mut jump_targets: Vec<Vec<usize>> = Vec::with_capacity(code.len());
    for (i, c) in code.iter().enumerate() {
        let to = c
            .targets
            .iter()
            .map(|t| {
                labels.get(t).copied().with_context(|| format!("a jump at {:#x} to {t}, which is nowhere", c.address))
            })
            .collect::<Result<Vec<_>>>()?;
        starts.extend(to.iter().copied().filter(|t| *t < code.len()));
        if (!to.is_empty() || !c.falls_through) && i + 1 < code.len() {
            starts.insert(i + 1);
        }
        jump_targets.push(to);
    }
    let starts: Vec<usize> = starts.into_iter().collect();
    let block_of = |i: usize| starts.partition_point(|s| *s <= i) - 1;
    let end_of = |b: usize| starts.get(b + 1).copied().unwrap_or(code.len());
    let successors: Vec<Vec<usize>> = (0..starts.len())
        .map(|b| {
            let last = end_of(b) - 1;
            let mut next: Vec<usize> =
                jump_targets[last].iter().filter(|t| **t < code.len()).map(|t| block_of(*t)).collect();
            if code[last].falls_through && last + 1 < code.len() {
                next.push(b + 1);
            }
            next
        })
        .collect();
    let loops = natural_loops(&successors);

    let has_work = |blocks: &BTreeSet<usize>| {
        blocks.iter().any(|b| code[starts[*b]..end_of(*b)].iter().any(|c| is_work(&c.mnemonic)))
    };
    let mut out = Vec::new();
    for (header, body) in &loops {
        let inner: BTreeSet<usize> = loops
            .iter()
            .filter(|(h, l)| *h != header && l.len() < body.len() && l.is_subset(body) && has_work(l))
            .flat_map(|(_, l)| l.iter().copied())
            .collect();
        let own: BTreeSet<usize> = body.difference(&inner).copied().collect();
        // Around other work loops a loop is the persistent one: its own part is prologue and epilogue.
        if !inner.is_empty() || !has_work(&own) {
            continue;
        }
        let mut found = WorkLoop {
            address: code[starts[*header]].address,
            instructions: 0,
            classes: BTreeMap::new(),
            products: BTreeMap::new(),
        };
        for c in own.iter().flat_map(|b| &code[starts[*b]..end_of(*b)]) {
            let class = class_of(&c.mnemonic);
            found.instructions += 1;
            *found.classes.entry(class.to_owned()).or_default() += 1;
            if class == "matrix" {
                *found.products.entry(c.mnemonic.clone()).or_default() += 1;
            }
        }
        out.push(found);
    }
    out.sort_by_key(|l| l.address);
    Ok(out)
}

/// Natural loops by header: the blocks from which a back edge's end can be reached without passing the header.
fn natural_loops(successors: &[Vec<usize>]) -> BTreeMap<usize, BTreeSet<usize>> {
    let n = successors.len();
    // Reverse post-order, then dominators by intersection (Cooper, Harvey, Kennedy).
    let mut order = Vec::new();
    let mut seen = vec![false; n];
    let mut stack = vec![(0, 0)];
    seen[0] = true;
    while let Some((b, next)) = stack.pop() {
        if let Some(&s) = successors[b].get(next) {
            stack.push((b, next + 1));
            if !seen[s] {
                seen[s] = true;
                stack.push((s, 0));
            }
        } else {
            order.push(b);
        }
    }
    order.reverse();
    let mut place = vec![usize::MAX; n];
    for (i, b) in order.iter().enumerate() {
        place[*b] = i;
    }
    let mut predecessors = vec![Vec::new(); n];
    for &b in &order {
        for &s in &successors[b] {
            predecessors[s].push(b);
        }
    }
    let mut dominator = vec![usize::MAX; n];
    dominator[0] = 0;
    let mut changed = true;
    while changed {
        changed = false;
        for &b in order.iter().skip(1) {
            let mut best = usize::MAX;
            for &p in predecessors[b].iter().filter(|p| dominator[**p] != usize::MAX) {
                best = if best == usize::MAX { p } else { common(&dominator, &place, best, p) };
            }
            if dominator[b] != best {
                dominator[b] = best;
                changed = true;
            }
        }
    }
    let dominates = |h: usize, mut b: usize| loop {
        if b == h {
            break true;
        }
        if b == 0 || dominator[b] == usize::MAX {
            break false;
        }
        b = dominator[b];
    };
    let mut loops: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for &b in &order {
        for &h in successors[b].iter().filter(|h| dominates(**h, b)) {
            let body = loops.entry(h).or_default();
            body.insert(h);
            let mut todo = vec![b];
            while let Some(x) = todo.pop() {
                if body.insert(x) {
                    todo.extend(&predecessors[x]);
                }
            }
        }
    }
    loops
}

fn common(dominator: &[usize], place: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        while place[a] > place[b] {
            a = dominator[a];
        }
        while place[b] > place[a] {
            b = dominator[b];
        }
    }
    a
}

/// Rows of the table of work loops for one kernel.
pub fn table_rows(arch: &str, kernel: &str, loops: &[WorkLoop]) -> String {
    let mut out = String::new();
    for l in loops {
        let _ = write!(out, "| {arch} | {kernel} | {:#06x} | {} |", l.address, l.instructions);
        for class in CLASSES {
            let _ = match l.count(class) {
                0 => write!(out, " |"),
                n => write!(out, " {n} |"),
            };
        }
        let products: Vec<_> = l.products.iter().map(|(name, n)| format!("{n} {name}")).collect();
        let _ = writeln!(out, " {} |", products.join(", "));
    }
    out
}

/// The head of the table.
pub fn table_head() -> String {
    format!(
        "| arch | kernel | at | all | {} | products |\n|{}\n",
        CLASSES.join(" | "),
        "---|".repeat(CLASSES.len() + 5)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
//--------------------- .text.other --------------------------
.text.other:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT ;
//--------------------- .text.k --------------------------
        .type           k,@function
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_0:
        /*0020*/                   S2R R2, SR_TID.X ;
.L_x_1:
        /*0030*/                   UTMALDG.5D [UR8], [UR16] ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR29+0x20060], RZ ;
        /*0050*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT, gsb0 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR32], R24, gsb0 ;
        /*0080*/                   MUFU.EX2 R4, R5 ;
        /*0090*/                   STL [R1+0x4c], R2                                          (*\"SpillRefill\"*);
        /*00a0*/                   BRA.U !UP0, `(.L_x_1) ;
        /*00b0*/                   F2FP.BF16.F32.PACK_AB R1, R2, R3 ;
        /*00c0*/              @!P1 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR29+0x20060], RZ ;
        /*00f0*/              @!P0 BRA `(.L_x_3) ;
        /*0100*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0110*/                   BRA `(.L_x_4);
";

    #[test]
    fn innermost_loops_with_work_are_found_with_their_distant_blocks() {
        let loops = work_loops(LISTING, "k").unwrap();
        assert_eq!(loops.len(), 1, "{loops:?}");
        let l = &loops[0];
        // The loop at .L_x_1 with the waiting block behind the kernel's end; the outer loop has no work of its own.
        assert_eq!((l.address, l.instructions), (0x30, 11));
        let counts: Vec<_> = ["matrix", "exp2", "bulk copy", "local", "sync", "branch"].map(|c| l.count(c)).into();
        assert_eq!(counts, [2, 1, 1, 1, 2, 4]);
        assert_eq!(l.products["HGMMA.64x128x16.F32.BF16"], 2);
        assert!(work_loops(LISTING, "gone").unwrap_err().to_string().contains("'gone'"));
        let row = table_rows("sm_90a", "k", &loops);
        assert!(row.starts_with("| sm_90a | k | 0x0030 | 11 | 2 | 1 |"), "{row}");
        let columns = |s: &str| s.matches('|').count();
        let head = table_head();
        assert!(head.lines().chain(row.lines()).all(|l| columns(l) == columns(&row)), "{head}{row}");
    }

    #[test]
    fn classes() {
        for (mnemonic, class) in [
            ("UTCHMMA.2CTA", "matrix"),
            ("HGMMA.64x64x16.F32", "matrix"),
            ("MUFU.EX2", "exp2"),
            ("MUFU.RCP", "fp32"),
            ("UTCCP.T.S.128dp128bit", "tensor memory"),
            ("LDTM.x32", "tensor memory"),
            ("UTCBAR", "sync"),
            ("UIADD3", "uniform"),
            ("IMAD.MOV.U32", "integer"),
            ("WHATEVER", "other"),
        ] {
            assert_eq!(class_of(mnemonic), class, "{mnemonic}");
            assert!(CLASSES.contains(&class));
        }
    }
}
