//! The command, one file per subcommand.

mod bench;
pub mod chat;
mod chat_session;
mod cli;
mod config;
mod demo;
mod doctor;
mod draft;
mod eval;
mod format;
mod hot;
mod kernels;
mod lab;
#[cfg(unix)]
mod launch;
mod memory;
mod models;
mod mtp;
mod profile;
mod prove;
mod report;
pub mod tune;
