use std::path::Path;
use std::time::Duration;

use larder_store::{StoreError, StoreErrorKind};

/// Why a request failed, and whether to ask again.
pub struct Trouble {
    pub error: StoreError,
    /// Whether it may pass.
    pub passing: bool,
    /// How long the server wants to be left alone.
    pub after: Option<Duration>,
}

impl Trouble {
    /// What will not be better next time.
    pub fn lasting(fault: StoreErrorKind, what: impl Into<String>) -> Self {
        Trouble { error: failure(fault, what), passing: false, after: None }
    }

    /// What may be better next time.
    pub fn passing(what: impl Into<String>) -> Self {
        Trouble { error: failure(StoreErrorKind::Io, what), passing: true, after: None }
    }

    /// An answer that is not the one hoped for.
    pub fn status(url: &str, status: u16, has_token: bool, after: Option<Duration>) -> Self {
        let lasting = |fault, what: &str| Trouble::lasting(fault, format!("{url}: {what}"));
        match status {
            401 if has_token => lasting(
                StoreErrorKind::Io,
                "the hub does not accept the token, or there is no such model (401); check HF_TOKEN and the name",
            ),
            401 => lasting(
                StoreErrorKind::Io,
                "there is no such model, or it is not public (401); check the name, or set HF_TOKEN to a token that \
                 may read it",
            ),
            403 => lasting(
                StoreErrorKind::Io,
                "access is denied (403); accept the model's terms on its page, and set HF_TOKEN to a token of that \
                 account",
            ),
            404 => lasting(StoreErrorKind::Missing, "there is no such model, revision or file (404)"),
            408 | 429 | 500..=599 => {
                let why = if status == 429 { "too many requests" } else { "the server is in trouble" };
                Trouble { after, ..Trouble::passing(format!("{url}: {why} ({status})")) }
            }
            other => lasting(StoreErrorKind::Io, &format!("answered with status {other}")),
        }
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Trouble { error, passing: false, after: None }
    }
}

/// A failure whose sentence says where.
pub fn failure(fault: StoreErrorKind, what: impl Into<String>) -> StoreError {
    StoreError::new(fault, Path::new(""), what)
}
