//! The draft model's part of the memory plan.

use larder_core::format_bytes;
use serde_json::{Value, json};

/// What a draft model takes: resident weights, all experts, the KV cache of one sequence, and workspaces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DraftMemory {
    /// The model's name.
    pub name: String,
    /// Bytes of all of that.
    pub bytes: u64,
}

impl DraftMemory {
    /// As a part of a sum, with the sign behind it.
    pub(super) fn text(draft: Option<&DraftMemory>) -> String {
        draft.map_or(String::new(), |draft| format!("{} draft model ({}) + ", format_bytes(draft.bytes), draft.name))
    }

    pub(super) fn json(draft: Option<&DraftMemory>) -> Value {
        draft.map_or(Value::Null, |draft| json!({ "name": draft.name, "bytes": draft.bytes }))
    }
}
