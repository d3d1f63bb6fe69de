//! Files of pictures as texts: `data:` URLs, and base64 alone.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Base64 as clients write it: with or without the padding at its end.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Why a text is no file of a picture; each is a sentence without its full stop, and repeats nothing of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PictureTextError {
    /// There is none.
    #[error("the image has no picture; send its file in base64")]
    Missing,
    /// It is the address of one.
    #[error("pictures are not fetched from addresses; send the file itself as a data: URL in base64")]
    Address,
    /// It is a URL that is written otherwise.
    #[error("the data: URL of the picture is not in base64")]
    NotBase64Url,
    /// It has other characters, or an end is missing.
    #[error("the picture is not valid base64")]
    NotBase64,
}

/// The base64 of a `data:` URL, or of a text that is nothing else.
///
/// # Errors
/// If there is none.
pub fn base64_of_picture(text: &str) -> Result<&str, PictureTextError> {
    let data = match text.get(..5) {
        Some(scheme) if scheme.eq_ignore_ascii_case("data:") => match text[5..].split_once(',') {
            Some((kind, data)) if kind.to_ascii_lowercase().ends_with(";base64") => data,
            _ => return Err(PictureTextError::NotBase64Url),
        },
        // No letter of base64.
        _ if text.contains(':') => return Err(PictureTextError::Address),
        _ => text,
    };
    if data.trim().is_empty() { Err(PictureTextError::Missing) } else { Ok(data) }
}

/// The file that is written in base64.
///
/// # Errors
/// If the text is something else.
pub fn picture_of_base64(base64: &str) -> Result<Vec<u8>, PictureTextError> {
    // Some clients break lines.
    let text: Vec<u8> = base64.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    BASE64.decode(text).map_err(|_| PictureTextError::NotBase64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_come_in_base64_and_never_from_addresses() {
        for good in ["aGk=", "aGk", "data:image/png;base64,aGk=", "DATA:;BASE64,aGk=", "aG\nk="] {
            let base64 = base64_of_picture(good).unwrap();
            assert_eq!(picture_of_base64(base64).as_deref(), Ok(&b"hi"[..]), "{good}");
        }
        for (bad, why) in [
            ("http://a.b/c.png", PictureTextError::Address),
            ("https://a.b/c.png", PictureTextError::Address),
            ("file:///etc/passwd", PictureTextError::Address),
            ("FILE:/etc/passwd", PictureTextError::Address),
            ("data:image/png,abc", PictureTextError::NotBase64Url),
            ("data:image/png;base64", PictureTextError::NotBase64Url),
            ("data:image/png;base64,", PictureTextError::Missing),
            ("", PictureTextError::Missing),
        ] {
            assert_eq!(base64_of_picture(bad), Err(why), "{bad}");
        }
        assert_eq!(picture_of_base64("a.b"), Err(PictureTextError::NotBase64));
    }
}
