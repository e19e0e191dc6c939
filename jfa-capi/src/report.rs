//! Reports for people and programs: which backends there are, what they support, why others were passed over.

use std::fmt::Write;

use jfa_core::registry::{Selection, Skipped};
use jfa_core::{AttentionBackend, Capabilities, Plan, Requirements};
use serde_json::{Value, json};

fn names<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(T::to_string).collect()
}

/// Capabilities as a JSON object.
pub fn capabilities_json(c: &Capabilities) -> Value {
    let ranges = |ranges: &[jfa_core::backend::DimRange]| -> Vec<Value> {
        ranges.iter().map(|r| json!({"min": r.min, "max": r.max, "step": r.step})).collect()
    };
    json!({
        "memory_space": c.memory_space.to_string(),
        "dtypes": names(&c.dtypes),
        "head_dims": ranges(&c.head_dims),
        "head_dims_v": ranges(&c.head_dims_v),
        "unequal_head_dims": c.unequal_head_dims,
        "causal": c.causal,
        "window": c.window,
        "biases": names(&c.biases),
        "gqa": c.gqa,
        "kv_index": c.kv_index,
        "broadcast_query": c.broadcast_query,
        "backward": c.backward,
        "deterministic": c.deterministic,
        "zero_unused_rows": c.zero_unused_rows,
        "base_alignment": c.base_alignment,
        "stride_alignment": c.stride_alignment,
    })
}

/// Capabilities in one line.
pub fn capabilities_text(c: &Capabilities) -> String {
    let ranges = |ranges: &[jfa_core::backend::DimRange]| {
        let parts: Vec<_> = ranges.iter().map(|r| format!("{}..={}/{}", r.min, r.max, r.step)).collect();
        parts.join(" ")
    };
    let mut text = format!(
        "{}; {}; head_dim {}; head_dim_v {}",
        c.memory_space,
        names(&c.dtypes).join(" "),
        ranges(&c.head_dims),
        ranges(&c.head_dims_v)
    );
    for (has, name) in [
        (c.unequal_head_dims, "unequal head_dims"),
        (c.causal, "causal"),
        (c.window, "window"),
        (c.gqa, "gqa"),
        (c.kv_index, "kv_index"),
        (c.broadcast_query, "broadcast query"),
        (c.backward, "backward"),
        (c.deterministic, "deterministic"),
        (c.zero_unused_rows, "zero_unused_rows"),
    ] {
        // Writing to a String cannot fail.
        let _ = write!(text, "; {}{name}", if has { "" } else { "no " });
    }
    let biases = if c.biases.is_empty() { "none".to_owned() } else { c.biases.join(" ") };
    let _ = write!(text, "; biases {biases}; alignment {}/{} bytes", c.base_alignment, c.stride_alignment);
    text
}

fn skipped_json(skipped: &[Skipped]) -> Vec<Value> {
    skipped.iter().map(|s| json!({"name": s.name, "reason": s.reason})).collect()
}

fn backend_json(b: &dyn AttentionBackend) -> Value {
    json!({
        "name": b.name(),
        "description": b.description(),
        "capabilities": capabilities_json(b.capabilities()),
    })
}

/// A selection as a JSON object.
pub fn selection_json(s: &Selection) -> Value {
    json!({
        "library_version": crate::VERSION,
        "api_version": crate::abi::JFA_API_VERSION,
        "backend_version": crate::abi_backend::JFA_BACKEND_VERSION,
        "chosen_by": s.chosen_by,
        "candidates": s.candidates.iter().map(|b| backend_json(b.as_ref())).collect::<Vec<_>>(),
        "skipped": skipped_json(&s.skipped),
    })
}

/// A selection in lines.
pub fn selection_text(s: &Selection) -> String {
    let mut text = format!("jfa {}, chosen by {}\n", crate::VERSION, s.chosen_by);
    for b in &s.candidates {
        let _ = writeln!(text, "{}: {}\n  {}", b.name(), b.description(), capabilities_text(b.capabilities()));
    }
    skipped_text(&mut text, &s.skipped);
    text
}

fn skipped_text(text: &mut String, skipped: &[Skipped]) {
    for s in skipped {
        let _ = writeln!(text, "skipped {}: {}", s.name, s.reason);
    }
}

/// What stood before a plan's backend and was not taken, each with its reason.
pub fn passed_over(selection: &Selection, plan: &Plan) -> Vec<Skipped> {
    let mut out = selection.skipped.clone();
    for b in &selection.candidates {
        if std::ptr::addr_eq(std::sync::Arc::as_ptr(b), std::sync::Arc::as_ptr(plan.backend())) {
            break;
        }
        let lacks = b.capabilities().lacks(plan.problem());
        out.push(Skipped { name: b.name().to_owned(), reason: format!("lacks {}", lacks.join(", ")) });
    }
    out
}

/// A plan as a JSON object.
pub fn plan_json(plan: &Plan, skipped: &[Skipped]) -> Value {
    let r = plan.requirements();
    json!({
        "library_version": crate::VERSION,
        "backend": backend_json(plan.backend().as_ref()),
        "problem": plan.problem().to_string(),
        "description": plan.describe(),
        "requirements": {
            "schedule_bytes": r.schedule_bytes,
            "forward_bytes": r.forward_bytes,
            "backward_bytes": r.backward_bytes,
            "buffer_alignment": Requirements::ALIGNMENT,
        },
        "skipped": skipped_json(skipped),
    })
}

/// A plan in lines.
pub fn plan_text(plan: &Plan, skipped: &[Skipped]) -> String {
    let r = plan.requirements();
    let mut text = format!(
        "{}: {}\n  {}\n  {}\n  schedule {} bytes, forward {} bytes, backward {} bytes\n",
        plan.backend().name(),
        plan.backend().description(),
        plan.problem(),
        plan.describe(),
        r.schedule_bytes,
        r.forward_bytes,
        r.backward_bytes
    );
    skipped_text(&mut text, skipped);
    text
}
