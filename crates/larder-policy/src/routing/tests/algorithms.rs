//! Single strategies against their definitions.

use super::*;

fn raw(k: usize) -> Gate {
    Gate { score: larder_core::Score::Raw, ..Gate::softmax(EXPERTS, k, false) }
}

fn ids(chosen: Vec<ExpertId>) -> Vec<usize> {
    chosen.into_iter().map(|e| e.index()).collect()
}

/// The experts of `first`, then the others in the order of `all`.
fn promote(first: &[usize], all: &[usize]) -> Vec<usize> {
    let rest = all.iter().filter(|e| !first.contains(e));
    first.iter().chain(rest).copied().collect()
}

proptest! {
    /// Algorithms 1 and 2, with lists.
    #[test]
    fn max_rank_and_cumsum_are_the_papers(
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        present in residents(),
        m in 1..=EXPERTS,
        p in 0f32..1.0,
        j in 0..=TOP_K,
    ) {
        let gate = Gate::softmax(EXPERTS, TOP_K, true);
        let mut shares = vec![];
        gate.probabilities(&logits, &mut shares);
        let mut order: Vec<usize> = (0..EXPERTS).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let expected = |m: usize| {
            let cached: Vec<usize> = order[..m].iter().copied().filter(|e| present.contains(e)).collect();
            let ranked = promote(&order[..j], &promote(&cached, &order));
            promote(&[], &order).into_iter().filter(|e| ranked[..TOP_K].contains(e)).collect::<Vec<_>>()
        };
        prop_assert_eq!(ids(choose(&format!("max-rank:m={m},j={j}"), &gate, &logits, &present)), expected(m));
        let (mut sum, mut reached) = (0.0, 0);
        while sum < p && reached < EXPERTS {
            sum += shares[order[reached]];
            reached += 1;
        }
        prop_assert_eq!(ids(choose(&format!("cumsum:p={p},j={j}"), &gate, &logits, &present)), expected(reached));
    }

    /// The paper's bonus is on logits; that the model sorts their softmax must not matter.
    #[test]
    fn prior_treats_a_softmax_as_its_logits(
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        present in residents(),
        lambda in 0.0f64..1.0,
    ) {
        let spec = format!("prior:lambda={lambda},delta=token");
        let softmax = Gate::softmax(EXPERTS, TOP_K, true);
        prop_assert_eq!(
            choose(&spec, &softmax, &logits, &present),
            choose(&spec, &raw(TOP_K), &logits, &present)
        );
    }

    #[test]
    fn replace_and_drop_touch_one_rank(
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        rank in 1..=TOP_K,
        seed in any::<u64>(),
    ) {
        let gate = raw(TOP_K);
        let own = ids(own(&gate, &logits));
        let replaced = ids(choose(&format!("replace:k={rank},seed={seed}"), &gate, &logits, &BTreeSet::new()));
        let without: Vec<usize> = (0..TOP_K).filter(|r| r + 1 != rank).map(|r| own[r]).collect();
        prop_assert_eq!(&replaced[..TOP_K - 1], &without[..]);
        prop_assert!(!own.contains(&replaced[TOP_K - 1]));
        if rank > 1 {
            let kept = ids(choose(&format!("drop:k={rank}"), &gate, &logits, &BTreeSet::new()));
            prop_assert_eq!(&kept[..], &own[..rank - 1]);
        }
        let pruned = ids(choose(&format!("prune:h={rank}"), &gate, &logits, &BTreeSet::new()));
        prop_assert_eq!(&pruned[..], &own[..rank]);
    }
}

/// Logits 3, 2, 1, 0 and then far below.
fn stairs(top: f32) -> Vec<f32> {
    (0..EXPERTS).map(|i| if i < 4 { top - i as f32 } else { top - 3.0 }).collect()
}

#[test]
fn the_bonus_is_lambda_times_the_mean_range() {
    let (gate, logits) = (raw(2), stairs(3.0));
    let present = BTreeSet::from([3]);
    assert_eq!(ids(choose("prior:lambda=0.6", &gate, &logits, &present)), [0, 1], "0 + 1.8 < 2");
    assert_eq!(ids(choose("prior:lambda=0.7", &gate, &logits, &present)), [0, 3], "0 + 2.1 > 2");
    // A range of 3 and one of 0 are 1.5 on average: 0.7 of it is not enough, 1.4 is.
    for (lambda, want) in [(0.7, [0, 1]), (1.4, [0, 3])] {
        let mut router = router(&format!("prior:lambda={lambda}"));
        choose_with(router.as_mut(), &gate, &[1.0; EXPERTS], &present);
        assert_eq!(ids(choose_with(router.as_mut(), &gate, &logits, &present)), want);
        assert_eq!(router.report(), RouterReport { lambda: vec![lambda], delta: vec![1.5], predicted_loss: None });
    }
    // Calibrated as 3 in these tests.
    assert_eq!(ids(choose("prior:lambda=0.7,delta=calibrated", &gate, &[1.0; EXPERTS], &present)), [0, 3]);
    let far = BTreeSet::from([2, 3]);
    assert_eq!(ids(choose("prior:lambda=5,j=0", &gate, &logits, &far)), [2, 3]);
    assert_eq!(ids(choose("prior:lambda=5,j=1", &gate, &logits, &far)), [0, 2]);
}

#[test]
fn no_bonus_at_all_is_not_a_bonus_of_zero() {
    let mut logits = [-1.0; EXPERTS];
    (logits[0], logits[1]) = (-0.0, 0.0);
    assert_eq!(ids(choose("prior:lambda=0", &raw(1), &logits, &BTreeSet::from([0]))), [1], "gates sort -0 below 0");
}

#[test]
fn the_best_expert_is_always_chosen_unless_it_is_the_only_one() {
    let (logits, present) = (stairs(3.0), BTreeSet::from([2, 3]));
    for spec in ["prior:lambda=9", "max-rank:m=4", "cumsum:p=1"] {
        assert_eq!(ids(choose(spec, &raw(2), &logits, &present)), [0, 2], "{spec}");
        assert_eq!(ids(choose(&format!("{spec},j=0"), &raw(2), &logits, &present)), [2, 3], "{spec}");
        for one in [spec.to_owned(), format!("{spec},j=1")] {
            assert_eq!(ids(choose(&one, &raw(1), &logits, &present)), [2], "{one} where one is chosen");
        }
    }
}

#[test]
fn an_expert_in_flight_counts_as_present() {
    struct OnItsWay;
    impl Residency for OnItsWay {
        fn presence(&self, expert: ExpertKey) -> Presence {
            if expert == MoeRow(0).expert(3) { Presence::InFlight } else { Presence::Absent }
        }
    }
    let (gate, logits, mut out) = (raw(2), stairs(3.0), ExpertChoice::default());
    let input = RouterInput { row: MoeRow(0), gate: &gate, logits: &logits, decode: true };
    router("prior:lambda=1").choose(&input, &OnItsWay, &mut out);
    assert_eq!(ids(out.experts), [0, 3]);
}

#[test]
fn prefill_only_with_phase_all() {
    let (gate, logits, mut out) = (raw(2), stairs(3.0), ExpertChoice::default());
    let input = RouterInput { row: MoeRow(0), gate: &gate, logits: &logits, decode: false };
    for (spec, want) in [("max-rank:m=4", [0, 1]), ("max-rank:m=4,phase=all", [0, 3])] {
        router(spec).choose(&input, &Residents(BTreeSet::from([3])), &mut out);
        assert_eq!(ids(out.experts.clone()), want, "{spec}");
    }
}
