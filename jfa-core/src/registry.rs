//! Which backends there are, and how the environment chooses among them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{AttentionBackend, Error, MemorySpace, Plan, Problem, Result};

/// Makes a backend, or says why it cannot run here. The argument is the variant: `tlx:g2` calls `tlx`'s factory with
/// `Some("g2")`, plain `tlx` with `None`.
pub type Factory = Arc<dyn Fn(Option<&str>) -> Result<Arc<dyn AttentionBackend>> + Send + Sync>;

/// Finds backends outside the registry: shared libraries by name (in a search path) or by path.
pub trait PluginLoader: Send + Sync {
    /// Loads `name_or_path`; `Ok(None)` when nothing of that name is found in `search_path`.
    fn load(&self, name_or_path: &str, search_path: &[std::path::PathBuf]) -> Result<Option<Arc<dyn AttentionBackend>>>;

    /// Everything found in `search_path`, each loaded or with the reason it was skipped.
    fn discover(&self, search_path: &[std::path::PathBuf]) -> Vec<(String, Result<Arc<dyn AttentionBackend>>)>;
}

/// The variables of the contract's environment table, read once per selection.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    values: BTreeMap<String, String>,
}

impl Environment {
    /// The process environment; empty in set-uid processes. Warns once about unknown `JFA_*` variables.
    pub fn from_process() -> Self {
        Environment { values: std::env::vars().filter(|(k, _)| k.starts_with("JFA_")).collect() }
    }

    /// Given pairs, for tests and embedders.
    pub fn from_pairs<K: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        Environment { values: pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect() }
    }

    /// One variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }
}

/// What to choose by.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// A backend by name; `None` asks the environment (`JFA_BACKEND`), then `auto`.
    pub backend: Option<String>,
    /// Where the caller's tensors live; `auto` considers only backends of that space. `None`: any.
    pub memory_space: Option<MemorySpace>,
}

/// A candidate that was not chosen, and why (naming the variable, if one was the cause).
#[derive(Clone, Debug)]
pub struct Skipped {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// The candidates in order of preference and everything that was skipped.
#[derive(Clone)]
pub struct Selection {
    /// Usable backends, best first; exactly one when a backend was named.
    pub candidates: Vec<Arc<dyn AttentionBackend>>,
    /// What was skipped.
    pub skipped: Vec<Skipped>,
}

impl Selection {
    /// Plans on the first candidate that supports the problem; else an error that prints what each one lacks.
    pub fn plan(&self, problem: &Problem) -> Result<Plan> {
        problem.validate()?;
        let mut lacks = Vec::new();
        for backend in &self.candidates {
            let missing = backend.capabilities().lacks(problem);
            if missing.is_empty() {
                return Plan::new(backend.clone(), problem);
            }
            lacks.push(format!("'{}' lacks {}", backend.name(), missing.join(", ")));
        }
        Err(Error::Unsupported { asked: format!("{problem:?}"), lacks: lacks.join("; ") })
    }
}

/// The backends known to this process.
#[derive(Clone, Default)]
pub struct Registry {
    entries: Vec<(String, Factory)>,
    plugins: Option<Arc<dyn PluginLoader>>,
}

impl Registry {
    /// Without any backend.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a backend; `auto` prefers those added first.
    pub fn register(&mut self, name: &str, factory: Factory) {
        self.entries.push((name.to_owned(), factory));
    }

    /// Lets names and paths resolve to shared libraries.
    pub fn set_plugin_loader(&mut self, loader: Arc<dyn PluginLoader>) {
        self.plugins = Some(loader);
    }

    /// Names of the registered backends.
    pub fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|(n, _)| n.as_str()).collect()
    }
}
