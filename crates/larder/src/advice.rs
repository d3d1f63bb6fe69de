//! Error messages, with advice where there is a remedy.

use larder_runtime::sentence;
use larder_store::{StoreError, StoreErrorKind};

/// The error's message and, where there is a remedy, the advice.
pub fn message(error: &anyhow::Error) -> String {
    let of_store = error.chain().find_map(|e| e.downcast_ref::<StoreError>());
    if let Some(removed) = of_store.filter(|e| e.kind == StoreErrorKind::Removed) {
        // It does not matter which expert was to be read.
        return removed.to_string();
    }
    let text = sentence(error);
    match of_store.and_then(|e| advice(e.kind)) {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

fn advice(fault: StoreErrorKind) -> Option<&'static str> {
    match fault {
        StoreErrorKind::NoSpace => {
            Some("free some space and run the same command again; it continues where it stopped")
        }
        StoreErrorKind::Newer => Some("update larder, or convert the model again"),
        StoreErrorKind::Io
        | StoreErrorKind::Malformed
        | StoreErrorKind::Missing
        | StoreErrorKind::Mismatch
        | StoreErrorKind::Unsupported
        | StoreErrorKind::Taken
        | StoreErrorKind::Removed => None,
    }
}
