//! The conformance suite finds what is wrong: backends that break one rule each, made of the cpu backend, must fail the
//! case that is about that rule; and one whose addresses mean nothing to the host must pass like any other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use jfa_bench::check::{self, CheckArgs, Context, Finished, Observer, Outcome};
use jfa_core::layout::Offsets;
use jfa_core::{
    Alignment, AttentionBackend, BackendPlan, BackwardArgs, Buffer, Call, Capabilities, DType, DataPtr, DeviceMemory,
    ForwardArgs, HostMemory, Layout, LseView, Mask, MemorySpace, Problem, Requirements, Result, Stream, TensorView,
};

type AfterForward = fn(&Call, &ForwardArgs, usize);
type AroundBackward = fn(&Call, &BackwardArgs) -> Box<dyn FnOnce()>;

/// What is done to a plan's calls.
#[derive(Clone, Default)]
struct Sabotage {
    /// Another problem is computed instead.
    problem: Option<fn(&mut Problem)>,
    /// Runs after each forward.
    after_forward: Option<AfterForward>,
    /// Runs around each backward: what it returns runs after it.
    around_backward: Option<AroundBackward>,
}

struct Broken {
    cpu: Arc<dyn AttentionBackend>,
    sabotage: Sabotage,
}

struct BrokenPlan {
    plan: Arc<dyn BackendPlan>,
    sabotage: Sabotage,
    calls: AtomicUsize,
}

impl AttentionBackend for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn description(&self) -> String {
        "cpu, sabotaged".to_owned()
    }

    fn capabilities(&self) -> &Capabilities {
        self.cpu.capabilities()
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        let mut problem = problem.clone();
        if let Some(change) = self.sabotage.problem {
            change(&mut problem);
        }
        let plan = self.cpu.plan(&problem)?;
        Ok(Arc::new(BrokenPlan { plan, sabotage: self.sabotage.clone(), calls: AtomicUsize::new(0) }))
    }
}

impl BackendPlan for BrokenPlan {
    fn requirements(&self) -> Requirements {
        self.plan.requirements()
    }

    fn describe(&self) -> String {
        self.plan.describe()
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.plan.build_schedule(layout, schedule, stream) }
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.plan.forward(call, args)? };
        if let Some(after) = self.sabotage.after_forward {
            after(call, args, self.calls.fetch_add(1, Ordering::Relaxed));
        }
        Ok(())
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let after = self.sabotage.around_backward.map(|around| around(call, args));
        // SAFETY: forwarded.
        unsafe { self.plan.backward(call, args)? };
        if let Some(after) = after {
            after();
        }
        Ok(())
    }
}

/// Address of a bf16 element.
fn element(v: &TensorView, row: i64, head: i64, c: i64) -> *mut u16 {
    v.data.cast::<u16>().wrapping_offset((row * v.row_stride + head * v.head_stride + c) as isize)
}

/// The i32 offsets of the queries.
fn q_offsets(layout: &Layout) -> Vec<i64> {
    let o = layout.q_offsets.expect("the filtered cases are jagged");
    // SAFETY: the layout of a running call has batch + 1 entries.
    unsafe {
        match o.index_type {
            jfa_core::IndexType::I32 => std::slice::from_raw_parts(o.data.cast::<i32>(), layout.batch as usize + 1)
                .iter()
                .map(|x| i64::from(*x))
                .collect(),
            jfa_core::IndexType::I64 => {
                std::slice::from_raw_parts(o.data.cast::<i64>(), layout.batch as usize + 1).to_vec()
            }
        }
    }
}

fn suite(backend: Arc<dyn AttentionBackend>, filter: &[&str]) -> Vec<Finished> {
    observed(backend, filter, None)
}

fn observed(backend: Arc<dyn AttentionBackend>, filter: &[&str], observer: Option<Observer>) -> Vec<Finished> {
    let args = CheckArgs {
        quick: true,
        filter: filter.iter().map(ToString::to_string).collect(),
        dtype: vec![DType::BF16.to_string()],
        head_dim: Some(16),
        ..CheckArgs::default()
    };
    let memory: Arc<dyn DeviceMemory> = backend.memory().unwrap_or_else(|| Arc::new(HostMemory::new()));
    let cases = check::cases(&args, backend.capabilities()).unwrap();
    assert!(!cases.is_empty(), "no case is named {filter:?}");
    let context = Context { backend, memory, repeats: 4, observer };
    cases.iter().map(|c| check::run_case(&context, c)).collect()
}

/// The case that is about the broken rule fails, and says `word`; the honest backend passes it.
fn caught(case: &str, word: &str, sabotage: Sabotage) {
    for finished in suite(jfa_core::cpu::backend_with_threads(1), &[case]) {
        assert!(matches!(finished.outcome, Outcome::Passed(_)), "{}: {:?}", finished.name, finished.outcome);
    }
    let broken = Arc::new(Broken { cpu: jfa_core::cpu::backend_with_threads(1), sabotage });
    let finished = suite(broken, &[case]);
    let failures: Vec<String> = finished
        .iter()
        .filter_map(|f| match &f.outcome {
            Outcome::Failed(findings) => Some(findings.join("\n")),
            _ => None,
        })
        .collect();
    assert!(failures.iter().any(|f| f.contains(word)), "{case} did not notice ({word}): {failures:?}");
}

#[test]
fn right_results_do_not_excuse_what_kernels_did_on_the_way() {
    let left = Mutex::new(vec!["Race in kernel at PTX line 7".to_owned()]);
    let observer: Observer = Box::new(move || std::mem::take(&mut *left.lock().unwrap()));
    let finished = observed(jfa_core::cpu::backend_with_threads(1), &["lengths/self", "lengths/cross"], Some(observer));
    let Outcome::Failed(findings) = &finished[0].outcome else { panic!("{:?}", finished[0].outcome) };
    assert_eq!(findings, &["Race in kernel at PTX line 7"]);
    assert!(finished[1..].iter().all(|f| matches!(f.outcome, Outcome::Passed(_))));
}

#[test]
fn a_wrong_alignment() {
    let flip: fn(&mut Problem) = |p| {
        if let Mask::Causal(Alignment::BottomRight) = p.mask {
            p.mask = Mask::Causal(Alignment::TopLeft);
        }
    };
    caught("mask/causal-bottom-right", "NaN/inf at", Sabotage { problem: Some(flip), ..Default::default() });
}

#[test]
fn a_scale_without_its_sign() {
    let change: fn(&mut Problem) = |p| p.scale = p.scale.abs();
    caught("scale/negative", "o: relative error", Sabotage { problem: Some(change), ..Default::default() });
}

#[test]
fn one_wrong_element_of_many() {
    let after: AfterForward = |call, args, _| {
        let last = *q_offsets(call.layout).last().unwrap() - 1;
        // SAFETY: an element of the last sequence's last row; the bit is worth half of its value.
        unsafe { *element(&args.o, last, 0, 0) ^= 0x40 };
    };
    caught("lengths/self", "o: 1 element far off", Sabotage { after_forward: Some(after), ..Default::default() });
}

#[test]
fn a_nan_where_a_number_belongs_is_told_before_any_error() {
    let after: AfterForward = |_, args, _| {
        // SAFETY: element (0, 1, 3) of o.
        unsafe { *element(&args.o, 0, 1, 3) = 0x7FC0 };
    };
    caught(
        "lengths/self",
        "row 0, head 1, element 3: NaN",
        Sabotage { after_forward: Some(after), ..Default::default() },
    );
}

#[test]
fn rows_of_no_sequence_written_unasked() {
    let after: AfterForward = |_, args, _| {
        // SAFETY: the last row of the buffer, which the loose placement leaves unused.
        unsafe { *element(&args.o, args.o.rows - 1, 0, 0) = 0 };
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("degenerate/leaves-unused-rows", "a row of no sequence was written: o", sabotage);
}

#[test]
fn rows_of_no_sequence_left_when_zeros_were_asked_for() {
    let change: fn(&mut Problem) = |p| p.zero_unused_rows = false;
    let sabotage = Sabotage { problem: Some(change), ..Default::default() };
    caught("degenerate/zero_unused_rows", "a row of no sequence is not zero", sabotage);
}

#[test]
fn a_write_past_the_workspace() {
    let after: AfterForward = |call, _, _| {
        let w = call.workspace;
        // SAFETY: the suite's guard follows the workspace.
        unsafe { *w.data.cast::<u8>().wrapping_add(w.bytes) = 7 };
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("lengths/self", "memory outside the forward workspace", sabotage);
}

#[test]
fn an_input_used_as_scratch() {
    let after: AfterForward = |_, args, _| {
        // SAFETY: element 0 of k; the rule broken is that inputs are not written.
        unsafe { *element(&args.k, 0, 0, 0) ^= 1 };
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("lengths/self", "memory that is no output was written: k", sabotage);
}

#[test]
fn masked_keys_multiplied_by_zero_instead_of_left_out() {
    let after: AfterForward = |call, args, _| {
        let first = element(&args.o, q_offsets(call.layout)[0], 0, 0);
        let beyond = element(&args.v, args.v.rows - 1, 0, 0);
        // SAFETY: the first row of o, and the last of v, which belongs to no sequence in a loose placement.
        unsafe {
            let sum = half::bf16::from_bits(*first).to_f32() + 0.0 * half::bf16::from_bits(*beyond).to_f32();
            *first = half::bf16::from_f32(sum).to_bits();
        }
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("isolation/garbage-around-full", "around the sequences", sabotage);
}

#[test]
fn a_bit_that_changes_from_run_to_run() {
    let after: AfterForward = |_, args, call| {
        if call % 2 == 1 {
            // SAFETY: the first element of o.
            unsafe { *element(&args.o, 0, 0, 0) ^= 1 };
        }
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("determinism/repeated", "run 2 of", sabotage);
}

#[test]
fn a_bit_that_depends_on_the_batch() {
    let after: AfterForward = |call, args, _| {
        if call.layout.batch > 5 {
            // SAFETY: the first element of o.
            unsafe { *element(&args.o, 0, 0, 0) ^= 1 };
        }
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("batch-invariance/first-half", "o of sequence 0", sabotage);
}

#[test]
fn gradients_of_keys_without_queries_left_unwritten() {
    let around: AroundBackward = |_, args| {
        let at = element(&args.dk, 0, 0, 0);
        // SAFETY: the first key's gradient; its sequence has no query in the case at hand.
        let before = unsafe { *at };
        let at = at as usize;
        // SAFETY: as above, after the backward.
        Box::new(move || unsafe { *(at as *mut u16) = before })
    };
    let sabotage = Sabotage { around_backward: Some(around), ..Default::default() };
    caught("degenerate/q_len-0", "dk: NaN/inf", sabotage);
}

#[test]
fn hints_taken_for_facts() {
    let after: AfterForward = |call, args, _| {
        // As if only the first row (the hint) of each sequence had been computed.
        let offsets = q_offsets(call.layout);
        // SAFETY: the second row of o belongs to the first sequence of the case.
        unsafe { *element(&args.o, offsets[0] + 1, 0, 0) = 0xFFFF };
    };
    let sabotage = Sabotage { after_forward: Some(after), ..Default::default() };
    caught("hints/too-small", "o: NaN/inf", sabotage);
}

/// Memory whose addresses are host addresses moved out of the address space: nobody can read through them by mistake.
struct ForeignMemory {
    host: HostMemory,
    live: Mutex<BTreeMap<usize, usize>>,
}

const AWAY: usize = 1 << 62;

fn away(p: DataPtr) -> DataPtr {
    DataPtr::new(p.cast::<u8>().wrapping_add(AWAY))
}

fn home(p: DataPtr) -> DataPtr {
    if p.is_null() { p } else { DataPtr::new(p.cast::<u8>().wrapping_sub(AWAY)) }
}

impl DeviceMemory for ForeignMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::CudaDevice
    }

    fn describe(&self) -> String {
        "memory the host cannot address".to_owned()
    }

    fn allocate(&self, bytes: usize) -> Result<DataPtr> {
        let p = away(self.host.allocate(bytes)?);
        self.live.lock().unwrap().insert(p.addr(), bytes);
        Ok(p)
    }

    unsafe fn free(&self, data: DataPtr, bytes: usize) {
        assert_eq!(self.live.lock().unwrap().remove(&data.addr()), Some(bytes), "freed what was not allocated");
        // SAFETY: forwarded, with the address that the host gave.
        unsafe { self.host.free(home(data), bytes) };
    }

    unsafe fn upload(&self, dst: DataPtr, src: &[u8]) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.host.upload(home(dst), src) }
    }

    unsafe fn download(&self, dst: &mut [u8], src: DataPtr) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.host.download(dst, home(src)) }
    }

    unsafe fn fill(&self, dst: DataPtr, bytes: usize, value: u8) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.host.fill(home(dst), bytes, value) }
    }

    fn stream(&self) -> Stream {
        Stream::from_raw(std::ptr::without_provenance_mut(0x51))
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn flush_caches(&self) -> Result<()> {
        Ok(())
    }
}

/// The cpu backend behind addresses of [`ForeignMemory`].
struct Foreign {
    cpu: Arc<dyn AttentionBackend>,
    capabilities: Capabilities,
    memory: Arc<ForeignMemory>,
}

struct ForeignPlan {
    plan: Arc<dyn BackendPlan>,
}

impl AttentionBackend for Foreign {
    fn name(&self) -> &str {
        "foreign"
    }

    fn description(&self) -> String {
        "cpu behind foreign addresses".to_owned()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        Some(self.memory.clone())
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        Ok(Arc::new(ForeignPlan { plan: self.cpu.plan(problem)? }))
    }
}

fn home_layout(l: &Layout) -> Layout {
    let offsets = |o: Offsets| Offsets { data: home(o.data), ..o };
    Layout {
        q_offsets: l.q_offsets.map(offsets),
        q_lengths: l.q_lengths.map(home),
        kv_offsets: offsets(l.kv_offsets),
        kv_lengths: l.kv_lengths.map(home),
        kv_index: l.kv_index.map(home),
        bias_offsets: l.bias_offsets.map(home),
        ..*l
    }
}

fn home_buffer(b: Buffer) -> Buffer {
    Buffer { data: home(b.data), ..b }
}

fn home_view(v: TensorView) -> TensorView {
    TensorView { data: home(v.data), ..v }
}

fn home_lse(v: LseView) -> LseView {
    LseView { data: home(v.data), ..v }
}

impl BackendPlan for ForeignPlan {
    fn requirements(&self) -> Requirements {
        self.plan.requirements()
    }

    fn describe(&self) -> String {
        self.plan.describe()
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        assert_eq!(stream.0.addr(), 0x51, "work belongs on the memory's stream");
        // SAFETY: forwarded, with addresses that mean something to the host.
        unsafe { self.plan.build_schedule(&home_layout(layout), home_buffer(schedule), stream) }
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let layout = home_layout(call.layout);
        let (schedule, workspace) = (home_buffer(call.schedule), home_buffer(call.workspace));
        let call = Call { layout: &layout, schedule, workspace, stream: call.stream };
        let args = ForwardArgs {
            q: home_view(args.q),
            k: home_view(args.k),
            v: home_view(args.v),
            bias: home(args.bias),
            o: home_view(args.o),
            lse: home_lse(args.lse),
        };
        // SAFETY: as above.
        unsafe { self.plan.forward(&call, &args) }
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let layout = home_layout(call.layout);
        let (schedule, workspace) = (home_buffer(call.schedule), home_buffer(call.workspace));
        let call = Call { layout: &layout, schedule, workspace, stream: call.stream };
        let args = BackwardArgs {
            q: home_view(args.q),
            k: home_view(args.k),
            v: home_view(args.v),
            bias: home(args.bias),
            o: home_view(args.o),
            lse: home_lse(args.lse),
            d_o: home_view(args.d_o),
            dq: home_view(args.dq),
            dk: home_view(args.dk),
            dv: home_view(args.dv),
            dbias: home(args.dbias),
        };
        // SAFETY: as above.
        unsafe { self.plan.backward(&call, &args) }
    }
}

#[test]
fn a_backend_whose_memory_the_host_cannot_address_passes() {
    let cpu = jfa_core::cpu::backend_with_threads(2);
    let mut capabilities = cpu.capabilities().clone();
    capabilities.memory_space = MemorySpace::CudaDevice;
    let memory = Arc::new(ForeignMemory { host: HostMemory::new(), live: Mutex::default() });
    let backend = Arc::new(Foreign { cpu, capabilities, memory: memory.clone() });
    // Wild offsets in device memory are for kernels that clamp; the cpu backend relies on them having been checked.
    let filter =
        ["lengths/", "mask/", "placement/", "degenerate/", "isolation/", "schedule/", "error/", "batch-invariance"];
    for finished in suite(backend, &filter) {
        match &finished.outcome {
            Outcome::Failed(findings) => panic!("{}: {findings:?}", finished.name),
            Outcome::Passed(_) => {}
            Outcome::Skipped(reason) => assert!(!reason.is_empty(), "{}", finished.name),
        }
    }
    assert!(memory.live.lock().unwrap().is_empty(), "the suite frees what it allocates");
}
