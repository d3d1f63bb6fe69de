//! Disks that fail under a running model.

use std::sync::atomic::Ordering;

use larder_core::CacheScope;
use larder_engine::{Session, TokenInput};
use larder_store::reader::{FaultTarget, ReadFault};

use crate::support::rig::{TOKENS, model, read_and_write};
use crate::support::{fixture, golden_models};

#[test]
fn g1_latency_and_a_full_queue_change_no_bit() {
    for folder in golden_models() {
        let model = model(&folder);
        let mut resident = model.resident();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
        for (queue, overtaken) in [(1, 0), (2, 3), (8, 7)] {
            for (slots, scope) in
                [(1, CacheScope::Layer), (2, CacheScope::Layer), (1, CacheScope::Global), (5, CacheScope::Global)]
            {
                for prefetch in [0, 2] {
                    let memory = model.memory().capacity(queue).overtaken(overtaken);
                    let mut streaming = model.streaming(slots, scope, prefetch, memory);
                    let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
                    let folder = folder.display();
                    assert!(got == want, "{folder}: {slots} slots, {scope:?}, queue of {queue}, {prefetch} ahead");
                }
            }
        }
    }
}

#[test]
fn g3_a_failure_ends_the_reading_and_the_session_goes_on() {
    let model = model(&fixture("golden/olmoe"));
    let mut resident = model.resident();
    let want = Session::new(&model.decoder, &mut resident, 100)
        .forward(&TokenInput::prompt(&TOKENS).in_chunks(4), &mut ())
        .unwrap();
    let mut happened = 0;
    let often = FaultTarget::OneIn(3);
    // A flipped bit is looked for when a shard is first read in a run, so it has to come then.
    let first = (0..12).map(|shard| (ReadFault::Flipped(4321), FaultTarget::Shard(shard), 1));
    let faults = [(ReadFault::Gone, often, 4), (ReadFault::Short(5000), often, 4)].into_iter().chain(first);
    for (i, (fault, when, times)) in faults.enumerate() {
        let memory = model.memory().overtaken(2).with_fault(when, fault, times);
        let faults = memory.faults_injected();
        let mut streaming = model.streaming(2, CacheScope::Layer, i % 3, memory);
        let mut session = Session::new(&model.decoder, &mut streaming, 100);
        let mut failures = 0;
        let got = loop {
            match session.forward(&TokenInput::prompt(&TOKENS).in_chunks(4), &mut ()) {
                Ok(logits) => break logits,
                Err(error) => {
                    let said = error.to_string();
                    assert!(said.contains("layer ") && said.contains("expert "), "{said}");
                    assert!(session.tokens().is_empty(), "a failed read leaves no tokens");
                    failures += 1;
                    assert!(failures < 10, "{fault:?} never passes");
                }
            }
        };
        assert_eq!(failures > 0, faults.load(Ordering::Relaxed) > 0, "{fault:?}");
        happened += failures;
        assert!(got == want, "{fault:?}: the text is wrong after a failure");
    }
    assert!(happened >= 10, "only {happened} failures happened");
}
