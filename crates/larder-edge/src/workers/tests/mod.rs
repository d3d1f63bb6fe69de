//! Workers and their clients in one process.

mod discovery;
mod drain;
mod failures;
mod fixture;
mod replies;
mod tls_and_limits;
