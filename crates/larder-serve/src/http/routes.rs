//! The table of all routes. The router, the keys that routes need, metrics and `/openapi.json` are made of it, and the
//! list in `docs/serve.md` is compared with it.

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};
use axum::routing::{MethodRouter, on};

use super::dispatch::dispatch;
use super::front::{self, Front};
use super::route::Handler::{Model, Models, Server};
use super::route::{Answer, Route, get, post};
use super::{
    anthropic, embeddings, events, llama, mathml, models, ollama, openai, openapi, responses, slots, status, tools,
};
use crate::error::{ApiError, excerpt};
use crate::page;
use crate::request::table::{Field, Kind, field};
use crate::request::{
    ANTHROPIC, ANTHROPIC_COUNT, CHAT, COMPLETION, DETOKENIZE, EMBED, EMBED_ONE, EMBEDDINGS, INFILL, MATHML,
    OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW, RESPONSES, ROUTING, SLOT, TOKENIZE,
};
use crate::state::App;

const LOADED: &[Field] = &[field("model", Kind::Text, "chooses one of several; without it the one that was used last")];
const SLOT_QUERY: &[Field] =
    &[field("action", Kind::Choice(&["save", "restore", "erase"]), "what happens to the slot").required()];

/// All routes.
pub static ROUTES: &[Route] = &[
    get(&["/"], "The page", "the page, which asks for the key", Server(|m| on(m, || async { page::response() })))
        .open()
        .answers(Answer::Page),
    post(&["/v1/chat/completions", "/chat/completions"], "Request fields", &CHAT, Model(|m| on(m, openai::chat)))
        .says("the answer to a chat")
        .answers(Answer::Streamed)
        .forwarded(),
    post(&["/v1/completions", "/completions"], "Request fields", &COMPLETION, Model(|m| on(m, openai::complete)))
        .says("the continuation of one or more prompts, of 16 tokens if no limit is given")
        .answers(Answer::Streamed)
        .forwarded(),
    post(&["/v1/responses", "/responses"], "OpenAI's Responses", &RESPONSES, Model(|m| on(m, responses::respond)))
        .says("the answer to OpenAI's newer form of a chat")
        .answers(Answer::Streamed)
        .forwarded(),
    post(&["/v1/responses/input_tokens"], "OpenAI's Responses", &RESPONSES, Model(|m| on(m, responses::input_tokens)))
        .says("the number of tokens of the prompt that such a body becomes")
        .forwarded(),
    post(&["/v1/messages"], "Anthropic's Messages", &ANTHROPIC, Model(|m| on(m, anthropic::messages)))
        .says("the answer to a chat in Anthropic's form")
        .answers(Answer::Streamed)
        .forwarded(),
    post(
        &["/v1/messages/count_tokens"],
        "Anthropic's Messages",
        &ANTHROPIC_COUNT,
        Model(|m| on(m, anthropic::count_tokens)),
    )
    .says("the number of tokens of the prompt that such a body becomes")
    .forwarded(),
    post(&["/completion"], "Request fields", &COMPLETION, Model(|m| on(m, llama::complete)))
        .says("the continuation of a prompt, as llama.cpp's server answers")
        .answers(Answer::Streamed),
    post(&["/infill"], "Request fields", &INFILL, Model(|m| on(m, llama::fill_in)))
        .says("what fills the gap between two texts, for models with fill-in tokens, as llama.cpp's server answers")
        .answers(Answer::Streamed),
    post(&["/api/chat"], "Ollama's API", &OLLAMA_CHAT, Model(|m| on(m, ollama::chat)))
        .says("the answer to a chat in Ollama's form")
        .answers(Answer::Lines),
    post(&["/api/generate"], "Ollama's API", &OLLAMA_GENERATE, Model(|m| on(m, ollama::generate)))
        .says("the answer to a prompt in Ollama's form")
        .answers(Answer::Lines),
    get(&["/api/tags"], "Ollama's API", "all models", Models(|m| on(m, ollama::tags), |m| on(m, front::tags))),
    get(&["/api/ps"], "Ollama's API", "loaded models", Models(|m| on(m, ollama::running), |m| on(m, front::running))),
    get(&["/api/version"], "Ollama's API", "the version of the API", Server(|m| on(m, ollama::version))),
    post(&["/api/show"], "Ollama's API", &OLLAMA_SHOW, Model(|m| on(m, ollama::show)))
        .says("what the server knows of a model"),
    get(
        &["/v1/models", "/models"],
        "Several models",
        "all models",
        Models(|m| on(m, models::models), |m| on(m, front::models)),
    ),
    get(
        &["/v1/models/{*id}"],
        "Several models",
        "one model",
        Models(|m| on(m, models::model), |m| on(m, front::model)),
    ),
    post(&["/v1/embeddings", "/embeddings"], "Embeddings", &EMBEDDINGS, Model(|m| on(m, embeddings::embeddings)))
        .says("embeddings in OpenAI's form")
        .forwarded(),
    post(&["/api/embed"], "Embeddings", &EMBED, Model(|m| on(m, embeddings::embed)))
        .says("embeddings in Ollama's form"),
    post(&["/api/embeddings"], "Embeddings", &EMBED_ONE, Model(|m| on(m, embeddings::embed_one)))
        .says("the embedding of one text in Ollama's older form"),
    post(&["/tokenize"], "Routes", &TOKENIZE, Model(|m| on(m, tools::tokenize))).says("the token ids of a text"),
    post(&["/detokenize"], "Routes", &DETOKENIZE, Model(|m| on(m, tools::detokenize))).says("the text of token ids"),
    post(&["/apply-template"], "Routes", &CHAT, Model(|m| on(m, tools::apply_template)))
        .says("the text that a chat becomes before it is tokenised"),
    post(&["/mathml"], "The page", &MATHML, Server(|m| on(m, mathml::convert)))
        .says("the MathML of each formula, or an error in its place; at most 256 KiB of each, in 2 s for all"),
    get(
        &["/props"],
        "Routes",
        "context, slots and default sampling, under llama.cpp's names",
        Model(|m| on(m, tools::props)),
    )
    .asks(LOADED),
    get(&["/slots"], "Slots", "all slots", Model(|m| on(m, slots::list))).asks(LOADED).answers(Answer::List),
    post(&["/slots/{id}"], "Slots", &SLOT, Model(|m| on(m, slots::act)))
        .says("saves, restores or erases the sequence of a slot")
        .asks(SLOT_QUERY)
        .admin(),
    get(
        &["/health", "/v1/health"],
        "Routes",
        "whether requests are accepted, and how many wait; 503 while shutting down",
        Models(|m| on(m, status::health), |m| on(m, front::health)),
    )
    .open(),
    get(
        &["/metrics"],
        "Routes",
        "counters and histograms in Prometheus' format",
        Models(|m| on(m, status::metrics), |m| on(m, front::metrics)),
    )
    .answers(Answer::Text),
    get(
        &["/engine"],
        "Routes",
        "geometry, resident experts, rates, routing, measured losses and costs of λ, recommended sampling",
        Model(|m| on(m, status::engine)),
    )
    .asks(LOADED),
    post(&["/engine"], "Routes", &ROUTING, Model(|m| on(m, status::set_engine)))
        .says("changes routing from the next token on, for all clients")
        .admin(),
    get(
        &["/events"],
        "Routes",
        "for each step the requests that took part, their tokens, experts hit, missed and evicted, and rates",
        Server(|m| on(m, events::events)),
    )
    .answers(Answer::Events),
    get(&["/openapi.json"], "OpenAPI", "the description of all routes", Server(|m| on(m, openapi::answer))).open(),
];

/// The route and the pattern that a request has matched. Of a method that its path does not have, it is the path's
/// first.
pub fn matched(request: &Request) -> Option<(&'static Route, &'static str)> {
    let path = request.extensions().get::<MatchedPath>()?.as_str();
    find(path, request.method())
}

fn find(path: &str, method: &Method) -> Option<(&'static Route, &'static str)> {
    let of = |route: &'static Route| Some((route, *route.paths.iter().find(|pattern| **pattern == path)?));
    let mut all = ROUTES.iter().filter_map(of);
    let first = all.next()?;
    Some([first].into_iter().chain(all).find(|(route, _)| route.method == method.as_str()).unwrap_or(first))
}

/// The routes of a model.
pub fn of_model(app: App) -> Router {
    let server = app.server.clone();
    built(app, |route| match route.handler {
        Server(handler) => handler(route.filter).with_state(server.clone()),
        Model(handler) | Models(handler, _) => handler(route.filter),
    })
}

/// The routes of several models.
pub fn of_models(front: Front) -> Router {
    let server = front.server.clone();
    built(front, |route| match route.handler {
        Server(handler) => handler(route.filter).with_state(server.clone()),
        Model(_) => on(route.filter, move |state, request| dispatch(route, state, request)),
        Models(_, handler) => handler(route.filter),
    })
}

fn built<S: Clone + Send + Sync + 'static>(state: S, handler: impl Fn(&'static Route) -> MethodRouter<S>) -> Router {
    let paths = ROUTES.iter().flat_map(|route| route.paths.iter().map(move |path| (route, path)));
    let all = paths.fold(Router::new(), |router, (route, path)| router.route(path, handler(route)));
    all.fallback(not_found).method_not_allowed_fallback(method_not_allowed).with_state(state)
}

async fn not_found(request: Request) -> ApiError {
    let message = format!("Unknown request URL: {} {}.", request.method(), excerpt(request.uri().path()));
    ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let message = format!("{} does not support the method {}.", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::route::Access;

    #[test]
    fn access_depends_on_path_and_method() {
        let of = |path, method| find(path, &method).map(|(route, pattern)| (route.access, pattern));
        assert_eq!(of("/", Method::GET), Some((Access::Open, "/")));
        assert_eq!(of("/engine", Method::GET), Some((Access::Key, "/engine")));
        assert_eq!(of("/engine", Method::HEAD), Some((Access::Key, "/engine")));
        assert_eq!(of("/engine", Method::POST), Some((Access::Admin, "/engine")));
        assert_eq!(of("/slots/{id}", Method::POST), Some((Access::Admin, "/slots/{id}")));
        assert_eq!(of("/models", Method::GET), Some((Access::Key, "/models")));
        assert_eq!(of("/nothing", Method::GET), None);
    }

    #[test]
    fn only_routes_of_openais_api_are_forwarded() {
        let forwarded = |path| find(path, &Method::POST).unwrap().0.is_forwarded;
        for path in ["/v1/chat/completions", "/completions", "/responses", "/embeddings", "/v1/messages/count_tokens"] {
            assert!(forwarded(path), "{path}");
        }
        for path in ["/engine", "/api/chat", "/v1/models", "/completion", "/tokenize"] {
            assert!(!forwarded(path), "{path}");
        }
    }
}
