//! The programs that can be launched: a row for each, and what it is told.

use serde_json::json;

use super::setup::{LocalEndpoint, Setup};

/// A program that talks to a server.
pub struct Client {
    /// Its name on the command line.
    pub name: &'static str,
    /// The name of its executable file.
    pub program: &'static str,
    /// The command that installs it.
    pub install: &'static str,
    /// Tokens of a context in which its own prompt and some turns have room.
    pub context: usize,
    /// What it is told of the server.
    pub setup: fn(&LocalEndpoint) -> Setup,
}

/// All of them.
pub static CLIENTS: [Client; 4] = [
    Client {
        name: "claude",
        program: "claude",
        install: "npm install -g @anthropic-ai/claude-code",
        context: 32 << 10,
        setup: claude,
    },
    Client {
        name: "codex",
        program: "codex",
        install: "npm install -g @openai/codex",
        context: 16 << 10,
        setup: codex,
    },
    Client {
        name: "opencode",
        program: "opencode",
        install: "npm install -g opencode-ai",
        context: 16 << 10,
        setup: opencode,
    },
    Client { name: "aider", program: "aider", install: "pipx install aider-chat", context: 8 << 10, setup: aider },
];

impl Client {
    /// The one of this name.
    pub fn named(name: &str) -> Option<&'static Client> {
        CLIENTS.iter().find(|client| client.name == name)
    }
}

/// Tokens of an answer, where a program has to leave room for one.
fn answer_tokens(context: usize) -> usize {
    (context / 4).min(8192)
}

/// A key of its own would go before the token, and make it ask which to use. Without a window it takes any model's as
/// 200,000 tokens.
fn claude(endpoint: &LocalEndpoint) -> Setup {
    let models = [
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    ];
    let models = models.map(|name| (name, endpoint.model.clone()));
    let env = [
        ("ANTHROPIC_BASE_URL", endpoint.url.clone()),
        ("ANTHROPIC_AUTH_TOKEN", endpoint.key.clone()),
        ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", endpoint.context.to_string()),
        ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", answer_tokens(endpoint.context).to_string()),
        // A line about the client in front of the system prompt, which would keep prompts from sharing their beginning.
        ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0".into()),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".into()),
    ];
    Setup { env: env.into_iter().chain(models).collect(), unset: vec!["ANTHROPIC_API_KEY"], args: vec![] }
}

/// Everything is a setting of its configuration; the values are TOML, of which strings of JSON are a part.
fn codex(endpoint: &LocalEndpoint) -> Setup {
    let (model, url) = (json!(endpoint.model), json!(endpoint.api_url()));
    let settings = [
        format!("model={model}"),
        "model_provider=\"larder\"".into(),
        format!(
            "model_providers.larder={{name=\"larder\",base_url={url},wire_api=\"responses\",env_key=\"LARDER_API_KEY\"}}"
        ),
        format!("model_context_window={}", endpoint.context),
        "check_for_update_on_startup=false".into(),
        "analytics.enabled=false".into(),
    ];
    let args = settings.into_iter().flat_map(|setting| ["-c".into(), setting]).collect();
    Setup { env: vec![("LARDER_API_KEY", endpoint.key.clone())], args, ..Setup::default() }
}

/// Without the limit of a model it never shortens a conversation.
fn opencode(endpoint: &LocalEndpoint) -> Setup {
    let LocalEndpoint { model, context, key, .. } = endpoint;
    let name = format!("larder/{model}");
    let limit = json!({"context": context, "output": answer_tokens(*context)});
    let config = json!({
        "model": name,
        "small_model": name,
        "share": "disabled",
        "provider": {"larder": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "larder",
            "options": {"baseURL": endpoint.api_url(), "apiKey": key},
            "models": {model: {"name": model, "limit": limit}},
        }},
    });
    let env = vec![
        ("OPENCODE_CONFIG_CONTENT", config.to_string()),
        ("OPENCODE_DISABLE_AUTOUPDATE", "1".into()),
        ("OPENCODE_DISABLE_MODELS_FETCH", "1".into()),
    ];
    Setup { env, ..Setup::default() }
}

fn aider(endpoint: &LocalEndpoint) -> Setup {
    let env = vec![
        ("OPENAI_API_BASE", endpoint.api_url()),
        ("OPENAI_API_KEY", endpoint.key.clone()),
        ("AIDER_MODEL", format!("openai/{}", endpoint.model)),
        ("AIDER_SHOW_MODEL_WARNINGS", "false".into()),
        ("AIDER_CHECK_UPDATE", "false".into()),
        ("AIDER_ANALYTICS_DISABLE", "true".into()),
    ];
    Setup { env, ..Setup::default() }
}
