//! What the kernel tests share: bfloat16, random operands, buffers.
#![allow(dead_code, reason = "every test file uses a part")]

use jfa_sim::{DataType, LaunchConfig, Machine, Report, Swizzle, TensorMap};

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 16
    }

    /// About normal.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() & 0xffff) as f32 / 65536.0).sum::<f32>() - 6.0
    }
}

pub fn bf16(x: f32) -> u16 {
    let b = x.to_bits();
    ((b + 0x7fff + ((b >> 16) & 1)) >> 16) as u16
}

pub fn wide(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// A matrix of bfloat16 numbers.
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<u16>,
}

impl Matrix {
    pub fn random(rows: usize, cols: usize, r: &mut Random) -> Matrix {
        Matrix { rows, cols, data: (0..rows * cols).map(|_| bf16(r.normal())).collect() }
    }

    pub fn at(&self, i: usize, j: usize) -> f64 {
        f64::from(wide(self.data[i * self.cols + j]))
    }

    pub fn upload(&self, m: &mut Machine) -> u64 {
        let bytes: Vec<u8> = self.data.iter().flat_map(|h| h.to_le_bytes()).collect();
        let a = m.alloc(bytes.len());
        m.write(a, &bytes).unwrap();
        a
    }

    /// A tensor map with boxes of `rows` by `cols` and the swizzle of that width.
    pub fn map(&self, at: u64, rows: u32, cols: u32) -> TensorMap {
        let swizzle = match cols * 2 {
            32 => Swizzle::B32,
            64 => Swizzle::B64,
            128 => Swizzle::B128,
            _ => Swizzle::None,
        };
        TensorMap::tiled(
            DataType::Bf16,
            at,
            &[self.cols as u64, self.rows as u64],
            &[self.cols as u64 * 2],
            &[cols, rows],
            swizzle,
        )
        .unwrap()
    }
}

pub fn floats(m: &Machine, at: u64, n: usize) -> Vec<f32> {
    let mut b = vec![0; 4 * n];
    m.read(at, &mut b).unwrap();
    b.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

pub fn words(m: &Machine, at: u64, n: usize) -> Vec<u32> {
    floats(m, at, n).into_iter().map(f32::to_bits).collect()
}

/// Memory full of NaN.
pub fn poisoned(m: &mut Machine, bytes: usize) -> u64 {
    let a = m.alloc(bytes);
    m.write(a, &vec![0xff; bytes]).unwrap();
    a
}

pub fn shape(grid: [u32; 3], threads: u32, cluster: u32, smem: u32) -> LaunchConfig {
    LaunchConfig { grid, block: [threads, 1, 1], cluster: [cluster, 1, 1], dynamic_smem: smem }
}

pub fn clean(r: &Report) {
    let t: String = r.findings.iter().map(|f| format!("{f}\n")).collect();
    assert!(r.findings.is_empty(), "{t}");
}

pub fn close(got: &[f32], want: impl Fn(usize) -> f64, tolerance: f64, what: &str) {
    for (i, g) in got.iter().enumerate() {
        let w = want(i);
        assert!((f64::from(*g) - w).abs() <= tolerance * (1.0 + w.abs()), "{what}: element {i} is {g}, not {w}");
    }
}
