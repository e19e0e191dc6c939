//! Fifth-generation tensor core.

use super::Cluster;
use super::engine::Job;
use super::warp::Warp;
use crate::findings::{Kind, Place};
use crate::ir::{Addr, Tcgen};

/// Tensor memory of a CTA.
#[derive(Default)]
pub(crate) struct TensorMemory {}

pub(super) struct Work {}

impl Work {
    pub(super) fn after(&self, _t: &Work) -> bool {
        true
    }
}

impl Cluster<'_> {
    pub(super) fn tcgen(&mut self, w: &mut Warp, mask: u32, _t: &Tcgen, _pc: u32) -> bool {
        self.report(w, mask.trailing_zeros(), Kind::BadOperand, None, "tcgen05".into());
        false
    }
    pub(super) fn tcgen_complete(&mut self, _t: Work, _p: Place) {}
    pub(super) fn tcgen_finish_loads(&mut self, _w: &mut Warp) {}
    pub(super) fn tcgen_end(&mut self, _c: usize) {}
    pub(super) fn clc_try_cancel(&mut self, w: &mut Warp, mask: u32, _dst: Addr, _bar: Addr, _m: bool) {
        let _ = Job::Tcgen(Box::new(Work {}));
        self.report(w, mask.trailing_zeros(), Kind::BadOperand, None, "clc".into());
    }
}
