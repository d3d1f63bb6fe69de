/// Why weights cannot be used.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EvictorError {
    /// Something that has to be said is not.
    #[error("the metadata do not say '{key}'")]
    Unsaid {
        /// What.
        key: &'static str,
    },
    /// Something that is no number.
    #[error("'{key}' is '{said}' and no whole number")]
    NoCount {
        /// What.
        key: &'static str,
        /// As it is said.
        said: String,
    },
    /// Weights of something else, or of another version.
    #[error("'{key}' is '{said}' where '{wanted}' is needed")]
    Foreign {
        /// What.
        key: &'static str,
        /// As it is said.
        said: String,
        /// What would do.
        wanted: String,
    },
    /// Features that mean something else here.
    #[error("they were trained on features {theirs}, and this larder computes {ours}; train them again")]
    Features {
        /// Those of the weights.
        theirs: String,
        /// Those that are computed.
        ours: String,
    },
    /// No model has this size.
    #[error("{layers} layers of {experts} experts, {top_k} for each token, are the size of no model")]
    Size {
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
