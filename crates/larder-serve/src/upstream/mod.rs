//! Another OpenAI-compatible server, which answers for the models that this one does not have.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{timeout, timeout_at};

use crate::error::ApiError;
use crate::error::form::ErrorForm;
use crate::net::connect::{ServerStream, exchange, opened};

mod address;
mod body;

pub use address::UpstreamAddress;
use body::{StreamedBody, read_complete};

/// Time to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a server that was away is not asked again.
const PAUSE: Duration = Duration::from_secs(2);
/// Time for the list of its models, and how long that is kept.
const LIST: Duration = Duration::from_secs(2);
const LIST_KEPT: Duration = Duration::from_secs(30);
/// Largest list of models.
const LIST_BYTES_MAX: usize = 1 << 20;
/// Bytes of all answers together that are not streamed, until clients have them.
const ANSWERS_BYTES_MAX: usize = 64 << 20;
/// Seconds after which a client may ask again when they have more.
const FULL_SECONDS: u64 = 5;
/// The name of this server in the header `Via`, which ends requests that go in a circle.
const VIA: &str = "1.1 larder";

/// How another server is reached.
#[derive(Clone)]
pub struct UpstreamOptions {
    /// Its address.
    pub address: UpstreamAddress,
    /// The API key that it wants.
    pub key: Option<String>,
}

impl std::fmt::Debug for UpstreamOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("UpstreamOptions").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Another server.
pub struct Upstream {
    options: UpstreamOptions,
    state: Mutex<UpstreamState>,
    /// A permit for each byte of an answer.
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct UpstreamState {
    /// When it was found to be away.
    away_since: Option<Instant>,
    models: Option<(Instant, Vec<Value>)>,
}

/// Why another server did not answer: one clause.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct UpstreamAway(String);

impl UpstreamAway {
    fn new(what: &str, error: impl std::fmt::Display) -> Self {
        UpstreamAway(format!("{what}: {error}"))
    }
}

type Result<T> = std::result::Result<T, UpstreamAway>;

impl Upstream {
    /// A server that was not asked yet.
    pub fn new(options: UpstreamOptions) -> Self {
        Upstream { options, state: Mutex::default(), room: Arc::new(Semaphore::new(ANSWERS_BYTES_MAX)) }
    }

    /// Whether a request has been here before.
    pub fn is_circular(headers: &HeaderMap) -> bool {
        headers.get_all(header::VIA).iter().any(|via| via.to_str().is_ok_and(|via| via.contains(VIA)))
    }

    /// The answer of the other server to a request. A response that is not streamed is read to its end before, and of
    /// one that is streamed the first part, so that an error is found while the request can still be answered here.
    pub async fn send(&self, parts: &Parts, body: Bytes, deadline: Instant) -> Result<Response> {
        if let Some(since) = self.state.lock().away_since
            && since.elapsed() < PAUSE
        {
            return Err(UpstreamAway("it was away a moment ago".into()));
        }
        let answer = self.try_send(parts, body, deadline).await;
        self.note(&answer);
        answer
    }

    async fn try_send(&self, parts: &Parts, body: Bytes, deadline: Instant) -> Result<Response> {
        let request = self.request(parts, body)?;
        let late = |_| UpstreamAway("it did not answer within the time limit".into());
        let response = timeout_at(deadline.into(), self.exchange(request)).await.map_err(late)??;
        if matches!(
            response.status(),
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
        ) {
            return Err(UpstreamAway(format!("it answers with status {}", response.status().as_u16())));
        }
        let (head, incoming) = response.into_parts();
        let body = if is_streamed(&head.headers) {
            StreamedBody::after_first(incoming, ErrorForm::of_path(parts.uri.path()), deadline).await?
        } else {
            match timeout_at(deadline.into(), read_complete(incoming, &self.room)).await.map_err(late)?? {
                Some(complete) => complete,
                None => return Ok(answers_full().into_response()),
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = head.status;
        for name in [header::CONTENT_TYPE, header::RETRY_AFTER, header::CACHE_CONTROL] {
            head.headers
                .get(&name)
                .into_iter()
                .for_each(|value| drop(response.headers_mut().insert(&name, value.clone())));
        }
        Ok(response)
    }

    /// The same request for the other server: with its key, without the client's.
    fn request(&self, parts: &Parts, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let address = &self.options.address;
        let mut request = Request::builder().method(parts.method.clone()).uri(address.path(&parts.uri));
        request = request.header(header::HOST, address.authority()).header(header::VIA, VIA);
        for name in [header::CONTENT_TYPE, header::ACCEPT, header::USER_AGENT] {
            request = parts.headers.get(&name).into_iter().fold(request, |request, value| request.header(&name, value));
        }
        for name in ["anthropic-version", "anthropic-beta"] {
            request = parts.headers.get(name).into_iter().fold(request, |request, value| request.header(name, value));
        }
        if let Some(key) = &self.options.key {
            let bearer = HeaderValue::try_from(format!("Bearer {key}"));
            let mut bearer = bearer.map_err(|error| UpstreamAway::new("its key cannot be sent", error))?;
            bearer.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, bearer);
        }
        request.body(Full::new(body)).map_err(|error| UpstreamAway::new("the request cannot be sent", error))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        let connecting = timeout(CONNECT, connect(&self.options.address));
        let stream =
            connecting.await.map_err(|_| UpstreamAway("it cannot be reached: no connection in time".into()))?;
        let stream = stream.map_err(|error| UpstreamAway::new("it cannot be reached", error))?;
        exchange(stream, request).await.map_err(|error| UpstreamAway::new("the connection broke", error))
    }

    /// Prints when the server goes away, and when it is back.
    fn note(&self, answer: &Result<Response>) {
        let mut state = self.state.lock();
        let was_away = state.away_since.is_some();
        match answer {
            Ok(_) => {
                state.away_since = None;
                if was_away {
                    eprintln!("upstream {} is back", self.options.address);
                }
            }
            Err(why) => {
                state.away_since = Some(Instant::now());
                if !was_away {
                    eprintln!("upstream {} is away ({why}); its requests are answered here", self.options.address);
                }
            }
        }
    }

    /// The models of the other server, as it lists them; those of the last time if it does not answer.
    pub async fn models(&self) -> Vec<Value> {
        let (kept, is_away) = {
            let state = self.state.lock();
            (state.models.clone(), state.away_since.is_some_and(|since| since.elapsed() < PAUSE))
        };
        let is_fresh = kept.as_ref().is_some_and(|(at, _)| at.elapsed() < LIST_KEPT);
        if !is_fresh
            && !is_away
            && let Ok(Some(models)) = timeout(LIST, self.listed()).await
        {
            self.state.lock().models = Some((Instant::now(), models.clone()));
            return models;
        }
        kept.map(|(_, models)| models).unwrap_or_default()
    }

    async fn listed(&self) -> Option<Vec<Value>> {
        let (parts, ()) = Request::builder().method(Method::GET).uri("/v1/models").body(()).ok()?.into_parts();
        let response = self.exchange(self.request(&parts, Bytes::new()).ok()?).await.ok()?;
        let body = Limited::new(response.into_body(), LIST_BYTES_MAX).collect().await.ok()?;
        let mut list: Value = serde_json::from_slice(&body.to_bytes()).ok()?;
        let models = list["data"].as_array_mut().map(std::mem::take)?;
        Some(models.into_iter().filter(|model| model["id"].is_string()).collect())
    }
}

async fn connect(address: &UpstreamAddress) -> io::Result<ServerStream> {
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
    opened(stream, &address.host, address.with_tls).await
}

fn answers_full() -> ApiError {
    let message = format!(
        "The upstream server's answers have more than {} MiB together; ask again when fewer are under way, or for a stream.",
        ANSWERS_BYTES_MAX >> 20
    );
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "upstream_answers_full", message);
    ApiError { retry_after: Some(FULL_SECONDS), ..error }
}

fn is_streamed(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    ["text/event-stream", "application/x-ndjson"].iter().any(|streamed| kind.starts_with(streamed))
}
