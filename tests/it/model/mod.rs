//! Models: every architecture against transformers, GGUF files, sequences that go back.

mod forms;
mod gguf;
mod golden;
mod pieces;
mod ragged;
mod rewind;
