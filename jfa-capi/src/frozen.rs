//! Every offset of the C ABI as a number. A moved field, a changed type or a gap between two fields fails to compile
//! here. To grow a struct: append a field, append its line, leave everything else as it is. `since` gives the bytes of
//! the struct when it first appeared: a caller that has less than that is broken, one that has more or less than the
//! current size is newer or older.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, size_of};

use crate::abi::*;
use crate::abi_backend::*;

/// One field, for error texts and for the assertions in the headers.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name in the header.
    pub name: &'static str,
    /// Where it starts.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// A C struct that starts with its size.
///
/// # Safety
/// `repr(C)`, the first field is the `usize` struct_size, there is no padding, and every bit pattern is a value.
pub unsafe trait AbiStruct: Copy {
    /// Name in the header.
    const NAME: &'static str;
    /// Bytes when it first appeared.
    const SINCE: usize;
    /// Its fields in order.
    const FIELDS: &'static [Field];
}

macro_rules! frozen {
    ($(struct $name:ident since $since:literal { $($field:ident: $ty:ty = $offset:literal,)* })*) => {
        $(
            const _: () = {
                let mut end = 0;
                $(
                    assert!(offset_of!($name, $field) == $offset, "a field moved");
                    assert!($offset == end, "padding between two fields: make it a reserved field");
                    end += size_of::<$ty>();
                    // A changed type of the same size.
                    let _: fn(&$name) -> &$ty = |s| &s.$field;
                )*
                assert!(size_of::<$name>() == end, "padding at the end: make it a reserved field");
                assert!($since <= end, "a struct never shrinks");
            };
            // SAFETY: checked above, except for "every bit pattern": the fields are integers, floats and raw or
            // optional function pointers.
            unsafe impl AbiStruct for $name {
                const NAME: &'static str = stringify!($name);
                const SINCE: usize = $since;
                const FIELDS: &'static [Field] =
                    &[$(Field { name: stringify!($field), offset: $offset, size: size_of::<$ty>() },)*];
            }
        )*
    };
}

frozen! {
    struct jfa_tensor since 64 {
        struct_size: usize = 0,
        data: *mut c_void = 8,
        dtype: i32 = 16,
        reserved: i32 = 20,
        rows: i64 = 24,
        heads: i64 = 32,
        dim: i64 = 40,
        row_stride: i64 = 48,
        head_stride: i64 = 56,
    }
    struct jfa_lse since 32 {
        struct_size: usize = 0,
        data: *mut f32 = 8,
        rows: i64 = 16,
        head_stride: i64 = 24,
    }
    struct jfa_problem since 176 {
        struct_size: usize = 0,
        dtype: i32 = 8,
        query: i32 = 12,
        heads_q: i64 = 16,
        heads_kv: i64 = 24,
        head_dim: i64 = 32,
        head_dim_v: i64 = 40,
        batch: i64 = 48,
        total_q: i64 = 56,
        total_kv: i64 = 64,
        kv_batch: i64 = 72,
        q_len: i64 = 80,
        mask: i32 = 88,
        alignment: i32 = 92,
        window_left: i64 = 96,
        window_right: i64 = 104,
        bias: i32 = 112,
        bias_dtype: i32 = 116,
        bias_row_align: i32 = 120,
        bias_shared_by_heads: i32 = 124,
        bias_radius: i64 = 128,
        bias_capacity: i64 = 136,
        flags: u64 = 144,
        scale: f32 = 152,
        reserved: i32 = 156,
        max_q_len_hint: i64 = 160,
        max_kv_len_hint: i64 = 168,
    }
    struct jfa_layout since 80 {
        struct_size: usize = 0,
        batch: i64 = 8,
        kv_batch: i64 = 16,
        q_offsets: *const c_void = 24,
        q_lengths: *const i32 = 32,
        kv_offsets: *const c_void = 40,
        kv_lengths: *const i32 = 48,
        kv_index: *const i32 = 56,
        bias_offsets: *const i64 = 64,
        q_offsets_type: i32 = 72,
        kv_offsets_type: i32 = 76,
    }
    struct jfa_call since 56 {
        struct_size: usize = 0,
        layout: *const jfa_layout = 8,
        schedule: *mut c_void = 16,
        schedule_bytes: usize = 24,
        workspace: *mut c_void = 32,
        workspace_bytes: usize = 40,
        stream: *mut c_void = 48,
    }
    struct jfa_forward_args since 56 {
        struct_size: usize = 0,
        q: *const jfa_tensor = 8,
        k: *const jfa_tensor = 16,
        v: *const jfa_tensor = 24,
        bias: *const c_void = 32,
        o: *const jfa_tensor = 40,
        lse: *const jfa_lse = 48,
    }
    struct jfa_backward_args since 96 {
        struct_size: usize = 0,
        q: *const jfa_tensor = 8,
        k: *const jfa_tensor = 16,
        v: *const jfa_tensor = 24,
        bias: *const c_void = 32,
        o: *const jfa_tensor = 40,
        lse: *const jfa_lse = 48,
        d_o: *const jfa_tensor = 56,
        dq: *const jfa_tensor = 64,
        dk: *const jfa_tensor = 72,
        dv: *const jfa_tensor = 80,
        dbias: *mut c_void = 88,
    }
    struct jfa_requirements since 64 {
        struct_size: usize = 0,
        schedule_bytes: usize = 8,
        forward_bytes: usize = 16,
        backward_bytes: usize = 24,
        buffer_alignment: usize = 32,
        base_alignment: usize = 40,
        stride_alignment: usize = 48,
        memory_space: i32 = 56,
        reserved: i32 = 60,
    }
    struct jfa_context_options since 40 {
        struct_size: usize = 0,
        backend: *const c_char = 8,
        memory_space: i32 = 16,
        log_level: i32 = 20,
        log: jfa_log_fn = 24,
        log_data: *mut c_void = 32,
    }
    struct jfa_capabilities since 88 {
        struct_size: usize = 0,
        memory_space: i32 = 8,
        reserved: i32 = 12,
        dtypes: u64 = 16,
        biases: u64 = 24,
        features: u64 = 32,
        head_dims: *const i64 = 40,
        num_head_dims: usize = 48,
        head_dims_v: *const i64 = 56,
        num_head_dims_v: usize = 64,
        base_alignment: usize = 72,
        stride_alignment: usize = 80,
    }
    struct jfa_backend_options since 32 {
        struct_size: usize = 0,
        variant: *const c_char = 8,
        log: jfa_log_fn = 16,
        log_data: *mut c_void = 24,
    }
}

/// The function tables: slots of one pointer each after a head of 24 bytes.
macro_rules! frozen_table {
    ($($name:ident { $head:ident, $($slot:ident = $index:literal,)* })*) => {
        $(
            const _: () = {
                assert!(offset_of!($name, struct_size) == 0 && offset_of!($name, version) == 8);
                assert!(offset_of!($name, reserved) == 12 && offset_of!($name, $head) == 16);
                let mut slots = 0;
                $(
                    assert!(offset_of!($name, $slot) == 24 + 8 * $index, "a function moved");
                    assert!(slots == $index);
                    slots += 1;
                )*
                assert!(size_of::<$name>() == 24 + 8 * slots);
            };
            impl $name {
                /// Offsets, for the assertions in the header.
                pub const FIELDS: &'static [Field] = &[
                    Field { name: "struct_size", offset: 0, size: 8 },
                    Field { name: "version", offset: 8, size: 4 },
                    Field { name: "reserved", offset: 12, size: 4 },
                    Field { name: stringify!($head), offset: 16, size: 8 },
                    $(Field { name: stringify!($slot), offset: 24 + 8 * $index, size: 8 },)*
                ];
            }
        )*
    };
}

frozen_table! {
    jfa_api {
        library_version,
        status_name = 0,
        context_create = 1,
        context_release = 2,
        context_report = 3,
        plan_create = 4,
        plan_release = 5,
        plan_requirements = 6,
        plan_backend = 7,
        plan_report = 8,
        build_schedule = 9,
        forward = 10,
        backward = 11,
    }
    jfa_backend_api {
        name,
        last_error = 0,
        create = 1,
        release = 2,
        description = 3,
        capabilities = 4,
        plan_create = 5,
        plan_release = 6,
        plan_requirements = 7,
        plan_description = 8,
        build_schedule = 9,
        forward = 10,
        backward = 11,
    }
}

/// Bytes of the plugin table when it first appeared.
pub const BACKEND_API_SINCE: usize = 120;
