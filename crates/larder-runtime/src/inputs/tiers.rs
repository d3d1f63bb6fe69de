//! The inputs of the memory plan with a GPU.

use anyhow::Result;
use larder_os::memory;

use super::draft;
use super::model::at_context;
use crate::machine::gpu::GpuParts;
use crate::open::OpenModel;
use crate::options::Options;
use crate::plan::tiers::{Vram, pass_through_slots};
use crate::plan::{PlanInputs, with_context_on_gpu};

/// Alignment of resident matrices in VRAM, in bytes.
const RESIDENT_ALIGN: u64 = 256;
/// Tokens of a step with a GPU, unless the options say more: scores of attention and staging buffers in VRAM grow with
/// them.
const GPU_TOKENS: usize = 256;

/// The inputs of the memory plan with a GPU, for main memory and for VRAM.
pub fn tier_inputs<'a>(
    model: &OpenModel,
    options: &Options,
    inputs: PlanInputs<'a>,
    gpu: &GpuParts,
) -> Result<(PlanInputs<'a>, Vram)> {
    let (on_device, in_memory) = model.resident_on_device()?;
    let vram = Vram {
        name: gpu.name.clone(),
        free_bytes: gpu.free,
        resident_bytes: on_device + model.padding_on_device(RESIDENT_ALIGN) + model.scale_bytes_on_device(),
        embedding_bytes: model.embedding_bytes_on_device().map(|bytes| bytes.next_multiple_of(RESIDENT_ALIGN)),
    };
    let scratch_slots = pass_through_slots(&inputs, options.cache.prefetch).max(options.cache.scratch);
    let prefill_tokens =
        options.prefill_tokens.map_or(inputs.prefill_tokens.min(GPU_TOKENS), |_| inputs.prefill_tokens);
    let any = PlanInputs {
        resident_bytes: in_memory,
        scratch_slots,
        growth_bytes: memory::growth(options.compute.threads, true) + options.program_bytes,
        kv_limit_bytes: options.kv_limit_bytes,
        vram_kv_layers: options.device.vram_kv_layers.unwrap_or(usize::MAX),
        on_gpu: true,
        ..inputs
    };
    let draft = |context| draft::memory(model, options, context);
    let inputs = with_context_on_gpu(options, &vram, &|tokens| at_context(&any, tokens, &draft))?;
    let prefill_tokens = prefill_tokens.min(inputs.context.saturating_mul(inputs.sequences));
    Ok((PlanInputs { prefill_tokens, ..inputs }.with_kv_placed(&vram, options), vram))
}
