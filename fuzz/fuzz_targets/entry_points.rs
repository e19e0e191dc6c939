//! Schedule, forward and backward through the C table: small problems of every kind, layouts with any offsets, lengths
//! and indices, views with any shape and strides, missing and misplaced pointers. Every buffer has exactly the size that
//! its description claims, so that AddressSanitizer sees any access beyond. Finite inputs must give finite outputs.

#![no_main]

use std::alloc::Layout;
use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::sync::OnceLock;

use arbitrary::{Result, Unstructured};
use jfa::abi::*;
use libfuzzer_sys::fuzz_target;

struct Library {
    api: &'static jfa_api,
    context: *mut jfa_context,
}

// SAFETY: a context may be used by many threads.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: the table lives as long as the process.
        let api = unsafe { &*jfa::jfa_get_api(1) };
        let mut options: jfa_context_options = zeroed();
        options.memory_space = jfa_memory_space::JFA_MEMORY_HOST as i32;
        options.backend = c"cpu:1".as_ptr();
        let mut context = std::ptr::null_mut();
        // SAFETY: as the header asks.
        assert_eq!(unsafe { (api.context_create)(&raw const options, &raw mut context) }, jfa_status::JFA_OK);
        Library { api, context }
    })
}

/// A struct of the header, zero but for its size.
fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for structs of the header: zero is a value of every field, and the first is struct_size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<usize>().write(size_of::<T>());
        value
    }
}

/// Memory of exactly `bytes` bytes at a multiple of 256.
struct Memory {
    data: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(1), 256).expect("small");
        // SAFETY: not empty.
        let data = unsafe { std::alloc::alloc(layout) };
        assert!(!data.is_null());
        Memory { data, layout }
    }

    /// Filled with bytes that are NaN in every type.
    fn poisoned(bytes: usize) -> Self {
        let memory = Self::new(bytes);
        // SAFETY: as large as it was made.
        unsafe { memory.data.write_bytes(0xff, memory.layout.size()) };
        memory
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.data, self.layout) };
    }
}

/// One time in `n`; never when the input has ended, since what ends early should be plain rather than wrong.
fn rarely(u: &mut Unstructured<'_>, n: u8) -> Result<bool> {
    Ok(!u.is_empty() && u.ratio(1, n)?)
}

fn element_size(dtype: i32) -> usize {
    if dtype == jfa_dtype::JFA_DTYPE_F32 as i32 { 4 } else { 2 }
}

/// Small finite numbers of a type.
fn fill(memory: &Memory, dtype: i32, seed: u8) {
    let patterns: [u16; 8] = match dtype {
        2 => [0x3c00, 0xbc00, 0x0000, 0x3800, 0xc000, 0x2e66, 0x8000, 0x4200],
        _ => [0x3f80, 0xbf80, 0x0000, 0x3f00, 0xc000, 0x3dcc, 0x8000, 0x4040],
    };
    let size = element_size(dtype);
    for i in 0..memory.layout.size() / size {
        let pattern = patterns[(i.wrapping_mul(5) + usize::from(seed) + i / 7) % 8];
        // SAFETY: element i lies within.
        unsafe {
            let to = memory.data.add(i * size);
            // The upper half of a binary32 is a bfloat16.
            if size == 4 {
                to.cast::<u32>().write(u32::from(pattern) << 16);
            } else {
                to.cast::<u16>().write(pattern);
            }
        }
    }
}

/// A view as the problem wants it, with something else in it now and then, and memory for exactly what it describes.
fn view(u: &mut Unstructured<'_>, dtype: i32, shape: [i64; 3], input: bool) -> Result<Option<(jfa_tensor, Memory)>> {
    let mut t: jfa_tensor = zeroed();
    t.dtype = dtype;
    [t.rows, t.heads, t.dim] = shape;
    t.head_stride = t.dim + i64::from(u.int_in_range(0..=2)?);
    t.row_stride = t.heads * t.head_stride + i64::from(u.int_in_range(0..=3)?);
    if rarely(u, 8)? {
        match u.int_in_range(0..=7)? {
            0 => t.dtype = u.int_in_range(0..=4)?,
            1 => t.rows = u.int_in_range(-1..=20)?,
            2 => t.heads = u.int_in_range(-1..=5)?,
            3 => t.dim = u.int_in_range(-1..=20)?,
            4 => t.row_stride = u.int_in_range(-3..=40)?,
            5 => t.head_stride = u.int_in_range(-3..=40)?,
            6 => (t.row_stride, t.head_stride) = (u.arbitrary()?, u.arbitrary()?),
            _ => t.reserved = u.int_in_range(0..=1)?,
        }
    }
    let last = |count: i64, stride: i64| (count - 1).max(0).checked_mul(stride);
    let extent = last(t.rows, t.row_stride)
        .zip(last(t.heads, t.head_stride))
        .and_then(|(r, h)| r.checked_add(h))
        .and_then(|e| e.checked_add(t.dim));
    let empty = t.rows <= 0 || t.heads <= 0 || t.dim <= 0;
    let elements = match extent {
        _ if empty => 0,
        // The library refuses what it cannot address; what it would take but is too large to try is left out.
        Some(e) if e > 1 << 16 => return Ok(None),
        Some(e) => usize::try_from(e).unwrap_or(0),
        None => 0,
    };
    let memory = Memory::poisoned(elements * element_size(t.dtype));
    if input {
        fill(&memory, t.dtype, u.arbitrary()?);
    }
    t.data = memory.data.cast();
    if rarely(u, 32)? {
        t.data = std::ptr::null_mut();
    }
    Ok(Some((t, memory)))
}

/// Prefix sums over at most `rows` rows, right or a little wrong.
fn offsets(u: &mut Unstructured<'_>, sequences: usize, rows: i64) -> Result<Vec<i64>> {
    let mut out = vec![if rarely(u, 6)? { u.int_in_range(-1..=3)? } else { 0 }];
    for _ in 0..sequences {
        let room = (rows - out[out.len() - 1]).max(0);
        let step = if rarely(u, 24)? { u.int_in_range(-2..=room + 2)? } else { u.int_in_range(0..=room)? };
        out.push(out[out.len() - 1] + step);
    }
    Ok(out)
}

/// An array of exactly its size, of i32 or i64.
fn integers(values: &[i64], wide: bool) -> Memory {
    let size = if wide { 8 } else { 4 };
    let memory = Memory::new(values.len() * size);
    for (i, v) in values.iter().enumerate() {
        // SAFETY: entry i lies within.
        unsafe {
            if wide {
                memory.data.cast::<i64>().add(i).write(*v);
            } else {
                memory.data.cast::<i32>().add(i).write(i32::try_from(*v).unwrap_or(i32::MAX));
            }
        }
    }
    memory
}

fn lengths(u: &mut Unstructured<'_>, offsets: &[i64]) -> Result<Memory> {
    let mut out = Vec::new();
    for pair in offsets.windows(2) {
        let slot = (pair[1] - pair[0]).max(0);
        out.push(if rarely(u, 24)? { u.int_in_range(-1..=slot + 1)? } else { u.int_in_range(0..=slot)? });
    }
    Ok(integers(&out, false))
}

fn checked(status: jfa_status) -> bool {
    if status != jfa_status::JFA_OK {
        assert_ne!(status, jfa_status::JFA_ERROR_INTERNAL);
        // SAFETY: a text of this thread.
        assert!(!unsafe { CStr::from_ptr(jfa::jfa_last_error()) }.is_empty());
    }
    status == jfa_status::JFA_OK
}

#[expect(clippy::too_many_lines, reason = "one scenario from top to bottom")]
fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let Library { api, context } = library();
    let mut p: jfa_problem = zeroed();
    p.dtype = u.int_in_range(1..=3)?;
    p.heads_kv = u.int_in_range(1..=2)?;
    p.heads_q = p.heads_kv * u.int_in_range(1..=2)?;
    p.head_dim = u.int_in_range(1..=10)?;
    p.head_dim_v = if rarely(u, 4)? { u.int_in_range(1..=10)? } else { p.head_dim };
    let batch: usize = u.int_in_range(0..=5)?;
    p.batch = batch as i64;
    p.total_q = u.int_in_range(0..=16)?;
    p.total_kv = u.int_in_range(0..=16)?;
    let mut kv_batch = batch;
    if rarely(u, 4)? {
        p.flags |= JFA_FLAG_KV_INDEX;
        kv_batch = u.int_in_range(0..=4)?;
    }
    p.kv_batch = kv_batch as i64;
    let broadcast = rarely(u, 4)?;
    p.query = if broadcast { 2 } else { 1 };
    p.q_len = u.int_in_range(0..=4)?;
    p.mask = u.int_in_range(1..=3)?;
    p.alignment = u.int_in_range(1..=2)?;
    (p.window_left, p.window_right) = (u.int_in_range(-1..=5)?, u.int_in_range(-1..=5)?);
    p.bias = u.int_in_range(1..=4)?;
    p.bias_dtype = if u.arbitrary()? { 1 } else { p.dtype };
    p.bias_row_align = *u.choose(&[1, 8, 16])?;
    p.bias_shared_by_heads = u.int_in_range(0..=1)?;
    p.bias_radius = u.int_in_range(0..=6)?;
    p.bias_capacity = u.int_in_range(0..=4096)?;
    p.flags |= u.int_in_range(0..=3_u64)?;
    p.scale = f32::from(u.arbitrary::<i8>()?) / 64.0;

    let mut plan = std::ptr::null_mut();
    // SAFETY: as the header asks, here and below: every struct is whole, and every array and view has the memory that it
    // describes.
    if !checked(unsafe { (api.plan_create)(*context, &raw const p, &raw mut plan) }) {
        return Ok(());
    }
    let plan = Plan { api, plan };
    let mut needs: jfa_requirements = zeroed();
    // SAFETY: as above.
    assert!(checked(unsafe { (api.plan_requirements)(plan.plan, &raw mut needs) }));

    // The layout.
    let q_rows = if broadcast { p.q_len } else { p.total_q };
    let o_rows = if broadcast { p.q_len * p.batch } else { p.total_q };
    let (q_offsets, kv_offsets) = (offsets(u, batch, p.total_q)?, offsets(u, kv_batch, p.total_kv)?);
    let (q_wide, kv_wide) = (u.arbitrary()?, u.arbitrary()?);
    let arrays = [integers(&q_offsets, q_wide), integers(&kv_offsets, kv_wide)];
    let (q_lengths, kv_lengths) = (lengths(u, &q_offsets)?, lengths(u, &kv_offsets)?);
    let mut index = Vec::new();
    for _ in 0..batch {
        let most = (kv_batch as i64 - 1).max(0);
        index.push(if rarely(u, 24)? { u.int_in_range(-1..=most + 1)? } else { u.int_in_range(0..=most)? });
    }
    let index = integers(&index, false);
    let bias_offsets = integers(&offsets(u, batch, p.bias_capacity)?, true);
    let mut layout: jfa_layout = zeroed();
    layout.batch = batch as i64;
    layout.kv_batch = kv_batch as i64;
    if !broadcast {
        layout.q_offsets = arrays[0].data.cast();
        layout.q_offsets_type = if q_wide { 2 } else { 1 };
        if rarely(u, 3)? {
            layout.q_lengths = q_lengths.data.cast();
        }
    }
    layout.kv_offsets = arrays[1].data.cast();
    layout.kv_offsets_type = if kv_wide { 2 } else { 1 };
    if rarely(u, 3)? {
        layout.kv_lengths = kv_lengths.data.cast();
    }
    if (p.flags & JFA_FLAG_KV_INDEX != 0) != rarely(u, 24)? {
        layout.kv_index = index.data.cast();
    }
    if (p.bias == 4) != rarely(u, 24)? {
        layout.bias_offsets = bias_offsets.data.cast();
    }
    // Fewer sequences than the arrays have entries for; never more.
    if batch > 0 && rarely(u, 8)? {
        layout.batch -= 1;
        if p.flags & JFA_FLAG_KV_INDEX == 0 {
            layout.kv_batch -= 1;
        }
    }

    // Memory.
    let short = |u: &mut Unstructured<'_>, bytes: usize| -> Result<usize> {
        Ok(if rarely(u, 32)? { bytes / 2 } else { bytes })
    };
    let schedule_bytes = short(u, needs.schedule_bytes)?;
    let schedule = Memory::poisoned(schedule_bytes);
    let scratch = short(u, needs.forward_bytes.max(needs.backward_bytes))?;
    let workspace = Memory::poisoned(scratch);
    // SAFETY: as above.
    let built = checked(unsafe {
        (api.build_schedule)(plan.plan, &raw const layout, schedule.data.cast(), schedule_bytes, std::ptr::null_mut())
    });
    if !built {
        return Ok(());
    }
    let mut call: jfa_call = zeroed();
    call.layout = &raw const layout;
    (call.schedule, call.schedule_bytes) = (schedule.data.cast(), schedule_bytes);
    (call.workspace, call.workspace_bytes) = (workspace.data.cast(), scratch);

    let (hq, hkv, d, dv) = (p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v);
    let shapes = [
        ([q_rows, hq, d], true),
        ([p.total_kv, hkv, d], true),
        ([p.total_kv, hkv, dv], true),
        ([o_rows, hq, dv], false),
        ([o_rows, hq, dv], true),
        ([q_rows, hq, d], false),
        ([p.total_kv, hkv, d], false),
        ([p.total_kv, hkv, dv], false),
    ];
    let mut views = Vec::new();
    for (shape, input) in shapes {
        let Some(made) = view(u, p.dtype, shape, input)? else { return Ok(()) };
        views.push(made);
    }
    let [q, k, v, o, d_o, dq, dk, dv] = [0, 1, 2, 3, 4, 5, 6, 7].map(|i: usize| &raw const views[i].0);
    let lse_stride = o_rows + i64::from(u.int_in_range(0..=2)?);
    let lse_memory = Memory::poisoned(usize::try_from(hq * lse_stride).expect("small") * 4);
    let mut lse: jfa_lse = zeroed();
    (lse.data, lse.rows, lse.head_stride) = (lse_memory.data.cast(), o_rows, lse_stride);
    let bias_elements = match p.bias {
        2 => hq,
        3 => hq * (2 * p.bias_radius + 1),
        4 => p.bias_capacity,
        _ => 0,
    };
    let bias_elements = usize::try_from(bias_elements).expect("small");
    let bias_type = if p.bias == 4 { p.bias_dtype } else { 1 };
    let bias_memory = Memory::poisoned(bias_elements * element_size(bias_type));
    fill(&bias_memory, bias_type, 3);
    let bias: *const c_void = if p.bias == 1 { std::ptr::null() } else { bias_memory.data.cast() };
    let dbias_memory = Memory::poisoned(bias_elements * 4);

    let mut forward: jfa_forward_args = zeroed();
    (forward.q, forward.k, forward.v, forward.bias, forward.o, forward.lse) = (q, k, v, bias, o, &raw const lse);
    // SAFETY: as above.
    if !checked(unsafe { (api.forward)(plan.plan, &raw const call, &raw const forward) }) {
        return Ok(());
    }
    if p.flags & JFA_FLAG_ZERO_UNUSED_ROWS != 0 && layout.batch > 0 && p.dtype == 1 {
        let t = &views[3].0;
        for (r, h, c) in (0..t.rows).flat_map(|r| (0..t.heads).flat_map(move |h| (0..t.dim).map(move |c| (r, h, c)))) {
            // SAFETY: an element of the view, and every row has been written.
            let x = unsafe { t.data.cast::<f32>().offset((r * t.row_stride + h * t.head_stride + c) as isize).read() };
            assert!(x.is_finite(), "o[{r}, {h}, {c}] = {x}");
        }
    }
    let mut backward: jfa_backward_args = zeroed();
    (backward.q, backward.k, backward.v, backward.bias, backward.o) = (q, k, v, bias, o);
    (backward.lse, backward.d_o, backward.dq, backward.dk, backward.dv) = (&raw const lse, d_o, dq, dk, dv);
    if p.bias != 1 && u.arbitrary()? {
        backward.dbias = dbias_memory.data.cast();
    }
    // SAFETY: as above.
    checked(unsafe { (api.backward)(plan.plan, &raw const call, &raw const backward) });
    Ok(())
}

struct Plan {
    api: &'static jfa_api,
    plan: *mut jfa_plan,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: released once, after the last call.
        assert_eq!(unsafe { (self.api.plan_release)(self.plan) }, jfa_status::JFA_OK);
    }
}

fuzz_target!(|data: &[u8]| {
    // An input that ends early is a smaller scenario.
    let _ = run(&mut Unstructured::new(data));
});
