//! The affinity of threads: which logical processors they may run on, where the system lets a program choose. One file
//! per kind of system, with the same functions.

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub use linux::{allowed, bind, current, move_off, strengths};
#[cfg(windows)]
mod windows;
#[cfg(windows)]
pub use windows::{allowed, bind, current, move_off, strengths};
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
mod unbound;
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
pub use unbound::{allowed, bind, current, move_off, strengths};
