//! From what a library found to what a person can do about it.

use larder_store::{Fault, StoreError};

/// The error and, where there is something to do about it, what.
pub fn message(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    match error.chain().find_map(|e| e.downcast_ref::<StoreError>()).and_then(|e| advice(e.fault)) {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

fn advice(fault: Fault) -> Option<&'static str> {
    match fault {
        Fault::NoSpace => Some("free some space and run the same command again: it goes on where it stopped"),
        Fault::Newer => Some("update larder, or convert the model again"),
        Fault::Io | Fault::Malformed | Fault::Missing | Fault::Mismatch | Fault::Unsupported | Fault::Taken => None,
    }
}
