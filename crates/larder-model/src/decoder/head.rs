//! The end of a step: the final norm and the output head, and the download of the logits that are asked for.

use crate::decoder::{BestLogits, Decoder, Logits, TokenLogit};
use crate::error::{ModelError, Result};
use crate::nn::Norm;
use crate::ops::{BEST_FOUND, Few, HostRows, Ops, Rows};
use crate::stack::{Stack, Streams};
use crate::step::{ForwardPass, Span};
use crate::tap::{Tap, report_hidden};

/// The most of the best logits that a device looks for: it may find a few more than asked for.
pub(crate) const BEST_MOST: usize = BEST_FOUND / 2;

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
        x: Rows,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        pass: &ForwardPass,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        let Stack { norm, streams, .. } = &self.stack;
        let ending = Ending { streams: streams.as_ref(), norm };
        if tap.wants_hidden() {
            let all = ending.forward(x, self.ops())?;
            report_hidden(tap, self.stack.layer_count(), all, self.ops())?;
        }
        self.logits_of(ending, x, spans, best, pass)
    }

    /// As [`logits`](Self::logits), of the last layer before this ending.
    pub(crate) fn logits_of(
        &self,
        ending: Ending,
        x: Rows,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        pass: &ForwardPass,
    ) -> Result<Logits> {
        let ops = self.ops();
        let wanted: Vec<_> = wanted_rows(spans, pass).filter(|(_, count)| *count > 0).collect();
        let hidden = if wants_hidden(spans) { Some(ending.forward(x, ops)?) } else { None };
        let x = match (rows_of(hidden.unwrap_or(x), &wanted, ops)?, hidden) {
            (Some(x), None) => Some(ending.forward(x, ops)?),
            (x, _) => x,
        };
        let logits = x.map(|x| self.head(x, ops)).transpose()?;
        let (logits, hidden) = download_logits(ops, logits, best.filter(|_| ops.draws()), hidden)?;
        hidden.iter().for_each(|hidden| hand_out_hidden(hidden, spans, pass));
        Ok(logits)
    }

    /// The logits `[rows, vocab]` of the output `x [rows, hidden]` of the norm before the head.
    pub(crate) fn head(&self, mut x: Rows, ops: &dyn Ops) -> Result<Rows> {
        let Stack { head, factors, .. } = &self.stack;
        if let Some(columns) = &factors.columns {
            x = columns.apply(x, ops)?;
        }
        let mut logits = head.forward(x, ops)?;
        if factors.logits != 1.0 {
            logits = ops.scale(logits, factors.logits as f32)?;
        }
        if let Some(cap) = factors.softcap {
            logits = ops.softcap(logits, cap as f32)?;
        }
        Ok(logits)
    }
}

impl Ending<'_> {
    /// What the head reads of `x [rows, streams · hidden]`.
    pub(crate) fn forward(self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        let x = self.streams.map_or(Ok(x), |streams| streams.merge.merge(x, ops))?;
        self.norm.forward(x, ops)
    }
}

/// Waits for logits, of which the `best` may be enough, and for hidden states.
fn download_logits(
    ops: &dyn Ops,
    logits: Option<Rows>,
    best: Option<&BestLogits>,
    hidden: Option<Rows>,
) -> Result<(Logits, Option<HostRows>)> {
    let found = best.zip(logits).filter(|(best, logits)| is_less(best, logits.width)).map(|(best, logits)| {
        let also: Vec<u32> = best.changes.listed().collect();
        let taken = if also.is_empty() { None } else { Some(ops.take_out(logits, &also)?) };
        Ok::<_, ModelError>((logits, taken, ops.find_best(logits, best.count)?, also))
    });
    let Some((logits, taken, found, also)) = found.transpose()? else {
        let mut received = ops.download(&hidden.into_iter().chain(logits).collect::<Few<_>>())?;
        let logits = logits.and_then(|_| received.pop()).map_or(Vec::new(), |logits| logits.to_vec());
        return Ok((Logits::All(logits), received.pop()));
    };
    let mut received = ops.download(&hidden.into_iter().chain(taken).chain([found]).collect::<Few<_>>())?;
    let found = received.pop().expect("the rows that were asked for");
    let taken = taken.and_then(|_| received.pop());
    let taken = taken.as_deref().unwrap_or_default();
    let width = taken.len() / logits.rows;
    let exists = |(id, _): &(&u32, &f32)| (**id as usize) < logits.width;
    let pairs = |row: usize| also.iter().zip(&taken[row * width..][..width]).filter(exists);
    let taken_of = |row: usize| pairs(row).map(|(id, logit)| (*id, *logit));
    let best = found.chunks_exact(1 + 2 * BEST_FOUND).enumerate().map(|(row, found)| found_in(found, taken_of(row)));
    if let Some(best) = best.collect() {
        return Ok((Logits::Best(best), received.pop()));
    }
    // Too many are equal, or close. The logits are still there.
    let mut all = ops.download(&[logits])?[0].to_vec();
    for (row, all) in all.chunks_exact_mut(logits.width).enumerate() {
        taken_of(row).for_each(|(id, logit)| all[id as usize] = logit);
    }
    Ok((Logits::All(all), received.pop()))
}

/// Whether it takes less time to find the best of `vocab` logits than to copy them all.
pub(crate) fn is_less(best: &BestLogits, vocab: usize) -> bool {
    best.count <= BEST_MOST && 4 * (best.count + best.changes.tokens.len()) < vocab
}

/// The logits that a device has found in a row and those that it took out before, in the order of ids; `None` if there
/// were more than it could return.
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
fn hand_out_hidden(x: &HostRows, spans: &mut [Span], pass: &ForwardPass) {
    for (at, span) in pass.spans.iter().zip(spans) {
        span.hidden.iter_mut().for_each(|into| into.extend_from_slice(at.rows(x, x.width)));
    }
}

/// Some rows of `x`, given as ranges of first row and count; `None` if there are none. They are copied side by side
/// unless they follow each other.
fn rows_of(x: Rows, ranges: &[(usize, usize)], ops: &dyn Ops) -> Result<Option<Rows>> {
    let (Some((first, _)), Some((last, count))) = (ranges.first(), ranges.last()) else { return Ok(None) };
    let rows = last + count - first;
    if rows == ranges.iter().map(|(_, count)| count).sum::<usize>() {
        return ops.slice(x, *first, rows).map(Some);
    }
    let all = &ops.download(&[x])?[0];
    let values = ranges.iter().flat_map(|(first, count)| &all[first * x.width..(first + count) * x.width]);
    ops.send(&values.copied().collect::<Vec<_>>(), x.width).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

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
