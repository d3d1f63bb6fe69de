//! Tests of traces: content, files, damage.

use proptest::prelude::*;

use super::*;

fn small() -> Trace {
    let mut trace = Trace::new(2, 4, 2);
    let pass = |ids: &'static [u16], starts_sequence| TracePass { ids, starts_sequence, ..TracePass::default() };
    trace.push(&pass(&[0, 1, 2, 3, 1, 2, 3, 0], true)).unwrap();
    trace.push(&pass(&[3, UNUSED, 1, 0], false)).unwrap();
    trace.push(&pass(&[2, 0, 0, 2], true)).unwrap();
    trace.meta.insert("model".into(), "a \"small\" one\n".into());
    trace
}

fn error_of(result: Result<Trace, TraceError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn steps_need_each_expert_once_per_pass() {
    let trace = small();
    let counts: Vec<_> = trace.steps().take(2).map(|s| s.tokens).collect();
    assert_eq!(counts, [vec![1, 2, 1], vec![1, 2, 1]]);
    let steps: Vec<_> = trace.steps().map(|s| (s.row.index(), s.wanted, s.starts_sequence)).collect();
    let want = [
        (0, vec![0, 1, 2], true),
        (1, vec![2, 3, 0], false),
        (0, vec![3], false),
        (1, vec![1, 0], false),
        (0, vec![2, 0], true),
        (1, vec![0, 2], false),
    ];
    assert_eq!(steps, want);
    assert_eq!((trace.passes, trace.sequences), (vec![2, 1, 1], vec![3, 1]));
}

fn with_capacities(changes: &[(u32, u32)]) -> Trace {
    let change = |(pass, slots): &(u32, u32)| CapacityAt { pass: *pass, slots: *slots, before_sequence: false };
    Trace { capacities: changes.iter().map(change).collect(), ..small() }
}

#[test]
fn capacities_change_with_the_first_row_of_a_pass() {
    let trace = with_capacities(&[(0, 4), (1, 2), (1, 3), (3, 1)]);
    trace.check().unwrap();
    let slots = |step: TraceStep| step.capacities.iter().map(|c| c.slots).collect::<Vec<_>>();
    assert_eq!(trace.steps().map(slots).collect::<Vec<_>>(), [&[4][..], &[], &[2, 3], &[], &[], &[]]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace");
    trace.write(&file).unwrap();
    assert_eq!(Trace::read(&file).unwrap(), trace);
    let pairs = |trace: &Trace| trace.capacities.iter().map(|c| (c.pass, c.slots)).collect::<Vec<_>>();
    assert_eq!(pairs(&trace.select(0..1)), [(0, 4), (1, 2), (1, 3)]);
    assert_eq!(pairs(&trace.select(1..2)), [(0, 3), (1, 1)]);
    let mut joined = trace.select(0..1);
    joined.append(&trace.select(1..2)).unwrap();
    assert_eq!(pairs(&joined), [(0, 4), (1, 2), (1, 3), (2, 3), (3, 1)]);
    assert_eq!(joined.passes, trace.passes);
    for wrong in [&[(4, 1)][..], &[(1, 0)], &[(1, 9)], &[(2, 1), (1, 1)]] {
        assert!(with_capacities(wrong).check().unwrap_err().to_string().contains("capacity of"), "{wrong:?}");
    }
}

#[test]
fn capacities_before_a_sequence_stay_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    let mut trace = with_capacities(&[(0, 4), (2, 2), (2, 3), (3, 1)]);
    trace.write(&path).unwrap();
    let without_flags = std::fs::read(&path).unwrap();
    trace.capacities[1].before_sequence = true;
    trace.write(&path).unwrap();
    assert_eq!(Trace::read(&path).unwrap(), trace);
    assert!(std::fs::metadata(&path).unwrap().len() > without_flags.len() as u64, "flags are written if one is set");
    let flags = |trace: &Trace| trace.capacities.iter().map(|c| c.before_sequence).collect::<Vec<_>>();
    // The number that a part begins with is there before its first sequence.
    assert_eq!(flags(&trace.select(1..2)), [true, true, false, false]);
    // What changed behind the last pass comes before the sequences that are added.
    let mut joined = trace.clone();
    joined.append(&trace).unwrap();
    assert_eq!(flags(&joined), [false, true, false, true, false, true, false, false]);
    joined.check().unwrap();
    trace.capacities[2].before_sequence = true;
    trace.capacities[1].before_sequence = false;
    assert!(trace.check().unwrap_err().to_string().contains("3 slots at pass 2"));
}

#[test]
fn logits_go_with_passes_of_one_token() {
    let mut trace = Trace::new(1, 2, 1);
    trace.push(&TracePass { ids: &[0, 1], logits: &[1.0, 2.0, 3.0, 4.0], ..TracePass::default() }).unwrap();
    trace.push(&TracePass { ids: &[1], logits: &[5.0, 6.0], ..TracePass::default() }).unwrap();
    let logits: Vec<_> = trace.steps().map(|s| s.logits).collect();
    assert_eq!(logits, [&[][..], &[5.0, 6.0]]);
}

#[test]
fn passes_that_do_not_fit_are_refused() {
    let mut trace = small();
    let before = trace.clone();
    let odd = TracePass { ids: &[0, 1, 2], ..TracePass::default() };
    assert!(trace.push(&odd).unwrap_err().to_string().contains("not a multiple"));
    let weights = vec![half::f16::ONE; 4];
    let some = TracePass { ids: &[0, 1, 2, 3], weights: &weights, ..TracePass::default() };
    assert!(trace.push(&some).unwrap_err().to_string().contains("weights for some"));
    let logits = TracePass { ids: &[0, 1, 2, 3], logits: &[0.0; 8], ..TracePass::default() };
    assert!(trace.push(&logits).unwrap_err().to_string().contains("logits for some"));
    assert_eq!(trace, before);
}

#[test]
fn traces_are_joined_and_cut_by_sequence() {
    let one = small();
    let mut two = one.clone();
    two.append(&one).unwrap();
    assert_eq!(two.check().map(|()| two.sequences.clone()).unwrap(), [3, 1, 3, 1]);
    assert_eq!(two.select(2..4), one);
    assert_eq!(two.select(1..2).passes, [1]);
    let other = Trace::new(2, 8, 2);
    assert!(two.append(&other).unwrap_err().to_string().contains("2 of 4 experts in 2 layers, and 2 of 8 in 2"));
}

#[test]
fn contradictory_traces_are_refused() {
    let broken = |change: fn(&mut Trace)| {
        let mut trace = small();
        change(&mut trace);
        trace.check().unwrap_err().to_string()
    };
    assert!(broken(|t| t.ids[1] = 0).contains("expert 0 twice at token 0, layer 0"));
    assert!(broken(|t| t.ids[2] = 4).contains("expert 4 of 4 at token 0, layer 1"));
    assert!(broken(|t| t.ids[0] = UNUSED).contains("gap"));
    assert!(broken(|t| t.ids.clear()).contains("no tokens"));
    assert!(broken(|t| t.passes[0] = 3).contains("'passes'"));
    assert!(broken(|t| t.sequences = vec![4, 0]).contains("'sequences'"));
    assert!(broken(|t| t.sequences = vec![1, 3]).contains("crosses the end"));
    assert!(broken(|t| t.origins.truncate(1)).contains("'origins'"));
    assert!(broken(|t| t.weights = vec![half::f16::ONE]).contains("'weights'"));
    assert!(broken(|t| t.logits = vec![f32::NAN; 32]).contains("not finite"));
    assert!(broken(|t| t.experts = 1 << 30).contains("supports up to"));
}

#[test]
fn other_files_are_refused_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = error_of(Trace::read(&path));
        assert!(error.contains("x.safetensors") && !error.contains('\n'), "{error}");
        error
    };
    assert!(refused(b"").contains("0 bytes long"));
    assert!(refused(b"token,layer,expert\n").contains("no safetensors header"));
    assert!(refused(&[&8u64.to_le_bytes()[..], b"notjson!"].concat()).contains("header is broken"));
    let header = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let whole = [&(header.len() as u64).to_le_bytes()[..], header, b"x"].concat();
    assert!(refused(&whole).contains("'format'"));
    assert!(refused(&whole[..whole.len() - 1]).contains("0 bytes of data"));
    assert!(error_of(Trace::read(dir.path())).contains("regular file"));
    assert!(error_of(Trace::read(dir.path().join("none"))).contains("reading failed"));
}

#[test]
fn every_damaged_byte_is_refused_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    small().write(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for at in 0..whole.len() {
        for change in [1, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(trace) = Trace::read(&path) {
                assert_eq!(trace.steps().count(), trace.passes.len() * trace.rows);
            }
        }
        std::fs::write(&path, &whole[..at]).unwrap();
        assert!(Trace::read(&path).is_err());
    }
}

#[test]
fn writing_is_deterministic_and_replaces_a_file_only_when_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    let bytes = |trace: &Trace| trace.write(&path).map(|()| std::fs::read(&path).unwrap());
    let first = bytes(&small()).unwrap();
    assert_eq!(bytes(&small()).unwrap(), first);
    assert!(bytes(&Trace::new(1, 1, 1)).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), first);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn half_precision_logits_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    let view = |dtype, shape: &[usize], data: &[u8]| (dtype, shape.to_vec(), data.to_vec());
    let tensors = [
        ("experts", view(safetensors::Dtype::U16, &[1, 1, 1], &[1, 0])),
        ("logits", view(safetensors::Dtype::F16, &[1, 1, 2], &[0, 0x3c, 0, 0x40])),
        ("passes", view(safetensors::Dtype::U32, &[1], &[1, 0, 0, 0])),
        ("sequences", view(safetensors::Dtype::U32, &[1], &[1, 0, 0, 0])),
        ("sequence_of", view(safetensors::Dtype::U32, &[1], &[0; 4])),
        ("decode", view(safetensors::Dtype::U8, &[1], &[1])),
    ];
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (*name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let meta = [("format", "larder-trace"), ("version", "2"), ("layers", "1"), ("experts", "2"), ("top_k", "1")];
    let meta = meta.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    std::fs::write(&path, safetensors::serialize(views, Some(meta)).unwrap()).unwrap();
    let trace = Trace::read(&path).unwrap();
    assert_eq!((trace.logits, trace.ids), (vec![1.0, 2.0], vec![1]));
    assert_eq!(trace.origins, [TraceToken { sequence: 0, decode: true }]);
}

#[test]
fn a_trace_of_another_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    small().write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let at = good.windows(11).position(|bytes| bytes == br#""version":""#).unwrap() + 11;
    for version in *b"13" {
        let mut other = good.clone();
        other[at] = version;
        std::fs::write(&path, other).unwrap();
        let said = Trace::read(&path).unwrap_err().to_string();
        assert!(said.contains("reads only version 2; record the trace again with `larder run --trace`"), "{said}");
    }
}

/// A trace of any shape, with passes of one and of several tokens.
fn any_trace() -> impl Strategy<Value = Trace> {
    let sizes = (1usize..4, 1usize..9, 1usize..5, any::<[bool; 2]>());
    let passes = prop::collection::vec((1usize..4, any::<bool>(), any::<u64>()), 1..12);
    (sizes, passes).prop_map(|((rows, experts, k, [weights, logits]), passes)| {
        let k = k.min(experts);
        let mut trace = Trace::new(rows, experts, k);
        // Sequences that began before the current stretch, and up to three that began in it.
        let (mut before, mut begun) = (0, 0);
        for (tokens, starts_sequence, seed) in passes {
            if starts_sequence {
                (before, begun) = (before + begun, 0);
            }
            let origin = |token: usize| {
                let local = ((seed % 3) as u32 + token as u32).min(begun).min(2);
                begun = begun.max(local + 1);
                TraceToken { sequence: before + local, decode: seed % 5 > token as u64 }
            };
            let origins: Vec<_> = (0..tokens).map(origin).collect();
            let places = tokens * rows * k;
            let id = |place: usize| ((seed as usize / 7 + place / k * 3 + place % k) % experts) as u16;
            let weights: Vec<_> =
                (0..if weights { places } else { 0 }).map(|i| half::f16::from_f32(i as f32)).collect();
            let logits: Vec<_> =
                (0..if logits { tokens * rows * experts } else { 0 }).map(|i| i as f32 - 0.5).collect();
            let ids: Vec<_> = (0..places).map(id).collect();
            let pass = TracePass { ids: &ids, weights: &weights, logits: &logits, origins: &origins, starts_sequence };
            trace.push(&pass).unwrap();
        }
        trace
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_written_trace_reads_back(trace in any_trace()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        trace.write(&path).unwrap();
        prop_assert_eq!(Trace::read(&path).unwrap(), trace);
    }

    #[test]
    fn split_sequences_join_to_the_same_trace(trace in any_trace()) {
        let mut joined = Trace { meta: trace.meta.clone(), ..Trace::new(trace.rows, trace.experts, trace.top_k) };
        for at in 0..trace.sequences.len() {
            let one = trace.select(at..at + 1);
            prop_assert!(one.check().is_ok());
            joined.append(&one).unwrap();
        }
        prop_assert_eq!(joined, trace);
    }
}
