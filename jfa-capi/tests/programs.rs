//! C and C++ programs against the shared library, plain and under AddressSanitizer and UndefinedBehaviorSanitizer.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{SANITIZE, library, program, root, scratch, succeed};

fn source(name: &str) -> PathBuf {
    root().join("jfa-capi/tests/c").join(name)
}

/// Arguments that link a program with the library.
fn linked() -> Vec<String> {
    let directory = library().parent().unwrap().display().to_string();
    vec![format!("-L{directory}"), "-ljfa".to_owned(), format!("-Wl,-rpath,{directory}"), "-lm".to_owned()]
}

fn build(file: &str, name: &str, more: &[&str]) -> PathBuf {
    let linked = linked();
    let arguments: Vec<_> = more.iter().copied().chain(linked.iter().map(String::as_str)).collect();
    program(&source(file), name, &arguments)
}

/// A program whose last line is "ok".
fn run(command: &mut Command) {
    let printed = succeed(command.env_remove("JFA_BACKEND").env_remove("JFA_BACKEND_PATH"));
    assert!(printed.ends_with("ok\n"), "{printed}");
}

fn both_ways(file: &str, name: &str, more: &[&str]) {
    run(&mut Command::new(build(file, name, more)));
    let sanitized: Vec<_> = more.iter().chain(SANITIZE).copied().collect();
    run(&mut Command::new(build(file, &format!("{name}-sanitized"), &sanitized)));
}

#[test]
fn every_mistake_is_a_status_and_a_text() {
    both_ways("errors.c", "errors", &[]);
}

#[test]
fn schedules_of_other_batches_and_forked_processes() {
    // Without optimisation a library of Rust takes more of a stack, as do programs with sanitizers.
    let stack = if cfg!(debug_assertions) { "-DSTACK=1048576" } else { "-DSTACK=65536" };
    run(&mut Command::new(build("misuse.c", "misuse", &["-O2", "-pthread", stack])));
}

/// Locks of the library that another thread of the parent held are free in a child; also what it writes messages with.
#[test]
fn forks_amid_other_threads_find_nothing_locked() {
    let program = build("forks.c", "forks", &["-O2", "-pthread"]);
    run(Command::new(&program).env("JFA_LOG", "error"));
    run(Command::new(&program).env("JFA_LOG", "debug"));
}

#[test]
fn a_newer_caller_works_on_this_library() {
    both_ways("newer_caller.c", "newer-caller", &[]);
}

/// The headers of 0.1, as they were: programs and plugins compiled with them are still at home here.
#[test]
fn an_older_caller_works_on_this_library() {
    let old = format!("-I{}", root().join("jfa-capi/tests/abi/0.1").display());
    let directory = scratch().join("old");
    std::fs::create_dir_all(&directory).unwrap();
    // The directory comes before `include`, so that these are the headers that are read.
    for (file, out) in [("jfa-capi/tests/c/errors.c", "old-errors"), ("examples/c/attention.c", "old-example")] {
        let mut command = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
        command
            .args(["-std=c11", &old, "-o"])
            .arg(directory.join(out))
            .arg(root().join(file))
            .args(linked())
            .arg("-ldl");
        succeed(&mut command);
    }
    run(&mut Command::new(directory.join("old-errors")));
    let plugin = directory.join(jfa::plugin::Loader::file_name("naive"));
    let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    command.args(["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", &old, "-o"]).arg(&plugin);
    succeed(command.arg(root().join("examples/plugin_naive/plugin_naive.cpp")));
    let mut command = Command::new(directory.join("old-example"));
    let printed = succeed(command.arg(library()).arg(common::lengths()).arg("6").env("JFA_BACKEND", &plugin));
    assert!(printed.contains("backend naive") && printed.ends_with("ok\n"), "{printed}");
}

#[test]
fn eight_threads_share_a_handle() {
    both_ways("threads.cpp", "threads", &["-O2"]);
}

#[test]
fn the_cpp_face_owns_throws_and_takes_dlpack() {
    both_ways("face.cpp", "face", &[]);
    both_ways("face.cpp", "face-dlpack-first", &["-DDLPACK_FIRST"]);
    both_ways("face.cpp", "face-dlpack-last", &["-DDLPACK_LAST"]);
}

#[test]
fn dlpack_tensors_of_numpy_become_views() {
    let Some(python) = common::python_with_numpy() else { return };
    let shim = scratch().join("dlpack_shim.so");
    let mut command = common::compiler(&source("dlpack_shim.c"));
    succeed(command.args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(source("dlpack_shim.c")));
    run(Command::new(python).arg(source("dlpack_numpy.py")).arg(shim));
}

/// A program in an environment without variables of the library, whatever the tests run in.
fn without_variables(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("JFA_")) {
        command.env_remove(name);
    }
    command
}

/// At debug the steps of a choice and every plan, at trace every call, good or bad, to the log of the context in question.
#[test]
fn every_level_has_its_messages() {
    let program = build("messages.c", "messages", &[]);
    run(&mut without_variables(&program));
    run(&mut without_variables(&build("messages.c", "messages-sanitized", SANITIZE)));
}

#[test]
fn a_warning_that_nobody_received_is_still_given() {
    let program = build("messages.c", "warnings", &[]);
    run(without_variables(&program).env("JFA_BANANA", "1"));
}

/// Messages: the choice at info, an unknown variable once however many contexts there are, nothing otherwise.
#[test]
fn messages_go_where_the_environment_says() {
    let program = build("errors.c", "logging", &[]);
    let said = |level: &str| {
        let mut command = without_variables(&program);
        command.env("JFA_LOG", level).env("JFA_BANANA", "1");
        let output = command.output().unwrap();
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let info = said("info");
    assert!(info.contains("jfa info: backend chosen backend=cpu chosen_by=argument backend=cpu"), "{info}");
    assert_eq!(info.matches("JFA_BANANA").count(), 1, "{info}");
    let warn = said("warn");
    assert_eq!(warn.lines().count(), 1, "{warn}");
    assert!(warn.starts_with("jfa warn: ") && warn.contains("JFA_BANANA"), "{warn}");
    assert_eq!(said("error"), "");
}

/// The contract is 1 microsecond; a library without optimisation gets five.
#[test]
fn a_forward_on_an_empty_batch_costs_less_than_a_microsecond() {
    let program = build("overhead.c", "overhead", &["-O2"]);
    // Other tests run beside this one: the best of a few runs is what the call costs.
    let nanoseconds = (0..5)
        .map(|_| succeed(&mut Command::new(&program)).trim().parse::<f64>().expect("a number"))
        .fold(f64::INFINITY, f64::min);
    let limit = if cfg!(debug_assertions) { 5000.0 } else { 1000.0 };
    println!("forward on an empty batch: {nanoseconds} ns");
    assert!(nanoseconds < limit, "{nanoseconds} ns");
}
