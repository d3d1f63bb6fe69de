//! Arithmetic with the same bits on every machine: the exponential function and random numbers.

pub(crate) mod exp;
pub(crate) mod rng;
pub(crate) mod xoshiro;
