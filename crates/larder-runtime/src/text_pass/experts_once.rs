//! The expert path that reads each expert of a step once, and keeps none.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;

use larder_core::{ExpertId, ExpertLayout, LayerIdx, RowOrder, WantedExpert};
use larder_model::{ComputeContext, ExpertPath, ExpertWorkspace, ModelError, MoeCall, Routed, wanted_experts};
use larder_store::ExpertSource;

/// Threads that read and convert experts while others are computed.
const READERS: usize = 2;

/// Experts of a source with the model's own routing.
pub struct ExpertsOnce<'a> {
    source: &'a dyn ExpertSource,
    workspace: ExpertWorkspace,
}

/// An expert that was read.
type ReadExpert = larder_store::Result<(ExpertId, Vec<u8>)>;

impl<'a> ExpertsOnce<'a> {
    /// Experts from `source`, computed on `compute`.
    pub fn new(source: &'a dyn ExpertSource, compute: Arc<ComputeContext>) -> Self {
        ExpertsOnce { source, workspace: ExpertWorkspace::new(compute) }
    }
}

impl ExpertPath for ExpertsOnce<'_> {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let (source, workspace) = (self.source, &mut self.workspace);
        let routed = workspace.route(call);
        let layout = source.layout(call.layer).clone().in_order(RowOrder::Rows8);
        workspace.begin(call, &routed, &layout);
        let wanted = wanted_experts(&routed.ids, call.gate.experts);
        let computed = read_all(source, call.layer, &wanted, &mut |expert, data| {
            workspace.compute(call, &routed, &layout, &[(expert, data)]);
        });
        computed.map_err(|e| ModelError::Expert(e.into()))?;
        workspace.sum(call, &routed, out);
        Ok(routed)
    }
}

/// Reads the experts of a layer on threads, and hands each to `each` as it arrives. At most two experts of each thread
/// are in memory.
fn read_all(
    source: &dyn ExpertSource,
    layer: LayerIdx,
    wanted: &[WantedExpert],
    each: &mut dyn FnMut(ExpertId, &[u8]),
) -> larder_store::Result<()> {
    thread::scope(|scope| {
        let (send, receive) = sync_channel::<ReadExpert>(0);
        for first in 0..READERS {
            let (send, share) = (send.clone(), wanted.iter().skip(first).step_by(READERS));
            scope.spawn(move || {
                // The receiver is gone after an error.
                let _ = share.map(|wanted| read(source, layer, wanted.expert)).try_for_each(|read| send.send(read));
            });
        }
        drop(send);
        for read in receive {
            let (expert, data) = read?;
            each(expert, &data);
        }
        Ok(())
    })
}

fn read(source: &dyn ExpertSource, layer: LayerIdx, expert: ExpertId) -> ReadExpert {
    let layout: &ExpertLayout = source.layout(layer);
    let mut data = vec![0; layout.bytes];
    source.read_expert(layer, expert, &mut data)?;
    layout.rearrange(&mut data);
    Ok((expert, data))
}
