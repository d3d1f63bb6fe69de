//! Tests that need more than one crate: one binary, one folder per subject, one file per topic.

mod cache;
mod commands;
mod counters;
mod edge;
mod laptop;
mod model;
mod serve;
mod store;
mod support;
mod tidy;
mod vision;
