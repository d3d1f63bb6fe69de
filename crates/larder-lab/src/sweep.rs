use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_core::{Scope, Trace};
use larder_policy::eviction::{EvictionSpec, Help, Setting};

use crate::replay::{Replayed, Start, replay_requests};
use crate::{LabError, Requests};

/// Hears how many more requests have been replayed; called from several threads.
pub type Progress<'a> = &'a (dyn Fn(u64) + Sync);

/// Policies × capacities × scopes over the sequences of a trace.
pub struct Sweep<'a> {
    policies: &'a [EvictionSpec],
    help: &'a Help,
    start: Start,
    settings: Vec<(usize, Setting)>,
    pieces: Vec<Requests<'a>>,
}

/// One policy at one capacity.
#[derive(Clone, PartialEq, Debug)]
pub struct Cell {
    /// Its spec.
    pub policy: String,
    /// What shared a pool.
    pub scope: Scope,
    /// Slots for each layer.
    pub slots: usize,
    /// Slots beside them, for all layers together.
    pub scratch: usize,
    /// What was found.
    pub replayed: Replayed,
}

/// The capacities at every eighth of all experts, at least one each.
pub fn eighths(experts: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=8).map(|i| (i * experts / 8).max(1)).collect();
    all.dedup();
    all
}

impl<'a> Sweep<'a> {
    /// Says what to sweep over. `slots` are those for each layer.
    pub fn new(
        trace: &'a Trace,
        policies: &'a [EvictionSpec],
        help: &'a Help,
        (slots, scopes, scratch): (&[usize], &[Scope], usize),
        start: Start,
    ) -> Result<Self, LabError> {
        let pieces = match start {
            Start::Cold => Requests::by_sequence(trace),
            Start::Carried => vec![Requests::all(trace)],
        };
        let Some(first) = pieces.first() else {
            return Err(LabError::Impossible("the trace holds no sequence".into()));
        };
        let mut settings = Vec::new();
        for scope in scopes {
            for slots in slots {
                settings.push((*slots, first.setting(*slots, *scope, scratch)?));
            }
        }
        Ok(Sweep { policies, help, start, settings, pieces })
    }

    /// How many requests it replays in all.
    pub fn work(&self) -> u64 {
        let once: usize = self.pieces.iter().map(Requests::len).sum();
        (once * self.settings.len() * self.policies.len()) as u64
    }

    /// What each sequence finds in memory.
    pub fn start(&self) -> Start {
        self.start
    }

    /// Replays everything on `threads` threads. The result does not depend on how many there are: scope by scope,
    /// capacity by capacity, policy by policy.
    pub fn run(&self, threads: usize, progress: Progress) -> Result<Vec<Cell>, LabError> {
        let cells: Vec<(&(usize, Setting), &EvictionSpec)> = self
            .settings
            .iter()
            .flat_map(|setting| self.policies.iter().map(move |policy| (setting, policy)))
            .collect();
        let jobs = cells.len() * self.pieces.len();
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<LabError>> = Mutex::new(None);
        let work = || {
            let mut done = Vec::new();
            loop {
                let job = next.fetch_add(1, Ordering::Relaxed);
                if job >= jobs {
                    return done;
                }
                let (piece, ((_, setting), policy)) = (job % self.pieces.len(), cells[job / self.pieces.len()]);
                match replay_requests(&self.pieces[piece], setting, policy, self.help) {
                    Ok(replayed) => done.push((job, replayed)),
                    Err(error) => {
                        next.store(jobs, Ordering::Relaxed);
                        *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
                        return done;
                    }
                }
                progress(self.pieces[piece].len() as u64);
            }
        };
        let mut results: Vec<(usize, Replayed)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.clamp(1, jobs.max(1))).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(error);
        }
        results.sort_by_key(|(job, _)| *job);
        let mut found = vec![Replayed::default(); cells.len()];
        results.iter().for_each(|(job, replayed)| found[job / self.pieces.len()].add(replayed));
        let cell = |(((slots, setting), policy), replayed): ((&(usize, Setting), &EvictionSpec), Replayed)| Cell {
            policy: policy.to_string(),
            scope: setting.scope,
            slots: *slots,
            scratch: setting.scratch,
            replayed,
        };
        Ok(cells.into_iter().zip(found).map(cell).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::{Synth, replay};

    #[test]
    fn a_sweep_is_its_replays_on_any_number_of_threads() {
        let trace =
            Synth { tokens: 40, sequences: 3, rows: 2, experts: 8, top_k: 2, ..Synth::default() }.draw().unwrap();
        let policies = ["lru".parse().unwrap()];
        let help = Help::default();
        for start in [Start::Cold, Start::Carried] {
            let axes = (&[2, 5][..], &[Scope::Layer, Scope::Global][..], 1);
            let sweep = Sweep::new(&trace, &policies, &help, axes, start).unwrap();
            let told = AtomicU64::new(0);
            let one = sweep.run(1, &|n| _ = told.fetch_add(n, Ordering::Relaxed)).unwrap();
            assert_eq!(told.into_inner(), sweep.work());
            assert_eq!(one, sweep.run(3, &|_| ()).unwrap());
            assert_eq!(one.len(), 4);
            for cell in &one {
                let alone = replay(&trace, (cell.slots, cell.scope, 1), &policies[0], &help, start).unwrap();
                assert_eq!(cell.replayed, alone);
            }
        }
    }

    #[test]
    fn eighths_are_distinct_and_end_with_everything() {
        assert_eq!(eighths(32), [4, 8, 12, 16, 20, 24, 28, 32]);
        assert_eq!(eighths(3), [1, 2, 3]);
    }

    #[test]
    fn a_capacity_of_nothing_is_refused_before_anything_runs() {
        let trace = Synth::default().draw().unwrap();
        let sweep = Sweep::new(&trace, &[], &Help::default(), (&[4, 0], &[Scope::Layer], 0), Start::Cold).map(drop);
        assert!(sweep.unwrap_err().to_string().contains("capacity of 0"));
    }
}
