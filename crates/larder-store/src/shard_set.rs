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

/// The bit that says that the header was checked; the bits below are those of the segments.
const HEADER: u8 = 1 << SEGMENTS;
const ALL: u8 = (HEADER << 1) - 1;

/// A set of shards. Headers are checked when a shard is first read, data as [`ReadChecks`] say.
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

    /// Checks an expert's data, and the header of its shard the first time it is called for the expert in a run.
    pub fn check_expert(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<()> {
        let (checksums, checked) = self.record(layer, expert);
        let before = checked.load(Ordering::Relaxed);
        if before == ALL && !self.checks.again() {
            return Ok(());
        }
        let shard = self.shard(layer, expert);
        if before & HEADER == 0 {
            shard.check_header(&shard.open(&self.path(&shard))?, checksums)?;
        }
        // Reads that are as expected, which is nearly all, need no memory for a path.
        if !checksums.are_of(shard.layout, data) {
            shard.check_data(&self.path(&shard), data, checksums)?;
        }
        checked.store(ALL, Ordering::Relaxed);
        Ok(())
    }

    /// Checks one segment, and the header of its shard the first time it is called for the expert in a run.
    pub fn check_segment(&self, layer: LayerIdx, expert: ExpertId, segment: usize, bytes: &[u8]) -> Result<()> {
        let (checksums, checked) = self.record(layer, expert);
        let (before, bit) = (checked.load(Ordering::Relaxed), 1u8 << segment);
        assert!(bit < HEADER, "an expert has {SEGMENTS} segments");
        if before & bit != 0 && !self.checks.again() {
            return Ok(());
        }
        let shard = self.shard(layer, expert);
        assert_eq!(bytes.len(), shard.layout.segments()[segment].len(), "the bytes must be those of the segment");
        let path = self.path(&shard);
        if before & HEADER == 0 {
            shard.check_header(&shard.open(&path)?, checksums)?;
        }
        shard.check_segment(&path, segment, bytes, checksums)?;
        checked.fetch_or(bit | HEADER, Ordering::Relaxed);
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
