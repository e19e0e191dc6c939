//! Parameters by name: what a kernel of this crate can ask for, and the table of a call from which its arguments are taken.
//!
//! `kernels/arguments.py` has the same names for the compiler; a test compares the two.

use std::collections::BTreeMap;

use jfa_core::{Error, Result, TensorView};
use jfa_driver::bundle::{Parameter, ParameterKind};
use jfa_driver::{JaggedMap, KernelArg, TensorMap};

/// Dimensions of a tensor map: wrap, head, end, bound, column in the kernels' order, outermost first.
pub(crate) const MAP_RANK: usize = 5;

/// Tensor maps that one pass may use.
pub(crate) const MOST_MAPS: usize = 16;

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub(crate) enum Tensor {
    Q,
    K,
    V,
    O,
    DO,
    DQ,
    DK,
    DV,
}

impl Tensor {
    pub(crate) const ALL: [Tensor; 8] =
        [Tensor::Q, Tensor::K, Tensor::V, Tensor::O, Tensor::DO, Tensor::DQ, Tensor::DK, Tensor::DV];

    pub(crate) const fn name(self) -> &'static str {
        ["q", "k", "v", "o", "d_o", "dq", "dk", "dv"][self as usize]
    }

    /// Whether it has rows of the query side.
    pub(crate) const fn of_queries(self) -> bool {
        matches!(self, Tensor::Q | Tensor::O | Tensor::DO | Tensor::DQ)
    }
}

macro_rules! names {
    ($(#[$doc:meta])* $enum:ident { $($variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum $enum {
            $($variant,)*
        }

        impl $enum {
            pub(crate) const NAMES: &[(&str, $enum)] = &[$(($text, $enum::$variant),)*];
        }
    };
}

names! {
    /// Addresses beside the tensors.
    Pointer {
        Lse = "lse",
        Delta = "delta",
        Partial = "partial",
        Counter = "counter",
        Header = "header",
        Sequences = "sequences",
        ForwardUnits = "forward_units",
        BackwardUnits = "backward_units",
        KvOffsets = "kv_offsets",
        KvLengths = "kv_lengths",
        KvTable = "kv_table",
        GlobalScratch = "global_scratch",
        ProfileScratch = "profile_scratch",
    }
}

names! {
    /// 64-bit numbers beside the tensors' strides.
    Long {
        LseHead = "lse_head",
        DeltaHead = "delta_head",
    }
}

names! {
    /// 32-bit integers.
    Int {
        Heads = "heads",
        HeadsQ = "heads_q",
        HeadsKv = "heads_kv",
        Group = "group",
        PackedLog2 = "packed_log2",
        Left = "left",
        Right = "right",
        BottomRight = "bottom_right",
        Batch = "batch",
        KvBatch = "kv_batch",
        QRows = "q_rows",
        ORows = "o_rows",
        KvRows = "kv_rows",
        Broadcast = "broadcast",
        Slices = "slices",
        KvOffsets64 = "kv_offsets_64",
    }
}

names! {
    /// Floats.
    Float {
        Scale = "scale",
        ScaleLog2 = "scale_log2",
    }
}

/// Where an argument comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A tensor's address.
    Data(Tensor),
    /// Distance of its rows, in elements.
    Row(Tensor),
    /// Distance of its heads, in elements.
    Head(Tensor),
    Pointer(Pointer),
    Long(Long),
    Int(Int),
    Float(Float),
    /// A map, by its number among those of the pass.
    Map(usize),
    /// Entry of its shape.
    MapShape(usize, usize),
    /// Entry of its strides, in elements.
    MapStride(usize, usize),
}

/// A tensor map of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapOf {
    pub(crate) tensor: Tensor,
    pub(crate) map: JaggedMap,
}

/// A parameter's name, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Data(Tensor),
    Row(Tensor),
    Head(Tensor),
    Pointer(Pointer),
    Long(Long),
    Int(Int),
    Float(Float),
    Map(Tensor),
    MapShape(Tensor, usize),
    MapStride(Tensor, usize),
}

impl Name {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        fn of<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
            names.iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
        }
        if let Some(p) = of(Pointer::NAMES, name) {
            return Some(Name::Pointer(p));
        }
        if let Some(l) = of(Long::NAMES, name) {
            return Some(Name::Long(l));
        }
        if let Some(i) = of(Int::NAMES, name) {
            return Some(Name::Int(i));
        }
        if let Some(f) = of(Float::NAMES, name) {
            return Some(Name::Float(f));
        }
        Tensor::ALL.into_iter().find_map(|t| {
            let rest = name.strip_prefix(t.name())?;
            let index = |digits: &str| digits.parse().ok().filter(|i| *i < MAP_RANK);
            match rest {
                "" => Some(Name::Data(t)),
                "_row" => Some(Name::Row(t)),
                "_head" => Some(Name::Head(t)),
                "_map" => Some(Name::Map(t)),
                _ => match (rest.strip_prefix("_map.shape"), rest.strip_prefix("_map.stride")) {
                    (Some(i), _) => Some(Name::MapShape(t, index(i)?)),
                    (_, Some(i)) => Some(Name::MapStride(t, index(i)?)),
                    (None, None) => None,
                },
            }
        })
    }

    /// The kind a manifest gives it.
    pub(crate) const fn kind(self) -> ParameterKind {
        match self {
            Name::Data(_) | Name::Pointer(_) => ParameterKind::Pointer,
            Name::Row(_) | Name::Head(_) | Name::Long(_) | Name::MapStride(..) => ParameterKind::I64,
            Name::Int(_) | Name::MapShape(..) => ParameterKind::I32,
            Name::Float(_) => ParameterKind::F32,
            Name::Map(_) => ParameterKind::TensorMap,
        }
    }
}

/// Resolves a kernel's parameters. `map_of` gives the number of a map among those of the pass.
pub(crate) fn resolve(
    kernel: &str,
    parameters: &[Parameter],
    mut map_of: impl FnMut(Tensor, &Parameter) -> Result<usize>,
) -> Result<Vec<Source>> {
    let mut maps = BTreeMap::new();
    let mut out = Vec::with_capacity(parameters.len());
    for p in parameters {
        let bad = |why: String| Error::Internal(format!("kernel {kernel}: parameter {} {why}", p.name));
        let name = Name::parse(&p.name).ok_or_else(|| bad("is unknown to the launcher".to_owned()))?;
        if name.kind() != p.kind {
            return Err(bad(format!("is {:?} in the manifest, {:?} to the launcher", p.kind, name.kind())));
        }
        let known =
            |maps: &BTreeMap<Tensor, usize>, t| maps.get(&t).copied().ok_or_else(|| bad("has no map".to_owned()));
        out.push(match name {
            Name::Data(t) => Source::Data(t),
            Name::Row(t) => Source::Row(t),
            Name::Head(t) => Source::Head(t),
            Name::Pointer(p) => Source::Pointer(p),
            Name::Long(l) => Source::Long(l),
            Name::Int(i) => Source::Int(i),
            Name::Float(f) => Source::Float(f),
            Name::Map(t) => {
                let number = map_of(t, p)?;
                maps.insert(t, number);
                Source::Map(number)
            }
            Name::MapShape(t, i) => Source::MapShape(known(&maps, t)?, i),
            Name::MapStride(t, i) => Source::MapStride(known(&maps, t)?, i),
        });
    }
    Ok(out)
}

/// The values of a call; kernels' arguments point into it.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    data: [u64; Tensor::ALL.len()],
    rows: [i64; Tensor::ALL.len()],
    heads: [i64; Tensor::ALL.len()],
    pointers: [u64; Pointer::NAMES.len()],
    longs: [i64; Long::NAMES.len()],
    ints: [i32; Int::NAMES.len()],
    floats: [f32; Float::NAMES.len()],
    maps: [TensorMap; MOST_MAPS],
    map_shapes: [[i32; MAP_RANK]; MOST_MAPS],
    map_strides: [[i64; MAP_RANK]; MOST_MAPS],
}

impl Table {
    /// All zero.
    pub(crate) const fn new() -> Self {
        Table {
            data: [0; Tensor::ALL.len()],
            rows: [0; Tensor::ALL.len()],
            heads: [0; Tensor::ALL.len()],
            pointers: [0; Pointer::NAMES.len()],
            longs: [0; Long::NAMES.len()],
            ints: [0; Int::NAMES.len()],
            floats: [0.0; Float::NAMES.len()],
            maps: [TensorMap::UNUSED; MOST_MAPS],
            map_shapes: [[0; MAP_RANK]; MOST_MAPS],
            map_strides: [[0; MAP_RANK]; MOST_MAPS],
        }
    }

    pub(crate) fn set_tensor(&mut self, tensor: Tensor, view: &TensorView) {
        let t = tensor as usize;
        self.data[t] = view.data.addr() as u64;
        // Single rows and heads never follow their stride, and callers may leave anything there; the kernels still assume a
        // lawful one.
        self.rows[t] = if view.rows > 1 { view.row_stride } else { view.dim * view.heads };
        self.heads[t] = if view.heads > 1 { view.head_stride } else { view.dim };
    }

    pub(crate) const fn set_pointer(&mut self, name: Pointer, address: u64) {
        self.pointers[name as usize] = address;
    }

    pub(crate) const fn set_long(&mut self, name: Long, value: i64) {
        self.longs[name as usize] = value;
    }

    pub(crate) const fn set_int(&mut self, name: Int, value: i32) {
        self.ints[name as usize] = value;
    }

    pub(crate) const fn set_float(&mut self, name: Float, value: f32) {
        self.floats[name as usize] = value;
    }

    /// `dims` and `strides` are the map's own, innermost first, strides in bytes from the second dimension on.
    pub(crate) fn set_map(&mut self, number: usize, map: TensorMap, dims: &[u64; 5], strides: &[u64; 4], element: u64) {
        self.maps[number] = map;
        for i in 0..MAP_RANK {
            let outer = MAP_RANK - 1 - i;
            self.map_shapes[number][i] = i32::try_from(dims[outer]).unwrap_or(i32::MAX);
            self.map_strides[number][i] = match outer.checked_sub(1) {
                Some(s) => (strides[s] / element).cast_signed(),
                None => 1,
            };
        }
    }

    /// The argument for a parameter.
    pub(crate) const fn argument(&self, source: Source) -> KernelArg<'_> {
        match source {
            Source::Data(t) => KernelArg::new(&self.data[t as usize]),
            Source::Row(t) => KernelArg::new(&self.rows[t as usize]),
            Source::Head(t) => KernelArg::new(&self.heads[t as usize]),
            Source::Pointer(p) => KernelArg::new(&self.pointers[p as usize]),
            Source::Long(l) => KernelArg::new(&self.longs[l as usize]),
            Source::Int(i) => KernelArg::new(&self.ints[i as usize]),
            Source::Float(f) => KernelArg::new(&self.floats[f as usize]),
            Source::Map(m) => KernelArg::new(&self.maps[m]),
            Source::MapShape(m, i) => KernelArg::new(&self.map_shapes[m][i]),
            Source::MapStride(m, i) => KernelArg::new(&self.map_strides[m][i]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Names, types and promises of `kernels/arguments.py`.
    fn arguments() -> BTreeMap<String, (String, Option<u32>)> {
        let out = Command::new("python3")
            .args(["-B", "-c", "import arguments, json; print(json.dumps(arguments.ARGUMENTS))"])
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"))
            .output()
            .expect("python3 runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }

    #[test]
    fn the_compiler_and_the_launcher_know_the_same_names() {
        let mut theirs = arguments();
        let mut ours: Vec<String> = Vec::new();
        ours.extend(Pointer::NAMES.iter().map(|n| n.0.to_owned()).filter(|n| !n.ends_with("_scratch")));
        ours.extend(Long::NAMES.iter().map(|n| n.0.to_owned()));
        ours.extend(Int::NAMES.iter().map(|n| n.0.to_owned()));
        ours.extend(Float::NAMES.iter().map(|n| n.0.to_owned()));
        for t in Tensor::ALL {
            ours.extend(["", "_row", "_head", "_map"].map(|s| format!("{}{s}", t.name())));
        }
        for name in ours {
            let (ty, divisible) = theirs.remove(&name).unwrap_or_else(|| panic!("arguments.py lacks {name}"));
            let kind = Name::parse(&name).unwrap().kind();
            let expected = match ty.as_str() {
                "i32" => ParameterKind::I32,
                "i64" => ParameterKind::I64,
                "f32" => ParameterKind::F32,
                t if t.starts_with("map of") => ParameterKind::TensorMap,
                t if t.starts_with('*') => ParameterKind::Pointer,
                t => panic!("{name} has type {t}"),
            };
            assert_eq!(kind, expected, "{name}");
            assert!(divisible.is_none_or(u32::is_power_of_two), "{name}");
        }
        assert!(theirs.is_empty(), "the launcher does not know {theirs:?}");
    }

    #[test]
    fn names() {
        assert_eq!(Name::parse("d_o_row"), Some(Name::Row(Tensor::DO)));
        assert_eq!(Name::parse("o"), Some(Name::Data(Tensor::O)));
        assert_eq!(Name::parse("dv_map.stride4"), Some(Name::MapStride(Tensor::DV, 4)));
        assert_eq!(Name::parse("q_map.shape0"), Some(Name::MapShape(Tensor::Q, 0)));
        for bad in ["", "x", "q_", "q_map.", "q_map.shape5", "q_map.shapeless", "qq", "d_o_column"] {
            assert_eq!(Name::parse(bad), None, "{bad}");
        }
    }

    fn parameter(name: &str, kind: ParameterKind) -> Parameter {
        let bytes = kind.bytes().unwrap();
        Parameter { name: name.to_owned(), kind, bytes, offset: 0, tile: None, divisible: 1 }
    }

    #[test]
    fn parameters_the_launcher_cannot_bind_are_named() {
        let refuse = |list: &[Parameter], words: &str| {
            let e = resolve("k", list, |_, _| Ok(3)).unwrap_err().to_string();
            assert!(e.contains(words), "{e} lacks {words}");
        };
        refuse(&[parameter("speed", ParameterKind::I32)], "kernel k: parameter speed is unknown");
        refuse(
            &[parameter("heads", ParameterKind::I64)],
            "parameter heads is I64 in the manifest, I32 to the launcher",
        );
        refuse(&[parameter("q_map.shape0", ParameterKind::I32)], "parameter q_map.shape0 has no map");
        let list = [parameter("q_map", ParameterKind::TensorMap), parameter("q_map.stride1", ParameterKind::I64)];
        assert_eq!(resolve("k", &list, |_, _| Ok(3)).unwrap(), [Source::Map(3), Source::MapStride(3, 1)]);
    }

    #[test]
    fn arguments_are_the_values_of_the_table() {
        let mut table = Table::new();
        let view = TensorView {
            data: jfa_core::DataPtr::new(std::ptr::without_provenance_mut::<u8>(0x1000)),
            dtype: jfa_core::DType::BF16,
            rows: 10,
            heads: 1,
            dim: 64,
            row_stride: 192,
            head_stride: 7,
        };
        table.set_tensor(Tensor::K, &view);
        table.set_int(Int::Left, -1);
        table.set_map(2, TensorMap([5; 16]), &[64, 1 << 25, 11, 1, (1 << 25) + 1], &[384, 384, 128, 1024], 2);
        let read = |s: Source| {
            let a = table.argument(s);
            // SAFETY: the argument points at that many bytes of the table.
            unsafe { std::slice::from_raw_parts(a.as_ptr().cast::<u8>(), a.bytes()) }.to_vec()
        };
        assert_eq!(read(Source::Data(Tensor::K)), 0x1000u64.to_le_bytes());
        assert_eq!(read(Source::Row(Tensor::K)), 192i64.to_le_bytes());
        assert_eq!(read(Source::Head(Tensor::K)), 64i64.to_le_bytes(), "a single head's stride is made lawful");
        assert_eq!(read(Source::Int(Int::Left)), (-1i32).to_le_bytes());
        assert_eq!(read(Source::Map(2)).len(), 128);
        let shape: Vec<_> = (0..5).map(|i| read(Source::MapShape(2, i))).collect();
        assert_eq!(shape, [(1 << 25) + 1, 1, 11, 1 << 25, 64i32].map(|d| d.to_le_bytes().to_vec()));
        let strides: Vec<_> = (0..5).map(|i| read(Source::MapStride(2, i))).collect();
        assert_eq!(strides, [512i64, 64, 192, 192, 1].map(|d| d.to_le_bytes().to_vec()));
    }
}
