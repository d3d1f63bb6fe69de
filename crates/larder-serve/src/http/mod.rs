//! Routes and their handlers.

use std::sync::Arc;

use axum::Router;

use crate::pool::ModelPool;
use crate::state::Shared;
#[cfg(test)]
pub use routes::ROUTES;
pub use routes::of_model;

mod answer_grammar;
mod anthropic;
mod body;
mod dispatch;
mod embeddings;
mod events;
mod front;
mod generate;
pub mod guard;
mod llama;
mod mathml;
mod models;
mod ollama;
mod openai;
mod openapi;
mod pictures;
mod responses;
mod route;
mod routes;
mod slots;
mod status;
mod tools;
mod work;

/// The routes of a server.
pub fn router(server: Shared, pool: Arc<ModelPool>) -> Router {
    match (pool.fixed(), &server.options.upstream) {
        (Some(router), None) => router,
        _ => routes::of_models(front::Front::new(server, pool)),
    }
}

#[cfg(test)]
mod seeing_tests;
#[cfg(test)]
mod tests;
