//! Error responses.

pub mod form;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The result of a handler or a parser of requests.
pub type Result<T> = std::result::Result<T, ApiError>;

/// An error response in OpenAI's format.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status code.
    pub status: StatusCode,
    /// One sentence for people.
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// OpenAI's machine-readable error code.
    pub code: Option<&'static str>,
    /// Seconds for the header `Retry-After`.
    pub retry_after: Option<u64>,
}

impl ApiError {
    /// An error without a field and without `Retry-After`.
    pub fn new(status: StatusCode, code: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None, code: code.into(), retry_after: None }
    }

    /// 400: a malformed request.
    pub fn bad_request(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// 400: a field with a wrong type or value.
    pub fn invalid_field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..ApiError::new(StatusCode::BAD_REQUEST, code, message) }
    }

    /// 400: a field that asks for something this server does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::invalid_field(param, "unsupported_value", message)
    }

    /// Names the field at fault.
    pub fn with_param(self, param: &str) -> Self {
        ApiError { param: Some(param.to_owned()), ..self }
    }

    /// 429: a queue is full; `what` says of what, as in "requests are waiting".
    pub fn too_many_requests(count: usize, what: &str, seconds: u64) -> Self {
        let message = format!("The server is busy: {count} {what}; try again in {seconds} s.");
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
        ApiError { retry_after: Some(seconds), ..error }
    }

    /// 503: no new requests are accepted.
    pub fn shutting_down() -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "The server is shutting down.")
    }

    /// 503: the drive with the model was removed, as this sentence says.
    pub fn drive_removed(sentence: String) -> Self {
        /// Seconds until a client may ask whether the drive is back, which costs next to nothing.
        const RETRY_SECONDS: u64 = 10;
        let mut letters = sentence.chars();
        let first = letters.next().map(|first| first.to_ascii_uppercase());
        let message = first.into_iter().chain(letters).chain(['.']).collect::<String>();
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "drive_removed", message);
        ApiError { retry_after: Some(RETRY_SECONDS), ..error }
    }

    /// 504: the request took longer than the server's time limit.
    pub fn timed_out(seconds: u64) -> Self {
        let message = format!("The request was not completed within the time limit of {seconds} s.");
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    /// 400: the grammar of an answer became too costly while it was written.
    pub fn grammar_failed(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_grammar", message)
    }

    /// 500: the engine failed.
    pub fn engine_failed(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", message)
    }

    /// The JSON body of the response.
    pub fn json(&self) -> Value {
        let kind = match self.status.as_u16() {
            429 => "rate_limit_error",
            500.. => "server_error",
            401 | 403 => "authentication_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// The most bytes of a client's text that a message repeats.
const EXCERPT_BYTES_MAX: usize = 200;

/// The beginning of a client's text, on one line, as messages and logs repeat it.
pub fn excerpt(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if shown.len() + c.len_utf8() > EXCERPT_BYTES_MAX {
            return shown + "…";
        }
        shown.push(c);
    }
    shown
}

/// A response with a JSON body.
pub struct Json(pub Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], self.0.to_string()).into_response()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        // Routes of other APIs write it in their own form.
        response.extensions_mut().insert(self.clone());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
