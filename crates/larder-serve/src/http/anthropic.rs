//! The routes of Anthropic's Messages API.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;

use super::body;
use super::generate::{ask_chat, generate};
use super::models::check_model;
use super::pictures::seen;
use super::work::run_blocking;
use crate::error::{Json, Result};
use crate::reply::AnthropicFormat;
use crate::request::{ChatRequest, GenerationParams};
use crate::state::App;

/// A message, whole or streamed.
pub async fn messages(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let parsed = run_blocking(&app, move |app| Ok(without_client_lines(app, ChatRequest::parse_anthropic(&body)?)));
    let asked = ask_chat(&app, parsed.await?).await?;
    let prompt_tokens = asked.prompts.iter().map(|(prompt, _)| prompt.len()).sum();
    let format = |params: &GenerationParams, number| {
        AnthropicFormat::new(number, &app.model.name, prompt_tokens, params.stop.clone())
    };
    generate(&app, since, asked, format).await
}

/// The request as it is cached, unless the server keeps all lines.
fn without_client_lines(app: &App, mut request: ChatRequest) -> ChatRequest {
    if !app.server.options.keep_client_lines {
        request.leave_out_client_lines();
    }
    request
}

/// The tokens of the prompt that a request becomes.
pub async fn count_tokens(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    let request = run_blocking(&app, move |app| {
        let request = without_client_lines(app, ChatRequest::parse_anthropic_count(&body)?);
        check_model(app, request.params.model.as_deref()).map(|()| request)
    })
    .await?;
    let request = seen(&app, request).await?;
    run_blocking(&app, move |app| Ok(Json(json!({"input_tokens": app.model.chat(&request)?.tokens.len()})))).await
}
