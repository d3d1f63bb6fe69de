//! A route: its paths, the key that it needs, what it takes and answers, and its handler.

use axum::routing::{MethodFilter, MethodRouter};

use super::front::Front;
use crate::request::table::{Field, Object};
use crate::state::{App, Shared};

/// A route.
pub struct Route {
    /// The method, in capitals.
    pub method: &'static str,
    /// The same, as the router has it.
    pub filter: MethodFilter,
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
    /// What answers.
    pub handler: Handler,
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
pub enum Handler {
    /// Whatever models there are.
    Server(fn(MethodFilter) -> MethodRouter<Shared>),
    /// The model that the request names.
    Model(fn(MethodFilter) -> MethodRouter<App>),
    /// The only model, or the server for all of several.
    Models(fn(MethodFilter) -> MethodRouter<App>, fn(MethodFilter) -> MethodRouter<Front>),
}

/// A route of GET.
pub const fn get(
    paths: &'static [&'static str],
    section: &'static str,
    summary: &'static str,
    handler: Handler,
) -> Route {
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

/// A route of POST, with the table of its body.
pub const fn post(
    paths: &'static [&'static str],
    section: &'static str,
    body: &'static Object,
    handler: Handler,
) -> Route {
    Route { method: "POST", filter: MethodFilter::POST, body: Some(body), ..get(paths, section, "", handler) }
}

impl Route {
    pub const fn says(self, summary: &'static str) -> Self {
        Route { summary, ..self }
    }

    pub const fn answers(self, answer: Answer) -> Self {
        Route { answer, ..self }
    }

    pub const fn asks(self, query: &'static [Field]) -> Self {
        Route { query, ..self }
    }

    pub const fn open(self) -> Self {
        Route { access: Access::Open, ..self }
    }

    pub const fn admin(self) -> Self {
        Route { access: Access::Admin, ..self }
    }

    pub const fn forwarded(self) -> Self {
        Route { is_forwarded: true, ..self }
    }

    /// Whether the body has these fields.
    pub fn has_body(&self, table: &Object) -> bool {
        self.body.is_some_and(|body| body.name == table.name)
    }
}
