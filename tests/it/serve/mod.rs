//! `larder serve`: the HTTP API and the chat page.

mod api;
mod hot;
mod page;
mod sessions;
mod several;
mod structured;
mod tool_calls;
mod tools;
