//! Passes of a text through models whose experts are read and not kept.

use std::sync::Arc;

use larder_model::{ComputeContext, ExpertPath, LogitsFor, Span};
use larder_runtime::text_pass::TextPass;
use larder_runtime::{ModelOptions, OpenModel};

use crate::support::golden_models;
use crate::support::reference::Reference;

#[test]
fn chunks_have_the_logits_that_they_have_with_all_experts_in_memory() {
    for folder in golden_models() {
        let model = OpenModel::open(&folder, &ModelOptions::default()).unwrap();
        let compute = Arc::new(ComputeContext::new(2, false).unwrap());
        let (decoder, experts) = (model.decoder(&compute).unwrap(), model.experts().unwrap());
        let mut resident = model.all_resident(&compute).unwrap();
        let ids = Reference::read(&folder).tokens("full_ids");
        let chunks: Vec<&[u32]> = ids.chunks(ids.len().div_ceil(3)).collect();
        let alone = |ids: &[u32], path: &mut dyn ExpertPath| {
            let mut cache = decoder.new_kv_cache();
            let span = Span { logits_for: LogitsFor::All, ..Span::new(ids, &mut cache) };
            decoder.step(&mut [span], path, &mut ()).unwrap()
        };
        let wanted: Vec<f32> = chunks.iter().flat_map(|chunk| alone(chunk, &mut resident)).collect();
        for per_step in [1, 2, 3] {
            let (mut found, mut steps) = (Vec::new(), Vec::new());
            let mut pass = TextPass::new(&decoder, experts.as_dyn(), &compute);
            let done = pass.run(&chunks, per_step, LogitsFor::All, &mut |step, logits| {
                found.extend_from_slice(logits);
                steps.push(step);
                Ok(())
            });
            done.unwrap();
            assert!(found == wanted, "{} by {per_step}", folder.display());
            assert_eq!((steps.len(), steps.last().unwrap().end), (chunks.len().div_ceil(per_step), chunks.len()));
        }
    }
}
