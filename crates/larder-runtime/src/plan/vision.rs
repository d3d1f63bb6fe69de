//! The image tower's part of the memory plan.

use larder_core::format_bytes;
use serde_json::{Value, json};

/// Memory that seeing takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VisionMemory {
    /// Bytes of the tower's weights.
    pub tower_bytes: u64,
    /// Bytes that decoding a picture and encoding it take at most; that happens to one picture at a time.
    pub working_bytes: u64,
    /// Bytes of what the tower made of recent pictures.
    pub kept_bytes: u64,
    /// Whether the tower is loaded at the start, and not with the first image.
    pub preloaded: bool,
}

impl VisionMemory {
    /// Bytes of all of that.
    pub fn bytes(&self) -> u64 {
        self.tower_bytes.saturating_add(self.working_bytes).saturating_add(self.kept_bytes)
    }

    /// As a part of a sum, with the sign behind it.
    pub(super) fn text(vision: Option<&VisionMemory>) -> String {
        vision.map_or(String::new(), |vision| {
            let when = if vision.preloaded { "" } else { ", loaded with the first" };
            let [all, tower] = [vision.bytes(), vision.tower_bytes].map(format_bytes);
            format!("{all} images (tower {tower}{when}) + ")
        })
    }

    pub(super) fn json(vision: Option<&VisionMemory>) -> Value {
        vision.map_or(Value::Null, |vision| {
            json!({
                "bytes": vision.bytes(),
                "tower_bytes": vision.tower_bytes,
                "working_bytes": vision.working_bytes,
                "kept_bytes": vision.kept_bytes,
                "preloaded": vision.preloaded,
            })
        })
    }
}
