//! The routes of the server's state: health, metrics, and the engine with its routing.

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::sync::oneshot;

use super::body;
use crate::error::{ApiError, Json, Result};
use crate::queue::EngineCommand;
use crate::request;
use crate::state::{App, SharedState};
use crate::telemetry::metrics::{self, ModelMetrics};

/// Whether the only model accepts requests.
pub async fn health(State(app): State<App>) -> Response {
    health_of(app.queue.lengths(), app.queue.is_closed())
}

/// Whether requests are accepted, and how many wait and are generated.
pub fn health_of((queued, active): (usize, usize), is_closed: bool) -> Response {
    let (code, status) =
        if is_closed { (StatusCode::SERVICE_UNAVAILABLE, "shutting down") } else { (StatusCode::OK, "ok") };
    (code, Json(json!({"status": status, "active": active, "queued": queued}))).into_response()
}

/// The counters of the only model.
pub async fn metrics(State(app): State<App>) -> Response {
    metrics_of(&app.server, &[ModelMetrics { name: None, metrics: &app.metrics, lengths: app.queue.lengths() }])
}

/// The counters of these models.
pub fn metrics_of(server: &SharedState, models: &[ModelMetrics]) -> Response {
    let text = metrics::text(&server.responses, models, (server.options.process_bytes)());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The state of the engine.
pub async fn engine(State(app): State<App>) -> Result<Json> {
    let (to, state) = oneshot::channel();
    app.queue.command(EngineCommand::ReadState(to))?;
    let mut state = state.await.map_err(|_| ApiError::shutting_down())?;
    state["routing_locked"] = app.server.options.lock_routing.into();
    Ok(Json(state))
}

/// Changes the routing, and answers the state.
pub async fn set_engine(State(app): State<App>, request: Request) -> Result<Json> {
    let body = body::read(&app.server, request).await?;
    let change = request::parse_routing(&body)?;
    if app.server.options.lock_routing {
        let message = "The routing is locked: this server was started with --lock-routing.";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "routing_locked", message));
    }
    let (to, routed) = oneshot::channel();
    app.queue.command(EngineCommand::SetRouting(change, to))?;
    let routed = routed.await.map_err(|_| ApiError::shutting_down())?;
    routed.map(Json).map_err(|error| ApiError::invalid_field("routing", "invalid_value", format!("{error}.")))
}
