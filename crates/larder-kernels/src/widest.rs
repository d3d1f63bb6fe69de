//! Plain arithmetic, compiled for the vectors of each instruction set. Operations on floats are neither fused nor
//! reordered by a compiler, so that bits are the same everywhere.

#[cfg(target_arch = "x86_64")]
use crate::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use crate::avx512::Avx512;
use crate::dispatch;
use crate::kernel_set::Vectors;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Simd, Task};

/// Arithmetic that is compiled for several instruction sets.
pub trait Arithmetic {
    /// Its result.
    type Output;

    /// Must be `#[inline(always)]`, as must be what it calls.
    fn run(self) -> Self::Output;
}

/// Runs arithmetic with the vectors of the instruction set that this process uses.
pub fn widest<A: Arithmetic>(arithmetic: A) -> A::Output {
    match dispatch::chosen().vectors {
        Vectors::Common => arithmetic.run(),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => with(Avx2::<false>::detect(), arithmetic),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 => with(Avx512::detect(), arithmetic),
    }
}

#[cfg(target_arch = "x86_64")]
fn with<S: Simd, A: Arithmetic>(simd: Option<S>, arithmetic: A) -> A::Output {
    let mut output = None;
    let simd = simd.expect("the set was chosen because the processor has it");
    simd.run(Plain { arithmetic, output: &mut output });
    output.expect("the task has run")
}

#[cfg(target_arch = "x86_64")]
struct Plain<'a, A: Arithmetic> {
    arithmetic: A,
    output: &'a mut Option<A::Output>,
}

#[cfg(target_arch = "x86_64")]
impl<S, A: Arithmetic> Task<S> for Plain<'_, A> {
    #[inline(always)]
    fn run(self, _: S) {
        *self.output = Some(self.arithmetic.run());
    }
}
