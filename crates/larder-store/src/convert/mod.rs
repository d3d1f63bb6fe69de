//! Conversion of a source into a store: streaming, atomic per file, and resumable.
//!
//! The order of writing makes it resumable. `convert.json` is written first and identifies source and options; every
//! other file is written atomically; `larder.json` is written last and makes the folder a store.

mod options;
mod shards;
mod target;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use larder_core::{Blueprint, ExpertId, ExpertLayout, LayerIdx, NumberFormat};

use crate::{
    drives::second_folder::{self, Division, SecondFolder, are_on_one_drive, check_second_folder},
    error::Result,
    files::{
        atomic_file::{sync_folder, write_atomically},
        checksum::checksum_of,
        direct::AlignedBuffer,
    },
    format_mix::{WantedFormats, expert_matrix},
    importance::{Importance, WeighedMatrices},
    manifest::{
        CONVERSION_STATE, ExpertChecksums, FORMAT_VERSION, MANIFEST_FILE, Manifest, Provenance, RESIDENT_FILE,
        ResidentFile, SidecarFile, TABLES, TableFile,
    },
    parallel::parallel,
    progress::Progress,
    resident,
    row_table::{self, TablePlan},
    shard::{EXPERTS, SMALL_EXPERTS, layer_folder},
    source::{
        SIDECARS, Source,
        identity::{check_unchanged, identity},
        tensor_slice::AssemblyBuffers,
    },
    store::tower::{TOWER_FILE, TowerPlan},
};
pub use options::ConvertOptions;
use shards::ShardWriter;
use target::{ConversionState, Target, Targets, remove_state};
pub(crate) use target::{check_space, lock};

/// Threads that each read, convert and write one expert at a time, so that reading and writing overlap. Rounding takes
/// longer than both and has as many as there are cores, if these are more.
const THREADS: usize = 3;
/// Limit of the bytes of all experts in flight, unless a single expert is larger.
const IN_FLIGHT_BYTES: usize = 768 << 20;

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
    /// One sentence for each part that is not used, or not stored in the requested format.
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
    target::check_outside(source.path(), target)?;
    if let Some(stripe) = &options.stripe {
        target::check_outside(source.path(), stripe)?;
        check_second_folder(target, stripe)?;
    }
    let wanted = |otherwise| WantedFormats::new(&options.mix, otherwise);
    let mut importance = options.importance.as_deref().map(|matrices| WeighedMatrices::new(matrices, source));
    let mut set = |name, wanted| ShardWriter::new(name, source, blueprint, wanted, importance.as_mut());
    let mut sets = vec![set(EXPERTS, wanted(options.experts))?];
    if let Some(kind) = options.small_experts {
        sets.push(set(SMALL_EXPERTS, Some(kind).into())?);
    }
    let mut resident = resident::ResidentPlan::new(source, blueprint, wanted(options.resident))?;
    if let Some(importance) = &mut importance {
        resident.weigh(importance)?;
        resident.notes.extend(importance.note()?);
    }
    let (tables, table_notes) = row_table::plans(source, blueprint, wanted(options.resident))?;
    let content = match source.published() {
        Some(published) => published,
        None => identity(source, blueprint)?,
    };
    let tower = options.tower.as_ref().map(TowerPlan::new).transpose()?;
    let conversion = Conversion { source, blueprint, options, progress, sets, resident, tables, tower, content };
    let mut report = conversion.report(&table_notes);
    let state = ConversionState::new(conversion.fingerprint(), options);
    if let Some(targets) = conversion.prepare(target, &state)? {
        source.use_direct_io();
        progress.begin(conversion.store_bytes());
        report.resumed = conversion.write(&targets)?;
    }
    if let Some(stripe) = options.stripe.as_ref().filter(|stripe| are_on_one_drive(target, stripe)) {
        report.notes.push(format!("{} is on the file system of the store, so reads get no faster", stripe.display()));
    }
    report.took = started.elapsed();
    Ok(report)
}

struct Conversion<'a> {
    source: &'a dyn Source,
    blueprint: &'a Blueprint,
    options: &'a ConvertOptions,
    progress: &'a dyn Progress,
    /// The experts, and their smaller copies if there are any.
    sets: Vec<ShardWriter<'a>>,
    resident: resident::ResidentPlan,
    tables: Vec<TablePlan>,
    /// The image tower, if the store gets one.
    tower: Option<TowerPlan<'a>>,
    /// Identity of the source when the conversion began; while it is being downloaded, the digest of its published
    /// checksums.
    content: String,
}

/// One unit of work of a conversion.
enum Task {
    /// The resident weights.
    Resident,
    /// A row table by its index.
    Table(usize),
    /// The image tower.
    Tower,
    /// An expert by its index, in all sets.
    Expert(usize),
}

/// Result of a task.
enum TaskOutcome {
    Resident(ResidentFile),
    Table(usize, TableFile),
    Tower(ResidentFile),
    /// `checksums` has an entry for each set.
    Expert {
        number: usize,
        checksums: Vec<ExpertChecksums>,
        resumed: bool,
    },
}

/// Buffers of one conversion thread.
struct ThreadBuffers {
    file: AlignedBuffer,
    scratch: AssemblyBuffers,
}

/// Everything that the tasks wrote.
struct Written {
    resident: ResidentFile,
    tables: Vec<TableFile>,
    /// The file of the image tower.
    tower: Option<ResidentFile>,
    /// For each set, the checksums of all experts.
    checksums: Vec<Vec<ExpertChecksums>>,
    /// Number of experts that were there.
    resumed: usize,
}

impl Conversion<'_> {
    fn report(&self, table_notes: &[String]) -> ConvertReport {
        let mut notes = self.source.notes();
        notes.extend(self.sets[0].assembler.notes().iter().cloned());
        if let Some(small) = self.sets.get(1) {
            notes.extend(small.assembler.notes().iter().map(|note| format!("small copy: {note}")));
        }
        notes.extend(self.resident.notes.iter().chain(table_notes).cloned());
        let unused = self.options.mix.unused(self.matrix_names());
        notes.extend(unused.into_iter().map(|pattern| format!("the rule for '{pattern}' decides about no matrix")));
        ConvertReport {
            source_bytes: self.source.files().iter().map(|f| f.bytes).sum(),
            store_bytes: self.store_bytes(),
            experts: self.blueprint.geometry.expert_count(),
            resumed: 0,
            notes,
            took: Duration::ZERO,
        }
    }

    /// Names of all matrices that a rule can match.
    fn matrix_names(&self) -> impl Iterator<Item = String> {
        let resident =
            self.blueprint.resident.iter().filter(|spec| spec.product || spec.by_row).map(|spec| spec.name.clone());
        let layouts = self.sets[0].assembler.layouts();
        let of_layer = |(layer, layout): (&LayerIdx, &ExpertLayout)| {
            layout.kinds().named().map(|(part, _)| expert_matrix(*layer, part)).collect::<Vec<_>>()
        };
        layouts.iter().flat_map(of_layer).chain(resident)
    }

    fn store_bytes(&self) -> u64 {
        self.files(|_| true).iter().map(|(_, bytes)| bytes).sum()
    }

    /// Prepares the folder at `store` and the one beside it, if there is one. `None` if nothing is left to do.
    fn prepare(&self, store: &Path, state: &ConversionState) -> Result<Option<Targets>> {
        let Some(stripe) = &self.options.stripe else {
            let target = Target::prepare(store, state, &self.files(|_| true))?;
            return Ok(target.map(|store| Targets { store, stripe: None }));
        };
        let files = self.files(|expert| Division::Stripe.store_has(expert));
        let Some(store) = Target::prepare(store, state, &files)? else {
            // The store is finished last, so only this mark may be left.
            if stripe.join(CONVERSION_STATE).exists() {
                remove_state(stripe)?;
            }
            return Ok(None);
        };
        let others = 1 + self.tables.len() + usize::from(self.tower.is_some());
        let files = self.files(|expert| Division::Stripe.second_has(expert));
        let stripe = Target::prepare(stripe, state, &files[others..])?;
        Ok(Some(Targets { store, stripe }))
    }

    /// Fingerprint of everything that decides what is written: the source's headers and content, and the blueprint.
    fn fingerprint(&self) -> String {
        fingerprint(self.source, &self.content, self.blueprint)
    }

    /// Every large file of the store with its length in bytes: the resident weights, the tables, and the shards of the
    /// experts that are wanted.
    fn files(&self, wanted: impl Fn(ExpertId) -> bool) -> Vec<(PathBuf, u64)> {
        let experts = (0..self.blueprint.geometry.expert_count()).map(|i| self.expert_at(i));
        let experts: Vec<_> = experts.filter(|(_, expert)| wanted(*expert)).collect();
        let shards = self.sets.iter().flat_map(|set| experts.iter().map(|(layer, expert)| set.file(*layer, *expert)));
        let tables = self.tables.iter().map(|plan| (plan.table.path(), plan.table.file_bytes() as u64));
        let resident = (RESIDENT_FILE.into(), self.resident.file_bytes() as u64);
        let tower = self.tower.iter().map(|tower| (TOWER_FILE.into(), tower.file_bytes()));
        std::iter::once(resident).chain(tables).chain(tower).chain(shards).collect()
    }

    /// The expert with index `i`: layer by layer, the order in which checkpoints usually store them.
    fn expert_at(&self, i: usize) -> (LayerIdx, ExpertId) {
        let geometry = &self.blueprint.geometry;
        (geometry.moe_layers[i / geometry.experts], ExpertId((i % geometry.experts) as u16))
    }

    /// Writes all files that do not exist yet; returns the number of experts that did.
    fn write(&self, targets: &Targets) -> Result<usize> {
        let (folders, target) = (self.folders(), &targets.store);
        targets.all().try_for_each(|target| folders.iter().try_for_each(|folder| target.create_folder(folder)))?;
        let sidecars = self.write_sidecars(target)?;
        let largest = self.sets.iter().map(ShardWriter::largest_file_bytes).max().unwrap_or_default();
        let threads = (IN_FLIGHT_BYTES / largest).clamp(1, self.threads());
        let buffers = || ThreadBuffers { file: AlignedBuffer::new(largest), scratch: AssemblyBuffers::default() };
        let tasks = self.tasks();
        let done = parallel(threads, tasks.len(), buffers, |buffers, i| match tasks[i] {
            Task::Resident => self.write_resident(target),
            Task::Table(i) => self.write_table(target, i),
            Task::Tower => self.write_tower(target),
            Task::Expert(expert) => self.write_expert(targets, expert, buffers),
        })?;
        let mut written = self.collect_outcomes(done);
        let (resumed, tower) = (written.resumed, written.tower.take());
        targets.all().try_for_each(|target| target.sync(&folders))?;
        let manifest = self.manifest(self.final_identity()?, sidecars, written);
        if let Some(stripe) = &targets.stripe {
            second_folder::mark(stripe.path(), &manifest)?;
            SecondFolder::record(target.path(), stripe.path(), Division::Stripe)?;
        }
        if let Some((plan, tensors)) = self.tower.as_ref().zip(tower) {
            plan.write_record(target.path(), &manifest.hash(), tensors)?;
        }
        write_atomically(&target.path().join(MANIFEST_FILE), &manifest.to_bytes())?;
        sync_folder(target.path())?;
        targets.stripe.iter().try_for_each(Target::finish)?;
        target.finish()?;
        Ok(resumed)
    }

    /// The most threads that are of use.
    fn threads(&self) -> usize {
        let ConvertOptions { experts, small_experts, mix, .. } = self.options;
        let rounds = [experts, small_experts].into_iter().flatten().any(|kind| !kind.is_float()) || !mix.is_empty();
        let cores = if rounds { std::thread::available_parallelism().map_or(1, usize::from) } else { 1 };
        cores.max(THREADS)
    }

    /// The identity of the source, which must still be the one that the conversion began with.
    fn final_identity(&self) -> Result<String> {
        let now = identity(self.source, self.blueprint)?;
        if self.source.published().is_none() {
            check_unchanged(self.source, &self.content, &now)?;
        }
        Ok(now)
    }

    /// The folders of the store, parents after their children.
    fn folders(&self) -> Vec<PathBuf> {
        let layers = &self.blueprint.geometry.moe_layers;
        let sets = self.sets.iter().flat_map(|set| {
            let layers = layers.iter().map(|layer| layer_folder(set.name, *layer));
            layers.chain([PathBuf::from(set.name)])
        });
        sets.chain((!self.tables.is_empty()).then(|| PathBuf::from(TABLES))).collect()
    }

    /// The tasks in order of work. The resident weights take longest, so they come first. While the model is still
    /// being downloaded they come last, since they are spread over all files, and experts follow the order of download.
    fn tasks(&self) -> Vec<Task> {
        let experts = 0..self.blueprint.geometry.expert_count();
        let rank = |i: &usize| {
            let (layer, expert) = self.expert_at(*i);
            self.sets[0].assembler.download_rank(layer, expert)
        };
        let mut experts: Vec<_> = experts.map(|i| (rank(&i), i)).collect();
        experts.sort_unstable();
        let downloading = experts.iter().any(|(rank, _)| rank.is_some());
        let experts = experts.into_iter().map(|(_, i)| Task::Expert(i));
        let others = std::iter::once(Task::Resident).chain((0..self.tables.len()).map(Task::Table));
        let others = others.chain(self.tower.iter().map(|_| Task::Tower));
        if downloading { experts.chain(others).collect() } else { others.chain(experts).collect() }
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

    fn write_table(&self, target: &Target, i: usize) -> Result<TaskOutcome> {
        let plan = &self.tables[i];
        let path = target.path().join(plan.table.path());
        let found = if target.is_resumed() { row_table::check_written(plan, &path).ok() } else { None };
        if let Some(written) = found {
            self.progress.advance(written.file_bytes() as u64);
            return Ok(TaskOutcome::Table(i, written));
        }
        row_table::write(self.source, plan, &path, self.progress).map(|table| TaskOutcome::Table(i, table))
    }

    fn write_tower(&self, target: &Target) -> Result<TaskOutcome> {
        let plan = self.tower.as_ref().expect("there is a task for the tower only if there is one");
        plan.write_tensors(target.path(), target.is_resumed(), self.progress).map(TaskOutcome::Tower)
    }

    fn write_expert(
        &self,
        targets: &Targets,
        i: usize,
        ThreadBuffers { file, scratch }: &mut ThreadBuffers,
    ) -> Result<TaskOutcome> {
        let (layer, expert) = self.expert_at(i);
        let mut checksums = vec![];
        let mut resumed = true;
        for set in &self.sets {
            let (written, was_there) = set.write(targets.of(expert), layer, expert, file, scratch)?;
            checksums.push(written);
            resumed &= was_there;
            self.progress.advance(set.file_bytes(layer) as u64);
        }
        let assembler = &self.sets[0].assembler;
        if assembler.download_rank(layer, expert).is_some() {
            // The shards must be durable before the source may delete the bytes they were made of.
            self.sets.iter().try_for_each(|set| set.sync(targets, layer))?;
            assembler.release(layer, expert)?;
        }
        Ok(TaskOutcome::Expert { number: i, checksums, resumed })
    }

    fn collect_outcomes(&self, done: Vec<TaskOutcome>) -> Written {
        let none = ExpertChecksums::default();
        let experts = self.blueprint.geometry.expert_count();
        let mut written = Written {
            resident: ResidentFile { bytes: 0, header_checksum: String::new() },
            tables: self.tables.iter().map(|plan| plan.table.clone()).collect(),
            tower: None,
            checksums: vec![vec![none; experts]; self.sets.len()],
            resumed: 0,
        };
        for done in done {
            match done {
                TaskOutcome::Resident(file) => written.resident = file,
                TaskOutcome::Table(i, table) => written.tables[i] = table,
                TaskOutcome::Tower(file) => written.tower = Some(file),
                TaskOutcome::Expert { number, checksums, resumed } => {
                    written.checksums.iter_mut().zip(checksums).for_each(|(all, one)| all[number] = one);
                    written.resumed += usize::from(resumed);
                }
            }
        }
        written
    }

    fn manifest(&self, identity: String, sidecars: Vec<SidecarFile>, written: Written) -> Manifest {
        let Written { resident, tables, checksums, .. } = written;
        let named = |kind: Option<NumberFormat>| kind.map_or("keep", NumberFormat::name).to_owned();
        let mut sets = self.sets.iter().zip(checksums).map(|(set, checksums)| set.files(checksums));
        Manifest {
            format: FORMAT_VERSION,
            larder: env!("CARGO_PKG_VERSION").to_owned(),
            model_type: self.blueprint.model_type.clone(),
            geometry: self.blueprint.geometry.clone(),
            experts: sets.next().expect("there is a set of experts"),
            small_experts: sets.next(),
            resident,
            tables,
            sidecars,
            source: Provenance {
                files: self.source.files(),
                identity: Some(identity),
                experts: named(self.options.experts),
                resident: named(self.options.resident),
                mix: self.options.mix.clone(),
                imatrix: self.options.importance.as_deref().map(Importance::record),
                small_experts: self.options.small_experts.map(|kind| kind.name().to_owned()),
            },
            config: self.source.config().clone(),
        }
    }
}

/// Digest of a source, its content and its blueprint.
fn fingerprint(source: &dyn Source, content: &str, blueprint: &Blueprint) -> String {
    let all = (source.fingerprint(), content, source.files(), blueprint);
    checksum_of(&serde_json::to_vec(&all).expect("text and numbers serialize as JSON"))
}

#[cfg(test)]
mod tests;
