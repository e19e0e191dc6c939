//! What can go wrong, each with the offending value in its text.

use std::fmt::Display;

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error a caller can act on: it names the argument and its value, or what is unsupported and what is.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument breaks a rule of the contract.
    #[error("{argument} = {value}: {reason}")]
    InvalidArgument {
        /// Name of the argument or field, as the C header spells it.
        argument: String,
        /// Its value.
        value: String,
        /// The rule it breaks.
        reason: String,
    },
    /// A null pointer where there is work to do.
    #[error("{argument} is null although there is work to do ({reason})")]
    NullPointer {
        /// Name of the argument.
        argument: String,
        /// Why it is needed.
        reason: String,
    },
    /// A pointer or stride that the backend's promises exclude.
    #[error("{argument} = {value}: backend '{backend}' needs a multiple of {required} bytes")]
    Misaligned {
        /// Name of the argument.
        argument: String,
        /// Its value (address, or stride in bytes).
        value: String,
        /// Required divisor in bytes.
        required: usize,
        /// Who needs it.
        backend: String,
    },
    /// A workspace or schedule buffer smaller than the plan asked for.
    #[error("{argument} has {given} bytes, the plan needs {needed}")]
    BufferTooSmall {
        /// Name of the buffer.
        argument: String,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// No backend does this combination.
    #[error("unsupported: {asked}; {lacks}")]
    Unsupported {
        /// What was asked.
        asked: String,
        /// What each candidate lacks and has.
        lacks: String,
    },
    /// A backend name nobody registered.
    #[error("{variable} = '{name}': there is no such backend; there are: {available}")]
    UnknownBackend {
        /// Where the name came from (`JFA_BACKEND` or an argument).
        variable: String,
        /// The name.
        name: String,
        /// Comma-separated names.
        available: String,
    },
    /// A backend exists but cannot run here.
    #[error("backend '{name}' is not available: {reason}")]
    Unavailable {
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A plugin library that cannot be used.
    #[error("plugin {path}: {reason}")]
    Plugin {
        /// Path of the library.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A backend outside this library (a plugin) reported a failure.
    #[error("backend '{name}': {reason} (status {status})")]
    Backend {
        /// Its name.
        name: String,
        /// The status it returned: one of the C header's, or any other number.
        status: i32,
        /// Its words.
        reason: String,
    },
    /// A driver call failed.
    #[error("{call} failed: {reason}")]
    Device {
        /// The driver function.
        call: String,
        /// The driver's words.
        reason: String,
    },
    /// A bug in this library.
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(argument: impl Into<String>, value: impl Display, reason: impl Into<String>) -> Self {
        Error::InvalidArgument { argument: argument.into(), value: value.to_string(), reason: reason.into() }
    }
}
