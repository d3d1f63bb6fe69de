//! Logits: the norm and the product behind the last layer, and what a step returns of them.

use candle_core::Tensor;
use larder_kernels::tanh;

use crate::decoder::{Decoder, report_hidden, scaled};
use crate::device::{BEST_FOUND, DeviceOps, DeviceRows, LogitChanges};
use crate::device_layer::on_host;
use crate::error::{ModelError, Result};
use crate::hidden::{Hidden, receive};
use crate::matrix::with_f32;
use crate::nn::{ForwardPass, Norm};
use crate::stack::{Stack, Streams};
use crate::step::Span;
use crate::tap::Tap;

/// The most rows of logits that are a part of a chain, whose memory stays allocated.
const CHAIN_LOGITS: usize = 16;
/// The most of the best logits that a device looks for: it may find a few more than asked for.
pub(crate) const BEST_MOST: usize = BEST_FOUND / 2;

/// Logits of some tokens, as a step returns them.
#[derive(Clone, PartialEq, Debug)]
pub enum Logits {
    /// All of them: `[rows, vocab]`.
    All(Vec<f32>),
    /// Of each row what [`BestLogits`] wants, those equal to the last of the highest, and maybe others; in the order of ids.
    Best(Vec<Vec<TokenLogit>>),
}

/// The logits of a row that the choice of a token reads, where it does not read all.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct BestLogits {
    /// How many of the highest.
    pub count: usize,
    /// How the choice changes logits first. The logits of the listed tokens are wanted too, as the model yields them, and do not count as any of
    /// the highest.
    pub changes: LogitChanges,
}

impl BestLogits {
    /// The logits that two choices read. How each of them changes logits is not kept.
    pub fn and(mut self, other: &BestLogits) -> Self {
        let tokens = &mut self.changes.tokens;
        tokens.extend_from_slice(&other.changes.tokens);
        tokens.sort_unstable_by_key(|token| token.id);
        tokens.dedup_by_key(|token| token.id);
        BestLogits { count: self.count.max(other.count), ..self }
    }

    /// The logits that the choice reads when the answer has one more token.
    pub fn with(self, id: u32) -> Self {
        BestLogits { changes: self.changes.with(id), ..self }
    }
}

/// The logit of a token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenLogit {
    /// Id of the token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// One row of logits.
#[derive(PartialEq, Debug)]
pub enum LogitsRow<'a> {
    /// The logit of each token.
    All(&'a mut [f32]),
    /// What [`BestLogits`] wants of them, in the order of ids.
    Best(&'a [TokenLogit]),
}

impl Default for Logits {
    fn default() -> Self {
        Logits::All(Vec::new())
    }
}

impl From<Vec<f32>> for Logits {
    fn from(all: Vec<f32>) -> Self {
        Logits::All(all)
    }
}

impl Logits {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        match self {
            Logits::All(all) => all.is_empty(),
            Logits::Best(rows) => rows.is_empty(),
        }
    }

    /// Row `row` of `rows`.
    pub fn row(&mut self, row: usize, rows: usize) -> LogitsRow<'_> {
        match self {
            Logits::All(all) => {
                let vocab = all.len() / rows;
                LogitsRow::All(&mut all[row * vocab..][..vocab])
            }
            Logits::Best(best) => LogitsRow::Best(&best[row]),
        }
    }

    /// All logits.
    ///
    /// # Panics
    /// If a step was asked for the best ones alone.
    pub fn into_all(self) -> Vec<f32> {
        match self {
            Logits::All(all) => all,
            Logits::Best(_) => unreachable!("logits of all tokens were asked for"),
        }
    }

    /// The parts of these numbers of rows.
    pub fn split(self, rows: &[usize], vocab: usize) -> Vec<Logits> {
        if rows.len() == 1 {
            return vec![self];
        }
        match self {
            Logits::All(all) => {
                let mut rest = &all[..];
                let part = |rows: &usize| Logits::All(rest.split_off(..rows * vocab).unwrap_or_default().to_vec());
                rows.iter().map(part).collect()
            }
            Logits::Best(best) => {
                let mut rest = best.into_iter();
                rows.iter().map(|rows| Logits::Best(rest.by_ref().take(*rows).collect())).collect()
            }
        }
    }
}

/// What lies between the last layer and the head.
#[derive(Clone, Copy)]
pub(crate) struct Ending<'a> {
    /// The residual streams, if there are several.
    pub streams: Option<&'a Streams>,
    /// The norm before the head.
    pub norm: &'a Norm,
}

impl Decoder {
    /// The logits that the spans ask for, from the last layer's output `x [tokens, hidden]`.
    pub(crate) fn logits(
        &self,
        x: Hidden,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        pass: &ForwardPass,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        let Stack { norm, streams, .. } = &self.stack;
        let ending = Ending { streams: streams.as_ref(), norm };
        if !tap.wants_hidden() {
            return self.logits_behind(ending, x, spans, best, pass);
        }
        let x = norm.forward(&ending.merged(on_host(&x, &self.stack)?)?)?;
        report_hidden(tap, self.stack.layer_count(), &x)?;
        self.logits_of_normalised(x, spans, pass)
    }

    /// As [`logits`](Self::logits), of the last layer before this ending.
    pub(crate) fn logits_behind(
        &self,
        ending: Ending,
        x: Hidden,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        pass: &ForwardPass,
    ) -> Result<Logits> {
        if let Hidden::Device(x) = &x
            && let Some(logits) = self.logits_on_device(ending, *x, spans, best, pass)?
        {
            return Ok(logits);
        }
        let x = ending.merged(on_host(&x, &self.stack)?)?;
        if wants_hidden(spans) {
            return self.logits_of_normalised(ending.norm.forward(&x)?, spans, pass);
        }
        let x = take_rows(x, wanted_rows(spans, pass))?.map(|x| ending.norm.forward(&x)).transpose()?;
        Ok(Logits::All(x.map_or(Ok(Vec::new()), |x| self.head(x))?))
    }

    /// The logits, and the hidden states that the spans ask for, of the output `x [tokens, hidden]` of the norm before the head.
    fn logits_of_normalised(&self, x: Tensor, spans: &mut [Span], pass: &ForwardPass) -> Result<Logits> {
        hand_out_hidden(&x, spans, pass)?;
        let x = take_rows(x, wanted_rows(spans, pass))?;
        Ok(Logits::All(x.map_or(Ok(Vec::new()), |x| self.head(x))?))
    }

    /// As [`logits_behind`](Self::logits_behind), at the end of the chain that computes `x`; `None` if a part of it is computed on the CPU, or
    /// if the rows are many or not next to each other.
    fn logits_on_device(
        &self,
        Ending { streams, norm }: Ending,
        x: DeviceRows,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        pass: &ForwardPass,
    ) -> Result<Option<Logits>> {
        let head = &self.stack.head;
        if streams.is_some_and(|streams| !streams.merge.is_on_device()) {
            return Ok(None);
        }
        let merged = |x: DeviceRows, ops| streams.map_or(Ok(x), |streams| streams.merge.begin(x, ops));
        let (Some(ops), Some(norm)) = (head.compute().device_ops.as_deref(), norm.for_devices()) else {
            return Ok(None);
        };
        let wanted: Vec<_> = wanted_rows(spans, pass).filter(|(_, count)| *count > 0).collect();
        let first = wanted.first().map_or(0, |(first, _)| *first);
        let rows = wanted.last().map_or(0, |(last, count)| last + count - first);
        let together = rows == wanted.iter().map(|(_, count)| count).sum::<usize>();
        if rows > 0 && (!head.is_on_device() || !together || rows > CHAIN_LOGITS) {
            return Ok(None);
        }
        if rows == 0 && !wants_hidden(spans) {
            // Also without logits, errors of the chain are errors of this step.
            return ops.receive(&mut []).map(|()| Some(Logits::default()));
        }
        let (x, hidden) = match wants_hidden(spans) {
            true => {
                let hidden = norm.begin(merged(x, ops)?, ops)?;
                (ops.part(hidden, first, rows)?, Some(hidden))
            }
            false => (norm.begin(merged(ops.part(x, first, rows)?, ops)?, ops)?, None),
        };
        let logits = match rows {
            0 => None,
            _ => match self.begin_head(x, ops)? {
                None => return Ok(None),
                logits => logits,
            },
        };
        let (logits, hidden) = receive_logits(ops, logits, best, hidden)?;
        hidden.map_or(Ok(()), |hidden| hand_out_hidden(&hidden, spans, pass))?;
        Ok(Some(logits))
    }

    /// Begins the head on a device: the logits of the output `x` of the norm before it; `None` if a part of it is computed on the CPU.
    pub(crate) fn begin_head(&self, mut x: DeviceRows, ops: &dyn DeviceOps) -> Result<Option<DeviceRows>> {
        let Stack { head, factors, .. } = &self.stack;
        if let Some(columns) = &factors.columns {
            x = columns.begin(x, ops)?;
        }
        let Some(mut logits) = head.begin(x, ops)? else { return Ok(None) };
        if factors.logits != 1.0 {
            logits = ops.scale(logits, factors.logits as f32)?;
        }
        if let Some(cap) = factors.softcap {
            logits = ops.bend(logits, cap as f32)?;
        }
        Ok(Some(logits))
    }

    /// The logits `[rows, vocab]` of the output `x [rows, hidden]` of the norm before the head.
    pub(crate) fn head(&self, mut x: Tensor) -> Result<Vec<f32>> {
        let Stack { head, factors, .. } = &self.stack;
        if let Some(columns) = &factors.columns {
            x = columns.apply(&x)?;
        }
        let mut logits = values(&scaled(head.forward(&x)?, factors.logits)?)?;
        if let Some(cap) = factors.softcap {
            logits.iter_mut().for_each(|l| *l = tanh(*l / cap as f32) * cap as f32);
        }
        Ok(logits)
    }
}

impl Ending<'_> {
    /// The residual stream, of `x [tokens, streams · hidden]`.
    fn merged(self, x: Tensor) -> Result<Tensor> {
        self.streams.map_or(Ok(x.clone()), |streams| streams.merge.merge(&x))
    }
}

/// Waits for logits, of which the `best` may be enough, and for hidden states.
fn receive_logits(
    ops: &dyn DeviceOps,
    logits: Option<DeviceRows>,
    best: Option<&BestLogits>,
    hidden: Option<DeviceRows>,
) -> Result<(Logits, Option<Tensor>)> {
    let found = best.zip(logits).filter(|(best, logits)| is_less(best, logits.width)).map(|(best, logits)| {
        let also: Vec<u32> = best.changes.listed().collect();
        let taken = if also.is_empty() { None } else { Some(ops.take_out(logits, &also)?) };
        Ok::<_, ModelError>((logits, taken, ops.find_best(logits, best.count)?, also))
    });
    let Some((logits, taken, found, also)) = found.transpose()? else {
        let mut received = receive(ops, &hidden.into_iter().chain(logits).collect::<Vec<_>>())?;
        let hidden = hidden.map(|_| received.remove(0));
        let logits = received.pop().map_or(Ok(Vec::new()), |logits| values(&logits))?;
        return Ok((Logits::All(logits), hidden));
    };
    let mut received = receive(ops, &hidden.into_iter().chain(taken).chain([found]).collect::<Vec<_>>())?;
    let found = received.pop().map_or(Ok(Vec::new()), |found| values(&found))?;
    let hidden = hidden.map(|_| received.remove(0));
    let taken = received.pop().map_or(Ok(Vec::new()), |taken| values(&taken))?;
    let width = taken.len() / logits.rows;
    let exists = |(id, _): &(&u32, &f32)| (**id as usize) < logits.width;
    let pairs = |row: usize| also.iter().zip(&taken[row * width..][..width]).filter(exists);
    let taken_of = |row: usize| pairs(row).map(|(id, logit)| (*id, *logit));
    let best = found.chunks_exact(1 + 2 * BEST_FOUND).enumerate().map(|(row, found)| found_in(found, taken_of(row)));
    if let Some(best) = best.collect() {
        return Ok((Logits::Best(best), hidden));
    }
    // Too many are equal, or close. The logits are still there.
    let mut all = values(&receive(ops, &[logits])?.remove(0))?;
    for (row, all) in all.chunks_exact_mut(logits.width).enumerate() {
        taken_of(row).for_each(|(id, logit)| all[id as usize] = logit);
    }
    Ok((Logits::All(all), hidden))
}

/// Whether it takes less time to find the best of `vocab` logits than to copy them all.
pub(crate) fn is_less(best: &BestLogits, vocab: usize) -> bool {
    best.count <= BEST_MOST && 4 * (best.count + best.changes.tokens.len()) < vocab
}

fn values(rows: &Tensor) -> Result<Vec<f32>> {
    Ok(rows.flatten_all()?.to_vec1()?)
}

/// The logits that a device has found in a row and those that it took out before, in the order of ids; `None` if there were more than it
/// could return.
pub(crate) fn found_in(row: &[f32], taken: impl Iterator<Item = (u32, f32)>) -> Option<Vec<TokenLogit>> {
    let found = row.get(1..1 + 2 * row[0].to_bits() as usize)?.as_chunks().0;
    let mut best: Vec<_> = taken.map(|(id, logit)| TokenLogit { id, logit }).collect();
    let others = found.iter().map(|[id, logit]| TokenLogit { id: id.to_bits(), logit: *logit });
    best.extend(others);
    // Tokens that were taken out may have been found again, as minus infinity.
    best.sort_by_key(|token| token.id);
    best.dedup_by_key(|token| token.id);
    Some(best)
}

fn wants_hidden(spans: &[Span]) -> bool {
    spans.iter().any(|span| span.hidden.is_some())
}

/// First row and number of the rows of each span whose logits are wanted.
fn wanted_rows<'s>(spans: &'s [Span], pass: &'s ForwardPass) -> impl Iterator<Item = (usize, usize)> + use<'s> {
    pass.spans.iter().zip(spans).map(|(at, span)| {
        let rows = span.logits_for.count(at.tokens);
        (at.first_row + at.tokens - rows, rows)
    })
}

/// Appends the rows of `x [tokens, hidden]` to the spans that want them.
fn hand_out_hidden(x: &Tensor, spans: &mut [Span], pass: &ForwardPass) -> Result<()> {
    let hidden = x.dim(1)?;
    with_f32(x, |x| {
        for (at, span) in pass.spans.iter().zip(spans) {
            span.hidden.iter_mut().for_each(|into| into.extend_from_slice(at.rows(x, hidden)));
        }
    })
}

/// Some rows of `x`, given as ranges of first row and count; `None` if there are none.
fn take_rows(x: Tensor, ranges: impl Iterator<Item = (usize, usize)>) -> Result<Option<Tensor>> {
    let ranges: Vec<_> = ranges.filter(|(_, count)| *count > 0).collect();
    match ranges[..] {
        [] => Ok(None),
        [(0, all)] if all == x.dim(0)? => Ok(Some(x)),
        [(first, count)] => Ok(Some(x.narrow(0, first, count)?)),
        _ => {
            let parts = ranges.iter().map(|(first, count)| x.narrow(0, *first, *count));
            Ok(Some(Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_logits_have_their_rows() {
        let mut all = Logits::All(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(all.row(1, 3), LogitsRow::All(&mut [2.0, 3.0]));
        let parts = all.split(&[2, 0, 1], 2);
        assert_eq!(parts, [vec![0.0, 1.0, 2.0, 3.0], vec![], vec![4.0, 5.0]].map(Logits::All));
        let [a, b] = [1, 2].map(|id| vec![TokenLogit { id, logit: 0.5 }]);
        let mut best = Logits::Best(vec![a.clone(), b.clone()]);
        assert_eq!(best.row(1, 2), LogitsRow::Best(&b));
        assert_eq!(best.split(&[1, 1], 9), [Logits::Best(vec![a]), Logits::Best(vec![b])]);
    }

    #[test]
    fn what_a_device_finds_is_put_in_the_order_of_ids() {
        let word = |value: u32| f32::from_bits(value);
        let mut row = vec![word(3), word(7), 1.5, word(3), -1.0, word(5), f32::NEG_INFINITY];
        row.resize(1 + 2 * BEST_FOUND, 9.0);
        let [three, five, seven] = [(3, -1.0), (5, 8.0), (7, 1.5)].map(|(id, logit)| TokenLogit { id, logit });
        assert_eq!(found_in(&row, [(5, 8.0)].into_iter()), Some(vec![three, five, seven]));
        row[0] = word(BEST_FOUND as u32 + 1);
        assert_eq!(found_in(&row, [].into_iter()), None);
    }
}
