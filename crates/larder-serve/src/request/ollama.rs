//! The bodies of Ollama's `/api/chat`, `/api/generate` and `/api/show`.

use std::collections::VecDeque;
use std::sync::Arc;

use larder_text::TextFormat;
use serde_json::{Map, Value};

use super::author::Author;
use super::content::Content;
use super::context::CONTEXT_FULL;
use super::dialogue::Dialogue;
use super::fields::Fields;
use super::image::RequestImage;
use super::neutral::Neutral;
use super::parts::{self, CONTENT};
use super::settings::{self, EFFORT, LIMIT, MODEL, REPEAT_PENALTY, SAMPLING, STOPS, TEMPLATE_KWARGS, stop_strings};
use super::table::{Field, Kind, Object, field};
use super::tools::{OfferedTools, TOOLS};
use super::unsupported::{UNSUPPORTED, refused, unread};
use super::{ChatRequest, CompletionRequest, GenerationParams, Prompt, RequestedFormat};
use crate::error::{ApiError, Result};

/// Pictures beside a text.
const IMAGES: Kind = Kind::List(&Kind::Text);

static OPTIONS: Object = Object {
    name: "OllamaOptions",
    groups: &[
        &[
            field(
                "num_predict",
                Kind::Integer(-2, u32::MAX as i128),
                "limit of the answer; 0 or less fills the context",
            ),
            field("num_keep", LIMIT, "tokens at the beginning of the prompt that shifts keep; -1 for all"),
            field("stop", STOPS, "up to 64 texts that end the answer"),
            REPEAT_PENALTY,
            unread("num_ctx", "ignored: `--context` decides"),
        ],
        SAMPLING,
        UNSUPPORTED,
    ],
};

/// Settings of both routes that generate.
const SETTINGS: &[Field] = &[
    MODEL,
    field(
        "format",
        Kind::Either(&[Kind::Choice(&["json", ""]), Kind::Map]),
        "the answer is JSON, or valid by this schema",
    ),
    field(
        "think",
        Kind::Either(&[Kind::Boolean, Kind::Text]),
        "passed to the chat template: whether to reason, or how much",
    ),
    field("stream", Kind::Flag(true), "the answer comes as it is generated, in lines of JSON"),
    field("options", Kind::Object(&OPTIONS), "limits and sampling; other options are ignored"),
    field("keep_alive", Kind::Any, "0 in a request without messages or prompt unloads the model; else ignored"),
    CONTEXT_FULL,
    EFFORT,
    TEMPLATE_KWARGS,
];

/// The fields of `/api/chat`.
pub static OLLAMA_CHAT: Object = Object {
    name: "OllamaChatRequest",
    groups: &[
        &[field("messages", Kind::Objects(&MESSAGE), "the dialogue; without one the model is loaded")],
        SETTINGS,
        TOOLS,
    ],
};

/// The fields of `/api/generate`.
pub static OLLAMA_GENERATE: Object = Object {
    name: "OllamaGenerateRequest",
    groups: &[
        &[
            field(
                "prompt",
                Kind::Text,
                "a user's message, or with `raw` a text to continue; without one the model is loaded",
            ),
            field("system", Kind::Text, "the system message; not with `raw` or `suffix`"),
            field("raw", Kind::Flag(false), "the prompt is not put into the chat template"),
            field("suffix", Kind::Text, "the answer fills the gap before this text, if the model has fill-in tokens"),
            refused("template", Neutral::Empty, ""),
            refused("context", Neutral::Empty, ""),
            field(
                "images",
                IMAGES,
                "pictures before the prompt, in base64 or at addresses; not with `raw` or `suffix`",
            ),
        ],
        SETTINGS,
    ],
};

/// The fields of `/api/show`.
pub static OLLAMA_SHOW: Object =
    Object { name: "OllamaShowRequest", groups: &[&[MODEL, field("name", Kind::Text, "the older name of `model`")]] };

static MESSAGE: Object = Object {
    name: "OllamaMessage",
    groups: &[&[
        field("role", Kind::Choice(&["system", "user", "assistant", "tool"]), "its author").required(),
        field("content", CONTENT, "its text"),
        field("thinking", Kind::Text, "reasoning before the answer"),
        field("tool_calls", Kind::Objects(&TOOL_CALL), "calls of tools"),
        field("tool_name", Kind::Text, "the tool whose result this is"),
        field("tool_call_id", Kind::Text, "the call whose result this is"),
        field("images", IMAGES, "pictures before the content, in base64 or at addresses"),
    ]],
};

static TOOL_CALL: Object = Object {
    name: "OllamaToolCall",
    groups: &[&[field("id", Kind::Text, "its id"), field("function", Kind::Object(&CALLED), "the call").required()]],
};

static CALLED: Object = Object {
    name: "OllamaFunctionCall",
    groups: &[&[
        field("name", Kind::Text, "the tool").required(),
        field("arguments", Kind::Map, "its arguments").required(),
    ]],
};

/// The body of `/api/generate`.
#[derive(Clone, PartialEq, Debug)]
pub enum OllamaGenerateRequest {
    /// A prompt for the chat template.
    Chat(ChatRequest),
    /// A prompt as it is.
    Raw(CompletionRequest),
}

impl ChatRequest {
    /// Parses the body of `/api/chat`.
    pub fn parse_ollama(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", &OLLAMA_CHAT)?;
        let offered = OfferedTools::of_chat(&fields)?;
        let params = GenerationParams { notes: offered.notes.clone(), ..params(&fields)? };
        let ((messages, images), tools, extra) = (messages(&fields)?, offered.requested()?, extra(&fields));
        let chat = ChatRequest { params, messages, images, tools, extra, ..ChatRequest::default() };
        Ok(ChatRequest { separate_reasoning: true, ..chat })
    }
}

impl OllamaGenerateRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", &OLLAMA_GENERATE)?;
        let (params, prompt) = (params(&fields)?, fields.required_string("prompt")?);
        let system = fields.string("system").filter(|system| !system.is_empty());
        let suffix = fields.string("suffix").filter(|suffix| !suffix.is_empty());
        if fields.flag("raw") || suffix.is_some() {
            if !fields.array("images").is_empty() {
                let message = "'images' is not supported with 'raw' and 'suffix', which have no template.";
                return Err(ApiError::unsupported("images", message));
            }
            if system.is_some() {
                let message = "'system' is not supported with 'raw' and 'suffix', which have no template.";
                return Err(ApiError::unsupported("system", message));
            }
            let text = Prompt::Text(prompt.to_owned());
            let prompts = vec![suffix.map_or(Ok(text.clone()), |suffix| text.clone().followed_by(suffix))?];
            return Ok(OllamaGenerateRequest::Raw(CompletionRequest { params, prompts }));
        }
        let mut dialogue = Dialogue::default();
        if let Some(system) = system {
            dialogue.text("system", system);
        }
        dialogue.text("user", with_images(&fields, prompt.into(), Author::Message));
        let ((messages, images), extra) = (dialogue.finish("prompt")?, extra(&fields));
        let chat = ChatRequest { params, messages, images, extra, ..ChatRequest::default() };
        let chat = ChatRequest { separate_reasoning: true, ..chat };
        Ok(OllamaGenerateRequest::Chat(chat))
    }

    /// Generation parameters.
    pub fn params(&mut self) -> &mut GenerationParams {
        match self {
            OllamaGenerateRequest::Chat(chat) => &mut chat.params,
            OllamaGenerateRequest::Raw(completion) => &mut completion.params,
        }
    }
}

/// A request that generates nothing, but has the model loaded or unloaded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OllamaLoadRequest {
    /// The model.
    pub model: Option<String>,
    /// Whether it may be unloaded.
    pub unloads: bool,
}

impl OllamaLoadRequest {
    /// Of a body without messages or without a prompt; `None` if it has them.
    pub fn parse(body: &[u8], table: &'static Object) -> Result<Option<Self>> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", table)?;
        let field = if table.find("messages").is_some() { "messages" } else { "prompt" };
        let is_empty = match fields.get(field) {
            None => true,
            Some(Value::String(text)) => text.is_empty(),
            Some(Value::Array(items)) => items.is_empty(),
            Some(_) => false,
        };
        let unloads = match fields.get("keep_alive") {
            Some(Value::Number(seconds)) => seconds.as_f64() == Some(0.0),
            Some(Value::String(time)) => matches!(time.as_str(), "0" | "0s" | "0m" | "0h"),
            _ => false,
        };
        let model = settings::model(&fields);
        Ok(is_empty.then_some(OllamaLoadRequest { model, unloads }))
    }
}

/// The model that the body of `/api/show` names.
pub fn shown_model(body: &[u8]) -> Result<Option<String>> {
    let json = super::json(body)?;
    let fields = Fields::of(&json, "", &OLLAMA_SHOW)?;
    Ok(fields.string("model").or(fields.string("name")).map(str::to_owned))
}

fn params(fields: &Fields) -> Result<GenerationParams> {
    let empty = Value::Object(Map::new());
    let options = fields.object("options")?.map_or_else(|| Fields::of(&empty, "options", &OPTIONS), Ok)?;
    Ok(GenerationParams {
        max_tokens: Some(options.count("num_predict").filter(|n| *n > 0).unwrap_or(usize::MAX)),
        stop: stop_strings(&options, "stop")?,
        keep: options.count("num_keep"),
        format: format(fields),
        ..settings::shared_params(fields, &options, &["repeat_penalty"])
    })
}

fn format(fields: &Fields) -> Option<RequestedFormat> {
    let format = match fields.get("format")? {
        Value::String(name) if name.is_empty() => return None,
        Value::String(_) => TextFormat::JsonObject,
        schema => TextFormat::JsonSchema(schema.clone()),
    };
    Some(RequestedFormat { field: "format", format })
}

/// `think` is whether to reason, or how much.
fn extra(fields: &Fields) -> Map<String, Value> {
    let mut extra = settings::extra(fields, None);
    match fields.get("think") {
        Some(Value::String(effort)) => {
            extra.entry("enable_thinking").or_insert(true.into());
            extra.entry("reasoning_effort").or_insert(effort.as_str().into());
        }
        Some(think) => {
            extra.entry("enable_thinking").or_insert(think.clone());
        }
        None => {}
    }
    extra
}

/// The images beside a content, before it.
fn with_images(fields: &Fields, content: Content, author: Author) -> Content {
    let mut all = Content::default();
    for (i, image) in fields.array("images").iter().enumerate() {
        let (field, data) = (fields.name(&format!("images[{i}]")), image.as_str().unwrap_or_default());
        all.push(RequestImage::of_text(&field, data, author).into());
    }
    all.push(content);
    all
}

fn messages(fields: &Fields) -> Result<(Vec<Value>, Vec<Arc<RequestImage>>)> {
    fields.required("messages")?;
    let mut reading = MessageReader::default();
    fields.objects("messages")?.iter().try_for_each(|message| reading.add(message))?;
    reading.dialogue.finish("messages")
}

/// Reads messages, whose calls need not have ids: results then belong to calls by their order and the tool's name.
#[derive(Default)]
struct MessageReader {
    dialogue: Dialogue,
    calls: usize,
    /// Ids and names of calls without a result.
    unanswered: VecDeque<(String, String)>,
}

impl MessageReader {
    fn add(&mut self, message: &Fields) -> Result<()> {
        let role = message.required_string("role")?;
        let author = match role {
            "tool" => Author::Tool,
            "assistant" => Author::Answer,
            _ => Author::Message,
        };
        let own = match message.get("content") {
            Some(_) => parts::content(message, "content", author)?,
            None => Content::default(),
        };
        if role == "assistant" && !message.array("images").is_empty() {
            let field = message.name("images");
            return Err(ApiError::unsupported(
                &field,
                format!("Invalid value for '{field}': an answer has no images."),
            ));
        }
        let content = with_images(message, own, author);
        match role {
            "tool" => self.add_result(message, content),
            "assistant" => self.add_turn(message, content)?,
            role => self.dialogue.text(role, content),
        }
        Ok(())
    }

    fn add_turn(&mut self, message: &Fields, content: Content) -> Result<()> {
        if let Some(thinking) = message.string("thinking").filter(|thinking| !thinking.is_empty()) {
            self.dialogue.reasoning(thinking);
        }
        self.dialogue.text("assistant", content);
        message.objects("tool_calls")?.iter().try_for_each(|call| self.add_call(call))
    }

    fn add_call(&mut self, call: &Fields) -> Result<()> {
        let function = call.object("function")?.ok_or_else(|| call.missing("function"))?;
        let (name, arguments) = (function.required_string("name")?, function.required("arguments")?);
        self.calls += 1;
        let id = call.string("id").map_or_else(|| format!("call{:05}", self.calls), str::to_owned);
        self.dialogue.call(&id, name, arguments);
        self.unanswered.push_back((id, name.to_owned()));
        Ok(())
    }

    fn add_result(&mut self, message: &Fields, content: Content) {
        let (name, id) = (message.string("tool_name"), message.string("tool_call_id"));
        let is_meant = |(own_id, own_name): &(String, String)| match (id, name) {
            (Some(id), _) => own_id == id,
            (None, Some(name)) => own_name == name,
            (None, None) => true,
        };
        let call = self.unanswered.iter().position(is_meant).and_then(|at| self.unanswered.remove(at));
        let id = id.map(str::to_owned).or(call.map(|(id, _)| id)).unwrap_or_default();
        self.dialogue.result(&id, name, content);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(body: &Value) -> Result<ChatRequest> {
        ChatRequest::parse_ollama(body.to_string().as_bytes())
    }

    fn with(field: &str, value: Value) -> Value {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body[field] = value;
        body
    }

    #[test]
    fn options_and_messages_are_read() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"a": 1}}});
        let body = json!({
            "model": "m", "think": "low", "format": "json", "keep_alive": "5m", "tools": [tool],
            "options": {"num_predict": 7, "seed": 3, "stop": ["x"], "num_ctx": 4096, "repeat_penalty": 1.5},
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call("f"), call("g")]},
                {"role": "tool", "content": "1", "tool_name": "g"},
                {"role": "tool", "content": "2"},
            ],
        });
        let ChatRequest { params, messages, tools, extra, .. } = parse(&body).unwrap();
        assert_eq!((params.max_tokens, params.seed, params.stop.len(), params.stream), (Some(7), Some(3), 1, true));
        assert_eq!(params.sampling.or_defaults(Default::default()).repetition_penalty, 1.5);
        assert_eq!(params.format.unwrap().format, TextFormat::JsonObject);
        assert_eq!((&extra["enable_thinking"], &extra["reasoning_effort"]), (&json!(true), &json!("low")));
        assert_eq!(tools.unwrap().schemas[0].name, "f");
        let ids: Vec<&Value> = messages[1]["tool_calls"].as_array().unwrap().iter().map(|call| &call["id"]).collect();
        assert_eq!(ids, ["call00001", "call00002"]);
        assert_eq!((&messages[2]["tool_call_id"], &messages[3]["tool_call_id"]), (ids[1], ids[0]));
        assert_eq!(messages[1]["reasoning_content"], "hm");
    }

    #[test]
    fn prompts_are_templated_or_raw() {
        let parse = |body: Value| OllamaGenerateRequest::parse(body.to_string().as_bytes());
        let body = json!({"prompt": "p", "system": "s", "stream": false});
        let Ok(OllamaGenerateRequest::Chat(chat)) = parse(body) else { panic!("a chat") };
        let want = [json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "p"})];
        assert_eq!((chat.messages.as_slice(), chat.params.stream), (&want[..], false));
        let Ok(OllamaGenerateRequest::Raw(raw)) = parse(json!({"prompt": "p", "raw": true})) else { panic!("raw") };
        assert_eq!((raw.prompts, raw.params.max_tokens), (vec![Prompt::Text("p".into())], Some(usize::MAX)));
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({"prompt": "p", "suffix": "s", "system": "t"}), "system"),
            (json!({"prompt": "p", "raw": true, "system": "s"}), "system"),
            (json!({"prompt": "p", "images": ["aGk="], "raw": true}), "images"),
        ] {
            assert_eq!(parse(body).unwrap_err().param.as_deref(), Some(param));
        }
        assert_eq!(shown_model(b"{\"name\": \"m\"}").unwrap().as_deref(), Some("m"));
    }

    #[test]
    fn null_counts_as_absent() {
        let mut body = with("options", json!({"num_predict": null, "stop": null, "temperature": null}));
        for field in ["format", "think", "tools", "stream", "keep_alive"] {
            body[field] = Value::Null;
        }
        assert_eq!(parse(&body).unwrap(), parse(&with("keep_alive", json!(0))).unwrap());
    }

    #[test]
    fn errors_name_the_field() {
        let message = |message: Value| json!([message]);
        for (field, value, param) in [
            ("messages", Value::Null, "messages"),
            ("messages", json!([]), "messages"),
            ("messages", message(json!({"role": "judge", "content": "x"})), "messages[0].role"),
            (
                "messages",
                message(json!({"role": "assistant", "content": "x", "images": ["aGk="]})),
                "messages[0].images",
            ),
            ("messages", message(json!({"role": "user", "content": "x", "images": "aGk="})), "messages[0].images"),
            (
                "messages",
                message(json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})),
                "messages[0].tool_calls[0].function.arguments",
            ),
            ("options", json!({"temperature": 9}), "options.temperature"),
            ("options", json!({"num_predict": 1_u64 << 32}), "options.num_predict"),
            ("options", json!({"stop": [1]}), "options.stop"),
            ("options", json!(5), "options"),
            ("format", json!("xml"), "format"),
            ("think", json!(5), "think"),
            ("stream", json!(1), "stream"),
        ] {
            let error = parse(&with(field, value.clone())).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{value}: {error}");
        }
    }
}
