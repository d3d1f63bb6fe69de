use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// A request that is not answered, in OpenAI's form.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The status code.
    pub status: StatusCode,
    /// One sentence.
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after: Option<u64>,
}

impl ApiError {
    /// An error of this status.
    pub fn new(status: StatusCode, code: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None, code: code.into(), retry_after: None }
    }

    /// A request that is wrong.
    pub fn bad_request(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// A field that is wrong.
    pub fn invalid_field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..ApiError::new(StatusCode::BAD_REQUEST, code, message) }
    }

    /// A field that asks for what this server cannot do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::invalid_field(param, "unsupported_value", message)
    }

    /// The same about a field.
    pub fn with_param(self, param: &str) -> Self {
        ApiError { param: Some(param.to_owned()), ..self }
    }

    /// Too many requests.
    pub fn too_many_requests(waiting: usize, seconds: u64) -> Self {
        let message = format!("The server is busy: {waiting} requests are waiting; try again in {seconds} s.");
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
        ApiError { retry_after: Some(seconds), ..error }
    }

    /// No longer answering.
    pub fn shutting_down() -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "The server is shutting down.")
    }

    /// Past its time.
    pub fn timed_out(seconds: u64) -> Self {
        let message = format!("The answer was not complete within the time limit of {seconds} s.");
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    /// The model failed.
    pub fn engine_failed(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", message)
    }

    /// The body of the response.
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

/// A response in JSON.
pub struct Json(pub Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], self.0.to_string()).into_response()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
