//! The routes of OpenAI's Responses API.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use larder_text::ContextFull;
use serde_json::json;

use super::body;
use super::generate::{generate, prepare_chat};
use super::models::check_model;
use super::work::run_blocking;
use crate::error::{Json, Result};
use crate::reply::ResponsesFormat;
use crate::request::ResponsesRequest;
use crate::state::App;

/// A response, whole or streamed.
pub async fn respond(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let (asked, echo, namespaces) = run_blocking(&app, move |app| {
        let ResponsesRequest { chat, mut echo, namespaces } = ResponsesRequest::parse(&body)?;
        let full = chat.params.context_full.unwrap_or(app.server.options.context_full);
        echo.insert("truncation".into(), if full == ContextFull::Stop { "disabled" } else { "auto" }.into());
        Ok((prepare_chat(app, chat)?, echo, namespaces))
    })
    .await?;
    generate(&app, since, asked, |_, number| ResponsesFormat::new(number, &app.model.name, echo, namespaces)).await
}

/// The tokens of the prompt that a request becomes.
pub async fn input_tokens(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    run_blocking(&app, move |app| {
        let ResponsesRequest { chat, .. } = ResponsesRequest::parse(&body)?;
        check_model(app, chat.params.model.as_deref())?;
        Ok(Json(json!({"object": "response.input_tokens", "input_tokens": app.model.chat(&chat)?.tokens.len()})))
    })
    .await
}
