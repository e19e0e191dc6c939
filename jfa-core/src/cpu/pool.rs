//! Threads: made on first use, shared by every plan with the same number.

use std::sync::{Arc, Mutex, OnceLock, Weak};

/// `threads` workers, of which the calling thread is one.
pub(super) struct Pool {
    threads: usize,
    // Empty until work comes that is worth sharing; `None` when the system refuses threads.
    helpers: OnceLock<Option<rayon::ThreadPool>>,
}

impl Pool {
    /// The pool of that many threads. It lives as long as someone holds it.
    pub(super) fn shared(threads: usize) -> Arc<Self> {
        static POOLS: Mutex<Vec<Weak<Pool>>> = Mutex::new(Vec::new());
        let threads = threads.max(1);
        let mut pools = POOLS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        pools.retain(|p| p.strong_count() > 0);
        if let Some(pool) = pools.iter().filter_map(Weak::upgrade).find(|p| p.threads == threads) {
            return pool;
        }
        let pool = Arc::new(Pool { threads, helpers: OnceLock::new() });
        pools.push(Arc::downgrade(&pool));
        pool
    }

    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether helpers were made (or refused).
    #[cfg(test)]
    pub(super) fn started(&self) -> bool {
        self.helpers.get().is_some()
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
        let make = || {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(self.threads - 1)
                .thread_name(|i| format!("jfa-cpu-{}", i + 1))
                .build();
            match pool {
                Ok(pool) => Some(pool),
                Err(error) => {
                    tracing::warn!(%error, "no threads for the cpu backend; it works on the calling thread alone");
                    None
                }
            }
        };
        if self.threads < 2 {
            return None;
        }
        self.helpers.get_or_init(make).as_ref()
    }
}
