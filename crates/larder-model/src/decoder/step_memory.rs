//! Memory of the activations of a step, from which the memory plan decides how many tokens a prefill chunk has.

use larder_core::StepMemory;
use larder_kernels::InputBuffer;

use crate::experts::ExpertWorkspace;
use crate::nn::{Mixer, Rope, TokenScratch};
use crate::stack::{Branch, Encoder, Ffn, Layer, Stack};

/// Bytes per token of what all layers share: position and range of positions seen per token, its origin.
const POSITION_BYTES: usize = 64;

/// The memory of the activations of a step of this model. What layers allocate is freed at their end; the inputs of
/// matmuls and the expert workspace are kept.
pub(crate) fn step_memory(stack: &Stack) -> StepMemory {
    let hidden = stack.hidden;
    let parts = stack.all_layers().flat_map(|layer| layer_scratch(layer, hidden));
    let (mtp, handed_out) = match &stack.mtp {
        // Both inputs, normalised, and side by side; the hidden states that the model hands out and those that the
        // layer does.
        Some(_) => (TokenScratch { floats: 6 * hidden, input: 2 * hidden }, 2 * hidden),
        None => Default::default(),
    };
    let most = parts.chain([mtp]).fold(TokenScratch::default(), TokenScratch::max);
    let scales_input = stack.ffns().any(|ffn| match ffn {
        Ffn::Moe(moe) => moe.gate.scales_input,
        Ffn::Dense(_) => false,
    });
    let experts = ExpertWorkspace::memory(&stack.geometry, scales_input);
    let rotations: usize = stack.ropes.iter().map(Rope::bytes_per_position).sum();
    let states = stack.ffns().filter_map(|ffn| match ffn {
        Ffn::Moe(moe) => Some(moe.router.state_width()),
        Ffn::Dense(_) => None,
    });
    // The residual streams exist beside every part, and so does the state of a router.
    let beside = stack.residual_width() + handed_out + states.max().unwrap_or(0);
    let layer = (beside + most.floats) * size_of::<f32>();
    let shared = InputBuffer::bytes(most.input) + rotations + POSITION_BYTES;
    let encoder = stack.encoder.as_ref().map_or(0, |encoder| encoder_bytes_per_token(encoder, hidden));
    // An encoder reads a whole prompt at once.
    let encoded = stack.context * (encoder + experts.bytes_per_token * usize::from(encoder > 0));
    // Choices are handed on from layer to layer.
    let choices = || stack.all_layers().filter_map(|layer| layer.mixer.as_ref()?.part.choice());
    let choice_bytes = choices().map(|choice| choice.bytes_per_token(stack.context)).max().unwrap_or(0);
    let chosen = choices().map(|choice| choice.fixed_bytes(stack.context)).max().unwrap_or(0);
    StepMemory {
        bytes_per_token: layer + shared + experts.bytes_per_token + choice_bytes,
        fixed_bytes: experts.fixed_bytes + encoded + chosen,
    }
}

/// The activations of an encoder per token of a prompt, without those of experts.
fn encoder_bytes_per_token(encoder: &Encoder, hidden: usize) -> usize {
    let parts =
        encoder.layers.iter().flat_map(|layer| [layer.attention.scratch(hidden), ffn_scratch(&layer.ffn, hidden)]);
    let most = parts.fold(TokenScratch::default(), TokenScratch::max);
    (hidden + most.floats) * size_of::<f32>() + InputBuffer::bytes(most.input) + POSITION_BYTES
}

/// The activations of the two parts of a layer, with those of their connections.
fn layer_scratch(layer: &Layer, hidden: usize) -> impl Iterator<Item = TokenScratch> {
    let mixer = layer.mixer.as_ref().map(|mixer| connected(mixer, mixer.part.scratch(hidden), hidden));
    let ffn = layer.ffn.as_ref().map(|ffn| connected(ffn, ffn_scratch(&ffn.part, hidden), hidden));
    let scaled = if layer.scale == 1.0 { 0 } else { hidden };
    mixer.into_iter().chain(ffn).map(move |part| TokenScratch { floats: part.floats + scaled, ..part })
}

/// The activations of a part beside those of its connection and of the norm after it.
fn connected<Part>(branch: &Branch<Part>, part: TokenScratch, hidden: usize) -> TokenScratch {
    let own = branch.connection.as_ref().map_or_else(Default::default, |connection| connection.scratch(hidden));
    let after = branch.after.as_ref().map_or(0, |_| hidden);
    TokenScratch { floats: part.floats + own.floats + after, input: part.input.max(own.input) }
}

fn ffn_scratch(ffn: &Ffn, hidden: usize) -> TokenScratch {
    match ffn {
        Ffn::Dense(mlp) => mlp.scratch(hidden),
        Ffn::Moe(moe) => moe.scratch(hidden),
    }
}

#[cfg(test)]
mod tests {
    use larder_core::STAGED_ROWS;
    use serde_json::{Value, json};

    use super::super::blueprint;
    use super::*;
    use crate::experts::PART_ROWS;

    /// The memory of a step of a small OLMoE with one value of its config changed.
    fn with(key: &str, value: usize) -> StepMemory {
        let text = include_str!("../../../../tests/golden/olmoe/config.json");
        let mut config: Value = serde_json::from_str(text).unwrap();
        config[key] = json!(value);
        blueprint(&config).unwrap().step_memory
    }

    #[test]
    fn a_token_takes_an_output_for_each_of_its_experts_and_no_inner_activations() {
        let (two, three) = (with("num_experts_per_tok", 2), with("num_experts_per_tok", 3));
        let per_expert = three.bytes_per_token - two.bytes_per_token;
        assert!((4 * 32..4 * 32 + 32).contains(&per_expert), "{per_expert} bytes for an output of 32 numbers");
        let (narrow, wide) = (with("intermediate_size", 32), with("intermediate_size", 3200));
        assert_eq!(narrow.bytes_per_token, wide.bytes_per_token);
        // Gate and up in floats, and what becomes of them quantised in 64 bytes for 32 values. Gate and up of few rows
        // are kept until the rest of their experts has been read.
        let part = PART_ROWS * (99 * 32 * 2 * 4 + 99 * 64);
        assert_eq!(wide.fixed_bytes - narrow.fixed_bytes, part + STAGED_ROWS * 99 * 32 * 2 * 4);
    }
}
