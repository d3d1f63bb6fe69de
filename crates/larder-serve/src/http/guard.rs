//! What holds for every request: access control by API keys and origins of web pages (CORS), ids, and the access log.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use super::route::Access;
use super::routes::matched;
use crate::error::form::ErrorForm;
use crate::error::{ApiError, excerpt};
use crate::state::Shared;

/// Longest id that a client may give its request.
const ID_BYTES_MAX: usize = 128;
/// The header of a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Middleware that authorises each request, adds its id and CORS headers, and counts and logs the response.
pub async fn guard(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    // Its pattern is a bounded set for metrics, whatever paths clients request.
    let (access, route) = matched(&request).map_or((Access::Key, "other"), |(route, path)| (route.access, path));
    let (method, id) = (request.method().clone(), request_id(request.headers()));
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default());
    let form = ErrorForm::of_path(request.uri().path());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match authorize(&app, &request, access) {
        Err(error) => error.into_response(),
        Ok(()) if is_preflight(&app, &request) => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => next.run(request).instrument(span.clone()).await,
    };
    response.headers_mut().insert(REQUEST_ID, id);
    form.apply(&mut response);
    if let (Some(allowed), Some(origin)) = (&app.options.cors, origin)
        && (allowed == "*" || allowed.as_bytes() == origin.as_bytes())
    {
        add_cors_headers(response.headers_mut(), origin, wanted);
    }
    let status = response.status().as_u16();
    app.responses.responded(route, status);
    let error = response.extensions().get::<ApiError>().map(tracing::field::display);
    span.in_scope(
        || tracing::info!(%method, route, status, ms = since.elapsed().as_millis() as u64, error, "responded"),
    );
    response
}

/// The id that the client gave, if it is short and visible, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_sane = |id: &&HeaderValue| {
        let bytes = id.as_bytes();
        (1..=ID_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    let given = headers.get(REQUEST_ID).filter(is_sane).cloned();
    given.unwrap_or_else(|| {
        let new = format!("{:016x}", RandomState::new().hash_one(0));
        HeaderValue::try_from(new).unwrap_or(HeaderValue::from_static("0"))
    })
}

fn authorize(app: &Shared, request: &Request, access: Access) -> Result<(), ApiError> {
    check_host(app, request.headers())?;
    check_origin(app, request.headers())?;
    if access == Access::Open || is_preflight(app, request) || app.options.api_keys.is_empty() {
        return Ok(());
    }
    let Some(given) = given_key(request.headers()) else {
        let message = "Missing API key: send it in the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "missing_api_key", message));
    };
    // All keys are compared, so that the time does not tell which one is near.
    let (mut known, mut is_admin) = (false, false);
    for key in &app.options.api_keys {
        let same = constant_time_eq(given, key.key.as_bytes());
        known |= same;
        is_admin |= same & key.is_admin;
    }
    match (known, is_admin || access != Access::Admin) {
        (false, _) => Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "Incorrect API key.")),
        (true, false) => {
            let message = "This API key may not change the engine's settings or sequences; use an admin's key.";
            Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message))
        }
        (true, true) => Ok(()),
    }
}

/// The key of a request: a bearer token, or the header of Anthropic's clients.
fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// DNS rebinding: a page of a foreign name that resolves to this machine could read all that needs no key.
fn check_host(app: &Shared, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    if !app.options.is_local || !app.options.api_keys.is_empty() || is_local_name(host) {
        return Ok(());
    }
    let host = excerpt(host);
    let message = format!("The host name '{host}' is not this machine's; with --api-key any name is allowed.");
    Err(ApiError::new(StatusCode::FORBIDDEN, "host_not_allowed", message))
}

/// Browsers let pages of any site send requests here. Allowed are the configured origin and this server's own page.
fn check_origin(app: &Shared, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let named = app.options.cors.as_deref().is_some_and(|allowed| allowed == "*" || allowed == origin);
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // Without TLS here, a proxy may speak it.
    let own = origin.split_once("://").is_some_and(|(scheme, authority)| {
        authority == host && (scheme == "https" || scheme == "http" && !app.options.with_tls)
    });
    // DNS rebinding: a foreign host name that resolves to this machine makes `Host` and `Origin` match.
    if named || own && (!app.options.is_local || is_local_name(host)) {
        return Ok(());
    }
    let origin = excerpt(origin);
    let message = format!("Cross-origin requests from {origin} are not allowed; --cors {origin} would allow them.");
    Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", message))
}

/// Whether a host, as `Host` has it with or without a port, is `localhost` or an address.
fn is_local_name(host: &str) -> bool {
    let is_port = |rest: &str| rest.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    host.strip_prefix("localhost").is_some_and(|rest| rest.is_empty() || is_port(rest))
        || host.parse::<SocketAddr>().is_ok()
        || host.parse::<Ipv4Addr>().is_ok()
        || bracketed.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

fn is_preflight(app: &Shared, request: &Request) -> bool {
    let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    app.options.cors.is_some() && request.method() == Method::OPTIONS && asks
}

/// `wanted` are the headers that a preflight asks for, such as those that OpenAI's client adds.
fn add_cors_headers(headers: &mut HeaderMap, origin: HeaderValue, wanted: Option<HeaderValue>) {
    let allowed = wanted.unwrap_or(HeaderValue::from_static("Authorization, Content-Type"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
}

/// Compares in a time that depends on the length of `given` alone, so that timing reveals nothing of the key.
fn constant_time_eq(given: &[u8], key: &[u8]) -> bool {
    let mut differ = given.len() ^ key.len();
    for (i, byte) in given.iter().enumerate() {
        let other = if key.is_empty() { 0 } else { key[i % key.len()] };
        differ |= usize::from(black_box(byte ^ other));
    }
    black_box(differ) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_keys_match() {
        assert!(constant_time_eq(b"secret", b"secret") && constant_time_eq(b"", b""));
        for other in ["", "s", "secreT", "secretsecret", "secret ", "Secret"] {
            assert!(!constant_time_eq(other.as_bytes(), b"secret"), "{other}");
        }
        assert!(!constant_time_eq(b"x", b""));
    }

    #[test]
    fn foreign_host_names_are_not_local() {
        for local in ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:80", "[::1]:8080", "[::1]", "10.0.0.7:1"] {
            assert!(is_local_name(local), "{local}");
        }
        let unlike_ports =
            ["localhost:evil", "localhost:80.evil", "localhost:99999", "localhostess:1", "127.0.0.1:evil"];
        let behind_brackets = ["[::1].evil", "[::1].evil:80", "[::1]evil", "[::1]:evil", "[127.0.0.1]", "[::1"];
        let names = ["evil.example:8080", "localhost.evil.example", "", "[evil]:1", "127.0.0.1.evil"];
        for other in names.iter().chain(&unlike_ports).chain(&behind_brackets) {
            assert!(!is_local_name(other), "{other}");
        }
    }
}
