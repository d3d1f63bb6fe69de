//! Computing experts on the CPU, several at a time: one batch of products for gate and up, one for down.

use std::ops::Range;
use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, ExpertPart, Geometry, PerMatrix, StepMemory};
use larder_kernels::{Inputs, Product, WeightMatrix};

use crate::compute::ComputeContext;
use crate::experts::{MoeCall, Routed};

/// The most rows of inputs, one for each token of an expert, that are computed at a time: enough for all experts of a few
/// tokens, and several times the tokens for which a kernel decodes a weight once, so that more would not be faster.
pub const PART_ROWS: usize = 256;

/// Computes the experts of MoE calls, one call after the other. Its buffers are kept from call to call.
pub struct ExpertWorkspace {
    compute: Arc<ComputeContext>,
    /// `[tokens, hidden]`, or `[tokens · k, hidden]` where the routing weight scales the input.
    x: Inputs,
    /// `[rows of a part, inter]` after the activation.
    inner: Inputs,
    /// `[rows of a part, inter]`, as `up`.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[rows of a part, hidden]`
    down: Vec<f32>,
    /// `[tokens, k, hidden]`: kept separately until all are computed, so that the sum does not depend on the order in
    /// which experts arrive.
    outputs: Vec<f32>,
    /// The places `token · k + rank` of the call, by expert.
    places: Vec<u32>,
    /// For each expert the end of its places; they begin where those of the expert before end.
    ends: Vec<u32>,
    /// For each row of a part, its row in `x`.
    picks: Vec<u32>,
    /// 0, 1, 2, …
    rows: Vec<u32>,
}

/// Rows of a part that one expert computes.
struct ExpertRows<'a> {
    data: &'a [u8],
    /// Where in [`ExpertWorkspace::places`] their places are; at least one.
    at: Range<usize>,
}

impl ExpertWorkspace {
    /// A workspace without buffers; they grow with the calls.
    pub fn new(compute: Arc<ComputeContext>) -> Self {
        let (x, inner) = (Inputs::new(), Inputs::new());
        let (gate, up, down, outputs) = Default::default();
        let (places, ends, picks, rows) = Default::default();
        ExpertWorkspace { compute, x, inner, gate, up, down, outputs, places, ends, picks, rows }
    }

    /// The most bytes of the buffers; `scales_input` if the routing weight scales the input.
    pub fn memory(geometry: &Geometry, scales_input: bool) -> StepMemory {
        let Geometry { hidden, inter, top_k, experts, .. } = *geometry;
        let (float, place) = (size_of::<f32>(), size_of::<u32>());
        let copies = if scales_input { top_k } else { 1 };
        let row = (2 * inter + hidden) * float + Inputs::bytes(inter) + 2 * place;
        StepMemory {
            bytes_per_token: copies * Inputs::bytes(hidden) + top_k * (hidden * float + place),
            fixed_bytes: PART_ROWS * row + experts * place,
        }
    }

    /// Starts a call: copies its inputs, and sorts its places by expert. `layout` is the layout of the call's experts.
    pub fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        let hidden = call.x.len() / call.tokens;
        let quantise = layout.quantises_input();
        self.reserve_outputs(call, routed);
        if call.gate.scales_input {
            let k = call.gate.top_k;
            // No output is there yet, so their memory has room for the scaled inputs.
            for ((place, weight), scaled) in (0..).zip(&routed.weights).zip(self.outputs.chunks_exact_mut(hidden)) {
                let x = &call.x[place / k * hidden..][..hidden];
                scaled.iter_mut().zip(x).for_each(|(scaled, x)| *scaled = x * weight);
            }
            self.compute.fill(&mut self.x, &self.outputs, hidden, quantise);
        } else {
            self.compute.fill(&mut self.x, call.x, hidden, quantise);
        }
        self.sort_places(routed);
    }

    /// Reserves the outputs of a call. Enough, without [`begin`](Self::begin), for a call whose experts are all
    /// computed elsewhere (a device, a worker) and arrive through [`put`](Self::put).
    pub fn reserve_outputs(&mut self, call: &MoeCall, routed: &Routed) {
        self.outputs.resize(routed.ids.len() * (call.x.len() / call.tokens), 0.0);
    }

    /// Computes some of the call's experts, given with their bytes, for all tokens that chose them. `routed` is what the
    /// call was begun with.
    pub fn compute(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout, group: &[(ExpertId, &[u8])]) {
        debug_assert_eq!(self.places.len(), choices(routed).count(), "the call was begun with another choice");
        let (mut part, mut rows) = (Vec::with_capacity(group.len()), 0);
        for (expert, data) in group {
            let mut at = self.places_of(*expert);
            while !at.is_empty() {
                let take = at.len().min(PART_ROWS);
                if rows + take > PART_ROWS {
                    self.compute_part(call, layout, &part);
                    (part, rows) = (Vec::with_capacity(group.len()), 0);
                }
                part.push(ExpertRows { data, at: at.start..at.start + take });
                (rows, at.start) = (rows + take, at.start + take);
            }
        }
        if rows > 0 {
            self.compute_part(call, layout, &part);
        }
    }

    /// Computes the rows of a part, in one batch of products for gate and up and one for down.
    fn compute_part(&mut self, call: &MoeCall, layout: &ExpertLayout, part: &[ExpertRows]) {
        let k = call.gate.top_k as u32;
        let row_of = |place: &u32| if call.gate.scales_input { *place } else { place / k };
        self.picks.clear();
        self.picks.extend(part.iter().flat_map(|rows| &self.places[rows.at.clone()]).map(row_of));
        let total = self.picks.len();
        let inter = layout.up.rows;
        let gated = if layout.gate.is_some() { total * inter } else { 0 };
        self.gate.resize(gated, 0.0);
        self.up.resize(total * inter, 0.0);

        let (mut gates, mut ups, mut picks) = (&mut self.gate[..], &mut self.up[..], &self.picks[..]);
        let mut batch = Vec::with_capacity(2 * part.len());
        for ExpertRows { data, at } in part {
            let pick = Some(front(&mut picks, at.len()));
            if let Some(gate) = &layout.gate {
                let out = front_mut(&mut gates, at.len() * inter);
                batch.push(Product { weights: weights(gate, data), x: &self.x, pick, out });
            }
            let out = front_mut(&mut ups, at.len() * inter);
            batch.push(Product { weights: weights(&layout.up, data), x: &self.x, pick, out });
        }
        self.compute.multiply(&mut batch);

        if let Some(PerMatrix { gate, up, .. }) = &layout.bias {
            gate.iter().for_each(|gate| add_biases(gate, part, &mut self.gate));
            add_biases(up, part, &mut self.up);
        }
        let inner = if layout.gate.is_some() {
            call.act.combine(&mut self.gate, &self.up);
            &self.gate
        } else {
            call.act.apply(&mut self.up);
            &self.up
        };
        self.compute.fill(&mut self.inner, inner, inter, !layout.down.kind.is_float());
        self.compute_down(layout, part, total);
    }

    /// The last product of the rows of a part, whose inputs are in `inner`, and their outputs at their places.
    fn compute_down(&mut self, layout: &ExpertLayout, part: &[ExpertRows], total: usize) {
        let hidden = layout.down.rows;
        self.down.resize(total * hidden, 0.0);
        self.rows.clear();
        self.rows.extend(0..total as u32);
        let (mut downs, mut rows) = (&mut self.down[..], &self.rows[..]);
        let mut batch = Vec::with_capacity(part.len());
        for ExpertRows { data, at } in part {
            let (pick, out) = (front(&mut rows, at.len()), front_mut(&mut downs, at.len() * hidden));
            batch.push(Product { weights: weights(&layout.down, data), x: &self.inner, pick: Some(pick), out });
        }
        self.compute.multiply(&mut batch);
        if let Some(PerMatrix { down, .. }) = &layout.bias {
            add_biases(down, part, &mut self.down);
        }
        let places = part.iter().flat_map(|rows| &self.places[rows.at.clone()]);
        for (place, y) in places.zip(self.down.chunks_exact(hidden)) {
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

    /// Sorts the places of a call by expert, in one pass to count and one to write.
    fn sort_places(&mut self, routed: &Routed) {
        let experts = choices(routed).map(|(_, id)| id.index() + 1).max().unwrap_or(0);
        self.ends.clear();
        self.ends.resize(experts + 1, 0);
        choices(routed).for_each(|(_, id)| self.ends[id.index() + 1] += 1);
        (0..experts).for_each(|expert| self.ends[expert + 1] += self.ends[expert]);
        self.places.clear();
        self.places.resize(self.ends[experts] as usize, 0);
        for (place, id) in choices(routed) {
            // Until all places are written this is the next place of the expert, and then the end.
            let next = &mut self.ends[id.index()];
            self.places[*next as usize] = place;
            *next += 1;
        }
    }

    /// Where the places of an expert are; empty if no token of the call chose it.
    fn places_of(&self, expert: ExpertId) -> Range<usize> {
        let end = |index: usize| self.ends.get(index).map_or(self.places.len(), |end| *end as usize);
        let start = expert.index().checked_sub(1).map_or(0, end);
        start..end(expert.index())
    }
}

/// The places of a call that have an expert, with the expert.
fn choices(routed: &Routed) -> impl Iterator<Item = (u32, ExpertId)> {
    (0..).zip(routed.ids.iter().copied()).filter(|(_, id)| *id != ExpertId::NONE)
}

fn weights<'a>(part: &ExpertPart, data: &'a [u8]) -> WeightMatrix<'a> {
    WeightMatrix { kind: part.kind, order: part.order, rows: part.rows, cols: part.cols, bytes: part.of(data) }
}

/// Adds each expert's bias to its rows of `out`.
fn add_biases(bias: &ExpertPart, part: &[ExpertRows], mut out: &mut [f32]) {
    let mut values = vec![0.0; bias.cols];
    for ExpertRows { data, at } in part {
        larder_kernels::widen(bias.kind, bias.of(data), &mut values);
        for row in front_mut(&mut out, at.len() * bias.cols).chunks_exact_mut(bias.cols) {
            row.iter_mut().zip(&values).for_each(|(o, b)| *o += b);
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
            let (values, bytes) = (values.collect::<Vec<f32>>(), &mut data[part.offset..][..part.bytes]);
            match part.kind {
                NumberFormat::Q8_0 => {
                    let rows = values.chunks(part.cols).zip(bytes.chunks_mut(part.bytes / part.rows));
                    rows.for_each(|(values, row)| larder_kernels::quantise_row(values, row));
                }
                kind => larder_kernels::narrow(kind, &values, bytes),
            }
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

    /// Outputs of a call of `tokens` tokens, of which all chose expert 0 and some other. The experts
    /// are computed `at_once` at a time.
    fn computed(layout: &ExpertLayout, tokens: usize, at_once: usize) -> Vec<f32> {
        let (hidden, experts, k) = (layout.up.cols, 9, 3);
        let data: Vec<Vec<u8>> = (0..experts).map(|e| expert(layout, e)).collect();
        let x: Vec<f32> = (0..tokens * hidden).map(|i| (i as f32 * 0.3).cos()).collect();
        let second = |token: usize| ExpertId((1 + token * 5 % 7) as u16);
        let ids =
            (0..tokens).flat_map(|t| [ExpertId(0), second(t), if t % 4 == 0 { ExpertId(8) } else { ExpertId::NONE }]);
        let routed = Routed { ids: ids.collect(), weights: (0..tokens * k).map(|i| 0.1 + i as f32 * 0.01).collect() };
        let gate = Gate::softmax(experts, k, false);
        let act = Activation::Silu;
        let call = MoeCall {
            layer: LayerIdx(0),
            gate: &gate,
            act,
            logits: &[],
            x: &x,
            tokens,
            origins: &[],
            meanwhile: &|| (),
        };
        let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::new(2, false).unwrap()));
        workspace.begin(&call, &routed, layout);
        let group: Vec<_> = data.iter().enumerate().map(|(e, data)| (ExpertId(e as u16), data.as_slice())).collect();
        for group in group.chunks(at_once) {
            workspace.compute(&call, &routed, layout, group);
        }
        assert!(workspace.up.len() <= PART_ROWS * layout.up.rows && workspace.down.len() <= PART_ROWS * hidden);
        let mut out = vec![f32::NAN; tokens * hidden];
        workspace.sum(&call, &routed, &mut out);
        out
    }

    #[test]
    fn parts_are_bounded_and_change_no_bit() {
        for kind in [NumberFormat::F32, NumberFormat::Q8_0] {
            let layout = ExpertLayout::new(64, 32, [kind; 3], kind.is_float()).unwrap();
            // One expert has all 700 tokens, the others 100 or 175 of them.
            let together = computed(&layout, 700, 9);
            assert_eq!(together, computed(&layout, 700, 1), "{kind}");
            // The rows of a token depend on no other token.
            let few = computed(&layout, 20, 9);
            assert_eq!(few, together[..few.len()], "{kind}");
        }
    }

    #[test]
    fn places_are_sorted_by_expert() {
        let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::single_threaded()));
        for (ids, want) in [
            (&[2, 0, 2, u16::MAX, 5, 2][..], &[(0, &[1][..]), (1, &[]), (2, &[0, 2, 5]), (5, &[4]), (6, &[])][..]),
            (&[u16::MAX], &[(0, &[]), (3, &[])]),
            (&[], &[(0, &[])]),
        ] {
            let ids: Vec<ExpertId> = ids.iter().map(|id| ExpertId(*id)).collect();
            workspace.sort_places(&Routed { weights: vec![0.0; ids.len()], ids });
            for (expert, places) in want {
                assert_eq!(&workspace.places[workspace.places_of(ExpertId(*expert))], *places, "expert {expert}");
            }
        }
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
            let call = MoeCall {
                layer: LayerIdx(0),
                gate: &gate,
                act,
                logits: &[],
                x: &x,
                tokens,
                origins: &[],
                meanwhile: &|| (),
            };
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
