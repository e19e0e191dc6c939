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

use crate::environment::LogLevel;

/// Receives one message.
pub type Sink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// How much the installed sink receives, as a number of [`LogLevel`]; a process has one sink, so it has one level.
static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Warn as u8);

/// Changes how much the installed sink receives. Without one installed here, this changes nothing.
pub fn set_level(level: LogLevel) {
    if LEVEL.swap(level as u8, Ordering::Relaxed) != level as u8 {
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Sends messages up to `level` to `sink`, unless this process (this copy of `tracing`) already has a subscriber;
/// returns whether it was installed.
pub fn install(level: LogLevel, sink: Sink) -> bool {
    let installed = tracing::subscriber::set_global_default(Subscriber { sink }).is_ok();
    if installed {
        set_level(level);
    }
    installed
}

/// [`install`], writing lines like `jfa warn: ...` to standard error.
pub fn install_stderr(level: LogLevel) -> bool {
    install(
        level,
        Box::new(|level, message| {
            // A closed standard error is no reason to fail.
            let _ = writeln!(std::io::stderr().lock(), "jfa {level}: {message}");
        }),
    )
}

struct Subscriber {
    sink: Sink,
}

fn level() -> LogLevel {
    let level = LEVEL.load(Ordering::Relaxed);
    LogLevel::ALL.into_iter().find(|l| *l as u8 == level).unwrap_or_default()
}

fn ours(target: &str) -> bool {
    target == "jfa" || target.starts_with("jfa_") || target.starts_with("jfa::")
}

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= level().tracing() && ours(metadata.target())
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
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => LogLevel::Error,
            tracing::Level::WARN => LogLevel::Warn,
            tracing::Level::INFO => LogLevel::Info,
            tracing::Level::DEBUG => LogLevel::Debug,
            _ => LogLevel::Trace,
        };
        let mut line = Line::default();
        event.record(&mut line);
        (self.sink)(level, &line.finish());
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
