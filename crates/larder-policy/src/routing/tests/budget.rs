//! The closed loop and the quality that it keeps to.

use super::quality::{Quality, QualityMeter};
use super::*;
use larder_core::Rng;

/// Logits that are roughly normal, and half of the experts present.
fn token(rng: &mut Rng, scale: f32) -> (Vec<f32>, BTreeSet<usize>) {
    let mut normal = || (0..12).map(|_| rng.below(1000) as f32 / 1000.0).sum::<f32>() - 6.0;
    let logits = (0..EXPERTS).map(|_| normal() * scale).collect();
    (logits, (0..EXPERTS).filter(|_| rng.below(2) == 0).collect())
}

#[test]
fn the_budget_is_kept_at_every_moment_and_spent_in_the_end() {
    let gate = Gate::softmax(EXPERTS, TOP_K, true);
    for (measure, budget) in [("kl", 0.002), ("kl", 0.02), ("kl", 0.1), ("mass", 0.01), ("mass", 0.05)] {
        let mut router = router(&format!("prior:budget={budget},measure={measure}"));
        let (mut meter, mut total, mut residents) = (QualityMeter::default(), Quality::default(), 0);
        let mut rng = Rng::with_stream(3, 0);
        for i in 0..4000 {
            // The cost of a λ changes half-way.
            let (logits, present) = token(&mut rng, if i < 2000 { 2.0 } else { 0.7 });
            let chosen = choose_with(router.as_mut(), &gate, &logits, &present);
            residents += chosen.iter().filter(|e| present.contains(&e.index())).count();
            total += meter.measure(&gate, &logits, &chosen);
            let spent = if measure == "kl" { total.mean_kl() } else { 1.0 - total.kept_mass() };
            assert!(spent <= budget + 1e-12, "{measure} {budget}: {spent} after {i}");
        }
        let spent = if measure == "kl" { total.mean_kl() } else { 1.0 - total.kept_mass() };
        assert!(spent > 0.9 * budget, "{measure} {budget}: only {spent}");
        assert!(residents as f64 > 2.05 * 4000.0, "more than half of the chosen were resident: {residents}");
        let lambda = router.report().lambda;
        assert!(lambda.len() == 1 && (0.001..1.0).contains(&lambda[0]), "{lambda:?}");
    }
}

#[test]
fn each_layer_has_a_budget_of_its_own() {
    let gate = Gate::softmax(EXPERTS, TOP_K, true);
    let mut router = "prior:budget=0.02".parse::<RoutingSpec>().unwrap().make(&StrategyInputs::of_rows(2)).unwrap();
    let (mut rng, mut out) = (Rng::with_stream(4, 0), ExpertChoice::default());
    for _ in 0..1000 {
        for (row, scale) in [(0, 3.0), (1, 0.3)] {
            let (logits, present) = token(&mut rng, scale);
            let input = RouterInput { row: MoeRow(row), gate: &gate, logits: &logits, decode: true };
            router.choose(&input, &Residents(present), &mut out);
        }
    }
    let RouterReport { lambda, delta, .. } = router.report();
    assert!(lambda[1] > 1.5 * lambda[0], "flat layers allow a larger λ: {lambda:?}");
    assert!(delta[0] > 5.0 * delta[1], "{delta:?}");
}

#[test]
fn quality_counts_substituted_experts() {
    let gate = Gate::softmax(4, 2, true);
    // Probabilities 0.4, 0.3, 0.2, 0.1.
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let mut meter = QualityMeter::default();
    let mut of = |chosen: &[u16]| {
        let chosen: Vec<ExpertId> = chosen.iter().map(|e| ExpertId(*e)).collect();
        meter.measure(&gate, &logits, &chosen)
    };
    assert_eq!(of(&[0, 1]), Quality { choices: 1, original_experts: 2, substituted: 0, kept: 1.0, kl: 0.0 });
    let q = of(&[0, 3]);
    assert_eq!((q.substituted, q.original_experts), (1, 2));
    assert!((q.kept - 0.5 / 0.7).abs() < 1e-6 && (q.kl - (0.7f64 / 0.5).ln()).abs() < 1e-6);
    let dropped = of(&[0]);
    assert!(dropped.substituted == 1 && (dropped.kept - 0.4 / 0.7).abs() < 1e-6);
    let both = q + dropped;
    assert_eq!((both.agreement(), both.choices), (0.5, 2));
    assert!((both.kept_mass() - (0.5 + 0.4) / 1.4).abs() < 1e-6);
    assert_eq!((Quality::default().kept_mass(), Quality::default().mean_kl()), (1.0, 0.0));
}
