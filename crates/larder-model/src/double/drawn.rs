//! Draws of the double of a device.

use super::OpsDouble;
use crate::device::{ChangedLogit, DeviceDraw, DeviceRows, DrawnFrom, LogitChanges, TokenDraw};
use crate::error::{ModelError, Result};

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

impl OpsDouble {
    /// The row of a table `[any, width]` that is kept, whose number is the token that was drawn last.
    pub fn row_of_drawn(&self, table: usize, width: usize) -> Vec<u32> {
        let state = self.lock();
        let row = state.drawn.expect("a token was drawn") as usize;
        state.kept[table][row * width..][..width].iter().map(|value| value.to_bits()).collect()
    }
}

impl DeviceDraw for OpsDouble {
    fn change(&self, x: DeviceRows, changes: &LogitChanges, follows: bool) -> Result<DeviceRows> {
        let mut state = self.lock();
        let drawn = state.drawn.filter(|drawn| follows && (*drawn as usize) < x.width);
        let is_listed = |id| changes.tokens.iter().any(|token| token.id == id);
        let changed = drawn.map_or_else(|| changes.clone(), |drawn| changes.clone().with(drawn));
        let new = drawn.filter(|drawn| !is_listed(*drawn) && changed.tokens.len() > changes.tokens.len());
        let logits = &mut state.rows.get_mut(&x.id).expect("rows of this chain or the one before").1;
        let was = |id: u32| logits.get(id as usize).copied().unwrap_or_default();
        let mut taken: Vec<f32> = changes.listed().map(was).collect();
        taken.extend([new.map_or(0.0, was), f32::from_bits(new.unwrap_or(u32::MAX))]);
        for token @ ChangedLogit { id, .. } in &changed.tokens {
            logits.get_mut(*id as usize).into_iter().for_each(|logit| *logit = changed.apply(token, *logit));
        }
        Ok(state.push(taken.len(), taken))
    }

    fn draw(&self, from: &DrawnFrom, draw: &TokenDraw) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut row = state.values(from.found).to_vec();
        let of_found = row[1..].as_chunks().0.iter().take(row[0].to_bits() as usize);
        let of_all = from.all.map(|all| state.values(all).iter().enumerate().map(|(id, logit)| (id as u32, *logit)));
        let pairs: Vec<_> = match of_all {
            Some(all) if draw.temperature != 0.0 => all.collect(),
            _ => of_found.map(|[id, logit]| (id.to_bits(), *logit)).collect(),
        };
        let mut token = drawn(&pairs, draw).unwrap_or_default();
        state.draws += 1;
        if self.wrong_draws > 0 && state.draws.is_multiple_of(self.wrong_draws) {
            token = u32::from(token == 0);
        }
        state.drawn = Some(token);
        row.insert(0, f32::from_bits(token));
        from.changed.iter().for_each(|changed| row.extend_from_slice(state.values(*changed)));
        Ok(state.push(row.len(), row))
    }

    fn row_of(&self, matrix: usize, number: DeviceRows) -> Result<DeviceRows> {
        let number = self.lock().values(number)[0].to_bits();
        let row = self.products.row(matrix, number as usize);
        Ok(self.lock().push(row.len(), row))
    }

    fn begin_copy(&self, rows: DeviceRows) -> Result<usize> {
        let mut state = self.lock();
        let values = state.values(rows).to_vec();
        state.copies.push_back(values);
        if state.copies.len() > COPIES {
            state.copies.pop_front();
        }
        state.copied += 1;
        Ok(state.copied)
    }

    fn end_copy(&self, copy: usize, out: &mut [f32]) -> Result<()> {
        let mut state = self.lock();
        state.received += 1;
        let behind = state.copied.checked_sub(copy).and_then(|behind| state.copies.len().checked_sub(1 + behind));
        let Some(values) = behind.map(|place| &state.copies[place]).filter(|values| values.len() == out.len()) else {
            return Err(ModelError::Device("the copy is not in flight".into()));
        };
        out.copy_from_slice(values);
        state.failed.take().map_or(Ok(()), Err)
    }

    fn waits(&self) -> u64 {
        self.lock().received
    }
}
