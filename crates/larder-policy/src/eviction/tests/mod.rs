//! Tests of every eviction policy: the contract, seeds, and specs.

mod adaptive;
mod optimum;
mod orders;
mod rig;
mod theorems;

use larder_core::{CacheScope, ExpertKey};
use proptest::prelude::*;

use super::*;
use rig::{EXPERTS, ROWS, Rig, groups, shape};

/// What may happen to a pool.
#[derive(Clone, Debug)]
enum Event {
    Choice(MoeRow, Vec<usize>),
    Prefetch(ExpertKey),
    Failure(ExpertKey),
    NewSequence,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => groups(4).prop_map(|(row, wanted)| Event::Choice(row, wanted)),
        1 => (0..ROWS, 0..EXPERTS).prop_map(|(row, e)| Event::Prefetch(MoeRow(row).expert(e))),
        1 => (0..ROWS, 0..EXPERTS).prop_map(|(row, e)| Event::Failure(MoeRow(row).expert(e))),
        1 => Just(Event::NewSequence),
    ]
}

/// Victims in order; the rig checks each of them.
fn play(spec: &str, shape: &CacheShape, events: &[Event]) -> Vec<ExpertKey> {
    let choices = events.iter().filter_map(|e| match e {
        Event::Choice(row, wanted) => Some((*row, wanted.clone())),
        _ => None,
    });
    let future = Arc::new(FutureUses::new(ROWS, EXPERTS, choices));
    let mut rig = Rig::new(spec, shape, future);
    for event in events {
        match event {
            Event::Choice(row, wanted) => rig.serve(*row, wanted),
            Event::Prefetch(expert) => rig.prefetch(*expert),
            Event::Failure(expert) => rig.fail(*expert),
            Event::NewSequence => rig.new_sequence(),
        }
        rig.check_refusal();
    }
    rig.victims
}

proptest! {
    /// The contract, for each row of the table: the victim is resident and evictable; there is none only if nothing is
    /// evictable; the same events give the same victims.
    #[test]
    fn every_policy_keeps_the_contract(
        events in prop::collection::vec(event(), 1..120),
        slots in 4usize..12,
        global in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        for spec in compared_specs().map(|spec| spec.to_string()) {
            let shape = shape(slots, scope);
            prop_assert_eq!(play(&spec, &shape, &events), play(&spec, &shape, &events), "{}", spec);
        }
    }
}

#[test]
fn seeds_change_the_victims_of_random_policies() {
    let shape = shape(6, CacheScope::Global);
    let choices: Vec<_> = (0..300usize).map(|i| (MoeRow(i % ROWS), vec![(i * i + i / 7) % EXPERTS])).collect();
    let victims = |spec: &str| {
        let mut rig = Rig::new(spec, &shape, Arc::new(FutureUses::new(ROWS, EXPERTS, choices.clone())));
        choices.iter().for_each(|(row, wanted)| rig.serve(*row, wanted));
        rig.victims
    };
    for name in ["random", "marking", "lecar"] {
        assert_ne!(victims(&format!("{name}:seed=1")), victims(&format!("{name}:seed=2")), "{name}");
    }
}

#[test]
fn specs_that_cannot_be_made_are_refused() {
    let error = |spec: &str, inputs: PolicyInputs| {
        let spec: EvictionSpec = spec.parse()?;
        spec.make(&shape(4, CacheScope::Layer), &inputs).map(|_| ())
    };
    let of_another_size = FutureUses::new(ROWS + 1, EXPERTS, [(MoeRow(0), [0])]);
    let message = |spec: &str, inputs: PolicyInputs| error(spec, inputs).unwrap_err().to_string();
    assert!(message("belady", PolicyInputs::default()).contains("needs the future requests"));
    let inputs = PolicyInputs { future: Some(Arc::new(of_another_size)), ..PolicyInputs::default() };
    assert!(message("belady", inputs).contains("another size"));
    assert!(message("lru:seed=1", PolicyInputs::default()).contains("takes no options"));
    assert!(message("psychic", PolicyInputs::default()).contains("available: lru, lfu, "));
    assert!(message("lfu:keep=1", PolicyInputs::default()).contains("keep must be yes or no"));
    assert!(message("lfru:half-life=0", PolicyInputs::default()).contains("half-life must be a number from"));
}

#[test]
fn names_are_distinct_and_specs_print_themselves() {
    for (i, policy) in POLICIES.iter().enumerate() {
        assert!(POLICIES[..i].iter().all(|p| p.name != policy.name));
        assert!(!policy.about.is_empty());
        assert_eq!(policy.name.parse::<EvictionSpec>().unwrap().to_string(), policy.name);
    }
    assert_eq!("random:seed=7".parse::<EvictionSpec>().unwrap().to_string(), "random:seed=7");
    let compared: Vec<String> = compared_specs().map(|spec| spec.to_string()).collect();
    assert_eq!(compared[..4], ["lru", "lfu", "lfu:keep", "fifo"]);
    assert_eq!(compared.len(), POLICIES.len() + 1);
}
