//! An encoded image does not depend on threads or other pictures.

use std::collections::HashSet;

use larder_vision::VisionError;

use crate::support::{PICTURES, Reference};

#[test]
fn threads_and_other_pictures_change_no_bit() {
    for reference in Reference::all() {
        let one = reference.tower_on(1);
        let alone: Vec<_> = PICTURES.iter().map(|name| one.encode(&reference.picture(name)).unwrap()).collect();
        for threads in [2, 4, 7] {
            let tower = reference.tower_on(threads);
            for (name, alone) in PICTURES.iter().zip(&alone).rev() {
                let image = tower.encode(&reference.picture(name)).unwrap();
                assert!(image == *alone, "{name} differs on {threads} threads");
            }
        }
    }
}

#[test]
fn pictures_are_encoded_at_the_same_time() {
    let reference = &Reference::all()[0];
    let tower = reference.tower_on(2);
    let alone = PICTURES.map(|name| tower.encode(&reference.picture(name)).unwrap());
    std::thread::scope(|scope| {
        let encode = |name| tower.encode(&reference.picture(name)).unwrap();
        let threads = PICTURES.map(|name| scope.spawn(move || encode(name)));
        for (thread, alone) in threads.into_iter().zip(&alone) {
            assert!(thread.join().unwrap() == *alone);
        }
    });
}

#[test]
fn fingerprints_tell_settings_and_weights_apart() {
    let mut seen = HashSet::new();
    for mut reference in Reference::of_repository() {
        assert!(seen.insert(reference.tower().fingerprint()), "two models have the same");
        assert_eq!(reference.tower().fingerprint(), reference.tower_on(1).fingerprint());
        reference.processor["size"]["longest_edge"] = 1_234_567.into();
        assert!(seen.insert(reference.tower().fingerprint()), "other limits have the same");
        let name = if reference.config["model_type"] == "qwen3_omni_moe" { "thinker" } else { "model" };
        let key = |key: &&String| key.starts_with(name) && key.ends_with("visual.patch_embed.proj.weight");
        let Some(key) = reference.weights.0.keys().find(key).cloned() else { panic!("no patch embedding") };
        reference.weights.0.get_mut(&key).unwrap().1[1003] ^= 1;
        assert!(seen.insert(reference.tower().fingerprint()), "other weights have the same");
    }
}

#[test]
fn progress_is_told_and_stops_it() {
    let reference = &Reference::all()[0];
    let (tower, picture) = (reference.tower(), reference.picture("tall"));
    let mut heard = Vec::new();
    let mut listen = |done, of| {
        heard.push((done, of));
        true
    };
    tower.encode_observed(&picture, &mut listen).unwrap();
    let blocks = heard.last().unwrap().1;
    assert_eq!(heard, (0..=blocks).map(|done| (done, blocks)).collect::<Vec<_>>());
    let stopped = tower.encode_observed(&picture, &mut |done, _| done < 1);
    assert!(matches!(stopped, Err(VisionError::Stopped)));
}

#[test]
fn a_plan_can_be_made_of_its_numbers() {
    let reference = &Reference::all()[0];
    let tower = reference.tower();
    assert!(tower.weight_bytes() > 10_000 && tower.weight_bytes() < 1 << 24);
    assert!(tower.memory_bytes(2 << 20) > tower.memory_bytes(1 << 20));
    assert!(tower.operations(2 << 20) > 2.0 * tower.operations(1 << 20), "attention is quadratic");
}
