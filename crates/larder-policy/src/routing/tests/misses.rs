//! Rules for missing experts.

use super::*;

/// The experts with weights, of a strategy that is in its first state.
fn choice(spec: &str, gate: &Gate, logits: &[f32], present: &BTreeSet<usize>) -> ExpertChoice {
    let (mut router, mut out) = (router(spec), ExpertChoice::default());
    let input = RouterInput { row: MoeRow(0), gate, logits, decode: true };
    router.supports(gate).unwrap();
    router.choose(&input, &Residents(present.clone()), &mut out);
    out
}

fn suits(spec: &str, gate: &Gate) -> bool {
    router(spec).supports(gate).is_ok()
}

proptest! {
    #[test]
    fn rules_without_a_weight_below_which_they_act_change_no_bit(
        g in gate(),
        logits in logits(),
        present in residents(),
        lambda in 0.0f64..1.0,
    ) {
        let gate = &gates()[g].1;
        for base in ["original".to_owned(), format!("prior:lambda={lambda}")] {
            let want = choice(&base, gate, &logits, &present);
            for rule in ["light:tau=0", "light:tau=0,fill=resident", "shelf:tau=0", "shelf:tau=0+light:tau=0"] {
                let spec = format!("{base}+{rule}");
                if suits(&spec, gate) {
                    // By their bits, since NaN is no equal of itself.
                    let found = choice(&spec, gate, &logits, &present);
                    let bits = |choice: &ExpertChoice| choice.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
                    prop_assert_eq!((&found.experts, bits(&found), &found.small), (&want.experts, bits(&want), &want.small));
                }
            }
        }
    }

    /// Against lists: those of little weight that are missing go, whatever is left keeps its weight.
    #[test]
    fn light_experts_are_left_out_or_replaced(
        g in gate(),
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        present in residents(),
        tau in 0f32..0.6,
        j in 1usize..3,
    ) {
        let gate = &gates()[g].1;
        let own = choice("original", gate, &logits, &present);
        let keep = if gate.top_k > 1 { j.min(gate.top_k) } else { 1 };
        let is_light = |at: usize| at >= keep && own.weights[at] < tau && !present.contains(&own.experts[at].index());
        let kept: Vec<_> = (0..own.experts.len()).filter(|at| !is_light(*at)).map(|at| (own.experts[at], own.weights[at])).collect();
        let j = if gate.top_k > 1 { j.min(gate.top_k) } else { 1 };
        let found = choice(&format!("light:tau={tau},j={j}"), gate, &logits, &present);
        let pairs = |choice: &ExpertChoice| choice.experts.iter().copied().zip(choice.weights.iter().copied()).collect::<Vec<_>>();
        prop_assert_eq!(&pairs(&found), &kept);
        let spec = format!("light:tau={tau},j={j},fill=resident");
        if suits(&spec, gate) {
            let filled = pairs(&choice(&spec, gate, &logits, &present));
            let mut ranking = Ranking::default();
            ranking.rank(gate, &logits);
            let rank = |expert: &ExpertId| ranking.order().position(|r| r == expert.index()).unwrap();
            prop_assert!(filled.windows(2).all(|pair| rank(&pair[0].0) < rank(&pair[1].0)), "{:?}", filled);
            prop_assert!(kept.iter().all(|pair| filled.contains(pair)), "{:?} {:?}", filled, kept);
            let fillers: Vec<_> = filled.iter().filter(|pair| !kept.contains(pair)).collect();
            let own_missing = own.experts.len() - kept.len();
            prop_assert!(fillers.len() <= own_missing);
            for (expert, weight) in fillers {
                prop_assert!(present.contains(&expert.index()) && !own.experts.contains(expert));
                // In proportion to the first expert as the gate has the two.
                let mut two = vec![];
                gate.weights(&logits, &[own.experts[0], *expert], &mut two);
                let want = own.weights[0] * two[1] / two[0];
                prop_assert!((weight - want).abs() <= 1e-5 + 1e-4 * want.abs(), "{} and not {}: {:?}", weight, want, kept);
            }
            let free = (0..EXPERTS).filter(|e| present.contains(e) && ranking.is_eligible(*e) && !own.experts.contains(&ExpertId(*e as u16)));
            prop_assert_eq!(filled.len(), kept.len() + own_missing.min(free.count()));
        }
    }

    #[test]
    fn smaller_copies_are_for_missing_experts_of_little_weight(
        g in gate(),
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        present in residents(),
        tau in 0f32..1.0,
    ) {
        let gate = &gates()[g].1;
        let found = choice(&format!("shelf:tau={tau}"), gate, &logits, &present);
        let own = choice("original", gate, &logits, &present);
        prop_assert_eq!((&found.experts, &found.weights), (&own.experts, &own.weights));
        let is_small = |at: usize| at > 0 && own.weights[at] < tau && !present.contains(&own.experts[at].index());
        let small: Vec<bool> = (0..own.experts.len()).map(is_small).collect();
        prop_assert_eq!(found.small, if small.contains(&true) { small } else { vec![] });
    }
}

#[test]
fn rules_join_a_strategy_or_stand_alone() {
    let printed = |spec: &str| spec.parse::<RoutingSpec>().unwrap().to_string();
    assert_eq!(printed("light:tau=0.04"), "light:tau=0.04");
    assert_eq!(printed("original+shelf:tau=0.1"), "shelf:tau=0.1");
    let all = "prior:lambda=0.05,j=1+light:tau=0.04+shelf:tau=0.1";
    assert_eq!(printed("prior:lambda=0.05,j=1+shelf:tau=0.1+light:tau=0.04"), all);
    let spec: RoutingSpec = all.parse().unwrap();
    assert!(spec.reads_small_copies() && !spec.is_lossless() && spec.lambda() == Some(0.05));
    assert_eq!(spec.with_lambda("0.2").unwrap().to_string(), all.replace("0.05", "0.2"));
    for (wrong, part) in [
        ("light", "option 'tau' is required"),
        ("light:tau=-1", "tau must be a number of at least 0"),
        ("light:tau=0.1+light:tau=0.2", "light is given twice"),
        ("prior:lambda=0.1+heavy:tau=1", "unknown rule for missing experts 'heavy'; available: light, shelf"),
        ("light:tau=0.1+prior:lambda=0.1", "unknown rule for missing experts 'prior'"),
        ("light:tau=0.1,fill=any", "fill must be none or resident"),
    ] {
        let message = wrong.parse::<RoutingSpec>().err().expect(wrong).to_string();
        assert!(message.contains(part), "{message}");
    }
}
