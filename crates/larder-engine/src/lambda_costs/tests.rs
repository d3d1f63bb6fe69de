//! Files, interpolation and sentences of the costs of λ.

use super::*;

fn geometry() -> Geometry {
    Geometry::narrow(3, [0, 2], 8, 2)
}

fn measured(lambda: f64, rise: f64) -> MeasuredLambda {
    let (agreement, substituted) = (0.75, 0.25);
    let text_breaks = text_breaks(rise);
    MeasuredLambda {
        lambda,
        rise,
        rise_error: Some(0.002),
        agreement,
        substituted,
        kl: 0.5,
        misses_per_token: 1.5,
        text_breaks,
    }
}

fn costs() -> LambdaCosts {
    let size = |slots, rises: [f64; 3]| SizeCosts {
        slots,
        perplexity: 20.0,
        lambdas: [0.1, 0.2, 0.4].into_iter().zip(rises).map(|(lambda, rise)| measured(lambda, rise)).collect(),
    };
    LambdaCosts {
        text: "a.txt".into(),
        tokens: 100,
        date: "2026-11-26".into(),
        eviction: "lru".into(),
        settings: "j=1".into(),
        sizes: vec![size(2, [0.01, 0.03, 2.0]), size(4, [0.0, 0.01, 0.5])],
        ..LambdaCosts::new("olmoe", &geometry())
    }
}

fn read(file: &Value) -> Result<LambdaCosts, String> {
    LambdaCosts::from_bytes(file.to_string().as_bytes(), "olmoe", &geometry()).map_err(|e| e.to_string())
}

#[test]
fn a_file_is_read_as_it_was_written() {
    assert_eq!(read(&json!(costs())).unwrap(), costs());
}

#[test]
fn files_that_no_sweep_writes_are_refused() {
    for (change, part) in [
        (json!({"format": 2}), "has format 2"),
        (json!({"experts": 9}), "2 layers of 9 experts"),
        (json!({"model_type": "x\u{1b}[2J"}), "\\u{1b}"),
        (json!({"text": "a\u{1b}[2J"}), "plain"),
        (json!({"text": "a".repeat(201)}), "at most 200 bytes"),
        (json!({"settings": "j=x"}), "must be a whole number"),
        (json!({"settings": "lambda=3"}), "given twice"),
        (json!({"sizes": []}), "1 to 16 cache sizes"),
        (json!({"sizes": vec![&costs().sizes[0]; 2]}), "ascending"),
        (json!({"tokens": -1}), "larder eval sweep --save"),
        (json!({"text": null}), "larder eval sweep --save"),
    ] {
        let mut file = json!(costs());
        file.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error = read(&file).unwrap_err();
        assert!(error.contains(part) && !error.contains('\u{1b}'), "{change}: {error}");
    }
    for (field, value) in [
        ("lambda", json!(0)),
        ("lambda", json!(0.3)),
        ("lambda", json!(1e300)),
        ("rise", json!(-2)),
        ("rise", Value::Null),
        ("rise_error", json!(-1)),
        ("agreement", json!(1.5)),
        ("substituted", json!(0.5)),
        ("kl", json!(-0.5)),
        ("text_breaks", json!(true)),
    ] {
        let mut file = json!(costs());
        file["sizes"][0]["lambdas"][0][field] = value.clone();
        assert!(read(&file).is_err(), "{field} = {value}");
    }
    for (field, value) in [("slots", json!(0)), ("slots", json!(9)), ("perplexity", json!(0.5)), ("lambdas", json!([]))]
    {
        let mut file = json!(costs());
        file["sizes"][0][field] = value.clone();
        assert!(read(&file).is_err(), "{field} = {value}");
    }
    for bytes in [&b""[..], b"{}", b"[1]", b"\xff", b"null"] {
        assert!(LambdaCosts::from_bytes(bytes, "olmoe", &geometry()).is_err());
    }
}

#[test]
fn costs_between_measurements_are_on_the_line_between_them() {
    let costs = costs();
    let at = |lambda| costs.at_size(2).cost(lambda);
    assert_eq!((at(0.0).rise, at(0.0).basis), (0.0, CostBasis::Own));
    assert_eq!((at(0.2).rise, at(0.2).basis), (0.03, CostBasis::Measured));
    assert!((at(0.05).rise - 0.005).abs() < 1e-12 && (at(0.05).agreement - 0.875).abs() < 1e-12);
    assert!((at(0.3).rise - 1.015).abs() < 1e-12 && at(0.3).basis == CostBasis::Between(0.2, 0.4));
    assert_eq!((at(9.0).rise, at(9.0).basis), (2.0, CostBasis::Beyond(0.4)));
    assert!(at(0.3).to_string().ends_with("(between λ = 0.2 and 0.4, which were measured)"), "{}", at(0.3));
    assert_eq!(at(0.2).to_string(), "perplexity +3.0 ± 0.2 %, 75 % of the model's own experts chosen, KL 0.500");
}

#[test]
fn the_measurement_with_no_more_slots_holds() {
    let slots = |slots| costs().at_size(slots).slots;
    assert_eq!([1, 2, 3, 4, 8].map(slots), [2, 2, 2, 4, 4]);
    assert!(costs().source(3).starts_with("Measured with 2 of 8 experts per layer in memory (here 3), "));
}

#[test]
fn a_strategy_is_told_its_cost_if_that_was_measured() {
    let costs = costs();
    let note = |costs, routing: &str| lambda_cost_note(costs, &routing.parse().unwrap(), 2);
    for without in ["original", "max-rank:m=4", "prior:budget=0.1,j=1", "prior:lambda=0,j=1"] {
        assert_eq!(note(Some(&costs), without), None, "{without}");
    }
    let found = note(Some(&costs), "prior:j=1,lambda=0.4,delta=running").unwrap();
    assert!(found.cost.starts_with("perplexity +200.0") && found.warning.unwrap().contains("Text breaks"));
    assert_eq!(note(Some(&costs), "prior:lambda=0.1,j=1").unwrap().warning, None);
    let other = note(Some(&costs), "prior:lambda=0.4,j=2").unwrap();
    assert_eq!((other.cost.as_str(), other.warning), ("measured with j=1, not with j=2", None));
    assert!(note(Some(&costs), "prior:lambda=0.1").is_some_and(|note| note.cost.starts_with("perplexity")));
    assert!(note(None, "prior:lambda=0.4").unwrap().cost.contains("larder eval sweep"));
}

#[test]
fn a_scale_has_few_steps_and_ends_at_the_largest_measured() {
    let mut costs = costs();
    let scale = costs.json(2)["scale"].as_array().unwrap().clone();
    let lambdas: Vec<f64> = scale.iter().map(|step| step["lambda"].as_f64().unwrap()).collect();
    assert_eq!((lambdas.len(), lambdas[7], lambdas[40]), (41, 0.07, 0.4));
    assert!(scale[40]["warning"].is_string() && scale[7]["warning"].is_null());
    costs.sizes[0].lambdas[2].lambda = LAMBDA_MAX;
    assert_eq!(costs.json(2)["scale"].as_array().unwrap().len(), STEPS_MAX + 1);
}
