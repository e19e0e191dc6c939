//! Status codes, and the text of the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use jfa_core::Error;

use crate::abi::jfa_status;
use jfa_status::*;

/// Why an entry point fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error of the core.
    #[error(transparent)]
    Core(#[from] Error),
    /// A breach of the C ABI itself.
    #[error("{text}")]
    Abi {
        /// The code.
        status: jfa_status,
        /// What and where.
        text: String,
    },
}

impl Failure {
    pub(crate) fn new(status: jfa_status, text: impl Into<String>) -> Self {
        Failure::Abi { status, text: text.into() }
    }

    pub(crate) fn status(&self) -> jfa_status {
        match self {
            Failure::Abi { status, .. } => *status,
            Failure::Core(e) => status_of(e),
        }
    }
}

/// The code of a core error.
pub(crate) fn status_of(error: &Error) -> jfa_status {
    match error {
        Error::InvalidArgument { .. } => JFA_ERROR_INVALID_ARGUMENT,
        Error::NullPointer { .. } => JFA_ERROR_NULL_POINTER,
        Error::Misaligned { .. } => JFA_ERROR_MISALIGNED,
        Error::BufferTooSmall { .. } => JFA_ERROR_BUFFER_TOO_SMALL,
        Error::Unsupported { .. } => JFA_ERROR_UNSUPPORTED,
        Error::UnknownBackend { .. } => JFA_ERROR_UNKNOWN_BACKEND,
        Error::Unavailable { .. } => JFA_ERROR_BACKEND_UNAVAILABLE,
        Error::Plugin { .. } => JFA_ERROR_PLUGIN,
        // A backend outside the library speaks this ABI: its own code goes through to the caller where it is one.
        Error::Backend { status, .. } => known(*status).filter(|s| *s != JFA_OK).unwrap_or(JFA_ERROR_BACKEND),
        Error::Device { .. } => JFA_ERROR_DEVICE,
        _ => JFA_ERROR_INTERNAL,
    }
}

/// Every code with its name.
pub(crate) const CODES: &[(jfa_status, &CStr)] = &[
    (JFA_OK, c"JFA_OK"),
    (JFA_ERROR_INVALID_ARGUMENT, c"JFA_ERROR_INVALID_ARGUMENT"),
    (JFA_ERROR_NULL_POINTER, c"JFA_ERROR_NULL_POINTER"),
    (JFA_ERROR_MISALIGNED, c"JFA_ERROR_MISALIGNED"),
    (JFA_ERROR_BUFFER_TOO_SMALL, c"JFA_ERROR_BUFFER_TOO_SMALL"),
    (JFA_ERROR_STRUCT_SIZE, c"JFA_ERROR_STRUCT_SIZE"),
    (JFA_ERROR_STRUCT_TOO_NEW, c"JFA_ERROR_STRUCT_TOO_NEW"),
    (JFA_ERROR_UNSUPPORTED, c"JFA_ERROR_UNSUPPORTED"),
    (JFA_ERROR_UNSUPPORTED_VERSION, c"JFA_ERROR_UNSUPPORTED_VERSION"),
    (JFA_ERROR_UNKNOWN_BACKEND, c"JFA_ERROR_UNKNOWN_BACKEND"),
    (JFA_ERROR_BACKEND_UNAVAILABLE, c"JFA_ERROR_BACKEND_UNAVAILABLE"),
    (JFA_ERROR_PLUGIN, c"JFA_ERROR_PLUGIN"),
    (JFA_ERROR_BACKEND, c"JFA_ERROR_BACKEND"),
    (JFA_ERROR_DEVICE, c"JFA_ERROR_DEVICE"),
    (JFA_ERROR_INTERNAL, c"JFA_ERROR_INTERNAL"),
];

/// The status of a code, where there is one.
pub(crate) fn known(code: i32) -> Option<jfa_status> {
    CODES.iter().map(|(s, _)| *s).find(|s| *s as i32 == code)
}

/// The name of a code, where there is one.
pub(crate) fn name(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|(s, _)| *s as i32 == code).map(|(_, n)| *n)
}

/// A text as C wants it. Texts carry callers' bytes (names, paths), so a NUL within is shown, not cut at.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\\0")).unwrap_or_default()
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Keeps the text for this thread.
pub(crate) fn set_last_error(text: &str) {
    // During the destruction of the thread's locals there is nobody left to ask for the text.
    let _ = LAST.try_with(|last| *last.borrow_mut() = c_text(text));
}

/// The text kept for this thread, "" when nothing has failed on it.
pub(crate) fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_name_and_none_is_an_errno() {
        for (status, name) in CODES {
            assert_eq!(name.to_str().unwrap(), format!("{status:?}"));
            assert!(*status == JFA_OK || *status as i32 >= 7001);
        }
        let mut codes: Vec<_> = CODES.iter().map(|(s, _)| *s as i32).collect();
        codes.dedup();
        assert_eq!(codes.len(), CODES.len());
        assert!(known(7000).is_none() && name(-1).is_none());
    }

    #[test]
    fn a_nul_in_a_text_is_shown() {
        set_last_error("a\0b");
        // SAFETY: the text lives until the next failure on this thread.
        assert_eq!(unsafe { CStr::from_ptr(last_error()) }, c"a\\0b");
    }

    #[test]
    fn each_thread_has_its_own_text() {
        set_last_error("here");
        std::thread::spawn(|| {
            // SAFETY: as above.
            assert_eq!(unsafe { CStr::from_ptr(last_error()) }, c"");
            set_last_error("there");
        })
        .join()
        .unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { CStr::from_ptr(last_error()) }, c"here");
    }
}
