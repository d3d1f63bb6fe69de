//! HTTP requests to the hub, with redirects, the token and retries.

use std::io::{ErrorKind, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_store::{Result, StoreErrorKind};
use ureq::Agent;
use ureq::http::{HeaderMap, Response};

use crate::DownloadProgress;
use crate::errors::{HubError, error};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const MAX_REDIRECTS: usize = 5;
/// The longest pause before a retry, whatever the server requests.
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// Timeouts and retries.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Failures in a row after which a request is given up.
    pub attempts: u32,
    /// Pause after the first failure; doubled after each further one.
    pub first_pause: Duration,
    /// Timeout of connecting, and of the beginning of a response.
    pub response_timeout: Duration,
    /// Time after which a transfer is interrupted and resumed, in case it has stalled.
    pub transfer_timeout: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        let of = Duration::from_secs;
        RetryPolicy { attempts: 6, first_pause: of(1), response_timeout: of(30), transfer_timeout: of(120) }
    }
}

/// The hub, or a mirror of it.
pub struct Hub {
    agent: Agent,
    /// Base URL without a trailing slash.
    endpoint: String,
    token: Option<String>,
    retry: RetryPolicy,
    /// Whether it has ever answered.
    reached: AtomicBool,
}

/// A response with status 200 or 206.
pub struct HubResponse {
    pub headers: HeaderMap,
    /// Whether the body is the requested range and not the whole file.
    pub partial: bool,
    pub body: Box<dyn Read>,
}

impl Hub {
    /// The hub of the usual environment variables: `HF_ENDPOINT`, and `HF_TOKEN` or `HUGGING_FACE_HUB_TOKEN`.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name| variable(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into());
        let token = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN"));
        Self::new(&endpoint, token, RetryPolicy::default())
    }

    /// The hub at the URL `endpoint`.
    pub fn new(endpoint: &str, token: Option<String>, retry: RetryPolicy) -> Result<Self> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if origin(&endpoint).is_none() {
            let what = format!(
                "'{endpoint}' is not a valid hub address; set HF_ENDPOINT to a URL that begins with https:// or http://"
            );
            return Err(error(StoreErrorKind::Unsupported, what));
        }
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(error(
                StoreErrorKind::Unsupported,
                "the hub token contains spaces or special characters; check HF_TOKEN",
            ));
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(retry.response_timeout))
            .timeout_recv_response(Some(retry.response_timeout))
            .timeout_recv_body(Some(retry.transfer_timeout))
            .user_agent(concat!("larder/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(Hub { agent, endpoint, token, retry, reached: AtomicBool::new(false) })
    }

    /// The base URL, without a trailing slash.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Repeats `ask` until it succeeds, fails permanently, or has failed too often.
    pub fn with_retries<T>(
        &self,
        progress: &dyn DownloadProgress,
        mut ask: impl FnMut() -> Result<T, HubError>,
    ) -> Result<T> {
        let mut failures = 0;
        loop {
            match ask() {
                Ok(result) => return Ok(result),
                Err(error) => {
                    failures += 1;
                    self.pause(failures, error, progress)?;
                }
            }
        }
    }

    /// Waits after the failure with number `failures`, or returns the error if there is no retry.
    pub fn pause(&self, failures: u32, error: HubError, progress: &dyn DownloadProgress) -> Result<()> {
        if !error.transient || failures >= self.retry.attempts {
            return Err(error.cause);
        }
        let usual = self.retry.first_pause * 2_u32.pow((failures - 1).min(10));
        let pause = error.retry_after.unwrap_or(usual).min(MAX_PAUSE);
        progress.pause(&error.cause.message, pause);
        std::thread::sleep(pause);
        Ok(())
    }

    /// Requests `url` once, or the bytes from `first` to `last` of it, and follows redirects.
    pub fn get(&self, url: &str, range: Option<(u64, Option<u64>)>) -> Result<HubResponse, HubError> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.get_once(&at, range)?;
            let status = response.status().as_u16();
            let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok());
            match status {
                200 | 206 => {
                    let (parts, body) = response.into_parts();
                    return Ok(HubResponse {
                        headers: parts.headers,
                        partial: status == 206,
                        body: Box::new(body.into_reader()),
                    });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let location = header("location").unwrap_or_default();
                    at = redirected(&at, location).ok_or_else(|| {
                        HubError::permanent(
                            StoreErrorKind::Io,
                            format!("{url}: the redirect to '{location}' is not allowed"),
                        )
                    })?;
                }
                status => {
                    let after = header("retry-after").and_then(|v| v.trim().parse().ok()).map(Duration::from_secs);
                    return Err(HubError::status(url, status, self.token.is_some(), after));
                }
            }
        }
        Err(HubError::permanent(StoreErrorKind::Io, format!("{url}: more than {MAX_REDIRECTS} redirects")))
    }

    fn get_once(&self, url: &str, range: Option<(u64, Option<u64>)>) -> Result<Response<ureq::Body>, HubError> {
        let mut request = self.agent.get(url);
        if let Some((first, last)) = range {
            let last = last.map_or_else(String::new, |last| last.to_string());
            request = request.header("Range", format!("bytes={first}-{last}"));
        }
        // The token is for the hub alone, not for hosts to which it redirects.
        if let Some(token) = self.token.as_ref().filter(|_| origin(url) == origin(&self.endpoint)) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let answer = request.call().map_err(|e| match e {
            ureq::Error::BadUri(_) | ureq::Error::Tls(_) => {
                HubError::permanent(StoreErrorKind::Io, format!("{url}: {e}"))
            }
            // Later the network may come back, but here it was never there.
            e if is_unreachable(&e) && !self.reached.load(Ordering::Relaxed) => HubError::permanent(
                StoreErrorKind::Io,
                format!(
                    "{} cannot be reached ({e}); check the network, or name a mirror with HF_ENDPOINT",
                    self.endpoint
                ),
            ),
            e => HubError::transient(format!("{url}: {e}")),
        })?;
        self.reached.store(true, Ordering::Relaxed);
        Ok(answer)
    }
}

/// Whether no connection was made. A name that is not found has no kind of its own.
fn is_unreachable(error: &ureq::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    match error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => true,
        ureq::Error::Timeout(timeout) => matches!(timeout, ureq::Timeout::Resolve | ureq::Timeout::Connect),
        ureq::Error::Io(error) => !matches!(
            error.kind(),
            BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof | WouldBlock
        ),
        _ => false,
    }
}

/// Scheme, host and port of a URL.
fn origin(url: &str) -> Option<&str> {
    let scheme = ["https://", "http://"].into_iter().find(|scheme| url.starts_with(scheme))?;
    let host = url[scheme.len()..].find(['/', '?', '#']).unwrap_or(url.len() - scheme.len());
    (host > 0 && !url[scheme.len()..scheme.len() + host].contains(['@', ' '])).then(|| &url[..scheme.len() + host])
}

/// The target of a redirect; `None` if it is no URL or leads from https to http.
fn redirected(from: &str, location: &str) -> Option<String> {
    let to = if location.starts_with('/') && !location.starts_with("//") {
        format!("{}{location}", origin(from)?)
    } else {
        location.to_owned()
    };
    origin(&to)?;
    (to.starts_with("https://") || from.starts_with("http://")).then_some(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_urls_and_never_from_https_to_http() {
        let from = |from, to| redirected(from, to);
        assert_eq!(from("https://h/a/b", "/c?d"), Some("https://h/c?d".into()));
        assert_eq!(from("http://h:1/a", "http://k/c"), Some("http://k/c".into()));
        assert_eq!(from("https://h/a", "https://k/c"), Some("https://k/c".into()));
        for bad in ["http://h/c", "file:///etc/passwd", "", "//k/c", "https://", "https://u@k/"] {
            assert_eq!(from("https://h/a", bad), None, "{bad}");
        }
    }

    #[test]
    fn hub_and_token_are_read_from_the_environment() {
        let hub = |pairs: &'static [(&str, &str)]| {
            Hub::from_environment(|name| pairs.iter().find(|p| p.0 == name).map(|p| p.1.to_owned()))
        };
        let usual = hub(&[]).unwrap();
        assert_eq!((usual.endpoint(), &usual.token), (DEFAULT_ENDPOINT, &None));
        let named =
            hub(&[("HF_ENDPOINT", "http://m:8/"), ("HUGGING_FACE_HUB_TOKEN", " t\n"), ("HF_TOKEN", "")]).unwrap();
        assert_eq!((named.endpoint(), named.token.as_deref()), ("http://m:8", Some("t")));
        assert!(hub(&[("HF_ENDPOINT", "m")]).is_err() && hub(&[("HF_TOKEN", "a b")]).is_err());
    }
}
