//! Views of the caller's memory.

use std::ffi::c_void;
use std::fmt;

use crate::DType;

/// An address in the backend's memory space (host or device). Holding one gives no right to read it: every access is
/// an `unsafe` operation of the backend, justified by the contract of [`crate::Plan::forward`] and its siblings.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DataPtr(*mut c_void);

// SAFETY: a DataPtr is an address; dereferencing it is unsafe and governed by the contract of the call it came with.
unsafe impl Send for DataPtr {}
// SAFETY: as above.
unsafe impl Sync for DataPtr {}

impl DataPtr {
    /// The null address.
    pub const NULL: DataPtr = DataPtr(std::ptr::null_mut());

    /// From a pointer to anything.
    pub const fn new<T>(p: *mut T) -> Self {
        DataPtr(p.cast())
    }

    /// From a pointer that will only be read.
    pub const fn from_const<T>(p: *const T) -> Self {
        DataPtr(p.cast_mut().cast())
    }

    /// As a typed pointer.
    pub const fn cast<T>(self) -> *mut T {
        self.0.cast()
    }

    /// The numeric address.
    pub fn addr(self) -> usize {
        self.0.addr()
    }

    /// Whether this is the null address.
    pub const fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl fmt::Debug for DataPtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// A `[rows, heads, dim]` view: element (r, h, c) stands at `data + r * row_stride + h * head_stride + c` (elements).
/// The innermost stride is 1; the other two are free, so views of fused QKV buffers need no copy.
#[derive(Clone, Copy, Debug)]
pub struct TensorView {
    /// Address of element (0, 0, 0); may be null when the view has no elements.
    pub data: DataPtr,
    /// Element type.
    pub dtype: DType,
    /// Rows of the buffer (its capacity; sequences may end earlier).
    pub rows: i64,
    /// Heads.
    pub heads: i64,
    /// Elements of a head's row.
    pub dim: i64,
    /// Distance of consecutive rows, in elements.
    pub row_stride: i64,
    /// Distance of consecutive heads, in elements.
    pub head_stride: i64,
}

impl TensorView {
    /// A contiguous `[rows, heads, dim]` tensor at `data`.
    pub const fn contiguous(data: DataPtr, dtype: DType, rows: i64, heads: i64, dim: i64) -> Self {
        TensorView { data, dtype, rows, heads, dim, row_stride: heads * dim, head_stride: dim }
    }
}

/// `lse`, `[heads_q, rows]`, f32: element (h, r) stands at `data + h * head_stride + r` (elements).
#[derive(Clone, Copy, Debug)]
pub struct LseView {
    /// Address of element (0, 0).
    pub data: DataPtr,
    /// Rows of the buffer (`total_q`; `batch * q_len` with a broadcast query).
    pub rows: i64,
    /// Distance of consecutive heads, in elements; at least `rows`.
    pub head_stride: i64,
}

impl LseView {
    /// A contiguous `[heads, rows]` view.
    pub const fn contiguous(data: DataPtr, rows: i64) -> Self {
        LseView { data, rows, head_stride: rows }
    }
}
