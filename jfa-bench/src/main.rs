//! The command line of JFA.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use jfa_bench::{ab, check, info, run};

/// Attention over jagged tensors: what is there, how fast it is, and whether it keeps the contract.
///
/// The environment chooses as for the library: JFA_BACKEND, JFA_BACKEND_PATH, JFA_BACKEND_DISABLE, JFA_LOG, JFA_VALIDATE.
#[derive(Parser)]
#[command(name = "jfa-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Backends, devices and capabilities, and why each backend was skipped.
    Info(info::InfoArgs),
    /// Time forward and backward over workloads, after checking them against the oracle.
    Run(run::RunArgs),
    /// The conformance suite: every row of the contract, against any backend or plugin.
    Check(check::CheckArgs),
    /// Compare two backends on the same inputs, in alternation.
    Ab(ab::AbArgs),
}

fn main() -> ExitCode {
    // Whoever reads the output may stop early (`jfa-bench info | head`); a Rust program would panic about it.
    #[cfg(unix)]
    // SAFETY: no other thread exists yet, and the default action runs no code of ours.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    jfa_core::log::install_stderr(jfa_core::registry::Environment::from_process().log_level());
    let result = match Cli::parse().command {
        Command::Info(args) => info::info(&args).map(|()| true),
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::check(&args),
        Command::Ab(args) => ab::ab(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(2)
        }
    }
}
