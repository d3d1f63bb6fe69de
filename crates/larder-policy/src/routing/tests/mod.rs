//! Tests of every routing strategy: the contract, neutral settings, monotony, and specs.

mod algorithms;
mod budget;
mod dial;
mod gates;
mod misses;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use larder_core::{ExpertId, ExpertKey, Presence};
use proptest::prelude::{Just, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as Values;

use super::*;
use gates::{EXPERTS, TOP_K, gate, gates, logits};

/// The residents of one layer.
struct Residents(BTreeSet<usize>);

impl Residency for Residents {
    fn presence(&self, expert: ExpertKey) -> Presence {
        if self.0.contains(&expert.expert.index()) { Presence::Resident } else { Presence::Absent }
    }
}

fn residents() -> impl Values<Value = BTreeSet<usize>> {
    prop::collection::btree_set(0..EXPERTS, 0..=EXPERTS)
}

/// The inputs of a strategy, with a dial for the first row.
fn inputs(rows: usize, deltas: Option<&[f32]>) -> StrategyInputs<'_> {
    StrategyInputs { rows, deltas, dial: Some(&DIAL) }
}

static DIAL: LazyLock<DialTable> = LazyLock::new(|| DialTable {
    substituted: vec![0.4],
    left_out: vec![0.5],
    small: vec![0.05],
    small_share: 0.6,
    rungs: vec![
        Rung { lambda: 0.05, price: 0.001, loss: 0.002, ratio: 1.0 },
        Rung { lambda: 0.2, price: 0.01, loss: 0.02, ratio: 1.5 },
    ],
});

fn router(spec: &str) -> Box<dyn Router> {
    spec.parse::<RoutingSpec>().unwrap().make(&inputs(1, Some(&[3.0]))).unwrap()
}

fn choose_with(router: &mut dyn Router, gate: &Gate, logits: &[f32], present: &BTreeSet<usize>) -> Vec<ExpertId> {
    let mut out = ExpertChoice { experts: vec![ExpertId(999)], ..ExpertChoice::default() };
    let input = RouterInput { row: MoeRow(0), gate, logits, decode: true };
    router.supports(gate).unwrap();
    router.choose(&input, &Residents(present.clone()), &mut out);
    out.experts
}

fn choose(spec: &str, gate: &Gate, logits: &[f32], present: &BTreeSet<usize>) -> Vec<ExpertId> {
    choose_with(router(spec).as_mut(), gate, logits, present)
}

fn own(gate: &Gate, logits: &[f32]) -> Vec<ExpertId> {
    let (mut values, mut ids) = (vec![], vec![]);
    gate.selection_scores(logits, &mut values);
    gate.choose(&values, &mut ids);
    ids
}

/// Example specs of each strategy that suit a gate.
fn examples(name: &str, gate: &Gate) -> Vec<String> {
    let examples: &[&str] = match name {
        "original" => &["original"],
        "prune" => &["prune:h=1", "prune:h={k}"],
        "max-rank" => &["max-rank:m=1", "max-rank:m=9,j=1", "max-rank:m={k},phase=all"],
        "cumsum" => &["cumsum:p=0", "cumsum:p=0.7,j={k}", "cumsum:p=1"],
        "prior" => &[
            "prior:lambda=0.3",
            "prior:lambda=0.5,j=1,delta=token",
            "prior:lambda=2,delta=calibrated",
            "prior:budget=0.05",
            "prior:budget=0.02,measure=mass,delta=token",
        ],
        "replace" => &["replace:k=1", "replace:k={k},seed=5"],
        "drop" => &["drop:k=2", "drop:k={k}"],
        "quality" => &["quality:budget=0.002", "quality:budget=0.01,j=0"],
        _ => panic!("{name} has no example"),
    };
    let examples = examples.iter().map(|e| e.replace("{k}", &gate.top_k.to_string()));
    let suits = |spec: &RoutingSpec| spec.make(&inputs(1, Some(&[3.0]))).unwrap().supports(gate).is_ok();
    examples.filter(|e| e.parse().is_ok_and(|spec| suits(&spec))).collect()
}

proptest! {
    #[test]
    fn every_strategy_keeps_the_contract(g in gate(), logits in logits(), present in residents()) {
        let (gate, k) = (&gates()[g].1, gates()[g].1.top_k);
        let (mut values, mut running) = (vec![], vec![]);
        gate.selection_scores_and_mask(&logits, &mut values, &mut running);
        let own = own(gate, &logits);
        let mut ranking = Ranking::default();
        ranking.rank(gate, &logits);
        let rank = |e: &ExpertId| ranking.order().position(|r| r == e.index()).unwrap();
        for spec in STRATEGIES.iter().flat_map(|s| examples(s.name, gate)) {
            let chosen = choose(&spec, gate, &logits, &present);
            prop_assert!(!chosen.is_empty() && chosen.len() <= k, "{}", spec);
            prop_assert!(chosen.windows(2).all(|w| rank(&w[0]) < rank(&w[1])), "{}: {:?}", spec, chosen);
            let allowed = |e: &ExpertId| running[e.index()] || own.contains(e);
            prop_assert!(chosen.iter().all(allowed), "{}: an expert of a masked group", spec);
            prop_assert_eq!(&chosen, &choose(&spec, gate, &logits, &present), "{}", spec);
            let mut weights = vec![];
            gate.weights(&logits, &chosen, &mut weights);
            let sound = weights.iter().all(|w| w.is_finite()) || logits.iter().any(|l| l.is_nan());
            prop_assert!(sound, "{}: weights {:?}", spec, weights);
        }
    }

    #[test]
    fn neutral_settings_give_the_models_own_choice(g in gate(), logits in logits(), present in residents()) {
        let (name, gate) = &gates()[g];
        let (own, k) = (own(gate, &logits), gate.top_k);
        let neutral = [
            "original".to_owned(),
            "prior:lambda=0".to_owned(),
            "prior:lambda=0,j=1,delta=token".to_owned(),
            "cumsum:p=0".to_owned(),
            "cumsum:p=1e-30".to_owned(),
            format!("max-rank:m={k}"),
            // A single expert is not kept.
            format!("max-rank:m={},j={k}", if k > 1 { EXPERTS } else { 1 }),
            format!("prune:h={k}"),
        ];
        for spec in &neutral {
            prop_assert_eq!(&choose(spec, gate, &logits, &present), &own, "{} of {}", spec, name);
        }
        for spec in STRATEGIES.iter().flat_map(|s| examples(s.name, gate)).filter(|s| !s.contains("phase=all")) {
            let mut out = ExpertChoice::default();
            let input = RouterInput { row: MoeRow(0), gate, logits: &logits, decode: false };
            router(&spec).choose(&input, &Residents(present.clone()), &mut out);
            prop_assert_eq!(&out.experts, &own, "{} in prefill", spec);
        }
    }

    /// Both from the same state.
    #[test]
    fn more_weight_on_the_cache_never_selects_fewer_residents(
        g in gate(),
        logits in logits(),
        present in residents(),
        weights in [0.0f64..1.5, 0.0f64..1.5],
        ranks in [1..=EXPERTS, 1..=EXPERTS],
        j in 0..3usize,
    ) {
        let (name, gate) = &gates()[g];
        let j = j.min(gate.top_k);
        let count = |spec: &str| choose(spec, gate, &logits, &present).iter().filter(|e| present.contains(&e.index())).count();
        let (low, high) = (weights[0].min(weights[1]), weights[0].max(weights[1]));
        for delta in ["running", "token", "calibrated"] {
            let spec = |lambda: f64| format!("prior:lambda={lambda},j={j},delta={delta}");
            prop_assert!(count(&spec(low)) <= count(&spec(high)), "{} of {}", spec(high), name);
            prop_assert!(count(&spec(0.0)) <= count(&spec(1e-9)), "{} of {}", spec(1e-9), name);
        }
        let spec = |m: usize| format!("max-rank:m={m},j={j}");
        prop_assert!(count(&spec(ranks[0].min(ranks[1]))) <= count(&spec(ranks[0].max(ranks[1]))), "{}", name);
        let spec = |p: f64| format!("cumsum:p={},j={j}", p.min(1.0));
        prop_assert!(count(&spec(low)) <= count(&spec(high)), "{}", name);
    }
}

#[test]
fn invalid_specs_are_one_sentence() {
    for (spec, part) in [
        ("prior:lambda=-1", "lambda must be a number of at least 0, not '-1'"),
        ("prior:lambda=inf", "lambda must be a number of at least 0, not 'inf'"),
        ("prior", "either lambda or budget is required"),
        ("prior:lambda=0.1,budget=0.1", "lambda and budget exclude each other"),
        ("prior:lambda=0.1,measure=kl", "measure goes with budget"),
        ("prior:budget=0", "budget must be a number of at least 0.000001"),
        ("prior:lambda=0.1,delta=mean", "delta must be running or token or calibrated"),
        ("max-rank:m=0", "m must be a whole number from 1 to"),
        ("max-rank", "option 'm' is required"),
        ("cumsum:p=1.1", "p must be a number from 0 to 1"),
        ("prune:h=0", "h must be a whole number from 1 to"),
        ("drop:k=1", "k must be a whole number from 2 to"),
        ("replace:k=0", "k must be a whole number from 1 to"),
        ("original:phase=all", "original has no option 'phase'; it takes no options"),
        ("priory", "unknown routing strategy 'priory'; available: original, "),
    ] {
        let message = spec.parse::<RoutingSpec>().err().expect(spec).to_string();
        assert!(message.contains(part), "{message}");
    }
    let calibrated: RoutingSpec = "prior:lambda=1,delta=calibrated".parse().unwrap();
    assert!(calibrated.needs_calibration());
    for deltas in [None, Some(&[1.0][..]), Some(&[1.0, f32::NAN])] {
        let message = calibrated.make(&inputs(2, deltas)).err().unwrap().to_string();
        assert!(message.contains("calibrated Δ"), "{message}");
    }
}

#[test]
fn gates_that_do_not_suit_are_refused() {
    let gate = &gates()[0].1;
    let k = TOP_K;
    for (spec, part) in [
        (format!("prune:h={}", k + 1), "but the model chooses 4 experts"),
        (format!("drop:k={}", k + 1), "but the model chooses 4 experts"),
        (format!("replace:k={}", k + 1), "but the model chooses 4 experts"),
        (format!("prior:lambda=1,j={}", k + 1), "but the model chooses 4 experts"),
        (format!("max-rank:m={}", EXPERTS + 1), "but the model has only 12 experts"),
    ] {
        let message = router(&spec).supports(gate).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let all = Gate { top_k: EXPERTS, ..gate.clone() };
    assert!(router("replace:k=1").supports(&all).unwrap_err().to_string().contains("no expert to substitute"));
}

#[test]
fn names_are_distinct_and_specs_print_themselves() {
    for (i, strategy) in STRATEGIES.iter().enumerate() {
        assert!(STRATEGIES[..i].iter().all(|s| s.name != strategy.name));
        let examples = examples(strategy.name, &gates()[0].1);
        assert!(!examples.is_empty());
        for example in examples {
            let spec: RoutingSpec = example.parse().unwrap();
            assert_eq!((spec.to_string(), spec.name()), (example, strategy.name));
            assert_eq!(spec.is_lossless(), strategy.name == "original");
        }
    }
}

#[test]
fn lambda_keeps_the_other_options() {
    let spec = |routing: &str| routing.parse::<RoutingSpec>().unwrap();
    let routed = |lambda, before| spec(before).with_lambda(lambda).unwrap().to_string();
    assert_eq!(routed("0.3", "original"), "prior:lambda=0.3,j=1");
    assert_eq!(routed("0.3", "max-rank:m=8,j=2"), "prior:lambda=0.3,j=1");
    assert_eq!(routed("0.3", "prior:lambda=0.1,j=2,delta=running"), "prior:lambda=0.3,j=2");
    assert_eq!(routed("0.3", "prior:budget=0.1,measure=mass,j=0"), "prior:lambda=0.3,j=0");
    assert!(RoutingSpec::standard_prior().with_lambda("x").is_err());
    assert_eq!(spec("prior:phase=all,lambda=1,delta=token").prior_settings().unwrap(), "delta=token,j=1,phase=all");
    assert_eq!(spec("cumsum:p=0.5").prior_settings(), None);
}
