//! What the tests share: where things are, and the system's compilers.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the repository").to_owned()
}

pub fn include() -> PathBuf {
    root().join("include")
}

pub fn examples() -> PathBuf {
    root().join("examples")
}

/// Real lengths that every example runs over.
pub fn lengths() -> PathBuf {
    root().join("workloads/lengths/movielens-100k-user-history.txt")
}

/// A directory of this process below the build's own; it stays, since loaded libraries lie in it.
pub fn scratch() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory");
        directory.keep()
    })
}

/// The shared library that cargo built beside this test, under its soname.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let here = std::env::current_exe().expect("the path of the test");
        let built = here.parent().expect("a directory").join("libjfa.so");
        assert!(built.exists(), "{} is not there", built.display());
        let directory = scratch().join("lib");
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        for name in ["libjfa.so", "libjfa.so.0.1"] {
            std::os::unix::fs::symlink(&built, directory.join(name)).expect("a link");
        }
        directory.join("libjfa.so.0.1")
    })
}

/// The system's compiler for a C (`.c`) or C++ source.
pub fn compiler(source: &Path) -> Command {
    let c = source.extension() == Some(OsStr::new("c"));
    let (variable, default) = if c { ("CC", "cc") } else { ("CXX", "c++") };
    let mut command = Command::new(std::env::var(variable).unwrap_or_else(|_| default.to_owned()));
    command.args(if c { ["-std=c11", "-Wshadow"] } else { ["-std=c++17", "-Wshadow"] });
    command.args(["-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]).arg("-I").arg(include());
    command
}

/// What a command printed, after it succeeded.
pub fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, both(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn both(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Compiles a program; `name` tells variants of one source apart.
pub fn program(source: &Path, name: &str, arguments: &[&str]) -> PathBuf {
    let out = scratch().join(name);
    succeed(compiler(source).arg("-O1").arg("-o").arg(&out).arg(source).args(arguments));
    out
}

/// Compiles a plugin into a directory, as `libjfa_backend_NAME.so`.
pub fn plugin(source: &Path, directory: &Path, name: &str, arguments: &[&str]) -> PathBuf {
    std::fs::create_dir_all(directory).expect("a temporary directory");
    let out = directory.join(jfa::plugin::Loader::file_name(name));
    let mut command = compiler(source);
    command.args(["-O2", "-shared", "-fPIC", "-fvisibility=hidden"]).args(arguments);
    succeed(command.arg("-o").arg(&out).arg(source));
    out
}

/// The directory that holds the example plugin.
pub fn naive() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let directory = scratch().join("naive");
        plugin(&examples().join("plugin_naive/plugin_naive.cpp"), &directory, "naive", &[]);
        directory
    })
}

/// Flags for programs that check themselves while they run.
pub const SANITIZE: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"];

/// A Python with NumPy (`TEST_PYTHON`, else `python3`), or a line that says what was skipped.
pub fn python_with_numpy() -> Option<String> {
    let python = std::env::var("TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import numpy"]).output().is_ok_and(|o| o.status.success());
    if !found {
        skipped("numpy not installed");
    }
    found.then_some(python)
}

/// Says on the terminal, past the test harness, what this machine cannot show.
pub fn skipped(why: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "skipped: {why}");
}
