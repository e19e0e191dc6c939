//! The examples compile with the system's compilers and compute what they should, over real lengths.

mod common;

use std::process::Command;

use common::{SANITIZE, examples, lengths, library, naive, program, root, succeed};

fn run(command: &mut Command, sequences: &str, backend: &str) {
    let printed = succeed(command.arg(lengths()).arg(sequences));
    assert!(printed.contains(&format!("backend {backend}")) && printed.ends_with("ok\n"), "{printed}");
}

#[test]
fn c_by_dlopen() {
    let source = examples().join("c/attention.c");
    let plain = program(&source, "c-example", &["-ldl", "-lm"]);
    run(Command::new(&plain).arg(library()), "24", "cpu");
    // Only the header of the library is known to it, so it is not linked.
    let linked = succeed(Command::new("ldd").arg(&plain));
    assert!(!linked.contains("libjfa"), "{linked}");
    let arguments: Vec<_> = SANITIZE.iter().copied().chain(["-ldl", "-lm"]).collect();
    run(Command::new(program(&source, "c-example-sanitized", &arguments)).arg(library()), "5", "cpu");
}

#[test]
fn cpp_by_linking_with_the_backend_of_the_environment() {
    let source = examples().join("cpp/attention.cpp");
    let directory = library().parent().unwrap().display().to_string();
    let link = [format!("-L{directory}"), "-ljfa".to_owned(), format!("-Wl,-rpath,{directory}")];
    let link: Vec<_> = link.iter().map(String::as_str).collect();
    let plain = program(&source, "cpp-example", &link);
    run(&mut Command::new(&plain), "24", "cpu");
    run(Command::new(&plain).env("JFA_BACKEND", "cpu:2"), "24", "cpu");
    run(Command::new(&plain).env("JFA_BACKEND", "naive").env("JFA_BACKEND_PATH", naive()), "12", "naive");

    // The plugin under the sanitizers too.
    let arguments: Vec<_> = SANITIZE.iter().chain(&link).copied().collect();
    let sanitized = program(&source, "cpp-example-sanitized", &arguments);
    run(&mut Command::new(&sanitized), "5", "cpu");
    let plugins = common::scratch().join("sanitized");
    common::plugin(&examples().join("plugin_naive/plugin_naive.cpp"), &plugins, "naive", SANITIZE);
    run(Command::new(&sanitized).env("JFA_BACKEND", "naive").env("JFA_BACKEND_PATH", &plugins), "5", "naive");

    // An unknown backend ends the program with the names there are.
    let output = Command::new(&plain).arg(lengths()).env("JFA_BACKEND", "nonsense").output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("JFA_BACKEND = 'nonsense': there is no such backend") && said.contains("cpu"), "{said}");
}

#[test]
fn python_by_ctypes() {
    let Some(python) = common::python_with_numpy() else { return };
    run(Command::new(python).arg(examples().join("python/attention.py")).arg(library()), "24", "cpu");
}

#[test]
fn rust_by_embedding() {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root()).args(["run", "--quiet", "--offline", "-p", "jfa-capi", "--example", "attention"]);
    // In a folder of its own: a library that is also a cdylib has one file name whatever it was compiled with, so building it
    // here for one package would replace the one that the rest of a `cargo test --workspace` links.
    command.env("CARGO_TARGET_DIR", std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("example"));
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    run(command.arg("--"), "8", "cpu");
}
