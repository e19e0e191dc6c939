//! `jfa-bench run`: forward and backward over workloads.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use jfa_core::{AttentionBackend, DeviceMemory};
use serde_json::json;

use crate::bench::{Bench, Pass, Pool};
use crate::execution::memory_of;
use crate::statistics::median;
use crate::table::{Table, count, rate};
use crate::workload::{Shape, Workloads, parse_dtype, parse_lengths, parse_mask};

/// Which passes to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Passes {
    /// Forward and backward.
    Both,
    /// Forward only.
    Forward,
    /// Backward only (a forward runs once before it).
    Backward,
}

impl Passes {
    /// As a list.
    pub fn list(self) -> Vec<Pass> {
        match self {
            Passes::Both => vec![Pass::Forward, Pass::Backward],
            Passes::Forward => vec![Pass::Forward],
            Passes::Backward => vec![Pass::Backward],
        }
    }
}

/// Which workloads, at which size; shared by `run` and `ab`.
#[derive(Args, Debug)]
pub struct WorkloadArgs {
    /// Shapes or sets of workloads/shapes.toml (`all`: every one); see --list.
    #[arg(value_name = "SHAPE")]
    pub shapes: Vec<String>,
    /// A file of sequence lengths, one a line, for self attention (instead of or besides SHAPE).
    #[arg(long, value_name = "FILE")]
    pub lengths: Vec<PathBuf>,
    /// A folder with shapes.toml and lengths/ to use instead of the built-in workloads.
    #[arg(long, value_name = "DIR")]
    pub workloads: Option<PathBuf>,
    /// Keep only the first N sequences of each shape.
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// Cut every sequence at N rows.
    #[arg(long, value_name = "N")]
    pub max_len: Option<i64>,
    /// Query heads, instead of the shape's.
    #[arg(long)]
    pub heads: Option<i64>,
    /// Key/value heads, instead of the shape's.
    #[arg(long)]
    pub heads_kv: Option<i64>,
    /// Head dimension, instead of the shape's.
    #[arg(long)]
    pub head_dim: Option<i64>,
    /// Mask, instead of the shape's: full, causal, causal-top-left, window:LEFT,RIGHT[,top-left].
    #[arg(long)]
    pub mask: Option<String>,
    /// Element type.
    #[arg(long, default_value = "bf16", value_name = "TYPE")]
    pub dtype: String,
    /// Which passes.
    #[arg(long, value_enum, default_value = "both")]
    pub pass: Passes,
    /// Ask for a bitwise reproducible backward.
    #[arg(long)]
    pub deterministic: bool,
    /// Seed of the tensors' values.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Compare with the oracle only sequences of at most this many visible pairs (the oracle is slow).
    #[arg(long, default_value_t = 1_200_000.0, value_name = "PAIRS")]
    pub check_pairs: f64,
    /// List the shapes and stop.
    #[arg(long)]
    pub list: bool,
}

impl WorkloadArgs {
    /// The shapes, at the size asked for. The name of a shape that was changed says so.
    pub fn shapes(&self) -> Result<Vec<Shape>> {
        let workloads = Workloads::load(self.workloads.as_deref())?;
        let mut shapes = workloads.select(&self.shapes)?;
        for path in &self.lengths {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            let lens = parse_lengths(&text).with_context(|| path.display().to_string())?;
            let name = path.file_stem().map_or_else(|| "lengths".to_owned(), |n| n.to_string_lossy().into_owned());
            shapes.push(Shape {
                set: name.clone(),
                name,
                q_lens: lens.clone(),
                kv_lens: lens,
                kv_index: None,
                broadcast_q: false,
                heads_q: 4,
                heads_kv: 4,
                head_dim: 128,
                mask: jfa_core::Mask::Full,
            });
        }
        if shapes.is_empty() {
            bail!("name a shape or set (jfa-bench run --list all), or give --lengths FILE");
        }
        for s in &mut shapes {
            let mut changes = Vec::new();
            if let Some(n) = self.batch.filter(|n| *n < s.q_lens.len()) {
                s.truncate_batch(n);
                changes.push(format!("batch {n}"));
            }
            if let Some(n) = self.max_len.filter(|n| s.q_lens.iter().chain(&s.kv_lens).any(|len| len > n)) {
                s.clamp_lengths(n);
                changes.push(format!("max {n}"));
            }
            if let Some(h) = self.heads {
                // One key/value head per query head, unless asked otherwise below.
                (s.heads_q, s.heads_kv) = (h, h);
                changes.push(format!("heads {h}"));
            }
            if let Some(h) = self.heads_kv {
                s.heads_kv = h;
                changes.push(format!("heads_kv {h}"));
            }
            if let Some(d) = self.head_dim {
                s.head_dim = d;
                changes.push(format!("head_dim {d}"));
            }
            if let Some(word) = &self.mask {
                s.mask = parse_mask(word)?;
                changes.push(word.clone());
            }
            if !changes.is_empty() {
                s.name = format!("{} ({})", s.name, changes.join(", "));
            }
        }
        Ok(shapes)
    }

    /// Prints what there is.
    pub fn print_list(&self) -> Result<()> {
        let workloads = Workloads::load(self.workloads.as_deref())?;
        let mut table =
            Table::new(&["shape", "sequences", "q tokens", "kv tokens", "heads", "dim", "mask", "GFLOP forward"]);
        for s in workloads.all()? {
            table.row(vec![
                s.name.clone(),
                count(s.q_lens.len() as i64),
                count(s.q_tokens()),
                count(s.kv_tokens()),
                if s.heads_q == s.heads_kv {
                    s.heads_q.to_string()
                } else {
                    format!("{} on {}", s.heads_q, s.heads_kv)
                },
                s.head_dim.to_string(),
                s.mask.to_string(),
                format!("{:.1}", s.forward_flops() / 1e9),
            ]);
        }
        print!("{}", table.render());
        Ok(())
    }
}

/// Arguments of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Backend: a name, a variant (`cpu:4`) or the path of a plugin; by default what JFA_BACKEND or `auto` chooses.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Time each pass for about this long (at least 3 calls).
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Do not compare with the oracle.
    #[arg(long)]
    no_check: bool,
    /// Write the results as JSON (`-`: standard output).
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

/// Runs the command; `Ok(true)` when every check passed.
pub fn run(args: &RunArgs) -> Result<bool> {
    if args.workload.list {
        args.workload.print_list()?;
        return Ok(true);
    }
    let shapes = args.workload.shapes()?;
    let backend = crate::backends::select(args.backend.as_deref())?;
    let memory = memory_of(&backend)?;
    let pool = Pool::new(parse_dtype(&args.workload.dtype)?, args.workload.seed, &shapes);
    let to_stdout = args.json.as_deref().is_some_and(|p| p.as_os_str() == "-");
    if !to_stdout {
        println!("backend '{}': {}", backend.name(), backend.description());
        println!("memory: {}", memory.describe());
        println!("tensors: {}, standard normal, seed {}\n", args.workload.dtype, args.workload.seed);
    }
    let mut table = Table::new(&[
        "shape",
        "pass",
        "sequences",
        "tokens",
        "padding avoided",
        "ms",
        "useful rate",
        "error",
        "checked",
    ]);
    let mut results = Vec::new();
    let mut good = true;
    let steps = shapes.len() * (1 + args.workload.pass.list().len());
    let progress = crate::progress::bar(steps as u64);
    for shape in &shapes {
        progress.set_message(format!("{}: checking against the oracle", shape.name));
        let outcome = one(args, shape, &backend, &memory, &pool, &progress);
        match outcome {
            Ok(rows) => {
                for row in rows {
                    good &= row.wrong.is_empty();
                    table.row(row.cells(shape));
                    results.push(row.json(shape, &args.workload));
                    if !row.wrong.is_empty() {
                        progress.suspend(|| row.wrong.iter().for_each(|w| eprintln!("wrong: {}: {w}", shape.name)));
                    }
                }
            }
            // A shape the backend cannot do is reported and does not end the run.
            Err(e) => {
                let unsupported = matches!(e.downcast_ref(), Some(jfa_core::Error::Unsupported { .. }));
                good &= unsupported;
                progress.suspend(|| eprintln!("{}: {e:#}", shape.name));
                results.push(json!({"shape": shape.name, "error": format!("{e:#}"), "unsupported": unsupported}));
            }
        }
    }
    progress.finish_and_clear();
    if !to_stdout {
        print!("{}", table.render());
        if !good {
            println!("\nSome results are wrong; see above.");
        }
    }
    if let Some(path) = &args.json {
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "backend": backend.name(),
            "description": backend.description(),
            "memory": memory.describe(),
            "results": results,
        });
        crate::progress::write_json(path, &document)?;
    }
    Ok(good)
}

/// One pass of one shape.
struct Row {
    pass: Pass,
    milliseconds: Vec<f64>,
    flops: f64,
    error: Option<f64>,
    errors: serde_json::Value,
    checked: String,
    wrong: Vec<String>,
    plan: String,
}

impl Row {
    fn cells(&self, shape: &Shape) -> Vec<String> {
        let ms = median(&self.milliseconds);
        let (q, kv) = (shape.q_tokens(), shape.kv_tokens());
        vec![
            shape.name.clone(),
            self.pass.name().to_owned(),
            count(shape.q_lens.len() as i64),
            if shape.q_lens == shape.kv_lens { count(q) } else { format!("{} q, {} kv", count(q), count(kv)) },
            format!("{:.1} %", 100.0 * shape.padding_avoided()),
            if ms < 10.0 { format!("{ms:.3}") } else { format!("{ms:.1}") },
            rate(self.flops, ms / 1e3),
            match self.error {
                _ if !self.wrong.is_empty() => "WRONG".to_owned(),
                Some(e) => format!("{e:.1e}"),
                None => "not checked".to_owned(),
            },
            self.checked.clone(),
        ]
    }

    fn json(&self, shape: &Shape, args: &WorkloadArgs) -> serde_json::Value {
        let ms = median(&self.milliseconds);
        json!({
            "shape": shape.name,
            "set": shape.set,
            "pass": self.pass.name(),
            "dtype": args.dtype,
            "sequences": shape.q_lens.len(),
            "q_tokens": shape.q_tokens(),
            "kv_tokens": shape.kv_tokens(),
            "heads_q": shape.heads_q,
            "heads_kv": shape.heads_kv,
            "head_dim": shape.head_dim,
            "mask": shape.mask.to_string(),
            "deterministic": args.deterministic,
            "padding_avoided": shape.padding_avoided(),
            "ms": ms,
            "ms_each": self.milliseconds,
            "useful_flops": self.flops,
            "useful_tflops_per_s": self.flops / (ms / 1e3) / 1e12,
            "errors": self.errors,
            "checked": self.checked,
            "wrong": self.wrong,
            "plan": self.plan,
        })
    }
}

fn one(
    args: &RunArgs,
    shape: &Shape,
    backend: &Arc<dyn AttentionBackend>,
    memory: &Arc<dyn DeviceMemory>,
    pool: &Pool,
    progress: &indicatif::ProgressBar,
) -> Result<Vec<Row>> {
    let bench = Bench::new(backend, memory, shape, pool, args.workload.deterministic)?;
    let checked = if args.no_check { None } else { Some(bench.check(pool, args.workload.check_pairs)?) };
    progress.inc(1);
    let mut rows = Vec::new();
    for pass in args.workload.pass.list() {
        progress.set_message(format!("{}: {}", shape.name, pass.name()));
        if !bench.has(pass) {
            progress.suspend(|| eprintln!("{}: backend '{}' has no backward", shape.name, backend.name()));
            continue;
        }
        let milliseconds = time(&bench, pass, args.seconds)?;
        let errors = checked.as_ref().map(|c| c.verdict.errors);
        rows.push(Row {
            pass,
            milliseconds,
            flops: bench.flops(pass),
            error: errors.and_then(|e| match pass {
                Pass::Forward => e.o,
                Pass::Backward => e.gradient(),
            }),
            errors: json!(errors),
            checked: checked
                .as_ref()
                .map_or_else(|| "no".to_owned(), |c| format!("{} up to {}x{}", c.sequences, c.longest.0, c.longest.1)),
            wrong: checked.as_ref().map_or_else(Vec::new, |c| c.verdict.wrong.clone()),
            plan: bench.plan().describe(),
        });
        progress.inc(1);
    }
    Ok(rows)
}

/// Milliseconds of each call: one to warm up, then for about `seconds`, at least 3.
fn time(bench: &Bench, pass: Pass, seconds: f64) -> Result<Vec<f64>> {
    if pass == Pass::Backward {
        bench.queue(Pass::Forward)?;
    }
    // What lies between calls (emptying the caches) takes time too.
    let start = std::time::Instant::now();
    bench.time(pass, 1)?;
    let calls = ((seconds / start.elapsed().as_secs_f64().max(1e-6)) as usize).clamp(3, 1000);
    Ok(bench.time(pass, calls)?.iter().map(|s| s * 1e3).collect())
}
