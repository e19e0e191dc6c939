//! `jfa-bench check`: the conformance suite. Every row of the contract is a named case, run against any backend.

mod cases;
mod degenerate;
mod determinism;
mod errors;
mod report;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use jfa_core::{AttentionBackend, Capabilities, DType, DeviceMemory};

use crate::compare::{self, Tolerance, Verdict};
use crate::element::Poison;
use crate::execution::{Execution, Outputs, Passes, memory_of};
use crate::reference;
use crate::scenario::Scenario;
use crate::workload::parse_dtype;

/// Arguments of `check`.
#[derive(Args, Debug, Default)]
pub struct CheckArgs {
    /// Backend: a name, a variant (`cpu:4`) or the path of a plugin; by default what JFA_BACKEND or `auto` chooses.
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Run only the cases whose name contains one of these.
    #[arg(value_name = "FILTER")]
    pub filter: Vec<String>,
    /// A small subset with small tensors: fit for a simulator or a first try.
    #[arg(long)]
    pub quick: bool,
    /// Print the names of the cases and what each is about, run nothing.
    #[arg(long)]
    pub list: bool,
    /// Element types to test (default: all that the backend has; with --quick the first it has of bf16, f16, f32).
    #[arg(long, value_delimiter = ',', value_name = "TYPE")]
    pub dtype: Vec<String>,
    /// Head dimension of the cases that are not about head dimensions (default: 64 if the backend has it).
    #[arg(long)]
    pub head_dim: Option<i64>,
    /// Repetitions of the determinism cases.
    #[arg(long, default_value_t = 25)]
    pub repeats: usize,
    /// Write a JUnit XML report.
    #[arg(long, value_name = "PATH")]
    pub junit: Option<PathBuf>,
    /// Write the results as JSON (`-`: standard output).
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
    /// Print failures and the summary only.
    #[arg(long)]
    pub quiet: bool,
    /// On the simulator: an arrival at a barrier orders only what its own lanes did, as compute-sanitizer's racecheck sees it.
    #[cfg(feature = "sim")]
    #[arg(long)]
    pub by_lane: bool,
}

/// What came of a case.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// As the contract says; what was measured, if anything.
    Passed(String),
    /// What is wrong, one finding a line.
    Failed(Vec<String>),
    /// Why it could not be tried.
    Skipped(String),
}

/// Everything a case needs.
pub struct Context {
    /// The backend under test.
    pub backend: Arc<dyn AttentionBackend>,
    /// Its memory.
    pub memory: Arc<dyn DeviceMemory>,
    /// Repetitions of determinism cases.
    pub repeats: usize,
    /// What a backend that watches its own kernels (the simulator) saw them do wrong since the last call.
    pub observer: Option<Observer>,
}

/// Tells what kernels did wrong since the last call, one finding a line.
pub type Observer = Box<dyn Fn() -> Vec<String> + Send + Sync>;

/// The work of a case.
type Work = Box<dyn Fn(&Context) -> Result<Outcome> + Send + Sync>;

/// One named case.
pub struct Case {
    /// `TYPE/GROUP/WHAT`.
    pub name: String,
    /// Section of the contract it tests.
    pub section: &'static str,
    /// Part of the quick subset.
    pub quick: bool,
    /// The work.
    pub work: Work,
}

/// A finished case.
pub struct Finished {
    /// Its name.
    pub name: String,
    /// Section of the contract.
    pub section: &'static str,
    /// What came of it.
    pub outcome: Outcome,
    /// How long it took.
    pub time: Duration,
}

/// What cases are made for: types and the dimension of those that are not about dimensions.
struct Axes {
    /// Element types.
    dtypes: Vec<DType>,
    /// Head dimension.
    dim: i64,
}

impl Axes {
    fn new(args: &CheckArgs, caps: &Capabilities) -> Result<Self> {
        let mut dtypes: Vec<DType> = Vec::new();
        if args.dtype.is_empty() {
            let order = [DType::BF16, DType::F16, DType::F32];
            dtypes.extend(order.iter().filter(|d| caps.dtypes.contains(d)));
            if args.quick {
                dtypes.truncate(1);
            }
        } else {
            for word in &args.dtype {
                dtypes.push(parse_dtype(word)?);
            }
        }
        let has = |dim: i64| {
            let in_any = |ranges: &[jfa_core::backend::DimRange]| ranges.iter().any(|r| r.contains(dim));
            in_any(&caps.head_dims) && in_any(&caps.head_dims_v)
        };
        let dim = match args.head_dim {
            Some(dim) => dim,
            None => match [64, 32, 128, 16, 8, 96, 256].into_iter().chain(1..=512).find(|d| has(*d)) {
                Some(dim) => dim,
                None => bail!("the backend declares no head dimension of 1..=512"),
            },
        };
        Ok(Axes { dtypes, dim })
    }
}

/// The cases that `args` ask for, for a backend of these capabilities.
pub fn cases(args: &CheckArgs, caps: &Capabilities) -> Result<Vec<Case>> {
    let mut cases = cases::all(&Axes::new(args, caps)?, caps);
    let wanted = |name: &str| args.filter.is_empty() || args.filter.iter().any(|f| name.contains(f.as_str()));
    cases.retain(|c| wanted(&c.name) && (c.quick || !args.quick));
    Ok(cases)
}

/// Runs a case.
pub fn run_case(context: &Context, case: &Case) -> Finished {
    let start = Instant::now();
    let mut outcome = caught(|| (case.work)(context));
    // Right results do not excuse a kernel that reached them by luck.
    let seen = context.observer.as_ref().map_or_else(Vec::new, |observe| observe());
    if !seen.is_empty() {
        let mut all = match outcome {
            Outcome::Failed(findings) => findings,
            Outcome::Passed(_) | Outcome::Skipped(_) => Vec::new(),
        };
        // The call that met a finding first may have failed with its text.
        let new: Vec<_> = seen.into_iter().filter(|f| !all.iter().any(|known| known.contains(f.as_str()))).collect();
        all.extend(new);
        outcome = Outcome::Failed(all);
    }
    Finished { name: case.name.clone(), section: case.section, outcome, time: start.elapsed() }
}

/// Runs the command; `Ok(true)` when no case failed.
pub fn check(args: &CheckArgs) -> Result<bool> {
    let (backend, observer) = crate::backends::select_observed(args)?;
    let cases = cases(args, backend.capabilities())?;
    if args.list {
        for c in &cases {
            println!("{}  (section {}{})", c.name, c.section, if c.quick { ", quick" } else { "" });
        }
        println!("{} cases", cases.len());
        return Ok(true);
    }
    if cases.is_empty() {
        bail!("no case's name contains {}", args.filter.join(" or "));
    }
    let memory = memory_of(&backend)?;
    let to_stdout = args.json.as_deref().is_some_and(|p| p.as_os_str() == "-");
    if !to_stdout {
        println!("backend '{}': {}", backend.name(), backend.description());
        println!("memory: {}", memory.describe());
        println!("{} cases\n", cases.len());
    }
    let context = Context { backend, memory, repeats: args.repeats, observer };
    let progress = crate::progress::bar(cases.len() as u64);
    let mut finished = Vec::new();
    for case in cases {
        progress.set_message(case.name.clone());
        let done = run_case(&context, &case);
        if !to_stdout {
            progress.suspend(|| report::line(&done, args.quiet));
        }
        finished.push(done);
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Some(path) = &args.junit {
        let xml = report::junit(&context, &finished);
        std::fs::write(path, xml).with_context(|| format!("writing {}", path.display()))?;
    }
    if let Some(path) = &args.json {
        crate::progress::write_json(path, &report::json(&context, &finished))?;
    }
    if !to_stdout {
        report::summary(&finished);
    }
    Ok(!finished.iter().any(|f| matches!(f.outcome, Outcome::Failed(_))))
}

/// A panic in a case, on whichever thread, is its failure and not the end of the suite.
fn caught(work: impl FnOnce() -> Result<Outcome>) -> Outcome {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let panics = || PANICS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    panics().clear();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| panics().push(info.to_string().replace('\n', " "))));
    let result = std::panic::catch_unwind(AssertUnwindSafe(work));
    std::panic::set_hook(before);
    match result {
        Ok(Ok(outcome)) => outcome,
        // Capabilities are per feature; a combination that a backend lacks it must refuse by name, as the contract says.
        Ok(Err(e)) if matches!(e.downcast_ref(), Some(jfa_core::Error::Unsupported { .. })) => {
            Outcome::Skipped(format!("{e:#}"))
        }
        Ok(Err(e)) => Outcome::Failed(vec![format!("{e:#}")]),
        Err(_) => Outcome::Failed(std::mem::take(&mut *panics())),
    }
}

impl Context {
    /// Why the backend cannot be asked to do this, or `None` when it can.
    pub fn lacks(&self, s: &Scenario) -> Result<Option<String>> {
        let lacks = self.backend.capabilities().lacks(&s.problem()?);
        Ok((!lacks.is_empty()).then(|| format!("the backend lacks: {}", lacks.join(", "))))
    }

    /// Lays a scenario out and runs both passes amid `poison`.
    pub fn run(&self, s: &Scenario, poison: Poison) -> Result<(Execution, Outputs)> {
        let execution = Execution::new(&self.backend, &self.memory, s, &s.inputs(), poison)?;
        execution.build_schedule().context("build_schedule")?;
        execution.forward().context("forward")?;
        if self.backend.capabilities().backward {
            execution.backward().context("backward")?;
        }
        let outputs = execution.outputs()?;
        Ok((execution, outputs))
    }

    /// Runs a scenario amid NaN and compares everything with the oracle: what may not be written, positions, errors.
    pub fn conform(&self, s: &Scenario) -> Result<Outcome> {
        if let Some(reason) = self.lacks(s)? {
            return Ok(Outcome::Skipped(reason));
        }
        let inputs = s.inputs();
        let execution = Execution::new(&self.backend, &self.memory, s, &inputs, Poison::Nan)?;
        execution.build_schedule().context("build_schedule")?;
        self.conform_passes(s, &inputs, &execution, Passes::FORWARD)
    }

    /// The same for an execution whose schedule is built. `before`: whether outputs of the backward are still as they
    /// were (`FORWARD`), or already written (`BOTH`), when the forward has run.
    pub fn conform_passes(
        &self,
        s: &Scenario,
        inputs: &crate::scenario::Inputs,
        execution: &Execution,
        before: Passes,
    ) -> Result<Outcome> {
        let tolerance = Tolerance::of(s.dtype).over(s.pairs()).at_scores_of(s.score_magnitude(), s.head_dim, s.dtype);
        execution.forward().context("forward")?;
        let mut verdict = Verdict::default();
        verdict.wrong.extend(execution.trespasses(before)?);
        let outputs = execution.outputs()?;
        let mut expected = reference::forward(s, inputs);
        verdict.join(compare::forward(s, &outputs, &expected, tolerance));
        if self.backend.capabilities().backward {
            match execution.backward() {
                Err(e @ jfa_core::Error::Unsupported { .. }) if verdict.wrong.is_empty() => {
                    verdict.wrong.extend(execution.trespasses(before)?);
                    return Ok(if verdict.wrong.is_empty() {
                        Outcome::Skipped(format!("the forward conforms; the backward is {e}"))
                    } else {
                        outcome(&verdict, true)
                    });
                }
                result => result.context("backward")?,
            }
            verdict.wrong.extend(execution.trespasses(Passes::BOTH)?);
            let outputs = execution.outputs()?;
            reference::backward(s, inputs, &outputs, &mut expected);
            verdict.join(compare::backward(s, inputs, &outputs, &expected, tolerance));
        }
        Ok(outcome(&verdict, self.backend.capabilities().backward))
    }
}

/// A verdict as an outcome.
fn outcome(verdict: &Verdict, backward: bool) -> Outcome {
    if !verdict.wrong.is_empty() {
        return Outcome::Failed(verdict.wrong.clone());
    }
    let errors: Vec<_> = verdict.errors.list().iter().map(|(name, e)| format!("{name} {e:.1e}")).collect();
    let mut text = errors.join(", ");
    if !backward {
        text.push_str(" (the backend has no backward)");
    }
    Outcome::Passed(text)
}
