//! Request bodies: limited in size, in time, and in memory over all connections.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::error::ApiError;
use crate::state::Shared;

/// Bytes of an oversized body that are read and discarded, so that the client receives the error response.
const DRAINED_BYTES: usize = 256 << 20;

/// Reads the whole body.
pub async fn read(server: &Shared, request: Request) -> Result<Bytes, ApiError> {
    let limit = server.options.body_bytes;
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|bytes| bytes > limit) {
        // The response does not wait for the body. That is discarded meanwhile, so that the client gets to read the
        // response.
        if !request.headers().contains_key(header::EXPECT) {
            tokio::spawn(timeout(server.options.client_timeout, collect(request.into_body(), 0)));
        }
        return Err(too_large(limit));
    }
    let slow = |_| {
        let message = format!("The request body did not arrive within {} s.", server.options.client_timeout.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message)
    };
    let permits = server.options.body_permits(length.unwrap_or(limit));
    let reading = async {
        let _permit = server.body_permits.acquire_many(permits).await.map_err(|_| ApiError::shutting_down())?;
        collect(request.into_body(), limit).await
    };
    timeout(server.options.client_timeout, reading).await.map_err(slow)?
}

async fn collect(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let (mut all, mut seen) = (BytesMut::new(), 0);
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| ApiError::bad_request(format!("The request body is incomplete: {error}.")))?;
        let Ok(data) = frame.into_data() else { continue };
        seen += data.len();
        match seen {
            n if n <= limit => all.extend_from_slice(&data),
            n if n > DRAINED_BYTES => break,
            _ => all.clear(),
        }
    }
    if seen > limit { Err(too_large(limit)) } else { Ok(all.freeze()) }
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("The request body is larger than the limit of {limit} bytes.");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}
