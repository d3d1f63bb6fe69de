//! Recurrences whose state has parts that do not depend on each other, heads or channels, which threads share.

use larder_kernels::ThreadPool;
use parking_lot::Mutex;

/// A state and what its parts yield. The last part of both may be smaller than the others.
pub(crate) struct StateParts<'a> {
    /// The values of all parts, one part after the other.
    pub state: &'a mut [f32],
    /// Values of a part of the state.
    pub state_len: usize,
    /// `[tokens, width of all parts]`: what the parts yield, side by side.
    pub out: &'a mut [f32],
    /// Width of what a part yields.
    pub width: usize,
}

impl StateParts<'_> {
    /// Takes in `tokens` tokens: `advance` gets the number of a part, its state, and its output `[tokens, width]` to be
    /// written.
    ///
    /// Each part is a task, and its arithmetic does not depend on which thread has it.
    pub fn advance(self, tokens: usize, threads: &ThreadPool, advance: impl Fn(usize, &mut [f32], &mut [f32]) + Sync) {
        let StateParts { state, state_len, out, width } = self;
        let mut by_part = vec![0.0; out.len()]; // [parts, tokens, width]
        let parts = state.chunks_mut(state_len).zip(by_part.chunks_mut(tokens * width));
        share(threads, parts, |part, (state, rows)| advance(part, state, rows));
        let all = out.len() / tokens;
        for (part, rows) in by_part.chunks(tokens * width).enumerate() {
            let own = rows.len() / tokens;
            for (row, out) in rows.chunks_exact(own).zip(out.chunks_exact_mut(all)) {
                out[part * width..][..own].copy_from_slice(row);
            }
        }
    }
}

/// Does the work of each of `parts`, which the threads share.
pub(crate) fn share<P: Send>(
    threads: &ThreadPool,
    parts: impl Iterator<Item = P>,
    work: impl Fn(usize, &mut P) + Sync,
) {
    let parts: Vec<_> = parts.map(Mutex::new).collect();
    threads.run(parts.len(), &|task| work(task, &mut parts[task].lock()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_parts_stand_side_by_side() {
        let (mut state, mut out) = (vec![0.0; 7], vec![0.0; 2 * 5]);
        let parts = StateParts { state: &mut state, state_len: 3, out: &mut out, width: 2 };
        parts.advance(2, &ThreadPool::single_threaded(), |part, state, rows| {
            state.fill(part as f32);
            rows.iter_mut().enumerate().for_each(|(i, value)| *value = (10 * part + i) as f32);
        });
        assert_eq!(state, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!(out, [0.0, 1.0, 10.0, 11.0, 20.0, 2.0, 3.0, 12.0, 13.0, 21.0]);
    }
}
