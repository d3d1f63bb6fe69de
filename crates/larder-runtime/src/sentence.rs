//! Errors as text.

use larder_core::printable;

/// The error and its causes in one line, each once: some errors tell their cause in their own text. What strangers' files
/// have put into it is [`printable`].
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

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use larder_store::{StoreError, StoreErrorKind};

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
