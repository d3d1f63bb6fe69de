//! The route that converts formulas to MathML, for the page.

use axum::extract::{Request, State};
use serde_json::{Value, json};

use super::body;
use super::work::run_permitted;
use crate::error::{Json, Result};
use crate::page::formula;
use crate::request::MathmlRequest;
use crate::state::Shared;

/// The MathML of each formula, or an error in its place.
pub async fn convert(State(server): State<Shared>, request: Request) -> Result<Json> {
    let body = body::read(&server, request).await?;
    run_permitted(&server.tokenizer_permits, move || {
        let MathmlRequest { formulas } = MathmlRequest::parse(&body)?;
        let converted = formula::convert(formulas).into_iter().map(|result| match result {
            Ok(mathml) => json!({"mathml": mathml}),
            Err(error) => json!({"error": error}),
        });
        Ok(Json(json!({"formulas": converted.collect::<Value>()})))
    })
    .await
}
