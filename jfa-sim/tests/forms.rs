//! Instructions that no compiled test kernel contains, with results worked out by hand.

mod common;

use common::{clean, shape, words};
use jfa_sim::{Arch, Config, Machine, Module};

/// Runs `body` with 32 threads in each CTA of one cluster over `out`, 64 words that hold their index; returns them.
/// `s` has 1,024 bytes of shared memory, `a` its address; `m` is an mbarrier for one arrival; `rank` the CTA's rank; `one` holds
/// for thread 0.
fn run(body: &str, ctas: u32) -> Vec<u32> {
    let text = format!(
        ".version 8.6
.target sm_90a
.address_size 64
.global .align 128 .b8 place[128];
.visible .entry k(.param .u64 px) {{
.reg .b32 v, u, a, b, m, t, n, rank; .reg .b64 x, w, st; .reg .pred p, q, one;
.shared .align 128 .b8 s[1024];
.shared .align 8 .b64 bar;
ld.param.u64 x, [px];
mov.u32 a, s; mov.u32 m, bar; mov.u32 rank, %cluster_ctarank;
mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;
shl.b32 v, t, 2; add.u32 b, a, v; cvt.u64.u32 w, v; add.u64 w, w, x;
@one mbarrier.init.shared.b64 [m], 1;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
{body}
ret; }}
"
    );
    let mut all = None;
    for seed in 0..4 {
        let mut m = Machine::new(Arch::Sm90, Config { seed, threads: 1, spin_limit: 1_000_000, ..Config::default() });
        let p = m.load(&Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))).unwrap();
        let x = m.alloc(256);
        m.write(x, &(0..64u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
        let launch = m.launch(&p, "k", shape([ctas, 1, 1], 32, ctas, 0), &[x.into()]);
        clean(&launch.unwrap_or_else(|e| panic!("{e}\n{text}")));
        let got = words(&m, x, 64);
        assert!(all.get_or_insert(got.clone()) == &got, "seed {seed} gives another result");
    }
    all.expect("four runs")
}

/// The first 32 words.
fn first(body: &str, ctas: u32) -> Vec<u32> {
    run(body, ctas)[..32].to_vec()
}

fn each(f: impl Fn(u32) -> u32) -> Vec<u32> {
    (0..32).map(f).collect()
}

const WAIT: &str = "WAIT: mbarrier.try_wait.parity.shared.b64 p, [m], 0; @!p bra WAIT;";

#[test]
fn dependent_launches() {
    let body = "griddepcontrol.launch_dependents; griddepcontrol.wait; st.global.b32 [w], 7;";
    assert_eq!(first(body, 1), each(|_| 7));
}

/// A branch to the end is the end: nobody waits for those lanes, at a warp-synchronous instruction or at a barrier (CUDA's
/// `__syncwarp`, PTX's `barrier.cluster`: all threads that have not exited).
#[test]
fn lanes_that_end_early() {
    let body =
        "@!one bra GONE; bar.warp.sync -1; barrier.cluster.arrive; barrier.cluster.wait; st.global.b32 [w], 77; GONE:";
    assert_eq!(first(body, 1), each(|l| if l == 0 { 77 } else { l }));
}

#[test]
fn reductions_of_bulk_copies() {
    for (op, f) in [
        ("add.u32", (|i| i + 100 + 2 * i) as fn(u32) -> u32),
        ("min.u32", |i| i.min(100 + 2 * i)),
        ("max.s32", |i| i.max(100 + 2 * i)),
        ("and.b32", |i| i & (100 + 2 * i)),
        ("or.b32", |i| i | (100 + 2 * i)),
        ("xor.b32", |i| i ^ (100 + 2 * i)),
    ] {
        let body = format!(
            "shl.b32 v, t, 1; add.u32 v, v, 100; st.shared.b32 [b], v;
             fence.proxy.async.shared::cta; bar.sync 0;
             @one cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [x], [a], 128;
             @one cp.async.bulk.commit_group; @one cp.async.bulk.wait_group 0;"
        );
        assert_eq!(first(&body, 1), each(f), "{op}");
    }
}

#[test]
fn bulk_copies_between_ctas_and_to_all_of_them() {
    // CTA 0 loads 64 words into both; each writes its half.
    let multicast = format!(
        "@one mbarrier.arrive.expect_tx.shared.b64 _, [m], 256;
         barrier.cluster.arrive; barrier.cluster.wait;
         setp.eq.and.u32 q, rank, 0, one; mov.b16 h, 3;
         @q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [a], [x], 256, [m], h;
         {WAIT}
         barrier.cluster.arrive; barrier.cluster.wait;
         shl.b32 v, rank, 7; add.u32 b, b, v; ld.shared.b32 v, [b]; add.u32 v, v, 1000;
         shl.b32 u, rank, 7; cvt.u64.u32 st, u; add.u64 w, w, st; st.global.b32 [w], v;
         barrier.cluster.arrive; barrier.cluster.wait;"
    );
    let multicast = format!("{{ .reg .b16 h; {multicast} }}");
    assert_eq!(run(&multicast, 2), (0..64).map(|i| i + 1000).collect::<Vec<_>>());
    // Each sends its words to the other.
    let across = format!(
        "mad.lo.u32 v, rank, 100, t; st.shared.b32 [b], v; fence.proxy.async.shared::cta; bar.sync 0;
         @one mbarrier.arrive.expect_tx.shared.b64 _, [m], 128;
         barrier.cluster.arrive; barrier.cluster.wait;
         xor.b32 u, rank, 1; add.u32 n, a, 512; mapa.shared::cluster.u32 n, n, u; mapa.shared::cluster.u32 v, m, u;
         @one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [n], [a], 128, [v];
         {WAIT}
         ld.shared.b32 v, [b+512];
         shl.b32 u, rank, 7; cvt.u64.u32 st, u; add.u64 w, w, st; st.global.b32 [w], v;
         barrier.cluster.arrive; barrier.cluster.wait;"
    );
    assert_eq!(run(&across, 2), (0..64).map(|i| if i < 32 { 100 + i } else { i - 32 }).collect::<Vec<_>>());
}

#[test]
fn every_form_of_an_mbarrier() {
    // Bytes asked for and given by threads; a state waited for; arrivals left; a barrier made anew.
    let body = "@!one bra END;
         mbarrier.expect_tx.relaxed.cta.shared.b64 [m], 64;
         mbarrier.arrive.shared.b64 st, [m];
         mbarrier.test_wait.shared.b64 p, [m], st; selp.u32 v, 1, 0, p; st.global.b32 [x], v;
         mbarrier.complete_tx.relaxed.cta.shared.b64 [m], 64;
         STATE: mbarrier.try_wait.shared.b64 p, [m], st; @!p bra STATE;
         mbarrier.test_wait.parity.shared.b64 p, [m], 0; selp.u32 v, 1, 0, p; st.global.b32 [x+4], v;
         mbarrier.test_wait.parity.shared.b64 p, [m], 1; selp.u32 v, 1, 0, p; st.global.b32 [x+8], v;
         mbarrier.inval.shared.b64 [m];
         mbarrier.init.shared.b64 [m], 3;
         mbarrier.arrive_drop.shared.b64 st, [m];
         mbarrier.pending_count.b64 v, st; st.global.b32 [x+12], v;
         mbarrier.arrive.noComplete.shared.b64 st, [m], 1;
         mbarrier.arrive.shared.b64 st, [m];
         mbarrier.pending_count.b64 v, st; st.global.b32 [x+16], v;
         mbarrier.arrive.shared.b64 st, [m];
         mbarrier.pending_count.b64 v, st; st.global.b32 [x+20], v;
         END: bar.sync 0;";
    assert_eq!(run(body, 1)[..6], [0, 1, 0, 3, 1, 2]);
}

#[test]
fn a_tensor_map_field_by_field() {
    // A map of 8 by 8 words over `x` with boxes of 4 by 4, from nothing: the tile at column 2, row 3.
    let fields = [
        ("global_address", "b64", "x"),
        ("rank", "b32", "1"),
        ("box_dim", "b32", "0, 4"),
        ("box_dim", "b32", "1, 4"),
        ("global_dim", "b32", "0, 8"),
        ("global_dim", "b32", "1, 8"),
        ("global_stride", "b64", "0, 32"),
        ("element_stride", "b32", "0, 1"),
        ("element_stride", "b32", "1, 1"),
        ("elemtype", "b32", "2"),
        ("interleave_layout", "b32", "0"),
        ("swizzle_mode", "b32", "0"),
        ("fill_mode", "b32", "0"),
    ];
    let replace: String = fields
        .iter()
        .map(|(f, ty, v)| format!("@one tensormap.replace.tile.{f}.shared::cta.b1024.{ty} [a], {v};\n"))
        .collect();
    let body = format!(
        "{{ .reg .b64 map;
         mov.u64 map, place;
         mov.u32 v, 0; st.shared.b32 [b], v; bar.sync 0;
         {replace}
         bar.warp.sync -1;
         tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [map], [a], 128;
         fence.proxy.tensormap::generic.acquire.gpu [map], 128;
         mov.u32 u, 3; mov.u32 n, 2; add.u32 v, a, 512;
         @one mbarrier.arrive.expect_tx.shared.b64 _, [m], 64;
         @one cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [v], [map, {{n, u}}], [m];
         {WAIT}
         setp.lt.u32 q, t, 16; @q ld.shared.b32 v, [b+512]; bar.sync 0; @q st.global.b32 [w], v; }}"
    );
    assert_eq!(run(&body, 1)[..16], (0..16).map(|i| 8 * (3 + i / 4) + 2 + i % 4).collect::<Vec<_>>());
}

#[test]
fn exchange_and_places() {
    // The 8 by 8 matrix of 16-bit numbers whose thread i holds 2 i and 2 i + 1, transposed.
    let movmatrix = "shl.b32 v, t, 1; shl.b32 u, t, 17; or.b32 v, v, u; add.u32 v, v, 0x10000;
         movmatrix.sync.aligned.m8n8.trans.b16 v, v; st.global.b32 [w], v;";
    let at = |i: u32, j: u32| 8 * i + j;
    assert_eq!(first(movmatrix, 1), each(|l| at(2 * (l % 4), l / 4) | at(2 * (l % 4) + 1, l / 4) << 16));
    let votes = "setp.lt.u32 q, t, 40; vote.sync.all.pred p, q, 0xffffffff; selp.u32 v, 1, 0, p;
         setp.lt.u32 q, t, 4; vote.sync.any.pred p, q, 0xffffffff; selp.u32 u, 2, 0, p; or.b32 v, v, u;
         vote.sync.uni.pred p, q, 0xffffffff; selp.u32 u, 4, 0, p; or.b32 v, v, u;
         mov.u32 n, 9; match.all.sync.b32 n|p, n, 0xffffffff; selp.u32 u, 8, 0, p; or.b32 v, v, u;
         match.all.sync.b32 n|p, t, 0xffffffff; selp.u32 u, 16, 0, p; or.b32 v, v, u;
         shr.u32 n, t, 3; match.any.sync.b32 n, n, 0xffffffff; and.b32 n, n, 0x01010101; shl.b32 n, n, 5; or.b32 v, v, n;
         st.global.b32 [w], v;";
    assert_eq!(first(votes, 1), each(|l| 1 | 2 | 8 | 1 << (8 * (l / 8)) << 5));
    let places = "cvta.shared.u64 st, s; isspacep.shared p, st; selp.u32 v, 1, 0, p;
         isspacep.global p, st; selp.u32 u, 2, 0, p; or.b32 v, v, u;
         isspacep.global p, x; selp.u32 u, 4, 0, p; or.b32 v, v, u;
         xor.b32 n, rank, 1; mapa.shared::cluster.u32 n, a, n; getctarank.shared::cluster.u32 n, n; shl.b32 n, n, 4; or.b32 v, v, n;
         shl.b32 u, rank, 7; cvt.u64.u32 st, u; add.u64 w, w, st; st.global.b32 [w], v;
         barrier.cluster.arrive; barrier.cluster.wait;";
    assert_eq!(run(places, 2), (0..64).map(|i| if i < 32 { 1 | 4 | 16 } else { 1 | 4 }).collect::<Vec<_>>());
}
