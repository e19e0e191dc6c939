//! Lowers a kernel from the syntax tree to the form that runs: names become numbers, calls are expanded in place,
//! opcodes are decoded once, and the meeting points of diverging branches are computed.

mod cfg;
mod decode;
mod polls;

use crate::ir::{Addr, Class, Dst, Inst, Kernel, NONE, Op, PSrc, Param, Src};
use crate::ptx::{Ast, Function, Operand, PtxError, RawInst, Space, Stmt, Ty, TyKind, Var};
use std::collections::HashMap;

/// Bytes at the start of every CTA's shared window that belong to the system, as on the hardware.
pub const RESERVED_SHARED: u32 = 1024;

/// Addresses of module-scope variables in device memory.
pub type Symbols = HashMap<String, u64>;

#[derive(Clone, Debug)]
enum Bind {
    Reg(Ty),
    Sym(Space, u64),
    Label(u32),
    Targets(Vec<String>),
}

type Res<T> = Result<T, PtxError>;

/// Lowers the kernel `f` of `ast`.
///
/// # Errors
/// [`PtxError`] naming the first statement that the simulator does not know.
pub fn lower(ast: &Ast, f: &Function, symbols: &Symbols) -> Res<Kernel> {
    let mut lw = Lower {
        ast,
        symbols,
        code: vec![],
        labels: vec![],
        scopes: vec![],
        regs: HashMap::new(),
        n_regs: 0,
        n_preds: 0,
        local: 0,
        shared: RESERVED_SHARED,
        shared_align: 16,
        shared_syms: HashMap::new(),
        depth: 0,
        serial: 0,
        ret: None,
    };
    let mut params = vec![];
    let mut offset = 0u32;
    let mut root = HashMap::new();
    for p in &f.params {
        offset = offset.next_multiple_of(p.align.max(1) as u32);
        params.push(Param { name: p.name.clone(), offset, size: p.size as u32 });
        root.insert(p.name.clone(), Bind::Sym(Space::Param, u64::from(offset)));
        offset += p.size as u32;
    }
    // Shared variables at module scope first, then those of the body.
    for v in ast.vars.iter().filter(|v| v.space == Space::Shared && !v.is_extern) {
        let at = lw.alloc_shared(v);
        lw.shared_syms.insert(v.name.clone(), at);
    }
    lw.scopes.push(root);
    lw.measure_shared(&f.body);
    lw.body(&f.body)?;
    lw.push(Op::Exit, Class::Control, PSrc::TRUE, 0);
    let mut dynamic_align = 16;
    for v in ast.vars.iter().filter(|v| v.space == Space::Shared && v.is_extern) {
        dynamic_align = dynamic_align.max(v.align as u32);
    }
    let labels = std::mem::take(&mut lw.labels);
    let mut code = lw.code;
    for inst in &mut code {
        match &mut inst.op {
            Op::Bra(t) => *t = labels[*t as usize],
            Op::BrxIdx(_, ts) => ts.iter_mut().for_each(|t| *t = labels[*t as usize]),
            _ => {}
        }
        if let Op::Bra(NONE) = inst.op {
            return Err(PtxError {
                line: inst.line,
                message: "branch to a label that does not exist".into(),
                text: f.name.clone(),
            });
        }
    }
    let reconverge = cfg::reconvergence(&code);
    let (mut uses, mut use_start) = (vec![], vec![0]);
    for inst in &code {
        inst.op.visit(|r, write| uses.push(r | u32::from(write) << 31));
        use_start.push(uses.len() as u32);
    }
    let mut kernel = Kernel {
        name: f.name.clone(),
        reconverge,
        polls: vec![],
        code,
        uses,
        use_start,
        regs: lw.n_regs,
        preds: lw.n_preds,
        local_bytes: lw.local.next_multiple_of(16),
        static_shared: lw.shared - RESERVED_SHARED,
        dynamic_align,
        dynamic_offset: lw.shared.next_multiple_of(dynamic_align),
        param_bytes: offset,
        params,
        reqntid: f.reqntid,
        maxntid: f.maxntid,
        reqnctapercluster: f.reqnctapercluster,
    };
    kernel.polls = polls::find(&kernel);
    Ok(kernel)
}

struct Lower<'a> {
    ast: &'a Ast,
    symbols: &'a Symbols,
    code: Vec<Inst>,
    /// Instruction index of each label.
    labels: Vec<u32>,
    scopes: Vec<HashMap<String, Bind>>,
    /// Registers that were used, by the serial number of their scope and name.
    regs: HashMap<(usize, String), Dst>,
    n_regs: u32,
    n_preds: u32,
    local: u32,
    shared: u32,
    shared_align: u32,
    shared_syms: HashMap<String, u32>,
    depth: u32,
    serial: usize,
    /// Where `ret` goes inside an expanded call.
    ret: Option<u32>,
}

impl Lower<'_> {
    fn push(&mut self, op: Op, class: Class, guard: PSrc, line: u32) {
        self.code.push(Inst { guard, op, line, class });
    }

    fn alloc_shared(&mut self, v: &Var) -> u32 {
        let a = v.align.max(1) as u32;
        self.shared = self.shared.next_multiple_of(a);
        self.shared_align = self.shared_align.max(a);
        let at = self.shared;
        self.shared += v.size as u32;
        at
    }

    /// Places the shared variables of a body before its instructions need them (and the dynamic offset).
    fn measure_shared(&mut self, body: &[Stmt]) {
        let mut vars = vec![];
        fn walk<'s>(body: &'s [Stmt], out: &mut Vec<&'s Var>) {
            for s in body {
                match s {
                    Stmt::Var(v) if v.space == Space::Shared && !v.is_extern => out.push(v),
                    Stmt::Scope(b) => walk(b, out),
                    _ => {}
                }
            }
        }
        walk(body, &mut vars);
        // Widest alignment first wastes least.
        vars.sort_by_key(|v| std::cmp::Reverse(v.align));
        for v in vars {
            if !self.shared_syms.contains_key(&v.name) {
                let at = self.alloc_shared(v);
                self.shared_syms.insert(v.name.clone(), at);
            }
        }
    }

    fn dynamic_offset(&self) -> u32 {
        let align = self
            .ast
            .vars
            .iter()
            .filter(|v| v.space == Space::Shared && v.is_extern)
            .map(|v| v.align as u32)
            .fold(16, u32::max);
        self.shared.next_multiple_of(align)
    }

    fn new_label(&mut self) -> u32 {
        self.labels.push(NONE);
        self.labels.len() as u32 - 1
    }

    fn body(&mut self, stmts: &[Stmt]) -> Res<()> {
        let mut scope = HashMap::new();
        for s in stmts {
            if let Stmt::Label(name) = s {
                let id = self.new_label();
                scope.insert(name.clone(), Bind::Label(id));
            }
            if let Stmt::BranchTargets(name, t) = s {
                scope.insert(name.clone(), Bind::Targets(t.clone()));
            }
        }
        self.serial += 1;
        scope.insert("\0serial".into(), Bind::Label(self.serial as u32));
        self.scopes.push(scope);
        for s in stmts {
            match s {
                Stmt::Reg(ty, names) => {
                    let scope = self.scopes.last_mut().expect("a scope is open");
                    for (name, count) in names {
                        match count {
                            Some(n) => {
                                for i in 0..*n {
                                    scope.insert(format!("{name}{i}"), Bind::Reg(*ty));
                                }
                            }
                            None => {
                                scope.insert(name.clone(), Bind::Reg(*ty));
                            }
                        }
                    }
                }
                Stmt::Var(v) => self.var(v),
                Stmt::Label(name) => {
                    let Some(Bind::Label(id)) = self.scopes.last().and_then(|s| s.get(name)) else {
                        unreachable!("labels were collected above")
                    };
                    self.labels[*id as usize] = self.code.len() as u32;
                }
                Stmt::BranchTargets(..) => {}
                Stmt::Inst(i) => self.inst(i)?,
                Stmt::Scope(b) => self.body(b)?,
            }
        }
        self.scopes.pop();
        Ok(())
    }

    fn var(&mut self, v: &Var) {
        let bind = match v.space {
            Space::Shared if v.is_extern => return,
            Space::Shared => Bind::Sym(Space::Shared, u64::from(self.shared_syms[&v.name])),
            // Arguments of calls live with the thread's local variables.
            _ => {
                self.local = self.local.next_multiple_of(v.align.max(1) as u32);
                let at = self.local;
                self.local += v.size as u32;
                Bind::Sym(Space::Local, u64::from(at))
            }
        };
        self.scopes.last_mut().expect("a scope is open").insert(v.name.clone(), bind);
    }

    fn lookup(&self, name: &str) -> Option<(usize, Bind)> {
        for s in self.scopes.iter().rev() {
            if let Some(b) = s.get(name) {
                let serial = match s.get("\0serial") {
                    Some(Bind::Label(n)) => *n as usize,
                    _ => 0,
                };
                return Some((serial, b.clone()));
            }
        }
        if let Some(&at) = self.shared_syms.get(name) {
            return Some((0, Bind::Sym(Space::Shared, u64::from(at))));
        }
        let v = self.ast.vars.iter().find(|v| v.name == name)?;
        if v.space == Space::Shared {
            return Some((0, Bind::Sym(Space::Shared, u64::from(self.dynamic_offset()))));
        }
        self.symbols.get(name).map(|&a| (0, Bind::Sym(v.space, a)))
    }

    fn fresh(&mut self) -> Dst {
        self.n_regs += 1;
        self.n_regs - 1
    }

    /// Register by name; a predicate gets its number in the predicate file, a 128-bit register the first of two.
    fn reg(&mut self, name: &str) -> Option<(Dst, Ty)> {
        let (serial, bind) = self.lookup(name)?;
        let Bind::Reg(ty) = bind else { return None };
        let key = (serial, name.to_string());
        if let Some(&id) = self.regs.get(&key) {
            return Some((id, ty));
        }
        let id = if ty.kind == TyKind::Pred {
            self.n_preds += 1;
            self.n_preds - 1
        } else {
            let id = self.fresh();
            if ty.bits == 128 {
                self.fresh();
            }
            id
        };
        self.regs.insert(key, id);
        Some((id, ty))
    }

    fn call(&mut self, i: &RawInst, guard: PSrc) -> Res<()> {
        let (rets, name, args) = match i.operands.as_slice() {
            [Operand::Group(r), Operand::Name(n), Operand::Group(a), ..] => (r.clone(), n, a.clone()),
            [Operand::Group(r), Operand::Name(n)] => (r.clone(), n, vec![]),
            [Operand::Name(n), Operand::Group(a), ..] => (vec![], n, a.clone()),
            [Operand::Name(n)] => (vec![], n, vec![]),
            _ => return Err(err(i, "calls other than of a named function are not supported")),
        };
        let Some(f) = self.ast.functions.iter().find(|f| f.name == *name && f.has_body) else {
            return Err(err(i, "call of a function that this module does not define"));
        };
        if self.depth >= 32 {
            return Err(err(i, "recursive calls are not supported"));
        }
        let mut root = HashMap::new();
        for (formal, actual) in f.params.iter().zip(&args).chain(f.returns.iter().zip(&rets)) {
            let Operand::Name(a) = actual else { return Err(err(i, "call arguments must be .param variables")) };
            match self.lookup(a) {
                Some((_, b @ Bind::Sym(Space::Local, _))) => root.insert(formal.name.clone(), b),
                _ => return Err(err(i, "call arguments must be .param variables")),
            };
        }
        let end = self.new_label();
        if guard.id != NONE {
            self.push(Op::Bra(end), Class::Control, PSrc { id: guard.id, neg: !guard.neg }, i.line);
        }
        let saved = std::mem::replace(&mut self.scopes, vec![root]);
        let ret = self.ret.replace(end);
        self.depth += 1;
        self.measure_shared(&f.body);
        let f = f.clone();
        let r = self.body(&f.body);
        self.depth -= 1;
        self.ret = ret;
        self.scopes = saved;
        self.labels[end as usize] = self.code.len() as u32;
        r
    }

    fn label(&mut self, i: &RawInst, op: &Operand) -> Res<u32> {
        let Operand::Name(n) = op else { return Err(err(i, "expected a label")) };
        match self.lookup(n) {
            Some((_, Bind::Label(id))) => Ok(id),
            _ => Err(err(i, format!("unknown label {n}"))),
        }
    }

    fn targets(&mut self, i: &RawInst, op: &Operand) -> Res<Vec<u32>> {
        let Operand::Name(n) = op else { return Err(err(i, "expected a list of branch targets")) };
        match self.lookup(n) {
            Some((_, Bind::Targets(t))) => t.iter().map(|t| self.label(i, &Operand::Name(t.clone()))).collect(),
            _ => Err(err(i, format!("unknown branch targets {n}"))),
        }
    }

    /// A source of `bits` width.
    fn src(&mut self, i: &RawInst, op: &Operand, ty: Ty) -> Res<Src> {
        match op {
            Operand::Int(v) => {
                if ty.is_float() && ty.bits == 32 {
                    return Ok(Src::Imm(u64::from((*v as f32).to_bits())));
                }
                Ok(Src::Imm(*v as u64))
            }
            Operand::Float(b, w) => Ok(Src::Imm(match (w, ty.bits) {
                (64, 32) => u64::from((f64::from_bits(*b) as f32).to_bits()),
                (32, 64) => f64::from(f32::from_bits(*b as u32)).to_bits(),
                _ => *b,
            })),
            Operand::Name(n) => {
                if let Some(s) = decode::sreg(n) {
                    let d = self.fresh();
                    self.push(Op::Sreg(d, s), Class::Move, PSrc::TRUE, i.line);
                    return Ok(Src::Reg(d));
                }
                if n == "WARP_SZ" {
                    return Ok(Src::Imm(32));
                }
                if let Some((id, t)) = self.reg(n) {
                    if t.kind == TyKind::Pred {
                        return Err(err(i, format!("predicate {n} where a value is needed")));
                    }
                    return Ok(Src::Reg(id));
                }
                self.symbol(i, n, 0).map(|s| s.0)
            }
            Operand::Offset(b, o) => match &**b {
                Operand::Name(n) => self.symbol(i, n, *o).map(|s| s.0),
                _ => Err(err(i, "offset of something that is not a variable")),
            },
            _ => Err(err(i, "operand form that is not a value")),
        }
    }

    fn symbol(&mut self, i: &RawInst, name: &str, off: i64) -> Res<(Src, Space)> {
        match self.lookup(name) {
            Some((_, Bind::Sym(Space::Shared, a))) => Ok((Src::Shared((a as i64 + off) as u32), Space::Shared)),
            Some((_, Bind::Sym(s, a))) => Ok((Src::Imm((a as i64 + off) as u64), s)),
            _ => Err(err(i, format!("unknown name {name}"))),
        }
    }

    fn dst(&mut self, i: &RawInst, op: &Operand) -> Res<Dst> {
        match op {
            Operand::Name(n) if n == "_" => Ok(NONE),
            Operand::Name(n) => match self.reg(n) {
                Some((id, t)) if t.kind != TyKind::Pred => Ok(id),
                _ => Err(err(i, format!("{n} is not a register"))),
            },
            _ => Err(err(i, "destination is not a register")),
        }
    }

    /// Width of the (first) register of an operand; 32 for what is none.
    fn register_bits(&mut self, op: &Operand) -> u8 {
        match op {
            Operand::Name(n) => self.reg(n).map_or(32, |(_, t)| t.bits.clamp(32, 64) as u8),
            Operand::Vector(v) => {
                v.iter().find(|o| !matches!(o, Operand::Name(n) if n == "_")).map_or(32, |o| self.register_bits(o))
            }
            _ => 32,
        }
    }

    fn pdst(&mut self, i: &RawInst, op: &Operand) -> Res<u32> {
        match op {
            Operand::Name(n) if n == "_" => Ok(NONE),
            Operand::Name(n) => match self.reg(n) {
                Some((id, t)) if t.kind == TyKind::Pred => Ok(id),
                _ => Err(err(i, format!("{n} is not a predicate"))),
            },
            _ => Err(err(i, "destination is not a predicate")),
        }
    }

    fn psrc(&mut self, i: &RawInst, op: &Operand) -> Res<PSrc> {
        match op {
            Operand::Int(v) => Ok(if *v != 0 { PSrc::TRUE } else { PSrc::FALSE }),
            Operand::Not(x) => {
                let p = self.psrc(i, x)?;
                Ok(PSrc { neg: !p.neg, ..p })
            }
            _ => Ok(PSrc { id: self.pdst(i, op)?, neg: false }),
        }
    }

    /// `[base + off]` and the space that its base names, if it names one.
    fn addr(&mut self, i: &RawInst, op: &Operand) -> Res<(Addr, Option<Space>)> {
        let Operand::Mem { base, offset, .. } = op else { return Err(err(i, "expected an address")) };
        match &**base {
            Operand::Int(v) => Ok((Addr { base: Src::Imm(*v as u64), off: *offset }, None)),
            Operand::Name(n) => {
                if let Some((id, _)) = self.reg(n) {
                    return Ok((Addr { base: Src::Reg(id), off: *offset }, None));
                }
                let (s, space) = self.symbol(i, n, *offset)?;
                Ok((Addr { base: s, off: 0 }, Some(space)))
            }
            _ => Err(err(i, "address form that is not supported")),
        }
    }

    fn srcs(&mut self, i: &RawInst, op: &Operand, ty: Ty) -> Res<Vec<Src>> {
        match op {
            Operand::Vector(v) => v.iter().map(|o| self.src(i, o, ty)).collect(),
            Operand::Name(n) if ty.bits == 128 => match self.reg(n) {
                Some((id, _)) => Ok(vec![Src::Reg(id), Src::Reg(id + 1)]),
                None => Err(err(i, format!("{n} is not a register"))),
            },
            _ => Ok(vec![self.src(i, op, ty)?]),
        }
    }

    fn dsts(&mut self, i: &RawInst, op: &Operand, ty: Ty) -> Res<Vec<Dst>> {
        match op {
            Operand::Vector(v) => v.iter().map(|o| self.dst(i, o)).collect(),
            _ if ty.bits == 128 => {
                let d = self.dst(i, op)?;
                Ok(if d == NONE { vec![NONE, NONE] } else { vec![d, d + 1] })
            }
            _ => Ok(vec![self.dst(i, op)?]),
        }
    }
}

fn err(i: &RawInst, message: impl Into<String>) -> PtxError {
    PtxError { line: i.line, message: message.into(), text: i.text.clone() }
}
