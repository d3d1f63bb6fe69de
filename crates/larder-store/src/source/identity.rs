//! Identity of a source by its content.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::{Blueprint, ExpertId, PerMatrix, matrix_scale_name};
use twox_hash::XxHash3_128;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{read_at::ReadAt, safetensors::SafetensorsHeader},
    parallel::parallel,
    source::{Source, expert_names, require_tensor},
};

/// Bytes of a sample.
const SAMPLE_BYTES: usize = 4096;
/// Distance between samples in bytes.
const STRIDE_BYTES: usize = 4 << 20;
/// Threads that read samples, each of which waits for the disk most of the time.
const THREADS: usize = 8;

/// A digest of the content of `source`: its headers, config and other files, and samples of every tensor that the model
/// of `blueprint` uses: its first and last 4 KiB, and 4 KiB every 4 MiB.
///
/// Sources of equal content have equal identities, whatever their files are called, and whether they are on disk or
/// still being downloaded; in the latter case this waits for them. A source that was retrained, requantised or damaged
/// on a large scale has another; a few changed bytes can remain unnoticed.
pub fn identity(source: &dyn Source, blueprint: &Blueprint) -> Result<String> {
    let names: Vec<String> = used_tensors(source, blueprint).into_iter().collect();
    let samples = parallel(THREADS, names.len(), || (), |(), i| tensor_samples(source, &names[i]))?;
    let mut digest = XxHash3_128::new();
    digest.write(&source.fingerprint().to_le_bytes());
    for (name, samples) in names.iter().zip(samples) {
        digest.write(name.as_bytes());
        digest.write(samples.as_bytes());
    }
    Ok(format!("{:032x}", digest.finish_128()))
}

/// The digest of the samples of the tensor `name`.
fn tensor_samples(source: &dyn Source, name: &str) -> Result<String> {
    if let Some(taken) = source.samples(name)? {
        return Ok(taken);
    }
    sampled(require_tensor(source, name)?.bytes, |offset, into| Ok(source.read(name, offset, into)?))
}

/// The names of all tensors that the model needs.
fn used_tensors(source: &dyn Source, blueprint: &Blueprint) -> BTreeSet<String> {
    let names = expert_names(source, blueprint);
    let biases = names.bias.iter().filter(|_| blueprint.geometry.bias).flat_map(PerMatrix::named);
    let slices: Vec<_> = names.matrices.named().chain(biases).map(|(_, slice)| slice).collect();
    let mut used: BTreeSet<String> = blueprint.resident.iter().map(|spec| spec.name.clone()).collect();
    for layer in &blueprint.geometry.moe_layers {
        for slice in &slices {
            let experts = if slice.stacked { 1 } else { blueprint.geometry.experts };
            used.extend((0..experts).map(|e| slice.tensor_name(*layer, ExpertId(e as u16))));
        }
    }
    let scaled = |name: &&String| source.meta(name).is_some_and(|meta| meta.kind.has_matrix_scale());
    let scales = used.iter().filter(scaled).map(|name| matrix_scale_name(name));
    let scales: Vec<String> = scales.filter(|name| source.meta(name).is_some()).collect();
    used.extend(scales);
    used
}

/// Digest of the samples of a tensor of `bytes` bytes, as 32 hex digits. `read` fills a buffer from an offset in the
/// tensor.
pub(crate) fn sampled(bytes: usize, read: impl Fn(usize, &mut [u8]) -> Result<()>) -> Result<String> {
    let mut digest = XxHash3_128::new();
    let mut sample = [0; SAMPLE_BYTES];
    for (offset, len) in samples(bytes) {
        read(offset, &mut sample[..len])?;
        digest.write(&sample[..len]);
    }
    Ok(format!("{:032x}", digest.finish_128()))
}

/// The digest of the samples of each tensor of a safetensors file, from which [`identity`] is made.
pub fn samples_of_file(file: &ReadAt) -> Result<BTreeMap<String, String>> {
    let tensors = SafetensorsHeader::read(file)?.tensors;
    let digest = |(name, entry): (String, crate::files::safetensors::TensorEntry)| {
        let digest = sampled(entry.bytes, |offset, into| file.read(entry.start + offset as u64, into))?;
        Ok((name, digest))
    };
    tensors.into_iter().map(digest).collect()
}

/// Offset and length of the samples of a tensor of `bytes` bytes, ascending, without overlap.
fn samples(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let last = bytes.saturating_sub(SAMPLE_BYTES);
    let strided = (0..last).step_by(STRIDE_BYTES).map(move |at| (at, SAMPLE_BYTES.min(last - at)));
    strided.chain([(last, bytes - last)])
}

/// Refuses a source whose content has changed since its identity was `before`.
pub(crate) fn check_unchanged(source: &dyn Source, before: &str, now: &str) -> Result<()> {
    if before == now {
        Ok(())
    } else {
        let what = "has changed while it was converted; remove the unfinished store and convert it again";
        Err(StoreError::new(StoreErrorKind::Mismatch, source.path(), what))
    }
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
        let tiny = Tiny::new(ExpertForm::Halves);
        tiny.write(dir.path());
        let id = || identity(&Checkpoint::open(dir.path()).unwrap(), &tiny.blueprint()).unwrap();
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

    #[test]
    fn the_samples_of_a_file_are_those_of_its_tensors() {
        let dir = tempfile::tempdir().unwrap();
        Tiny::new(ExpertForm::Separate).write(dir.path());
        let source = Checkpoint::open(dir.path()).unwrap();
        let of_file = samples_of_file(&ReadAt::open(&dir.path().join("model.safetensors")).unwrap()).unwrap();
        assert_eq!(of_file.len(), source.names().len());
        for (name, digest) in of_file {
            assert_eq!(digest, tensor_samples(&source, &name).unwrap(), "{name}");
        }
    }
}
