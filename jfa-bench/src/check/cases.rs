//! The table of cases.

use jfa_core::{Alignment, Bias, Capabilities, DType, IndexType, Mask};

use super::{Axes, Case, Context, Outcome, degenerate, determinism, errors};
use crate::scenario::{Data, Placement, Scenario, Strides};

/// Lengths around every tile boundary there is likely to be.
pub const LENGTHS: [i64; 10] = [0, 1, 7, 8, 63, 64, 65, 127, 128, 129];

/// Builds names and collects cases of one element type.
pub struct Collector<'a> {
    cases: &'a mut Vec<Case>,
    dtype: DType,
}

impl Collector<'_> {
    /// Adds a case with work of its own.
    pub fn add(
        &mut self,
        section: &'static str,
        quick: bool,
        name: &str,
        work: impl Fn(&Context) -> anyhow::Result<Outcome> + Send + Sync + 'static,
    ) {
        self.cases.push(Case { name: format!("{}/{name}", self.dtype), section, quick, work: Box::new(work) });
    }

    /// Adds a scenario that must agree with the oracle.
    pub fn conform(&mut self, section: &'static str, quick: bool, name: &str, scenario: Scenario) {
        self.add(section, quick, name, move |context| context.conform(&scenario));
    }
}

/// Every case for these axes.
pub fn all(axes: &Axes, caps: &Capabilities) -> Vec<Case> {
    let mut cases = Vec::new();
    for &dtype in &axes.dtypes {
        let mut c = Collector { cases: &mut cases, dtype };
        lengths(&mut c, dtype, axes.dim);
        roomy(&mut c, dtype, axes.dim, caps);
        dimensions(&mut c, dtype, axes.dim, caps);
        masks(&mut c, dtype, axes.dim);
        biases(&mut c, dtype, axes.dim);
        sharing(&mut c, dtype, axes.dim);
        placements(&mut c, dtype, axes.dim);
        numerics(&mut c, dtype, axes.dim);
        degenerate::cases(&mut c, dtype, axes.dim);
        determinism::cases(&mut c, dtype, axes.dim);
        errors::cases(&mut c, dtype, axes.dim);
    }
    cases
}

/// Sections 1 to 3: lengths, heads, scale.
fn lengths(c: &mut Collector, dtype: DType, dim: i64) {
    c.conform("2-3", true, "lengths/self", Scenario::new(dtype, dim, &LENGTHS));
    let cross = |m: &[i64], n: &[i64]| -> (Vec<i64>, Vec<i64>) {
        m.iter().flat_map(|m| n.iter().map(move |n| (*m, *n))).unzip()
    };
    let (m, n) = cross(&LENGTHS, &LENGTHS);
    c.conform("2-3", false, "lengths/cross-product", Scenario::cross(dtype, dim, &m, &n));
    let (m, n) = cross(&[0, 1, 65], &[0, 1, 64, 129]);
    c.conform("2-3", true, "lengths/cross", Scenario::cross(dtype, dim, &m, &n));
    for n in LENGTHS {
        c.conform("2-3", false, &format!("lengths/alone-{n}"), Scenario::new(dtype, dim, &[n]));
    }
    c.conform(
        "2-3",
        false,
        "lengths/long",
        Scenario::new(dtype, dim, &[1000, 3]).with(|s| s.heads_q = 1).with(|s| s.heads_kv = 1),
    );
    c.conform("2-3", false, "lengths/long-query-short-key", Scenario::cross(dtype, dim, &[700, 1], &[3, 5]));
    c.conform("2-3", false, "lengths/short-query-long-key", Scenario::cross(dtype, dim, &[3, 5], &[700, 1]));
    // One block of rows and many keys, in more sequences than a device has workers: where one of them sums a row's dq over all
    // keys, each addition must be in place before the next one builds on it.
    let (few, keys): (Vec<i64>, Vec<i64>) = (0..140).map(|b| (1 + b % 3, [520, 700, 300][b as usize % 3])).unzip();
    c.conform("2-3", false, "lengths/few-rows-many-keys", Scenario::cross(dtype, dim, &few, &keys));
    // One head and odd numbers of key tiles, then sequences of one tile: whoever shares a sequence has nothing of the last ones.
    let odd: Vec<i64> = (0..60).map(|b| if b % 4 == 0 { 290 + b % 20 } else { 5 + b }).collect();
    c.conform(
        "2-3",
        true,
        "lengths/one-head-odd-tiles",
        Scenario::cross(dtype, dim, &odd, &odd).with(|s| {
            (s.heads_q, s.heads_kv) = (1, 1);
        }),
    );
    let many: Vec<i64> = (0..500).map(|b| b % 4).collect();
    c.conform("2-3", false, "lengths/many-tiny", Scenario::new(dtype, dim, &many));

    let some = [5, 0, 33, 65];
    for (name, hq, hkv) in [("mha-1", 1, 1), ("mha-3", 3, 3), ("gqa-4-2", 4, 2), ("gqa-6-2", 6, 2), ("mqa-4-1", 4, 1)] {
        let s = Scenario::cross(dtype, dim, &some, &[7, 3, 64, 70]).with(|s| (s.heads_q, s.heads_kv) = (hq, hkv));
        c.conform("1", name == "gqa-4-2", &format!("heads/{name}"), s);
    }
    for (name, scale) in [("zero", 0.0), ("negative", -0.3), ("one", 1.0), ("small", 0.01)] {
        let s = Scenario::new(dtype, dim, &some).with(|s| s.scale = Some(scale));
        c.conform("7", name == "zero" || name == "negative", &format!("scale/{name}"), s);
    }
}

/// Capacities that promise long sequences, a gradient that need not be reproducible: backends may take kernels of their own then,
/// which must be right for whatever comes instead. Heads of 128, where there are any: long sequences are theirs.
fn roomy(c: &mut Collector, dtype: DType, dim: i64, caps: &Capabilities) {
    let has = |ranges: &[jfa_core::backend::DimRange]| ranges.iter().any(|r| r.contains(128));
    let dim = if has(&caps.head_dims) && has(&caps.head_dims_v) { 128 } else { dim };
    // A mean of 2,048 rows, whatever the lengths.
    let room = |s: Scenario| s.with(|s| s.placement.tail += 2048 * (s.q_lens.len() as i64 + s.placement.spare_batch));
    let mut conform = |quick: bool, name: &str, s: Scenario| c.conform("2-3", quick, &format!("room/{name}"), room(s));
    let masked = |s: Scenario, mask: Mask| s.with(|s| s.mask = mask);
    let gqa = |s: Scenario| s.with(|s| (s.heads_q, s.heads_kv) = (4, 2));
    let window = |left, right, alignment| Mask::Window { left: Some(left), right: Some(right), alignment };

    conform(true, "lengths", Scenario::new(dtype, dim, &LENGTHS));
    // Few rows under many keys; rows without keys and keys without rows beside them.
    let few = Scenario::cross(dtype, dim, &[3, 0, 66, 1], &[520, 300, 0, 129]);
    conform(true, "few-rows-many-keys", few.clone());
    conform(false, "few-rows-many-keys-gqa", masked(gqa(few.clone()), Mask::Causal(Alignment::BottomRight)));
    conform(false, "few-keys-many-rows", Scenario::cross(dtype, dim, &[520, 300, 0, 129], &[3, 0, 66, 1]));
    let (rows, keys): (Vec<i64>, Vec<i64>) = (0..24).map(|b| (1 + b % 3, [520, 700, 300][b as usize % 3])).unzip();
    conform(false, "few-rows-many-keys-often", Scenario::cross(dtype, dim, &rows, &keys));

    let long = Scenario::new(dtype, dim, &[700, 3, 450]);
    conform(false, "long", long.clone());
    conform(false, "long-mqa", long.clone().with(|s| (s.heads_q, s.heads_kv) = (3, 1)));
    conform(false, "long-gaps", long.clone().with(|s| s.placement = Placement::LOOSE));
    conform(false, "long-fused-qkv", long.clone().with(|s| s.placement.strides = Strides::Fused));
    conform(false, "long-zero_unused_rows", long.clone().with(|s| s.zero_unused_rows = true));
    conform(false, "long-huge-score", long.clone().with(|s| s.data = Data::OneHuge(1e4)));
    for (name, scale) in [("zero", 0.0), ("negative", -0.3)] {
        conform(false, &format!("long-scale-{name}"), long.clone().with(|s| s.scale = Some(scale)));
    }
    let oblong = Scenario::cross(dtype, dim, &[300, 90, 65, 400], &[410, 260, 300, 129]);
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        let causal = masked(long.clone(), Mask::Causal(alignment));
        conform(false, &format!("long-causal-{alignment}"), causal);
        let quick = alignment == Alignment::BottomRight;
        conform(quick, &format!("causal-gqa-{alignment}"), masked(gqa(oblong.clone()), Mask::Causal(alignment)));
        for (left, right) in [(0, 0), (150, 40), (5, 300)] {
            let s = masked(oblong.clone(), window(left, right, alignment));
            conform(false, &format!("window-{left}-{right}-{alignment}"), s);
        }
    }
    let blind = Scenario::cross(dtype, dim, &[600, 400], &[200, 20]);
    conform(false, "rows-that-see-nothing", masked(blind.clone(), Mask::Causal(Alignment::BottomRight)));
    conform(false, "window-past-the-keys", masked(blind, window(5, 0, Alignment::TopLeft)));
    // Tiles of keys without a row, as the first and the only ones that a block works on.
    let unseen = Scenario::cross(dtype, dim, &[20, 0, 70], &[700, 300, 400]);
    conform(true, "keys-that-nothing-sees", masked(unseen, Mask::Causal(Alignment::TopLeft)));

    let dims = [(32, 32), (64, 64), (72, 72), (96, 96), (64, 128), (128, 40)];
    for (d, dv) in dims.into_iter().filter(|(d, dv)| (*d, *dv) != (dim, dim) && (d == dv || caps.unequal_head_dims)) {
        let s = Scenario::cross(dtype, d, &[129, 70, 0, 200], &[300, 0, 20, 200]).with(|s| s.head_dim_v = dv);
        conform(false, &format!("head_dim-{d}-{dv}"), s.clone());
        let causal = Mask::Causal(Alignment::BottomRight);
        conform(false, &format!("head_dim-{d}-{dv}-causal"), masked(s, causal));
    }
}

/// Section 1: every head dimension, also unequal ones.
fn dimensions(c: &mut Collector, dtype: DType, dim: i64, caps: &Capabilities) {
    let lens = [1, 17, 70];
    let few = [
        1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 40, 48, 64, 65, 80, 96, 100, 112, 128, 160, 192, 224, 256, 257, 384, 511,
        512,
    ];
    for d in few {
        let quick = (d == 64 || d == 128) && d != dim;
        c.conform("1", quick, &format!("head_dim/{d}"), Scenario::new(dtype, d, &lens));
    }
    let mut pairs = vec![(64, 32), (32, 64), (64, 128), (128, 64), (192, 128), (5, 3), (96, 256)];
    pairs.retain(|(d, dv)| {
        // A pair in which one is out of range would only repeat what the sweep above says.
        let has = |ranges: &[jfa_core::backend::DimRange], x: i64| ranges.iter().any(|r| r.contains(x));
        !caps.unequal_head_dims || (has(&caps.head_dims, *d) && has(&caps.head_dims_v, *dv)) || (*d, *dv) == (64, 32)
    });
    for (d, dv) in pairs {
        let s = Scenario::new(dtype, d, &lens).with(|s| s.head_dim_v = dv);
        c.conform("1", false, &format!("head_dim_v/{d}-{dv}"), s);
    }
}

/// Lengths whose score matrices are wide, tall, square, of one row or column, and empty.
const RECTANGLES: [(i64, i64); 12] =
    [(2, 5), (5, 2), (1, 1), (64, 129), (129, 64), (7, 0), (0, 7), (130, 1), (1, 130), (100, 100), (65, 66), (3, 200)];

fn rectangles(dtype: DType, dim: i64) -> Scenario {
    let (m, n): (Vec<i64>, Vec<i64>) = RECTANGLES.into_iter().unzip();
    Scenario::cross(dtype, dim, &m, &n)
}

/// Section 4.
fn masks(c: &mut Collector, dtype: DType, dim: i64) {
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        let s = rectangles(dtype, dim).with(|s| s.mask = Mask::Causal(alignment));
        c.conform("4", true, &format!("mask/causal-{alignment}"), s);
        let s = Scenario::new(dtype, dim, &LENGTHS).with(|s| s.mask = Mask::Causal(alignment));
        c.conform("4", false, &format!("mask/causal-{alignment}-self"), s);
        let sides = [
            (Some(0), Some(0)),
            (Some(3), Some(2)),
            (Some(16), Some(0)),
            (Some(64), Some(64)),
            (Some(200), Some(5)),
            (None, Some(0)),
            (None, Some(4)),
            (Some(4), None),
            (None, None),
            (Some(u32::MAX), Some(u32::MAX)),
        ];
        for (left, right) in sides {
            let side = |s: Option<u32>| s.map_or("all".to_owned(), |v| v.to_string());
            let s = rectangles(dtype, dim).with(|s| s.mask = Mask::Window { left, right, alignment });
            let quick = (left, right) == (Some(16), Some(0));
            c.conform("4", quick, &format!("mask/window-{}-{}-{alignment}", side(left), side(right)), s);
        }
    }
    // Windows that lie wholly outside the keys for most rows: tiles without work, at either end.
    let s = Scenario::cross(dtype, dim, &[300, 10], &[20, 400]).with(|s| {
        s.mask = Mask::Window { left: Some(5), right: Some(0), alignment: Alignment::TopLeft };
    });
    c.conform("4", false, "mask/window-past-the-keys", s);
    let s = Scenario::cross(dtype, dim, &[300, 10], &[20, 400]).with(|s| {
        s.mask = Mask::Window { left: Some(5), right: Some(0), alignment: Alignment::BottomRight };
    });
    c.conform("4", false, "mask/window-before-the-keys", s);
    let s = rectangles(dtype, dim).with(|s| {
        s.mask = Mask::Causal(Alignment::BottomRight);
        (s.heads_q, s.heads_kv) = (4, 2);
    });
    c.conform("4", false, "mask/causal-gqa", s);
}

/// Section 5.
fn biases(c: &mut Collector, dtype: DType, dim: i64) {
    let both = [Alignment::TopLeft, Alignment::BottomRight];
    let windows = [("full", None), ("causal", Some(None)), ("window", Some(Some((20, 3))))];
    let kinds = [
        ("alibi", Bias::Alibi),
        ("relative-0", Bias::Relative { radius: 0 }),
        ("relative-3", Bias::Relative { radius: 3 }),
        ("relative-150", Bias::Relative { radius: 150 }),
    ];
    for (kind, bias) in kinds {
        for alignment in both {
            for (mask_name, mask) in windows {
                let s = rectangles(dtype, dim).with(|s| {
                    s.bias = bias;
                    s.bias_alignment = alignment;
                    s.mask = match mask {
                        None => Mask::Full,
                        Some(None) => Mask::Causal(alignment),
                        Some(Some((left, right))) => Mask::Window { left: Some(left), right: Some(right), alignment },
                    };
                });
                let quick = alignment == Alignment::BottomRight && mask_name == "causal" && kind != "relative-0";
                c.conform("5", quick, &format!("bias/{kind}-{mask_name}-{alignment}"), s);
            }
        }
        let s = rectangles(dtype, dim).with(|s| (s.bias, s.heads_q, s.heads_kv) = (bias, 4, 2));
        c.conform("5", false, &format!("bias/{kind}-gqa"), s);
        let s = rectangles(dtype, dim).with(|s| (s.bias, s.placement) = (bias, Placement::LOOSE));
        c.conform("5", false, &format!("bias/{kind}-gaps"), s);
    }
    for own_type in [false, true] {
        if own_type && dtype == DType::F32 {
            continue;
        }
        let bias_dtype = if own_type { dtype } else { DType::F32 };
        for row_align in [1, 8, 16] {
            for shared_by_heads in [false, true] {
                let bias = Bias::Dense { dtype: bias_dtype, row_align, shared_by_heads, capacity: 0 };
                let sharing = if shared_by_heads { "shared" } else { "per-head" };
                let name = format!("bias/dense-{bias_dtype}-align{row_align}-{sharing}");
                let s = rectangles(dtype, dim).with(|s| s.bias = bias);
                c.conform("5", row_align == 8 && !shared_by_heads, &name, s);
            }
        }
        let bias = Bias::Dense { dtype: bias_dtype, row_align: 8, shared_by_heads: false, capacity: 0 };
        let masked = |share: f64| rectangles(dtype, dim).with(|s| (s.bias, s.bias_masked) = (bias, share));
        c.conform("5", true, &format!("bias/dense-{bias_dtype}-some-masked"), masked(0.3));
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-nearly-all-masked"), masked(0.97));
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-all-masked"), masked(1.0));
        let s = masked(0.3).with(|s| s.mask = Mask::Causal(Alignment::BottomRight));
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-causal"), s);
        let s = masked(0.1).with(|s| s.placement = Placement::LOOSE);
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-gaps"), s);
        let s = masked(0.1).with(|s| (s.heads_q, s.heads_kv) = (4, 2));
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-gqa"), s);
        let s = shared_histories(dtype, dim).with(|s| s.bias = bias);
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-kv_index"), s);
        let s = pooling(dtype, dim, 5).with(|s| s.bias = bias);
        c.conform("5", false, &format!("bias/dense-{bias_dtype}-broadcast-query"), s);
    }
    for (kind, bias) in kinds {
        let s = shared_histories(dtype, dim).with(|s| s.bias = bias);
        c.conform("5", false, &format!("bias/{kind}-kv_index"), s);
        let s = pooling(dtype, dim, 5).with(|s| s.bias = bias);
        c.conform("5", false, &format!("bias/{kind}-broadcast-query"), s);
    }
}

/// Several candidates share a history; one history has no candidate, one is empty.
pub fn shared_histories(dtype: DType, dim: i64) -> Scenario {
    let mut s = Scenario::cross(dtype, dim, &[1, 3, 0, 1, 20, 2, 65], &[70, 5, 0, 12, 129]);
    s.kv_index = Some(vec![4, 0, 0, 2, 0, 1, 4]);
    s
}

/// A broadcast query over histories of many lengths, an empty one among them.
pub fn pooling(dtype: DType, dim: i64, q_len: i64) -> Scenario {
    let kv = [3, 0, 64, 1, 129, 40];
    let mut s = Scenario::cross(dtype, dim, &[q_len; 6], &kv);
    s.broadcast_q = Some(q_len);
    s
}

/// `kv_index` and section 6.
fn sharing(c: &mut Collector, dtype: DType, dim: i64) {
    c.conform("1", true, "kv_index/shared", shared_histories(dtype, dim));
    c.conform("1", false, "kv_index/gaps", shared_histories(dtype, dim).with(|s| s.placement = Placement::LOOSE));
    let s = shared_histories(dtype, dim).with(|s| (s.heads_q, s.heads_kv) = (4, 2));
    c.conform("1", false, "kv_index/gqa", s);
    let s = shared_histories(dtype, dim).with(|s| s.mask = Mask::Causal(Alignment::BottomRight));
    c.conform("1", false, "kv_index/causal", s);
    let candidates = Scenario::cross(dtype, dim, &[1; 150], &[90, 33]).with(|s| {
        s.kv_index = Some((0..150).map(|b| i32::from(b >= 100)).collect());
    });
    c.conform("1", false, "kv_index/many-candidates", candidates);

    for q_len in [1, 5, 64, 130] {
        c.conform("6", q_len == 5, &format!("broadcast-query/{q_len}"), pooling(dtype, dim, q_len));
    }
    c.conform("6", false, "broadcast-query/0", pooling(dtype, dim, 0));
    let s = pooling(dtype, dim, 5).with(|s| (s.heads_q, s.heads_kv) = (4, 2));
    c.conform("6", false, "broadcast-query/gqa", s);
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        let s = pooling(dtype, dim, 5).with(|s| s.mask = Mask::Causal(alignment));
        c.conform("6", false, &format!("broadcast-query/causal-{alignment}"), s);
    }
    let s = pooling(dtype, dim, 5).with(|s| s.placement = Placement::LOOSE);
    c.conform("6", false, "broadcast-query/gaps", s);
    let s = shared_histories(dtype, dim).with(|s| {
        s.broadcast_q = Some(4);
        s.q_lens = vec![4; 7];
    });
    c.conform("6", false, "broadcast-query/kv_index", s);
}

/// Section 1: where the sequences stand and how tensors lie.
fn placements(c: &mut Collector, dtype: DType, dim: i64) {
    let lens = [5, 0, 65, 1, 30];
    let base = || Scenario::new(dtype, dim, &lens);
    let tight = Placement::TIGHT;
    let table: [(&str, bool, Placement); 12] = [
        ("loose", true, Placement::LOOSE),
        ("gaps", false, Placement { gap: 3, lengths: true, ..tight }),
        ("lengths-without-gaps", false, Placement { lengths: true, ..tight }),
        ("capacity-larger-than-total", false, Placement { tail: 40, ..tight }),
        ("batch-smaller-than-capacity", false, Placement { spare_batch: 5, ..tight }),
        ("first-offset-above-0", false, Placement { start: 11, ..tight }),
        ("offsets-i64", false, Placement { q_index: IndexType::I64, kv_index: IndexType::I64, ..tight }),
        ("offsets-i32-i64", false, Placement { kv_index: IndexType::I64, ..tight }),
        ("strides-padded", false, Placement { strides: Strides::Padded, ..tight }),
        ("strides-head-major", true, Placement { strides: Strides::HeadMajor, ..tight }),
        ("strides-fused-qkv", true, Placement { strides: Strides::Fused, ..tight }),
        ("strides-fused-qkv-loose", false, Placement { strides: Strides::Fused, ..Placement::LOOSE }),
    ];
    for (name, quick, placement) in table {
        c.conform("1", quick, &format!("placement/{name}"), base().with(|s| s.placement = placement));
    }
    let s = base().with(|s| {
        s.placement.strides = Strides::Fused;
        (s.heads_q, s.heads_kv) = (4, 2);
    });
    c.conform("1", false, "placement/strides-fused-qkv-gqa", s);
    for (name, hints) in [
        ("too-small", (Some(1), Some(1))),
        ("zero", (Some(0), Some(0))),
        ("too-large", (Some(1 << 20), Some(1 << 20))),
        ("exact", (Some(65), Some(65))),
    ] {
        c.conform("1", name == "too-small", &format!("hints/{name}"), base().with(|s| s.hints = hints));
    }
}

/// Section 8.
fn numerics(c: &mut Collector, dtype: DType, dim: i64) {
    // 69 keys: a partial tile of every usual size, so that masked columns stand beside very low scores.
    let lens = [69, 5, 129];
    // binary16 ends at 65504: elements stay in range up to these scores.
    for (name, quick, data) in [
        ("scores-near-minus-100", true, Data::Shifted(-100.0)),
        ("scores-near-minus-1000", false, Data::Shifted(-1000.0)),
        ("scores-near-plus-10000", true, Data::Shifted(1e4)),
        ("one-huge-score", false, Data::OneHuge(1e4)),
        ("one-very-low-score", false, Data::OneHuge(-1e4)),
        ("constant-rows", false, Data::ConstantRows),
    ] {
        let s = Scenario::new(dtype, dim, &lens).with(|s| s.data = data);
        c.conform("8", quick, &format!("numerics/{name}"), s.clone());
        let s = s.with(|s| s.mask = Mask::Causal(Alignment::BottomRight));
        c.conform("8", false, &format!("numerics/{name}-causal"), s);
    }
}
