//! The routes of OpenAI's Responses API.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use larder_text::ContextFull;
use serde_json::json;

use super::body;
use super::generate::{ask_chat, generate};
use super::models::check_model;
use super::pictures::seen;
use super::work::run_blocking;
use crate::error::{Json, Result};
use crate::reply::ResponsesFormat;
use crate::request::ResponsesRequest;
use crate::state::App;

/// A response, whole or streamed.
pub async fn respond(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let (chat, echo, namespaces) = run_blocking(&app, move |app| {
        let ResponsesRequest { chat, mut echo, namespaces } = ResponsesRequest::parse(&body)?;
        let full = chat.params.context_full.unwrap_or(app.server.options.context_full);
        echo.insert("truncation".into(), if full == ContextFull::Stop { "disabled" } else { "auto" }.into());
        Ok((chat, echo, namespaces))
    })
    .await?;
    let asked = ask_chat(&app, chat).await?;
    generate(&app, since, asked, |_, number| ResponsesFormat::new(number, &app.model.name, echo, namespaces)).await
}

/// The tokens of the prompt that a request becomes.
pub async fn input_tokens(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    let chat = run_blocking(&app, move |app| {
        let ResponsesRequest { chat, .. } = ResponsesRequest::parse(&body)?;
        check_model(app, chat.params.model.as_deref()).map(|()| chat)
    })
    .await?;
    let chat = seen(&app, chat).await?;
    let tokens = run_blocking(&app, move |app| Ok(app.model.chat(&chat)?.tokens.len())).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": tokens})))
}
