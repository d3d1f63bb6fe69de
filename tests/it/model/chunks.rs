//! Chunks of a prompt: cancelled, with their progress, of the size that the memory plan counts, and made up instead of
//! computed.

use std::path::Path;

use larder_engine::{Session, TokenInput};
use larder_model::{ModelError, Tap};
use serde_json::Value;

use crate::support::reference::load;
use crate::support::{encoder_decoders, golden_models, larder_ok};

const ROOM: usize = 2048;

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i * 7 % 97).collect()
}

/// Ends a pass after some layers.
struct After(usize);

impl Tap for After {
    fn wants_more(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0
    }
}

#[test]
fn a_cancelled_chunk_leaves_the_sequence_as_it_was() {
    for folder in golden_models() {
        let mut loaded = load(&folder, "config.json");
        let (before, prompt) = (tokens(270), tokens(31));
        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM).with_prefill_tokens(300);
        session.forward(&TokenInput::prompt(&before), &mut ()).unwrap();
        for layers in [1, 2] {
            let error = session.forward(&TokenInput::prompt(&prompt), &mut After(layers)).unwrap_err();
            assert!(matches!(error, ModelError::Cancelled), "{}: {error}", folder.display());
            assert_eq!(session.tokens(), before);
        }
        let got = session.forward(&TokenInput::prompt(&prompt), &mut ()).unwrap();
        let want = Session::new(&loaded.decoder, &mut loaded.experts, ROOM)
            .forward(&TokenInput::prompt(&[before, prompt].concat()).in_chunks(64), &mut ())
            .unwrap();
        assert_eq!(got, want, "{}", folder.display());
    }
}

/// Records the progress that it is told.
#[derive(Default)]
struct Progress(Vec<(usize, usize)>);

impl Tap for Progress {
    fn progress(&mut self, done: usize, of: usize) {
        self.0.push((done, of));
    }
}

#[test]
fn each_layer_of_a_chunk_is_progress_of_all_tokens() {
    for folder in golden_models() {
        let mut loaded = load(&folder, "config.json");
        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM).with_prefill_tokens(12);
        session.forward(&TokenInput::prompt(&tokens(20)), &mut ()).unwrap();
        let mut told = Progress::default();
        session.forward(&TokenInput::prompt(&tokens(31)), &mut told).unwrap();
        let layers = told.0[0].1 / 31;
        let chunks = [(0, 12), (12, 12), (24, 7)].into_iter();
        let want = chunks.flat_map(|(before, n)| (0..layers).map(move |i| (before * layers + n * i, 31 * layers)));
        assert_eq!(told.0, want.collect::<Vec<_>>(), "{}", folder.display());
    }
    for folder in encoder_decoders() {
        let mut loaded = load(&folder, "config.json");
        let layers = loaded.decoder.encoder_layers();
        let mut told = Progress::default();
        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
        session.forward(&TokenInput::prompt(&tokens(31)), &mut told).unwrap();
        let want = (0..layers).map(|i| (31 * i, 31 * layers));
        assert_eq!(told.0, want.collect::<Vec<_>>(), "{}: the encoder has the prompt", folder.display());
    }
}

#[test]
fn decode_behind_a_made_up_context_is_that_of_its_seed() {
    for folder in golden_models() {
        let mut loaded = load(&folder, "config.json");
        let name = folder.display();
        let mut behind = |depth: usize, seed: u64| {
            let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
            session.plan_len(depth + 2);
            session.append_made_up(&tokens(depth), seed).unwrap();
            let bytes = session.kv_bytes();
            let logits = session.forward(&TokenInput::prompt(&[5]), &mut ()).unwrap();
            assert_eq!(session.tokens().len(), depth + 1, "{name}");
            assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
            (logits, bytes, session.rewind(depth))
        };
        let (logits, bytes, kept) = behind(700, 1);
        assert_eq!(behind(700, 1), (logits.clone(), bytes, kept), "{name}");
        assert!(behind(700, 2).0 != logits && behind(300, 1).0 != logits, "{name}");
        assert!(kept >= 512, "{name}: checkpoints are made up too, and {kept} tokens are kept");

        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
        session.forward(&TokenInput::prompt(&tokens(700)), &mut ()).unwrap();
        assert_eq!(session.kv_bytes(), bytes, "{name}: as much memory as a computed context");
        assert!(session.append_made_up(&tokens(ROOM), 0).is_err());
        assert_eq!(session.tokens().len(), 700);
    }
}

/// What the plan has for a sequence and its activations, and the peak of memory, of a run with chunks of `size` tokens.
fn planned_and_peak(model: &str, prompt: &str, size: &str) -> (f64, f64, u64) {
    let chunks = format!("prefill-tokens={size}");
    let args = ["run", "-m", model, "-p", prompt, "-n", "1", "--json", "--threads", "1", "-o", &chunks];
    let number = |value: &Value| value.as_f64().unwrap();
    // The least of some runs: now and then the system gives a huge page where others get small ones.
    let runs = (0..4).map(|_| serde_json::from_str::<Value>(&larder_ok(&args)).unwrap());
    let found = runs.min_by(|a, b| number(&a["peak_bytes"]).total_cmp(&number(&b["peak_bytes"]))).unwrap();
    let plan = &found["plan"];
    assert!(number(&found["peak_bytes"]) <= number(&plan["total_bytes"]), "{model}: beyond the ceiling: {found}");
    // A ring of keys and values of a sliding window has room for a chunk.
    let planned = number(&plan["context_bytes"]) + number(&plan["scratch_bytes"]);
    (planned, number(&found["peak_bytes"]), plan["prefill_tokens"].as_u64().unwrap())
}

/// Whether the attention of a model goes over rows that an indexer chooses, or over compressed entries.
fn chooses_rows(folder: &Path) -> bool {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    ["index_topk", "indexer_budget", "sparse_attention_config"].iter().any(|key| config.contains(key))
}

#[test]
fn the_plan_counts_the_activations_of_a_chunk() {
    if std::env::var_os("LARDER_UNDER_TEST").is_some() {
        println!("skipped: an emulator's memory is in the numbers");
        return;
    }
    let prompt = "a b c d e f g h ".repeat(220);
    for folder in golden_models() {
        let model = folder.to_str().unwrap();
        let (planned_small, peak_small, small) = planned_and_peak(model, &prompt, "64");
        let (planned_large, peak_large, large) = planned_and_peak(model, &prompt, "1536");
        assert_eq!((small, large), (64, 1536), "{model}");
        let (planned, took) = (planned_large - planned_small, peak_large - peak_small);
        println!("{model}: {took} of {planned} bytes");
        // What the allocator keeps is noise of a megabyte. A small chunk does not fill the buffers for copies of chosen
        // rows and for scores, which both plans have.
        let ceiling = if chooses_rows(&folder) { planned_large } else { planned };
        assert!(took <= ceiling + 1e6, "{model}: {took} bytes, and the plan has {ceiling}");
        assert!(took >= 0.25 * planned - 1e6, "{model}: {took} bytes of {planned}: the plan wastes memory");
    }
}
