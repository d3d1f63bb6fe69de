//! The routes of Ollama's API.

use std::fmt::Write;
use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use larder_core::rfc3339;
use larder_engine::Sampling;
use serde_json::{Value, json};

use super::generate::{ask_chat, prepare_completion};
use super::models::check_model;
use super::work::run_blocking;
use super::{body, generate};
use crate::error::{Json, Result};
use crate::model::{ModelFacts, ServedModel};
use crate::reply::{OllamaEndpoint, OllamaFormat};
use crate::request::table::Object;
use crate::request::{self, ChatRequest, OLLAMA_CHAT, OLLAMA_GENERATE, OllamaGenerateRequest, OllamaLoadRequest};
use crate::state::App;

/// A chat's answer, whole or in lines.
pub async fn chat(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let format = OllamaFormat::new(OllamaEndpoint::Chat, &app.model.name);
    if let Some(answer) = loaded(&app, &body, &OLLAMA_CHAT, &format)? {
        return Ok(answer);
    }
    let request = run_blocking(&app, move |app| {
        let mut request = ChatRequest::parse_ollama(&body)?;
        remove_tag(app, &mut request.params.model);
        Ok(request)
    })
    .await?;
    let asked = ask_chat(&app, request).await?;
    generate::generate(&app, since, asked, |_, _| format).await
}

/// The continuation of a prompt, whole or in lines.
pub async fn generate(State(app): State<App>, request: Request) -> Result<Response> {
    let since = Instant::now();
    let body = body::read(&app.server, request).await?;
    let format = OllamaFormat::new(OllamaEndpoint::Generate, &app.model.name);
    if let Some(answer) = loaded(&app, &body, &OLLAMA_GENERATE, &format)? {
        return Ok(answer);
    }
    let request = run_blocking(&app, move |app| {
        let mut request = OllamaGenerateRequest::parse(&body)?;
        remove_tag(app, &mut request.params().model);
        Ok(request)
    })
    .await?;
    let asked = match request {
        OllamaGenerateRequest::Chat(chat) => ask_chat(&app, chat).await?,
        OllamaGenerateRequest::Raw(completion) => {
            run_blocking(&app, move |app| prepare_completion(app, completion)).await?
        }
    };
    generate::generate(&app, since, asked, |_, _| format).await
}

/// The answer at once to a request without messages or prompt, by which Ollama's clients load and unload models; the
/// served one is always loaded.
fn loaded(app: &App, body: &[u8], table: &'static Object, format: &OllamaFormat) -> Result<Option<Response>> {
    let Some(OllamaLoadRequest { mut model, unloads }) = OllamaLoadRequest::parse(body, table)? else {
        return Ok(None);
    };
    remove_tag(app, &mut model);
    check_model(app, model.as_deref())?;
    Ok(Some(Json(format.loaded(unloads)).into_response()))
}

/// Ollama's clients may append the tag `latest` to the name of a model.
pub fn remove_tag(app: &App, model: &mut Option<String>) {
    if let Some(name) = model
        && let Some(name) = name.strip_suffix(":latest").filter(|_| !app.model.has_name(name))
    {
        *model = Some(name.to_owned());
    }
}

/// The served model, as a list.
pub async fn tags(State(app): State<App>) -> Json {
    Json(json!({"models": [tag(&app.model.name, &app.model.facts)]}))
}

/// The served model, which is always loaded.
pub async fn running(State(app): State<App>) -> Json {
    let ServedModel { name, facts, context, .. } = &app.model;
    Json(json!({"models": [loaded_tag(name, facts, facts.bytes, Some(context.tokens))]}))
}

/// A model as `/api/tags` lists it.
pub fn tag(name: &str, facts: &ModelFacts) -> Value {
    let mut model = summary(name, facts);
    model["modified_at"] = rfc3339(UNIX_EPOCH).into();
    model
}

/// A loaded model as `/api/ps` lists it, with the bytes that it takes in memory.
pub fn loaded_tag(name: &str, facts: &ModelFacts, bytes: u64, context: Option<usize>) -> Value {
    /// The end of the year 9999, which stands for never.
    const NEVER: Duration = Duration::from_secs(253_402_300_799);
    let mut model = summary(name, facts);
    model["size"] = bytes.into();
    model["expires_at"] = rfc3339(UNIX_EPOCH + NEVER).into();
    model["size_vram"] = 0.into();
    model["context_length"] = context.into();
    model
}

fn summary(name: &str, facts: &ModelFacts) -> Value {
    json!({"name": name, "model": name, "size": facts.bytes, "digest": "", "details": details(facts)})
}

fn details(facts: &ModelFacts) -> Value {
    let ModelFacts { family, quantization, .. } = facts;
    json!({
        "parent_model": "",
        "format": "larder",
        "family": family,
        "families": if family.is_empty() { json!([]) } else { json!([family]) },
        "parameter_size": if facts.parameters == 0 { String::new() } else { facts.parameter_size() },
        "quantization_level": quantization,
    })
}

/// What the server knows of its model.
pub async fn show(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    let mut name = request::shown_model(&body)?;
    remove_tag(&app, &mut name);
    check_model(&app, name.as_deref())?;
    let facts = &app.model.facts;
    let mut info = json!({
        "general.architecture": facts.family,
        "general.basename": app.model.name,
        "general.parameter_count": facts.parameters,
    });
    info[format!("{}.context_length", facts.family)] = app.model.context.tokens.into();
    Ok(Json(json!({
        "modelfile": "",
        "parameters": parameters(&app),
        "template": "",
        "details": details(facts),
        "model_info": info,
        "capabilities": capabilities(&app.model),
        "modified_at": rfc3339(UNIX_EPOCH),
    })))
}

/// What clients may ask of a model.
fn capabilities(model: &ServedModel) -> Vec<&'static str> {
    ["completion", "tools"].into_iter().chain(model.sees().then_some("vision")).collect()
}

/// The default sampling, a line for each setting.
fn parameters(app: &App) -> String {
    let sampling = Sampling::from(&app.model.generation);
    let settings = [
        ("temperature", sampling.temperature.to_string()),
        ("top_k", sampling.top_k.to_string()),
        ("top_p", sampling.top_p.to_string()),
        ("min_p", sampling.min_p.to_string()),
        ("repeat_penalty", sampling.repetition_penalty.to_string()),
    ];
    settings.iter().fold(String::new(), |mut text, (name, value)| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<30} {value}");
        text
    })
}

/// The version of Ollama whose API this is: clients refuse older ones, and would take this server's own for one.
const API_VERSION: &str = "0.13.0";

/// The version of the API.
pub async fn version() -> Json {
    Json(json!({"version": API_VERSION, "larder": env!("CARGO_PKG_VERSION")}))
}
