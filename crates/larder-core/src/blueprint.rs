use crate::{ExpertId, LayerIdx, NumberFormat, TensorMeta};

/// The sizes that decide how experts are stored, cached and routed.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Geometry {
    /// Decoder layers, dense ones included.
    pub layers: usize,
    /// The layers that have experts, ascending.
    pub moe_layers: Vec<LayerIdx>,
    /// Experts per such layer.
    pub experts: usize,
    /// Experts that one token uses per such layer.
    pub top_k: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of one expert.
    pub inter: usize,
    /// Whether experts have biases.
    pub bias: bool,
}

impl Geometry {
    /// How many experts the model has, over all layers.
    pub fn expert_count(&self) -> usize {
        self.moe_layers.len() * self.experts
    }
}

/// What a model remembers of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SequenceMemory {
    /// Numbers for every token.
    pub values_per_token: usize,
    /// Bytes however long it is.
    pub fixed_bytes: usize,
}

impl SequenceMemory {
    /// Bytes for a sequence of `tokens` tokens whose numbers take `number` bytes.
    pub fn bytes(&self, tokens: usize, value_bytes: usize) -> u64 {
        let values = (self.values_per_token as u64).saturating_mul(tokens as u64);
        values.saturating_mul(value_bytes as u64).saturating_add(self.fixed_bytes as u64)
    }
}

impl std::iter::Sum for SequenceMemory {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| SequenceMemory {
            values_per_token: a.values_per_token + b.values_per_token,
            fixed_bytes: a.fixed_bytes + b.fixed_bytes,
        })
    }
}

/// A tensor that a model needs besides its experts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Its name in the checkpoint.
    pub name: String,
    /// The shape that the config calls for.
    pub shape: Vec<usize>,
    /// A weight of a product, which may be stored quantised; everything else stays in full precision.
    pub product: bool,
    /// A product of each head by itself, with parts of the weight that are turned: quantised blocks cannot be, and become
    /// f16 when it is loaded.
    pub by_head: bool,
}

impl TensorSpec {
    /// Bytes that it takes once it is loaded, of a tensor that is stored like this.
    pub fn loaded_bytes(&self, stored: &TensorMeta) -> usize {
        match self.by_head && !stored.kind.is_float() {
            true => self.shape.iter().product::<usize>() * NumberFormat::F16.block_bytes(),
            false => stored.bytes,
        }
    }
}

/// Which rows of the source matrix belong to the piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowPick {
    /// All of them.
    All,
    /// The first half: gate of a fused gate+up.
    FirstHalf,
    /// The second half: up of a fused gate+up.
    SecondHalf,
    /// Rows 0, 2, 4, …
    Even,
    /// Rows 1, 3, 5, …
    Odd,
}

/// Where a checkpoint keeps one matrix or bias of one expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSlice {
    /// Tensor name; `{l}` stands for the layer and `{e}` for the expert.
    pub name: String,
    /// The tensor has a leading dimension over all experts.
    pub stacked: bool,
    /// Stored as `[in, out]`; the rows of `pick` are then its columns.
    pub transposed: bool,
    /// The rows that belong to this piece.
    pub pick: RowPick,
}

impl TensorSlice {
    /// A tensor of its own, stored as `[out, in]`.
    pub fn whole(name: impl Into<String>) -> Self {
        TensorSlice { name: name.into(), stacked: false, transposed: false, pick: RowPick::All }
    }

    /// A slab of a tensor over all experts.
    pub fn stacked(name: impl Into<String>, transposed: bool, pick: RowPick) -> Self {
        TensorSlice { name: name.into(), stacked: true, transposed, pick }
    }

    /// The tensor's name for one expert.
    pub fn tensor_name(&self, layer: LayerIdx, expert: ExpertId) -> String {
        self.name.replace("{l}", &layer.0.to_string()).replace("{e}", &expert.0.to_string())
    }
}

/// Where a checkpoint keeps the parts of an expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertNames {
    /// `[inter, hidden]`
    pub gate: TensorSlice,
    /// `[inter, hidden]`
    pub up: TensorSlice,
    /// `[hidden, inter]`
    pub down: TensorSlice,
    /// Biases of gate, up and down.
    pub bias: Option<[TensorSlice; 3]>,
}

impl ExpertNames {
    /// The usual form: three tensors per expert below `prefix`, named `gate`, `up` and `down`.
    pub fn separate(prefix: &str, gate: &str, up: &str, down: &str) -> Self {
        let own = |part: &str| TensorSlice::whole(format!("{prefix}.{{e}}.{part}.weight"));
        ExpertNames { gate: own(gate), up: own(up), down: own(down), bias: None }
    }
}

/// What a model's config says about its tensors: all that conversion needs to know of an architecture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blueprint {
    /// The config's `model_type`.
    pub model_type: String,
    /// The sizes.
    pub geometry: Geometry,
    /// Where the experts are.
    pub experts: ExpertNames,
    /// Every other tensor the model needs.
    pub resident: Vec<TensorSpec>,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// What it takes to remember one.
    pub sequence_memory: SequenceMemory,
}
