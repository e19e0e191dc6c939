//! `cargo xtask gpu-tests`: everything that needs a GPU, as a folder of programs and one script. The folder runs on any
//! machine with the driver and the same C library or a later one; Rust is not needed there.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use jfa_driver::Gpu;
use jfa_driver::cuda::CudaGpu;

use crate::Places;

/// Test targets with this prefix need a GPU (and say so where there is none).
const PREFIX: &str = "gpu";

/// What else the folder holds: the command line, and the library for programs in other languages.
const BENCH: &str = "jfa-bench";
const LIBRARY: &str = "libjfa.so";

#[derive(clap::Args)]
pub struct Options {
    /// Where the folder goes.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only build the folder, also where there is a device.
    #[arg(long)]
    build_only: bool,
}

pub fn run(places: &Places, options: &Options) -> Result<()> {
    let out = options.out.clone().unwrap_or_else(|| places.target.join("gpu-tests"));
    let bin = out.join("bin");
    if bin.exists() {
        std::fs::remove_dir_all(&bin)?;
    }
    std::fs::create_dir_all(&bin)?;
    let mut tests = Vec::new();
    for (name, program) in build(places)? {
        let to = bin.join(&name);
        std::fs::copy(&program, &to).with_context(|| format!("copying {}", program.display()))?;
        // Smaller to carry; a program works with its symbols too.
        let _ = Command::new("strip").arg(&to).status();
        if name != BENCH && name != LIBRARY {
            tests.push(name);
        }
    }
    tests.sort();
    ensure!(!tests.is_empty(), "no test target is named {PREFIX}*");
    let script = out.join("run.sh");
    std::fs::write(&script, script_text(&tests))?;
    set_executable(&script)?;
    println!("{}: {} test programs, {BENCH}, {LIBRARY} and run.sh", out.display(), tests.len());
    if options.build_only {
        return Ok(());
    }
    match CudaGpu::new() {
        Ok(gpu) => {
            println!("{}", gpu.description());
            let status = Command::new(&script).status()?;
            ensure!(status.success(), "run.sh failed ({status})");
        }
        Err(e) => println!("skipped: no CUDA device ({e})"),
    }
    Ok(())
}

/// Builds the test programs, the command line and the library; returns them by name.
fn build(places: &Places) -> Result<Vec<(String, PathBuf)>> {
    let mut out = Vec::new();
    let pattern = format!("{PREFIX}*");
    for arguments in [
        vec!["test", "--no-run", "--workspace", "--test", pattern.as_str()],
        vec!["build", "--package", "jfa-bench", "--package", "jfa-capi"],
    ] {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(&arguments)
            .args(["--release", "--message-format=json-render-diagnostics"])
            .current_dir(&places.root)
            .stderr(std::process::Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "cargo {} failed", arguments.join(" "));
        for line in String::from_utf8(output.stdout)?.lines() {
            let message: serde_json::Value = serde_json::from_str(line)?;
            let files = message["filenames"].as_array().into_iter().flatten().filter_map(|f| f.as_str());
            for library in files.map(Path::new).filter(|f| f.file_name() == Some(LIBRARY.as_ref())) {
                out.push((LIBRARY.to_owned(), library.to_owned()));
            }
            let (Some(program), Some(target)) = (message["executable"].as_str(), message["target"]["name"].as_str())
            else {
                continue;
            };
            // Several crates may have a target of one name.
            let package = message["manifest_path"].as_str().and_then(|m| Path::new(m).parent()?.file_name()?.to_str());
            let name = if target == BENCH { target.to_owned() } else { format!("{}-{target}", package.unwrap_or("")) };
            out.push((name, PathBuf::from(program)));
        }
    }
    Ok(out)
}

fn script_text(tests: &[String]) -> String {
    let mut s = String::from(
        "#!/bin/sh\n\
         # Runs every GPU test and the conformance suite. SANITIZER=\"compute-sanitizer --tool memcheck\" puts a tool in front\n\
         # of the programs and leaves the suite its quick cases; BACKENDS names what the suite checks (default:\n\
         # cuda tlx; every generation: cuda tlx:g1 tlx:g2 tlx:g3 tlx:g4).\n\
         here=$(dirname \"$0\")\n\
         if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then\n\
         \x20   echo \"skipped: no CUDA device\"\n\
         \x20   exit 0\n\
         fi\n\
         failed=\"\"\n",
    );
    for t in tests {
        let _ = write!(
            s,
            "echo \"== {t}\"\n${{SANITIZER:-}} \"$here/bin/{t}\" --nocapture --test-threads=1 || failed=\"$failed {t}\"\n"
        );
    }
    s.push_str(
        "for backend in ${BACKENDS:-cuda tlx}; do\n\
         \x20   echo \"== jfa-bench check --backend $backend\"\n\
         \x20   ${SANITIZER:-} \"$here/bin/jfa-bench\" check --backend \"$backend\" ${SANITIZER:+--quick} \\\n\
         \x20       || failed=\"$failed check:$backend\"\n\
         done\n\
         if [ -n \"$failed\" ]; then\n\
         \x20   echo \"failed:$failed\"\n\
         \x20   exit 1\n\
         fi\n\
         echo \"all GPU tests passed\"\n",
    );
    s
}

fn set_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mut permissions = std::fs::metadata(path)?.permissions();
    permissions.set_mode(0o755);
    Ok(std::fs::set_permissions(path, permissions)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The script itself, with programs that note that they ran, in place of the real ones.
    #[test]
    fn the_script_skips_without_a_device_and_reports_each_failure_with_one() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let program = |name: &str, code: i32| {
            let path = bin.join(name);
            std::fs::write(&path, format!("#!/bin/sh\necho \"{name} $*\"\nexit {code}\n")).unwrap();
            set_executable(&path).unwrap();
        };
        program("a-gpu", 0);
        program("b-gpu", 3);
        program("jfa-bench", 0);
        let run_under = |text: &str, tool: Option<&str>| {
            let script = folder.path().join("run.sh");
            std::fs::write(&script, text).unwrap();
            let mut shell = Command::new("sh");
            shell.arg(&script).env_remove("SANITIZER").env_remove("BACKENDS").envs(tool.map(|t| ("SANITIZER", t)));
            let out = shell.output().unwrap();
            (out.status.code(), String::from_utf8(out.stdout).unwrap())
        };
        let run = |text: &str| run_under(text, None);
        let text = script_text(&["a-gpu".to_owned(), "b-gpu".to_owned()]);
        assert!(text.contains("/dev/nvidia[0-9]*"));
        let absent = text.replace("/dev/nvidia[0-9]*", "/nonexistent[0-9]*");
        assert_eq!(run(&absent), (Some(0), "skipped: no CUDA device\n".to_owned()));
        let present = text.replace("/dev/nvidia[0-9]*", "/dev/null");
        let (code, out) = run(&present);
        assert_eq!(code, Some(1));
        assert!(out.contains("a-gpu --nocapture --test-threads=1"), "{out}");
        assert!(out.contains("jfa-bench check --backend cuda\n"), "{out}");
        assert!(out.contains("jfa-bench check --backend tlx\n"), "{out}");
        assert!(out.ends_with("failed: b-gpu\n"), "{out}");
        program("b-gpu", 0);
        let (code, out) = run(&present);
        assert_eq!(code, Some(0));
        assert!(out.ends_with("all GPU tests passed\n"), "{out}");
        let (_, out) = run_under(&present, Some("echo tool"));
        assert!(out.contains("tool ") && out.contains("jfa-bench check --backend cuda --quick\n"), "{out}");
    }
}
