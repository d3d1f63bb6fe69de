//! Workers and their clients in one process.

mod failures;
mod fixture;
mod replies;
mod tls_and_limits;
