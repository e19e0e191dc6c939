//! Tensors in host memory whose bounds are checked once, on construction.

use std::ops::Range;

use half::{bf16, f16};

use crate::{DType, DataPtr, Error, Result, TensorView};

/// An element type of tensors: `f32`, [`struct@f16`] or [`bf16`].
pub trait Element: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The same as a value.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}

/// Shape and strides of a `[rows, heads, dim]` view, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    rows: usize,
    heads: usize,
    dim: usize,
    row_stride: usize,
    head_stride: usize,
}

impl Shape {
    fn contiguous(len: usize, heads: usize, dim: usize) -> Result<Self> {
        let row = heads.checked_mul(dim).filter(|&row| row > 0);
        let Some(row) = row.filter(|&row| len.is_multiple_of(row)) else {
            return Err(Error::invalid("data.len()", len, format!("not a number of rows of {heads} heads x {dim}")));
        };
        Ok(Shape { rows: len / row, heads, dim, row_stride: row, head_stride: dim })
    }

    fn strided(len: usize, [rows, heads, dim]: [usize; 3], [row_stride, head_stride]: [usize; 2]) -> Result<Self> {
        let shape = Shape { rows, heads, dim, row_stride, head_stride };
        let needed = shape.elements();
        if needed.is_none_or(|n| n > len) {
            let reason = format!("{shape:?} ends past it");
            return Err(Error::invalid("data.len()", len, reason));
        }
        Ok(shape)
    }

    /// Elements from the first to the last of the view, or `None` on overflow.
    fn elements(&self) -> Option<usize> {
        if self.rows == 0 || self.heads == 0 || self.dim == 0 {
            return Some(0);
        }
        let rows = (self.rows - 1).checked_mul(self.row_stride)?;
        let heads = (self.heads - 1).checked_mul(self.head_stride)?;
        rows.checked_add(heads)?.checked_add(self.dim)
    }

    fn start(&self, r: usize, h: usize) -> usize {
        assert!(r < self.rows && h < self.heads, "row {r}, head {h} of {self:?}");
        r * self.row_stride + h * self.head_stride
    }

    fn view(&self, data: DataPtr, dtype: DType) -> TensorView {
        // Sizes of slices are below isize::MAX; strides of a view without elements may be anything.
        let int = |v: usize| i64::try_from(v).unwrap_or(i64::MAX);
        TensorView {
            data,
            dtype,
            rows: int(self.rows),
            heads: int(self.heads),
            dim: int(self.dim),
            row_stride: int(self.row_stride),
            head_stride: int(self.head_stride),
        }
    }
}

/// A borrowed `[rows, heads, dim]` view with free row and head strides, for reading.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, T> {
    data: &'a [T],
    shape: Shape,
}

impl<'a, T: Copy> TensorRef<'a, T> {
    /// All of `data`, as rows of `heads` x `dim`.
    ///
    /// # Errors
    /// When its length is no multiple of `heads * dim`, or that is 0.
    pub fn contiguous(data: &'a [T], heads: usize, dim: usize) -> Result<Self> {
        Ok(TensorRef { data, shape: Shape::contiguous(data.len(), heads, dim)? })
    }

    /// A view with strides (elements), starting at `data[0]`: the `q`, `k` or `v` part of a fused buffer, for example.
    ///
    /// # Errors
    /// When an element of the view lies outside of `data`.
    pub fn strided(
        data: &'a [T],
        [rows, heads, dim]: [usize; 3],
        [row_stride, head_stride]: [usize; 2],
    ) -> Result<Self> {
        Ok(TensorRef { data, shape: Shape::strided(data.len(), [rows, heads, dim], [row_stride, head_stride])? })
    }

    /// Rows.
    pub const fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Heads.
    pub const fn heads(&self) -> usize {
        self.shape.heads
    }

    /// Elements of a head's row.
    pub const fn dim(&self) -> usize {
        self.shape.dim
    }

    /// The `dim` elements of head `h` in row `r`.
    ///
    /// # Panics
    /// When there is no such row or head.
    pub fn row(&self, r: usize, h: usize) -> &'a [T] {
        let start = self.shape.start(r, h);
        &self.data[start..start + self.shape.dim]
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// When the range ends past [`TensorRef::rows`].
    #[must_use]
    pub fn slice(&self, rows: Range<usize>) -> TensorRef<'a, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let start = (rows.start * self.shape.row_stride).min(self.data.len());
        TensorRef { data: &self.data[start..], shape: Shape { rows: rows.len(), ..self.shape } }
    }
}

impl<T: Element> TensorRef<'_, T> {
    /// As an argument of a call; valid while the borrowed data is.
    pub fn view(&self) -> TensorView {
        self.shape.view(DataPtr::from_const(self.data.as_ptr()), T::DTYPE)
    }
}

/// A borrowed `[rows, heads, dim]` view with free row and head strides, for writing.
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    data: &'a mut [T],
    shape: Shape,
}

impl<'a, T: Copy> TensorMut<'a, T> {
    /// All of `data`, as rows of `heads` x `dim`.
    ///
    /// # Errors
    /// When its length is no multiple of `heads * dim`, or that is 0.
    pub fn contiguous(data: &'a mut [T], heads: usize, dim: usize) -> Result<Self> {
        let shape = Shape::contiguous(data.len(), heads, dim)?;
        Ok(TensorMut { data, shape })
    }

    /// A view with strides (elements), starting at `data[0]`.
    ///
    /// # Errors
    /// When an element of the view lies outside of `data`.
    pub fn strided(
        data: &'a mut [T],
        [rows, heads, dim]: [usize; 3],
        [row_stride, head_stride]: [usize; 2],
    ) -> Result<Self> {
        let shape = Shape::strided(data.len(), [rows, heads, dim], [row_stride, head_stride])?;
        Ok(TensorMut { data, shape })
    }

    /// The same view for reading.
    pub const fn as_ref(&self) -> TensorRef<'_, T> {
        TensorRef { data: self.data, shape: self.shape }
    }

    /// The `dim` elements of head `h` in row `r`.
    ///
    /// # Panics
    /// When there is no such row or head.
    pub fn row_mut(&mut self, r: usize, h: usize) -> &mut [T] {
        let start = self.shape.start(r, h);
        &mut self.data[start..start + self.shape.dim]
    }
}

impl<T: Element> TensorMut<'_, T> {
    /// As an argument of a call; valid while the borrowed data is.
    pub fn view(&mut self) -> TensorView {
        self.shape.view(DataPtr::new(self.data.as_mut_ptr()), T::DTYPE)
    }
}

/// An owned, contiguous `[rows, heads, dim]` tensor; with the offsets of a [`super::Batch`] it is a jagged one.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    data: Vec<T>,
    heads: usize,
    dim: usize,
}

impl<T: Copy> Tensor<T> {
    /// Takes `data` as rows of `heads` x `dim`.
    ///
    /// # Errors
    /// When its length is no multiple of `heads * dim`, or that is 0.
    pub fn from_vec(data: Vec<T>, heads: usize, dim: usize) -> Result<Self> {
        Shape::contiguous(data.len(), heads, dim)?;
        Ok(Tensor { data, heads, dim })
    }

    /// Element (r, h, c) is `f(r, h, c)`.
    pub fn from_fn([rows, heads, dim]: [usize; 3], mut f: impl FnMut(usize, usize, usize) -> T) -> Self {
        let mut data = Vec::with_capacity(rows * heads * dim);
        for r in 0..rows {
            for h in 0..heads {
                data.extend((0..dim).map(|c| f(r, h, c)));
            }
        }
        Tensor { data, heads, dim }
    }

    /// Every element is `value`.
    pub fn filled([rows, heads, dim]: [usize; 3], value: T) -> Self {
        Tensor { data: vec![value; rows * heads * dim], heads, dim }
    }

    /// Rows.
    pub const fn rows(&self) -> usize {
        match self.data.len().checked_div(self.heads * self.dim) {
            Some(rows) => rows,
            None => 0,
        }
    }

    /// The elements, row by row.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// The elements, row by row.
    pub fn data_mut(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// The elements, row by row.
    pub fn into_vec(self) -> Vec<T> {
        self.data
    }

    fn shape(&self) -> Shape {
        let (heads, dim) = (self.heads, self.dim);
        Shape { rows: self.rows(), heads, dim, row_stride: heads * dim, head_stride: dim }
    }

    /// All of it, for reading.
    pub fn as_ref(&self) -> TensorRef<'_, T> {
        TensorRef { data: &self.data, shape: self.shape() }
    }

    /// All of it, for writing.
    pub fn as_mut(&mut self) -> TensorMut<'_, T> {
        let shape = self.shape();
        TensorMut { data: &mut self.data, shape }
    }

    /// The elements of some rows, `[rows, heads, dim]` without gaps: a sequence, given its row range.
    ///
    /// # Panics
    /// When the range ends past [`Tensor::rows`].
    pub fn slice(&self, rows: Range<usize>) -> &[T] {
        let row = self.heads * self.dim;
        &self.data[rows.start * row..rows.end * row]
    }
}
