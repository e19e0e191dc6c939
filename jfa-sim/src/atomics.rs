//! Read-modify-write functions of `atom`, `red`, `redux` and reducing copies.

use crate::alu::Lane;
use crate::ir::{AtomFn, RedOp};
use crate::num;
use crate::ptx::{Ty, TyKind};

fn f32_add(a: f32, b: f32) -> f32 {
    num::canon32(a + b)
}

fn half_add(fmt: num::Format, a: u64, b: u64) -> u64 {
    u64::from(num::round_to(fmt, num::Rnd::Rn, num::widen(fmt, a as u32 & 0xffff) + num::widen(fmt, b as u32 & 0xffff)))
}

fn half_pick(fmt: num::Format, a: u64, b: u64, max: bool) -> u64 {
    let (x, y) = (num::widen(fmt, a as u32 & 0xffff), num::widen(fmt, b as u32 & 0xffff));
    if x.is_nan() {
        return b & 0xffff;
    }
    if y.is_nan() || (x > y) == max { a & 0xffff } else { b & 0xffff }
}

fn both(f: impl Fn(u64, u64) -> u64, a: u64, b: u64) -> u64 {
    f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16
}

macro_rules! a2 {
    ($t:ty, |$a:ident, $b:ident| $e:expr) => {
        |x: u64, y: u64, _z: u64| {
            let ($a, $b) = (<$t as Lane>::get(x), <$t as Lane>::get(y));
            Lane::put($e)
        }
    };
}

/// Function of an atomic opcode part (`add`, `cas`, ...) on `ty`; `None` if that part names no operation of that type.
pub(crate) fn decode(op: &str, ty: Ty) -> Option<AtomFn> {
    let bytes = ty.bytes() as u8;
    use TyKind::*;
    let f: fn(u64, u64, u64) -> u64 = match (op, ty.kind, ty.bits) {
        ("exch", _, ..=64) => |_a, b, _c| b,
        ("cas", _, ..=64) => |a, b, c| if a == b { c } else { a },
        ("and", Bits | Unsigned | Signed, _) => |a, b, _c| a & b,
        ("or", Bits | Unsigned | Signed, _) => |a, b, _c| a | b,
        ("xor", Bits | Unsigned | Signed, _) => |a, b, _c| a ^ b,
        ("add", Unsigned | Signed | Bits, 32) => a2!(u32, |a, b| a.wrapping_add(b)),
        ("add", Unsigned | Signed | Bits, 64) => a2!(u64, |a, b| a.wrapping_add(b)),
        ("add", Float, 32) => a2!(f32, |a, b| f32_add(a, b)),
        ("add", Float, 64) => a2!(f64, |a, b| a + b),
        ("add", Float, 16) => |a, b, _c| half_add(num::F16, a, b),
        ("add", Bf16, _) => |a, b, _c| half_add(num::BF16, a, b),
        ("add", F16x2, _) => |a, b, _c| both(|x, y| half_add(num::F16, x, y), a, b),
        ("add", Bf16x2, _) => |a, b, _c| both(|x, y| half_add(num::BF16, x, y), a, b),
        ("min", Unsigned, 32) => a2!(u32, |a, b| a.min(b)),
        ("min", Signed, 32) => a2!(i32, |a, b| a.min(b)),
        ("min", Unsigned, 64) => a2!(u64, |a, b| a.min(b)),
        ("min", Signed, 64) => a2!(i64, |a, b| a.min(b)),
        ("max", Unsigned, 32) => a2!(u32, |a, b| a.max(b)),
        ("max", Signed, 32) => a2!(i32, |a, b| a.max(b)),
        ("max", Unsigned, 64) => a2!(u64, |a, b| a.max(b)),
        ("max", Signed, 64) => a2!(i64, |a, b| a.max(b)),
        ("min", Float, 16) => |a, b, _c| half_pick(num::F16, a, b, false),
        ("max", Float, 16) => |a, b, _c| half_pick(num::F16, a, b, true),
        ("min", Bf16, _) => |a, b, _c| half_pick(num::BF16, a, b, false),
        ("max", Bf16, _) => |a, b, _c| half_pick(num::BF16, a, b, true),
        ("min", F16x2, _) => |a, b, _c| both(|x, y| half_pick(num::F16, x, y, false), a, b),
        ("max", F16x2, _) => |a, b, _c| both(|x, y| half_pick(num::F16, x, y, true), a, b),
        ("min", Bf16x2, _) => |a, b, _c| both(|x, y| half_pick(num::BF16, x, y, false), a, b),
        ("max", Bf16x2, _) => |a, b, _c| both(|x, y| half_pick(num::BF16, x, y, true), a, b),
        ("inc", Unsigned, 32) => a2!(u32, |a, b| if a >= b { 0 } else { a + 1 }),
        ("dec", Unsigned, 32) => a2!(u32, |a, b| if a == 0 || a > b { b } else { a - 1 }),
        _ => return None,
    };
    Some(AtomFn { f, bytes })
}

/// Function of a reducing copy.
pub(crate) fn of_red(op: RedOp, ty: Ty) -> Option<AtomFn> {
    let name = match op {
        RedOp::Add => "add",
        RedOp::Min => "min",
        RedOp::Max => "max",
        RedOp::And => "and",
        RedOp::Or => "or",
        RedOp::Xor => "xor",
        RedOp::Inc => "inc",
        RedOp::Dec => "dec",
    };
    decode(name, ty)
}

/// Fold of `redux.sync`.
pub(crate) fn decode_redux(parts: &[&str], ty: Ty) -> Option<fn(u64, u64) -> u64> {
    let op = *parts.get(2)?;
    let has = |s: &str| parts.contains(&s);
    Some(match (op, ty.kind, ty.bits) {
        ("add", TyKind::Unsigned | TyKind::Signed, 32) => |a, b| u64::from((a as u32).wrapping_add(b as u32)),
        ("min", TyKind::Unsigned, 32) => |a, b| a.min(b),
        ("max", TyKind::Unsigned, 32) => |a, b| a.max(b),
        ("min", TyKind::Signed, 32) => |a, b| (a as u32 as i32).min(b as u32 as i32).put(),
        ("max", TyKind::Signed, 32) => |a, b| (a as u32 as i32).max(b as u32 as i32).put(),
        ("and", _, 32) => |a, b| a & b,
        ("or", _, 32) => |a, b| a | b,
        ("xor", _, 32) => |a, b| a ^ b,
        ("max", TyKind::Float, 32) if !has("abs") && !has("NaN") => |a, b| f32::get(a).max(f32::get(b)).put(),
        ("min", TyKind::Float, 32) if !has("abs") && !has("NaN") => |a, b| f32::get(a).min(f32::get(b)).put(),
        ("max", TyKind::Float, 32) if !has("NaN") => |a, b| f32::get(a).abs().max(f32::get(b).abs()).put(),
        ("min", TyKind::Float, 32) if !has("NaN") => |a, b| f32::get(a).abs().min(f32::get(b).abs()).put(),
        _ => return None,
    })
}
