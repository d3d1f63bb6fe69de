//! Computing experts on the CPU, several at a time: one batch of products for gate and up, one for down.

use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, ExpertPart, PerMatrix};
use larder_kernels::{Inputs, Product, WeightMatrix};

use crate::compute::ComputeContext;
use crate::experts::{MoeCall, Routed};

/// Computes the experts of MoE calls, one call after the other. Its buffers are kept from call to call.
pub struct ExpertWorkspace {
    compute: Arc<ComputeContext>,
    /// `[tokens, hidden]`, or `[tokens · k, hidden]` where the routing weight scales the input.
    x: Inputs,
    /// `[rows, inter]` after the activation.
    inner: Inputs,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    /// `[tokens, k, hidden]`: kept separately until all are computed, so that the sum does not depend on the order in
    /// which experts arrive.
    outputs: Vec<f32>,
    /// The places `token · k + rank` of the current experts, one expert after the other.
    places: Vec<u32>,
    /// For each place, its row in `x`.
    picks: Vec<u32>,
    /// 0, 1, 2, …
    rows: Vec<u32>,
}

impl ExpertWorkspace {
    /// A workspace without buffers; they grow with the calls.
    pub fn new(compute: Arc<ComputeContext>) -> Self {
        let (x, inner) = (Inputs::new(), Inputs::new());
        let (gate, up, down, outputs) = Default::default();
        let (places, picks, rows) = Default::default();
        ExpertWorkspace { compute, x, inner, gate, up, down, outputs, places, picks, rows }
    }

    /// Starts a call: copies its inputs. `layout` is the layout of the call's experts.
    pub fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        let hidden = call.x.len() / call.tokens;
        let quantise = layout.quantises_input();
        if call.gate.scales_input {
            let k = call.gate.top_k;
            self.down.clear();
            for (place, weight) in routed.weights.iter().enumerate() {
                self.down.extend(call.x[place / k * hidden..][..hidden].iter().map(|v| v * weight));
            }
            self.compute.fill(&mut self.x, &self.down, hidden, quantise);
        } else {
            self.compute.fill(&mut self.x, call.x, hidden, quantise);
        }
        self.reserve_outputs(call, routed);
    }

    /// Reserves the outputs of a call. Enough, without [`begin`](Self::begin), for a call whose experts are all
    /// computed elsewhere (a device, a worker) and arrive through [`put`](Self::put).
    pub fn reserve_outputs(&mut self, call: &MoeCall, routed: &Routed) {
        self.outputs.resize(routed.ids.len() * (call.x.len() / call.tokens), 0.0);
    }

    /// Computes some of the call's experts, given with their bytes, for all tokens that chose them.
    pub fn compute(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout, group: &[(ExpertId, &[u8])]) {
        let counts = self.find_places(call, routed, group);
        let total = self.places.len();
        let inter = layout.up.rows;
        let gated = if layout.gate.is_some() { total * inter } else { 0 };
        self.gate.resize(gated, 0.0);
        self.up.resize(total * inter, 0.0);

        let (mut gates, mut ups, mut picks) = (&mut self.gate[..], &mut self.up[..], &self.picks[..]);
        let mut batch = Vec::with_capacity(2 * group.len());
        for ((_, data), n) in group.iter().zip(&counts) {
            let pick = Some(front(&mut picks, *n));
            if let Some(gate) = &layout.gate {
                let out = front_mut(&mut gates, n * inter);
                batch.push(Product { weights: weights(gate, data), x: &self.x, pick, out });
            }
            let out = front_mut(&mut ups, n * inter);
            batch.push(Product { weights: weights(&layout.up, data), x: &self.x, pick, out });
        }
        self.compute.multiply(&mut batch);

        if let Some(PerMatrix { gate, up, .. }) = &layout.bias {
            gate.iter().for_each(|gate| add_biases(gate, group, &counts, &mut self.gate));
            add_biases(up, group, &counts, &mut self.up);
        }
        let inner = if layout.gate.is_some() {
            call.act.combine(&mut self.gate, &self.up);
            &self.gate
        } else {
            call.act.apply(&mut self.up);
            &self.up
        };
        self.compute.fill(&mut self.inner, inner, inter, !layout.down.kind.is_float());

        let hidden = layout.down.rows;
        self.down.resize(total * hidden, 0.0);
        self.rows.clear();
        self.rows.extend(0..total as u32);
        let (mut downs, mut rows) = (&mut self.down[..], &self.rows[..]);
        let mut batch = Vec::with_capacity(group.len());
        for ((_, data), n) in group.iter().zip(&counts) {
            let (pick, out) = (front(&mut rows, *n), front_mut(&mut downs, n * hidden));
            batch.push(Product { weights: weights(&layout.down, data), x: &self.inner, pick: Some(pick), out });
        }
        self.compute.multiply(&mut batch);
        if let Some(PerMatrix { down, .. }) = &layout.bias {
            add_biases(down, group, &counts, &mut self.down);
        }
        for (place, y) in self.places.iter().zip(self.down.chunks_exact(hidden)) {
            self.outputs[*place as usize * hidden..][..hidden].copy_from_slice(y);
        }
    }

    /// Stores the output `[hidden]` of a place, `token · k + rank`, whose expert was computed elsewhere.
    pub fn put(&mut self, place: usize, output: &[f32]) {
        self.outputs[place * output.len()..][..output.len()].copy_from_slice(output);
    }

    /// The output of a place.
    pub fn output(&self, place: usize, hidden: usize) -> &[f32] {
        &self.outputs[place * hidden..][..hidden]
    }

    /// The weighted sum of each token's experts, in the order of their rank: `out [tokens, hidden]`.
    pub fn sum(&self, call: &MoeCall, routed: &Routed, out: &mut [f32]) {
        let (k, hidden) = (call.gate.top_k, out.len() / call.tokens);
        out.fill(0.0);
        for (place, _) in routed.ids.iter().enumerate().filter(|(_, id)| **id != ExpertId::NONE) {
            self.add(call, routed, place, &mut out[place / k * hidden..][..hidden]);
        }
    }

    /// Adds the output of one place, `token · k + rank`, times its weight to `out [hidden]`.
    pub fn add(&self, call: &MoeCall, routed: &Routed, place: usize, out: &mut [f32]) {
        let weight = if call.gate.scales_input { 1.0 } else { routed.weights[place] };
        let output = self.output(place, out.len());
        out.iter_mut().zip(output).for_each(|(o, y)| *o += weight * y);
    }

    /// Lists the places of each expert, one expert after the other, and returns the number of places per expert.
    fn find_places(&mut self, call: &MoeCall, routed: &Routed, group: &[(ExpertId, &[u8])]) -> Vec<usize> {
        let k = call.gate.top_k as u32;
        self.places.clear();
        let counts = group.iter().map(|(expert, _)| {
            let before = self.places.len();
            let places = (0..).zip(&routed.ids).filter(|(_, id)| *id == expert);
            self.places.extend(places.map(|(place, _)| place));
            self.places.len() - before
        });
        let counts = counts.collect();
        let row = |place: &u32| if call.gate.scales_input { *place } else { place / k };
        self.picks.clear();
        self.picks.extend(self.places.iter().map(row));
        counts
    }
}

fn weights<'a>(part: &ExpertPart, data: &'a [u8]) -> WeightMatrix<'a> {
    WeightMatrix { kind: part.kind, order: part.order, rows: part.rows, cols: part.cols, bytes: part.of(data) }
}

/// Adds each expert's bias to its rows of `out`.
fn add_biases(part: &ExpertPart, group: &[(ExpertId, &[u8])], counts: &[usize], mut out: &mut [f32]) {
    let mut bias = vec![0.0; part.cols];
    for ((_, data), n) in group.iter().zip(counts) {
        larder_kernels::widen(part.kind, part.of(data), &mut bias);
        for row in front_mut(&mut out, n * part.cols).chunks_exact_mut(part.cols) {
            row.iter_mut().zip(&bias).for_each(|(o, b)| *o += b);
        }
    }
}

/// Splits the first `n` elements off.
fn front<'a, T>(rest: &mut &'a [T], n: usize) -> &'a [T] {
    let (front, behind) = rest.split_at(n);
    *rest = behind;
    front
}

/// Splits the first `n` elements off.
fn front_mut<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (front, behind) = std::mem::take(rest).split_at_mut(n);
    *rest = behind;
    front
}

#[cfg(test)]
mod tests {
    use larder_core::{Gate, LayerIdx, NumberFormat};

    use super::*;
    use crate::nn::Activation;

    /// The bytes of an expert with varied weights.
    fn expert(layout: &ExpertLayout, seed: usize) -> Vec<u8> {
        let mut data = vec![0; layout.bytes];
        for (_, part) in layout.parts() {
            let values =
                (0..part.rows * part.cols).map(|i| ((i * 31 + seed * 17 + part.offset) % 97) as f32 / 97.0 - 0.5);
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            data[part.offset..][..part.bytes].copy_from_slice(&bytes);
        }
        data
    }

    /// The definition, for a single token.
    fn naive(layout: &ExpertLayout, data: &[u8], act: Activation, x: &[f32]) -> Vec<f32> {
        let floats = |part: &ExpertPart| -> Vec<f32> {
            part.of(data).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let product = |part: &ExpertPart, x: &[f32]| -> Vec<f32> {
            let w = floats(part);
            w.chunks_exact(part.cols).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
        };
        let bias = layout.bias.as_ref().map(|b| b.as_ref().map(floats)).unwrap();
        let add = |v: Vec<f32>, b: &[f32]| -> Vec<f32> { v.iter().zip(b).map(|(a, b)| a + b).collect() };
        let mut inner = add(product(&layout.up, x), &bias.up);
        match &layout.gate {
            Some(gate) => {
                let up = std::mem::replace(&mut inner, add(product(gate, x), &bias.gate.unwrap()));
                act.combine(&mut inner, &up);
            }
            None => act.apply(&mut inner),
        }
        add(product(&layout.down, &inner), &bias.down)
    }

    #[test]
    fn groups_and_batches_follow_the_definition() {
        check(ExpertLayout::new(24, 16, [NumberFormat::F32; 3], true).unwrap());
    }

    #[test]
    fn experts_of_two_matrices_follow_the_definition() {
        check(ExpertLayout::new(24, 16, [NumberFormat::F32; 2], true).unwrap());
    }

    fn check(layout: ExpertLayout) {
        let (hidden, experts, k, tokens) = (layout.up.cols, 5, 2, 7);
        let data: Vec<Vec<u8>> = (0..experts).map(|e| expert(&layout, e)).collect();
        let x: Vec<f32> = (0..tokens * hidden).map(|i| (i as f32 * 0.3).cos()).collect();
        let ids: Vec<ExpertId> = (0..tokens * k).map(|i| ExpertId(((i / k * 3 + i % k) % experts) as u16)).collect();
        let weights: Vec<f32> = (0..tokens * k).map(|i| 0.1 + i as f32 * 0.01).collect();
        let routed = Routed { ids, weights };
        for scales_input in [false, true] {
            let gate = Gate { scales_input, ..Gate::softmax(experts, k, false) };
            let act = Activation::Silu;
            let call = MoeCall { layer: LayerIdx(0), gate: &gate, act, logits: &[], x: &x, tokens, origins: &[] };
            let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::new(2, false).unwrap()));
            workspace.begin(&call, &routed, &layout);
            for group in [&[3, 1][..], &[0, 2, 4]] {
                let group: Vec<_> = group.iter().map(|e| (ExpertId(*e), data[*e as usize].as_slice())).collect();
                workspace.compute(&call, &routed, &layout, &group);
            }
            let mut out = vec![f32::NAN; tokens * hidden];
            workspace.sum(&call, &routed, &mut out);
            for t in 0..tokens {
                let mut want = vec![0.0; hidden];
                for (id, weight) in routed.ids[t * k..][..k].iter().zip(&routed.weights[t * k..]) {
                    let (inside, outside) = if scales_input { (*weight, 1.0) } else { (1.0, *weight) };
                    let x: Vec<f32> = x[t * hidden..][..hidden].iter().map(|v| v * inside).collect();
                    let y = naive(&layout, &data[id.index()], act, &x);
                    want.iter_mut().zip(y).for_each(|(w, y)| *w += outside * y);
                }
                for (got, want) in out[t * hidden..][..hidden].iter().zip(want) {
                    assert!((got - want).abs() < 1e-4, "{got} instead of {want}");
                }
            }
        }
    }
}
