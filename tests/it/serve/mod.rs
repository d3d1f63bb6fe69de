//! `larder serve`: the HTTP API and the chat page.

mod agents;
pub mod api;
mod apis;
mod context;
mod echo;
mod embeddings;
mod fields;
mod fill_in;
mod hot;
mod image_urls;
mod images;
#[cfg(unix)]
mod listening;
mod memory;
mod openapi;
mod operating;
mod page;
mod pool;
mod progress;
mod routing;
mod scheduling;
mod sessions;
mod several;
mod speculation;
mod structured;
mod tool_calls;
mod tools;
mod upstream;
mod warm;

use std::fs;

use tempfile::TempDir;

use crate::support::fixture;

/// A tiny model with a template of `tests/templates`.
pub fn model_with_template(template: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("golden/olmoe")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let template = fixture(&format!("templates/{template}.jinja"));
    fs::copy(template, folder.path().join("chat_template.jinja")).unwrap();
    folder
}
