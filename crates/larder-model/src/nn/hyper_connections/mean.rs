//! The plain mean of the residual streams after the last layer.

use crate::error::Result;
use crate::nn::MergeStreams;
use crate::ops::{Ops, Rows};

/// Merges streams into their mean.
pub struct MeanMerge {
    /// Residual streams.
    pub streams: usize,
}

impl MergeStreams for MeanMerge {
    fn merge(&self, streams: Rows, ops: &dyn Ops) -> Result<Rows> {
        ops.read_streams(streams, self.streams, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::ComputeContext;

    #[test]
    fn streams_are_merged_by_token() {
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let streams = ops.send(&[1.0, 2.0, 3.0, 6.0, 0.0, 1.0, 2.0, 2.0], 4).unwrap();
        let merged = MeanMerge { streams: 2 }.merge(streams, ops).unwrap();
        assert_eq!(ops.download(&[merged]).unwrap()[0][..], [2.0, 4.0, 1.0, 1.5]);
    }
}
