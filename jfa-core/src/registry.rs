//! Which backends there are, and how the environment chooses among them.
//!
//! A backend is *named* (by an argument, else by `JFA_BACKEND`) or left to `auto`.
//!
//! * Named: that one or an error, never another. A name is looked up among the registered backends, then among the
//!   plugins in `JFA_BACKEND_PATH`; a name with a `/` is the path of a plugin library.
//! * `auto`: the registered backends in the order of their registration, then the plugins in `JFA_BACKEND_PATH`, less
//!   the names in `JFA_BACKEND_DISABLE` and those whose tensors live elsewhere than the caller's. Plugins come last so
//!   that adding a directory to the search path never takes work away from a built-in backend: a plugin gets what no
//!   built-in one supports, or what is given to it by name.

use std::path::PathBuf;
use std::sync::Arc;

pub use crate::environment::{Environment, LogLevel};
use crate::{AttentionBackend, Error, MemorySpace, Plan, Problem, Result};

/// Makes a backend, or says why it cannot run here. The argument is the variant: `tlx:g2` calls `tlx`'s factory with
/// `Some("g2")`, plain `tlx` with `None`.
pub type Factory = Arc<dyn Fn(Option<&str>) -> Result<Arc<dyn AttentionBackend>> + Send + Sync>;

/// Finds backends outside the registry: shared libraries by name (in a search path) or by path.
pub trait PluginLoader: Send + Sync {
    /// Loads `name_or_path`; `Ok(None)` when nothing of that name is found in `search_path`.
    fn load(&self, name_or_path: &str, search_path: &[PathBuf]) -> Result<Option<Arc<dyn AttentionBackend>>>;

    /// Everything found in `search_path`, each loaded or with the reason it was skipped.
    fn discover(&self, search_path: &[PathBuf]) -> Vec<(String, Result<Arc<dyn AttentionBackend>>)>;
}

/// What to choose by.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// A backend by name; `None` asks the environment (`JFA_BACKEND`), then `auto`. `Some("auto")` overrides the
    /// environment's choice.
    pub backend: Option<String>,
    /// Where the caller's tensors live; `auto` considers only backends of that space. `None`: any.
    pub memory_space: Option<MemorySpace>,
}

/// A candidate that was not chosen, and why (naming the variable, if one was the cause).
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// What decided: `argument backend=NAME`, `JFA_BACKEND=NAME` or `auto`.
    pub chosen_by: String,
}

impl Selection {
    /// Plans on the first candidate that supports the problem; else an error that prints what each one lacks.
    ///
    /// # Errors
    /// Those of [`Problem::validate`] and [`Plan::new`]; [`Error::Unsupported`] when no candidate fits.
    pub fn plan(&self, problem: &Problem) -> Result<Plan> {
        match self.candidate_for(problem) {
            Ok(backend) => Plan::new(backend.clone(), problem),
            Err(error) => {
                tracing::debug!(target: "jfa", %problem, %error, "no plan");
                Err(error)
            }
        }
    }

    /// The first candidate that supports the problem.
    fn candidate_for(&self, problem: &Problem) -> Result<&Arc<dyn AttentionBackend>> {
        problem.validate()?;
        let mut lacks = Vec::new();
        for backend in &self.candidates {
            let missing = backend.capabilities().lacks(problem);
            let name = backend.name();
            if missing.is_empty() {
                tracing::debug!(target: "jfa", backend = %name, "candidate supports the problem");
                return Ok(backend);
            }
            let missing = missing.join(", ");
            tracing::debug!(target: "jfa", backend = %name, lacks = %missing, "candidate passed over");
            lacks.push(format!("'{name}' lacks {missing}"));
        }
        lacks.extend(self.skipped.iter().map(|s| format!("'{}' was skipped: {}", s.name, s.reason)));
        Err(Error::Unsupported { asked: problem.to_string(), lacks: lacks.join("; ") })
    }
}

impl std::fmt::Debug for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selection")
            .field("candidates", &self.candidates.iter().map(|b| b.name()).collect::<Vec<_>>())
            .field("skipped", &self.skipped)
            .field("chosen_by", &self.chosen_by)
            .finish()
    }
}

/// Where a backend was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Registered by this process.
    Registered,
    /// A shared library in `JFA_BACKEND_PATH`.
    Plugin,
}

/// One backend of a survey.
pub struct Surveyed {
    /// Its name.
    pub name: String,
    /// Where it was found.
    pub origin: Origin,
    /// The backend, or why it cannot run here.
    pub backend: Result<Arc<dyn AttentionBackend>>,
    /// Why `auto` would pass it over although it can run.
    pub passed_over: Option<String>,
}

#[derive(Clone)]
struct Entry {
    name: String,
    memory_space: Option<MemorySpace>,
    factory: Factory,
}

/// The backends known to this process.
#[derive(Clone, Default)]
pub struct Registry {
    entries: Vec<Entry>,
    plugins: Option<Arc<dyn PluginLoader>>,
}

impl Registry {
    /// Without any backend.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a backend; `auto` prefers those added first. A second registration of a name replaces the first.
    ///
    /// # Panics
    /// When `name` is empty, `auto`, or holds a `:` (which separates the variant) or a `/` (which marks a path).
    pub fn register(&mut self, name: &str, factory: Factory) {
        self.add(name, None, factory);
    }

    /// Like [`Registry::register`], for a backend whose memory space is known beforehand: `auto` does not make it (and
    /// wake a driver) for a caller whose tensors live elsewhere.
    ///
    /// # Panics
    /// As [`Registry::register`].
    pub fn register_in(&mut self, name: &str, memory_space: MemorySpace, factory: Factory) {
        self.add(name, Some(memory_space), factory);
    }

    fn add(&mut self, name: &str, memory_space: Option<MemorySpace>, factory: Factory) {
        let reserved = name.is_empty() || name == "auto" || name.contains([':', '/']);
        assert!(!reserved, "'{name}' cannot name a backend");
        let entry = Entry { name: name.to_owned(), memory_space, factory };
        match self.entries.iter_mut().find(|e| e.name == name) {
            Some(old) => *old = entry,
            None => self.entries.push(entry),
        }
    }

    /// Lets names and paths resolve to shared libraries.
    pub fn set_plugin_loader(&mut self, loader: Arc<dyn PluginLoader>) {
        self.plugins = Some(loader);
    }

    /// Names of the registered backends.
    pub fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|e| e.name.as_str()).collect()
    }

    /// Chooses by `request`, then by `environment`; the rules stand at the top of this module. The choice is logged
    /// at `info`, what else could have been chosen, or why nothing was, at `debug`.
    ///
    /// # Errors
    /// [`Error::UnknownBackend`] with every name there is; [`Error::Unavailable`] or the backend's own reason when the
    /// named one cannot run or keeps its tensors elsewhere; [`Error::Plugin`] when the named plugin cannot be used;
    /// [`Error::Unavailable`] when `auto` finds none.
    pub fn select(&self, request: &Request, environment: &Environment) -> Result<Selection> {
        let argument = request.backend.as_deref().map(str::trim).filter(|n| !n.is_empty());
        let named = match argument {
            Some("auto") => None,
            Some(name) => Some((name.to_owned(), "backend")),
            None => environment.backend().map(|name| (name, "JFA_BACKEND")),
        };
        let selection = match named {
            Some((name, variable)) => self.select_named(&name, variable, request, environment),
            None => self.select_auto(request, environment),
        }
        .inspect_err(|error| tracing::debug!(target: "jfa", %error, "no backend chosen"))?;
        for s in &selection.skipped {
            tracing::info!(target: "jfa", backend = %s.name, reason = %s.reason, "backend skipped");
        }
        for (place, candidate) in selection.candidates.iter().enumerate() {
            let (name, description) = (candidate.name(), candidate.description());
            tracing::debug!(target: "jfa", backend = %name, place = place + 1, %description, "candidate");
        }
        let chosen = &selection.candidates[0];
        tracing::info!(
            target: "jfa", backend = %chosen.name(), chosen_by = %selection.chosen_by, description = %chosen.description(),
            "backend chosen"
        );
        Ok(selection)
    }

    fn select_named(
        &self,
        name: &str,
        variable: &'static str,
        request: &Request,
        environment: &Environment,
    ) -> Result<Selection> {
        let backend = self.named(name, variable, environment)?;
        let space = backend.capabilities().memory_space;
        if let Some(wanted) = request.memory_space
            && wanted != space
        {
            let reason = format!("its tensors live in {space}, the caller's in {wanted} ({variable} names it)");
            return Err(Error::Unavailable { name: name.to_owned(), reason });
        }
        let chosen_by = match variable {
            "backend" => format!("argument backend={name}"),
            _ => format!("{variable}={name}"),
        };
        Ok(Selection { candidates: vec![backend], skipped: Vec::new(), chosen_by })
    }

    fn named(
        &self,
        name: &str,
        variable: &'static str,
        environment: &Environment,
    ) -> Result<Arc<dyn AttentionBackend>> {
        let search_path = environment.search_path();
        if name.contains('/') {
            let plugin = |reason: &str| Error::Plugin { path: name.to_owned(), reason: reason.to_owned() };
            let Some(loader) = &self.plugins else {
                return Err(plugin("this program does not load plugins"));
            };
            return loader.load(name, &search_path)?.ok_or_else(|| plugin("no such file"));
        }
        let (base, variant) = match name.split_once(':') {
            Some((base, variant)) => (base, Some(variant)),
            None => (name, None),
        };
        if let Some(entry) = self.entries.iter().find(|e| e.name == base) {
            return (entry.factory)(variant);
        }
        if let Some(loader) = &self.plugins
            && let Some(backend) = loader.load(name, &search_path)?
        {
            return Ok(backend);
        }
        let mut available: Vec<_> = std::iter::once("auto").chain(self.names()).map(str::to_owned).collect();
        if let Some(loader) = &self.plugins {
            available.extend(loader.discover(&search_path).into_iter().map(|(name, result)| match result {
                Ok(_) => format!("{name} (plugin)"),
                Err(e) => format!("{name} (plugin, unusable: {e})"),
            }));
        }
        Err(Error::UnknownBackend {
            variable: variable.to_owned(),
            name: name.to_owned(),
            available: available.join(", "),
        })
    }

    fn select_auto(&self, request: &Request, environment: &Environment) -> Result<Selection> {
        let mut candidates = Vec::new();
        let mut skipped = Vec::new();
        let mut seen = Vec::new();
        self.walk(environment, request.memory_space, |s| {
            seen.push(s.name.clone());
            match (s.backend, s.passed_over) {
                (_, Some(reason)) => skipped.push(Skipped { name: s.name, reason }),
                (Err(e), None) => skipped.push(Skipped { name: s.name, reason: e.to_string() }),
                (Ok(backend), None) => candidates.push(backend),
            }
        });
        for name in environment.disabled() {
            if !seen.contains(&name) {
                let reason = "JFA_BACKEND_DISABLE names it, but there is no such backend".to_owned();
                skipped.push(Skipped { name, reason });
            }
        }
        if candidates.is_empty() {
            let reasons: Vec<_> = skipped.iter().map(|s| format!("'{}': {}", s.name, s.reason)).collect();
            let reason = if reasons.is_empty() { "there is no backend".to_owned() } else { reasons.join("; ") };
            return Err(Error::Unavailable { name: "auto".to_owned(), reason });
        }
        Ok(Selection { candidates, skipped, chosen_by: "auto".to_owned() })
    }

    /// Every backend there is, made where possible, in the order in which `auto` considers them; for reports.
    pub fn survey(&self, environment: &Environment) -> Vec<Surveyed> {
        let mut all = Vec::new();
        self.walk(environment, None, |s| all.push(s));
        // A disabled backend is not made by `auto`; a report wants to show it all the same.
        for s in &mut all {
            if s.passed_over.is_some()
                && s.origin == Origin::Registered
                && let Some(entry) = self.entries.iter().find(|e| e.name == s.name)
            {
                s.backend = (entry.factory)(None);
            }
        }
        all
    }

    /// Calls `visit` with every backend in `auto`'s order. Those passed over are not made, except plugins, whose
    /// libraries have to be opened to learn their names.
    fn walk(&self, environment: &Environment, space: Option<MemorySpace>, mut visit: impl FnMut(Surveyed)) {
        let disabled = environment.disabled();
        let elsewhere = |has: MemorySpace| {
            let wanted = space.filter(|&w| w != has)?;
            Some(format!("its tensors live in {has}, the caller's in {wanted}"))
        };
        let disabled = |name: &str| disabled.contains(name).then(|| "named in JFA_BACKEND_DISABLE".to_owned());
        for entry in &self.entries {
            let name = entry.name.clone();
            let mut passed_over = disabled(&name).or_else(|| entry.memory_space.and_then(elsewhere));
            let backend = match &passed_over {
                Some(reason) => Err(Error::Unavailable { name: name.clone(), reason: reason.clone() }),
                None => (entry.factory)(None),
            };
            if let Ok(b) = &backend {
                passed_over = passed_over.or_else(|| elsewhere(b.capabilities().memory_space));
            }
            visit(Surveyed { name, origin: Origin::Registered, backend, passed_over });
        }
        let Some(loader) = &self.plugins else { return };
        for (name, backend) in loader.discover(&environment.search_path()) {
            let shadowed = || {
                let registered = self.entries.iter().any(|e| e.name == name);
                registered.then(|| "a registered backend has this name; name the library by its path".to_owned())
            };
            let space = || backend.as_ref().ok().and_then(|b| elsewhere(b.capabilities().memory_space));
            let passed_over = disabled(&name).or_else(shadowed).or_else(space);
            visit(Surveyed { name, origin: Origin::Plugin, backend, passed_over });
        }
    }
}
