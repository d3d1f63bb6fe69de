//! The file, interpolation between its measurements, and sentences on what λ costs.

use larder_core::{DEFINITION, Geometry};
use serde_json::{Value, json};

use super::lambda_cost::{CostBasis, LAMBDA_MAX, STEPS_MAX};
use super::*;

fn measured(lambda: f64, rise: f64) -> MeasuredLambda {
    MeasuredLambda { lambda, rise, rise_error: Some(0.002), agreement: 0.75, kl: 0.5, misses_per_token: 1.5 }
}

fn made() -> QualityCalibration {
    let setting =
        |price: f64, loss, bytes| MeasuredSetting { price, loss, bytes, ratio: 1.0, ..MeasuredSetting::default() };
    QualityCalibration {
        model_type: "olmoe".into(),
        experts: 8,
        text: "a.txt".into(),
        tokens: 100,
        date: "2026-11-26".into(),
        definition: DEFINITION,
        slots: 2,
        eviction: "lru".into(),
        delta: vec![1.25, 3.5],
        lambdas: vec![measured(0.1, 0.01), measured(0.2, 0.03), measured(0.4, 2.0)],
        substituted: vec![0.5, 1.0],
        left_out: vec![1.0, 2.0],
        settings: vec![setting(0.0, 0.0, 100.0), setting(0.1, 0.01, 60.0), setting(0.4, 0.03, 40.0)],
        ..QualityCalibration::default()
    }
}

fn read(file: &Value) -> Result<QualityCalibration, String> {
    let geometry = Geometry::narrow(3, [0, 2], 8, 2);
    QualityCalibration::from_bytes(file.to_string().as_bytes(), "olmoe", &geometry).map_err(|e| e.to_string())
}

#[test]
fn a_calibration_is_read_as_it_was_written() {
    let found = read(&json!(made())).unwrap();
    assert_eq!(found, made());
    assert_eq!((found.table().rungs.len(), found.table().rungs[1].loss), (2, 0.03));
}

#[test]
fn files_that_no_tune_writes_are_refused() {
    for (field, value, part) in [
        ("experts", json!(9), "2 layers of 9 experts"),
        ("model_type", json!("x\u{1b}[2J"), "\\u{1b}"),
        ("model_type", json!("mixtral"), "this model is olmoe"),
        ("definition", json!(1), "measured with definition 1 of products"),
        ("text", json!("a\u{1b}[2J"), "plain"),
        ("text", json!("a".repeat(201)), "at most 200 bytes"),
        ("text", Value::Null, "larder tune"),
        ("tokens", json!(-1), "larder tune"),
        ("delta", json!([1.0]), "spread Δ"),
        ("delta", json!([1.0, -1.0]), "spread Δ"),
        ("delta", json!([1.0, null]), "larder tune"),
        ("lambdas", json!([]), "1 to 100 values of λ"),
        ("lambdas", json!([measured(0.2, 0.1), measured(0.1, 0.2)]), "ascending"),
        ("left_out", json!([1.0]), "1 layers of 8"),
        ("left_out", json!([1.0, 0.0]), "larder tune"),
        ("substituted", json!([0.5, -1.0]), "larder tune"),
        ("small", json!([1.0]), "larder tune"),
        ("small_share", json!(2.0), "larder tune"),
        ("settings", json!(&made().settings[..1]), "larder tune"),
    ] {
        let mut file = json!(made());
        file[field] = value.clone();
        let error = read(&file).unwrap_err();
        assert!(error.contains(part) && !error.contains('\u{1b}'), "{field} = {value}: {error}");
    }
    for (field, value) in [
        ("lambda", json!(0)),
        ("lambda", json!(0.3)),
        ("lambda", json!(1e300)),
        ("rise", json!(-2)),
        ("rise", Value::Null),
        ("rise_error", json!(-1)),
        ("agreement", json!(1.5)),
        ("kl", json!(-0.5)),
        ("misses_per_token", json!(-0.5)),
    ] {
        let mut file = json!(made());
        file["lambdas"][0][field] = value.clone();
        assert!(read(&file).is_err(), "{field} = {value}");
    }
    for (field, value) in [("loss", json!(0.04)), ("ratio", json!(0))] {
        let mut file = json!(made());
        file["settings"][1][field] = value.clone();
        assert!(read(&file).is_err(), "{field} = {value}");
    }
    let geometry = Geometry::narrow(3, [0, 2], 8, 2);
    for bytes in [&b""[..], b"{}", b"[1]", b"\xff", b"null"] {
        let error = QualityCalibration::from_bytes(bytes, "olmoe", &geometry).unwrap_err().to_string();
        assert!(error.contains("larder tune"), "{error}");
    }
}

#[test]
fn settings_between_those_measured_are_interpolated() {
    let bytes = |loss| made().at_loss(loss).bytes;
    assert_eq!([0.0, 0.005, 0.01, 0.02, 0.03, 1.0].map(bytes), [100.0, 80.0, 60.0, 50.0, 40.0, 40.0]);
}

#[test]
fn costs_between_measurements_are_on_the_line_between_them() {
    let at = |lambda| made().lambda_cost(lambda);
    assert_eq!((at(0.0).rise, at(0.0).basis), (0.0, CostBasis::Own));
    assert_eq!((at(0.2).rise, at(0.2).basis), (0.03, CostBasis::Measured));
    assert!((at(0.05).rise - 0.005).abs() < 1e-12 && (at(0.05).agreement - 0.875).abs() < 1e-12);
    assert!((at(0.3).rise - 1.015).abs() < 1e-12 && at(0.3).basis == CostBasis::Between(0.2, 0.4));
    assert_eq!((at(9.0).rise, at(9.0).basis), (2.0, CostBasis::Beyond(0.4)));
    assert!(at(0.3).to_string().ends_with("(between λ = 0.2 and 0.4, which were measured)"), "{}", at(0.3));
    assert_eq!(at(0.2).to_string(), "perplexity +3.0 ± 0.2 %, 75 % of the model's own experts chosen, KL 0.500");
    let source = "Measured with 2 of 8 experts per layer in memory";
    assert!(made().lambda_source(2).starts_with(&format!("{source}, eviction lru, on 100 tokens of a.txt")));
    assert!(made().lambda_source(3).starts_with(&format!("{source} (here 3), ")));
}

#[test]
fn a_strategy_is_told_its_cost_if_that_was_measured() {
    let made = made();
    let note = |made, routing: &str| lambda_cost_note(made, &routing.parse().unwrap());
    for without in ["original", "max-rank:m=4", "prior:budget=0.1,j=1", "prior:lambda=0,j=1"] {
        assert_eq!(note(Some(&made), without), None, "{without}");
    }
    let found = note(Some(&made), "prior:j=1,lambda=0.4,delta=running").unwrap();
    assert!(found.cost.starts_with("perplexity +200.0") && found.warning.unwrap().contains("Text breaks"));
    assert_eq!(note(Some(&made), "prior:lambda=0.1,j=1").unwrap().warning, None);
    let other = note(Some(&made), "prior:lambda=0.4,j=2").unwrap();
    assert_eq!((other.cost.as_str(), other.warning), ("measured with j=1, not with j=2", None));
    assert!(note(Some(&made), "prior:lambda=0.1").is_some_and(|note| note.cost.starts_with("perplexity")));
    assert!(note(None, "prior:lambda=0.4").unwrap().cost.contains("larder tune"));
}

#[test]
fn a_scale_has_few_steps_and_ends_at_the_largest_measured() {
    let mut made = made();
    let scale = made.lambda_json(2)["scale"].as_array().unwrap().clone();
    let lambdas: Vec<f64> = scale.iter().map(|step| step["lambda"].as_f64().unwrap()).collect();
    assert_eq!((lambdas.len(), lambdas[7], lambdas[40]), (41, 0.07, 0.4));
    assert!(scale[40]["warning"].is_string() && scale[7]["warning"].is_null());
    made.lambdas[2].lambda = LAMBDA_MAX;
    assert_eq!(made.lambda_json(2)["scale"].as_array().unwrap().len(), STEPS_MAX + 1);
}
