//! The handshake: the protocol version, model and arithmetic that a client and a worker must have in common.

use larder_core::{DEFINITION, Geometry, LayerIdx};

use crate::workers::wire;

/// Version of the messages in `proto/experts.proto`.
pub const PROTOCOL_VERSION: u32 = 1;
/// Most tokens of one request.
pub const MAX_REQUEST_TOKENS: usize = 256;
/// Bytes of a message besides states, rows and the lists counted below; an upper bound.
const MESSAGE_OVERHEAD: usize = 4 << 10;

/// The model that both sides have.
#[derive(Clone, PartialEq, Debug)]
pub struct Handshake {
    /// Fingerprint of the model's experts.
    pub model: String,
    /// The model's sizes.
    pub geometry: Geometry,
    /// Whether quantised weights are multiplied with unrounded activations (the setting `exact`).
    pub exact: bool,
}

impl Handshake {
    /// Bytes of the longest valid request.
    pub fn request_bytes(&self) -> usize {
        // An expert takes at most 3 bytes for its index, 4 for its weight, and 5 for a term of its own.
        MAX_REQUEST_TOKENS * (self.geometry.hidden * size_of::<f32>() + self.geometry.top_k * 12) + MESSAGE_OVERHEAD
    }

    /// Bytes of the longest valid reply.
    pub fn reply_bytes(&self) -> usize {
        MAX_REQUEST_TOKENS * self.geometry.top_k * self.geometry.hidden * size_of::<f32>() + MESSAGE_OVERHEAD
    }

    /// Whether a decoder layer has experts.
    pub fn has_experts(&self, layer: LayerIdx) -> bool {
        self.geometry.moe_layers.contains(&layer)
    }

    /// The reason why a worker with this description cannot be used, if there is one; continues a sentence that begins
    /// with the worker's name.
    pub fn incompatibility(&self, description: &wire::Description) -> Option<String> {
        let wire::Description { version, ref model, exact, definition, .. } = *description;
        if version != PROTOCOL_VERSION {
            return Some(format!("uses protocol version {version}, but this larder uses version {PROTOCOL_VERSION}"));
        }
        if *model != self.model {
            return Some(format!(
                "serves another model or the same model in another format: its experts have fingerprint {}, but this store's have {}",
                printable(model),
                printable(&self.model)
            ));
        }
        if definition != DEFINITION {
            return Some(format!(
                "computes by definition {} of products, but this larder by definition {DEFINITION}",
                definition.max(1)
            ));
        }
        let with = |exact| if exact { "with" } else { "without" };
        (exact != self.exact)
            .then(|| format!("runs {} exact products, but this machine runs {} it", with(exact), with(self.exact)))
    }
}

/// The first printable characters of an untrusted name, for error messages.
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
    fn other_versions_models_and_arithmetic_are_reported() {
        let handshake = handshake();
        let good = wire::Description {
            version: PROTOCOL_VERSION,
            model: "abc".into(),
            definition: DEFINITION,
            ..Default::default()
        };
        assert_eq!(handshake.incompatibility(&good), None);
        let newer = wire::Description { version: 2, ..good.clone() };
        assert!(handshake.incompatibility(&newer).unwrap().contains("version 2"));
        let older = wire::Description { definition: 0, ..good.clone() };
        assert!(handshake.incompatibility(&older).unwrap().contains("by definition 1 of products"));
        let other = wire::Description { model: "x\u{1b}yz".into(), ..good.clone() };
        assert!(handshake.incompatibility(&other).unwrap().contains("fingerprint xyz, but this store's have abc"));
        assert!(
            handshake.incompatibility(&wire::Description { exact: true, ..good }).unwrap().contains("exact products")
        );
    }
}
