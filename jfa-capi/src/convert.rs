//! From the structs of the C ABI to those of the core, and back for plugins.

use std::ffi::c_void;

use jfa_core::backend::DimRange;
use jfa_core::layout::Offsets;
use jfa_core::{
    Alignment, BackwardArgs, Bias, Buffer, Call, Capabilities, DType, DataPtr, Error, ForwardArgs, IndexType, Layout,
    LseView, Mask, MemorySpace, Problem, Query, TensorView,
};

use crate::abi::*;
use crate::abi_backend::*;
use crate::boundary::{Result, read, required};
use crate::status::Failure;

/// A C enum: its name, and its values with their meaning.
pub(crate) struct CEnum<T: 'static> {
    name: &'static str,
    values: &'static [(i32, &'static str, T)],
}

impl<T: Copy + PartialEq> CEnum<T> {
    pub(crate) fn get(&self, value: i32, argument: &str) -> Result<T> {
        match self.values.iter().find(|(v, _, _)| *v == value) {
            Some((_, _, meaning)) => Ok(*meaning),
            None => Err(self.unknown(value, argument)),
        }
    }

    #[cold]
    fn unknown(&self, value: i32, argument: &str) -> Failure {
        let values: Vec<_> = self.values.iter().map(|(v, n, _)| format!("{n} = {v}")).collect();
        Error::invalid(argument, value, format!("no {}; there are {}", self.name, values.join(", "))).into()
    }

    /// The C value of a meaning; every meaning has one.
    pub(crate) fn value(&self, meaning: T) -> i32 {
        self.values.iter().find(|(_, _, m)| *m == meaning).map_or(0, |(v, _, _)| *v)
    }
}

macro_rules! c_enum {
    ($const:ident: $ty:ident -> $to:ty { $($variant:ident => $meaning:expr,)* }) => {
        pub(crate) const $const: CEnum<$to> = CEnum {
            name: stringify!($ty),
            values: &[$(($ty::$variant as i32, stringify!($variant), $meaning),)*],
        };
    };
}

/// Which bias, without its parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasKind {
    None,
    Alibi,
    Relative,
    Dense,
}

/// Which mask, without its parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaskKind {
    Full,
    Causal,
    Window,
}

c_enum!(DTYPE: jfa_dtype -> DType {
    JFA_DTYPE_F32 => DType::F32,
    JFA_DTYPE_F16 => DType::F16,
    JFA_DTYPE_BF16 => DType::BF16,
});
c_enum!(INDEX: jfa_index_type -> IndexType {
    JFA_INDEX_I32 => IndexType::I32,
    JFA_INDEX_I64 => IndexType::I64,
});
c_enum!(QUERY: jfa_query -> bool {
    JFA_QUERY_JAGGED => false,
    JFA_QUERY_BROADCAST => true,
});
c_enum!(MASK: jfa_mask -> MaskKind {
    JFA_MASK_FULL => MaskKind::Full,
    JFA_MASK_CAUSAL => MaskKind::Causal,
    JFA_MASK_WINDOW => MaskKind::Window,
});
c_enum!(ALIGNMENT: jfa_alignment -> Alignment {
    JFA_ALIGNMENT_TOP_LEFT => Alignment::TopLeft,
    JFA_ALIGNMENT_BOTTOM_RIGHT => Alignment::BottomRight,
});
c_enum!(BIAS: jfa_bias -> BiasKind {
    JFA_BIAS_NONE => BiasKind::None,
    JFA_BIAS_ALIBI => BiasKind::Alibi,
    JFA_BIAS_RELATIVE => BiasKind::Relative,
    JFA_BIAS_DENSE => BiasKind::Dense,
});
c_enum!(MEMORY: jfa_memory_space -> Option<MemorySpace> {
    JFA_MEMORY_HOST => Some(MemorySpace::Host),
    JFA_MEMORY_CUDA => Some(MemorySpace::CudaDevice),
    JFA_MEMORY_ANY => None,
});
c_enum!(REPORT: jfa_report_format -> bool {
    JFA_REPORT_TEXT => false,
    JFA_REPORT_JSON => true,
});

const FLAGS: u64 = JFA_FLAG_DETERMINISTIC | JFA_FLAG_ZERO_UNUSED_ROWS | JFA_FLAG_KV_INDEX;

/// A reserved field that is not 0 is one that a newer header gave a name.
fn unreserved(value: i32, argument: &str) -> Result<()> {
    if value == 0 {
        return Ok(());
    }
    Err(Failure::new(
        jfa_status::JFA_ERROR_STRUCT_TOO_NEW,
        format!("{argument} = {value}: must be 0 in this version of the library ({})", crate::VERSION),
    ))
}

/// A count or distance that the core keeps in 32 bits.
fn distance(value: i64, argument: &str) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::invalid(argument, value, "must be between 0 and 2^32 - 1").into())
}

fn side(value: i64, argument: &str) -> Result<Option<u32>> {
    match value {
        -1 => Ok(None),
        _ => u32::try_from(value)
            .map(Some)
            .map_err(|_| Error::invalid(argument, value, "must be between 0 and 2^32 - 1, or -1 for unbounded").into()),
    }
}

/// The core's problem, not yet validated.
///
/// # Safety
/// That of [`read`].
pub(crate) unsafe fn problem(pointer: *const jfa_problem) -> Result<Problem> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(pointer, "problem") }?;
    unreserved(c.reserved, "problem.reserved")?;
    if c.flags & !FLAGS != 0 {
        let unknown = format!("{:#x}", c.flags);
        return Err(Error::invalid("flags", unknown, format!("unknown bits {:#x}", c.flags & !FLAGS)).into());
    }
    let mask = MASK.get(c.mask, "mask")?;
    let bias = BIAS.get(c.bias, "bias")?;
    let needs_alignment = mask != MaskKind::Full || matches!(bias, BiasKind::Alibi | BiasKind::Relative);
    let alignment = match (needs_alignment, c.alignment) {
        // Nothing depends on it.
        (false, 0) => Alignment::TopLeft,
        (_, value) => ALIGNMENT.get(value, "alignment")?,
    };
    let broadcast = QUERY.get(c.query, "query")?;
    let hint = |hint: i64| (hint > 0).then_some(hint);
    Ok(Problem {
        dtype: DTYPE.get(c.dtype, "dtype")?,
        heads_q: c.heads_q,
        heads_kv: c.heads_kv,
        head_dim: c.head_dim,
        head_dim_v: c.head_dim_v,
        batch: c.batch,
        total_q: c.total_q,
        total_kv: c.total_kv,
        kv_batch: c.kv_batch,
        query: if broadcast { Query::Broadcast { q_len: c.q_len } } else { Query::Jagged },
        uses_kv_index: c.flags & JFA_FLAG_KV_INDEX != 0,
        mask: match mask {
            MaskKind::Full => Mask::Full,
            MaskKind::Causal => Mask::Causal(alignment),
            MaskKind::Window => Mask::Window {
                left: side(c.window_left, "window_left")?,
                right: side(c.window_right, "window_right")?,
                alignment,
            },
        },
        bias: match bias {
            BiasKind::None => Bias::None,
            BiasKind::Alibi => Bias::Alibi,
            BiasKind::Relative => Bias::Relative { radius: distance(c.bias_radius, "bias_radius")? },
            BiasKind::Dense => Bias::Dense {
                dtype: DTYPE.get(c.bias_dtype, "bias_dtype")?,
                row_align: distance(i64::from(c.bias_row_align), "bias_row_align")?,
                shared_by_heads: match c.bias_shared_by_heads {
                    0 => false,
                    1 => true,
                    other => return Err(Error::invalid("bias_shared_by_heads", other, "must be 0 or 1").into()),
                },
                capacity: c.bias_capacity,
            },
        },
        bias_alignment: alignment,
        scale: c.scale,
        deterministic: c.flags & JFA_FLAG_DETERMINISTIC != 0,
        zero_unused_rows: c.flags & JFA_FLAG_ZERO_UNUSED_ROWS != 0,
        max_q_len_hint: hint(c.max_q_len_hint),
        max_kv_len_hint: hint(c.max_kv_len_hint),
    })
}

/// The C form of a problem, for plugins.
pub(crate) fn c_problem(p: &Problem) -> jfa_problem {
    let (mask, left, right) = match p.mask {
        Mask::Full => (MaskKind::Full, None, None),
        Mask::Causal(_) => (MaskKind::Causal, None, None),
        Mask::Window { left, right, .. } => (MaskKind::Window, left, right),
    };
    let side = |s: Option<u32>| s.map_or(-1, i64::from);
    let mut c = jfa_problem {
        struct_size: size_of::<jfa_problem>(),
        dtype: DTYPE.value(p.dtype),
        query: QUERY.value(matches!(p.query, Query::Broadcast { .. })),
        heads_q: p.heads_q,
        heads_kv: p.heads_kv,
        head_dim: p.head_dim,
        head_dim_v: p.head_dim_v,
        batch: p.batch,
        total_q: p.total_q,
        total_kv: p.total_kv,
        kv_batch: p.kv_batch,
        q_len: if let Query::Broadcast { q_len } = p.query { q_len } else { 0 },
        mask: MASK.value(mask),
        alignment: ALIGNMENT.value(p.mask.alignment().unwrap_or(p.bias_alignment)),
        window_left: side(left),
        window_right: side(right),
        bias: BIAS.value(BiasKind::None),
        bias_dtype: 0,
        bias_row_align: 0,
        bias_shared_by_heads: 0,
        bias_radius: 0,
        bias_capacity: 0,
        flags: 0,
        scale: p.scale,
        reserved: 0,
        max_q_len_hint: p.max_q_len_hint.unwrap_or(0),
        max_kv_len_hint: p.max_kv_len_hint.unwrap_or(0),
    };
    match p.bias {
        Bias::None => {}
        Bias::Alibi => c.bias = BIAS.value(BiasKind::Alibi),
        Bias::Relative { radius } => {
            c.bias = BIAS.value(BiasKind::Relative);
            c.bias_radius = i64::from(radius);
        }
        Bias::Dense { dtype, row_align, shared_by_heads, capacity } => {
            c.bias = BIAS.value(BiasKind::Dense);
            c.bias_dtype = DTYPE.value(dtype);
            c.bias_row_align = row_align.cast_signed();
            c.bias_shared_by_heads = i32::from(shared_by_heads);
            c.bias_capacity = capacity;
        }
    }
    for (on, flag) in [
        (p.deterministic, JFA_FLAG_DETERMINISTIC),
        (p.zero_unused_rows, JFA_FLAG_ZERO_UNUSED_ROWS),
        (p.uses_kv_index, JFA_FLAG_KV_INDEX),
    ] {
        if on {
            c.flags |= flag;
        }
    }
    c
}

fn optional<T>(p: *const T) -> Option<DataPtr> {
    (!p.is_null()).then(|| DataPtr::from_const(p))
}

/// The core's layout.
///
/// # Safety
/// That of [`read`].
#[inline]
pub(crate) unsafe fn layout(pointer: *const jfa_layout) -> Result<Layout> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(pointer, "layout") }?;
    let offsets = |data: *const c_void, index_type: i32, argument: &str| -> Result<Offsets> {
        // Where there is nothing to read, the type does not matter.
        let index_type = if data.is_null() { IndexType::I64 } else { INDEX.get(index_type, argument)? };
        Ok(Offsets { data: DataPtr::from_const(data), index_type })
    };
    Ok(Layout {
        batch: c.batch,
        q_offsets: if c.q_offsets.is_null() {
            None
        } else {
            Some(offsets(c.q_offsets, c.q_offsets_type, "q_offsets_type")?)
        },
        q_lengths: optional(c.q_lengths),
        kv_batch: c.kv_batch,
        kv_offsets: offsets(c.kv_offsets, c.kv_offsets_type, "kv_offsets_type")?,
        kv_lengths: optional(c.kv_lengths),
        kv_index: optional(c.kv_index),
        bias_offsets: optional(c.bias_offsets),
    })
}

/// The C form of a layout, for plugins.
pub(crate) fn c_layout(l: &Layout) -> jfa_layout {
    let raw = |p: Option<DataPtr>| p.unwrap_or(DataPtr::NULL);
    jfa_layout {
        struct_size: size_of::<jfa_layout>(),
        batch: l.batch,
        kv_batch: l.kv_batch,
        q_offsets: raw(l.q_offsets.map(|o| o.data)).cast(),
        q_lengths: raw(l.q_lengths).cast(),
        kv_offsets: l.kv_offsets.data.cast(),
        kv_lengths: raw(l.kv_lengths).cast(),
        kv_index: raw(l.kv_index).cast(),
        bias_offsets: raw(l.bias_offsets).cast(),
        q_offsets_type: l.q_offsets.map_or(0, |o| INDEX.value(o.index_type)),
        kv_offsets_type: INDEX.value(l.kv_offsets.index_type),
    }
}

/// The core's view of a tensor.
///
/// # Safety
/// That of [`read`].
#[inline]
unsafe fn tensor(pointer: *const jfa_tensor, argument: &str) -> Result<TensorView> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(pointer, argument) }?;
    if c.reserved != 0 {
        unreserved(c.reserved, &format!("{argument}.reserved"))?;
    }
    let dtype = match DTYPE.get(c.dtype, argument) {
        Ok(dtype) => dtype,
        Err(_) => DTYPE.get(c.dtype, &format!("{argument}.dtype"))?,
    };
    Ok(TensorView {
        data: DataPtr::new(c.data),
        dtype,
        rows: c.rows,
        heads: c.heads,
        dim: c.dim,
        row_stride: c.row_stride,
        head_stride: c.head_stride,
    })
}

/// The C form of a view, for plugins.
pub(crate) fn c_tensor(t: &TensorView) -> jfa_tensor {
    jfa_tensor {
        struct_size: size_of::<jfa_tensor>(),
        data: t.data.cast(),
        dtype: DTYPE.value(t.dtype),
        reserved: 0,
        rows: t.rows,
        heads: t.heads,
        dim: t.dim,
        row_stride: t.row_stride,
        head_stride: t.head_stride,
    }
}

/// # Safety
/// That of [`read`].
#[inline]
unsafe fn lse(pointer: *const jfa_lse) -> Result<LseView> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(pointer, "lse") }?;
    Ok(LseView { data: DataPtr::new(c.data), rows: c.rows, head_stride: c.head_stride })
}

pub(crate) fn c_lse(l: &LseView) -> jfa_lse {
    jfa_lse { struct_size: size_of::<jfa_lse>(), data: l.data.cast(), rows: l.rows, head_stride: l.head_stride }
}

/// The C struct of a call and its layout.
///
/// # Safety
/// That of [`read`], also for the layout.
#[inline]
pub(crate) unsafe fn call(pointer: *const jfa_call) -> Result<(jfa_call, Layout)> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(pointer, "call") }?;
    let layout_pointer = required!(c.layout, "call.layout");
    // SAFETY: as above.
    let layout = unsafe { layout(layout_pointer) }?;
    Ok((c, layout))
}

/// The core's call, borrowing the layout.
#[inline]
pub(crate) fn core_call<'a>(c: &jfa_call, layout: &'a Layout) -> Call<'a> {
    Call {
        layout,
        schedule: Buffer { data: DataPtr::new(c.schedule), bytes: c.schedule_bytes },
        workspace: Buffer { data: DataPtr::new(c.workspace), bytes: c.workspace_bytes },
        stream: jfa_core::Stream::from_raw(c.stream),
    }
}

/// # Safety
/// That of [`read`], also for every view.
#[inline]
pub(crate) unsafe fn forward_args(pointer: *const jfa_forward_args) -> Result<ForwardArgs> {
    // SAFETY: the caller's promise.
    unsafe {
        let c = read(pointer, "args")?;
        Ok(ForwardArgs {
            q: tensor(c.q, "q")?,
            k: tensor(c.k, "k")?,
            v: tensor(c.v, "v")?,
            bias: DataPtr::from_const(c.bias),
            o: tensor(c.o, "o")?,
            lse: lse(c.lse)?,
        })
    }
}

/// # Safety
/// That of [`read`], also for every view.
#[inline]
pub(crate) unsafe fn backward_args(pointer: *const jfa_backward_args) -> Result<BackwardArgs> {
    // SAFETY: the caller's promise.
    unsafe {
        let c = read(pointer, "args")?;
        Ok(BackwardArgs {
            q: tensor(c.q, "q")?,
            k: tensor(c.k, "k")?,
            v: tensor(c.v, "v")?,
            bias: DataPtr::from_const(c.bias),
            o: tensor(c.o, "o")?,
            lse: lse(c.lse)?,
            d_o: tensor(c.d_o, "d_o")?,
            dq: tensor(c.dq, "dq")?,
            dk: tensor(c.dk, "dk")?,
            dv: tensor(c.dv, "dv")?,
            dbias: DataPtr::new(c.dbias),
        })
    }
}

/// What a plugin declares, as the core's data; the error says what makes no sense.
///
/// # Safety
/// The arrays hold as many ranges as their counts say.
pub(crate) unsafe fn capabilities(c: &jfa_capabilities) -> std::result::Result<Capabilities, String> {
    let memory_space = match MEMORY.get(c.memory_space, "memory_space") {
        Ok(Some(space)) => space,
        _ => {
            return Err(format!(
                "capabilities.memory_space = {}: must be JFA_MEMORY_HOST or JFA_MEMORY_CUDA",
                c.memory_space
            ));
        }
    };
    let has = |bits: u64, value: i32| bits & (1_u64 << value) != 0;
    let dtypes: Vec<_> = DType::ALL.into_iter().filter(|d| has(c.dtypes, DTYPE.value(*d))).collect();
    if dtypes.is_empty() {
        return Err(format!("capabilities.dtypes = {:#x}: no element type that this library knows", c.dtypes));
    }
    let biases = [(BiasKind::Alibi, "alibi"), (BiasKind::Relative, "relative"), (BiasKind::Dense, "dense")];
    let feature = |bit: u64| c.features & bit != 0;
    for (name, bytes) in [("base_alignment", c.base_alignment), ("stride_alignment", c.stride_alignment)] {
        if !bytes.is_power_of_two() || bytes > 4096 {
            return Err(format!("capabilities.{name} = {bytes}: must be a power of two up to 4096"));
        }
    }
    Ok(Capabilities {
        memory_space,
        dtypes,
        // SAFETY: the caller's promise.
        head_dims: unsafe { ranges(c.head_dims, c.num_head_dims, "head_dims") }?,
        // SAFETY: as above.
        head_dims_v: unsafe { ranges(c.head_dims_v, c.num_head_dims_v, "head_dims_v") }?,
        unequal_head_dims: feature(JFA_FEATURE_UNEQUAL_HEAD_DIMS),
        causal: feature(JFA_FEATURE_CAUSAL),
        window: feature(JFA_FEATURE_WINDOW),
        biases: biases.into_iter().filter(|(kind, _)| has(c.biases, BIAS.value(*kind))).map(|(_, name)| name).collect(),
        gqa: feature(JFA_FEATURE_GQA),
        kv_index: feature(JFA_FEATURE_KV_INDEX),
        broadcast_query: feature(JFA_FEATURE_BROADCAST_QUERY),
        backward: feature(JFA_FEATURE_BACKWARD),
        deterministic: feature(JFA_FEATURE_DETERMINISTIC),
        zero_unused_rows: feature(JFA_FEATURE_ZERO_UNUSED_ROWS),
        base_alignment: c.base_alignment,
        stride_alignment: c.stride_alignment,
    })
}

unsafe fn ranges(data: *const i64, count: usize, name: &str) -> std::result::Result<Vec<DimRange>, String> {
    if data.is_null() || count == 0 || count > 1024 {
        return Err(format!("capabilities.{name} = {data:p} with {count} ranges: must be 1 to 1024"));
    }
    if !data.is_aligned() {
        return Err(format!("capabilities.{name} = {data:p}: not the address of integers"));
    }
    // SAFETY: the caller's promise.
    let flat = unsafe { std::slice::from_raw_parts(data, 3 * count) };
    flat.chunks_exact(3)
        .map(|r| {
            let range = DimRange { min: r[0], max: r[1], step: r[2] };
            if range.step < 1 || range.min < 1 || range.max < range.min {
                return Err(format!("capabilities.{name}: {} to {} in steps of {} is no range", r[0], r[1], r[2]));
            }
            Ok(range)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_problems() -> Vec<Problem> {
        let base = Problem::builder(DType::BF16, 8, 64).capacity(3, 100, 200).heads_kv(2).head_dim_v(48).scale(-0.5);
        let a = Alignment::BottomRight;
        let mut out = vec![base.clone().build().unwrap()];
        for mask in [
            Mask::Causal(a),
            Mask::Causal(Alignment::TopLeft),
            Mask::Window { left: Some(3), right: None, alignment: a },
            Mask::Window { left: None, right: Some(0), alignment: Alignment::TopLeft },
        ] {
            out.push(base.clone().mask(mask).build().unwrap());
        }
        for bias in [
            Bias::Alibi,
            Bias::Relative { radius: 9 },
            Bias::Dense { dtype: DType::F32, row_align: 8, shared_by_heads: true, capacity: 1 << 40 },
            Bias::Dense { dtype: DType::BF16, row_align: 1, shared_by_heads: false, capacity: 77 },
        ] {
            out.push(base.clone().bias(bias).bias_alignment(a).build().unwrap());
        }
        out.push(base.clone().broadcast_query(4).kv_index(2).deterministic(true).build().unwrap());
        out.push(base.zero_unused_rows(true).max_len_hint(Some(50), None).build().unwrap());
        out
    }

    #[test]
    fn a_problem_survives_the_way_to_c_and_back() {
        for p in all_problems() {
            let c = c_problem(&p);
            // SAFETY: a whole struct.
            assert_eq!(unsafe { problem(&raw const c) }.unwrap(), p);
        }
    }

    fn error_of(change: impl FnOnce(&mut jfa_problem)) -> String {
        let mut c = c_problem(&Problem::builder(DType::F32, 1, 8).capacity(1, 1, 1).build().unwrap());
        change(&mut c);
        // SAFETY: a whole struct.
        unsafe { problem(&raw const c) }.unwrap_err().to_string()
    }

    #[test]
    fn unknown_values_are_named() {
        let text = error_of(|c| c.dtype = 4);
        assert_eq!(text, "dtype = 4: no jfa_dtype; there are JFA_DTYPE_F32 = 1, JFA_DTYPE_F16 = 2, JFA_DTYPE_BF16 = 3");
        assert!(error_of(|c| c.mask = 0).starts_with("mask = 0: no jfa_mask"));
        assert!(error_of(|c| c.bias = -1).starts_with("bias = -1: no jfa_bias"));
        assert!(error_of(|c| c.query = 3).starts_with("query = 3: no jfa_query"));
        assert!(error_of(|c| c.alignment = 3).starts_with("alignment = 3: no jfa_alignment"));
        assert!(error_of(|c| c.flags = 0x11).starts_with("flags = 0x11: unknown bits 0x10"));
        assert!(error_of(|c| c.reserved = 1).starts_with("problem.reserved = 1: must be 0"));
        assert!(error_of(|c| (c.mask, c.alignment, c.window_left) = (3, 1, -2)).starts_with("window_left = -2: must"));
        assert!(error_of(|c| (c.bias, c.alignment, c.bias_radius) = (3, 1, -2)).starts_with("bias_radius = -2: must"));
    }

    #[test]
    fn alignment_has_no_default_where_it_matters() {
        for (mask, bias, needed) in
            [(1, 1, false), (1, 4, false), (2, 1, true), (3, 1, true), (1, 2, true), (1, 3, true)]
        {
            let mut c = c_problem(&Problem::builder(DType::F32, 1, 8).capacity(1, 1, 1).build().unwrap());
            (c.mask, c.bias, c.alignment, c.bias_dtype, c.bias_row_align) = (mask, bias, 0, 1, 1);
            // SAFETY: a whole struct.
            let result = unsafe { problem(&raw const c) };
            assert_eq!(result.is_err(), needed, "mask {mask}, bias {bias}");
            if let Err(e) = result {
                assert!(e.to_string().starts_with("alignment = 0: no jfa_alignment"), "{e}");
            }
        }
    }
}
