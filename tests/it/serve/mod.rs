//! `larder serve`: the HTTP API and the chat page.

mod api;
mod apis;
mod echo;
mod hot;
mod operating;
mod page;
mod sessions;
mod several;
mod structured;
mod tool_calls;
mod tools;
