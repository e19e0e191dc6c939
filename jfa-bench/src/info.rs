//! `jfa-bench info`: what there is, and why each backend was skipped.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use jfa_core::backend::DimRange;
use jfa_core::registry::{Environment, Origin, Request};
use jfa_core::{Capabilities, MemorySpace};
use serde_json::{Value, json};

use crate::execution::memory_of;

/// Arguments of `info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Also load these plugins, by path.
    #[arg(long, value_name = "PATH")]
    plugin: Vec<PathBuf>,
}

/// Runs the command.
pub fn info(args: &InfoArgs) -> Result<()> {
    let environment = Environment::from_process();
    let registry = crate::backends::registry();
    let mut backends: Vec<Value> = registry
        .survey(&environment)
        .into_iter()
        .map(|s| {
            let origin = match s.origin {
                Origin::Registered => "built in".to_owned(),
                Origin::Plugin => "plugin in JFA_BACKEND_PATH".to_owned(),
            };
            entry(&s.name, &origin, &s.backend, s.passed_over)
        })
        .collect();
    for path in &args.plugin {
        let name = path.display().to_string();
        let request = Request { backend: Some(name.clone()), memory_space: None };
        let backend = registry.select(&request, &environment).map(|s| s.candidates[0].clone());
        backends.push(entry(&name, "plugin by path", &backend, None));
    }
    let selection = registry.select(&Request::default(), &environment);
    let chosen = match &selection {
        Ok(s) => json!({"backend": s.candidates[0].name(), "by": s.chosen_by}),
        Err(e) => json!({"error": e.to_string()}),
    };
    let skipped: Vec<Value> =
        selection.iter().flat_map(|s| &s.skipped).map(|s| json!({"name": s.name, "reason": s.reason})).collect();
    let variables: serde_json::Map<String, Value> = Environment::VARIABLES
        .iter()
        .map(|name| ((*name).to_owned(), environment.get(name).map_or(Value::Null, Value::from)))
        .collect();
    let document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "chosen": chosen,
        "skipped": skipped,
        "backends": backends,
        "environment": variables,
    });
    if args.json {
        println!("{}", serde_json::to_string_pretty(&document)?);
    } else {
        print(&document);
    }
    Ok(())
}

fn entry(
    name: &str,
    origin: &str,
    backend: &jfa_core::Result<std::sync::Arc<dyn jfa_core::AttentionBackend>>,
    passed_over: Option<String>,
) -> Value {
    match backend {
        Ok(b) => json!({
            "name": name,
            "origin": origin,
            "available": true,
            "passed_over_by_auto": passed_over,
            "description": b.description(),
            "device": memory_of(b).map_or_else(|e| e.to_string(), |m| m.describe()),
            "capabilities": capabilities(b.capabilities()),
        }),
        Err(e) => json!({"name": name, "origin": origin, "available": false, "reason": e.to_string()}),
    }
}

fn ranges(ranges: &[DimRange]) -> String {
    let one = |r: &DimRange| match (r.min == r.max, r.step) {
        (true, _) => r.min.to_string(),
        (false, 1) => format!("{} to {}", r.min, r.max),
        (false, step) => format!("{} to {} by {step}", r.min, r.max),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn capabilities(c: &Capabilities) -> Value {
    json!({
        "memory_space": match c.memory_space {
            MemorySpace::Host => "host",
            MemorySpace::CudaDevice => "CUDA device",
        },
        "dtypes": c.dtypes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "head_dim": ranges(&c.head_dims),
        "head_dim_v": ranges(&c.head_dims_v),
        "unequal_head_dims": c.unequal_head_dims,
        "causal": c.causal,
        "window": c.window,
        "biases": c.biases,
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

/// The document as text.
fn print(document: &Value) {
    let text = |v: &Value| match v {
        Value::String(s) => s.clone(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(|i| i.as_str().unwrap_or_default()).collect::<Vec<_>>().join(", "),
        Value::Bool(b) => if *b { "yes" } else { "no" }.to_owned(),
        other => other.to_string(),
    };
    println!("jfa {}", text(&document["version"]));
    let chosen = &document["chosen"];
    match chosen.get("error") {
        Some(e) => println!("chosen: none: {}", text(e)),
        None => println!("chosen: {} (by {})", text(&chosen["backend"]), text(&chosen["by"])),
    }
    for s in document["skipped"].as_array().into_iter().flatten() {
        println!("skipped: {}: {}", text(&s["name"]), text(&s["reason"]));
    }
    for b in document["backends"].as_array().into_iter().flatten() {
        println!("\n{} ({})", text(&b["name"]), text(&b["origin"]));
        if b["available"] == false {
            println!("  not available: {}", text(&b["reason"]));
            continue;
        }
        if let Some(reason) = b["passed_over_by_auto"].as_str() {
            println!("  passed over by auto: {reason}");
        }
        println!("  {}", text(&b["description"]));
        println!("  {}", text(&b["device"]));
        for (key, value) in b["capabilities"].as_object().into_iter().flatten() {
            println!("  {:18} {}", key, text(value));
        }
    }
    println!("\nenvironment");
    for (name, value) in document["environment"].as_object().into_iter().flatten() {
        println!("  {name:20} {}", value.as_str().unwrap_or("(unset)"));
    }
}
