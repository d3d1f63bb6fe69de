//! Errors as text, with advice where there is a remedy.

use larder_core::printable;
use larder_store::{StoreError, StoreErrorKind};

/// The error and its causes in one line, each once: some errors tell their cause in their own text. What strangers'
/// files have put into it is [`printable`].
pub fn sentence(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    let mut last = text.clone();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !last.ends_with(&cause) {
            text += &format!(": {cause}");
        }
        last = cause;
    }
    printable(&text)
}

/// The error's message and, where there is a remedy, the advice.
pub fn error_message(error: &anyhow::Error) -> String {
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
        StoreErrorKind::Io
        | StoreErrorKind::Malformed
        | StoreErrorKind::Missing
        | StoreErrorKind::Mismatch
        | StoreErrorKind::Unsupported
        | StoreErrorKind::OtherFormat
        | StoreErrorKind::Taken
        | StoreErrorKind::Removed => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn what_a_file_says_stays_on_its_line() {
        let error = anyhow::anyhow!("tensor '\x1b[31mred\n' is missing");
        assert_eq!(sentence(&error), "tensor '\\u{1b}[31mred\\n' is missing");
    }

    #[test]
    fn a_cause_that_was_told_is_not_repeated() {
        let path = std::path::Path::new("a/b");
        let cause = || StoreError::new(StoreErrorKind::Io, path, "reading failed");
        let model_error = larder_model::ModelError::Expert(Box::new(cause()));
        assert_eq!(sentence(&model_error.into()), "a/b: reading failed");
        let in_context = Err::<(), _>(cause()).context("layer 1").unwrap_err();
        assert_eq!(sentence(&in_context), "layer 1: a/b: reading failed");
    }
}
