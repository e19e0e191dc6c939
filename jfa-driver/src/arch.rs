//! Architectures kernels are compiled for, and the devices that run them.

use std::fmt;
use std::str::FromStr;

use crate::DriverError;

/// Compute capability of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// Generation: 9 is Hopper, 10 Blackwell.
    pub major: u32,
    /// Revision.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What binaries of an [`Arch`] run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArchScope {
    /// `sm_90`: the same generation, this revision or a later one.
    Generation,
    /// `sm_100f`: the same family; within a generation this revision or a later one.
    Family,
    /// `sm_90a`: exactly this capability.
    Exact,
}

/// A compilation target such as `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    /// The capability it names.
    pub capability: ComputeCapability,
    /// Which capabilities run it.
    pub scope: ArchScope,
}

impl Arch {
    /// Hopper with its architecture-specific instructions.
    pub const SM_90A: Arch = Arch { capability: ComputeCapability { major: 9, minor: 0 }, scope: ArchScope::Exact };
    /// Blackwell (B200) with its architecture-specific instructions.
    pub const SM_100A: Arch = Arch { capability: ComputeCapability { major: 10, minor: 0 }, scope: ArchScope::Exact };

    /// Whether a device of capability `cc` runs binaries of this architecture.
    pub fn runs_on(&self, cc: ComputeCapability) -> bool {
        match self.scope {
            ArchScope::Exact => cc == self.capability,
            ArchScope::Generation | ArchScope::Family => {
                cc.major == self.capability.major && cc.minor >= self.capability.minor
            }
        }
    }

    /// Digits and suffix: `90a`.
    pub fn number(&self) -> String {
        let suffix = match self.scope {
            ArchScope::Generation => "",
            ArchScope::Family => "f",
            ArchScope::Exact => "a",
        };
        format!("{}{}{suffix}", self.capability.major, self.capability.minor)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.number())
    }
}

impl FromStr for Arch {
    type Err = DriverError;

    fn from_str(s: &str) -> Result<Self, DriverError> {
        let bad = || DriverError::Bundle(format!("architecture '{s}' is not of the form sm_90, sm_90a or sm_100f"));
        let rest = s.strip_prefix("sm_").ok_or_else(bad)?;
        let (digits, scope) = match rest.as_bytes().last() {
            Some(b'a') => (&rest[..rest.len() - 1], ArchScope::Exact),
            Some(b'f') => (&rest[..rest.len() - 1], ArchScope::Family),
            _ => (rest, ArchScope::Generation),
        };
        if digits.len() < 2 || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad());
        }
        let (major, minor) = digits.split_at(digits.len() - 1);
        Ok(Arch {
            capability: ComputeCapability {
                major: major.parse().map_err(|_| bad())?,
                minor: minor.parse().map_err(|_| bad())?,
            },
            scope,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["sm_90a", "sm_100a", "sm_90", "sm_100f", "sm_121"] {
            assert_eq!(name.parse::<Arch>().unwrap().to_string(), name);
        }
        assert_eq!("sm_90a".parse::<Arch>().unwrap(), Arch::SM_90A);
        assert_eq!("sm_100a".parse::<Arch>().unwrap(), Arch::SM_100A);
        for name in ["", "sm_", "sm_9", "90a", "sm_9x", "sm_a", "compute_90"] {
            let e = name.parse::<Arch>().unwrap_err().to_string();
            assert!(e.contains(&format!("'{name}'")), "{e}");
        }
    }

    #[test]
    fn what_runs_where() {
        let cc = |major, minor| ComputeCapability { major, minor };
        assert!(Arch::SM_90A.runs_on(cc(9, 0)));
        assert!(!Arch::SM_90A.runs_on(cc(9, 1)));
        assert!(!Arch::SM_90A.runs_on(cc(10, 0)));
        let plain: Arch = "sm_80".parse().unwrap();
        assert!(plain.runs_on(cc(8, 9)) && !plain.runs_on(cc(9, 0)) && !plain.runs_on(cc(7, 5)));
    }
}
