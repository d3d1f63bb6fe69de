//! Tests of training on a planted pattern, and of weights files.

use std::sync::Arc;

use larder_core::{CacheScope, Trace, TracePass};
use larder_policy::eviction::PolicyInputs;
use larder_policy::eviction::learned::Evictor;

use super::*;
use crate::{InitialCache, replay};

const ROWS: usize = 2;
const EXPERTS: usize = 16;

/// Each sequence cycles through topics, each with its own experts. The experts that are active now predict the next
/// ones; an expert's own past does not.
fn planted(sequences: usize, seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let mut trace = Trace::new(ROWS, EXPERTS, 2);
    for _ in 0..sequences {
        let mut topic = rng.below(8);
        for token in 0..64 {
            let ids = [topic, 8 + topic, (topic + 3) % 8, 8 + (topic + 5) % 8].map(|e| e as u16);
            trace.push(&TracePass { ids: &ids, starts_sequence: token == 0, ..TracePass::default() }).unwrap();
            if rng.below(3) == 0 {
                topic = (topic * 3 + 1) % 8;
            }
        }
    }
    trace
}

fn config(network: NetworkKind) -> TrainingConfig {
    TrainingConfig { hidden: 16, epochs: 6, lanes: 2, learning_rate: 1e-2, seed: 3, ..TrainingConfig::new(network) }
}

fn trained(network: NetworkKind, seed: u64) -> Arrays {
    let split = Split { train: (0..8).collect(), validation: vec![8, 9], test: vec![] };
    train(&planted(10, 1), &split, &TrainingConfig { seed, ..config(network) }, &mut |_| {}).unwrap()
}

fn misses(spec: &str, evictor: Option<Evictor>, scope: CacheScope) -> u64 {
    let inputs = PolicyInputs { evictor: evictor.map(Arc::new), ..PolicyInputs::default() };
    let spec = spec.parse().unwrap();
    replay(&planted(6, 2), (4, scope, 0), &spec, &inputs, InitialCache::Cold).unwrap().counts.misses
}

#[test]
fn both_networks_learn_the_planted_pattern() {
    for network in [NetworkKind::Crosslayer, NetworkKind::Flashmoe] {
        let arrays = trained(network, 3);
        for scope in [CacheScope::Layer, CacheScope::Global] {
            let [lru, belady] = ["lru", "belady"].map(|spec| misses(spec, None, scope));
            let learned = misses("learned", Some(Evictor::from_arrays(&arrays).unwrap()), scope);
            let closed = (lru as f64 - learned as f64) / (lru as f64 - belady as f64);
            let wanted = if network == NetworkKind::Crosslayer { 0.3 } else { 0.1 };
            assert!(closed > wanted, "{network:?} {scope}: {lru} {learned} {belady}");
        }
    }
}

#[test]
fn training_is_reproducible_by_seed() {
    for network in [NetworkKind::Crosslayer, NetworkKind::Flashmoe] {
        assert_eq!(trained(network, 3), trained(network, 3));
        assert_ne!(trained(network, 3).all, trained(network, 4).all);
    }
}

#[test]
fn weights_round_trip_through_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for network in [NetworkKind::Crosslayer, NetworkKind::Flashmoe] {
        let path = folder.path().join("evictor.safetensors");
        let arrays = trained(network, 3);
        write_evictor(&path, &arrays).unwrap();
        assert_eq!(larder_engine::evictor_arrays(&std::fs::read(&path).unwrap()).unwrap(), arrays);
        assert_eq!(read_evictor(&path).unwrap().size(), MoeSize { rows: ROWS, experts: EXPERTS, top_k: 2 });
    }
}

#[test]
fn other_files_are_refused_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evictor.safetensors");
    let error_of = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        read_evictor(&path).err().unwrap().to_string()
    };
    assert!(error_of(b"no").contains("is not a safetensors file"));
    let trace = folder.path().join("trace");
    planted(1, 1).write(&trace).unwrap();
    assert!(error_of(&std::fs::read(&trace).unwrap()).contains("weights for eviction are F32 or I8"));
    let mut arrays = trained(NetworkKind::Crosslayer, 3);
    arrays.meta.insert("features".into(), "0".into());
    write_evictor(&path, &arrays).unwrap();
    assert!(read_evictor(&path).err().unwrap().to_string().contains("were trained on features 0"));
    assert!(read_evictor(folder.path()).is_err() && read_evictor(&folder.path().join("none")).is_err());
}

#[test]
fn training_without_sequences_is_refused() {
    let error = train(&planted(1, 1), &Split::default(), &config(NetworkKind::Crosslayer), &mut |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "there are no sequences to train on");
}
