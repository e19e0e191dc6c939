//! Kernel bundles: compiled kernels of one crate and one architecture in one file.
//!
//! The file is a 64-byte header, the manifest (JSON, zstd) and the images one after another (one zstd frame: kernels
//! of a family share most of their bytes). All numbers are little endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | magic `JFA\0BNDL` |
//! | 8..12 | format version |
//! | 12..16 | kind: 1 machine code (cubin), 2 PTX text |
//! | 16..32 | architecture, zero-padded |
//! | 32..40 | bytes of the compressed manifest |
//! | 40..48 | bytes of the compressed images |
//! | 48..56 | bytes of the images |
//! | 56..64 | zero |
//!
//! Writing is a pure function of its input: the same kernels give the same bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;

use once_cell::sync::OnceCell;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Arch, DriverError, Result};

const MAGIC: [u8; 8] = *b"JFA\0BNDL";
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Highest level whose window and memory use stay modest; decompression speed does not depend on it.
const LEVEL: i32 = 19;
/// A bundle that claims more than this is damaged.
const MAX_BYTES: usize = 1 << 30;

/// What the images are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageKind {
    /// Machine code.
    Cubin,
    /// PTX text, for study and simulation.
    Ptx,
}

impl ImageKind {
    const fn code(self) -> u32 {
        match self {
            ImageKind::Cubin => 1,
            ImageKind::Ptx => 2,
        }
    }
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterKind {
    /// `const __grid_constant__ CUtensorMap`, 128 bytes.
    TensorMap,
    /// A structure by value.
    Struct,
    /// A global address, 8 bytes.
    Pointer,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// 32-bit float.
    F32,
}

impl ParameterKind {
    /// Size in bytes where the kind decides it.
    pub const fn bytes(self) -> Option<u32> {
        match self {
            ParameterKind::TensorMap => Some(128),
            ParameterKind::Struct => None,
            ParameterKind::Pointer | ParameterKind::I64 => Some(8),
            ParameterKind::I32 | ParameterKind::F32 => Some(4),
        }
    }
}

/// The box one copy through a tensor map moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Columns (elements of a head's row); their bytes are the swizzle's span.
    pub cols: u32,
    /// Rows.
    pub rows: u32,
    /// Heads.
    #[serde(default = "one")]
    pub heads: u32,
}

const fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_one(n: &u32) -> bool {
    *n == 1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// One kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// Name, as the host knows it.
    pub name: String,
    /// What it is.
    pub kind: ParameterKind,
    /// Size in bytes.
    pub bytes: u32,
    /// Position in the parameter area, in bytes.
    pub offset: u32,
    /// The box of a tensor map.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile: Option<Tile>,
    /// What the kernel was compiled to assume: a pointer or integer is a multiple of this. Checked at every launch.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub divisible: u32,
}

/// What a kernel was compiled to assume about one tensor, in bytes; the host checks it before a launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promise {
    /// The tensor argument (`q`, `k`, …).
    pub argument: String,
    /// The base address is a multiple of this.
    pub base: u32,
    /// So is the row stride of this.
    pub row_stride: u32,
    /// And the head stride of this.
    pub head_stride: u32,
}

/// What the compiler says a kernel uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Registers per thread at launch.
    pub registers: u32,
    /// Stack frame, in bytes per thread.
    pub stack_bytes: u32,
    /// Spill stores, in bytes per thread.
    pub spill_store_bytes: u32,
    /// Spill loads, in bytes per thread.
    pub spill_load_bytes: u32,
    /// Local memory, in bytes per thread.
    pub local_bytes: u32,
    /// Constant bank 0 (parameters), in bytes.
    pub constant_bytes: u32,
    /// Hardware barriers.
    pub barriers: u32,
    /// Size of the machine code, in bytes.
    pub code_bytes: u32,
    /// Columns of tensor memory a block allocates.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tensor_memory_columns: u32,
}

/// Where an image stands among the decompressed images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRange {
    /// First byte.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// Everything the host must know about one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Unique within the bundle.
    pub name: String,
    /// Symbol in the image.
    pub entry: String,
    /// What distinguishes this variant (`kind`, `dtype`, `head_dim`, …): launchers choose by it.
    pub tags: BTreeMap<String, String>,
    /// Numbers the source states for the launcher (tile sizes and the like).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub constants: BTreeMap<String, u32>,
    /// Parameters in order.
    pub parameters: Vec<Parameter>,
    /// Threads of a block.
    pub threads: u32,
    /// Shared memory fixed at compile time, in bytes.
    pub shared_static: u32,
    /// Shared memory the launch must give, in bytes.
    pub shared_dynamic: u32,
    /// Blocks of a cluster; `[1, 1, 1]` without clusters.
    pub cluster: [u32; 3],
    /// Whether the cluster is compiled in; otherwise the launch names it.
    pub cluster_compiled: bool,
    /// Whether it may start before its predecessor has ended (it then waits itself).
    pub programmatic: bool,
    /// Promises the host checks.
    pub promises: Vec<Promise>,
    /// Compiler's figures.
    pub resources: Resources,
    /// SHA-256 over source, included files, flags and tool versions, in hexadecimal.
    pub source_sha256: String,
    /// Where its image is.
    pub image: ImageRange,
}

impl KernelInfo {
    /// The cluster the launch must name, if any.
    pub fn launch_cluster(&self) -> Option<[u32; 3]> {
        (!self.cluster_compiled && self.cluster != [1, 1, 1]).then_some(self.cluster)
    }

    /// A tag, or "" without one.
    pub fn tag(&self, name: &str) -> &str {
        self.tags.get(name).map_or("", String::as_str)
    }

    fn validate(&self) -> Result<(), String> {
        let fail = |why: String| Err(format!("kernel '{}': {why}", self.name));
        if self.name.is_empty() || self.entry.is_empty() {
            return fail("needs a name and an entry".to_owned());
        }
        if self.threads == 0 || self.threads > 1024 || !self.threads.is_multiple_of(32) {
            return fail(format!("threads = {} is not a multiple of 32 in 32..=1024", self.threads));
        }
        if self.cluster.contains(&0) || self.cluster.iter().product::<u32>() > 16 {
            return fail(format!("cluster = {:?} is not 1 to 16 blocks", self.cluster));
        }
        let mut end = self.parameters.first().map_or(0, |p| p.offset);
        for p in &self.parameters {
            if p.kind.bytes().is_some_and(|b| b != p.bytes) {
                return fail(format!("parameter '{}' of kind {:?} has {} bytes", p.name, p.kind, p.bytes));
            }
            let integral = matches!(p.kind, ParameterKind::Pointer | ParameterKind::I32 | ParameterKind::I64);
            if !p.divisible.is_power_of_two() || (p.divisible > 1 && !integral) {
                return fail(format!(
                    "parameter '{}' of kind {:?} cannot be a multiple of {}",
                    p.name, p.kind, p.divisible
                ));
            }
            if p.bytes == 0 || p.offset < end {
                return fail(format!("parameter '{}' ({} bytes at {}) overlaps another", p.name, p.bytes, p.offset));
            }
            end = p.offset + p.bytes;
        }
        for p in &self.promises {
            for (field, v) in [("base", p.base), ("row_stride", p.row_stride), ("head_stride", p.head_stride)] {
                if !v.is_power_of_two() {
                    return fail(format!("promise of '{}': {field} = {v} is not a power of two", p.argument));
                }
            }
        }
        Ok(())
    }
}

/// The manifest of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The crate the kernels belong to.
    pub owner: String,
    /// Architecture.
    pub arch: String,
    /// Compilers and their versions.
    pub toolchains: Vec<String>,
    /// The kernels, sorted by name.
    pub kernels: Vec<KernelInfo>,
}

/// A bundle, opened. Images are decompressed when one is first asked for.
pub struct Bundle {
    arch: Arch,
    kind: ImageKind,
    manifest: Manifest,
    packed: Cow<'static, [u8]>,
    images_bytes: usize,
    images: OnceCell<Vec<u8>>,
}

fn damaged(why: impl Into<String>) -> DriverError {
    DriverError::Bundle(why.into())
}

impl Bundle {
    /// Opens a bundle that is part of the program.
    pub fn from_static(file: &'static [u8]) -> Result<Self> {
        Self::open(Cow::Borrowed(file))
    }

    /// Opens a bundle read from a file.
    pub fn from_vec(file: Vec<u8>) -> Result<Self> {
        Self::open(Cow::Owned(file))
    }

    fn open(file: Cow<'static, [u8]>) -> Result<Self> {
        let header = file.get(..HEADER).ok_or_else(|| damaged(format!("{} bytes are no bundle", file.len())))?;
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| -> Result<usize> {
            let v = u64::from(word(at)) | u64::from(word(at + 4)) << 32;
            usize::try_from(v).ok().filter(|v| *v <= MAX_BYTES).ok_or_else(|| damaged(format!("size {v} at byte {at}")))
        };
        if header[..8] != MAGIC {
            return Err(damaged("does not begin with the bundle magic"));
        }
        if word(8) != VERSION {
            return Err(damaged(format!("format version {} (this program reads {VERSION})", word(8))));
        }
        let kind = match word(12) {
            1 => ImageKind::Cubin,
            2 => ImageKind::Ptx,
            other => return Err(damaged(format!("image kind {other}"))),
        };
        let name: Vec<u8> = header[16..32].iter().copied().take_while(|b| *b != 0).collect();
        let arch: Arch = String::from_utf8_lossy(&name).parse()?;
        if header[16 + name.len()..32].iter().chain(&header[56..]).any(|b| *b != 0) {
            return Err(damaged("reserved bytes of the header are not zero"));
        }
        let (manifest_packed, images_packed, images_bytes) = (long(32)?, long(40)?, long(48)?);
        if file.len() != HEADER + manifest_packed + images_packed {
            return Err(damaged(format!(
                "{} bytes, the header says {}",
                file.len(),
                HEADER + manifest_packed + images_packed
            )));
        }
        let json = zstd::bulk::decompress(&file[HEADER..HEADER + manifest_packed], 64 << 20)
            .map_err(|e| damaged(format!("manifest: {e}")))?;
        let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| damaged(format!("manifest: {e}")))?;
        if manifest.arch != arch.to_string() {
            return Err(damaged(format!("header says {arch}, manifest {}", manifest.arch)));
        }
        for (i, k) in manifest.kernels.iter().enumerate() {
            k.validate().map_err(damaged)?;
            if i > 0 && manifest.kernels[i - 1].name >= k.name {
                return Err(damaged(format!("kernel '{}' is not sorted or not unique", k.name)));
            }
            let end = k.image.offset.checked_add(k.image.bytes);
            if end.is_none_or(|e| e > images_bytes as u64) {
                return Err(damaged(format!("image of '{}' lies outside of the bundle", k.name)));
            }
        }
        let packed = match file {
            Cow::Borrowed(f) => Cow::Borrowed(&f[HEADER + manifest_packed..]),
            Cow::Owned(f) => Cow::Owned(f[HEADER + manifest_packed..].to_vec()),
        };
        Ok(Bundle { arch, kind, manifest, packed, images_bytes, images: OnceCell::new() })
    }

    /// Writes a bundle. `kernels` need not be sorted; their image ranges are filled in here.
    pub fn write(
        kind: ImageKind,
        owner: &str,
        arch: Arch,
        toolchains: &[String],
        kernels: Vec<(KernelInfo, Vec<u8>)>,
    ) -> Result<Vec<u8>> {
        let mut kernels = kernels;
        kernels.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let mut images = Vec::new();
        // Entries of one source share their image.
        let mut known: BTreeMap<String, ImageRange> = BTreeMap::new();
        for (info, image) in &mut kernels {
            let sha256 = hex(&Sha256::digest(&*image));
            let range = known.entry(sha256).or_insert_with_key(|sha256| {
                let offset = images.len() as u64;
                images.extend_from_slice(image);
                ImageRange { offset, bytes: image.len() as u64, sha256: sha256.clone() }
            });
            info.image = range.clone();
            info.validate().map_err(damaged)?;
        }
        if let Some(pair) = kernels.windows(2).find(|p| p[0].0.name == p[1].0.name) {
            return Err(damaged(format!("two kernels are named '{}'", pair[0].0.name)));
        }
        let manifest = Manifest {
            owner: owner.to_owned(),
            arch: arch.to_string(),
            toolchains: toolchains.to_vec(),
            kernels: kernels.into_iter().map(|k| k.0).collect(),
        };
        let json = serde_json::to_vec(&manifest).map_err(|e| damaged(e.to_string()))?;
        let manifest_packed = pack(&json)?;
        let images_packed = pack(&images)?;
        let mut out = Vec::with_capacity(HEADER + manifest_packed.len() + images_packed.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&kind.code().to_le_bytes());
        let mut name = [0u8; 16];
        let text = arch.to_string();
        name[..text.len()].copy_from_slice(text.as_bytes());
        out.extend_from_slice(&name);
        for n in [manifest_packed.len(), images_packed.len(), images.len(), 0] {
            out.extend_from_slice(&(n as u64).to_le_bytes());
        }
        out.extend_from_slice(&manifest_packed);
        out.extend_from_slice(&images_packed);
        Ok(out)
    }

    /// Architecture of the images.
    pub const fn arch(&self) -> Arch {
        self.arch
    }

    /// What the images are.
    pub const fn kind(&self) -> ImageKind {
        self.kind
    }

    /// The manifest.
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The kernels, sorted by name.
    pub fn kernels(&self) -> &[KernelInfo] {
        &self.manifest.kernels
    }

    /// Image of kernel number `index`.
    pub fn image(&self, index: usize) -> Result<&[u8]> {
        let images = self.images.get_or_try_init(|| {
            let images =
                zstd::bulk::decompress(&self.packed, self.images_bytes).map_err(|e| damaged(format!("images: {e}")))?;
            if images.len() == self.images_bytes {
                Ok(images)
            } else {
                Err(damaged(format!("{} bytes of images, the header says {}", images.len(), self.images_bytes)))
            }
        })?;
        let k = self.manifest.kernels.get(index).ok_or_else(|| damaged(format!("no kernel number {index}")))?;
        #[expect(clippy::cast_possible_truncation, reason = "checked against the images' size when opened")]
        let range = k.image.offset as usize..(k.image.offset + k.image.bytes) as usize;
        Ok(&images[range])
    }

    /// Decompresses everything and compares every image with its recorded digest.
    pub fn verify(&self) -> Result<()> {
        for (i, k) in self.kernels().iter().enumerate() {
            let found = hex(&Sha256::digest(self.image(i)?));
            if found != k.image.sha256 {
                return Err(damaged(format!(
                    "image of '{}' has digest {found}, manifest says {}",
                    k.name, k.image.sha256
                )));
            }
        }
        Ok(())
    }
}

fn pack(data: &[u8]) -> Result<Vec<u8>> {
    let run = || -> std::io::Result<Vec<u8>> {
        let mut c = zstd::bulk::Compressor::new(LEVEL)?;
        c.include_checksum(true)?;
        c.include_contentsize(true)?;
        c.compress(data)
    };
    run().map_err(|e| damaged(format!("compressing: {e}")))
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn kernel(name: &str) -> KernelInfo {
        KernelInfo {
            name: name.to_owned(),
            entry: format!("jfa_{name}"),
            tags: BTreeMap::from([("kind".to_owned(), "test".to_owned())]),
            constants: BTreeMap::from([("rows".to_owned(), 64)]),
            parameters: vec![
                Parameter {
                    name: "q".into(),
                    kind: ParameterKind::TensorMap,
                    bytes: 128,
                    offset: 0,
                    tile: Some(Tile { cols: 64, rows: 64, heads: 1 }),
                    divisible: 1,
                },
                Parameter {
                    name: "n".into(),
                    kind: ParameterKind::I32,
                    bytes: 4,
                    offset: 128,
                    tile: None,
                    divisible: 8,
                },
            ],
            threads: 384,
            shared_static: 0,
            shared_dynamic: 1024,
            cluster: [1, 1, 1],
            cluster_compiled: false,
            programmatic: false,
            promises: vec![Promise { argument: "q".into(), base: 16, row_stride: 16, head_stride: 16 }],
            resources: Resources { registers: 168, ..Resources::default() },
            source_sha256: "00".into(),
            image: ImageRange { offset: 0, bytes: 0, sha256: String::new() },
        }
    }

    fn write(kernels: Vec<(KernelInfo, Vec<u8>)>) -> Result<Vec<u8>> {
        Bundle::write(ImageKind::Cubin, "test", Arch::SM_90A, &["compiler 1".to_owned()], kernels)
    }

    #[test]
    fn round_trip_in_any_order_gives_the_same_bytes() {
        let images = [vec![1u8; 1000], (0..=255u8).cycle().take(70_000).collect(), Vec::new()];
        let rows: Vec<_> = ["b", "a", "c"].iter().zip(&images).map(|(n, i)| (kernel(n), i.clone())).collect();
        let file = write(rows.clone()).unwrap();
        let reversed = write(rows.into_iter().rev().collect()).unwrap();
        assert_eq!(file, reversed);
        assert!(file.len() < 20_000);
        let bundle = Bundle::from_vec(file).unwrap();
        assert_eq!((bundle.arch(), bundle.kind()), (Arch::SM_90A, ImageKind::Cubin));
        let names: Vec<_> = bundle.kernels().iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(bundle.image(0).unwrap(), images[1]);
        assert_eq!(bundle.image(1).unwrap(), images[0]);
        assert!(bundle.image(2).unwrap().is_empty());
        assert!(bundle.image(3).is_err());
        bundle.verify().unwrap();
        assert_eq!(bundle.manifest().owner, "test");
        assert_eq!(bundle.kernels()[0].parameters, kernel("a").parameters);
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        let file = write(vec![(kernel("a"), (0..200u8).collect()), (kernel("b"), vec![7; 300])]).unwrap();
        let whole = Bundle::from_vec(file.clone()).unwrap();
        whole.verify().unwrap();
        for cut in [0, 5, HEADER - 1, HEADER, file.len() - 1] {
            assert!(Bundle::from_vec(file[..cut].to_vec()).is_err(), "cut at {cut}");
        }
        for at in 0..file.len() {
            let mut bad = file.clone();
            bad[at] ^= 0x10;
            // zstd ignores one bit of a frame's header: there the content is still right.
            let noticed = Bundle::from_vec(bad).and_then(|b| b.verify().map(|()| b));
            assert!(noticed.is_err() || noticed.is_ok_and(|b| b.manifest() == whole.manifest()), "byte {at}");
        }
    }

    #[test]
    fn manifests_that_make_no_sense_are_refused_with_the_kernel_and_the_value() {
        let refuse = |change: &dyn Fn(&mut KernelInfo), words: &str| {
            let mut k = kernel("a");
            change(&mut k);
            let e = write(vec![(k, vec![1])]).unwrap_err().to_string();
            assert!(e.contains(words), "{e} lacks {words}");
        };
        refuse(&|k| k.threads = 100, "kernel 'a': threads = 100");
        refuse(&|k| k.threads = 2048, "threads = 2048");
        refuse(&|k| k.cluster = [3, 3, 2], "cluster = [3, 3, 2]");
        refuse(&|k| k.cluster = [0, 1, 1], "cluster = [0, 1, 1]");
        refuse(&|k| k.parameters[0].bytes = 64, "parameter 'q' of kind TensorMap has 64 bytes");
        refuse(&|k| k.parameters[1].offset = 120, "parameter 'n' (4 bytes at 120) overlaps");
        refuse(&|k| k.parameters[1].divisible = 12, "parameter 'n' of kind I32 cannot be a multiple of 12");
        refuse(&|k| k.parameters[0].divisible = 16, "parameter 'q' of kind TensorMap cannot be a multiple of 16");
        refuse(&|k| k.promises[0].row_stride = 12, "row_stride = 12 is not a power of two");
        refuse(&|k| k.entry.clear(), "needs a name and an entry");
        let twice = write(vec![(kernel("a"), vec![1]), (kernel("a"), vec![2])]).unwrap_err().to_string();
        assert!(twice.contains("two kernels are named 'a'"), "{twice}");
    }
}
