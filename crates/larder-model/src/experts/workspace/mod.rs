//! Computing experts on the CPU, several at a time: one batch of matmuls for gate and up, one for down.

mod staged;

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use larder_core::{ComputeStage, ExpertId, ExpertLayout, ExpertPart, Geometry, STAGED_ROWS, StepMemory};
use larder_kernels::{InputBuffer, Product, WeightMatrix};
use larder_os::timeline;
use smallvec::SmallVec;

use crate::compute::{ComputeContext, ExpertInput};
use crate::experts::{MoeCall, Routed, route_on};
use staged::StagedInputs;

/// The most rows of inputs, one for each token of an expert, that are computed at a time: enough for all experts of a
/// few tokens, and several times the tokens for which a kernel decodes a weight once, so that more would not be faster.
pub const PART_ROWS: usize = 256;

/// The least number of values that a task adds up.
const TASK_VALUES: usize = 16 * 1024;

/// Computes the experts of MoE calls, one call after the other. Its buffers are kept from call to call.
pub struct ExpertWorkspace {
    compute: Arc<ComputeContext>,
    /// The quantised input of the call.
    x: InputBuffer,
    /// `[tokens · k, hidden]`: the input times each routing weight, where that scales the input.
    scaled: Vec<f32>,
    /// The quantised inputs of the last matmuls of a part.
    inner: InputBuffer,
    /// `[rows of a part, inter]`, as `up`.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[tokens · k, hidden]`, in the order of `places`: kept separately until all are computed, so that the sum does
    /// not depend on the order in which experts arrive.
    outputs: Vec<f32>,
    /// For each place of the call, its row in `outputs`.
    output_rows: Vec<u32>,
    /// The places `token · k + rank` of the call, by expert.
    places: Vec<u32>,
    /// For each expert the end of its places; they begin where those of the expert before end.
    ends: Vec<u32>,
    /// For each row of a part, its row in `x`.
    picks: Vec<u32>,
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
        let (x, inner) = (InputBuffer::new(), InputBuffer::new());
        let (scaled, gate, up, outputs) = Default::default();
        let (output_rows, places, ends, picks, staged) = Default::default();
        ExpertWorkspace { compute, x, scaled, inner, gate, up, outputs, output_rows, places, ends, picks, staged }
    }

    /// The most bytes of the buffers; `scales_input` if the routing weight scales the input.
    pub fn memory(geometry: &Geometry, scales_input: bool) -> StepMemory {
        let Geometry { hidden, inter, top_k, experts, .. } = *geometry;
        let (float, place) = (size_of::<f32>(), size_of::<u32>());
        let input = InputBuffer::bytes(hidden);
        let inputs = if scales_input { top_k * (hidden * float + input) } else { input };
        let row = 2 * inter * float + InputBuffer::bytes(inter) + place;
        StepMemory {
            bytes_per_token: inputs + top_k * (hidden * float + 2 * place),
            fixed_bytes: PART_ROWS * row + experts * place + StagedInputs::bytes(STAGED_ROWS, inter),
        }
    }

    /// As [`route`](crate::route), by the threads that compute.
    pub fn route(&self, call: &MoeCall) -> Routed {
        route_on(call, &self.compute.pool)
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
        let (hidden, k) = (call.x.len() / call.tokens, call.gate.top_k);
        let quantise = layouts.any(ExpertLayout::quantises_input) && !self.compute.exact;
        self.reserve_outputs(call, routed);
        if call.gate.scales_input {
            let scaled = grown(&mut self.scaled, routed.ids.len() * hidden);
            self.x.make_on(&self.compute.pool, scaled, hidden, quantise, &|first, rows| {
                for (place, scaled) in (first..).zip(rows.chunks_exact_mut(hidden)) {
                    let (x, weight) = (&call.x[place / k * hidden..][..hidden], routed.weights[place]);
                    scaled.iter_mut().zip(x).for_each(|(scaled, x)| *scaled = x * weight);
                }
            });
        } else {
            self.x.fill_on(&self.compute.pool, call.x, hidden, quantise);
        }
        self.sort_places(routed);
        self.staged.clear();
    }

    /// Reserves the outputs of a call. Enough, without [`begin`](Self::begin), for a call whose experts are all
    /// computed elsewhere (a device, a worker) and arrive through [`put`](Self::put).
    pub fn reserve_outputs(&mut self, call: &MoeCall, routed: &Routed) {
        grown(&mut self.outputs, routed.ids.len() * (call.x.len() / call.tokens));
        self.output_rows.clear();
        self.output_rows.extend(0..routed.ids.len() as u32);
    }

    /// Computes some of the call's experts, given with their bytes, for all tokens that chose them. `routed` is what
    /// the call was begun with.
    pub fn compute(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout, group: &[(ExpertId, &[u8])]) {
        self.compute_stage(call, routed, layout, ComputeStage::Whole, group);
    }

    /// One stage of [`compute`](Self::compute). Experts that are computed in two stages have [`STAGED_ROWS`] rows
    /// together at most.
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
        let (mut part, mut rows) = (SmallVec::<[ExpertRows; 16]>::with_capacity(group.len()), 0);
        for &(expert, data) in group {
            let mut at = self.places_of(expert);
            while !at.is_empty() {
                let take = at.len().min(PART_ROWS);
                if rows + take > PART_ROWS {
                    self.compute_part(call, layout, stage, &mut part);
                    part.clear();
                    rows = 0;
                }
                part.push(ExpertRows { expert, data, at: at.start..at.start + take });
                (rows, at.start) = (rows + take, at.start + take);
            }
        }
        if rows > 0 {
            self.compute_part(call, layout, stage, &mut part);
        }
    }

    /// Computes a stage of the rows of a part, which it sorts as the outputs are.
    fn compute_part(&mut self, call: &MoeCall, layout: &ExpertLayout, stage: ComputeStage, part: &mut [ExpertRows]) {
        part.sort_unstable_by_key(|rows| rows.at.start);
        match stage {
            ComputeStage::Whole => {
                self.compute_inputs(call, layout, part);
                self.compute_rest(call, layout, part);
            }
            ComputeStage::Inputs => {
                self.compute_inputs(call, layout, part);
                let values = part.iter().map(|rows| (rows.expert, rows.at.len() * layout.up.rows));
                let [gated, all] = values_of(layout, self.picks.len());
                self.staged.keep(values, &self.gate[..gated], &self.up[..all]);
            }
            ComputeStage::Rest => {
                self.gate.clear();
                self.up.clear();
                part.iter().for_each(|rows| self.staged.take(rows.expert, &mut self.gate, &mut self.up));
                self.compute_rest(call, layout, part);
            }
        }
    }

    /// The matmuls of a part with the input, in one batch: gate and up.
    fn compute_inputs(&mut self, call: &MoeCall, layout: &ExpertLayout, part: &[ExpertRows]) {
        let k = call.gate.top_k as u32;
        let row_of = |place: &u32| if call.gate.scales_input { *place } else { place / k };
        self.picks.clear();
        self.picks.extend(part.iter().flat_map(|rows| &self.places[rows.at.clone()]).map(row_of));
        let total = self.picks.len();
        let inter = layout.up.rows;
        let [gated, all] = values_of(layout, total);
        let (mut gates, mut ups, mut picks) = (grown(&mut self.gate, gated), grown(&mut self.up, all), &self.picks[..]);
        let input = if call.gate.scales_input { &self.scaled[..call.x.len() * call.gate.top_k] } else { call.x };
        let x = self.x.of(input, layout.up.cols);
        let mut batch: SmallVec<[Product; 16]> = SmallVec::with_capacity(2 * part.len());
        for ExpertRows { data, at, .. } in part {
            let pick = Some(front(&mut picks, at.len()));
            if let Some(gate) = &layout.gate {
                let out = front_mut(&mut gates, at.len() * inter);
                batch.push(Product { weights: weights(gate, data), x, pick, out });
            }
            let out = front_mut(&mut ups, at.len() * inter);
            batch.push(Product { weights: weights(&layout.up, data), x, pick, out });
        }
        self.compute.matmul(&mut batch);
        if let Some(squares) = &self.compute.input_squares {
            let mut picks = &self.picks[..];
            part.iter().for_each(|rows| {
                squares.add(call.layer, rows.expert, ExpertInput::Hidden, &x, front(&mut picks, rows.at.len()));
            });
        }
    }

    /// The rest, with the matmuls of the input in `gate` and `up`: biases, activation and the last matmul, whose
    /// outputs are written where they stay.
    fn compute_rest(&mut self, call: &MoeCall, layout: &ExpertLayout, part: &[ExpertRows]) {
        let ExpertWorkspace { compute, inner, gate, up, outputs, .. } = self;
        let (inter, hidden, act) = (layout.up.rows, layout.down.rows, call.act);
        let quantise = !layout.down.kind.is_float() && !compute.exact;
        let bias = layout.bias.as_ref();
        let [gated, all] = values_of(layout, part.iter().map(|rows| rows.at.len()).sum());
        let (gate, up) = (&mut gate[..gated], &mut up[..all]);
        let x = match (&layout.gate, bias) {
            (Some(_), None) => inner.make_on(&compute.pool, gate, inter, quantise, &|first, gate| {
                act.combine(gate, &up[first * inter..][..gate.len()]);
            }),
            (Some(_), Some(bias)) => {
                add_biases(compute, &bias.up, part, up);
                inner.make_on(&compute.pool, gate, inter, quantise, &|first, gate| {
                    bias.gate.iter().for_each(|bias| add_bias(bias, part, first, gate));
                    act.combine(gate, &up[first * inter..][..gate.len()]);
                })
            }
            (None, bias) => inner.make_on(&compute.pool, up, inter, quantise, &|first, up| {
                bias.iter().for_each(|bias| add_bias(&bias.up, part, first, up));
                act.apply(up);
            }),
        };
        let (mut rest, mut end, mut row) = (&mut outputs[..], 0, 0);
        let mut batch: SmallVec<[Product; 16]> = SmallVec::with_capacity(part.len());
        for ExpertRows { data, at, .. } in part {
            front_mut(&mut rest, (at.start - end) * hidden);
            let (out, x) = (front_mut(&mut rest, at.len() * hidden), x.part(row..row + at.len()));
            batch.push(Product { weights: weights(&layout.down, data), x, pick: None, out });
            (end, row) = (at.end, row + at.len());
        }
        compute.matmul(&mut batch);
        drop(batch);
        if let Some(bias) = bias {
            for ExpertRows { data, at, .. } in part {
                let rows = &mut outputs[at.start * hidden..at.end * hidden];
                compute.pool.run_chunks(rows, hidden, &|_, row| add_values(&bias.down, data, row));
            }
        }
        if let Some(squares) = &compute.input_squares {
            let rows: Vec<u32> = (0..x.tokens() as u32).collect();
            let mut rows = &rows[..];
            part.iter().for_each(|part| {
                squares.add(call.layer, part.expert, ExpertInput::Inner, &x, front(&mut rows, part.at.len()));
            });
        }
    }

    /// Stores the output `[hidden]` of a place, `token · k + rank`, whose expert was computed elsewhere.
    pub fn put(&mut self, place: usize, output: &[f32]) {
        self.outputs[self.output_rows[place] as usize * output.len()..][..output.len()].copy_from_slice(output);
    }

    /// The output of a place.
    pub fn output(&self, place: usize, hidden: usize) -> &[f32] {
        &self.outputs[self.output_rows[place] as usize * hidden..][..hidden]
    }

    /// The weighted sum of each token's experts, in the order of their rank: `out [tokens, hidden]`.
    pub fn sum(&self, call: &MoeCall, routed: &Routed, out: &mut [f32]) {
        let (k, scales_input, hidden) = (call.gate.top_k, call.gate.scales_input, out.len() / call.tokens);
        let tokens = TASK_VALUES.div_ceil(k * hidden);
        let some = |task: usize, sums: &mut [f32]| {
            sums.fill(0.0);
            for (token, sum) in (task * tokens..).zip(sums.chunks_exact_mut(hidden)) {
                let chosen = (token * k..(token + 1) * k).filter(|place| routed.ids[*place] != ExpertId::NONE);
                for place in chosen {
                    let weight = if scales_input { 1.0 } else { routed.weights[place] };
                    self.add_weighted(weight, place, sum);
                }
            }
        };
        let ComputeContext { clocks, pool, .. } = &*self.compute;
        clocks.shared(pool, out.len(), || pool.run_chunks(out, tokens * hidden, &some));
    }

    /// Adds the output of one place, `token · k + rank`, times its weight to `out [hidden]`.
    pub fn add(&self, call: &MoeCall, routed: &Routed, place: usize, out: &mut [f32]) {
        self.add_weighted(if call.gate.scales_input { 1.0 } else { routed.weights[place] }, place, out);
    }

    fn add_weighted(&self, weight: f32, place: usize, out: &mut [f32]) {
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
            self.output_rows[place as usize] = *next;
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

/// Values of gate, if there is one, and of up for this many rows.
fn values_of(layout: &ExpertLayout, rows: usize) -> [usize; 2] {
    let all = rows * layout.up.rows;
    [if layout.gate.is_some() { all } else { 0 }, all]
}

/// The front of a buffer, which never shrinks: to grow again would clear it.
fn grown(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(len.max(buffer.len()), 0.0);
    &mut buffer[..len]
}

fn weights<'a>(part: &ExpertPart, data: &'a [u8]) -> WeightMatrix<'a> {
    let ExpertPart { kind, order, rows, cols, .. } = *part;
    WeightMatrix { kind, order, rows, cols, scale: part.scale(data), bytes: part.of(data) }
}

/// Adds each expert's bias to its rows of a part.
fn add_biases(compute: &ComputeContext, bias: &ExpertPart, part: &[ExpertRows], rows: &mut [f32]) {
    let some = TASK_VALUES.div_ceil(bias.cols);
    compute.pool.run_chunks(rows, some * bias.cols, &|task, rows| add_bias(bias, part, task * some, rows));
}

/// Adds each expert's bias to some rows of a part, from number `first` on.
fn add_bias(bias: &ExpertPart, part: &[ExpertRows], first: usize, rows: &mut [f32]) {
    let of_rows = part.iter().flat_map(|rows| iter::repeat_n(rows.data, rows.at.len()));
    of_rows.skip(first).zip(rows.chunks_exact_mut(bias.cols)).for_each(|(data, row)| add_values(bias, data, row));
}

/// Adds the values of a bias, which is f32, to a row.
fn add_values(bias: &ExpertPart, data: &[u8], row: &mut [f32]) {
    let values = bias.of(data).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    row.iter_mut().zip(values).for_each(|(value, bias)| *value += bias);
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
