//! From what a library found to what a person can do about it.

use larder_store::{StoreError, StoreErrorKind};

/// The error and, where there is something to do about it, what.
pub fn message(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    match error.chain().find_map(|e| e.downcast_ref::<StoreError>()).and_then(|e| advice(e.kind)) {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

fn advice(fault: StoreErrorKind) -> Option<&'static str> {
    match fault {
        StoreErrorKind::NoSpace => Some("free some space and run the same command again: it goes on where it stopped"),
        StoreErrorKind::Newer => Some("update larder, or convert the model again"),
        StoreErrorKind::Io
        | StoreErrorKind::Malformed
        | StoreErrorKind::Missing
        | StoreErrorKind::Mismatch
        | StoreErrorKind::Unsupported
        | StoreErrorKind::Taken => None,
    }
}
