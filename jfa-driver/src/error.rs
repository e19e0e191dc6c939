//! What can go wrong between a launcher and a device.

/// Result of this crate's operations.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A failure with its reason.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no driver, no device, or the driver lacks a function.
    #[error("{0}")]
    Unavailable(String),
    /// A driver call failed.
    #[error("{call} failed: {reason}")]
    Call {
        /// The driver function.
        call: &'static str,
        /// The driver's name and words for the error.
        reason: String,
    },
    /// A bundle that cannot be read.
    #[error("kernel bundle: {0}")]
    Bundle(String),
    /// No compiled kernel fits the device.
    #[error("{0}")]
    NoKernel(String),
    /// A tensor map whose description breaks a rule of the hardware.
    #[error("tensor map of {tensor}: {field} = {value}: {rule}")]
    TensorMap {
        /// Which tensor.
        tensor: String,
        /// Which field.
        field: String,
        /// Its value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// Arguments or shape of a launch disagree with the kernel's manifest.
    #[error("launch of {kernel}: {reason}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// What disagrees.
        reason: String,
    },
    /// A pointer or stride that breaks a promise the kernel was compiled with.
    #[error("{argument} = {value}: kernel {kernel} needs a multiple of {required} bytes")]
    Promise {
        /// Which argument.
        argument: String,
        /// Its value (an address, or a stride in bytes).
        value: String,
        /// The divisor in bytes.
        required: usize,
        /// The kernel.
        kernel: String,
    },
}

impl DriverError {
    /// The same failure in the vocabulary of the backends; `backend` is who says so.
    #[must_use]
    pub fn for_backend(self, backend: &str) -> jfa_core::Error {
        use jfa_core::Error;
        match self {
            DriverError::Unavailable(reason) | DriverError::NoKernel(reason) => {
                Error::Unavailable { name: backend.to_owned(), reason }
            }
            DriverError::Call { call, reason } => Error::Device { call: call.to_owned(), reason },
            DriverError::TensorMap { tensor, field, value, rule } => {
                Error::InvalidArgument { argument: format!("{tensor}.{field}"), value, reason: rule }
            }
            DriverError::Promise { argument, value, required, .. } => {
                Error::Misaligned { argument, value, required, backend: backend.to_owned() }
            }
            e @ (DriverError::Bundle(_) | DriverError::Launch { .. }) => Error::Internal(format!("{backend}: {e}")),
        }
    }
}
