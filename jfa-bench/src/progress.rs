//! Progress bars, and results as files.

use std::path::Path;

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `steps` steps on standard error; invisible when that is no terminal.
pub fn bar(steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:30} {pos}/{len} {msg}")
        .expect("the template is well-formed");
    bar.set_style(style);
    bar
}

/// Writes `value` to `path`, or to standard output when that is `-`.
pub fn write_json(path: &Path, value: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    if path.as_os_str() == "-" {
        print!("{text}");
        return Ok(());
    }
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
