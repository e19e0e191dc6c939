//! The parts of the `jfa-bench` command: workloads, scenarios laid out in a backend's memory, comparison with the
//! oracle, the conformance suite, timing and pictures.

// The numbers cast here are lengths, counts and measured values, all far below 2^53 and 2^31 where it matters.

pub mod ab;
pub mod backends;
pub mod bench;
pub mod check;
pub mod compare;
pub mod element;
pub mod execution;
pub mod info;
mod mt19937;
pub mod picture;
pub mod progress;
pub mod reference;
pub mod run;
pub mod scenario;
pub mod statistics;
pub mod table;
pub mod workload;
