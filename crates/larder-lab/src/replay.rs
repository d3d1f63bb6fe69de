use larder_cache::{Counts, Ledger, Wave};
use larder_core::{Scope, Trace};
use larder_policy::eviction::{EvictionSpec, Help, Setting};

use crate::lives::{Lives, Watch};
use crate::requests::Ask;
use crate::{LabError, Requests};

/// What a sequence finds in memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Start {
    /// Nothing, and the policy is new.
    #[default]
    Cold,
    /// What the one before it left, as in a chat.
    Carried,
}

impl std::fmt::Display for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Start::Cold => "cold",
            Start::Carried => "carried",
        })
    }
}

/// Of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RowCounts {
    /// Experts that were there.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
}

/// Of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SequenceCounts {
    /// Experts that were wanted.
    pub wanted: u64,
    /// Experts that were not there.
    pub misses: u64,
}

/// What a replay found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Replayed {
    /// Tokens that were replayed.
    pub tokens: u64,
    /// The ledger's counts.
    pub counts: Counts,
    /// Of each layer.
    pub rows: Vec<RowCounts>,
    /// Of each sequence.
    pub sequences: Vec<SequenceCounts>,
    /// How long experts stayed.
    pub lives: Lives,
}

impl Replayed {
    /// The share of wanted experts that were there.
    pub fn hit_rate(&self) -> f64 {
        self.counts.hits as f64 / self.counts.wanted().max(1) as f64
    }

    /// Adds the sequences of another replay behind these.
    pub fn add(&mut self, other: &Replayed) {
        self.tokens += other.tokens;
        self.counts = self.counts + other.counts;
        self.rows.resize(self.rows.len().max(other.rows.len()), RowCounts::default());
        for (sum, row) in self.rows.iter_mut().zip(&other.rows) {
            sum.hits += row.hits;
            sum.misses += row.misses;
        }
        self.sequences.extend_from_slice(&other.sequences);
        self.lives.add(&other.lives);
    }
}

/// Replays a trace with `slots` for each layer, in one pool or apart.
pub fn replay(
    trace: &Trace,
    (slots, scope, scratch): (usize, Scope, usize),
    spec: &EvictionSpec,
    help: &Help,
    start: Start,
) -> Result<Replayed, LabError> {
    let pieces = match start {
        Start::Cold => Requests::by_sequence(trace),
        Start::Carried => vec![Requests::all(trace)],
    };
    let mut all = Replayed::default();
    for requests in &pieces {
        let setting = requests.setting(slots, scope, scratch)?;
        all.add(&replay_requests(requests, &setting, spec, help)?);
    }
    Ok(all)
}

/// Replays requests through the ledger, which is empty at first. Reads take no time.
pub fn replay_requests(
    requests: &Requests,
    setting: &Setting,
    spec: &EvictionSpec,
    help: &Help,
) -> Result<Replayed, LabError> {
    let mut tally = Tally {
        starts: Vec::new(),
        rows: vec![RowCounts::default(); setting.rows],
        watch: Watch::new(setting.rows, setting.experts),
    };
    let counts = drive(requests, setting, spec, help, &mut tally)?;
    tally.starts.push(counts);
    let sequence = |(from, to): (&Counts, &Counts)| {
        let passed = *to - *from;
        SequenceCounts { wanted: passed.wanted(), misses: passed.misses }
    };
    Ok(Replayed {
        tokens: requests.tokens(),
        counts,
        rows: tally.rows,
        sequences: tally.starts.iter().zip(&tally.starts[1..]).map(sequence).collect(),
        lives: tally.watch.finish(),
    })
}

/// Looks on while a trace is replayed.
pub(crate) trait Observer {
    /// A sequence begins.
    fn sequence(&mut self, _ledger: &Ledger) {}

    /// A layer has chosen, and nothing has happened yet.
    fn visit(&mut self, ask: &Ask, ledger: &Ledger);

    /// Some of its experts were there and some have come.
    fn wave(&mut self, ask: &Ask, wave: &Wave);
}

/// Leads requests through the ledger as the engine does.
pub(crate) fn drive(
    requests: &Requests,
    setting: &Setting,
    spec: &EvictionSpec,
    help: &Help,
    observer: &mut impl Observer,
) -> Result<Counts, LabError> {
    let mut ledger = Ledger::new(setting, spec.make(setting, &requests.help(spec, help))?);
    let mut wave = Wave::default();
    for ask in requests.iter() {
        if ask.starts_sequence {
            observer.sequence(&ledger);
            ledger.new_sequence();
        }
        observer.visit(&ask, &ledger);
        visit(&mut ledger, &ask, &mut wave, |wave| observer.wave(&ask, wave));
    }
    Ok(ledger.counts())
}

/// One visit, wave by wave.
pub(crate) fn visit(ledger: &mut Ledger, ask: &Ask, wave: &mut Wave, mut then: impl FnMut(&Wave)) {
    ledger.begin(ask.row, ask.wanted, ask.logits);
    let in_order: Vec<usize>;
    let mut rest = ask.wanted;
    if rest.len() > ledger.capacity() {
        let mut wanted = rest.to_vec();
        ledger.put_in_order(ask.row, &mut wanted);
        in_order = wanted;
        rest = &in_order;
    }
    while !rest.is_empty() {
        ledger.open(ask.row, rest, wave);
        wave.misses.iter().for_each(|(expert, _)| ledger.arrived(ask.row, *expert));
        ledger.close(ask.row, wave);
        then(wave);
        rest = &rest[wave.len()..];
    }
}

/// Adds up what happens.
struct Tally {
    /// The counts when each sequence began.
    starts: Vec<Counts>,
    rows: Vec<RowCounts>,
    watch: Watch,
}

impl Observer for Tally {
    fn sequence(&mut self, ledger: &Ledger) {
        self.starts.push(ledger.counts());
    }

    fn visit(&mut self, ask: &Ask, _: &Ledger) {
        self.watch.visit(ask.row);
    }

    fn wave(&mut self, ask: &Ask, wave: &Wave) {
        self.watch.wave(ask.row, wave);
        self.rows[ask.row].hits += wave.hits.len() as u64;
        self.rows[ask.row].misses += wave.misses.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use larder_core::Pass;

    use super::*;

    /// Two sequences over one layer of four experts.
    fn trace() -> Trace {
        let mut trace = Trace::new(1, 4, 1);
        for (ids, starts_sequence) in [([0], true), ([1], false), ([0], false), ([2], false), ([0], true), ([1], false)]
        {
            trace.push(&Pass { ids: &ids, starts_sequence, ..Pass::default() }).unwrap();
        }
        trace
    }

    fn run(start: Start, slots: usize) -> Replayed {
        replay(&trace(), (slots, Scope::Layer, 0), &"lru".parse().unwrap(), &Help::default(), start).unwrap()
    }

    #[test]
    fn a_cold_cache_finds_nothing_of_the_sequence_before() {
        let cold = run(Start::Cold, 2);
        let misses: Vec<_> = cold.sequences.iter().map(|s| s.misses).collect();
        assert_eq!((misses, cold.counts.hits, cold.counts.evictions), (vec![3, 2], 1, 1));
        let carried = run(Start::Carried, 2);
        let misses: Vec<_> = carried.sequences.iter().map(|s| s.misses).collect();
        assert_eq!((misses, carried.counts.hits), (vec![3, 1], 2));
        assert_eq!(carried.rows, [RowCounts { hits: 2, misses: 4 }]);
        assert_eq!(carried.lives.refetches, 1);
    }

    #[test]
    fn more_experts_than_slots_come_in_waves() {
        let mut trace = Trace::new(1, 4, 3);
        trace.push(&Pass { ids: &[0, 1, 2], ..Pass::default() }).unwrap();
        let spec = "lru".parse().unwrap();
        let all = replay(&trace, (1, Scope::Layer, 0), &spec, &Help::default(), Start::Cold).unwrap();
        assert_eq!((all.counts.misses, all.counts.evictions, all.tokens), (3, 2, 1));
    }

    #[test]
    fn impossible_capacities_are_refused() {
        let said = |slots, scratch| {
            let spec = "lru".parse().unwrap();
            let result = replay(&trace(), (slots, Scope::Global, scratch), &spec, &Help::default(), Start::Cold);
            result.unwrap_err().to_string()
        };
        assert!(said(0, 0).contains("capacity of 0"));
        assert!(said(5, 0).contains("more than the 4 experts"));
        assert!(said(1, 9).contains("9 scratch slots"));
    }
}
