//! What plans and calls log, in a process of its own: a process has one sink.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use jfa_core::host::{Batch, BiasData, Inputs, Session, Tensor};
use jfa_core::registry::{Environment, LogLevel, Registry, Request};
use jfa_core::{AttentionBackend, BackendPlan, Call, Capabilities, DType, ForwardArgs, Plan, Problem, Result, log};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    static WANTED: Cell<LogLevel> = const { Cell::new(LogLevel::Trace) };
}

/// Only for bf16.
struct Narrow(Capabilities);

impl AttentionBackend for Narrow {
    fn name(&self) -> &str {
        "narrow"
    }

    fn description(&self) -> String {
        "bf16 alone".to_owned()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.0
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        unreachable!("asked for {problem}")
    }
}

fn lines() -> Vec<String> {
    std::mem::take(&mut *LINES.lock().unwrap())
}

fn problem(batch: i64) -> Problem {
    Problem::builder(DType::F32, 2, 8).capacity(batch, 12, 12).build().unwrap()
}

fn pass(plan: &Plan) {
    let mut session = Session::new(plan, Batch::self_attention(&[5, 0, 7]).unwrap()).unwrap();
    let x = Tensor::<f32>::from_fn([12, 2, 8], |r, h, c| (r * 3 + h + c) as f32 / 50.0);
    let inputs = Inputs { q: x.as_ref(), k: x.as_ref(), v: x.as_ref(), bias: BiasData::None };
    let forward = session.forward(&inputs).unwrap();
    session.backward(&inputs, &forward, x.as_ref()).unwrap();
}

fn failing(plan: &Plan) {
    let batch = Batch::self_attention(&[5, 0, 7]).unwrap();
    let layout = batch.layout();
    let x = Tensor::<f32>::from_fn([12, 2, 8], |_, _, _| 0.0);
    let view = x.as_ref().view();
    let lse = jfa_core::LseView::contiguous(jfa_core::DataPtr::NULL, 12);
    let args = ForwardArgs { q: view, k: view, v: view, bias: jfa_core::DataPtr::NULL, o: view, lse };
    let (schedule, workspace) = (jfa_core::plan::Buffer::EMPTY, jfa_core::plan::Buffer::EMPTY);
    let call = Call { layout: &layout, schedule, workspace, stream: jfa_core::Stream::DEFAULT };
    // SAFETY: refused before anything is read: a null pointer where there is work to do.
    unsafe { plan.forward(&call, &args) }.unwrap_err();
}

#[test]
fn choices_plans_and_calls_are_logged_as_far_as_somebody_wants_them() {
    let sink = |level, message: &str| LINES.lock().unwrap().push(format!("{level}: {message}"));
    assert!(log::install_filtered(LogLevel::Warn, |level| level <= WANTED.get(), Box::new(sink)) && log::installed());
    let mut registry = Registry::new();
    let capabilities = Capabilities { dtypes: vec![DType::BF16], ..jfa_core::cpu::backend().capabilities().clone() };
    let narrow: Arc<dyn AttentionBackend> = Arc::new(Narrow(capabilities));
    registry.register("narrow", Arc::new(move |_| Ok(narrow.clone())));
    jfa_core::cpu::register(&mut registry);
    let silent = Environment::from_pairs::<&str, &str>([]);
    let selection = registry.select(&Request::default(), &silent).unwrap();
    pass(&selection.plan(&problem(3)).unwrap());
    assert_eq!(lines(), [""; 0], "the level is warn");

    log::raise_level(LogLevel::Trace);
    log::raise_level(LogLevel::Info);
    let has = |lines: &[String], parts: &[&str]| {
        let found = lines.iter().filter(|l| l.starts_with(parts[0]) && parts.iter().all(|p| l.contains(p))).count();
        assert_eq!(found, 1, "{parts:?}: {lines:#?}");
    };
    let selection = registry.select(&Request::default(), &silent).unwrap();
    let said = lines();
    has(&said, &["debug: candidate backend=narrow", " place=1", " description=bf16 alone"]);
    has(&said, &["debug: candidate backend=cpu", " place=2", " description="]);
    has(&said, &["info: backend chosen backend=narrow"]);

    let plan = selection.plan(&problem(3)).unwrap();
    let said = lines();
    has(&said, &["debug: candidate passed over backend=narrow lacks=dtype f32"]);
    has(&said, &["debug: candidate supports the problem backend=cpu"]);
    let r = plan.requirements();
    let memory = format!("schedule_bytes={} forward_bytes={} ", r.schedule_bytes, r.forward_bytes);
    has(&said, &["debug: plan made backend=cpu", &plan.problem().to_string(), &plan.describe(), &memory]);

    let mut bad = problem(3);
    bad.heads_kv = 3;
    let error = selection.plan(&bad).unwrap_err().to_string();
    has(&lines(), &["debug: no plan problem=", &error]);
    let error = Plan::new(selection.candidates[1].clone(), &bad).unwrap_err().to_string();
    has(&lines(), &["debug: no plan backend=cpu", &error]);

    pass(&plan);
    let said = lines();
    for call in ["build_schedule", "forward", "backward"] {
        has(&said, &[&format!("trace: {call} backend=cpu batch=3 kv_batch=3")]);
    }
    assert_eq!(said.len(), 3, "{said:#?}");
    failing(&plan);
    has(&lines(), &["trace: forward failed backend=cpu batch=3 kv_batch=3 error="]);

    // Another thread's loudness costs this one no message.
    WANTED.set(LogLevel::Warn);
    pass(&selection.plan(&problem(3)).unwrap());
    failing(&plan);
    assert_eq!(lines(), [""; 0], "nobody here wants them");
    WANTED.set(LogLevel::Trace);
    log::set_level(LogLevel::Debug);
    pass(&plan);
    assert_eq!(lines(), [""; 0], "the level is debug");
}
