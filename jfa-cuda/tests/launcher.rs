//! The launcher over an executor that records: what would be launched, with which parameters and tensor maps. Needs no
//! device; the bundles are the real ones.

use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    Alignment, AttentionBackend, BackwardArgs, Buffer, Call, DType, DataPtr, Error, ForwardArgs, Layout, LseView, Mask,
    Plan, Problem, Stream, TensorView,
};
use jfa_cuda::params::{
    BackwardParams, Finding, ForwardParams, IndexParams, PrepareParams, ScheduleParams, SplitParams, ValidateParams,
    ZeroParams,
};
use jfa_cuda::{BUNDLES, CudaBackend};
use jfa_driver::recorder::{Launched, Recorder};
use jfa_driver::{JaggedMap, L2Promotion, TensorMapSpec};

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

fn plan_on(gpu: &Arc<Recorder>, problem: &Problem, validate: bool) -> jfa_core::Result<Plan> {
    let backend = CudaBackend::new(gpu.clone(), BUNDLES, "cuda", None, Some(validate))?;
    Plan::new(Arc::new(backend), problem)
}

fn workspace() -> Buffer {
    Buffer { data: at(0x6000_0000), bytes: 1 << 30 }
}

fn schedule_buffer(plan: &Plan) -> Buffer {
    Buffer { data: at(0x7000_0000), bytes: plan.requirements().schedule_bytes }
}

/// Arguments of a forward over whole buffers.
fn forward_args(problem: &Problem, kv_rows: i64) -> ForwardArgs {
    let p = problem;
    let (q, o) = (p.q_rows(), p.o_rows());
    let view = |address, rows, heads, dim| TensorView::contiguous(at(address), p.dtype, rows, heads, dim);
    let kv = |address, dim| {
        let mut v = view(address, kv_rows, p.heads_kv, dim);
        if kv_rows == 0 {
            v.data = DataPtr::NULL;
        }
        v
    };
    ForwardArgs {
        q: view(0x1000_0000, q, p.heads_q, p.head_dim),
        k: kv(0x2000_0000, p.head_dim),
        v: kv(0x3000_0000, p.head_dim_v),
        bias: DataPtr::NULL,
        o: view(0x4000_0000, o, p.heads_q, p.head_dim_v),
        lse: LseView::contiguous(at(0x5000_0000), o),
    }
}

fn run(gpu: &Recorder, plan: &Plan, layout: &Layout, args: &ForwardArgs) -> Vec<Launched> {
    let schedule = schedule_buffer(plan);
    let call = Call { layout, schedule, workspace: workspace(), stream: Stream::DEFAULT };
    // SAFETY: the recorder follows no address.
    unsafe {
        plan.build_schedule(layout, schedule, Stream::DEFAULT).unwrap();
        plan.forward(&call, args).unwrap();
    }
    gpu.take()
}

#[test]
fn self_attention() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 4, 128).capacity(1152, 147_000, 147_000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    assert!(plan.describe().contains("forward_128_bf16 (sm_90a, 512 threads"), "{}", plan.describe());
    let layout = Layout::jagged(1000, offsets(0x100), offsets(0x200));
    let args = forward_args(&problem, problem.total_kv);
    let launches = run(&gpu, &plan, &layout, &args);
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names, ["schedule", "forward_128_bf16"]);

    let s = &launches[0];
    assert_eq!((s.shape.grid, s.shape.threads, s.shape.cluster), ([8, 1, 1], 512, None));
    let p: ScheduleParams = params(s);
    assert_eq!((p.q_offsets, p.kv_offsets, p.q_lengths, p.kv_lengths, p.kv_index), (0x100, 0x200, 0, 0, 0));
    assert_eq!((p.batch, p.kv_batch, p.total_q, p.total_kv), (1000, 1000, 147_000, 147_000));
    assert_eq!((p.broadcast_q_len, p.forward_rows, p.forward_kv_tile, p.merge_shared_kv), (-1, 128, 64, 0));
    assert_eq!((p.mask.left, p.mask.right, p.mask.bottom_right), (-1, -1, 0));
    // Header, sequences, units; every batch has at most total / rows + batch units.
    assert_eq!(p.forward_capacity, 147_000 / 128 + 1152);
    assert_eq!((p.header, p.sequences), (0x7000_0000, 0x7000_0100));
    assert_eq!(p.forward_list, 0x7000_0100 + 1152 * 32);
    assert!(p.forward_list + 8 * p.forward_capacity as u64 <= 0x7000_0000 + plan.requirements().schedule_bytes as u64);

    let f = &launches[1];
    assert_eq!((f.shape.grid, f.shape.threads, f.shape.cluster), ([132, 1, 1], 512, None));
    assert!(f.shape.shared_bytes > 200_000);
    let p: ForwardParams = params(f);
    assert_eq!((p.header, p.sequences, p.units), (0x7000_0000, 0x7000_0100, 0x7000_0100 + 1152 * 32));
    assert_eq!((p.lse, p.lse_head_stride, p.o_rows), (0x5000_0000, 147_000, 147_000));
    assert_eq!(p.queue, 0x6000_0000);
    assert!(p.queue_key % 2 == 1 && p.queue_key > 1);
    assert!(gpu.take_fills().is_empty(), "a forward is one launch");
    let again: ForwardParams = params(&run(&gpu, &plan, &layout, &args)[1]);
    assert_ne!(again.queue_key, p.queue_key);
    assert_eq!(plan.requirements().forward_bytes, 256);
    assert_eq!((p.heads, p.group, p.packed_log2, p.has_prescale), (4, 1, 0, 0));
    assert!((f64::from(p.scale_log2) - std::f64::consts::LOG2_E / 128f64.sqrt()).abs() < 1e-7);
    assert!((p.prescale - 1.0).abs() < f32::EPSILON);
    let specs: Vec<_> = (0..4).map(|i| gpu.map(f, i)).collect();
    assert_eq!(specs.iter().map(|s| s.tensor).collect::<Vec<_>>(), ["q", "k", "v", "o"]);
    assert_eq!(specs[0], JaggedMap::tile(64, 64, jfa_driver::Swizzle::B128).spec("q", &args.q).unwrap());
    assert_eq!(specs[3].box_dims, [64, 16, 1, 1, 1]);
}

#[test]
fn fewer_rows_and_strides_of_the_call_are_what_the_maps_describe() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::F16, 2, 64).capacity(8, 1000, 1000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let fused = |address| TensorView {
        data: at(address),
        dtype: DType::F16,
        rows: 300,
        heads: 2,
        dim: 64,
        row_stride: 3 * 128,
        head_stride: 64,
    };
    let mut args = forward_args(&problem, 1000);
    (args.q, args.k, args.v) = (fused(0x1000_0000), fused(0x1000_0100), fused(0x1000_0200));
    (args.o.rows, args.lse.rows) = (300, 300);
    let launches = run(&gpu, &plan, &Layout::jagged(3, offsets(0x100), offsets(0x200)), &args);
    let spec = gpu.map(&launches[1], 1);
    assert_eq!(spec.address, 0x1000_0100);
    assert_eq!(spec.dims, [64, 1 << 25, 301, 2, (1 << 25) + 1]);
    assert_eq!(spec.strides, [768, 768, 128, (1 << 39) - 768]);
    let p: ForwardParams = params(&launches[1]);
    assert_eq!((p.o_rows, p.lse_head_stride), (300, 1000));
}

#[test]
fn tensors_that_differ_in_their_address_alone_share_a_map() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 4, 128).capacity(8, 1000, 1000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(8, offsets(0x100), offsets(0x200));
    let mut args = forward_args(&problem, 1000);
    let counts = || gpu.maps_made();
    let specs = |args: &ForwardArgs| {
        let launches = run(&gpu, &plan, &layout, args);
        (0..4).map(|i| gpu.map(&launches[1], i)).collect::<Vec<_>>()
    };
    let first = specs(&args);
    assert_eq!(counts(), (4, 0));
    // The same tensors again, then the next layer's, then fewer rows.
    assert_eq!(specs(&args), first);
    assert_eq!(counts(), (4, 0));
    args.k.data = at(0x1_2340_0000);
    let moved = specs(&args);
    assert_eq!(counts(), (5, 1));
    assert_eq!(moved[1], TensorMapSpec { address: 0x1_2340_0000, ..first[1] });
    assert_eq!((moved[0], moved[2], moved[3]), (first[0], first[2], first[3]));
    (args.k.rows, args.v.rows) = (900, 900);
    let shorter = specs(&args);
    assert_eq!(counts(), (7, 1));
    assert_eq!((shorter[1].dims[2], shorter[2].dims[2], shorter[0].dims[2]), (901, 901, 1001));
    args.v.row_stride *= 2;
    assert_eq!(specs(&args)[2].strides[0], 2 * first[2].strides[0]);
    assert_eq!(specs(&args)[1], shorter[1]);
}

#[test]
fn groups_are_packed_into_rows() {
    let gpu = Recorder::new(&[(9, 0)]);
    for (heads_q, heads_kv, packed) in [(16, 4, 2u32), (16, 1, 4), (8, 4, 1), (6, 2, 0), (64, 1, 0), (4, 4, 0)] {
        let problem = Problem::builder(DType::BF16, heads_q, 128)
            .heads_kv(heads_kv)
            .capacity(100, 10_000, 10_000)
            .build()
            .unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let launches =
            run(&gpu, &plan, &Layout::jagged(100, offsets(0x100), offsets(0x200)), &forward_args(&problem, 10_000));
        let s: ScheduleParams = params(&launches[0]);
        assert_eq!(s.forward_rows, 128 >> packed);
        assert_eq!(i64::from(s.forward_capacity), 10_000 / i64::from(s.forward_rows) + 100);
        let p: ForwardParams = params(&launches[1]);
        assert_eq!(p.packed_log2.cast_unsigned(), packed);
        assert_eq!(i64::from(p.group), heads_q / heads_kv);
        assert_eq!(i64::from(p.heads), if packed > 0 { heads_kv } else { heads_q });
        let (q, k, o) = (gpu.map(&launches[1], 0), gpu.map(&launches[1], 1), gpu.map(&launches[1], 3));
        assert_eq!((q.box_dims[1], q.box_dims[3]), (64 >> packed, 1 << packed));
        assert_eq!((k.box_dims[1], k.box_dims[3]), (64, 1));
        // A warp stores 16 rows of a block: of one head, or of several when a head has fewer.
        assert_eq!(o.box_dims[1] * o.box_dims[3], 16);
        assert_eq!(o.box_dims[1], 16.min(64 >> packed));
    }
}

#[test]
fn masks_scales_and_index_types() {
    let gpu = Recorder::new(&[(9, 0)]);
    let base = || Problem::builder(DType::BF16, 2, 128).capacity(10, 1000, 1000);
    let window = |left, right, alignment| Mask::Window { left, right, alignment };
    for (mask, expected) in [
        (Mask::Full, (-1, -1, 0)),
        (Mask::Causal(Alignment::TopLeft), (-1, 0, 0)),
        (Mask::Causal(Alignment::BottomRight), (-1, 0, 1)),
        (window(Some(5), Some(0), Alignment::BottomRight), (5, 0, 1)),
        (window(None, Some(7), Alignment::TopLeft), (-1, 7, 0)),
        (window(Some(u32::MAX), Some(1 << 31), Alignment::TopLeft), (-1, -1, 0)),
        (window(Some(2_147_481_599), None, Alignment::TopLeft), (2_147_481_599, -1, 0)),
    ] {
        let problem = base().mask(mask).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let mut layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
        layout.q_offsets = Some(Offsets::i64(std::ptr::without_provenance(0x100)));
        layout.q_lengths = Some(at(0x300));
        layout.kv_lengths = Some(at(0x400));
        let launches = run(&gpu, &plan, &layout, &forward_args(&problem, 1000));
        let s: ScheduleParams = params(&launches[0]);
        assert_eq!((s.mask.left, s.mask.right, s.mask.bottom_right), expected, "{mask}");
        assert_eq!((s.q_offsets_are_64bit, s.kv_offsets_are_64bit), (1, 0));
        assert_eq!((s.q_lengths, s.kv_lengths), (0x300, 0x400));
        let f: ForwardParams = params(&launches[1]);
        assert_eq!((f.mask.left, f.mask.right, f.mask.bottom_right), expected, "{mask}");
    }
    for (scale, scale_log2, prescale, has) in [
        (0.5f32, 0.5 * std::f32::consts::LOG2_E, 1.0f32, 0),
        (0.0, std::f32::consts::LOG2_E, 0.0, 1),
        (-2.0, std::f32::consts::LOG2_E, -2.0, 1),
    ] {
        let problem = base().scale(scale).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let launches =
            run(&gpu, &plan, &Layout::jagged(10, offsets(0x100), offsets(0x200)), &forward_args(&problem, 1000));
        let backward = run_backward(
            &gpu,
            &plan,
            &Layout::jagged(10, offsets(0x100), offsets(0x200)),
            &backward_args(&problem, 1000),
        )
        .unwrap();
        let p: BackwardParams = params(&backward[0]);
        // lse is divided by it: never 0.
        let least = 2f32.powi(-60).copysign(scale);
        let expected = if scale == 0.0 { least } else { scale * std::f32::consts::LOG2_E };
        assert_eq!((p.scale, p.scale_log2.to_bits()), (scale, expected.to_bits()));
        let f: ForwardParams = params(&launches[1]);
        assert_eq!(
            (f.scale_log2.to_bits(), f.prescale.to_bits(), f.has_prescale),
            (scale_log2.to_bits(), prescale.to_bits(), has)
        );
    }
}

#[test]
fn broadcast_and_shared_keys() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(1000, 0, 9000).broadcast_query(32).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let launches = run(&gpu, &plan, &Layout::broadcast(900, offsets(0x200)), &forward_args(&problem, 9000));
    let s: ScheduleParams = params(&launches[0]);
    assert_eq!((s.q_offsets, s.broadcast_q_len, s.total_q, s.forward_capacity), (0, 32, 32_000, 1000));
    assert_eq!(gpu.map(&launches[1], 0).dims[2], 33);
    assert_eq!(gpu.map(&launches[1], 3).dims[2], 32_001);

    let shared = |mask| {
        let problem =
            Problem::builder(DType::BF16, 2, 128).kv_index(64).capacity(1000, 1000, 9000).mask(mask).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let mut layout = Layout::jagged(1000, offsets(0x100), offsets(0x200));
        layout.kv_batch = 60;
        layout.kv_index = Some(at(0x500));
        let launches = run(&gpu, &plan, &layout, &forward_args(&problem, 9000));
        params::<ScheduleParams>(&launches[0])
    };
    let s = shared(Mask::Full);
    assert_eq!((s.kv_index, s.batch, s.kv_batch, s.merge_shared_kv), (0x500, 1000, 60, 1));
    // Never more units than query rows.
    assert_eq!(s.forward_capacity, 1000);
    assert_eq!(shared(Mask::Causal(Alignment::TopLeft)).merge_shared_kv, 0);
}

#[test]
fn no_keys_at_all() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(10, 1000, 0).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let launches = run(&gpu, &plan, &Layout::jagged(10, offsets(0x100), offsets(0x200)), &forward_args(&problem, 0));
    let tensors: Vec<_> = (0..4).map(|i| gpu.map(&launches[1], i).tensor).collect();
    assert_eq!(tensors, ["q", "q", "q", "o"]);
}

#[test]
fn head_dims_go_to_the_narrowest_kernel_that_is_wide_enough() {
    let gpu = Recorder::new(&[(9, 0)]);
    for (dim, dim_v) in [(8, 8), (40, 64), (64, 64), (72, 64), (64, 72), (128, 128), (136, 8), (256, 256)] {
        let problem = Problem::builder(DType::F16, 2, dim).head_dim_v(dim_v).capacity(10, 100, 100).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let launches =
            run(&gpu, &plan, &Layout::jagged(10, offsets(0x100), offsets(0x200)), &forward_args(&problem, 100));
        let forward = launches.last().unwrap();
        let name = forward.name().to_owned();
        let width: i64 = name.strip_prefix("forward_").unwrap().strip_suffix("_f16").unwrap().parse().unwrap();
        assert!(width >= dim.max(dim_v), "{name} for {dim}, {dim_v}");
        assert_eq!(gpu.map(forward, 0).dims[0], dim.unsigned_abs());
        assert_eq!(gpu.map(forward, 2).dims[0], dim_v.unsigned_abs());
    }
    for (dim, words) in [(60, "head_dim 60"), (264, "head_dim 264")] {
        let problem = Problem::builder(DType::F16, 2, dim).capacity(10, 100, 100).build().unwrap();
        let e = plan_on(&gpu, &problem, false).unwrap_err().to_string();
        assert!(e.contains(words) && e.contains("multiples of 8 in 8..=256"), "{e}");
    }
}

#[test]
fn a_variant_is_used_where_it_exists_and_never_replaced() {
    let gpu = Recorder::new(&[(9, 0)]);
    let backend = Arc::new(CudaBackend::new(gpu.clone(), BUNDLES, "cuda", Some("g1"), Some(false)).unwrap());
    assert_eq!(backend.name(), "cuda:g1");
    let problem = |dim| Problem::builder(DType::BF16, 2, dim).capacity(10, 100, 100).build().unwrap();
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    for (dim, kernel) in [(32, "forward_g1_64_bf16"), (128, "forward_g1_128_bf16")] {
        let plan = Plan::new(backend.clone(), &problem(dim)).unwrap();
        assert_eq!(run(&gpu, &plan, &layout, &forward_args(&problem(dim), 100))[1].name(), kernel);
        // It has no backward of its own.
        let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem(dim), 100)).unwrap();
        assert_eq!(launches[0].name(), kernel.replace("forward_g1", "backward"));
    }
    let e = Plan::new(backend, &problem(256)).unwrap_err().to_string();
    assert!(e.contains("'cuda:g1' lacks head_dim 256 (has multiples of 8 in 8..=128)"), "{e}");
}

#[test]
fn limits_name_what_is_too_large() {
    let gpu = Recorder::new(&[(9, 0)]);
    let refuse = |problem: Problem, words: &str| {
        let e = plan_on(&gpu, &problem, false).unwrap_err().to_string();
        assert!(e.contains(words), "{e} lacks {words}");
    };
    let base = || Problem::builder(DType::BF16, 2, 128);
    refuse(
        base().capacity(10, 1 << 31, 10).build().unwrap(),
        "total_q = 2147483648: backend 'cuda' takes at most 2147481600",
    );
    refuse(base().capacity(10, 10, 1 << 31).build().unwrap(), "total_kv = 2147483648");
    refuse(base().capacity(1 << 20, 0, 10).broadcast_query(1 << 12).build().unwrap(), "batch * q_len = 4294967296");
    refuse(
        Problem::builder(DType::BF16, 4096, 128).capacity(1_000_000, 1_000_000, 10).build().unwrap(),
        "2^31 - 1 tiles times heads",
    );
    // What the contract demands to work.
    plan_on(
        &gpu,
        &Problem::builder(DType::BF16, 128, 128).capacity(1_000_000, 2_000_000_000, 2_000_000_000).build().unwrap(),
        false,
    )
    .unwrap();
    plan_on(&gpu, &Problem::builder(DType::F32, 2, 128).capacity(1, 1, 1).build().unwrap(), false)
        .map(|_| ())
        .unwrap_err()
        .to_string()
        .find("dtype f32 (has f16, bf16)")
        .unwrap();
}

#[test]
fn unused_rows_are_zeroed_first() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 96)
        .head_dim_v(64)
        .capacity(10, 1000, 1000)
        .zero_unused_rows(true)
        .build()
        .unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let mut layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    layout.q_lengths = Some(at(0x300));
    let args = forward_args(&problem, 1000);
    let launches = run(&gpu, &plan, &layout, &args);
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names[..2], ["schedule", "zero_rows"]);
    assert!(names[2].starts_with("forward_"));
    let z: ZeroParams = params(&launches[1]);
    assert_eq!((z.offsets, z.lengths, z.sequences, z.rows), (0x100, 0x300, 10, 1000));
    assert_eq!((z.tensors[0].data, z.tensors[0].row_bytes, z.tensors[0].head_bytes), (0x4000_0000, 256, 128));
    assert_eq!((z.tensors[0].heads, z.tensors[0].vectors, z.tensors[1].data), (2, 8, 0));
    assert_eq!((z.lse, z.lse_heads, z.lse_head_stride), (0x5000_0000, 2, 1000));

    // Without any sequence there is nothing else to do.
    let empty = Layout { batch: 0, kv_batch: 0, q_lengths: None, ..layout };
    let launches = run(&gpu, &plan, &empty, &args);
    assert_eq!(launches.len(), 1);
    assert_eq!(params::<ZeroParams>(&launches[0]).sequences, 0);
}

#[test]
fn validation_waits_and_names_the_first_bad_entry() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 128).kv_index(20).capacity(10, 1000, 2000).build().unwrap();
    let plan = plan_on(&gpu, &problem, true).unwrap();
    let mut layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    layout.kv_batch = 20;
    layout.kv_index = Some(at(0x500));
    let schedule = schedule_buffer(&plan);
    // SAFETY: the recorder follows no address.
    let build = || unsafe { plan.build_schedule(&layout, schedule, Stream::DEFAULT) };
    build().unwrap();
    let launches = gpu.take();
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names, ["validate", "schedule", "backward_index"]);
    assert_eq!(gpu.waits(), 1);
    let v: ValidateParams = params(&launches[0]);
    assert_eq!((v.batch, v.kv_batch, v.total_q, v.total_kv, v.finding), (10, 20, 1000, 2000, 0x7000_0000));

    for (array, index, value, limit, words) in [
        (1, 3, 7, 9, "q_offsets[3] = 7: offsets must not decrease (the entry before is 9)"),
        (1, 0, -4, 0, "q_offsets[0] = -4: offsets must not be negative"),
        (2, 20, 2001, 2000, "kv_offsets[20] = 2001: lies past the buffer's 2000 rows"),
        (3, 1, -1, 5, "q_lengths[1] = -1: must lie between 0 and the 5 rows of its slot"),
        (4, 2, 9, 5, "kv_lengths[2] = 9: must lie between 0 and the 5 rows of its slot"),
        (5, 4, 20, 20, "kv_index[4] = 20: must lie between 0 and kv_batch = 20"),
    ] {
        gpu.answer(&Finding { array, reserved: 0, index, value, limit });
        assert_eq!(build().unwrap_err().to_string(), words);
        let launches = gpu.take();
        assert_eq!(launches.len(), 1, "nothing is launched after a bad entry");
    }

    // A capture cannot wait: the check is left out, the schedule is not.
    gpu.set_capturing(true);
    let waits = gpu.waits();
    build().unwrap();
    assert_eq!(gpu.take().len(), 2);
    assert_eq!(gpu.waits(), waits);
}

/// Arguments of a backward over whole buffers.
fn backward_args(problem: &Problem, kv_rows: i64) -> BackwardArgs {
    let p = problem;
    let f = forward_args(p, kv_rows);
    let moved = |view: TensorView, to: usize| TensorView {
        data: if view.rows > 0 { at(view.data.addr() + to) } else { DataPtr::NULL },
        ..view
    };
    BackwardArgs {
        q: f.q,
        k: f.k,
        v: f.v,
        bias: DataPtr::NULL,
        o: f.o,
        lse: f.lse,
        d_o: moved(f.o, 0x800_0000),
        dq: moved(f.q, 0x800_0000),
        dk: moved(f.k, 0x800_0000),
        dv: moved(f.v, 0x800_0000),
        dbias: DataPtr::NULL,
    }
}

fn run_backward(gpu: &Recorder, plan: &Plan, layout: &Layout, args: &BackwardArgs) -> jfa_core::Result<Vec<Launched>> {
    let call = Call { layout, schedule: schedule_buffer(plan), workspace: workspace(), stream: Stream::DEFAULT };
    // SAFETY: the recorder follows no address.
    unsafe { plan.backward(&call, args) }?;
    Ok(gpu.take())
}

#[test]
fn backward_launches_workspace_and_schedule() {
    let gpu = Recorder::new(&[(9, 0)]);
    for (dim, q_tile) in [(128, 64i64), (64, 128)] {
        let problem = Problem::builder(DType::BF16, 4, dim).heads_kv(2).capacity(100, 9000, 8000).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let layout = Layout::jagged(90, offsets(0x100), offsets(0x200));
        run(&gpu, &plan, &layout, &forward_args(&problem, 8000));
        // SAFETY: the recorder follows no address.
        unsafe { plan.build_schedule(&layout, schedule_buffer(&plan), Stream::DEFAULT) }.unwrap();
        let s: ScheduleParams = params(&gpu.take()[0]);
        assert_eq!((s.backward_rows, i64::from(s.backward_q_tile)), (256, q_tile), "two tiles of a pair of blocks");
        assert_eq!(s.backward_capacity, 8000 / 256 + 100);
        assert_eq!(s.backward_share, 66);
        assert!(s.backward_list >= s.forward_list + 8 * s.forward_capacity as u64);
        let end = s.backward_list + 8 * s.backward_capacity as u64;
        assert!(end <= 0x7000_0000 + plan.requirements().schedule_bytes as u64);

        gpu.take_fills();
        let args = backward_args(&problem, 8000);
        let launches = run_backward(&gpu, &plan, &layout, &args).unwrap();
        assert_eq!(launches.len(), 1);
        let l = &launches[0];
        assert_eq!(l.name(), format!("backward_{dim}_bf16"));
        assert_eq!((l.shape.grid, l.shape.threads, l.shape.cluster), ([132, 1, 1], 512, Some([2, 1, 1])));
        let names: Vec<_> = (0..7).map(|i| gpu.map(l, i).tensor).collect();
        assert_eq!(names, ["q", "k", "v", "o", "d_o", "dk", "dv"]);
        let addresses: Vec<_> = (0..7).map(|i| gpu.map(l, i).address >> 24).collect();
        assert_eq!(addresses, [0x10, 0x20, 0x30, 0x40, 0x48, 0x28, 0x38]);
        assert_eq!((gpu.map(l, 4).box_dims[1], gpu.map(l, 5).box_dims[1]), (64, 16));

        let p: BackwardParams = params(l);
        let blocks = 9000 / q_tile + 100;
        assert_eq!((i64::from(p.blocks), p.broadcast, p.heads_kv, p.group, p.ctas), (blocks, 0, 2, 2, 132));
        assert_eq!((p.control, p.units), (0x6000_0000, s.backward_list));
        assert!((f64::from(p.scale_log2) - std::f64::consts::LOG2_E / (dim as f64).sqrt()).abs() < 1e-7);
        let control = usize::try_from(128 + 8 * 4 * blocks).unwrap();
        assert_eq!(gpu.take_fills(), [(0x6000_0000, 0, control)], "flags start at zero");
        assert_eq!(p.partial, 0x6000_0000 + control.next_multiple_of(256) as u64);
        let needed = p.partial - 0x6000_0000 + 4 * blocks.unsigned_abs() * 33_792;
        assert_eq!(plan.requirements().backward_bytes as u64, needed);
        assert_eq!((p.dq, p.dk, p.dv), (0x1800_0000, 0x2800_0000, 0x3800_0000));
        assert_eq!((p.dq_row_bytes, p.dq_head_bytes), (8 * dim, 2 * dim));
        assert_eq!((p.dk_row_bytes, p.dv_head_bytes), (4 * dim, 2 * dim));
        assert_eq!((i64::from(p.vectors_qk), p.vectors_v), (dim / 8, p.vectors_qk));
        assert_eq!((p.o_rows, p.kv_rows), (9000, 8000));
        assert!((f64::from(p.scale) - 1.0 / (dim as f64).sqrt()).abs() < 1e-7);
    }
}

#[test]
fn backward_of_short_keys_broadcast_queries_and_empty_sides() {
    let gpu = Recorder::new(&[(9, 0)]);
    // A pair of blocks has at most 256 keys at once: no partial sums.
    let problem = Problem::builder(DType::F16, 2, 128).capacity(100, 9000, 256).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
    let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem, 256)).unwrap();
    assert_eq!(params::<BackwardParams>(&launches[0]).partial, 0);
    assert_eq!(plan.requirements().backward_bytes, usize::next_multiple_of(128 + 8 * 2 * (9000 / 64 + 100), 256));

    // A broadcast query: a sum per block of the grid, added up by a second kernel.
    let problem = Problem::builder(DType::F16, 4, 128).capacity(100, 0, 8000).broadcast_query(100).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::broadcast(100, offsets(0x200));
    let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem, 8000)).unwrap();
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names, ["backward_broadcast_128_f16", "backward_reduce_128_f16"]);
    let p: BackwardParams = params(&launches[1]);
    assert_eq!((p.blocks, p.broadcast), (2, 100));
    assert_eq!((launches[1].shape.grid, launches[1].shape.threads), ([4 * 2 * 8, 1, 1], 256));
    // 132 blocks over 4 heads are 33 slices.
    assert_eq!(plan.requirements().backward_bytes, 256 + 4 * 2 * 33 * 33_792);

    // No key rows: dq must become zero all the same; no query rows: dk and dv.
    let problem = Problem::builder(DType::F16, 2, 128).capacity(100, 9000, 0).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
    let l = run_backward(&gpu, &plan, &layout, &backward_args(&problem, 0)).unwrap().remove(0);
    let names: Vec<_> = (0..7).map(|i| gpu.map(&l, i).dims[2]).collect();
    assert!(names.iter().all(|rows| *rows == 9001), "{names:?}");
    let problem = Problem::builder(DType::F16, 2, 128).capacity(100, 0, 9000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let mut args = backward_args(&problem, 9000);
    for view in [&mut args.q, &mut args.o, &mut args.d_o, &mut args.dq] {
        view.data = DataPtr::NULL;
    }
    let l = run_backward(&gpu, &plan, &layout, &args).unwrap().remove(0);
    assert!((0..7).all(|i| gpu.map(&l, i).dims[2] == 9001));
    // Keys are prefetched box by box.
    assert!((0..7).all(|i| gpu.map(&l, i).l2_promotion == L2Promotion::B128));
}

#[test]
fn backward_zeroes_unused_rows_of_both_sides() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem =
        Problem::builder(DType::BF16, 2, 128).capacity(10, 1000, 2000).zero_unused_rows(true).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    let launches = run_backward(&gpu, &plan, &layout, &backward_args(&problem, 2000)).unwrap();
    let names: Vec<_> = launches.iter().map(Launched::name).collect();
    assert_eq!(names, ["zero_rows", "zero_rows", "backward_128_bf16"]);
    let (q, kv): (ZeroParams, ZeroParams) = (params(&launches[0]), params(&launches[1]));
    assert_eq!((q.offsets, q.rows, q.tensors[0].data, q.tensors[1].data, q.lse), (0x100, 1000, 0x1800_0000, 0, 0));
    assert_eq!((kv.offsets, kv.rows, kv.tensors[0].data, kv.tensors[1].data), (0x200, 2000, 0x2800_0000, 0x3800_0000));
}

#[test]
fn what_lacks_a_backward_keeps_its_forward() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem =
        Problem::builder(DType::BF16, 128, 128).capacity(1_000_000, 2_000_000_000, 1_000_000_000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    assert_eq!(plan.requirements().backward_bytes, 0);
    let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
    let e = run_backward(&gpu, &plan, &layout, &backward_args(&problem, 100)).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
    assert!(e.to_string().contains("partial sums"), "{e}");
    // SAFETY: the recorder follows no address.
    unsafe { plan.build_schedule(&layout, schedule_buffer(&plan), Stream::DEFAULT) }.unwrap();
    assert_eq!(params::<ScheduleParams>(&gpu.take()[0]).backward_list, 0);
}

#[test]
fn devices_without_kernels_are_named() {
    let make = |capabilities: &[(u32, u32)], variant| {
        CudaBackend::new(Recorder::new(capabilities), BUNDLES, "cuda", variant, Some(false)).map(|_| ()).unwrap_err()
    };
    let e = make(&[(8, 0)], None);
    assert!(matches!(&e, Error::Unavailable { name, .. } if name == "cuda"));
    assert!(
        e.to_string().contains("no kernels for device 0 (recorder 0, compute capability 8.0); compiled in: sm_90a"),
        "{e}"
    );
    // What there is for each architecture, and what not.
    for words in ["forward 32/64/96/128/256", "sm_100a (", "; no forward)"] {
        assert!(e.to_string().contains(words), "{e} lacks {words}");
    }
    let e = make(&[(10, 0)], None).to_string();
    assert!(e.contains("the kernels compiled for sm_100a contain no forward; compiled in: sm_90a ("), "{e}");
    let e = make(&[(9, 0)], Some("nonsense")).to_string();
    assert!(e.contains("there is no variant 'nonsense'; there are: g1, pairs, split, unordered"), "{e}");

    // A stream of a device without kernels, beside one with them.
    let gpu = Recorder::new(&[(8, 0), (9, 0)]);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(10, 100, 100).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
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
}

/// The launches of a schedule and a backward, which must be of these names.
fn run_split(gpu: &Recorder, plan: &Plan, layout: &Layout, args: &BackwardArgs, expected: &[&str]) -> Vec<Launched> {
    // SAFETY: the recorder follows no address.
    unsafe { plan.build_schedule(layout, schedule_buffer(plan), Stream::DEFAULT) }.unwrap();
    let mut launches = gpu.take();
    gpu.take_fills();
    launches.extend(run_backward(gpu, plan, layout, args).unwrap());
    assert_eq!(launches.iter().map(Launched::name).collect::<Vec<_>>(), expected);
    launches
}

#[test]
fn shared_keys_take_the_split_backward() {
    let gpu = Recorder::new(&[(9, 0)]);
    let problem = Problem::builder(DType::BF16, 8, 128)
        .heads_kv(2)
        .kv_index(70)
        .capacity(1000, 9000, 8000)
        .mask(Mask::Causal(Alignment::BottomRight))
        .build()
        .unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let mut layout = Layout::jagged(900, offsets(0x100), offsets(0x200));
    layout.kv_batch = 60;
    layout.kv_index = Some(at(0x500));
    layout.kv_lengths = Some(at(0x400));
    let args = backward_args(&problem, 8000);
    let launches = run_split(
        &gpu,
        &plan,
        &layout,
        &args,
        &["schedule", "backward_index", "backward_dq_128_bf16", "backward_dkdv_128_bf16"],
    );

    // No list of its own in the schedule; the index stands behind it.
    let s: ScheduleParams = params(&launches[0]);
    assert_eq!((s.backward_list, s.forward_rows), (0, 32));
    let i: IndexParams = params(&launches[1]);
    assert_eq!((launches[1].shape.grid, launches[1].shape.threads), ([1, 1, 1], 1024));
    assert_eq!((i.schedule, i.sequences), (0x7000_0000, s.sequences));
    assert_eq!((i.kv_offsets, i.kv_lengths, i.total_kv), (0x200, 0x400, 8000));
    assert_eq!((i.batch, i.kv_batch, i.unit_keys, i.block_rows, i.capacity), (900, 60, 128, 16, 8000 / 128 + 70));
    let ends = [
        s.forward_list + 8 * s.forward_capacity as u64,
        i.header + 256,
        i.keys + 16 * 70,
        i.members + 16 * 1000,
        i.units + 8 * i.capacity as u64,
        i.scratch + 4 * (4 * 1000 + 70),
    ];
    let starts = [i.header, i.keys, i.members, i.units, i.scratch];
    assert!(ends.iter().zip(&starts).all(|(end, next)| end <= next), "{ends:?} {starts:?}");
    assert!(ends[5] <= 0x7000_0000 + plan.requirements().schedule_bytes as u64);

    let p: SplitParams = params(&launches[2]);
    assert_eq!(launches[2].args, {
        let mut other = launches[3].args.clone();
        other[..4].clone_from_slice(&launches[2].args[..4]);
        other
    });
    for l in &launches[2..] {
        assert_eq!((l.shape.grid, l.shape.threads), ([132, 1, 1], 384));
        let specs: Vec<_> = (0..4).map(|i| gpu.map(l, i)).collect();
        assert_eq!(specs.iter().map(|s| s.tensor).collect::<Vec<_>>(), ["q", "k", "v", "d_o"]);
        // Four heads share the rows of a block.
        assert_eq!(
            specs.iter().map(|s| (s.box_dims[1], s.box_dims[3])).collect::<Vec<_>>(),
            [(16, 4), (64, 1), (64, 1), (16, 4)]
        );
    }
    assert_eq!((p.heads, p.heads_kv, p.packed_log2, p.blocks, p.batch), (2, 2, 2, 9000 / 16 + 1000, 900));
    assert_eq!((p.header, p.sequences, p.query_units), (0x7000_0000, s.sequences, s.forward_list));
    assert_eq!((p.index, p.keys, p.members, p.key_units), (i.header, i.keys, i.members, i.units));
    assert_eq!((p.mask.left, p.mask.right, p.mask.bottom_right), (-1, 0, 1));
    assert_eq!((p.o, p.dq, p.dk, p.dv), (0x4000_0000, 0x1800_0000, 0x2800_0000, 0x3800_0000));
    assert_eq!((p.o_row_bytes, p.dq_row_bytes, p.dk_row_bytes, p.dv_row_bytes), (2048, 2048, 512, 512));
    assert_eq!((p.vectors_qk, p.vectors_v, p.q_rows, p.o_rows, p.kv_rows), (16, 16, 9000, 9000, 8000));
    assert_eq!((p.broadcast, p.pairs, p.slices, p.partial), (0, 0, 0, 0));
    assert_eq!((p.control, p.statistics), (0x6000_0000, 0x6000_0100));
    assert_eq!(gpu.take_fills(), [(0x6000_0000, 0, 256)], "the counters start at zero");
    let statistics = 512 * p.heads.unsigned_abs() as usize * p.blocks.unsigned_abs() as usize;
    assert_eq!(plan.requirements().backward_bytes, 256 + statistics);
}

#[test]
fn wide_heads_take_the_split_backward() {
    let gpu = Recorder::new(&[(9, 0)]);
    for (dim, dim_v) in [(136, 8), (64, 200), (256, 256)] {
        let problem = Problem::builder(DType::F16, 3, dim).head_dim_v(dim_v).capacity(100, 9000, 8000).build().unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
        let launches = run_split(
            &gpu,
            &plan,
            &layout,
            &backward_args(&problem, 8000),
            &["schedule", "backward_index", "backward_dq_256_f16", "backward_dkdv_256_f16"],
        );
        assert_eq!(params::<IndexParams>(&launches[1]).capacity, 8000 / 64 + 100);
        let p: SplitParams = params(&launches[3]);
        assert_eq!((i64::from(p.vectors_qk), i64::from(p.vectors_v)), (dim / 8, dim_v / 8));
    }

    // A broadcast query: 32 rows are one pair of blocks, 3 heads leave 44 parts of the batch.
    let problem = Problem::builder(DType::BF16, 3, 256).capacity(100, 0, 8000).broadcast_query(32).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let launches = run_split(
        &gpu,
        &plan,
        &Layout::broadcast(90, offsets(0x200)),
        &backward_args(&problem, 8000),
        &["schedule", "backward_index", "backward_dq_256_bf16", "backward_dkdv_256_bf16", "backward_dq_sum_256_bf16"],
    );
    let p: SplitParams = params(&launches[4]);
    assert_eq!((p.broadcast, p.pairs, p.slices, p.blocks, p.q_rows, p.o_rows), (32, 1, 44, 150, 32, 3200));
    assert_eq!((launches[4].shape.grid, launches[4].shape.threads), ([3 * 32, 1, 1], 256));
    let statistics = 512 * 3 * 150;
    assert_eq!(p.partial, 0x6000_0100 + statistics);
    assert_eq!(plan.requirements().backward_bytes as u64, 256 + statistics + 44 * 3 * 128 * 256 * 4);

    // Sides without rows: what is left becomes zero, and the maps of the other side serve.
    let layout = Layout::jagged(100, offsets(0x100), offsets(0x200));
    let problem = Problem::builder(DType::BF16, 3, 256).capacity(100, 9000, 0).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let names = ["schedule", "backward_index", "backward_dq_256_bf16"];
    let launches = run_split(&gpu, &plan, &layout, &backward_args(&problem, 0), &names);
    assert!((0..4).all(|i| gpu.map(&launches[2], i).dims[2] == 9001));
    let problem = Problem::builder(DType::BF16, 3, 256).capacity(100, 0, 8000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let mut args = backward_args(&problem, 8000);
    for view in [&mut args.q, &mut args.o, &mut args.d_o, &mut args.dq] {
        view.data = DataPtr::NULL;
    }
    let names = ["schedule", "backward_index", "backward_dkdv_256_bf16"];
    let launches = run_split(&gpu, &plan, &layout, &args, &names);
    assert!((0..4).all(|i| gpu.map(&launches[2], i).dims[2] == 8001));
}

#[test]
fn long_sequences_take_the_unordered_backward() {
    let gpu = Recorder::new(&[(9, 0)]);
    let causal = Mask::Causal(Alignment::TopLeft);
    let rows = 80i64;
    for (dim, mask) in [(128, Mask::Full), (72, causal), (96, Mask::Full)] {
        let dim_v = dim - 8;
        let problem = Problem::builder(DType::F16, 4, dim)
            .heads_kv(2)
            .head_dim_v(dim_v)
            .capacity(10, 9000, 8000)
            .mask(mask)
            .build()
            .unwrap();
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let layout = Layout::jagged(9, offsets(0x100), offsets(0x200));
        let args = backward_args(&problem, 8000);
        let names = ["schedule", "backward_prepare_128_f16", "backward_unordered_128_f16"];
        let launches = run_split(&gpu, &plan, &layout, &args, &names);

        // Every tile of keys is a unit.
        let s: ScheduleParams = params(&launches[0]);
        assert_eq!((s.backward_rows, i64::from(s.backward_q_tile), s.backward_share), (128, rows, i32::MAX));
        assert_eq!(s.backward_capacity, 8000 / 128 + 10);
        assert!(
            s.backward_list + 8 * s.backward_capacity as u64 <= 0x7000_0000 + plan.requirements().schedule_bytes as u64
        );

        let (l, p): (_, PrepareParams) = (&launches[1], params(&launches[1]));
        // Items: tiles times query heads.
        assert_eq!((l.shape.grid, l.shape.threads, l.shape.cluster), ([72 * 4, 1, 1], 256, None));
        assert_eq!((p.header, p.sequences, p.units), (0x7000_0000, s.sequences, s.backward_list));
        assert_eq!((p.lse, p.lse_head_stride, p.o, p.d_o), (0x5000_0000, 9000, 0x4000_0000, 0x4800_0000));
        assert_eq!((p.o_row_bytes, p.o_head_bytes, p.do_row_bytes), (8 * dim_v, 2 * dim_v, 8 * dim_v));
        assert_eq!((p.dq, p.dq_row_bytes, p.dq_head_bytes), (0x1800_0000, 8 * dim, 2 * dim));
        let blocks = 9000 / rows + 10;
        assert_eq!((p.heads, i64::from(p.blocks), p.o_rows), (4, blocks, 9000));
        assert_eq!((i64::from(p.vectors_qk), i64::from(p.vectors_v)), (dim / 8, dim_v / 8));

        let (l, b): (_, BackwardParams) = (&launches[2], params(&launches[2]));
        assert_eq!((l.shape.grid, l.shape.threads, l.shape.cluster), ([132, 1, 1], 384, None));
        let maps: Vec<_> = (0..6).map(|i| gpu.map(l, i)).collect();
        assert_eq!(maps.iter().map(|m| m.tensor).collect::<Vec<_>>(), ["q", "k", "v", "d_o", "dk", "dv"]);
        let rows_of_box = maps.iter().map(|m| i64::from(m.box_dims[1])).collect::<Vec<_>>();
        assert_eq!(rows_of_box, [rows, 128, 128, rows, 16, 16]);
        assert!(maps.iter().all(|m| m.l2_promotion == L2Promotion::B256));
        assert_eq!((b.dq, b.dk, b.dv), (0x1800_0000, 0x2800_0000, 0x3800_0000));
        assert_eq!((b.heads_kv, b.group, i64::from(b.blocks), b.broadcast), (2, 2, blocks, 0));
        assert_eq!((b.o_rows, b.kv_rows, b.ctas), (9000, 8000, 132));
        assert_eq!((b.units, b.control, b.partial), (s.backward_list, 0x6000_0000, p.partial));

        // Counters, then for every block of rows its sums and two values a row.
        let control = 144 + 24 * 4 * blocks;
        assert_eq!(
            gpu.take_fills(),
            [(0x6000_0000, 0, usize::try_from(control).unwrap())],
            "the counters start at zero"
        );
        let partial = control.cast_unsigned().next_multiple_of(256);
        assert_eq!(p.partial, 0x6000_0000 + partial);
        let block_bytes = (rows * (128 + 2) * 4).cast_unsigned().next_multiple_of(128);
        let needed = (partial + 4 * blocks.cast_unsigned() * block_bytes).next_multiple_of(256);
        assert_eq!(plan.requirements().backward_bytes as u64, needed);
    }
}

#[test]
fn which_backward_a_problem_takes() {
    let gpu = Recorder::new(&[(9, 0)]);
    let unordered = ["schedule", "backward_prepare_128_bf16", "backward_unordered_128_bf16"];
    let pairs = ["schedule", "backward_128_bf16"];
    let split = ["schedule", "backward_index", "backward_dq_128_bf16", "backward_dkdv_128_bf16"];
    let causal = Mask::Causal(Alignment::BottomRight);
    let window = |left, right| Mask::Window { left, right, alignment: Alignment::TopLeft };
    let of = |heads_q, rows: i64, keys: i64, mask, deterministic| {
        Problem::builder(DType::BF16, heads_q, 128)
            .heads_kv(1)
            .capacity(10, 10 * rows, 10 * keys)
            .mask(mask)
            .deterministic(deterministic)
            .build()
            .unwrap()
    };
    let hinted = |mut problem: Problem, q, kv| {
        (problem.max_q_len_hint, problem.max_kv_len_hint) = (q, kv);
        problem
    };
    // It is the mean of the capacities of ten sequences that counts.
    for (problem, expected) in [
        (of(1, 599, 900, Mask::Full, false), &pairs[..]),
        (of(1, 900, 599, Mask::Full, false), &pairs[..]),
        (of(1, 600, 600, Mask::Full, false), &unordered[..]),
        (of(4, 600, 600, causal, false), &unordered[..]),
        // Under a causal mask pairs go further, where hints say that no sequence is much longer than the mean.
        (hinted(of(4, 799, 799, causal, false), None, Some(1797)), &pairs[..]),
        (hinted(of(4, 799, 799, causal, false), None, Some(1799)), &unordered[..]),
        (hinted(of(4, 799, 799, causal, false), Some(1799), Some(1000)), &unordered[..]),
        (hinted(of(4, 800, 800, causal, false), Some(800), Some(800)), &unordered[..]),
        (hinted(of(4, 700, 700, Mask::Full, false), Some(700), Some(700)), &unordered[..]),
        // No bound that cuts off earlier keys.
        (of(1, 900, 900, window(Some(u32::MAX), None), false), &unordered[..]),
        (of(1, 900, 900, window(None, Some(5)), false), &unordered[..]),
        // The bits must not depend on the run or the batch.
        (of(1, 2000, 2000, Mask::Full, true), &pairs[..]),
        (of(8, 2000, 2000, Mask::Full, true), &pairs[..]),
        // A tile has few rows, or few tiles have all rows.
        (of(1, 9000, 9000, window(Some(511), Some(0)), false), &pairs[..]),
        (of(1, 1999, 2500, window(Some(512), Some(0)), false), &pairs[..]),
        (of(1, 2000, 2000, window(Some(512), Some(0)), false), &unordered[..]),
        (of(1, 2000, 2000, window(Some(256), Some(256)), false), &unordered[..]),
        (of(1, 1999, 2500, window(Some(5), None), false), &pairs[..]),
        (of(1, 2000, 2000, window(Some(5), None), false), &unordered[..]),
        (of(8, 9000, 9000, window(Some(512), Some(0)), true), &pairs[..]),
        (of(8, 1000, 1000, window(Some(5), Some(0)), false), &split[..]),
        (of(8, 2000, 999, causal, false), &pairs[..]),
        (of(8, 1000, 1000, causal, false), &split[..]),
    ] {
        let plan = plan_on(&gpu, &problem, false).unwrap();
        let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
        run_split(&gpu, &plan, &layout, &backward_args(&problem, problem.total_kv), expected);
    }

    // A variant takes one way, but where the bits must not depend on the run or the batch.
    for (variant, expected) in [("pairs", &pairs[..]), ("unordered", &unordered[..]), ("split", &split[..])] {
        let backend = Arc::new(CudaBackend::new(gpu.clone(), BUNDLES, "cuda", Some(variant), Some(false)).unwrap());
        for (deterministic, rows) in [(false, 100), (false, 2000), (true, 2000)] {
            for (heads_q, mask) in [(1, Mask::Full), (8, window(Some(5), Some(0)))] {
                let problem = of(heads_q, rows, rows, mask, deterministic);
                let plan = Plan::new(backend.clone(), &problem).unwrap();
                let layout = Layout::jagged(10, offsets(0x100), offsets(0x200));
                let expected = if deterministic { &pairs[..] } else { expected };
                run_split(&gpu, &plan, &layout, &backward_args(&problem, problem.total_kv), expected);
            }
        }
    }

    // Narrow heads have a narrower kernel in pairs.
    let problem = Problem::builder(DType::BF16, 3, 64).capacity(1, 2000, 2000).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(1, offsets(0x100), offsets(0x200));
    run_split(&gpu, &plan, &layout, &backward_args(&problem, 2000), &["schedule", "backward_64_bf16"]);

    // Few items: no more blocks than those.
    let problem = Problem::builder(DType::BF16, 3, 128).capacity(1, 750, 750).build().unwrap();
    let plan = plan_on(&gpu, &problem, false).unwrap();
    let layout = Layout::jagged(1, offsets(0x100), offsets(0x200));
    let mut args = backward_args(&problem, 750);
    let launches = run_split(&gpu, &plan, &layout, &args, &unordered);
    assert_eq!(launches[1..].iter().map(|l| l.shape.grid[0]).collect::<Vec<_>>(), [18, 18]);
    // A call without query rows: the maps of the other side serve.
    for view in [&mut args.q, &mut args.o, &mut args.d_o, &mut args.dq] {
        (view.data, view.rows) = (DataPtr::NULL, 0);
    }
    (args.lse.data, args.lse.rows) = (DataPtr::NULL, 0);
    let launches = run_split(&gpu, &plan, &layout, &args, &unordered);
    assert!((0..6).all(|i| gpu.map(&launches[2], i).dims[2] == 751));

    // A variant without one of its own takes the plain one, as of every other kind.
    let backend = Arc::new(CudaBackend::new(gpu.clone(), BUNDLES, "cuda", Some("g1"), Some(false)).unwrap());
    let plan = Plan::new(backend, &problem).unwrap();
    run_split(&gpu, &plan, &layout, &backward_args(&problem, 750), &unordered);
}
