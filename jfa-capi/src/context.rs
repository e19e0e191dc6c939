//! The entry points behind the function table.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::size_of;

use jfa_core::registry::{Request, Selection, Skipped};
use jfa_core::{Buffer, DataPtr, Error, Plan, Requirements, Stream};

use once_cell::race::OnceBox;

use crate::abi::*;
use crate::boundary::{Result, entry_points, read, required, write};
use crate::convert;
use crate::logging::{self, Sink};
use crate::report;
use crate::status::{self, Failure, c_text};

/// What a `jfa_context` holds. Texts are made when they are asked for, by whoever comes first: nobody waits for another
/// thread's, which in a process made by fork is never finished.
pub(crate) struct Context {
    selection: Selection,
    log: Option<Sink>,
    text: OnceBox<CString>,
    json: OnceBox<CString>,
}

/// What a `jfa_plan` holds.
pub(crate) struct PlanHandle {
    plan: Plan,
    skipped: Vec<Skipped>,
    backend: CString,
    log: Option<Sink>,
    text: OnceBox<CString>,
    json: OnceBox<CString>,
}

impl PlanHandle {
    /// Logs why a call cannot be taken; failures of those that can are the core's to log.
    #[cold]
    fn refused(&self, call: &str, failure: Failure) -> Failure {
        logging::scoped(self.log, || {
            let backend = self.backend.to_string_lossy();
            tracing::trace!(target: "jfa", %backend, error = %failure, "{call} failed");
        });
        failure
    }
}

/// Handles are used by many threads at once.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Context>();
    shared::<PlanHandle>();
};

/// Sets an output pointer before anything can fail, so that a caller that ignores the status finds NULL.
macro_rules! cleared {
    ($out:ident) => {{
        let out = required!($out);
        // SAFETY: not NULL and aligned; the caller gives the address of a pointer of its own.
        unsafe { out.write(std::ptr::null_mut()) };
        out
    }};
}

/// The same for a text.
macro_rules! cleared_text {
    ($out:ident) => {{
        let out = required!($out);
        // SAFETY: as above.
        unsafe { out.write(std::ptr::null()) };
        out
    }};
}

/// A borrowed handle.
macro_rules! handle {
    ($handle:ident) => {{
        let handle = required!($handle);
        // SAFETY: not NULL; the header's contract is that it came from this library and has not been released.
        unsafe { &(*handle).inner }
    }};
}

/// What a call was given. No `map_err`: it would copy what there is on the way.
macro_rules! taken {
    ($plan:ident, $call:literal, $given:expr) => {
        match $given {
            Ok(given) => given,
            Err(failure) => return Err($plan.refused($call, failure)),
        }
    };
}

entry_points! {
    fn status_name(code: i32, name: *mut *const c_char) {
        let out = cleared_text!(name);
        let text = status::name(code).ok_or_else(|| Error::invalid("status", code, "no code of this library"))?;
        // SAFETY: `out` was checked above.
        unsafe { out.write(text.as_ptr()) };
        Ok(())
    }

    fn context_create(options: *const jfa_context_options, context: *mut *mut jfa_context) {
        let out = cleared!(context);
        // SAFETY: the caller's struct is as long as it says.
        let options = unsafe { read(options, "options") }?;
        let memory_space = convert::MEMORY.get(options.memory_space, "options.memory_space")?;
        let backend = if options.backend.is_null() {
            None
        } else {
            // SAFETY: the header asks for a string.
            let name = unsafe { CStr::from_ptr(options.backend) };
            match name.to_str() {
                Ok(name) => Some(name.to_owned()),
                Err(_) => return Err(Error::invalid("options.backend", name.to_string_lossy(), "not UTF-8").into()),
            }
        };
        let request = Request { backend, memory_space };
        let (log, environment) = logging::start(options.log, options.log_data, options.log_level)?;
        let selection = logging::scoped(log, || crate::registry().select(&request, &environment))?;
        let inner = Context { selection, log, text: OnceBox::new(), json: OnceBox::new() };
        // SAFETY: `out` was checked above.
        unsafe { out.write(Box::into_raw(Box::new(jfa_context { inner }))) };
        Ok(())
    }

    fn context_release(context: *mut jfa_context) {
        if !context.is_null() {
            let context = required!(context);
            // SAFETY: it came from `context_create`, and the header says that it is released once.
            drop(unsafe { Box::from_raw(context) });
        }
        Ok(())
    }

    fn context_report(context: *const jfa_context, format: i32, text: *mut *const c_char) {
        let context = handle!(context);
        let out = cleared_text!(text);
        let report = if convert::REPORT.get(format, "format")? {
            context.json.get_or_init(|| Box::new(c_text(&report::selection_json(&context.selection).to_string())))
        } else {
            context.text.get_or_init(|| Box::new(c_text(&report::selection_text(&context.selection))))
        };
        // SAFETY: `out` was checked above.
        unsafe { out.write(report.as_ptr()) };
        Ok(())
    }

    fn plan_create(context: *const jfa_context, problem: *const jfa_problem, plan: *mut *mut jfa_plan) {
        let out = cleared!(plan);
        let context = handle!(context);
        let plan = logging::scoped(context.log, || -> Result<Plan> {
            // SAFETY: the caller's struct is as long as it says.
            let problem = unsafe { convert::problem(problem) }
                .inspect_err(|failure| tracing::debug!(target: "jfa", error = %failure, "no plan"))?;
            Ok(context.selection.plan(&problem)?)
        })?;
        let inner = PlanHandle {
            skipped: report::passed_over(&context.selection, &plan),
            backend: c_text(plan.backend().name()),
            plan,
            log: context.log,
            text: OnceBox::new(),
            json: OnceBox::new(),
        };
        // SAFETY: `out` was checked above.
        unsafe { out.write(Box::into_raw(Box::new(jfa_plan { inner }))) };
        Ok(())
    }

    fn plan_release(plan: *mut jfa_plan) {
        if !plan.is_null() {
            let plan = required!(plan);
            // SAFETY: it came from `plan_create`, and the header says that it is released once.
            drop(unsafe { Box::from_raw(plan) });
        }
        Ok(())
    }

    fn plan_requirements(plan: *const jfa_plan, requirements: *mut jfa_requirements) {
        let plan = &handle!(plan).plan;
        let r = plan.requirements();
        let capabilities = plan.backend().capabilities();
        let value = jfa_requirements {
            struct_size: size_of::<jfa_requirements>(),
            schedule_bytes: r.schedule_bytes,
            forward_bytes: r.forward_bytes,
            backward_bytes: r.backward_bytes,
            buffer_alignment: Requirements::ALIGNMENT,
            base_alignment: capabilities.base_alignment.max(plan.problem().dtype.size()),
            stride_alignment: capabilities.stride_alignment.max(plan.problem().dtype.size()),
            memory_space: convert::MEMORY.value(Some(plan.memory_space())),
            reserved: 0,
        };
        // SAFETY: the caller's struct is as long as it says.
        unsafe { write(requirements, &value, "requirements") }
    }

    fn plan_backend(plan: *const jfa_plan, name: *mut *const c_char) {
        let plan = handle!(plan);
        let out = cleared_text!(name);
        // SAFETY: `out` was checked above.
        unsafe { out.write(plan.backend.as_ptr()) };
        Ok(())
    }

    fn plan_report(plan: *const jfa_plan, format: i32, text: *mut *const c_char) {
        let plan = handle!(plan);
        let out = cleared_text!(text);
        let report = if convert::REPORT.get(format, "format")? {
            plan.json.get_or_init(|| Box::new(c_text(&report::plan_json(&plan.plan, &plan.skipped).to_string())))
        } else {
            plan.text.get_or_init(|| Box::new(c_text(&report::plan_text(&plan.plan, &plan.skipped))))
        };
        // SAFETY: `out` was checked above.
        unsafe { out.write(report.as_ptr()) };
        Ok(())
    }

    fn build_schedule(
        plan: *const jfa_plan,
        layout: *const jfa_layout,
        schedule: *mut c_void,
        schedule_bytes: usize,
        stream: *mut c_void,
    ) {
        let plan = handle!(plan);
        // SAFETY: the caller's struct is as long as it says.
        let layout = taken!(plan, "build_schedule", unsafe { convert::layout(layout) });
        let schedule = Buffer { data: DataPtr::new(schedule), bytes: schedule_bytes };
        logging::scoped(plan.log, || {
            // SAFETY: the header's contract is that of `Plan::build_schedule`.
            unsafe { plan.plan.build_schedule(&layout, schedule, Stream::from_raw(stream)) }
        })?;
        Ok(())
    }

    fn forward(plan: *const jfa_plan, call: *const jfa_call, args: *const jfa_forward_args) {
        let plan = handle!(plan);
        // SAFETY: the caller's structs are as long as they say.
        let (call, layout) = taken!(plan, "forward", unsafe { convert::call(call) });
        // SAFETY: as above.
        let args = taken!(plan, "forward", unsafe { convert::forward_args(args) });
        let call = convert::core_call(&call, &layout);
        logging::scoped(plan.log, || {
            // SAFETY: the header's contract is that of `Plan::forward`.
            unsafe { plan.plan.forward(&call, &args) }
        })?;
        Ok(())
    }

    fn backward(plan: *const jfa_plan, call: *const jfa_call, args: *const jfa_backward_args) {
        let plan = handle!(plan);
        // SAFETY: the caller's structs are as long as they say.
        let (call, layout) = taken!(plan, "backward", unsafe { convert::call(call) });
        // SAFETY: as above.
        let args = taken!(plan, "backward", unsafe { convert::backward_args(args) });
        let call = convert::core_call(&call, &layout);
        logging::scoped(plan.log, || {
            // SAFETY: the header's contract is that of `Plan::backward`.
            unsafe { plan.plan.backward(&call, &args) }
        })?;
        Ok(())
    }
}

/// The table of version 1.
pub(crate) static API: jfa_api = jfa_api {
    struct_size: size_of::<jfa_api>(),
    version: JFA_API_VERSION,
    reserved: 0,
    library_version: crate::VERSION_C.as_ptr(),
    status_name,
    context_create,
    context_release,
    context_report,
    plan_create,
    plan_release,
    plan_requirements,
    plan_backend,
    plan_report,
    build_schedule,
    forward,
    backward,
};

/// The table of a version, or NULL with a text for `jfa_last_error`.
pub(crate) fn api(version: u32) -> *const jfa_api {
    if version == JFA_API_VERSION {
        return &raw const API;
    }
    let failure = Failure::new(
        jfa_status::JFA_ERROR_UNSUPPORTED_VERSION,
        format!("version = {version}: this library ({}) has version {JFA_API_VERSION} of the table", crate::VERSION),
    );
    status::set_last_error(&failure.to_string());
    std::ptr::null()
}
