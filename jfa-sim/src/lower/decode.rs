//! Decodes one instruction.

use super::{Lower, Res, err};
use crate::alu::{self, Alu, Cvt};
use crate::ir::*;
use crate::order::Strength;
use crate::ptx::{Operand, RawInst, Space, Ty, TyKind};
use crate::{atomics, num};

const B16: Ty = Ty { kind: TyKind::Bits, bits: 16 };
const B32: Ty = Ty { kind: TyKind::Bits, bits: 32 };
const B64: Ty = Ty { kind: TyKind::Bits, bits: 64 };
const B128: Ty = Ty { kind: TyKind::Bits, bits: 128 };

/// Special register by name.
pub(super) fn sreg(name: &str) -> Option<SReg> {
    let (base, dim) = match name.split_once('.') {
        Some((b, "x")) => (b, 0u8),
        Some((b, "y")) => (b, 1),
        Some((b, "z")) => (b, 2),
        Some(_) => return None,
        None => (name, 0),
    };
    Some(match base {
        "%tid" => SReg::Tid(dim),
        "%ntid" => SReg::Ntid(dim),
        "%ctaid" => SReg::Ctaid(dim),
        "%nctaid" => SReg::Nctaid(dim),
        "%clusterid" => SReg::Clusterid(dim),
        "%nclusterid" => SReg::Nclusterid(dim),
        "%cluster_ctaid" => SReg::ClusterCtaid(dim),
        "%cluster_nctaid" => SReg::ClusterNctaid(dim),
        "%cluster_ctarank" => SReg::ClusterCtarank,
        "%cluster_nctarank" => SReg::ClusterNctarank,
        "%is_explicit_cluster" => SReg::IsExplicitCluster,
        "%laneid" => SReg::Laneid,
        "%warpid" => SReg::Warpid,
        "%nwarpid" => SReg::Nwarpid,
        "%smid" => SReg::Smid,
        "%nsmid" => SReg::Nsmid,
        "%gridid" => SReg::Gridid,
        "%lanemask_eq" => SReg::Lanemask(0),
        "%lanemask_lt" => SReg::Lanemask(1),
        "%lanemask_le" => SReg::Lanemask(2),
        "%lanemask_gt" => SReg::Lanemask(3),
        "%lanemask_ge" => SReg::Lanemask(4),
        "%clock" => SReg::Clock(0),
        "%clock_hi" => SReg::Clock(1),
        "%clock64" => SReg::Clock(2),
        "%globaltimer" => SReg::Globaltimer(2),
        "%globaltimer_lo" => SReg::Globaltimer(0),
        "%globaltimer_hi" => SReg::Globaltimer(1),
        "%dynamic_smem_size" => SReg::DynamicSmem,
        "%total_smem_size" => SReg::TotalSmem,
        _ if base.starts_with("%envreg") => SReg::Zero,
        _ => return None,
    })
}

fn space_of(parts: &[&str]) -> Space {
    for p in parts {
        match *p {
            "global" => return Space::Global,
            "shared" | "shared::cta" | "shared::cluster" => return Space::Shared,
            "local" => return Space::Local,
            "param" | "param::entry" | "param::func" => return Space::Param,
            "const" => return Space::Const,
            _ => {}
        }
    }
    Space::Generic
}

fn boolop(s: &str) -> Option<Bool> {
    Some(match s {
        "and" => Bool::And,
        "or" => Bool::Or,
        "xor" => Bool::Xor,
        _ => return None,
    })
}

fn red_op(parts: &[&str]) -> Option<RedOp> {
    parts.iter().find_map(|p| {
        Some(match *p {
            "add" => RedOp::Add,
            "min" => RedOp::Min,
            "max" => RedOp::Max,
            "and" => RedOp::And,
            "or" => RedOp::Or,
            "xor" => RedOp::Xor,
            "inc" => RedOp::Inc,
            "dec" => RedOp::Dec,
            _ => return None,
        })
    })
}

impl Lower<'_> {
    pub(super) fn inst(&mut self, i: &RawInst) -> Res<()> {
        let guard = match &i.guard {
            Some((name, neg)) => PSrc { id: self.pdst(i, &Operand::Name(name.clone()))?, neg: *neg },
            None => PSrc::TRUE,
        };
        let parts: Vec<&str> = i.parts.iter().map(String::as_str).collect();
        if parts[0] == "call" {
            return self.call(i, guard);
        }
        let (op, class) = self.decode(i, &parts)?;
        if let Op::Nop = op {
            return Ok(());
        }
        self.push(op, class, guard, i.line);
        Ok(())
    }

    fn last_ty(&self, i: &RawInst, parts: &[&str]) -> Res<Ty> {
        parts.iter().rev().find_map(|p| Ty::parse(p)).ok_or_else(|| err(i, "no type suffix"))
    }

    fn need(&self, i: &RawInst, n: usize) -> Res<()> {
        if i.operands.len() < n { Err(err(i, format!("needs at least {n} operands"))) } else { Ok(()) }
    }

    fn imm(&self, i: &RawInst, k: usize) -> Res<i64> {
        match i.operands.get(k) {
            Some(Operand::Int(v)) => Ok(*v as i64),
            _ => Err(err(i, format!("operand {} must be an integer literal", k + 1))),
        }
    }

    /// Address operand `k`, in the space the opcode or its base names.
    fn mem(&mut self, i: &RawInst, k: usize, space: Space) -> Res<(Addr, Space)> {
        self.need(i, k + 1)?;
        let (a, named) = self.addr(i, &i.operands[k])?;
        // Arguments of expanded calls are local variables behind `.param` accesses.
        let space = match (space, named) {
            (Space::Param, Some(Space::Local)) => Space::Local,
            (Space::Const, _) => Space::Global,
            (s, _) => s,
        };
        Ok((a, space))
    }

    fn coords(&mut self, i: &RawInst, k: usize) -> Res<Box<[Src]>> {
        match i.operands.get(k) {
            Some(Operand::Mem { extra, .. }) if extra.len() == 1 => Ok(self.srcs(i, &extra[0], B32)?.into()),
            _ => Err(err(i, "expected [map, {coordinates}]")),
        }
    }

    fn opt_src(&mut self, i: &RawInst, k: usize, ty: Ty) -> Res<Option<Src>> {
        match i.operands.get(k) {
            Some(o) => Ok(Some(self.src(i, o, ty)?)),
            None => Ok(None),
        }
    }

    fn pair(&mut self, op: &Operand) -> (Operand, Operand) {
        match op {
            Operand::Pair(a, b) => ((**a).clone(), (**b).clone()),
            o => (o.clone(), Operand::Name("_".into())),
        }
    }

    fn decode(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let unknown = || err(i, "unknown opcode or form");
        let has = |s: &str| parts.contains(&s);
        let second = parts.get(1).copied().unwrap_or("");
        Ok(match parts[0] {
            "mov" => self.mov(i, parts)?,
            "setp" => self.setp(i, parts)?,
            "set" => {
                self.need(i, 3)?;
                let tys: Vec<Ty> = parts.iter().filter_map(|p| Ty::parse(p)).collect();
                let [dt, st] = tys.as_slice() else { return Err(unknown()) };
                let x2 = matches!(st.kind, TyKind::F16x2 | TyKind::Bf16x2);
                let elem = match st.kind {
                    TyKind::F16x2 => Ty { kind: TyKind::Float, bits: 16 },
                    TyKind::Bf16x2 => Ty { kind: TyKind::Bf16, bits: 16 },
                    _ => *st,
                };
                let f = alu::decode_cmp(second, elem, has("ftz")).ok_or_else(unknown)?;
                let ones = match (dt.kind, dt.bits) {
                    (TyKind::Float, 32) => u64::from(1f32.to_bits()),
                    (TyKind::Float | TyKind::F16x2, _) => u64::from(num::f32_to_f16(1.0)),
                    (TyKind::Bf16 | TyKind::Bf16x2, _) => u64::from(num::f32_to_bf16(1.0)),
                    (_, 16) => 0xffff,
                    _ if x2 => 0xffff,
                    _ => 0xffff_ffff,
                };
                let d = self.dst(i, &ops[0])?;
                (
                    Op::Set { f, d, a: self.src(i, &ops[1], *st)?, b: self.src(i, &ops[2], *st)?, ones, x2 },
                    Class::Predicate,
                )
            }
            "selp" => {
                self.need(i, 4)?;
                let ty = self.last_ty(i, parts)?;
                let d = self.dst(i, &ops[0])?;
                let (a, b) = (self.src(i, &ops[1], ty)?, self.src(i, &ops[2], ty)?);
                (Op::Selp(d, a, b, self.psrc(i, &ops[3])?), Class::Predicate)
            }
            "and" | "or" | "xor" | "not" if has("pred") => {
                let d = self.pdst(i, &ops[0])?;
                if parts[0] == "not" {
                    let a = self.psrc(i, &ops[1])?;
                    (Op::PMov(d, PSrc { neg: !a.neg, ..a }), Class::Predicate)
                } else {
                    let b = boolop(parts[0]).ok_or_else(unknown)?;
                    (Op::PLogic(b, d, self.psrc(i, &ops[1])?, self.psrc(i, &ops[2])?), Class::Predicate)
                }
            }
            "testp" => {
                let ty = self.last_ty(i, parts)?;
                let f = alu::decode_testp(second, ty).ok_or_else(unknown)?;
                let (p, a) = (self.pdst(i, &ops[0])?, self.src(i, &ops[1], ty)?);
                (Op::Setp { f, p, q: NONE, a, b: Src::Imm(0), with: None }, Class::Predicate)
            }
            "lop3" => {
                let has_p = matches!(ops[0], Operand::Pair(..)) || boolop(second).is_some();
                let (d, p) = self.pair(&ops[0]);
                let d = self.dst(i, &d)?;
                let s = [self.src(i, &ops[1], B32)?, self.src(i, &ops[2], B32)?, self.src(i, &ops[3], B32)?];
                let lut = self.imm(i, 4)? as u8;
                let p = if has_p {
                    Some((self.pdst(i, &p)?, boolop(second).ok_or_else(unknown)?, self.psrc(i, &ops[5])?))
                } else {
                    None
                };
                (Op::Lop3 { d, p, s, lut }, Class::Integer)
            }
            "bfi" => {
                self.need(i, 5)?;
                let ty = self.last_ty(i, parts)?;
                let d = self.dst(i, &ops[0])?;
                let s = [
                    self.src(i, &ops[1], ty)?,
                    self.src(i, &ops[2], ty)?,
                    self.src(i, &ops[3], B32)?,
                    self.src(i, &ops[4], B32)?,
                ];
                (Op::Bfi { d, s, wide: ty.bits == 64 }, Class::Integer)
            }
            "addc" | "subc" | "madc" => self.carry(i, parts)?,
            "add" | "sub" | "mad" if has("cc") => self.carry(i, parts)?,
            "cvt" => self.cvt(i, parts)?,
            "cvta" => {
                let to = has("to");
                let ty = self.last_ty(i, parts)?;
                let (d, a) = (self.dst(i, &ops[0])?, self.src(i, &ops[1], ty)?);
                match space_of(parts) {
                    Space::Shared => (Op::CvtaShared { d, a, to }, Class::Move),
                    Space::Local => (Op::CvtaWindow { d, a, to, local: true }, Class::Move),
                    Space::Param => (Op::CvtaWindow { d, a, to, local: false }, Class::Move),
                    Space::Global | Space::Const => (Op::Mov(d, a), Class::Move),
                    Space::Generic => return Err(unknown()),
                }
            }
            "isspacep" => {
                let cluster = has("shared::cluster");
                let space = space_of(parts);
                let (p, a) = (self.pdst(i, &ops[0])?, self.src(i, &ops[1], B64)?);
                (Op::Isspacep(p, a, space, cluster), Class::Integer)
            }
            "mapa" => {
                let d = self.dst(i, &ops[0])?;
                let ty = self.last_ty(i, parts)?;
                let generic = space_of(parts) != Space::Shared;
                (
                    Op::Mapa { d, a: self.src(i, &ops[1], ty)?, rank: self.src(i, &ops[2], B32)?, generic },
                    Class::Integer,
                )
            }
            "getctarank" => {
                let d = self.dst(i, &ops[0])?;
                let generic = space_of(parts) != Space::Shared;
                (Op::GetCtaRank { d, a: self.src(i, &ops[1], B64)?, generic }, Class::Integer)
            }
            "ld" | "ldu" => {
                self.need(i, 2)?;
                let ty = self.last_ty(i, parts)?;
                let (addr, space) = self.mem(i, 1, space_of(parts))?;
                let d: Box<[Dst]> = self.dsts(i, &ops[0], ty)?.into();
                // A signed value is extended to the width of its register.
                let signed = if ty.is_signed() { self.register_bits(&ops[0]) } else { 0 };
                let strength = Strength::of(parts, Strength::Weak);
                let class = mem_class(space);
                (Op::Ld { space, d, bytes: ty.bytes().min(8) as u8, signed, addr, strength }, class)
            }
            "st" if second == "async" => {
                let ty = self.last_ty(i, parts)?;
                let (dst, _) = self.mem(i, 0, Space::Shared)?;
                let values = self.srcs(i, &ops[1], ty)?.into();
                let (bar, _) = self.mem(i, 2, Space::Shared)?;
                (Op::Copy(Copy::StoreAsync { dst, values, bytes: ty.bytes() as u8, bar, red: None }), Class::Copy)
            }
            "st" => {
                self.need(i, 2)?;
                let ty = self.last_ty(i, parts)?;
                let (addr, space) = self.mem(i, 0, space_of(parts))?;
                let v = self.srcs(i, &ops[1], ty)?.into();
                let strength = Strength::of(parts, Strength::Weak);
                let class = mem_class(space);
                (Op::St { space, v, bytes: ty.bytes().min(8) as u8, addr, strength }, class)
            }
            "red" if second == "async" => {
                let ty = self.last_ty(i, parts)?;
                let f = parts.iter().find_map(|p| atomics::decode(p, ty)).ok_or_else(unknown)?;
                let (dst, _) = self.mem(i, 0, Space::Shared)?;
                let values = self.srcs(i, &ops[1], ty)?.into();
                let (bar, _) = self.mem(i, 2, Space::Shared)?;
                (Op::Copy(Copy::StoreAsync { dst, values, bytes: ty.bytes() as u8, bar, red: Some(f) }), Class::Copy)
            }
            "atom" | "red" => {
                let ty = self.last_ty(i, parts)?;
                let f = parts[1..].iter().find_map(|p| atomics::decode(p, ty)).ok_or_else(unknown)?;
                let ret = parts[0] == "atom";
                let k = usize::from(ret);
                let (addr, space) = self.mem(i, k, space_of(parts))?;
                let b: Box<[Src]> = self.srcs(i, &ops[k + 1], ty)?.into();
                let d: Box<[Dst]> = if ret { self.dsts(i, &ops[0], ty)?.into() } else { [].into() };
                let c = if has("cas") { self.src(i, ops.get(k + 2).ok_or_else(unknown)?, ty)? } else { Src::Imm(0) };
                let strength = Strength::of(parts, Strength::Relaxed);
                (Op::Atom { space, d, f, addr, b, c, strength }, Class::Atomic)
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" => (Op::Copy(Copy::Prefetch), Class::Other),
            "createpolicy" => {
                let d = self.dst(i, &ops[0])?;
                (Op::Mov(d, Src::Imm(0)), Class::Other)
            }
            "shfl" => {
                let mode = match parts.get(2).copied() {
                    Some("up") => ShflMode::Up,
                    Some("down") => ShflMode::Down,
                    Some("bfly") => ShflMode::Bfly,
                    Some("idx") => ShflMode::Idx,
                    _ => return Err(unknown()),
                };
                self.need(i, 5)?;
                let (d, p) = self.pair(&ops[0]);
                let (d, p) = (self.dst(i, &d)?, self.pdst(i, &p)?);
                let (a, b, c) = (self.src(i, &ops[1], B32)?, self.src(i, &ops[2], B32)?, self.src(i, &ops[3], B32)?);
                (Op::Shfl { mode, d, p, a, b, c, mask: self.src(i, &ops[4], B32)? }, Class::Warp)
            }
            "vote" => {
                let mode = match parts.get(2).copied() {
                    Some("all") => VoteMode::All,
                    Some("any") => VoteMode::Any,
                    Some("uni") => VoteMode::Uni,
                    Some("ballot") => VoteMode::Ballot,
                    _ => return Err(unknown()),
                };
                self.need(i, 3)?;
                let d = if mode == VoteMode::Ballot { self.dst(i, &ops[0])? } else { self.pdst(i, &ops[0])? };
                (Op::Vote { mode, d, p: self.psrc(i, &ops[1])?, mask: self.src(i, &ops[2], B32)? }, Class::Warp)
            }
            "match" => {
                self.need(i, 3)?;
                let ty = self.last_ty(i, parts)?;
                let (d, p) = self.pair(&ops[0]);
                let (d, p) = (self.dst(i, &d)?, self.pdst(i, &p)?);
                let (a, mask) = (self.src(i, &ops[1], ty)?, self.src(i, &ops[2], B32)?);
                (Op::Match { all: second == "all", d, p, a, mask }, Class::Warp)
            }
            "redux" => {
                self.need(i, 3)?;
                let ty = self.last_ty(i, parts)?;
                let f = atomics::decode_redux(parts, ty).ok_or_else(unknown)?;
                let d = self.dst(i, &ops[0])?;
                (Op::Redux { f, d, a: self.src(i, &ops[1], ty)?, mask: self.src(i, &ops[2], B32)? }, Class::Warp)
            }
            "activemask" => (Op::Activemask(self.dst(i, &ops[0])?), Class::Warp),
            "elect" => {
                let (d, p) = self.pair(&ops[0]);
                let (d, p) = (self.dst(i, &d)?, self.pdst(i, &p)?);
                (Op::Elect { d, p, mask: self.src(i, &ops[1], B32)? }, Class::Warp)
            }
            "bra" => {
                let t = self.label(i, &ops[0])?;
                (Op::Bra(t), Class::Control)
            }
            "brx" => {
                let idx = self.src(i, &ops[0], B32)?;
                let t = self.targets(i, &ops[1])?;
                (Op::BrxIdx(idx, t.into()), Class::Control)
            }
            "ret" => match self.ret {
                Some(end) => (Op::Bra(end), Class::Control),
                None => (Op::Exit, Class::Control),
            },
            "exit" => (Op::Exit, Class::Control),
            "trap" | "brkpt" => (Op::Trap, Class::Control),
            "pmevent" => (Op::Nop, Class::Other),
            "nanosleep" => (Op::Nanosleep(self.src(i, &ops[0], B32)?), Class::Other),
            "bar" | "barrier" => self.bar(i, parts)?,
            "membar" => match second {
                "proxy" => return Err(unknown()),
                _ => (Op::Fence(Fence::Memory { wide: second != "cta" }), Class::Sync),
            },
            "fence" => self.fence(i, parts)?,
            "mbarrier" => self.mbarrier(i, parts)?,
            "cp" => self.cp(i, parts)?,
            "tensormap" => self.tensormap(i, parts)?,
            "ldmatrix" | "stmatrix" => {
                if !has("m8n8") || !has("b16") {
                    return Err(unknown());
                }
                let trans = has("trans");
                if parts[0] == "ldmatrix" {
                    let d = self.dsts(i, &ops[0], B32)?.into();
                    let (addr, _) = self.mem(i, 1, Space::Shared)?;
                    if space_of(parts) == Space::Generic {
                        return Err(err(i, "matrix access without .shared is not supported"));
                    }
                    (Op::Ldmatrix { trans, d, addr }, Class::Shared)
                } else {
                    let (addr, _) = self.mem(i, 0, Space::Shared)?;
                    if space_of(parts) == Space::Generic {
                        return Err(err(i, "matrix access without .shared is not supported"));
                    }
                    (Op::Stmatrix { trans, v: self.srcs(i, &ops[1], B32)?.into(), addr }, Class::Shared)
                }
            }
            "movmatrix" if has("trans") && has("b16") => {
                (Op::Movmatrix(self.dst(i, &ops[0])?, self.src(i, &ops[1], B32)?), Class::Warp)
            }
            "mma" => self.mma(i, parts)?,
            "wgmma" => self.wgmma(i, parts)?,
            "setmaxnreg" => (Op::SetMaxNReg { n: self.imm(i, 0)? as u32, inc: second == "inc" }, Class::Other),
            "griddepcontrol" => (Op::Griddep, Class::Sync),
            "clusterlaunchcontrol" => self.clc(i, parts)?,
            "tcgen05" => self.tcgen(i, parts)?,
            _ => self.arith(i, parts)?,
        })
    }

    fn mov(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        self.need(i, 2)?;
        let ops = &i.operands;
        let ty = self.last_ty(i, parts)?;
        if ty.kind == TyKind::Pred {
            return Ok((Op::PMov(self.pdst(i, &ops[0])?, self.psrc(i, &ops[1])?), Class::Predicate));
        }
        if let Operand::Name(n) = &ops[1]
            && let Some(s) = sreg(n)
        {
            return Ok((Op::Sreg(self.dst(i, &ops[0])?, s), Class::Move));
        }
        match (&ops[0], &ops[1]) {
            (Operand::Vector(d), s) if ty.bits == 128 => {
                let s = self.srcs(i, s, ty)?;
                let d: Vec<Dst> = d.iter().map(|o| self.dst(i, o)).collect::<Res<_>>()?;
                self.pair_moves(i, &d, &s)
            }
            (d, s) if ty.bits == 128 => {
                let s = self.srcs(i, s, ty)?;
                let d = self.dsts(i, d, ty)?;
                self.pair_moves(i, &d, &s)
            }
            (Operand::Vector(d), s) => {
                let bits = ty.bits / d.len() as u16;
                let s = self.src(i, s, ty)?;
                let d: Vec<Dst> = d.iter().map(|o| self.dst(i, o)).collect::<Res<_>>()?;
                Ok((Op::Unpack(d.into(), s, bits), Class::Move))
            }
            (d, Operand::Vector(s)) => {
                let bits = ty.bits / s.len() as u16;
                let part = Ty { kind: TyKind::Bits, bits };
                let s: Vec<Src> = s.iter().map(|o| self.src(i, o, part)).collect::<Res<_>>()?;
                Ok((Op::Pack(self.dst(i, d)?, s.into(), bits), Class::Move))
            }
            (d, s) => {
                let s = self.src(i, s, ty)?;
                Ok((Op::Mov(self.dst(i, d)?, s), Class::Move))
            }
        }
    }

    /// Two 64-bit moves of a 128-bit one; only the second is returned.
    fn pair_moves(&mut self, i: &RawInst, d: &[Dst], s: &[Src]) -> Res<(Op, Class)> {
        if d.len() != 2 || s.len() != 2 || i.guard.is_some() {
            return Err(err(i, "128-bit move form that is not supported"));
        }
        self.push(Op::Mov(d[0], s[0]), Class::Move, PSrc::TRUE, i.line);
        Ok((Op::Mov(d[1], s[1]), Class::Move))
    }

    fn setp(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        self.need(i, 3)?;
        let ops = &i.operands;
        let ty = self.last_ty(i, parts)?;
        let (p, q) = self.pair(&ops[0]);
        let (p, q) = (self.pdst(i, &p)?, self.pdst(i, &q)?);
        let elem = match ty.kind {
            TyKind::F16x2 => Ty { kind: TyKind::Float, bits: 16 },
            TyKind::Bf16x2 => Ty { kind: TyKind::Bf16, bits: 16 },
            _ => ty,
        };
        // The assembler also takes the type before the comparison (`setp.u32.eq`).
        let f = parts[1..].iter().find_map(|p| alu::decode_cmp(p, elem, parts.contains(&"ftz")));
        let f = f.ok_or_else(|| err(i, "unknown comparison"))?;
        let (a, b) = (self.src(i, &ops[1], ty)?, self.src(i, &ops[2], ty)?);
        if elem != ty {
            return Ok((Op::SetpX2 { f, p, q, a, b }, Class::Predicate));
        }
        let with = match (parts.get(2).and_then(|s| boolop(s)), ops.get(3)) {
            (Some(bo), Some(c)) => Some((bo, self.psrc(i, c)?)),
            (None, None) => None,
            _ => return Err(err(i, "boolean operator without its predicate")),
        };
        Ok((Op::Setp { f, p, q, a, b, with }, Class::Predicate))
    }

    fn carry(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let ty = self.last_ty(i, parts)?;
        let set_cc = parts.contains(&"cc");
        let use_cc = matches!(parts[0], "addc" | "subc" | "madc");
        let d = self.dst(i, &ops[0])?;
        let a = self.src(i, &ops[1], ty)?;
        let b = self.src(i, &ops[2], ty)?;
        let wide = ty.bits == 64;
        let mul = if parts[0].starts_with("mad") {
            Some((self.src(i, ops.get(3).ok_or_else(|| err(i, "needs four operands"))?, ty)?, parts.contains(&"hi")))
        } else {
            None
        };
        if mul.is_some() && ty.is_signed() && parts.contains(&"hi") {
            return Err(err(i, "signed high products with carry are not supported"));
        }
        Ok((Op::Carry { d, a, b, mul, sub: parts[0].starts_with("sub"), wide, use_cc, set_cc }, Class::Integer))
    }

    fn cvt(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        if parts[1] == "pack" {
            return Err(err(i, "cvt.pack is not supported"));
        }
        let c = Cvt::decode(parts).ok_or_else(|| err(i, "unknown conversion"))?;
        let d = self.dst(i, &ops[0])?;
        let from = parts.iter().rev().find_map(|p| Ty::parse(p)).expect("decoded above");
        if c.is_pack() {
            self.need(i, 3)?;
            let (a, b) = (self.src(i, &ops[1], from)?, self.src(i, &ops[2], from)?);
            return Ok((Op::CvtPack(c, d, a, b), Class::Convert));
        }
        Ok((Op::Cvt(c, d, self.src(i, &ops[1], from)?), Class::Convert))
    }

    fn arith(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let f = alu::decode(parts, ops.len().saturating_sub(1)).ok_or_else(|| err(i, "unknown opcode or form"))?;
        let ty = self.last_ty(i, parts)?;
        let class = match (parts[0], ty.kind, ty.bits) {
            ("ex2", ..) => Class::Exp,
            ("lg2" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh", ..) => Class::Special,
            _ if alu::is_mixed(parts) => Class::Float,
            (_, TyKind::F32x2, _) => Class::Packed,
            (_, TyKind::Float, 32) => Class::Float,
            (_, TyKind::Float, 64) => Class::Double,
            (_, TyKind::Float | TyKind::Bf16 | TyKind::F16x2 | TyKind::Bf16x2, _) => Class::Half,
            _ => Class::Integer,
        };
        let d = self.dst(i, &ops[0])?;
        let n = match f {
            Alu::A1(_) => 1,
            Alu::A2(_) => 2,
            Alu::A3(_) => 3,
        };
        if ops.len() != n + 1 {
            return Err(err(i, format!("needs {} operands", n + 1)));
        }
        let mut s = vec![];
        for (k, o) in ops[1..].iter().enumerate() {
            let ty = if alu::is_mixed(parts) && k + 1 == n { Ty { kind: TyKind::Float, bits: 32 } } else { ty };
            s.push(self.src(i, o, ty)?);
        }
        Ok((
            match f {
                Alu::A1(f) => Op::A1(f, d, s[0]),
                Alu::A2(f) => Op::A2(f, d, s[0], s[1]),
                Alu::A3(f) => Op::A3(f, d, s[0], s[1], s[2]),
            },
            class,
        ))
    }

    fn bar(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let has = |s: &str| parts.contains(&s);
        if has("warp") {
            return Ok((Op::WarpSync(self.src(i, &ops[0], B32)?), Class::Warp));
        }
        if has("cluster") {
            return Ok((
                if has("arrive") { Op::ClusterArrive { relaxed: has("relaxed") } } else { Op::ClusterWait },
                Class::Sync,
            ));
        }
        let aligned = parts[0] == "bar" || has("aligned");
        let bad = || err(i, "unknown barrier form");
        if has("sync") || has("arrive") {
            let id = self.src(i, ops.first().ok_or_else(bad)?, B32)?;
            let count = self.opt_src(i, 1, B32)?;
            let kind = if has("sync") { BarKind::Sync } else { BarKind::Arrive };
            return Ok((Op::Bar { kind, aligned, id, count }, Class::Sync));
        }
        if has("red") {
            self.need(i, 3)?;
            let id = self.src(i, &ops[1], B32)?;
            let count = if ops.len() == 4 { Some(self.src(i, &ops[2], B32)?) } else { None };
            let p = self.psrc(i, &ops[ops.len() - 1])?;
            let kind = if has("popc") {
                BarKind::RedPopc(self.dst(i, &ops[0])?, p)
            } else {
                BarKind::Red(if has("and") { Bool::And } else { Bool::Or }, self.pdst(i, &ops[0])?, p)
            };
            return Ok((Op::Bar { kind, aligned, id, count }, Class::Sync));
        }
        Err(bad())
    }

    fn fence(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let f = match parts[1] {
            "proxy" => match parts.get(2).copied() {
                Some("async") => {
                    let s = space_of(parts);
                    Fence::ProxyAsync {
                        shared: matches!(s, Space::Shared | Space::Generic),
                        global: matches!(s, Space::Global | Space::Generic),
                    }
                }
                Some("async::generic") => Fence::ProxyAsync { shared: true, global: true },
                Some("alias") => Fence::Other,
                Some(p) if p.starts_with("tensormap") => Fence::ProxyTensormap { acquire: parts.contains(&"acquire") },
                _ => return Err(err(i, "unknown proxy fence")),
            },
            "mbarrier_init" => Fence::MbarrierInit,
            "acq_rel" | "sc" | "acquire" | "release" => Fence::Memory { wide: !parts.contains(&"cta") },
            _ => return Err(err(i, "unknown fence")),
        };
        Ok((Op::Fence(f), Class::Sync))
    }

    fn mbarrier(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let has = |s: &str| parts.contains(&s);
        let space = space_of(parts);
        let class = Class::Sync;
        Ok((
            match parts[1] {
                "init" => {
                    let (a, s) = self.mem(i, 0, space)?;
                    self.need(i, 2)?;
                    Op::Mbar(Mbar::Init(self.src(i, &ops[1], B32)?), s, a)
                }
                "inval" => {
                    let (a, s) = self.mem(i, 0, space)?;
                    Op::Mbar(Mbar::Inval, s, a)
                }
                "expect_tx" => {
                    let (a, s) = self.mem(i, 0, space)?;
                    self.need(i, 2)?;
                    Op::Mbar(Mbar::ExpectTx(self.src(i, &ops[1], B32)?), s, a)
                }
                "complete_tx" => {
                    let (a, s) = self.mem(i, 0, space)?;
                    self.need(i, 2)?;
                    Op::Mbar(Mbar::CompleteTx(self.src(i, &ops[1], B32)?), s, a)
                }
                "arrive" | "arrive_drop" => {
                    let k = usize::from(!matches!(ops[0], Operand::Mem { .. }));
                    let d = if k == 1 { self.dst(i, &ops[0])? } else { NONE };
                    let (a, s) = self.mem(i, k, space)?;
                    let extra = self.opt_src(i, k + 1, B32)?;
                    let tx = has("expect_tx");
                    if tx && extra.is_none() {
                        return Err(err(i, "expect_tx without a byte count"));
                    }
                    let m = Mbar::Arrive {
                        d,
                        count: if tx { Src::Imm(1) } else { extra.unwrap_or(Src::Imm(1)) },
                        expect: if tx { extra } else { None },
                        drop: parts[1] == "arrive_drop",
                        no_complete: has("noComplete"),
                    };
                    Op::Mbar(m, s, a)
                }
                "test_wait" | "try_wait" => {
                    self.need(i, 3)?;
                    let p = self.pdst(i, &ops[0])?;
                    let (a, s) = self.mem(i, 1, space)?;
                    let parity = has("parity");
                    let phase = self.src(i, &ops[2], if parity { B32 } else { B64 })?;
                    Op::Mbar(Mbar::Wait { p, phase, parity, block: parts[1] == "try_wait" }, s, a)
                }
                "pending_count" => Op::MbarPending(self.dst(i, &ops[0])?, self.src(i, &ops[1], B64)?),
                _ => return Err(err(i, "unknown mbarrier operation")),
            },
            class,
        ))
    }

    fn cp(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let has = |s: &str| parts.contains(&s);
        let bad = || err(i, "unknown copy form");
        let reduce = parts[1] == "reduce";
        let bulk = has("bulk");
        let c = if !bulk {
            if has("commit_group") {
                Copy::Commit
            } else if has("wait_group") {
                Copy::Wait(Some(self.imm(i, 0)? as u32))
            } else if has("wait_all") {
                Copy::Wait(None)
            } else if has("mbarrier") {
                Copy::MbarArrive { bar: self.mem(i, 0, Space::Shared)?.0, noinc: has("noinc") }
            } else {
                let dst = self.mem(i, 0, Space::Shared)?.0;
                let src = self.mem(i, 1, Space::Global)?.0;
                let bytes = self.imm(i, 2)? as u8;
                let (mut src_bytes, mut ignore) = (None, None);
                if let Some(o) = ops.get(3) {
                    let is_pred = match o {
                        Operand::Name(n) => self.reg(n).is_some_and(|(_, t)| t.kind == TyKind::Pred),
                        Operand::Not(_) => true,
                        _ => false,
                    };
                    if is_pred {
                        ignore = Some(self.psrc(i, o)?);
                    } else if ops.len() > 4 || !has("L2::cache_hint") {
                        src_bytes = Some(self.src(i, o, B32)?);
                    }
                }
                Copy::Element { dst, src, bytes, src_bytes, ignore }
            }
        } else if has("commit_group") {
            Copy::BulkCommit
        } else if has("wait_group") {
            Copy::BulkWait { n: self.imm(i, 0)? as u32, read: has("read") }
        } else if has("prefetch") {
            Copy::Prefetch
        } else {
            // Which way it goes is said by the first space after the fixed part.
            let first = parts
                .iter()
                .position(|p| matches!(*p, "global" | "shared::cta" | "shared::cluster"))
                .ok_or_else(bad)?;
            let to_global = parts[first] == "global";
            let from_shared = parts.get(first + 1) == Some(&"shared::cta");
            let multicast_at = |k: usize| if has("multicast::cluster") { Some(k) } else { None };
            if let Some(p) = parts.iter().find(|p| p.starts_with("im2col") || p.starts_with("tile::")) {
                return Err(err(i, format!("tensor mode {p} is not supported")));
            }
            let red = if reduce { Some(red_op(&parts[3..]).ok_or_else(bad)?) } else { None };
            if has("tensor") {
                if to_global {
                    let coords = self.coords(i, 0)?;
                    let map = self.mem(i, 0, Space::Generic)?.0;
                    let src = self.mem(i, 1, Space::Shared)?.0;
                    Copy::TensorStore { map, coords, src, red }
                } else {
                    let dst = self.mem(i, 0, Space::Shared)?.0;
                    let coords = self.coords(i, 1)?;
                    let map = self.mem(i, 1, Space::Generic)?.0;
                    let bar = self.mem(i, 2, Space::Shared)?.0;
                    let multicast = match multicast_at(3) {
                        Some(k) => self.opt_src(i, k, B16)?,
                        None => None,
                    };
                    Copy::TensorLoad { dst, map, coords, bar, multicast }
                }
            } else {
                let ty = self.last_ty(i, parts).ok();
                let red = match (red, ty) {
                    (Some(r), Some(t)) => Some((r, t)),
                    (None, _) => None,
                    _ => return Err(bad()),
                };
                self.need(i, 3)?;
                if has("cp_mask") {
                    return Err(err(i, "byte masks are not supported"));
                }
                let dst = self.mem(i, 0, Space::Generic)?.0;
                let src = self.mem(i, 1, Space::Generic)?.0;
                let bytes = self.src(i, &ops[2], B32)?;
                if to_global {
                    Copy::BulkStore { dst, src, bytes, red }
                } else {
                    let bar = self.mem(i, 3, Space::Shared)?.0;
                    if from_shared {
                        Copy::BulkCluster { dst, src, bytes, bar, red }
                    } else {
                        let multicast = match multicast_at(4) {
                            Some(k) => self.opt_src(i, k, B16)?,
                            None => None,
                        };
                        Copy::BulkLoad { dst, src, bytes, bar, multicast }
                    }
                }
            }
        };
        Ok((Op::Copy(c), Class::Copy))
    }

    fn tensormap(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let bad = || err(i, "unknown tensormap form");
        if parts[1] == "cp_fenceproxy" {
            let dst = self.mem(i, 0, Space::Global)?.0;
            let src = self.mem(i, 1, Space::Shared)?.0;
            return Ok((Op::MapCopy { dst, src }, Class::Copy));
        }
        if parts[1] != "replace" || parts.get(2) != Some(&"tile") {
            return Err(bad());
        }
        let (addr, space) = self.mem(i, 0, space_of(parts))?;
        let name = *parts.get(3).ok_or_else(bad)?;
        let dim = if i.operands.len() == 3 { self.imm(i, 1)? as u8 } else { 0 };
        let field = match name {
            "global_address" => MapField::Address,
            "rank" => MapField::Rank,
            "box_dim" => MapField::Box(dim),
            "global_dim" => MapField::Dim(dim),
            "global_stride" => MapField::Stride(dim),
            "element_stride" => MapField::ElementStride(dim),
            "elemtype" => MapField::ElemType,
            "interleave_layout" => MapField::Interleave,
            "swizzle_mode" => MapField::Swizzle,
            "fill_mode" => MapField::Fill,
            "swizzle_atomicity" => MapField::SwizzleAtomicity,
            _ => return Err(bad()),
        };
        let last = i.operands.last().ok_or_else(bad)?;
        let v = self.src(i, last, B64)?;
        Ok((Op::MapReplace { field, space, addr, v }, Class::Copy))
    }

    fn mma(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let bad = || err(i, "unknown mma form");
        let shape = parts.iter().find(|p| p.starts_with('m') && p.contains('k') && **p != "mma").ok_or_else(bad)?;
        let k: u32 = shape.rsplit('k').next().and_then(|s| s.parse().ok()).ok_or_else(bad)?;
        let n = parts.len();
        let (dt, at, bt, ct) = (parts[n - 4], parts[n - 3], parts[n - 2], parts[n - 1]);
        if !shape.starts_with("m16n8k") || dt != "f32" || ct != "f32" || at != bt {
            return Err(bad());
        }
        let ty = match at {
            "bf16" => MmaTy::Bf16,
            "f16" => MmaTy::F16,
            "tf32" => MmaTy::Tf32,
            _ => return Err(bad()),
        };
        let f32t = Ty { kind: TyKind::Float, bits: 32 };
        let d = self.dsts(i, &i.operands[0], B32)?.into();
        let a = self.srcs(i, &i.operands[1], B32)?.into();
        let b = self.srcs(i, &i.operands[2], B32)?.into();
        let c = self.srcs(i, &i.operands[3], f32t)?.into();
        Ok((Op::MmaSync(Box::new(MmaSync { k, ty, d, a, b, c })), Class::Tensor))
    }

    fn wgmma(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let bad = || err(i, "unknown wgmma form");
        let class = Class::Tensor;
        match parts[1] {
            "fence" => return Ok((Op::WgmmaFence, class)),
            "commit_group" => return Ok((Op::WgmmaCommit, class)),
            "wait_group" => return Ok((Op::WgmmaWait(self.imm(i, 0)? as u32), class)),
            "mma_async" if !parts.contains(&"sp") => {}
            _ => return Err(bad()),
        }
        let shape = *parts.iter().find(|p| p.starts_with("m64n")).ok_or_else(bad)?;
        let (n, k) = shape["m64n".len()..].split_once('k').ok_or_else(bad)?;
        let n: u32 = n.parse().map_err(|_| bad())?;
        let len = parts.len();
        let (dt, at, bt) = (parts[len - 3], parts[len - 2], parts[len - 1]);
        let (ty, want_k) = match at {
            "bf16" => (MmaTy::Bf16, "16"),
            "f16" => (MmaTy::F16, "16"),
            "tf32" => (MmaTy::Tf32, "8"),
            _ => return Err(bad()),
        };
        if at != bt
            || k != want_k
            || !(dt == "f32" || (dt == "f16" && ty == MmaTy::F16))
            || !n.is_multiple_of(8)
            || n == 0
            || n > 256
        {
            return Err(bad());
        }
        let f16_acc = dt == "f16";
        let ops = &i.operands;
        self.need(i, 6)?;
        let d: Box<[Dst]> = self.dsts(i, &ops[0], B32)?.into();
        let regs = if f16_acc { n / 4 } else { n / 2 };
        if d.len() as u32 != regs {
            return Err(err(i, format!("needs {regs} accumulator registers")));
        }
        let (a, in_regs) = match &ops[1] {
            Operand::Vector(v) if v.len() == 4 => {
                let s = self.srcs(i, &ops[1], B32)?;
                (WgmmaA::Regs([s[0], s[1], s[2], s[3]]), true)
            }
            o => (WgmmaA::Desc(self.src(i, o, B64)?), false),
        };
        let b = self.src(i, &ops[2], B64)?;
        let scale_d = self.psrc(i, &ops[3])?;
        let (neg_a, neg_b) = (self.imm(i, 4)? == -1, self.imm(i, 5)? == -1);
        let (mut trans_a, mut trans_b) = (false, false);
        if ty != MmaTy::Tf32 && ops.len() > 6 {
            if in_regs {
                trans_b = self.imm(i, 6)? == 1;
            } else {
                trans_a = self.imm(i, 6)? == 1;
                trans_b = self.imm(i, 7)? == 1;
            }
        }
        Ok((Op::Wgmma(Box::new(Wgmma { n, ty, f16_acc, d, a, b, scale_d, neg_a, neg_b, trans_a, trans_b })), class))
    }

    fn clc(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        if parts[1] == "try_cancel" {
            let dst = self.mem(i, 0, Space::Shared)?.0;
            let bar = self.mem(i, 1, Space::Shared)?.0;
            let multicast = parts.iter().any(|p| p.starts_with("multicast"));
            return Ok((Op::ClcTryCancel { dst, bar, multicast }, Class::Sync));
        }
        let handle = |lw: &mut Self| -> Res<[Src; 2]> {
            let s = lw.srcs(i, &ops[1], B128)?;
            match s.as_slice() {
                [a, b] => Ok([*a, *b]),
                _ => Err(err(i, "the handle must be a 128-bit register")),
            }
        };
        let what = parts.get(2).copied().unwrap_or("");
        if what == "is_canceled" {
            let p = self.pdst(i, &ops[0])?;
            return Ok((Op::ClcIsCanceled(p, handle(self)?), Class::Sync));
        }
        let dim = match what {
            "get_first_ctaid" => 3,
            "get_first_ctaid::x" => 0,
            "get_first_ctaid::y" => 1,
            "get_first_ctaid::z" => 2,
            _ => return Err(err(i, "unknown clusterlaunchcontrol form")),
        };
        let d = self.dsts(i, &ops[0], B32)?.into();
        Ok((Op::ClcFirstCta(d, handle(self)?, dim), Class::Sync))
    }

    fn tcgen(&mut self, i: &RawInst, parts: &[&str]) -> Res<(Op, Class)> {
        let ops = &i.operands;
        let has = |s: &str| parts.contains(&s);
        let bad = || err(i, "unknown tcgen05 form");
        let group = if has("cta_group::2") { 2u8 } else { 1 };
        let shape_num = || -> Res<(TmemShape, u8)> {
            let shape = parts
                .iter()
                .find_map(|p| {
                    Some(match *p {
                        "32x32b" => TmemShape::S32x32b,
                        "16x64b" => TmemShape::S16x64b,
                        "16x128b" => TmemShape::S16x128b,
                        "16x256b" => TmemShape::S16x256b,
                        "16x32bx2" => TmemShape::S16x32bx2,
                        _ => return None,
                    })
                })
                .ok_or_else(bad)?;
            let num =
                parts.iter().find_map(|p| p.strip_prefix('x').and_then(|n| n.parse::<u8>().ok())).ok_or_else(bad)?;
            Ok((shape, num))
        };
        let t = match parts[1] {
            "alloc" => Tcgen::Alloc { dst: self.mem(i, 0, Space::Shared)?.0, cols: self.src(i, &ops[1], B32)?, group },
            "dealloc" => Tcgen::Dealloc { addr: self.src(i, &ops[0], B32)?, cols: self.src(i, &ops[1], B32)?, group },
            "relinquish_alloc_permit" => Tcgen::Relinquish(group),
            "mma" => {
                let kind = parts.iter().find(|p| p.starts_with("kind::")).copied().ok_or_else(bad)?;
                if has("ws")
                    || has("sp")
                    || parts
                        .iter()
                        .any(|p| p.starts_with("collector") && !p.ends_with("discard") && !p.contains("::a::"))
                {
                    return Err(bad());
                }
                let tf32 = match kind {
                    "kind::f16" => false,
                    "kind::tf32" => true,
                    _ => return Err(err(i, "only kind::f16 and kind::tf32 are supported")),
                };
                self.need(i, 5)?;
                let d = self.mem(i, 0, Space::Generic)?.0;
                let (a, a_tmem, a_off) = match &ops[1] {
                    Operand::Mem { .. } => {
                        let m = self.mem(i, 1, Space::Generic)?.0;
                        (m.base, true, m.off)
                    }
                    o => (self.src(i, o, B64)?, false, 0),
                };
                let b = self.src(i, &ops[2], B64)?;
                let idesc = self.src(i, &ops[3], B32)?;
                let mut k = 4;
                let mut disable: Box<[Src]> = [].into();
                if let Operand::Vector(_) = &ops[4] {
                    disable = self.srcs(i, &ops[4], B32)?.into();
                    k = 5;
                }
                let enable = self.psrc(i, ops.get(k).ok_or_else(bad)?)?;
                let scale_d = if ops.len() > k + 1 { self.imm(i, k + 1)? as u8 } else { 0 };
                Tcgen::Mma { group, tf32, d, a, a_tmem, a_off, b, idesc, enable, scale_d, disable }
            }
            "commit" => {
                let bar = self.mem(i, 0, Space::Shared)?.0;
                let multicast = if has("multicast::cluster") { self.opt_src(i, 1, B16)? } else { None };
                Tcgen::Commit { group, bar, multicast }
            }
            "ld" if !has("red") => {
                let (shape, num) = shape_num()?;
                let d = self.dsts(i, &ops[0], B32)?.into();
                let addr = self.mem(i, 1, Space::Generic)?.0;
                let half = if shape == TmemShape::S16x32bx2 { self.imm(i, 2)? as u32 } else { 0 };
                Tcgen::Ld { shape, num, pack: has("pack::16b"), d, addr, half }
            }
            "st" => {
                let (shape, num) = shape_num()?;
                let addr = self.mem(i, 0, Space::Generic)?.0;
                let (k, half) = if shape == TmemShape::S16x32bx2 { (2, self.imm(i, 1)? as u32) } else { (1, 0) };
                let values = self.srcs(i, ops.get(k).ok_or_else(bad)?, B32)?.into();
                Tcgen::St { shape, num, unpack: has("unpack::16b"), addr, values, half }
            }
            "wait::ld" => Tcgen::WaitLd,
            "wait::st" => Tcgen::WaitSt,
            "fence::before_thread_sync" => Tcgen::Fence { before: true },
            "fence::after_thread_sync" => Tcgen::Fence { before: false },
            "cp" => {
                let shape = if has("128x256b") {
                    CpShape::S128x256b
                } else if has("4x256b") {
                    CpShape::S4x256b
                } else if has("128x128b") {
                    CpShape::S128x128b
                } else if has("64x128b") {
                    CpShape::S64x128b { x02_13: has("warpx2::02_13") }
                } else if has("32x128b") {
                    CpShape::S32x128b
                } else {
                    return Err(bad());
                };
                if has("b6x16_p32") || has("b4x16_p64") {
                    return Err(bad());
                }
                Tcgen::Cp { group, shape, addr: self.mem(i, 0, Space::Generic)?.0, desc: self.src(i, &ops[1], B64)? }
            }
            _ => return Err(bad()),
        };
        Ok((Op::Tcgen(t), Class::Tensor))
    }
}

fn mem_class(s: Space) -> Class {
    match s {
        Space::Global | Space::Generic => Class::Global,
        Space::Shared => Class::Shared,
        Space::Local => Class::Local,
        Space::Param | Space::Const => Class::Param,
    }
}
