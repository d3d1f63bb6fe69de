//! Errors of requests: transient ones are retried, permanent ones are not.

use std::path::Path;
use std::time::Duration;

use larder_store::{StoreError, StoreErrorKind};

/// The error of a request, and whether to repeat it.
pub struct HubError {
    /// The error as the caller of the crate sees it.
    pub cause: StoreError,
    /// Whether the request may succeed when it is repeated.
    pub transient: bool,
    /// The pause that the server requested.
    pub retry_after: Option<Duration>,
}

impl HubError {
    /// An error that repeating does not change.
    pub fn permanent(fault: StoreErrorKind, what: impl Into<String>) -> Self {
        HubError { cause: error(fault, what), transient: false, retry_after: None }
    }

    /// An error after which the request is repeated.
    pub fn transient(what: impl Into<String>) -> Self {
        HubError { cause: error(StoreErrorKind::Io, what), transient: true, retry_after: None }
    }

    /// The error for an HTTP status other than 200 and 206.
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
                let reason = if status == 429 { "too many requests" } else { "the server failed" };
                HubError { retry_after, ..HubError::transient(format!("{url}: {reason} ({status})")) }
            }
            other => permanent(StoreErrorKind::Io, &format!("unexpected status {other}")),
        }
    }
}

impl From<StoreError> for HubError {
    fn from(error: StoreError) -> Self {
        HubError { cause: error, transient: false, retry_after: None }
    }
}

/// An error whose message contains the location, so that it has no path.
pub fn error(fault: StoreErrorKind, what: impl Into<String>) -> StoreError {
    StoreError::new(fault, Path::new(""), what)
}
