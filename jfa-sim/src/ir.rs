//! The instruction form that the executor runs: registers are numbers, labels are indices, modifiers are fields.

use crate::alu::{Cmp, Cvt, F1, F2, F3};
use crate::order::Strength;
use crate::ptx::Space;

/// A source operand.
#[derive(Clone, Copy, Debug)]
pub enum Src {
    /// Register.
    Reg(u32),
    /// Immediate, or a fixed address.
    Imm(u64),
    /// Offset in the CTA's shared memory; its address carries the CTA's rank.
    Shared(u32),
}

/// A destination register; [`NONE`] discards.
pub type Dst = u32;
/// No register.
pub const NONE: u32 = u32::MAX;

/// A predicate source; [`NONE`] is true.
#[derive(Clone, Copy, Debug)]
pub struct PSrc {
    /// Predicate register.
    pub id: u32,
    /// Negated.
    pub neg: bool,
}

impl PSrc {
    /// Always true.
    pub const TRUE: PSrc = PSrc { id: NONE, neg: false };
    /// Always false.
    pub const FALSE: PSrc = PSrc { id: NONE, neg: true };
}

/// `[base + off]`.
#[derive(Clone, Copy, Debug)]
pub struct Addr {
    /// Base address.
    pub base: Src,
    /// Byte offset.
    pub off: i64,
}

/// Classes of instructions, as the counters show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Integer and logic.
    Integer,
    /// Moves and packing, which the hardware compiler often removes.
    Move,
    /// f32 adds, multiplies and fused multiply-adds.
    Float,
    /// Packed f32: two results a lane.
    Packed,
    /// 16-bit floats, packed ones too.
    Half,
    /// f64.
    Double,
    /// `ex2`.
    Exp,
    /// Other special functions.
    Special,
    /// Conversions.
    Convert,
    /// Predicates and selection.
    Predicate,
    /// Branches and calls.
    Control,
    /// Loads and stores of global memory.
    Global,
    /// Loads and stores of shared memory, matrix forms included.
    Shared,
    /// Local memory.
    Local,
    /// Parameters and constants.
    Param,
    /// Atomics and reductions.
    Atomic,
    /// Exchange between lanes.
    Warp,
    /// Barriers, mbarriers, fences.
    Sync,
    /// Asynchronous copies.
    Copy,
    /// Tensor core.
    Tensor,
    /// Everything else.
    Other,
}

/// Number of classes.
pub const CLASSES: usize = Class::Other as usize + 1;

impl Class {
    /// All classes in order.
    pub const ALL: [Class; CLASSES] = [
        Class::Integer,
        Class::Move,
        Class::Float,
        Class::Packed,
        Class::Half,
        Class::Double,
        Class::Exp,
        Class::Special,
        Class::Convert,
        Class::Predicate,
        Class::Control,
        Class::Global,
        Class::Shared,
        Class::Local,
        Class::Param,
        Class::Atomic,
        Class::Warp,
        Class::Sync,
        Class::Copy,
        Class::Tensor,
        Class::Other,
    ];
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Inst {
    /// Guard.
    pub guard: PSrc,
    /// What to do.
    pub op: Op,
    /// PTX line.
    pub line: u32,
    /// Counter class.
    pub class: Class,
}

/// Logic on predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bool {
    /// And.
    And,
    /// Or.
    Or,
    /// Exclusive or.
    Xor,
}

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SReg {
    /// `%tid.{x,y,z}`.
    Tid(u8),
    /// `%ntid`.
    Ntid(u8),
    /// `%ctaid`.
    Ctaid(u8),
    /// `%nctaid`.
    Nctaid(u8),
    /// `%clusterid`.
    Clusterid(u8),
    /// `%nclusterid`.
    Nclusterid(u8),
    /// `%cluster_ctaid`.
    ClusterCtaid(u8),
    /// `%cluster_nctaid`.
    ClusterNctaid(u8),
    /// `%cluster_ctarank`.
    ClusterCtarank,
    /// `%cluster_nctarank`.
    ClusterNctarank,
    /// `%is_explicit_cluster`.
    IsExplicitCluster,
    /// `%laneid`.
    Laneid,
    /// `%warpid`.
    Warpid,
    /// `%nwarpid`.
    Nwarpid,
    /// `%smid`.
    Smid,
    /// `%nsmid`.
    Nsmid,
    /// `%gridid`.
    Gridid,
    /// `%lanemask_{eq,lt,le,gt,ge}`.
    Lanemask(u8),
    /// `%clock`, `%clock_hi`, `%clock64`.
    Clock(u8),
    /// `%globaltimer` and its halves.
    Globaltimer(u8),
    /// `%dynamic_smem_size`.
    DynamicSmem,
    /// `%total_smem_size`.
    TotalSmem,
    /// An environment register, which holds 0.
    Zero,
}

/// Vote modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteMode {
    /// All lanes.
    All,
    /// Any lane.
    Any,
    /// All the same.
    Uni,
    /// Mask of lanes.
    Ballot,
}

/// Shuffle modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShflMode {
    /// From a lower lane.
    Up,
    /// From a higher lane.
    Down,
    /// Exclusive or.
    Bfly,
    /// Absolute.
    Idx,
}

/// Binary operation of an atomic or a reduction, on the bits of its type.
#[derive(Clone, Copy, Debug)]
pub struct AtomFn {
    /// `f(old, b, c)`.
    pub f: fn(u64, u64, u64) -> u64,
    /// Bytes of one element.
    pub bytes: u8,
}

/// What a barrier instruction does.
#[derive(Clone, Copy, Debug)]
pub enum BarKind {
    /// Arrive and wait.
    Sync,
    /// Arrive only.
    Arrive,
    /// Arrive, wait, and count the lanes where the predicate holds.
    RedPopc(Dst, PSrc),
    /// Conjunction or disjunction into a predicate.
    Red(Bool, u32, PSrc),
}

/// Fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// `fence.acq_rel`, `fence.sc`, `membar`: orders the generic proxy, beyond the CTA or within it.
    Memory {
        /// Scope of the cluster or wider.
        wide: bool,
    },
    /// `fence.proxy.async` over shared and global memory (or one of them).
    ProxyAsync {
        /// Covers shared memory.
        shared: bool,
        /// Covers global memory.
        global: bool,
    },
    /// `fence.mbarrier_init`.
    MbarrierInit,
    /// `fence.proxy.tensormap`.
    ProxyTensormap {
        /// The acquiring form.
        acquire: bool,
    },
    /// A fence with no effect on anything the simulator models.
    Other,
}

/// mbarrier operations.
#[derive(Clone, Copy, Debug)]
pub enum Mbar {
    /// `init`.
    Init(Src),
    /// `inval`.
    Inval,
    /// `arrive` and `arrive_drop`, with optional expected bytes.
    Arrive {
        /// Destination of the state.
        d: Dst,
        /// Arrivals.
        count: Src,
        /// Bytes to expect first.
        expect: Option<Src>,
        /// Lowers the expected count of later phases too.
        drop: bool,
        /// Must not complete the phase.
        no_complete: bool,
    },
    /// `expect_tx`.
    ExpectTx(Src),
    /// `complete_tx`.
    CompleteTx(Src),
    /// `test_wait` and `try_wait`.
    Wait {
        /// Predicate that tells whether the phase is complete.
        p: u32,
        /// Phase parity, or a state when `parity` is false.
        phase: Src,
        /// Tests a parity.
        parity: bool,
        /// May block.
        block: bool,
    },
}

/// Reduction operator of bulk copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedOp {
    /// Sum.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// And.
    And,
    /// Or.
    Or,
    /// Exclusive or.
    Xor,
    /// Increment with wrap.
    Inc,
    /// Decrement with wrap.
    Dec,
}

/// Asynchronous copies.
#[derive(Clone, Debug)]
pub enum Copy {
    /// `cp.async`.
    Element {
        /// Shared destination.
        dst: Addr,
        /// Global source.
        src: Addr,
        /// Bytes written.
        bytes: u8,
        /// Bytes read; the rest is zero.
        src_bytes: Option<Src>,
        /// Reads nothing where it holds.
        ignore: Option<PSrc>,
    },
    /// `cp.async.commit_group`.
    Commit,
    /// `cp.async.wait_group` (`None`: all).
    Wait(Option<u32>),
    /// `cp.async.mbarrier.arrive`.
    MbarArrive {
        /// Barrier.
        bar: Addr,
        /// Does not raise the pending count.
        noinc: bool,
    },
    /// `cp.async.bulk` from global to shared memory.
    BulkLoad {
        /// Destination.
        dst: Addr,
        /// Source.
        src: Addr,
        /// Bytes.
        bytes: Src,
        /// Barrier.
        bar: Addr,
        /// CTA mask.
        multicast: Option<Src>,
    },
    /// `cp.async.bulk` from shared memory to that of another CTA.
    BulkCluster {
        /// Destination.
        dst: Addr,
        /// Source.
        src: Addr,
        /// Bytes.
        bytes: Src,
        /// Barrier.
        bar: Addr,
        /// Reduction instead of a copy, with its element.
        red: Option<(RedOp, crate::ptx::Ty)>,
    },
    /// `cp.async.bulk` or `cp.reduce.async.bulk` from shared to global memory.
    BulkStore {
        /// Destination.
        dst: Addr,
        /// Source.
        src: Addr,
        /// Bytes.
        bytes: Src,
        /// Reduction instead of a copy, with its element.
        red: Option<(RedOp, crate::ptx::Ty)>,
    },
    /// `cp.async.bulk.tensor` from global to shared memory.
    TensorLoad {
        /// Destination.
        dst: Addr,
        /// Tensor map.
        map: Addr,
        /// Coordinates.
        coords: Box<[Src]>,
        /// Barrier.
        bar: Addr,
        /// CTA mask.
        multicast: Option<Src>,
    },
    /// `cp.async.bulk.tensor` or `cp.reduce.async.bulk.tensor` from shared to global memory.
    TensorStore {
        /// Tensor map.
        map: Addr,
        /// Coordinates.
        coords: Box<[Src]>,
        /// Source.
        src: Addr,
        /// Reduction instead of a copy.
        red: Option<RedOp>,
    },
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`.
    BulkWait {
        /// Groups that may stay.
        n: u32,
        /// Wait for the reads only.
        read: bool,
    },
    /// `st.async` and `red.async`: a remote store that completes bytes on a remote barrier.
    StoreAsync {
        /// Destination.
        dst: Addr,
        /// Values.
        values: Box<[Src]>,
        /// Bytes of a value.
        bytes: u8,
        /// Barrier.
        bar: Addr,
        /// Reduction.
        red: Option<AtomFn>,
    },
    /// Prefetches, which have no visible effect.
    Prefetch,
}

/// Fields of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapField {
    /// Global address.
    Address,
    /// Rank minus one.
    Rank,
    /// Box extent of a dimension.
    Box(u8),
    /// Extent of a dimension.
    Dim(u8),
    /// Stride of a dimension, bytes.
    Stride(u8),
    /// Element stride of a dimension.
    ElementStride(u8),
    /// Element type.
    ElemType,
    /// Interleave.
    Interleave,
    /// Swizzle.
    Swizzle,
    /// Fill.
    Fill,
    /// Swizzle atomicity, which the simulator keeps at 16 bytes.
    SwizzleAtomicity,
}

/// The element types of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaTy {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// TensorFloat-32.
    Tf32,
}

/// A `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub struct Wgmma {
    /// Columns.
    pub n: u32,
    /// Type of A and B.
    pub ty: MmaTy,
    /// f16 accumulators instead of f32.
    pub f16_acc: bool,
    /// Accumulators.
    pub d: Box<[Dst]>,
    /// A: a descriptor or four registers.
    pub a: WgmmaA,
    /// Descriptor of B.
    pub b: Src,
    /// Keeps the accumulators where true, else starts at zero.
    pub scale_d: PSrc,
    /// Negates A.
    pub neg_a: bool,
    /// Negates B.
    pub neg_b: bool,
    /// A is MN-major.
    pub trans_a: bool,
    /// B is MN-major.
    pub trans_b: bool,
}

/// The A operand of a `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub enum WgmmaA {
    /// Shared memory.
    Desc(Src),
    /// Registers.
    Regs([Src; 4]),
}

/// `mma.sync` shapes with f32 accumulators.
#[derive(Clone, Debug)]
pub struct MmaSync {
    /// K.
    pub k: u32,
    /// Type of A and B.
    pub ty: MmaTy,
    /// Destination.
    pub d: Box<[Dst]>,
    /// A.
    pub a: Box<[Src]>,
    /// B.
    pub b: Box<[Src]>,
    /// C.
    pub c: Box<[Src]>,
}

/// Shapes of `tcgen05.ld` and `tcgen05.st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TmemShape {
    /// Lane t, consecutive columns.
    S32x32b,
    /// 16 lanes, 64 bits.
    S16x64b,
    /// 16 lanes, 128 bits.
    S16x128b,
    /// 16 lanes, 256 bits.
    S16x256b,
    /// 16 lanes, two halves at a column offset.
    S16x32bx2,
}

/// Fifth-generation tensor core.
#[derive(Clone, Debug)]
pub enum Tcgen {
    /// `alloc`.
    Alloc {
        /// Where the address goes.
        dst: Addr,
        /// Columns.
        cols: Src,
        /// CTAs.
        group: u8,
    },
    /// `dealloc`.
    Dealloc {
        /// Address.
        addr: Src,
        /// Columns.
        cols: Src,
        /// CTAs.
        group: u8,
    },
    /// `relinquish_alloc_permit`.
    Relinquish(u8),
    /// `mma`.
    Mma {
        /// CTAs.
        group: u8,
        /// Kind `tf32` (else `f16`).
        tf32: bool,
        /// Accumulator address.
        d: Addr,
        /// A: descriptor, or a tensor memory address.
        a: Src,
        /// A is in tensor memory.
        a_tmem: bool,
        /// Offset of that address.
        a_off: i64,
        /// Descriptor of B.
        b: Src,
        /// Instruction descriptor.
        idesc: Src,
        /// Keeps the accumulators where true.
        enable: PSrc,
        /// Power by which the accumulators shrink first.
        scale_d: u8,
        /// Lanes that stay as they are, 4 or 8 words.
        disable: Box<[Src]>,
    },
    /// `commit`.
    Commit {
        /// CTAs.
        group: u8,
        /// Barrier.
        bar: Addr,
        /// CTA mask.
        multicast: Option<Src>,
    },
    /// `ld`.
    Ld {
        /// Shape.
        shape: TmemShape,
        /// Repeats.
        num: u8,
        /// Two 16-bit columns per register.
        pack: bool,
        /// Destinations.
        d: Box<[Dst]>,
        /// Address.
        addr: Addr,
        /// Column offset of the second half (`16x32bx2`).
        half: u32,
    },
    /// `st`.
    St {
        /// Shape.
        shape: TmemShape,
        /// Repeats.
        num: u8,
        /// Two 16-bit columns per register.
        unpack: bool,
        /// Address.
        addr: Addr,
        /// Sources.
        values: Box<[Src]>,
        /// Column offset of the second half (`16x32bx2`).
        half: u32,
    },
    /// `wait::ld`.
    WaitLd,
    /// `wait::st`.
    WaitSt,
    /// `cp`.
    Cp {
        /// CTAs.
        group: u8,
        /// Shape.
        shape: CpShape,
        /// Destination.
        addr: Addr,
        /// Source descriptor.
        desc: Src,
    },
    /// `fence::before_thread_sync` or `fence::after_thread_sync`.
    Fence {
        /// The `before` form.
        before: bool,
    },
}

/// Shapes of `tcgen05.cp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpShape {
    /// 128 lanes, 256 bits.
    S128x256b,
    /// 4 lanes, 256 bits.
    S4x256b,
    /// 128 lanes, 128 bits.
    S128x128b,
    /// 64 lanes, 128 bits, copied to lanes 0-63 and 64-127 as the warp pairs say.
    S64x128b {
        /// `warpx2::02_13` (else `01_23`).
        x02_13: bool,
    },
    /// 32 lanes, 128 bits, to all four warps.
    S32x128b,
}

/// An operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// Nothing.
    Nop,
    /// Unary arithmetic.
    A1(F1, Dst, Src),
    /// Binary arithmetic.
    A2(F2, Dst, Src, Src),
    /// Ternary arithmetic.
    A3(F3, Dst, Src, Src, Src),
    /// `lop3`, with an optional predicate of the result.
    Lop3 {
        /// Destination.
        d: Dst,
        /// Predicate: result is nonzero, combined.
        p: Option<(u32, Bool, PSrc)>,
        /// Sources.
        s: [Src; 3],
        /// Truth table.
        lut: u8,
    },
    /// `bfi`.
    Bfi {
        /// Destination.
        d: Dst,
        /// Sources.
        s: [Src; 4],
        /// 64 bits.
        wide: bool,
    },
    /// Additions with carry.
    Carry {
        /// Destination.
        d: Dst,
        /// First.
        a: Src,
        /// Second.
        b: Src,
        /// Third, of `madc`/`mad.cc` low and high parts.
        mul: Option<(Src, bool)>,
        /// Subtracts.
        sub: bool,
        /// 64 bits.
        wide: bool,
        /// Adds the carry.
        use_cc: bool,
        /// Writes the carry.
        set_cc: bool,
    },
    /// `setp`.
    Setp {
        /// Comparison.
        f: Cmp,
        /// Destination.
        p: u32,
        /// Destination of the complement.
        q: u32,
        /// First.
        a: Src,
        /// Second.
        b: Src,
        /// Combined with a predicate.
        with: Option<(Bool, PSrc)>,
    },
    /// `setp` of two packed halves: one predicate each.
    SetpX2 {
        /// Comparison of one half.
        f: Cmp,
        /// Low half.
        p: u32,
        /// High half.
        q: u32,
        /// First.
        a: Src,
        /// Second.
        b: Src,
    },
    /// `set`.
    Set {
        /// Comparison.
        f: Cmp,
        /// Destination.
        d: Dst,
        /// First.
        a: Src,
        /// Second.
        b: Src,
        /// Value where true.
        ones: u64,
        /// Applies to both halves.
        x2: bool,
    },
    /// `selp`.
    Selp(Dst, Src, Src, PSrc),
    /// Logic of predicates.
    PLogic(Bool, u32, PSrc, PSrc),
    /// Copy of a predicate.
    PMov(u32, PSrc),
    /// Copy.
    Mov(Dst, Src),
    /// Parts into one register, low first; bits per part.
    Pack(Dst, Box<[Src]>, u16),
    /// One register into parts.
    Unpack(Box<[Dst]>, Src, u16),
    /// Special register.
    Sreg(Dst, SReg),
    /// Conversion.
    Cvt(Cvt, Dst, Src),
    /// Packing conversion.
    CvtPack(Cvt, Dst, Src, Src),
    /// Address of shared memory to generic, or back.
    CvtaShared {
        /// Destination.
        d: Dst,
        /// Source.
        a: Src,
        /// From generic.
        to: bool,
    },
    /// Address of local or parameter memory to generic, or back.
    CvtaWindow {
        /// Destination.
        d: Dst,
        /// Source.
        a: Src,
        /// From generic.
        to: bool,
        /// Local (else parameters).
        local: bool,
    },
    /// `isspacep`.
    Isspacep(u32, Src, Space, bool),
    /// `mapa`.
    Mapa {
        /// Destination.
        d: Dst,
        /// Address.
        a: Src,
        /// Rank.
        rank: Src,
        /// Generic address.
        generic: bool,
    },
    /// `getctarank`.
    GetCtaRank {
        /// Destination.
        d: Dst,
        /// Address.
        a: Src,
        /// Generic address.
        generic: bool,
    },
    /// Load.
    Ld {
        /// State space.
        space: Space,
        /// Destinations.
        d: Box<[Dst]>,
        /// Bytes of an element.
        bytes: u8,
        /// Bits to which it extends the sign; 0: fills with zeros.
        signed: u8,
        /// Address.
        addr: Addr,
        /// How it orders.
        strength: Strength,
    },
    /// Store.
    St {
        /// State space.
        space: Space,
        /// Values.
        v: Box<[Src]>,
        /// Bytes of an element.
        bytes: u8,
        /// Address.
        addr: Addr,
        /// How it orders.
        strength: Strength,
    },
    /// `atom` (with destinations) and `red`.
    Atom {
        /// State space.
        space: Space,
        /// Old values.
        d: Box<[Dst]>,
        /// Operation.
        f: AtomFn,
        /// Address.
        addr: Addr,
        /// Operands.
        b: Box<[Src]>,
        /// Third operand of `cas`.
        c: Src,
        /// How it orders.
        strength: Strength,
    },
    /// `shfl.sync`.
    Shfl {
        /// Mode.
        mode: ShflMode,
        /// Destination.
        d: Dst,
        /// Predicate: the source lane is valid.
        p: u32,
        /// Value.
        a: Src,
        /// Lane or offset.
        b: Src,
        /// Clamp and segments.
        c: Src,
        /// Members.
        mask: Src,
    },
    /// `vote.sync`.
    Vote {
        /// Mode.
        mode: VoteMode,
        /// Destination register (ballot) or predicate.
        d: u32,
        /// Predicate.
        p: PSrc,
        /// Members.
        mask: Src,
    },
    /// `match.sync`.
    Match {
        /// All (else any).
        all: bool,
        /// Destination.
        d: Dst,
        /// Predicate of `all`.
        p: u32,
        /// Value.
        a: Src,
        /// Members.
        mask: Src,
    },
    /// `redux.sync`.
    Redux {
        /// Fold of two values.
        f: fn(u64, u64) -> u64,
        /// Destination.
        d: Dst,
        /// Value.
        a: Src,
        /// Members.
        mask: Src,
    },
    /// `activemask`.
    Activemask(Dst),
    /// `elect.sync`.
    Elect {
        /// Leader lane.
        d: Dst,
        /// Is leader.
        p: u32,
        /// Members.
        mask: Src,
    },
    /// `bar.warp.sync`.
    WarpSync(Src),
    /// Branch.
    Bra(u32),
    /// Branch through a table.
    BrxIdx(Src, Box<[u32]>),
    /// `exit`, or `ret` of a kernel.
    Exit,
    /// `trap`.
    Trap,
    /// CTA barrier.
    Bar {
        /// What.
        kind: BarKind,
        /// All threads of the warp execute it together.
        aligned: bool,
        /// Barrier.
        id: Src,
        /// Threads, or all.
        count: Option<Src>,
    },
    /// `barrier.cluster.arrive`.
    ClusterArrive {
        /// Without release.
        relaxed: bool,
    },
    /// `barrier.cluster.wait`.
    ClusterWait,
    /// Fence.
    Fence(Fence),
    /// mbarrier at an address.
    Mbar(Mbar, Space, Addr),
    /// `mbarrier.pending_count`.
    MbarPending(Dst, Src),
    /// Copies.
    Copy(Copy),
    /// `tensormap.replace`.
    MapReplace {
        /// Field.
        field: MapField,
        /// State space.
        space: Space,
        /// Tensor map.
        addr: Addr,
        /// Value.
        v: Src,
    },
    /// `tensormap.cp_fenceproxy`: copies a tensor map from shared to global memory.
    MapCopy {
        /// Global.
        dst: Addr,
        /// Shared.
        src: Addr,
    },
    /// `ldmatrix`.
    Ldmatrix {
        /// Transposes.
        trans: bool,
        /// Destinations.
        d: Box<[Dst]>,
        /// Address.
        addr: Addr,
    },
    /// `stmatrix`.
    Stmatrix {
        /// Transposes.
        trans: bool,
        /// Values.
        v: Box<[Src]>,
        /// Address.
        addr: Addr,
    },
    /// `movmatrix.trans`.
    Movmatrix(Dst, Src),
    /// `mma.sync`.
    MmaSync(Box<MmaSync>),
    /// `wgmma.mma_async`.
    Wgmma(Box<Wgmma>),
    /// `wgmma.fence`.
    WgmmaFence,
    /// `wgmma.commit_group`.
    WgmmaCommit,
    /// `wgmma.wait_group`.
    WgmmaWait(u32),
    /// `setmaxnreg`.
    SetMaxNReg {
        /// Registers.
        n: u32,
        /// Raises.
        inc: bool,
    },
    /// `nanosleep`.
    Nanosleep(Src),
    /// `griddepcontrol`.
    Griddep,
    /// `clusterlaunchcontrol.try_cancel`.
    ClcTryCancel {
        /// Where the 16-byte answer goes.
        dst: Addr,
        /// Barrier.
        bar: Addr,
        /// To every CTA of the cluster.
        multicast: bool,
    },
    /// `clusterlaunchcontrol.query_cancel.is_canceled`.
    ClcIsCanceled(u32, [Src; 2]),
    /// `clusterlaunchcontrol.query_cancel.get_first_ctaid`; a single dimension has one destination.
    ClcFirstCta(Box<[Dst]>, [Src; 2], u8),
    /// Fifth-generation tensor core.
    Tcgen(Tcgen),
}

/// What one round of a wait loop costs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Poll {
    /// Warp instructions by class, the branch back among them.
    pub by_class: [u64; CLASSES],
    /// Instructions that every lane of the loop executes.
    pub unguarded: u64,
    /// Bytes that a lane loads from global memory.
    pub global: u64,
    /// Bytes that a lane loads from shared memory.
    pub shared: u64,
    /// Loads from shared memory.
    pub shared_loads: u64,
}

/// A kernel ready to run.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Name.
    pub name: String,
    /// Instructions.
    pub code: Vec<Inst>,
    /// For each instruction, where diverged lanes meet again after a branch at it; [`NONE`] if only at exit.
    pub reconverge: Vec<u32>,
    /// For each branch that closes a loop which only waits, what a round of it costs.
    pub polls: Vec<Option<Box<Poll>>>,
    /// Registers that each instruction uses: bit 31 marks a write; see `use_start`.
    pub uses: Vec<u32>,
    /// Where the uses of each instruction begin, and a last entry.
    pub use_start: Vec<u32>,
    /// Registers.
    pub regs: u32,
    /// Predicates.
    pub preds: u32,
    /// Local bytes per thread.
    pub local_bytes: u32,
    /// Statically shared bytes, from the start of the CTA's window.
    pub static_shared: u32,
    /// Alignment of dynamic shared memory.
    pub dynamic_align: u32,
    /// Offset of dynamic shared memory.
    pub dynamic_offset: u32,
    /// Parameters: name, offset, size, alignment.
    pub params: Vec<Param>,
    /// Bytes of all parameters.
    pub param_bytes: u32,
    /// `.reqntid`.
    pub reqntid: Option<[u32; 3]>,
    /// `.maxntid`.
    pub maxntid: Option<[u32; 3]>,
    /// `.reqnctapercluster`.
    pub reqnctapercluster: Option<[u32; 3]>,
}

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Name.
    pub name: String,
    /// Offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

impl Op {
    /// Calls `f(register, written)` for each register that the operation uses.
    pub(crate) fn visit(&self, mut f: impl FnMut(u32, bool)) {
        let mut reads: Vec<Src> = vec![];
        let mut writes: Vec<Dst> = vec![];
        match self {
            Op::Nop
            | Op::PLogic(..)
            | Op::PMov(..)
            | Op::Bra(_)
            | Op::Exit
            | Op::Trap
            | Op::ClusterArrive { .. }
            | Op::ClusterWait
            | Op::Fence(_)
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait(_)
            | Op::SetMaxNReg { .. }
            | Op::Griddep => {}
            Op::A1(_, d, a) | Op::Mov(d, a) | Op::Cvt(_, d, a) | Op::MbarPending(d, a) | Op::Movmatrix(d, a) => {
                writes.push(*d);
                reads.push(*a);
            }
            Op::A2(_, d, a, b) | Op::CvtPack(_, d, a, b) | Op::Selp(d, a, b, _) => {
                writes.push(*d);
                reads.extend([*a, *b]);
            }
            Op::A3(_, d, a, b, c) => {
                writes.push(*d);
                reads.extend([*a, *b, *c]);
            }
            Op::Lop3 { d, s, .. } => {
                writes.push(*d);
                reads.extend(s);
            }
            Op::Bfi { d, s, .. } => {
                writes.push(*d);
                reads.extend(s);
            }
            Op::Carry { d, a, b, mul, .. } => {
                writes.push(*d);
                reads.extend([*a, *b]);
                reads.extend(mul.map(|m| m.0));
            }
            Op::Setp { a, b, .. } | Op::SetpX2 { a, b, .. } => reads.extend([*a, *b]),
            Op::Set { d, a, b, .. } => {
                writes.push(*d);
                reads.extend([*a, *b]);
            }
            Op::Pack(d, s, _) => {
                writes.push(*d);
                reads.extend(s.iter());
            }
            Op::Unpack(d, s, _) => {
                writes.extend(d.iter());
                reads.push(*s);
            }
            Op::Sreg(d, _) | Op::Activemask(d) => writes.push(*d),
            Op::CvtaShared { d, a, .. } | Op::CvtaWindow { d, a, .. } | Op::GetCtaRank { d, a, .. } => {
                writes.push(*d);
                reads.push(*a);
            }
            Op::Isspacep(_, a, ..) => reads.push(*a),
            Op::Mapa { d, a, rank, .. } => {
                writes.push(*d);
                reads.extend([*a, *rank]);
            }
            Op::Ld { d, addr, .. } | Op::Ldmatrix { d, addr, .. } => {
                writes.extend(d.iter());
                reads.push(addr.base);
            }
            Op::St { v, addr, .. } | Op::Stmatrix { v, addr, .. } => {
                reads.extend(v.iter());
                reads.push(addr.base);
            }
            Op::Atom { d, addr, b, c, .. } => {
                writes.extend(d.iter());
                reads.extend(b.iter());
                reads.extend([addr.base, *c]);
            }
            Op::Shfl { d, a, b, c, mask, .. } => {
                writes.push(*d);
                reads.extend([*a, *b, *c, *mask]);
            }
            Op::Vote { mode, d, mask, .. } => {
                if *mode == VoteMode::Ballot {
                    writes.push(*d);
                }
                reads.push(*mask);
            }
            Op::Match { d, a, mask, .. } | Op::Redux { d, a, mask, .. } => {
                writes.push(*d);
                reads.extend([*a, *mask]);
            }
            Op::Elect { d, mask, .. } => {
                writes.push(*d);
                reads.push(*mask);
            }
            Op::WarpSync(m) => reads.push(*m),
            Op::BrxIdx(s, _) | Op::Nanosleep(s) => reads.push(*s),
            Op::Bar { kind, id, count, .. } => {
                if let BarKind::RedPopc(d, _) = kind {
                    writes.push(*d);
                }
                reads.push(*id);
                reads.extend(*count);
            }
            Op::Mbar(m, _, a) => {
                reads.push(a.base);
                match m {
                    Mbar::Init(s) | Mbar::ExpectTx(s) | Mbar::CompleteTx(s) => reads.push(*s),
                    Mbar::Inval => {}
                    Mbar::Arrive { d, count, expect, .. } => {
                        writes.push(*d);
                        reads.push(*count);
                        reads.extend(*expect);
                    }
                    Mbar::Wait { phase, .. } => reads.push(*phase),
                }
            }
            Op::Copy(c) => match c {
                Copy::Element { dst, src, src_bytes, .. } => {
                    reads.extend([dst.base, src.base]);
                    reads.extend(*src_bytes);
                }
                Copy::Commit | Copy::Wait(_) | Copy::BulkCommit | Copy::BulkWait { .. } | Copy::Prefetch => {}
                Copy::MbarArrive { bar, .. } => reads.push(bar.base),
                Copy::BulkLoad { dst, src, bytes, bar, multicast } => {
                    reads.extend([dst.base, src.base, *bytes, bar.base]);
                    reads.extend(*multicast);
                }
                Copy::BulkCluster { dst, src, bytes, bar, .. } => reads.extend([dst.base, src.base, *bytes, bar.base]),
                Copy::BulkStore { dst, src, bytes, .. } => reads.extend([dst.base, src.base, *bytes]),
                Copy::TensorLoad { dst, map, coords, bar, multicast } => {
                    reads.extend([dst.base, map.base, bar.base]);
                    reads.extend(coords.iter());
                    reads.extend(*multicast);
                }
                Copy::TensorStore { map, coords, src, .. } => {
                    reads.extend([map.base, src.base]);
                    reads.extend(coords.iter());
                }
                Copy::StoreAsync { dst, values, bar, .. } => {
                    reads.extend([dst.base, bar.base]);
                    reads.extend(values.iter());
                }
            },
            Op::MapReplace { addr, v, .. } => reads.extend([addr.base, *v]),
            Op::MapCopy { dst, src } => reads.extend([dst.base, src.base]),
            Op::MmaSync(m) => {
                writes.extend(m.d.iter());
                reads.extend(m.a.iter().chain(m.b.iter()).chain(m.c.iter()));
            }
            Op::Wgmma(g) => {
                writes.extend(g.d.iter());
                match &g.a {
                    WgmmaA::Desc(s) => reads.push(*s),
                    WgmmaA::Regs(s) => reads.extend(s),
                }
                reads.push(g.b);
            }
            Op::ClcTryCancel { dst, bar, .. } => reads.extend([dst.base, bar.base]),
            Op::ClcIsCanceled(_, h) => reads.extend(h),
            Op::ClcFirstCta(d, h, _) => {
                writes.extend(d.iter());
                reads.extend(h);
            }
            Op::Tcgen(t) => match t {
                Tcgen::Alloc { dst, cols, .. } => reads.extend([dst.base, *cols]),
                Tcgen::Dealloc { addr, cols, .. } => reads.extend([*addr, *cols]),
                Tcgen::Relinquish(_) | Tcgen::WaitLd | Tcgen::WaitSt | Tcgen::Fence { .. } => {}
                Tcgen::Mma { d, a, b, idesc, disable, .. } => {
                    reads.extend([d.base, *a, *b, *idesc]);
                    reads.extend(disable.iter());
                }
                Tcgen::Commit { bar, multicast, .. } => {
                    reads.push(bar.base);
                    reads.extend(*multicast);
                }
                Tcgen::Ld { d, addr, .. } => {
                    writes.extend(d.iter());
                    reads.push(addr.base);
                }
                Tcgen::St { addr, values, .. } => {
                    reads.push(addr.base);
                    reads.extend(values.iter());
                }
                Tcgen::Cp { addr, desc, .. } => reads.extend([addr.base, *desc]),
            },
        }
        for s in reads {
            if let Src::Reg(r) = s {
                f(r, false);
            }
        }
        for d in writes {
            if d != NONE {
                f(d, true);
            }
        }
    }
}
