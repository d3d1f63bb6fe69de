use std::path::Path;
use std::time::Duration;

use larder_store::{StoreError, StoreErrorKind};

/// Why a request failed, and whether to ask again.
pub struct HubError {
    pub error: StoreError,
    /// Whether it may pass.
    pub transient: bool,
    /// How long the server wants to be left alone.
    pub retry_after: Option<Duration>,
}

impl HubError {
    /// What will not be better next time.
    pub fn permanent(fault: StoreErrorKind, what: impl Into<String>) -> Self {
        HubError { error: failure(fault, what), transient: false, retry_after: None }
    }

    /// What may be better next time.
    pub fn transient(what: impl Into<String>) -> Self {
        HubError { error: failure(StoreErrorKind::Io, what), transient: true, retry_after: None }
    }

    /// An answer that is not the one hoped for.
    pub fn status(url: &str, status: u16, has_token: bool, retry_after: Option<Duration>) -> Self {
        let permanent = |fault, what: &str| HubError::permanent(fault, format!("{url}: {what}"));
        match status {
            401 if has_token => permanent(
                StoreErrorKind::Io,
                "the hub does not accept the token, or there is no such model (401); check HF_TOKEN and the name",
            ),
            401 => permanent(
                StoreErrorKind::Io,
                "there is no such model, or it is not public (401); check the name, or set HF_TOKEN to a token that \
                 may read it",
            ),
            403 => permanent(
                StoreErrorKind::Io,
                "access is denied (403); accept the model's terms on its page, and set HF_TOKEN to a token of that \
                 account",
            ),
            404 => permanent(StoreErrorKind::Missing, "there is no such model, revision or file (404)"),
            408 | 429 | 500..=599 => {
                let why = if status == 429 { "too many requests" } else { "the server is in trouble" };
                HubError { retry_after, ..HubError::transient(format!("{url}: {why} ({status})")) }
            }
            other => permanent(StoreErrorKind::Io, &format!("answered with status {other}")),
        }
    }
}

impl From<StoreError> for HubError {
    fn from(error: StoreError) -> Self {
        HubError { error, transient: false, retry_after: None }
    }
}

/// A failure whose sentence says where.
pub fn failure(fault: StoreErrorKind, what: impl Into<String>) -> StoreError {
    StoreError::new(fault, Path::new(""), what)
}
