//! The delta rule: a state that decays and is corrected with each token.
//!
//! ```text
//! state  = decay · state + key ⊗ strength · (value − keyᵀ · decay · state)
//! output = queryᵀ · state
//! ```
//!
//! Columns of the state do not depend on each other. A task has a few of one head, which stay in the first-level cache
//! over all tokens, and a token passes over them once: what the next one reads is summed while they are corrected.
#![allow(unsafe_code)]

use std::cell::RefCell;

use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::kernel_set::{DELTA_COLUMNS, DeltaKernels, DeltaRow, DeltaStep};
use crate::thread_pool::ThreadPool;

/// Values of consecutive tokens, at equal distances.
#[derive(Clone, Copy)]
pub struct TokenRows<'a> {
    /// From the first token's values on.
    pub values: &'a [f32],
    /// From the values of a token to those of the next.
    pub step: usize,
}

impl<'a> TokenRows<'a> {
    fn of(&self, token: usize, width: usize) -> &'a [f32] {
        &self.values[token * self.step..][..width]
    }
}

/// What one head reads of consecutive tokens of a sequence.
#[derive(Clone, Copy)]
pub struct DeltaHead<'a> {
    /// `[tokens, k_dim]`
    pub queries: TokenRows<'a>,
    /// `[tokens, k_dim]`
    pub keys: TokenRows<'a>,
    /// `[tokens, v_dim]`
    pub values: TokenRows<'a>,
    /// `[tokens, 1]`: of corrections.
    pub strengths: TokenRows<'a>,
    /// `[tokens, 1 or k_dim]`
    pub decays: TokenRows<'a>,
    /// Whether each channel of the keys has a decay of its own.
    pub by_channel: bool,
}

/// Tokens, and widths of a key and of a value.
#[derive(Clone, Copy)]
pub struct DeltaSizes {
    /// Consecutive tokens.
    pub tokens: usize,
    /// Rows of a head's state.
    pub k_dim: usize,
    /// Its columns.
    pub v_dim: usize,
}

/// Takes in tokens, one after the other, with the state `[heads, k_dim, v_dim]`, and writes what each reads from it:
/// `out [tokens, heads, v_dim]`. Allocates nothing from the second call on.
///
/// # Panics
/// If a length does not fit the sizes.
pub fn delta_rule(pool: &ThreadPool, sizes: DeltaSizes, heads: &[DeltaHead], state: &mut [f32], out: &mut [f32]) {
    assert_eq!(state.len(), heads.len() * sizes.k_dim * sizes.v_dim, "the state does not fit the sizes");
    assert_eq!(out.len(), sizes.tokens * heads.len() * sizes.v_dim, "the output does not fit the sizes");
    if sizes.tokens == 0 {
        return;
    }
    let (kernels, strips) = (&dispatch::chosen().delta, sizes.v_dim.div_ceil(DELTA_COLUMNS));
    let (state, out) = (Disjoint::new(state), Disjoint::new(out));
    pool.run(heads.len() * strips, &|task| {
        let (head, first) = (task / strips, task % strips * DELTA_COLUMNS);
        let columns = Columns {
            sizes,
            head: &heads[head],
            first,
            width: DELTA_COLUMNS.min(sizes.v_dim - first),
            state_at: head * sizes.k_dim * sizes.v_dim + first,
            out_at: head * sizes.v_dim + first,
            out_step: heads.len() * sizes.v_dim,
        };
        SCRATCH.with_borrow_mut(|scratch| columns.advance(kernels, scratch, &state, &out));
    });
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    state: Vec<DeltaRow>,
    decays: Vec<f32>,
    /// By which the next token reads rows of the state.
    factors: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Some columns of the state of a head.
struct Columns<'a> {
    sizes: DeltaSizes,
    head: &'a DeltaHead<'a>,
    /// The first column.
    first: usize,
    width: usize,
    /// Where they begin in the state of all heads.
    state_at: usize,
    /// Where they begin in the output of all heads.
    out_at: usize,
    out_step: usize,
}

impl Columns<'_> {
    fn advance(&self, kernels: &DeltaKernels, scratch: &mut Scratch, state: &Disjoint<f32>, out: &Disjoint<f32>) {
        let DeltaSizes { tokens, k_dim, v_dim } = self.sizes;
        let Scratch { state: rows, decays, factors } = scratch;
        rows.resize(k_dim, [0.0; DELTA_COLUMNS]);
        decays.resize(k_dim, 0.0);
        factors.resize(k_dim, 0.0);
        // SAFETY: no other task has these columns of this head.
        let stored = |i: usize| unsafe { state.slice(self.state_at + i * v_dim, self.width) };
        rows.iter_mut().enumerate().for_each(|(i, row)| {
            row[..self.width].copy_from_slice(stored(i));
            row[self.width..].fill(0.0);
        });
        self.factors(0, factors);
        let mut known = (kernels.read)(rows, factors);
        for t in 0..tokens {
            let correction = self.correction(t, &known);
            self.decays(t, decays);
            if t + 1 < tokens {
                self.factors(t + 1, factors);
            }
            let (key, query) = (self.head.keys.of(t, k_dim), self.head.queries.of(t, k_dim));
            let step = DeltaStep { decays, key, query, correction: &correction, next: factors };
            let [read, next] = (kernels.step)(rows, step);
            known = next;
            // SAFETY: no other task has these columns of this head.
            unsafe { out.slice(self.out_at + t * self.out_step, self.width) }.copy_from_slice(&read[..self.width]);
        }
        rows.iter().enumerate().for_each(|(i, row)| stored(i).copy_from_slice(&row[..self.width]));
    }

    /// The correction of the state in the direction of the key of a token, for what the state knew of it.
    fn correction(&self, token: usize, known: &DeltaRow) -> DeltaRow {
        let values = &self.head.values.of(token, self.sizes.v_dim)[self.first..][..self.width];
        let strength = self.head.strengths.of(token, 1)[0];
        let mut correction = [0.0; DELTA_COLUMNS];
        for ((correction, value), known) in correction.iter_mut().zip(values).zip(known) {
            *correction = (value - known) * strength;
        }
        correction
    }

    fn decays(&self, token: usize, decays: &mut [f32]) {
        if self.head.by_channel {
            decays.copy_from_slice(self.head.decays.of(token, decays.len()));
        } else {
            decays.fill(self.head.decays.of(token, 1)[0]);
        }
    }

    /// The products of a key and decays.
    fn factors(&self, token: usize, factors: &mut [f32]) {
        self.decays(token, factors);
        factors.iter_mut().zip(self.head.keys.of(token, self.sizes.k_dim)).for_each(|(factor, key)| *factor *= key);
    }
}
