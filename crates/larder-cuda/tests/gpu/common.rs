//! Random experts, layers to compute, and the emulated GPU.

use std::sync::Arc;

use larder_cache::two_tiers::{Device, Direction, Transfer, TransferDone};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, NumberFormat};
use larder_cuda::{Emulator, Gpu};
use larder_kernels::WeightMatrix;
use larder_model::{
    Activation, ComputeContext, DeviceExperts, DeviceProducts, ExpertWorkspace, MoeCall, Ops, PlacedMatrix, Routed,
    Rows,
};
use larder_store::reader::{Arena, Slot};

pub const MEMORY: u64 = 64 << 20;

/// The emulator, or `None` if there is no C++ compiler.
pub fn emulator(seed: u64) -> Option<Emulator> {
    match Emulator::new(MEMORY, seed) {
        Ok(emulator) => Some(emulator),
        Err(larder_cuda::GpuError::Missing(what)) => {
            println!("skipped: {what}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

pub fn gpu(emulator: Emulator) -> Gpu {
    Gpu::with_driver(Arc::new(emulator)).unwrap()
}

/// A matrix in the memory of a device.
pub fn placed(device: &Arc<dyn DeviceProducts>, weights: WeightMatrix) -> PlacedMatrix {
    let id = device.upload(weights).unwrap();
    PlacedMatrix::uploaded(device.clone(), id, weights.kind, [weights.rows, weights.cols])
}

/// The same rows once more, for an operation that may overwrite them.
pub fn copy(ops: &dyn Ops, rows: Rows) -> Rows {
    let values = &ops.download(&[rows]).unwrap()[0];
    ops.send(values, rows.width).unwrap()
}

/// The values of rows. A layer begins behind them, so that memory is used again.
pub fn receive<const N: usize>(ops: &dyn Ops, wanted: [Rows; N]) -> [Vec<f32>; N] {
    let rows = ops.download(&wanted).unwrap();
    ops.begin_layer();
    assert_eq!(rows.len(), N);
    std::array::from_fn(|place| rows[place].to_vec())
}

/// As [`receive`], as bits.
pub fn receive_bits<const N: usize>(ops: &dyn Ops, wanted: [Rows; N]) -> [Vec<u32>; N] {
    receive(ops, wanted).map(|values| values.into_iter().map(f32::to_bits).collect())
}

/// A seeded random generator (xorshift).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// −1 to 1.
    pub fn float(&mut self) -> f32 {
        self.below(20_001) as f32 / 10_000.0 - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Random weights in a number format, with small scales.
    pub fn weights(&mut self, kind: NumberFormat, out: &mut [u8]) {
        for block in out.chunks_exact_mut(kind.block_bytes()) {
            match kind.parts() {
                None => larder_kernels::narrow(kind, &[self.float()], block),
                Some(parts) => {
                    block.iter_mut().for_each(|byte| *byte = self.next() as u8);
                    if parts.scales > 0 && parts.scale_bytes == 1 {
                        // A small exponent.
                        block[parts.scales_at] = 116 + self.below(8) as u8;
                        continue;
                    }
                    for i in 0..parts.scales {
                        let sign = if self.below(4) == 0 { 0x8000 } else { 0 };
                        let half = (0x1400 + self.below(0x1000) as u16) | sign;
                        block[parts.scales_at + 2 * i..][..2].copy_from_slice(&half.to_le_bytes());
                    }
                }
            }
        }
    }

    pub fn expert(&mut self, layout: &ExpertLayout) -> Vec<u8> {
        let mut data = vec![0; layout.bytes];
        for (_, part) in layout.parts() {
            self.weights(part.kind, &mut data[part.offset..part.offset + part.bytes]);
        }
        data
    }
}

/// Slots in main memory, filled with these experts.
pub fn slots(layout: &ExpertLayout, experts: &[Vec<u8>]) -> Vec<Slot> {
    let (_, mut slots) = Arena::new(experts.len(), layout.bytes).unwrap();
    slots.iter_mut().zip(experts).for_each(|(slot, data)| slot.copy_from_slice(data));
    slots
}

pub fn transfer(direction: Direction, slot: Slot, at: usize) -> Transfer {
    let (len, tag) = (slot.len(), at as u64);
    Transfer { direction, slot, at, len, is_ahead: false, tag }
}

/// A transfer for which nothing waits.
pub fn ahead(direction: Direction, slot: Slot, at: usize) -> Transfer {
    Transfer { is_ahead: true, ..transfer(direction, slot, at) }
}

pub fn wait_for_all(link: &mut dyn Device) -> Vec<TransferDone> {
    let over: Vec<_> = std::iter::from_fn(|| link.wait()).collect();
    assert_eq!(link.in_flight(), 0);
    over
}

/// Copies experts to the slots of the same numbers on the device.
pub fn upload_experts(link: &mut dyn Device, layout: &ExpertLayout, experts: &[Vec<u8>]) {
    link.allocate(experts.len(), layout.bytes).unwrap();
    for (at, slot) in slots(layout, experts).into_iter().enumerate() {
        link.submit(transfer(Direction::ToDevice, slot, at));
    }
    for over in wait_for_all(link) {
        over.result.unwrap();
    }
}

/// A layer, its inputs and its routing.
pub struct LayerCase {
    pub layout: ExpertLayout,
    pub gate: Gate,
    pub act: Activation,
    pub x: Vec<f32>,
    pub tokens: usize,
    pub routed: Routed,
}

impl LayerCase {
    /// Each token chooses `k` of `experts` experts; some choose fewer.
    pub fn new(
        random: &mut Random,
        layout: ExpertLayout,
        act: Activation,
        tokens: usize,
        (k, experts): (usize, usize),
        scales_input: bool,
    ) -> Self {
        let gate = Gate { scales_input, ..Gate::softmax(experts, k, false) };
        let x = random.floats(tokens * layout.up.cols);
        let mut routed = Routed::default();
        for token in 0..tokens {
            let first = random.below(experts);
            for rank in 0..k {
                let none = token > 0 && rank + 1 == k && random.below(5) == 0;
                routed.ids.push(if none { ExpertId::NONE } else { ExpertId(((first + rank) % experts) as u16) });
                routed.weights.push(random.float());
            }
        }
        LayerCase { layout, gate, act, x, tokens, routed }
    }

    pub fn call(&self) -> MoeCall<'_> {
        MoeCall::new(LayerIdx(0), &self.gate, self.act, &self.x, self.tokens)
    }

    /// What each place of these experts adds to the sum, computed by the CPU kernels.
    pub fn by_cpu(&self, experts: &[(ExpertId, &[u8])]) -> Vec<Option<Vec<u32>>> {
        let call = self.call();
        let mut bench = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
        bench.begin(&call, &self.routed, &self.layout);
        bench.compute(&call, &self.routed, &self.layout, experts);
        let places = self.routed.ids.iter().enumerate().map(|(place, id)| {
            experts.iter().any(|(expert, _)| expert == id).then(|| {
                let mut out = vec![0.0; self.layout.down.rows];
                bench.add(&call, &self.routed, place, &mut out);
                out.into_iter().map(f32::to_bits).collect()
            })
        });
        places.collect()
    }

    /// Submits groups of experts in these slots.
    pub fn begin(&self, bench: &mut dyn DeviceExperts, groups: &[&[(ExpertId, usize)]]) {
        bench.prepare(&self.layout, self.act, &self.gate, self.call().tokens).unwrap();
        bench.begin(&self.call(), &self.routed, &self.layout);
        for group in groups {
            bench.compute(&self.call(), &self.routed, &self.layout, group);
        }
    }

    /// What each place that was computed on the device adds to the sum.
    pub fn finish(&self, bench: &mut dyn DeviceExperts) -> larder_model::Result<Vec<Option<Vec<u32>>>> {
        let mut places = vec![None; self.routed.ids.len()];
        bench.finish(&mut |place, y| {
            let weight = if self.gate.scales_input { 1.0 } else { self.routed.weights[place] };
            let added = y.iter().map(|y| (0.0 + weight * y).to_bits()).collect();
            assert!(places[place].replace(added).is_none(), "place {place} was returned twice");
        })?;
        Ok(places)
    }
}

/// Every expert with its number.
pub fn numbered(experts: &[Vec<u8>]) -> Vec<(ExpertId, &[u8])> {
    experts.iter().enumerate().map(|(i, data)| (ExpertId(i as u16), data.as_slice())).collect()
}
