//! Panics as errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow};

/// The result of `run`; a panic, which is a fault of this library, is an error too.
pub fn guarded<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow!("larder failed, which is a fault of it: {}", text.unwrap_or("no reason is known")))
    })
}
