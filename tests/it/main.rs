//! Tests that need more than one crate: one binary, one file per subject.

mod chat;
mod cli;
mod config;
mod demo;
mod doctor;
mod edge_hostile;
mod edge_plan;
mod edge_run;
mod eval;
mod faults;
mod gguf;
mod golden;
mod hostile;
mod lab;
mod models;
mod page;
mod reference;
mod report;
mod rewind;
mod rig;
mod routing;
mod serve;
mod store;
mod streaming;
mod support;
