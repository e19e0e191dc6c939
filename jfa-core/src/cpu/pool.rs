//! Threads: made on first use, shared by every plan with the same number.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Weak};

use crate::fork::Shared;

/// `threads` workers, of which the calling thread is one.
pub(super) struct Pool {
    threads: usize,
    // Null until work comes that is worth sharing. Not a `OnceLock`: a process made by fork has the address but not the threads,
    // and makes its own.
    helpers: AtomicPtr<Helpers>,
}

/// The other workers.
struct Helpers {
    /// Of the process whose threads they are.
    process: u32,
    /// `None` when the system refuses threads.
    pool: Option<rayon::ThreadPool>,
}

impl Drop for Pool {
    fn drop(&mut self) {
        let helpers = *self.helpers.get_mut();
        if helpers.is_null() {
            return;
        }
        // SAFETY: made by `Box::into_raw`, and nobody else has the pool any more.
        let helpers = unsafe { Box::from_raw(helpers) };
        if helpers.process != std::process::id() {
            // Its threads are another process's; telling them to stop would wait for locks that nobody here gives back.
            std::mem::forget(helpers);
        }
    }
}

impl Pool {
    /// The pool of that many threads. It lives as long as someone holds it.
    pub(super) fn shared(threads: usize) -> Arc<Self> {
        static POOLS: Shared<Vec<(usize, Weak<Pool>)>> = Shared::new(Vec::new());
        let threads = threads.max(1);
        POOLS.with(|pools| {
            pools.retain(|(_, p)| p.strong_count() > 0);
            if let Some(pool) = pools.iter().filter(|(n, _)| *n == threads).find_map(|(_, p)| p.upgrade()) {
                return pool;
            }
            let pool = Arc::new(Pool { threads, helpers: AtomicPtr::default() });
            pools.push((threads, Arc::downgrade(&pool)));
            pool
        })
    }

    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether helpers were made (or refused).
    #[cfg(test)]
    pub(super) fn started(&self) -> bool {
        !self.helpers.load(Ordering::Acquire).is_null()
    }

    /// Calls `work(0) .. work(workers - 1)`, at once as far as there are threads, and returns when all have.
    pub(super) fn run(&self, workers: usize, work: &(dyn Fn(usize) + Sync)) {
        let helpers = if workers > 1 { self.helpers() } else { None };
        match helpers {
            None => (0..workers).for_each(work),
            Some(pool) => pool.in_place_scope(|scope| {
                for worker in 1..workers {
                    scope.spawn(move |_| work(worker));
                }
                work(0);
            }),
        }
    }

    fn helpers(&self) -> Option<&rayon::ThreadPool> {
        if self.threads < 2 {
            return None;
        }
        let process = std::process::id();
        let known = self.helpers.load(Ordering::Acquire);
        // SAFETY: null, or made by `Box::into_raw` below, and freed only with the pool.
        if let Some(helpers) = unsafe { known.as_ref() }
            && helpers.process == process
        {
            return helpers.pool.as_ref();
        }
        let made = Box::into_raw(Box::new(Helpers { process, pool: self.make() }));
        let helpers = match self.helpers.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire) {
            // What a forked process found is left as it is: see `drop`.
            Ok(_) => made,
            Err(first) => {
                // SAFETY: made above and given to nobody.
                drop(unsafe { Box::from_raw(made) });
                first
            }
        };
        // SAFETY: as above; not null, since either exchange found or left helpers.
        unsafe { &*helpers }.pool.as_ref()
    }

    fn make(&self) -> Option<rayon::ThreadPool> {
        /// Whether workers of this process have been at rayon's queues, which make state of the process when they are first
        /// used: a child must not find that half done.
        static USED: Shared<bool> = Shared::new(false);
        let pool = USED.with(|used| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(self.threads - 1)
                .thread_name(|i| format!("jfa-cpu-{}", i + 1))
                .build()?;
            if !*used {
                // Waited for on a thread of its own: a worker of the caller's own rayon pool would do the caller's other
                // work meanwhile, and that could come here again.
                let all = std::thread::scope(|scope| {
                    let thread = std::thread::Builder::new().spawn_scoped(scope, || pool.broadcast(|_| ()));
                    thread.is_ok_and(|thread| thread.join().is_ok())
                });
                *used = all;
            }
            Ok::<_, rayon::ThreadPoolBuildError>(pool)
        });
        pool.inspect_err(|error| {
            tracing::warn!(target: "jfa", %error, "no threads for the cpu backend; it works on the calling thread alone");
        })
        .ok()
    }
}
