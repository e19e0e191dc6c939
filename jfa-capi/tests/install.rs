//! `cargo cinstall` puts header, libraries, pkg-config and CMake files where distributions expect them, and programs find
//! them there. Needs cargo-c (`cargo install cargo-c`) and, for its part, CMake; without them it says so.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{examples, lengths, root, scratch, skipped, succeed};

fn available(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success())
}

/// Installs below a directory; `None` without cargo-c.
fn installed() -> Option<PathBuf> {
    if !available("cargo-cinstall") {
        skipped("cargo-c not installed");
        return None;
    }
    let prefix = scratch().join("usr");
    let mut command = Command::new("cargo-cinstall");
    command.current_dir(root()).args(["cinstall", "--offline", "-p", "jfa-capi"]);
    // Beside what cargo builds, but for itself: cargo-c passes flags of its own.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cargo-c");
    command.arg("--target-dir").arg(target).arg("--prefix").arg(&prefix).args([
        "--libdir",
        "lib",
        "--datadir",
        "share",
    ]);
    command.args(["--profile", if cfg!(debug_assertions) { "dev" } else { "release" }]);
    succeed(command.env_remove("RUSTFLAGS"));
    Some(prefix)
}

fn pkg_config(prefix: &Path, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(arguments).arg("jfa");
    succeed(&mut command).split_whitespace().map(str::to_owned).collect()
}

fn example(command: &mut Command) {
    let printed = succeed(command.arg(lengths()).arg("6"));
    assert!(printed.ends_with("ok\n"), "{printed}");
}

#[test]
fn installs_where_distributions_expect() {
    let Some(prefix) = installed() else { return };
    let lib = prefix.join("lib");
    for file in [
        "include/jfa/jfa.h",
        "include/jfa/jfa.hpp",
        "include/jfa/jfa_backend.h",
        "include/jfa/jfa_dlpack.h",
        "lib/libjfa.a",
        "lib/pkgconfig/jfa.pc",
        "share/cmake/jfa/jfaConfig.cmake",
        "share/cmake/jfa/jfaConfigVersion.cmake",
    ] {
        assert!(prefix.join(file).is_file(), "{file} is not there");
    }
    // libjfa.so -> libjfa.so.0.1 -> libjfa.so.0.1.0, and the soname is the middle one.
    let version = env!("CARGO_PKG_VERSION");
    let series = version.rsplit_once('.').expect("three parts").0;
    let real = std::fs::canonicalize(lib.join("libjfa.so")).unwrap();
    assert_eq!(real.file_name().unwrap().to_str().unwrap(), format!("libjfa.so.{version}"));
    assert_eq!(std::fs::canonicalize(lib.join(format!("libjfa.so.{series}"))).unwrap(), real);
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(&real));
    assert!(dynamic.contains(&format!("Library soname: [libjfa.so.{series}]")), "{dynamic}");
    let listed = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(&real));
    let foreign: Vec<_> = listed.lines().filter(|l| !l.contains(" jfa_") && !l.ends_with(" A JFA_1")).collect();
    assert!(foreign.is_empty(), "{foreign:?}");

    // pkg-config.
    assert_eq!(pkg_config(&prefix, &["--modversion"]), [version]);
    let out = scratch().join("by-pkg-config");
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-O1", "-o"]).arg(&out).arg(examples().join("cpp/attention.cpp"));
    succeed(command.args(pkg_config(&prefix, &["--cflags", "--libs"])).arg(format!("-Wl,-rpath,{}", lib.display())));
    example(&mut Command::new(&out));

    // CMake.
    if !available("cmake") {
        return skipped("cmake not installed");
    }
    let build = scratch().join("cmake");
    let configure = |wanted: &str| {
        let mut command = Command::new("cmake");
        command.arg("-S").arg(root().join("jfa-capi/tests/cmake")).arg("-B").arg(&build);
        command.arg(format!("-DEXAMPLES={}", examples().display())).arg(format!("-DWANTED={wanted}"));
        command.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
        command
    };
    for refused in ["9.0", "0.9", "0.0.9"] {
        let output = configure(refused).output().unwrap();
        assert!(!output.status.success(), "version {refused} was accepted");
        std::fs::remove_dir_all(&build).unwrap();
    }
    succeed(&mut configure(series));
    succeed(Command::new("cmake").arg("--build").arg(&build));
    example(&mut Command::new(build.join("shared")));
    example(&mut Command::new(build.join("static")));
    example(Command::new(build.join("loader")).arg(lib.join("libjfa.so")));
    let plugin = build.join("libjfa_backend_naive.so");
    example(Command::new(build.join("shared")).env("JFA_BACKEND", plugin));
}
