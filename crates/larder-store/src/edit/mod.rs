//! Changes of a finished store: its config, and its shards on a second drive.

pub(crate) mod add_drive;
pub(crate) mod config;
