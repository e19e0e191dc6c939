//! The command-line runner: files in, files out, findings in the status.

use std::path::PathBuf;
use std::process::{Command, Output};

const PTX: &str = ".version 9.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 p, .param .f32 by, .param .u32 n) {
  .reg .b32 %r<3>; .reg .f32 %f<3>; .reg .b64 %rd<4>; .reg .pred %p;
  ld.param.u64 %rd1, [p];
  ld.param.f32 %f1, [by];
  ld.param.u32 %r2, [n];
  mov.u32 %r1, %tid.x;
  setp.ge.u32 %p, %r1, %r2;
  @%p bra DONE;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f2, [%rd3];
  mul.f32 %f2, %f2, %f1;
  st.global.f32 [%rd3], %f2;
DONE:
  ret;
}
";

fn run(name: &str, n: u32) -> (Output, Vec<u8>) {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("k.ptx"), PTX).unwrap();
    let data: Vec<u8> = (0..16).flat_map(|i| (i as f32).to_le_bytes()).collect();
    std::fs::write(dir.join("x.bin"), data).unwrap();
    let job = format!(
        r#"{{"ptx": "k.ptx", "kernel": "scale", "grid": [1], "block": [32],
            "buffers": {{"x": {{"file": "x.bin", "dtype": "f32", "shape": [16], "out": "y.npy"}}}},
            "params": [{{"ptr": "x"}}, {{"f32": 2.5}}, {{"u32": {n}}}]}}"#
    );
    std::fs::write(dir.join("job.json"), job).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_jfa-sim-run")).arg(dir.join("job.json")).output().unwrap();
    let npy = std::fs::read(dir.join("y.npy")).unwrap_or_default();
    (out, npy)
}

#[test]
fn a_clean_kernel() {
    let (out, npy) = run("clean", 16);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(npy.starts_with(b"\x93NUMPY") && npy.len() % 64 == 0);
    let got: Vec<f32> = npy[npy.len() - 64..].chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    assert_eq!(got, (0..16).map(|i| 2.5 * i as f32).collect::<Vec<_>>());
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report[0]["counters"]["global_read"], 64);
}

#[test]
fn a_fault_shows_in_the_status() {
    let (out, _) = run("fault", 17);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("OutOfBounds in scale at PTX line 14"), "{out:?}");
}
