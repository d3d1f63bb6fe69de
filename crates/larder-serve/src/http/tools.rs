//! Routes that llama.cpp's server has beside generation: tokens of a text and back, the rendered prompt of a chat,
//! properties.

use axum::extract::{Request, State};
use larder_engine::Sampling;
use serde_json::json;

use super::body;
use super::models::check_model;
use super::pictures::without_images;
use super::work::run_blocking;
use crate::error::{Json, Result};
use crate::request::{ChatRequest, DetokenizeRequest, TokenizeRequest};
use crate::state::App;

/// The token ids of a text.
pub async fn tokenize(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    run_blocking(&app, move |app| {
        let TokenizeRequest { content, add_special, with_pieces } = TokenizeRequest::parse(&body)?;
        let ids = app.model.encode(&content, add_special, "content")?;
        let piece = |id: u32| json!({"id": id, "piece": app.model.tokenizer.decode(&[id], false)});
        let tokens = if with_pieces { ids.into_iter().map(piece).collect() } else { json!(ids) };
        Ok(Json(json!({"tokens": tokens})))
    })
    .await
}

/// The text of token ids, special tokens included.
pub async fn detokenize(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    run_blocking(&app, move |app| {
        let DetokenizeRequest { tokens } = DetokenizeRequest::parse(&body)?;
        Ok(Json(json!({"content": app.model.tokenizer.decode(&tokens, false)})))
    })
    .await
}

/// The text that a chat becomes before it is tokenised.
pub async fn apply_template(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    run_blocking(&app, move |app| {
        let request = ChatRequest::parse(&body)?;
        check_model(app, request.params.model.as_deref())?;
        let request = without_images(request, &app.model.vision)?;
        Ok(Json(json!({"prompt": app.model.rendered(&request)?})))
    })
    .await
}

/// Limits and defaults, under llama.cpp's names.
pub async fn props(State(app): State<App>) -> Json {
    let sampling = Sampling::from(&app.model.generation);
    Json(json!({
        "default_generation_settings": {
            "n_ctx": app.model.context.tokens,
            "params": {
                "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
                "min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
                "max_tokens": app.model.max_tokens,
            },
        },
        "context_full": app.server.options.context_full.name(),
        "total_slots": app.server.options.sessions.max(app.server.options.parallel),
        "model_alias": app.model.name,
        "modalities": {"vision": app.model.sees(), "audio": false},
        "has_chat_template": app.model.template.is_some(),
        "build_info": concat!("larder-", env!("CARGO_PKG_VERSION")),
    }))
}
