/// Why weights cannot be used.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EvictorError {
    /// Something that has to be said is not.
    #[error("the metadata do not say '{key}'")]
    MissingKey {
        /// What.
        key: &'static str,
    },
    /// Something that is no number.
    #[error("'{key}' is '{found}' and no whole number")]
    NotInteger {
        /// What.
        key: &'static str,
        /// As it is said.
        found: String,
    },
    /// Weights of something else, or of another version.
    #[error("'{key}' is '{found}' where '{wanted}' is needed")]
    Unsupported {
        /// What.
        key: &'static str,
        /// As it is said.
        found: String,
        /// What would do.
        wanted: String,
    },
    /// Features that mean something else here.
    #[error("they were trained on features {trained}, and this larder computes {computed}; train them again")]
    Features {
        /// Those of the weights.
        trained: String,
        /// Those that are computed.
        computed: String,
    },
    /// No model has this size.
    #[error("{layers} layers of {experts} experts, {top_k} for each token, are the size of no model")]
    MoeSize {
        /// Layers that have experts.
        layers: usize,
        /// Experts of each.
        experts: usize,
        /// Experts for each token.
        top_k: usize,
    },
    /// An array that is not there.
    #[error("there is no array '{name}'")]
    Missing {
        /// Which.
        name: String,
    },
    /// An array in another shape.
    #[error("the array '{name}' has the shape {has:?} where {wanted:?} is needed")]
    Shape {
        /// Which.
        name: String,
        /// What would do.
        wanted: Vec<usize>,
        /// What it is.
        has: Vec<usize>,
    },
    /// An array of another kind of numbers.
    #[error("the array '{name}' does not hold {wanted}")]
    Kind {
        /// Which.
        name: String,
        /// What would do.
        wanted: &'static str,
    },
    /// An array with infinities or worse.
    #[error("the array '{name}' holds numbers that are not finite")]
    NotFinite {
        /// Which.
        name: String,
    },
}
