//! The library as a file: what it exports, what it is called, what loading it does, and that statuses must be used.

mod common;

use std::process::Command;

use common::{both, compiler, library, program, root, scratch, succeed};

#[test]
fn exports_nothing_but_the_two_symbols() {
    let listed = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let mut names: Vec<_> = listed.lines().filter_map(|l| l.split_whitespace().nth(2)).collect();
    names.sort_unstable();
    let plain: Vec<_> = names.iter().map(|n| n.split('@').next().unwrap()).collect();
    assert_eq!(plain, ["jfa_get_api", "jfa_last_error"], "{listed}");
    // With a linker that takes the version script they carry its version.
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        assert_eq!(names, ["jfa_get_api@@JFA_1", "jfa_last_error@@JFA_1"]);
    }
}

#[test]
fn has_its_soname() {
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(library()));
    let soname = library().file_name().unwrap().to_str().unwrap();
    assert!(dynamic.contains(&format!("Library soname: [{soname}]")), "{dynamic}");
}

#[test]
fn loading_touches_no_gpu_and_starts_no_thread() {
    let c = root().join("jfa-capi/tests/c");
    let program = program(&c.join("loading.c"), "loading", &["-ldl"]);
    // A driver that ends the process when it is loaded stands where the real one would be found.
    let driver = scratch().join("driver");
    std::fs::create_dir_all(&driver).unwrap();
    let mut command = compiler(&c.join("fake_cuda.c"));
    succeed(command.args(["-shared", "-fPIC", "-o"]).arg(driver.join("libcuda.so.1")).arg(c.join("fake_cuda.c")));
    let mut command = Command::new(&program);
    let printed = succeed(command.arg(library()).env("LD_LIBRARY_PATH", &driver).env_remove("JFA_BACKEND"));
    assert_eq!(printed, "ok\n");
    // The stand-in works: asking for the device wakes it.
    let output = Command::new(&program)
        .arg(library())
        .env("LD_LIBRARY_PATH", &driver)
        .env("JFA_BACKEND", "cuda")
        .output()
        .unwrap();
    assert!(!output.status.success(), "{}", both(&output));
}

/// Every `jfa_*` call whose status is dropped is a warning, in C and in C++.
#[test]
fn statuses_must_be_used() {
    for (extension, text) in [("c", "warn_unused_result"), ("cpp", "warn_unused_result")] {
        let source = scratch().join(format!("unused.{extension}"));
        let code = "#include \"jfa.h\"\nvoid f(const jfa_api *api, jfa_plan *plan, const jfa_call *call) {\n    \
                    api->forward(plan, call, NULL);\n}\n";
        std::fs::write(&source, code).unwrap();
        let output = compiler(&source).args(["-c", "-o", "/dev/null"]).arg(&source).output().unwrap();
        let said = both(&output);
        assert!(!output.status.success() && said.contains("forward") && said.contains(text), "{said}");
        // A release is the exception in C; in C++ the type itself asks.
        let release =
            code.replace("forward(plan, call, NULL)", "plan_release(plan)").replace("const jfa_call *call", "int x");
        std::fs::write(&source, release.replace("    api", "    (void)x;\n    (void)api")).unwrap();
        succeed(compiler(&source).args(["-c", "-o", "/dev/null"]).arg(&source));
    }
}

#[test]
fn the_static_library_links() {
    let built = std::fs::canonicalize(library()).unwrap();
    let archive = built.with_file_name("libjfa.a");
    assert!(archive.exists(), "{} is not there", archive.display());
    let source = root().join("jfa-capi/tests/c/newer_caller.c");
    let out = program(&source, "static", &[archive.to_str().unwrap(), "-lpthread", "-ldl", "-lm", "-lgcc_s"]);
    assert_eq!(succeed(&mut Command::new(&out)), "ok\n");
    assert!(!succeed(Command::new("ldd").arg(&out)).contains("libjfa"));
}
