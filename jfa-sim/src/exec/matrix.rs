//! Matrix instructions of the warp and the warpgroup: `ldmatrix`, `stmatrix`, `mma.sync`, `wgmma`.
//!
//! Their arithmetic is in [`crate::product`].

use super::Cluster;
use super::warp::{Product, Warp};
use crate::alu::Lanes;
use crate::findings::Kind;
use crate::ir::{Dst, MmaSync, MmaTy, Op, Src, Wgmma, WgmmaA};
use crate::num;
use crate::product;
use crate::ptx::Space;
use crate::tensor_map::Swizzle;

/// A shared-memory matrix descriptor, decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub start: usize,
    pub lead: usize,
    pub stride: usize,
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Descriptor of `wgmma`.
    pub(super) fn hopper(d: u64) -> Result<Descriptor, String> {
        let swizzle = [Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32][(d >> 62) as usize];
        if d >> 49 & 7 != 0 {
            return Err(format!("descriptor {d:#018x} has a base offset, which is not supported"));
        }
        Ok(Descriptor {
            start: ((d & 0x3fff) << 4) as usize,
            lead: ((d >> 16 & 0x3fff) << 4) as usize,
            stride: ((d >> 32 & 0x3fff) << 4) as usize,
            swizzle,
        })
    }

    /// Shared offset of the 16-byte chunk `c` of row `i`: rows along M or N and chunks along K for a K-major operand,
    /// rows along K and chunks along M or N for an MN-major one.
    #[inline]
    pub(super) fn chunk(&self, mn_major: bool, i: usize, c: usize) -> usize {
        let w = self.swizzle.width();
        let shift = w.trailing_zeros();
        let a = match (mn_major, self.swizzle) {
            (false, Swizzle::None) => self.start + (i / 8) * self.stride + (i % 8) * 16 + c * self.lead,
            (false, _) => {
                self.start
                    + (i / 8) * self.stride
                    + (i % 8) * w
                    + ((c * 16) >> shift) * self.lead
                    + ((c * 16) & (w - 1))
            }
            (true, Swizzle::None) => self.start + c * self.stride + (i / 8) * self.lead + (i % 8) * 16,
            (true, _) => {
                self.start
                    + ((c * 16) >> shift) * self.lead
                    + ((c * 16) & (w - 1))
                    + (i / 8) * self.stride
                    + (i % 8) * w
            }
        };
        self.swizzle.apply(a & 0x3ffff)
    }
}

/// What the arithmetic must know of the types.
pub(super) fn types(ty: MmaTy, half: bool) -> product::Types {
    product::Types { least: if ty == MmaTy::F16 { -14 } else { -126 }, half }
}

pub(super) fn element(ty: MmaTy, v: u32) -> f32 {
    match ty {
        MmaTy::Bf16 => num::bf16_to_f32(v as u16),
        MmaTy::F16 => num::f16_to_f32(v as u16),
        MmaTy::Tf32 => f32::from_bits(v & 0xffff_e000),
    }
}

/// A matrix operand in shared memory: `rows` (along M or N, from `first`) by `k` values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub d: Descriptor,
    pub mn_major: bool,
    pub ty: MmaTy,
    pub first: usize,
    pub rows: usize,
    pub k: usize,
}

impl Operand {
    /// Elements of a 16-byte chunk.
    fn per(&self) -> usize {
        if self.ty == MmaTy::Tf32 { 4 } else { 8 }
    }

    /// Lines of chunks (along K if MN-major, else along M or N) and chunks of a line.
    fn extent(&self) -> (usize, usize) {
        if self.mn_major { (self.k, self.rows / self.per()) } else { (self.rows, self.k / self.per()) }
    }

    /// Shared offset of a chunk.
    #[inline(always)]
    fn at(&self, line: usize, c: usize) -> usize {
        if self.mn_major {
            self.d.chunk(true, line, self.first / self.per() + c)
        } else {
            self.d.chunk(false, self.first + line, c)
        }
    }

    /// Offsets of all its chunks, or the first one outside the `len` bytes of shared memory.
    pub(super) fn chunks(&self, len: usize) -> Result<Vec<usize>, usize> {
        let (lines, per_line) = self.extent();
        let mut out = Vec::with_capacity(lines * per_line);
        for line in 0..lines {
            for c in 0..per_line {
                let at = self.at(line, c);
                if at + 16 > len {
                    return Err(at);
                }
                out.push(at);
            }
        }
        Ok(out)
    }

    /// Its values as `out[k][row]` (or `out[row][k]` if `by_row`).
    pub(super) fn read(&self, data: &[u8], by_row: bool, negate: bool, out: &mut [f32]) -> Result<(), usize> {
        match self.ty {
            MmaTy::Bf16 => self.read_as::<8>(data, by_row, out, |b| b.map(num::bf16_to_f32)),
            MmaTy::F16 => self.read_as::<8>(data, by_row, out, |b| b.map(num::f16_to_f32)),
            MmaTy::Tf32 => self.read_as::<4>(data, by_row, out, |b| {
                std::array::from_fn(|i| element(MmaTy::Tf32, u32::from(b[2 * i]) | u32::from(b[2 * i + 1]) << 16))
            }),
        }?;
        if negate {
            out.iter_mut().for_each(|v| *v = -*v);
        }
        Ok(())
    }

    #[inline(always)]
    fn read_as<const P: usize>(
        &self,
        data: &[u8],
        by_row: bool,
        out: &mut [f32],
        widen: impl Fn([u16; 8]) -> [f32; P],
    ) -> Result<(), usize> {
        let (lines, per_line) = self.extent();
        let get = |line: usize, c: usize| -> Result<[f32; P], usize> {
            let at = self.at(line, c);
            let b: &[u8; 16] = data.get(at..).and_then(|b| b.first_chunk()).ok_or(at)?;
            Ok(widen(std::array::from_fn(|i| u16::from_le_bytes([b[2 * i], b[2 * i + 1]]))))
        };
        if by_row != self.mn_major {
            // Chunks lie along what is contiguous in the result.
            for (line, to) in out.chunks_exact_mut(per_line * P).enumerate().take(lines) {
                for (c, to) in to.chunks_exact_mut(P).enumerate() {
                    to.copy_from_slice(&get(line, c)?);
                }
            }
        } else {
            // Blocks of eight lines are turned.
            for block in (0..lines).step_by(8) {
                for c in 0..per_line {
                    let mut values = [[0f32; P]; 8];
                    for (i, v) in values.iter_mut().enumerate() {
                        *v = get(block + i, c)?;
                    }
                    for e in 0..P {
                        let at = (c * P + e) * lines + block;
                        let line: [f32; 8] = std::array::from_fn(|i| values[i][e]);
                        out[at..at + 8].copy_from_slice(&line);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Cluster<'_> {
    /// Issues a `wgmma.mma_async` of one warp: its 16 rows.
    pub(super) fn wgmma(&mut self, w: &mut Warp, inst: u32, g: &Wgmma) {
        let mut dirty = w.fence_epoch == 0;
        let mut clash = false;
        for &d in g.d.iter() {
            dirty |= w.written[d as usize] == w.fence_epoch;
            clash |= w.busy[d as usize] & 2 != 0;
        }
        let mut regs = None;
        let mut desc_a = 0;
        match &g.a {
            WgmmaA::Regs(s) => {
                let mut v = Box::new([[0u64; 32]; 4]);
                for (o, s) in v.iter_mut().zip(s) {
                    if let Src::Reg(r) = *s {
                        dirty |= w.written[r as usize] == w.fence_epoch;
                        clash |= w.busy[r as usize] & 1 != 0;
                    }
                    self.fetch(w, *s, o);
                }
                regs = Some(v);
            }
            WgmmaA::Desc(s) => desc_a = self.uniform(w, *s, "the descriptor of A"),
        }
        let desc_b = self.uniform(w, g.b, "the descriptor of B");
        if dirty {
            self.report(
                w,
                0,
                Kind::TensorRegisters,
                None,
                "registers of this wgmma were written without a wgmma.fence in between".into(),
            );
        }
        if clash {
            self.report(
                w,
                0,
                Kind::TensorRegisters,
                None,
                "registers of this wgmma belong to another one in flight".into(),
            );
            self.finish_products(w);
        }
        let group = w.wg_group;
        let k = if g.ty == MmaTy::Tf32 { 8 } else { 16 };
        // What it reads is noted now; the values are taken when it runs.
        let (slot, cta) = (self.wgmma_slot(w.index), w.cta);
        let mut touched = vec![];
        let len = self.ctas[cta].smem.data.len();
        let mut scan = |desc: u64, mn_major: bool, first: usize, rows: usize| -> Result<(), String> {
            let d = Descriptor::hopper(desc)?;
            let chunks = Operand { d, mn_major, ty: g.ty, first, rows, k }.chunks(len);
            touched.extend(chunks.map_err(|at| {
                format!("descriptor {desc:#018x} reaches shared offset {at:#x}, outside the CTA's memory")
            })?);
            Ok(())
        };
        let mut r = scan(desc_b, g.trans_b, 0, g.n as usize);
        if r.is_ok() && regs.is_none() {
            r = scan(desc_a, g.trans_a, 16 * (w.id as usize % 4), 16);
        }
        if let Err(e) = r {
            self.report(w, 0, Kind::BadOperand, None, e);
            return;
        }
        for at in touched {
            if at < crate::lower::RESERVED_SHARED as usize {
                self.report(
                    w,
                    0,
                    Kind::OutOfBounds,
                    Some(at as u64),
                    "a wgmma operand in the reserved part of shared memory".into(),
                );
                continue;
            }
            if self.l.cfg.detect {
                self.note_shared_read(w, 0, cta, at, 16, slot, group, true, false);
            }
        }
        // B is read once for the four warps.
        self.counters.shared_tensor += u64::from(g.n) * 8 + if regs.is_some() { 0 } else { 512 };
        let macs = 16 * u64::from(g.n) * k as u64;
        if g.ty == MmaTy::Tf32 {
            self.counters.mma_tf32 += macs;
        } else {
            self.counters.mma_16 += macs;
        }
        let keep = self.pred(w, g.scale_d) & 1 == 1;
        for &d in g.d.iter() {
            w.busy[d as usize] |= 1;
        }
        if let WgmmaA::Regs(s) = &g.a {
            for s in s {
                if let Src::Reg(r) = *s {
                    w.busy[r as usize] |= 2;
                }
            }
        }
        w.products.push_back(Product { inst, desc_a, desc_b, a: regs, keep, group, done: false });
        // Results and reads happen at a random time between here and the wait.
        if self.l.cfg.shuffle && self.rng.below(2) == 0 {
            self.run_products(w, u32::MAX);
        }
    }

    /// Runs queued products up to a group, oldest first.
    pub(super) fn run_products(&mut self, w: &mut Warp, limit: u32) {
        for i in 0..w.products.len() {
            if w.products[i].group > limit {
                break;
            }
            if !w.products[i].done {
                let p = w.products[i].clone();
                let start = self.matrix_clock();
                self.run_product(w, &p);
                self.counters.matrix_nanos += self.matrix_clock() - start;
                w.products[i].done = true;
            }
        }
    }

    /// Runs all products and forgets that they were in flight.
    pub(super) fn finish_products(&mut self, w: &mut Warp) {
        self.run_products(w, u32::MAX);
        w.products.clear();
        w.busy.iter_mut().for_each(|b| *b &= !3);
    }

    /// `wgmma.wait_group`.
    pub(super) fn wgmma_wait(&mut self, w: &mut Warp, n: u32) {
        let limit = (w.wg_group - 1).saturating_sub(n);
        self.run_products(w, limit);
        while w.products.front().is_some_and(|p| p.group <= limit) {
            w.products.pop_front();
        }
        w.busy.iter_mut().for_each(|b| *b &= !3);
        let code = &self.l.kernel.code;
        for p in &w.products {
            if let Op::Wgmma(g) = &code[p.inst as usize].op {
                for &d in g.d.iter() {
                    w.busy[d as usize] |= 1;
                }
                if let WgmmaA::Regs(s) = &g.a {
                    for s in s {
                        if let Src::Reg(r) = *s {
                            w.busy[r as usize] |= 2;
                        }
                    }
                }
            }
        }
        let slot = self.wgmma_slot(w.index);
        w.know.all.raise(slot, limit);
    }

    fn run_product(&mut self, w: &mut Warp, p: &Product) {
        let Op::Wgmma(g) = &self.l.kernel.code[p.inst as usize].op else { return };
        let n = g.n as usize;
        let k = if g.ty == MmaTy::Tf32 { 8 } else { 16 };
        let data = &self.ctas[w.cta].smem.data;
        let mut b = vec![0f32; k * n];
        let mut a = vec![0f32; 16 * k];
        let Ok(d) = Descriptor::hopper(p.desc_b) else { return };
        let operand = Operand { d, mn_major: g.trans_b, ty: g.ty, first: 0, rows: n, k };
        if operand.read(data, false, g.neg_b, &mut b).is_err() {
            return;
        }
        match &p.a {
            Some(r) => fragment_a(g.ty, r.as_slice(), &mut a, g.neg_a),
            None => {
                let Ok(d) = Descriptor::hopper(p.desc_a) else { return };
                let first = 16 * (w.id as usize % 4);
                let operand = Operand { d, mn_major: g.trans_a, ty: g.ty, first, rows: 16, k };
                if operand.read(data, true, g.neg_a, &mut a).is_err() {
                    return;
                }
            }
        }
        let mut acc = vec![0f32; 16 * n];
        if p.keep {
            if g.f16_acc {
                for_fragment(n, |j, lane, row, col| {
                    acc[row * n + col] = num::f16_to_f32((w.regs[g.d[j / 2] as usize][lane] >> (16 * (j % 2))) as u16);
                });
            } else {
                for (j, d) in g.d.iter().enumerate() {
                    let first = 8 * n * (j / 2 % 2) + 8 * (j / 4) + j % 2;
                    for (row, lanes) in acc[first..].chunks_mut(n).zip(w.regs[*d as usize].chunks_exact(4)) {
                        for (i, v) in lanes.iter().enumerate() {
                            row[2 * i] = f32::from_bits(*v as u32);
                        }
                    }
                }
            }
        }
        product::Columns::new(&b, n, types(g.ty, g.f16_acc)).accumulate(&mut acc, &a);
        if g.f16_acc {
            for_fragment(n, |j, lane, row, col| {
                let reg = &mut w.regs[g.d[j / 2] as usize][lane];
                let v = u64::from(num::f32_to_f16(acc[row * n + col]));
                *reg = if j % 2 == 0 { (*reg & 0xffff_0000) | v } else { (*reg & 0xffff) | v << 16 };
            });
        } else {
            for (j, d) in g.d.iter().enumerate() {
                let first = 8 * n * (j / 2 % 2) + 8 * (j / 4) + j % 2;
                for (row, lanes) in acc[first..].chunks(n).zip(w.regs[*d as usize].chunks_exact_mut(4)) {
                    for (i, v) in lanes.iter_mut().enumerate() {
                        *v = u64::from(num::canon32(row[2 * i]).to_bits());
                    }
                }
            }
        }
    }

    pub(super) fn ldmatrix(&mut self, w: &mut Warp, d: &[Dst], trans: bool, addrs: &Lanes) {
        w.touched = u32::MAX;
        for (m, &d) in d.iter().enumerate() {
            let mut rows = [[0u8; 16]; 8];
            for (r, row) in rows.iter_mut().enumerate() {
                let lane = (m * 8 + r) as u32;
                if let Some(loc) = self.resolve(w, lane, Space::Shared, addrs[lane as usize], 16, 16) {
                    self.read_written(w, lane, loc, addrs[lane as usize], row);
                }
            }
            let half = |r: usize, c: usize| u64::from(u16::from_le_bytes([rows[r][2 * c], rows[r][2 * c + 1]]));
            let mut v = [0u64; 32];
            for (l, v) in v.iter_mut().enumerate() {
                let (i, j) = (l / 4, (l % 4) * 2);
                *v = if trans { half(j, i) | half(j + 1, i) << 16 } else { half(i, j) | half(i, j + 1) << 16 };
            }
            let mut group = [0u64; 32];
            group[..8].copy_from_slice(&addrs[m * 8..m * 8 + 8]);
            self.count_banks(0xff, &group, 16);
            w.set(d, u32::MAX, &v);
        }
    }

    pub(super) fn stmatrix(&mut self, w: &mut Warp, v: &[Src], trans: bool, addrs: &Lanes) {
        w.touched = u32::MAX;
        for (m, s) in v.iter().enumerate() {
            let mut x = [0u64; 32];
            self.fetch(w, *s, &mut x);
            let mut rows = [[0u8; 16]; 8];
            for (l, x) in x.iter().enumerate() {
                let (i, j) = (l / 4, (l % 4) * 2);
                for h in 0..2 {
                    let b = ((*x >> (16 * h)) as u16).to_le_bytes();
                    let (r, c) = if trans { (j + h, i) } else { (i, j + h) };
                    rows[r][2 * c..2 * c + 2].copy_from_slice(&b);
                }
            }
            for (r, row) in rows.iter().enumerate() {
                let lane = (m * 8 + r) as u32;
                if let Some(loc) = self.resolve(w, lane, Space::Shared, addrs[lane as usize], 16, 16) {
                    self.write(w, lane, loc, row);
                }
            }
            let mut group = [0u64; 32];
            group[..8].copy_from_slice(&addrs[m * 8..m * 8 + 8]);
            self.count_banks(0xff, &group, 16);
        }
    }

    pub(super) fn mma_sync(&mut self, w: &mut Warp, g: &MmaSync) {
        let k = g.k as usize;
        let mut a = vec![0f32; 16 * k];
        let mut b = vec![0f32; k * 8];
        let regs: Vec<Lanes> =
            g.a.iter()
                .map(|s| {
                    let mut v = [0; 32];
                    self.fetch(w, *s, &mut v);
                    v
                })
                .collect();
        fragment_a(g.ty, &regs, &mut a, false);
        for (i, s) in g.b.iter().enumerate() {
            let mut v = [0; 32];
            self.fetch(w, *s, &mut v);
            for (l, x) in v.iter().enumerate() {
                if g.ty == MmaTy::Tf32 {
                    b[(l % 4 + 4 * i) * 8 + l / 4] = element(g.ty, *x as u32);
                } else {
                    for h in 0..2 {
                        b[((l % 4) * 2 + h + 8 * i) * 8 + l / 4] = element(g.ty, (*x >> (16 * h)) as u32 & 0xffff);
                    }
                }
            }
        }
        let mut acc = vec![0f32; 128];
        let mut c = [[0u64; 32]; 4];
        for (v, s) in c.iter_mut().zip(g.c.iter()) {
            self.fetch(w, *s, v);
        }
        for_fragment(8, |j, lane, row, col| acc[row * 8 + col] = f32::from_bits(c[j][lane] as u32));
        product::Columns::new(&b, 8, types(g.ty, false)).accumulate(&mut acc, &a);
        let mut out = [[0u64; 32]; 4];
        for_fragment(8, |j, lane, row, col| out[j][lane] = u64::from(num::canon32(acc[row * 8 + col]).to_bits()));
        for (d, v) in g.d.iter().zip(&out) {
            w.set(*d, u32::MAX, v);
        }
        let macs = 128 * k as u64;
        if g.ty == MmaTy::Tf32 {
            self.counters.mma_tf32 += macs;
        } else {
            self.counters.mma_16 += macs;
        }
    }

    /// A value that all lanes must agree on.
    pub(super) fn uniform(&mut self, w: &Warp, s: Src, what: &str) -> u64 {
        let mut v = [0; 32];
        self.fetch(w, s, &mut v);
        let live = w.live();
        let first = v[live.trailing_zeros() as usize % 32];
        if (0..32).any(|l| live >> l & 1 == 1 && v[l] != first) {
            self.report(w, 0, Kind::BadOperand, None, format!("{what} differs between lanes"));
        }
        first
    }
}

/// Registers of an A fragment (four 16-bit pairs, or TensorFloat-32 values) into 16 rows.
fn fragment_a(ty: MmaTy, r: &[Lanes], a: &mut [f32], negate: bool) {
    let k = a.len() / 16;
    let sign = if negate { -1.0 } else { 1.0 };
    for (i, v) in r.iter().enumerate() {
        for (l, x) in v.iter().enumerate() {
            let row = l / 4 + 8 * (i % 2);
            if ty == MmaTy::Tf32 {
                a[row * k + l % 4 + 4 * (i / 2)] = sign * element(ty, *x as u32);
            } else {
                for h in 0..2 {
                    a[row * k + (l % 4) * 2 + h + 8 * (i / 2)] = sign * element(ty, (*x >> (16 * h)) as u32 & 0xffff);
                }
            }
        }
    }
}

/// Calls `f(accumulator, lane, row, column)` for every element of 16 by `n` accumulators.
fn for_fragment(n: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
    for j in 0..n / 2 {
        for lane in 0..32 {
            let row = lane / 4 + 8 * (j / 2 % 2);
            let col = 8 * (j / 4) + (lane % 4) * 2 + j % 2;
            f(j, lane, row, col);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_chunks_match_the_swizzled_tile() {
        // 64 rows of 128 bytes at 0x400, as a tensor copy with 128-byte swizzle leaves them.
        let d = Descriptor::hopper(0x400 >> 4 | 1 << 16 | (1024 >> 4) << 32 | 1 << 62).unwrap();
        for r in 0..64 {
            for c in 0..2 {
                assert_eq!(d.chunk(false, r, c), Swizzle::B128.apply(0x400 + r * 128 + c * 16));
            }
        }
    }

    #[test]
    fn fragments_cover_the_tile_once() {
        let mut seen = [[0; 16]; 16];
        for_fragment(16, |_, _, r, c| seen[r][c] += 1);
        assert!(seen.iter().flatten().all(|&n| n == 1));
    }
}
