//! `jfa-bench ab`: two backends on the same inputs, in alternation.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use jfa_core::{AttentionBackend, DeviceMemory};
use serde::Serialize;
use serde_json::json;

use crate::bench::{Bench, Checked, Pass, Pool};
use crate::compare::Errors;
use crate::execution::memory_of;
use crate::picture::{self, Mark};
use crate::run::WorkloadArgs;
use crate::statistics::{Estimate, geometric_mean_of_medians, median, median_estimate};
use crate::table::Table;
use crate::workload::{Shape, parse_dtype};

/// Arguments of `ab`.
#[derive(Args, Debug)]
pub struct AbArgs {
    /// The baseline: a name, a variant (`cpu:1`) or the path of a plugin.
    #[arg(long, value_name = "NAME")]
    a: String,
    /// What is compared with it.
    #[arg(long, value_name = "NAME")]
    b: String,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Pairs of measurements per shape and pass.
    #[arg(long, default_value = "15")]
    pairs: NonZeroUsize,
    /// Stop a shape's pass after about this long, but not before 5 pairs.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Write the results as JSON (`-`: standard output).
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Draw the ratios to PATH.svg and PATH.png.
    #[arg(long, value_name = "PATH")]
    plot: Option<PathBuf>,
}

/// One pass of one shape.
#[derive(Serialize)]
struct Comparison {
    shape: String,
    pass: &'static str,
    /// Time of A over time of B, of each pair.
    ratios: Vec<f64>,
    /// Their median.
    speed: Estimate,
    a_ms: Vec<f64>,
    b_ms: Vec<f64>,
    a_median_ms: f64,
    b_median_ms: f64,
    a_errors: Errors,
    b_errors: Errors,
    wrong: Vec<String>,
}

struct Side {
    backend: Arc<dyn AttentionBackend>,
    memory: Arc<dyn DeviceMemory>,
}

impl Side {
    fn new(name: &str) -> Result<Self> {
        let backend = crate::backends::select(Some(name))?;
        Ok(Side { memory: memory_of(&backend)?, backend })
    }
}

/// Runs the command; `Ok(true)` when the results of both are right on every shape.
pub fn ab(args: &AbArgs) -> Result<bool> {
    if args.workload.list {
        args.workload.print_list()?;
        return Ok(true);
    }
    let shapes = args.workload.shapes()?;
    let (a, b) = (Side::new(&args.a)?, Side::new(&args.b)?);
    let pool = Pool::new(parse_dtype(&args.workload.dtype)?, args.workload.seed, &shapes);
    let to_stdout = args.json.as_deref().is_some_and(|p| p.as_os_str() == "-");
    if !to_stdout {
        for (label, given, side) in [("A", &args.a, &a), ("B", &args.b, &b)] {
            println!("{label}: {given}: {} ({})", side.backend.description(), side.memory.describe());
        }
        println!();
    }
    let passes = args.workload.pass.list();
    let progress = crate::progress::bar((shapes.len() * passes.len()) as u64);
    let mut comparisons = Vec::new();
    let mut skipped = Vec::new();
    for shape in &shapes {
        progress.set_message(format!("{}: checking both against the oracle", shape.name));
        match both(args, shape, &a, &b, &pool, &progress) {
            Ok(list) => comparisons.extend(list),
            Err(e) if matches!(e.downcast_ref(), Some(jfa_core::Error::Unsupported { .. })) => {
                progress.suspend(|| eprintln!("{}: skipped: {e:#}", shape.name));
                skipped.push(json!({"shape": shape.name, "reason": format!("{e:#}")}));
            }
            Err(e) => return Err(e.context(shape.name.clone())),
        }
    }
    progress.finish_and_clear();
    if comparisons.is_empty() {
        bail!("no shape is supported by both backends");
    }

    let means: Vec<(Pass, Estimate)> = passes
        .iter()
        .filter_map(|pass| {
            let groups: Vec<_> =
                comparisons.iter().filter(|c| c.pass == pass.name()).map(|c| c.ratios.clone()).collect();
            (!groups.is_empty()).then(|| (*pass, geometric_mean_of_medians(&groups)))
        })
        .collect();
    let good = comparisons.iter().all(|c| c.wrong.is_empty());
    if !to_stdout {
        print(&comparisons, &means);
    }
    if let Some(path) = &args.json {
        let mean = |e: &Estimate| json!({"speed": e.value, "low": e.low, "high": e.high});
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "a": {"name": args.a, "description": a.backend.description(), "memory": a.memory.describe()},
            "b": {"name": args.b, "description": b.backend.description(), "memory": b.memory.describe()},
            "dtype": args.workload.dtype,
            "seed": args.workload.seed,
            "comparisons": comparisons,
            "geometric_mean": means.iter().map(|(p, e)| (p.name().to_owned(), mean(e))).collect::<serde_json::Map<_, _>>(),
            "skipped": skipped,
        });
        crate::progress::write_json(path, &document)?;
    }
    if let Some(path) = &args.plot {
        draw(args, &a, &b, &comparisons, &means, path).with_context(|| format!("drawing {}", path.display()))?;
    }
    Ok(good)
}

fn both(
    args: &AbArgs,
    shape: &Shape,
    a: &Side,
    b: &Side,
    pool: &Pool,
    progress: &indicatif::ProgressBar,
) -> Result<Vec<Comparison>> {
    let bench = |side: &Side| Bench::new(&side.backend, &side.memory, shape, pool, args.workload.deterministic);
    let (bench_a, bench_b) = (bench(a)?, bench(b)?);
    let check = |bench: &Bench| bench.check(pool, args.workload.check_pairs);
    let (checked_a, checked_b): (Checked, Checked) = (check(&bench_a)?, check(&bench_b)?);
    let mut wrong: Vec<String> = Vec::new();
    for (label, checked) in [("A", &checked_a), ("B", &checked_b)] {
        for text in &checked.verdict.wrong {
            progress.suspend(|| eprintln!("wrong: {}, {label}: {text}", shape.name));
            wrong.push(format!("{label}: {text}"));
        }
    }
    let mut out = Vec::new();
    for pass in args.workload.pass.list() {
        if !bench_a.has(pass) || !bench_b.has(pass) {
            progress.suspend(|| eprintln!("{}: not both have a {}", shape.name, pass.name()));
            continue;
        }
        progress.set_message(format!("{}: {}", shape.name, pass.name()));
        // Warm up, and find how many calls make a measurement long enough for the clock.
        let calls = |bench: &Bench| -> Result<usize> {
            let once = bench.time(pass, 1)?[0];
            Ok((2e-3 / once.max(1e-7)).ceil().clamp(1.0, 20.0) as usize)
        };
        let (calls_a, calls_b) = (calls(&bench_a)?, calls(&bench_b)?);
        let measure = |bench: &Bench, calls: usize| -> Result<f64> { Ok(median(&bench.time(pass, calls)?)) };
        let start = std::time::Instant::now();
        let (mut a_ms, mut b_ms) = (Vec::new(), Vec::new());
        for pair in 0..args.pairs.get() {
            if pair >= 5 && start.elapsed().as_secs_f64() > args.seconds {
                break;
            }
            // ABBA: whatever drifts slowly (clocks, temperature) falls on both alike.
            let (mut ta, mut tb) = (0.0, 0.0);
            if pair % 2 == 0 {
                ta = measure(&bench_a, calls_a)?;
            }
            tb += measure(&bench_b, calls_b)?;
            if pair % 2 == 1 {
                ta = measure(&bench_a, calls_a)?;
            }
            a_ms.push(ta * 1e3);
            b_ms.push(tb * 1e3);
        }
        let ratios: Vec<f64> = a_ms.iter().zip(&b_ms).map(|(a, b)| a / b).collect();
        out.push(Comparison {
            shape: shape.name.clone(),
            pass: pass.name(),
            speed: median_estimate(&ratios),
            ratios,
            a_median_ms: median(&a_ms),
            b_median_ms: median(&b_ms),
            a_ms,
            b_ms,
            a_errors: checked_a.verdict.errors,
            b_errors: checked_b.verdict.errors,
            wrong: wrong.clone(),
        });
        progress.inc(1);
    }
    Ok(out)
}

fn print(comparisons: &[Comparison], means: &[(Pass, Estimate)]) {
    let mut table = Table::new(&[
        "shape",
        "pass",
        "A ms",
        "B ms",
        "speed of B (A = 1)",
        "95 % interval",
        "pairs",
        "error A",
        "error B",
    ]);
    let error = |e: &Errors, pass: &str| {
        let value = if pass == Pass::Forward.name() { e.o } else { e.gradient() };
        value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1e}"))
    };
    for c in comparisons {
        table.row(vec![
            c.shape.clone(),
            c.pass.to_owned(),
            format!("{:.3}", c.a_median_ms),
            format!("{:.3}", c.b_median_ms),
            format!("{:.3}", c.speed.value),
            format!("{:.3} .. {:.3}", c.speed.low, c.speed.high),
            c.ratios.len().to_string(),
            error(&c.a_errors, c.pass),
            error(&c.b_errors, c.pass),
        ]);
    }
    for (pass, e) in means {
        let mut cells = vec![String::new(); 9];
        "geometric mean".clone_into(&mut cells[0]);
        pass.name().clone_into(&mut cells[1]);
        cells[4] = format!("{:.3}", e.value);
        cells[5] = format!("{:.3} .. {:.3}", e.low, e.high);
        table.row(cells);
    }
    print!("{}", table.render());
    if comparisons.iter().any(|c| !c.wrong.is_empty()) {
        println!("\nSome results are wrong; see above.");
    }
}

fn draw(
    args: &AbArgs,
    a: &Side,
    b: &Side,
    comparisons: &[Comparison],
    means: &[(Pass, Estimate)],
    path: &std::path::Path,
) -> Result<()> {
    let mut rows: Vec<picture::Row> = Vec::new();
    for c in comparisons {
        let mark = Mark { estimate: c.speed, backward: c.pass == Pass::Backward.name() };
        match rows.last_mut().filter(|r| r.label == c.shape) {
            Some(row) => row.marks.push(mark),
            None => rows.push(picture::Row { label: c.shape.clone(), marks: vec![mark], summary: false }),
        }
    }
    let marks = means.iter().map(|(p, e)| Mark { estimate: *e, backward: *p == Pass::Backward }).collect();
    rows.push(picture::Row { label: "geometric mean".to_owned(), marks, summary: true });
    // A plugin is known by its file's name, not by where it lies.
    let name = |given: &str| -> String {
        let file = std::path::Path::new(given).file_name().map_or(given.into(), |f| f.to_string_lossy());
        let plugin = file.strip_prefix("libjfa_backend_").and_then(|rest| rest.strip_suffix(".so"));
        plugin.unwrap_or(&file).to_owned()
    };
    let (name_a, name_b) = (name(&args.a), name(&args.b));
    picture::draw(
        &picture::Picture {
            title: format!("Speed of {name_b} relative to {name_a}"),
            notes: vec![
                format!("A = {name_a}: {}", a.backend.description()),
                format!("B = {name_b}: {}", b.backend.description()),
                format!("{}; medians of paired time ratios with 95 % bootstrap intervals", args.workload.dtype),
            ],
            rows,
        },
        path,
    )
}
