//! Requests to a server of several models: each goes to the routes of the model that it names, which is loaded for it,
//! or to the upstream server if the model is not here.

use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;

use super::body;
use super::front::{Front, queried};
use super::route::{Access, Route};
use crate::error::{ApiError, Json, Result};
use crate::pool::ModelLease;
use crate::reply::{OllamaEndpoint, OllamaFormat};
use crate::request::{self, OLLAMA_CHAT, OLLAMA_GENERATE, OllamaLoadRequest, ROUTING};
use crate::upstream::{Upstream, UpstreamAway};

/// The header by which a response tells that a local model answered in place of the upstream server's.
const FALLBACK: HeaderName = HeaderName::from_static("x-larder-fallback");

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
