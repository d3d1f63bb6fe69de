//! How long a context is where no number is asked for, and how much memory the keys and values of all sequences share.
//!
//! Keys and values grow by pages, so a long context takes no memory before it is used. But slots are allocated at the
//! start, beside all that a context may ever take. So what grows with the context has half of the memory that all
//! experts leave; where they do not fit, an eighth of what experts, keys and values share.

use anyhow::Result;
use larder_engine::ContextLimit;

use super::tiers::Vram;
use super::{PlanInputs, requested_slots};
use crate::options::{ContextSize, Options};

/// Tokens for which every sequence has memory whatever that leaves to experts, if the model's context has as many.
const LEAST_TOKENS: usize = 4096;
/// The share of the memory that all experts leave.
const LEFT_DIVISOR: u64 = 2;
/// The share of the memory of experts, keys and values, where not all experts fit.
const SHARE_DIVISOR: u64 = 8;
/// The number of tokens is a multiple of this, if it is not the model's.
const MULTIPLE: usize = 1024;

/// Makes the inputs of a plan for a context of this number of tokens, at most the model's.
pub(crate) type WithContext<'f, 'a> = &'f dyn Fn(usize) -> Result<PlanInputs<'a>>;

/// The inputs of a plan on the CPU with the context of the options, and with a limit for the keys and values of all
/// sequences where whole contexts of all of them would take more than their share.
pub(crate) fn with_context<'a>(options: &Options, with: WithContext<'_, 'a>) -> Result<PlanInputs<'a>> {
    let least = with(LEAST_TOKENS)?;
    let most_bytes = least.base_bytes().saturating_add(growth(&least, options));
    let fits = |inputs: &PlanInputs| match options.kv_limit_bytes {
        Some(limit) => inputs.whole_kv_bytes() <= limit,
        None => inputs.with_kv_limit(inputs.whole_kv_bytes()).base_bytes() <= most_bytes,
    };
    let inputs = of_size(options.context, least, fits, with)?;
    let shared = most_bytes.saturating_sub(inputs.with_kv_limit(0).base_bytes()).max(inputs.whole_kv_bytes());
    let shared = (shared < inputs.all_kv_bytes()).then_some(shared);
    Ok(PlanInputs { kv_limit_bytes: options.kv_limit_bytes.or(shared), ..inputs })
}

/// As [`with_context`], with a GPU, where no limit is shared: whole contexts of all sequences have their share of VRAM.
pub(crate) fn with_context_on_gpu<'a>(
    options: &Options,
    vram: &Vram,
    with: WithContext<'_, 'a>,
) -> Result<PlanInputs<'a>> {
    let least = with(LEAST_TOKENS)?;
    let most_bytes = least.base_bytes().saturating_add(growth(&least, options));
    let (base, scope) = (vram.base_bytes(&least), options.cache.scope);
    let spare = vram.budget(options)?.saturating_sub(base);
    let requested = options.device.vram_experts.map(|n| least.bytes_of_slots(least.slots_for(n, scope), scope));
    let most_vram = base.saturating_add(grown(spare, least.all_kv_bytes(), least.all_expert_bytes(), requested));
    let fits = |inputs: &PlanInputs| inputs.base_bytes() <= most_bytes && vram.base_bytes(inputs) <= most_vram;
    of_size(options.context, least, fits, with)
}

/// The inputs with a context of this size, or the longest that `fits`; never less than `least`.
fn of_size<'a>(
    size: ContextSize,
    least: PlanInputs<'a>,
    fits: impl Fn(&PlanInputs<'a>) -> bool,
    with: WithContext<'_, 'a>,
) -> Result<PlanInputs<'a>> {
    let most = least.blueprint.context;
    if let Some(tokens) = size.tokens(most) {
        return with(tokens);
    }
    // Ascending halves: below `low` all fit, from `high` on none does.
    let (mut longest, mut low, mut high) = (least, LEAST_TOKENS / MULTIPLE + 1, most.div_ceil(MULTIPLE) + 1);
    while low < high {
        let middle = low.midpoint(high);
        let inputs = with(middle.saturating_mul(MULTIPLE))?;
        if fits(&inputs) { (longest, low) = (inputs, middle + 1) } else { high = middle }
    }
    Ok(longest)
}

/// Bytes that a context may take beyond the least one.
fn growth(least: &PlanInputs, options: &Options) -> u64 {
    let Some(spare) = least.slot_budget() else { return 0 };
    let requested = requested_slots(least, options).map(|slots| least.bytes_of_slots(slots, options.cache.scope));
    grown(spare, least.all_kv_bytes(), least.all_expert_bytes(), requested)
}

/// Bytes that keys and values may take beyond `kv`, if `spare` bytes are for experts beside that, where all experts
/// take `all` and those that the options ask for `requested`.
fn grown(spare: u64, kv: u64, all: u64, requested: Option<u64>) -> u64 {
    let share = (spare.saturating_add(kv) / SHARE_DIVISOR).saturating_sub(kv);
    match (requested, spare.checked_sub(all)) {
        (Some(requested), _) => share.min(spare.saturating_sub(requested)),
        (None, Some(left)) => left / LEFT_DIVISOR,
        (None, None) => share,
    }
}

impl<'a> PlanInputs<'a> {
    /// The same inputs with this limit of keys and values.
    fn with_kv_limit(&self, bytes: u64) -> PlanInputs<'a> {
        PlanInputs { kv_limit_bytes: Some(bytes), ..self.clone() }
    }

    /// Bytes of the keys, values and recurrent states of whole contexts of all sequences.
    fn all_kv_bytes(&self) -> u64 {
        self.page_bytes().saturating_add(self.recurrent_bytes())
    }

    /// Those of the sequences that always have room for a whole context.
    fn whole_kv_bytes(&self) -> u64 {
        PlanInputs { sequences: self.whole_contexts.min(self.sequences), ..self.clone() }.all_kv_bytes()
    }

    /// The context, and what larger ones would take: each power of two up to the model's.
    pub fn context_limit(&self) -> ContextLimit {
        let bytes = |inputs: &PlanInputs| match self.kv_limit_bytes {
            Some(limit) => inputs.with_kv_limit(limit.max(inputs.whole_kv_bytes())).kv_bytes(),
            None => inputs.kv_bytes(),
        };
        let now = bytes(self);
        let more = |context| (context, bytes(&PlanInputs { context, ..self.clone() }).saturating_sub(now));
        let most = self.blueprint.context;
        let powers = std::iter::successors(Some((self.context + 1).next_power_of_two()), |n| n.checked_mul(2));
        let larger = powers.take_while(|tokens| *tokens < most).chain((most > self.context).then_some(most));
        ContextLimit { tokens: self.context, larger: larger.map(more).collect() }
    }
}

#[cfg(test)]
mod tests {
    use larder_cache::CacheScope;
    use larder_core::Blueprint;

    use super::*;
    use crate::options::CacheSize;
    use crate::plan::decide;
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, inputs, options};
    use crate::plan::tiers::tests::vram;

    /// A model with 32 experts of 1 MiB, 1 KiB of keys and values per token, and a context of 128K.
    fn long() -> Blueprint {
        Blueprint { context: 128 << 10, ..blueprint() }
    }

    /// The context and the limit of keys and values in MiB, with this much memory beside 1 MiB of weights.
    fn chosen(beside_weights: Option<u64>, sequences: usize, options: &Options) -> (usize, Option<u64>) {
        let blueprint = long();
        let available = beside_weights.map(|bytes| beside_reserve(bytes + MEGA));
        let any = PlanInputs { sequences, ..inputs(&blueprint, available) };
        let with = |tokens: usize| Ok(PlanInputs { context: tokens.min(blueprint.context), ..any.clone() });
        let found = with_context(options, &with).unwrap();
        decide(&found, options).unwrap();
        (found.context, found.kv_limit_bytes.map(|bytes| bytes / MEGA))
    }

    fn of(size: CacheSize) -> Options {
        options(size, CacheScope::Layer)
    }

    #[test]
    fn a_context_has_half_of_what_all_experts_leave_or_an_eighth() {
        let automatic = of(CacheSize::Available);
        let context = |mega: u64| chosen(Some(mega * MEGA), 1, &automatic).0;
        assert_eq!(context(32 + 300), 128 << 10, "the model's own is 128 MiB");
        // Beside 4 MiB of the least context half of 96 MiB, of which attention takes some.
        assert!((50 << 10..=52 << 10).contains(&context(32 + 100)), "{}", context(132));
        assert_eq!(context(32 + 4), 4096, "all experts stay in memory");
        assert!((3 << 10..=4 << 10).contains(&context(30)), "an eighth: {}", context(30));
        let blueprint = Blueprint { geometry: larder_core::Geometry::narrow(4, 0..4, 64, 2), ..long() };
        let any = inputs(&blueprint, Some(beside_reserve(129 * MEGA)));
        let with = |tokens: usize| Ok(PlanInputs { context: tokens.min(blueprint.context), ..any.clone() });
        let streamed = with_context(&automatic, &with).unwrap();
        assert!((15 << 10..=16 << 10).contains(&streamed.context), "an eighth of 128 MiB: {}", streamed.context);
        assert_eq!(chosen(None, 1, &automatic), (4096, None), "the memory is unknown");
    }

    #[test]
    fn experts_that_are_asked_for_are_not_displaced() {
        // 20 MiB and some slots that others pass through.
        let context = |mega: u64| chosen(Some(mega * MEGA), 1, &of(CacheSize::ExpertsPerLayer(5))).0;
        assert!((4 << 10..=5 << 10).contains(&context(28)), "{}", context(28));
        assert!((30 << 10..=32 << 10).contains(&context(256)), "an eighth, not half: {}", context(256));
    }

    #[test]
    fn sequences_share_the_memory_of_whole_contexts() {
        let shared = chosen(Some(132 * MEGA), 4, &of(CacheSize::Available));
        assert!((54 << 10..=58 << 10).contains(&shared.0), "{shared:?}");
        assert!((54..=58).contains(&shared.1.unwrap()), "{shared:?}");
        let asked = |tokens: usize| Options { context: tokens.into(), ..of(CacheSize::Available) };
        assert_eq!(chosen(Some(132 * MEGA), 4, &asked(8 << 10)), (8 << 10, None), "32 MiB are within the share");
        let (context, limit) = chosen(Some(132 * MEGA), 4, &asked(80 << 10));
        assert_eq!((context, limit), (80 << 10, Some(80)), "one whole context");
        let own = Options { context: ContextSize::Model, kv_limit_bytes: Some(200 * MEGA), ..of(CacheSize::Available) };
        assert_eq!(chosen(Some(400 * MEGA), 4, &own), (128 << 10, Some(200)));
        let auto = Options { context: ContextSize::Auto, ..own };
        assert_eq!(chosen(Some(400 * MEGA), 4, &auto), (128 << 10, Some(200)));
        let auto = Options { kv_limit_bytes: Some(20 * MEGA), ..auto };
        assert_eq!(chosen(Some(400 * MEGA), 4, &auto), (20 << 10, Some(20)), "one context takes all of it");
    }

    #[test]
    fn on_a_gpu_the_share_is_that_of_vram() {
        let blueprint = long();
        let available = Some(beside_reserve(1 << 30));
        let any = PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, available) };
        let with = |tokens: usize| Ok(PlanInputs { context: tokens.min(blueprint.context), ..any.clone() });
        let context = |mega: u64| {
            let found = with_context_on_gpu(&of(CacheSize::Available), &vram(mega * MEGA), &with).unwrap();
            found.context
        };
        assert_eq!((context(24), context(600)), (4096, 128 << 10), "some experts fit, or all beside the model's own");
        let half = context(200);
        assert!((40 << 10..=72 << 10).contains(&half), "half of what all experts leave: {half}");
    }

    #[test]
    fn larger_contexts_are_listed_with_what_they_take_more() {
        let blueprint = Blueprint { context: 20_000, ..long() };
        let at = |context, kv_limit_bytes| PlanInputs { context, kv_limit_bytes, ..inputs(&blueprint, None) };
        let limit = at(5000, None).context_limit();
        let pages = |tokens: u64| tokens.next_multiple_of(64) << 10;
        let more = |tokens: u64| (tokens as usize, pages(tokens) - pages(5000));
        assert_eq!(limit, ContextLimit { tokens: 5000, larger: vec![more(8192), more(16_384), more(20_000)] });
        assert!(at(20_000, None).context_limit().larger.is_empty());
        let shared = PlanInputs { sequences: 4, ..at(8192, Some(10 * MEGA)) }.context_limit();
        assert_eq!(shared.larger, [(16_384, 6 * MEGA), (20_000, pages(20_000) - 10 * MEGA)]);
    }
}
