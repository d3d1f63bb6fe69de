//! The forms in which APIs write errors: a response in OpenAI's form is rewritten for the routes of the others.

use axum::body::Body;
use axum::http::header;
use axum::response::Response;
use serde_json::{Value, json};

use crate::error::ApiError;

/// The form of the errors of an API.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorForm {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
    /// `{"error": "sentence"}`.
    Ollama,
}

impl ErrorForm {
    /// The form of the routes below `path`.
    pub fn of_path(path: &str) -> Self {
        match path {
            _ if path == "/v1/messages" || path.starts_with("/v1/messages/") => ErrorForm::Anthropic,
            _ if path.starts_with("/api/") => ErrorForm::Ollama,
            _ => ErrorForm::OpenAi,
        }
    }

    /// An error as JSON.
    pub fn json(self, error: &ApiError) -> Value {
        match self {
            ErrorForm::OpenAi => error.json(),
            ErrorForm::Anthropic => {
                json!({"type": "error", "error": {"type": anthropic_type(error), "message": error.message}})
            }
            ErrorForm::Ollama => json!({"error": error.message}),
        }
    }

    /// Rewrites the body of an error response.
    pub fn apply(self, response: &mut Response) {
        if let (false, Some(error)) = (self == ErrorForm::OpenAi, response.extensions().get::<ApiError>()) {
            let body = self.json(error).to_string();
            *response.body_mut() = Body::from(body);
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
    }
}

fn anthropic_type(error: &ApiError) -> &'static str {
    match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}
