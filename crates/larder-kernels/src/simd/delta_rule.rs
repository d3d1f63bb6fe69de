//! The delta rule, for some columns of a state.
#![allow(unsafe_code)]
// The number of a register is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use super::{F32, Simd, Task};
use crate::kernel_set::{DELTA_COLUMNS, DeltaRow, DeltaStep};

/// Registers of columns that are computed at a time.
const REGISTERS: usize = 2;

/// The sums of the rows of the state, each times its factor.
///
/// # Panics
/// If lengths do not fit.
pub fn read<S: Simd>(simd: S, state: &[DeltaRow], factors: &[f32]) -> DeltaRow {
    assert_eq!(state.len(), factors.len(), "a factor for each row");
    let mut known = [0.0; DELTA_COLUMNS];
    simd.run(Reading { state, factors, known: &mut known });
    known
}

/// Takes in a token: what it reads, and what the next one does.
///
/// # Panics
/// If lengths do not fit.
pub fn step<S: Simd>(simd: S, state: &mut [DeltaRow], step: DeltaStep) -> [DeltaRow; 2] {
    step.check(state.len());
    let mut read = [[0.0; DELTA_COLUMNS]; 2];
    simd.run(Stepping { state, step, read: &mut read });
    read
}

struct Reading<'a> {
    state: &'a [DeltaRow],
    factors: &'a [f32],
    known: &'a mut DeltaRow,
}

impl<S: Simd> Task<S> for Reading<'_> {
    #[inline(always)]
    fn run(self, simd: S) {
        for column in (0..DELTA_COLUMNS).step_by(REGISTERS * S::LANES) {
            let mut known = [simd.splat(0.0); REGISTERS];
            for (row, factor) in self.state.iter().zip(self.factors) {
                let factor = simd.splat(*factor);
                for v in 0..REGISTERS {
                    let state = load(simd, row, column + v * S::LANES);
                    known[v] = simd.add(known[v], simd.mul(factor, state));
                }
            }
            for v in 0..REGISTERS {
                simd.store(known[v], &mut self.known[column + v * S::LANES..]);
            }
        }
    }
}

struct Stepping<'a> {
    state: &'a mut [DeltaRow],
    step: DeltaStep<'a>,
    read: &'a mut [DeltaRow; 2],
}

impl<S: Simd> Task<S> for Stepping<'_> {
    #[inline(always)]
    fn run(self, simd: S) {
        let DeltaStep { decays, key, query, correction, next } = self.step;
        for column in (0..DELTA_COLUMNS).step_by(REGISTERS * S::LANES) {
            let (mut read, mut known) = ([simd.splat(0.0); REGISTERS], [simd.splat(0.0); REGISTERS]);
            let mut corrections = [simd.splat(0.0); REGISTERS];
            for v in 0..REGISTERS {
                corrections[v] = load(simd, correction, column + v * S::LANES);
            }
            let factors = decays.iter().zip(key).zip(query).zip(next);
            for (row, (((decay, key), query), next)) in self.state.iter_mut().zip(factors) {
                let (decay, key, query, next) =
                    (simd.splat(*decay), simd.splat(*key), simd.splat(*query), simd.splat(*next));
                for v in 0..REGISTERS {
                    let decayed = simd.mul(decay, load(simd, row, column + v * S::LANES));
                    let state = simd.add(decayed, simd.mul(key, corrections[v]));
                    // SAFETY: as in `load`.
                    simd.store(state, unsafe { row.get_unchecked_mut(column + v * S::LANES..) });
                    read[v] = simd.add(read[v], simd.mul(query, state));
                    known[v] = simd.add(known[v], simd.mul(next, state));
                }
            }
            for v in 0..REGISTERS {
                simd.store(read[v], &mut self.read[0][column + v * S::LANES..]);
                simd.store(known[v], &mut self.read[1][column + v * S::LANES..]);
            }
        }
    }
}

/// The columns from number `column` on, where those of a register begin.
#[inline(always)]
fn load<S: Simd>(simd: S, row: &DeltaRow, column: usize) -> S::Floats {
    const { assert!(DELTA_COLUMNS.is_multiple_of(REGISTERS * S::LANES)) };
    // SAFETY: a row has whole registers.
    unsafe { simd.floats_at::<F32>(row.as_ptr().add(column).cast()) }
}
