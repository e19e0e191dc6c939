//! Forward and backward of one batch.

use std::ops::Range;
use std::sync::Arc;

use crate::{
    BackwardArgs, Bias, Buffer, Call, DType, DataPtr, DeviceBuffer, DeviceMemory, Error, ForwardArgs, HostMemory,
    LseView, MemorySpace, Plan, Problem, Query, Result, Stream,
};

use super::{Batch, Element, Tensor, TensorMut, TensorRef};

/// Data of the bias, in the layout that [`Bias`] describes.
#[derive(Clone, Copy, Debug, Default)]
pub enum BiasData<'a, T> {
    /// The problem has none.
    #[default]
    None,
    /// f32: slopes, tables, dense matrices of dtype f32.
    F32(&'a [f32]),
    /// Dense matrices of the problem's element type.
    Native(&'a [T]),
}

/// What every pass reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// Queries, `[q_rows, heads_q, head_dim]`.
    pub q: TensorRef<'a, T>,
    /// Keys, `[kv_rows, heads_kv, head_dim]`.
    pub k: TensorRef<'a, T>,
    /// Values, `[kv_rows, heads_kv, head_dim_v]`.
    pub v: TensorRef<'a, T>,
    /// The bias.
    pub bias: BiasData<'a, T>,
}

/// What a forward gives, and a backward needs back.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward<T> {
    /// `[o_rows, heads_q, head_dim_v]`; rows that belong to no sequence are 0.
    pub o: Tensor<T>,
    /// `[heads_q, o_rows]`; rows that belong to no sequence are -inf.
    pub lse: Vec<f32>,
}

/// What a backward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// `[q_rows, heads_q, head_dim]`.
    pub dq: Tensor<T>,
    /// `[kv_rows, heads_kv, head_dim]`.
    pub dk: Tensor<T>,
    /// `[kv_rows, heads_kv, head_dim_v]`.
    pub dv: Tensor<T>,
    /// In the layout of the bias, padding 0; empty without a bias.
    pub dbias: Vec<f32>,
}

/// Where a backward writes.
#[derive(Debug)]
pub struct GradientsMut<'a, T> {
    /// `[q_rows, heads_q, head_dim]`.
    pub dq: TensorMut<'a, T>,
    /// `[kv_rows, heads_kv, head_dim]`.
    pub dk: TensorMut<'a, T>,
    /// `[kv_rows, heads_kv, head_dim_v]`.
    pub dv: TensorMut<'a, T>,
    /// In the layout of the bias; `None` when not wanted.
    pub dbias: Option<&'a mut [f32]>,
}

/// One batch on one plan: its schedule, built once for all layers and both passes, and the scratch memory.
pub struct Session {
    plan: Plan,
    batch: Batch,
    memory: Arc<dyn DeviceMemory>,
    schedule: DeviceBuffer,
    /// Grown by the first pass that needs it.
    workspace: DeviceBuffer,
}

impl Session {
    /// Checks the batch against the plan's problem and builds its schedule.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the plan's backend does not work on host memory; those of
    /// [`Plan::build_schedule`].
    pub fn new(plan: &Plan, batch: Batch) -> Result<Self> {
        if plan.memory_space() != MemorySpace::Host {
            let reason = format!("its tensors live in {}, these in host memory", plan.memory_space());
            return Err(Error::Unavailable { name: plan.backend().name().to_owned(), reason });
        }
        let memory: Arc<dyn DeviceMemory> = Arc::new(HostMemory::new());
        let schedule = DeviceBuffer::new(&memory, plan.requirements().schedule_bytes)?;
        // SAFETY: `batch` owns arrays of the sizes its layout implies, `schedule` its memory; host backends have finished
        // when they return.
        unsafe { plan.build_schedule(&batch.layout(), schedule.as_buffer(), Stream::DEFAULT)? };
        let workspace = DeviceBuffer::new(&memory, 0)?;
        Ok(Session { plan: plan.clone(), batch, memory, schedule, workspace })
    }

    /// The plan.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The batch.
    pub const fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Rows of `q` and `dq` of sequence `b`.
    ///
    /// # Panics
    /// When `b` is not below the number of sequences; so do its siblings.
    pub fn q_rows(&self, b: usize) -> Range<usize> {
        to_usize(self.batch.sequence(self.plan.problem(), b).q_rows())
    }

    /// Rows of `o` and `d_o` (columns of `lse`) of sequence `b`.
    pub fn o_rows(&self, b: usize) -> Range<usize> {
        to_usize(self.batch.sequence(self.plan.problem(), b).o_rows())
    }

    /// Rows of `k`, `v`, `dk` and `dv` that sequence `b` attends to.
    pub fn kv_rows(&self, b: usize) -> Range<usize> {
        to_usize(self.batch.sequence(self.plan.problem(), b).kv_rows())
    }

    /// Computes `o` and `lse`.
    ///
    /// # Errors
    /// Those of [`Plan::forward`]; a bias of the wrong kind or size.
    pub fn forward<T: Element>(&mut self, inputs: &Inputs<'_, T>) -> Result<Forward<T>> {
        let problem = self.plan.problem();
        let rows = match problem.query {
            Query::Jagged => inputs.q.rows(),
            Query::Broadcast { q_len } => self.batch.len() * size(q_len),
        };
        let heads = size(problem.heads_q);
        let mut o = Tensor::filled([rows, heads, size(problem.head_dim_v)], T::default());
        let mut lse = vec![f32::NEG_INFINITY; heads * rows];
        self.forward_into(inputs, &mut o.as_mut(), &mut lse)?;
        Ok(Forward { o, lse })
    }

    /// Computes `o` and `lse` into memory of the caller; rows that belong to no sequence are left as they are, unless
    /// the problem asks for `zero_unused_rows`.
    ///
    /// # Errors
    /// Those of [`Plan::forward`]; a bias of the wrong kind or size; an `lse` that is not `[heads_q, o_rows]`.
    pub fn forward_into<T: Element>(
        &mut self,
        inputs: &Inputs<'_, T>,
        o: &mut TensorMut<'_, T>,
        lse: &mut [f32],
    ) -> Result<()> {
        let problem = self.plan.problem();
        let lse = lse_view(problem, DataPtr::new(lse.as_mut_ptr()), lse.len(), o.as_ref().rows())?;
        let args = ForwardArgs {
            q: inputs.q.view(),
            k: inputs.k.view(),
            v: inputs.v.view(),
            bias: bias_data(problem, inputs.bias)?,
            o: o.view(),
            lse,
        };
        let workspace = self.workspace(self.plan.requirements().forward_bytes)?;
        let layout = self.batch.layout();
        let call = Call { layout: &layout, schedule: self.schedule.as_buffer(), workspace, stream: Stream::DEFAULT };
        // SAFETY: views, bias and lse cover memory that is borrowed for this call, outputs uniquely; their sizes against
        // the problem are checked here (bias, lse) and by the plan (views); the schedule was built from this batch; the
        // workspace is only used by this call, since `self` is borrowed uniquely.
        unsafe { self.plan.forward(&call, &args) }
    }

    /// Computes every gradient, also that of the bias when there is one.
    ///
    /// # Errors
    /// Those of [`Plan::backward`]; a bias of the wrong kind or size; a `forward` of another shape.
    pub fn backward<T: Element>(
        &mut self,
        inputs: &Inputs<'_, T>,
        forward: &Forward<T>,
        d_o: TensorRef<'_, T>,
    ) -> Result<Gradients<T>> {
        let like = |t: &TensorRef<'_, T>| Tensor::filled([t.rows(), t.heads(), t.dim()], T::default());
        let (mut dq, mut dk, mut dv) = (like(&inputs.q), like(&inputs.k), like(&inputs.v));
        let mut dbias = vec![0.0; bias_elements(self.plan.problem())?];
        let gradients = GradientsMut {
            dq: dq.as_mut(),
            dk: dk.as_mut(),
            dv: dv.as_mut(),
            dbias: (self.plan.problem().bias != Bias::None).then_some(&mut dbias),
        };
        self.backward_into(inputs, forward, d_o, gradients)?;
        Ok(Gradients { dq, dk, dv, dbias })
    }

    /// Computes the gradients into memory of the caller; rows that belong to no sequence are left as they are, unless
    /// the problem asks for `zero_unused_rows`.
    ///
    /// # Errors
    /// As [`Session::backward`]; a `dbias` shorter than the bias.
    pub fn backward_into<T: Element>(
        &mut self,
        inputs: &Inputs<'_, T>,
        forward: &Forward<T>,
        d_o: TensorRef<'_, T>,
        mut gradients: GradientsMut<'_, T>,
    ) -> Result<()> {
        let problem = self.plan.problem();
        let lse = DataPtr::from_const(forward.lse.as_ptr());
        let lse = lse_view(problem, lse, forward.lse.len(), forward.o.rows())?;
        let dbias = match &mut gradients.dbias {
            None => DataPtr::NULL,
            Some(dbias) => {
                at_least("dbias", dbias.len(), bias_elements(problem)?)?;
                DataPtr::new(dbias.as_mut_ptr())
            }
        };
        let args = BackwardArgs {
            q: inputs.q.view(),
            k: inputs.k.view(),
            v: inputs.v.view(),
            bias: bias_data(problem, inputs.bias)?,
            o: forward.o.as_ref().view(),
            lse,
            d_o: d_o.view(),
            dq: gradients.dq.view(),
            dk: gradients.dk.view(),
            dv: gradients.dv.view(),
            dbias,
        };
        let workspace = self.workspace(self.plan.requirements().backward_bytes)?;
        let layout = self.batch.layout();
        let call = Call { layout: &layout, schedule: self.schedule.as_buffer(), workspace, stream: Stream::DEFAULT };
        // SAFETY: as in `forward_into`.
        unsafe { self.plan.backward(&call, &args) }
    }

    fn workspace(&mut self, bytes: usize) -> Result<Buffer> {
        if self.workspace.bytes() < bytes {
            self.workspace = DeviceBuffer::new(&self.memory, bytes)?;
        }
        Ok(self.workspace.as_buffer())
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("plan", &self.plan).field("batch", &self.batch).finish_non_exhaustive()
    }
}

/// Elements of the bias and its gradient.
fn bias_elements(problem: &Problem) -> Result<usize> {
    let heads = size(problem.heads_q);
    Ok(match problem.bias {
        Bias::None => 0,
        Bias::Alibi => heads,
        Bias::Relative { radius } => heads * (2 * radius as usize + 1),
        Bias::Dense { capacity, .. } => usize::try_from(capacity)
            .map_err(|_| Error::invalid("bias_capacity", capacity, "does not fit the address space"))?,
    })
}

fn bias_data<T: Element>(problem: &Problem, data: BiasData<'_, T>) -> Result<DataPtr> {
    let (pointer, len, dtype) = match data {
        BiasData::None => return Ok(DataPtr::NULL),
        BiasData::F32(s) => (DataPtr::from_const(s.as_ptr()), s.len(), DType::F32),
        BiasData::Native(s) => (DataPtr::from_const(s.as_ptr()), s.len(), T::DTYPE),
    };
    let wanted = match problem.bias {
        Bias::Dense { dtype, .. } => dtype,
        _ => DType::F32,
    };
    if problem.bias != Bias::None && dtype != wanted {
        return Err(Error::invalid("bias", dtype, format!("the problem's {} bias is {wanted}", problem.bias.kind())));
    }
    at_least("bias", len, bias_elements(problem)?)?;
    Ok(pointer)
}

fn at_least(name: &str, len: usize, needed: usize) -> Result<()> {
    if len < needed {
        return Err(Error::invalid(format!("{name}.len()"), len, format!("the problem's bias has {needed} elements")));
    }
    Ok(())
}

fn lse_view(problem: &Problem, data: DataPtr, len: usize, rows: usize) -> Result<LseView> {
    let needed = size(problem.heads_q).checked_mul(rows);
    if needed != Some(len) {
        let reason = format!("must be heads_q x rows of o = {} x {rows}", problem.heads_q);
        return Err(Error::invalid("lse.len()", len, reason));
    }
    Ok(LseView::contiguous(data, i64::try_from(rows).unwrap_or(i64::MAX)))
}

/// A dimension of a validated problem.
fn size(value: i64) -> usize {
    usize::try_from(value).unwrap_or(0)
}

fn to_usize(r: Range<i64>) -> Range<usize> {
    size(r.start)..size(r.end)
}
