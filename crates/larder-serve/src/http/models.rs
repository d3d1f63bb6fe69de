//! The routes that list the served model, and the check of the name that a request gives.

use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde_json::json;

use crate::error::{ApiError, Json, Result, excerpt};
use crate::state::App;

/// The served model, as a list.
pub async fn models(State(app): State<App>) -> Json {
    Json(json!({"object": "list", "data": [model_object(&app, &app.model.name)]}))
}

/// The served model, by one of its names.
pub async fn model(State(app): State<App>, Path(id): Path<String>) -> Result<Json> {
    if app.model.has_name(&id) { Ok(Json(model_object(&app, &id))) } else { Err(unknown_model(&app, &id)) }
}

fn model_object(app: &App, id: &str) -> serde_json::Value {
    json!({
        "id": id, "object": "model", "created": 0, "owned_by": "larder",
        "context_length": app.model.context.tokens, "aliases": app.model.aliases,
    })
}

/// Refuses a request for another model, if names count.
pub fn check_model(app: &App, name: Option<&str>) -> Result<()> {
    let is_other = |name: &&str| !name.is_empty() && !app.model.has_name(name);
    let other = name.filter(|name| app.server.options.strict_model && is_other(name));
    other.map_or(Ok(()), |name| Err(unknown_model(app, name)))
}

fn unknown_model(app: &App, name: &str) -> ApiError {
    let message = format!("The model '{}' does not exist; this server serves '{}'.", excerpt(name), app.model.name);
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
}
