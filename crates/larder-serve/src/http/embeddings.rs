//! The routes of embeddings.

use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::extract::{Request, State};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use larder_engine::{Sampler, Sampling};
use larder_text::StopMatcher;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::models::check_model;
use super::work::run_blocking;
use super::{body, ollama};
use crate::error::{ApiError, Json, Result};
use crate::prompt::context::ContextPlan;
use crate::prompt::turns::PromptTurns;
use crate::queue::job::{CHANNEL, GenerationEvent, GenerationJob};
use crate::request::{EmbeddingRequest, EmbeddingStyle};
use crate::state::App;

/// OpenAI's `/v1/embeddings`.
pub async fn embeddings(State(app): State<App>, request: Request) -> Result<Json> {
    answer(&app, request, EmbeddingStyle::OpenAi).await
}

/// Ollama's `/api/embed`.
pub async fn embed(State(app): State<App>, request: Request) -> Result<Json> {
    answer(&app, request, EmbeddingStyle::Ollama).await
}

/// Ollama's older `/api/embeddings`, for one text.
pub async fn embed_one(State(app): State<App>, request: Request) -> Result<Json> {
    answer(&app, request, EmbeddingStyle::OllamaOne).await
}

async fn answer(app: &App, request: Request, style: EmbeddingStyle) -> Result<Json> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let (request, prompts) = run_blocking(app, move |app| {
        let mut request = EmbeddingRequest::parse(&body, style)?;
        ollama::remove_tag(app, &mut request.model);
        check_model(app, request.model.as_deref())?;
        app.model.require_files()?;
        let prompts = request.inputs.iter().map(|input| app.model.input(input)).collect::<Result<Vec<_>>>()?;
        Ok((request, prompts))
    })
    .await?;
    if !app.model.has_embeddings {
        let message = "Models with an encoder have no embeddings here.";
        return Err(ApiError::unsupported("model", message));
    }
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let vectors = computed(app, since, prompts).await?;
    if let (Some(wanted), Some(vector)) = (request.dimensions, vectors.first())
        && wanted != vector.len()
    {
        let message = format!("The embeddings of this model have {} dimensions, not {wanted}.", vector.len());
        return Err(ApiError::invalid_field("dimensions", "invalid_value", message));
    }
    let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(Json(match style {
        EmbeddingStyle::OpenAi => {
            let one = |(index, vector): (usize, &Vec<f32>)| {
                let embedding = if request.base64 { base64_of(vector).into() } else { json!(vector) };
                json!({"object": "embedding", "index": index, "embedding": embedding})
            };
            let data: Vec<Value> = vectors.iter().enumerate().map(one).collect();
            let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
            json!({"object": "list", "model": app.model.name, "data": data, "usage": usage})
        }
        EmbeddingStyle::Ollama => json!({
            "model": app.model.name, "embeddings": vectors, "total_duration": nanoseconds, "load_duration": 0,
            "prompt_eval_count": tokens,
        }),
        EmbeddingStyle::OllamaOne => json!({"embedding": vectors.first()}),
    }))
}

/// The embeddings of all prompts. At most as many are in the queue as are computed at a time, so that they leave room
/// there.
async fn computed(app: &App, since: Instant, prompts: Vec<Vec<u32>>) -> Result<Vec<Vec<f32>>> {
    let (mut computing, mut vectors) = (JoinSet::new(), vec![Vec::new(); prompts.len()]);
    for (index, prompt) in prompts.into_iter().enumerate() {
        if computing.len() >= app.server.options.parallel {
            let (done, vector) = next_of(&mut computing).await?;
            vectors[done] = vector;
        }
        let events = submit(app, since, prompt)?;
        computing.spawn(async move { Ok((index, received(events).await?)) });
    }
    while !computing.is_empty() {
        let (done, vector) = next_of(&mut computing).await?;
        vectors[done] = vector;
    }
    Ok(vectors)
}

/// The next embedding that is complete, and its index.
async fn next_of(computing: &mut JoinSet<Result<(usize, Vec<f32>)>>) -> Result<(usize, Vec<f32>)> {
    let done = computing.join_next().await.and_then(std::result::Result::ok);
    done.unwrap_or_else(|| Err(stopped()))
}

fn stopped() -> ApiError {
    ApiError::engine_failed("The engine stopped before the embedding was complete.")
}

fn submit(app: &App, since: Instant, prompt: Vec<u32>) -> Result<mpsc::Receiver<GenerationEvent>> {
    let wrong = |error: &dyn std::fmt::Display| ApiError::bad_request(format!("Invalid request: {error}."));
    let (to, from) = mpsc::channel(CHANNEL);
    let job = GenerationJob {
        number: app.server.requests.fetch_add(1, Ordering::Relaxed),
        turns: PromptTurns::default(),
        prompt,
        embeds: true,
        context: ContextPlan::default(),
        pictures: vec![],
        sampler: Sampler::new(Sampling::default(), 0).map_err(|error| wrong(&error))?,
        grammar: None,
        stop: StopMatcher::new(vec![]).map_err(|error| wrong(&error))?,
        echo: None,
        max_tokens: 1,
        ignore_eos: false,
        logprobs: None,
        show_marks: false,
        tells_progress: false,
        span: tracing::Span::current(),
        received: since,
        deadline: since + app.server.options.timeout,
        events: to,
    };
    let seconds = app.metrics.lock().request_seconds();
    app.queue.submit(job, seconds)?;
    Ok(from)
}

async fn received(mut events: mpsc::Receiver<GenerationEvent>) -> Result<Vec<f32>> {
    loop {
        match events.recv().await.ok_or_else(stopped)? {
            GenerationEvent::Embedded(vector) => return Ok(vector),
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Queued(_)
            | GenerationEvent::Prefilled(_)
            | GenerationEvent::Delta(_)
            | GenerationEvent::Done(_) => {}
        }
    }
}

/// The numbers as f32 in little-endian order, as OpenAI's clients ask for them.
fn base64_of(vector: &[f32]) -> String {
    STANDARD.encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}
