//! The route of OpenAI's Responses API.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use larder_engine::ContextFull;

use super::{Result, body, generate, prepare_chat, run_blocking};
use crate::reply::ResponsesFormat;
use crate::request::ResponsesRequest;
use crate::server::App;

/// A response, whole or streamed.
pub async fn respond(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let (asked, echo) = run_blocking(&app, move |app| {
        let ResponsesRequest { chat, mut echo } = ResponsesRequest::parse(&body)?;
        let full = chat.params.context_full.unwrap_or(app.server.options.context_full);
        echo.insert("truncation".into(), if full == ContextFull::Stop { "disabled" } else { "auto" }.into());
        Ok((prepare_chat(app, chat)?, echo))
    })
    .await?;
    generate(&app, since, asked, |_, number| ResponsesFormat::new(number, &app.model.name, echo)).await
}
