//! Texts and token files, and their division into chunks.

use std::path::Path;

use larder_os::read_regular;

use crate::LabError;

/// Upper bound of the mean bytes of text per token.
const BYTES_PER_TOKEN: usize = 64;
/// Maximum length of a file. A text is tokenised as a whole.
const BYTES_MAX: u64 = 64 << 20;

/// Reads a file of UTF-8 text, unchanged.
pub fn read_text(path: &Path) -> Result<String, LabError> {
    let bytes = read_regular(path, BYTES_MAX).map_err(LabError::io(path, "reading"))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        LabError::malformed(path, format!("is not UTF-8 text: byte {at} is invalid"))
    })?;
    if text.trim().is_empty() { Err(LabError::malformed(path, "holds no text")) } else { Ok(text) }
}

/// Reads a JSON array of token ids.
pub fn read_token_ids(path: &Path) -> Result<Vec<u32>, LabError> {
    let bytes = read_regular(path, BYTES_MAX).map_err(LabError::io(path, "reading"))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| LabError::malformed(path, format!("is not a JSON array of token ids: {e}")))
}

/// A prefix of the text that is long enough for this number of tokens.
pub fn text_prefix(text: &str, tokens: usize) -> &str {
    let mut end = tokens.saturating_mul(BYTES_PER_TOKEN).min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Chunks of `size` tokens, the last one shorter. A chunk of a single token is dropped: it has nothing to predict.
pub fn chunks(ids: &[u32], size: usize) -> impl Iterator<Item = &[u32]> {
    ids.chunks(size.max(1)).filter(|chunk| chunk.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_contiguous_and_a_single_token_is_dropped() {
        let ids: Vec<u32> = (0..9).collect();
        let lengths = |size| chunks(&ids, size).map(<[u32]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(4), [4, 4]);
        assert_eq!(lengths(7), [7, 2]);
        assert_eq!(lengths(100), [9]);
        assert!(lengths(1).is_empty());
    }

    #[test]
    fn a_prefix_ends_between_characters() {
        let text = "ä".repeat(100);
        assert_eq!(text_prefix(&text, 1), "ä".repeat(32));
        assert_eq!(text_prefix(&format!("a{text}"), 1).len(), 63);
        assert_eq!(text_prefix(&text, 1000), text);
    }

    #[test]
    fn unusable_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let error = |path: &Path| read_text(path).unwrap_err().to_string();
        assert!(error(&at("empty.txt", b" \n")).ends_with("empty.txt holds no text"));
        assert!(error(&at("latin.txt", b"caf\xe9")).contains("byte 3 is invalid"));
        assert!(error(&dir.path().join("none.txt")).contains("none.txt"));
        assert_eq!(read_token_ids(&at("a.json", b"[3, 1]")).unwrap(), [3, 1]);
        assert!(read_token_ids(&at("b.json", b"[-1]")).unwrap_err().to_string().contains("JSON array of token ids"));
    }
}
