//! What the library reads from the process environment, and what it says about it, in a process of its own: a child
//! runs the same test binary with other variables.

use std::process::Command;
use std::sync::{Arc, Mutex};

use jfa_core::log;
use jfa_core::registry::{Environment, LogLevel, Registry, Request};

/// In the child: reports on standard output what it found.
#[test]
fn child() {
    if std::env::var_os("CORE_TEST_CHILD").is_none() {
        return;
    }
    // Nobody listens yet: what is wrong is still to be said.
    Environment::from_process();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    let installed = log::install(
        LogLevel::Info,
        Box::new(move |level, message| sink.lock().unwrap().push(format!("{level}: {message}"))),
    );
    assert!(installed, "a fresh process has no subscriber");
    assert!(!log::install_stderr(LogLevel::Trace), "a second sink is refused");
    let environment = Environment::from_process();
    Environment::from_process();
    tracing_elsewhere();
    let mut registry = Registry::new();
    jfa_core::cpu::register(&mut registry);
    let selection = registry.select(&Request::default(), &environment).unwrap();
    println!("chosen {} by {}", selection.candidates[0].name(), selection.chosen_by);
    println!("path {:?}", environment.search_path());
    for line in lines.lock().unwrap().iter() {
        println!("line {line}");
    }
}

/// An event of another crate does not reach the sink.
fn tracing_elsewhere() {
    tracing::error!(target: "elsewhere", "not ours");
}

fn run_child(variables: &[(&str, &std::ffi::OsStr)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env("CORE_TEST_CHILD", "1");
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("JFA_")) {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_choice_is_logged_and_mistakes_are_warned_about_once() {
    let text =
        run_child(&[("JFA_BACKEND", "cpu:1".as_ref()), ("JFA_TYPO", "x".as_ref()), ("JFA_LOG", "loud".as_ref())]);
    assert!(text.contains("by JFA_BACKEND=cpu:1"), "{text}");
    let count = |part: &str| text.lines().filter(|l| l.starts_with("line ") && l.contains(part)).count();
    assert_eq!(count("warn: unknown environment variable JFA_TYPO=x"), 1, "{text}");
    assert_eq!(count("warn: JFA_LOG=loud"), 1, "{text}");
    assert_eq!(count("info: backend chosen"), 1, "{text}");
    assert_eq!(count("not ours"), 0, "{text}");
}

#[test]
fn a_silent_environment_gives_no_warning() {
    let text = run_child(&[]);
    assert!(text.contains("chosen cpu") && text.contains("by auto"), "{text}");
    assert!(!text.contains("warn:"), "{text}");
}

#[cfg(unix)]
#[test]
fn variables_that_are_not_unicode_do_not_panic() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"/a\xFF:/b");
    let text = run_child(&[("JFA_BACKEND_PATH", odd), ("OTHER", odd)]);
    assert!(text.contains(r#"path ["/a\xFF", "/b"]"#), "{text}");
}

/// A set-uid process does not let its caller choose what code it loads. Needs root to make one.
#[cfg(target_os = "linux")]
#[test]
fn secure_execution_ignores_the_variables() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    use std::os::unix::process::CommandExt;

    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let copy = directory.join("set-uid-child");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    // Only root may hand the file to another user and run as a third.
    if std::fs::metadata(&copy).unwrap().uid() != 0 || chown(&copy, Some(1), Some(1)).is_err() {
        println!("not root: cannot make a set-uid process");
        return;
    }
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o6755)).unwrap();
    let run = |uid: u32| {
        let mut command = Command::new(&copy);
        command.args(["--exact", "child", "--nocapture"]).env("CORE_TEST_CHILD", "1").env("JFA_BACKEND", "cpu:1");
        let output = command.uid(uid).gid(uid).output();
        output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned())
    };
    match (run(1), run(2)) {
        (Ok(own), Ok(other)) => {
            assert!(own.contains("by JFA_BACKEND=cpu:1"), "its own user chooses: {own}");
            assert!(other.contains("by auto"), "another user must not choose: {other}");
        }
        // The directory is not open to other users, or the file system ignores set-uid bits.
        (a, b) => println!("cannot run as other users here: {a:?} {b:?}"),
    }
    std::fs::remove_file(&copy).unwrap();
}
