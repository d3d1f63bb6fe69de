//! `larder serve`: the HTTP API and the chat page.

mod api;
mod hot;
mod page;
mod structured;
mod tools;
