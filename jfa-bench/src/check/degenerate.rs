//! Section 7: what degenerate input gives.

use jfa_core::layout::Offsets;
use jfa_core::{
    BackwardArgs, Bias, Buffer, Call, DType, DataPtr, ForwardArgs, IndexType, Layout, LseView, Mask, Plan, TensorView,
};

use super::cases::{Collector, pooling, shared_histories};
use super::{Context, Outcome};
use crate::compare;
use crate::element::Poison;
use crate::execution::{Execution, Passes};
use crate::scenario::{Inputs, Placement, Scenario, Strides};

/// Adds the cases.
pub fn cases(c: &mut Collector, dtype: DType, dim: i64) {
    for (name, zeroed) in [("leaves-unused-rows", false), ("zero_unused_rows", true)] {
        let s = Scenario::new(dtype, dim, &[5, 0, 65, 1]).with(|s| {
            s.placement = Placement::LOOSE;
            s.zero_unused_rows = zeroed;
        });
        c.conform("7", true, &format!("degenerate/{name}"), s.clone());
        let tight_strides = s.clone().with(|s| s.placement.strides = Strides::Contiguous);
        c.conform("7", false, &format!("degenerate/{name}-contiguous"), tight_strides);
        let s = pooling(dtype, dim, 5).with(|s| {
            s.placement = Placement::LOOSE;
            s.zero_unused_rows = zeroed;
        });
        c.conform("7", false, &format!("degenerate/{name}-broadcast-query"), s);
        let s = shared_histories(dtype, dim).with(|s| {
            s.placement = Placement::LOOSE;
            s.zero_unused_rows = zeroed;
        });
        c.conform("7", false, &format!("degenerate/{name}-kv_index"), s);
    }
    let zeroed_empty = Scenario::new(dtype, dim, &[0, 0]).with(|s| {
        s.placement = Placement::LOOSE;
        s.zero_unused_rows = true;
    });
    c.conform("7", false, "degenerate/zero_unused_rows-empty-sequences", zeroed_empty);

    // q_len = 0 beside kv_len > 0: dk and dv of those rows are written, with zeros. And the reverse.
    c.conform("7", true, "degenerate/q_len-0", Scenario::cross(dtype, dim, &[0, 3, 0], &[65, 4, 2]));
    c.conform("7", false, "degenerate/every-q_len-0", Scenario::cross(dtype, dim, &[0, 0], &[65, 4]));
    c.conform("7", true, "degenerate/kv_len-0", Scenario::cross(dtype, dim, &[65, 3, 1], &[0, 4, 0]));
    c.conform("7", false, "degenerate/every-kv_len-0", Scenario::cross(dtype, dim, &[65, 3], &[0, 0]));
    c.conform("7", false, "degenerate/all-lengths-0", Scenario::new(dtype, dim, &[0, 0, 0]));
    let blind = Scenario::cross(dtype, dim, &[130, 5, 70], &[3, 2, 69]).with(|s| {
        s.mask = Mask::Causal(jfa_core::Alignment::BottomRight);
    });
    c.conform("7", true, "degenerate/rows-that-see-nothing", blind);

    c.add("7", true, "degenerate/batch-0", move |x| empty(x, dtype, dim, 0, 0));
    c.add("7", false, "degenerate/batch-0-of-a-larger-plan", move |x| empty(x, dtype, dim, 4, 100));
    c.add("7", false, "degenerate/total-0-null-data", move |x| null_data(x, dtype, dim));

    let isolated = |s: Scenario| s.with(|s| s.placement = Placement::LOOSE);
    let lens = [65, 1, 0, 129, 7];
    let bases: [(&str, bool, Scenario); 5] = [
        ("full", true, Scenario::new(dtype, dim, &lens)),
        (
            "causal",
            false,
            Scenario::new(dtype, dim, &lens).with(|s| {
                s.mask = Mask::Causal(jfa_core::Alignment::BottomRight);
            }),
        ),
        ("kv_index", false, shared_histories(dtype, dim)),
        ("broadcast-query", false, pooling(dtype, dim, 5)),
        (
            "dense-bias",
            false,
            Scenario::new(dtype, dim, &lens).with(|s| {
                s.bias = Bias::Dense { dtype: DType::F32, row_align: 8, shared_by_heads: false, capacity: 0 };
            }),
        ),
    ];
    for (name, quick, s) in bases {
        let s = isolated(s).with(|s| s.deterministic = true);
        c.add("7", quick, &format!("isolation/garbage-around-{name}"), move |x| garbage_around(x, &s));
    }
    for tensor in ["q", "k", "v", "do"] {
        for (kind, value) in [("nan", f32::NAN), ("inf", f32::INFINITY)] {
            let s = Scenario::new(dtype, dim, &[65, 70, 7]);
            let quick = kind == "nan" && (tensor == "v" || tensor == "k");
            c.add("7", quick, &format!("isolation/{kind}-inside-{tensor}"), move |x| {
                garbage_inside(x, &s, tensor, value)
            });
        }
    }

    c.add("7", true, "schedule/reused-by-layers", move |x| layers(x, dtype, dim));

    let wide = vec![1; 16_400];
    let s = Scenario::new(dtype, dim, &wide).with(|s| (s.heads_q, s.heads_kv) = (4, 4));
    c.conform("7", false, "large/batch-times-heads-above-65535", s);
    c.add("7", false, "large/batch-of-a-million", move |x| million(x, dtype, dim));
    let sparse = |rows: &[i64], stride: i64, start: i64| {
        Scenario::new(dtype, dim, rows).with(|s| {
            (s.heads_q, s.heads_kv) = (1, 1);
            s.placement.strides = Strides::Sparse(stride);
            s.placement.start = start;
            s.placement.q_index = IndexType::I64;
            s.placement.kv_index = IndexType::I64;
        })
    };
    let far = sparse(&[2, 3], (1 << 29) + 64, 0);
    c.add("7", false, "large/row-stride-beyond-2^31-elements", move |x| large(x, &far));
    let late = sparse(&[66, 3], 4096 + 64, (1 << 19) + 1);
    c.add("7", false, "large/first-row-beyond-2^31-elements", move |x| large(x, &late));
}

fn no_view(dtype: DType, heads: i64, dim: i64) -> TensorView {
    TensorView::contiguous(DataPtr::NULL, dtype, 0, heads, dim)
}

/// A batch of none: null pointers everywhere, success.
fn empty(x: &Context, dtype: DType, dim: i64, batch: i64, rows: i64) -> anyhow::Result<Outcome> {
    let problem = jfa_core::Problem::builder(dtype, 2, dim).capacity(batch, rows, rows).build()?;
    let lacks = x.backend.capabilities().lacks(&problem);
    if !lacks.is_empty() {
        return Ok(Outcome::Skipped(format!("the backend lacks: {}", lacks.join(", "))));
    }
    let null = Offsets { data: DataPtr::NULL, index_type: IndexType::I32 };
    let layout = Layout {
        batch: 0,
        q_offsets: Some(null),
        q_lengths: None,
        kv_batch: 0,
        kv_offsets: null,
        kv_lengths: None,
        kv_index: None,
        bias_offsets: None,
    };
    run_null(x, &problem, &layout, dtype, dim)
}

/// Sequences, all of length 0, over buffers of no rows at all.
fn null_data(x: &Context, dtype: DType, dim: i64) -> anyhow::Result<Outcome> {
    let s = Scenario::new(dtype, dim, &[0, 0, 0]);
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    let execution = Execution::new(&x.backend, &x.memory, &s, &s.inputs(), Poison::Nan)?;
    run_null(x, execution.problem(), &execution.layout, dtype, dim)
}

fn run_null(
    x: &Context,
    problem: &jfa_core::Problem,
    layout: &Layout,
    dtype: DType,
    dim: i64,
) -> anyhow::Result<Outcome> {
    let plan = Plan::new(x.backend.clone(), problem)?;
    let needs = plan.requirements();
    let scratch = |bytes: usize| jfa_core::DeviceBuffer::filled(&x.memory, bytes, 0xFF);
    let (schedule, forward, backward) =
        (scratch(needs.schedule_bytes)?, scratch(needs.forward_bytes)?, scratch(needs.backward_bytes)?);
    let buffer = |b: &jfa_core::DeviceBuffer| if b.bytes() == 0 { Buffer::EMPTY } else { b.as_buffer() };
    let stream = x.memory.stream();
    let view = no_view(dtype, 2, dim);
    let lse = LseView::contiguous(DataPtr::NULL, 0);
    let args = ForwardArgs { q: view, k: view, v: view, bias: DataPtr::NULL, o: view, lse };
    // SAFETY: the views have no rows, the layout's arrays the entries of its batch, the scratch its asked size.
    unsafe {
        plan.build_schedule(layout, buffer(&schedule), stream)?;
        let call = Call { layout, schedule: buffer(&schedule), workspace: buffer(&forward), stream };
        plan.forward(&call, &args)?;
        if x.backend.capabilities().backward {
            let call = Call { layout, schedule: buffer(&schedule), workspace: buffer(&backward), stream };
            let (q, k, v, o, d_o, dq, dk, dv) = (view, view, view, view, view, view, view, view);
            let null = DataPtr::NULL;
            plan.backward(&call, &BackwardArgs { q, k, v, bias: null, o, lse, d_o, dq, dk, dv, dbias: null })?;
        }
    }
    x.memory.synchronize()?;
    Ok(Outcome::Passed(String::new()))
}

/// Whether the backward of `s` can be compared bit by bit.
fn backward_in_bits(x: &Context, s: &Scenario) -> bool {
    x.backend.capabilities().backward && s.deterministic
}

/// The same computation amid zeros, NaN, infinities and huge numbers: not a bit differs.
fn garbage_around(x: &Context, s: &Scenario) -> anyhow::Result<Outcome> {
    let mut s = s.clone();
    s.deterministic &= x.backend.capabilities().deterministic;
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    let (_, clean) = x.run(&s, Poison::Zero)?;
    let mut wrong = Vec::new();
    for poison in [Poison::Nan, Poison::Inf, Poison::Huge] {
        let (execution, outputs) = x.run(&s, poison)?;
        let difference = compare::bit_difference(&s, &clean, &outputs, backward_in_bits(x, &s), |_, _, _| false);
        wrong.extend(difference.map(|d| format!("differs between zeros and {poison:?} around the sequences: {d}")));
        let both = if x.backend.capabilities().backward { Passes::BOTH } else { Passes::FORWARD };
        wrong.extend(execution.trespasses(both)?);
    }
    Ok(if wrong.is_empty() { Outcome::Passed(bits(x, &s)) } else { Outcome::Failed(wrong) })
}

/// What "identical bits" covered.
pub fn bits(x: &Context, s: &Scenario) -> String {
    if backward_in_bits(x, s) {
        "identical bits, forward and backward".to_owned()
    } else {
        "identical bits, forward only (no deterministic backward)".to_owned()
    }
}

/// NaN or infinity in sequence 1, head 1 of one tensor: no other sequence and no other head changes.
fn garbage_inside(x: &Context, s: &Scenario, tensor: &str, value: f32) -> anyhow::Result<Outcome> {
    let mut s = s.clone();
    s.deterministic = x.backend.capabilities().deterministic;
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    if tensor == "do" && !x.backend.capabilities().backward {
        return Ok(Outcome::Skipped("the backend has no backward".to_owned()));
    }
    let (_, clean) = x.run(&s, Poison::Nan)?;
    let mut inputs = s.inputs();
    let Inputs { q, k, v, d_o, .. } = &mut inputs;
    let (rows, dim) = match tensor {
        "q" => (q, s.head_dim),
        "k" => (k, s.head_dim),
        "v" => (v, s.head_dim_v),
        _ => (d_o, s.head_dim_v),
    };
    // Row 3 of sequence 1, head 1.
    rows[1][((3 * 2 + 1) * dim + dim / 2) as usize] = value;
    let execution = Execution::new(&x.backend, &x.memory, &s, &inputs, Poison::Nan)?;
    execution.build_schedule()?;
    execution.forward()?;
    if x.backend.capabilities().backward {
        execution.backward()?;
    }
    let outputs = execution.outputs()?;
    let inside = |_: &str, sequence: usize, head: usize| sequence == 1 && head == 1;
    let difference = compare::bit_difference(&s, &clean, &outputs, backward_in_bits(x, &s), inside);
    Ok(match difference {
        None => Outcome::Passed(bits(x, &s)),
        Some(d) => Outcome::Failed(vec![format!("{value} in {tensor}, sequence 1, head 1 reached {d}")]),
    })
}

/// One schedule, several layers with tensors of their own, both passes, in the order of a training step.
fn layers(x: &Context, dtype: DType, dim: i64) -> anyhow::Result<Outcome> {
    let base =
        Scenario::new(dtype, dim, &[65, 0, 7, 64]).with(|s| s.mask = Mask::Causal(jfa_core::Alignment::BottomRight));
    if let Some(reason) = x.lacks(&base)? {
        return Ok(Outcome::Skipped(reason));
    }
    let first = Execution::new(&x.backend, &x.memory, &base, &base.inputs(), Poison::Nan)?;
    first.build_schedule()?;
    let mut layers = Vec::new();
    for seed in 1..=3 {
        let s = base.clone().with(|s| s.seed = seed);
        let inputs = s.inputs();
        let mut execution = Execution::new(&x.backend, &x.memory, &s, &inputs, Poison::Nan)?;
        execution.share_batch(&first);
        layers.push((s, inputs, execution));
    }
    let mut texts = Vec::new();
    for (s, inputs, execution) in &layers {
        match x.conform_passes(s, inputs, execution, Passes::FORWARD)? {
            Outcome::Passed(text) => texts.push(text),
            other => return Ok(other),
        }
    }
    // And back again through the layers, on the same schedule and tensors.
    for (s, inputs, execution) in layers.iter().rev() {
        if let other @ (Outcome::Failed(_) | Outcome::Skipped(_)) = x.conform_passes(
            s,
            inputs,
            execution,
            if x.backend.capabilities().backward { Passes::BOTH } else { Passes::FORWARD },
        )? {
            return Ok(other);
        }
    }
    Ok(Outcome::Passed(texts.swap_remove(0)))
}

/// A million sequences of 0, 1 and 2 rows.
fn million(x: &Context, dtype: DType, dim: i64) -> anyhow::Result<Outcome> {
    let caps = x.backend.capabilities();
    let smallest = caps.head_dims.iter().map(|r| if r.min >= 8 { r.min } else { 8 }).min().unwrap_or(dim).min(dim);
    let lens: Vec<i64> = (0..1_000_000).map(|b| b % 3).collect();
    let s = Scenario::new(dtype, smallest, &lens).with(|s| (s.heads_q, s.heads_kv) = (1, 1));
    x.conform(&s)
}

/// Tensors whose elements lie more than 2^31 apart; the memory is address space that is hardly touched.
fn large(x: &Context, s: &Scenario) -> anyhow::Result<Outcome> {
    if let Some(reason) = x.lacks(s)? {
        return Ok(Outcome::Skipped(reason));
    }
    let inputs = s.inputs();
    let execution = match Execution::new(&x.backend, &x.memory, s, &inputs, Poison::Nan) {
        Ok(execution) => execution,
        Err(e @ jfa_core::Error::Device { .. }) => {
            return Ok(Outcome::Skipped(format!("the tensors could not be allocated: {e}")));
        }
        Err(e) => return Err(e.into()),
    };
    execution.build_schedule()?;
    x.conform_passes(s, &inputs, &execution, Passes::FORWARD)
}
