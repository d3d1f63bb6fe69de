//! Tests of the learned policy: refusals, the incremental state, and that the victim is worth least.

use std::sync::Arc;

use larder_core::{CacheScope, MoeRow};
use proptest::prelude::*;

use super::testing::{arrays, evictor};
use super::*;
use crate::eviction::{EvictionSpec, Key, LayerChoice, PolicyInputs};

const SIZE: MoeSize = MoeSize { rows: 3, experts: 6, top_k: 2 };

fn shape(scope: CacheScope) -> CacheShape {
    CacheShape { rows: SIZE.rows, experts: SIZE.experts, top_k: SIZE.top_k, slots: 4, scope, scratch: 0 }
}

/// The choices of sixty steps, row by row.
fn choices() -> impl Iterator<Item = (MoeRow, [usize; 2])> {
    (0..60).map(|step| (MoeRow(step % SIZE.rows), [step * 7 % 5, 5 - step * 7 % 5 / 2]))
}

#[test]
fn weights_that_do_not_fit_are_one_sentence() {
    let inputs = |evictor| PolicyInputs { evictor, ..PolicyInputs::default() };
    let said = |shape: &CacheShape, inputs: &PolicyInputs| {
        let spec: EvictionSpec = "learned".parse().unwrap();
        spec.make(shape, inputs).err().map(|e| e.to_string())
    };
    let weights = Some(Arc::new(evictor(SIZE)));
    assert_eq!(said(&shape(CacheScope::Layer), &inputs(None)).unwrap(), "learned needs trained weights");
    let other = CacheShape { experts: 8, ..shape(CacheScope::Global) };
    assert_eq!(
        said(&other, &inputs(weights.clone())).unwrap(),
        "learned has weights for a model of 3 layers of 6 experts, 2 for each token, but this model has 3 layers of 8 \
         experts, 2 for each token"
    );
    assert_eq!(said(&shape(CacheScope::Global), &inputs(weights)), None);
}

#[test]
fn weights_of_another_format_are_refused() {
    let said = |key: &str, value: &str| {
        let mut arrays = arrays(CROSSLAYER, SIZE, 1);
        arrays.meta.insert(key.to_owned(), value.to_owned());
        Evictor::from_arrays(&arrays).err().map_or("fits".to_owned(), |e| e.to_string())
    };
    assert_eq!(said("seed", "7"), "fits");
    assert_eq!(said("format", "x"), "the metadata's 'format' is 'x'; 'larder-evictor' is needed");
    assert_eq!(said("version", "2"), "the metadata's 'version' is '2'; '1' is needed");
    assert_eq!(said("form", "oracle"), "the metadata's 'form' is 'oracle'; 'crosslayer' or 'flashmoe' is needed");
    assert!(said("features", "0").contains("were trained on features 0, but this version of larder computes "));
    assert_eq!(said("layers", "many"), "the metadata's 'layers' is 'many', not a whole number");
    assert!(said("layers", "18446744073709551615").ends_with("is not the size of any model"));
    assert!(said("top_k", "7").ends_with("is not the size of any model"));
    assert_eq!(said("experts", "5"), "the array 'popularity' has shape [3, 6]; [3, 5] is needed");
    assert_eq!(said("hidden", "100000"), "the metadata's 'hidden' is '100000'; '1 to 512' is needed");
    let mut arrays = arrays(FLASHMOE, SIZE, 1);
    assert!(Evictor::from_arrays(&arrays).is_ok());
    arrays.meta.remove("features");
    assert_eq!(Evictor::from_arrays(&arrays).err().unwrap().to_string(), "the metadata have no 'features'");
}

/// The hidden layer from its definition, in double precision, over all choices so far.
fn hidden(weights: &Arrays, past: &[(MoeRow, [usize; 2])], popularity: &[f32], hidden: usize) -> Vec<f64> {
    let (wholes, scales) = weights.quantised("gather", &[SIZE.rows, SCALES, SIZE.experts, hidden]).unwrap();
    let row_now = past.last().unwrap().0.index();
    let bias = &weights.floats("gather_bias", &[SIZE.rows, hidden]).unwrap()[row_now * hidden..][..hidden];
    let mut sum: Vec<f64> = bias.iter().map(|b| f64::from(*b)).collect();
    for row in 0..SIZE.rows {
        let mine: Vec<_> = past.iter().filter(|(r, _)| r.index() == row).collect();
        for scale in 0..SCALES {
            for expert in 0..SIZE.experts {
                let usual = f64::from(popularity[row * SIZE.experts + expert]);
                let start = if scale == 0 { 0.0 } else { usual };
                let keep = if scale == 0 { 0.0 } else { 0.5f64.powf(f64::from(HALF_LIVES[scale - 1]).recip()) };
                let value = mine.iter().fold(start, |value, (_, wanted)| {
                    keep * value + (1.0 - keep) * f64::from(u8::from(wanted.contains(&expert)))
                });
                let at = (row * SCALES + scale) * SIZE.experts + expert;
                for (unit, sum) in sum.iter_mut().enumerate() {
                    *sum += (value - usual) * f64::from(wholes[at * hidden + unit]) * f64::from(scales[at]);
                }
            }
        }
    }
    sum.iter().map(|x| x / (1.0 + (-x).exp())).collect()
}

#[test]
fn incremental_state_matches_a_computation_from_scratch() {
    let arrays = arrays(CROSSLAYER, SIZE, 5);
    let units = arrays.count("hidden").unwrap();
    let popularity = arrays.floats("popularity", &[SIZE.rows, SIZE.experts]).unwrap();
    let weights = Arc::new(crosslayer::CrosslayerWeights::from_arrays(SIZE, &arrays).unwrap());
    let mut scorer = crosslayer::Crosslayer::new(weights);
    let mut past = Vec::new();
    for (row, wanted) in choices() {
        scorer.observe(row, &wanted);
        past.push((row, wanted));
        let anew = hidden(&arrays, &past, popularity, units);
        for (kept, anew) in scorer.active().iter().zip(anew) {
            assert!((f64::from(*kept) - anew).abs() < 1e-3 * anew.abs().max(1.0), "{kept} {anew} {}", past.len());
        }
    }
}

#[test]
fn pools_of_layers_share_one_network() {
    let inputs = PolicyInputs { evictor: Some(Arc::new(evictor(SIZE))), ..PolicyInputs::default() };
    let spec: EvictionSpec = "learned".parse().unwrap();
    let mut apart = spec.make(&shape(CacheScope::Layer), &inputs).unwrap();
    let mut together = spec.make(&shape(CacheScope::Global), &inputs).unwrap();
    let all = |policies: &mut Vec<Box<dyn crate::eviction::Eviction>>, scope| {
        for row in (0..SIZE.rows).map(MoeRow) {
            for expert in 0..SIZE.experts {
                policies[shape(scope).pool(row)].admit(shape(scope).key(row.expert(expert)));
            }
        }
    };
    all(&mut apart, CacheScope::Layer);
    all(&mut together, CacheScope::Global);
    for (nth, (row, wanted)) in choices().enumerate() {
        if nth == 30 {
            apart.iter_mut().chain(&mut together).for_each(|p| p.new_sequence());
        }
        let choice = LayerChoice { row, wanted: &wanted, tokens: &vec![1; wanted.len()], logits: &[] };
        apart[row.index()].begin(&choice);
        together[0].begin(&choice);
        let of_row = |key: Key| shape(CacheScope::Global).expert(0, key).row == row;
        let found = together[0].victim(&of_row).map(|key| shape(CacheScope::Global).expert(0, key).expert.index());
        assert_eq!(apart[row.index()].victim(&|_| true).map(|key| key.index()), found);
    }
}

proptest! {
    /// The victim is worth least among all evictable experts scored again, in whatever order rows choose.
    #[test]
    fn the_victim_is_worth_least(
        steps in prop::collection::vec(
            (prop_oneof![9 => Just(1usize), 1 => 0..SIZE.rows], prop::sample::subsequence(vec![0usize, 1, 2, 3, 4, 5], 2),
             0u8..30), 1..80),
        form in prop::sample::select(vec![CROSSLAYER, FLASHMOE]),
        global in any::<bool>(),
    ) {
        let shape = shape(if global { CacheScope::Global } else { CacheScope::Layer });
        let evictor = Arc::new(Evictor::from_arrays(&arrays(form, SIZE, 3)).unwrap());
        let mut scorer = evictor.scorer();
        let inputs = PolicyInputs { evictor: Some(evictor), ..PolicyInputs::default() };
        let mut policies = "learned".parse::<EvictionSpec>().unwrap().make(&shape, &inputs).unwrap();
        let mut inside = vec![Vec::<Key>::new(); shape.pools()];
        let mut row = MoeRow(SIZE.rows - 1);
        for (ahead, wanted, event) in steps {
            if event == 0 {
                policies.iter_mut().for_each(|policy| policy.new_sequence());
                scorer.new_sequence();
            }
            row = MoeRow((row.index() + ahead) % SIZE.rows);
            let pool = shape.pool(row);
            policies[pool].begin(&LayerChoice { row, wanted: &wanted, tokens: &vec![1; wanted.len()], logits: &[] });
            scorer.observe(row, &wanted);
            for key in wanted.iter().map(|expert| shape.key(row.expert(*expert))) {
                if inside[pool].contains(&key) {
                    policies[pool].touch(key);
                    continue;
                }
                policies[pool].admit(key);
                inside[pool].push(key);
                if inside[pool].len() <= shape.slots {
                    continue;
                }
                let may_leave = |other: Key| other != key;
                let victim = policies[pool].victim(&may_leave).unwrap();
                let mut worth = |key: Key| {
                    let expert = shape.expert(pool, key);
                    let ahead = expert.row.index() + 2 * SIZE.rows - row.index() - 1;
                    scorer.worth(expert, ahead % SIZE.rows + 1)
                };
                let least = inside[pool].iter().filter(|k| may_leave(**k)).map(|k| worth(*k)).fold(f32::INFINITY, f32::min);
                prop_assert_eq!(worth(victim), least);
                policies[pool].forget(victim);
                inside[pool].retain(|k| *k != victim);
            }
        }
    }
}
