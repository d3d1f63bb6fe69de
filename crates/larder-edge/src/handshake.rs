//! What a worker and whoever asks it must agree on.

use larder_core::{Geometry, LayerIdx};

use crate::wire;

/// The version of everything that is said between the two.
pub const PROTOCOL_VERSION: u32 = 1;
/// The most tokens of one request.
pub const MAX_REQUEST_TOKENS: usize = 256;
/// Bytes of a message beside states and rows: more than its lists take, which are bounded as well.
const MESSAGE_OVERHEAD: usize = 4 << 10;

/// The model that both have.
#[derive(Clone, PartialEq, Debug)]
pub struct Handshake {
    /// Fingerprint of its experts.
    pub model: String,
    /// Its sizes.
    pub geometry: Geometry,
    /// Whether activations meet quantised weights as they are.
    pub exact: bool,
}

impl Handshake {
    /// The longest request that can be right.
    pub fn request_bytes(&self) -> usize {
        // An expert takes at most 3 bytes of its number, 4 of its weight, and 5 of a term of its own.
        MAX_REQUEST_TOKENS * (self.geometry.hidden * size_of::<f32>() + self.geometry.top_k * 12) + MESSAGE_OVERHEAD
    }

    /// The longest answer that can be right.
    pub fn reply_bytes(&self) -> usize {
        MAX_REQUEST_TOKENS * self.geometry.top_k * self.geometry.hidden * size_of::<f32>() + MESSAGE_OVERHEAD
    }

    /// Whether a decoder layer has experts.
    pub fn has_experts(&self, layer: LayerIdx) -> bool {
        self.geometry.moe_layers.contains(&layer)
    }

    /// Why a worker that says this of itself cannot be asked, if it cannot.
    pub fn incompatibility(&self, description: &wire::Description) -> Option<String> {
        let wire::Description { version, ref model, exact, .. } = *description;
        if version != PROTOCOL_VERSION {
            return Some(format!(
                "speaks version {version} of the protocol, and this larder version {PROTOCOL_VERSION}"
            ));
        }
        if *model != self.model {
            return Some(format!(
                "serves another model, or the same one stored otherwise: its experts have the fingerprint {}, these {}",
                printable(model),
                printable(&self.model)
            ));
        }
        let how = |exact| if exact { "with" } else { "without" };
        (exact != self.exact)
            .then(|| format!("computes {} --exact, and this machine {} it", how(exact), how(self.exact)))
    }
}

/// As much of a name as fits a sentence, whoever wrote it.
pub fn printable(name: &str) -> String {
    name.chars().filter(|c| c.is_ascii_graphic()).take(12).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Two layers, the first of them dense.
    pub fn handshake() -> Handshake {
        let geometry = Geometry {
            layers: 2,
            moe_layers: vec![LayerIdx(1)],
            experts: 8,
            top_k: 3,
            hidden: 4,
            inter: 32,
            bias: false,
        };
        Handshake { model: "abc".into(), geometry, exact: false }
    }

    #[test]
    fn another_version_model_or_way_to_compute_is_told() {
        let handshake = handshake();
        let good = wire::Description { version: PROTOCOL_VERSION, model: "abc".into(), ..Default::default() };
        assert_eq!(handshake.incompatibility(&good), None);
        let newer = wire::Description { version: 2, ..good.clone() };
        assert!(handshake.incompatibility(&newer).unwrap().contains("version 2"));
        let other = wire::Description { model: "x\u{1b}yz".into(), ..good.clone() };
        assert!(handshake.incompatibility(&other).unwrap().contains("fingerprint xyz, these abc"));
        assert!(handshake.incompatibility(&wire::Description { exact: true, ..good }).unwrap().contains("--exact"));
    }
}
