//! How many tokens of a prompt are computed in one step. A layer reads each expert that any of them wants once, so with
//! larger chunks a prompt reads less; but their activations take memory that slots could have.

use super::{PlanInputs, requested_slots};
use crate::options::Options;

/// Fewer tokens would read more than their activations save, however short memory is.
pub(crate) const LEAST_TOKENS: usize = 128;
/// At least as many where memory allows: in small models they take more than the share of small slots.
const USUAL_TOKENS: usize = 256;
/// More tokens want hardly fewer reads: nearly every expert is wanted by some.
const MOST_TOKENS: usize = 4096;
/// Activations take at most this fraction of the memory of the slots.
const SHARE_DIVISOR: u64 = 8;
/// The number of tokens is a multiple of this, if it is not the context.
const MULTIPLE: usize = 64;

/// The tokens of a chunk: as many as the options say, else as many as an eighth of the memory of the slots has room
/// for, or the usual number if that is more, within the constants above and the contexts of all sequences. `inputs` has
/// the least number of tokens.
pub(crate) fn prefill_tokens(inputs: &PlanInputs, options: &Options) -> usize {
    let longest = inputs.context.saturating_mul(inputs.sequences).max(1);
    if let Some(tokens) = options.prefill_tokens {
        return tokens.clamp(1, longest);
    }
    let memory = &inputs.blueprint.step_memory;
    let least = memory.bytes(inputs.prefill_tokens);
    let share = (slot_bytes(inputs, options) / SHARE_DIVISOR).max(memory.bytes(USUAL_TOKENS));
    let (more, spare) = (share.saturating_sub(least), spare_bytes(inputs, options));
    let mut tokens = memory.tokens_in(least.saturating_add(more.min(spare))).min(MOST_TOKENS) / MULTIPLE * MULTIPLE;
    // Sliding windows keep the rows of a chunk until its end.
    let pages = |prefill_tokens| PlanInputs { prefill_tokens, ..inputs.clone() }.page_bytes();
    let grown = |tokens| memory.bytes(tokens).saturating_sub(least) + pages(tokens).saturating_sub(inputs.page_bytes());
    while tokens > LEAST_TOKENS && grown(tokens) > spare {
        tokens -= MULTIPLE;
    }
    tokens.max(LEAST_TOKENS).min(longest)
}

/// Bytes of the slots, if chunks are as small as possible.
fn slot_bytes(inputs: &PlanInputs, options: &Options) -> u64 {
    let all = inputs.all_expert_bytes();
    match (requested_slots(inputs, options), inputs.slot_budget()) {
        (Some(slots), _) => inputs.bytes_of_slots(slots, options.cache.scope),
        (None, budget) => budget.map_or(all, |budget| budget.min(all)),
    }
}

/// Bytes that larger chunks can take without displacing what must be in memory: the slots that the options request, all
/// experts if they fit, or else the experts that one token uses in each layer.
fn spare_bytes(inputs: &PlanInputs, options: &Options) -> u64 {
    let Some(budget) = inputs.slot_budget() else { return u64::MAX };
    let all = inputs.all_expert_bytes();
    let must = match requested_slots(inputs, options) {
        Some(slots) => inputs.bytes_of_slots(slots, options.cache.scope),
        None if budget >= all => all,
        None => {
            let scope = options.cache.scope;
            inputs.bytes_of_slots(inputs.slots_for(inputs.blueprint.geometry.top_k, scope), scope)
        }
    };
    budget.saturating_sub(must)
}

#[cfg(test)]
mod tests {
    use larder_core::{SequenceMemory, StepMemory};
    use larder_kernels::attention_scratch_bytes;

    use super::*;
    use crate::options::CacheSize;
    use crate::plan::decide;
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, inputs, options};

    use larder_cache::CacheScope::{Global, Layer};

    /// The tokens of a chunk of a model with 32 experts of 1 MiB and 1 KiB of activations per token.
    fn tokens(available: Option<u64>, context: usize, options: &Options) -> usize {
        let blueprint = with_activations();
        let least = LEAST_TOKENS.min(context);
        prefill_tokens(&PlanInputs { context, prefill_tokens: least, ..inputs(&blueprint, available) }, options)
    }

    fn with_activations() -> larder_core::Blueprint {
        let step_memory = StepMemory { bytes_per_token: 1024, fixed_bytes: 0 };
        larder_core::Blueprint { step_memory, ..blueprint() }
    }

    #[test]
    fn chunks_take_an_eighth_of_the_slots() {
        // Beside the slots 1 MiB of weights, 8 MiB of KV cache, attention, and less than half a MiB of the smallest
        // chunks.
        let attention = attention_scratch_bytes(8192, 512, 1) as u64;
        let available = |bytes| Some(beside_reserve(bytes + 9 * MEGA + MEGA / 2 + attention));
        let automatic = options(CacheSize::Available, Layer);
        assert_eq!(tokens(available(20 * MEGA), 8192, &automatic), 2560, "an eighth of 20 MiB are 2.5 MiB");
        assert_eq!(tokens(available(20 * MEGA), 100, &automatic), 100, "never beyond the context");
        assert_eq!(tokens(None, 8192, &automatic), 4096, "all experts are 32 MiB");
        let small = options(CacheSize::ExpertsPerLayer(2), Layer);
        assert_eq!(tokens(available(20 * MEGA), 8192, &small), 1152, "8 slots and one that experts pass through");
        let two = options(CacheSize::Bytes(2 * MEGA), Global);
        assert_eq!(tokens(available(20 * MEGA), 8192, &two), 256, "2 slots");
        let one = options(CacheSize::Bytes(MEGA), Global);
        assert_eq!(tokens(available(20 * MEGA), 8192, &one), 256, "an eighth of 1 slot would be 128 tokens");
    }

    #[test]
    fn chunks_displace_nothing_that_must_be_in_memory() {
        // Memory left for slots beside the smallest chunks, 1 MiB of weights, 4 MiB of KV cache and attention.
        let attention = attention_scratch_bytes(4096, 512, 1) as u64;
        let left = |bytes| Some(beside_reserve(bytes + 5 * MEGA + MEGA / 8 + attention));
        let all = options(CacheSize::Available, Layer);
        let found = [32, 33, 34].map(|mega| tokens(left(mega * MEGA + MEGA / 2), 4096, &all));
        assert_eq!(found, [576, 1600, 2624], "what is left of 32 MiB, within an eighth of them");
        for (bytes, wanted) in [(32 * MEGA, CacheSize::Available), (17 * MEGA, CacheSize::ExpertsPerLayer(4))] {
            let available = left(bytes + MEGA / 2);
            let (options, blueprint) = (options(wanted, Layer), with_activations());
            let planned = |tokens| {
                let inputs = PlanInputs { prefill_tokens: tokens, context: 4096, ..inputs(&blueprint, available) };
                decide(&inputs, &options).unwrap()
            };
            let larger = tokens(available, 4096, &options);
            assert_eq!((planned(larger), larger > LEAST_TOKENS), (planned(LEAST_TOKENS), true));
        }
        // The experts of one token are 8 MiB; not even they fit here, so chunks are as small as they get.
        assert_eq!(tokens(left(6 * MEGA), 4096, &all), LEAST_TOKENS);
    }

    #[test]
    fn chunks_of_windows_displace_nothing_either() {
        let attention = attention_scratch_bytes(4096, 512, 1) as u64;
        let available = Some(beside_reserve(33 * MEGA + MEGA / 8 + attention + MEGA));
        let planned = |sequence_memory, tokens: Option<usize>| {
            let blueprint = larder_core::Blueprint { sequence_memory, ..with_activations() };
            let options = options(CacheSize::Available, Layer);
            let inputs = PlanInputs { prefill_tokens: LEAST_TOKENS, context: 4096, ..inputs(&blueprint, available) };
            let tokens = tokens.unwrap_or_else(|| prefill_tokens(&inputs, &options));
            (tokens, decide(&PlanInputs { prefill_tokens: tokens, ..inputs }, &options).unwrap())
        };
        // A token of a chunk takes 1 KiB of activations, and as much of keys and values until the end of the chunk.
        let window = || SequenceMemory::window_rows(1, 1 << 9, [64, 64]);
        let (tokens, plan) = planned(window(), None);
        assert_eq!((tokens > LEAST_TOKENS, plan), (true, planned(window(), Some(LEAST_TOKENS)).1));
        let (more, _) = planned(SequenceMemory::kept_rows(1, 1 << 9, 64 + 64 + LEAST_TOKENS), None);
        assert!(3 * tokens < 2 * more, "{tokens} and {more}");
    }

    #[test]
    fn the_option_goes_first_within_the_context() {
        let chosen = |tokens| Options { prefill_tokens: Some(tokens), ..options(CacheSize::Available, Layer) };
        let found = [1, 500, 5000, usize::MAX].map(|wanted| tokens(Some(beside_reserve(MEGA)), 600, &chosen(wanted)));
        assert_eq!(found, [1, 500, 600, 600]);
    }
}
