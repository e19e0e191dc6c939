//! The matrix products of attention, each fused with what follows it.
//!
//! Queries are laid across vector lanes: a *panel* is `W = 2 * LANES` queries, and score-like matrices are stored
//! `[key][W]`. Every product is then a register tile of `R` rows by one or two vectors whose left operand is broadcast
//! from plain row-major memory and whose right operand is read in order; neither is packed, and softmax over keys is
//! element-wise in the lanes.
//!
//! A lane's sums are taken over the contraction index in order, starting from zero, whatever the tile shape: results of
//! one query do not depend on which queries share its panel.

use super::simd::{Kernel, Simd};

/// How a product meets what its destination holds.
#[derive(Clone, Copy)]
pub(super) enum Into {
    /// Destination is not read: `C = A B`.
    Store,
    /// `C += A B`.
    Add,
    /// `C = C * factor + A B`, a factor for each lane (one panel of them).
    Rescale(*const f32),
}

/// `acc[r][c] += sum_k a[r * rs + k * ks] * b[k * bs + c]`, in a register tile.
///
/// # Safety
/// All those elements are readable.
#[inline(always)]
unsafe fn accumulate<S: Simd, const R: usize, const C: usize>(
    s: S,
    acc: &mut [[S::V; C]; R],
    k: usize,
    (a, rs, ks): (*const f32, usize, usize),
    (b, bs): (*const f32, usize),
) {
    // SAFETY: the caller's promise.
    unsafe {
        for kk in 0..k {
            let bv: [S::V; C] = std::array::from_fn(|c| s.load(b.add(kk * bs + c * S::LANES)));
            for (r, row) in acc.iter_mut().enumerate() {
                let av = s.splat(*a.add(r * rs + kk * ks));
                for (x, &bv) in row.iter_mut().zip(&bv) {
                    *x = s.mul_add(av, bv, *x);
                }
            }
        }
    }
}

/// One register tile of some product.
trait Tile<S: Simd> {
    /// # Safety
    /// Rows `row .. row + R` exist.
    unsafe fn tile<const R: usize, const C: usize>(&self, s: S, row: usize);
}

/// Covers `rows` rows with register tiles `C` vectors wide.
///
/// # Safety
/// The tiles' operands cover `rows` rows.
#[inline(always)]
unsafe fn cover<S: Simd, T: Tile<S>, const C: usize>(s: S, tile: &T, rows: usize) {
    let mut row = 0;
    macro_rules! steps {
        ($($r:literal),*) => {{
            $(while rows - row >= $r {
                // SAFETY: `row + R <= rows`.
                unsafe { tile.tile::<$r, C>(s, row) };
                row += $r;
            })*
        }};
    }
    // One vector wide, twice the rows keep the multiply-add units equally busy.
    match (S::TILE_ROWS, C) {
        (12, 2) => steps!(12, 8, 6, 4, 2, 1),
        (12, _) | (6, 1) => steps!(12, 6, 4, 2, 1),
        (6, _) => steps!(6, 5, 4, 3, 2, 1),
        _ => steps!(2, 1),
    }
}

/// `c[row][lane] = sum_d a[row][d] b[d][lane]`: scores (keys by queries) and `dP` (values by output gradients).
pub(super) struct Scores {
    pub rows: usize,
    pub depth: usize,
    /// Row-major, `lda` apart.
    pub a: *const f32,
    pub lda: usize,
    /// Panel `[depth][W]`.
    pub b: *const f32,
    /// Panel `[rows][W]`.
    pub c: *mut f32,
    /// Vectors of the panel that hold queries: 1 or 2.
    pub vectors: usize,
}

impl<S: Simd> Tile<S> for Scores {
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(&self, s: S, row: usize) {
        let w = 2 * S::LANES;
        // SAFETY: the extents of the fields.
        unsafe {
            let mut acc = [[s.zero(); C]; R];
            accumulate(s, &mut acc, self.depth, (self.a.add(row * self.lda), self.lda, 1), (self.b, w));
            for (r, acc) in acc.iter().enumerate() {
                for (v, &x) in acc.iter().enumerate() {
                    s.store(self.c.add((row + r) * w + v * S::LANES), x);
                }
            }
        }
    }
}

impl Kernel for Scores {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the extents of the fields.
        unsafe {
            if self.vectors == 1 {
                cover::<S, Self, 1>(s, &self, self.rows);
            } else {
                cover::<S, Self, 2>(s, &self, self.rows);
            }
        }
    }
}

/// `c[row][lane] (+)= sum_k a[k][row] b[k][lane]`: outputs (values weighted by P) and `dQ` (keys weighted by dS).
pub(super) struct Weighted {
    pub rows: usize,
    pub depth: usize,
    /// Row-major, `lda` apart; its rows are the contraction.
    pub a: *const f32,
    pub lda: usize,
    /// Panel `[depth][W]`.
    pub b: *const f32,
    /// Panel `[rows][W]`.
    pub c: *mut f32,
    pub into: Into,
    pub vectors: usize,
    /// Panel `[depth][W]` whose set sign bits mark terms to leave out (0 times NaN is NaN); null takes all terms.
    pub skip: *const f32,
}

impl Weighted {
    #[inline(always)]
    unsafe fn finish<S: Simd, const R: usize, const C: usize>(&self, s: S, row: usize, acc: [[S::V; C]; R]) {
        let w = 2 * S::LANES;
        // SAFETY: the extents of the fields.
        unsafe {
            match self.into {
                Into::Store => {
                    for (r, acc) in acc.iter().enumerate() {
                        for (v, &x) in acc.iter().enumerate() {
                            s.store(self.c.add((row + r) * w + v * S::LANES), x);
                        }
                    }
                }
                Into::Add => {
                    for (r, acc) in acc.iter().enumerate() {
                        for (v, &x) in acc.iter().enumerate() {
                            let c = self.c.add((row + r) * w + v * S::LANES);
                            s.store(c, s.add(s.load(c), x));
                        }
                    }
                }
                Into::Rescale(factor) => {
                    let factor: [S::V; C] = std::array::from_fn(|v| s.load(factor.add(v * S::LANES)));
                    for (r, acc) in acc.iter().enumerate() {
                        for (v, &x) in acc.iter().enumerate() {
                            let c = self.c.add((row + r) * w + v * S::LANES);
                            s.store(c, s.mul_add(s.load(c), factor[v], x));
                        }
                    }
                }
            }
        }
    }

    /// The same sums in the same order, without the marked terms. Only data with NaN or infinities comes here.
    #[inline(always)]
    unsafe fn run_skipping<S: Simd, const C: usize>(&self, s: S) {
        let w = 2 * S::LANES;
        for row in 0..self.rows {
            // SAFETY: the extents of the fields.
            unsafe {
                let mut acc = [s.zero(); C];
                for k in 0..self.depth {
                    let a = s.splat(*self.a.add(k * self.lda + row));
                    for (v, acc) in acc.iter_mut().enumerate() {
                        let at = k * w + v * S::LANES;
                        let sum = s.mul_add(a, s.load(self.b.add(at)), *acc);
                        *acc = s.select_by_sign(s.load(self.skip.add(at)), *acc, sum);
                    }
                }
                self.finish::<S, 1, C>(s, row, [acc]);
            }
        }
    }
}

impl<S: Simd> Tile<S> for Weighted {
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(&self, s: S, row: usize) {
        // SAFETY: the extents of the fields.
        unsafe {
            let mut acc = [[s.zero(); C]; R];
            accumulate(s, &mut acc, self.depth, (self.a.add(row), 1, self.lda), (self.b, 2 * S::LANES));
            self.finish(s, row, acc);
        }
    }
}

impl Kernel for Weighted {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the extents of the fields.
        unsafe {
            match (self.skip.is_null(), self.vectors) {
                (true, 1) => cover::<S, Self, 1>(s, &self, self.rows),
                (true, _) => cover::<S, Self, 2>(s, &self, self.rows),
                (false, 1) => self.run_skipping::<S, 1>(s),
                (false, _) => self.run_skipping::<S, 2>(s),
            }
        }
    }
}

/// `c[row][col] += sum_lane a[row][lane] b[lane][col]`, over the queries of several panels: `dV` (P by output gradients)
/// and `dK` (dS by queries).
pub(super) struct Outer {
    pub rows: usize,
    /// Queries in all; every panel but the last is full.
    pub lanes: usize,
    /// Panels `[rows][W]`, `panel_stride` apart.
    pub a: *const f32,
    pub panel_stride: usize,
    /// Row-major, `ldb` apart, one row for each query; rows are padded with zeros to whole vectors.
    pub b: *const f32,
    pub ldb: usize,
    /// Row-major, `ldc` apart, padded like `b`.
    pub c: *mut f32,
    pub ldc: usize,
    /// Columns, padded to whole vectors.
    pub cols: usize,
    /// Laid out as `a`: set sign bits mark terms to leave out; null takes all terms.
    pub skip: *const f32,
}

/// A strip of one or two vectors of columns.
struct OuterStrip<'a> {
    of: &'a Outer,
    col: usize,
}

impl<S: Simd> Tile<S> for OuterStrip<'_> {
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(&self, s: S, row: usize) {
        let w = 2 * S::LANES;
        let p = self.of;
        // SAFETY: the extents of the fields of `Outer`.
        unsafe {
            let mut acc = [[s.zero(); C]; R];
            let (mut lane, mut a) = (0, p.a.add(row * w));
            while lane < p.lanes {
                let depth = (p.lanes - lane).min(w);
                accumulate(s, &mut acc, depth, (a, w, 1), (p.b.add(lane * p.ldb + self.col), p.ldb));
                lane += depth;
                a = a.wrapping_add(p.panel_stride);
            }
            for (r, acc) in acc.iter().enumerate() {
                for (v, &x) in acc.iter().enumerate() {
                    let c = p.c.add((row + r) * p.ldc + self.col + v * S::LANES);
                    s.store(c, s.add(s.load(c), x));
                }
            }
        }
    }
}

impl Outer {
    #[inline(always)]
    unsafe fn run_skipping<S: Simd>(&self, s: S) {
        let w = 2 * S::LANES;
        for row in 0..self.rows {
            for col in (0..self.cols).step_by(S::LANES) {
                // SAFETY: the extents of the fields.
                unsafe {
                    let mut acc = s.zero();
                    for lane in 0..self.lanes {
                        let at = lane / w * self.panel_stride + row * w + lane % w;
                        if (*self.skip.add(at)).is_sign_positive() {
                            acc = s.mul_add(s.splat(*self.a.add(at)), s.load(self.b.add(lane * self.ldb + col)), acc);
                        }
                    }
                    let c = self.c.add(row * self.ldc + col);
                    s.store(c, s.add(s.load(c), acc));
                }
            }
        }
    }
}

impl Kernel for Outer {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the extents of the fields.
        unsafe {
            if !self.skip.is_null() {
                return self.run_skipping(s);
            }
            let mut col = 0;
            while self.cols - col >= 2 * S::LANES {
                cover::<S, _, 2>(s, &OuterStrip { of: &self, col }, self.rows);
                col += 2 * S::LANES;
            }
            if col < self.cols {
                cover::<S, _, 1>(s, &OuterStrip { of: &self, col }, self.rows);
            }
        }
    }
}
