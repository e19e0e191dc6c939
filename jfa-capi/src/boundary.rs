//! What stands between C and Rust: the panic boundary, the NULL check, and reading structs of any age.

use std::any::Any;
use std::mem::{MaybeUninit, size_of};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::jfa_status;
use crate::frozen::AbiStruct;
use crate::status::{Failure, set_last_error};

/// Result of the body of an entry point.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// No struct of this ABI will ever be larger: a larger struct_size is memory nobody initialised.
const LARGEST: usize = 1 << 16;

/// Defines `extern "C"` entry points: each catches panics, turns its body's result into a status and keeps the error's
/// text for the thread.
macro_rules! entry_points {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::abi::jfa_status {
                $crate::boundary::guard(stringify!($name), || $body)
            }
        )*
    };
}

/// A reference to what a pointer points at; returns an error naming the argument when it is NULL.
macro_rules! required {
    ($pointer:ident) => {
        $crate::boundary::required!($pointer, stringify!($pointer))
    };
    ($pointer:expr, $name:expr) => {
        match $pointer {
            p if p.is_null() => {
                return Err($crate::status::Failure::new(
                    $crate::abi::jfa_status::JFA_ERROR_NULL_POINTER,
                    format!("{} is NULL", $name),
                ));
            }
            p if !p.is_aligned() => {
                return Err($crate::status::Failure::new(
                    $crate::abi::jfa_status::JFA_ERROR_MISALIGNED,
                    format!("{} = {:p}: not the address of a struct of this type", $name, p),
                ));
            }
            p => p,
        }
    };
}

pub(crate) use {entry_points, required};

/// Runs the body of an entry point.
#[inline]
pub(crate) fn guard(name: &str, body: impl FnOnce() -> Result<()>) -> jfa_status {
    // Unwind safety: after a panic the caller gets an error, and what the body could have left half-done are the
    // outputs of that call; handles are only read, but for texts, which are there whole or not at all.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => jfa_status::JFA_OK,
        Ok(Err(failure)) => {
            set_last_error(&failure.to_string());
            failure.status()
        }
        Err(panic) => {
            set_last_error(&format!("internal error in {name}: {}", panic_text(panic.as_ref())));
            // A payload whose destructor panics must not unwind from here.
            std::mem::forget(panic);
            jfa_status::JFA_ERROR_INTERNAL
        }
    }
}

/// The boundary of the two plain symbols, which return no status: a panic gives `otherwise`.
pub(crate) fn guard_value<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        std::mem::forget(panic);
        otherwise
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic")
}

/// Copies a caller's struct, whatever version of the header it was compiled with: fields beyond its struct_size are
/// zero; a newer caller's extra fields must be zero, since what they ask for cannot be done.
///
/// # Safety
/// `pointer`, unless NULL, points at memory that is readable for as many bytes as its struct_size says.
#[inline]
pub(crate) unsafe fn read<T: AbiStruct>(pointer: *const T, argument: &str) -> Result<T> {
    let pointer = required!(pointer, argument);
    // SAFETY: not NULL, aligned, and every struct starts with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size == size_of::<T>() {
        // SAFETY: readable for this many bytes, and every bit pattern is a value.
        return Ok(unsafe { pointer.read() });
    }
    // SAFETY: as above.
    unsafe { read_other(pointer, size, argument) }
}

#[cold]
unsafe fn read_other<T: AbiStruct>(pointer: *const T, size: usize, argument: &str) -> Result<T> {
    check_size::<T>(size, argument)?;
    let known = size.min(size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the caller's struct has `size` bytes, ours has `size_of::<T>()`, and `known` is the smaller.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known) };
    // SAFETY: the caller's struct has `size` bytes.
    let extra = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>().add(known), size - known) };
    if let Some(at) = extra.iter().position(|b| *b != 0) {
        return Err(Failure::new(
            jfa_status::JFA_ERROR_STRUCT_TOO_NEW,
            format!(
                "{argument}: byte {} of {} is set, but this library ({}) knows {} bytes of it: a feature of a newer version",
                known + at,
                T::NAME,
                crate::VERSION,
                size_of::<T>()
            ),
        ));
    }
    // SAFETY: zeroed, then partly copied; every bit pattern is a value.
    Ok(unsafe { value.assume_init() })
}

/// Whether `size` can be the struct_size of some version of `T`: every field is there whole or not at all.
fn check_size<T: AbiStruct>(size: usize, argument: &str) -> Result<()> {
    let cut = T::FIELDS.iter().any(|f| f.offset < size && size < f.offset + f.size);
    if size < T::SINCE || cut {
        let missing = T::FIELDS.iter().find(|f| size < f.offset + f.size).map_or("struct_size", |f| f.name);
        return Err(Failure::new(
            jfa_status::JFA_ERROR_STRUCT_SIZE,
            format!(
                "{argument}.struct_size = {size}: {} has at least {} bytes, this ends before its field {missing} does",
                T::NAME,
                T::SINCE
            ),
        ));
    }
    if size > LARGEST {
        return Err(Failure::new(
            jfa_status::JFA_ERROR_STRUCT_SIZE,
            format!("{argument}.struct_size = {size}: no size of {}; set it to sizeof({})", T::NAME, T::NAME),
        ));
    }
    Ok(())
}

/// Writes a struct into a caller's, as far as its struct_size reaches; what a newer caller has beyond is set to zero.
///
/// # Safety
/// `pointer`, unless NULL, points at memory that is writable for as many bytes as its struct_size says.
pub(crate) unsafe fn write<T: AbiStruct>(pointer: *mut T, value: &T, argument: &str) -> Result<()> {
    let pointer = required!(pointer, argument);
    // SAFETY: not NULL, aligned, and every struct starts with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    check_size::<T>(size, argument)?;
    let known = size.min(size_of::<T>());
    let start = size_of::<usize>();
    // SAFETY: `known` bytes are ours and the caller's; struct_size, the first, stays the caller's.
    unsafe {
        let to = pointer.cast::<u8>();
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>().add(start), to.add(start), known - start);
        std::ptr::write_bytes(to.add(known), 0, size - known);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::abi::jfa_lse;
    use crate::frozen::Field;

    fn last() -> String {
        // SAFETY: the text lives until the next failure on this thread.
        unsafe { CStr::from_ptr(crate::status::last_error()) }.to_str().unwrap().to_owned()
    }

    entry_points! {
        fn panics_with_text(n: i32) {
            assert!(n < 0, "n is {n}");
            Ok(())
        }
        fn panics_with_anything() {
            std::panic::panic_any(PanicsOnDrop)
        }
    }

    struct PanicsOnDrop;
    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            panic!("in a destructor");
        }
    }

    #[test]
    fn a_panic_becomes_a_status() {
        // SAFETY: these take no pointers.
        assert_eq!(unsafe { panics_with_text(7) }, jfa_status::JFA_ERROR_INTERNAL);
        assert_eq!(last(), "internal error in panics_with_text: n is 7");
        // SAFETY: as above.
        assert_eq!(unsafe { panics_with_anything() }, jfa_status::JFA_ERROR_INTERNAL);
        assert_eq!(last(), "internal error in panics_with_anything: panic");
        // SAFETY: as above.
        assert_eq!(unsafe { panics_with_text(-1) }, jfa_status::JFA_OK);
        assert_eq!(guard_value(3, || panic!("no value")), 3);
    }

    /// A struct as a newer header might have it.
    #[repr(C)]
    struct Newer {
        base: jfa_lse,
        extra: [u64; 2],
    }

    fn lse(size: usize) -> jfa_lse {
        jfa_lse { struct_size: size, data: std::ptr::null_mut(), rows: 5, head_stride: 6 }
    }

    #[test]
    fn a_newer_struct_is_read_when_its_news_are_unset() {
        let mut newer = Newer { base: lse(size_of::<Newer>()), extra: [0, 0] };
        // SAFETY: as long as its struct_size says.
        let read_back = unsafe { read(&raw const newer.base, "args->lse") }.unwrap();
        assert_eq!((read_back.rows, read_back.head_stride), (5, 6));
        newer.extra[1] = 0x100;
        // SAFETY: as above.
        let failure = unsafe { read((&raw const newer).cast::<jfa_lse>(), "args->lse") }.unwrap_err();
        assert_eq!(failure.status(), jfa_status::JFA_ERROR_STRUCT_TOO_NEW);
        assert!(failure.to_string().starts_with("args->lse: byte 41 of jfa_lse is set"), "{failure}");
    }

    #[test]
    fn a_short_struct_names_the_field_it_misses() {
        for (size, field) in [(0, "struct_size"), (15, "data"), (16, "rows"), (31, "head_stride")] {
            let short = lse(size);
            // SAFETY: longer than its struct_size says.
            let failure = unsafe { read(&raw const short, "lse") }.unwrap_err();
            assert_eq!(failure.status(), jfa_status::JFA_ERROR_STRUCT_SIZE);
            let text = failure.to_string();
            assert!(text.contains(&format!("lse.struct_size = {size}:")) && text.contains(field), "{text}");
        }
    }

    /// A struct that had its first two fields at first, and grew twice.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: usize,
        first: i64,
        second: i64,
        third: i32,
        fourth: i32,
    }

    // SAFETY: as the trait asks: sizes and offsets are those of `repr(C)`.
    unsafe impl AbiStruct for Grown {
        const NAME: &'static str = "grown";
        const SINCE: usize = 16;
        const FIELDS: &'static [Field] = &[
            Field { name: "struct_size", offset: 0, size: 8 },
            Field { name: "first", offset: 8, size: 8 },
            Field { name: "second", offset: 16, size: 8 },
            Field { name: "third", offset: 24, size: 4 },
            Field { name: "fourth", offset: 28, size: 4 },
        ];
    }

    #[test]
    fn older_callers_have_zero_in_what_they_do_not_know() {
        let full = Grown { struct_size: 32, first: 1, second: 2, third: 3, fourth: 4 };
        for (size, expected) in [
            (16_usize, Ok((0, 0, 0))),
            (24, Ok((2, 0, 0))),
            (28, Ok((2, 3, 0))),
            (32, Ok((2, 3, 4))),
            (8, Err("first")),
            (20, Err("second")),
            (30, Err("fourth")),
        ] {
            // Exactly as much memory as the caller says, so that Miri and AddressSanitizer see a read beyond.
            let mut memory = vec![0_u64; size.div_ceil(8)];
            // SAFETY: `memory` has room for `size` bytes.
            unsafe {
                let bytes = (&raw const full).cast::<u8>();
                std::ptr::copy_nonoverlapping(bytes, memory.as_mut_ptr().cast::<u8>(), size);
            }
            memory[0] = size as u64;
            // SAFETY: as long as it says.
            match (unsafe { read(memory.as_ptr().cast::<Grown>(), "s") }, expected) {
                (Ok(g), Ok(rest)) => assert_eq!((g.first, (g.second, g.third, g.fourth)), (1, rest)),
                (Err(e), Err(field)) => {
                    assert_eq!(e.status(), jfa_status::JFA_ERROR_STRUCT_SIZE);
                    assert!(e.to_string().contains(&format!("before its field {field} does")), "{e}");
                }
                (got, _) => panic!("{size}: {got:?}"),
            }
        }
        // What is written ends where the caller's struct does.
        let mut old = [24_u64, 9, 9, 9];
        // SAFETY: longer than it says.
        unsafe { write(old.as_mut_ptr().cast::<Grown>(), &full, "s") }.unwrap();
        assert_eq!(old, [24, 1, 2, 9]);
    }

    #[test]
    fn null_and_misaligned_structs_are_errors() {
        // SAFETY: NULL is checked.
        let failure = unsafe { read(std::ptr::null::<jfa_lse>(), "lse") }.unwrap_err();
        assert_eq!(failure.to_string(), "lse is NULL");
        let odd = std::ptr::without_provenance::<jfa_lse>(0x1001);
        // SAFETY: rejected before it is read.
        let failure = unsafe { read(odd, "lse") }.unwrap_err();
        assert_eq!(failure.status(), jfa_status::JFA_ERROR_MISALIGNED);
    }

    #[test]
    fn writing_fills_what_the_caller_has() {
        let mut newer = Newer { base: lse(size_of::<Newer>()), extra: [1, 1] };
        // SAFETY: as long as its struct_size says.
        unsafe { write((&raw mut newer).cast::<jfa_lse>(), &lse(0), "out") }.unwrap();
        assert_eq!((newer.base.struct_size, newer.base.rows, newer.extra), (size_of::<Newer>(), 5, [0, 0]));
    }
}
