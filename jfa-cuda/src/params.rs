//! The structures kernels take by value, as `kernels/params.h` and `kernels/support.h` declare them. A test compiles the
//! headers and compares every size and offset.

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

const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

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
        pub const LAYOUTS: &[StructLayout] = &[$(StructLayout {
            name: $c,
            size: size_of::<$name>(),
            fields: &[$((
                stringify!($field),
                std::mem::offset_of!($name, $field),
                size_of_field::<$name, $ty>(|s| &s.$field),
            ),)*],
        },)*];
    };
}

/// Bytes of a row block's partial dq: `JFA_BACKWARD_BLOCK_BYTES`.
pub const BACKWARD_BLOCK_BYTES: usize = 33_280;

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

    /// Parameters of the forward kernels.
    struct ForwardParams = "JfaForwardParams" {
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// The forward list.
        units: Address,
        /// Zeroed before every launch; 0: items are dealt.
        counter: Address,
        /// `[heads_q, lse_head_stride]`.
        lse: Address,
        /// Distance of heads, in elements.
        lse_head_stride: i64,
        /// `scale * log2(e)`; `log2(e)` with a prescale.
        scale_log2: f32,
        /// The scale itself where it is not positive, else 1.
        prescale: f32,
        /// Heads a unit is repeated for.
        heads: i32,
        /// Query heads per key/value head.
        group: i32,
        /// Log2 of the query heads packed into the rows of a block.
        packed_log2: i32,
        /// Whether `prescale` counts.
        has_prescale: i32,
        /// Visibility.
        mask: Mask,
        /// Rows of o and lse in this call.
        o_rows: i32,
    }

    /// Parameters of the backward kernels.
    struct BackwardParams = "JfaBackwardParams" {
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// The backward list.
        units: Address,
        /// `[heads_q, lse_head_stride]`.
        lse: Address,
        /// Zeroed before every launch.
        control: Address,
        /// Partial sums of dq.
        partial: Address,
        /// Base of dq.
        dq: Address,
        /// Base of dk.
        dk: Address,
        /// Base of dv.
        dv: Address,
        /// Distance of heads, in elements.
        lse_head_stride: i64,
        /// Distance of rows of dq.
        dq_row_bytes: i64,
        /// Distance of heads of dq.
        dq_head_bytes: i64,
        /// Distance of rows of dk.
        dk_row_bytes: i64,
        /// Distance of heads of dk.
        dk_head_bytes: i64,
        /// Distance of rows of dv.
        dv_row_bytes: i64,
        /// Distance of heads of dv.
        dv_head_bytes: i64,
        /// Factor of the scores.
        scale: f32,
        /// `scale * log2(e)`.
        scale_log2: f32,
        /// Key/value heads.
        heads_kv: i32,
        /// Query heads per key/value head.
        group: i32,
        /// Row blocks per query head.
        blocks: i32,
        /// Rows of the broadcast query; 0: jagged queries.
        broadcast: i32,
        /// 16-byte pieces of a row of dq and dk.
        vectors_qk: i32,
        /// And of dv.
        vectors_v: i32,
        /// Visibility.
        mask: Mask,
        /// Rows of o in this call.
        o_rows: i32,
        /// Rows of k in this call.
        kv_rows: i32,
        /// Blocks of the backward's grid.
        ctas: i32,
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;
    use std::path::Path;
    use std::process::Command;

    /// The C compiler checks our sizes and offsets against the headers the kernels are compiled with.
    #[test]
    fn headers_agree() {
        let mut c = "#include <stddef.h>\n#include \"params.h\"\n#include \"support.h\"\n".to_owned();
        let mut assert = |what: String, value: usize| {
            writeln!(c, "_Static_assert({what} == {value}, \"{what} is not {value}\");").unwrap();
        };
        for s in LAYOUTS {
            assert(format!("sizeof({})", s.name), s.size);
            for (field, offset, size) in s.fields {
                assert(format!("offsetof({}, {field})", s.name), *offset);
                assert(format!("sizeof((({} *)0)->{field})", s.name), *size);
            }
        }
        assert("sizeof(JfaScheduleHeader)".into(), SCHEDULE_HEADER_BYTES);
        assert("sizeof(JfaSequence)".into(), SEQUENCE_BYTES);
        assert("sizeof(JfaUnit)".into(), UNIT_BYTES);
        assert("JFA_BACKWARD_BLOCK_BYTES".into(), BACKWARD_BLOCK_BYTES);
        assert("JFA_BOUND".into(), jfa_driver::JaggedMap::BOUND as usize);
        assert("JFA_MAX_ROWS".into(), usize::try_from(MAX_ROWS).unwrap());
        let compile = |c: &str| {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("layout.c");
            std::fs::write(&file, c).unwrap();
            Command::new("cc")
                .args(["-std=c11", "-fsyntax-only", "-Wall", "-Werror", "-I"])
                .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"))
                .arg(file)
                .output()
                .expect("the C compiler cc runs")
        };
        let out = compile(&c);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let wrong = c.replace("sizeof(JfaUnit) == 8", "sizeof(JfaUnit) == 12");
        assert!(!compile(&wrong).status.success(), "the compiler notices a wrong size");
    }
}
