//! The static description of a computation.

use crate::{Alignment, Bias, DType, Error, Mask, Result};

/// How the query tensor relates to the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Query {
    /// Every sequence has its own rows.
    Jagged,
    /// One sequence of `q_len` rows serves every batch item (pooling by multi-head attention): `q` has `q_len` rows,
    /// `o`, `do` and `lse` have `batch * q_len`, `dq` has `q_len` and is the sum over the batch.
    Broadcast {
        /// Rows of the shared query.
        q_len: i64,
    },
}

/// A computation, described by types, dimensions and capacities; no pointers. Build one with [`Problem::builder`].
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Element type of all `[rows, heads, dim]` tensors.
    pub dtype: DType,
    /// Query heads.
    pub heads_q: i64,
    /// Key/value heads; divides `heads_q`.
    pub heads_kv: i64,
    /// Elements of a query/key head.
    pub head_dim: i64,
    /// Elements of a value head.
    pub head_dim_v: i64,
    /// Most sequences of any batch.
    pub batch: i64,
    /// Rows of the query buffer (capacity). Ignored with a broadcast query.
    pub total_q: i64,
    /// Rows of the key and value buffers (capacity).
    pub total_kv: i64,
    /// Most key/value sequences; equal to `batch` unless `uses_kv_index`.
    pub kv_batch: i64,
    /// Jagged or broadcast query.
    pub query: Query,
    /// Whether layouts carry `kv_index`.
    pub uses_kv_index: bool,
    /// Visibility.
    pub mask: Mask,
    /// Additive bias.
    pub bias: Bias,
    /// Diagonal of a positional bias under a full mask; masks with an alignment must agree with it.
    pub bias_alignment: Alignment,
    /// Factor of the score, applied after the dot product.
    pub scale: f32,
    /// Bitwise reproducible, batch-invariant backward.
    pub deterministic: bool,
    /// Write exact zeros (lse: -inf) to rows that belong to no sequence, instead of leaving them.
    pub zero_unused_rows: bool,
    /// Longest query sequence expected: a hint for what is fastest, never needed for right results.
    pub max_q_len_hint: Option<i64>,
    /// The same of keys.
    pub max_kv_len_hint: Option<i64>,
}

impl Problem {
    /// Starts a description. Defaults: self-attention with `head_dim_v = head_dim`, `heads_kv = heads_q`, full mask,
    /// no bias, `scale = head_dim^-0.5`, jagged query, nothing zeroed, atomic order free in the backward.
    pub fn builder(dtype: DType, heads: i64, head_dim: i64) -> ProblemBuilder {
        ProblemBuilder {
            problem: Problem {
                dtype,
                heads_q: heads,
                heads_kv: heads,
                head_dim,
                head_dim_v: head_dim,
                batch: 0,
                total_q: 0,
                total_kv: 0,
                kv_batch: 0,
                query: Query::Jagged,
                uses_kv_index: false,
                mask: Mask::Full,
                bias: Bias::None,
                bias_alignment: Alignment::TopLeft,
                #[expect(clippy::cast_precision_loss, reason = "head dimensions are small")]
                scale: 1.0 / (head_dim.max(1) as f32).sqrt(),
                deterministic: false,
                zero_unused_rows: false,
                max_q_len_hint: None,
                max_kv_len_hint: None,
            },
        }
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> i64 {
        self.heads_q / self.heads_kv
    }

    /// Rows of `q` and `dq`: `total_q`, or `q_len` with a broadcast query.
    pub fn q_rows(&self) -> i64 {
        match self.query {
            Query::Jagged => self.total_q,
            Query::Broadcast { q_len } => q_len,
        }
    }

    /// Rows of `o`, `do` and `lse`: `total_q`, or `batch * q_len` with a broadcast query.
    pub fn o_rows(&self) -> i64 {
        match self.query {
            Query::Jagged => self.total_q,
            Query::Broadcast { q_len } => self.batch * q_len,
        }
    }

    /// Checks every rule of the contract that needs no pointers; the error names the field and its value.
    pub fn validate(&self) -> Result<()> {
        let at_least = |name: &'static str, value: i64, least: i64| {
            if value < least { Err(Error::invalid(name, value, format!("must be at least {least}"))) } else { Ok(()) }
        };
        at_least("heads_q", self.heads_q, 1)?;
        at_least("heads_kv", self.heads_kv, 1)?;
        at_least("head_dim", self.head_dim, 1)?;
        at_least("head_dim_v", self.head_dim_v, 1)?;
        at_least("batch", self.batch, 0)?;
        if self.query == Query::Jagged {
            at_least("total_q", self.total_q, 0)?;
        }
        at_least("total_kv", self.total_kv, 0)?;
        at_least("kv_batch", self.kv_batch, 0)?;
        if self.heads_q % self.heads_kv != 0 {
            return Err(Error::invalid(
                "heads_q",
                self.heads_q,
                format!("not divisible by heads_kv = {}", self.heads_kv),
            ));
        }
        if !self.uses_kv_index && self.kv_batch != self.batch {
            return Err(Error::invalid(
                "kv_batch",
                self.kv_batch,
                format!("must equal batch = {} without kv_index", self.batch),
            ));
        }
        if !self.scale.is_finite() {
            return Err(Error::invalid("scale", self.scale, "must be finite"));
        }
        if let Query::Broadcast { q_len } = self.query {
            at_least("q_len", q_len, 0)?;
        }
        match self.bias {
            Bias::None => {}
            Bias::Alibi | Bias::Relative { .. } => {
                if let Some(of_mask) = self.mask.alignment()
                    && of_mask != self.bias_alignment
                {
                    let reason = format!("the mask is {}, and both have to agree", self.mask);
                    return Err(Error::invalid("bias_alignment", self.bias_alignment, reason));
                }
            }
            Bias::Dense { dtype, row_align, capacity, .. } => {
                if !matches!(row_align, 1 | 8 | 16) {
                    return Err(Error::invalid("bias_row_align", row_align, "must be 1, 8 or 16"));
                }
                if dtype != DType::F32 && dtype != self.dtype {
                    let reason = format!("must be f32 or the problem's {}", self.dtype);
                    return Err(Error::invalid("bias_dtype", dtype, reason));
                }
                at_least("bias_capacity", capacity, 0)?;
            }
        }
        self.validate_sizes()
    }

    /// Backends compute with products of these; all of them stay below 2^60 bytes or entries.
    fn validate_sizes(&self) -> Result<()> {
        let radius = match self.bias {
            Bias::Relative { radius } => i64::from(radius),
            _ => 0,
        };
        let capacity = match self.bias {
            Bias::Dense { capacity, .. } => capacity,
            _ => 0,
        };
        let heads = ("heads_q", self.heads_q);
        let width = if self.head_dim >= self.head_dim_v { "head_dim" } else { "head_dim_v" };
        let dim = (width, self.head_dim.max(self.head_dim_v));
        let batch = ("batch", self.batch.max(1));
        // Gradients are accumulated in up to eight bytes per element.
        bounded(&[heads, dim], 8)?;
        bounded(&[batch, heads], 64)?;
        bounded(&[("kv_batch", self.kv_batch), heads], 64)?;
        bounded(&[("bias_radius", radius), heads], 24)?;
        bounded(&[("bias_capacity", capacity)], 8)?;
        if self.query == Query::Jagged {
            bounded(&[("total_q", self.total_q), heads, dim], 8)?;
        }
        bounded(&[("total_kv", self.total_kv), heads, dim], 8)?;
        if let Query::Broadcast { q_len } = self.query {
            bounded(&[("q_len", q_len), batch, heads, dim], 8)?;
        }
        Ok(())
    }
}

/// The product of what is named must stay below 2^60 bytes; the error names the largest factor and what stands beside it.
fn bounded(factors: &[(&'static str, i64)], bytes: i64) -> Result<()> {
    let product = factors.iter().try_fold(bytes, |product, &(_, f)| product.checked_mul(f));
    if product.is_some_and(|p| p <= 1 << 60) {
        return Ok(());
    }
    let largest = (0..factors.len()).max_by_key(|&i| factors[i].1).unwrap_or(0);
    let others =
        factors.iter().enumerate().filter(|&(i, _)| i != largest).map(|(_, (name, value))| format!("{name} = {value}"));
    let others: Vec<_> = others.collect();
    let beside = if others.is_empty() { String::new() } else { format!(" (beside {})", others.join(", ")) };
    let (name, value) = factors[largest];
    Err(Error::invalid(name, value, format!("makes sizes exceed 2^60 bytes{beside}")))
}

/// Builder of [`Problem`]; [`ProblemBuilder::build`] validates.
#[derive(Clone, Debug)]
#[must_use]
pub struct ProblemBuilder {
    problem: Problem,
}

impl ProblemBuilder {
    /// Grouped-query attention: this many key/value heads.
    pub fn heads_kv(mut self, heads_kv: i64) -> Self {
        self.problem.heads_kv = heads_kv;
        self
    }

    /// Width of a value head, where it differs from `head_dim`.
    pub fn head_dim_v(mut self, head_dim_v: i64) -> Self {
        self.problem.head_dim_v = head_dim_v;
        self
    }

    /// Capacities: most sequences, query rows and key/value rows of any batch.
    pub fn capacity(mut self, batch: i64, total_q: i64, total_kv: i64) -> Self {
        self.problem.batch = batch;
        self.problem.total_q = total_q;
        self.problem.total_kv = total_kv;
        if !self.problem.uses_kv_index {
            self.problem.kv_batch = batch;
        }
        self
    }

    /// Layouts carry `kv_index`, over at most `kv_batch` key/value sequences.
    pub fn kv_index(mut self, kv_batch: i64) -> Self {
        self.problem.uses_kv_index = true;
        self.problem.kv_batch = kv_batch;
        self
    }

    /// One query sequence of `q_len` rows for the whole batch.
    pub fn broadcast_query(mut self, q_len: i64) -> Self {
        self.problem.query = Query::Broadcast { q_len };
        self
    }

    /// Visibility.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.problem.mask = mask;
        if let Some(a) = mask.alignment() {
            self.problem.bias_alignment = a;
        }
        self
    }

    /// Additive bias.
    pub fn bias(mut self, bias: Bias) -> Self {
        self.problem.bias = bias;
        self
    }

    /// Diagonal of a positional bias under a full mask (a mask with an alignment sets it by itself).
    pub fn bias_alignment(mut self, alignment: Alignment) -> Self {
        self.problem.bias_alignment = alignment;
        self
    }

    /// Factor of the score (default `head_dim^-0.5`).
    pub fn scale(mut self, scale: f32) -> Self {
        self.problem.scale = scale;
        self
    }

    /// Ask for a bitwise reproducible, batch-invariant backward.
    pub fn deterministic(mut self, on: bool) -> Self {
        self.problem.deterministic = on;
        self
    }

    /// Write zeros (lse: -inf) to rows that belong to no sequence.
    pub fn zero_unused_rows(mut self, on: bool) -> Self {
        self.problem.zero_unused_rows = on;
        self
    }

    /// Longest sequences expected; a wrong hint is at worst slow.
    pub fn max_len_hint(mut self, q: Option<i64>, kv: Option<i64>) -> Self {
        self.problem.max_q_len_hint = q;
        self.problem.max_kv_len_hint = kv;
        self
    }

    /// Validates and returns the description.
    pub fn build(self) -> Result<Problem> {
        self.problem.validate()?;
        Ok(self.problem)
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "dtype {}, heads_q {}, heads_kv {}, head_dim {}, head_dim_v {}, batch {}, total_q {}, total_kv {}, mask {}, bias {}",
            self.dtype,
            self.heads_q,
            self.heads_kv,
            self.head_dim,
            self.head_dim_v,
            self.batch,
            self.total_q,
            self.total_kv,
            self.mask,
            self.bias.kind()
        )?;
        if let Query::Broadcast { q_len } = self.query {
            write!(f, ", broadcast query of {q_len} rows")?;
        }
        for (on, name) in [
            (self.uses_kv_index, "kv_index"),
            (self.deterministic, "deterministic"),
            (self.zero_unused_rows, "zero_unused_rows"),
        ] {
            if on {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}
