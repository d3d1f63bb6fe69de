//! Identity of a source by its content.

use xxhash_rust::xxh3::Xxh3;

use crate::{error::Result, source::Source};

/// Bytes of a sample.
const SAMPLE_BYTES: usize = 4096;
/// Distance between samples in bytes.
const STRIDE_BYTES: usize = 16 << 20;

/// A digest of the content of `source`: its headers, config and other files, and samples of every tensor: its first and last
/// 4 KiB, and 4 KiB every 16 MiB. `None` while a part of the source is not on disk.
///
/// Sources of equal content have equal identities, whatever their files are called. A source that was retrained,
/// requantised or damaged on a large scale has another; a few changed bytes can remain unnoticed.
pub fn identity(source: &dyn Source) -> Result<Option<String>> {
    let names = source.names();
    if names.iter().any(|name| source.download_rank(name).is_some()) {
        return Ok(None);
    }
    let mut digest = Xxh3::new();
    digest.update(&source.fingerprint().to_le_bytes());
    let mut sample = vec![];
    for name in names {
        let Some(meta) = source.meta(name) else { continue };
        digest.update(name.as_bytes());
        for (offset, len) in samples(meta.bytes) {
            sample.resize(len, 0);
            source.read(name, offset, &mut sample)?;
            digest.update(&sample);
        }
    }
    Ok(Some(format!("{:032x}", digest.digest128())))
}

/// Offset and length of the samples of a tensor of `bytes` bytes, ascending, without overlap.
fn samples(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let last = bytes.saturating_sub(SAMPLE_BYTES);
    let strided = (0..last).step_by(STRIDE_BYTES).map(move |at| (at, SAMPLE_BYTES.min(last - at)));
    strided.chain([(last, bytes - last)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        source::Checkpoint,
        testing::{ExpertForm, Tiny},
    };

    #[test]
    fn samples_cover_both_ends_and_do_not_overlap() {
        for bytes in [0, 1, 4095, 4096, 4097, 8192, 10_000, STRIDE_BYTES, STRIDE_BYTES + 5000, 3 * STRIDE_BYTES + 1] {
            let all: Vec<_> = samples(bytes).collect();
            assert!(all.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "{bytes}: {all:?}");
            let ends = (all[0].0, all.last().map(|(at, len)| at + len));
            assert_eq!(ends, (0, Some(bytes)), "{all:?}");
            assert!(all.iter().all(|(_, len)| *len <= SAMPLE_BYTES), "{all:?}");
        }
    }

    #[test]
    fn other_bytes_of_the_same_length_are_another_source() {
        let dir = tempfile::tempdir().unwrap();
        Tiny::new(ExpertForm::Halves).write(dir.path());
        let id = || identity(&Checkpoint::open(dir.path()).unwrap()).unwrap().unwrap();
        let (before, file) = (id(), dir.path().join("model.safetensors"));
        assert_eq!(before, id());
        let good = std::fs::read(&file).unwrap();
        for at in [good.len() - 1, good.len() / 2] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&file, bad).unwrap();
            assert_ne!(before, id(), "byte {at}");
        }
        std::fs::write(&file, good).unwrap();
        std::fs::rename(&file, dir.path().join("other.safetensors")).unwrap();
        assert_eq!(before, id());
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        assert_ne!(before, id());
    }
}
