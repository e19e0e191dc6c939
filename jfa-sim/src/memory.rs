//! Device memory: allocations in a virtual address space, with a shadow that knows which bytes were written.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// First device address.
const BASE: u64 = 0x7_0000_0000;
/// Bytes between allocations that belong to none.
const GUARD: u64 = 1 << 16;

/// The byte was written.
pub(crate) const INIT: u8 = 1;
/// An asynchronous write of the byte is on its way.
pub(crate) const PENDING: u8 = 2;

/// An allocation.
pub(crate) struct Alloc {
    base: u64,
    size: u64,
    words: Box<[UnsafeCell<u64>]>,
    shadow: Box<[AtomicU8]>,
    /// What this launch did to it: [`WRITTEN`] by threads, [`STORING`] by copies.
    used: AtomicU8,
}

/// Threads of the launch wrote to the allocation.
const WRITTEN: u8 = 1;
/// Copies of the launch are to write to it.
const STORING: u8 = 2;

// SAFETY: `words` is only accessed through atomic operations (see the methods of `Alloc`).
unsafe impl Sync for Alloc {}
// SAFETY: as above; the memory is owned.
unsafe impl Send for Alloc {}

impl Alloc {
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Threads of this launch wrote here.
    #[inline]
    pub(crate) fn is_written(&self) -> bool {
        self.used.load(Ordering::Relaxed) & WRITTEN != 0
    }

    pub(crate) fn set_written(&self) {
        if !self.is_written() {
            self.used.fetch_or(WRITTEN, Ordering::Relaxed);
        }
    }

    fn ptr(&self, off: usize) -> *mut u8 {
        debug_assert!(off < self.words.len() * 8);
        // SAFETY: callers stay inside the allocation.
        unsafe { self.words.as_ptr().cast::<u8>().cast_mut().add(off) }
    }

    /// Little-endian value of 1, 2, 4 or 8 bytes at an aligned offset inside the allocation.
    pub(crate) fn load(&self, off: usize, bytes: usize) -> u64 {
        assert!(off + bytes <= self.words.len() * 8 && off.is_multiple_of(bytes));
        let p = self.ptr(off);
        // SAFETY: in bounds and aligned by the assertion; all accesses are atomic.
        unsafe {
            match bytes {
                1 => u64::from(AtomicU8::from_ptr(p).load(Ordering::Relaxed)),
                2 => u64::from(AtomicU16::from_ptr(p.cast()).load(Ordering::Relaxed)),
                4 => u64::from(AtomicU32::from_ptr(p.cast()).load(Ordering::Relaxed)),
                _ => AtomicU64::from_ptr(p.cast()).load(Ordering::Relaxed),
            }
        }
    }

    /// Stores 1, 2, 4 or 8 bytes at an aligned offset inside the allocation.
    pub(crate) fn store(&self, off: usize, bytes: usize, v: u64) {
        assert!(off + bytes <= self.words.len() * 8 && off.is_multiple_of(bytes));
        let p = self.ptr(off);
        // SAFETY: in bounds and aligned by the assertion; all accesses are atomic.
        unsafe {
            match bytes {
                1 => AtomicU8::from_ptr(p).store(v as u8, Ordering::Relaxed),
                2 => AtomicU16::from_ptr(p.cast()).store(v as u16, Ordering::Relaxed),
                4 => AtomicU32::from_ptr(p.cast()).store(v as u32, Ordering::Relaxed),
                _ => AtomicU64::from_ptr(p.cast()).store(v, Ordering::Relaxed),
            }
        }
    }

    /// Replaces the value at an aligned offset by `f` of it, atomically; returns the old one.
    pub(crate) fn update(&self, off: usize, bytes: usize, f: impl Fn(u64) -> u64) -> u64 {
        assert!(off + bytes <= self.words.len() * 8 && off.is_multiple_of(bytes));
        let p = self.ptr(off);
        macro_rules! rmw {
            ($t:ty) => {{
                // SAFETY: in bounds and aligned by the assertion; all accesses are atomic.
                let a = unsafe { <$t>::from_ptr(p.cast()) };
                match a.fetch_update(Ordering::AcqRel, Ordering::Acquire, |v| Some(f(u64::from(v)) as _)) {
                    Ok(v) | Err(v) => u64::from(v),
                }
            }};
        }
        match bytes {
            1 => rmw!(AtomicU8),
            2 => rmw!(AtomicU16),
            4 => rmw!(AtomicU32),
            _ => rmw!(AtomicU64),
        }
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, off: usize, out: &mut [u8]) {
        let mut i = 0;
        while i < out.len() {
            if (off + i).is_multiple_of(8) && out.len() - i >= 8 {
                out[i..i + 8].copy_from_slice(&self.load(off + i, 8).to_le_bytes());
                i += 8;
            } else {
                out[i] = self.load(off + i, 1) as u8;
                i += 1;
            }
        }
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, off: usize, data: &[u8]) {
        let mut i = 0;
        while i < data.len() {
            if (off + i).is_multiple_of(8) && data.len() - i >= 8 {
                self.store(off + i, 8, u64::from_le_bytes(data[i..i + 8].try_into().expect("eight bytes")));
                i += 8;
            } else {
                self.store(off + i, 1, u64::from(data[i]));
                i += 1;
            }
        }
    }

    /// Shadow bits that all bytes of the range have (`and`) and that some byte has (`or`).
    pub(crate) fn shadow(&self, off: usize, len: usize) -> (u8, u8) {
        let (mut and, mut or) = (0xff, 0);
        for s in &self.shadow[off..off + len] {
            let s = s.load(Ordering::Relaxed);
            and &= s;
            or |= s;
        }
        (and, or)
    }

    /// Sets `set` and clears `clear` in the shadow of the range.
    pub(crate) fn mark(&self, off: usize, len: usize, set: u8, clear: u8) {
        if set & PENDING != 0 {
            self.used.fetch_or(STORING, Ordering::Relaxed);
        }
        for s in &self.shadow[off..off + len] {
            let v = s.load(Ordering::Relaxed);
            let n = (v & !clear) | set;
            if v != n {
                s.store(n, Ordering::Relaxed);
            }
        }
    }
}

/// All allocations.
#[derive(Default)]
pub(crate) struct DeviceMemory {
    allocs: Vec<Alloc>,
    next: u64,
}

impl DeviceMemory {
    pub(crate) fn alloc(&mut self, size: u64) -> u64 {
        let base = BASE + self.next;
        self.next += (size + GUARD).next_multiple_of(GUARD);
        let words = (0..size.div_ceil(8)).map(|_| UnsafeCell::new(0xcdcd_cdcd_cdcd_cdcd)).collect();
        let shadow = (0..size).map(|_| AtomicU8::new(0)).collect();
        // Addresses only grow, so the list stays sorted.
        self.allocs.push(Alloc { base, size, words, shadow, used: AtomicU8::new(0) });
        base
    }

    pub(crate) fn free(&mut self, base: u64) -> bool {
        let n = self.allocs.len();
        self.allocs.retain(|a| a.base != base);
        self.allocs.len() != n
    }

    /// The allocation that contains `[addr, addr + len)`, and the offset in it. `hint` remembers the last hit.
    #[inline]
    pub(crate) fn find(&self, addr: u64, len: usize, hint: &mut usize) -> Option<(&Alloc, usize)> {
        if let Some(a) = self.allocs.get(*hint) {
            let off = addr.wrapping_sub(a.base);
            if off < a.size && a.size - off >= len as u64 {
                return Some((a, off as usize));
            }
        }
        let i = self.allocs.partition_point(|a| a.base <= addr).checked_sub(1)?;
        let a = &self.allocs[i];
        let off = addr - a.base;
        if off <= a.size && a.size - off >= len as u64 {
            *hint = i;
            return Some((a, off as usize));
        }
        None
    }

    /// Describes where an address is, for messages.
    pub(crate) fn describe(&self, addr: u64) -> String {
        let i = self.allocs.partition_point(|a| a.base <= addr);
        let before = i.checked_sub(1).map(|i| &self.allocs[i]);
        match before {
            Some(a) => {
                format!("{} bytes past the start of the allocation {:#x} of {} bytes", addr - a.base, a.base, a.size)
            }
            None => "below every allocation".to_string(),
        }
    }

    /// A launch ended: nothing is on its way any more, and what follows is ordered after it.
    pub(crate) fn settle(&self) {
        for a in &self.allocs {
            if a.used.swap(0, Ordering::Relaxed) & STORING != 0 {
                a.mark(0, a.size as usize, 0, PENDING);
            }
        }
    }
}
