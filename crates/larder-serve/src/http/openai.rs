//! The routes of OpenAI's chats and completions.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;

use super::body;
use super::generate::{ask_chat, generate, prepare_completion};
use super::work::run_blocking;
use crate::error::Result;
use crate::reply::{Endpoint, OpenAiFormat};
use crate::request::{ChatRequest, CompletionRequest, GenerationParams};
use crate::state::App;

/// The answer to a chat, whole or streamed.
pub async fn chat(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let request = run_blocking(&app, move |_| ChatRequest::parse(&body)).await?;
    let asked = ask_chat(&app, request).await?;
    let format = |params: &GenerationParams, number| OpenAiFormat::new(Endpoint::Chat, number, &app.model.name, params);
    generate(&app, since, asked, format).await
}

/// The continuation of prompts, whole or streamed.
pub async fn complete(State(app): State<App>, request: Request) -> Result<Response> {
    /// OpenAI's default for this endpoint.
    const DEFAULT_MAX_TOKENS: usize = 16;
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let asked = run_blocking(&app, move |app| {
        let mut request = CompletionRequest::parse(&body)?;
        request.params.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        prepare_completion(app, request)
    })
    .await?;
    let format =
        |params: &GenerationParams, number| OpenAiFormat::new(Endpoint::Completion, number, &app.model.name, params);
    generate(&app, since, asked, format).await
}
