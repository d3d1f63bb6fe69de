//! Changes of a finished store: its config, its shards on a second drive, and its image tower.

pub(crate) mod add_drive;
pub(crate) mod add_vision;
pub(crate) mod config;
