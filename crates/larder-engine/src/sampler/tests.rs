//! Properties of the sampler against probabilities by definition.

use proptest::prelude::*;

use larder_model::ChangedLogit;
use larder_text::GenerationConfig;

use super::*;

const DRAWING: Sampling = Sampling {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    frequency_penalty: 0.0,
    presence_penalty: 0.0,
};

fn sampler(sampling: Sampling) -> Sampler {
    Sampler::new(sampling, 1).unwrap()
}

/// The probabilities by definition: each step is a mask over a plain softmax.
fn naive(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(sampling.temperature)).collect();
    let mut keep = vec![true; logits.len()];
    let mut ranks: Vec<usize> = (0..logits.len()).collect();
    ranks.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]).then(a.cmp(&b)));
    if sampling.top_k > 0 {
        let least = scaled[ranks[sampling.top_k.min(logits.len()) - 1]];
        (0..logits.len()).for_each(|i| keep[i] &= scaled[i] >= least);
    }
    let softmax = |keep: &[bool]| {
        let weight = |i: usize| if keep[i] { scaled[i].exp() } else { 0.0 };
        let total: f64 = (0..logits.len()).map(weight).sum();
        (0..logits.len()).map(|i| weight(i) / total).collect::<Vec<f64>>()
    };
    let p = softmax(&keep);
    for (rank, &i) in ranks.iter().enumerate() {
        let below: f64 = ranks[rank..].iter().map(|&j| p[j]).sum();
        keep[i] &= below > 1.0 - f64::from(sampling.top_p) || rank == 0;
    }
    let p = softmax(&keep);
    (0..logits.len()).for_each(|i| keep[i] &= p[i] >= f64::from(sampling.min_p) * p[ranks[0]]);
    softmax(&keep)
}

proptest! {
    #[test]
    fn the_best_logits_are_enough(
        logits in prop::collection::vec(prop_oneof![(-40i32..40).prop_map(|l| l as f32 / 8.0), Just(f32::NEG_INFINITY)], 90..300),
        greedy in any::<bool>(),
        top_k in 1usize..40,
        top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
        more in 0.0f32..3.0,
        penalties in prop_oneof![Just((1.0, 0.0)), (0.7f32..1.5, -0.5f32..0.9)],
        previous in prop::collection::vec(0u32..60, 0..30),
    ) {
        let temperature = if greedy { 0.0 } else { 0.8 };
        let (repetition_penalty, frequency_penalty) = penalties;
        let sampling = Sampling { temperature, top_k, top_p, repetition_penalty, frequency_penalty, ..DRAWING };
        let bias = vec![(3, 2.5)];
        let sampler = |_| sampler(sampling).with_logit_bias(bias.clone()).with_prompt_len(previous.len() / 2);
        let BestLogits { count, changes } = sampler(()).best(&[&previous]).unwrap();
        let is_named = |id: usize| changes.listed().any(|listed| listed as usize == id);
        let mut order: Vec<f32> = logits.iter().enumerate().filter(|(id, _)| !is_named(*id)).map(|(_, l)| *l).collect();
        order.sort_by(|a, b| b.total_cmp(a));
        let least = order[count - 1] - more;
        let tokens = logits.iter().enumerate().map(|(id, logit)| TokenLogit { id: id as u32, logit: *logit });
        let tokens: Vec<_> = tokens.filter(|token| token.logit >= least || is_named(token.id as usize)).collect();
        let (mut of_all, mut of_best) = (sampler(()), sampler(()));
        for _ in 0..5 {
            let drawn = of_all.sample(&mut logits.clone(), &previous);
            prop_assert_eq!(drawn, of_best.sample_row(LogitsRow::Best(&tokens), &previous));
        }
    }

    #[test]
    fn the_candidates_have_the_naive_probabilities(
        logits in prop::collection::vec(-40i32..40, 1..600),
        temperature in 0.3f32..2.0,
        top_k in 0usize..40,
        top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
        min_p in prop_oneof![Just(0.0f32), 0.01f32..0.9],
    ) {
        let sampling = Sampling { temperature, top_k, top_p, min_p, ..DRAWING };
        let mut logits: Vec<f32> = logits.into_iter().map(|l| l as f32 / 8.0).collect();
        let want = naive(sampling, &logits);
        let mut sampler = sampler(sampling);
        let drawn = sampler.sample(&mut logits, &[]).unwrap();
        let total: f64 = sampler.candidates.iter().map(|c| c.weight).sum();
        let mut got = vec![0.0; logits.len()];
        sampler.candidates.iter().for_each(|c| got[c.id as usize] = c.weight / total);
        let away = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        prop_assert!(away < 1e-9, "{away}");
        prop_assert!(got[drawn as usize] > 0.0);
    }
}

#[test]
fn tokens_are_drawn_with_their_probabilities() {
    let sampling = Sampling { temperature: 0.8, top_k: 4, ..DRAWING };
    let logits = [0.0, 1.0, 2.0, 0.5, -3.0];
    let mut sampler = sampler(sampling);
    let mut counts = [0.0; 5];
    for _ in 0..40_000 {
        counts[sampler.sample(&mut logits.clone(), &[]).unwrap() as usize] += 1.0 / 40_000.0;
    }
    let away = counts.iter().zip(naive(sampling, &logits)).map(|(a, b)| (a - b).abs());
    assert!(away.fold(0.0, f64::max) < 0.01, "{counts:?}");
    assert_eq!(counts[4], 0.0);
}

#[test]
fn what_is_read_of_logits_is_said() {
    let best = |sampling: Sampling| {
        sampler(sampling).best(&[&[7, 5], &[7]]).map(|best| (best.count, best.changes.listed().collect()))
    };
    let greedy = Sampling::default();
    assert_eq!(best(greedy), Some((1, vec![])));
    assert_eq!(best(Sampling { top_k: 20, ..DRAWING }), Some((20, vec![])));
    assert_eq!(best(DRAWING), None);
    for penalised in [
        Sampling { repetition_penalty: 1.1, ..greedy },
        Sampling { frequency_penalty: 0.1, ..greedy },
        Sampling { presence_penalty: 0.1, ..greedy },
    ] {
        assert_eq!(best(penalised), Some((1, vec![7, 5])));
    }
    let biased = sampler(greedy).with_logit_bias(vec![(1, 1.0), (u32::MAX, 1.0), (1, 2.0)]).best(&[&[7]]).unwrap();
    assert_eq!(biased.count, 1);
    let changed = |id, bias| ChangedLogit { id, bias, ..ChangedLogit::default() };
    assert_eq!(biased.changes.tokens, [changed(1, 3.0), changed(u32::MAX, 1.0)]);
    let token = |id, logit| TokenLogit { id, logit };
    let tokens = [token(3, f32::NEG_INFINITY), token(9, f32::NAN)];
    let error = sampler(greedy).sample_row(LogitsRow::Best(&tokens), &[]).unwrap_err().to_string();
    assert_eq!(error, "the model's logit for token 9 is NaN; it must be finite");
    let error = sampler(greedy).sample_row(LogitsRow::Best(&tokens[..1]), &[]).unwrap_err();
    assert_eq!(error, SamplerError::NoToken(1));
}

#[test]
fn a_model_recommends_sampling() {
    let recommended = |json: &str| Sampling::from(&GenerationConfig::from_bytes(Some(json.as_bytes()), b"{}").unwrap());
    assert_eq!(recommended(r#"{"temperature": 0.7}"#).temperature, 0.0, "greedy without do_sample");
    assert_eq!(recommended(r#"{"do_sample": true}"#).temperature, 1.0);
    let all = r#"{"do_sample": true, "temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.125, "repetition_penalty": 1.25}"#;
    let sampling = Sampling { temperature: 0.5, top_k: 20, top_p: 0.9, min_p: 0.125, ..Sampling::default() };
    assert_eq!(recommended(all), Sampling { repetition_penalty: 1.25, ..sampling });
}

#[test]
fn zero_temperature_takes_the_lowest_id_of_equal_logits() {
    let mut greedy = sampler(Sampling::default());
    assert_eq!(greedy.sample(&mut [1.0, 3.0, 3.0, f32::NEG_INFINITY], &[]), Ok(1));
}

#[test]
fn a_bias_is_added_to_a_tokens_logit() {
    let mut biased = sampler(Sampling::default()).with_logit_bias(vec![(0, 2.0), (1, -100.0), (9, 5.0)]);
    let mut logits = [1.5, 3.0, 2.0];
    assert_eq!(biased.sample(&mut logits, &[]), Ok(0));
    assert_eq!(logits, [3.5, -97.0, 2.0]);
}

#[test]
fn earlier_tokens_are_penalised_once() {
    let mut logits = [2.0, -2.0, 1.5, 0.0];
    let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
    assert_eq!(sampler(penalty).sample(&mut logits, &[0, 1, 0, 3, 99]), Ok(2));
    assert_eq!(logits, [1.0, -4.0, 1.5, 0.0]);
}

#[test]
fn answer_tokens_are_penalised_by_their_number_of_occurrences() {
    let mut logits = [3.0, 3.0, 3.0, 0.5];
    let penalties = Sampling { frequency_penalty: 1.0, presence_penalty: 0.5, ..Sampling::default() };
    let mut sampler = sampler(penalties).with_prompt_len(2);
    assert_eq!(sampler.sample(&mut logits, &[2, 2, 0, 1, 0, 99]), Ok(2));
    assert_eq!(logits, [0.5, 1.5, 3.0, 0.5]);
}

proptest! {
    /// Changes behind a text are those behind a shorter one, with the tokens between.
    #[test]
    fn changes_grow_with_the_text(
        text in prop::collection::vec(0u32..20, 0..60),
        from in 0usize..60,
        parts in 0usize..60,
        prompt in 0usize..30,
        repetition_penalty in prop_oneof![Just(1.0f32), Just(1.3)],
        frequency_penalty in prop_oneof![Just(0.0f32), Just(0.2)],
        presence_penalty in prop_oneof![Just(0.0f32), Just(-0.3)],
        bias in prop::collection::vec((0u32..30, -2.0f32..2.0), 0..6),
    ) {
        let (from, parts, prompt) = (from.min(text.len()), parts.min(text.len()), prompt.min(from.min(text.len())));
        let sampling = Sampling { repetition_penalty, frequency_penalty, presence_penalty, ..Sampling::default() };
        let mut sampler = sampler(sampling).with_logit_bias(bias).with_prompt_len(prompt);
        let short = sampler.best(&[&text[..from]]).unwrap();
        let grown = text[from..].iter().fold(short, |best, id| best.with(*id));
        prop_assert_eq!(&sampler.best(&[&text[..parts], &text[parts..]]).unwrap(), &grown);
        prop_assert_eq!(sampler.draws(&[&text]).unwrap().changes, grown.changes);
    }
}

#[test]
fn after_a_shift_the_answer_begins_earlier() {
    let prompt_after = |keep, dropped| {
        let mut sampler = sampler(Sampling::default()).with_prompt_len(10);
        sampler.shifted(keep, dropped);
        sampler.prompt
    };
    assert_eq!((prompt_after(4, 3), prompt_after(4, 9), prompt_after(12, 5)), (7, 4, 10));
}

#[test]
fn equal_seeds_give_equal_tokens() {
    let draw = |seed| -> Vec<u32> {
        let mut sampler = Sampler::new(DRAWING, seed).unwrap();
        (0..12).map(|_| sampler.sample(&mut [0.0; 10], &[]).unwrap()).collect()
    };
    assert_eq!(draw(42), GOLDEN);
    assert_ne!(draw(43), GOLDEN);
}

const GOLDEN: [u32; 12] = [8, 3, 9, 7, 7, 5, 1, 6, 2, 9, 5, 8];

#[test]
fn logits_that_are_not_finite_are_errors() {
    let mut greedy = sampler(Sampling::default());
    let error = greedy.sample(&mut [0.0, f32::NAN], &[]).unwrap_err();
    assert_eq!(error.to_string(), "the model's logit for token 1 is NaN; it must be finite");
    assert!(greedy.sample(&mut [f32::INFINITY], &[]).is_err());
    assert_eq!(greedy.sample(&mut [f32::NEG_INFINITY; 2], &[]), Err(SamplerError::NoToken(2)));
    assert_eq!(greedy.sample(&mut [], &[]), Err(SamplerError::NoToken(0)));
}

#[test]
fn settings_out_of_range_are_errors() {
    let bad = |sampling: Sampling| sampling.checked().unwrap_err().to_string();
    assert!(bad(Sampling { temperature: -1.0, ..DRAWING }).contains("temperature is -1"));
    assert!(bad(Sampling { temperature: f32::NAN, ..DRAWING }).contains("temperature"));
    assert!(bad(Sampling { top_p: 0.0, ..DRAWING }).contains("top-p"));
    assert!(bad(Sampling { top_p: 1.1, ..DRAWING }).contains("top-p"));
    assert!(bad(Sampling { min_p: -0.1, ..DRAWING }).contains("min-p"));
    assert!(bad(Sampling { repetition_penalty: 0.0, ..DRAWING }).contains("penalty"));
    assert!(bad(Sampling { presence_penalty: f32::NAN, ..DRAWING }).contains("presence penalty"));
    assert!(DRAWING.checked().is_ok());
}
