//! State of the whole process that a process made by fork finds whole.
//!
//! A child has its parent's memory, but of its threads only the one that called fork: a lock that another thread held at
//! that moment stays locked in the child for ever, and what it guarded may be half changed. So everything that threads of
//! a process share beyond handles stands behind one lock here, which fork takes before it copies the process and gives back
//! on both sides. There is one lock only, so that there is no order to keep.

use std::cell::UnsafeCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Guards the contents of every [`Shared`].
static LOCK: Mutex<()> = Mutex::new(());

fn lock() -> MutexGuard<'static, ()> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that the threads of a process share, and that a child finds as no thread was changing it.
pub(crate) struct Shared<T>(UnsafeCell<T>);

// SAFETY: the value is reached only under the lock, by one thread at a time.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new(value: T) -> Self {
        Shared(UnsafeCell::new(value))
    }

    /// Calls `work` with the value. `work` is short, reaches no other [`Shared`], and calls nothing that could: no log
    /// messages, no callbacks, no backend; otherwise it waits for itself.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        handlers::register();
        let _held = lock();
        // SAFETY: the lock is held, and `work` takes no second reference.
        work(unsafe { &mut *self.0.get() })
    }
}

#[cfg(unix)]
mod handlers {
    use std::cell::UnsafeCell;
    use std::sync::MutexGuard;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    static REGISTERED: AtomicBool = AtomicBool::new(false);

    /// Makes fork hold the lock. Nobody waits for another's registration, which a child could find begun and not ended:
    /// threads that come at the same time all register, and the handlers count.
    pub(super) fn register() {
        if !REGISTERED.load(Ordering::Acquire) {
            register_again();
        }
    }

    pub(super) fn register_again() {
        // SAFETY: the handlers may be called on any thread at any time. The system forgets them if it ever unloads this code.
        if unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) } == 0 {
            REGISTERED.store(true, Ordering::Release);
        }
    }

    /// The lock while a thread forks.
    struct Held {
        /// Identity of that thread, the same in the child; 0: none forks. Only that thread finds its own here.
        thread: AtomicUsize,
        /// How many registrations' handlers hold it, and the lock itself; belongs to that thread.
        lock: UnsafeCell<(usize, Option<MutexGuard<'static, ()>>)>,
    }

    // SAFETY: `lock` is reached only by the thread that holds the lock; the guard never changes threads.
    unsafe impl Sync for Held {}

    static HELD: Held = Held { thread: AtomicUsize::new(0), lock: UnsafeCell::new((0, None)) };

    fn this_thread() -> usize {
        // SAFETY: no preconditions.
        let thread = unsafe { libc::pthread_self() };
        thread as usize
    }

    unsafe extern "C" fn before() {
        let me = this_thread();
        if HELD.thread.load(Ordering::Relaxed) != me {
            let guard = super::lock();
            HELD.thread.store(me, Ordering::Relaxed);
            // SAFETY: this thread holds the lock.
            unsafe { *HELD.lock.get() = (0, Some(guard)) };
        }
        // SAFETY: this thread holds the lock.
        unsafe { (*HELD.lock.get()).0 += 1 };
    }

    unsafe extern "C" fn after() {
        if HELD.thread.load(Ordering::Relaxed) != this_thread() {
            return;
        }
        // SAFETY: this thread, or the one that it is a copy of, holds the lock.
        let (count, guard) = unsafe { &mut *HELD.lock.get() };
        *count -= 1;
        if *count == 0 {
            let guard = guard.take();
            HELD.thread.store(0, Ordering::Relaxed);
            drop(guard);
        }
    }
}

#[cfg(not(unix))]
mod handlers {
    pub(super) fn register() {}
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A child made while other threads are in the middle of a change finds the value whole and can change it.
    #[test]
    fn a_child_finds_the_lock_free_and_the_value_whole() {
        static PAIR: Shared<(u64, u64)> = Shared::new((0, 0));
        static STOP: AtomicBool = AtomicBool::new(false);
        let step = |pair: &mut (u64, u64)| {
            pair.0 += 1;
            // Long enough to be met.
            std::thread::sleep(std::time::Duration::from_micros(200));
            pair.1 += 1;
            pair.0 == pair.1
        };
        // Registered twice, as by two threads at once: the handlers of both run in every fork.
        handlers::register_again();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !STOP.load(Ordering::Relaxed) {
                        assert!(PAIR.with(step));
                    }
                });
            }
            let mut failed = 0;
            for _ in 0..50 {
                // SAFETY: the child touches only the lock and ends without running anything else of the test.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: no preconditions; a child that waits for ever is ended.
                    unsafe {
                        libc::alarm(20);
                        libc::_exit(i32::from(!PAIR.with(step)));
                    }
                }
                let mut status = 0;
                // SAFETY: the child is this process's own.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                if waited != child || status != 0 {
                    failed += 1;
                    break;
                }
            }
            STOP.store(true, Ordering::Relaxed);
            assert_eq!(failed, 0, "a child hung or found half a change");
        });
        assert!(PAIR.with(step), "the parent goes on");
    }
}
