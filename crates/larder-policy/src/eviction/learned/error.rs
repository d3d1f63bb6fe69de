//! Errors of trained weights.

/// Why trained weights cannot be used.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EvictorError {
    /// A key is missing in the metadata.
    #[error("the metadata have no '{key}'")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A value in the metadata is no whole number.
    #[error("the metadata's '{key}' is '{found}', not a whole number")]
    NotInteger {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
    },
    /// The weights are in another format, version or form, or of a size that is not supported.
    #[error("the metadata's '{key}' is '{found}'; '{wanted}' is needed")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// The values that are supported.
        wanted: String,
    },
    /// The weights were trained on features that are defined differently.
    #[error(
        "they were trained on features {trained}, but this version of larder computes {computed}; train them again"
    )]
    Features {
        /// The hash of the features that the weights were trained on.
        trained: String,
        /// The hash of the features that are computed here.
        computed: String,
    },
    /// The sizes in the metadata are not those of any model.
    #[error("{layers} layers of {experts} experts, {top_k} for each token, is not the size of any model")]
    MoeSize {
        /// Layers that have experts.
        layers: usize,
        /// Experts per layer.
        experts: usize,
        /// Experts for each token.
        top_k: usize,
    },
    /// An array is missing.
    #[error("the array '{name}' is missing")]
    Missing {
        /// The array's name.
        name: String,
    },
    /// An array has another shape.
    #[error("the array '{name}' has shape {has:?}; {wanted:?} is needed")]
    Shape {
        /// The array's name.
        name: String,
        /// The shape that is needed.
        wanted: Vec<usize>,
        /// The shape that it has.
        has: Vec<usize>,
    },
    /// An array is in another number format.
    #[error("the array '{name}' does not hold {wanted}")]
    Kind {
        /// The array's name.
        name: String,
        /// The number format that is needed.
        wanted: &'static str,
    },
    /// An array holds infinities or NaN.
    #[error("the array '{name}' holds numbers that are not finite")]
    NotFinite {
        /// The array's name.
        name: String,
    },
}
