use std::path::Path;

use crate::LabError;

/// No token stands for more bytes of text on average.
const BYTES_PER_TOKEN: usize = 64;

/// The text in a file, as it is.
pub fn read_text(path: &Path) -> Result<String, LabError> {
    let bytes = std::fs::read(path).map_err(LabError::io(path, "reading"))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        LabError::malformed(path, format!("is not text in UTF-8: byte {at} is not"))
    })?;
    match text.trim().is_empty() {
        true => Err(LabError::malformed(path, "holds no text")),
        false => Ok(text),
    }
}

/// The token ids in a file, a JSON array.
pub fn read_token_ids(path: &Path) -> Result<Vec<u32>, LabError> {
    let bytes = std::fs::read(path).map_err(LabError::io(path, "reading"))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| LabError::malformed(path, format!("is not a JSON array of token ids: {e}")))
}

/// Enough of a text for so many tokens.
pub fn text_prefix(text: &str, tokens: usize) -> &str {
    let mut end = tokens.saturating_mul(BYTES_PER_TOKEN).min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Pieces of `size` tokens, the last one shorter. A single token is left out: nothing comes before it.
pub fn chunks(ids: &[u32], size: usize) -> impl Iterator<Item = &[u32]> {
    ids.chunks(size.max(1)).filter(|chunk| chunk.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_each_other_and_a_lonely_token_is_dropped() {
        let ids: Vec<u32> = (0..9).collect();
        let lengths = |size| chunks(&ids, size).map(<[u32]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(4), [4, 4]);
        assert_eq!(lengths(7), [7, 2]);
        assert_eq!(lengths(100), [9]);
        assert!(lengths(1).is_empty());
    }

    #[test]
    fn a_head_ends_between_characters() {
        let text = "ä".repeat(100);
        assert_eq!(text_prefix(&text, 1), "ä".repeat(32));
        assert_eq!(text_prefix(&format!("a{text}"), 1).len(), 63);
        assert_eq!(text_prefix(&text, 1000), text);
    }

    #[test]
    fn files_that_hold_nothing_to_read_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let said = |path: &Path| read_text(path).unwrap_err().to_string();
        assert!(said(&at("empty.txt", b" \n")).ends_with("empty.txt holds no text"));
        assert!(said(&at("latin.txt", b"caf\xe9")).contains("byte 3 is not"));
        assert!(said(&dir.path().join("none.txt")).contains("none.txt"));
        assert_eq!(read_token_ids(&at("a.json", b"[3, 1]")).unwrap(), [3, 1]);
        assert!(read_token_ids(&at("b.json", b"[-1]")).unwrap_err().to_string().contains("JSON array of token ids"));
    }
}
