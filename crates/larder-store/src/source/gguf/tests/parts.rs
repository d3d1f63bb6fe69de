//! Tests of models in several files.

use larder_core::Tensors;

use super::builder::{GgufBuilder, mixtral};
use crate::source::{Source, gguf::Gguf};

/// Splits the tensors of a file over parts; the first part has the metadata.
fn split(whole: &GgufBuilder, counts: &[usize]) -> Vec<GgufBuilder> {
    let total: usize = counts.iter().sum();
    assert_eq!(total, whole.tensors.len());
    let mut next = 0;
    let part = |(no, count): (usize, &usize)| {
        let mut part = if no == 0 { whole.clone() } else { GgufBuilder::new() };
        part.tensors = whole.tensors[next..next + count].to_vec();
        part.data.clear();
        for entry in &mut part.tensors {
            let at = entry.len() - 8;
            let offset = u64::from_le_bytes(entry[at..].try_into().unwrap()) as usize;
            let end = whole.offsets().into_iter().find(|o| *o > offset).unwrap_or(whole.data.len());
            part.data.resize(part.data.len().next_multiple_of(32), 0);
            let moved = part.data.len() as u64;
            part.data.extend_from_slice(&whole.data[offset..end]);
            entry[at..].copy_from_slice(&moved.to_le_bytes());
        }
        next += count;
        part.uint("split.no", no as u32)
            .uint("split.count", counts.len() as u32)
            .uint("split.tensors.count", total as u32)
    };
    counts.iter().enumerate().map(part).collect()
}

fn write(dir: &std::path::Path, parts: &[GgufBuilder]) {
    for (i, part) in parts.iter().enumerate() {
        let name = format!("m-{:05}-of-{:05}.gguf", i + 1, parts.len());
        std::fs::write(dir.join(name), part.bytes()).unwrap();
    }
}

fn refusal(dir: &std::path::Path, name: &str) -> String {
    Gguf::open(&dir.join(name)).err().expect("refused").to_string()
}

#[test]
fn any_part_opens_the_whole_model() {
    let whole = mixtral(true);
    let one = whole.open().unwrap();
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &split(&whole, &[0, 5, whole.tensors.len() - 5]));
    for n in 1..=3 {
        let parts = Gguf::open(&dir.path().join(format!("m-0000{n}-of-00003.gguf"))).unwrap();
        assert_eq!((parts.names(), parts.config()), (one.names(), one.config()));
        assert_eq!(parts.files().len(), 3);
        for name in one.names() {
            let bytes = one.meta(name).unwrap().bytes;
            let (mut got, mut want) = (vec![1; bytes], vec![2; bytes]);
            parts.read(name, 0, &mut got).unwrap();
            one.read(name, 0, &mut want).unwrap();
            assert_eq!(got, want, "{name}");
        }
    }
}

#[test]
fn missing_and_wrong_parts_are_named() {
    let whole = mixtral(true);
    let dir = tempfile::tempdir().unwrap();
    let parts = split(&whole, &[2, 3, whole.tensors.len() - 5]);
    write(dir.path(), &parts);
    let at = |n: usize| dir.path().join(format!("m-0000{n}-of-00003.gguf"));
    std::fs::copy(at(2), at(3)).unwrap();
    assert!(
        refusal(dir.path(), "m-00001-of-00003.gguf").contains("named as part 3 of 3, but its metadata say part 2 of 3")
    );
    std::fs::remove_file(at(3)).unwrap();
    assert!(refusal(dir.path(), "m-00001-of-00003.gguf").contains("of which m-00003-of-00003.gguf is missing"));
    std::fs::remove_file(at(2)).unwrap();
    assert!(refusal(dir.path(), "m-00001-of-00003.gguf").contains("m-00002-of-00003.gguf is missing, and 1 more"));
    std::fs::rename(at(1), dir.path().join("other.gguf")).unwrap();
    assert!(refusal(dir.path(), "other.gguf").contains("whose names must end in"));
    let mut short = split(&whole, &[2, 3, whole.tensors.len() - 5]);
    short[2].tensors.pop();
    write(dir.path(), &short);
    let count = whole.tensors.len();
    let message = format!("parts hold {count} tensors, but they hold {}", count - 1);
    assert!(refusal(dir.path(), "m-00001-of-00003.gguf").contains(&message));
}
