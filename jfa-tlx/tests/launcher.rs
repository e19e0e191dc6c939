//! The launcher over an executor that records: what would be launched, with which arguments and tensor maps. Needs no device;
//! the bundles are the real ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    Alignment, AttentionBackend, BackwardArgs, Buffer, Call, DType, DataPtr, Error, ForwardArgs, Layout, LseView, Mask,
    Plan, Problem, Stream, TensorView,
};
use jfa_driver::bundle::{ParameterKind, Promise};
use jfa_driver::recorder::{Launched, Recorder};
use jfa_driver::schedule::params::{ScheduleParams, ZeroParams};
use jfa_driver::{Arch, Bundle, ImageKind, KernelInfo};
use jfa_tlx::{BUNDLES, GENERATIONS, TlxBackend};

/// The last argument of a launch, as a structure.
fn params<T: Copy>(launch: &Launched) -> T {
    // SAFETY: the parameters of kernels are plain numbers.
    unsafe { launch.params() }
}

fn at(address: usize) -> DataPtr {
    DataPtr::new(std::ptr::without_provenance_mut::<u8>(address))
}

fn offsets(address: usize) -> Offsets {
    Offsets::i32(std::ptr::without_provenance(address))
}

fn backend(gpu: &Arc<Recorder>, generation: Option<&str>) -> jfa_core::Result<Arc<TlxBackend>> {
    TlxBackend::new(gpu.clone(), BUNDLES, jfa_cuda::BUNDLES, "tlx", generation, Some(false)).map(Arc::new)
}

fn plan_on(gpu: &Arc<Recorder>, generation: Option<&str>, problem: &Problem) -> jfa_core::Result<Plan> {
    Plan::new(backend(gpu, generation)?, problem)
}

fn schedule_buffer(plan: &Plan) -> Buffer {
    Buffer { data: at(0x7000_0000), bytes: plan.requirements().schedule_bytes }
}

fn call<'a>(plan: &Plan, layout: &'a Layout) -> Call<'a> {
    let workspace = Buffer { data: at(0x6000_0000), bytes: 1 << 40 };
    Call { layout, schedule: schedule_buffer(plan), workspace, stream: Stream::DEFAULT }
}

/// Arguments of a forward over whole buffers.
fn forward_args(p: &Problem) -> ForwardArgs {
    let view = |address, rows, heads| {
        let data = if rows > 0 { at(address) } else { DataPtr::NULL };
        TensorView::contiguous(data, p.dtype, rows, heads, p.head_dim)
    };
    ForwardArgs {
        q: view(0x1000_0000, p.q_rows(), p.heads_q),
        k: view(0x2000_0000, p.total_kv, p.heads_kv),
        v: view(0x3000_0000, p.total_kv, p.heads_kv),
        bias: DataPtr::NULL,
        o: view(0x4000_0000, p.o_rows(), p.heads_q),
        lse: LseView::contiguous(at(0x5000_0000), p.o_rows()),
    }
}

/// Arguments of a backward over whole buffers.
fn backward_args(p: &Problem) -> BackwardArgs {
    let f = forward_args(p);
    let moved = |view: TensorView| TensorView {
        data: if view.rows > 0 { at(view.data.addr() + 0x800_0000) } else { DataPtr::NULL },
        ..view
    };
    BackwardArgs {
        q: f.q,
        k: f.k,
        v: f.v,
        bias: DataPtr::NULL,
        o: f.o,
        lse: f.lse,
        d_o: moved(f.o),
        dq: moved(f.q),
        dk: moved(f.k),
        dv: moved(f.v),
        dbias: DataPtr::NULL,
    }
}

fn run_forward(gpu: &Recorder, plan: &Plan, layout: &Layout, args: &ForwardArgs) -> Vec<Launched> {
    // SAFETY: the recorder follows no address.
    unsafe {
        plan.build_schedule(layout, schedule_buffer(plan), Stream::DEFAULT).unwrap();
        plan.forward(&call(plan, layout), args).unwrap();
    }
    assert_eq!(gpu.waits(), 0, "nothing waits for a stream");
    gpu.take()
}

fn run_backward(gpu: &Recorder, plan: &Plan, layout: &Layout, args: &BackwardArgs) -> jfa_core::Result<Vec<Launched>> {
    // SAFETY: the recorder follows no address.
    unsafe { plan.backward(&call(plan, layout), args) }?;
    assert_eq!(gpu.waits(), 0, "nothing waits for a stream");
    Ok(gpu.take())
}

/// The cubin bundle of an architecture.
fn bundle(arch: Arch) -> Bundle {
    let all = BUNDLES.iter().map(|file| Bundle::from_static(file).unwrap());
    all.into_iter().find(|b| b.kind() == ImageKind::Cubin && b.arch() == arch).unwrap()
}

fn generations_of(arch: Arch, kind: &str) -> Vec<&'static str> {
    let bundle = bundle(arch);
    // The one that writes a result: others may serve several generations.
    let result = if kind == "forward" { ["o", "o_map"] } else { ["dk", "dk_map"] };
    let has = |g: &str| {
        let of = |k: &&KernelInfo| k.tag("kind") == kind && k.tag("variant").split_whitespace().any(|v| v == g);
        bundle.kernels().iter().filter(of).any(|k| k.parameters.iter().any(|p| result.contains(&p.name.as_str())))
    };
    GENERATIONS.into_iter().filter(|g| has(g)).collect()
}

const DEVICES: [(Arch, (u32, u32)); 2] = [(Arch::SM_90A, (9, 0)), (Arch::SM_100A, (10, 0))];

#[test]
fn bundles_are_whole_and_promise_what_the_launcher_checks() {
    for (arch, _) in DEVICES {
        let bundle = bundle(arch);
        bundle.verify().unwrap();
        let most = bundle.kernels().iter().map(|k| k.parameters.len()).max().unwrap();
        assert!(most <= jfa_driver::cuda::MOST_ARGUMENTS, "{most} parameters");
        assert_eq!(bundle.manifest().owner, "jfa-tlx");
        for (i, k) in bundle.kernels().iter().enumerate() {
            let cubin = jfa_driver::cubin::parse(bundle.image(i).unwrap()).unwrap();
            let real = &cubin.kernels[&k.entry];
            let listed: Vec<_> = k.parameters.iter().map(|p| (p.offset, p.bytes)).collect();
            let recorded: Vec<_> = real.parameters.iter().map(|p| (p.offset, p.bytes)).collect();
            assert_eq!(listed, recorded, "{}", k.name);
            assert!(k.resources.registers > 0 && k.resources.registers <= 255, "{}", k.name);
            for p in &k.parameters {
                let expected = match (p.kind, p.name.as_str()) {
                    (
                        ParameterKind::Pointer,
                        "lse" | "kv_offsets" | "kv_lengths" | "global_scratch" | "profile_scratch",
                    ) => 1,
                    (ParameterKind::Pointer, _) | (_, "delta_head") => 16,
                    (ParameterKind::I64, n) if n != "lse_head" && !n.contains("_map.") => 8,
                    _ => 1,
                };
                assert_eq!(p.divisible, expected, "{}: {}", k.name, p.name);
            }
            for p in &k.promises {
                let expected = Promise { argument: p.argument.clone(), base: 16, row_stride: 16, head_stride: 16 };
                assert_eq!(*p, expected, "{}", k.name);
            }
        }
    }
}

#[test]
fn every_generation_binds_its_forward() {
    for (arch, capability) in DEVICES {
        let gpu = Recorder::new(&[capability]);
        let generations = generations_of(arch, "forward");
        assert!(generations.contains(&"g1") && generations.contains(&"g2"), "{arch}: {generations:?}");
        for (dtype, dim) in [(DType::BF16, 64), (DType::BF16, 128), (DType::F16, 64), (DType::F16, 128)] {
            let problem = Problem::builder(dtype, 4, dim).heads_kv(2).capacity(100, 9000, 8000).build().unwrap();
            for g in &generations {
                let plan = plan_on(&gpu, Some(g), &problem).unwrap();
                let args = forward_args(&problem);
                let layout = Layout::jagged(90, offsets(0x100), offsets(0x200));
                let launches = run_forward(&gpu, &plan, &layout, &args);
                assert_eq!(launches.len(), 2, "{plan:?}", plan = plan.describe());
                assert!(plan.describe().contains(&format!("forward of generation {g}")), "{}", plan.describe());
                let s: ScheduleParams = params(&launches[0]);
                let f = &launches[1];
                let tags = ["kind", "variant", "dtype", "head_dim"].map(|t| f.kernel.tag(t).to_owned());
                assert_eq!(tags, ["forward".to_owned(), (*g).to_owned(), dtype.to_string(), dim.to_string()]);
                assert_eq!((f.shape.threads, f.shape.shared_bytes), (f.kernel.threads, f.kernel.shared_dynamic));
                // Two query heads share the rows of a unit.
                let rows = i64::from(f.kernel.constants["unit_rows"]) / 2;
                assert_eq!(i64::from(s.forward_rows), rows);
                assert_eq!(i64::from(s.forward_kv_tile), i64::from(f.kernel.constants["kv_tile"]));
                assert_eq!((f.int("packed_log2"), f.int("heads"), f.int("group")), (1, 2, 2));
                let grid = match f.kernel.tag("grid") {
                    "persistent" => 132,
                    "forward_units" => (9000 / rows + 100) * 2,
                    "forward_tickets" => ((9000 / rows + 100) * 2).min(32 * 132),
                    other => panic!("{other}"),
                };
                assert_eq!(f.shape.grid, [u32::try_from(grid).unwrap(), 1, 1]);
                assert_eq!(f.int("header"), 0x7000_0000);
                assert_eq!(f.int("sequences").cast_unsigned(), s.sequences);
                assert_eq!(f.int("forward_units").cast_unsigned(), s.forward_list);
                assert_eq!((f.int("lse"), f.int("lse_head"), f.int("o_rows")), (0x5000_0000, 9000, 9000));
                assert_eq!((f.int("left"), f.int("right"), f.int("bottom_right")), (-1, -1, 0));
                let expected = (dim as f64).sqrt().recip() * std::f64::consts::LOG2_E;
                assert!((f64::from(f.float("scale_log2")) - expected).abs() < 1e-7);
                assert_eq!((f.int("global_scratch"), f.int("profile_scratch")), (0, 0));
                if f.has("q_map") {
                    let (q, k) = (gpu.map_of(f, "q_map"), gpu.map_of(f, "k_map"));
                    assert_eq!((q.tensor, q.address, k.tensor, k.address), ("q", 0x1000_0000, "k", 0x2000_0000));
                    let box_rows =
                        |name: &str| f.kernel.parameters.iter().find(|p| p.name == name).unwrap().tile.unwrap().rows;
                    assert_eq!((q.box_dims[1], q.box_dims[3]), (box_rows("q_map") / 2, 2));
                    assert_eq!((k.box_dims[1], k.box_dims[3]), (box_rows("k_map"), 1));
                    assert_eq!((f.int("k_map.shape2"), f.int("k_map.shape4"), f.int("k_map.stride4")), (8001, dim, 1));
                    assert_eq!(f.int("k_map.stride1"), dim);
                } else {
                    assert_eq!(
                        (f.int("q"), f.int("k"), f.int("v"), f.int("o")),
                        (0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000)
                    );
                    assert_eq!((f.int("q_row"), f.int("q_head"), f.int("k_row")), (4 * dim, dim, 2 * dim));
                }
                let fills = gpu.take_fills();
                if f.has("counter") {
                    assert_eq!(fills, [(0x6000_0000, 0, 256)], "counters start at zero");
                    assert_eq!((f.int("counter"), plan.requirements().forward_bytes), (0x6000_0000, 256));
                } else {
                    assert!(fills.is_empty());
                }
            }
            // Without a pin: the newest.
            let plan = plan_on(&gpu, None, &problem).unwrap();
            assert!(
                plan.describe().contains(&format!("forward of generation {}", generations[0])),
                "{}",
                plan.describe()
            );
        }
    }
}

#[test]
fn groups_masks_and_scales() {
    let gpu = Recorder::new(&[(9, 0)]);
    let layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
    for (heads_q, heads_kv, packed) in [(16, 4, 2u32), (16, 1, 4), (8, 4, 1), (6, 2, 0), (64, 1, 0), (4, 4, 0)] {
        let problem = Problem::builder(DType::BF16, heads_q, 128)
            .heads_kv(heads_kv)
            .capacity(100, 10_000, 10_000)
            .build()
            .unwrap();
        let plan = plan_on(&gpu, Some("g1"), &problem).unwrap();
        let launches = run_forward(&gpu, &plan, &layout, &forward_args(&problem));
        let f = &launches[1];
        assert_eq!((f.int("packed_log2"), f.int("heads")), (i64::from(packed), heads_q >> packed));
        assert_eq!(params::<ScheduleParams>(&launches[0]).forward_rows, 128 >> packed);
    }
    let base = || Problem::builder(DType::BF16, 2, 128).capacity(100, 1000, 1000);
    let window = |left, right, alignment| Mask::Window { left, right, alignment };
    for (mask, expected) in [
        (Mask::Causal(Alignment::TopLeft), (-1, 0, 0)),
        (Mask::Causal(Alignment::BottomRight), (-1, 0, 1)),
        (window(Some(5), Some(0), Alignment::BottomRight), (5, 0, 1)),
        (window(None, Some(7), Alignment::TopLeft), (-1, 7, 0)),
    ] {
        let problem = base().mask(mask).scale(-2.0).build().unwrap();
        let plan = plan_on(&gpu, None, &problem).unwrap();
        let launches = run_forward(&gpu, &plan, &layout, &forward_args(&problem));
        let f = &launches[1];
        assert_eq!((f.int("left"), f.int("right"), f.int("bottom_right")), expected, "{mask}");
        assert!((f.float("scale_log2") + 2.0 * std::f32::consts::LOG2_E).abs() < 1e-6);
    }
}

#[test]
fn fewer_rows_and_strides_of_a_call() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::F16, 2, 64).capacity(8, 1000, 1000).build().unwrap();
    let fused = |address| TensorView {
        data: at(address),
        dtype: DType::F16,
        rows: 300,
        heads: 2,
        dim: 64,
        row_stride: 3 * 128,
        head_stride: 64,
    };
    let mut args = forward_args(&problem);
    (args.q, args.k, args.v) = (fused(0x1000_0000), fused(0x1000_0100), fused(0x1000_0200));
    (args.o.rows, args.lse.rows) = (300, 300);
    let layout = Layout::jagged(3, offsets(0x100), offsets(0x200));
    for g in GENERATIONS {
        let plan = plan_on(&gpu, Some(g), &problem).unwrap();
        let f = run_forward(&gpu, &plan, &layout, &args).remove(1);
        assert_eq!((f.int("o_rows"), f.int("lse_head")), (300, 1000));
        if f.has("k_map") {
            let spec = gpu.map_of(&f, "k_map");
            assert_eq!((spec.address, spec.dims[2]), (0x1000_0100, 301));
            assert_eq!(spec.strides, [768, 768, 128, (1 << 39) - 768]);
        } else {
            assert_eq!((f.int("k"), f.int("k_row"), f.int("k_head")), (0x1000_0100, 384, 64));
        }
        // What the kernels were compiled to assume is refused, by argument and value, before anything is launched.
        let plan = plan_on(&gpu, Some(g), &problem).unwrap();
        let mut bad = args;
        bad.k.row_stride = 3 * 128 + 4;
        // SAFETY: the recorder follows no address.
        let e = unsafe { plan.forward(&call(&plan, &layout), &bad) }.unwrap_err().to_string();
        assert!(e.contains("k.row_stride") && e.contains("776") && e.contains("16"), "{e}");
        assert!(gpu.take().is_empty());
        gpu.take_fills();
    }
    // No key rows: outputs must be written all the same.
    let problem = Problem::builder(DType::F16, 2, 64).capacity(8, 1000, 0).build().unwrap();
    for g in GENERATIONS {
        let plan = plan_on(&gpu, Some(g), &problem).unwrap();
        let f = run_forward(&gpu, &plan, &layout, &forward_args(&problem)).remove(1);
        if f.has("k_map") {
            assert_eq!(gpu.map_of(&f, "k_map").address, 0x1000_0000, "another tensor's map serves");
        } else {
            assert_eq!(f.int("k"), 0);
        }
    }
}

#[test]
fn what_is_unsupported_is_named() {
    let gpu = Recorder::new(&[(9, 0)]);
    let refuse = |generation, problem: &Problem, words: &[&str]| {
        let e = plan_on(&gpu, generation, problem).map(|_| ()).unwrap_err();
        assert!(matches!(e, Error::Unsupported { .. }), "{e}");
        for w in words {
            assert!(e.to_string().contains(w), "{e} lacks {w}");
        }
    };
    let base = |dtype, dim| Problem::builder(dtype, 2, dim).capacity(10, 100, 100);
    refuse(None, &base(DType::BF16, 96).build().unwrap(), &["'tlx' lacks head_dim 96 (has 64, 128)"]);
    refuse(Some("g1"), &base(DType::BF16, 32).build().unwrap(), &["'tlx:g1' lacks head_dim 32 (has 64, 128)"]);
    refuse(None, &base(DType::F32, 64).build().unwrap(), &["dtype f32 (has f16, bf16)"]);
    refuse(
        None,
        &base(DType::F16, 64).head_dim_v(128).build().unwrap(),
        &["head_dim_v 128 different from head_dim 64"],
    );
    refuse(None, &base(DType::F16, 64).bias(jfa_core::Bias::Alibi).build().unwrap(), &["alibi bias (has none)"]);
    let large = Problem::builder(DType::BF16, 4096, 128).capacity(1_000_000, 1_000_000, 10).build().unwrap();
    refuse(None, &large, &["2^31 - 1 tiles times heads"]);
    let e = plan_on(&gpu, None, &base(DType::F16, 64).capacity(10, 1 << 31, 10).build().unwrap()).unwrap_err();
    assert!(e.to_string().contains("total_q = 2147483648: backend 'tlx' takes at most 2147481600"), "{e}");
    // What the contract demands to work.
    let problem = Problem::builder(DType::BF16, 128, 128).capacity(1_000_000, 2_000_000_000, 2_000_000_000);
    plan_on(&gpu, None, &problem.build().unwrap()).unwrap();
}

#[test]
fn devices_and_generations_that_are_not_there_are_named() {
    let make = |capabilities: &[(u32, u32)], generation| {
        let e = backend(&Recorder::new(capabilities), generation).map(|_| ()).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        e.to_string()
    };
    let e = make(&[(8, 0)], None);
    assert!(e.contains("no kernels for device 0 (recorder 0, compute capability 8.0); compiled in: sm_90a"), "{e}");
    assert!(e.contains("sm_100a"), "{e}");
    assert!(make(&[(9, 0)], Some("g7")).contains("no generation is called 'g7'; there are: g4, g3, g2, g1"));
    let gpu = Recorder::new(&[(8, 0), (9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(10, 100, 100).build().unwrap();
    let plan = plan_on(&gpu, None, &problem).unwrap();
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    let build = |device: usize| {
        let stream = Stream::from_raw(std::ptr::without_provenance_mut(device));
        // SAFETY: the recorder follows no address.
        unsafe { plan.build_schedule(&layout, schedule_buffer(&plan), stream) }
    };
    build(1).unwrap();
    assert_eq!(gpu.take().len(), 1);
    assert!(build(0).unwrap_err().to_string().contains("compute capability 8.0"));
    assert!(gpu.take().is_empty());
    let b = backend(&gpu, Some("g1")).unwrap();
    assert_eq!(b.name(), "tlx:g1");
    assert!(b.capabilities().head_dims.iter().map(|d| d.min).eq([64, 128]));
}

#[test]
fn unused_rows_are_zeroed_first() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem =
        Problem::builder(DType::BF16, 2, 128).capacity(10, 1000, 2000).zero_unused_rows(true).build().unwrap();
    let plan = plan_on(&gpu, None, &problem).unwrap();
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    let launches = run_forward(&gpu, &plan, &layout, &forward_args(&problem));
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names[..2], ["schedule", "zero_rows"]);
    let z: ZeroParams = params(&launches[1]);
    assert_eq!((z.offsets, z.rows, z.tensors[0].data, z.lse), (0x100, 1000, 0x4000_0000, 0x5000_0000));
    // Without any sequence there is nothing else to do.
    let empty = Layout { batch: 0, kv_batch: 0, ..layout };
    let launches = run_forward(&gpu, &plan, &empty, &forward_args(&problem));
    assert_eq!(launches.iter().map(Launched::name).collect::<Vec<_>>(), ["zero_rows"]);
}

/// Kernels of a generation's backward that a problem needs, by step.
fn backward_names(launches: &[Launched]) -> Vec<(String, String)> {
    launches.iter().map(|l| (l.kernel.tag("step").to_owned(), l.kernel.entry.clone())).collect()
}

#[test]
fn every_generation_binds_its_backward() {
    for (arch, capability) in DEVICES {
        let gpu = Recorder::new(&[capability]);
        for g in generations_of(arch, "backward") {
            for dim in [64, 128] {
                let problem =
                    Problem::builder(DType::BF16, 4, dim).heads_kv(2).capacity(100, 9000, 8000).build().unwrap();
                let plan = plan_on(&gpu, Some(g), &problem).unwrap();
                let layout = Layout::jagged(90, offsets(0x100), offsets(0x200));
                let s: ScheduleParams = params(&run_forward(&gpu, &plan, &layout, &forward_args(&problem))[0]);
                // One unit per key tile.
                assert_eq!(s.backward_share, i32::MAX);
                assert_eq!(s.backward_capacity, 8000 / s.backward_rows + 100);
                gpu.take_fills();
                let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem)).unwrap();
                let steps = backward_names(&launches);
                assert!(steps.is_sorted(), "{steps:?}");
                let written = |t: &str| launches.iter().any(|l| l.has(t) || l.has(&format!("{t}_map")));
                for t in ["dq", "dk", "dv"] {
                    assert!(written(t), "{g}: {t}");
                }
                let bytes = plan.requirements().backward_bytes as u64;
                let inside = |address: i64| (0x6000_0000..0x6000_0000 + bytes).contains(&address.cast_unsigned());
                for l in &launches {
                    assert!(l.kernel.tag("variant").split_whitespace().any(|v| v == g), "{}", l.name());
                    for name in ["delta", "counter", "partial"] {
                        assert!(!l.has(name) || inside(l.int(name)), "{}: {name}", l.name());
                    }
                    if l.has("backward_units") {
                        assert_eq!(l.int("backward_units").cast_unsigned(), s.backward_list);
                    }
                    if l.kernel.tag("grid") == "backward_units" {
                        let heads = if l.kernel.tag("grid_heads") == "q" { 4 } else { 2 };
                        assert_eq!(l.shape.grid[0], s.backward_capacity.cast_unsigned() * heads);
                    }
                    assert!(l.kernel.tag("pairs").is_empty(), "{}: sequences of 90 rows", l.name());
                    if l.has("dq") {
                        assert_eq!((l.int("dq"), l.int("dq_row"), l.int("dq_head")), (0x1800_0000, 4 * dim, dim));
                    }
                    if l.has("delta") {
                        assert_eq!(l.int("delta_head"), 9024);
                        assert!(inside(l.int("delta") + 4 * (4 * 9024 - 1)));
                    }
                    let kinds: BTreeMap<_, _> = [("dk", 0x2800_0000), ("dv", 0x3800_0000), ("d_o", 0x4800_0000)].into();
                    for (name, address) in kinds {
                        assert!(!l.has(name) || l.int(name) == address, "{}: {name}", l.name());
                    }
                }
                for (start, value, bytes) in gpu.take_fills() {
                    assert_eq!((start, value), (0x6000_0000, 0));
                    assert_eq!(bytes, 256, "only counters are zeroed");
                }
            }
        }
    }
}

#[test]
fn blackwell_deals_tickets_and_pairs_long_sequences() {
    let gpu = Recorder::new(&[(10, 0)]);
    let layout = Layout::jagged(4, offsets(0x100), offsets(0x200));
    let shapes_of = |generation: &str, heads: i64, rows: i64, deterministic: bool| {
        let problem = Problem::builder(DType::BF16, heads, 128).capacity(4, 4 * rows, 4 * rows);
        let problem = problem.deterministic(deterministic).build().unwrap();
        let plan = plan_on(&gpu, Some(generation), &problem).unwrap();
        let mut launches = run_forward(&gpu, &plan, &layout, &forward_args(&problem));
        launches.append(&mut run_backward(&gpu, &plan, &layout, &backward_args(&problem)).unwrap());
        assert!(gpu.take_fills().is_empty(), "no counter is to be cleared");
        let steps: Vec<_> = launches.iter().filter(|l| l.kernel.tag("grid").ends_with("_tickets")).collect();
        assert_eq!(steps.len(), 3, "forward, dq, dk and dv");
        steps.iter().map(|l| (l.kernel.tag("pairs") == "yes", l.shape.grid[0])).collect::<Vec<_>>()
    };
    let shapes = |generation: &str, heads: i64, rows: i64| shapes_of(generation, heads, rows, false);
    // Lengths of 300: neither pass gains by pairs. 4 x 300 rows have room for 1200 / 256 + 4 and 1200 / 128 + 4 units.
    assert_eq!(shapes("g4", 2, 300), [(false, 16), (false, 26), (false, 26)]);
    assert_eq!(shapes("g4-pairs", 2, 300), [(false, 16), (true, 52), (true, 52)]);
    // Of 1,024 rows the dq pass does, of 4,096 both; a pair has one ticket.
    assert_eq!(shapes("g4", 2, 1024), [(false, 40), (true, 144), (false, 72)]);
    assert_eq!(shapes("g4", 2, 4096), [(false, 136), (true, 528), (true, 528)]);
    assert_eq!(shapes("g4-single", 2, 4096), [(false, 136), (false, 264), (false, 264)]);
    // What is chosen by capacities must not change a sequence's bits.
    assert_eq!(shapes_of("g4", 2, 4096, true), [(false, 136), (false, 264), (false, 264)]);
    // However large the capacity, no more than 32 tickets per multiprocessor.
    assert_eq!(shapes("g4", 64, 100_000), [(false, 32 * 132), (true, 2 * 32 * 132), (true, 2 * 32 * 132)]);
    // A name with a suffix is still one of a generation.
    let e = backend(&gpu, Some("g5-pairs")).map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("'g5'") && e.contains("g4"), "{e}");
}

#[test]
fn backward_of_broadcast_queries_and_shared_keys() {
    for (arch, capability) in DEVICES {
        let gpu = Recorder::new(&[capability]);
        for g in generations_of(arch, "backward") {
            let problem =
                Problem::builder(DType::F16, 4, 128).capacity(100, 0, 8000).broadcast_query(200).build().unwrap();
            let plan = plan_on(&gpu, Some(g), &problem).unwrap();
            let layout = Layout::broadcast(100, offsets(0x200));
            let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem)).unwrap();
            assert!(
                launches.iter().all(|l| l
                    .kernel
                    .tag("when")
                    .split_whitespace()
                    .all(|w| w != "jagged" && w != "kv_index"))
            );
            // 2 x 132 blocks over 4 heads x 2 blocks of 128 rows are 33 slices, each with its share of dq.
            let reduce = launches.iter().find(|l| l.has("slices") && l.has("dq")).expect("something sums the slices");
            assert_eq!((reduce.int("slices"), reduce.int("q_rows")), (33, 200));
            let partial = reduce.int("partial") - 0x6000_0000;
            assert_eq!(plan.requirements().backward_bytes as i64, partial + (33 * 4 * 200 * 128 * 4 + 255) / 256 * 256);
            let slices = launches.iter().find(|l| l.kernel.tag("grid") == "slices").unwrap();
            assert_eq!((slices.shape.grid[0], slices.int("broadcast")), (33 * 2 * 4, 200));

            let problem = Problem::builder(DType::F16, 4, 128).kv_index(30).capacity(100, 9000, 8000).build().unwrap();
            let plan = plan_on(&gpu, Some(g), &problem).unwrap();
            let mut layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
            (layout.kv_batch, layout.kv_index) = (30, Some(at(0x500)));
            let s: ScheduleParams = params(&run_forward(&gpu, &plan, &layout, &forward_args(&problem))[0]);
            assert_eq!((s.backward_share, s.backward_capacity), (0, 100), "a sequence is a unit");
            gpu.take_fills();
            let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem)).unwrap();
            assert!(
                launches.iter().all(|l| l
                    .kernel
                    .tag("when")
                    .split_whitespace()
                    .all(|w| w != "broadcast" && w != "no_kv_index"))
            );
            let index = launches.iter().find(|l| l.has("kv_table")).expect("something makes the table");
            assert_eq!((index.int("kv_table"), index.int("kv_batch")), (0x6000_0100, 30));
            assert_eq!(gpu.take_fills(), [(0x6000_0000, 0, 256 + 30 * 16)], "counters and table start at zero");
        }
    }
}

#[test]
fn backward_zeroes_unused_rows_of_both_sides() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem =
        Problem::builder(DType::BF16, 2, 128).capacity(10, 1000, 2000).zero_unused_rows(true).build().unwrap();
    let plan = plan_on(&gpu, None, &problem).unwrap();
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem)).unwrap();
    let (q, kv): (ZeroParams, ZeroParams) = (params(&launches[0]), params(&launches[1]));
    assert_eq!((q.offsets, q.rows, q.tensors[0].data, q.tensors[1].data, q.lse), (0x100, 1000, 0x1800_0000, 0, 0));
    assert_eq!((kv.offsets, kv.rows, kv.tensors[0].data, kv.tensors[1].data), (0x200, 2000, 0x2800_0000, 0x3800_0000));
}
