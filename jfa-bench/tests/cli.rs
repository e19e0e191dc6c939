//! The command line as a user meets it: output, files, exit codes.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jfa-bench"));
    // The environment of whoever runs the tests must not choose.
    for variable in jfa_core::registry::Environment::VARIABLES {
        command.env_remove(variable);
    }
    command.args(arguments);
    command
}

fn jfa_bench(arguments: &[&str]) -> Output {
    command(arguments).output().expect("jfa-bench starts")
}

fn json(arguments: &[&str]) -> Value {
    let output = jfa_bench(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is JSON")
}

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn info_tells_every_backend_and_why_one_is_not_there() {
    let info = json(&["info", "--json"]);
    let backends = info["backends"].as_array().unwrap();
    let cpu = backends.iter().find(|b| b["name"] == "cpu").expect("cpu is built in");
    assert_eq!(cpu["available"], true);
    assert_eq!(cpu["capabilities"]["memory_space"], "host");
    for b in backends.iter().filter(|b| b["available"] == false) {
        assert!(!b["reason"].as_str().unwrap().is_empty(), "{b}");
    }
    let output = jfa_bench(&["info"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("JFA_BACKEND_PATH"));
}

#[test]
fn run_checks_and_times_both_passes() {
    for dtype in ["f32", "bf16", "f16"] {
        let result = json(&[
            "run",
            "real_movielens",
            "gqa-4",
            "gem_pma-32",
            "request_shared_kv",
            "--backend",
            "cpu",
            "--batch",
            "6",
            "--max-len",
            "40",
            "--head-dim",
            "32",
            "--seconds",
            "0.01",
            "--dtype",
            dtype,
            "--json",
            "-",
        ]);
        let results = result["results"].as_array().unwrap();
        assert_eq!(results.len(), 8, "four shapes, two passes");
        for r in results {
            assert!(r["ms"].as_f64().unwrap() > 0.0 && r["useful_flops"].as_f64().unwrap() > 0.0, "{r}");
            assert_eq!(r["wrong"].as_array().unwrap().len(), 0, "{r}");
            let errors = &r["errors"];
            for output in ["o", "lse", "dq", "dk", "dv"] {
                assert!(errors[output].as_f64().unwrap() < 5e-3, "{output}: {r}");
            }
            assert!(r["ms_each"].as_array().unwrap().len() >= 3);
        }
        let movielens = &results[0];
        assert_eq!(movielens["q_tokens"], 6 * 40 - (40 - 24), "six histories, cut at 40; one has 24");
    }
}

#[test]
fn run_reads_a_lengths_file() {
    let file = folder("lengths").join("mine.txt");
    std::fs::write(&file, "3\n0\n17\n").unwrap();
    let output = jfa_bench(&["run", "--lengths", file.to_str().unwrap(), "--head-dim", "16", "--seconds", "0.01"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    let row = text.lines().find(|l| l.starts_with("| mine")).expect("a row for the file");
    assert!(row.contains(" 20 ") && row.contains("60.8 %"), "20 rows of 51: {row}");
}

#[test]
fn mistakes_are_told_and_end_with_2() {
    for (arguments, said) in [
        (vec!["run", "gem_self"], "gem_self_half-256"),
        (vec!["run"], "--lengths"),
        (vec!["run", "real_movielens", "--backend", "nonsense"], "nonsense"),
        (vec!["run", "real_movielens", "--mask", "diagonal"], "diagonal"),
        (vec!["check", "no-such-case"], "no-such-case"),
        (vec!["ab", "--a", "cpu", "--b", "cpu:0", "real_movielens"], "cpu"),
        (vec!["ab", "--a", "cpu", "--b", "cpu", "--pairs", "0", "real_movielens"], "--pairs"),
    ] {
        let output = jfa_bench(&arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
}

/// As under `jfa-bench info | head -1`.
#[cfg(unix)]
#[test]
fn a_reader_may_stop_early() {
    use std::process::Stdio;

    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child = command(&["info"]).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(libc::SIGPIPE));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_batch_of_nothing_has_no_sign() {
    let output = jfa_bench(&["run", "real_movielens", "--batch", "0"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(" 0.0 GFLOP/s") && !text.contains("-0.0"), "{text}");
}

#[test]
fn check_writes_junit_and_json() {
    let folder = folder("check");
    let (junit, list) = (folder.join("junit.xml"), folder.join("list.json"));
    let output = jfa_bench(&[
        "check",
        "placement/loose",
        "device-offsets/wild",
        "--quick",
        "--backend",
        "cpu",
        "--junit",
        junit.to_str().unwrap(),
        "--json",
        list.to_str().unwrap(),
    ]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed, 0 failed, 1 skipped"), "{text}");
    let xml = std::fs::read_to_string(junit).unwrap();
    assert!(xml.contains("tests=\"2\" failures=\"0\" skipped=\"1\"") && xml.contains("name=\"loose\""), "{xml}");
    let cases: Value = serde_json::from_str(&std::fs::read_to_string(list).unwrap()).unwrap();
    assert_eq!(cases["cases"].as_array().unwrap().len(), 2);
}

#[test]
fn the_list_covers_every_section_of_the_contract() {
    let output = jfa_bench(&["check", "--list", "--backend", "cpu"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for section in ["1", "2-3", "4", "5", "6", "7", "8", "9"] {
        assert!(text.contains(&format!("(section {section}")), "section {section}");
    }
}

#[test]
fn ab_measures_in_alternation_and_draws() {
    let folder = folder("ab");
    let (data, plot) = (folder.join("ab.json"), folder.join("picture"));
    let output = jfa_bench(&[
        "ab",
        "--a",
        "cpu:1",
        "--b",
        "cpu:2",
        "real_movielens",
        "causal-1024",
        "--batch",
        "8",
        "--max-len",
        "32",
        "--head-dim",
        "32",
        "--pairs",
        "6",
        "--json",
        data.to_str().unwrap(),
        "--plot",
        plot.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("geometric mean"));
    let result: Value = serde_json::from_str(&std::fs::read_to_string(data).unwrap()).unwrap();
    let comparisons = result["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 4, "two shapes, two passes");
    for c in comparisons {
        assert_eq!(c["ratios"].as_array().unwrap().len(), 6);
        let (value, low, high) = (&c["speed"]["value"], &c["speed"]["low"], &c["speed"]["high"]);
        assert!(low.as_f64() <= value.as_f64() && value.as_f64() <= high.as_f64(), "{c}");
        assert_eq!(c["a_errors"], c["b_errors"], "the number of threads changes no bit");
    }
    for extension in ["svg", "png"] {
        assert!(std::fs::metadata(plot.with_extension(extension)).unwrap().len() > 5000);
    }
}
