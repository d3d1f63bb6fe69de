//! Generation of text, as all routes have it: from a parsed request to the answers.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use larder_engine::Sampler;
use larder_text::{OutputParser, StopMatcher, ToolSchema};
use tokio::sync::mpsc;
use tokio::time::timeout_at;

use super::answer_grammar::AnswerGrammar;
use super::events::event_stream;
use super::models::check_model;
use super::pictures::seen;
use super::work::{run_blocking, run_permitted};
use crate::error::{ApiError, Result};
use crate::prompt::ChatPrompt;
use crate::prompt::context::ContextPlan;
use crate::prompt::turns::PromptTurns;
use crate::queue::job::{CHANNEL, CompiledGrammar, GenerationJob};
use crate::reply::{Framing, PendingAnswer, ResponseFormat, ResponseStream, complete_response};
use crate::request::image::SeenPicture;
use crate::request::{ChatRequest, CompletionRequest, GenerationParams};
use crate::state::App;

/// The header with the number that a request has in `/events`; of several answers the first has it.
const REQUEST_NUMBER: HeaderName = HeaderName::from_static("x-larder-request");

/// Reads the pictures of a chat, renders and tokenises it.
pub async fn ask_chat(app: &App, request: ChatRequest) -> Result<Asked> {
    check_model(app, request.params.model.as_deref())?;
    let request = seen(app, request).await?;
    run_blocking(app, move |app| prepare_chat(app, request)).await
}

fn prepare_chat(app: &App, mut request: ChatRequest) -> Result<Asked> {
    app.model.require_files()?;
    app.server.notes.log(&request.params.notes);
    request.params.max_tokens = request.params.max_tokens.or(app.model.max_tokens);
    let full = request.params.context_full.unwrap_or(app.server.options.context_full);
    let (ChatPrompt { tokens, pictures, text, begun, stop, turns }, plan) = app.model.fitted_chat(&request, full)?;
    let turns = Some(turns);
    let grammar = app.chat_grammar(&request, &text)?;
    let ChatRequest { params, tools, separate_reasoning, .. } = request;
    let tools = tools.map(|tools| tools.schemas).unwrap_or_default();
    let is_separated = separate_reasoning || !tools.is_empty();
    let chat = is_separated.then_some(ChatAnswers { prompt: text, begun, tools, separate_reasoning });
    let prompts = vec![(tokens, plan)];
    Ok(Asked { params, grammar, prompts, pictures, turns, more_stops: stop, chat, show_marks: true })
}

/// Tokenises the prompts of a completion.
pub fn prepare_completion(app: &App, CompletionRequest { mut params, prompts }: CompletionRequest) -> Result<Asked> {
    check_model(app, params.model.as_deref())?;
    app.model.require_files()?;
    app.server.notes.log(&params.notes);
    let full = params.context_full.unwrap_or(app.server.options.context_full);
    let prompts = prompts.iter().map(|prompt| app.model.fitted_prompt(prompt, &params, full)).collect::<Result<_>>()?;
    let grammar = params.format.take().map(AnswerGrammar::from);
    let (pictures, more_stops) = (vec![], vec![]);
    Ok(Asked { params, grammar, prompts, pictures, turns: None, more_stops, chat: None, show_marks: false })
}

/// A request that was parsed and tokenised.
pub struct Asked {
    params: GenerationParams,
    /// What each answer has to match.
    grammar: Option<AnswerGrammar>,
    /// Tokens of each prompt, at least one, and their use of the context.
    pub prompts: Vec<(Vec<u32>, ContextPlan)>,
    /// The pictures of a chat's images, each once.
    pictures: Vec<Arc<SeenPicture>>,
    /// Turns of a chat's prompt.
    turns: Option<PromptTurns>,
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
pub async fn generate<F: ResponseFormat + 'static>(
    app: &App,
    since: Instant,
    asked: Asked,
    format: impl FnOnce(&GenerationParams, u64) -> F,
) -> Result<Response> {
    let Asked { mut params, grammar, prompts, pictures, turns, more_stops, chat, show_marks } = asked;
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
            pictures: pictures.clone(),
            turns: turns.clone().unwrap_or_else(|| PromptTurns::of_text(prompt)),
            embeds: false,
            echo: params.echo.then(|| app.model.tokenizer.decode(prompt, false)),
            // Answers to one prompt differ; the first is that of a request for one.
            sampler: sampler.clone().with_seed(seed.wrapping_add(choice as u64)).with_prompt_len(prompt.len()),
            grammar: grammar.clone(),
            stop: stop.clone(),
            ignore_eos: params.ignore_eos,
            logprobs: params.logprobs,
            show_marks,
            tells_progress: params.stream && params.return_progress,
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
