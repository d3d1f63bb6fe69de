//! Operations on recurrent states, which are in pages of the KV cache.

use std::sync::Arc;

use larder_model::{
    ChannelDecay, ChannelScan, Convolution, Decay, Delta, GateFunction, GateOrder, HeadConvolution, NormGate,
    RecurrentOps, Rows, Scan, StateSpan,
};

use super::{GpuOps, State};
use crate::attention::GpuAttention;
use crate::error::{GpuError, Result};
use crate::expert_kernels::BLOCK;
use crate::launch_queue::LaunchQueue;
use crate::launches::{
    ChannelScanArgs, ConvolutionArgs, DeltaArgs, HeadConvolutionArgs, RowCopy, ScanArgs, StateArgs, word,
};

/// Where a kernel finds the spans of a step, and by token the states that get copies.
#[derive(Clone, Copy)]
struct Staged {
    spans: u64,
    copies: u64,
}

/// States of spans.
pub(super) struct States<'a> {
    spans: &'a [StateSpan],
    attention: &'a GpuAttention,
    /// Rows of the step, which are those of all spans.
    rows: usize,
    /// Values of a state.
    values: usize,
}

impl<'a> States<'a> {
    /// The states of these spans, which all have one size.
    pub fn of(spans: &'a [StateSpan], attention: &'a GpuAttention) -> Result<Self> {
        let bytes = spans.first().map_or(Ok(0), |span| attention.page(span.page).map(|(_, bytes)| bytes))?;
        let rows = spans.iter().map(|span| span.tokens).sum();
        Ok(States { spans, attention, rows, values: bytes / 4 })
    }

    /// The place of the recurrence in a state.
    fn recurrence_at(&self) -> usize {
        self.spans.first().map_or(0, |span| span.recurrence_at)
    }

    /// Whether all states have `values` values from this place on.
    fn have(&self, recurrence_at: usize, values: usize) -> bool {
        let fits = |span: &StateSpan| span.recurrence_at == recurrence_at;
        self.spans.iter().all(fits) && self.values == recurrence_at + values
    }

    /// The address of a state.
    fn address(&self, page: usize) -> Result<u64> {
        let (at, bytes) = self.attention.page(page)?;
        if bytes == 4 * self.values {
            Ok(at)
        } else {
            let values = self.values;
            Err(GpuError::Unsupported(format!("a page of {bytes} bytes is no state of {values} values")))
        }
    }

    /// Checks that the spans have all rows, in order.
    fn check(&self) -> Result<()> {
        let mut end = 0;
        let is_next = |span: &StateSpan| {
            let copies = span.copies.iter().all(|(taken_in, _)| (1..span.tokens).contains(taken_in));
            let follows = span.first_row == end && span.tokens > 0;
            end += span.tokens;
            follows && copies
        };
        if self.spans.iter().all(is_next) && end == self.rows {
            Ok(())
        } else {
            Err(GpuError::Unsupported(format!("{:?} are not {} rows", self.spans, self.rows)))
        }
    }

    /// Stages `args`, the spans and the copies, and returns the address of the first.
    fn stage<const BYTES: usize>(&self, queue: &LaunchQueue, args: impl FnOnce(Staged) -> [u8; BYTES]) -> Result<u64> {
        self.check()?;
        // Before anything is staged, which takes the lock of the queue.
        let mut copies = vec![0_u64; self.rows];
        let mut spans = Vec::with_capacity(self.spans.len());
        for span in self.spans {
            let state = self.address(span.page)?;
            spans.push(StateArgs { state, first_row: word(span.first_row)?, tokens: word(span.tokens)? });
            for (taken_in, page) in &span.copies {
                copies[span.first_row + taken_in - 1] = self.address(*page)?;
            }
        }
        let spans_at = BYTES.next_multiple_of(16);
        let copies_at = spans_at + self.spans.len() * StateArgs::BYTES;
        queue.stage(copies_at + 8 * self.rows, |at, bytes| {
            let staged = Staged { spans: at + spans_at as u64, copies: at + copies_at as u64 };
            bytes[..BYTES].copy_from_slice(&args(staged));
            let (of_spans, of_copies) = bytes[spans_at..].split_at_mut(copies_at - spans_at);
            for (span, out) in spans.iter().zip(of_spans.chunks_exact_mut(StateArgs::BYTES)) {
                out.copy_from_slice(&span.to_bytes());
            }
            of_copies.copy_from_slice(bytemuck::cast_slice(&copies));
            Ok(())
        })
    }
}

impl State {
    /// A convolution of the tokens of spans.
    pub(super) fn convolve(
        &mut self,
        queue: &Arc<LaunchQueue>,
        convolution: &Convolution,
        states: &States,
    ) -> Result<Rows> {
        let Convolution { inputs, taps, bias, width, dilation, silu } = *convolution;
        let channels = convolution.channels();
        let fits = (1..=Convolution::MAX_INPUTS).contains(&inputs.len())
            && inputs.iter().all(|input| input.rows == states.rows)
            && states.spans.iter().all(|span| span.recurrence_at == (width - 1) * dilation * channels);
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {inputs:?} cannot be convolved with {width} taps")));
        }
        let (mut addresses, mut widths) = ([0; Convolution::MAX_INPUTS], [0; Convolution::MAX_INPUTS]);
        for ((input, at), width) in inputs.iter().zip(&mut addresses).zip(&mut widths) {
            (*at, *width) = (self.at(*input)?, word(input.width)?);
        }
        let (taps, bias) = (self.kept(taps)?, bias.map_or(Ok(0), |bias| self.kept(bias))?);
        let (result, out) = self.result(states.rows, channels)?;
        let (channels, width, dilation) = (word(channels)?, word(width)?, word(dilation)?);
        let list = states.stage(queue, |Staged { spans, copies }| {
            let inputs = addresses;
            ConvolutionArgs { inputs, taps, bias, out, spans, copies, widths, channels, width, dilation, silu }
                .to_bytes()
        })?;
        self.launches.convolve(list, channels, word(states.spans.len())?)?;
        Ok(result)
    }

    /// Writes the recurrences of states and of their copies.
    pub(super) fn write_recurrences(
        &mut self,
        queue: &Arc<LaunchQueue>,
        values: &[f32],
        states: &States,
    ) -> Result<()> {
        let of_span = |span: &StateSpan| {
            let copies = span.copies.iter().map(|(_, page)| *page);
            copies.chain([span.page]).map(|page| (page, span.recurrence_at)).collect::<Vec<_>>()
        };
        let pages: Vec<(usize, usize)> = states.spans.iter().flat_map(of_span).collect();
        let each = values.len() / pages.len().max(1);
        if each * pages.len() != values.len() || !states.have(states.recurrence_at(), each) {
            return Err(GpuError::Unsupported(format!("{} values are no recurrences of {pages:?}", values.len())));
        }
        let staged = queue.stage(size_of_val(values), |_, bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(values));
            Ok(())
        })?;
        for (number, (page, at)) in pages.into_iter().enumerate() {
            let (from, to) = (staged + (4 * number * each) as u64, states.address(page)? + 4 * at as u64);
            let (bytes, count, heads) = (4 * each, 1, 1);
            self.launches.copy_rows(&RowCopy {
                from,
                from_head: 0,
                from_row: 0,
                to,
                to_head: 0,
                bytes,
                count,
                heads,
            })?;
        }
        Ok(())
    }

    /// The convolutions of queries and keys of the tokens of spans.
    pub(super) fn convolve_heads(
        &mut self,
        queue: &Arc<LaunchQueue>,
        convolution: &HeadConvolution,
        states: &States,
    ) -> Result<[Rows; 2]> {
        let HeadConvolution { queries, keys, delayed, taps, bias, delayed_bias, head_dim, widths } = *convolution;
        let (inputs, channels) = ([queries, keys, delayed], queries.width + keys.width);
        let kept = (widths[0] + widths[1]).saturating_sub(2);
        let fits = inputs.iter().all(|rows| rows.rows == states.rows)
            && widths.iter().all(|width| *width > 0)
            && [queries.width, keys.width].iter().all(|width| width.is_multiple_of(head_dim))
            && states.have(kept * channels, delayed.width);
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {inputs:?} cannot be convolved with {widths:?} taps")));
        }
        let addresses = [self.at(queries)?, self.at(keys)?, self.at(delayed)?];
        let (taps, bias) = (self.kept(taps)?, self.kept(bias)?);
        let delayed_bias = delayed_bias.map_or(Ok(0), |bias| self.kept(bias))?;
        let (gathered, out) = self.result(states.rows, widths[1] * channels)?;
        let (of_before, earlier) = self.result(states.rows, delayed.width)?;
        let of_inputs = [word(queries.width)?, word(keys.width)?, word(delayed.width)?];
        let (head_dim, [width, rows]) = (word(head_dim)?, [word(widths[0])?, word(widths[1])?]);
        let list = states.stage(queue, |Staged { spans, copies }| {
            let (inputs, widths, gathered) = (addresses, of_inputs, rows);
            HeadConvolutionArgs {
                inputs,
                taps,
                bias,
                delayed_bias,
                out,
                earlier,
                spans,
                copies,
                widths,
                head_dim,
                width,
                gathered,
            }
            .to_bytes()
        })?;
        self.launches.convolve_heads(list, word(channels + delayed.width)?, word(states.spans.len())?)?;
        Ok([gathered, of_before])
    }

    /// The delta rule for the tokens of spans.
    pub(super) fn delta(&mut self, queue: &Arc<LaunchQueue>, delta: &Delta, states: &States) -> Result<Rows> {
        let Delta { heads, qkv, strengths, decay } = *delta;
        let Decay { products, bias, rates, form } = decay;
        let recurrence_at = states.recurrence_at();
        let shapes = [(qkv, heads.mixed()), (strengths, heads.v_heads), (products, products.width)];
        let fits = shapes.iter().all(|(rows, width)| (rows.rows, rows.width) == (states.rows, *width))
            && [heads.v_heads, heads.v_heads * heads.k_dim].contains(&products.width)
            && states.have(recurrence_at, heads.state_len());
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {shapes:?} do not fit the delta rule of {heads:?}")));
        }
        let (result, out) = self.result(states.rows, heads.values())?;
        let mut args = DeltaArgs {
            qkv: self.at(qkv)?,
            strengths: self.at(strengths)?,
            decays: self.at(products)?,
            bias: self.kept(bias)?,
            rates: self.kept(rates)?,
            out,
            spans: 0,
            copies: 0,
            heads: [word(heads.k_heads)?, word(heads.v_heads)?, word(heads.k_dim)?, word(heads.v_dim)?],
            tiled: heads.tiled,
            recurrence_at: word(recurrence_at)?,
            decays_each: word(products.width / heads.v_heads)?,
            bound: match form {
                ChannelDecay::Softplus => None,
                ChannelDecay::Bounded(bound) => Some(bound),
            },
            query_length: 1.0 / (heads.k_dim as f32).sqrt(),
            count: word(states.spans.len())?,
        };
        let list = states.stage(queue, |Staged { spans, copies }| {
            (args.spans, args.copies) = (spans, copies);
            args.to_bytes()
        })?;
        self.launches.delta_rule(&args, list)?;
        Ok(result)
    }

    /// The recurrence of Mamba 2 for the tokens of spans.
    pub(super) fn scan(&mut self, queue: &Arc<LaunchQueue>, scan: &Scan, states: &States) -> Result<Rows> {
        let Scan { heads, convolved, steps, step_bias, rates, skips, limits } = *scan;
        let recurrence_at = states.recurrence_at();
        let shapes = [(convolved, heads.channels()), (steps, heads.heads)];
        let fits = shapes.iter().all(|(rows, width)| (rows.rows, rows.width) == (states.rows, *width))
            && heads.heads.is_multiple_of(heads.groups)
            && states.have(recurrence_at, heads.state_len());
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {shapes:?} do not fit the recurrence of {heads:?}")));
        }
        let (result, out) = self.result(states.rows, heads.inner())?;
        let mut args = ScanArgs {
            convolved: self.at(convolved)?,
            steps: self.at(steps)?,
            step_bias: self.kept(step_bias)?,
            rates: self.kept(rates)?,
            skips: self.kept(skips)?,
            out,
            spans: 0,
            copies: 0,
            sizes: [word(heads.heads)?, word(heads.head_dim)?, word(heads.groups)?, word(heads.state)?],
            recurrence_at: word(recurrence_at)?,
            count: word(states.spans.len())?,
            limits,
        };
        let list = states.stage(queue, |Staged { spans, copies }| {
            (args.spans, args.copies) = (spans, copies);
            args.to_bytes()
        })?;
        self.launches.scan(&args, list)?;
        Ok(result)
    }

    /// The recurrence of Mamba 1 for the tokens of spans.
    pub(super) fn scan_channels(
        &mut self,
        queue: &Arc<LaunchQueue>,
        scan: &ChannelScan,
        states: &States,
    ) -> Result<Rows> {
        let ChannelScan { x, steps, b, c, rates, skips } = *scan;
        let (channels, width, recurrence_at) = (x.width, b.width, states.recurrence_at());
        let shapes = [(x, channels), (steps, channels), (b, width), (c, width)];
        let fits = shapes.iter().all(|(rows, width)| (rows.rows, rows.width) == (states.rows, *width))
            && states.have(recurrence_at, channels * width);
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {shapes:?} do not fit the recurrence of Mamba 1")));
        }
        let (result, out) = self.result(states.rows, channels)?;
        let mut args = ChannelScanArgs {
            inputs: [self.at(x)?, self.at(steps)?],
            both: [self.at(b)?, self.at(c)?],
            rates: self.kept(rates)?,
            skips: self.kept(skips)?,
            out,
            spans: 0,
            copies: 0,
            sizes: [word(channels)?, word(width)?],
            recurrence_at: word(recurrence_at)?,
            count: word(states.spans.len())?,
        };
        let list = states.stage(queue, |Staged { spans, copies }| {
            (args.spans, args.copies) = (spans, copies);
            args.to_bytes()
        })?;
        self.launches.scan_channels(&args, list)?;
        Ok(result)
    }

    /// The norm of parts of rows, with a function of gates.
    pub(super) fn norm_gate(&mut self, x: Rows, gates: Rows, norm: &NormGate) -> Result<Rows> {
        let NormGate { weight, width, eps, function, order } = *norm;
        if (x.rows, x.width) != (gates.rows, gates.width) || !x.width.is_multiple_of(width) {
            return Err(GpuError::Unsupported(format!("rows {x:?} do not have the gates {gates:?}")));
        }
        let (at, gates, weight) = (self.at(x)?, self.at(gates)?, self.kept(weight)?);
        let (result, out) = self.result(x.rows, x.width)?;
        // A warp quantises what it computes, which has to be a block.
        let blocks = if width.is_multiple_of(BLOCK) { self.blocks_of(result)? } else { 0 };
        let of_row = x.width / width;
        let weights = if order == GateOrder::GateFirst { of_row } else { 1 };
        let shape = [word(x.rows * of_row)?, word(width)?, word(weights)?];
        self.launches.norm_gate([at, gates, weight, out, blocks], shape, (function, order), eps)?;
        Ok(result)
    }

    /// Values times a function of their gates.
    pub(super) fn gate(&mut self, x: Rows, gates: Rows, function: GateFunction, heads: usize) -> Result<Rows> {
        let is_whole = x.rows == gates.rows && x.width.is_multiple_of(heads);
        if !is_whole || ![heads, x.width].contains(&gates.width) {
            return Err(GpuError::Unsupported(format!("rows {x:?} do not have the gates {gates:?}")));
        }
        let shape = [word(x.rows * x.width)?, word(x.width / gates.width)?];
        let (at, gates) = (self.at(x)?, self.at(gates)?);
        let (result, [out, blocks]) = self.result_in_blocks(x.rows, x.width)?;
        self.launches.gate([at, gates, out, blocks], shape, function)?;
        Ok(result)
    }
}

impl RecurrentOps for GpuOps {
    fn convolve(&self, convolution: &Convolution, spans: &[StateSpan]) -> larder_model::Result<Rows> {
        Ok(self.lock().convolve(&self.queue, convolution, &States::of(spans, &self.attention)?)?)
    }

    fn write_recurrences(&self, spans: &[StateSpan], values: &[f32]) -> larder_model::Result<()> {
        Ok(self.lock().write_recurrences(&self.queue, values, &States::of(spans, &self.attention)?)?)
    }

    fn delta(&self, delta: &Delta, spans: &[StateSpan]) -> larder_model::Result<Rows> {
        Ok(self.lock().delta(&self.queue, delta, &States::of(spans, &self.attention)?)?)
    }

    fn scan(&self, scan: &Scan, spans: &[StateSpan]) -> larder_model::Result<Rows> {
        Ok(self.lock().scan(&self.queue, scan, &States::of(spans, &self.attention)?)?)
    }

    fn scan_channels(&self, scan: &ChannelScan, spans: &[StateSpan]) -> larder_model::Result<Rows> {
        Ok(self.lock().scan_channels(&self.queue, scan, &States::of(spans, &self.attention)?)?)
    }
}
