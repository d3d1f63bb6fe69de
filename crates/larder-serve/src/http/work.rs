//! Work on blocking threads, a few at a time.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::{ApiError, Result};
use crate::state::App;

/// Runs `work` on a model, mostly tokenising, on a blocking thread, a few at a time.
pub async fn run_blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T> + Send + 'static,
) -> Result<T> {
    let own = app.clone();
    run_permitted(&app.server.tokenizer_permits, move || work(&own)).await
}

/// Runs `work` on a blocking thread, a few at a time.
pub async fn run_permitted<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let failed = || ApiError::engine_failed("The request could not be prepared: a worker thread failed.");
    let permit = permits.clone().acquire_owned().await.map_err(|_| failed())?;
    // The permit is held until the work is done, also if the client has disconnected.
    let work = move || {
        let _permit = permit;
        work()
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| failed())?
}
