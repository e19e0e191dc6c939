//! Every row of the contract's degenerate table that is an error: the text names the argument and its value, and the
//! backend is not called. And every row that is a success without work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jfa_core::backend::DimRange;
use jfa_core::layout::Offsets;
use jfa_core::{
    Alignment, AttentionBackend, BackendPlan, BackwardArgs, Bias, Buffer, Call, Capabilities, DType, DataPtr, Error,
    ForwardArgs, Layout, LseView, Mask, MemorySpace, Plan, Problem, ProblemBuilder, Requirements, Result, Stream,
    TensorView,
};

/// A backend that counts its calls and touches nothing.
struct Recorder {
    capabilities: Capabilities,
    calls: Arc<AtomicUsize>,
}

struct RecorderPlan(Arc<AtomicUsize>);

impl AttentionBackend for Recorder {
    fn name(&self) -> &str {
        "recorder"
    }

    fn description(&self) -> String {
        "counts calls".into()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn plan(&self, _: &Problem) -> Result<Arc<dyn BackendPlan>> {
        Ok(Arc::new(RecorderPlan(self.calls.clone())))
    }
}

impl BackendPlan for RecorderPlan {
    fn requirements(&self) -> Requirements {
        Requirements { schedule_bytes: 100, forward_bytes: 200, backward_bytes: 300 }
    }

    fn describe(&self) -> String {
        "nothing".into()
    }

    unsafe fn build_schedule(&self, _: &Layout, _: Buffer, _: Stream) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn forward(&self, _: &Call, args: &ForwardArgs) -> Result<()> {
        for v in [args.q, args.k, args.v, args.o] {
            assert!(v.head_stride % 8 == 0 && v.row_stride % 8 == 0, "an unaligned stride reached the backend: {v:?}");
        }
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn backward(&self, _: &Call, _: &BackwardArgs) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn capabilities(memory_space: MemorySpace) -> Capabilities {
    let any = vec![DimRange { min: 1, max: 512, step: 1 }];
    Capabilities {
        memory_space,
        dtypes: DType::ALL.to_vec(),
        head_dims: any.clone(),
        head_dims_v: any,
        unequal_head_dims: true,
        causal: true,
        window: true,
        biases: vec!["alibi", "relative", "dense"],
        gqa: true,
        kv_index: true,
        broadcast_query: true,
        backward: true,
        deterministic: true,
        zero_unused_rows: true,
        base_alignment: 16,
        stride_alignment: 16,
    }
}

/// A valid call on memory nobody reads (the recorder touches none), to be broken in one place by each test.
struct Fixture {
    plan: Plan,
    calls: Arc<AtomicUsize>,
    q_offsets: Vec<i32>,
    q_lengths: Vec<i32>,
    kv_offsets: Vec<i64>,
    kv_lengths: Vec<i32>,
    kv_index: Vec<i32>,
    bias_offsets: Vec<i64>,
    layout: Layout,
    schedule: Buffer,
    workspace: Buffer,
    args: BackwardArgs,
}

/// Addresses no test dereferences: a multiple of 256 each.
fn address(i: usize) -> DataPtr {
    DataPtr::new(std::ptr::without_provenance_mut::<u8>(0x10_0000 * (i + 1)))
}

const BF16: DType = DType::BF16;

/// 3 query sequences (2, 0, 3 rows; gap of 1 after the first), the same for keys with (4, 1, 2): bf16, 4 heads over 2,
/// dims 16 and 24.
fn builder() -> ProblemBuilder {
    Problem::builder(BF16, 4, 16).heads_kv(2).head_dim_v(24).capacity(3, 8, 8)
}

impl Fixture {
    fn new(space: MemorySpace, problem: ProblemBuilder) -> Fixture {
        let problem = problem.build().expect("the fixture's problem is valid");
        let calls = Arc::new(AtomicUsize::new(0));
        let backend = Recorder { capabilities: capabilities(space), calls: calls.clone() };
        let plan = Plan::new(Arc::new(backend), &problem).expect("the recorder supports everything");
        let (hq, hkv, d, dv) = (problem.heads_q, problem.heads_kv, problem.head_dim, problem.head_dim_v);
        let view = |i: usize, rows, heads, dim| TensorView::contiguous(address(i), problem.dtype, rows, heads, dim);
        let (q_rows, o_rows) = (problem.q_rows(), problem.o_rows());
        let bias = if problem.bias == Bias::None { DataPtr::NULL } else { address(10) };
        let mut f = Fixture {
            plan,
            calls,
            q_offsets: vec![0, 3, 3, 6],
            q_lengths: vec![2, 0, 3],
            kv_offsets: vec![0, 5, 6, 8],
            kv_lengths: vec![4, 1, 2],
            kv_index: vec![2, 0, 2],
            bias_offsets: vec![0, 100, 100, 200],
            layout: Layout::EMPTY,
            schedule: Buffer { data: address(20), bytes: 100 },
            workspace: Buffer { data: address(21), bytes: 300 },
            args: BackwardArgs {
                q: view(0, q_rows, hq, d),
                k: view(1, problem.total_kv, hkv, d),
                v: view(2, problem.total_kv, hkv, dv),
                bias,
                o: view(3, o_rows, hq, dv),
                lse: LseView::contiguous(address(4), o_rows),
                d_o: view(5, o_rows, hq, dv),
                dq: view(6, q_rows, hq, d),
                dk: view(7, problem.total_kv, hkv, d),
                dv: view(8, problem.total_kv, hkv, dv),
                dbias: DataPtr::NULL,
            },
        };
        f.relink();
        f
    }

    fn host() -> Fixture {
        Fixture::new(MemorySpace::Host, builder())
    }

    /// Points the layout at the arrays as they are now.
    fn relink(&mut self) {
        let p = self.plan.problem();
        let jagged = p.query == jfa_core::Query::Jagged;
        let i32s = |v: &[i32]| DataPtr::from_const(v.as_ptr());
        self.layout = Layout {
            batch: 3,
            q_offsets: jagged.then(|| Offsets::i32(self.q_offsets.as_ptr())),
            q_lengths: jagged.then(|| i32s(&self.q_lengths)),
            kv_batch: 3,
            kv_offsets: Offsets::i64(self.kv_offsets.as_ptr()),
            kv_lengths: Some(i32s(&self.kv_lengths)),
            kv_index: p.uses_kv_index.then(|| i32s(&self.kv_index)),
            bias_offsets: matches!(p.bias, Bias::Dense { .. }).then(|| DataPtr::from_const(self.bias_offsets.as_ptr())),
        };
    }

    fn call(&self) -> Call<'_> {
        Call { layout: &self.layout, schedule: self.schedule, workspace: self.workspace, stream: Stream::DEFAULT }
    }

    fn forward_args(&self) -> ForwardArgs {
        let a = &self.args;
        ForwardArgs { q: a.q, k: a.k, v: a.v, bias: a.bias, o: a.o, lse: a.lse }
    }

    fn build_schedule(&self) -> Result<()> {
        // SAFETY: the layout's arrays are alive; the recorder touches no buffer.
        unsafe { self.plan.build_schedule(&self.layout, self.schedule, Stream::DEFAULT) }
    }

    fn forward(&self) -> Result<()> {
        // SAFETY: the layout's arrays are alive; the recorder touches no tensor.
        unsafe { self.plan.forward(&self.call(), &self.forward_args()) }
    }

    fn backward(&self) -> Result<()> {
        // SAFETY: the layout's arrays are alive; the recorder touches no tensor.
        unsafe { self.plan.backward(&self.call(), &self.args) }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// All three calls reach the backend.
    #[track_caller]
    fn expect_valid(&self) {
        self.build_schedule().expect("schedule");
        self.forward().expect("forward");
        self.backward().expect("backward");
        assert_eq!(self.calls(), 3);
    }

    /// The text of the error names everything in `parts`, and no backend was called.
    #[track_caller]
    fn expect_error(&self, result: Result<()>, parts: &[&str]) {
        let text = result.expect_err("the call is invalid").to_string();
        for part in parts {
            assert!(text.contains(part), "'{part}' is not in the error: {text}");
        }
        assert_eq!(self.calls(), 0, "the backend was called in spite of: {text}");
    }
}

/// Breaks a valid host call and expects the error from both passes.
#[track_caller]
fn broken(parts: &[&str], change: impl Fn(&mut Fixture)) {
    broken_from(Fixture::host, parts, change);
}

#[track_caller]
fn broken_from(fixture: impl Fn() -> Fixture, parts: &[&str], change: impl Fn(&mut Fixture)) {
    fixture().expect_valid();
    let mut f = fixture();
    change(&mut f);
    f.expect_error(f.forward(), parts);
    f.expect_error(f.backward(), parts);
}

/// Breaks an argument that only the backward has.
#[track_caller]
fn broken_backward(parts: &[&str], change: impl Fn(&mut Fixture)) {
    let mut f = Fixture::host();
    change(&mut f);
    f.expect_error(f.backward(), parts);
}

fn at(address: usize) -> DataPtr {
    DataPtr::new(std::ptr::without_provenance_mut::<u8>(address))
}

#[test]
fn a_valid_call_reaches_the_backend_in_either_space() {
    for space in [MemorySpace::Host, MemorySpace::CudaDevice] {
        Fixture::new(space, builder()).expect_valid();
        Fixture::new(space, builder().kv_index(5)).expect_valid();
        Fixture::new(space, builder().bias(Bias::Alibi).mask(Mask::Causal(Alignment::BottomRight))).expect_valid();
        Fixture::new(space, builder().broadcast_query(7)).expect_valid();
        let dense = Bias::Dense { dtype: BF16, row_align: 8, shared_by_heads: false, capacity: 200 };
        Fixture::new(space, builder().bias(dense)).expect_valid();
    }
}

// ---- the problem ----

#[track_caller]
fn bad_problem(parts: &[&str], problem: ProblemBuilder) {
    let text = problem.build().expect_err("the problem is invalid").to_string();
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in the error: {text}");
    }
}

#[test]
fn problems_that_break_a_rule() {
    let b = || Problem::builder(DType::F16, 8, 64).capacity(4, 100, 200);
    b().build().expect("the base is valid");
    for (name, scale) in [("NaN", f32::NAN), ("inf", f32::INFINITY), ("-inf", f32::NEG_INFINITY)] {
        bad_problem(&["scale", name, "finite"], b().scale(scale));
    }
    b().scale(0.0).build().expect("0 is a scale");
    b().scale(-3.5).build().expect("negative is a scale");
    bad_problem(&["heads_q = 8", "heads_kv = 3"], b().heads_kv(3));
    bad_problem(&["heads_kv = 0"], b().heads_kv(0));
    bad_problem(&["heads_q = -2"], Problem::builder(DType::F16, -2, 64));
    bad_problem(&["head_dim = 0"], Problem::builder(DType::F16, 8, 0));
    bad_problem(&["head_dim_v = -64"], b().head_dim_v(-64));
    bad_problem(&["batch = -1"], b().capacity(-1, 100, 200));
    bad_problem(&["total_q = -100"], b().capacity(4, -100, 200));
    bad_problem(&["total_kv = -5"], b().capacity(4, 100, -5));
    bad_problem(&["kv_batch = -1"], b().kv_index(-1));
    bad_problem(&["q_len = -1"], b().broadcast_query(-1));
    let dense = |dtype, row_align, capacity| Bias::Dense { dtype, row_align, shared_by_heads: false, capacity };
    bad_problem(&["bias_row_align = 4", "1, 8 or 16"], b().bias(dense(DType::F32, 4, 10)));
    bad_problem(&["bias_dtype = bf16", "f32 or the problem's f16"], b().bias(dense(BF16, 8, 10)));
    bad_problem(&["bias_capacity = -10"], b().bias(dense(DType::F32, 8, -10)));
    let causal = b().bias(Bias::Alibi).mask(Mask::Causal(Alignment::BottomRight));
    causal.clone().build().expect("the mask sets the alignment");
    bad_problem(&["bias_alignment = top-left", "bottom-right"], causal.bias_alignment(Alignment::TopLeft));
    let mut kv_batch = b().build().unwrap();
    kv_batch.kv_batch = 9;
    assert!(kv_batch.validate().unwrap_err().to_string().contains("kv_batch = 9"));
}

#[test]
fn problems_whose_products_overflow() {
    let huge = i64::MAX / 2;
    let b = || Problem::builder(DType::F32, 8, 64);
    bad_problem(&["total_q", &huge.to_string()], b().capacity(1, huge, 1));
    bad_problem(&["total_kv", &huge.to_string()], b().capacity(1, 1, huge));
    bad_problem(&["batch", &huge.to_string()], b().capacity(huge, 1, 1));
    bad_problem(&["q_len", &huge.to_string()], b().capacity(1, 1, 1).broadcast_query(huge));
    bad_problem(&[&format!("head_dim = {huge}: makes sizes exceed 2^60 bytes")], Problem::builder(DType::F32, 1, huge));
    bad_problem(&[&format!("head_dim_v = {huge}"), "beside heads_q = 8"], b().head_dim_v(huge));
    let heads = Problem::builder(DType::F32, huge, 16).heads_kv(huge);
    bad_problem(&[&format!("heads_q = {huge}"), "beside head_dim = 16"], heads);
    bad_problem(&[&format!("heads_q = {huge}"), "beside head_dim = 16"], Problem::builder(DType::F32, huge, 16));
    let dense = Bias::Dense { dtype: DType::F32, row_align: 1, shared_by_heads: true, capacity: huge };
    bad_problem(&["bias_capacity", &huge.to_string()], b().bias(dense));
    // What the contract says must work.
    b().capacity(1_000_000, 1 << 33, 1 << 33).build().expect("a large batch");
    Problem::builder(DType::F32, 128, 512).capacity(1_000_000, 1 << 36, 1).build().expect("many heads");
}

#[test]
fn unsupported_problems_say_what_is_and_what_is_not() {
    let mut caps = capabilities(MemorySpace::Host);
    caps.dtypes = vec![BF16];
    caps.head_dims = vec![DimRange { min: 8, max: 256, step: 8 }];
    caps.head_dims_v = caps.head_dims.clone();
    caps.biases.clear();
    caps.window = false;
    caps.kv_index = false;
    let backend: Arc<dyn AttentionBackend> = Arc::new(Recorder { capabilities: caps, calls: Arc::default() });
    let window = Mask::Window { left: Some(3), right: None, alignment: Alignment::TopLeft };
    let problem = Problem::builder(DType::F32, 4, 60)
        .capacity(1, 1, 1)
        .bias(Bias::Relative { radius: 5 })
        .mask(window)
        .kv_index(1)
        .build()
        .unwrap();
    let error = Plan::new(backend, &problem).expect_err("unsupported");
    assert!(matches!(error, Error::Unsupported { .. }));
    let text = error.to_string();
    for part in
        ["recorder", "dtype f32 (has bf16)", "head_dim 60 (has multiples of 8 in 8..=256)", "window", "kv_index"]
    {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    assert!(text.contains("relative bias (has none)"), "{text}");
}

#[test]
fn a_backend_without_a_backward_says_so() {
    let mut caps = capabilities(MemorySpace::Host);
    caps.backward = false;
    let mut f = Fixture::host();
    let backend = Recorder { capabilities: caps, calls: f.calls.clone() };
    f.plan = Plan::new(Arc::new(backend), &builder().build().unwrap()).unwrap();
    f.expect_error(f.backward(), &["unsupported: the backward", "'recorder' lacks a backward"]);
    f.forward().unwrap();
    assert_eq!(f.calls(), 1);
}

// ---- offsets, lengths, indices in host memory ----

#[test]
fn offsets_that_break_a_rule() {
    broken(&["q_offsets[0] = -1", "negative"], |f| f.q_offsets[0] = -1);
    broken(&["q_offsets[2] = 2", "q_offsets[1] = 3"], |f| f.q_offsets[2] = 2);
    broken(&["q_offsets[3] = 9", "8 rows of q"], |f| f.q_offsets[3] = 9);
    broken(&["q_offsets[3] = 2147483647"], |f| f.q_offsets[3] = i32::MAX);
    broken(&["kv_offsets[0] = -7"], |f| f.kv_offsets[0] = -7);
    broken(&["kv_offsets[1] = 9", "8 rows of k"], |f| f.kv_offsets[1] = 9);
    broken(&["kv_offsets[3] = -9223372036854775808"], |f| f.kv_offsets[3] = i64::MIN);
    broken(&["kv_offsets[3] = 9223372036854775807"], |f| f.kv_offsets[3] = i64::MAX);
    broken(&["q_lengths[0] = -1"], |f| f.q_lengths[0] = -1);
    broken(&["q_lengths[1] = 1", "0..=0"], |f| f.q_lengths[1] = 1);
    broken(&["kv_lengths[2] = 3", "0..=2"], |f| f.kv_lengths[2] = 3);
    broken(&["kv_lengths[0] = -2147483648"], |f| f.kv_lengths[0] = i32::MIN);
}

#[test]
fn the_schedule_checks_offsets_against_capacities() {
    for (parts, change) in [
        (&["q_offsets[3] = 9", "8 rows"][..], (|f: &mut Fixture| f.q_offsets[3] = 9) as fn(&mut Fixture)),
        (&["kv_offsets[2] = 4", "kv_offsets[1] = 5"], |f| f.kv_offsets[2] = 4),
        (&["kv_lengths[1] = 2"], |f| f.kv_lengths[1] = 2),
        (&["q_offsets is null"], |f| f.layout.q_offsets = None),
        (&["batch = 4", "0..=3"], |f| f.layout.batch = 4),
        (&["schedule has 99 bytes", "100"], |f| f.schedule.bytes = 99),
        (&["schedule is null"], |f| f.schedule.data = DataPtr::NULL),
        (&["schedule = 0x200010", "256 bytes"], |f| f.schedule.data = at(0x20_0010)),
    ] {
        let mut f = Fixture::host();
        change(&mut f);
        f.expect_error(f.build_schedule(), parts);
    }
}

#[test]
fn offsets_are_checked_against_the_rows_of_the_call() {
    let fewer = |f: &mut Fixture, rows| {
        for v in [&mut f.args.q, &mut f.args.o, &mut f.args.d_o, &mut f.args.dq] {
            v.rows = rows;
        }
        f.args.lse.rows = rows;
    };
    let mut f = Fixture::host();
    fewer(&mut f, 6);
    f.expect_valid();
    broken(&["q_offsets[3] = 6", "5 rows of q"], |f| fewer(f, 5));
}

#[test]
fn indices_that_break_a_rule() {
    let fixture = || Fixture::new(MemorySpace::Host, builder().kv_index(5));
    broken_from(fixture, &["kv_index[1] = -1", "0..3"], |f| f.kv_index[1] = -1);
    broken_from(fixture, &["kv_index[2] = 3", "0..3"], |f| f.kv_index[2] = 3);
    broken_from(fixture, &["kv_batch = 6", "0..=5"], |f| f.layout.kv_batch = 6);
    broken_from(fixture, &["kv_batch = -1"], |f| f.layout.kv_batch = -1);
    broken_from(fixture, &["kv_batch = 0", "kv_index"], |f| f.layout.kv_batch = 0);
    broken_from(fixture, &["kv_index is null"], |f| f.layout.kv_index = None);
    broken_from(fixture, &["kv_index is null"], |f| f.layout.kv_index = Some(DataPtr::NULL));
    broken(&["kv_index = given", "does not use it"], |f| f.layout.kv_index = Some(address(30)));
    broken(&["kv_batch = 2", "batch = 3"], |f| f.layout.kv_batch = 2);
}

#[test]
fn bias_offsets_that_break_a_rule() {
    // Sequence 0: 2 rows of 4 keys (8 aligned); sequence 2: 3 rows of 2 keys: 4 heads x 3 x 8 = 96 elements.
    let dense = Bias::Dense { dtype: BF16, row_align: 8, shared_by_heads: false, capacity: 200 };
    let fixture = || Fixture::new(MemorySpace::Host, builder().bias(dense));
    broken_from(fixture, &["bias_offsets[0] = -8"], |f| f.bias_offsets[0] = -8);
    broken_from(fixture, &["bias_offsets[2] = 90", "bias_offsets[1] = 100"], |f| f.bias_offsets[2] = 90);
    broken_from(fixture, &["bias_offsets[3] = 201", "bias_capacity = 200"], |f| f.bias_offsets[3] = 201);
    broken_from(fixture, &["bias_offsets[3] = 195", "4 x 3 x 8 = 96"], |f| f.bias_offsets[3] = 195);
    broken_from(fixture, &["bias_offsets[1] = 63", "4 x 2 x 8 = 64"], |f| f.bias_offsets[1] = 63);
    broken_from(fixture, &["bias_offsets is null", "dense"], |f| f.layout.bias_offsets = None);
    broken_from(fixture, &["bias is null", "dense"], |f| f.args.bias = DataPtr::NULL);
    broken_from(fixture, &["bias = 0x10001", "2 bytes"], |f| f.args.bias = at(0x1_0001));
    broken(&["bias_offsets = given"], |f| f.layout.bias_offsets = Some(address(30)));
    broken(&["bias = 0x", "no bias"], |f| f.args.bias = address(30));
    broken_backward(&["dbias = 0x", "no bias"], |f| f.args.dbias = address(30));
    let mut f = Fixture::new(MemorySpace::Host, builder().bias(Bias::Alibi));
    f.args.dbias = at(0x1_0002);
    f.expect_error(f.backward(), &["dbias = 0x10002", "4 bytes"]);
}

#[test]
fn offsets_on_a_device_are_not_read() {
    let mut f = Fixture::new(MemorySpace::CudaDevice, builder().kv_index(5));
    f.layout.q_offsets = Some(Offsets::i32(std::ptr::without_provenance(0x8000)));
    f.layout.kv_offsets = Offsets::i64(std::ptr::without_provenance(0x9000));
    for data in [&mut f.layout.q_lengths, &mut f.layout.kv_lengths, &mut f.layout.kv_index] {
        *data = Some(at(0xA000));
    }
    f.expect_valid();
}

#[test]
fn arrays_that_are_missing_or_misaligned() {
    broken(&["q_offsets is null"], |f| f.layout.q_offsets = None);
    broken(&["q_offsets is null"], |f| f.layout.q_offsets = Some(Offsets::i32(std::ptr::null())));
    broken(&["kv_offsets is null"], |f| f.layout.kv_offsets = Offsets::i64(std::ptr::null()));
    broken(&["q_lengths is null"], |f| f.layout.q_lengths = Some(DataPtr::NULL));
    broken(&["kv_offsets = 0x8004", "8 bytes"], |f| {
        f.layout.kv_offsets = Offsets::i64(std::ptr::without_provenance(0x8004));
    });
    broken(&["q_offsets = 0x8002", "4 bytes"], |f| {
        f.layout.q_offsets = Some(Offsets::i32(std::ptr::without_provenance(0x8002)));
    });
    broken(&["kv_lengths = 0x8001", "4 bytes"], |f| f.layout.kv_lengths = Some(at(0x8001)));
    let broadcast = || Fixture::new(MemorySpace::Host, builder().broadcast_query(7));
    for ignored in [-1, i64::MAX] {
        Fixture::new(MemorySpace::Host, builder().capacity(3, ignored, 40).broadcast_query(7)).expect_valid();
    }
    broken_from(broadcast, &["q_offsets = given", "broadcast"], |f| {
        f.layout.q_offsets = Some(Offsets::i32(f.q_offsets.as_ptr()));
    });
    broken_from(broadcast, &["q_lengths = given", "broadcast"], |f| f.layout.q_lengths = Some(address(30)));
}

// ---- tensors ----

#[test]
fn views_that_differ_from_the_problem() {
    broken(&["batch = -1"], |f| f.layout.batch = -1);
    broken(&["batch = 4", "0..=3"], |f| f.layout.batch = 4);
    broken(&["q.dtype = f16", "bf16"], |f| f.args.q.dtype = DType::F16);
    broken(&["k.heads = 4", "heads_kv = 2"], |f| f.args.k.heads = 4);
    broken(&["o.heads = 3", "heads_q = 4"], |f| f.args.o.heads = 3);
    broken(&["v.dim = 16", "head_dim_v = 24"], |f| f.args.v.dim = 16);
    broken(&["q.dim = 0", "head_dim = 16"], |f| f.args.q.dim = 0);
    broken(&["q.rows = 9", "0..=8", "total_q"], |f| f.args.q.rows = 9);
    broken(&["k.rows = -1", "total_kv"], |f| f.args.k.rows = -1);
    broken(&["v.rows = 7", "k.rows = 8"], |f| f.args.v.rows = 7);
    broken(&["o.rows = 7", "must equal q.rows = 8"], |f| f.args.o.rows = 7);
    broken(&["lse.rows = 5", "o.rows = 8"], |f| f.args.lse.rows = 5);
    broken(&["lse.head_stride = 7", "8"], |f| f.args.lse.head_stride = 7);
    broken(&["lse.head_stride = -8"], |f| f.args.lse.head_stride = -8);
    broken_backward(&["d_o.rows = 7"], |f| f.args.d_o.rows = 7);
    broken_backward(&["dq.dim = 24", "head_dim = 16"], |f| f.args.dq.dim = 24);
    broken_backward(&["dk.dtype = f32", "bf16"], |f| f.args.dk.dtype = DType::F32);
    broken_backward(&["dv.heads = 4", "heads_kv = 2"], |f| f.args.dv.heads = 4);
    let broadcast = || Fixture::new(MemorySpace::Host, builder().broadcast_query(7));
    broken_from(broadcast, &["q.rows = 8", "q_len = 7"], |f| f.args.q.rows = 8);
    broken_from(broadcast, &["o.rows = 20", "21 rows"], |f| f.args.o.rows = 20);
    broken_from(broadcast, &["o.rows = 22", "0..=21"], |f| f.args.o.rows = 22);
}

#[test]
fn null_data_where_there_is_work() {
    for (name, change) in [
        ("q.data", (|f: &mut Fixture| f.args.q.data = DataPtr::NULL) as fn(&mut Fixture)),
        ("k.data", |f| f.args.k.data = DataPtr::NULL),
        ("v.data", |f| f.args.v.data = DataPtr::NULL),
        ("o.data", |f| f.args.o.data = DataPtr::NULL),
        ("lse.data", |f| f.args.lse.data = DataPtr::NULL),
        ("workspace", |f| f.workspace.data = DataPtr::NULL),
        ("schedule", |f| f.schedule.data = DataPtr::NULL),
    ] {
        broken(&[&format!("{name} is null")], change);
    }
    broken_backward(&["d_o.data is null"], |f| f.args.d_o.data = DataPtr::NULL);
    broken_backward(&["dq.data is null"], |f| f.args.dq.data = DataPtr::NULL);
    broken_backward(&["dk.data is null"], |f| f.args.dk.data = DataPtr::NULL);
    broken_backward(&["dv.data is null"], |f| f.args.dv.data = DataPtr::NULL);
}

#[test]
fn addresses_and_strides_beyond_the_backends_promises() {
    broken(&["q.data = 0x100002", "16 bytes", "recorder"], |f| f.args.q.data = at(0x10_0002));
    broken(&["o.data = 0x100008", "16 bytes"], |f| f.args.o.data = at(0x10_0008));
    broken(&["lse.data = 0x100002", "4 bytes"], |f| f.args.lse.data = at(0x10_0002));
    broken(&["k.row_stride = 36 elements (72 bytes)", "16 bytes"], |f| f.args.k.row_stride = 36);
    broken(&["v.head_stride = 25 elements (50 bytes)", "16 bytes"], |f| f.args.v.head_stride = 25);
    broken(&["q.row_stride = -64", "negative"], |f| f.args.q.row_stride = -64);
    broken(&["k.head_stride = -16", "negative"], |f| f.args.k.head_stride = -16);
    let huge = i64::MAX / 2 / 8 * 8;
    broken(&["q.row_stride", &huge.to_string(), "address space"], |f| f.args.q.row_stride = huge);
    broken(&["v.head_stride", &huge.to_string(), "address space"], |f| f.args.v.head_stride = huge);
    broken(&["lse.head_stride", &huge.to_string(), "address space"], |f| f.args.lse.head_stride = huge);
    broken(&["q.row_stride", "address space"], |f| f.args.q.data = at(usize::MAX - 255));
    broken(&["workspace has 1 bytes", "needs"], |f| f.workspace.bytes = 1);
    broken(&["workspace = 0x1080", "256 bytes"], |f| f.workspace.data = at(0x1080));
    broken_backward(&["workspace has 299 bytes", "needs 300"], |f| f.workspace.bytes = 299);
    broken_backward(&["dk.head_stride = 15 elements"], |f| f.args.dk.head_stride = 15);
}

#[test]
fn outputs_whose_elements_overlap() {
    // `o` is an output of the forward; the backward reads it, and may read a row twice.
    for (part, row_stride, head_stride) in [("head_stride 24", 0, 24), ("head_stride 16", 96, 16)] {
        let mut f = Fixture::host();
        (f.args.o.row_stride, f.args.o.head_stride) = (row_stride, head_stride);
        f.expect_error(f.forward(), &[&format!("o.row_stride = {row_stride}"), part, "share an address"]);
        f.backward().unwrap();
    }
    broken_backward(&["dq.row_stride = 56", "head_stride 16"], |f| f.args.dq.row_stride = 56);
    broken_backward(&["dv.row_stride = 32", "head_stride 24"], |f| f.args.dv.row_stride = 32);
    // Heads outside of rows, and strides that nest neither way without touching.
    let mut f = Fixture::host();
    (f.args.o.row_stride, f.args.o.head_stride) = (24, 8 * 24);
    (f.args.dq.row_stride, f.args.dq.head_stride) = (32, 8 * 32 + 16);
    (f.args.dv.row_stride, f.args.dv.head_stride) = (48, 72);
    f.expect_valid();
    // Inputs may repeat rows and heads.
    let mut f = Fixture::host();
    (f.args.q.row_stride, f.args.k.head_stride) = (0, 0);
    f.expect_valid();
}

#[test]
fn strides_that_no_element_uses_may_be_anything() {
    // One head, one row: exchange formats write 1 there.
    let problem = Problem::builder(BF16, 1, 16).head_dim_v(24).capacity(3, 6, 8);
    let mut f = Fixture::new(MemorySpace::Host, problem);
    let a = &mut f.args;
    for v in [&mut a.q, &mut a.k, &mut a.v, &mut a.o, &mut a.d_o, &mut a.dq, &mut a.dk, &mut a.dv] {
        v.head_stride = 1;
    }
    f.args.lse.head_stride = 1;
    f.expect_valid();
    let mut f = Fixture::new(MemorySpace::CudaDevice, builder().capacity(1, 1, 1));
    f.layout.batch = 1;
    f.layout.kv_batch = 1;
    let a = &mut f.args;
    for v in [&mut a.q, &mut a.k, &mut a.v, &mut a.o, &mut a.d_o, &mut a.dq, &mut a.dk, &mut a.dv] {
        v.row_stride = 1;
    }
    f.expect_valid();
}

// ---- successes without work ----

#[test]
fn an_empty_batch_touches_nothing() {
    let mut f = Fixture::host();
    f.layout = Layout::EMPTY;
    f.schedule = Buffer::EMPTY;
    f.workspace = Buffer::EMPTY;
    let a = &mut f.args;
    for v in [&mut a.q, &mut a.k, &mut a.v, &mut a.o, &mut a.d_o, &mut a.dq, &mut a.dk, &mut a.dv] {
        v.data = DataPtr::NULL;
        v.rows = 0;
    }
    f.args.lse = LseView::contiguous(DataPtr::NULL, 0);
    f.build_schedule().unwrap();
    f.forward().unwrap();
    f.backward().unwrap();
    assert_eq!(f.calls(), 0);
}

#[test]
fn an_empty_batch_still_zeroes_unused_rows() {
    let mut f = Fixture::new(MemorySpace::Host, builder().zero_unused_rows(true));
    f.layout = Layout::EMPTY;
    f.expect_valid();
    let mut f = Fixture::new(MemorySpace::Host, builder().zero_unused_rows(true));
    f.layout = Layout::EMPTY;
    f.args.o.data = DataPtr::NULL;
    f.expect_error(f.forward(), &["o.data is null"]);
}

#[test]
fn sides_without_rows_need_no_data() {
    // No query rows: the forward has nothing to do, the backward has dk and dv to write.
    let mut f = Fixture::host();
    f.q_offsets = vec![0; 4];
    f.q_lengths = vec![0; 3];
    f.relink();
    let a = &mut f.args;
    for v in [&mut a.q, &mut a.o, &mut a.d_o, &mut a.dq] {
        (v.data, v.rows) = (DataPtr::NULL, 0);
    }
    a.lse = LseView::contiguous(DataPtr::NULL, 0);
    f.forward().unwrap();
    assert_eq!(f.calls(), 0);
    f.backward().unwrap();
    assert_eq!(f.calls(), 1);
    // No rows at all.
    let a = &mut f.args;
    for v in [&mut a.k, &mut a.v, &mut a.dk, &mut a.dv] {
        (v.data, v.rows) = (DataPtr::NULL, 0);
    }
    f.backward().unwrap();
    assert_eq!(f.calls(), 1);
    // No keys: o and lse have to be written.
    let mut f = Fixture::host();
    f.kv_offsets = vec![0; 4];
    f.kv_lengths = vec![0; 3];
    f.relink();
    let a = &mut f.args;
    for v in [&mut a.k, &mut a.v, &mut a.dk, &mut a.dv] {
        (v.data, v.rows) = (DataPtr::NULL, 0);
    }
    f.expect_valid();
}
