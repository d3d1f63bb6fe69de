//! The table of all routes. The router, the keys that routes need, metrics and `/openapi.json` are made of it, and the
//! list in `docs/serve.md` is compared with it.

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter, on};

use super::front::{self, Front};
use super::{anthropic, embeddings, llama, mathml, ollama, openapi, responses, slots, tools};
use super::{method_not_allowed, not_found};
use crate::page;
use crate::request::table::{Field, Kind, Object, field};
use crate::request::{
    ANTHROPIC, ANTHROPIC_COUNT, CHAT, COMPLETION, DETOKENIZE, EMBED, EMBED_ONE, EMBEDDINGS, INFILL, MATHML,
    OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW, RESPONSES, ROUTING, SLOT, TOKENIZE,
};
use crate::server::{App, Shared};

/// A route.
pub struct Route {
    /// The method, in capitals.
    pub method: &'static str,
    filter: MethodFilter,
    /// The pattern of its path, and its other names.
    pub paths: &'static [&'static str],
    /// The key that it needs.
    pub access: Access,
    /// Whether OpenAI-compatible servers have it too.
    pub is_forwarded: bool,
    /// The section of `docs/serve.md` that says more.
    pub section: &'static str,
    /// What it answers.
    pub summary: &'static str,
    /// Parameters of the query.
    pub query: &'static [Field],
    /// The fields of the body.
    pub body: Option<&'static Object>,
    /// The form of the answer.
    pub answer: Answer,
    handler: Handler,
}

/// The key that a route needs, if the server has keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// None.
    Open,
    /// Any.
    Key,
    /// An administrator's.
    Admin,
}

/// The form of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// A page.
    Page,
    /// Text.
    Text,
    /// An object.
    Json,
    /// A list of objects.
    List,
    /// An object, or with `stream` server-sent events.
    Streamed,
    /// An object, or with `stream` an object per line.
    Lines,
    /// Server-sent events.
    Events,
}

/// What answers, on a method.
enum Handler {
    /// Whatever models there are.
    Server(fn(MethodFilter) -> MethodRouter<Shared>),
    /// The model that the request names.
    Model(fn(MethodFilter) -> MethodRouter<App>),
    /// The only model, or the server for all of several.
    Models(fn(MethodFilter) -> MethodRouter<App>, fn(MethodFilter) -> MethodRouter<Front>),
}

use Handler::{Model, Models, Server};

const LOADED: &[Field] = &[field("model", Kind::Text, "chooses one of several; without it the one that was used last")];
const SLOT_QUERY: &[Field] =
    &[field("action", Kind::Choice(&["save", "restore", "erase"]), "what happens to the slot").required()];

/// All routes.
pub static ROUTES: &[Route] = &[
    get(&["/"], "The page", "the page, which asks for the key", Server(|m| on(m, || async { page::response() })))
        .open()
        .answers(Answer::Page),
    post(&["/v1/chat/completions", "/chat/completions"], "Request fields", &CHAT, Model(|m| on(m, super::chat)))
        .says("the answer to a chat")
        .answers(Answer::Streamed)
        .forwarded(),
    post(&["/v1/completions", "/completions"], "Request fields", &COMPLETION, Model(|m| on(m, super::complete)))
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
        Models(|m| on(m, super::models), |m| on(m, front::models)),
    ),
    get(&["/v1/models/{*id}"], "Several models", "one model", Models(|m| on(m, super::model), |m| on(m, front::model))),
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
        Models(|m| on(m, super::health), |m| on(m, front::health)),
    )
    .open(),
    get(
        &["/metrics"],
        "Routes",
        "counters and histograms in Prometheus' format",
        Models(|m| on(m, super::metrics), |m| on(m, front::metrics)),
    )
    .answers(Answer::Text),
    get(
        &["/engine"],
        "Routes",
        "geometry, resident experts, rates, routing, measured losses and costs of λ, recommended sampling",
        Model(|m| on(m, super::engine)),
    )
    .asks(LOADED),
    post(&["/engine"], "Routes", &ROUTING, Model(|m| on(m, super::set_engine)))
        .says("changes routing from the next token on, for all clients")
        .admin(),
    get(
        &["/events"],
        "Routes",
        "for each step the requests that took part, their tokens, experts hit, missed and evicted, and rates",
        Server(|m| on(m, super::events)),
    )
    .answers(Answer::Events),
    get(&["/openapi.json"], "OpenAPI", "the description of all routes", Server(|m| on(m, openapi::answer))).open(),
];

const fn get(paths: &'static [&'static str], section: &'static str, summary: &'static str, handler: Handler) -> Route {
    Route {
        method: "GET",
        filter: MethodFilter::GET,
        paths,
        access: Access::Key,
        is_forwarded: false,
        section,
        summary,
        query: &[],
        body: None,
        answer: Answer::Json,
        handler,
    }
}

const fn post(paths: &'static [&'static str], section: &'static str, body: &'static Object, handler: Handler) -> Route {
    Route { method: "POST", filter: MethodFilter::POST, body: Some(body), ..get(paths, section, "", handler) }
}

impl Route {
    const fn says(self, summary: &'static str) -> Self {
        Route { summary, ..self }
    }

    const fn answers(self, answer: Answer) -> Self {
        Route { answer, ..self }
    }

    const fn asks(self, query: &'static [Field]) -> Self {
        Route { query, ..self }
    }

    const fn open(self) -> Self {
        Route { access: Access::Open, ..self }
    }

    const fn admin(self) -> Self {
        Route { access: Access::Admin, ..self }
    }

    const fn forwarded(self) -> Self {
        Route { is_forwarded: true, ..self }
    }

    /// Whether the body has these fields.
    pub fn has_body(&self, table: &Object) -> bool {
        self.body.is_some_and(|body| body.name == table.name)
    }

    /// The route and the pattern that a request has matched. Of a method that its path does not have, it is the path's
    /// first.
    pub fn matched(request: &Request) -> Option<(&'static Route, &'static str)> {
        let path = request.extensions().get::<MatchedPath>()?.as_str();
        Route::find(path, request.method())
    }

    fn find(path: &str, method: &Method) -> Option<(&'static Route, &'static str)> {
        let of = |route: &'static Route| Some((route, *route.paths.iter().find(|pattern| **pattern == path)?));
        let mut all = ROUTES.iter().filter_map(of);
        let first = all.next()?;
        Some([first].into_iter().chain(all).find(|(route, _)| route.method == method.as_str()).unwrap_or(first))
    }
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
        Model(_) => on(route.filter, move |state, request| front::dispatch(route, state, request)),
        Models(_, handler) => handler(route.filter),
    })
}

fn built<S: Clone + Send + Sync + 'static>(state: S, handler: impl Fn(&'static Route) -> MethodRouter<S>) -> Router {
    let paths = ROUTES.iter().flat_map(|route| route.paths.iter().map(move |path| (route, path)));
    let all = paths.fold(Router::new(), |router, (route, path)| router.route(path, handler(route)));
    all.fallback(not_found).method_not_allowed_fallback(method_not_allowed).with_state(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_depends_on_path_and_method() {
        let of = |path, method| Route::find(path, &method).map(|(route, pattern)| (route.access, pattern));
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
        let forwarded = |path| Route::find(path, &Method::POST).unwrap().0.is_forwarded;
        for path in ["/v1/chat/completions", "/completions", "/responses", "/embeddings", "/v1/messages/count_tokens"] {
            assert!(forwarded(path), "{path}");
        }
        for path in ["/engine", "/api/chat", "/v1/models", "/completion", "/tokenize"] {
            assert!(!forwarded(path), "{path}");
        }
    }
}
