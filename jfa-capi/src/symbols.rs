//! The two symbols of the shared library; everything else is reached through the table.
//!
//! Where the linker takes a version script besides rustc's own (`build.rs` tries), the symbols are made here as aliases
//! that rustc does not export by itself, and the version script exports them as `jfa_get_api@@JFA_1`. Elsewhere rustc
//! exports them, without a version. Nothing else is visible either way.

use std::ffi::c_char;

use crate::abi::jfa_api;

/// The function table of `version` (`JFA_API_VERSION`); NULL when the library does not have it, and then
/// `jfa_last_error` says which it has. Loading the library and this call start no thread and touch no device.
#[cfg_attr(not(jfa_versioned_symbols), unsafe(no_mangle))]
pub extern "C" fn jfa_get_api(version: u32) -> *const jfa_api {
    crate::boundary::guard_value(std::ptr::null(), || crate::context::api(version))
}

/// What went wrong in the last call that failed on this thread: a text that names the argument and its value. Never
/// NULL; "" when nothing has failed. Valid until the next failure on this thread.
#[cfg_attr(not(jfa_versioned_symbols), unsafe(no_mangle))]
pub extern "C" fn jfa_last_error() -> *const c_char {
    crate::boundary::guard_value(c"".as_ptr(), crate::status::last_error)
}

#[cfg(jfa_versioned_symbols)]
std::arch::global_asm!(
    ".globl jfa_get_api",
    ".type jfa_get_api, @function",
    ".set jfa_get_api, {get_api}",
    ".globl jfa_last_error",
    ".type jfa_last_error, @function",
    ".set jfa_last_error, {last_error}",
    get_api = sym jfa_get_api,
    last_error = sym jfa_last_error,
);
