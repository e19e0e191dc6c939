//! Whole kernels on hardware and on the simulator, bit by bit.
//!
//! ```text
//! kernels device FILE [BACKEND]    # on a machine with the GPU: runs every case through the backend (`cuda`), writes FILE
//! kernels compare FILE [FILTER]    # anywhere (feature `sim`): runs the same cases through `sim:cuda:sm_90a`, prints a table
//! ```
//!
//! Both run the same launchers and the kernels of the same bundle; the simulator takes as many multiprocessors as an H200
//! has, so that both passes divide their work alike.

use std::collections::BTreeMap;
use std::io::Write as _;

#[cfg(feature = "sim")]
use anyhow::ensure;
use anyhow::{Context as _, Result, bail};
use jfa_bench::check::Context;
use jfa_bench::element::Poison;
use jfa_bench::execution::{Execution, memory_of};
use jfa_bench::scenario::{Data, Placement, Scenario};
use jfa_core::{Alignment, DType, Mask};

/// Results of a case: name of the tensor and its values as bits.
type Results = BTreeMap<String, Vec<u32>>;

fn cases() -> Vec<(String, Scenario)> {
    let ugly = [0, 1, 7, 64, 65, 129];
    let window = Mask::Window { left: Some(40), right: Some(24), alignment: Alignment::BottomRight };
    let mut all = Vec::new();
    for (dtype, dims) in [(DType::BF16, [64, 128].as_slice()), (DType::F16, &[128])] {
        for &dim in dims {
            let mut add = |name: &str, s: Scenario| {
                all.push((format!("{dtype} {dim} {name}"), s.with(|s| s.deterministic = true)));
            };
            let base = Scenario::new(dtype, dim, &ugly);
            add("full", base.clone());
            add("causal", base.clone().with(|s| s.mask = Mask::Causal(Alignment::TopLeft)));
            add("window", base.clone().with(|s| s.mask = window));
            add(
                "cross, causal from the end",
                Scenario::cross(dtype, dim, &[130, 5, 1], &[257, 12, 90])
                    .with(|s| s.mask = Mask::Causal(Alignment::BottomRight)),
            );
            add(
                "four query heads a key head",
                Scenario::new(dtype, dim, &[1, 65, 100]).with(|s| (s.heads_q, s.heads_kv) = (8, 2)),
            );
            add("loose placement", base.clone().with(|s| s.placement = Placement::LOOSE));
            add("scores near -100", base.clone().with(|s| s.data = Data::Shifted(-100.0)));
            add("one huge score", base.clone().with(|s| s.data = Data::OneHuge(1e4)));
            add("long", Scenario::new(dtype, dim, &[400, 30]));
        }
        for dim in [32, 96, 256] {
            all.push((format!("{dtype} {dim} full"), Scenario::new(dtype, dim, &ugly)));
        }
    }
    all
}

/// Whether a tensor has the element type of the case: a file keeps 16 bits of its values.
fn is_narrow(tensor: &str) -> bool {
    matches!(tensor, "o" | "dq" | "dk" | "dv")
}

fn bits(sequences: &[Vec<f32>]) -> Vec<u32> {
    sequences.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Runs a case. The schedule comes as the words of its buffer.
fn run(context: &Context, scenario: &Scenario) -> Result<Results> {
    let inputs = scenario.inputs();
    let execution = Execution::new(&context.backend, &context.memory, scenario, &inputs, Poison::Nan)?;
    execution.build_schedule()?;
    let schedule = execution.schedule();
    let mut bytes = vec![0; schedule.bytes];
    // SAFETY: the schedule lives as long as the execution and has that many bytes.
    unsafe { context.memory.download(&mut bytes, schedule.data)? };
    execution.forward()?;
    let backward = match execution.backward() {
        Ok(()) => true,
        Err(jfa_core::Error::Unsupported { .. }) => false,
        Err(e) => return Err(e.into()),
    };
    let out = execution.outputs()?;
    let mut results = Results::new();
    let given: Vec<Vec<f32>> = [inputs.q, inputs.k, inputs.v, inputs.d_o].concat();
    results.insert("inputs".into(), bits(&given));
    let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes")));
    results.insert("schedule".into(), words.collect());
    results.insert("o".into(), bits(&out.o));
    results.insert("lse".into(), bits(&out.lse));
    if backward {
        results.insert("dq".into(), bits(&out.dq));
        results.insert("dk".into(), bits(&out.dk));
        results.insert("dv".into(), bits(&out.dv));
    }
    Ok(results)
}

fn device(path: &str, backend: &str) -> Result<()> {
    let backend = jfa_bench::backends::select(Some(backend))?;
    let memory = memory_of(&backend)?;
    println!("{}", memory.describe());
    let context = Context { backend, memory, repeats: 1, observer: None };
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    for (name, scenario) in cases() {
        let mut results = run(&context, &scenario).with_context(|| name.clone())?;
        // The inputs are drawn from a seed on both sides; a digest shows that they are the same.
        results.insert("inputs".into(), vec![digest(&results["inputs"])]);
        for (tensor, values) in results {
            writeln!(file, "{name}/{tensor}/{}", values.len())?;
            let half = name.starts_with("f16");
            for v in values {
                match (is_narrow(&tensor), half) {
                    (true, true) => file.write_all(&half::f16::from_f32(f32::from_bits(v)).to_le_bytes())?,
                    (true, false) => file.write_all(&v.to_le_bytes()[2..])?,
                    (false, _) => file.write_all(&v.to_le_bytes())?,
                }
            }
        }
    }
    println!("{} cases", cases().len());
    Ok(())
}

fn digest(words: &[u32]) -> u32 {
    words.iter().fold(0x811c_9dc5, |h, w| (h ^ w).wrapping_mul(0x0100_0193))
}

/// What `device` wrote: results by case.
#[cfg_attr(not(feature = "sim"), expect(dead_code, reason = "comparing needs the simulator"))]
fn read(path: &str) -> Result<BTreeMap<String, Results>> {
    let data = std::fs::read(path).with_context(|| path.to_owned())?;
    let (mut all, mut at) = (BTreeMap::<String, Results>::new(), 0);
    while at < data.len() {
        let end = at + data[at..].iter().position(|b| *b == b'\n').context("a header ends with a newline")?;
        let header = std::str::from_utf8(&data[at..end])?;
        let (name, count) = header.rsplit_once('/').context("a count")?;
        let (case, tensor) = name.rsplit_once('/').context("a tensor")?;
        let count: usize = count.parse()?;
        let width = if is_narrow(tensor) { 2 } else { 4 };
        let bytes = data.get(end + 1..end + 1 + width * count).context("the file is cut off")?;
        let word = |b: &[u8]| match (width, case.starts_with("f16")) {
            (2, true) => half::f16::from_le_bytes([b[0], b[1]]).to_f32().to_bits(),
            (2, false) => u32::from_le_bytes([0, 0, b[0], b[1]]),
            _ => u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        };
        all.entry(case.to_owned())
            .or_default()
            .insert(tensor.to_owned(), bytes.chunks_exact(width).map(word).collect());
        at = end + 1 + width * count;
    }
    Ok(all)
}

#[cfg(feature = "sim")]
fn compare(path: &str, filter: &str) -> Result<()> {
    let (gpu, backend) =
        jfa_bench::backends::simulator("cuda:sm_90a", jfa_sim::Config { sms: 132, ..jfa_sim::Config::default() })?;
    let context = Context { memory: memory_of(&backend)?, backend, repeats: 1, observer: None };
    let want = read(path)?;
    println!(
        "| case | tensor | values | differ | largest difference | relative to the norm |\n|---|---|---:|---:|---:|---:|"
    );
    let mut wrong = 0;
    for (name, scenario) in cases().iter().filter(|(name, _)| name.contains(filter)) {
        let want = want.get(name).with_context(|| format!("{path} lacks {name}"))?;
        let mut got = run(&context, scenario).with_context(|| name.clone())?;
        let findings = gpu.findings();
        ensure!(findings.is_empty(), "{name}: {}", findings[0]);
        got.insert("inputs".into(), vec![digest(&got["inputs"])]);
        ensure!(got["inputs"] == want["inputs"], "{name}: the inputs differ from those the device saw");
        for (tensor, values) in &got {
            let other = &want[tensor];
            ensure!(values.len() == other.len(), "{name}/{tensor}: {} and {} values", values.len(), other.len());
            let differ = values.iter().zip(other).filter(|(a, b)| a != b).count();
            if tensor == "schedule" {
                // Units of equal length may stand in any order.
                let sorted = |v: &[u32]| {
                    let mut v = v.to_vec();
                    v.sort_unstable();
                    v
                };
                let same = sorted(values) == sorted(other);
                wrong += usize::from(!same);
                let note = if same { "the same words" } else { "other words" };
                println!("| {name} | {tensor} | {} | {differ} | {note} | |", values.len());
                continue;
            }
            let float = |w: &u32| f64::from(f32::from_bits(*w));
            let kinds = |w: &u32| (float(w).is_nan(), float(w) == f64::INFINITY, float(w) == f64::NEG_INFINITY);
            let unlike = values.iter().zip(other).filter(|(a, b)| kinds(a) != kinds(b)).count();
            let finite = |a: &u32, b: &u32| float(a).is_finite() && float(b).is_finite();
            let pairs = || values.iter().zip(other).filter(|(a, b)| finite(a, b));
            let most = pairs().map(|(a, b)| (float(a) - float(b)).abs()).fold(0.0, f64::max);
            let square: f64 = pairs().map(|(a, b)| (float(a) - float(b)).powi(2)).sum();
            let norm: f64 = pairs().map(|(_, b)| float(b).powi(2)).sum();
            let relative = (square / norm.max(f64::MIN_POSITIVE)).sqrt();
            wrong += usize::from(unlike > 0);
            println!("| {name} | {tensor} | {} | {differ} | {most:.2e} | {relative:.1e} |", values.len());
        }
    }
    ensure!(wrong == 0, "{wrong} tensors differ in more than rounding");
    Ok(())
}

#[cfg(not(feature = "sim"))]
fn compare(_: &str, _: &str) -> Result<()> {
    bail!("comparing needs --features sim")
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["device", path] => device(path, "cuda"),
        ["device", path, backend] => device(path, backend),
        ["compare", path] => compare(path, ""),
        ["compare", path, filter] => compare(path, filter),
        _ => bail!("usage: kernels device FILE [BACKEND] | kernels compare FILE [FILTER]"),
    }
}
