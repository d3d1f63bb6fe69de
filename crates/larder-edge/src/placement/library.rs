//! The models whose experts are placed, with one numbering for all of their experts.

/// The sizes of a model that placement needs.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelProfile {
    /// Its name.
    pub name: String,
    /// Number of layers with experts.
    pub rows: usize,
    /// Experts per such layer.
    pub experts: usize,
    /// Experts that a token uses per such layer, at most.
    pub top_k: usize,
    /// Bytes of an expert.
    pub expert_bytes: u64,
    /// Bits of a hidden state on the network.
    pub state_bits: f64,
    /// FLOP of one expert for one token.
    pub expert_flops: f64,
}

/// Several models. Their experts have consecutive numbers: those of the first model layer by layer, then those of the
/// second, and so on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Library {
    models: Vec<ModelProfile>,
    /// The number of each model's first expert, and behind them the number of experts in all.
    first: Vec<usize>,
}

impl Library {
    /// A library of these models, in this order.
    pub fn new(models: Vec<ModelProfile>) -> Self {
        let mut end = 0;
        let mut first: Vec<usize> = models.iter().map(|m| (end, end += m.rows * m.experts).0).collect();
        first.push(end);
        Library { models, first }
    }

    /// The models, in the order of their experts' numbers.
    pub fn models(&self) -> &[ModelProfile] {
        &self.models
    }

    /// Number of experts of all models.
    pub fn experts(&self) -> usize {
        self.first.last().copied().unwrap_or(0)
    }

    /// The number of the first expert of a model's MoE row.
    pub fn first_expert(&self, model: usize, row: usize) -> usize {
        self.first[model] + row * self.models[model].experts
    }

    /// The model that an expert belongs to.
    pub fn model_of(&self, expert: usize) -> usize {
        self.first.partition_point(|first| *first <= expert) - 1
    }

    /// Bytes of an expert.
    pub fn bytes(&self, expert: usize) -> u64 {
        self.models[self.model_of(expert)].expert_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_all_models_have_consecutive_numbers() {
        let model = |rows, experts, expert_bytes| ModelProfile {
            name: String::new(),
            rows,
            experts,
            top_k: 1,
            expert_bytes,
            state_bits: 1.0,
            expert_flops: 1.0,
        };
        let library = Library::new(vec![model(2, 3, 10), model(1, 4, 20)]);
        assert_eq!((library.experts(), library.first_expert(0, 1), library.first_expert(1, 0)), (10, 3, 6));
        let models: Vec<_> = (0..10).map(|e| library.model_of(e)).collect();
        assert_eq!(models, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!((library.bytes(5), library.bytes(6)), (10, 20));
    }
}
