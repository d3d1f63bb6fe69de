//! The tables of the rules: what may be where, each exception with its reason.

/// The crates that each crate may depend on, outside of its tests.
pub const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("larder-os", &[]),
    ("larder-core", &["os"]),
    ("larder-policy", &["os", "core"]),
    ("larder-kernels", &["os", "core"]),
    ("larder-store", &["os", "core"]),
    ("larder-cache", &["os", "core", "policy", "store"]),
    ("larder-hub", &["os", "core", "store"]),
    ("larder-model", &["os", "core", "kernels"]),
    ("larder-cuda", &["os", "core", "kernels", "store", "cache", "model"]),
    ("larder-text", &["os", "core"]),
    ("larder-vision", &["core", "kernels"]),
    ("larder-engine", &["os", "core", "policy", "cache", "model", "text"]),
    ("larder-lab", &["os", "core", "policy", "cache", "model", "engine"]),
    (
        "larder-runtime",
        &[
            "os", "core", "policy", "kernels", "store", "cache", "hub", "model", "cuda", "text", "engine", "edge",
            "vision",
        ],
    ),
    ("larder-c", &["runtime"]),
    ("larder-serve", &["os", "core", "cache", "model", "text", "engine"]),
    ("larder-edge", &["os", "core", "cache", "model", "engine"]),
    (
        "larder",
        &[
            "os", "core", "policy", "kernels", "store", "cache", "model", "text", "engine", "runtime", "lab", "serve",
            "edge",
        ],
    ),
    ("larder-python", &["core", "runtime"]),
];

/// Crates that depend on the command, as they bring it along.
pub const WITH_COMMAND: &[&str] = &["larder-python"];

/// Files and folders that may hold `unsafe`.
pub const UNSAFE: &[&str] = &[
    "crates/larder-c/src/",
    "crates/larder-cuda/src/cuda/mod.rs",
    "crates/larder-cuda/src/cuda/compiler.rs",
    "crates/larder-cuda/src/counted.rs",
    "crates/larder-cuda/src/driver.rs",
    "crates/larder-cuda/src/emulator/mod.rs",
    "crates/larder-cuda/src/emulator/library.rs",
    "crates/larder-cuda/src/emulator/streams.rs",
    "crates/larder-cuda/src/launch_queue/graphs.rs",
    "crates/larder-cuda/src/launch_queue/mod.rs",
    "crates/larder-cuda/src/launches/mod.rs",
    "crates/larder-cuda/src/link/mod.rs",
    "crates/larder-cuda/src/link/staging.rs",
    "crates/larder-cuda/src/measure.rs",
    "crates/larder-cuda/src/memory.rs",
    "crates/larder-cuda/tests/kernels/",
    "crates/larder-kernels/src/amx.rs",
    "crates/larder-kernels/src/attention/mod.rs",
    "crates/larder-kernels/src/attention/query_tile.rs",
    "crates/larder-kernels/src/avx2/",
    "crates/larder-kernels/src/avx512/",
    "crates/larder-kernels/src/delta_rule.rs",
    "crates/larder-kernels/src/disjoint.rs",
    "crates/larder-kernels/src/inputs.rs",
    "crates/larder-kernels/src/neon/",
    "crates/larder-kernels/src/peaks/",
    "crates/larder-kernels/src/products/",
    "crates/larder-kernels/src/simd/",
    "crates/larder-kernels/src/strip.rs",
    "crates/larder-kernels/src/thread_pool/mod.rs",
    "crates/larder-kernels/src/thread_pool/shared.rs",
    "crates/larder-store/src/files/page_cache.rs",
    "crates/larder-store/src/reader/arena/",
    "crates/larder-store/src/reader/overlapped.rs",
    "crates/larder-store/src/reader/registered_buffers.rs",
    "crates/larder-store/src/reader/uring.rs",
    "crates/larder-os/src/affinity/windows.rs",
    "crates/larder-os/src/files/system/windows.rs",
    "crates/larder-os/src/freed_memory.rs",
    "crates/larder-os/src/group/job_object.rs",
    "crates/larder-os/src/lock/",
    "crates/larder-os/src/memory/",
    "crates/larder-os/src/nodes.rs",
    "crates/larder-os/src/power/windows.rs",
    "crates/larder-os/src/sysctl.rs",
    "tests/src/instructions.rs",
    "tests/src/larder.rs",
];

/// Type names that are public in more than one crate, each with its reason.
pub const SHARED_NAMES: &[(&str, &str)] = &[("Result", "the customary alias of a crate's own error")];

/// Files in which a word of the glossary's "not" column may stand, each with its reason.
pub const KEPT_WORDS: &[(&str, &[&str], &str)] = &[
    ("crates/larder-core/src/formats/CODE_BOOKS_LICENSE", &["whom"], "the text of a licence"),
    ("crates/larder-serve/src/telemetry/live.rs", &["awaited"], "a JSON key of the API"),
    ("crates/larder-serve/src/telemetry/metrics.rs", &["awaited"], "the name of a metric"),
    ("crates/larder-serve/src/page/grid.js", &["awaited"], "a JSON key of the API"),
    ("crates/larder/src/commands/report.rs", &["neighbour", "who"], "prompts"),
];

/// The traits of each seam, and the page that explains how to implement them.
pub const SEAMS: &[(&str, &[&str])] = &[
    ("adding-a-device.md", &["Device", "DeviceExperts", "DeviceProducts", "DeviceAttention", "Ops", "Driver"]),
    ("adding-a-model.md", &["Mixer", "ExpertPath"]),
    ("adding-a-reader.md", &["Reader"]),
    ("adding-a-routing-strategy.md", &["Router", "Residency"]),
    ("adding-a-source.md", &["Source", "Tensors"]),
    ("adding-a-tower.md", &["Tower"]),
    ("adding-a-tool-format.md", &["CallReader", "ResponseFormat"]),
    ("adding-an-eviction-policy.md", &["Eviction"]),
];

/// Files that open files for reading by themselves: the function that all others use, and what reads `/proc` and
/// `/sys`.
pub const OPENERS: &[&str] = &["crates/larder-os/src/", "crates/larder/src/doctor/"];

pub const MOST_LINES: usize = 500;

/// Matches on a bool, and results with a string as their error. Both numbers may only fall.
pub const BOOL_MATCHES: usize = 14;
pub const STRING_ERRORS: usize = 137;

/// Files that use the standard library's hash, each with its reason.
pub const STANDARD_HASHES: &[(&str, &str)] =
    &[("crates/larder-cuda/src/launch_queue/graphs.rs", "keys of graphs, which live as long as the process")];
