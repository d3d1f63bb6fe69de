//! Conversion of a source into a store: streaming, atomic per file, and resumable.
//!
//! The order of writing makes it resumable. `convert.json` is written first and identifies source and options; every
//! other file is written atomically; `larder.json` is written last and makes the folder a store.

mod target;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use larder_core::{Blueprint, ExpertId, LayerIdx, NumberFormat, RowOrder};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    assemble::Assembler,
    atomic_file::{AtomicFile, sync_folder, write_atomically},
    direct::AlignedBuffer,
    error::Result,
    manifest::{
        ExpertFiles, FORMAT_VERSION, MANIFEST_FILE, Manifest, Provenance, RESIDENT_FILE, ResidentFile, SidecarFile,
    },
    parallel::parallel,
    resident,
    shard::{DATA_START, Shard, checksum_of, layer_folder, shard_path},
    source::{SIDECARS, Source},
    tensor_slice::AssemblyBuffers,
};
pub use target::CONVERSION_STATE;
use target::{ConversionState, Target};

/// Threads that each read, convert and write one expert at a time.
const THREADS: usize = 3;
/// Limit of the bytes of all experts in flight, unless a single expert is larger.
const IN_FLIGHT_BYTES: usize = 768 << 20;

/// Number formats of a conversion.
#[derive(Clone, Copy, Default, Debug)]
pub struct ConvertOptions {
    /// Number format of the experts; `None` keeps the source's.
    pub experts: Option<NumberFormat>,
    /// Number format of the resident weights of products; `None` keeps the source's.
    pub resident: Option<NumberFormat>,
}

/// Receives the progress of long work.
pub trait Progress: Sync {
    /// Work on a total of `bytes` bytes begins.
    fn begin(&self, bytes: u64);

    /// `bytes` more bytes are done.
    fn advance(&self, bytes: u64);
}

/// Ignores progress.
impl Progress for () {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}
}

/// Result of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertReport {
    /// Bytes of the source's weights.
    pub source_bytes: u64,
    /// Bytes of the store's weights.
    pub store_bytes: u64,
    /// Number of experts in the store.
    pub experts: usize,
    /// Number of experts that an earlier, interrupted conversion had finished.
    pub resumed: usize,
    /// One sentence for each part that is not stored in the requested format.
    pub notes: Vec<String>,
    /// Elapsed time.
    pub took: Duration,
}

/// Converts `source` into a store in the folder `target`, or resumes an earlier attempt.
pub fn convert(
    source: &dyn Source,
    blueprint: &Blueprint,
    target: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<ConvertReport> {
    let started = Instant::now();
    let assembler = Assembler::new(source, blueprint, options.experts)?;
    let resident = resident::ResidentPlan::new(source, blueprint, options.resident)?;
    let data_bytes = assembler.layouts().values().map(|l| l.bytes).max().unwrap_or_default();
    let conversion = Conversion { source, blueprint, options, progress, assembler, resident, data_bytes };
    let mut report = conversion.report();
    let state = ConversionState::new(conversion.fingerprint(), options);
    if let Some(target) = Target::prepare(target, &state, &conversion.files())? {
        source.use_direct_io();
        progress.begin(conversion.store_bytes());
        report.resumed = conversion.write(&target)?;
    }
    report.took = started.elapsed();
    Ok(report)
}

struct Conversion<'a> {
    source: &'a dyn Source,
    blueprint: &'a Blueprint,
    options: &'a ConvertOptions,
    progress: &'a dyn Progress,
    assembler: Assembler<'a>,
    resident: resident::ResidentPlan,
    /// Bytes of the largest expert.
    data_bytes: usize,
}

/// One unit of work of a conversion.
enum Task {
    /// The resident weights.
    Resident,
    /// An expert by its index.
    Expert(usize),
}

/// Result of a task.
enum TaskOutcome {
    Resident(ResidentFile),
    Expert { number: usize, checksum: String, resumed: bool },
}

/// Buffers of one conversion thread.
struct ThreadBuffers {
    file: AlignedBuffer,
    scratch: AssemblyBuffers,
}

impl Conversion<'_> {
    fn report(&self) -> ConvertReport {
        ConvertReport {
            source_bytes: self.source.files().iter().map(|f| f.bytes).sum(),
            store_bytes: self.store_bytes(),
            experts: self.blueprint.geometry.expert_count(),
            resumed: 0,
            notes: [self.assembler.notes(), &self.resident.notes].concat(),
            took: Duration::ZERO,
        }
    }

    fn file_bytes(&self) -> usize {
        self.data_bytes + DATA_START
    }

    /// The row order in which products are fastest; float formats have only one.
    fn order(&self) -> RowOrder {
        let layouts = self.assembler.layouts().values();
        layouts.map(|l| l.clone().in_order(RowOrder::Rows8).order()).find(|o| *o != RowOrder::Plain).unwrap_or_default()
    }

    fn store_bytes(&self) -> u64 {
        self.files().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Fingerprint of everything that decides what is written.
    fn fingerprint(&self) -> u64 {
        xxh3_64(format!("{:x} {:?}", self.source.fingerprint(), self.blueprint).as_bytes())
    }

    /// Every large file of the store with its length in bytes.
    fn files(&self) -> Vec<(std::path::PathBuf, u64)> {
        let shards = (0..self.blueprint.geometry.expert_count()).map(|i| {
            let (layer, expert) = self.expert_at(i);
            (shard_path(layer, expert), self.file_bytes() as u64)
        });
        std::iter::once((RESIDENT_FILE.into(), self.resident.file_bytes() as u64)).chain(shards).collect()
    }

    /// The expert with index `i`: layer by layer, the order in which checkpoints usually store them.
    fn expert_at(&self, i: usize) -> (LayerIdx, ExpertId) {
        let geometry = &self.blueprint.geometry;
        (geometry.moe_layers[i / geometry.experts], ExpertId((i % geometry.experts) as u16))
    }

    /// Writes all files that do not exist yet; returns the number of experts that did.
    fn write(&self, target: &Target) -> Result<usize> {
        for layer in &self.blueprint.geometry.moe_layers {
            target.create_folder(&layer_folder(*layer))?;
        }
        let sidecars = self.write_sidecars(target)?;
        let threads = (IN_FLIGHT_BYTES / self.file_bytes()).clamp(1, THREADS);
        let buffers =
            || ThreadBuffers { file: AlignedBuffer::new(self.file_bytes()), scratch: AssemblyBuffers::default() };
        let tasks = self.tasks();
        let done = parallel(threads, tasks.len(), buffers, |buffers, i| match tasks[i] {
            Task::Resident => self.write_resident(target),
            Task::Expert(expert) => self.write_expert(target, expert, buffers),
        })?;
        let (resident, checksums, resumed) = self.collect_outcomes(done);
        target.sync(&self.blueprint.geometry.moe_layers)?;
        let manifest = self.manifest(sidecars, resident, checksums);
        write_atomically(&target.path().join(MANIFEST_FILE), &manifest.to_bytes())?;
        sync_folder(target.path())?;
        target.finish()?;
        Ok(resumed)
    }

    /// The tasks in order of work. The resident weights take longest, so they come first. While the model is still
    /// being downloaded they come last, since they are spread over all files, and experts follow the order of download.
    fn tasks(&self) -> Vec<Task> {
        let experts = 0..self.blueprint.geometry.expert_count();
        let rank = |i: &usize| {
            let (layer, expert) = self.expert_at(*i);
            self.assembler.download_rank(layer, expert)
        };
        let mut experts: Vec<_> = experts.map(|i| (rank(&i), i)).collect();
        experts.sort_unstable();
        let downloading = experts.iter().any(|(rank, _)| rank.is_some());
        let experts = experts.into_iter().map(|(_, i)| Task::Expert(i));
        match downloading {
            false => std::iter::once(Task::Resident).chain(experts).collect(),
            true => experts.chain(std::iter::once(Task::Resident)).collect(),
        }
    }

    fn write_sidecars(&self, target: &Target) -> Result<Vec<SidecarFile>> {
        let mut written = Vec::new();
        for name in SIDECARS {
            if let Some(bytes) = self.source.sidecar(name)? {
                write_atomically(&target.path().join(name), &bytes)?;
                let checksum = checksum_of(&bytes);
                written.push(SidecarFile { name: name.to_owned(), bytes: bytes.len() as u64, checksum });
            }
        }
        Ok(written)
    }

    fn write_resident(&self, target: &Target) -> Result<TaskOutcome> {
        let path = target.path().join(RESIDENT_FILE);
        let found = if target.is_resumed() { resident::check_written(&self.resident, &path).ok() } else { None };
        if let Some(written) = found {
            self.progress.advance(written.bytes);
            return Ok(TaskOutcome::Resident(written));
        }
        resident::write(self.source, &self.resident, &path, self.progress).map(TaskOutcome::Resident)
    }

    fn write_expert(
        &self,
        target: &Target,
        i: usize,
        ThreadBuffers { file, scratch }: &mut ThreadBuffers,
    ) -> Result<TaskOutcome> {
        let (layer, expert) = self.expert_at(i);
        let layout = &self.assembler.layouts()[&layer];
        let written = layout.clone().in_order(self.order());
        let shard = Shard { layer, expert, layout: &written, file_bytes: self.file_bytes() };
        let path = target.path().join(shard_path(layer, expert));
        let (header, data) = file.split_at_mut(DATA_START);
        // A shard that exists and is damaged is written again.
        let found = if target.is_resumed() { shard.check_by_itself(&path, data).ok() } else { None };
        let resumed = found.is_some();
        let checksum = match found {
            Some(checksum) => checksum,
            None => {
                let (data, tail) = data.split_at_mut(layout.bytes);
                self.assembler.assemble(layer, expert, data, scratch)?;
                layout.rearrange(data);
                tail.fill(0);
                let checksum = checksum_of(data);
                header.copy_from_slice(&shard.header(&checksum));
                let atomic_file = AtomicFile::create(&path)?;
                atomic_file.write_direct(file)?;
                atomic_file.publish()?;
                checksum
            }
        };
        if self.assembler.download_rank(layer, expert).is_some() {
            // The shard must be durable before the source may delete the bytes it was made of.
            sync_folder(&target.path().join(layer_folder(layer)))?;
            self.assembler.release(layer, expert)?;
        }
        self.progress.advance(self.file_bytes() as u64);
        Ok(TaskOutcome::Expert { number: i, checksum, resumed })
    }

    fn collect_outcomes(&self, done: Vec<TaskOutcome>) -> (ResidentFile, Vec<Vec<String>>, usize) {
        let mut resident = ResidentFile { bytes: 0, header_checksum: String::new() };
        let mut all = vec![String::new(); self.blueprint.geometry.expert_count()];
        let mut count = 0;
        for done in done {
            match done {
                TaskOutcome::Resident(file) => resident = file,
                TaskOutcome::Expert { number, checksum, resumed } => {
                    all[number] = checksum;
                    count += usize::from(resumed);
                }
            }
        }
        (resident, all.chunks(self.blueprint.geometry.experts).map(<[_]>::to_vec).collect(), count)
    }

    fn manifest(&self, sidecars: Vec<SidecarFile>, resident: ResidentFile, checksums: Vec<Vec<String>>) -> Manifest {
        let mut kinds: Vec<_> =
            self.assembler.layouts().values().map(|l| [l.gate.kind, l.up.kind, l.down.kind]).collect();
        if kinds.iter().all(|k| *k == kinds[0]) {
            kinds.truncate(1);
        }
        let named = |kind: Option<NumberFormat>| kind.map_or("keep", NumberFormat::name).to_owned();
        Manifest {
            format: FORMAT_VERSION,
            larder: env!("CARGO_PKG_VERSION").to_owned(),
            model_type: self.blueprint.model_type.clone(),
            geometry: self.blueprint.geometry.clone(),
            experts: ExpertFiles {
                layout: self.order(),
                kinds,
                data_bytes: self.data_bytes,
                file_bytes: self.file_bytes(),
                checksums,
            },
            resident,
            sidecars,
            source: Provenance {
                files: self.source.files(),
                experts: named(self.options.experts),
                resident: named(self.options.resident),
            },
            config: self.source.config().clone(),
        }
    }
}

#[cfg(test)]
mod tests;
