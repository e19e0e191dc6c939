//! Accesses of every kind in every space, each with a fault and repaired: bounds, alignment, operands, barriers.

mod common;

use common::shape;
use jfa_sim::{Arch, Config, Kind, Machine, Module, Report};

/// Name, what is found, the faulty instructions and the repaired ones. `x` has 256 bytes of device memory, `s` 256 of shared
/// and `l` 64 of local memory; `m` is an mbarrier at the end of `s` for one arrival; `a` is the address of `s`.
const PAIRS: &[(&str, Kind, &str, &str)] = &[
    ("global load past the end", Kind::OutOfBounds, "ld.global.b32 v, [x+256];", "ld.global.b32 v, [x+252];"),
    (
        "global vector load past the end",
        Kind::OutOfBounds,
        "ld.global.v4.b32 {v, v, v, v}, [x+256];",
        "ld.global.v4.b32 {v, v, v, v}, [x+240];",
    ),
    ("global store past the end", Kind::OutOfBounds, "st.global.b64 [x+256], x;", "st.global.b64 [x+248], x;"),
    (
        "global atomic past the end",
        Kind::OutOfBounds,
        "red.global.add.u32 [x+256], 1;",
        "red.global.add.u32 [x+252], 1;",
    ),
    ("shared load past the end", Kind::OutOfBounds, "ld.shared.b32 v, [a+0x40000];", "ld.shared.b32 v, [a];"),
    ("shared store past the end", Kind::OutOfBounds, "st.shared.b32 [a+0x40000], v;", "st.shared.b32 [a], v;"),
    (
        "shared atomic past the end",
        Kind::OutOfBounds,
        "atom.shared.add.u32 v, [a+0x40000], 1;",
        "atom.shared.add.u32 v, [a], 1;",
    ),
    (
        "load of the reserved part of shared memory",
        Kind::OutOfBounds,
        "mov.u32 v, 16; ld.shared.b32 v, [v];",
        "ld.shared.b32 v, [a];",
    ),
    (
        "local load past the end",
        Kind::OutOfBounds,
        "mov.u32 v, l; ld.local.b32 v, [v+64];",
        "mov.u32 v, l; st.local.b32 [v+60], 1; ld.local.b32 v, [v+60];",
    ),
    (
        "local store past the end",
        Kind::OutOfBounds,
        "mov.u32 v, l; st.local.b32 [v+64], 1;",
        "mov.u32 v, l; st.local.b32 [v+60], 1;",
    ),
    ("parameter past the end", Kind::OutOfBounds, "ld.param.b32 v, [px+8];", "ld.param.b32 v, [px+4];"),
    ("generic load of nothing", Kind::OutOfBounds, "ld.b32 v, [0];", "ld.b32 v, [x];"),
    (
        "shared memory of a CTA that is not there",
        Kind::OutOfBounds,
        "ld.shared::cluster.b32 v, [a+0x2000000];",
        "ld.shared::cluster.b32 v, [a];",
    ),
    (
        "ldmatrix past the end",
        Kind::OutOfBounds,
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {v}, [a+0x40000];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {v}, [a];",
    ),
    (
        "bulk copy past the end of its source",
        Kind::OutOfBounds,
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x+128], 144, [m]; EXPECT(144)",
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x+128], 128, [m]; EXPECT(128)",
    ),
    ("bulk store past the end of its target", Kind::OutOfBounds, "STORE([x+128], 144)", "STORE([x+128], 128)"),
    (
        "cp.async past the end",
        Kind::OutOfBounds,
        "cp.async.ca.shared.global [a], [x+256], 16; cp.async.wait_all;",
        "@one cp.async.ca.shared.global [a], [x+240], 16; cp.async.wait_all;",
    ),
    ("global load between words", Kind::Misaligned, "ld.global.b32 v, [x+2];", "ld.global.b32 v, [x+4];"),
    (
        "global vector load between vectors",
        Kind::Misaligned,
        "ld.global.v4.b32 {v, v, v, v}, [x+8];",
        "ld.global.v4.b32 {v, v, v, v}, [x+16];",
    ),
    ("global atomic between words", Kind::Misaligned, "red.global.add.u32 [x+2], 1;", "red.global.add.u32 [x+4], 1;"),
    ("shared load between words", Kind::Misaligned, "ld.shared.b64 w, [a+4];", "ld.shared.b64 w, [a+8];"),
    ("shared store between words", Kind::Misaligned, "st.shared.b32 [a+1], v;", "st.shared.b32 [a+4], v;"),
    (
        "local store between words",
        Kind::Misaligned,
        "mov.u32 v, l; st.local.b32 [v+2], 1;",
        "mov.u32 v, l; st.local.b32 [v+4], 1;",
    ),
    ("parameter between words", Kind::Misaligned, "ld.param.b32 v, [px+2];", "ld.param.b32 v, [px+4];"),
    ("generic load between words", Kind::Misaligned, "ld.b32 v, [x+3];", "ld.b32 v, [x];"),
    (
        "ldmatrix between rows",
        Kind::Misaligned,
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {v}, [a+8];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {v}, [a+16];",
    ),
    (
        "mbarrier between places",
        Kind::Misaligned,
        "@one mbarrier.arrive.shared.b64 _, [m+4];",
        "@one mbarrier.arrive.shared.b64 _, [m];",
    ),
    (
        "bulk copy from between lines",
        Kind::Misaligned,
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x+8], 128, [m];",
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x+16], 128, [m]; EXPECT(128)",
    ),
    (
        "bulk copy to between lines",
        Kind::Misaligned,
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a+8], [x], 128, [m];",
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a+16], [x], 128, [m]; EXPECT(128)",
    ),
    (
        "bulk copy of half a line",
        Kind::Misaligned,
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x], 24, [m];",
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [x], 32, [m]; EXPECT(32)",
    ),
    (
        "mapa to a CTA that is not there",
        Kind::BadOperand,
        "mapa.shared::cluster.u32 v, a, 2;",
        "mapa.shared::cluster.u32 v, a, 0;",
    ),
    (
        "setmaxnreg to a number that does not exist",
        Kind::BadOperand,
        "setmaxnreg.dec.sync.aligned.u32 20;",
        "setmaxnreg.dec.sync.aligned.u32 24;",
    ),
    (
        "mbarrier for no arrival",
        Kind::Mbarrier,
        "@one mbarrier.init.shared.b64 [a], 0;",
        "@one mbarrier.init.shared.b64 [a], 1;",
    ),
    (
        "mbarrier before its initialisation",
        Kind::Mbarrier,
        "@one mbarrier.arrive.shared.b64 _, [a];",
        "@one mbarrier.arrive.shared.b64 _, [m];",
    ),
    ("an mbarrier touched as data", Kind::Mbarrier, "ld.shared.b64 w, [m];", "ld.shared.b64 w, [a];"),
    ("two numbers of threads at a barrier", Kind::Barrier, "bar.arrive 1, 64; bar.arrive 1, 96;", "bar.sync 1, 32;"),
    (
        "a warp at a barrier of the cluster twice",
        Kind::Barrier,
        "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
    ),
    ("a trap", Kind::Trap, "@one trap;", "@none trap;"),
];

fn kernel(body: &str) -> String {
    let number = |name: &str| -> Option<String> {
        let (_, rest) = body.split_once(&format!("{name}("))?;
        Some(rest.split_once(')')?.0.to_owned())
    };
    let mut body = body.to_owned();
    if let Some(n) = number("EXPECT") {
        let wait = format!(
            "@one mbarrier.arrive.expect_tx.shared.b64 _, [m], {n};
             WAIT: mbarrier.try_wait.parity.shared.b64 p, [m], 0; @!p bra WAIT;"
        );
        body = body.replace(&format!("EXPECT({n})"), &wait);
    }
    if let Some(n) = number("STORE") {
        let (to, bytes) = n.split_once(", ").expect("a place and a number of bytes");
        let store = format!(
            "fence.proxy.async.shared::cta; bar.sync 0;
             @one cp.async.bulk.global.shared::cta.bulk_group {to}, [a], {bytes};
             @one cp.async.bulk.commit_group; @one cp.async.bulk.wait_group 0;"
        );
        body = body.replace(&format!("STORE({n})"), &store);
    }
    format!(
        ".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 px) {{
.reg .b32 v, a, m, t; .reg .b64 x, w; .reg .pred p, one, none;
.shared .align 16 .b8 s[264];
.local .align 16 .b8 l[64];
ld.param.u64 x, [px];
mov.u32 a, s; add.u32 m, a, 256;
mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; setp.gt.u32 none, t, 1000;
shl.b32 v, t, 3; add.u32 v, v, a;
mov.u64 w, 0; st.shared.b64 [v], w;
@one mbarrier.init.shared.b64 [m], 1;
fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
mov.u32 v, 7;
{body}
ret; }}
"
    )
}

fn run(body: &str, seed: u64) -> Report {
    let mut m = Machine::new(Arch::Sm90, Config { seed, threads: 1, spin_limit: 1_000_000, ..Config::default() });
    let text = kernel(body);
    let p = m.load(&Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))).unwrap();
    let x = m.alloc(256);
    m.write(x, &[0; 256]).unwrap();
    // Something lies behind, but it is not part of the buffer.
    m.alloc(4096);
    m.launch(&p, "k", shape([1; 3], 32, 1, 0), &[x.into()]).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn every_kind_of_access_in_every_space() {
    let mut wrong = String::new();
    for (name, kind, bad, good) in PAIRS {
        for seed in 0..3 {
            let r = run(bad, seed);
            if !r.findings.iter().any(|f| f.kind == *kind && f.line > 0) {
                wrong += &format!("{name}, seed {seed}: no {kind:?} but {:?}\n", r.findings);
            }
            let r = run(good, seed);
            if !r.findings.is_empty() {
                wrong += &format!("{name}, repaired, seed {seed}: {:?}\n", r.findings);
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}
