//! The choice of a token from logits.

use std::collections::VecDeque;

use super::State;
use crate::error::{ModelError, Result};
use crate::ops::{BEST_FOUND, ChangedLogit, CpuOps, DrawOps, DrawnFrom, LogitChanges, Rows, TokenDraw};

/// The most copies in flight.
const COPIES: usize = 4;

/// Draws one of these pairs of an id and a logit, which are in the order of ids if they are all of a row.
fn drawn(found: &[(u32, f32)], draw: &TokenDraw) -> Option<u32> {
    let TokenDraw { temperature, top_k, top_p, min_p, unit } = *draw;
    let zero = if temperature == 0.0 { 0.0 } else { -0.0 };
    let mut kept = found.to_vec();
    kept.sort_by(|a, b| (b.1 + zero).total_cmp(&(a.1 + zero)).then(a.0.cmp(&b.0)));
    let best = kept.first()?.1;
    if temperature == 0.0 {
        return Some(kept[0].0);
    }
    if let Some(least) = top_k.checked_sub(1).and_then(|last| kept.get(last)).map(|last| last.1) {
        kept.retain(|(_, logit)| *logit >= least);
    }
    if top_k == 0 && top_p == 1.0 {
        kept = found.to_vec();
    }
    let weight = |logit: f32| ((f64::from(logit) - f64::from(best)) / f64::from(temperature)).exp();
    if top_p != 1.0 {
        let enough = f64::from(top_p) * kept.iter().map(|(_, logit)| weight(*logit)).sum::<f64>();
        let mut before = 0.0;
        kept.retain(|(_, logit)| {
            let is_kept = before < enough;
            before += weight(*logit);
            is_kept
        });
    }
    kept.retain(|(_, logit)| weight(*logit) >= f64::from(min_p));
    let mut left = unit * kept.iter().map(|(_, logit)| weight(*logit)).sum::<f64>();
    let chosen = kept.iter().find(|(_, logit)| {
        left -= weight(*logit);
        left < 0.0
    });
    let last = kept.iter().rfind(|(_, logit)| weight(*logit) > 0.0);
    chosen.or(last).map(|(id, _)| *id)
}

/// What the choice of tokens changes.
#[derive(Default)]
pub(super) struct Sampling {
    /// How often the host has waited.
    pub waits: u64,
    /// The rows that were copied back last, and the number of all copies so far.
    copies: VecDeque<Vec<f32>>,
    copied: usize,
    draws: u64,
    /// The token that was drawn last.
    drawn: Option<u32>,
}

/// The best values of a row: their number, and the bits of the place and the value of each.
fn best_of(row: &[f32], best: usize) -> Vec<f32> {
    let rank = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| rank(row[*b]).total_cmp(&rank(row[*a])));
    let least = rank(row[order[best - 1]]);
    order.retain(|id| rank(row[*id]) >= least);
    let mut found = vec![f32::from_bits(order.len() as u32)];
    order.iter().take(BEST_FOUND).for_each(|id| found.extend([f32::from_bits(*id as u32), row[*id]]));
    found.resize(1 + 2 * BEST_FOUND, 0.0);
    found
}

impl State {
    /// Rows of these values.
    fn push(&mut self, width: usize, values: &[f32]) -> Rows {
        let mut out = self.rows.take(values.len() / width, width);
        out.values().copy_from_slice(values);
        self.rows.push(out)
    }
}

impl CpuOps {
    /// The best values of each row.
    pub(super) fn best_of_rows(&self, x: Rows, best: usize) -> Rows {
        let mut state = self.lock();
        let found: Vec<f32> = state.values(x).chunks_exact(x.width).flat_map(|row| best_of(row, best)).collect();
        state.push(1 + 2 * BEST_FOUND, &found)
    }

    /// The values at some places of each row, in whose place there is minus infinity then.
    pub(super) fn taken_out(&self, x: Rows, places: &[u32]) -> Rows {
        let mut state = self.lock();
        let rows = state.rows.values_mut(x).expect("nothing else reads the logits");
        let take = |row: &mut [f32]| {
            let take = |at: &u32| row.get_mut(*at as usize).map(|value| std::mem::replace(value, f32::NEG_INFINITY));
            places.iter().map(take).map(Option::unwrap_or_default).collect::<Vec<_>>()
        };
        let taken: Vec<f32> = rows.chunks_exact_mut(x.width).flat_map(take).collect();
        state.push(places.len(), &taken)
    }

    /// The row of a table `[any, width]` that is kept, whose number is the token that was drawn last.
    pub fn row_of_drawn(&self, table: usize, width: usize) -> Vec<u32> {
        let state = self.lock();
        let row = state.sampling.drawn.expect("a token was drawn") as usize;
        state.kept[table][row * width..][..width].iter().map(|value| value.to_bits()).collect()
    }

    /// How often the host has waited.
    pub fn chains(&self) -> u64 {
        self.lock().sampling.waits
    }

    /// The values of rows, without a wait.
    pub fn peek(&self, rows: Rows) -> Vec<f32> {
        self.lock().values(rows).to_vec()
    }
}

impl DrawOps for CpuOps {
    fn change(&self, x: Rows, changes: &LogitChanges, follows: bool) -> Result<Rows> {
        let mut state = self.lock();
        let drawn = state.sampling.drawn.filter(|drawn| follows && (*drawn as usize) < x.width);
        let is_listed = |id| changes.tokens.iter().any(|token| token.id == id);
        let changed = drawn.map_or_else(|| changes.clone(), |drawn| changes.clone().with(drawn));
        let new = drawn.filter(|drawn| !is_listed(*drawn) && changed.tokens.len() > changes.tokens.len());
        let logits = state.rows.values_mut(x).expect("nothing else reads the logits");
        let was = |id: u32| logits.get(id as usize).copied().unwrap_or_default();
        let mut taken: Vec<f32> = changes.listed().map(was).collect();
        taken.extend([new.map_or(0.0, was), f32::from_bits(new.unwrap_or(u32::MAX))]);
        for token @ ChangedLogit { id, .. } in &changed.tokens {
            logits.get_mut(*id as usize).into_iter().for_each(|logit| *logit = changed.apply(token, *logit));
        }
        Ok(state.push(taken.len(), &taken))
    }

    fn draw(&self, from: &DrawnFrom, draw: &TokenDraw) -> Result<Rows> {
        let mut state = self.lock();
        let mut row = state.values(from.found).to_vec();
        let of_found = row[1..].as_chunks().0.iter().take(row[0].to_bits() as usize);
        let of_all = from.all.map(|all| state.values(all).iter().enumerate().map(|(id, logit)| (id as u32, *logit)));
        let pairs: Vec<_> = match of_all {
            Some(all) if draw.temperature != 0.0 => all.collect(),
            _ => of_found.map(|[id, logit]| (id.to_bits(), *logit)).collect(),
        };
        let mut token = drawn(&pairs, draw).unwrap_or_default();
        state.sampling.draws += 1;
        let wrong_draws = self.fake.as_ref().map_or(0, |fake| fake.wrong_draws);
        if wrong_draws > 0 && state.sampling.draws.is_multiple_of(wrong_draws) {
            token = u32::from(token == 0);
        }
        state.sampling.drawn = Some(token);
        row.insert(0, f32::from_bits(token));
        from.changed.iter().for_each(|changed| row.extend_from_slice(state.values(*changed)));
        Ok(state.push(row.len(), &row))
    }

    fn row_of(&self, matrix: usize, number: Rows) -> Result<Rows> {
        let mut state = self.lock();
        let number = state.values(number)[0].to_bits();
        let row = self.fake.as_ref().map_or(Vec::new(), |fake| fake.products.row(matrix, number as usize));
        Ok(state.push(row.len(), &row))
    }

    fn begin_copy(&self, rows: Rows) -> Result<usize> {
        let mut state = self.lock();
        let values = state.values(rows).to_vec();
        let sampling = &mut state.sampling;
        sampling.copies.push_back(values);
        if sampling.copies.len() > COPIES {
            sampling.copies.pop_front();
        }
        sampling.copied += 1;
        Ok(sampling.copied)
    }

    fn end_copy(&self, copy: usize, out: &mut [f32]) -> Result<()> {
        let sampling = &mut self.lock().sampling;
        sampling.waits += 1;
        let before = sampling.copied.checked_sub(copy).and_then(|later| sampling.copies.len().checked_sub(1 + later));
        let Some(values) = before.map(|place| &sampling.copies[place]).filter(|values| values.len() == out.len())
        else {
            return Err(ModelError::Device("the copy is not in flight".into()));
        };
        out.copy_from_slice(values);
        self.fake.as_ref().and_then(|fake| fake.failed.lock().take()).map_or(Ok(()), Err)
    }

    fn waits(&self) -> u64 {
        self.lock().sampling.waits
    }
}
