//! Soname and version script of the shared library, and the CMake package files.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(jfa_versioned_symbols)");
    for path in ["build.rs", "libjfa.map", "cmake"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    cmake_package(&root, &out);
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // The version that an incompatible change alters, as cargo-c has it.
        let version = |part: &str| env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap_or_default();
        let soname = match (version("MAJOR").as_str(), version("MINOR").as_str()) {
            ("0", minor) => format!("libjfa.so.0.{minor}"),
            (major, _) => format!("libjfa.so.{major}"),
        };
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
        // Threads and thread-local data of the library outlive a dlclose, so its code has to.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
        let script = format!("-Wl,--version-script={}", root.join("libjfa.map").display());
        if takes_version_script(&out, &script) {
            println!("cargo::rustc-cfg=jfa_versioned_symbols");
            println!("cargo::rustc-cdylib-link-arg={script}");
        }
    }
}

/// rustc hides everything but `no_mangle` symbols by an anonymous version script of its own. Some linkers (lld) take
/// ours besides, some (GNU ld) refuse to combine the two: try.
fn takes_version_script(out: &Path, script: &str) -> bool {
    let source = out.join("probe.rs");
    let code = r#"
        extern "C" fn get_api() {}
        extern "C" fn last_error() {}
        std::arch::global_asm!(
            ".globl jfa_get_api", ".set jfa_get_api, {a}", ".globl jfa_last_error", ".set jfa_last_error, {b}",
            a = sym get_api, b = sym last_error,
        );
    "#;
    if std::fs::write(&source, code).is_err() {
        return false;
    }
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=probe", "-o"]).arg(out.join("libprobe.so"));
    rustc.arg(&source).arg(format!("-Clink-arg={script}"));
    if let Ok(target) = env::var("TARGET") {
        rustc.arg(format!("--target={target}"));
    }
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = std::ffi::OsString::from("-Clinker=");
        option.push(linker);
        rustc.arg(option);
    }
    for flag in env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default().split('\x1f').filter(|f| !f.is_empty()) {
        rustc.arg(flag);
    }
    rustc.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    rustc.status().is_ok_and(|s| s.success())
}

/// Fills the version into the CMake package files; cargo-c installs them from `OUT_DIR`.
fn cmake_package(root: &Path, out: &Path) {
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets CARGO_PKG_VERSION");
    let to = out.join("cmake");
    std::fs::create_dir_all(&to).expect("OUT_DIR is writable");
    for name in ["jfaConfig.cmake", "jfaConfigVersion.cmake"] {
        let from = root.join("cmake").join(format!("{name}.in"));
        let text = std::fs::read_to_string(&from).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
        std::fs::write(to.join(name), text.replace("@JFA_VERSION@", &version)).expect("OUT_DIR is writable");
    }
}
