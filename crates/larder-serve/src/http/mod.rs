//! Routes and their handlers.

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use larder_engine::Sampler;
use larder_text::{OutputParser, StopMatcher, ToolSchema};
use serde_json::json;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot};
use tokio::time::timeout_at;

use crate::answer_grammar::{AnswerGrammar, CompiledGrammar};
use crate::context::ContextPlan;
use crate::error::{ApiError, Json, excerpt};
use crate::job::{CHANNEL, GenerationJob};
use crate::metrics::{self, ModelMetrics};
use crate::pool::ModelPool;
use crate::prompt::ChatPrompt;
use crate::queue::EngineCommand;
use crate::reply::{Endpoint, Framing, OpenAiFormat, PendingAnswer, ResponseFormat, ResponseStream, complete_response};
use crate::request::{self, ChatRequest, CompletionRequest, GenerationParams};
use crate::server::{App, Shared, SharedState};
#[cfg(test)]
pub use routes::ROUTES;
pub use routes::{Access, Route, of_model};

mod anthropic;
mod body;
mod embeddings;
mod front;
mod llama;
mod mathml;
mod ollama;
mod openapi;
mod responses;
mod routes;
mod slots;
mod tools;

/// The header with the number that a request has in `/events`; of several answers the first has it.
const REQUEST_NUMBER: HeaderName = HeaderName::from_static("x-larder-request");

type Result<T> = std::result::Result<T, ApiError>;

/// Open event streams at a time.
const LISTENERS_MAX: usize = 32;

/// The routes of a server.
pub fn router(server: Shared, pool: Arc<ModelPool>) -> Router {
    match (pool.fixed(), &server.options.upstream) {
        (Some(router), None) => router,
        _ => front::routes(server, pool),
    }
}

async fn not_found(request: Request) -> ApiError {
    let message = format!("Unknown request URL: {} {}.", request.method(), excerpt(request.uri().path()));
    ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let message = format!("{} does not support the method {}.", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn health(State(app): State<App>) -> Response {
    health_of(app.queue.lengths(), app.queue.is_closed())
}

/// Whether requests are accepted, and how many wait and are generated.
fn health_of((queued, active): (usize, usize), is_closed: bool) -> Response {
    let (code, status) =
        if is_closed { (StatusCode::SERVICE_UNAVAILABLE, "shutting down") } else { (StatusCode::OK, "ok") };
    (code, Json(json!({"status": status, "active": active, "queued": queued}))).into_response()
}

async fn metrics(State(app): State<App>) -> Response {
    metrics_of(&app.server, &[ModelMetrics { name: None, metrics: &app.metrics, lengths: app.queue.lengths() }])
}

fn metrics_of(server: &SharedState, models: &[ModelMetrics]) -> Response {
    let text = metrics::text(&server.responses, models, (server.options.process_bytes)());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn models(State(app): State<App>) -> Json {
    Json(json!({"object": "list", "data": [model_object(&app, &app.model.name)]}))
}

async fn model(State(app): State<App>, Path(id): Path<String>) -> Result<Json> {
    if app.model.has_name(&id) { Ok(Json(model_object(&app, &id))) } else { Err(unknown_model(&app, &id)) }
}

fn model_object(app: &App, id: &str) -> serde_json::Value {
    json!({
        "id": id, "object": "model", "created": 0, "owned_by": "larder",
        "context_length": app.model.context.tokens, "aliases": app.model.aliases,
    })
}

async fn chat(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let asked = run_blocking(&app, move |app| prepare_chat(app, ChatRequest::parse(&body)?)).await?;
    let format = |params: &GenerationParams, number| OpenAiFormat::new(Endpoint::Chat, number, &app.model.name, params);
    generate(&app, since, asked, format).await
}

/// Renders and tokenises a chat.
fn prepare_chat(app: &App, mut request: ChatRequest) -> Result<Asked> {
    check_model(app, request.params.model.as_deref())?;
    app.model.require_files()?;
    app.server.notes.log(&request.params.notes);
    request.params.max_tokens = request.params.max_tokens.or(app.model.max_tokens);
    let full = request.params.context_full.unwrap_or(app.server.options.context_full);
    let (ChatPrompt { tokens, text, begun, stop }, plan) = app.model.fitted_chat(&request, full)?;
    let grammar = app.chat_grammar(&request, &text)?;
    let ChatRequest { params, tools, separate_reasoning, .. } = request;
    let tools = tools.map(|tools| tools.schemas).unwrap_or_default();
    let is_separated = separate_reasoning || !tools.is_empty();
    let chat = is_separated.then_some(ChatAnswers { prompt: text, begun, tools, separate_reasoning });
    Ok(Asked { params, grammar, prompts: vec![(tokens, plan)], more_stops: stop, chat, show_marks: true })
}

async fn complete(State(app): State<App>, request: Request) -> Result<Response> {
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

/// Tokenises the prompts of a completion.
fn prepare_completion(app: &App, CompletionRequest { mut params, prompts }: CompletionRequest) -> Result<Asked> {
    check_model(app, params.model.as_deref())?;
    app.model.require_files()?;
    app.server.notes.log(&params.notes);
    let full = params.context_full.unwrap_or(app.server.options.context_full);
    let prompts = prompts.iter().map(|prompt| app.model.fitted_prompt(prompt, &params, full)).collect::<Result<_>>()?;
    let grammar = params.format.take().map(AnswerGrammar::from);
    Ok(Asked { params, grammar, prompts, more_stops: vec![], chat: None, show_marks: false })
}

/// Runs `work` on a model, mostly tokenising, on a blocking thread, a few at a time.
async fn run_blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T> + Send + 'static,
) -> Result<T> {
    let own = app.clone();
    run_permitted(&app.server.tokenizer_permits, move || work(&own)).await
}

/// Compiles the grammar of an answer in its turn, once there is room for it. Requests without one do not wait for it.
async fn compile(app: &App, since: Instant, grammar: AnswerGrammar) -> Result<Option<CompiledGrammar>> {
    let (own, limit) = (app.clone(), app.server.options.timeout);
    let compiled = async {
        let room = app.server.grammar_room.clone().acquire_owned().await.map_err(|_| ApiError::shutting_down())?;
        let compiled = run_permitted(&app.server.grammar_permits, move || own.compile(&grammar)).await?;
        Ok(compiled.map(|grammar| CompiledGrammar { grammar, room: Arc::new(room) }))
    };
    timeout_at((since + limit).into(), compiled).await.map_err(|_| ApiError::timed_out(limit.as_secs()))?
}

/// Runs `work` on a blocking thread, a few at a time.
async fn run_permitted<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let failed = || ApiError::engine_failed("The request could not be prepared: a worker thread failed.");
    let permit = permits.clone().acquire_owned().await.map_err(|_| failed())?;
    // The permit is held until the work is done, also if the client has disconnected.
    let work = move || {
        let _permit = permit;
        work()
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| failed())?
}

/// Refuses a request for another model, if names count.
fn check_model(app: &App, name: Option<&str>) -> Result<()> {
    let is_other = |name: &&str| !name.is_empty() && !app.model.has_name(name);
    let other = name.filter(|name| app.server.options.strict_model && is_other(name));
    other.map_or(Ok(()), |name| Err(unknown_model(app, name)))
}

fn unknown_model(app: &App, name: &str) -> ApiError {
    let message = format!("The model '{}' does not exist; this server serves '{}'.", excerpt(name), app.model.name);
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
}

/// A request that was parsed and tokenised.
struct Asked {
    params: GenerationParams,
    /// What each answer has to match.
    grammar: Option<AnswerGrammar>,
    /// Tokens of each prompt, at least one, and their use of the context.
    prompts: Vec<(Vec<u32>, ContextPlan)>,
    /// Stop strings beside those of the request.
    more_stops: Vec<String>,
    /// What separates the parts of a chat's answers, if they are separated.
    chat: Option<ChatAnswers>,
    /// Whether the marks of reasoning and tool calls stay in the text.
    show_marks: bool,
}

/// What the parser of a chat's answers needs.
struct ChatAnswers {
    /// Text of the prompt, without that of the answer's beginning.
    prompt: String,
    /// The beginning of the answer, where the request has it.
    begun: String,
    /// Tools that may be called.
    tools: Vec<ToolSchema>,
    /// Whether reasoning is a part of its own, or content.
    separate_reasoning: bool,
}

impl ChatAnswers {
    fn parser(&self, app: &App) -> Box<dyn OutputParser> {
        let (format, tools) = (&app.model.chat_format, self.tools.clone());
        let mut parser = if self.separate_reasoning {
            format.parser(&self.prompt, tools)
        } else {
            format.with_reasoning_as_content().parser(&self.prompt, tools)
        };
        if !self.begun.is_empty() {
            parser.push(&self.begun);
        }
        parser
    }
}

/// Submits a job for each answer and responds with all of them, in the format that `format` makes of the parameters and
/// the request's number.
async fn generate<F: ResponseFormat + 'static>(
    app: &App,
    since: Instant,
    asked: Asked,
    format: impl FnOnce(&GenerationParams, u64) -> F,
) -> Result<Response> {
    let Asked { mut params, grammar, prompts, more_stops, chat, show_marks } = asked;
    let grammar = match grammar {
        Some(grammar) => compile(app, since, grammar).await?,
        None => None,
    };
    let number = app.server.requests.fetch_add((prompts.len() * params.choices) as u64, Ordering::Relaxed);
    let wrong = |error: &dyn std::fmt::Display| ApiError::bad_request(format!("Invalid request: {error}."));
    let sampling = params.sampling.or_defaults((&app.model.generation).into());
    let sampler = Sampler::new(sampling, 0).map_err(|error| wrong(&error))?;
    let sampler = sampler.with_logit_bias(checked_bias(app, std::mem::take(&mut params.logit_bias))?);
    let stops = params.stop.iter().cloned().chain(more_stops).collect();
    let stop = StopMatcher::new(stops).map_err(|error| wrong(&error).with_param("stop"))?;
    let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(number));
    let seconds = app.metrics.lock().request_seconds();
    let answers = prompts.iter().flat_map(|prompt| (0..params.choices).map(move |choice| (prompt, choice)));
    let mut pending = Vec::new();
    for (i, ((prompt, plan), choice)) in answers.enumerate() {
        let (to, from) = mpsc::channel(CHANNEL);
        pending.push(PendingAnswer { events: from, parser: chat.as_ref().map(|chat| chat.parser(app)) });
        let job = GenerationJob {
            number: number + i as u64,
            max_tokens: plan.answer_limit(params.max_tokens, prompt.len(), app.model.context.tokens),
            context: *plan,
            prompt: prompt.clone(),
            embeds: false,
            echo: params.echo.then(|| app.model.tokenizer.decode(prompt, false)),
            // Answers to one prompt differ; the first is that of a request for one.
            sampler: sampler.clone().with_seed(seed.wrapping_add(choice as u64)).with_prompt_len(prompt.len()),
            grammar: grammar.clone(),
            stop: stop.clone(),
            ignore_eos: params.ignore_eos,
            logprobs: params.logprobs,
            show_marks,
            span: tracing::Span::current(),
            received: since,
            deadline: since + app.server.options.timeout,
            events: to,
        };
        // If one is refused, the receivers of the others are dropped, which cancels them.
        app.queue.submit(job, seconds)?;
    }
    let format = Box::new(format(&params, number));
    let mut response = match (params.stream, format.framing()) {
        (true, Framing::ServerSentEvents { .. }) => {
            event_stream(Body::from_stream(ResponseStream::new(pending, format)))
        }
        (true, Framing::JsonLines) => json_lines(Body::from_stream(ResponseStream::new(pending, format))),
        (false, _) => complete_response(pending, format).await,
    };
    response.headers_mut().insert(REQUEST_NUMBER, number.into());
    Ok(response)
}

fn json_lines(body: Body) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))], body).into_response()
}

/// The biases, if all are of tokens of the vocabulary.
fn checked_bias(app: &App, bias: Vec<(u32, f32)>) -> Result<Vec<(u32, f32)>> {
    match bias.iter().find(|(id, _)| *id as usize >= app.model.vocab) {
        None => Ok(bias),
        Some((id, _)) => {
            let message = format!("Token id {id} is out of range: the vocabulary has {} tokens.", app.model.vocab);
            Err(ApiError::invalid_field("logit_bias", "invalid_value", message))
        }
    }
}

fn event_stream(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Some proxies otherwise buffer the whole response.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

async fn engine(State(app): State<App>) -> Result<Json> {
    let (to, state) = oneshot::channel();
    app.queue.command(EngineCommand::ReadState(to))?;
    let mut state = state.await.map_err(|_| ApiError::shutting_down())?;
    state["routing_locked"] = app.server.options.lock_routing.into();
    Ok(Json(state))
}

async fn set_engine(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    let change = request::parse_routing(&body)?;
    if app.server.options.lock_routing {
        let message = "The routing is locked: this server was started with --lock-routing.";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "routing_locked", message));
    }
    let (to, routed) = oneshot::channel();
    app.queue.command(EngineCommand::SetRouting(change, to))?;
    let routed = routed.await.map_err(|_| ApiError::shutting_down())?;
    routed.map(Json).map_err(|error| ApiError::invalid_field("routing", "invalid_value", format!("{error}.")))
}

/// The events of all engines.
async fn events(State(server): State<Shared>) -> Result<Response> {
    if server.live.listeners() >= LISTENERS_MAX {
        return Err(ApiError::too_many_requests(LISTENERS_MAX, "event streams are open", 5));
    }
    let listener = server.live.subscribe();
    Ok(event_stream(Body::from_stream(EventStream { waiting: wait(listener) })))
}

type Waiting = Pin<Box<dyn Future<Output = (Option<Arc<str>>, broadcast::Receiver<Arc<str>>)> + Send>>;

/// Server-sent events of the engine; a client that lags misses some.
struct EventStream {
    waiting: Waiting,
}

fn wait(mut listener: broadcast::Receiver<Arc<str>>) -> Waiting {
    Box::pin(async move {
        loop {
            match listener.recv().await {
                Ok(event) => return (Some(event), listener),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return (None, listener),
            }
        }
    })
}

impl futures_core::Stream for EventStream {
    type Item = std::result::Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Poll::Ready((event, listener)) = self.waiting.as_mut().poll(context) else { return Poll::Pending };
        self.waiting = wait(listener);
        Poll::Ready(event.map(|event| Ok(format!("data: {event}\n\n").into())))
    }
}

#[cfg(test)]
mod tests;
