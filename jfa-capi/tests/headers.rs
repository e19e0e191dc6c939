//! The committed headers are what cbindgen makes of the crate.
//!
//! `BLESS_HEADERS=1 cargo test -p jfa-capi --test headers` writes them anew.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use cbindgen::Config;
use jfa::abi;
use jfa::abi_backend as backend;
use jfa::frozen::{AbiStruct, Field};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn config() -> Config {
    Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml")
}

const LICENCE: &str = "// SPDX-License-Identifier: MIT OR Apache-2.0\n";

/// What C cannot be told through cbindgen: a status in a function pointer's type must be used, except that of a release.
fn must_use(header: &str) -> String {
    const MARK: &str = "JFA_MUST_USE ";
    let mut out = String::new();
    let mut inside = false;
    for line in header.lines() {
        let line = line.replace("    enum jfa_status (*", "    jfa_status (*");
        let starts = line.starts_with("    jfa_status (*") && !line.contains("_release)");
        let _ = match (starts, inside) {
            (true, _) => writeln!(out, "    {MARK}{}", line.trim_start()),
            // Parameters stay below the first one.
            (false, true) => writeln!(out, "{}{line}", " ".repeat(MARK.len())),
            (false, false) => writeln!(out, "{line}"),
        };
        inside = (starts || inside) && !line.ends_with(");");
    }
    out
}

/// The compiler of the including program has to lay the structs out as the library does.
fn assertions(structs: &[(&str, usize, &[Field])]) -> String {
    let mut out = String::new();
    for (name, size, fields) in structs {
        let _ = writeln!(out, "JFA_STATIC_ASSERT(sizeof({name}) == {size}, \"{name}\");");
        for f in *fields {
            let (field, offset) = (f.name, f.offset);
            let _ = writeln!(out, "JFA_STATIC_ASSERT(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");");
        }
    }
    out
}

fn of<T: AbiStruct>() -> (&'static str, usize, &'static [Field]) {
    (T::NAME, size_of::<T>(), T::FIELDS)
}

/// The header of one source file, with `tail` before the end of its include guard.
fn generate(config: Config, source: &str, tail: &str) -> String {
    let guard = format!("\n#endif  /* {} */\n", config.include_guard.as_deref().expect("every header has a guard"));
    // cbindgen does not look into `cfg_attr`; in the header the symbols are always there.
    let symbols = std::fs::read_to_string(root().join("src/symbols.rs")).expect("src/symbols.rs");
    let attribute = "#[cfg_attr(not(jfa_versioned_symbols), unsafe(no_mangle))]";
    assert_eq!(symbols.matches(attribute).count(), 2);
    let plain = tempfile::Builder::new().suffix(".rs").tempfile().expect("a temporary file");
    std::fs::write(plain.path(), symbols.replace(attribute, "#[unsafe(no_mangle)]")).expect("a temporary file");
    let mut text = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(root().join("src").join(source))
        .with_src(plain.path())
        .generate()
        .expect("cbindgen")
        .write(&mut text);
    let text = must_use(&String::from_utf8(text).expect("UTF-8"));
    let (body, rest) = text.rsplit_once(&guard).expect("the end of the include guard");
    assert!(rest.trim().is_empty(), "{rest}");
    format!("{body}\n{}\n{}", tail.trim_end(), guard.replace("  ", " "))
}

fn jfa_h() -> String {
    let mut config = config();
    let (mut version, mut parts) = (String::new(), env!("CARGO_PKG_VERSION").split('.'));
    for part in ["MAJOR", "MINOR", "PATCH"] {
        let _ = writeln!(version, "#define JFA_VERSION_{part} {}", parts.next().expect("three parts"));
    }
    config.header = Some(format!("{LICENCE}{}", include_str!("../src/header/jfa_intro.h").trim_end()));
    config.after_includes = Some(include_str!("../src/header/jfa_macros.h").replace("@VERSION@", version.trim_end()));
    config.include_guard = Some("JFA_H".to_owned());
    config.no_includes = true;
    config.sys_includes = vec!["stddef.h".to_owned(), "stdint.h".to_owned()];
    config.export.include = [
        "jfa_dtype",
        "jfa_index_type",
        "jfa_query",
        "jfa_mask",
        "jfa_alignment",
        "jfa_bias",
        "jfa_memory_space",
        "jfa_log_level",
        "jfa_report_format",
    ]
    .map(str::to_owned)
    .to_vec();
    let tail = assertions(&[
        of::<abi::jfa_tensor>(),
        of::<abi::jfa_lse>(),
        of::<abi::jfa_problem>(),
        of::<abi::jfa_layout>(),
        of::<abi::jfa_call>(),
        of::<abi::jfa_forward_args>(),
        of::<abi::jfa_backward_args>(),
        of::<abi::jfa_requirements>(),
        of::<abi::jfa_context_options>(),
        ("jfa_api", size_of::<abi::jfa_api>(), abi::jfa_api::FIELDS),
    ]);
    generate(config, "abi.rs", &tail)
}

fn jfa_backend_h() -> String {
    let mut config = config();
    config.header = Some(format!("{LICENCE}{}", include_str!("../src/header/backend_intro.h").trim_end()));
    config.include_guard = Some("JFA_BACKEND_H".to_owned());
    config.no_includes = true;
    config.includes = vec!["jfa.h".to_owned()];
    config.export.exclude = ["RawStatus", "jfa_get_api", "jfa_last_error"].map(str::to_owned).to_vec();
    config.export.rename.insert("RawStatus".to_owned(), "jfa_status".to_owned());
    config.export.include = ["jfa_capabilities", "jfa_backend_options", "jfa_backend_api"].map(str::to_owned).to_vec();
    let mut tail = include_str!("../src/header/backend_entry.h").to_owned() + "\n";
    tail += &assertions(&[
        of::<backend::jfa_capabilities>(),
        of::<backend::jfa_backend_options>(),
        ("jfa_backend_api", size_of::<backend::jfa_backend_api>(), backend::jfa_backend_api::FIELDS),
    ]);
    generate(config, "abi_backend.rs", &tail)
}

fn compare(name: &str, generated: &str) {
    let path = root().join("../include").join(name);
    if std::env::var_os("BLESS_HEADERS").is_some() {
        std::fs::write(&path, generated).expect("include/ is writable");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = committed.lines().zip(generated.lines()).position(|(a, b)| a != b);
    let line = difference.unwrap_or(committed.lines().count().min(generated.lines().count()));
    assert!(
        committed == generated,
        "include/{name} differs from the crate at line {}:\n  committed: {:?}\n  generated: {:?}\nBLESS_HEADERS=1 writes it",
        line + 1,
        committed.lines().nth(line),
        generated.lines().nth(line)
    );
}

#[test]
fn jfa_h_is_current() {
    compare("jfa.h", &jfa_h());
}

#[test]
fn jfa_backend_h_is_current() {
    compare("jfa_backend.h", &jfa_backend_h());
}

/// The headers stand alone, in C11 and C++17, with every warning on.
#[test]
fn headers_compile_alone() {
    let include = root().join("../include");
    let dir = tempfile::tempdir().expect("a temporary directory");
    for header in ["jfa.h", "jfa_backend.h", "jfa_dlpack.h", "jfa.hpp"] {
        for (compiler, standard, extension) in
            [("CC", "-std=c11", "c"), ("CXX", "-std=c++17", "cpp"), ("CXX", "-std=c++20", "cpp")]
        {
            if header == "jfa.hpp" && compiler == "CC" {
                continue;
            }
            let source = dir.path().join(format!("alone.{extension}"));
            std::fs::write(&source, format!("#include \"{header}\"\n#include \"{header}\"\n")).unwrap();
            compile(compiler, standard, &include, &source);
        }
    }
}

fn compile(compiler: &str, standard: &str, include: &Path, source: &Path) {
    let default = if compiler == "CC" { "cc" } else { "c++" };
    let program = std::env::var(compiler).unwrap_or_else(|_| default.to_owned());
    let output = std::process::Command::new(&program)
        .args([standard, "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"])
        .arg("-I")
        .arg(include)
        .arg(source)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        output.status.success(),
        "{program} {standard} {}:\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}
