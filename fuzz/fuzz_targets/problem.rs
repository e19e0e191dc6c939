//! Problem validation through the C table: any bytes in the struct, with any struct_size. Whatever passes must be
//! plannable or refused with a text, and its plan must say how much memory it needs.

#![no_main]

use std::ffi::CStr;
use std::mem::{offset_of, size_of};
use std::sync::OnceLock;

use jfa::abi::{
    jfa_api, jfa_context, jfa_context_options, jfa_memory_space, jfa_problem, jfa_requirements, jfa_status,
};
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
        // SAFETY: zero is a value of every field.
        let mut options: jfa_context_options = unsafe { std::mem::zeroed() };
        options.struct_size = size_of::<jfa_context_options>();
        options.memory_space = jfa_memory_space::JFA_MEMORY_HOST as i32;
        options.backend = c"cpu:2".as_ptr();
        let mut context = std::ptr::null_mut();
        // SAFETY: as the header asks.
        assert_eq!(unsafe { (api.context_create)(&raw const options, &raw mut context) }, jfa_status::JFA_OK);
        Library { api, context }
    })
}

/// Half of the inputs keep the enumerations in range, so that the rest of the validation is reached.
fn tame(bytes: &mut [u8]) {
    let mut clamp = |offset: usize, values: i32| {
        if let Some(field) = bytes.get_mut(offset..offset + 4) {
            let value = i32::from_ne_bytes(field.try_into().expect("four bytes"));
            field.copy_from_slice(&(1 + value.rem_euclid(values)).to_ne_bytes());
        }
    };
    clamp(offset_of!(jfa_problem, dtype), 3);
    clamp(offset_of!(jfa_problem, query), 2);
    clamp(offset_of!(jfa_problem, mask), 3);
    clamp(offset_of!(jfa_problem, alignment), 2);
    clamp(offset_of!(jfa_problem, bias), 4);
    clamp(offset_of!(jfa_problem, bias_dtype), 3);
    for (offset, bytes_kept) in [(offset_of!(jfa_problem, flags), 1), (offset_of!(jfa_problem, reserved), 0)] {
        let end = if offset == offset_of!(jfa_problem, flags) { offset + 8 } else { offset + 4 };
        if let Some(rest) = bytes.get_mut(offset + bytes_kept..end) {
            rest.fill(0);
        }
    }
    if let Some(flags) = bytes.get_mut(offset_of!(jfa_problem, flags)) {
        *flags &= 7;
    }
    // Dimensions that a backend has.
    for offset in [
        offset_of!(jfa_problem, heads_q),
        offset_of!(jfa_problem, heads_kv),
        offset_of!(jfa_problem, head_dim),
        offset_of!(jfa_problem, head_dim_v),
    ] {
        if let Some(high) = bytes.get_mut(offset + 1..offset + 8) {
            high.fill(0);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let [mode, data @ ..] = data else { return };
    // As much memory as the struct says it has, and not a byte more: AddressSanitizer sees what is read beyond.
    let size = match mode & 3 {
        0 => data.len().max(8),
        1 => size_of::<jfa_problem>() + usize::from(*mode >> 2),
        _ => size_of::<jfa_problem>(),
    };
    let mut memory = vec![0_u64; size.div_ceil(8)];
    let mut bytes = vec![0_u8; size];
    let given = data.len().min(size - 8);
    bytes[8..8 + given].copy_from_slice(&data[..given]);
    if mode & 4 != 0 {
        tame(&mut bytes);
    }
    bytes[..8].copy_from_slice(&size.to_ne_bytes());
    for (word, chunk) in memory.iter_mut().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(whole);
    }

    let Library { api, context } = library();
    let mut plan = std::ptr::null_mut();
    // SAFETY: the struct is as long as it says.
    let status = unsafe { (api.plan_create)(*context, memory.as_ptr().cast(), &raw mut plan) };
    if status != jfa_status::JFA_OK {
        assert!(plan.is_null());
        assert_ne!(status, jfa_status::JFA_ERROR_INTERNAL);
        // SAFETY: a text of this thread.
        let text = unsafe { CStr::from_ptr(jfa::jfa_last_error()) };
        assert!(!text.is_empty());
        return;
    }
    // SAFETY: zero is a value of every field.
    let mut needs: jfa_requirements = unsafe { std::mem::zeroed() };
    needs.struct_size = size_of::<jfa_requirements>();
    let mut report = std::ptr::null();
    // SAFETY: as the header asks.
    unsafe {
        assert_eq!((api.plan_requirements)(plan, &raw mut needs), jfa_status::JFA_OK);
        assert_eq!((api.plan_report)(plan, 2, &raw mut report), jfa_status::JFA_OK);
        assert!(needs.buffer_alignment.is_power_of_two() && needs.base_alignment.is_power_of_two());
        assert_eq!((api.plan_release)(plan), jfa_status::JFA_OK);
    }
});
