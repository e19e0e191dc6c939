//! Development tasks, run as `cargo xtask <task>`.

mod build;
mod gpu_tests;
mod rows;
mod toolchain;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks")]
struct Cli {
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
    fn find() -> Result<Self> {
        let root =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().context("xtask stands in no workspace")?.to_owned();
        // This program is <target>/<profile>/xtask.
        let exe = std::env::current_exe()?;
        let target = exe.ancestors().nth(2).context("the program has no target folder")?.to_owned();
        Ok(Places { root, target })
    }
}

fn main() -> ExitCode {
    let run = || {
        let places = Places::find()?;
        match Cli::parse().task {
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
