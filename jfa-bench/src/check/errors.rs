//! Section 7, the rows that are errors: each names the argument and its value, and nothing is written.

use jfa_core::{
    BackwardArgs, Bias, Call, DType, DataPtr, ForwardArgs, IndexType, MemorySpace, Plan, Problem, Requirements,
};

use super::cases::{Collector, pooling, shared_histories};
use super::{Context, Outcome};
use crate::element::Poison;
use crate::execution::{Execution, Passes};
use crate::scenario::{Placement, Scenario};

/// What the text of an error must hold: every one of these (argument, value).
type Expected = &'static [&'static str];

/// What becomes of the layout before `build_schedule`.
type BreakLayout = fn(&mut Execution) -> jfa_core::Result<()>;
/// What becomes of a forward's arguments.
type BreakForward = fn(&Context, &mut Call, &mut ForwardArgs);
/// What becomes of a backward's arguments.
type BreakBackward = fn(&Context, &mut Call, &mut BackwardArgs);

/// Adds the cases.
pub fn cases(c: &mut Collector, dtype: DType, dim: i64) {
    problems(c, dtype, dim);
    layouts(c, dtype, dim);
    device_offsets(c, dtype, dim);
    rows_past_the_call(c, dtype, dim);
    calls(c, dtype, dim);
}

/// A description that must not be accepted.
fn problems(c: &mut Collector, dtype: DType, dim: i64) {
    type Break = fn(&mut Problem);
    let table: [(&str, Break, Expected); 15] = [
        ("scale-nan", |p| p.scale = f32::NAN, &["scale", "NaN"]),
        ("scale-infinite", |p| p.scale = f32::NEG_INFINITY, &["scale", "-inf"]),
        ("heads-not-divisible", |p| (p.heads_q, p.heads_kv) = (5, 2), &["heads_q", "5", "heads_kv", "2"]),
        ("heads_q-0", |p| p.heads_q = 0, &["heads_q", "0"]),
        ("heads_kv-negative", |p| p.heads_kv = -2, &["heads_kv", "-2"]),
        ("head_dim-0", |p| p.head_dim = 0, &["head_dim", "0"]),
        ("head_dim_v-negative", |p| p.head_dim_v = -7, &["head_dim_v", "-7"]),
        ("batch-negative", |p| (p.batch, p.kv_batch) = (-1, -1), &["batch", "-1"]),
        ("total_q-negative", |p| p.total_q = -3, &["total_q", "-3"]),
        ("total_kv-negative", |p| p.total_kv = -4, &["total_kv", "-4"]),
        ("kv_batch-without-kv_index", |p| p.kv_batch = p.batch + 9, &["kv_batch", "kv_index"]),
        ("q_len-negative", |p| p.query = jfa_core::Query::Broadcast { q_len: -5 }, &["q_len", "-5"]),
        (
            "bias-row_align",
            |p| p.bias = Bias::Dense { dtype: DType::F32, row_align: 3, shared_by_heads: false, capacity: 0 },
            &["row_align", "3"],
        ),
        (
            "bias-capacity-negative",
            |p| p.bias = Bias::Dense { dtype: DType::F32, row_align: 1, shared_by_heads: false, capacity: -6 },
            &["capacity", "-6"],
        ),
        ("head_dim-unsupported", |p| (p.head_dim, p.head_dim_v) = (100_003, 100_003), &["head_dim", "100003"]),
    ];
    for (name, broken, expected) in table {
        c.add("7", true, &format!("error/problem-{name}"), move |x| {
            let mut problem = Scenario::new(dtype, dim, &[3, 4]).problem()?;
            broken(&mut problem);
            Ok(match Plan::new(x.backend.clone(), &problem) {
                Ok(_) => Outcome::Failed(vec!["a plan was made".to_owned()]),
                Err(e) => named(&e.to_string(), expected),
            })
        });
    }
    c.add("7", true, "error/unsupported-says-what-is-supported", move |x| {
        let caps = x.backend.capabilities();
        let mut problem = Scenario::new(dtype, dim, &[3, 4]).problem()?;
        (problem.head_dim, problem.head_dim_v) = (100_003, 100_003);
        let Err(error) = Plan::new(x.backend.clone(), &problem) else {
            return Ok(Outcome::Failed(vec!["a plan was made".to_owned()]));
        };
        let text = error.to_string();
        let largest = caps.head_dims.iter().map(|r| r.max).max().unwrap_or(0).to_string();
        Ok(if text.contains(&largest) {
            Outcome::Passed(text)
        } else {
            Outcome::Failed(vec![format!("the error does not say that head_dim goes up to {largest}: {text}")])
        })
    });
}

/// The error's text names what it must.
fn named(text: &str, expected: Expected) -> Outcome {
    let missing: Vec<_> = expected.iter().filter(|word| !text.contains(**word)).copied().collect();
    if missing.is_empty() {
        Outcome::Passed(text.to_owned())
    } else {
        Outcome::Failed(vec![format!("the error does not say {}: {text}", missing.join(", "))])
    }
}

/// Layouts that must not be accepted where they can be read: in host memory.
fn layouts(c: &mut Collector, dtype: DType, dim: i64) {
    fn offsets(e: &mut Execution, q: bool, values: &[i64]) -> jfa_core::Result<()> {
        let data = e.array(values, IndexType::I32)?;
        let offsets = jfa_core::layout::Offsets { data, index_type: IndexType::I32 };
        if q {
            e.layout.q_offsets = Some(offsets);
        } else {
            e.layout.kv_offsets = offsets;
        }
        Ok(())
    }
    fn lengths(e: &mut Execution, q: bool, values: &[i64]) -> jfa_core::Result<()> {
        let data = e.array(values, IndexType::I32)?;
        *(if q { &mut e.layout.q_lengths } else { &mut e.layout.kv_lengths }) = Some(data);
        Ok(())
    }
    fn index(e: &mut Execution, values: &[i64]) -> jfa_core::Result<()> {
        e.layout.kv_index = Some(e.array(values, IndexType::I32)?);
        Ok(())
    }
    fn matrices(e: &mut Execution, values: &[i64]) -> jfa_core::Result<()> {
        e.layout.bias_offsets = Some(e.array(values, IndexType::I64)?);
        Ok(())
    }
    // The scenario has sequences of 3, 0 and 4 rows: offsets 0, 3, 3, 7.
    let contents: [(&str, BreakLayout, Expected); 10] = [
        ("q_offsets-start-negative", |e| offsets(e, true, &[-1, 3, 3, 7]), &["q_offsets[0]", "-1"]),
        ("kv_offsets-start-negative", |e| offsets(e, false, &[-2, 3, 3, 7]), &["kv_offsets[0]", "-2"]),
        ("q_offsets-decreasing", |e| offsets(e, true, &[0, 3, 2, 7]), &["q_offsets[2]", "2"]),
        ("kv_offsets-decreasing", |e| offsets(e, false, &[0, 5, 4, 7]), &["kv_offsets[2]", "4"]),
        ("q_offsets-past-the-buffer", |e| offsets(e, true, &[0, 3, 3, 8]), &["q_offsets[3]", "8"]),
        ("kv_offsets-past-the-buffer", |e| offsets(e, false, &[0, 3, 3, 1000]), &["kv_offsets[3]", "1000"]),
        ("q_lengths-negative", |e| lengths(e, true, &[3, -1, 4]), &["q_lengths[1]", "-1"]),
        ("kv_lengths-negative", |e| lengths(e, false, &[-5, 0, 4]), &["kv_lengths[0]", "-5"]),
        ("q_lengths-past-the-next-offset", |e| lengths(e, true, &[4, 0, 4]), &["q_lengths[0]", "4"]),
        ("kv_lengths-past-the-next-offset", |e| lengths(e, false, &[3, 0, 5]), &["kv_lengths[2]", "5"]),
    ];
    let base = move || Scenario::new(dtype, dim, &[3, 0, 4]);
    for (name, broken, expected) in contents {
        c.add("7", true, &format!("error/layout-{name}"), move |x| bad_layout(x, &base(), broken, expected, true));
    }
    let indexed: [(&str, BreakLayout, Expected); 3] = [
        ("kv_index-negative", |e| index(e, &[4, 0, -1, 2, 0, 1, 4]), &["kv_index[2]", "-1"]),
        ("kv_index-past-kv_batch", |e| index(e, &[4, 0, 0, 2, 0, 1, 5]), &["kv_index[6]", "5"]),
        (
            "kv_index-missing",
            |e| {
                e.layout.kv_index = None;
                Ok(())
            },
            &["kv_index"],
        ),
    ];
    for (name, broken, expected) in indexed {
        c.add("7", true, &format!("error/layout-{name}"), move |x| {
            bad_layout(x, &shared_histories(dtype, dim), broken, expected, !name.ends_with("missing"))
        });
    }
    let dense = move || {
        base().with(|s| s.bias = Bias::Dense { dtype: DType::F32, row_align: 1, shared_by_heads: true, capacity: 0 })
    };
    // Matrices of 9, 0 and 16 elements at 0, 16, 16; capacity 48.
    let biased: [(&str, BreakLayout, Expected); 3] = [
        ("bias_offsets-negative", |e| matrices(e, &[-16, 16, 16, 32]), &["bias_offsets[0]", "-16"]),
        (
            "bias_offsets-past-the-capacity",
            |e| matrices(e, &[0, 16, 16, 1 << 40]),
            &["bias_offsets[3]", "1099511627776"],
        ),
        (
            "bias_offsets-missing",
            |e| {
                e.layout.bias_offsets = None;
                Ok(())
            },
            &["bias_offsets"],
        ),
    ];
    for (name, broken, expected) in biased {
        c.add("7", false, &format!("error/layout-{name}"), move |x| {
            bad_layout(x, &dense(), broken, expected, !name.ends_with("missing"))
        });
    }
    // What can be seen without reading an array, in any memory space.
    let fields: [(&str, BreakLayout, Expected); 7] = [
        (
            "q_offsets-null",
            |e| {
                e.layout.q_offsets.as_mut().expect("jagged").data = DataPtr::NULL;
                Ok(())
            },
            &["q_offsets", "null"],
        ),
        (
            "kv_offsets-null",
            |e| {
                e.layout.kv_offsets.data = DataPtr::NULL;
                Ok(())
            },
            &["kv_offsets", "null"],
        ),
        (
            "q_offsets-missing",
            |e| {
                e.layout.q_offsets = None;
                Ok(())
            },
            &["q_offsets"],
        ),
        (
            "q_offsets-misaligned",
            |e| {
                let o = e.layout.q_offsets.as_mut().expect("jagged");
                o.data = DataPtr::new(o.data.cast::<u8>().wrapping_add(1));
                Ok(())
            },
            &["q_offsets"],
        ),
        (
            "batch-above-capacity",
            |e| {
                (e.layout.batch, e.layout.kv_batch) = (40, 40);
                Ok(())
            },
            &["batch", "40"],
        ),
        (
            "batch-negative",
            |e| {
                (e.layout.batch, e.layout.kv_batch) = (-1, -1);
                Ok(())
            },
            &["batch", "-1"],
        ),
        (
            "kv_batch-differs",
            |e| {
                e.layout.kv_batch = 2;
                Ok(())
            },
            &["kv_batch", "2"],
        ),
    ];
    for (name, broken, expected) in fields {
        c.add("7", true, &format!("error/layout-{name}"), move |x| bad_layout(x, &base(), broken, expected, false));
    }
    let with_offsets: BreakLayout = |e| offsets(e, true, &[0, 5, 10, 15, 20, 25, 30]);
    c.add("7", false, "error/layout-q_offsets-with-broadcast-query", move |x| {
        bad_layout(x, &pooling(dtype, dim, 5), with_offsets, &["q_offsets"], false)
    });
}

/// `build_schedule` refuses the layout, naming what is wrong, and writes nothing; so do both passes.
fn bad_layout(
    x: &Context,
    s: &Scenario,
    broken: BreakLayout,
    expected: Expected,
    needs_reading: bool,
) -> anyhow::Result<Outcome> {
    if let Some(reason) = x.lacks(s)? {
        return Ok(Outcome::Skipped(reason));
    }
    if needs_reading && x.backend.capabilities().memory_space != MemorySpace::Host {
        return Ok(Outcome::Skipped(
            "offsets in device memory cannot be checked without a synchronisation; see device-offsets cases".to_owned(),
        ));
    }
    let mut execution = Execution::new(&x.backend, &x.memory, s, &s.inputs(), Poison::Nan)?;
    broken(&mut execution)?;
    let mut wrong = Vec::new();
    let mut text = String::new();
    let mut expect = |call: &str, result: jfa_core::Result<()>| match result {
        Ok(()) => wrong.push(format!("{call} accepted the layout")),
        Err(e) => {
            if let Outcome::Failed(more) = named(&e.to_string(), expected) {
                wrong.extend(more.into_iter().map(|m| format!("{call}: {m}")));
            }
            text = e.to_string();
        }
    };
    expect("build_schedule", execution.build_schedule());
    expect("forward", execution.forward());
    if x.backend.capabilities().backward {
        expect("backward", execution.backward());
    }
    wrong.extend(execution.trespasses(Passes::NONE)?);
    Ok(if wrong.is_empty() { Outcome::Passed(text) } else { Outcome::Failed(wrong) })
}

/// Offsets that cannot be checked: whatever comes out, no access leaves the buffers.
fn device_offsets(c: &mut Collector, dtype: DType, dim: i64) {
    let table: [(&str, [i64; 4]); 4] = [
        ("start-negative", [-4, 3, 3, 7]),
        ("decreasing", [0, 7, 2, 5]),
        ("past-the-buffer", [0, 3, 3, 1_000_000]),
        ("wild", [i64::from(i32::MAX), i64::from(i32::MIN), -1, i64::from(i32::MAX)]),
    ];
    for (name, values) in table {
        c.add("7", true, &format!("device-offsets/{name}"), move |x| {
            if x.backend.capabilities().memory_space == MemorySpace::Host {
                return Ok(Outcome::Skipped(
                    "in host memory such offsets are an error (error/layout cases)".to_owned(),
                ));
            }
            let s = Scenario::new(dtype, dim, &[3, 0, 4]).with(|s| s.placement = Placement::TIGHT);
            if let Some(reason) = x.lacks(&s)? {
                return Ok(Outcome::Skipped(reason));
            }
            let mut wrong = Vec::new();
            for (q, kv) in [(true, true), (true, false), (false, true)] {
                let mut e = Execution::new(&x.backend, &x.memory, &s, &s.inputs(), Poison::Nan)?;
                let data = e.array(&values, IndexType::I32)?;
                let bad = jfa_core::layout::Offsets { data, index_type: IndexType::I32 };
                if q {
                    e.layout.q_offsets = Some(bad);
                }
                if kv {
                    e.layout.kv_offsets = bad;
                }
                // With JFA_VALIDATE=1 these are errors; without it they are not, and both are right.
                let passes = e
                    .build_schedule()
                    .and_then(|()| e.forward())
                    .and_then(|()| if x.backend.capabilities().backward { e.backward() } else { Ok(()) });
                if let Err(error @ jfa_core::Error::Device { .. }) = passes {
                    wrong.push(format!("the device failed: {error}"));
                }
                wrong.extend(e.writes_outside_outputs()?);
            }
            Ok(if wrong.is_empty() {
                Outcome::Passed("nothing outside the outputs changed".to_owned())
            } else {
                Outcome::Failed(wrong)
            })
        });
    }
}

/// Offsets that the plan has room for and this call has not: the rows past those of the call are nobody's. Sequences have
/// several tiles of keys, so that whoever works on one together must be done with rows that are not there.
fn rows_past_the_call(c: &mut Collector, dtype: DType, dim: i64) {
    const ROWS: i64 = 300;
    c.add("7", true, "device-offsets/past-the-call", move |x| {
        if x.backend.capabilities().memory_space == MemorySpace::Host {
            return Ok(Outcome::Skipped("in host memory such offsets are an error".to_owned()));
        }
        let s = Scenario::new(dtype, dim, &[330, 400]).with(|s| s.placement = Placement::TIGHT);
        if let Some(reason) = x.lacks(&s)? {
            return Ok(Outcome::Skipped(reason));
        }
        let e = Execution::new(&x.backend, &x.memory, &s, &s.inputs(), Poison::Nan)?;
        let call = |workspace| Call { layout: &e.layout, schedule: e.schedule(), workspace, stream: x.memory.stream() };
        let mut forward = e.forward_args();
        for view in [&mut forward.q, &mut forward.k, &mut forward.v, &mut forward.o] {
            view.rows = ROWS;
        }
        forward.lse.rows = ROWS;
        let mut backward = e.backward_args();
        (backward.q, backward.k, backward.v, backward.o) = (forward.q, forward.k, forward.v, forward.o);
        for view in [&mut backward.d_o, &mut backward.dq, &mut backward.dk, &mut backward.dv] {
            view.rows = ROWS;
        }
        backward.lse = forward.lse;
        // SAFETY: the views are the first rows of `e`'s, which live; what the offsets say beyond them must not be touched.
        let passes = e
            .build_schedule()
            .and_then(|()| unsafe { e.plan().forward(&call(e.forward_workspace()), &forward) })
            .and_then(|()| {
                if !x.backend.capabilities().backward {
                    return Ok(());
                }
                // SAFETY: as for the forward.
                unsafe { e.plan().backward(&call(e.backward_workspace()), &backward) }
            })
            .and_then(|()| x.memory.synchronize());
        let mut wrong = Vec::new();
        // With JFA_VALIDATE=1 these are errors; without it they are not, and both are right.
        if let Err(error @ jfa_core::Error::Device { .. }) = passes {
            wrong.push(format!("the device failed: {error}"));
        }
        wrong.extend(e.writes_outside_outputs()?);
        let outputs = e.outputs()?;
        for (name, sequences) in [("o", &outputs.o), ("dq", &outputs.dq), ("dk", &outputs.dk), ("dv", &outputs.dv)] {
            if !sequences[1].iter().all(|v| v.is_nan()) {
                wrong.push(format!("{name} past row {ROWS} was written"));
            }
        }
        Ok(if wrong.is_empty() {
            Outcome::Passed(format!("nothing past row {ROWS} changed"))
        } else {
            Outcome::Failed(wrong)
        })
    });
}

fn shifted(data: DataPtr, bytes: usize) -> DataPtr {
    DataPtr::new(data.cast::<u8>().wrapping_add(bytes))
}

/// Arguments of the passes that must not be accepted.
fn calls(c: &mut Collector, dtype: DType, dim: i64) {
    let forward: [(&str, BreakForward, Expected); 22] = [
        ("q-null", |_, _, a| a.q.data = DataPtr::NULL, &["q", "null"]),
        ("k-null", |_, _, a| a.k.data = DataPtr::NULL, &["k", "null"]),
        ("v-null", |_, _, a| a.v.data = DataPtr::NULL, &["v", "null"]),
        ("o-null", |_, _, a| a.o.data = DataPtr::NULL, &["o", "null"]),
        ("lse-null", |_, _, a| a.lse.data = DataPtr::NULL, &["lse", "null"]),
        ("q-misaligned", |_, _, a| a.q.data = shifted(a.q.data, 1), &["q"]),
        ("k-misaligned", |_, _, a| a.k.data = shifted(a.k.data, 1), &["k"]),
        ("v-misaligned", |_, _, a| a.v.data = shifted(a.v.data, 1), &["v"]),
        ("o-misaligned", |_, _, a| a.o.data = shifted(a.o.data, 1), &["o"]),
        ("lse-misaligned", |_, _, a| a.lse.data = shifted(a.lse.data, 2), &["lse"]),
        ("q-heads", |_, _, a| a.q.heads = 17, &["q.heads", "17"]),
        ("k-heads", |_, _, a| a.k.heads = 17, &["k.heads", "17"]),
        ("v-dim", |_, _, a| a.v.dim = 1003, &["v.dim", "1003"]),
        ("q-rows-above-capacity", |_, _, a| a.q.rows = 1_000_007, &["q.rows", "1000007"]),
        ("k-rows-differ-from-v", |_, _, a| a.k.rows -= 1, &["rows"]),
        ("o-rows-negative", |_, _, a| a.o.rows = -9, &["o.rows", "-9"]),
        ("q-row_stride-negative", |_, _, a| a.q.row_stride = -64, &["q.row_stride", "-64"]),
        ("o-rows-overlap", |_, _, a| a.o.row_stride = 0, &["o"]),
        ("lse-heads-overlap", |_, _, a| a.lse.head_stride = 1, &["lse.head_stride", "1"]),
        ("bias-without-bias", |_, _, a| a.bias = a.lse.data, &["bias"]),
        ("q-dtype", |_, _, a| a.q.dtype = if a.q.dtype == DType::F32 { DType::BF16 } else { DType::F32 }, &["q.dtype"]),
        ("schedule-too-small", |_, call, _| call.schedule.bytes = call.schedule.bytes.saturating_sub(1), &["schedule"]),
    ];
    for (name, broken, expected) in forward {
        c.add("7", true, &format!("error/forward-{name}"), move |x| {
            bad_call(x, dtype, dim, Some(broken), None, expected)
        });
    }
    let backward: [(&str, BreakBackward, Expected); 14] = [
        ("do-null", |_, _, a| a.d_o.data = DataPtr::NULL, &["d_o", "null"]),
        ("dq-null", |_, _, a| a.dq.data = DataPtr::NULL, &["dq", "null"]),
        ("dk-null", |_, _, a| a.dk.data = DataPtr::NULL, &["dk", "null"]),
        ("dv-null", |_, _, a| a.dv.data = DataPtr::NULL, &["dv", "null"]),
        ("o-null", |_, _, a| a.o.data = DataPtr::NULL, &["o", "null"]),
        ("lse-null", |_, _, a| a.lse.data = DataPtr::NULL, &["lse", "null"]),
        ("dq-misaligned", |_, _, a| a.dq.data = shifted(a.dq.data, 1), &["dq"]),
        ("dk-misaligned", |_, _, a| a.dk.data = shifted(a.dk.data, 1), &["dk"]),
        ("do-misaligned", |_, _, a| a.d_o.data = shifted(a.d_o.data, 1), &["d_o"]),
        ("dk-heads", |_, _, a| a.dk.heads = 17, &["dk.heads", "17"]),
        ("dv-dim", |_, _, a| a.dv.dim = 1003, &["dv.dim", "1003"]),
        ("dq-rows", |_, _, a| a.dq.rows += 1, &["dq.rows"]),
        ("dk-rows-overlap", |_, _, a| a.dk.row_stride = 0, &["dk"]),
        ("dbias-without-bias", |_, _, a| a.dbias = a.lse.data, &["dbias"]),
    ];
    for (name, broken, expected) in backward {
        c.add("7", true, &format!("error/backward-{name}"), move |x| {
            bad_call(x, dtype, dim, None, Some(broken), expected)
        });
    }
    // Only backends that ask for memory, or promise less than any alignment, can be refused these.
    let workspace: [(&str, BreakForward, Expected); 3] = [
        ("workspace-null", |_, call, _| call.workspace.data = DataPtr::NULL, &["workspace"]),
        (
            "workspace-too-small",
            |_, call, _| call.workspace.bytes = call.workspace.bytes.saturating_sub(1),
            &["workspace"],
        ),
        (
            "workspace-misaligned",
            |_, call, _| call.workspace.data = shifted(call.workspace.data, Requirements::ALIGNMENT / 2),
            &["workspace"],
        ),
    ];
    for (name, broken, expected) in workspace {
        c.add("7", true, &format!("error/forward-{name}"), move |x| {
            bad_call(x, dtype, dim, Some(broken), None, expected)
        });
    }
    let workspace: [(&str, BreakBackward, Expected); 2] = [
        ("workspace-null", |_, call, _| call.workspace.data = DataPtr::NULL, &["workspace"]),
        (
            "workspace-too-small",
            |_, call, _| call.workspace.bytes = call.workspace.bytes.saturating_sub(1),
            &["workspace"],
        ),
    ];
    for (name, broken, expected) in workspace {
        c.add("7", true, &format!("error/backward-{name}"), move |x| {
            bad_call(x, dtype, dim, None, Some(broken), expected)
        });
    }
    let strides: [(&str, BreakForward, Expected); 2] = [
        ("q-stride-misaligned", |_, _, a| a.q.row_stride += 1, &["q.row_stride"]),
        ("o-base-misaligned", |_, _, a| a.o.data = shifted(a.o.data, a.o.dtype.size()), &["o"]),
    ];
    for (name, broken, expected) in strides {
        c.add("7", true, &format!("error/forward-{name}"), move |x| {
            let caps = x.backend.capabilities();
            if caps.base_alignment.min(caps.stride_alignment) <= dtype.size() {
                return Ok(Outcome::Skipped(
                    "the backend promises to take any element's address and stride".to_owned(),
                ));
            }
            bad_call(x, dtype, dim, Some(broken), None, expected)
        });
    }
}

/// The call is refused, naming what is wrong, and nothing is written.
fn bad_call(
    x: &Context,
    dtype: DType,
    dim: i64,
    forward: Option<BreakForward>,
    backward: Option<BreakBackward>,
    expected: Expected,
) -> anyhow::Result<Outcome> {
    let s = Scenario::new(dtype, dim, &[3, 0, 4]);
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    if backward.is_some() && !x.backend.capabilities().backward {
        return Ok(Outcome::Skipped("the backend has no backward".to_owned()));
    }
    let e = Execution::new(&x.backend, &x.memory, &s, &s.inputs(), Poison::Nan)?;
    e.build_schedule()?;
    let mut call = Call {
        layout: &e.layout,
        schedule: e.schedule(),
        workspace: if forward.is_some() { e.forward_workspace() } else { e.backward_workspace() },
        stream: x.memory.stream(),
    };
    let needs = e.plan().requirements();
    let workspace_bytes = if forward.is_some() { needs.forward_bytes } else { needs.backward_bytes };
    if expected == ["schedule"] && needs.schedule_bytes == 0 || expected == ["workspace"] && workspace_bytes == 0 {
        return Ok(Outcome::Skipped(format!("the plan needs no {} here", expected[0])));
    }
    let wrote = if backward.is_some() {
        e.forward()?;
        Passes::FORWARD
    } else {
        Passes::NONE
    };
    let before = e.outputs()?;
    // SAFETY: what the call is given is refused before anything is read through it; that is what is being tested, and
    // a backend that reads it all the same finds the live buffers of `e` or an address that faults.
    let result = unsafe {
        match (forward, backward) {
            (Some(broken), _) => {
                let mut args = e.forward_args();
                broken(x, &mut call, &mut args);
                e.plan().forward(&call, &args)
            }
            (None, Some(broken)) => {
                let mut args = e.backward_args();
                broken(x, &mut call, &mut args);
                e.plan().backward(&call, &args)
            }
            (None, None) => unreachable!("one of the passes is broken"),
        }
    };
    x.memory.synchronize()?;
    let mut wrong = Vec::new();
    let text = match result {
        Ok(()) => {
            wrong.push("the call was accepted".to_owned());
            String::new()
        }
        Err(error) => {
            if let Outcome::Failed(more) = named(&error.to_string(), expected) {
                wrong.extend(more);
            }
            error.to_string()
        }
    };
    wrong.extend(e.trespasses(wrote)?);
    if backward.is_some() {
        // The forward wrote o and lse; the refused backward must not have touched them.
        let after = e.outputs()?;
        wrong.extend(crate::compare::bit_difference(&s, &before, &after, false, |_, _, _| false));
    }
    Ok(if wrong.is_empty() { Outcome::Passed(text) } else { Outcome::Failed(wrong) })
}
