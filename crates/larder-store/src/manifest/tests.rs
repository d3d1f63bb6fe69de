//! Tests of manifests: contradictions, versions.

use larder_core::{ExpertLayout, LayerIdx, NumberFormat, RowOrder};

use super::*;

/// A text that could be a checksum.
fn sum() -> String {
    "0123456789abcdef".repeat(2)
}

fn manifest() -> Manifest {
    let geometry = Geometry {
        layers: 3,
        moe_layers: vec![LayerIdx(1), LayerIdx(2)],
        experts: 2,
        top_k: 1,
        hidden: 64,
        inter: 32,
        bias: false,
    };
    let layout = ExpertLayout::new(64, 32, [NumberFormat::F16; 3], false).unwrap();
    let sums = |name: &str| ExpertChecksums([name.repeat(32), sum()]);
    Manifest {
        format: FORMAT_VERSION,
        larder: "0".into(),
        model_type: "olmoe".into(),
        geometry,
        experts: ExpertFiles {
            layout: RowOrder::Plain,
            classes: vec![ExpertClass::of(&layout).unwrap()],
            layers: vec![0, 0],
            checksums: vec![vec![sums("a"), sums("b")], vec![sums("c"), sums("d")]],
        },
        small_experts: None,
        resident: ResidentFile { bytes: 0, header_checksum: sum() },
        tables: vec![TableFile { checksum: sum(), ..TableFile::new("embed", NumberFormat::F16, 7, 64).unwrap() }],
        sidecars: vec![SidecarFile { name: "tokenizer.json".into(), bytes: 0, checksum: sum() }],
        source: Provenance {
            files: vec![],
            identity: Some("id".into()),
            experts: "keep".into(),
            resident: "keep".into(),
            mix: Default::default(),
            imatrix: None,
            small_experts: None,
        },
        config: serde_json::json!({"b": 1, "a": 2}),
    }
}

fn read(bytes: &[u8]) -> Result<Manifest> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(MANIFEST_FILE), bytes).unwrap();
    Manifest::read(dir.path()).map(|(manifest, _)| manifest)
}

#[test]
fn a_manifest_round_trips_with_its_config_in_order() {
    let bytes = manifest().to_bytes();
    let back = read(&bytes).unwrap();
    assert_eq!(back, manifest());
    assert_eq!(back.to_bytes(), bytes);
}

#[test]
fn other_experts_give_another_fingerprint() {
    let (one, mut other, mut resident) = (manifest(), manifest(), manifest());
    other.experts.checksums[1][0] = ExpertChecksums(["e".into(), "f".into()]);
    resident.resident.header_checksum = "r".into();
    assert_ne!(one.experts_fingerprint(), other.experts_fingerprint());
    assert_eq!(one.experts_fingerprint(), resident.experts_fingerprint());
}

#[test]
fn a_store_of_another_format_is_refused_with_the_command_that_makes_a_new_one() {
    for (format, advice) in [(1, "; make"), (3, "; update larder, or make")] {
        let error = read(format!(r#"{{"format": {format}, "something": "else"}}"#).as_bytes()).unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::OtherFormat);
        let want = format!(
            "has store format {format}, but this larder reads only format 2{advice} a new store in another folder with `larder convert SOURCE STORE`"
        );
        assert_eq!(error.message, want);
    }
    for broken in [r#"{"format": 2, "something": "else"}"#, "{"] {
        assert_eq!(read(broken.as_bytes()).unwrap_err().kind, StoreErrorKind::Malformed);
    }
}

#[test]
fn contradictory_manifests_are_refused() {
    type Change = fn(&mut Manifest);
    let changes: [(&str, Change); 29] = [
        ("layer beyond", |m| m.geometry.layers = 2),
        ("layers out of order", |m| m.geometry.moe_layers.reverse()),
        ("more experts", |m| m.geometry.experts = usize::MAX),
        ("no experts per token", |m| m.geometry.top_k = 0),
        ("huge", |m| m.geometry.hidden = usize::MAX / 64 * 32),
        ("other width", |m| m.geometry.inter = 64),
        ("odd width", |m| {
            (m.geometry.inter, m.experts.classes[0].kinds) = (33, [NumberFormat::Q8_0; 3].into());
        }),
        ("other data bytes", |m| m.experts.classes[0].data_bytes += 4096),
        ("other file bytes", |m| m.experts.classes[0].file_bytes += 65536),
        ("other kinds", |m| m.experts.classes[0].kinds.gate = Some(NumberFormat::F32)),
        ("no gate", |m| m.experts.classes[0].kinds.gate = None),
        ("with and without gate", |m| {
            let layout = ExpertLayout::new(64, 32, [NumberFormat::F16; 2], false).unwrap();
            m.experts.classes.push(ExpertClass::of(&layout).unwrap());
            m.experts.layers[1] = 1;
        }),
        ("no classes", |m| m.experts.classes = vec![]),
        ("many classes", |m| m.experts.classes = vec![m.experts.classes[0]; 3]),
        ("class out of range", |m| m.experts.layers[1] = 1),
        ("huge class", |m| m.experts.layers[1] = usize::MAX),
        ("fewer layers", |m| m.experts.layers = vec![0]),
        ("a text instead of a checksum", |m| {
            m.experts.checksums[0][1] = ExpertChecksums(["f".repeat(5000), sum()]);
        }),
        ("a table's checksum", |m| m.tables[0].checksum.push('0')),
        ("a checksum in capitals", |m| m.resident.header_checksum = "A".repeat(32)),
        ("a sidecar's checksum", |m| m.sidecars[0].checksum.clear()),
        ("table twice", |m| m.tables.push(m.tables[0].clone())),
        ("table elsewhere", |m| m.tables[0].name = "../embed".into()),
        ("table of no rows", |m| m.tables[0].rows = 0),
        ("huge table", |m| m.tables[0].rows = usize::MAX / 2),
        ("huge blocks", |m| m.tables[0].block_rows = usize::MAX),
        ("empty blocks", |m| m.tables[0].block_rows = 0),
        ("small copy of other sizes", |m| {
            m.small_experts = Some(m.experts.clone());
            m.small_experts.as_mut().unwrap().classes[0].data_bytes = 1 << 60;
        }),
        ("sidecar", |m| {
            m.sidecars = vec![SidecarFile { name: "../x".into(), bytes: 0, checksum: sum() }];
        }),
    ];
    for (name, change) in changes {
        let mut manifest = manifest();
        change(&mut manifest);
        assert_eq!(read(&manifest.to_bytes()).expect_err(name).kind, StoreErrorKind::Malformed);
    }
}
