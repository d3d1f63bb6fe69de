//! The most that a processor does in a second: multiply-adds of floats, dot products of bytes, products of tiles, and
//! reads of memory. How near a kernel comes to them is how good it is.

use std::time::Duration;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod peak_loop;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod timing;

pub use memory::memory_bandwidth;
use peak_loop::PeakLoop;
use timing::{best_rate, rounds};

use crate::thread_pool::ThreadPool;

/// The loops of a kind of arithmetic, the widest first.
type Loops = &'static [fn() -> Option<PeakLoop>];

const FLOATS: Loops = &[
    #[cfg(target_arch = "x86_64")]
    avx512::floats,
    #[cfg(target_arch = "x86_64")]
    avx2::floats,
    #[cfg(target_arch = "aarch64")]
    neon::floats,
];

const BYTES: Loops = &[
    #[cfg(target_arch = "x86_64")]
    avx512::bytes,
    #[cfg(target_arch = "x86_64")]
    avx2::bytes,
    #[cfg(target_arch = "aarch64")]
    neon::matrices,
    #[cfg(target_arch = "aarch64")]
    neon::bytes,
];

const TILES: Loops = &[
    #[cfg(target_arch = "x86_64")]
    tiles::bytes,
];

/// Time for the rate of a loop on a number of threads.
const LOOP_TIME: Duration = Duration::from_millis(300);

/// The most arithmetic of a kind that this processor does.
pub struct Peak {
    /// Name of the arithmetic.
    pub name: &'static str,
    /// The unit of the rate, as in FLOP per second: multiplications and additions.
    pub unit: &'static str,
    /// `None` if the processor has no instructions for it.
    of: Option<PeakLoop>,
}

impl Peak {
    /// All kinds of arithmetic.
    pub fn all() -> [Peak; 3] {
        let peak = |name, unit, loops: Loops| Peak { name, unit, of: loops.iter().find_map(|of| of()) };
        [
            peak("f32 multiply-add", "FLOP", FLOATS),
            peak("int8 dot products", "OP", BYTES),
            peak("int8 tile products", "OP", TILES),
        ]
    }

    /// The instructions that are measured, if the processor has any for it.
    pub fn instructions(&self) -> Option<&'static str> {
        self.of.map(|of| of.instructions)
    }

    /// Multiplications and additions per second that the threads of a pool together do at most, if the processor has
    /// instructions for them.
    pub fn rate(&self, pool: &ThreadPool) -> Option<f64> {
        let PeakLoop { operations, run, .. } = self.of?;
        let rounds = rounds(run);
        let amount = (pool.threads() * operations) as f64 * rounds as f64;
        Some(best_rate(LOOP_TIME, pool, amount, |_, _| run(rounds)))
    }
}

#[cfg(test)]
mod tests;
