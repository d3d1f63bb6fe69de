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
    let flipped =
        |target: fn(usize) -> FaultTarget| (0..12).map(move |shard| (ReadFault::Flipped(4321), target(shard), 1));
    // As often as a short read is attempted.
    let short = (0..12).map(|shard| (ReadFault::Short(3000), FaultTarget::Shard(shard), 3));
    let faults = [(ReadFault::Gone, often, 4), (ReadFault::Flipped(77), often, 4)]
        .into_iter()
        .chain(short)
        .chain(flipped(FaultTarget::Shard))
        .chain(flipped(FaultTarget::Again));
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

/// A disk that returns the right bytes of an expert once, and then wrong ones without an error.
#[test]
fn wrong_bytes_of_a_later_read_end_the_run_and_name_the_expert() {
    let model = model(&fixture("golden/olmoe"));
    let mut resident = model.resident();
    let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
    let geometry = model.decoder.geometry();
    let (layer, experts) = (geometry.moe_layers[1], geometry.experts);
    let mut refused = 0;
    for prefetch in [0, 2] {
        for expert in 0..experts {
            let target = FaultTarget::Again(experts + expert);
            let memory = model.memory().with_fault(target, ReadFault::Flipped(99), u64::MAX);
            let faults = memory.faults_injected();
            // One slot: nearly every read is a second one.
            let mut streaming = model.streaming(1, CacheScope::Layer, prefetch, memory);
            let mut session = Session::new(&model.decoder, &mut streaming, 100);
            let mut outcome = session.forward(&TokenInput::prompt(&TOKENS).in_chunks(1).all_logits(), &mut ());
            if let Ok(logits) = &outcome {
                assert!(logits[..] == want[..logits.len()], "expert {expert}: computed with wrong bytes");
                outcome = session.forward(&TokenInput::prompt(&TOKENS).in_chunks(1), &mut ());
            }
            let Err(error) = outcome else {
                assert!(faults.load(Ordering::Relaxed) == 0 || prefetch > 0, "expert {expert}: a fault was overlooked");
                continue;
            };
            let said = error.to_string();
            assert!(said.contains(&format!("{layer}, expert {expert}:")) && said.contains("have checksum"), "{said}");
            refused += 1;
        }
    }
    assert!(refused >= experts, "only {refused} runs met a fault");
}

/// What `-o check-reads=first` gives up.
#[test]
fn wrong_bytes_of_a_later_read_pass_if_only_first_reads_are_checked() {
    let model = model(&fixture("golden/olmoe"));
    let mut resident = model.resident();
    let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
    let mut differ = 0;
    for shard in 0..2 * model.decoder.geometry().experts {
        let memory = model.memory().with_fault(FaultTarget::Again(shard), ReadFault::Flipped(99), u64::MAX);
        let mut streaming = model.hardly_checked(memory);
        let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
        differ += usize::from(got != want);
    }
    assert!(differ > 0, "no fault changed the logits");
}
