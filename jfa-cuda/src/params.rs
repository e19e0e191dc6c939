//! The structures kernels take by value, as `kernels/params.h`, `split.h` and `support.h` declare them; those of the schedule
//! are in [`jfa_driver::schedule::params`]. A test compiles the headers and compares every size and offset.

pub use jfa_driver::schedule::params::{
    Address, Finding, MAX_ROWS, Mask, SCHEDULE_HEADER_BYTES, SEQUENCE_BYTES, ScheduleParams, UNIT_BYTES,
    ValidateParams, ZeroParams, ZeroTensor,
};

/// Bytes of a row block's partial dq: `JFA_BACKWARD_BLOCK_BYTES`.
pub const BACKWARD_BLOCK_BYTES: usize = 33_792;

/// Query rows of a block of the split backward: `JFA_SPLIT_ROWS`.
pub const SPLIT_ROWS: i64 = 64;

/// Bytes of a block's statistics: `JFA_SPLIT_STATISTICS_BYTES`.
pub const SPLIT_STATISTICS_BYTES: usize = 512;

/// Size of `JfaIndexHeader`.
pub const INDEX_HEADER_BYTES: usize = 256;

/// Size of `JfaKeySequence`.
pub const KEY_SEQUENCE_BYTES: usize = 16;

/// Size of `JfaMember`.
pub const MEMBER_BYTES: usize = 16;

jfa_driver::mirror! {
    /// Parameters of the forward kernels.
    struct ForwardParams = "JfaForwardParams" {
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// The forward list.
        units: Address,
        /// The launch's own queue of items, in scratch memory.
        queue: Address,
        /// Odd, and of no other launch whose work may be unfinished.
        queue_key: u64,
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

    /// Parameters of the kernel before the unordered backward.
    struct PrepareParams = "JfaPrepareParams" {
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// The backward list.
        units: Address,
        /// `[heads_q, lse_head_stride]`.
        lse: Address,
        /// Base of o.
        o: Address,
        /// Base of do.
        d_o: Address,
        /// Sums of dq, and what rows start from.
        partial: Address,
        /// Base of dq.
        dq: Address,
        /// Distance of heads, in elements.
        lse_head_stride: i64,
        /// Distance of rows of o.
        o_row_bytes: i64,
        /// Distance of heads of o.
        o_head_bytes: i64,
        /// Distance of rows of do.
        do_row_bytes: i64,
        /// Distance of heads of do.
        do_head_bytes: i64,
        /// Distance of rows of dq.
        dq_row_bytes: i64,
        /// Distance of heads of dq.
        dq_head_bytes: i64,
        /// Query heads.
        heads: i32,
        /// Row blocks per query head.
        blocks: i32,
        /// 16-byte pieces of a row of dq.
        vectors_qk: i32,
        /// And of o and do.
        vectors_v: i32,
        /// Visibility.
        mask: Mask,
        /// Rows of o in this call.
        o_rows: i32,
    }

    /// Parameters of the index of the split backward.
    struct IndexParams = "JfaIndexParams" {
        /// The schedule buffer.
        schedule: Address,
        /// `[batch]`.
        sequences: Address,
        /// `[kv_batch + 1]`.
        kv_offsets: Address,
        /// `[kv_batch]` or 0.
        kv_lengths: Address,
        /// Number of units.
        header: Address,
        /// `[kv_batch]`.
        keys: Address,
        /// `[batch]`.
        members: Address,
        /// `[capacity]`.
        units: Address,
        /// `[4 * batch + kv_batch]` words.
        scratch: Address,
        /// Rows of k and v.
        total_kv: i64,
        /// Sequences.
        batch: i32,
        /// Key/value sequences.
        kv_batch: i32,
        /// Width of `kv_offsets`.
        kv_offsets_are_64bit: i32,
        /// Keys of a unit.
        unit_keys: i32,
        /// Rows of a sequence in a block.
        block_rows: i32,
        /// Most units.
        capacity: i32,
    }

    /// Parameters of the kernels of the split backward.
    struct SplitParams = "JfaSplitParams" {
        /// The schedule buffer.
        header: Address,
        /// `[batch]`.
        sequences: Address,
        /// The forward list.
        query_units: Address,
        /// Number of units of keys.
        index: Address,
        /// `[kv_batch]`.
        keys: Address,
        /// `[batch]`.
        members: Address,
        /// Units of keys.
        key_units: Address,
        /// `[heads_q, lse_head_stride]`.
        lse: Address,
        /// Base of o.
        o: Address,
        /// Base of dq.
        dq: Address,
        /// Base of dk.
        dk: Address,
        /// Base of dv.
        dv: Address,
        /// Two counters, zeroed before.
        control: Address,
        /// lse and delta of every block of rows.
        statistics: Address,
        /// Sums of dq, with a broadcast query.
        partial: Address,
        /// Distance of heads, in elements.
        lse_head_stride: i64,
        /// Distance of rows of o.
        o_row_bytes: i64,
        /// Distance of heads of o.
        o_head_bytes: i64,
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
        /// Packed heads.
        heads: i32,
        /// Key/value heads.
        heads_kv: i32,
        /// Log2 of the query heads packed into the rows of a block.
        packed_log2: i32,
        /// Blocks of rows per packed head.
        blocks: i32,
        /// Sequences.
        batch: i32,
        /// Rows of the broadcast query; 0: jagged queries.
        broadcast: i32,
        /// Pairs of blocks of a broadcast query.
        pairs: i32,
        /// Parts of the batch, with a broadcast query.
        slices: i32,
        /// 16-byte pieces of a row of dq and dk.
        vectors_qk: i32,
        /// And of o and dv.
        vectors_v: i32,
        /// Visibility.
        mask: Mask,
        /// Rows of dq in this call.
        q_rows: i32,
        /// Rows of o in this call.
        o_rows: i32,
        /// Rows of dk in this call.
        kv_rows: i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jfa_driver::schedule::params as schedule;
    use std::fmt::Write;
    use std::path::Path;
    use std::process::Command;

    /// The C compiler checks our sizes and offsets against the headers the kernels are compiled with.
    #[test]
    fn headers_agree() {
        let mut c =
            "#include <stddef.h>\n#include \"params.h\"\n#include \"split.h\"\n#include \"support.h\"\n".to_owned();
        let mut assert = |what: String, value: usize| {
            writeln!(c, "_Static_assert({what} == {value}, \"{what} is not {value}\");").unwrap();
        };
        for s in LAYOUTS.iter().chain(schedule::LAYOUTS) {
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
        assert("JFA_SPLIT_ROWS".into(), usize::try_from(SPLIT_ROWS).unwrap());
        assert("JFA_SPLIT_STATISTICS_BYTES".into(), SPLIT_STATISTICS_BYTES);
        assert("sizeof(JfaIndexHeader)".into(), INDEX_HEADER_BYTES);
        assert("sizeof(JfaKeySequence)".into(), KEY_SEQUENCE_BYTES);
        assert("sizeof(JfaMember)".into(), MEMBER_BYTES);
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
