//! Writes small GGUF files: metadata, and tensors of 32-bit floats.

use std::path::Path;

use crate::{
    error::Result,
    files::atomic_file::AtomicFile,
    source::{DEFAULT_ALIGNMENT, MAGIC, tag},
};

/// The version of GGUF that is written.
const VERSION: u32 = 3;
/// GGUF's number of the tensor type f32.
const F32: u32 = 0;
/// Bytes that are written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A file that is to be written.
#[derive(Default)]
pub struct GgufFile<'a> {
    entries: Vec<u8>,
    entry_count: u64,
    tensors: Vec<(String, Vec<u64>, &'a [f32])>,
}

impl<'a> GgufFile<'a> {
    pub fn text(&mut self, key: &str, value: &str) {
        self.entry(key, tag::TEXT, &text(value));
    }

    pub fn texts(&mut self, key: &str, values: &[String]) {
        let mut list = tag::TEXT.to_le_bytes().to_vec();
        list.extend((values.len() as u64).to_le_bytes());
        list.extend(values.iter().flat_map(|value| text(value)));
        self.entry(key, tag::LIST, &list);
    }

    pub fn number(&mut self, key: &str, value: u32) {
        self.entry(key, tag::U32, &value.to_le_bytes());
    }

    fn entry(&mut self, key: &str, tag: u32, value: &[u8]) {
        self.entries.extend([&text(key)[..], &tag.to_le_bytes(), value].concat());
        self.entry_count += 1;
    }

    /// Adds a tensor of `rows` rows, or one of a single dimension if there is only one row.
    pub fn tensor(&mut self, name: String, rows: usize, values: &'a [f32]) {
        let mut dims = vec![(values.len() / rows) as u64];
        if rows > 1 {
            dims.push(rows as u64);
        }
        self.tensors.push((name, dims, values));
    }

    /// Writes the file atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut file = AtomicFile::create(path)?;
        file.write(&self.header())?;
        for (_, _, values) in &self.tensors {
            for values in values.chunks(CHUNK_BYTES / size_of::<f32>()) {
                file.write(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())?;
            }
            file.write(&vec![0; padding(size_of_val(*values))])?;
        }
        file.publish()
    }

    fn header(&self) -> Vec<u8> {
        let mut out = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.to_le_bytes());
        out.extend(&self.entries);
        let mut offset = 0;
        for (name, dims, values) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(F32.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += size_of_val(*values) + padding(size_of_val(*values));
        }
        out.resize(out.len() + padding(out.len()), 0);
        out
    }
}

/// Bytes between the end of `bytes` bytes and where the next tensor begins.
fn padding(bytes: usize) -> usize {
    bytes.next_multiple_of(DEFAULT_ALIGNMENT as usize) - bytes
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}
