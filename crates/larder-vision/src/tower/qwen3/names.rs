//! The names of the tower's tensors in checkpoints and in `mmproj` files.

use super::config::Qwen3TowerConfig;
use crate::tower::weights::WeightReader;

/// Where the tower stands in a checkpoint.
const PREFIXES: [&str; 4] = ["model.visual.", "visual.", "thinker.visual.", "thinker.model.visual."];

/// Names of the parts of a tower; each has a `.weight`, most a `.bias`.
pub struct Qwen3Names {
    prefix: &'static str,
    parts: &'static Parts,
}

/// A merger: its norm, and both linear layers.
pub struct MergerNames {
    /// The norm.
    pub norm: String,
    /// The first layer.
    pub first: String,
    /// The second layer.
    pub second: String,
}

/// The names of one kind of file. `N` stands for a number.
struct Parts {
    patches: &'static str,
    positions: &'static str,
    block: &'static str,
    norms: [&'static str; 2],
    qkv: &'static str,
    projection: &'static str,
    mlp: [&'static str; 2],
    merger: [&'static str; 3],
    /// Whether mergers are counted from zero on, or by the block after which they stand.
    deepstack: (&'static str, [&'static str; 3], bool),
}

const CHECKPOINT: Parts = Parts {
    patches: "patch_embed.proj",
    positions: "pos_embed.weight",
    block: "blocks.N.",
    norms: ["norm1", "norm2"],
    qkv: "attn.qkv",
    projection: "attn.proj",
    mlp: ["mlp.linear_fc1", "mlp.linear_fc2"],
    merger: ["merger.norm", "merger.linear_fc1", "merger.linear_fc2"],
    deepstack: ("deepstack_merger_list.N.", ["norm", "linear_fc1", "linear_fc2"], false),
};

const OMNI: Parts = Parts {
    merger: ["merger.ln_q", "merger.mlp.0", "merger.mlp.2"],
    deepstack: ("merger_list.N.", ["ln_q", "mlp.0", "mlp.2"], false),
    ..CHECKPOINT
};

const MMPROJ: Parts = Parts {
    patches: "v.patch_embd",
    positions: "v.position_embd.weight",
    block: "v.blk.N.",
    norms: ["ln1", "ln2"],
    qkv: "attn_qkv",
    projection: "attn_out",
    mlp: ["ffn_up", "ffn_down"],
    merger: ["v.post_ln", "mm.0", "mm.2"],
    deepstack: ("v.deepstack.N.", ["norm", "fc1", "fc2"], true),
};

impl Qwen3Names {
    /// The names that a checkpoint has: there are several places, and two ways to name a merger.
    pub fn of_checkpoint(weights: &WeightReader) -> Self {
        let at = |prefix: &&&str| weights.has(&format!("{prefix}{}.weight", CHECKPOINT.patches));
        let prefix = PREFIXES.iter().find(at).unwrap_or(&PREFIXES[0]);
        let is_omni = weights.has(&format!("{prefix}{}.weight", OMNI.merger[0]));
        Qwen3Names { prefix, parts: if is_omni { &OMNI } else { &CHECKPOINT } }
    }

    /// The names of `mmproj` files.
    pub fn of_mmproj() -> Self {
        Qwen3Names { prefix: "", parts: &MMPROJ }
    }

    /// The patch embedding.
    pub fn patches(&self) -> String {
        format!("{}{}", self.prefix, self.parts.patches)
    }

    /// The table of positions.
    pub fn positions(&self) -> String {
        format!("{}{}", self.prefix, self.parts.positions)
    }

    fn in_block(&self, block: usize, part: &str) -> String {
        format!("{}{}{part}", self.prefix, self.parts.block.replace('N', &block.to_string()))
    }

    /// Both norms of a block.
    pub fn norms(&self, block: usize) -> [String; 2] {
        self.parts.norms.map(|part| self.in_block(block, part))
    }

    /// Queries, keys and values of a block.
    pub fn qkv(&self, block: usize) -> String {
        self.in_block(block, self.parts.qkv)
    }

    /// The projection after attention.
    pub fn projection(&self, block: usize) -> String {
        self.in_block(block, self.parts.projection)
    }

    /// Both layers of a block's MLP.
    pub fn mlp(&self, block: usize) -> [String; 2] {
        self.parts.mlp.map(|part| self.in_block(block, part))
    }

    /// The merger at the end.
    pub fn merger(&self) -> MergerNames {
        let [norm, first, second] = self.parts.merger.map(|part| format!("{}{part}", self.prefix));
        MergerNames { norm, first, second }
    }

    /// The merger number `index` of those after blocks.
    pub fn deepstack(&self, config: &Qwen3TowerConfig, index: usize) -> MergerNames {
        let (folder, parts, is_by_block) = self.parts.deepstack;
        let number = if is_by_block { config.deepstack[index] } else { index };
        let of = |part| format!("{}{}{part}", self.prefix, folder.replace('N', &number.to_string()));
        let [norm, first, second] = parts.map(of);
        MergerNames { norm, first, second }
    }
}
