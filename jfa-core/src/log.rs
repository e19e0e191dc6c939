//! Where this library's messages go.
//!
//! Everything is emitted through `tracing`, with the target `jfa`. A Rust program that has a `tracing` subscriber sees
//! the messages there, filtered as it likes; nothing here interferes. A program that has none sees nothing, unless it
//! (or the C library on its behalf, within its own copy of `tracing`) calls [`install`].

use std::fmt::Write;
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};

use tracing::field::{Field, Visit};
use tracing::span;
use tracing::subscriber::Interest;

use crate::environment::LogLevel;
use crate::fork::Shared;

/// Receives one message.
pub type Sink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// Says whether a message of a level, logged now on this thread, has a receiver.
pub type Wanted = fn(LogLevel) -> bool;

/// How much the installed sink receives, as a number of [`LogLevel`]; a process has one sink, so it has one level.
static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Warn as u8);

/// Whether a sink was installed here. `tracing` has locks of its own, which are taken only behind this one.
static INSTALLED: Shared<bool> = Shared::new(false);

/// Changes how much the installed sink receives. Without one installed here, this changes nothing.
pub fn set_level(level: LogLevel) {
    INSTALLED.with(|installed| {
        if *installed {
            change_level(level);
        }
    });
}

/// [`set_level`], only ever to more.
pub fn raise_level(to: LogLevel) {
    INSTALLED.with(|installed| {
        if *installed && to > level() {
            change_level(to);
        }
    });
}

fn change_level(level: LogLevel) {
    if LEVEL.swap(level as u8, Ordering::Relaxed) != level as u8 {
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Sends messages up to `level` to `sink`, unless this process (this copy of `tracing`) already has a subscriber;
/// returns whether it was installed.
pub fn install(level: LogLevel, sink: Sink) -> bool {
    install_filtered(level, |_| true, sink)
}

/// [`install`], asking before each message whether it is wanted, so that one that is not costs no text.
pub fn install_filtered(level: LogLevel, wanted: Wanted, sink: Sink) -> bool {
    INSTALLED.with(|installed| {
        // A second attempt would leave its traces in `tracing` although it must fail.
        if *installed {
            return false;
        }
        *installed = tracing::subscriber::set_global_default(Subscriber { wanted, sink }).is_ok();
        if *installed {
            change_level(level);
        }
        *installed
    })
}

/// Whether messages go to a sink that was installed here.
pub fn installed() -> bool {
    INSTALLED.with(|installed| *installed)
}

/// [`install`], writing lines like `jfa warn: ...` to standard error.
pub fn install_stderr(level: LogLevel) -> bool {
    install(level, Box::new(write_stderr))
}

/// Writes a line like `jfa warn: ...` to standard error.
pub fn write_stderr(level: LogLevel, message: &str) {
    let line = format!("jfa {level}: {message}\n");
    // Past the standard library's lock, which a process made by fork could find locked; one write is one line all the same.
    #[cfg(unix)]
    let mut stderr = {
        use std::os::fd::FromRawFd;
        // SAFETY: the descriptor is only written to, and never closed here.
        std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(libc::STDERR_FILENO) })
    };
    #[cfg(not(unix))]
    let mut stderr = std::io::stderr();
    // A closed standard error is no reason to fail.
    let _ = stderr.write_all(line.as_bytes());
}

struct Subscriber {
    wanted: Wanted,
    sink: Sink,
}

fn level() -> LogLevel {
    let level = LEVEL.load(Ordering::Relaxed);
    LogLevel::ALL.into_iter().find(|l| *l as u8 == level).unwrap_or_default()
}

fn ours(target: &str) -> bool {
    target == "jfa" || target.starts_with("jfa_") || target.starts_with("jfa::")
}

/// Whether messages of this kind can be wanted by anyone at the present level.
fn possible(metadata: &tracing::Metadata<'_>) -> bool {
    *metadata.level() <= level().tracing() && ours(metadata.target())
}

fn level_of(level: tracing::Level) -> LogLevel {
    match level {
        tracing::Level::ERROR => LogLevel::Error,
        tracing::Level::WARN => LogLevel::Warn,
        tracing::Level::INFO => LogLevel::Info,
        tracing::Level::DEBUG => LogLevel::Debug,
        _ => LogLevel::Trace,
    }
}

impl tracing::Subscriber for Subscriber {
    fn register_callsite(&self, metadata: &'static tracing::Metadata<'static>) -> Interest {
        if possible(metadata) { Interest::sometimes() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        possible(metadata) && (self.wanted)(level_of(*metadata.level()))
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(level().tracing().into())
    }

    // Spans carry nothing that a line of text needs; every one gets the same identity.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        (self.sink)(level_of(*event.metadata().level()), &line.finish());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The message, then the fields as `name=value`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn finish(self) -> String {
        self.message + &self.fields
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}
