//! Random requests, evictions, restarts and crashes beside a plain tree: a map from the tokens of a prompt to what a
//! sequence of its own computes for it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use larder_core::{Rng, common_prefix};
use larder_engine::{Images, StepPart, TokenInput, step};
use larder_model::{AllResident, KvUsage, LogitsFor};
use serde_json::json;

use super::*;
use crate::sequences::sessions::SessionDisk;
use crate::testing::tiny;

const VOCAB: usize = 40;
const CONTEXT: usize = 512;
/// Requests at a time.
const ACTIVE: usize = 3;
const SLOTS: usize = 6;
/// Nodes of the tree of texts that prompts are paths of.
const TEXTS: usize = 48;

/// The logits of each prompt, by the simplest means, and how often slots and files served one.
#[derive(Default)]
struct PlainTree {
    /// The logits behind each prompt.
    logits: HashMap<Vec<u32>, Vec<f32>>,
    reused: usize,
    read: usize,
}

impl PlainTree {
    fn logits_of(&mut self, prompt: &[u32], decoder: &Decoder, experts: &mut AllResident) -> &[f32] {
        self.logits.entry(prompt.to_vec()).or_insert_with(|| {
            let mut sequence = Sequence::new(decoder, CONTEXT);
            sequence.forward(decoder, experts, &TokenInput::prompt(prompt), &mut ()).unwrap()
        })
    }
}

/// A request that is being computed.
struct Running {
    slot: usize,
    sequence: Sequence,
}

struct Trial<'a> {
    decoder: &'a Decoder,
    experts: &'a mut AllResident,
    disk: SessionDisk,
    slots: ServerSlots,
    active: Vec<Running>,
    tree: PlainTree,
    texts: Vec<Vec<u32>>,
    rng: Rng,
    keeps_all_rows: bool,
}

fn origin() -> SequenceOrigin {
    SequenceOrigin::new("tiny", "own routing")
}

fn open(disk: &SessionDisk) -> ServerSlots {
    let sessions = Sessions::open(disk, &origin(), CONTEXT, Images::default()).unwrap();
    ServerSlots::new(SLOTS, CONTEXT, origin(), Some(sessions))
}

impl Trial<'_> {
    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound)
    }

    /// A text of the tree, or one that goes on where another one is.
    fn prompt(&mut self) -> Vec<u32> {
        let mut text = match self.below(self.texts.len() + 1) {
            0 => vec![],
            index => self.texts[index - 1].clone(),
        };
        if self.below(4) == 0 || text.is_empty() {
            if text.len() > CONTEXT - 160 {
                text.truncate(self.below(CONTEXT - 160));
            }
            let length = 1 + self.below(120);
            text.extend((0..length).map(|_| self.below(VOCAB) as u32));
            let place = self.below(TEXTS);
            if place < self.texts.len() { self.texts[place] = text.clone() } else { self.texts.push(text.clone()) }
        }
        text
    }

    fn begin(&mut self) {
        let prompt = self.prompt();
        let most = prompt.len() - 1;
        let shared = |sequence: &Sequence| common_prefix(sequence.computed_tokens(), &prompt).min(most);
        let held = (0..SLOTS).filter_map(|id| self.slots.cache.get(id)).map(shared).max().unwrap_or(0);
        let held = self.active.iter().map(|running| shared(&running.sequence)).fold(held, usize::max);
        let active: Vec<&Sequence> = self.active.iter().map(|running| &running.sequence).collect();
        let (slot, mut sequence, cached) = self.slots.take_whole((&prompt, &[]), false, &active, self.decoder).unwrap();
        assert_eq!(sequence.tokens(), prompt);
        assert!(cached < prompt.len());
        // All that is in memory is used where states can go back, and only a file has more.
        let is_best = cached == held || cached >= held + READ_GAIN;
        assert!(is_best || !self.keeps_all_rows, "{cached} of {held}");
        (self.tree.reused, self.tree.read) =
            (self.tree.reused + usize::from(cached > 0), self.tree.read + usize::from(cached > held));
        sequence
            .pin((0..self.below(3)).map(|_| 1 + self.below(prompt.len())).filter(|at| *at < prompt.len()).collect());
        self.active.push(Running { slot, sequence });
    }

    /// Computes some tokens of all that are active, in one step.
    fn step(&mut self) {
        let most = 1 + self.below(90);
        let waiting = self.active.iter_mut().map(|running| &mut running.sequence).filter(|one| one.pending() > 0);
        let part = |sequence| StepPart { sequence, most, logits_for: LogitsFor::Last, best: None, draws: None };
        let mut parts: Vec<StepPart> = waiting.map(part).collect();
        if parts.is_empty() {
            return;
        }
        let logits = step(self.decoder, self.experts, &mut parts, &mut ()).unwrap();
        let prompts: Vec<Vec<u32>> = parts.iter().map(|part| part.sequence.tokens().to_vec()).collect();
        for (prompt, logits) in prompts.iter().zip(logits).filter(|(_, logits)| !logits.is_empty()) {
            let want = self.tree.logits_of(prompt, self.decoder, self.experts);
            assert!(logits.into_all() == want, "after {} tokens", prompt.len());
        }
    }

    /// Ends a request, or lets it go on for a few tokens.
    fn go_on(&mut self) {
        if self.active.is_empty() {
            return;
        }
        let index = self.below(self.active.len());
        let has_room = self.active[index].sequence.remaining() > 8;
        if has_room && self.active[index].sequence.pending() == 0 && self.below(3) > 0 {
            let token = self.below(VOCAB) as u32;
            self.active[index].sequence.append(self.decoder, &[token], TokenPhase::Decode).unwrap();
            return;
        }
        // Its client may be gone before it is computed.
        let Running { slot, mut sequence } = self.active.swap_remove(index);
        sequence.rewind(sequence.computed_tokens().len());
        self.slots.put_back(slot, sequence);
    }

    fn command(&mut self, action: SlotAction) {
        let (to, mut from) = oneshot::channel();
        let id = self.below(SLOTS);
        self.slots.execute(SlotCommand { id, action, to }, self.decoder);
        if let Ok(Err(error)) = from.try_recv() {
            assert!(!error.to_string().is_empty());
        }
    }

    /// A server that is stopped, or killed while it writes: what it was writing has its first bytes, under the name
    /// of an unfinished file.
    fn restart(&mut self) {
        let is_killed = self.below(2) == 0;
        self.active.clear();
        if !is_killed {
            self.slots.end();
        }
        let folder = self.disk.folder.clone();
        self.slots = ServerSlots::new(1, CONTEXT, origin(), None);
        let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        if is_killed && !files.is_empty() {
            let path = &files[self.below(files.len())];
            let bytes = fs::read(path).unwrap();
            let cut = self.below(bytes.len() + 1);
            fs::write(path.with_extension("prefix.tmp"), &bytes[..cut]).unwrap();
            if self.below(2) == 0 {
                fs::remove_file(path).unwrap();
            }
        }
        self.slots = open(&self.disk);
        assert!(!fs::read_dir(&folder).unwrap().any(|file| is_unfinished(&file.unwrap().path())));
    }

    fn check_memory(&self) {
        let idle = (0..SLOTS).filter_map(|id| self.slots.cache.get(id));
        let all: Vec<&Sequence> = idle.chain(self.active.iter().map(|running| &running.sequence)).collect();
        let sum: usize = all.iter().map(|sequence| sequence.kv_bytes()).sum();
        // A sequence that is being written has memory, too.
        let used = self.decoder.kv_pool().usage().bytes();
        let largest = all.iter().map(|sequence| sequence.kv_bytes()).max().unwrap_or(0);
        assert!(largest <= used, "{used} bytes, {largest} of one sequence");
        if self.slots.sessions.is_none() {
            assert!(used <= sum, "{used} bytes in use, {sum} by the sequences");
        }
    }
}

fn is_unfinished(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "tmp")
}

fn run(config: &Value, operations: usize, seed: u64) -> (usize, usize) {
    let (decoder, mut experts) = tiny(config);
    let folder = tempfile::tempdir().unwrap();
    let disk = SessionDisk { folder: folder.path().to_owned(), limit_bytes: 4 << 20 };
    let mut trial = Trial {
        decoder: &decoder,
        experts: &mut experts,
        slots: open(&disk),
        disk,
        active: vec![],
        tree: PlainTree::default(),
        texts: vec![],
        rng: Rng::new(seed),
        keeps_all_rows: seed == 1,
    };
    for _ in 0..operations {
        match trial.below(1000) {
            0..280 if trial.active.len() < ACTIVE => trial.begin(),
            280..620 => trial.step(),
            620..960 => trial.go_on(),
            960..975 => _ = trial.slots.drop_least(),
            975..985 => trial.command(SlotAction::Erase),
            985..990 => trial.command(SlotAction::Save("own".into())),
            990..995 => trial.command(SlotAction::Restore("own".into())),
            995..997 => trial.slots.save_all(),
            997..999 => trial.restart(),
            _ => {}
        }
        trial.check_memory();
    }
    let found = (trial.tree.reused, trial.tree.read);
    drop(trial);
    assert_eq!(decoder.kv_pool().usage(), KvUsage::default());
    let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
    let bytes: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
    assert!(bytes <= 4 << 20, "{bytes} bytes of files");
    found
}

fn mixtral(window: Option<usize>) -> Value {
    json!({
        "model_type": "mixtral", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
        "max_position_embeddings": CONTEXT, "sliding_window": window,
    })
}

fn lfm2() -> Value {
    json!({
        "model_type": "lfm2_moe", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 8,
        "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "use_expert_bias": true, "norm_topk_prob": true, "max_position_embeddings": CONTEXT,
    })
}

/// Operations per model: 100,000 in all.
const OPERATIONS: usize = 33_400;

#[test]
fn slots_are_a_plain_tree_where_all_rows_stay() {
    let (reused, read) = run(&mixtral(None), OPERATIONS, 1);
    assert!(reused > OPERATIONS / 20 && read > 10, "{reused} {read}");
}

#[test]
fn slots_are_a_plain_tree_with_windows() {
    let (reused, read) = run(&mixtral(Some(70)), OPERATIONS, 2);
    assert!(reused > OPERATIONS / 20 && read > 10, "{reused} {read}");
}

#[test]
fn slots_are_a_plain_tree_with_recurrent_states() {
    let (reused, read) = run(&lfm2(), OPERATIONS, 3);
    assert!(reused > OPERATIONS / 20 && read > 10, "{reused} {read}");
}
