//! Plain arithmetic, compiled for the widest vectors of the processor it runs on. Operations on floats are neither
//! fused nor reordered by a compiler, so that bits are the same everywhere.
#![allow(unsafe_code)]

/// Arithmetic that is compiled for several instruction sets.
pub trait Arithmetic {
    /// What it yields.
    type Output;

    /// Must be `#[inline(always)]`, as must be what it calls.
    fn run(self) -> Self::Output;
}

/// Runs arithmetic with the widest vectors of this processor.
#[cfg(target_arch = "x86_64")]
pub fn widest<A: Arithmetic>(arithmetic: A) -> A::Output {
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx2")]
    fn with_avx512<A: Arithmetic>(arithmetic: A) -> A::Output {
        arithmetic.run()
    }
    #[target_feature(enable = "avx2")]
    fn with_avx2<A: Arithmetic>(arithmetic: A) -> A::Output {
        arithmetic.run()
    }
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
    {
        // SAFETY: the processor has the features that the function is compiled for.
        unsafe { with_avx512(arithmetic) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the feature that the function is compiled for.
        unsafe { with_avx2(arithmetic) }
    } else {
        arithmetic.run()
    }
}

/// Runs arithmetic, with vectors that every processor of the architecture has.
#[cfg(not(target_arch = "x86_64"))]
pub fn widest<A: Arithmetic>(arithmetic: A) -> A::Output {
    arithmetic.run()
}
