//! Plugins: the naive C++ backend computes what the built-in one computes, and every way to be a bad plugin is told.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jfa::plugin::Loader;
use jfa_core::host::{Batch, BiasData, Element, Inputs, Session, Tensor};
use jfa_core::registry::{Environment, PluginLoader, Request};
use jfa_core::{Alignment, AttentionBackend, Bias, DType, Error, Mask, Plan, Problem, ProblemBuilder};

fn naive() -> Arc<dyn AttentionBackend> {
    let path = common::naive().join(Loader::file_name("naive"));
    Loader.open(&path, None).expect("the naive plugin loads")
}

/// Numbers around zero, the same on every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f32::from(i16::from_ne_bytes(((self.0 >> 40) as u16).to_ne_bytes())) / 16384.0
    }
}

struct Shape {
    problem: Problem,
    batch: fn(&Problem) -> Batch,
}

fn tensor<T: Element>(shape: [i64; 3], numbers: &mut Numbers, from: fn(f32) -> T) -> Tensor<T> {
    Tensor::from_fn(shape.map(|n| usize::try_from(n).unwrap()), |_, _, _| from(numbers.next()))
}

fn close(what: &str, actual: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let (mut error, mut norm) = (0.0_f64, 0.0_f64);
    for (&a, &e) in actual.iter().zip(expected) {
        assert_eq!((a.is_nan(), a == f32::NEG_INFINITY), (e.is_nan(), e == f32::NEG_INFINITY), "{what}: {a} for {e}");
        if a.is_finite() {
            error += f64::from(a - e).powi(2);
            norm += f64::from(e).powi(2);
        }
    }
    assert!(error.sqrt() <= tolerance * norm.sqrt().max(1e-3), "{what}: error {} of {}", error.sqrt(), norm.sqrt());
}

/// Both backends on the same inputs. `to` gives an element as f32.
fn compare<T: Element>(name: &str, shape: &Shape, from: fn(f32) -> T, to: fn(&T) -> f32, tolerance: f64) {
    let p = &shape.problem;
    let mut numbers = Numbers(7);
    let q = tensor([p.q_rows(), p.heads_q, p.head_dim], &mut numbers, from);
    let k = tensor([p.total_kv, p.heads_kv, p.head_dim], &mut numbers, from);
    let v = tensor([p.total_kv, p.heads_kv, p.head_dim_v], &mut numbers, from);
    let d_o = tensor([p.o_rows(), p.heads_q, p.head_dim_v], &mut numbers, from);
    let elements = match p.bias {
        Bias::None => 0,
        Bias::Alibi => p.heads_q,
        Bias::Relative { radius } => p.heads_q * (2 * i64::from(radius) + 1),
        Bias::Dense { capacity, .. } => capacity,
    };
    let mut bias: Vec<f32> = (0..elements).map(|_| numbers.next()).collect();
    if matches!(p.bias, Bias::Dense { .. }) {
        bias.iter_mut().step_by(5).for_each(|b| *b = f32::NEG_INFINITY);
    }
    let own: Vec<T> = bias.iter().map(|b| from(*b)).collect();
    let inputs = Inputs {
        q: q.as_ref(),
        k: k.as_ref(),
        v: v.as_ref(),
        bias: match p.bias {
            Bias::None => BiasData::None,
            Bias::Dense { dtype, .. } if dtype != DType::F32 => BiasData::Native(&own),
            _ => BiasData::F32(&bias),
        },
    };
    let results = [jfa_core::cpu::backend(), naive()].map(|backend| {
        let plan = Plan::new(backend, p).unwrap();
        let mut session = Session::new(&plan, (shape.batch)(p)).unwrap();
        let forward = session.forward(&inputs).unwrap();
        let gradients = session.backward(&inputs, &forward, d_o.as_ref()).unwrap();
        (forward, gradients)
    });
    let [(ef, eg), (af, ag)] = &results;
    let floats = |t: &Tensor<T>| t.data().iter().map(to).collect::<Vec<_>>();
    close(&format!("{name}: o"), &floats(&af.o), &floats(&ef.o), tolerance);
    close(&format!("{name}: lse"), &af.lse, &ef.lse, 1e-5);
    close(&format!("{name}: dq"), &floats(&ag.dq), &floats(&eg.dq), 2.0 * tolerance);
    close(&format!("{name}: dk"), &floats(&ag.dk), &floats(&eg.dk), 2.0 * tolerance);
    close(&format!("{name}: dv"), &floats(&ag.dv), &floats(&eg.dv), 2.0 * tolerance);
    close(&format!("{name}: dbias"), &ag.dbias, &eg.dbias, 2.0 * tolerance);
}

const Q: [i64; 6] = [3, 0, 7, 1, 12, 5];
const KV: [i64; 6] = [5, 4, 0, 9, 12, 2];

fn shapes(dtype: DType) -> Vec<(&'static str, Shape)> {
    let cross = |p: &Problem| {
        let batch = Batch::cross(&Q, &KV).unwrap();
        if matches!(p.bias, Bias::Dense { .. }) { batch.with_packed_dense_bias(p).unwrap() } else { batch }
    };
    let base = || Problem::builder(dtype, 4, 24).capacity(6, 30, 35);
    let a = Alignment::BottomRight;
    let shape = |b: ProblemBuilder, batch| Shape { problem: b.build().unwrap(), batch };
    let dense =
        |dtype, row_align, shared_by_heads| Bias::Dense { dtype, row_align, shared_by_heads, capacity: 4 * 400 };
    vec![
        ("full", shape(base(), cross)),
        ("causal", shape(base().mask(Mask::Causal(a)).heads_kv(2), cross)),
        ("causal top-left", shape(base().mask(Mask::Causal(Alignment::TopLeft)).head_dim_v(9), cross)),
        ("window", shape(base().mask(Mask::Window { left: Some(2), right: Some(1), alignment: a }), cross)),
        ("window left", shape(base().mask(Mask::Window { left: Some(1), right: None, alignment: a }), cross)),
        ("alibi", shape(base().bias(Bias::Alibi).bias_alignment(a), cross)),
        ("relative", shape(base().bias(Bias::Relative { radius: 3 }).mask(Mask::Causal(a)).heads_kv(1), cross)),
        ("dense", shape(base().bias(dense(DType::F32, 8, false)), cross)),
        ("dense shared", shape(base().bias(dense(dtype, 1, true)), cross)),
        (
            "zeroed",
            shape(base().zero_unused_rows(true).deterministic(true), |_| {
                let lengths = |l: &[i64]| l.iter().map(|n| i32::try_from(*n / 2).unwrap()).collect();
                Batch::cross(&Q, &KV).unwrap().with_lengths(Some(lengths(&Q)), Some(lengths(&KV))).unwrap()
            }),
        ),
        (
            "kv_index",
            shape(base().kv_index(3).heads_kv(2), |_| {
                Batch::shared_kv(&Q, &[6, 0, 8], vec![2, 0, 2, 1, 0, 2]).unwrap()
            }),
        ),
        ("broadcast", shape(base().broadcast_query(4), |_| Batch::broadcast(&KV).unwrap())),
    ]
}

#[test]
fn naive_agrees_with_cpu_in_f32() {
    for (name, shape) in shapes(DType::F32) {
        compare::<f32>(name, &shape, |x| x, |x| *x, 5e-6);
    }
}

#[test]
fn naive_agrees_with_cpu_in_16_bits() {
    for (name, shape) in shapes(DType::BF16) {
        compare(&format!("bf16 {name}"), &shape, half::bf16::from_f32, |x| x.to_f32(), 4e-3);
    }
    for (name, shape) in shapes(DType::F16) {
        compare(&format!("f16 {name}"), &shape, half::f16::from_f32, |x| x.to_f32(), 6e-4);
    }
}

/// A directory with one broken plugin, named `broken`.
fn broken(kind: u32) -> PathBuf {
    let directory = common::scratch().join(format!("broken{kind}"));
    let source = common::root().join("jfa-capi/tests/plugins/broken.cpp");
    common::plugin(&source, &directory, "broken", &[&format!("-DBROKEN={kind}")]);
    directory
}

fn environment(directory: &Path) -> Environment {
    Environment::from_pairs([("JFA_BACKEND_PATH", directory.as_os_str().to_owned())])
}

/// What naming the plugin in `directory` gives, and what `auto` says about it.
fn verdicts(directory: &Path) -> (Error, String) {
    let request = Request { backend: Some("broken".to_owned()), ..Request::default() };
    let named = jfa::registry().select(&request, &environment(directory)).expect_err("a named bad plugin is an error");
    let auto = jfa::registry().select(&Request::default(), &environment(directory)).expect("auto finds cpu");
    assert_eq!(auto.candidates[0].name(), "cpu");
    let skipped = auto.skipped.iter().find(|s| s.name == "broken").expect("auto reports what it skipped");
    (named, skipped.reason.clone())
}

#[test]
fn a_bad_plugin_is_an_error_when_named_and_reported_by_auto() {
    for (kind, text) in [
        (1, "has no symbol jfa_backend_get_api"),
        (2, "does not start: no luck today (JFA_ERROR_DEVICE)"),
        (4, "create reported success and gave no backend"),
        (5, "capabilities.base_alignment = 12"),
        (6, "with 0 ranges"),
        (7, "capabilities.memory_space = 3"),
        (8, "capabilities.dtypes = 0x10000000000"),
        (10, "its table has 104 bytes, version 1 has at least 120"),
        (11, "has version 2 of the plugin table, which is newer"),
        (12, "has version 0 of the plugin table, which is older"),
        (13, "calls itself 'Bad Name'"),
        (14, "calls itself 'other', the file name says 'broken'"),
        (15, "its table lacks the function plan_create"),
        (17, "does not have version 1 of the plugin table"),
        (18, "returned status 0 and the table 0x0"),
    ] {
        let directory = broken(kind);
        let (named, skipped) = verdicts(&directory);
        assert!(matches!(named, Error::Plugin { .. }), "{kind}: {named:?}");
        for said in [named.to_string(), skipped] {
            assert!(said.contains(text), "{kind}: {said}");
            assert!(said.contains(&directory.display().to_string()), "{kind}: {said}");
        }
    }
    let (named, _) = verdicts(&broken(3));
    assert!(matches!(&named, Error::Unavailable { reason, .. } if reason.contains("no such device here")), "{named:?}");
    let (named, _) = verdicts(&broken(9));
    assert!(named.to_string().contains("capabilities: what can I do (status 7901)"), "{named}");
}

/// Files that are no libraries at all, or none for this machine.
#[test]
fn what_is_no_library_for_this_machine_is_told() {
    let directory = common::scratch().join("files");
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join(Loader::file_name("broken"));
    let good = std::fs::read(common::naive().join(Loader::file_name("naive"))).unwrap();
    let patched = |at: usize, bytes: &[u8]| {
        let mut copy = good.clone();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        copy
    };
    let foreign: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };
    let name = if cfg!(target_arch = "aarch64") { "x86_64" } else { "aarch64" };
    for (content, text) in [
        (b"INPUT(libm.so)\n".to_vec(), "is not a shared library (no ELF header)".to_owned()),
        (Vec::new(), "is not a shared library (no ELF header)".to_owned()),
        (patched(18, &foreign.to_le_bytes()), format!("is built for {name} (64 bits), this machine is")),
        (patched(4, &[1]), "(32 bits), this machine is".to_owned()),
        (patched(16, &[1, 0]), "is no shared library (ELF type 1)".to_owned()),
        (good[..200].to_vec(), "does not load:".to_owned()),
    ] {
        std::fs::write(&file, content).unwrap();
        let (named, skipped) = verdicts(&directory);
        assert!(named.to_string().contains(&text), "{named}");
        assert!(skipped.contains(&text), "{skipped}");
    }
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(verdicts(&directory).0.to_string().contains("is a directory"));
    // Whoever opens a pipe waits for its other end.
    std::fs::remove_dir(&file).unwrap();
    common::succeed(std::process::Command::new("mkfifo").arg(&file));
    assert!(verdicts(&directory).0.to_string().contains("is no regular file"));
}

#[test]
fn a_newer_table_with_the_same_version_works() {
    let directory = broken(16);
    let backend = Loader.load("broken", std::slice::from_ref(&directory)).unwrap().unwrap();
    assert_eq!(backend.name(), "broken");
}

#[test]
fn names_paths_variants_and_search_order() {
    let (first, second) = (broken(0), common::naive().to_owned());
    let copy = common::scratch().join("copy");
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(second.join(Loader::file_name("naive")), copy.join(Loader::file_name("naive"))).unwrap();
    let path = [first.clone(), common::scratch().join("nowhere"), second, copy.clone()];

    let backend = Loader.load("broken:blue", &path).unwrap().unwrap();
    assert_eq!(backend.name(), "broken:blue");
    assert!(Loader.load("absent", &path).unwrap().is_none());
    assert!(Loader.load("../escape", &path).unwrap().is_none());
    let file = copy.join(Loader::file_name("naive")).display().to_string();
    assert_eq!(Loader.load(&file, &[]).unwrap().unwrap().name(), "naive");
    let refused = Loader.load(&format!("{file}:red"), &[]).err().unwrap().to_string();
    assert!(refused.contains("variant = red: there are none (JFA_ERROR_INVALID_ARGUMENT)"), "{refused}");
    assert!(Loader.load("/no/such/file.so", &[]).unwrap().is_none());

    let found: Vec<_> =
        Loader.discover(&path).into_iter().map(|(n, r)| (n, r.map(|_| ()).map_err(|e| e.to_string()))).collect();
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!((found[0].0.as_str(), found[0].1.is_ok()), ("broken", true));
    assert!(found[1].1.as_ref().unwrap_err().contains("cannot search this directory"), "{found:?}");
    assert_eq!((found[2].0.as_str(), found[2].1.is_ok()), ("naive", true));
    assert!(found[3].1.as_ref().unwrap_err().contains("comes first in the search path"), "{found:?}");
}

/// A plugin's failures keep its words; what it does not declare is never asked of it.
#[test]
fn failures_of_a_plugin_reach_the_caller() {
    let backend = Loader.load("broken", &[broken(0)]).unwrap().unwrap();
    let problem = |b: i64, dim: i64| Problem::builder(DType::F32, 1, dim).capacity(b, 8, 8).build().unwrap();
    let failed = Plan::new(backend.clone(), &problem(7, 8)).unwrap_err();
    assert!(matches!(&failed, Error::Backend { status: 9999, reason, .. } if reason.contains("seven is too many")));
    let lacking = Plan::new(backend.clone(), &problem(1, 12)).unwrap_err();
    assert!(lacking.to_string().contains("head_dim 12 (has multiples of 8 in 8..=64)"), "{lacking}");

    let plan = Plan::new(backend, &problem(1, 8)).unwrap();
    assert_eq!(plan.requirements().forward_bytes, 100);
    let mut session = Session::new(&plan, Batch::self_attention(&[8_i64]).unwrap()).unwrap();
    let q = Tensor::filled([8, 1, 8], 1.0_f32);
    let inputs = Inputs { q: q.as_ref(), k: q.as_ref(), v: q.as_ref(), bias: BiasData::None };
    let failed = session.forward(&inputs).err().unwrap();
    assert_eq!(failed.to_string(), "backend 'broken': forward: the forward fell over (status 7301)");
    let forward = jfa_core::host::Forward { o: q.clone(), lse: vec![0.0; 8] };
    let failed = session.backward(&inputs, &forward, q.as_ref()).err().unwrap();
    assert!(
        matches!(&failed, Error::Unsupported { lacks, .. } if lacks.contains("'broken' lacks a backward")),
        "{failed}"
    );
}
