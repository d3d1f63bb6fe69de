//! What a checkpoint holds: sizes, tensor names and shapes.

use crate::{ExpertId, LayerIdx, MoeRow, NumberFormat, PerMatrix, SequenceMemory, StepMemory, TensorMeta};

/// The config key that says, when true, that the model is used with its layer for multi-token prediction. Only larder
/// writes it.
pub const MTP_KEY: &str = "larder_mtp";

/// The config key with the names of the keys that a user has larder ignore although they might change the result. Only
/// larder writes it.
pub const IGNORED_KEY: &str = "larder_ignored";

/// The sizes of a model that decide how its experts are stored, cached and routed.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Geometry {
    /// Decoder layers, dense ones and a layer for multi-token prediction included.
    pub layers: usize,
    /// The layers that have experts, ascending.
    pub moe_layers: Vec<LayerIdx>,
    /// Experts per MoE layer.
    pub experts: usize,
    /// Experts that one token uses per MoE layer.
    pub top_k: usize,
    /// Width of what experts read and yield: that of the residual stream, or less in models that project it down.
    pub hidden: usize,
    /// Width of one expert.
    pub inter: usize,
    /// Whether experts have biases.
    pub bias: bool,
}

impl Geometry {
    /// With the narrowest experts that every number format can hold, for tests of what does not compute with them.
    pub fn narrow(layers: usize, moe_layers: impl IntoIterator<Item = u16>, experts: usize, top_k: usize) -> Self {
        let moe_layers = moe_layers.into_iter().map(LayerIdx).collect();
        Geometry { layers, moe_layers, experts, top_k, hidden: 8, inter: 8, bias: false }
    }

    /// Number of experts in all layers together.
    pub fn expert_count(&self) -> usize {
        self.moe_layers.len() * self.experts
    }

    /// For each decoder layer, its MoE row, if it has experts.
    pub fn moe_rows(&self) -> Vec<Option<MoeRow>> {
        let mut rows = vec![None; self.layers];
        for (row, layer) in self.moe_layers.iter().enumerate() {
            rows[layer.index()] = Some(MoeRow(row));
        }
        rows
    }
}

/// A tensor that a model needs besides its experts.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct TensorSpec {
    /// Its name in the checkpoint.
    pub name: String,
    /// The shape that the config requires.
    pub shape: Vec<usize>,
    /// Whether it is the weight of a product, which may be stored quantised. Other tensors keep their precision.
    pub product: bool,
    /// Whether the product is taken per head, with parts of the weight transposed. Quantised blocks cannot be
    /// transposed and become f16 when the tensor is loaded.
    pub by_head: bool,
    /// Whether only single rows of it are read, by row index, and never the whole: an embedding that is not the output
    /// head too.
    pub by_row: bool,
    /// Whether it goes to a device, if there is one: weights of products, and kernels that are multiplied with but keep
    /// their precision.
    pub on_device: bool,
    /// Matrices that it is divided into once loaded, each of which a device aligns.
    #[serde(skip)]
    pub pieces: usize,
}

impl TensorSpec {
    /// A tensor of this shape, the weight of a `product` or a small one that keeps its precision.
    pub fn new(name: impl Into<String>, shape: &[usize], product: bool) -> Self {
        let (name, shape) = (name.into(), shape.to_vec());
        TensorSpec { name, shape, product, by_head: false, by_row: false, on_device: product, pieces: 1 }
    }

    /// Bytes in memory once loaded, for a tensor that is stored as `stored`.
    pub fn loaded_bytes(&self, stored: &TensorMeta) -> usize {
        if self.by_head && !stored.kind.is_float() {
            self.shape.iter().product::<usize>() * NumberFormat::F16.block_bytes()
        } else {
            stored.bytes
        }
    }
}

/// Which rows of the source matrix belong to a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub enum RowPick {
    /// All rows.
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

/// Where a checkpoint stores one matrix or bias of one expert.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct TensorSlice {
    /// Tensor name; `{l}` stands for the layer and `{e}` for the expert.
    pub name: String,
    /// Whether the tensor has a leading dimension over all experts.
    pub stacked: bool,
    /// Whether it is stored as `[in, out]`; `pick` then selects columns of the stored tensor.
    pub transposed: bool,
    /// The rows that belong to this slice.
    pub pick: RowPick,
    /// What stands for `{l}` in each layer, where that is not the number of the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_names: Option<Vec<String>>,
}

impl TensorSlice {
    /// A whole tensor, stored as `[out, in]`.
    pub fn whole(name: impl Into<String>) -> Self {
        TensorSlice { name: name.into(), stacked: false, transposed: false, pick: RowPick::All, layer_names: None }
    }

    /// One expert's part of a tensor over all experts.
    pub fn stacked(name: impl Into<String>, transposed: bool, pick: RowPick) -> Self {
        TensorSlice { name: name.into(), stacked: true, transposed, pick, layer_names: None }
    }

    /// The tensor's name for one expert.
    pub fn tensor_name(&self, layer: LayerIdx, expert: ExpertId) -> String {
        let named = self.layer_names.as_ref().map(|names| names[layer.index()].clone());
        self.name.replace("{l}", &named.unwrap_or_else(|| layer.0.to_string())).replace("{e}", &expert.0.to_string())
    }
}

/// Where a checkpoint stores the parts of an expert.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct ExpertNames {
    /// Gate, up and down; experts of two matrices, `down(act(up(x)))`, have no gate.
    pub matrices: PerMatrix<TensorSlice>,
    /// Biases of the matrices.
    pub bias: Option<PerMatrix<TensorSlice>>,
}

impl ExpertNames {
    /// Three tensors per expert below `prefix`, named `gate`, `up` and `down`; the usual form.
    pub fn separate(prefix: &str, gate: &str, up: &str, down: &str) -> Self {
        let own = |part: &str| TensorSlice::whole(format!("{prefix}.{{e}}.{part}.weight"));
        ExpertNames { matrices: [gate, up, down].map(own).into(), bias: None }
    }
}

/// What a model's config says about its tensors; everything that conversion needs to know about an architecture.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Blueprint {
    /// The config's `model_type`.
    pub model_type: String,
    /// Sizes of layers and experts.
    pub geometry: Geometry,
    /// Where the experts are stored.
    pub experts: ExpertNames,
    /// Every other tensor the model needs.
    pub resident: Vec<TensorSpec>,
    /// Width of the residual stream, which what experts read may be projected down from.
    #[serde(skip)] // the shapes of the tensors say it
    pub hidden: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Memory per sequence.
    #[serde(skip)] // says nothing of what is stored
    pub sequence_memory: SequenceMemory,
    /// Of that, the keys and values of each layer that can have them on a device, in the order in which they get a
    /// place there.
    #[serde(skip)] // as above
    pub kv_layers: Vec<SequenceMemory>,
    /// Memory of the activations of a step.
    #[serde(skip)] // as above
    pub step_memory: StepMemory,
    /// The most query heads of a layer.
    #[serde(skip)] // as above
    pub attention_heads: usize,
    /// Bytes on a device of the experts of each token, in layers where the token decides on them.
    #[serde(skip)] // as above
    pub by_token_bytes: usize,
    /// Whether a device that has drawn a token can begin the step of it.
    #[serde(skip)] // as above
    pub runs_ahead: bool,
}
