//! Double of a device that computes chains of operations.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, AttentionTask, DistanceBias, InputBuffer, narrow, quantise_row, tanh};

use super::best::best_of;
use super::{AttentionDouble, ProductsDouble};
use crate::device::{
    BEST_FOUND, DeviceAttention, DeviceHeads, DeviceKvView, DeviceOps, DeviceProduct, DeviceProducts, DeviceRotation,
    DeviceRows, GateOrder, HeadNorm, HeadRest, NormGate, StateSpan,
};
use crate::error::{ModelError, Result};
use crate::nn::{Activation, GateFunction, Rotary, layer_norm_row, rms_row};

/// Double of [`DeviceOps`]: computes each operation at once, with the weights and the KV cache of two other doubles.
pub struct OpsDouble {
    pub(super) products: Arc<ProductsDouble>,
    pub(super) attention: Arc<AttentionDouble>,
    /// Every n-th draw is of another token; 0 for none.
    pub(super) wrong_draws: u64,
    state: Mutex<Inner>,
}

#[derive(Default)]
pub(super) struct Inner {
    pub(super) kept: Vec<Vec<f32>>,
    pub(super) rows: HashMap<usize, (DeviceRows, Vec<f32>)>,
    next_id: usize,
    /// The id of the first result behind the last chain that was received, or the last layer that began; those before it are valid too.
    begun_at: usize,
    /// The first error of the chain.
    pub(super) failed: Option<ModelError>,
    /// The last choice of rows.
    pub(super) choice: Vec<Vec<u32>>,
    pub(super) received: u64,
    /// The rows that were copied back last, and the number of all copies so far.
    pub(super) copies: VecDeque<Vec<f32>>,
    pub(super) copied: usize,
    pub(super) draws: u64,
    /// The token that was drawn last.
    pub(super) drawn: Option<u32>,
}

impl Inner {
    pub(super) fn push(&mut self, width: usize, values: Vec<f32>) -> DeviceRows {
        let rows = DeviceRows { id: self.next_id, rows: values.len() / width, width };
        self.rows.insert(rows.id, (rows, values));
        self.next_id += 1;
        rows
    }

    fn begin_chain(&mut self) {
        let (begun_at, next_id) = (self.begun_at, self.next_id);
        self.rows.retain(|id, _| *id >= begun_at);
        self.begun_at = next_id;
    }

    pub(super) fn values(&self, rows: DeviceRows) -> &[f32] {
        let (known, values) = self.rows.get(&rows.id).expect("rows of this chain or the one before");
        assert_eq!(*known, rows);
        values
    }
}

impl OpsDouble {
    /// A device with these weights and this KV cache.
    pub fn new(products: Arc<ProductsDouble>, attention: Arc<AttentionDouble>) -> Self {
        OpsDouble { products, attention, wrong_draws: 0, state: Mutex::default() }
    }

    /// Every n-th draw is of another token.
    pub fn drawing_wrong(self, every: u64) -> Self {
        OpsDouble { wrong_draws: every, ..self }
    }

    /// The values of rows, without a wait.
    pub fn peek(&self, rows: DeviceRows) -> Vec<f32> {
        self.lock().values(rows).to_vec()
    }

    /// Number of chains whose results were received.
    pub fn chains(&self) -> u64 {
        self.lock().received
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queries, keys and values of new tokens, normalised and rotated.
    pub(super) fn changed(
        &self,
        heads: &DeviceHeads,
        tasks: &[&AttentionArgs<DeviceKvView>],
    ) -> (Vec<f32>, Vec<f32>, Option<Vec<f32>>) {
        let state = self.lock();
        let width = tasks.first().map_or(1, |args| args.keys.width);
        let count = tasks.first().map_or(1, |args| args.heads);
        let clip = |values: &mut [f32]| {
            heads
                .clip
                .iter()
                .for_each(|limit| values.iter_mut().for_each(|value| *value = value.clamp(-limit, *limit)));
        };
        let change = |mut values: Vec<f32>, heads_of_token: usize, which: usize| {
            for (token, row) in values.chunks_exact_mut(heads_of_token * width).enumerate() {
                if let Some(HeadNorm { weights, eps, whole, width: some, behind_rotation: false }) = heads.norm
                    && let Some(weight) = weights[which]
                {
                    let each = if whole { row.len() } else { width };
                    let normalised = |part: &mut [f32]| {
                        let some = some.unwrap_or(part.len());
                        rms_row(&mut part[..some], &state.kept[weight], eps);
                    };
                    row.chunks_exact_mut(each).for_each(normalised);
                }
                clip(row);
                for head in row.chunks_exact_mut(width) {
                    if let Some(DeviceRotation { turns, first, dim, interleaved }) = heads.rotation {
                        let rotary = Rotary { dim, interleaved, table: 0 };
                        rotary.rotate_by(&mut head[first..], &turns[token * (dim / 2)..][..dim / 2]);
                    }
                    if let Some(HeadNorm { weights, eps, behind_rotation: true, .. }) = heads.norm {
                        let ones = vec![1.0; width];
                        rms_row(head, weights[which].map_or(&ones, |weight| &state.kept[weight]), eps);
                    }
                }
            }
            values
        };
        let queries = match heads.rest {
            None => state.values(heads.queries).to_vec(),
            Some(HeadRest { rows, first }) => {
                let (split, step) = (heads.queries.width / count, rows.width / count);
                let of_rest = state.values(rows).chunks_exact(step);
                let both = state.values(heads.queries).chunks_exact(split).zip(of_rest);
                both.flat_map(|(front, rest)| [front, &rest[first..][..width - split]].concat()).collect()
            }
        };
        let keys = change(state.values(heads.keys).to_vec(), heads.keys.width / width, 1);
        let mut queries = change(queries, count, 0);
        for (row, scale) in queries.chunks_exact_mut(count * width).zip(heads.scales) {
            row.iter_mut().for_each(|value| *value *= scale);
        }
        let values = heads.values.map(|values| {
            let mut values = state.values(values).to_vec();
            clip(&mut values);
            if let Some(eps) = heads.value_norm {
                let width = tasks[0].values.width;
                values.chunks_exact_mut(width).for_each(|head| rms_row(head, &vec![1.0; width], eps));
            }
            if heads.value_factor != 1.0 {
                values.iter_mut().for_each(|value| *value = *value * heads.value_factor + 0.0);
            }
            values
        });
        (queries, keys, values)
    }

    /// Writes the rows of the new tokens of a task to its pages.
    pub(super) fn write(&self, view: &DeviceKvView, args: &AttentionArgs<DeviceKvView>, rows: &[f32]) -> Result<()> {
        for (seen, row) in args.seen.iter().zip(rows.chunks_exact(rows.len() / args.seen.len())) {
            let (position, shape) = (seen.end - 1, self.attention.shape(view.pages[0]));
            let page = view.pages[position / shape.positions - view.first_page];
            let mut bytes = vec![0; shape.heads * shape.row_bytes];
            let heads = row.chunks_exact(row.len() / shape.heads).zip(bytes.chunks_exact_mut(shape.row_bytes));
            heads.for_each(|(head, out)| match shape.kind {
                NumberFormat::Q8_0 => quantise_row(head, out),
                kind => narrow(kind, head, out),
            });
            self.attention.append(page, position % shape.positions, &bytes)?;
        }
        Ok(())
    }

    /// Takes in the tokens of spans: `step` gets a span, its state and consecutive rows, and returns the part of the state that it changed.
    pub(super) fn advance(
        &self,
        spans: &[StateSpan],
        mut step: impl FnMut(&StateSpan, &mut [f32], Range<usize>) -> Range<usize>,
    ) {
        for span in spans {
            let (mut state, mut start) = (self.attention.floats(span.page), 0);
            let ends = span.copies.iter().map(|(end, page)| (*end, *page));
            for (end, page) in ends.chain([(span.tokens, span.page)]) {
                let changed = step(span, &mut state, span.first_row + start..span.first_row + end);
                self.attention.set_floats(page, changed.start, &state[changed]);
                start = end;
            }
        }
    }

    /// Adds a result to the chain; after an error it is not a number.
    pub(super) fn push(&self, width: usize, mut values: Vec<f32>, computed: Result<()>) -> DeviceRows {
        let mut state = self.lock();
        if let Err(error) = computed {
            values.fill(f32::NAN);
            state.failed.get_or_insert(error);
        }
        state.push(width, values)
    }
}

impl DeviceOps for OpsDouble {
    fn keep(&self, values: &[f32]) -> Result<usize> {
        let mut state = self.lock();
        state.kept.push(values.to_vec());
        Ok(state.kept.len() - 1)
    }

    fn send(&self, values: &[f32], width: usize) -> Result<DeviceRows> {
        Ok(self.lock().push(width, values.to_vec()))
    }

    fn begin_layer(&self) {
        self.lock().begin_chain();
    }

    fn part(&self, x: DeviceRows, first: usize, rows: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let values = state.values(x)[first * x.width..][..rows * x.width].to_vec();
        Ok(state.push(x.width, values))
    }

    fn attend(&self, tasks: &[&AttentionArgs<DeviceKvView>]) -> Result<DeviceRows> {
        let outputs = |args: &AttentionArgs<DeviceKvView>| args.seen.len() * args.heads * args.values.width;
        let mut values = vec![0.0; tasks.iter().map(|args| outputs(args)).sum()];
        let mut rest = &mut values[..];
        let mut own = Vec::new();
        for args in tasks {
            let (out, others) = rest.split_at_mut(outputs(args));
            let args = args.with_kv(args.keys.clone(), args.values.clone());
            own.push(AttentionTask { args, out });
            rest = others;
        }
        let computed = self.attention.attend(&mut own);
        Ok(self.push(tasks.first().map_or(1, |args| args.heads * args.values.width), values, computed))
    }

    fn attend_new(&self, heads: &DeviceHeads, tasks: &[&AttentionArgs<DeviceKvView>]) -> Result<DeviceRows> {
        let queries = self.write_new(heads, tasks)?;
        let (width, mut rest) = (queries.len() / heads.queries.rows, &queries[..]);
        let with_queries = tasks.iter().map(|args| rest.split_off(..args.seen.len() * width).unwrap_or_default());
        let with_queries: Vec<&[f32]> = with_queries.collect();
        let kept = heads.bias.map_or_else(Vec::new, |bias| self.lock().kept[bias].clone());
        let tasks: Vec<_> = (tasks.iter().zip(&with_queries))
            .map(|(args, queries)| {
                let bias = args.bias.map(|bias| DistanceBias { values: &kept, ..bias });
                AttentionArgs { queries, bias, ..args.with_kv(args.keys.clone(), args.values.clone()) }
            })
            .collect();
        self.attend(&tasks.iter().collect::<Vec<_>>())
    }

    fn multiply(&self, x: DeviceRows, weights: &[usize]) -> Result<Vec<DeviceRows>> {
        let one = |weights: &usize| {
            let (rows, quantised) = self.products.shape(*weights);
            let (mut buffer, values) = (InputBuffer::new(), self.lock().values(x).to_vec());
            let inputs = buffer.fill(&values, x.width, quantised);
            let mut out = vec![0.0; x.rows * rows];
            let product = DeviceProduct { weights: *weights, pick: None, out: &mut out };
            let computed = self.products.multiply(&inputs, &mut [product]);
            self.push(rows, out, computed)
        };
        Ok(weights.iter().map(one).collect())
    }

    fn multiply_heads(&self, x: DeviceRows, weights: &[usize]) -> Result<DeviceRows> {
        let step = x.width / weights.len();
        let (rows, quantised) = self.products.shape(weights[0]);
        let (mut all, mut computed) = (vec![0.0; x.rows * weights.len() * rows], Ok(()));
        for (head, id) in weights.iter().enumerate() {
            let cols = self.products.cols(*id);
            let own = self
                .lock()
                .values(x)
                .chunks_exact(x.width)
                .flat_map(|row| row[head * step..][..cols].to_vec())
                .collect::<Vec<_>>();
            let (mut buffer, mut out) = (InputBuffer::new(), vec![0.0; x.rows * rows]);
            let inputs = buffer.fill(&own, cols, quantised);
            let product = DeviceProduct { weights: *id, pick: None, out: &mut out };
            computed = computed.and(self.products.multiply(&inputs, &mut [product]));
            for (token, values) in out.chunks_exact(rows).enumerate() {
                all[(token * weights.len() + head) * rows..][..rows].copy_from_slice(values);
            }
        }
        Ok(self.push(weights.len() * rows, all, computed))
    }

    fn combine(&self, act: Activation, gate: DeviceRows, up: DeviceRows) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(gate).to_vec();
        act.combine(&mut values, state.values(up));
        Ok(state.push(gate.width, values))
    }

    fn activate(&self, act: Activation, x: DeviceRows) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(x).to_vec();
        act.apply(&mut values);
        Ok(state.push(x.width, values))
    }

    fn bend(&self, x: DeviceRows, cap: f32) -> Result<DeviceRows> {
        let mut state = self.lock();
        let values = state.values(x).iter().map(|v| tanh(*v / cap) * cap).collect();
        Ok(state.push(x.width, values))
    }

    fn find_best(&self, x: DeviceRows, best: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let found = state.values(x).chunks_exact(x.width).flat_map(|row| best_of(row, best)).collect();
        Ok(state.push(1 + 2 * BEST_FOUND, found))
    }

    fn take_out(&self, x: DeviceRows, places: &[u32]) -> Result<DeviceRows> {
        let mut state = self.lock();
        let rows = &mut state.rows.get_mut(&x.id).expect("rows of this chain or the one before").1;
        let take = |row: &mut [f32]| {
            let take = |at: &u32| row.get_mut(*at as usize).map(|value| std::mem::replace(value, f32::NEG_INFINITY));
            places.iter().map(take).map(Option::unwrap_or_default).collect::<Vec<_>>()
        };
        let taken: Vec<f32> = rows.chunks_exact_mut(x.width).flat_map(take).collect();
        Ok(state.push(places.len(), taken))
    }

    fn gate(&self, x: DeviceRows, gates: DeviceRows, function: GateFunction, heads: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let (of_head, per_head) = (x.width / heads, gates.width / heads);
        let at = |i: usize| i / of_head * per_head + if per_head == 1 { 0 } else { i % of_head };
        let gated = |(i, x): (usize, &f32)| x * function.of(state.values(gates)[at(i)]);
        let values = state.values(x).iter().enumerate().map(gated).collect();
        Ok(state.push(x.width, values))
    }

    fn norm_gate(&self, x: DeviceRows, gates: DeviceRows, norm: &NormGate) -> Result<DeviceRows> {
        let NormGate { weight, width, eps, function, order } = *norm;
        let mut state = self.lock();
        let mut values = state.values(x).to_vec();
        let gate = |values: &mut [f32]| {
            values.iter_mut().zip(state.values(gates)).for_each(|(x, gate)| *x *= function.of(*gate));
        };
        let normalise = |values: &mut [f32]| {
            let weights = state.kept[weight].chunks_exact(width).cycle();
            values.chunks_exact_mut(width).zip(weights).for_each(|(part, weight)| rms_row(part, weight, eps));
        };
        match order {
            GateOrder::NormFirst => {
                normalise(&mut values);
                gate(&mut values);
            }
            GateOrder::GateFirst => {
                gate(&mut values);
                normalise(&mut values);
            }
        }
        Ok(state.push(x.width, values))
    }

    fn scale(&self, x: DeviceRows, factor: f32) -> Result<DeviceRows> {
        let mut state = self.lock();
        let scaled = state.values(x).iter().map(|v| v * factor + 0.0).collect();
        Ok(state.push(x.width, scaled))
    }

    fn scale_columns(&self, x: DeviceRows, factors: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let scaled = state.values(x).iter().zip(state.kept[factors].iter().cycle()).map(|(x, y)| x * y).collect();
        Ok(state.push(x.width, scaled))
    }

    fn add(&self, x: DeviceRows, y: DeviceRows, factor: f32) -> Result<DeviceRows> {
        let mut state = self.lock();
        assert_eq!((x.rows, x.width), (y.rows, y.width));
        let scaled = |v: f32| if factor == 1.0 { v } else { v * factor + 0.0 };
        let sum = state.values(x).iter().zip(state.values(y)).map(|(x, y)| x + scaled(*y)).collect();
        Ok(state.push(x.width, sum))
    }

    fn add_norm(&self, x: DeviceRows, y: DeviceRows, factor: f32, weight: usize, eps: f64) -> Result<[DeviceRows; 2]> {
        let sum = self.add(x, y, factor)?;
        Ok([sum, self.rms_norm(sum, weight, eps)?])
    }

    fn add_row(&self, x: DeviceRows, row: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let sum = state.values(x).iter().zip(state.kept[row].iter().cycle()).map(|(x, y)| x + y).collect();
        Ok(state.push(x.width, sum))
    }

    fn rms_norm(&self, x: DeviceRows, weight: usize, eps: f64) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(x).to_vec();
        values.chunks_exact_mut(x.width).for_each(|row| rms_row(row, &state.kept[weight], eps));
        Ok(state.push(x.width, values))
    }

    fn layer_norm(&self, x: DeviceRows, [weight, bias]: [usize; 2], eps: f64) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(x).to_vec();
        let rows = values.chunks_exact_mut(x.width);
        rows.for_each(|row| layer_norm_row(row, &state.kept[weight], &state.kept[bias], eps));
        Ok(state.push(x.width, values))
    }

    fn receive(&self, wanted: &mut [(DeviceRows, &mut [f32])]) -> Result<()> {
        let mut state = self.lock();
        state.received += 1;
        if state.failed.is_none() {
            wanted.iter_mut().for_each(|(rows, out)| out.copy_from_slice(state.values(*rows)));
        }
        state.begin_chain();
        state.failed.take().map_or(Ok(()), Err)
    }
}
