//! Development tasks, run as `cargo xtask <task>`.

mod build;
mod gpu_tests;
mod rows;
mod sass;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks")]
struct Cli {
    /// Work on another checkout of this workspace.
    #[arg(long, global = true, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile the GPU kernels of every crate and write its bundles; needs Python 3, gcc and a package index, no GPU.
    Kernels(build::Options),
    /// Build the tests that need a GPU into a folder that runs on a machine without Rust, and run it where there is a
    /// device.
    GpuTests(gpu_tests::Options),
}

/// Where things are.
struct Places {
    /// The workspace.
    root: PathBuf,
    /// Build outputs.
    target: PathBuf,
}

impl Places {
    fn find(root: Option<PathBuf>) -> Result<Self> {
        let own = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned);
        let root = root.or_else(own).context("xtask stands in no workspace")?;
        // This program is <target>/<profile>/xtask.
        let exe = std::env::current_exe()?;
        let target = exe.ancestors().nth(2).context("the program has no target folder")?.to_owned();
        Ok(Places { root, target })
    }
}

fn main() -> ExitCode {
    let run = || {
        let cli = Cli::parse();
        let places = Places::find(cli.root)?;
        match cli.task {
            Task::Kernels(options) => build::run(&places, &options),
            Task::GpuTests(options) => gpu_tests::run(&places, &options),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
