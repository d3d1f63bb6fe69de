//! Routes of llama.cpp's server that generate text: the continuation of a prompt, and what fills a gap in.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;

use super::body;
use super::generate::{generate, prepare_completion};
use super::work::run_blocking;
use crate::error::Result;
use crate::reply::LlamaFormat;
use crate::request::{CompletionRequest, GenerationParams};
use crate::state::App;

/// The continuation of a prompt.
pub async fn complete(State(app): State<App>, request: Request) -> Result<Response> {
    respond(&app, request, CompletionRequest::parse).await
}

/// What belongs between two texts.
pub async fn fill_in(State(app): State<App>, request: Request) -> Result<Response> {
    respond(&app, request, CompletionRequest::parse_infill).await
}

async fn respond(
    app: &App,
    request: Request,
    parse: impl FnOnce(&[u8]) -> Result<CompletionRequest> + Send + 'static,
) -> Result<Response> {
    let since = Instant::now();
    let body: Bytes = body::read(&app.server, request).await?;
    let asked = run_blocking(app, move |app| prepare_completion(app, parse(&body)?)).await?;
    let format = |params: &GenerationParams, _| LlamaFormat::new(&app.model.name, params.stop.clone());
    generate(app, since, asked, format).await
}
