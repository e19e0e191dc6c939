//! The process environment, as far as this library reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::str::FromStr;

use crate::fork::Shared;

/// How much is logged: `JFA_LOG`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogLevel {
    /// Failures that the caller also sees as a status.
    Error,
    /// What is likely a mistake (the default).
    #[default]
    Warn,
    /// Choices: the backend, and why others were skipped.
    Info,
    /// The steps of a choice, candidate by candidate, and every plan: kernels and memory, or why there is none.
    Debug,
    /// Every `build_schedule`, `forward` and `backward`, with its error if it fails.
    Trace,
}

impl LogLevel {
    /// Every level, from the fewest messages to the most.
    pub const ALL: [LogLevel; 5] = [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];

    /// The name, as `JFA_LOG` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }

    /// The same level in `tracing`'s terms.
    pub const fn tracing(self) -> tracing::Level {
        match self {
            LogLevel::Error => tracing::Level::ERROR,
            LogLevel::Warn => tracing::Level::WARN,
            LogLevel::Info => tracing::Level::INFO,
            LogLevel::Debug => tracing::Level::DEBUG,
            LogLevel::Trace => tracing::Level::TRACE,
        }
    }
}

impl std::fmt::Display for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LogLevel {
    type Err = crate::Error;

    fn from_str(s: &str) -> crate::Result<Self> {
        LogLevel::ALL
            .into_iter()
            .find(|l| l.name().eq_ignore_ascii_case(s.trim()))
            .ok_or_else(|| crate::Error::invalid("log level", s, "must be error, warn, info, debug or trace"))
    }
}

/// The variables of the contract's environment table, read once per selection.
///
/// | variable | meaning |
/// |---|---|
/// | `JFA_BACKEND` | `auto`, a backend's name (`name:variant`), a plugin's name, or the path of a plugin library |
/// | `JFA_BACKEND_PATH` | directories searched for plugins, `:`-separated |
/// | `JFA_BACKEND_DISABLE` | names that `auto` must skip, comma-separated |
/// | `JFA_LOG` | `error`, `warn`, `info`, `debug`, `trace` |
/// | `JFA_VALIDATE` | `1`: backends check device offsets, which synchronises |
///
/// An empty value counts as unset.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    values: BTreeMap<String, OsString>,
}

impl Environment {
    /// The variables that have a meaning.
    pub const VARIABLES: [&'static str; 5] =
        ["JFA_BACKEND", "JFA_BACKEND_PATH", "JFA_BACKEND_DISABLE", "JFA_LOG", "JFA_VALIDATE"];

    /// The process environment; empty in set-uid processes (and wherever else the system asks for secure execution),
    /// whose caller must not choose which code is loaded. Logs what [`Environment::warn`] logs.
    pub fn from_process() -> Self {
        let environment = Self::from_process_silently();
        environment.warn();
        environment
    }

    /// [`Environment::from_process`] without a word, for callers that learn here where messages go.
    pub fn from_process_silently() -> Self {
        if secure_execution() {
            return Environment::default();
        }
        // `vars_os`: `vars` panics when any variable of the process, ours or not, is not Unicode.
        let values = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok().filter(|k| k.starts_with("JFA_"))?, v)))
            .collect();
        Environment { values }
    }

    /// Logs [`Environment::warnings`], each once per process. One that nobody receives, since nobody listens here or only
    /// to worse, does not count.
    pub fn warn(&self) {
        static LOGGED: Shared<BTreeSet<String>> = Shared::new(BTreeSet::new());
        for warning in self.warnings() {
            // The lock is given back before the message goes out: its receiver may do anything.
            if tracing::enabled!(target: "jfa", tracing::Level::WARN) && LOGGED.with(|l| l.insert(warning.clone())) {
                tracing::warn!(target: "jfa", "{warning}");
            }
        }
    }

    /// Given pairs, for tests and embedders.
    pub fn from_pairs<K: Into<String>, V: Into<OsString>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        Environment { values: pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect() }
    }

    /// One variable; `None` when unset, empty or not Unicode (see [`Environment::get_os`]).
    pub fn get(&self, name: &str) -> Option<&str> {
        self.get_os(name).and_then(OsStr::to_str)
    }

    /// One variable; `None` when unset or empty.
    pub fn get_os(&self, name: &str) -> Option<&OsStr> {
        self.values.get(name).map(OsString::as_os_str).filter(|v| !v.is_empty())
    }

    /// `JFA_BACKEND`, where it names a backend: `None` for `auto`.
    pub fn backend(&self) -> Option<String> {
        let value = self.get_os("JFA_BACKEND")?.to_string_lossy();
        let value = value.trim();
        (!value.is_empty() && value != "auto").then(|| value.to_owned())
    }

    /// `JFA_BACKEND_PATH`: directories to search for plugins, in order.
    pub fn search_path(&self) -> Vec<PathBuf> {
        let Some(value) = self.get_os("JFA_BACKEND_PATH") else { return Vec::new() };
        std::env::split_paths(value).filter(|p| !p.as_os_str().is_empty()).collect()
    }

    /// `JFA_BACKEND_DISABLE`: names that `auto` must skip.
    pub fn disabled(&self) -> BTreeSet<String> {
        let value = self.get_os("JFA_BACKEND_DISABLE").map(OsStr::to_string_lossy).unwrap_or_default();
        value.split([',', ' ']).map(str::trim).filter(|n| !n.is_empty()).map(str::to_owned).collect()
    }

    /// `JFA_LOG`; the default when unset or unreadable (then [`Environment::warnings`] says so).
    pub fn log_level(&self) -> LogLevel {
        self.get("JFA_LOG").and_then(|v| v.parse().ok()).unwrap_or_default()
    }

    /// `JFA_VALIDATE`: whether device backends check offsets in device memory, which synchronises.
    pub fn validate(&self) -> bool {
        self.get("JFA_VALIDATE").is_some_and(|v| v.trim() == "1")
    }

    /// What looks like a mistake: unknown `JFA_*` variables and values without a meaning.
    pub fn warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        for (name, value) in &self.values {
            let value = value.to_string_lossy();
            match name.as_str() {
                n if !Self::VARIABLES.contains(&n) => {
                    let known = Self::VARIABLES.join(", ");
                    out.push(format!("unknown environment variable {name}={value}; there are: {known}"));
                }
                "JFA_LOG" if !value.is_empty() && value.parse::<LogLevel>().is_err() => {
                    let level = LogLevel::default();
                    out.push(format!("JFA_LOG={value} is none of error, warn, info, debug, trace; using {level}"));
                }
                "JFA_VALIDATE" if !matches!(value.trim(), "" | "0" | "1") => {
                    out.push(format!("JFA_VALIDATE={value} is neither 0 nor 1; not validating"));
                }
                _ => {}
            }
        }
        out
    }
}

/// Whether the kernel flagged this process for secure execution (set-uid, set-gid, file capabilities).
#[cfg(target_os = "linux")]
fn secure_execution() -> bool {
    // SAFETY: getauxval reads the process's own auxiliary vector and has no preconditions.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Whether this process runs with another identity than its caller's.
#[cfg(all(unix, not(target_os = "linux")))]
fn secure_execution() -> bool {
    // SAFETY: these calls have no preconditions and cannot fail.
    unsafe { libc::getuid() != libc::geteuid() || libc::getgid() != libc::getegid() }
}

#[cfg(not(unix))]
fn secure_execution() -> bool {
    false
}
