//! The choice between the kernels of the instruction sets: the best of those that this processor has, or one by its
//! name. It is made once in a process, before the first product, and all sets give the same bits.

use std::error::Error;
use std::fmt::{self, Display};
use std::str::FromStr;
use std::sync::OnceLock;

use crate::kernel_set::{KernelSet, UnavailableSet};
use crate::portable;

/// One row for each instruction set, the best first: its kernels, if this processor can run them.
const TABLE: &[fn() -> Result<KernelSet, UnavailableSet>] = &[
    #[cfg(target_arch = "x86_64")]
    crate::avx512::set,
    #[cfg(target_arch = "x86_64")]
    crate::avx2::with_vnni,
    #[cfg(target_arch = "x86_64")]
    crate::avx2::set,
    #[cfg(target_arch = "aarch64")]
    crate::neon::with_matrix_products,
    #[cfg(target_arch = "aarch64")]
    crate::neon::with_dot_products,
    #[cfg(target_arch = "aarch64")]
    crate::neon::set,
    portable::set,
];

/// The kernels that this process uses.
static CHOSEN: OnceLock<KernelSet> = OnceLock::new();

/// The sets that this processor can run, the best first.
pub fn all() -> impl Iterator<Item = KernelSet> {
    TABLE.iter().filter_map(|set| set().ok())
}

/// The set that this process uses: the best one, unless another was chosen before the first call.
pub fn chosen() -> &'static KernelSet {
    CHOSEN.get_or_init(|| all().next().expect("every processor runs the portable kernels"))
}

/// The name of the instruction set whose kernels this process uses: `avx512`, `avx2+vnni`, `avx2`, `neon+i8mm`,
/// `neon+dotprod`, `neon` or `portable`. They cannot be [chosen](KernelChoice::apply) any more.
pub fn instruction_set() -> &'static str {
    chosen().name
}

/// What an instruction set is to this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SetUse {
    /// Its kernels are used.
    Used,
    /// The processor has it, and its kernels are slower than those that are used.
    Slower,
    /// The processor has it, and its kernels are faster than those that are used, which were chosen by name.
    Faster,
    /// The processor lacks these features of it.
    Missing(Vec<&'static str>),
}

/// All instruction sets of this architecture by name, the best first.
pub fn instruction_sets() -> Vec<(&'static str, SetUse)> {
    let (used, mut is_below) = (chosen().name, false);
    let use_of = |set: &fn() -> Result<KernelSet, UnavailableSet>| match set() {
        Err(lacking) => (lacking.name, SetUse::Missing(lacking.missing)),
        Ok(set) if set.name == used => {
            is_below = true;
            (used, SetUse::Used)
        }
        Ok(set) => (set.name, if is_below { SetUse::Slower } else { SetUse::Faster }),
    };
    TABLE.iter().map(use_of).collect()
}

/// Which kernels a process uses. As text, `auto` or the name of an instruction set that this processor has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum KernelChoice {
    /// Those that were chosen before, or else the best ones.
    #[default]
    Auto,
    /// Those of one instruction set.
    Named(&'static str),
}

impl KernelChoice {
    /// Lets this process use these kernels from now on.
    ///
    /// # Errors
    /// If the processor does not have them, or if this process uses others already.
    pub fn apply(self) -> Result<(), KernelChoiceError> {
        let KernelChoice::Named(wanted) = self else { return Ok(()) };
        let set = set_named(wanted)?;
        let used = CHOSEN.get_or_init(|| set).name;
        if used == wanted { Ok(()) } else { Err(KernelChoiceError::Chosen { wanted, used }) }
    }
}

impl FromStr for KernelChoice {
    type Err = KernelChoiceError;

    fn from_str(text: &str) -> Result<Self, KernelChoiceError> {
        if text == "auto" { Ok(KernelChoice::Auto) } else { set_named(text).map(|set| KernelChoice::Named(set.name)) }
    }
}

impl Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            KernelChoice::Auto => "auto",
            KernelChoice::Named(name) => name,
        })
    }
}

/// The kernels of the instruction set of this name.
fn set_named(name: &str) -> Result<KernelSet, KernelChoiceError> {
    for set in TABLE {
        match set() {
            Ok(set) if set.name == name => return Ok(set),
            Err(lacking) if lacking.name == name => return Err(KernelChoiceError::Unavailable(lacking)),
            _ => {}
        }
    }
    Err(KernelChoiceError::Unknown)
}

/// Why kernels cannot be chosen, as the end of a sentence that begins with the name of a setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KernelChoiceError {
    /// No instruction set of this architecture has the name.
    Unknown,
    /// The processor does not have the instruction set.
    Unavailable(UnavailableSet),
    /// This process uses other kernels already.
    Chosen {
        /// The instruction set that was asked for.
        wanted: &'static str,
        /// That of the kernels in use.
        used: &'static str,
    },
}

impl Error for KernelChoiceError {}

impl Display for KernelChoiceError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let names = || all().map(|set| set.name).collect::<Vec<_>>().join(", ");
        match self {
            KernelChoiceError::Unknown => {
                write!(f, "must be auto, or an instruction set that this processor has: {}", names())
            }
            KernelChoiceError::Unavailable(UnavailableSet { name, missing }) => {
                write!(f, "{name} needs {}, which this processor lacks; it has {}", missing.join(", "), names())
            }
            KernelChoiceError::Chosen { wanted, used } => {
                write!(f, "this process uses {used} already, for all its models; use {wanted} in a process of its own")
            }
        }
    }
}

#[cfg(test)]
mod tests;
