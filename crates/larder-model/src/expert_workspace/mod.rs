//! Computing experts on the CPU, several at a time: one batch of products for gate and up, one for down.

mod staged;

use std::ops::Range;
use std::sync::Arc;

use larder_core::{
    ComputeStage, ExpertId, ExpertLayout, ExpertPart, Geometry, PerMatrix, STAGED_ROWS, StepMemory, timeline,
};
use larder_kernels::{Inputs, Product, WeightMatrix};

use crate::compute::ComputeContext;
use crate::experts::{MoeCall, Routed};
use crate::input_squares::ExpertInput;
use staged::StagedInputs;

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
    staged: StagedInputs,
}

/// Rows of a part that one expert computes.
struct ExpertRows<'a> {
    expert: ExpertId,
    data: &'a [u8],
    /// Where in [`ExpertWorkspace::places`] their places are; at least one.
    at: Range<usize>,
}

impl ExpertWorkspace {
    /// A workspace without buffers; they grow with the calls.
    pub fn new(compute: Arc<ComputeContext>) -> Self {
        let (x, inner) = (Inputs::new(), Inputs::new());
        let (gate, up, down, outputs) = Default::default();
        let (places, ends, picks, rows, staged) = Default::default();
        ExpertWorkspace { compute, x, inner, gate, up, down, outputs, places, ends, picks, rows, staged }
    }

    /// The most bytes of the buffers; `scales_input` if the routing weight scales the input.
    pub fn memory(geometry: &Geometry, scales_input: bool) -> StepMemory {
        let Geometry { hidden, inter, top_k, experts, .. } = *geometry;
        let (float, place) = (size_of::<f32>(), size_of::<u32>());
        let copies = if scales_input { top_k } else { 1 };
        let row = (2 * inter + hidden) * float + Inputs::bytes(inter) + 2 * place;
        StepMemory {
            bytes_per_token: copies * Inputs::bytes(hidden) + top_k * (hidden * float + place),
            fixed_bytes: PART_ROWS * row + experts * place + StagedInputs::bytes(STAGED_ROWS, inter),
        }
    }

    /// Starts a call: copies its inputs, and sorts its places by expert. `layout` is the layout of the call's experts.
    pub fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        self.begin_with(call, routed, [layout].into_iter());
    }

    /// As [`begin`](Self::begin) for experts of several layouts.
    pub fn begin_with<'l>(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        mut layouts: impl Iterator<Item = &'l ExpertLayout>,
    ) {
        let hidden = call.x.len() / call.tokens;
        let quantise = layouts.any(ExpertLayout::quantises_input);
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
        self.staged.clear();
    }

    /// Reserves the outputs of a call. Enough, without [`begin`](Self::begin), for a call whose experts are all
    /// computed elsewhere (a device, a worker) and arrive through [`put`](Self::put).
    pub fn reserve_outputs(&mut self, call: &MoeCall, routed: &Routed) {
        self.outputs.resize(routed.ids.len() * (call.x.len() / call.tokens), 0.0);
    }

    /// Computes some of the call's experts, given with their bytes, for all tokens that chose them. `routed` is what the
    /// call was begun with.
    pub fn compute(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout, group: &[(ExpertId, &[u8])]) {
        self.compute_stage(call, routed, layout, ComputeStage::Whole, group);
    }

    /// One stage of [`compute`](Self::compute). Experts that are computed in two stages have [`STAGED_ROWS`] rows together at
    /// most.
    pub fn compute_stage(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        stage: ComputeStage,
        group: &[(ExpertId, &[u8])],
    ) {
        debug_assert_eq!(self.places.len(), choices(routed).count(), "the call was begun with another choice");
        let _products =
            timeline::span(stage.name(), [("layer", call.layer.index() as u64), ("experts", group.len() as u64)]);
        let (mut part, mut rows) = (Vec::with_capacity(group.len()), 0);
        for &(expert, data) in group {
            let mut at = self.places_of(expert);
            while !at.is_empty() {
                let take = at.len().min(PART_ROWS);
                if rows + take > PART_ROWS {
                    self.compute_part(call, layout, stage, &part);
                    (part, rows) = (Vec::with_capacity(group.len()), 0);
                }
                part.push(ExpertRows { expert, data, at: at.start..at.start + take });
                (rows, at.start) = (rows + take, at.start + take);
            }
        }
        if rows > 0 {
            self.compute_part(call, layout, stage, &part);
        }
    }

    /// Computes a stage of the rows of a part.
    fn compute_part(&mut self, call: &MoeCall, layout: &ExpertLayout, stage: ComputeStage, part: &[ExpertRows]) {
        match stage {
            ComputeStage::Whole => {
                self.compute_inputs(call, layout, part);
                self.compute_rest(call, layout, part);
            }
            ComputeStage::Inputs => {
                self.compute_inputs(call, layout, part);
                let values = part.iter().map(|rows| (rows.expert, rows.at.len() * layout.up.rows));
                self.staged.keep(values, &self.gate, &self.up);
            }
            ComputeStage::Rest => {
                self.gate.clear();
                self.up.clear();
                part.iter().for_each(|rows| self.staged.take(rows.expert, &mut self.gate, &mut self.up));
                self.compute_rest(call, layout, part);
            }
        }
    }

    /// The products of a part with the input, in one batch: gate and up.
    fn compute_inputs(&mut self, call: &MoeCall, layout: &ExpertLayout, part: &[ExpertRows]) {
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
        for ExpertRows { data, at, .. } in part {
            let pick = Some(front(&mut picks, at.len()));
            if let Some(gate) = &layout.gate {
                let out = front_mut(&mut gates, at.len() * inter);
                batch.push(Product { weights: weights(gate, data), x: &self.x, pick, out });
            }
            let out = front_mut(&mut ups, at.len() * inter);
            batch.push(Product { weights: weights(&layout.up, data), x: &self.x, pick, out });
        }
        self.compute.multiply(&mut batch);
        self.collect(call, ExpertInput::Hidden, part);
    }

    /// Adds the inputs of a part's products to the sums of squares, if they are collected.
    fn collect(&self, call: &MoeCall, input: ExpertInput, part: &[ExpertRows]) {
        let Some(squares) = &self.compute.input_squares else { return };
        let (x, mut rows) = match input {
            ExpertInput::Hidden => (&self.x, &self.picks[..]),
            ExpertInput::Inner => (&self.inner, &self.rows[..]),
        };
        part.iter().for_each(|p| squares.add(call.layer, p.expert, input, x, front(&mut rows, p.at.len())));
    }

    /// The rest, with the products of the input in `gate` and `up`: biases, activation and the last product.
    fn compute_rest(&mut self, call: &MoeCall, layout: &ExpertLayout, part: &[ExpertRows]) {
        let inter = layout.up.rows;
        let total = self.up.len() / inter;
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
        self.collect(call, ExpertInput::Inner, part);
    }

    /// The last product of the rows of a part, whose inputs are in `inner`, and their outputs at their places.
    fn compute_down(&mut self, layout: &ExpertLayout, part: &[ExpertRows], total: usize) {
        let hidden = layout.down.rows;
        self.down.resize(total * hidden, 0.0);
        self.rows.clear();
        self.rows.extend(0..total as u32);
        let (mut downs, mut rows) = (&mut self.down[..], &self.rows[..]);
        let mut batch = Vec::with_capacity(part.len());
        for ExpertRows { data, at, .. } in part {
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
    let ExpertPart { kind, order, rows, cols, .. } = *part;
    WeightMatrix { kind, order, rows, cols, scale: part.scale(data), bytes: part.of(data) }
}

/// Adds each expert's bias to its rows of `out`.
fn add_biases(bias: &ExpertPart, part: &[ExpertRows], mut out: &mut [f32]) {
    let mut values = vec![0.0; bias.cols];
    for ExpertRows { data, at, .. } in part {
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
mod tests;
