//! The checksum that a manifest carries over itself.
//!
//! The file ends in `,\n  "checksum": "` + 32 hex digits + `"\n}\n`; the digits are the checksum of all bytes before
//! that.

use crate::files::checksum::checksum_of;

const KEY: &str = ",\n  \"checksum\": \"";
const END: &str = "\"\n}\n";
const DIGITS: usize = 32;

/// Adds its checksum to the JSON of an object with at least one key, indented by two spaces.
pub fn seal(json: &str) -> Vec<u8> {
    let body = json.strip_suffix("\n}").expect("an indented object ends in a line with its brace");
    let checksum = checksum_of(body.as_bytes());
    format!("{body}{KEY}{checksum}{END}").into_bytes()
}

/// The JSON before it was sealed, and its checksum; an error if they do not fit together.
pub fn unseal(bytes: &[u8]) -> Result<(Vec<u8>, String), &'static str> {
    let unsealed = "does not end in its checksum";
    let at = bytes.len().checked_sub(KEY.len() + DIGITS + END.len()).ok_or(unsealed)?;
    let (body, tail) = bytes.split_at(at);
    let tail = std::str::from_utf8(tail).map_err(|_| unsealed)?;
    let digits = tail.strip_prefix(KEY).and_then(|rest| rest.strip_suffix(END)).ok_or(unsealed)?;
    if checksum_of(body) != digits {
        return Err("does not match its own checksum");
    }
    Ok(([body, b"\n}"].concat(), digits.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_object_opens_and_a_changed_one_does_not() {
        let json = serde_json::to_string_pretty(&serde_json::json!({"a": 1, "b": [2]})).unwrap();
        let sealed = seal(&json);
        assert!(serde_json::from_slice::<serde_json::Value>(&sealed).unwrap()["checksum"].is_string());
        let (body, checksum) = unseal(&sealed).unwrap();
        assert_eq!((body, checksum.len()), (json.into_bytes(), DIGITS));
        for at in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[at] ^= 1;
            assert!(unseal(&bad).is_err(), "byte {at}");
            assert!(unseal(&sealed[..at]).is_err(), "cut at {at}");
        }
    }
}
