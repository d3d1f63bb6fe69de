//! Models: every architecture against transformers, GGUF files, sequences that go back.

mod gguf;
mod golden;
mod ragged;
mod rewind;
