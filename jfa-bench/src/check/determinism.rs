//! Section 9: the same bits, run after run and whatever else is in the batch.

use jfa_core::{Alignment, Bias, DType, Mask};

use super::cases::{Collector, pooling, shared_histories};
use super::degenerate::bits;
use super::{Context, Outcome};
use crate::compare;
use crate::element::Poison;
use crate::execution::{Execution, Outputs};
use crate::scenario::{BiasData, Placement, Scenario, Strides};

/// Adds the cases.
pub fn cases(c: &mut Collector, dtype: DType, dim: i64) {
    let lens = [65, 1, 0, 129, 7, 64, 130, 12];
    let base = || {
        Scenario::new(dtype, dim, &lens).with(|s| {
            s.mask = Mask::Causal(Alignment::BottomRight);
            s.deterministic = true;
        })
    };
    let gqa = || base().with(|s| (s.heads_q, s.heads_kv) = (4, 2));
    let dense = || {
        base().with(|s| s.bias = Bias::Dense { dtype: DType::F32, row_align: 8, shared_by_heads: false, capacity: 0 })
    };
    for (name, quick, s) in [
        ("causal", true, base()),
        ("gqa", false, gqa()),
        ("kv_index", false, shared_histories(dtype, dim).with(|s| s.deterministic = true)),
        ("broadcast-query", false, pooling(dtype, dim, 5).with(|s| s.deterministic = true)),
        ("alibi", false, base().with(|s| s.bias = Bias::Alibi)),
        ("relative", false, base().with(|s| s.bias = Bias::Relative { radius: 5 })),
        ("dense", false, dense()),
    ] {
        c.add("9", quick, &format!("determinism/repeated-{name}"), move |x| repeated(x, &s));
    }
    type Transform = fn(&Scenario) -> Scenario;
    // What becomes of the batch; sequences keep their data, and are found again by it.
    let transforms: [(&str, bool, Transform); 7] = [
        ("permuted", true, |s| s.subset(&[4, 3, 7, 0, 2, 6, 1, 5])),
        ("reversed", false, |s| s.subset(&[7, 6, 5, 4, 3, 2, 1, 0])),
        ("first-half", true, |s| s.subset(&[0, 1, 2, 3])),
        ("second-half", false, |s| s.subset(&[4, 5, 6, 7])),
        ("alone", true, |s| s.subset(&[3])),
        ("moved-apart", true, |s| s.clone().with(|s| s.placement = Placement::LOOSE)),
        ("other-strides", false, |s| s.clone().with(|s| s.placement.strides = Strides::HeadMajor)),
    ];
    for (scenario_name, base) in [("causal", base()), ("gqa", gqa()), ("dense", dense())] {
        for (name, quick, transform) in transforms {
            let s = base.clone();
            let quick = quick && scenario_name == "causal";
            c.add("9", quick, &format!("batch-invariance/{name}-{scenario_name}"), move |x| {
                invariant(x, &s, &transform(&s))
            });
        }
        let s = base.clone();
        c.add("9", false, &format!("batch-invariance/among-many-{scenario_name}"), move |x| {
            // Eight sequences of the batch among two hundred others.
            let many = s.clone().with(|s| {
                for i in 0..200 {
                    let n = (i * 37) % 90;
                    s.q_lens.push(n);
                    s.kv_lens.push(n);
                    s.q_ids.push(1000 + i as u64);
                    s.kv_ids.push(1000 + i as u64);
                }
            });
            invariant(x, &s, &many)
        });
        let s = base.clone();
        c.add("9", false, &format!("batch-invariance/hints-{scenario_name}"), move |x| {
            invariant(x, &s, &s.clone().with(|s| s.hints = (Some(1), Some(100_000))))
        });
    }
    cases_of_a_long_sequence(c, dtype, dim);
}

/// A choice of algorithm that follows from how long the sequences of a batch are would show here.
fn cases_of_a_long_sequence(c: &mut Collector, dtype: DType, dim: i64) {
    for (name, mask) in [("full", Mask::Full), ("causal", Mask::Causal(Alignment::BottomRight))] {
        let s = Scenario::new(dtype, dim, &[2100, 5, 17, 64]).with(|s| {
            s.mask = mask;
            s.deterministic = true;
        });
        for (what, kept) in [("alone-long", vec![0]), ("without-the-long", vec![1, 2, 3])] {
            let s = s.clone();
            c.add("9", false, &format!("batch-invariance/{what}-{name}"), move |x| invariant(x, &s, &s.subset(&kept)));
        }
    }
}

fn adapted(x: &Context, s: &Scenario) -> Scenario {
    s.clone().with(|s| s.deterministic &= x.backend.capabilities().deterministic && x.backend.capabilities().backward)
}

/// The same call again and again on the same memory.
fn repeated(x: &Context, s: &Scenario) -> anyhow::Result<Outcome> {
    let s = adapted(x, s);
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    let execution = Execution::new(&x.backend, &x.memory, &s, &s.inputs(), Poison::Nan)?;
    let mut first: Option<Outputs> = None;
    for run in 0..x.repeats.max(2) {
        execution.build_schedule()?;
        execution.forward()?;
        if x.backend.capabilities().backward {
            execution.backward()?;
        }
        let outputs = execution.outputs()?;
        if let Some(first) = &first {
            if let Some(d) = compare::bit_difference(&s, first, &outputs, s.deterministic, |_, _, _| false) {
                return Ok(Outcome::Failed(vec![format!("run {} of {}: {d}", run + 1, x.repeats)]));
            }
        } else {
            first = Some(outputs);
        }
    }
    Ok(Outcome::Passed(format!("{} runs, {}", x.repeats.max(2), bits(x, &s))))
}

/// Every sequence that is in both batches has the same bits in both.
fn invariant(x: &Context, s: &Scenario, other: &Scenario) -> anyhow::Result<Outcome> {
    let (s, other) = (adapted(x, s), adapted(x, other));
    if let Some(reason) = x.lacks(&s)? {
        return Ok(Outcome::Skipped(reason));
    }
    let (_, all) = x.run(&s, Poison::Nan)?;
    let (_, again) = x.run(&other, Poison::Nan)?;
    let items: Vec<(usize, usize)> =
        (0..s.batch()).filter_map(|b| other.q_ids.iter().position(|id| *id == s.q_ids[b]).map(|c| (b, c))).collect();
    assert!(!items.is_empty(), "the two batches have no sequence in common");
    let pick = |x: &Outputs, which: &[usize]| -> Outputs {
        let take = |v: &[Vec<f32>]| which.iter().map(|i| v[*i].clone()).collect();
        let dbias = match &x.dbias {
            BiasData::Dense(items) => BiasData::Dense(take(items)),
            _ => BiasData::None,
        };
        Outputs { o: take(&x.o), lse: take(&x.lse), dq: take(&x.dq), dk: take(&x.dk), dv: take(&x.dv), dbias }
    };
    let (here, there): (Vec<_>, Vec<_>) = items.into_iter().unzip();
    let difference = compare::bit_difference(
        &s.subset(&here),
        &pick(&all, &here),
        &pick(&again, &there),
        s.deterministic,
        |_, _, _| false,
    );
    Ok(match difference {
        None => Outcome::Passed(format!("{} sequences, {}", here.len(), bits(x, &s))),
        Some(d) => Outcome::Failed(vec![format!("(sequences numbered as in both batches) {d}")]),
    })
}
