//! A server of several models: which model a name means, and what the server answers for all of them.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::{ollama, status};
use crate::error::{ApiError, Json, Result, excerpt};
use crate::pool::{ListedModel, ModelLease, ModelPool};
use crate::state::Shared;
use crate::upstream::Upstream;

/// The models, and the server for all others.
#[derive(Clone)]
pub struct Front {
    pub server: Shared,
    pub pool: Arc<ModelPool>,
    pub upstream: Option<Arc<Upstream>>,
}

pub async fn health(State(front): State<Front>) -> Response {
    status::health_of(front.pool.all_lengths(), front.pool.is_closed())
}

pub async fn metrics(State(front): State<Front>) -> Response {
    status::metrics_of(&front.server, &front.pool.all_metrics())
}

pub async fn models(State(front): State<Front>) -> Json {
    let mut all: Vec<Value> = front.pool.list().iter().map(listed_model).collect();
    if let Some(upstream) = &front.upstream {
        let others = upstream.models().await.into_iter();
        all.extend(others.filter(|model| model["id"].as_str().is_some_and(|id| front.pool.find(id).is_none())));
    }
    Json(json!({"object": "list", "data": all}))
}

pub async fn model(State(front): State<Front>, Path(id): Path<String>) -> Result<Json> {
    let model = front.pool.find(&id).ok_or_else(|| front.unknown(&id))?;
    let mut object = front.pool.list().get(model).map(listed_model).unwrap_or_default();
    object["id"] = id.into();
    Ok(Json(object))
}

pub async fn tags(State(front): State<Front>) -> Json {
    let list = front.pool.list();
    Json(json!({"models": list.iter().map(|model| ollama::tag(model.name, &model.facts)).collect::<Vec<_>>()}))
}

pub async fn running(State(front): State<Front>) -> Json {
    let list = front.pool.list();
    let loaded = list.iter().filter(|model| model.status == "loaded");
    let tags = loaded.map(|model| ollama::loaded_tag(model.name, &model.facts, model.bytes, model.context));
    Json(json!({"models": tags.collect::<Vec<_>>()}))
}

fn listed_model(model: &ListedModel) -> Value {
    json!({
        "id": model.name, "object": "model", "created": 0, "owned_by": "larder", "context_length": model.context,
        "aliases": model.aliases, "status": {"value": model.status},
    })
}

impl Front {
    /// All models of the pool, and the upstream server of the options.
    pub fn new(server: Shared, pool: Arc<ModelPool>) -> Self {
        let upstream = server.options.upstream.clone().map(|options| Arc::new(Upstream::new(options)));
        Front { server, pool, upstream }
    }

    /// The model that answers to any name: the only one, unless names count.
    pub fn only(&self) -> Option<usize> {
        let is_only = self.upstream.is_none() && self.pool.list().len() == 1;
        (is_only && !self.server.options.strict_model).then_some(0)
    }

    /// The model of a name, to which Ollama's clients may append the tag `latest`.
    pub fn find(&self, path: &str, name: &str) -> Option<usize> {
        let untagged = name.strip_suffix(":latest").filter(|_| path.starts_with("/api/"));
        self.pool.find(name).or_else(|| self.pool.find(untagged?))
    }

    /// The model of a request that only reads, if it is loaded: reading loads none.
    pub fn loaded_now(&self, parts: &Parts) -> Result<ModelLease> {
        let model = match queried(parts) {
            Some(name) => self.pool.find(&name).ok_or_else(|| self.unknown(&name))?,
            None => self.pool.recent().unwrap_or(0),
        };
        self.pool.peek(model).ok_or_else(|| {
            let message =
                format!("The model '{}' is not loaded; a request for an answer loads it.", self.pool.name(model));
            ApiError::new(StatusCode::NOT_FOUND, "model_not_loaded", message).with_param("model")
        })
    }

    /// The error of a name that no model has.
    pub fn unknown(&self, name: &str) -> ApiError {
        let names: Vec<String> = self.pool.list().iter().map(|model| format!("'{}'", model.name)).collect();
        let message = format!("The model '{}' does not exist; this server serves {}.", excerpt(name), names.join(", "));
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
    }
}

/// The value of `model` in a query.
pub fn queried(parts: &Parts) -> Option<String> {
    let value = parts.uri.query()?.split('&').find_map(|pair| pair.strip_prefix("model="))?;
    // A plus sign stands for a space in a query.
    Some(percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;

    use super::*;

    #[test]
    fn names_in_queries_are_decoded() {
        for (query, wanted) in
            [("model=a%2Fb+c", Some("a/b c")), ("x=1&model=%zz%4", Some("%zz%4")), ("models=a", None), ("", None)]
        {
            let request = Request::builder().uri(format!("/engine?{query}")).body(Body::empty()).unwrap();
            assert_eq!(queried(&request.into_parts().0).as_deref(), wanted, "{query}");
        }
    }
}
