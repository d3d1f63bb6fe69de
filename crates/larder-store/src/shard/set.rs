//! The shards of a store that together hold every expert once.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use larder_core::{ExpertId, ExpertLayout, Geometry, LayerIdx, SEGMENTS};

use crate::{
    check_reads::ReadChecks,
    error::{Result, StoreError},
    expert_source::ExpertSource,
    files::{read_at::ReadAt, safetensors::DATA_START},
    manifest::{ExpertChecksums, ExpertFiles},
    shard::{Shard, shard_path_in},
};

/// The bits of all segments.
const ALL: u8 = (1 << SEGMENTS) - 1;

/// A set of shards. Their data are checked as `ReadChecks` say. Their headers are for other programs: experts are found
/// by the manifest alone, and only verification reads headers.
pub struct ShardSet {
    /// The store, and its second folder if there is one.
    roots: Vec<PathBuf>,
    /// Folder of the set.
    name: &'static str,
    files: ExpertFiles,
    layouts: BTreeMap<LayerIdx, ExpertLayout>,
    experts: usize,
    /// Per shard, layer by layer: what was verified in this run.
    checked: Vec<AtomicU8>,
    checks: Arc<ReadChecks>,
    /// Per shard, layer by layer, a bit for each root that has it, the lowest for the first.
    held: Vec<u8>,
}

impl ShardSet {
    /// The set `name` of the store at `store` with this second folder. Lengths of the shards are checked, and shards
    /// may be missing. A shard of a wrong length is an error, unless there is another copy.
    pub fn open(
        store: &Path,
        second: Option<&Path>,
        name: &'static str,
        files: &ExpertFiles,
        geometry: &Geometry,
    ) -> Result<Self> {
        let mut set = Self::listed(store, name, files, geometry)?;
        set.roots.extend(second.map(Path::to_owned));
        set.held = set.shards().map(|shard| set.find(&shard)).collect::<Result<_>>()?;
        Ok(set)
    }

    /// Which roots have a shard.
    fn find(&self, shard: &Shard) -> Result<u8> {
        let (mut held, mut damaged) = (0, None);
        for root in 0..self.roots.len() {
            let path = self.path_on(root, shard);
            match shard.open(&path) {
                Ok(_) => held |= 1 << root,
                Err(_) if !path.exists() => {}
                Err(e) => damaged = damaged.or(Some(e)),
            }
        }
        damaged.filter(|_| held == 0).map_or(Ok(held), Err)
    }

    /// As [`open`](Self::open) without a second folder, and without a look at the files.
    pub fn listed(store: &Path, name: &'static str, files: &ExpertFiles, geometry: &Geometry) -> Result<Self> {
        let layouts = files.layouts(geometry).map_err(|what| StoreError::malformed(store, what))?;
        let checked = (0..geometry.expert_count()).map(|_| AtomicU8::new(0)).collect();
        let (roots, files, experts) = (vec![store.to_owned()], files.clone(), geometry.experts);
        let (checks, held) = (Arc::new(ReadChecks::new()), vec![1; geometry.expert_count()]);
        Ok(ShardSet { roots, name, files, layouts, experts, checked, checks, held })
    }

    /// Folder of the set.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The layers that have experts.
    pub fn layers(&self) -> impl Iterator<Item = LayerIdx> {
        self.layouts.keys().copied()
    }

    /// The store, and its second folder if there is one.
    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// Per shard, layer by layer, a bit for each root that has it, the lowest for the first.
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Whether the shard of an expert exists.
    pub fn has(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.layouts.contains_key(&layer) && self.held[self.index(layer, expert)] != 0
    }

    /// Checks that no shard is missing.
    pub fn require_all(&self) -> Result<()> {
        match self.shards().zip(&self.held).find(|(_, held)| **held == 0) {
            Some((shard, _)) => shard.open(&self.path(&shard)).map(drop),
            None => Ok(()),
        }
    }

    /// Whether experts of this set have a gate matrix.
    pub fn has_gates(&self) -> bool {
        self.layouts.values().all(|layout| layout.gate.is_some())
    }

    /// Checks reads as `checks` say, which others share.
    pub(crate) fn share_checks(&mut self, checks: &Arc<ReadChecks>) {
        self.checks = checks.clone();
    }

    /// Checks one segment of an expert, given with all its data.
    pub fn check_part(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<()> {
        self.check_segment(layer, expert, part, &data[self.layouts[&layer].segments()[part].clone()])
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

    /// The path of a shard of this set: in the first root that has it.
    pub fn path(&self, shard: &Shard) -> PathBuf {
        let held = self.held[self.index(shard.layer, shard.expert)];
        self.path_on((0..self.roots.len()).find(|root| held & (1 << root) != 0).unwrap_or_default(), shard)
    }

    /// The path of a shard in one of the roots.
    pub fn path_on(&self, root: usize, shard: &Shard) -> PathBuf {
        self.roots[root].join(shard_path_in(self.name, shard.layer, shard.expert))
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
        let index = self.index(layer, expert);
        (&self.files.checksums[index / self.experts][expert.index()], &self.checked[index])
    }

    /// The index of a shard, layer by layer.
    fn index(&self, layer: LayerIdx, expert: ExpertId) -> usize {
        self.row(layer) * self.experts + expert.index()
    }

    /// Reads and checks an expert from one of the roots.
    fn read_from(&self, root: usize, shard: &Shard, into: &mut [u8]) -> Result<()> {
        let file: ReadAt = shard.open(&self.path_on(root, shard))?;
        file.read(DATA_START as u64, into)?;
        self.check_expert(shard.layer, shard.expert, into)
    }
}

impl ExpertSource for ShardSet {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        &self.layouts[&layer]
    }

    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()> {
        let shard = self.shard(layer, expert);
        assert_eq!(into.len(), shard.layout.bytes, "the buffer must have the layout's length");
        // A shard that exists nowhere is missing in the store.
        let held = self.held[self.index(layer, expert)].max(1);
        let mut first = None;
        for root in (0..self.roots.len()).filter(|root| held & (1 << root) != 0) {
            match self.read_from(root, &shard, into) {
                Ok(()) => return Ok(()),
                Err(e) => first = first.or(Some(e)),
            }
        }
        first.map_or(Ok(()), Err)
    }
}
