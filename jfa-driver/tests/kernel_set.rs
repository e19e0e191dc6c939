//! Loading, choosing and launching through the seam, with an executor that only records.

use std::collections::BTreeMap;
use std::sync::Barrier;

use jfa_core::{DType, DataPtr, Stream, TensorView};
use jfa_driver::bundle::{ImageRange, Parameter, ParameterKind, Promise, Resources};
use jfa_driver::recorder::Recorder;
use jfa_driver::{Bundle, ImageKind, KernelArg, KernelInfo, KernelSet, LaunchShape, Scope, TensorMap};

fn kernel(name: &str, cluster: [u32; 3]) -> KernelInfo {
    KernelInfo {
        name: name.to_owned(),
        entry: name.to_owned(),
        tags: BTreeMap::from([("kind".to_owned(), name.to_owned())]),
        constants: BTreeMap::new(),
        parameters: vec![
            Parameter {
                name: "map".into(),
                kind: ParameterKind::TensorMap,
                bytes: 128,
                offset: 0,
                tile: None,
                divisible: 1,
            },
            Parameter { name: "n".into(), kind: ParameterKind::I32, bytes: 4, offset: 128, tile: None, divisible: 4 },
        ],
        threads: 384,
        shared_static: 16,
        shared_dynamic: 200_000,
        cluster,
        cluster_compiled: false,
        programmatic: true,
        promises: vec![Promise { argument: "q".into(), base: 16, row_stride: 16, head_stride: 8 }],
        resources: Resources::default(),
        source_sha256: String::new(),
        image: ImageRange { offset: 0, bytes: 0, sha256: String::new() },
    }
}

fn bundle(kind: ImageKind, arch: &str, image: u8) -> &'static [u8] {
    let arch = arch.parse().unwrap();
    let kernels = vec![(kernel("one", [1, 1, 1]), vec![image; 100]), (kernel("two", [2, 1, 1]), vec![image; 50])];
    Vec::leak(Bundle::write(kind, "test", arch, &[], kernels).unwrap())
}

fn stream(device: usize) -> Stream {
    Stream::from_raw(std::ptr::without_provenance_mut(device))
}

#[test]
fn each_device_gets_its_architecture() {
    let gpu = Recorder::new(&[(9, 0), (10, 0), (8, 0), (9, 1)]);
    let files = [
        bundle(ImageKind::Cubin, "sm_90a", 1),
        bundle(ImageKind::Cubin, "sm_100a", 2),
        bundle(ImageKind::Cubin, "sm_90", 3),
        bundle(ImageKind::Ptx, "sm_80", 4),
    ];
    let set = KernelSet::new(gpu.clone(), "test", &files).unwrap();
    assert_eq!(set.usable_devices().collect::<Vec<_>>(), [0, 1, 3]);
    for (device, image) in [(0, 1u8), (1, 2), (3, 3)] {
        let scope = Scope::enter(&*gpu, stream(device)).unwrap();
        set.get(&scope, 0).unwrap();
        let last = gpu.loaded().pop().unwrap();
        assert_eq!((last.device, last.kernel.name.as_str(), last.image), (device, "one", vec![image; 100]));
    }
    let e = set.bundle(2).err().unwrap().to_string();
    let kinds = "(one, two; no forward)";
    let all = format!("sm_90a {kinds}, sm_100a {kinds}, sm_90 {kinds}");
    assert_eq!(e, format!("no kernels for device 2 (recorder 2, compute capability 8.0); compiled in: {all}"));
    assert_eq!(set.find(0, "kind two", |k| k.tag("kind") == "two").unwrap(), 1);
    let e = set.find(0, "kind three", |k| k.tag("kind") == "three").unwrap_err().to_string();
    assert_eq!(e, "test has no kernel for kind three on sm_90a; compiled in: one, two");
}

#[test]
fn a_kernel_is_loaded_once_however_many_threads_ask() {
    let gpu = Recorder::new(&[(9, 0), (9, 0)]);
    let set = KernelSet::new(gpu.clone(), "test", &[bundle(ImageKind::Cubin, "sm_90a", 1)]).unwrap();
    let start = Barrier::new(8);
    std::thread::scope(|threads| {
        for t in 0..8 {
            let (gpu, set, start) = (&gpu, &set, &start);
            threads.spawn(move || {
                start.wait();
                for _ in 0..50 {
                    let scope = Scope::enter(&**gpu, stream(t % 2)).unwrap();
                    for index in 0..2 {
                        set.get(&scope, index).unwrap();
                    }
                }
            });
        }
    });
    let mut loads: Vec<_> = gpu.loaded().into_iter().map(|l| (l.device, l.kernel.name)).collect();
    loads.sort();
    assert_eq!(loads, [(0, "one"), (0, "two"), (1, "one"), (1, "two")].map(|(d, n)| (d, n.to_owned())));
    assert!(gpu.take().is_empty());
}

#[test]
fn a_failed_load_is_reported_and_tried_again() {
    let gpu = Recorder::new(&[(9, 0)]);
    let set = KernelSet::new(gpu.clone(), "test", &[bundle(ImageKind::Cubin, "sm_90a", 1)]).unwrap();
    gpu.refuse_loads(1);
    let scope = Scope::enter(&*gpu, stream(0)).unwrap();
    assert_eq!(set.get(&scope, 0).err().unwrap().to_string(), "load failed: refused");
    set.get(&scope, 0).unwrap();
}

#[test]
fn launches_follow_the_manifest() {
    let gpu = Recorder::new(&[(9, 0)]);
    let set = KernelSet::new(gpu.clone(), "test", &[bundle(ImageKind::Cubin, "sm_90a", 1)]).unwrap();
    let scope = Scope::enter(&*gpu, stream(0)).unwrap();
    let two = set.get(&scope, 1).unwrap();
    let (map, n) = (TensorMap::UNUSED, 8i32);
    let args = [KernelArg::new(&map), KernelArg::new(&n)];
    // SAFETY: nothing runs.
    unsafe { two.launch(&scope, [4, 1, 1], &args) }.unwrap();
    drop(scope);
    let launches = gpu.take();
    let shape = LaunchShape {
        grid: [4, 1, 1],
        threads: 384,
        shared_bytes: 200_000,
        cluster: Some([2, 1, 1]),
        programmatic: true,
    };
    assert_eq!(launches.len(), 1);
    assert_eq!((launches[0].name(), launches[0].shape), ("two", shape));
    assert_eq!((launches[0].args[0].len(), launches[0].int("n")), (128, 8));

    let scope = Scope::enter(&*gpu, stream(0)).unwrap();
    let refuse = |grid: [u32; 3], args: &[KernelArg], words: &str| {
        // SAFETY: nothing runs.
        let e = unsafe { two.launch(&scope, grid, args) }.unwrap_err().to_string();
        assert!(e.contains("launch of two") && e.contains(words), "{e} lacks {words}");
    };
    refuse([3, 1, 1], &args, "grid[0] = 3 is not a multiple of the cluster's 2");
    refuse([0, 1, 1], &args, "grid [0, 1, 1] is empty");
    refuse([2, 1, 1], &args[..1], "1 arguments for 2 parameters");
    let odd = 6i32;
    let words = "argument 'n' = 6 is not a multiple of 4, which the kernel was compiled for";
    refuse([2, 1, 1], &[KernelArg::new(&map), KernelArg::new(&odd)], words);
    let wide = 5i64;
    refuse([2, 1, 1], &[KernelArg::new(&map), KernelArg::new(&wide)], "argument 'n' has 8 bytes, the kernel expects 4");
    drop(scope);
    assert!(gpu.take().is_empty(), "nothing was launched by the refused calls");
}

#[test]
fn promises_are_checked_with_argument_value_and_divisor() {
    let info = kernel("one", [1, 1, 1]);
    let view = |address: usize, row_stride, head_stride| TensorView {
        data: DataPtr::new(std::ptr::without_provenance_mut::<u8>(address)),
        dtype: DType::BF16,
        rows: 10,
        heads: 2,
        dim: 64,
        row_stride,
        head_stride,
    };
    info.check_promises("q", &view(4096, 128, 64)).unwrap();
    info.check_promises("q", &view(4096, 128, 4)).unwrap();
    info.check_promises("k", &view(4097, 127, 63)).unwrap();
    for (v, words) in [
        (view(4098, 128, 64), "q.data = 0x1002: kernel one needs a multiple of 16 bytes"),
        (view(4096, 127, 64), "q.row_stride = 254: kernel one needs a multiple of 16 bytes"),
        (view(4096, 128, 66), "q.head_stride = 132: kernel one needs a multiple of 8 bytes"),
    ] {
        assert_eq!(info.check_promises("q", &v).unwrap_err().to_string(), words);
    }
    let mut single = view(4096, 127, 63);
    (single.rows, single.heads) = (1, 1);
    info.check_promises("q", &single).unwrap();
    let core = info.check_promises("q", &view(4098, 128, 64)).unwrap_err().for_backend("cuda");
    assert_eq!(core.to_string(), "q.data = 0x1002: backend 'cuda' needs a multiple of 16 bytes");
}
