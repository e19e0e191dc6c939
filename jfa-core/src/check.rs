//! The checks of every call, made before a backend sees it: whatever returns an error here has written nothing.
//!
//! The happy path is a few dozen integer comparisons; texts are put together in cold functions.

use crate::layout::Offsets;
use crate::{
    BackwardArgs, Bias, Buffer, Call, Capabilities, DType, DataPtr, Error, ForwardArgs, IndexType, Layout, LseView,
    MemorySpace, Problem, Query, Requirements, Result, TensorView,
};

/// What a call has to respect: the problem, and the promises of the backend it goes to.
pub(crate) struct Checker {
    pub problem: Problem,
    pub memory_space: MemorySpace,
    /// Divisor of tensor addresses, in bytes; a power of two.
    base_alignment: usize,
    /// Divisor of strides, in elements; a power of two.
    stride_step: i64,
    pub requirements: Requirements,
    pub has_backward: bool,
    pub backend: String,
}

/// Rows of the buffers of one call.
#[derive(Clone, Copy)]
struct Rows {
    /// Of `q` (and `dq`).
    q: i64,
    /// Of `o`, `lse` (and `do`).
    o: i64,
    /// Of `k` and `v` (and their gradients).
    kv: i64,
}

/// Whether a pass touches anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Call the backend.
    Some,
    /// Success without a call.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Checker {
    /// # Errors
    /// [`Error::Internal`] when the backend promises alignments that are no powers of two.
    pub fn new(problem: &Problem, capabilities: &Capabilities, requirements: Requirements, name: &str) -> Result<Self> {
        let (base, stride) = (capabilities.base_alignment, capabilities.stride_alignment);
        if !base.is_power_of_two() || !stride.is_power_of_two() {
            let text = format!("backend '{name}': alignments {base} and {stride} are not both powers of two");
            return Err(Error::Internal(text));
        }
        let size = problem.dtype.size();
        Ok(Checker {
            problem: problem.clone(),
            memory_space: capabilities.memory_space,
            base_alignment: base.max(size),
            stride_step: i64::try_from(stride.max(size) / size).unwrap_or(i64::MAX),
            requirements,
            has_backward: capabilities.backward,
            backend: name.to_owned(),
        })
    }

    /// What a backward on a backend without one is answered.
    #[cold]
    pub fn no_backward(&self) -> Error {
        let lacks = format!("'{}' lacks a backward (has forward)", self.backend);
        Error::Unsupported { asked: format!("the backward of {}", self.problem), lacks }
    }

    /// A batch without sequences is done as soon as it is seen, unless unused rows are to be zeroed.
    #[inline]
    pub fn is_idle(&self, layout: &Layout) -> bool {
        layout.batch == 0 && !self.problem.zero_unused_rows
    }

    /// Checks a [`crate::Plan::build_schedule`].
    ///
    /// # Safety
    /// That of `build_schedule`.
    pub unsafe fn schedule(&self, layout: &Layout, schedule: Buffer) -> Result<()> {
        let rows = Rows { q: self.problem.q_rows(), o: self.problem.o_rows(), kv: self.problem.total_kv };
        // SAFETY: the caller's promise.
        unsafe { self.layout(layout, rows)? };
        self.buffer("schedule", schedule, self.requirements.schedule_bytes)
    }

    /// Checks a forward. Strides of single rows and heads, which address nothing, are set to aligned values.
    ///
    /// # Safety
    /// That of [`crate::Plan::forward`].
    pub unsafe fn forward(&self, call: &Call, args: &mut ForwardArgs) -> Result<Work> {
        let p = &self.problem;
        self.counts(call.layout)?;
        let rows = self.rows(call.layout, &args.q, &args.k, &args.o)?;
        let work = if rows.o == 0 { Work::None } else { Work::Some };
        let (hq, hkv) = (p.heads_q, p.heads_kv);
        // What the rows of o are compared with: those of q, except with a broadcast query.
        let o_like = if p.query == Query::Jagged { "q" } else { "o" };
        self.view("q", &mut args.q, (rows.q, "q", hq, p.head_dim), Access::Read, work)?;
        self.view("k", &mut args.k, (rows.kv, "k", hkv, p.head_dim), Access::Read, work)?;
        self.view("v", &mut args.v, (rows.kv, "k", hkv, p.head_dim_v), Access::Read, work)?;
        self.view("o", &mut args.o, (rows.o, o_like, hq, p.head_dim_v), Access::Write, work)?;
        self.lse(&mut args.lse, rows.o, work)?;
        if work == Work::None {
            return Ok(work);
        }
        self.bias(args.bias)?;
        // SAFETY: the caller's promise.
        unsafe { self.layout(call.layout, rows)? };
        self.buffer("schedule", call.schedule, self.requirements.schedule_bytes)?;
        self.buffer("workspace", call.workspace, self.requirements.forward_bytes)?;
        Ok(work)
    }

    /// Checks a backward. Strides of single rows and heads, which address nothing, are set to aligned values.
    ///
    /// # Safety
    /// That of [`crate::Plan::backward`].
    pub unsafe fn backward(&self, call: &Call, args: &mut BackwardArgs) -> Result<Work> {
        let p = &self.problem;
        self.counts(call.layout)?;
        let rows = self.rows(call.layout, &args.q, &args.k, &args.o)?;
        let work = if rows.q == 0 && rows.o == 0 && rows.kv == 0 { Work::None } else { Work::Some };
        let (hq, hkv) = (p.heads_q, p.heads_kv);
        // What the rows of o are compared with: those of q, except with a broadcast query.
        let o_like = if p.query == Query::Jagged { "q" } else { "o" };
        self.view("q", &mut args.q, (rows.q, "q", hq, p.head_dim), Access::Read, work)?;
        self.view("k", &mut args.k, (rows.kv, "k", hkv, p.head_dim), Access::Read, work)?;
        self.view("v", &mut args.v, (rows.kv, "k", hkv, p.head_dim_v), Access::Read, work)?;
        self.view("o", &mut args.o, (rows.o, o_like, hq, p.head_dim_v), Access::Read, work)?;
        self.lse(&mut args.lse, rows.o, work)?;
        self.view("d_o", &mut args.d_o, (rows.o, o_like, hq, p.head_dim_v), Access::Read, work)?;
        self.view("dq", &mut args.dq, (rows.q, "q", hq, p.head_dim), Access::Write, work)?;
        self.view("dk", &mut args.dk, (rows.kv, "k", hkv, p.head_dim), Access::Write, work)?;
        self.view("dv", &mut args.dv, (rows.kv, "k", hkv, p.head_dim_v), Access::Write, work)?;
        if work == Work::None {
            return Ok(work);
        }
        self.bias(args.bias)?;
        self.bias_gradient(args.dbias)?;
        // SAFETY: the caller's promise.
        unsafe { self.layout(call.layout, rows)? };
        self.buffer("schedule", call.schedule, self.requirements.schedule_bytes)?;
        self.buffer("workspace", call.workspace, self.requirements.backward_bytes)?;
        Ok(work)
    }

    /// Sequence counts against the capacities.
    fn counts(&self, layout: &Layout) -> Result<()> {
        let p = &self.problem;
        if layout.batch < 0 || layout.batch > p.batch {
            return Err(out_of_capacity("batch", layout.batch, p.batch));
        }
        if p.uses_kv_index {
            if layout.kv_batch < 0 || layout.kv_batch > p.kv_batch {
                return Err(out_of_capacity("kv_batch", layout.kv_batch, p.kv_batch));
            }
            if layout.kv_batch == 0 && layout.batch > 0 {
                return Err(Error::invalid("kv_batch", 0, "kv_index has nothing to refer to"));
            }
        } else if layout.kv_batch != layout.batch {
            return Err(kv_batch_differs(layout));
        }
        Ok(())
    }

    /// Row counts of the call; every later view is compared with them.
    fn rows(&self, layout: &Layout, q: &TensorView, k: &TensorView, o: &TensorView) -> Result<Rows> {
        let p = &self.problem;
        let in_capacity = |name: &'static str, rows: i64, capacity: &'static str, most: i64| {
            if rows < 0 || rows > most { Err(rows_out_of_capacity(name, rows, capacity, most)) } else { Ok(rows) }
        };
        let kv = in_capacity("k.rows", k.rows, "total_kv", p.total_kv)?;
        match p.query {
            Query::Jagged => {
                let q = in_capacity("q.rows", q.rows, "total_q", p.total_q)?;
                Ok(Rows { q, o: q, kv })
            }
            Query::Broadcast { q_len } => {
                if q.rows != q_len {
                    return Err(Error::invalid("q.rows", q.rows, format!("must equal the broadcast q_len = {q_len}")));
                }
                let o = in_capacity("o.rows", o.rows, "batch * q_len", p.o_rows())?;
                if o < layout.batch * q_len {
                    let least = layout.batch * q_len;
                    return Err(Error::invalid("o.rows", o, format!("must hold batch * q_len = {least} rows")));
                }
                Ok(Rows { q: q_len, o, kv })
            }
        }
    }

    /// `shape` is (rows, name of the view that sets the rows, heads, dim).
    #[inline]
    fn view(
        &self,
        name: &'static str,
        view: &mut TensorView,
        shape: (i64, &'static str, i64, i64),
        access: Access,
        work: Work,
    ) -> Result<()> {
        let (rows, _, heads, dim) = shape;
        if view.dtype != self.problem.dtype
            || view.rows != rows
            || view.heads != heads
            || view.dim != dim
            || view.row_stride < 0
            || view.head_stride < 0
        {
            return Err(self.bad_shape(name, view, shape));
        }
        if rows == 0 || work == Work::None {
            return Ok(());
        }
        if view.data.is_null() {
            return Err(null(name, "data", format!("it has {rows} rows")));
        }
        if view.data.addr() & (self.base_alignment - 1) != 0 {
            return Err(self.misaligned(format!("{name}.data"), view.data, self.base_alignment));
        }
        let size = self.problem.dtype.size();
        let off_step = self.stride_step - 1;
        if (view.row_stride | view.head_stride) & off_step != 0 || heads == 1 || rows == 1 {
            self.strides(name, view)?;
        }
        match extent(rows, view.row_stride, heads, view.head_stride, dim, size) {
            Some(bytes) if view.data.addr().checked_add(bytes).is_some() => {}
            _ => return Err(overflow(name, view)),
        }
        if access == Access::Write && self_overlaps(view) {
            return Err(overlap(name, view));
        }
        Ok(())
    }

    /// Repairs strides that no element uses (exchange formats write 1 there), complains about the others.
    #[cold]
    fn strides(&self, name: &'static str, view: &mut TensorView) -> Result<()> {
        let step = self.stride_step;
        if view.heads == 1 && (view.head_stride % step != 0 || view.head_stride < view.dim) {
            view.head_stride = round_up(view.dim, step);
        }
        if view.rows == 1 && (view.row_stride % step != 0 || view.row_stride < view.dim) {
            view.row_stride = round_up(view.dim, step).max(view.head_stride.saturating_mul(view.heads));
        }
        let size = self.problem.dtype.size();
        for (stride, field) in [(view.row_stride, "row_stride"), (view.head_stride, "head_stride")] {
            if stride % step != 0 {
                let bytes = i128::from(stride) * size as i128;
                let required = usize::try_from(step).map_or(usize::MAX, |s| s.saturating_mul(size));
                let value = format!("{stride} elements ({bytes} bytes)");
                return Err(self.misaligned(format!("{name}.{field}"), value, required));
            }
        }
        Ok(())
    }

    #[cold]
    fn bad_shape(&self, name: &'static str, view: &TensorView, shape: (i64, &'static str, i64, i64)) -> Error {
        let (rows, rows_of, heads, dim) = shape;
        let field = |field: &str| format!("{name}.{field}");
        if view.dtype != self.problem.dtype {
            return Error::invalid(field("dtype"), view.dtype, format!("the problem's is {}", self.problem.dtype));
        }
        if view.rows != rows {
            return Error::invalid(field("rows"), view.rows, format!("must equal {rows_of}.rows = {rows}"));
        }
        if view.heads != heads {
            let whose = if matches!(name, "k" | "v" | "dk" | "dv") { "heads_kv" } else { "heads_q" };
            return Error::invalid(field("heads"), view.heads, format!("must equal the problem's {whose} = {heads}"));
        }
        if view.dim != dim {
            let whose = if matches!(name, "q" | "k" | "dq" | "dk") { "head_dim" } else { "head_dim_v" };
            return Error::invalid(field("dim"), view.dim, format!("must equal the problem's {whose} = {dim}"));
        }
        if view.row_stride < 0 {
            return Error::invalid(field("row_stride"), view.row_stride, "must not be negative");
        }
        Error::invalid(field("head_stride"), view.head_stride, "must not be negative")
    }

    fn lse(&self, lse: &mut LseView, rows: i64, work: Work) -> Result<()> {
        if lse.rows != rows {
            return Err(Error::invalid("lse.rows", lse.rows, format!("must equal o.rows = {rows}")));
        }
        if lse.head_stride < 0 {
            return Err(Error::invalid("lse.head_stride", lse.head_stride, "must not be negative"));
        }
        if self.problem.heads_q == 1 && lse.head_stride < rows {
            lse.head_stride = rows;
        }
        if lse.head_stride < rows {
            return Err(Error::invalid(
                "lse.head_stride",
                lse.head_stride,
                format!("must be at least lse.rows = {rows}"),
            ));
        }
        if rows == 0 || work == Work::None {
            return Ok(());
        }
        if lse.data.is_null() {
            return Err(null("lse", "data", format!("it has {rows} rows")));
        }
        if !lse.data.addr().is_multiple_of(4) {
            return Err(self.misaligned("lse.data".to_owned(), lse.data, 4));
        }
        match extent(self.problem.heads_q, lse.head_stride, 1, 0, rows, 4) {
            Some(bytes) if lse.data.addr().checked_add(bytes).is_some() => Ok(()),
            _ => Err(Error::invalid("lse.head_stride", lse.head_stride, "the view does not fit the address space")),
        }
    }

    fn bias(&self, data: DataPtr) -> Result<()> {
        let (elements, dtype) = match self.problem.bias {
            Bias::None => {
                return if data.is_null() {
                    Ok(())
                } else {
                    Err(Error::invalid("bias", format!("{data:?}"), "the problem has no bias"))
                };
            }
            Bias::Alibi | Bias::Relative { .. } => (1, DType::F32),
            Bias::Dense { dtype, capacity, .. } => (capacity, dtype),
        };
        if data.is_null() && elements > 0 {
            return Err(null("bias", "", format!("the problem has a {} bias", self.problem.bias.kind())));
        }
        if !data.addr().is_multiple_of(dtype.size()) {
            return Err(self.misaligned("bias".to_owned(), data, dtype.size()));
        }
        Ok(())
    }

    fn bias_gradient(&self, data: DataPtr) -> Result<()> {
        if data.is_null() {
            return Ok(());
        }
        if self.problem.bias == Bias::None {
            return Err(Error::invalid("dbias", format!("{data:?}"), "the problem has no bias"));
        }
        if !data.addr().is_multiple_of(4) {
            return Err(self.misaligned("dbias".to_owned(), data, 4));
        }
        Ok(())
    }

    fn buffer(&self, name: &'static str, buffer: Buffer, needed: usize) -> Result<()> {
        if needed == 0 {
            return Ok(());
        }
        if buffer.bytes < needed {
            return Err(Error::BufferTooSmall { argument: name.to_owned(), needed, given: buffer.bytes });
        }
        if buffer.data.is_null() {
            return Err(null(name, "", format!("the plan needs {needed} bytes")));
        }
        if !buffer.data.addr().is_multiple_of(Requirements::ALIGNMENT) {
            return Err(self.misaligned(name.to_owned(), buffer.data, Requirements::ALIGNMENT));
        }
        Ok(())
    }

    /// Counts, presence and alignment of the arrays; in host memory also what they hold.
    ///
    /// # Safety
    /// In host memory, the arrays have the number of entries that the docs of [`Layout`] give.
    unsafe fn layout(&self, layout: &Layout, rows: Rows) -> Result<()> {
        let p = &self.problem;
        self.counts(layout)?;
        let broadcast = matches!(p.query, Query::Broadcast { .. });
        let dense = matches!(p.bias, Bias::Dense { .. });
        let has_batch = layout.batch > 0;
        for (name, given, wanted, why_wanted, why_not) in [
            ("q_offsets", layout.q_offsets.is_some(), !broadcast, "the query is jagged", "the query is broadcast"),
            ("q_lengths", layout.q_lengths.is_some(), !broadcast, "", "the query is broadcast"),
            (
                "kv_index",
                layout.kv_index.is_some(),
                p.uses_kv_index,
                "the problem uses it",
                "the problem does not use it",
            ),
            (
                "bias_offsets",
                layout.bias_offsets.is_some(),
                dense,
                "the bias is dense",
                "the problem has no dense bias",
            ),
        ] {
            if given && !wanted {
                return Err(Error::invalid(name, "given", format!("must be null: {why_not}")));
            }
            if wanted && !given && has_batch && !why_wanted.is_empty() {
                return Err(null(name, "", why_wanted.to_owned()));
            }
        }

        let offsets = |name, o: Offsets, needed| self.array(name, o.data, o.index_type.size(), needed);
        if let Some(o) = layout.q_offsets {
            offsets("q_offsets", o, has_batch)?;
        }
        offsets("kv_offsets", layout.kv_offsets, layout.kv_batch > 0)?;
        for (name, data, size, needed) in [
            ("q_lengths", layout.q_lengths, 4, has_batch),
            ("kv_lengths", layout.kv_lengths, 4, layout.kv_batch > 0),
            ("kv_index", layout.kv_index, 4, has_batch),
            ("bias_offsets", layout.bias_offsets, 8, has_batch),
        ] {
            if let Some(data) = data {
                self.array(name, data, size, needed)?;
            }
        }

        if self.memory_space == MemorySpace::Host {
            // SAFETY: the caller's promise; presence and alignment have just been checked.
            unsafe { self.host_arrays(layout, rows) }
        } else {
            Ok(())
        }
    }

    fn array(&self, name: &'static str, data: DataPtr, size: usize, needed: bool) -> Result<()> {
        if data.is_null() && needed {
            return Err(null(name, "", "the batch has sequences".to_owned()));
        }
        if data.addr() & (size - 1) != 0 {
            return Err(self.misaligned(name.to_owned(), data, size));
        }
        Ok(())
    }

    /// # Safety
    /// Arrays are host memory of the documented sizes; null ones only where their count is 0; alignment is checked.
    unsafe fn host_arrays(&self, layout: &Layout, rows: Rows) -> Result<()> {
        let batch = count(layout.batch);
        let kv_batch = count(layout.kv_batch);
        if let Some(o) = layout.q_offsets
            && !o.data.is_null()
        {
            // SAFETY: [batch + 1] and [batch] entries by the caller's promise.
            unsafe { offsets_and_lengths(("q_offsets", "q_lengths"), o, layout.q_lengths, batch, ("q", rows.q))? };
        }
        if !layout.kv_offsets.data.is_null() {
            let names = ("kv_offsets", "kv_lengths");
            // SAFETY: [kv_batch + 1] and [kv_batch] entries by the caller's promise.
            unsafe { offsets_and_lengths(names, layout.kv_offsets, layout.kv_lengths, kv_batch, ("k", rows.kv))? };
        }
        if let Some(index) = layout.kv_index
            && batch > 0
        {
            // SAFETY: [batch] entries by the caller's promise; batch > 0 implies a checked non-null pointer.
            let index = unsafe { std::slice::from_raw_parts(index.cast::<i32>(), batch) };
            // A negative entry becomes a large unsigned one.
            let bad = |&c: &i32| i64::from(c.cast_unsigned()) >= layout.kv_batch;
            if let Some(i) = index.iter().position(bad) {
                return Err(Error::invalid(
                    format!("kv_index[{i}]"),
                    index[i],
                    format!("must be within 0..{}, the key/value sequences", layout.kv_batch),
                ));
            }
        }
        if let Bias::Dense { shared_by_heads, capacity, .. } = self.problem.bias
            && let Some(offsets) = layout.bias_offsets
            && batch > 0
        {
            // SAFETY: [batch + 1] entries by the caller's promise; batch > 0 implies a checked non-null pointer.
            let offsets = unsafe { std::slice::from_raw_parts(offsets.cast::<i64>(), batch + 1) };
            // SAFETY: arrays have just been checked.
            let sequences = unsafe { crate::layout::Sequences::new(&self.problem, layout, rows.q, rows.kv) };
            let heads = if shared_by_heads { 1 } else { self.problem.heads_q };
            bias_offsets(offsets, &sequences, heads, capacity)?;
        }
        Ok(())
    }

    #[cold]
    fn misaligned(&self, argument: String, value: impl std::fmt::Debug, required: usize) -> Error {
        let value = format!("{value:?}").trim_matches('"').to_owned();
        Error::Misaligned { argument, value, required, backend: self.backend.clone() }
    }
}

/// # Safety
/// `offsets` has `sequences + 1` and `lengths` `sequences` entries, aligned.
unsafe fn offsets_and_lengths(
    names: (&'static str, &'static str),
    offsets: Offsets,
    lengths: Option<DataPtr>,
    sequences: usize,
    rows: (&'static str, i64),
) -> Result<()> {
    let lengths = lengths.filter(|l| !l.is_null() && sequences > 0).map(|l| {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(l.cast::<i32>(), sequences) }
    });
    match offsets.index_type {
        IndexType::I32 => {
            // SAFETY: the caller's promise.
            let offsets = unsafe { std::slice::from_raw_parts(offsets.data.cast::<i32>(), sequences + 1) };
            check_offsets(names, offsets, lengths, rows)
        }
        IndexType::I64 => {
            // SAFETY: the caller's promise.
            let offsets = unsafe { std::slice::from_raw_parts(offsets.data.cast::<i64>(), sequences + 1) };
            check_offsets(names, offsets, lengths, rows)
        }
    }
}

pub(crate) fn check_offsets<T: Copy + Ord + Into<i64>>(
    names: (&'static str, &'static str),
    offsets: &[T],
    lengths: Option<&[i32]>,
    rows: (&'static str, i64),
) -> Result<()> {
    let first: i64 = offsets[0].into();
    let last: i64 = offsets[offsets.len() - 1].into();
    // No branch inside the loops, so that they vectorise; the culprit is looked for only when there is one.
    let decreasing = offsets.windows(2).fold(false, |bad, w| bad | (w[1] < w[0]));
    let mut bad = first < 0 || last > rows.1 || decreasing;
    if let Some(lengths) = lengths
        && !bad
    {
        bad = lengths.iter().zip(offsets.windows(2)).fold(false, |bad, (&len, w)| {
            let slot = w[1].into() - w[0].into();
            bad | (len < 0) | (i64::from(len) > slot)
        });
    }
    if bad { Err(bad_offsets(names, offsets, lengths, rows)) } else { Ok(()) }
}

#[cold]
fn bad_offsets<T: Copy + Ord + Into<i64>>(
    (offsets_name, lengths_name): (&'static str, &'static str),
    offsets: &[T],
    lengths: Option<&[i32]>,
    (buffer, rows): (&'static str, i64),
) -> Error {
    let mut previous = 0;
    for (i, &o) in offsets.iter().enumerate() {
        let o: i64 = o.into();
        let reason = if i == 0 && o < 0 {
            "must not be negative".to_owned()
        } else if o < previous {
            format!("must not be below {offsets_name}[{}] = {previous}", i - 1)
        } else if o > rows {
            format!("must not be past the {rows} rows of {buffer}")
        } else {
            previous = o;
            continue;
        };
        return Error::invalid(format!("{offsets_name}[{i}]"), o, reason);
    }
    for (i, (&len, w)) in lengths.unwrap_or(&[]).iter().zip(offsets.windows(2)).enumerate() {
        let slot = w[1].into() - w[0].into();
        if len < 0 || i64::from(len) > slot {
            let reason = format!("must be within 0..={slot}, the rows between {offsets_name}[{i}] and the next");
            return Error::invalid(format!("{lengths_name}[{i}]"), len, reason);
        }
    }
    Error::Internal(format!("{offsets_name} was found invalid without a culprit"))
}

fn bias_offsets(offsets: &[i64], sequences: &crate::layout::Sequences<'_>, heads: i64, capacity: i64) -> Result<()> {
    let name = |b: usize| format!("bias_offsets[{b}]");
    if offsets[0] < 0 {
        return Err(Error::invalid(name(0), offsets[0], "must not be negative"));
    }
    for (b, s) in sequences.iter().enumerate() {
        let (start, end) = (offsets[b], offsets[b + 1]);
        if end < start {
            return Err(Error::invalid(name(b + 1), end, format!("must not be below {} = {start}", name(b))));
        }
        if end > capacity {
            return Err(Error::invalid(name(b + 1), end, format!("must not be past bias_capacity = {capacity}")));
        }
        let needed = i128::from(heads) * i128::from(s.q_len) * i128::from(s.bias_stride);
        if needed > i128::from(end - start) {
            let reason = format!(
                "leaves {} elements from {} = {start} on for a matrix of {heads} x {} x {} = {needed}",
                end - start,
                name(b),
                s.q_len,
                s.bias_stride
            );
            return Err(Error::invalid(name(b + 1), end, reason));
        }
    }
    Ok(())
}

/// Bytes from the first to one past the last element of a non-empty view, where that fits the address space.
fn extent(rows: i64, row_stride: i64, heads: i64, head_stride: i64, dim: i64, size: usize) -> Option<usize> {
    let rows_part = (rows - 1).checked_mul(row_stride)?;
    let heads_part = (heads - 1).checked_mul(head_stride)?;
    let elements = rows_part.checked_add(heads_part)?.checked_add(dim)?;
    let size = i64::try_from(size).ok()?;
    // Backends add whole strides to addresses, so a stride alone has to fit as well.
    row_stride.max(head_stride).checked_mul(size)?;
    let bytes = elements.checked_mul(size)?;
    usize::try_from(bytes).ok().filter(|&b| isize::try_from(b).is_ok())
}

/// Whether two elements of a view stand at the same address (an output would be written twice).
fn self_overlaps(view: &TensorView) -> bool {
    let (rows, heads, dim) = (view.rows, view.heads, view.dim);
    let (rs, hs) = (view.row_stride, view.head_stride);
    let heads_in_row = (heads == 1 || hs >= dim) && (rows == 1 || rs >= (heads - 1) * hs + dim);
    if heads_in_row {
        return false;
    }
    let rows_in_head = (rows == 1 || rs >= dim) && (heads == 1 || hs >= (rows - 1) * rs + dim);
    if rows_in_head {
        return false;
    }
    // Strides that nest neither way: elements of rows apart by a and heads apart by b collide when the distance of
    // their first columns is below dim.
    if (rows > 1 && rs < dim) || (heads > 1 && hs < dim) {
        return true;
    }
    (1..heads).any(|b| {
        let distance = b * hs;
        let below = distance / rs;
        [below, below + 1].iter().any(|&a| a < rows && (distance - a * rs).abs() < dim)
    })
}

fn round_up(value: i64, step: i64) -> i64 {
    (value + step - 1) / step * step
}

/// A count that has been found non-negative.
fn count(value: i64) -> usize {
    usize::try_from(value).unwrap_or(0)
}

#[cold]
fn null(name: &str, field: &str, reason: String) -> Error {
    let argument = if field.is_empty() { name.to_owned() } else { format!("{name}.{field}") };
    Error::NullPointer { argument, reason }
}

#[cold]
fn out_of_capacity(name: &str, value: i64, most: i64) -> Error {
    Error::invalid(name, value, format!("must be within 0..={most}, the capacity the plan was made for"))
}

#[cold]
fn rows_out_of_capacity(name: &str, value: i64, capacity: &str, most: i64) -> Error {
    Error::invalid(name, value, format!("must be within 0..={most}, the plan's capacity {capacity}"))
}

#[cold]
fn kv_batch_differs(layout: &Layout) -> Error {
    Error::invalid("kv_batch", layout.kv_batch, format!("must equal batch = {} without kv_index", layout.batch))
}

#[cold]
fn overflow(name: &str, view: &TensorView) -> Error {
    let (field, value) = if view.row_stride >= view.head_stride {
        ("row_stride", view.row_stride)
    } else {
        ("head_stride", view.head_stride)
    };
    let shape = format!("{} rows, {} heads, dim {}", view.rows, view.heads, view.dim);
    Error::invalid(format!("{name}.{field}"), value, format!("the view ({shape}) does not fit the address space"))
}

#[cold]
fn overlap(name: &str, view: &TensorView) -> Error {
    Error::invalid(
        format!("{name}.row_stride"),
        view.row_stride,
        format!(
            "with head_stride {} two elements of this output ({} rows, {} heads, dim {}) share an address",
            view.head_stride, view.rows, view.heads, view.dim
        ),
    )
}
