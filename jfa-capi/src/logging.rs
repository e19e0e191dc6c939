//! Messages of the C library: to the callback of the context whose call is running on this thread, else to standard
//! error.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use jfa_core::registry::{Environment, LogLevel};

use crate::abi::{jfa_log_fn, jfa_log_level};
use crate::boundary::Result;
use crate::status::c_text;

/// A context's callback.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    function: unsafe extern "C" fn(*mut c_void, i32, *const std::ffi::c_char),
    data: *mut c_void,
    level: LogLevel,
}

// SAFETY: the header asks for a callback that several threads may call at once.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

thread_local! {
    static CURRENT: Cell<Option<Sink>> = const { Cell::new(None) };
    /// Messages about the environment, held until the environment has said how much is logged.
    static HELD: RefCell<Option<Vec<(LogLevel, String)>>> = const { RefCell::new(None) };
}

/// `JFA_LOG` as last read, for what goes to standard error.
static STDERR: AtomicU8 = AtomicU8::new(LogLevel::Warn as u8);

/// The highest level any context asked for; `None` before the first.
static HIGHEST: Mutex<Option<LogLevel>> = Mutex::new(None);

pub(crate) fn c_level(level: LogLevel) -> i32 {
    (match level {
        LogLevel::Error => jfa_log_level::JFA_LOG_ERROR,
        LogLevel::Warn => jfa_log_level::JFA_LOG_WARN,
        LogLevel::Info => jfa_log_level::JFA_LOG_INFO,
        LogLevel::Debug => jfa_log_level::JFA_LOG_DEBUG,
        LogLevel::Trace => jfa_log_level::JFA_LOG_TRACE,
    }) as i32
}

/// The level of a C value; `None` for the default.
pub(crate) fn core_level(value: i32) -> Result<Option<LogLevel>> {
    if value == jfa_log_level::JFA_LOG_DEFAULT as i32 {
        return Ok(None);
    }
    match LogLevel::ALL.into_iter().find(|l| c_level(*l) == value) {
        Some(level) => Ok(Some(level)),
        None => Err(jfa_core::Error::invalid("log_level", value, "no jfa_log_level; there are 0 to 5").into()),
    }
}

/// Makes the sink of a context and reads the environment with it in place, so that warnings about the environment reach
/// it too. In a program that has a `tracing` subscriber of its own, messages go there instead.
pub(crate) fn start(log: jfa_log_fn, data: *mut c_void, level: i32) -> Result<(Option<Sink>, Environment)> {
    let asked = core_level(level)?;
    let mut highest = HIGHEST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if highest.is_none() {
        jfa_core::log::install(LogLevel::Warn, Box::new(deliver));
    }
    let sink = |level| log.map(|function| Sink { function, data, level });
    HELD.replace(Some(Vec::new()));
    let environment = Environment::from_process();
    let held = HELD.take().unwrap_or_default();
    let from_environment = environment.log_level();
    STDERR.store(from_environment as u8, Ordering::Relaxed);
    let sink = sink(asked.unwrap_or(from_environment));
    let wanted = sink.map_or(from_environment, |s| s.level.max(from_environment));
    if highest.is_none_or(|h| h < wanted) {
        *highest = Some(wanted);
        jfa_core::log::set_level(wanted);
    }
    scoped(sink, || held.iter().for_each(|(level, message)| deliver(*level, message)));
    Ok((sink, environment))
}

/// Runs `body` with messages of this thread going to `sink`.
#[inline]
pub(crate) fn scoped<R>(sink: Option<Sink>, body: impl FnOnce() -> R) -> R {
    struct Restore(Option<Sink>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    if sink.is_none() {
        return body();
    }
    let _restore = Restore(CURRENT.replace(sink));
    body()
}

fn deliver(level: LogLevel, message: &str) {
    let held = HELD.try_with(|held| {
        held.borrow_mut().as_mut().map(|messages| messages.push((level, message.to_owned()))).is_some()
    });
    if held == Ok(true) {
        return;
    }
    match CURRENT.try_with(Cell::get).ok().flatten() {
        Some(sink) if level <= sink.level => {
            let text = c_text(message);
            // SAFETY: the header's contract for the callback; the text outlives the call.
            unsafe { (sink.function)(sink.data, c_level(level), text.as_ptr()) };
        }
        Some(_) => {}
        None if level as u8 <= STDERR.load(Ordering::Relaxed) => {
            // A closed standard error is no reason to fail.
            let _ = writeln!(std::io::stderr().lock(), "jfa {level}: {message}");
        }
        None => {}
    }
}
