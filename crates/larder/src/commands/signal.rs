//! The signals that end a server.

use std::io;

/// Waits for the next interrupt or termination signal.
#[cfg(unix)]
pub async fn signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// Waits for the next interrupt.
#[cfg(not(unix))]
pub async fn signal() -> io::Result<()> {
    tokio::signal::ctrl_c().await
}
