//! The shards of a store that together hold every expert once.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU8, Ordering},
};

use larder_core::{ExpertId, ExpertLayout, Geometry, LayerIdx, SEGMENTS};

use crate::{
    check_reads::{CheckReads, ReadChecks},
    error::{Result, StoreError},
    expert_source::ExpertSource,
    file::ReadAt,
    manifest::{ExpertChecksums, ExpertFiles},
    shard::{DATA_START, Shard, shard_path_in},
};

/// The bits of all segments.
const ALL: u8 = (1 << SEGMENTS) - 1;

/// A set of shards. Their data are checked as [`ReadChecks`] say. Their headers are for other programs: experts are found by
/// the manifest alone, and only [`verify`](crate::verify) reads headers.
pub struct ShardSet {
    store: PathBuf,
    /// Folder of the set.
    name: &'static str,
    files: ExpertFiles,
    layouts: BTreeMap<LayerIdx, ExpertLayout>,
    experts: usize,
    /// Per shard, layer by layer: what was verified in this run.
    checked: Vec<AtomicU8>,
    checks: ReadChecks,
    /// Shards that do not exist.
    missing: BTreeSet<(LayerIdx, ExpertId)>,
}

impl ShardSet {
    /// The set `name` of the store at `store`. Lengths of the shards are checked, and shards may be missing.
    pub fn open(store: &Path, name: &'static str, files: &ExpertFiles, geometry: &Geometry) -> Result<Self> {
        let mut set = Self::listed(store, name, files, geometry)?;
        let missing = |shard: Shard| {
            let path = set.path(&shard);
            match shard.open(&path) {
                Err(_) if !path.exists() => Some(Ok((shard.layer, shard.expert))),
                opened => opened.err().map(Err),
            }
        };
        set.missing = set.shards().filter_map(missing).collect::<Result<_>>()?;
        Ok(set)
    }

    /// As [`open`](Self::open), without a look at the files.
    pub fn listed(store: &Path, name: &'static str, files: &ExpertFiles, geometry: &Geometry) -> Result<Self> {
        let layouts = files.layouts(geometry).map_err(|what| StoreError::malformed(store, what))?;
        let checked = (0..geometry.expert_count()).map(|_| AtomicU8::new(0)).collect();
        let (store, files, experts) = (store.to_owned(), files.clone(), geometry.experts);
        let (checks, missing) = (ReadChecks::new(), BTreeSet::new());
        Ok(ShardSet { store, name, files, layouts, experts, checked, checks, missing })
    }

    /// Whether the shard of an expert exists.
    pub fn has(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.layouts.contains_key(&layer) && !self.missing.contains(&(layer, expert))
    }

    /// Checks that no shard is missing.
    pub fn require_all(&self) -> Result<()> {
        match self.missing.first() {
            Some((layer, expert)) => {
                let shard = self.shard(*layer, *expert);
                shard.open(&self.path(&shard)).map(drop)
            }
            None => Ok(()),
        }
    }

    /// Whether experts of this set have a gate matrix.
    pub fn has_gates(&self) -> bool {
        self.layouts.values().all(|layout| layout.gate.is_some())
    }

    /// Which reads are checked from now on.
    pub fn set_checks(&self, checks: CheckReads) {
        self.checks.set(checks);
    }

    /// Number of parts of an expert that are checked on their own: its segments, or the whole in stores of format 1.
    pub fn check_parts(&self) -> usize {
        match self.files.checksums.first().and_then(|row| row.first()) {
            Some(ExpertChecksums::Segments(_)) => SEGMENTS,
            _ => 1,
        }
    }

    /// Checks one of the [`check_parts`](Self::check_parts) of an expert, given with all its data.
    pub fn check_part(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<()> {
        match self.check_parts() {
            1 => self.check_expert(layer, expert, data),
            _ => self.check_segment(layer, expert, part, &data[self.layouts[&layer].segments()[part].clone()]),
        }
    }

    /// Checks an expert's data.
    pub fn check_expert(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<()> {
        let (checksums, checked) = self.record(layer, expert);
        if checked.load(Ordering::Relaxed) == ALL && !self.checks.again() {
            return Ok(());
        }
        let shard = self.shard(layer, expert);
        // Reads that are as expected, which is nearly all, need no memory for a path.
        if !checksums.are_of(shard.layout, data) {
            shard.check_data(&self.path(&shard), data, checksums)?;
        }
        checked.store(ALL, Ordering::Relaxed);
        Ok(())
    }

    /// Checks one segment.
    pub fn check_segment(&self, layer: LayerIdx, expert: ExpertId, segment: usize, bytes: &[u8]) -> Result<()> {
        let (checksums, checked) = self.record(layer, expert);
        let bit = 1u8 << segment;
        assert!(bit <= ALL, "an expert has {SEGMENTS} segments");
        if checked.load(Ordering::Relaxed) & bit != 0 && !self.checks.again() {
            return Ok(());
        }
        let shard = self.shard(layer, expert);
        assert_eq!(bytes.len(), shard.layout.segments()[segment].len(), "the bytes must be those of the segment");
        if !checksums.is_of_segment(segment, bytes) {
            shard.check_segment(&self.path(&shard), segment, bytes, checksums)?;
        }
        checked.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }

    /// Every shard with its checksums, layer by layer.
    pub fn shards_with_checksums(&self) -> impl Iterator<Item = (Shard<'_>, &ExpertChecksums)> {
        self.shards().map(|shard| (shard, self.record(shard.layer, shard.expert).0))
    }

    /// All shards, layer by layer.
    pub fn shards(&self) -> impl Iterator<Item = Shard<'_>> {
        let experts = 0..self.experts;
        self.layouts.keys().flat_map(move |layer| experts.clone().map(|e| self.shard(*layer, ExpertId(e as u16))))
    }

    /// The path of a shard of this set.
    pub fn path(&self, shard: &Shard) -> PathBuf {
        self.store.join(shard_path_in(self.name, shard.layer, shard.expert))
    }

    fn shard(&self, layer: LayerIdx, expert: ExpertId) -> Shard<'_> {
        let file_bytes = self.files.file_bytes(self.row(layer));
        Shard { layer, expert, layout: &self.layouts[&layer], file_bytes }
    }

    /// The MoE row of a layer.
    fn row(&self, layer: LayerIdx) -> usize {
        self.layouts.range(..layer).count()
    }

    /// The checksums of a shard, and what was verified.
    fn record(&self, layer: LayerIdx, expert: ExpertId) -> (&ExpertChecksums, &AtomicU8) {
        let row = self.row(layer);
        (&self.files.checksums[row][expert.index()], &self.checked[row * self.experts + expert.index()])
    }
}

impl ExpertSource for ShardSet {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        &self.layouts[&layer]
    }

    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()> {
        let shard = self.shard(layer, expert);
        assert_eq!(into.len(), shard.layout.bytes, "the buffer must have the layout's length");
        let file: ReadAt = shard.open(&self.path(&shard))?;
        file.read(DATA_START as u64, into)?;
        self.check_expert(layer, expert, into)
    }
}
