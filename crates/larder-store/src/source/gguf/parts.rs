//! The files of a GGUF model: one, or parts named `NAME-00001-of-00003.gguf` and so on.

use std::path::{Path, PathBuf};

use super::{
    metadata::Metadata,
    reader::{GgufHeader, GgufTensor},
};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

/// Largest number of parts, limited by the five digits in their names.
const PARTS_MAX: u64 = 99_999;

/// All files of a model with their headers.
pub(super) struct GgufParts {
    pub files: Vec<ReadAt>,
    /// Length of each header in bytes.
    pub header_bytes: Vec<u64>,
    /// Metadata of the first file, which has everything that is not about the parts themselves.
    pub metadata: Metadata,
    /// Tensors of all files, in order.
    pub tensors: Vec<GgufTensor>,
}

impl GgufParts {
    /// Opens the file at `path`, which may be any part, and the other parts in the same folder.
    pub fn open(path: &Path) -> Result<Self> {
        let file = ReadAt::open(path)?;
        let header = GgufHeader::read(&file)?;
        match header.metadata.uint("split.count")? {
            Some(count) if count > 1 => Self::of(&siblings(path, count)?),
            _ => Ok(Self::begin(file, header)),
        }
    }

    fn of(paths: &[PathBuf]) -> Result<Self> {
        let first = ReadAt::open(&paths[0])?;
        let header = GgufHeader::read(&first)?;
        let mut parts = Self::begin(first, header);
        check_number(&parts.metadata, 0, paths.len())?;
        for (number, path) in paths.iter().enumerate().skip(1) {
            let file = ReadAt::open(path)?;
            let GgufHeader { metadata, tensors, bytes } = GgufHeader::read(&file)?;
            check_number(&metadata, number, paths.len())?;
            parts.tensors.extend(tensors.into_iter().map(|entry| GgufTensor { file: number, ..entry }));
            parts.files.push(file);
            parts.header_bytes.push(bytes);
        }
        let declared = parts.metadata.uint("split.tensors.count")?;
        match declared.filter(|declared| *declared != parts.tensors.len() as u64) {
            Some(declared) => {
                let what = format!("says its parts hold {declared} tensors, but they hold {}", parts.tensors.len());
                Err(StoreError::new(StoreErrorKind::Mismatch, &paths[0], what))
            }
            None => Ok(parts),
        }
    }

    fn begin(file: ReadAt, GgufHeader { metadata, tensors, bytes }: GgufHeader) -> Self {
        GgufParts { files: vec![file], header_bytes: vec![bytes], metadata, tensors }
    }
}

/// The paths of all parts, each of which must exist.
fn siblings(path: &Path, count: u64) -> Result<Vec<PathBuf>> {
    let unnamed = || {
        let what = format!("is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on");
        StoreError::new(StoreErrorKind::Unsupported, path, what)
    };
    let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(unnamed)?;
    let stem = stem_of(name, count).filter(|_| count <= PARTS_MAX).ok_or_else(unnamed)?;
    let at = |n: u64| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.gguf"));
    let missing: Vec<u64> = (1..=count).filter(|n| !at(*n).exists()).collect();
    match missing[..] {
        [] => Ok((1..=count).map(at).collect()),
        [first, ..] => {
            let name = at(first);
            let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let more = match missing.len() {
                1 => String::new(),
                n => format!(", and {} more", n - 1),
            };
            let what = format!("is one of {count} parts, of which {name} is missing{more}");
            Err(StoreError::new(StoreErrorKind::Missing, path, what))
        }
    }
}

/// The part of a name before `-NNNNN-of-NNNNN.gguf`.
fn stem_of(name: &str, count: u64) -> Option<&str> {
    let numbered = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = numbered.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit())).then_some(stem)
}

fn check_number(metadata: &Metadata, number: usize, count: usize) -> Result<()> {
    let (no, of) = (metadata.uint("split.no")?, metadata.uint("split.count")?);
    if (no, of) == (Some(number as u64), Some(count as u64)) {
        return Ok(());
    }
    let shown = |n: Option<u64>| n.map_or("unknown".into(), |n| n.to_string());
    let what = format!(
        "is named as part {} of {count}, but its metadata say part {} of {}",
        number + 1,
        shown(no.map(|no| no.saturating_add(1))),
        shown(of)
    );
    Err(StoreError::new(StoreErrorKind::Mismatch, metadata.path(), what))
}
