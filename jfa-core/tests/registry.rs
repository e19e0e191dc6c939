//! Selection by argument and environment, and what it reports.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jfa_core::backend::DimRange;
use jfa_core::registry::{Environment, Factory, LogLevel, Origin, PluginLoader, Registry, Request, Skipped};
use jfa_core::{AttentionBackend, BackendPlan, Capabilities, DType, Error, MemorySpace, Problem, Result};

struct Fake {
    name: String,
    capabilities: Capabilities,
}

impl AttentionBackend for Fake {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        "fake".into()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn plan(&self, _: &Problem) -> Result<Arc<dyn BackendPlan>> {
        Err(Error::Unavailable { name: self.name.clone(), reason: "it is a fake".into() })
    }
}

fn fake(name: &str, space: MemorySpace, dtype: DType) -> Arc<dyn AttentionBackend> {
    let any = vec![DimRange { min: 1, max: 512, step: 1 }];
    let capabilities = Capabilities {
        memory_space: space,
        dtypes: vec![dtype],
        head_dims: any.clone(),
        head_dims_v: any,
        unequal_head_dims: false,
        causal: true,
        window: true,
        biases: vec![],
        gqa: true,
        kv_index: true,
        broadcast_query: true,
        backward: true,
        deterministic: true,
        zero_unused_rows: true,
        base_alignment: 1,
        stride_alignment: 1,
    };
    Arc::new(Fake { name: name.to_owned(), capabilities })
}

fn factory(name: &'static str, space: MemorySpace, dtype: DType) -> Factory {
    Arc::new(move |variant| Ok(fake(&variant.map_or(name.to_owned(), |v| format!("{name}:{v}")), space, dtype)))
}

fn failing(name: &'static str, reason: &'static str) -> Factory {
    Arc::new(move |_| Err(Error::Unavailable { name: name.into(), reason: reason.into() }))
}

/// One good plugin, one broken one, both only where the search path says `/plugins`.
struct Loader;

impl PluginLoader for Loader {
    fn load(&self, name_or_path: &str, search_path: &[PathBuf]) -> Result<Option<Arc<dyn AttentionBackend>>> {
        let found = search_path.contains(&PathBuf::from("/plugins"));
        match name_or_path {
            "/elsewhere/libnaive.so" => Ok(Some(fake("naive", MemorySpace::Host, DType::F32))),
            "naive" if found => Ok(Some(fake("naive", MemorySpace::Host, DType::F32))),
            "broken" if found => Err(Error::Plugin { path: "/plugins/broken.so".into(), reason: "no symbol".into() }),
            _ => Ok(None),
        }
    }

    fn discover(&self, search_path: &[PathBuf]) -> Vec<(String, Result<Arc<dyn AttentionBackend>>)> {
        if !search_path.contains(&PathBuf::from("/plugins")) {
            return vec![];
        }
        let names = ["broken", "naive"];
        names
            .into_iter()
            .filter_map(|n| Some((n.to_owned(), self.load(n, search_path).transpose()?)))
            .chain([("cpu".to_owned(), Ok(fake("cpu", MemorySpace::Host, DType::F32)))])
            .collect()
    }
}

/// cuda (device), tlx (fails), cpu (host), and the loader.
fn registry() -> Registry {
    let mut r = Registry::new();
    r.register("cuda", factory("cuda", MemorySpace::CudaDevice, DType::BF16));
    r.register("tlx", failing("tlx", "no driver"));
    r.register("cpu", factory("cpu", MemorySpace::Host, DType::F16));
    r.set_plugin_loader(Arc::new(Loader));
    r
}

fn env(pairs: &[(&str, &str)]) -> Environment {
    Environment::from_pairs(pairs.iter().copied())
}

fn names(s: &jfa_core::registry::Selection) -> Vec<&str> {
    s.candidates.iter().map(|b| b.name()).collect()
}

fn reason<'a>(skipped: &'a [Skipped], name: &str) -> &'a str {
    &skipped.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("{name} was not skipped: {skipped:?}")).reason
}

#[test]
fn auto_takes_registration_order_and_reports_failures() {
    for pairs in [&[][..], &[("JFA_BACKEND", "auto")], &[("JFA_BACKEND", "")]] {
        let s = registry().select(&Request::default(), &env(pairs)).unwrap();
        assert_eq!(names(&s), ["cuda", "cpu"]);
        assert_eq!(s.chosen_by, "auto");
        assert!(reason(&s.skipped, "tlx").contains("no driver"));
    }
}

#[test]
fn auto_keeps_to_the_callers_memory_space() {
    let host = Request { memory_space: Some(MemorySpace::Host), ..Request::default() };
    let s = registry().select(&host, &env(&[])).unwrap();
    assert_eq!(names(&s), ["cpu"]);
    assert!(reason(&s.skipped, "cuda").contains("CUDA device memory"));
}

#[test]
fn a_backend_of_another_known_space_is_not_made() {
    let made = Arc::new(AtomicUsize::new(0));
    let mut r = registry();
    let counter = made.clone();
    r.register_in(
        "cuda",
        MemorySpace::CudaDevice,
        Arc::new(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(fake("cuda", MemorySpace::CudaDevice, DType::BF16))
        }),
    );
    assert_eq!(r.names(), ["cuda", "tlx", "cpu"], "a second registration replaces the first in its place");
    let host = Request { memory_space: Some(MemorySpace::Host), ..Request::default() };
    let s = r.select(&host, &env(&[])).unwrap();
    assert!(reason(&s.skipped, "cuda").contains("the caller's in host memory"));
    assert_eq!(made.load(Ordering::Relaxed), 0);
    r.select(&Request::default(), &env(&[])).unwrap();
    assert_eq!(made.load(Ordering::Relaxed), 1);
}

#[test]
fn disabled_names_are_skipped_by_auto_only() {
    let e = env(&[("JFA_BACKEND_DISABLE", "cuda, naive,ghost"), ("JFA_BACKEND_PATH", "/plugins")]);
    let s = registry().select(&Request::default(), &e).unwrap();
    assert_eq!(names(&s), ["cpu"]);
    assert!(reason(&s.skipped, "cuda").contains("JFA_BACKEND_DISABLE"));
    assert!(reason(&s.skipped, "naive").contains("JFA_BACKEND_DISABLE"));
    assert!(reason(&s.skipped, "ghost").contains("no such backend"));
    let named = Request { backend: Some("cuda".into()), ..Request::default() };
    assert_eq!(names(&registry().select(&named, &e).unwrap()), ["cuda"]);
}

#[test]
fn plugins_come_after_every_registered_backend() {
    let e = env(&[("JFA_BACKEND_PATH", "/nowhere:/plugins")]);
    let s = registry().select(&Request::default(), &e).unwrap();
    assert_eq!(names(&s), ["cuda", "cpu", "naive"]);
    assert!(reason(&s.skipped, "broken").contains("no symbol"));
    assert!(reason(&s.skipped, "cpu").contains("registered backend has this name"));
}

#[test]
fn named_backends_never_fall_back() {
    let select =
        |pairs: &[(&str, &str)], space| registry().select(&Request { backend: None, memory_space: space }, &env(pairs));
    let s = select(&[("JFA_BACKEND", "cpu")], None).unwrap();
    assert_eq!((names(&s), s.chosen_by.as_str()), (vec!["cpu"], "JFA_BACKEND=cpu"));
    let s = select(&[("JFA_BACKEND", "cuda:g2")], None).unwrap();
    assert_eq!(names(&s), ["cuda:g2"]);
    let e = select(&[("JFA_BACKEND", "tlx")], None).unwrap_err();
    assert!(matches!(&e, Error::Unavailable { name, .. } if name == "tlx"), "{e}");
    let e = select(&[("JFA_BACKEND", "cuda")], Some(MemorySpace::Host)).unwrap_err().to_string();
    assert!(e.contains("'cuda'") && e.contains("CUDA device memory") && e.contains("JFA_BACKEND"), "{e}");
    let path = ("JFA_BACKEND_PATH", "/plugins");
    assert_eq!(names(&select(&[("JFA_BACKEND", "naive"), path], None).unwrap()), ["naive"]);
    let e = select(&[("JFA_BACKEND", "broken"), path], None).unwrap_err();
    assert!(matches!(e, Error::Plugin { .. }), "{e}");
    assert_eq!(names(&select(&[("JFA_BACKEND", "/elsewhere/libnaive.so")], None).unwrap()), ["naive"]);
    let e = select(&[("JFA_BACKEND", "./libmissing.so")], None).unwrap_err().to_string();
    assert!(e.contains("./libmissing.so") && e.contains("no such file"), "{e}");
}

#[test]
fn unknown_names_are_answered_with_every_name_there_is() {
    let e = env(&[("JFA_BACKEND", "cudda"), ("JFA_BACKEND_PATH", "/plugins")]);
    let error = registry().select(&Request::default(), &e).unwrap_err();
    assert!(matches!(error, Error::UnknownBackend { .. }));
    let text = error.to_string();
    for part in [
        "JFA_BACKEND = 'cudda': there is no such backend",
        "auto, cuda, tlx, cpu",
        "naive (plugin)",
        "broken (plugin, unusable",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let named = Request { backend: Some("nope".into()), ..Request::default() };
    let text = registry().select(&named, &env(&[])).unwrap_err().to_string();
    assert!(text.contains("backend = 'nope': there is no such backend"), "{text}");
}

#[test]
fn the_argument_overrides_the_environment() {
    let e = env(&[("JFA_BACKEND", "cuda")]);
    let request = |name: &str| Request { backend: Some(name.into()), ..Request::default() };
    let s = registry().select(&request("cpu"), &e).unwrap();
    assert_eq!((names(&s), s.chosen_by.as_str()), (vec!["cpu"], "argument backend=cpu"));
    assert_eq!(names(&registry().select(&request("auto"), &e).unwrap()), ["cuda", "cpu"]);
    assert_eq!(names(&registry().select(&request(""), &e).unwrap()), ["cuda"]);
}

#[test]
fn auto_without_any_usable_backend_says_why() {
    let mut r = Registry::new();
    let text = r.select(&Request::default(), &env(&[])).unwrap_err().to_string();
    assert!(text.contains("there is no backend"), "{text}");
    r.register("tlx", failing("tlx", "no driver"));
    let text = r.select(&Request::default(), &env(&[])).unwrap_err().to_string();
    assert!(text.contains("'tlx'") && text.contains("no driver"), "{text}");
}

#[test]
fn plans_go_to_the_first_candidate_that_fits_and_errors_list_what_each_lacks() {
    let s = registry().select(&Request::default(), &env(&[])).unwrap();
    // f16 is what the fake cpu has: it is asked for the plan (and, being a fake, refuses by name).
    let problem = Problem::builder(DType::F16, 1, 64).capacity(1, 1, 1).build().unwrap();
    let text = s.plan(&problem).unwrap_err().to_string();
    assert!(text.contains("'cpu'") && text.contains("it is a fake"), "{text}");
    let problem = Problem::builder(DType::F32, 1, 64).capacity(1, 1, 1).build().unwrap();
    let text = s.plan(&problem).unwrap_err().to_string();
    for part in ["unsupported", "dtype f32", "'cuda' lacks", "has bf16", "'cpu' lacks", "has f16", "'tlx' was skipped"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_survey_shows_everything_in_order() {
    let e = env(&[("JFA_BACKEND_DISABLE", "cuda"), ("JFA_BACKEND_PATH", "/plugins")]);
    let all = registry().survey(&e);
    let line =
        |s: &jfa_core::registry::Surveyed| (s.name.clone(), s.origin, s.backend.is_ok(), s.passed_over.is_some());
    let expected = [
        ("cuda", Origin::Registered, true, true),
        ("tlx", Origin::Registered, false, false),
        ("cpu", Origin::Registered, true, false),
        ("broken", Origin::Plugin, false, false),
        ("naive", Origin::Plugin, true, false),
        ("cpu", Origin::Plugin, true, true),
    ];
    let expected: Vec<_> = expected.into_iter().map(|(n, o, a, b)| (n.to_owned(), o, a, b)).collect();
    assert_eq!(all.iter().map(line).collect::<Vec<_>>(), expected);
}

#[test]
fn variables_are_parsed_and_mistakes_are_named() {
    let e = env(&[]);
    assert_eq!((e.log_level(), e.validate(), e.backend()), (LogLevel::Warn, false, None));
    assert!(e.search_path().is_empty() && e.disabled().is_empty() && e.warnings().is_empty());
    let e = env(&[("JFA_LOG", "Debug"), ("JFA_VALIDATE", "1"), ("JFA_BACKEND_PATH", "/a::/b")]);
    assert_eq!((e.log_level(), e.validate()), (LogLevel::Debug, true));
    assert_eq!(e.search_path(), [PathBuf::from("/a"), PathBuf::from("/b")]);
    assert!(e.warnings().is_empty());
    let e = env(&[("JFA_LOG", "loud"), ("JFA_VALIDATE", "yes"), ("JFA_BAKEND", "cpu")]);
    assert_eq!((e.log_level(), e.validate()), (LogLevel::Warn, false));
    let w = e.warnings().join("\n");
    for part in
        ["JFA_LOG=loud", "JFA_VALIDATE=yes", "unknown environment variable JFA_BAKEND=cpu", "JFA_BACKEND_DISABLE"]
    {
        assert!(w.contains(part), "{part}: {w}");
    }
}

#[test]
fn names_with_a_meaning_cannot_be_registered() {
    for name in ["", "auto", "a:b", "a/b"] {
        let result = std::panic::catch_unwind(|| {
            Registry::new().register(name, failing("x", "y"));
        });
        assert!(result.is_err(), "'{name}' was accepted");
    }
}
