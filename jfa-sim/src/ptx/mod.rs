//! PTX text: lexer, syntax tree and parser.
//!
//! The parser knows the grammar (directives, scopes, operands) and nothing about opcodes; what an opcode
//! means is decided when a kernel is lowered to the instruction form that the executor runs
//! (see [`crate::lower`]).

mod lexer;
mod parser;

pub use parser::parse;

/// Where a variable lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Resolved per access from the address.
    Generic,
    /// Device memory.
    Global,
    /// Read-only device memory of a module.
    Const,
    /// Memory of a CTA (or, with a rank in the upper address bits, of a CTA of the cluster).
    Shared,
    /// Memory of one thread.
    Local,
    /// Kernel parameters, or arguments of a call.
    Param,
}

/// A scalar type of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ty {
    /// What the bits mean.
    pub kind: TyKind,
    /// Width in bits; predicates have 1.
    pub bits: u16,
}

/// The meaning of the bits of a [`Ty`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TyKind {
    /// Untyped bits.
    Bits,
    /// Unsigned integer.
    Unsigned,
    /// Signed integer.
    Signed,
    /// IEEE float of that width.
    Float,
    /// Two f16 in 32 bits.
    F16x2,
    /// bfloat16.
    Bf16,
    /// Two bfloat16 in 32 bits.
    Bf16x2,
    /// Two f32 in 64 bits.
    F32x2,
    /// TensorFloat-32 in 32 bits.
    Tf32,
    /// Predicate.
    Pred,
}

impl Ty {
    /// Parses a type suffix without its dot, such as `u32` or `bf16x2`.
    pub fn parse(s: &str) -> Option<Ty> {
        use TyKind::*;
        let (kind, bits) = match s {
            "b8" => (Bits, 8),
            "b16" => (Bits, 16),
            "b32" => (Bits, 32),
            "b64" => (Bits, 64),
            "b128" => (Bits, 128),
            "u8" => (Unsigned, 8),
            "u16" => (Unsigned, 16),
            "u32" => (Unsigned, 32),
            "u64" => (Unsigned, 64),
            "s8" => (Signed, 8),
            "s16" => (Signed, 16),
            "s32" => (Signed, 32),
            "s64" => (Signed, 64),
            "f16" => (Float, 16),
            "f32" => (Float, 32),
            "f64" => (Float, 64),
            "f16x2" => (F16x2, 32),
            "bf16" => (Bf16, 16),
            "bf16x2" => (Bf16x2, 32),
            "f32x2" => (F32x2, 64),
            "tf32" => (Tf32, 32),
            "pred" => (Pred, 1),
            _ => return None,
        };
        Some(Ty { kind, bits })
    }

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        usize::from(self.bits).div_ceil(8)
    }

    /// Whether this is a floating-point type of one element.
    pub fn is_float(self) -> bool {
        matches!(self.kind, TyKind::Float | TyKind::Bf16 | TyKind::Tf32)
    }

    /// Whether this is a signed integer.
    pub fn is_signed(self) -> bool {
        self.kind == TyKind::Signed
    }
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A name: register, special register, variable, label or function.
    Name(String),
    /// An integer literal.
    Int(i128),
    /// A floating-point literal: value bits and width (32 or 64).
    Float(u64, u16),
    /// `{a, b, ...}`.
    Vector(Vec<Operand>),
    /// `[base + offset, extra...]`; a tensor coordinate list is one extra operand.
    Mem {
        /// Register or variable name, or an absolute address.
        base: Box<Operand>,
        /// Byte offset.
        offset: i64,
        /// Operands after a comma inside the brackets.
        extra: Vec<Operand>,
    },
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `!a`.
    Not(Box<Operand>),
    /// `name + offset` outside brackets.
    Offset(Box<Operand>, i64),
    /// `(a, b)` of a call.
    Group(Vec<Operand>),
}

/// A variable declaration.
#[derive(Clone, Debug)]
pub struct Var {
    /// Name as written.
    pub name: String,
    /// State space.
    pub space: Space,
    /// Element type.
    pub ty: Ty,
    /// Alignment in bytes.
    pub align: usize,
    /// Size in bytes; 0 for an `extern` array without bound.
    pub size: usize,
    /// Initial bytes, empty when there is none.
    pub init: Vec<u8>,
    /// Declared `.extern`.
    pub is_extern: bool,
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub struct RawInst {
    /// Guard predicate name and whether it is negated.
    pub guard: Option<(String, bool)>,
    /// Opcode and modifiers, split at the dots; `shared::cta` stays one part.
    pub parts: Vec<String>,
    /// Operands.
    pub operands: Vec<Operand>,
    /// Source line, counted from 1.
    pub line: u32,
    /// Text of the statement, for messages.
    pub text: String,
}

/// One statement of a body.
#[derive(Clone, Debug)]
pub enum Stmt {
    /// `.reg` declaration: names with their type; a count makes `name0 .. name(count-1)`.
    Reg(Ty, Vec<(String, Option<u32>)>),
    /// A variable declared inside the body.
    Var(Var),
    /// A label.
    Label(String),
    /// `label: .branchtargets a, b;`
    BranchTargets(String, Vec<String>),
    /// An instruction.
    Inst(RawInst),
    /// A nested scope.
    Scope(Vec<Stmt>),
}

/// A kernel or device function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Name.
    pub name: String,
    /// Whether it is a kernel.
    pub is_entry: bool,
    /// Return parameters (device functions).
    pub returns: Vec<Var>,
    /// Formal parameters.
    pub params: Vec<Var>,
    /// Body; empty for a declaration.
    pub body: Vec<Stmt>,
    /// `.reqntid`, when given.
    pub reqntid: Option<[u32; 3]>,
    /// `.maxntid`, when given.
    pub maxntid: Option<[u32; 3]>,
    /// `.reqnctapercluster`, when given.
    pub reqnctapercluster: Option<[u32; 3]>,
    /// Whether the function has a body.
    pub has_body: bool,
}

/// A parsed module.
#[derive(Clone, Debug, Default)]
pub struct Ast {
    /// `.target`, for example `sm_90a`.
    pub target: String,
    /// `.version`.
    pub version: String,
    /// Variables at module scope.
    pub vars: Vec<Var>,
    /// Kernels and device functions.
    pub functions: Vec<Function>,
}

/// A problem in PTX text.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("PTX line {line}: {message}: `{text}`")]
pub struct PtxError {
    /// Source line, counted from 1.
    pub line: u32,
    /// What is wrong.
    pub message: String,
    /// The text it is about.
    pub text: String,
}
