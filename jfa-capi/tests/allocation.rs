//! The hot path of the C interface allocates nothing: not for an empty batch, and not on the way to a plugin and back.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CString;
use std::mem::size_of;
use std::os::unix::ffi::OsStrExt;

use jfa::abi::*;
use jfa::plugin::Loader;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn zeroed<T: jfa::frozen::AbiStruct>() -> T {
    // SAFETY: zero is a value of every field, and the first is struct_size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<usize>().write(size_of::<T>());
        value
    }
}

#[repr(align(256))]
struct Aligned([u8; 4096]);

/// Allocations of this thread during schedule, forward and backward of a batch of one sequence of `rows` rows, or of an
/// empty batch when there are none.
fn allocations(backend: &CString, rows: i64) -> usize {
    // SAFETY: the table lives as long as the process; below, every struct and view is whole.
    let api = unsafe { &*jfa::jfa_get_api(JFA_API_VERSION) };
    let mut options: jfa_context_options = zeroed();
    (options.backend, options.memory_space) = (backend.as_ptr(), jfa_memory_space::JFA_MEMORY_HOST as i32);
    let mut p: jfa_problem = zeroed();
    (p.dtype, p.query, p.mask, p.bias, p.scale) = (1, 1, 1, 1, 1.0);
    (p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v) = (1, 1, 4, 4);
    (p.batch, p.kv_batch, p.total_q, p.total_kv) = (1, 1, 8, 8);
    let (mut context, mut plan) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: as above.
    unsafe {
        assert_eq!((api.context_create)(&raw const options, &raw mut context), jfa_status::JFA_OK);
        assert_eq!((api.plan_create)(context, &raw const p, &raw mut plan), jfa_status::JFA_OK);
    }
    let offsets = [0_i64, rows];
    let mut layout: jfa_layout = zeroed();
    (layout.batch, layout.kv_batch) = if rows > 0 { (1, 1) } else { (0, 0) };
    (layout.q_offsets, layout.kv_offsets) = (offsets.as_ptr().cast(), offsets.as_ptr().cast());
    (layout.q_offsets_type, layout.kv_offsets_type) = (2, 2);
    let mut data = [[0.5_f32; 32]; 8];
    let mut lse = [0.0_f32; 8];
    let views = data.each_mut().map(|x| jfa_tensor {
        data: x.as_mut_ptr().cast(),
        dtype: 1,
        rows,
        heads: 1,
        dim: 4,
        row_stride: 4,
        head_stride: 4,
        ..zeroed()
    });
    let [q, k, v, o, d_o, dq, dk, dv] = views.each_ref().map(std::ptr::from_ref);
    let lse = jfa_lse { data: lse.as_mut_ptr(), rows, head_stride: rows, ..zeroed() };
    let mut schedule = Aligned([0; 4096]);
    let mut workspace = Aligned([0; 4096]);
    let schedule_pointer = schedule.0.as_mut_ptr().cast();
    let call = jfa_call {
        layout: &raw const layout,
        schedule: schedule_pointer,
        schedule_bytes: 4096,
        workspace: workspace.0.as_mut_ptr().cast(),
        workspace_bytes: 4096,
        ..zeroed()
    };
    let lse = &raw const lse;
    let forward = jfa_forward_args { q, k, v, o, lse, ..zeroed() };
    let backward = jfa_backward_args { q, k, v, o, lse, d_o, dq, dk, dv, ..zeroed() };
    let before = ALLOCATIONS.get();
    for _ in 0..10 {
        // SAFETY: as above.
        unsafe {
            let built = (api.build_schedule)(plan, &raw const layout, schedule_pointer, 4096, std::ptr::null_mut());
            assert_eq!(built, jfa_status::JFA_OK);
            assert_eq!((api.forward)(plan, &raw const call, &raw const forward), jfa_status::JFA_OK);
            assert_eq!((api.backward)(plan, &raw const call, &raw const backward), jfa_status::JFA_OK);
        }
    }
    let after = ALLOCATIONS.get();
    // SAFETY: released once, after the last call.
    unsafe {
        assert_eq!((api.plan_release)(plan), jfa_status::JFA_OK);
        assert_eq!((api.context_release)(context), jfa_status::JFA_OK);
    }
    after - before
}

#[test]
fn an_empty_batch_allocates_nothing() {
    assert_eq!(allocations(&c"cpu".to_owned(), 0), 0);
}

#[test]
fn the_way_to_a_plugin_allocates_nothing() {
    let plugin = common::naive().join(Loader::file_name("naive"));
    let plugin = CString::new(plugin.as_os_str().as_bytes()).unwrap();
    assert_eq!(allocations(&plugin, 8), 0);
    // The counter counts: making a context allocates.
    let before = ALLOCATIONS.get();
    drop(jfa::registry());
    assert!(ALLOCATIONS.get() > before);
}
