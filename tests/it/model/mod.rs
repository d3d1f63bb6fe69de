//! Models: every architecture against transformers, GGUF files, sequences that go back, or are saved.

mod chunks;
mod encoder_decoder;
mod forms;
mod gguf;
mod golden;
mod images;
mod keys;
mod mtp;
mod published;
mod ragged;
mod rewind;
mod run_ahead;
mod saved;
mod speculation;
mod text_pass;
mod threads;
