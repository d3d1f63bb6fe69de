//! Requests to a server of several models: each goes to the routes of the model that it names, which is loaded for it,
//! or to the upstream server if the model is not here.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::routes::{Access, Route, of_models};
use super::{Result, body, health_of, metrics_of, ollama};
use crate::error::{ApiError, Json, excerpt};
use crate::pool::{ListedModel, ModelLease, ModelPool};
use crate::reply::{OllamaEndpoint, OllamaFormat};
use crate::request::{self, OLLAMA_CHAT, OLLAMA_GENERATE, OllamaLoadRequest, ROUTING};
use crate::server::Shared;
use crate::upstream::{Upstream, UpstreamAway};

/// The header by which a response tells that a local model answered in place of the upstream server's.
const FALLBACK: HeaderName = HeaderName::from_static("x-larder-fallback");

/// The models, and the server for all others.
#[derive(Clone)]
pub struct Front {
    pub server: Shared,
    pool: Arc<ModelPool>,
    upstream: Option<Arc<Upstream>>,
}

/// All routes.
pub fn routes(server: Shared, pool: Arc<ModelPool>) -> Router {
    let upstream = server.options.upstream.clone().map(|options| Arc::new(Upstream::new(options)));
    of_models(Front { server, pool, upstream })
}

pub async fn health(State(front): State<Front>) -> Response {
    health_of(front.pool.all_lengths(), front.pool.is_closed())
}

pub async fn metrics(State(front): State<Front>) -> Response {
    metrics_of(&front.server, &front.pool.all_metrics())
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

/// Sends a request to the model that it names.
pub async fn dispatch(route: &'static Route, State(front): State<Front>, request: Request) -> Result<Response> {
    let (mut parts, body) = request.into_parts();
    // Routers match the path again, and would add to what this one has found.
    parts.extensions = Extensions::new();
    if parts.method != Method::POST {
        let lease = front.loaded_now(&parts)?;
        return call(lease, Request::from_parts(parts, body)).await;
    }
    let body = body::read(&front.server, Request::from_parts(parts.clone(), body)).await?;
    if let Some(answer) = front.ollama_unload(route, &parts, &body) {
        return Ok(answer);
    }
    match front.named(route, &parts, &body) {
        Named::Here(model) => front.answer(route, model, parts, body).await,
        Named::Other(name) => front.forward(route, &name, parts, body).await,
    }
}

/// Sends a request to a loaded model, which stays loaded until the end of the response.
async fn call(lease: ModelLease, request: Request) -> Result<Response> {
    let failed = |_| ApiError::engine_failed("The request could not be passed on.");
    let response = TowerToHyperService::new(lease.router.clone()).call(request).await.map_err(failed)?;
    Ok(response.map(|body| lease.over(body)))
}

/// The model that a request names.
enum Named {
    Here(usize),
    Other(String),
}

impl Front {
    /// The model of a request: by the field `model` (or `name`, where its table has that) or the query. Without,
    /// settings are those of the model that was used last, and all else is of the first.
    fn named(&self, route: &Route, parts: &Parts, body: &[u8]) -> Named {
        let in_body = || {
            let json: Value = serde_json::from_slice(body).ok()?;
            let name = route.body.and_then(|table| table.find("name")).and_then(|_| json["name"].as_str());
            json["model"].as_str().or(name).map(str::to_owned)
        };
        let recent = || self.pool.recent().filter(|_| route.access == Access::Admin).unwrap_or(0);
        match in_body().or_else(|| queried(parts)).filter(|name| !name.is_empty()) {
            None => Named::Here(recent()),
            Some(name) => self.find(parts.uri.path(), &name).or(self.only()).map_or(Named::Other(name), Named::Here),
        }
    }

    /// The model that answers to any name: the only one, unless names count.
    fn only(&self) -> Option<usize> {
        let is_only = self.upstream.is_none() && self.pool.list().len() == 1;
        (is_only && !self.server.options.strict_model).then_some(0)
    }

    /// The model of a name, to which Ollama's clients may append the tag `latest`.
    fn find(&self, path: &str, name: &str) -> Option<usize> {
        let untagged = name.strip_suffix(":latest").filter(|_| path.starts_with("/api/"));
        self.pool.find(name).or_else(|| self.pool.find(untagged?))
    }

    /// The model of a request that only reads, if it is loaded: reading loads none.
    fn loaded_now(&self, parts: &Parts) -> Result<ModelLease> {
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

    /// Loads the model if need be and sends it the request.
    async fn answer(&self, route: &Route, model: usize, parts: Parts, body: Bytes) -> Result<Response> {
        let lease = self.pool.acquire(model).await?;
        let routing = route.has_body(&ROUTING).then(|| request::parse_routing(&body).ok()).flatten();
        let response = call(lease, Request::from_parts(parts, Body::from(body))).await?;
        if let (StatusCode::OK, Some(change)) = (response.status(), routing) {
            self.pool.remember_routing(model, change);
        }
        Ok(response)
    }

    /// Sends a request to the upstream server; while that is away, the first model here answers it.
    async fn forward(&self, route: &Route, name: &str, parts: Parts, body: Bytes) -> Result<Response> {
        let upstream = self.upstream.as_ref().filter(|_| route.is_forwarded);
        let upstream = upstream.filter(|_| !Upstream::is_circular(&parts.headers)).ok_or_else(|| self.unknown(name))?;
        let deadline = Instant::now() + self.server.options.timeout;
        match upstream.send(&parts, body.clone(), deadline).await {
            Ok(response) => Ok(response),
            Err(why) => self.fall_back(route, &why, parts, &body).await,
        }
    }

    async fn fall_back(&self, route: &Route, why: &UpstreamAway, mut parts: Parts, body: &[u8]) -> Result<Response> {
        let local = self.pool.name(0);
        tracing::info!(%why, local, "the upstream server is away");
        let mut json = request::json(body)?;
        json["model"] = local.into();
        let body = Bytes::from(json.to_string());
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        let mut response = self.answer(route, 0, parts, body).await?;
        if let Ok(local) = HeaderValue::try_from(local) {
            response.headers_mut().insert(FALLBACK, local);
        }
        Ok(response)
    }

    fn unknown(&self, name: &str) -> ApiError {
        let names: Vec<String> = self.pool.list().iter().map(|model| format!("'{}'", model.name)).collect();
        let message = format!("The model '{}' does not exist; this server serves {}.", excerpt(name), names.join(", "));
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
    }

    /// The answer to a request that only unloads a model, in Ollama's API.
    fn ollama_unload(&self, route: &Route, parts: &Parts, body: &[u8]) -> Option<Response> {
        let endpoints = [(&OLLAMA_CHAT, OllamaEndpoint::Chat), (&OLLAMA_GENERATE, OllamaEndpoint::Generate)];
        let (table, endpoint) = endpoints.into_iter().find(|(table, _)| route.has_body(table))?;
        let OllamaLoadRequest { model, unloads } = OllamaLoadRequest::parse(body, table).ok()??;
        let model = self.find(parts.uri.path(), &model?).filter(|_| unloads)?;
        self.pool.unload(model);
        let format = OllamaFormat::new(endpoint, self.pool.name(model));
        Some(Json(format.loaded(true)).into_response())
    }
}

/// The value of `model` in a query.
fn queried(parts: &Parts) -> Option<String> {
    let value = parts.uri.query()?.split('&').find_map(|pair| pair.strip_prefix("model="))?;
    // A plus sign stands for a space in a query.
    Some(percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
}

#[cfg(test)]
mod tests {
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
