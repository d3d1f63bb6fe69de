//! Conversion with an importance matrix.

use std::sync::Arc;

use super::*;
use crate::quantize::{encode, encode_weighted};

const KIND: NumberFormat = NumberFormat::Q5_0;
const PARTS: [&str; 3] = ["gate", "up", "down"];

/// Of the experts of the tiny model; `seed` changes all of it.
fn measured(fixture: &Fixture, seed: usize) -> Importance {
    let mut importance = Importance::new("folder/novel.txt".into(), 64);
    let geometry = fixture.tiny.blueprint().geometry;
    for (layer, part) in
        LAYERS.iter().flat_map(|layer| PARTS[fixture.tiny.first_part()..].iter().map(move |p| (layer, p)))
    {
        let columns = if *part == "down" { geometry.inter } else { geometry.hidden };
        let square = |i: usize| ((i * 7919 + seed) % 101 + 1).pow(2) as f32;
        let sums = (0..EXPERTS * columns).map(square).collect();
        importance.insert(&expert_matrix(*layer, part), sums, vec![32.0; EXPERTS]);
    }
    importance
}

fn options(importance: Importance) -> ConvertOptions {
    ConvertOptions { experts: Some(KIND), importance: Some(Arc::new(importance)), ..ConvertOptions::default() }
}

fn encoded(values: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut bytes = vec![0; KIND.row_bytes(values.len()).unwrap()];
    match importance {
        Some(_) => encode_weighted(KIND, values, importance, &mut bytes).unwrap(),
        None => encode(KIND, values, &mut bytes).unwrap(),
    }
    bytes
}

#[test]
fn experts_are_rounded_by_their_importance() {
    for form in FORMS {
        let fixture = Fixture::new(form);
        let (importance, blueprint) = (measured(&fixture, 0), fixture.tiny.blueprint());
        let report =
            convert(&fixture.source, &blueprint, &fixture.path("store"), &options(importance.clone()), &()).unwrap();
        assert!(report.notes.is_empty(), "{:?}", report.notes);
        let store = Store::open(&fixture.path("store")).unwrap();
        let record = store.manifest().source.imatrix.clone().unwrap();
        assert_eq!((&record.texts[..], &record.digest), (&["novel.txt".to_owned()][..], &importance.digest()));
        let mut assembler = Assembler::new(&fixture.source, &blueprint, Some(KIND)).unwrap();
        assembler.weigh(&mut WeighedMatrices::new(&importance, &fixture.source)).unwrap();
        for (layer, e) in LAYERS.into_iter().flat_map(|l| (0..EXPERTS).map(move |e| (l, e))) {
            let (layout, expert) = (assembler.layout(layer), ExpertId(e as u16));
            let mut data = vec![0; layout.bytes];
            assembler.read_expert(layer, expert, &mut data).unwrap();
            for (index, part) in PARTS.iter().enumerate().skip(fixture.tiny.first_part()) {
                let values = fixture.tiny.part(layer, expert, index);
                let weighed = encoded(&values, importance.of_expert(layer, part, e).as_deref());
                let (_, place) = layout.parts().find(|(name, _)| name == part).unwrap();
                assert!(place.of(&data) == weighed, "{form:?} {layer} {e} {part}");
                assert!(weighed != encoded(&values, None));
            }
            let mut stored = vec![0; layout.bytes];
            store.read_expert(layer, expert, &mut stored).unwrap();
            layout.rearrange(&mut data);
            assert!(stored == data, "{form:?} {layer} {e}");
        }
        assert!(verify(&fixture.path("store"), &()).unwrap().is_good());
    }
}

#[test]
fn a_conversion_goes_on_only_with_the_same_importance_matrix() {
    let fixture = Fixture::new(ExpertForm::Halves);
    let begun = fixture.state(&options(measured(&fixture, 0)));
    write(&fixture.path("begun"), Path::new(CONVERSION_STATE), &begun);
    let go_on = |options: &ConvertOptions| {
        convert(&fixture.source, &fixture.tiny.blueprint(), &fixture.path("begun"), options, &())
    };
    let without = ConvertOptions { experts: Some(KIND), ..ConvertOptions::default() };
    for other in [without, options(measured(&fixture, 1))] {
        let error = go_on(&other).unwrap_err();
        assert!(error.kind == StoreErrorKind::Taken && error.message.contains("with other options"), "{error}");
    }
    go_on(&options(measured(&fixture, 0))).unwrap();
}

#[test]
fn an_importance_matrix_of_another_model_is_refused() {
    let fixture = Fixture::new(ExpertForm::Halves);
    let run = |name: &str, options: &ConvertOptions| {
        convert(&fixture.source, &fixture.tiny.blueprint(), &fixture.path(name), options, &())
    };
    let gate = expert_matrix(LAYERS[1], "gate");
    for (sums, counts, found) in
        [(64, 1, "64 columns"), (32 * 3, 3, "3 experts and 32 columns"), (64 * 4, 4, "4 experts")]
    {
        let mut wrong = measured(&fixture, 0);
        wrong.insert(&gate, vec![1.0; sums], vec![1.0; counts]);
        let error = run("wrong", &options(wrong)).unwrap_err();
        let said =
            format!("has 3 experts and 64 columns in the matrix '{gate}', but its importance is that of {found}");
        assert!(error.kind == StoreErrorKind::Mismatch && error.message.contains(&said), "{error}");
    }
    let mut other = Importance::new("novel.txt".into(), 64);
    other.insert("layers.7.experts.gate", vec![1.0; 3], vec![1.0; 3]);
    let error = run("other", &options(other.clone())).unwrap_err();
    assert!(error.message.contains("has 6 matrices that are rounded"), "{error}");
    assert!(!fixture.path("wrong").exists() && !fixture.path("other").exists());
    let report = run("kept", &ConvertOptions { experts: None, ..options(other) }).unwrap();
    assert_eq!(report.notes, ["the importance matrix is not used, because no matrix is rounded"]);
    let mut some = Importance::new("novel.txt".into(), 64);
    some.insert(&gate, vec![1.0; 64 * 3], vec![1.0; 3]);
    let report = run("some", &options(some)).unwrap();
    assert_eq!(report.notes, ["the importance matrix does not have layers.1.experts.gate and 4 others"]);
}
