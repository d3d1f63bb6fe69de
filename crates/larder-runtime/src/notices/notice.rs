//! What the runtime reports while it opens, starts and runs a model. It prints nothing itself.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_core::{format_bytes, printable};
use larder_os::lock::{self, LockReport};

use super::setting::Setting;

/// A fact worth a line for the user; [`fmt::Display`] is that line (of a plan, those lines).
pub enum Notice {
    /// The memory plan, as text; decided, and nothing loaded yet.
    Plan(String),
    /// The reader and how it reads.
    Reader(String),
    /// The measured throughput of a GPU and of the CPU.
    GpuThroughput(String),
    /// The state of the connection to an edge worker.
    Worker(String),
    /// The number of slots of each pool, which follows the available memory, has changed.
    Capacity {
        /// The number before.
        before: usize,
        /// The number now.
        slots: usize,
    },
    /// Tasks wait for memory for this share of the time, while the number of slots is fixed.
    MemoryPressure(f64),
    /// The machine runs on its battery from now on, or not any more.
    Power {
        /// Whether it runs on its battery.
        on_battery: bool,
        /// Compute threads in use.
        threads: usize,
        /// All compute threads.
        all: usize,
    },
    /// All experts were loaded from a store.
    Preloaded(PreloadRates),
    /// All experts of a draft model were loaded from a store.
    DraftPreloaded {
        /// Its name.
        name: String,
        /// How fast that was.
        rates: PreloadRates,
    },
    /// Memory is taken from this number of nodes in turns.
    MemoryNodes(usize),
    /// How much memory is locked.
    Locked(LockReport),
    /// A store that was made of a GGUF file earlier is used.
    StoreFound {
        /// The store.
        store: PathBuf,
        /// The file.
        gguf: PathBuf,
    },
    /// A store of a GGUF file is being made.
    StoreBegun(PathBuf),
    /// No store could be made of a GGUF file, so the file is run directly.
    StoreRefused(String),
    /// What of a model is not used, or not kept as it is.
    Model(String),
    /// A drive of a store is not used, or fails.
    Drive(String),
    /// A model is being downloaded.
    Downloading {
        /// Its name on the hub.
        name: String,
        /// The store that is made of it.
        store: PathBuf,
    },
    /// A download pauses before it is tried again.
    DownloadPaused {
        /// The failure.
        reason: String,
        /// Time until the next attempt.
        pause: Duration,
    },
    /// A hot set that earlier runs left is not used.
    HotSetIgnored {
        /// The file.
        path: PathBuf,
        /// The fault of the file.
        why: String,
    },
    /// The hot set could be written nowhere, for this reason.
    HotSetNotKept(String),
    /// The trace of the routing was written.
    TraceWritten {
        /// Tokens in the trace.
        tokens: usize,
        /// The file.
        path: PathBuf,
    },
}

/// What loading all experts took, and what bounds it.
#[derive(Clone, Copy, Debug)]
pub struct PreloadRates {
    /// Bytes of the experts.
    pub bytes: u64,
    /// Time of the loading.
    pub time: Duration,
    /// Bytes per second of the SSD while as many reads as it likes were in flight; `None` if that was too short to
    /// tell.
    pub ssd: Option<f64>,
    /// Bytes per second at which the system cleared memory ahead of the reads; `None` if it did not.
    pub clearing: Option<f64>,
}

impl fmt::Display for PreloadRates {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let PreloadRates { bytes, time, ssd, clearing } = *self;
        let seconds = time.as_secs_f64();
        let per_second = |rate: f64| format!("{}/s", format_bytes(rate as u64));
        let rate = per_second(bytes as f64 / seconds.max(1e-9));
        write!(f, "{} in {seconds:.2} s ({rate})", format_bytes(bytes))?;
        ssd.iter().try_for_each(|rate| write!(f, ", SSD {}", per_second(*rate)))?;
        clearing.iter().try_for_each(|rate| write!(f, ", memory cleared at {}", per_second(*rate)))
    }
}

fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Notice::Plan(text) | Notice::Reader(text) | Notice::GpuThroughput(text) | Notice::Worker(text) => {
                f.write_str(text)
            }
            Notice::Capacity { before, slots } if slots < before => {
                write!(f, "memory: other programs need it; {slots} slots are left of {before}")
            }
            Notice::Capacity { before, slots } => write!(f, "memory: available again; {slots} slots after {before}"),
            Notice::MemoryPressure(share) => {
                let (mem, percent) = (Setting::Cache, share * 100.0);
                write!(
                    f,
                    "memory: other programs need it, and tasks waited for it {percent:.0} % of the last 10 s; a smaller {mem} leaves \
                     them more, and {mem} auto gives slots back by itself"
                )
            }
            Notice::Power { on_battery, threads, all } => {
                let supply = if *on_battery { "on battery" } else { "plugged in" };
                write!(f, "power: {supply}, {threads} of {all} compute threads")
            }
            Notice::Preloaded(rates) => write!(f, "preload: {rates}"),
            Notice::DraftPreloaded { name, rates } => write!(f, "preload: draft model {}, {rates}", printable(name)),
            Notice::MemoryNodes(nodes) => write!(f, "memory: from {nodes} nodes in turns"),
            Notice::Locked(report) => write_locked(report, f),
            Notice::StoreFound { store, gguf } => {
                write!(f, "store: {}, made of {}", shown(store), shown(gguf))
            }
            Notice::StoreBegun(store) => {
                let no_store = Setting::NoStore;
                write!(f, "store: making {} once; use {no_store} to run the file directly", shown(store))
            }
            Notice::StoreRefused(why) => {
                write!(f, "note: no store was made ({}); the file is run directly", printable(why))
            }
            Notice::Model(note) | Notice::Drive(note) => write!(f, "note: {}", printable(note)),
            Notice::Downloading { name, store } => write!(f, "downloading {} to {}", printable(name), shown(store)),
            Notice::DownloadPaused { reason, pause } => {
                write!(f, "{}; retrying in {:.0} s", printable(reason), pause.as_secs_f64())
            }
            Notice::HotSetIgnored { path, why } => {
                write!(f, "note: {} {}; it will be written anew", shown(path), printable(why))
            }
            Notice::HotSetNotKept(why) => {
                let hot_set = Setting::HotSet.with("off");
                write!(f, "note: the hot set cannot be kept ({}); {hot_set} does without", printable(why))
            }
            Notice::TraceWritten { tokens, path } => {
                write!(f, "trace: {tokens} tokens written to {}", shown(path))
            }
        }
    }
}

/// Shows the progress of long work, one piece of work at a time. Methods are called from several threads.
pub trait WorkProgress: Send + Sync {
    /// Work of `bytes` begins, of which `done` were done before.
    fn begin(&self, work: &str, bytes: u64, done: u64);

    /// Further `bytes` are done.
    fn advance(&self, bytes: u64);

    /// The work has ended, done or failed.
    fn end(&self);
}

type Receiver = Arc<dyn Fn(&Notice) + Send + Sync>;

/// Where notices and progress go; by default nowhere. Clones share the receivers.
#[derive(Clone, Default)]
pub struct Notices {
    receiver: Option<Receiver>,
    progress: Option<Arc<dyn WorkProgress>>,
}

impl Notices {
    /// Calls `receiver` for each notice.
    pub fn to(receiver: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        Notices { receiver: Some(Arc::new(receiver)), progress: None }
    }

    /// The same notices, with the progress of loading, converting and downloading.
    pub fn with_progress(self, progress: impl WorkProgress + 'static) -> Self {
        Notices { progress: Some(Arc::new(progress)), ..self }
    }

    pub(crate) fn send(&self, notice: Notice) {
        self.receiver.iter().for_each(|receiver| receiver(&notice));
    }

    pub(crate) fn begin(&self, work: &str, bytes: u64, done: u64) {
        self.progress.iter().for_each(|progress| progress.begin(work, bytes, done));
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.progress.iter().for_each(|progress| progress.advance(bytes));
    }

    pub(crate) fn end(&self) {
        self.progress.iter().for_each(|progress| progress.end());
    }
}

fn write_locked(report: &LockReport, f: &mut fmt::Formatter) -> fmt::Result {
    let bytes = format_bytes(report.bytes);
    let Some((all, cause)) = &report.refused else { return write!(f, "locked: {bytes} of memory") };
    let limit = lock::limit().map(|limit| format!(", {} is {}", lock::LIMIT, format_bytes(limit)));
    let (all, limit, remedy) = (format_bytes(*all), limit.unwrap_or_default(), lock::REMEDY);
    write!(
        f,
        "locked: {bytes} of {all} of memory, weights before experts; the rest may be swapped out ({cause}{limit}); {remedy}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preload_names_the_rates_that_are_known() {
        let rates = PreloadRates { bytes: 3_000_000_000, time: Duration::from_secs(2), ssd: None, clearing: None };
        assert_eq!(Notice::Preloaded(rates).to_string(), "preload: 3.00 GB in 2.00 s (1.50 GB/s)");
        let draft = Notice::DraftPreloaded { name: "small".into(), rates };
        assert_eq!(draft.to_string(), "preload: draft model small, 3.00 GB in 2.00 s (1.50 GB/s)");
        let rates = PreloadRates { ssd: Some(2e9), clearing: Some(1.5e9), ..rates };
        let both = "preload: 3.00 GB in 2.00 s (1.50 GB/s), SSD 2.00 GB/s, memory cleared at 1.50 GB/s";
        assert_eq!(Notice::Preloaded(rates).to_string(), both);
    }
}
