//! The kernels, compiled for this machine's processor.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{env, fs, io, process};

use libloading::{Library, Symbol};
use xxhash_rust::xxh3::Xxh3Default;

use crate::driver::Argument;
use crate::error::{GpuError, Result};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
const OPTIONS: [&str; 5] = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"];

type LaunchFn = unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_uint, *mut *mut c_void) -> c_int;

/// One at a time runs.
pub struct Kernels {
    launch: Mutex<LaunchFn>,
    _library: Library,
}

/// The kernels, compiled when they are first asked for.
pub fn kernels() -> Result<&'static Kernels> {
    static KERNELS: OnceLock<Result<Kernels>> = OnceLock::new();
    KERNELS.get_or_init(|| load(&compile()?)).as_ref().map_err(Clone::clone)
}

impl Kernels {
    /// Runs one to its end.
    pub fn launch(&self, kernel: &'static str, grid: [u32; 2], block: u32, arguments: &[Argument]) -> Result<()> {
        let name = CString::new(kernel).expect("names have no zeros");
        let mut pointers: Vec<*mut c_void> = arguments.iter().map(Argument::pointer).collect();
        let launch = self.launch.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller of `Driver::launch` guarantees arguments as the kernel takes them.
        match unsafe { launch(name.as_ptr(), grid[0], grid[1], block, pointers.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(GpuError::failed(format!("the kernel {kernel}"), "there is none of this name")),
        }
    }
}

fn load(path: &Path) -> Result<Kernels> {
    let failed = |e: libloading::Error| GpuError::failed(format!("loading {}", path.display()), e.to_string());
    // SAFETY: it was compiled from the sources here, which do nothing when they are loaded.
    let library = unsafe { Library::new(path) }.map_err(failed)?;
    // SAFETY: the emulator defines it so.
    let launch: Symbol<LaunchFn> = unsafe { library.get(b"larder_launch\0") }.map_err(failed)?;
    Ok(Kernels { launch: Mutex::new(*launch), _library: library })
}

/// The path of the compiled kernels, which are kept beside the program for its next run.
fn compile() -> Result<PathBuf> {
    let failed = |e: io::Error| GpuError::failed("compiling the emulator", e.to_string());
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let program = env::current_exe().map_err(failed)?;
    let folder = program.parent().map_or_else(env::temp_dir, Path::to_owned);
    let name = format!("larder-emulator-{:016x}", fingerprint(Path::new(SOURCES), &compiler).map_err(failed)?);
    let path = folder.join(format!("{name}.so"));
    if path.exists() {
        return Ok(path);
    }
    let unfinished = folder.join(format!("{name}-{}.tmp", process::id()));
    let mut command = Command::new(&compiler);
    command.args(OPTIONS).arg("-o").arg(&unfinished).arg(format!("{SOURCES}/emulator/emulate.cpp"));
    let said = command.output().map_err(|e| {
        let what = "the GPU's emulator needs a C++ compiler with C++20 (CXX, or c++ in the path)";
        GpuError::Missing(format!("{what}: {compiler}: {e}"))
    })?;
    if !said.status.success() {
        return Err(GpuError::failed("compiling the emulator", String::from_utf8_lossy(&said.stderr)));
    }
    fs::rename(&unfinished, &path).map_err(failed)?;
    Ok(path)
}

/// Differs if any of the sources, the options, or the compiler's name does.
fn fingerprint(sources: &Path, compiler: &str) -> io::Result<u64> {
    let mut hash = Xxh3Default::new();
    let mut folders = vec![sources.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(folder)?.map(|e| Ok(e?.path())).collect::<io::Result<_>>()?;
        entries.sort();
        for path in entries {
            if path.is_dir() {
                folders.push(path);
            } else {
                hash.update(path.as_os_str().as_encoded_bytes());
                hash.update(&fs::read(path)?);
            }
        }
    }
    hash.update(compiler.as_bytes());
    OPTIONS.iter().for_each(|option| hash.update(option.as_bytes()));
    Ok(hash.digest())
}
