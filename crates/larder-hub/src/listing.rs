//! The hub's description of a model: its commit, and its files with sizes and checksums.

use std::collections::BTreeMap;

use larder_store::{Result, StoreErrorKind};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde::Deserialize;

use crate::errors::error;

/// Most bytes of a file; a longer one is an error.
const MAX_FILE_BYTES: u64 = 1 << 42;

/// A model's files at one commit.
pub struct Listing {
    pub commit: String,
    files: BTreeMap<String, RemoteFile>,
}

/// A file as the hub describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteFile {
    pub name: String,
    pub bytes: u64,
    pub checksum: Checksum,
}

/// The checksum that the hub states for a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Checksum {
    /// SHA-256 of the bytes, for large files.
    Sha256(String),
    /// SHA-1 of the bytes as a git blob, for other files.
    GitBlob(String),
    /// The hub stated none.
    Unknown,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Parses the hub's description of the model `repo`.
    pub fn parse(repo: &str, json: &[u8]) -> Result<Self> {
        let bad = |what: String| error(StoreErrorKind::Malformed, format!("{repo}: the hub's description {what}"));
        let info: Info = serde_json::from_slice(json).map_err(|e| bad(format!("is not valid: {e}")))?;
        if !is_hex(&info.sha, 40) && !is_hex(&info.sha, 64) {
            return Err(bad("has no commit".into()));
        }
        let mut files = BTreeMap::new();
        for file in info.siblings {
            let Some(remote) = file.remote().map_err(bad)? else { continue };
            if let Some(twice) = files.insert(remote.name.clone(), remote) {
                return Err(bad(format!("lists {} twice", twice.name)));
            }
        }
        Ok(Listing { commit: info.sha, files })
    }

    pub fn get(&self, name: &str) -> Option<&RemoteFile> {
        self.files.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }
}

impl Sibling {
    /// The file, or `None` if its length is not stated.
    fn remote(self) -> Result<Option<RemoteFile>, String> {
        let Sibling { rfilename: name, size, blob, lfs } = self;
        let bytes = lfs.as_ref().map(|lfs| lfs.size).or(size);
        let Some(bytes) = bytes else { return Ok(None) };
        if bytes > MAX_FILE_BYTES {
            return Err(format!("has a file of {bytes} bytes, more than the limit of {MAX_FILE_BYTES}"));
        }
        let checksum = match (lfs, blob) {
            (Some(lfs), _) if is_hex(&lfs.sha256, 64) => Checksum::Sha256(lfs.sha256.to_ascii_lowercase()),
            (Some(_), _) => return Err("has an invalid checksum".into()),
            (None, Some(blob)) if is_hex(&blob, 40) => Checksum::GitBlob(blob.to_ascii_lowercase()),
            (None, _) => Checksum::Unknown,
        };
        Ok(Some(RemoteFile { name, bytes, checksum }))
    }
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Computes the checksum of a file and compares it with the stated one.
pub struct ChecksumVerifier<'a> {
    checksum: &'a Checksum,
    context: Context,
}

impl<'a> ChecksumVerifier<'a> {
    pub fn new(remote: &'a RemoteFile) -> Self {
        let context = match &remote.checksum {
            Checksum::GitBlob(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", remote.bytes).as_bytes());
                context
            }
            Checksum::Sha256(_) | Checksum::Unknown => Context::new(&SHA256),
        };
        ChecksumVerifier { checksum: &remote.checksum, context }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// Whether the checksum is the stated one; true if none is stated.
    pub fn matches(self) -> bool {
        let found: String = self.context.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect();
        match self.checksum {
            Checksum::Sha256(expected) | Checksum::GitBlob(expected) => *expected == found,
            Checksum::Unknown => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(siblings: &str) -> Result<Listing> {
        let json = format!(r#"{{"sha":"{}","siblings":[{siblings}],"other":1}}"#, "a".repeat(40));
        Listing::parse("o/n", json.as_bytes())
    }

    #[test]
    fn files_have_sizes_and_checksums() {
        let sha = "B".repeat(64);
        let listing = parse(&format!(
            r#"{{"rfilename":"w","size":7,"blobId":"{0}","lfs":{{"sha256":"{sha}","size":9,"pointerSize":1}}}},
               {{"rfilename":"c","size":3,"blobId":"{0}"}},{{"rfilename":"d","size":3}},{{"rfilename":"e"}}"#,
            "c".repeat(40)
        ))
        .unwrap();
        assert_eq!(listing.names().collect::<Vec<_>>(), ["c", "d", "w"]);
        let of = |name: &str| listing.get(name).map(|r| (r.bytes, r.checksum.clone())).unwrap();
        assert_eq!(of("w"), (9, Checksum::Sha256("b".repeat(64))));
        assert_eq!(of("c"), (3, Checksum::GitBlob("c".repeat(40))));
        assert_eq!(of("d"), (3, Checksum::Unknown));
    }

    #[test]
    fn invalid_descriptions_are_refused() {
        assert!(Listing::parse("o/n", br#"{"sha":"../../x"}"#).is_err());
        assert!(Listing::parse("o/n", b"[]").is_err());
        assert!(parse(r#"{"rfilename":"w","size":99999999999999}"#).is_err());
        assert!(parse(r#"{"rfilename":"w","lfs":{"sha256":"x","size":1}}"#).is_err());
        assert!(parse(r#"{"rfilename":"w","size":1},{"rfilename":"w","size":2}"#).is_err());
    }

    #[test]
    fn a_blob_is_hashed_as_git_does() {
        let of = |checksum| RemoteFile { name: "f".into(), bytes: 6, checksum };
        let git = of(Checksum::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".into()));
        let mut verifier = ChecksumVerifier::new(&git);
        verifier.update(b"hello\n");
        assert!(verifier.matches());
        let mut wrong = ChecksumVerifier::new(&git);
        wrong.update(b"hallo\n");
        assert!(!wrong.matches());
    }
}
