//! A number format for each matrix.

use super::*;
use crate::format_mix::FormatMix;

#[test]
fn a_mix_gives_each_matrix_the_format_of_its_rule() {
    let fixture = Fixture::new(ExpertForm::Halves);
    let blueprint = fixture.tiny.blueprint();
    let mixed = |name: &str, rules: &str| {
        let mix = FormatMix::parse(rules).unwrap();
        let options = ConvertOptions { experts: Some(NumberFormat::Q8_0), mix, ..ConvertOptions::default() };
        convert(&fixture.source, &blueprint, &fixture.path(name), &options, &())
    };
    let [first, last] = LAYERS;
    let rules = format!("layers.{}.* f16\n*.down q4_0\n*.up keep\n", first.0);
    let report = mixed("mixed", &rules).unwrap();
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    let store = Store::open(&fixture.path("mixed")).unwrap();
    let kinds = |layer| store.layout(layer).kinds();
    assert_eq!(kinds(first), [NumberFormat::F16; 3].into());
    let of_last = kinds(last);
    assert_eq!((of_last.gate, of_last.down), (Some(NumberFormat::Q8_0), NumberFormat::Q4_0));
    assert!(of_last.up.is_float(), "{}", of_last.up);
    // The matrices are those of stores in one format.
    for (layer, kind) in [(first, NumberFormat::F16), (last, NumberFormat::Q4_0)] {
        fixture.convert(kind.name(), Some(kind), None).unwrap();
        let uniform = Store::open(&fixture.path(kind.name())).unwrap();
        let down = |store: &Store| {
            let layout = store.layout(layer);
            let mut data = vec![0; layout.bytes];
            store.read_expert(layer, ExpertId(1), &mut data).unwrap();
            data[layout.down.offset..][..layout.down.bytes].to_vec()
        };
        assert!(down(&store) == down(&uniform), "{kind}");
    }
    verify(&fixture.path("mixed"), &()).unwrap();
    // Another mix is another conversion.
    let state = fixture.state(&ConvertOptions {
        experts: Some(NumberFormat::Q8_0),
        mix: FormatMix::parse("*.down q4_0").unwrap(),
        ..ConvertOptions::default()
    });
    write(&fixture.path("begun"), Path::new(CONVERSION_STATE), &state);
    let error = mixed("begun", "*.down f16").unwrap_err();
    assert!(error.message.contains("or with other options"), "{error}");
    mixed("begun", "*.down q4_0").unwrap();
    let report = mixed("unused", "layers.77.* f16\n*.experts.* f16\n*.down q4_0").unwrap();
    let unused =
        ["the rule for 'layers.77.*' decides about no matrix", "the rule for '*.down' decides about no matrix"];
    assert_eq!(report.notes, unused);
}
