//! Builds GGUF files for tests, byte by byte.

use std::io::Write;

use crate::{
    error::Result,
    source::gguf::{Gguf, metadata::Metadata, reader::GgufHeader},
};

/// GGUF's numbers of tensor types.
pub const F32: u32 = 0;
pub const Q8_0: u32 = 8;

/// Builds a file; every field can be set to a wrong value.
#[derive(Clone)]
pub struct GgufBuilder {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub entry_count: Option<u64>,
    pub alignment: usize,
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

impl GgufBuilder {
    pub fn new() -> Self {
        GgufBuilder {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            entry_count: None,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
        }
    }

    /// Adds a metadata entry of any type: the number of the type and the bytes of the value.
    pub fn entry(mut self, key: &str, tag: u32, value: &[u8]) -> Self {
        self.entries.push([&text(key)[..], &tag.to_le_bytes(), value].concat());
        self
    }

    pub fn uint(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub fn float(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, 8, &text(value))
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let body: Vec<u8> = values.iter().flat_map(|v| text(v)).collect();
        self.list(key, 8, values.len() as u64, &body)
    }

    pub fn flags(self, key: &str, values: &[bool]) -> Self {
        self.list(key, 7, values.len() as u64, &values.iter().map(|v| u8::from(*v)).collect::<Vec<_>>())
    }

    pub fn ints(self, key: &str, values: &[i32]) -> Self {
        self.list(key, 5, values.len() as u64, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn floats(self, key: &str, values: &[f32]) -> Self {
        self.list(key, 6, values.len() as u64, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Adds a list that claims `count` values of the type `tag`.
    pub fn list(self, key: &str, tag: u32, count: u64, body: &[u8]) -> Self {
        self.entry(key, 9, &[&tag.to_le_bytes()[..], &count.to_le_bytes(), body].concat())
    }

    /// Adds a tensor entry without data.
    pub fn claim(mut self, name: &[u8], dims: &[u64], kind: u32, offset: u64) -> Self {
        let mut entry = (name.len() as u64).to_le_bytes().to_vec();
        entry.extend_from_slice(name);
        entry.extend((dims.len() as u32).to_le_bytes());
        entry.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
        entry.extend(kind.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    /// Adds a tensor with its data; `dims` are innermost first, as in GGUF.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend_from_slice(bytes);
        self.claim(name.as_bytes(), dims, kind, offset)
    }

    /// Adds a tensor of 32-bit floats that count up from `first`.
    pub fn counting(self, name: &str, dims: &[u64], first: u32) -> Self {
        let count = dims.iter().product::<u64>() as u32;
        let bytes: Vec<u8> = (first..first + count).flat_map(|v| (v as f32).to_le_bytes()).collect();
        self.tensor(name, dims, F32, &bytes)
    }

    /// Offsets of the tensors in the data.
    pub fn offsets(&self) -> Vec<usize> {
        let offset = |entry: &Vec<u8>| u64::from_le_bytes(entry[entry.len() - 8..].try_into().expect("eight bytes"));
        self.tensors.iter().map(|entry| offset(entry) as usize).collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        out.extend(self.entries.iter().flatten());
        out.extend(self.tensors.iter().flatten());
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }

    pub(in crate::source::gguf) fn header(&self) -> Result<GgufHeader> {
        header(&self.bytes())
    }

    pub(in crate::source::gguf) fn metadata(&self) -> Metadata {
        self.header().expect("a valid header").metadata
    }

    /// Opens the file as a source. It stays open after the temporary file was deleted.
    pub fn open(&self) -> Result<Gguf> {
        Gguf::open(on_disk(&self.bytes()).path())
    }
}

pub fn header(bytes: &[u8]) -> Result<GgufHeader> {
    GgufHeader::read(&crate::files::read_at::ReadAt::open(on_disk(bytes).path())?)
}

/// A small Mixtral whose query and key tensors count up; experts are in fused tensors or, as in old files, separate.
pub fn mixtral(fused: bool) -> GgufBuilder {
    let mut file = GgufBuilder::new()
        .text("general.architecture", "llama")
        .uint("llama.block_count", 1)
        .uint("llama.context_length", 64)
        .uint("llama.embedding_length", 8)
        .uint("llama.feed_forward_length", 4)
        .uint("llama.attention.head_count", 2)
        .uint("llama.attention.head_count_kv", 1)
        .uint("llama.expert_count", 2)
        .uint("llama.expert_used_count", 1)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .counting("token_embd.weight", &[8, 5], 0)
        .counting("output_norm.weight", &[8], 0)
        .counting("blk.0.attn_norm.weight", &[8], 0)
        .counting("blk.0.attn_q.weight", &[8, 8], 100)
        .counting("blk.0.attn_k.weight", &[8, 4], 200)
        .counting("blk.0.attn_v.weight", &[8, 4], 300)
        .counting("blk.0.attn_output.weight", &[8, 8], 400)
        .counting("blk.0.ffn_norm.weight", &[8], 0)
        .counting("blk.0.ffn_gate_inp.weight", &[8, 2], 500);
    for (matrix, dims) in [("gate", [8, 4]), ("up", [8, 4]), ("down", [4, 8])] {
        file = if fused {
            file.counting(&format!("blk.0.ffn_{matrix}_exps.weight"), &[dims[0], dims[1], 2], 600)
        } else {
            file.counting(&format!("blk.0.ffn_{matrix}.0.weight"), &dims, 600).counting(
                &format!("blk.0.ffn_{matrix}.1.weight"),
                &dims,
                700,
            )
        };
    }
    file
}

fn on_disk(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("the temporary file is writable");
    file
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}
