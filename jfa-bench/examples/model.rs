//! The simulator's throughput model against times measured on an H200.
//!
//! ```text
//! model TIMES.json [--detect] [SHAPE..]   # docs/h200-peers.json: median times of `jfa` and the clock during each
//! ```
//!
//! Runs a few sequences of every workload with one group of heads through the kernels on the simulator, scales the counts to
//! the whole workload by its visible pairs, and sets the least time of the slowest unit beside the measured one. The last
//! line is the simulator's own speed, per second of CPU time, with matrix arithmetic and without; with `--detect` it looks for faults meanwhile, as `check` does.

use anyhow::{Context as _, Result, bail};
use jfa_bench::check::Context;
use jfa_bench::element::Poison;
use jfa_bench::execution::{Execution, memory_of};
use jfa_bench::scenario::Scenario;
use jfa_bench::workload::Workloads;
use jfa_core::DType;
use jfa_sim::{Arch, Config, Counters, model};

const SMS: f64 = 132.0;
/// Pairs of a tile.
const TILE: f64 = 128.0 * 128.0;
/// Visible pairs to simulate of a workload, about.
const PAIRS: f64 = 6.0e6;

struct Row {
    name: String,
    pass: &'static str,
    units: Vec<(&'static str, f64)>,
    /// Least cycles of a multiprocessor for 128 by 128 visible pairs of a head.
    tile: f64,
    measured: f64,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(path) = args.next() else { bail!("usage: model TIMES.json [SHAPE..]") };
    let (options, wanted): (Vec<String>, Vec<String>) = args.partition(|a| a == "--detect");
    let detect = !options.is_empty();
    let times: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).with_context(|| path.clone())?)?;
    let (gpu, backend) = jfa_bench::backends::simulator(
        "cuda:sm_90a",
        Config { sms: 8, detect, time_matrix: true, ..Config::default() },
    )?;
    let context = Context { memory: memory_of(&backend)?, backend, repeats: 1, observer: None };
    let mut rows = Vec::new();
    let (mut instructions, mut products, mut matrix, mut seconds) = (0, 0, 0, 0.0);
    for result in times["results"].as_array().context("results")?.iter().filter(|r| r["peer"] == "jfa") {
        let name = result["shape"].as_str().context("a shape's name")?;
        if !(wanted.is_empty() || wanted.iter().any(|w| w == name)) {
            continue;
        }
        let Some(shape) = Workloads::load(None)?.all()?.into_iter().find(|s| s.name == name) else { continue };
        if shape.broadcast_q {
            continue;
        }
        // Every stride-th sequence, as many as give enough pairs.
        let group = shape.heads_q / shape.heads_kv;
        let batch = shape.q_lens.len();
        let per = shape.pairs() * group as f64 / batch as f64;
        let count = ((PAIRS / per) as usize).clamp(1, batch.min(12));
        let chosen: Vec<usize> = (0..count).map(|i| i * batch / count + batch / count / 2).collect();
        let lens = |all: &[i64]| chosen.iter().map(|b| all[*b]).collect::<Vec<_>>();
        let scenario =
            Scenario::cross(DType::BF16, shape.head_dim, &lens(&shape.q_lens), &lens(&shape.kv_lens)).with(|s| {
                (s.heads_q, s.heads_kv, s.mask) = (group, 1, shape.mask);
                // Capacities with the workload's mean: a backend may choose by them.
                let rows: i64 = s.q_lens.iter().sum();
                let mean = shape.q_lens.iter().sum::<i64>() as f64 / batch as f64;
                s.placement.tail = ((mean * count as f64) as i64 - rows).max(0);
                s.placement.spare_batch = ((rows as f64 / mean) as i64 - count as i64).max(0);
            });
        let part: f64 = chosen.iter().map(|b| shape.pairs_of(*b)).sum::<f64>() * group as f64;
        let scale = shape.pairs() * shape.heads_q as f64 / part;
        let execution = Execution::new(&context.backend, &context.memory, &scenario, &scenario.inputs(), Poison::Nan)?;
        execution.build_schedule()?;
        gpu.launches();
        for (pass, key) in [("forward", "fwd"), ("backward", "bwd")] {
            eprintln!("{name} {pass}");
            let start = cpu_seconds()?;
            if key == "fwd" {
                execution.forward()?;
            } else {
                execution.backward()?;
            }
            seconds += cpu_seconds()? - start;
            let mut counters = Counters::default();
            gpu.launches().iter().for_each(|l| counters.add(&l.counters));
            instructions += counters.thread_instructions;
            products += counters.mma_16;
            matrix += counters.matrix_nanos;
            let clock = result[key]["mhz"].as_f64().context("a clock")? * 1e3;
            let units = model::bound(Arch::Sm90, &counters).units;
            let tile = units[0].1 / (part / TILE);
            let units = units.into_iter().map(|(unit, cycles)| (unit, cycles * scale / SMS / clock)).collect();
            let measured = result[key]["ms"].as_f64().context("a time")?;
            rows.push(Row { name: name.to_owned(), pass, units, tile, measured });
        }
    }
    println!(
        "| workload | pass | least time, ms | by | next | least cycles a tile | measured, ms | measured / least |\n\
         |---|---|---:|---|---|---:|---:|---:|"
    );
    for r in &rows {
        let ((unit, least), (second, other)) = (r.units[0], r.units[1]);
        println!(
            "| {} | {} | {least:.3} | {unit} | {second} {:.0} % | {:.0} | {:.3} | {:.2} |",
            r.name,
            r.pass,
            100.0 * other / least,
            r.tile,
            r.measured,
            r.measured / least
        );
    }
    println!();
    for pass in ["forward", "backward"] {
        let ratios: Vec<f64> = rows.iter().filter(|r| r.pass == pass).map(|r| r.measured / r.units[0].1).collect();
        let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp();
        let (low, high) = ratios.iter().fold((f64::MAX, 0.0_f64), |(l, h), r| (l.min(*r), h.max(*r)));
        println!(
            "{pass}: {} workloads, measured / least {mean:.2} in geometric mean, {low:.2} to {high:.2}",
            ratios.len()
        );
    }
    let (instructions, matrix) = (instructions as f64 / 1e6, matrix as f64 / 1e9);
    println!(
        "simulator: {instructions:.0} million thread-instructions and {:.0} million multiply-adds of the tensor core in \
         {seconds:.1} s of CPU time, {matrix:.1} s of it matrix arithmetic: {:.1} million thread-instructions a second and core \
         with it, {:.1} without",
        products as f64 / 1e6,
        instructions / seconds,
        instructions / (seconds - matrix)
    );
    Ok(())
}

/// CPU time of this process, all threads.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().context("fields")?.split_whitespace().collect();
    // User and system time, in hundredths of a second.
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
}
