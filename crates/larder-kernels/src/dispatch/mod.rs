//! The choice between the kernels of the instruction sets.

use std::sync::OnceLock;

use crate::kernel_set::KernelSet;
use crate::portable;

/// The name of the instruction set whose kernels are used on this processor: `avx512`, `avx2+vnni`, `avx2`,
/// `neon+dotprod`, `neon` or `portable`.
pub fn instruction_set() -> &'static str {
    best().name
}

/// One row for each instruction set, the best first: its kernels, if this processor can run them.
const TABLE: &[fn() -> Option<KernelSet>] = &[
    #[cfg(target_arch = "x86_64")]
    crate::avx512::set,
    #[cfg(target_arch = "x86_64")]
    crate::avx2::with_vnni,
    #[cfg(target_arch = "x86_64")]
    crate::avx2::set,
    #[cfg(target_arch = "aarch64")]
    crate::neon::with_dot_products,
    #[cfg(target_arch = "aarch64")]
    crate::neon::set,
    portable::set,
];

/// The sets that this processor can run, the best first.
pub fn all() -> impl Iterator<Item = KernelSet> {
    TABLE.iter().filter_map(|set| set())
}

/// The best set that this processor can run, chosen once.
pub fn best() -> &'static KernelSet {
    static BEST: OnceLock<KernelSet> = OnceLock::new();
    BEST.get_or_init(|| all().next().expect("every processor runs the portable kernels"))
}

#[cfg(test)]
mod tests;
