//! The strategy `quality`: what it does about missing experts, and how its dial is turned.

use super::*;

const ROWS: usize = 2;

fn table() -> DialTable {
    DialTable {
        substituted: vec![0.2, 0.7],
        left_out: vec![0.5, 2.0],
        small: vec![0.05, 0.1],
        small_share: 0.6,
        rungs: DIAL.rungs.clone(),
    }
}

/// The choice for one layer, with a dial that is not turned.
fn settled(
    table: &DialTable,
    rung: Rung,
    row: usize,
    gate: &Gate,
    logits: &[f32],
    present: &BTreeSet<usize>,
) -> ExpertChoice {
    let mut out = ExpertChoice::default();
    let input = RouterInput { row: MoeRow(row), gate, logits, decode: true };
    // As while the settings are searched.
    let table = DialTable { rungs: Vec::new(), ..table.clone() };
    table.fixed(ROWS, rung).choose(&input, &OfRow(row, present.clone()), &mut out);
    out
}

/// The residents of one layer, whichever it is.
struct OfRow(usize, BTreeSet<usize>);

impl Residency for OfRow {
    fn presence(&self, expert: ExpertKey) -> Presence {
        let resident = expert.row.index() == self.0 && self.1.contains(&expert.expert.index());
        if resident { Presence::Resident } else { Presence::Absent }
    }
}

proptest! {
    #[test]
    fn a_dial_at_its_beginning_changes_no_bit(g in gate(), logits in logits(), present in residents()) {
        let gate = &gates()[g].1;
        let rung = Rung { ratio: 1.0, ..Rung::default() };
        let found = settled(&table(), rung, 0, gate, &logits, &present);
        let mut own = ExpertChoice::default();
        own.experts = super::own(gate, &logits);
        own.weigh(gate, &logits);
        let bits = |choice: &ExpertChoice| choice.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!((&found.experts, bits(&found), &found.small), (&own.experts, bits(&own), &own.small));
    }

    /// Against the cost of each way, expert by expert.
    #[test]
    fn what_costs_least_is_done_about_a_missing_expert(
        g in gate(),
        logits in prop::collection::vec(-4f32..4.0, EXPERTS),
        present in residents(),
        price in 1e-4..0.5f64,
        row in 0..ROWS,
    ) {
        let (gate, table) = (&gates()[g].1, table());
        let rung = Rung { price, ratio: 1.0, ..Rung::default() };
        let found = settled(&table, rung, row, gate, &logits, &present);
        let mut own = ExpertChoice::default();
        own.experts = super::own(gate, &logits);
        own.weigh(gate, &logits);
        let mut wanted: Vec<(ExpertId, f32, bool)> = Vec::new();
        for (at, (expert, weight)) in own.experts.iter().zip(&own.weights).enumerate() {
            let square = f64::from(*weight).powi(2);
            let ways = [price, table.small[row] * square + 0.6 * price, table.left_out[row] * square];
            let least = (0..3).min_by(|a, b| ways[*a].total_cmp(&ways[*b])).unwrap();
            match least {
                _ if at == 0 || present.contains(&expert.index()) => wanted.push((*expert, *weight, false)),
                2 => {}
                way => wanted.push((*expert, *weight, way == 1)),
            }
        }
        let small = |at: usize| found.small.get(at).copied().unwrap_or_default();
        let got: Vec<_> = (0..found.experts.len()).map(|at| (found.experts[at], found.weights[at], small(at))).collect();
        prop_assert_eq!(got, wanted);
    }
}

#[test]
fn the_dial_is_turned_down_while_tokens_cost_more_than_the_budget() {
    let gate = Gate::softmax(8, 4, true);
    let logits = [2.0, 1.9, 1.8, 1.7, 0.0, 0.0, 0.0, 0.0];
    let rung = |price, loss| Rung { lambda: 0.0, price, loss, ratio: 1.0 };
    let table = DialTable { rungs: vec![rung(0.01, 0.005), rung(0.3, 0.1)], ..table() };
    let inputs = StrategyInputs { rows: ROWS, deltas: None, dial: Some(&table) };
    let mut router = "quality:budget=0.01".parse::<RoutingSpec>().unwrap().make(&inputs).unwrap();
    let mut token = |present: &BTreeSet<usize>| {
        let mut experts = 0;
        for row in 0..ROWS {
            let mut out = ExpertChoice::default();
            let input = RouterInput { row: MoeRow(row), gate: &gate, logits: &logits, decode: true };
            router.choose(&input, &OfRow(row, present.clone()), &mut out);
            experts += out.experts.len();
        }
        (experts, router.changes().iter().map(|change| change.left_out).sum::<f64>(), router.report())
    };
    // Nothing is missing: the dial goes to its end, and what is missing then is left out.
    let all: BTreeSet<usize> = (0..8).collect();
    (0..1000).for_each(|_| assert_eq!((token(&all).0, token(&all).1), (8, 0.0)));
    let (experts, changed, _) = token(&BTreeSet::new());
    assert!(experts < 8 && changed > 0.01, "{experts}, {changed}");
    // That costs more than the budget, on and on.
    let left: Vec<usize> = (0..4000).map(|_| token(&BTreeSet::new()).0).collect();
    assert!(left[3000..].contains(&8), "the model's own choice in between");
    let mean = token(&BTreeSet::new()).2.predicted_loss.unwrap();
    // Three quarters of the budget, and nothing in the third of the tokens before.
    assert!((mean / (0.01 * 0.75 * 2.0 / 3.0) - 1.0).abs() < 0.1, "{mean}");
}

#[test]
fn a_calibration_that_does_not_fit_is_refused() {
    let refused = |table: Option<&DialTable>| {
        let spec = "quality:budget=0.01".parse::<RoutingSpec>().unwrap();
        spec.make(&StrategyInputs { rows: ROWS, deltas: None, dial: table }).err().expect("it is refused").to_string()
    };
    assert!(refused(None).contains("larder tune"));
    assert!(refused(Some(&DIAL)).contains("another number of layers"));
    let fits = table();
    for change in [
        |table: &mut DialTable| table.left_out[0] = 0.0,
        |table: &mut DialTable| table.substituted[1] = -1.0,
        |table: &mut DialTable| table.small[1] = f64::NAN,
        |table: &mut DialTable| table.rungs.clear(),
        |table: &mut DialTable| table.rungs.reverse(),
        |table: &mut DialTable| table.rungs[0].ratio = 0.0,
        |table: &mut DialTable| table.small_share = -1.0,
    ] {
        let mut wrong = fits.clone();
        change(&mut wrong);
        assert!(refused(Some(&wrong)).contains("calibrat"), "{wrong:?}");
    }
    for spec in ["quality", "quality:budget=0", "quality:budget=0.01+light:tau=0.1", "quality:budget=x"] {
        assert!(spec.parse::<RoutingSpec>().is_err(), "{spec}");
    }
}
