//! The structures the schedule and the support kernels take by value, as `params.h` and `support.h` of their sources
//! declare them.

/// Where a mirrored structure's fields stand.
#[derive(Clone, Copy, Debug)]
pub struct StructLayout {
    /// Name in the header.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Name, offset and size of each field.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Size of the field that a projection gives.
#[doc(hidden)]
pub const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Declares structures that kernels take by value, and `LAYOUTS`, where their fields stand: for a test that compiles the
/// header they mirror.
#[macro_export]
macro_rules! mirror {
    ($($(#[$doc:meta])* struct $name:ident = $c:literal { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            pub struct $name {
                $($(#[$fdoc])* pub $field: $ty,)*
            }
        )*

        /// Every mirrored structure.
        pub const LAYOUTS: &[$crate::schedule::params::StructLayout] = &[$($crate::schedule::params::StructLayout {
            name: $c,
            size: size_of::<$name>(),
            fields: &[$((
                stringify!($field),
                std::mem::offset_of!($name, $field),
                $crate::schedule::params::size_of_field::<$name, $ty>(|s| &s.$field),
            ),)*],
        },)*];
    };
}

/// A device address in a parameter structure.
pub type Address = u64;

/// Rows of a buffer are limited to this, so that a row plus a tile fits 32 bits.
pub const MAX_ROWS: i64 = 2_147_481_600;

/// Size of `JfaScheduleHeader`.
pub const SCHEDULE_HEADER_BYTES: usize = 256;

/// Size of `JfaSequence`.
pub const SEQUENCE_BYTES: usize = 32;

/// Size of `JfaUnit`.
pub const UNIT_BYTES: usize = 8;

mirror! {
    /// Visibility of key j for row i: `i + d - left <= j <= i + d + right`.
    struct Mask = "JfaMask" {
        /// -1: unbounded.
        left: i32,
        /// -1: unbounded.
        right: i32,
        /// 1: `d = kv_len - q_len`; 0: `d = 0`.
        bottom_right: i32,
    }

    /// Parameters of `jfa_schedule`.
    struct ScheduleParams = "JfaScheduleParams" {
        /// `[batch + 1]`; 0 with a broadcast query.
        q_offsets: Address,
        /// `[kv_batch + 1]`.
        kv_offsets: Address,
        /// `[batch]` or 0.
        q_lengths: Address,
        /// `[kv_batch]` or 0.
        kv_lengths: Address,
        /// `[batch]` or 0.
        kv_index: Address,
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// `[forward_capacity]`.
        forward_list: Address,
        /// `[backward_capacity]`.
        backward_list: Address,
        /// Rows of q (capacity); with a broadcast query rows of o.
        total_q: i64,
        /// Rows of k and v (capacity).
        total_kv: i64,
        /// Sequences.
        batch: i32,
        /// Key/value sequences.
        kv_batch: i32,
        /// Entries of `q_offsets` are 64-bit.
        q_offsets_are_64bit: i32,
        /// Entries of `kv_offsets` are 64-bit.
        kv_offsets_are_64bit: i32,
        /// -1: jagged query.
        broadcast_q_len: i32,
        /// Query rows of a forward unit.
        forward_rows: i32,
        /// Keys of a forward tile.
        forward_kv_tile: i32,
        /// Entries of the forward list.
        forward_capacity: i32,
        /// Key rows of a backward unit.
        backward_rows: i32,
        /// Query rows of a backward tile.
        backward_q_tile: i32,
        /// Entries of the backward list.
        backward_capacity: i32,
        /// 1: adjoining sequences of one key/value sequence become one.
        merge_shared_kv: i32,
        /// Visibility.
        mask: Mask,
        /// Blocks of the backward's grid per key/value head, rounded up.
        backward_share: i32,
    }

    /// What `jfa_validate` found.
    struct Finding = "JfaFinding" {
        /// Which array; 0: none.
        array: i32,
        /// Zero.
        reserved: i32,
        /// Entry.
        index: i64,
        /// Its value.
        value: i64,
        /// What it breaks.
        limit: i64,
    }

    /// Parameters of `jfa_validate`.
    struct ValidateParams = "JfaValidateParams" {
        /// `[batch + 1]`; 0 with a broadcast query.
        q_offsets: Address,
        /// `[kv_batch + 1]`.
        kv_offsets: Address,
        /// `[batch]` or 0.
        q_lengths: Address,
        /// `[kv_batch]` or 0.
        kv_lengths: Address,
        /// `[batch]` or 0.
        kv_index: Address,
        /// Where the result goes.
        finding: Address,
        /// Rows of q.
        total_q: i64,
        /// Rows of k and v.
        total_kv: i64,
        /// Sequences.
        batch: i64,
        /// Key/value sequences.
        kv_batch: i64,
        /// Entries of `q_offsets` are 64-bit.
        q_offsets_are_64bit: i32,
        /// Entries of `kv_offsets` are 64-bit.
        kv_offsets_are_64bit: i32,
    }

    /// A tensor whose unused rows become zero.
    struct ZeroTensor = "JfaZeroTensor" {
        /// 0: none.
        data: Address,
        /// Distance of rows.
        row_bytes: i64,
        /// Distance of heads.
        head_bytes: i64,
        /// Heads.
        heads: i32,
        /// 16-byte pieces of a head's row.
        vectors: i32,
    }

    /// Parameters of `jfa_zero_rows`.
    struct ZeroParams = "JfaZeroParams" {
        /// `[sequences + 1]`; 0: sequences of `fixed_length` rows.
        offsets: Address,
        /// `[sequences]` or 0.
        lengths: Address,
        /// Sequences.
        sequences: i64,
        /// Rows of the tensors.
        rows: i64,
        /// Rows of a sequence without offsets.
        fixed_length: i64,
        /// What becomes zero.
        tensors: [ZeroTensor; 2],
        /// What becomes -inf; 0: none.
        lse: Address,
        /// Distance of heads, in elements.
        lse_head_stride: i64,
        /// Heads of lse.
        lse_heads: i32,
        /// Entries of `offsets` are 64-bit.
        offsets_are_64bit: i32,
    }
}

impl ZeroTensor {
    /// No tensor.
    pub const NONE: ZeroTensor = ZeroTensor { data: 0, row_bytes: 0, head_bytes: 0, heads: 0, vectors: 0 };
}
