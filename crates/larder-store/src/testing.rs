//! A tiny model for tests, in every form in which checkpoints store experts.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use larder_core::{
    Blueprint, ExpertId, ExpertNames, Geometry, LayerIdx, NumberFormat, PerMatrix, RowPick, TensorSlice, TensorSpec,
};

use crate::{
    convert::ConvertOptions,
    files::{
        describe::stored_shape,
        safetensors::{HeaderWriter, dtype_of},
    },
    quantize::encode,
};
use larder_core::TensorMeta;

pub const HIDDEN: usize = 64;
pub const EXPERTS: usize = 3;
pub const LAYERS: [LayerIdx; 2] = [LayerIdx(1), LayerIdx(3)];

/// How a checkpoint stores its experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertForm {
    /// Three tensors per expert.
    Separate,
    /// `[experts, 2 * inter, hidden]`, gate before up.
    Halves,
    /// `[experts, hidden, 2 * inter]`, gate before up.
    TransposedHalves,
    /// `[experts, hidden, 2 * inter]`, gate and up rows alternating; with biases.
    TransposedTurns,
    /// `[experts, 2 * inter, hidden]`, gate and up rows alternating.
    Turns,
    /// Two tensors per expert: up and down, no gate.
    TwoMatrices,
}

pub const FORMS: [ExpertForm; 6] = [
    ExpertForm::Separate,
    ExpertForm::Halves,
    ExpertForm::TransposedHalves,
    ExpertForm::TransposedTurns,
    ExpertForm::Turns,
    ExpertForm::TwoMatrices,
];

/// The tiny model: experts in one form, of width `inter`, all in one number format unless the experts of the last layer
/// have their own.
#[derive(Clone, Copy)]
pub struct Tiny {
    pub form: ExpertForm,
    pub inter: usize,
    pub kind: NumberFormat,
    pub last_kind: Option<NumberFormat>,
}

impl Tiny {
    pub fn new(form: ExpertForm) -> Self {
        Tiny { form, inter: 32, kind: NumberFormat::Bf16, last_kind: None }
    }

    /// Index of the first part that an expert has, as [`part`](Self::part) counts them.
    pub fn first_part(&self) -> usize {
        usize::from(self.form == ExpertForm::TwoMatrices)
    }

    pub fn bias(&self) -> bool {
        self.form == ExpertForm::TransposedTurns
    }

    pub fn blueprint(&self) -> Blueprint {
        let stacked = |name: &str, transposed, pick| TensorSlice::stacked(format!("l.{{l}}.{name}"), transposed, pick);
        let fused = |transposed, [gate, up]: [RowPick; 2]| ExpertNames {
            matrices: PerMatrix {
                gate: Some(stacked("gate_up", transposed, gate)),
                up: stacked("gate_up", transposed, up),
                down: stacked("down", transposed, RowPick::All),
            },
            bias: None,
        };
        let (halves, turns) = ([RowPick::FirstHalf, RowPick::SecondHalf], [RowPick::Even, RowPick::Odd]);
        let mut experts = match self.form {
            ExpertForm::Separate => ExpertNames::separate("l.{l}", "gate", "up", "down"),
            ExpertForm::Halves => fused(false, halves),
            ExpertForm::TransposedHalves => fused(true, halves),
            ExpertForm::TransposedTurns => fused(true, turns),
            ExpertForm::Turns => fused(false, turns),
            ExpertForm::TwoMatrices => {
                let names = ExpertNames::separate("l.{l}", "gate", "up", "down");
                ExpertNames { matrices: PerMatrix { gate: None, ..names.matrices }, ..names }
            }
        };
        if self.bias() {
            let bias = |name, pick| stacked(name, false, pick);
            let all = [bias("gate_up_b", RowPick::Even), bias("gate_up_b", RowPick::Odd), bias("down_b", RowPick::All)];
            experts.bias = Some(all.into());
        }
        let spec = |name: &str, shape: &[usize], product| TensorSpec {
            by_row: name == "embed",
            ..TensorSpec::new(name, shape, product)
        };
        Blueprint {
            model_type: "tiny".into(),
            geometry: Geometry {
                layers: 4,
                moe_layers: LAYERS.to_vec(),
                experts: EXPERTS,
                top_k: 2,
                hidden: HIDDEN,
                inter: self.inter,
                bias: self.bias(),
            },
            experts,
            resident: vec![
                spec("norm", &[5], false),
                spec("embed", &[7, HIDDEN], true),
                spec("conv", &[2, 1, 3], false),
                spec("head", &[3, 80], true),
            ],
            hidden: HIDDEN,
            vocab: 7,
            context: 16,
            sequence_memory: Default::default(),
            kv_layers: Vec::new(),
            step_memory: Default::default(),
            attention_heads: 0,
            by_token_bytes: 0,
            runs_ahead: true,
        }
    }

    /// One value of an expert: `part` is the index among gate, up, down and their biases. Exact in every float format.
    fn value(layer: LayerIdx, expert: ExpertId, part: usize, row: usize, col: usize) -> f32 {
        let seed = layer.index() * 31 + expert.index() * 17 + part * 7 + row * 13 + col * 5;
        (seed % 61) as f32 * 0.0625 - 1.875
    }

    /// The values of a part of an expert: `[rows, cols]`.
    pub fn part(&self, layer: LayerIdx, expert: ExpertId, part: usize) -> Vec<f32> {
        let (rows, cols) = [
            (self.inter, HIDDEN),
            (self.inter, HIDDEN),
            (HIDDEN, self.inter),
            (1, self.inter),
            (1, self.inter),
            (1, HIDDEN),
        ][part];
        grid(rows, cols, |r, c| Self::value(layer, expert, part, r, c))
    }

    /// All tensors of the checkpoint.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let mut all = vec![
            ("norm".into(), vec![5], grid(1, 5, |_, c| c as f32)),
            ("embed".into(), vec![7, HIDDEN], grid(7, HIDDEN, |r, c| (r * 3 + c) as f32 * 0.25)),
            ("conv".into(), vec![2, 1, 3], grid(2, 3, |r, c| (r + c) as f32)),
            ("head".into(), vec![3, 80], grid(3, 80, |r, c| (r * c % 9) as f32)),
        ];
        for layer in LAYERS {
            match self.form {
                ExpertForm::Separate | ExpertForm::TwoMatrices => self.separate(layer, &mut all),
                _ => self.stacked(layer, &mut all),
            }
        }
        all
    }

    fn separate(&self, layer: LayerIdx, all: &mut Vec<(String, Vec<usize>, Vec<f32>)>) {
        for e in 0..EXPERTS {
            let expert = ExpertId(e as u16);
            let shapes = [("gate", [self.inter, HIDDEN]), ("up", [self.inter, HIDDEN]), ("down", [HIDDEN, self.inter])];
            for (i, (name, shape)) in shapes.into_iter().enumerate().skip(self.first_part()) {
                all.push((format!("l.{}.{e}.{name}.weight", layer.0), shape.to_vec(), self.part(layer, expert, i)));
            }
        }
    }

    fn stacked(&self, layer: LayerIdx, all: &mut Vec<(String, Vec<usize>, Vec<f32>)>) {
        let (inter, turns) = (self.inter, matches!(self.form, ExpertForm::Turns | ExpertForm::TransposedTurns));
        let transposed = matches!(self.form, ExpertForm::TransposedHalves | ExpertForm::TransposedTurns);
        // Row `r` of the fused matrix: its part, and its row in that part.
        let fused = |r: usize| if turns { (r % 2, r / 2) } else { (r / inter, r % inter) };
        let each = |one: &dyn Fn(ExpertId) -> Vec<f32>| (0..EXPERTS).flat_map(|e| one(ExpertId(e as u16))).collect();
        let matrix = |rows: usize, cols: usize, value: &dyn Fn(usize, usize) -> f32| {
            if transposed { grid(cols, rows, |c, r| value(r, c)) } else { grid(rows, cols, value) }
        };
        let shape = |rows, cols| if transposed { vec![EXPERTS, cols, rows] } else { vec![EXPERTS, rows, cols] };
        let gate_up = each(&|e| {
            matrix(2 * inter, HIDDEN, &|r, c| {
                let (part, row) = fused(r);
                Self::value(layer, e, part, row, c)
            })
        });
        all.push((format!("l.{}.gate_up", layer.0), shape(2 * inter, HIDDEN), gate_up));
        let down = each(&|e| matrix(HIDDEN, inter, &|r, c| Self::value(layer, e, 2, r, c)));
        all.push((format!("l.{}.down", layer.0), shape(HIDDEN, inter), down));
        if self.bias() {
            let gate_up = each(&|e| {
                grid(1, 2 * inter, |_, r| {
                    let (part, row) = fused(r);
                    Self::value(layer, e, 3 + part, 0, row)
                })
            });
            all.push((format!("l.{}.gate_up_b", layer.0), vec![EXPERTS, 2 * inter], gate_up));
            let down = each(&|e| grid(1, HIDDEN, |_, c| Self::value(layer, e, 5, 0, c)));
            all.push((format!("l.{}.down_b", layer.0), vec![EXPERTS, HIDDEN], down));
        }
    }

    /// Writes the checkpoint folder.
    pub fn write(&self, folder: &Path) {
        let last = format!("l.{}.", LAYERS[1].0);
        let kind = |name: &str| self.last_kind.filter(|_| name.starts_with(&last)).unwrap_or(self.kind);
        write_checkpoint(folder, kind, &self.tensors());
    }
}

fn grid(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| value(r, c)).collect()
}

/// Encodes values in the format `kind`.
pub fn bytes_as(kind: NumberFormat, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; kind.row_bytes(values.len()).unwrap()];
    encode(kind, values, &mut bytes).unwrap();
    bytes
}

/// Writes a checkpoint folder with the given tensors, each in the float format that `kind` gives for its name.
pub fn write_checkpoint(
    folder: &Path,
    kind: impl Fn(&str) -> NumberFormat,
    tensors: &[(String, Vec<usize>, Vec<f32>)],
) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), r#"{"model_type":"tiny","b":1,"a":2.5}"#).unwrap();
    std::fs::write(folder.join("tokenizer.json"), r#"{"a":1}"#).unwrap();
    let mut header = HeaderWriter::default();
    let mut data = vec![];
    for (name, shape, values) in tensors {
        let kind = kind(name);
        let meta = TensorMeta::new(kind, shape.clone()).unwrap();
        header.push(name, dtype_of(kind), &stored_shape(&meta), meta.bytes);
        data.extend(bytes_as(kind, values));
    }
    let mut bytes = header.finish(8);
    bytes.extend(data);
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

/// Converts the tiny model to a store in `folder/store`; returns its path.
pub fn small_store(folder: &Path, form: ExpertForm) -> std::path::PathBuf {
    let options = ConvertOptions { experts: Some(NumberFormat::Q8_0), ..ConvertOptions::default() };
    store_of(folder, &Tiny::new(form), &options)
}

/// Converts a tiny model to a store in `folder/store`; returns its path.
pub fn store_of(folder: &Path, tiny: &Tiny, options: &ConvertOptions) -> std::path::PathBuf {
    tiny.write(&folder.join("source"));
    let source = crate::source::Checkpoint::open(&folder.join("source")).unwrap();
    let target = folder.join("store");
    crate::convert::convert(&source, &tiny.blueprint(), &target, options, &()).unwrap();
    target
}

/// All files below `root` with their contents.
pub fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry)
            } else {
                drop(found.insert(entry.strip_prefix(root).unwrap().to_owned(), fs::read(&entry).unwrap()))
            }
        }
    }
    found
}

/// Replaces text in the manifest of a store and seals it again, as the author of a store could have done.
pub fn edit_manifest(store: &Path, from: &str, to: &str) {
    let path = store.join(crate::manifest::MANIFEST_FILE);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    let (body, _) = text.rsplit_once(",\n  \"checksum\"").unwrap();
    let edited = body.replacen(from, to, 1) + "\n}";
    std::fs::write(path, crate::manifest::seal(&edited)).unwrap();
}
