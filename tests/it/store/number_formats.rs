//! Models in each block format that GGUF files have: opened, converted and computed.

use std::path::Path;

use larder_core::{ExpertId, LayerIdx, NumberFormat, Tensors};
use larder_kernels::widen;
use larder_store::{ExpertSource, Gguf, Source, Store, encode};

use super::convert::{convert, logits_with, text};
use crate::support::{fixture, larder, larder_ok};

/// The numbers of GGUF's tensor types.
const TYPES: [(NumberFormat, u32); 25] = [
    (NumberFormat::Q4_0, 2),
    (NumberFormat::Q4_1, 3),
    (NumberFormat::Q5_0, 6),
    (NumberFormat::Q5_1, 7),
    (NumberFormat::Q8_0, 8),
    (NumberFormat::Q2K, 10),
    (NumberFormat::Q3K, 11),
    (NumberFormat::Q4K, 12),
    (NumberFormat::Q5K, 13),
    (NumberFormat::Q6K, 14),
    (NumberFormat::Iq4Nl, 20),
    (NumberFormat::Iq4Xs, 23),
    (NumberFormat::Mxfp4, 39),
    (NumberFormat::Nvfp4, 40),
    (NumberFormat::Iq2Xxs, 16),
    (NumberFormat::Iq2Xs, 17),
    (NumberFormat::Iq3Xxs, 18),
    (NumberFormat::Iq1S, 19),
    (NumberFormat::Iq3S, 21),
    (NumberFormat::Iq2S, 22),
    (NumberFormat::Iq1M, 29),
    (NumberFormat::Tq1_0, 34),
    (NumberFormat::Tq2_0, 35),
    (NumberFormat::Q1_0, 41),
    (NumberFormat::Q2_0, 42),
];

/// About 0.001 as f16.
const SMALL_SCALE: u16 = 0x1419;

/// Blocks of values in a format: rounded to it if it can be written, else random bits with a small scale.
fn blocks(kind: NumberFormat, values: &[f32], row: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; values.len() / cols * row];
    if kind.is_encodable() {
        encode(kind, values, &mut bytes).unwrap();
        return bytes;
    }
    let mut state = 1u64;
    for byte in &mut bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
    let parts = kind.parts().unwrap();
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        if kind == NumberFormat::Iq1M {
            // Four bits at the top of each of the last four pairs of bytes.
            (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | (SMALL_SCALE >> (4 * i) << 4) as u8);
        } else {
            block[parts.scales_at..][..2].copy_from_slice(&SMALL_SCALE.to_le_bytes());
        }
    }
    bytes
}

/// A GGUF file whose tensors can be replaced: new data are appended, and the tensor's entry points to them.
pub struct PatchedGguf {
    source: Gguf,
    bytes: Vec<u8>,
    data_start: usize,
}

impl PatchedGguf {
    pub fn of(name: &str) -> Self {
        let path = fixture("fixtures/gguf").join(name);
        let (source, bytes) = (Gguf::open(&path).unwrap(), std::fs::read(&path).unwrap());
        let mut patched = PatchedGguf { source, bytes, data_start: 0 };
        let name = patched.matrices(LayerIdx(0)).remove(0);
        let mut stored = vec![0; patched.source.meta(&name).unwrap().bytes];
        patched.source.read(&name, 0, &mut stored).unwrap();
        let (_, offset) = patched.entry(&name);
        let old = u64::from_le_bytes(patched.bytes[offset..][..8].try_into().unwrap());
        patched.data_start = find(&patched.bytes, &stored) - old as usize;
        patched
    }

    /// The tensors with a layer's gate, up and down matrices of all experts.
    pub fn matrices(&self, layer: LayerIdx) -> Vec<String> {
        let names = self.source.expert_names().unwrap().matrices;
        names.iter().map(|name| name.tensor_name(layer, ExpertId(0))).collect()
    }

    /// Number of values of a tensor, and of one of its rows.
    pub fn size(&self, name: &str) -> (usize, usize) {
        let shape = &self.source.meta(name).unwrap().shape;
        (shape.iter().product(), *shape.last().unwrap())
    }

    /// Replaces a tensor by another of the same shape.
    pub fn replace(&mut self, name: &str, gguf_type: u32, data: &[u8]) {
        let (kind, offset) = self.entry(name);
        let end = (self.bytes.len() - self.data_start).next_multiple_of(32);
        self.bytes.resize(self.data_start + end, 0);
        self.bytes.extend(data);
        self.bytes[kind..offset].copy_from_slice(&gguf_type.to_le_bytes());
        self.bytes[offset..][..8].copy_from_slice(&(end as u64).to_le_bytes());
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, &self.bytes).unwrap();
    }

    /// Where a tensor's entry has the number of its type, and its offset. Behind its name, a tensor has the number of
    /// its dimensions, the dimensions, the number of its type and the offset.
    fn entry(&self, name: &str) -> (usize, usize) {
        let dimensions = self.source.meta(name).unwrap().shape.len();
        let kind = find(&self.bytes, name.as_bytes()) + name.len() + 4 + 8 * dimensions;
        (kind, kind + 4)
    }
}

fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).position(|window| window == what).unwrap()
}

/// The experts' matrices whose rows are whole blocks are written in the format, and in another file as the f32 values
/// that the blocks stand for. With activations that are not rounded, both give the same bits; rounded ones give about
/// the same. A store of the file, streamed, gives the bits of the file.
#[test]
fn experts_in_each_block_format_are_those_that_the_blocks_stand_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut known = NumberFormat::ALL.into_iter().filter(|kind| !kind.is_float());
    assert!(known.all(|kind| TYPES.iter().any(|(known, _)| *known == kind)));
    for (kind, number) in TYPES {
        let (mut quantised, mut widened) =
            (PatchedGguf::of("tiny-qwen3moe-q4_k.gguf"), PatchedGguf::of("tiny-qwen3moe-q4_k.gguf"));
        for (seed, name) in quantised.matrices(LayerIdx(0)).iter().enumerate() {
            let (count, cols) = quantised.size(name);
            let Some(row) = kind.row_bytes(cols) else { continue };
            let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 * 0.002 - 0.1).collect();
            let (bytes, mut wide) = (blocks(kind, &values, row, cols), vec![0.0; count]);
            widen(kind, &bytes, &mut wide);
            quantised.replace(name, number, &bytes);
            widened.replace(name, 0, &wide.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        }
        let (gguf, floats, store) = (path("quantised.gguf"), path("widened.gguf"), path(kind.name()));
        quantised.write(&gguf);
        widened.write(&floats);
        let exact = logits_with(&gguf, &path("exact"), &["-oexact", "-o", "kv=f32"]);
        assert!(exact == logits_with(&floats, &path("floats"), &["-oexact", "-o", "kv=f32"]), "{kind}");
        let rounded = logits_with(&gguf, &path("rounded"), &[]);
        assert!(rounded != exact, "{kind}: activations are not rounded");
        convert(&gguf, &store, &[]);
        larder_ok(&["verify", text(&store)]);
        assert_eq!(Store::open(&store).unwrap().layout(LayerIdx(0)).up.kind, kind);
        assert!(logits_with(&store, &path("streamed"), &["--cache", "1x"]) == rounded, "{kind}");
    }
}

/// The formats that `convert` writes. The rows have 32 values, so that it stores others in place of those with blocks
/// of 256.
#[test]
fn convert_writes_each_number_format() {
    let dir = tempfile::tempdir().unwrap();
    let want = logits_with(&fixture("golden/olmoe"), &dir.path().join("want"), &[]);
    for kind in NumberFormat::ALL.into_iter().filter(|kind| kind.is_encodable()) {
        let store = dir.path().join(kind.name());
        let output = larder(&["convert", text(&fixture("golden/olmoe")), text(&store), "--experts", kind.name()]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        larder_ok(&["verify", text(&store)]);
        let layout = Store::open(&store).unwrap().layout(LayerIdx(1)).clone();
        assert_eq!(layout.up.kind == kind, kind.row_bytes(layout.up.cols).is_some(), "{kind}");
        assert_eq!(said.contains("are not whole blocks"), layout.up.kind != kind, "{said}");
        let got = logits_with(&store, &dir.path().join("got"), &["--cache", "2x"]);
        assert!(kind == NumberFormat::F16 || (got == want) == kind.is_float(), "{kind}");
    }
}

#[test]
fn convert_refuses_formats_that_it_cannot_write() {
    let dir = tempfile::tempdir().unwrap();
    for kind in NumberFormat::ALL.into_iter().filter(|kind| !kind.is_encodable()) {
        let store = dir.path().join(kind.name());
        let output = larder(&["convert", text(&fixture("golden/olmoe")), text(&store), "--experts", kind.name()]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && !store.join("manifest.json").exists(), "{kind}");
        assert!(
            said.contains(&format!("cannot be written as {kind}, which is only kept where the source has it")),
            "{said}"
        );
    }
}
