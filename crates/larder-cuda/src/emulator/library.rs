//! The kernels, compiled for the CPU with the C++ compiler.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, io, process};

use larder_os::read_regular;
use libloading::{Library, Symbol};
use parking_lot::Mutex;
use twox_hash::XxHash3_64;

use crate::code_books;
use crate::driver::Argument;
use crate::error::{GpuError, Result};
use crate::launches::all_kernels;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
/// Maximum length of a source file.
const SOURCE_BYTES: u64 = 1 << 20;
const OPTIONS: [&str; 5] = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"];
/// Direct calls and thread-locals at fixed offsets: lanes use both all the time.
const CALLS: [&str; 2] = ["-ftls-model=initial-exec", "-fno-semantic-interposition"];
/// A load or store at an address that is no multiple of its size is an error on a GPU: it ends the program.
const CHECKS: [&str; 2] = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"];

/// All options. Fused operations are calls where the processor has no instruction for them.
fn options() -> impl Iterator<Item = &'static str> {
    #[cfg(target_arch = "x86_64")]
    let fused = std::arch::is_x86_feature_detected!("fma").then_some("-mfma");
    #[cfg(not(target_arch = "x86_64"))]
    let fused = None;
    OPTIONS.into_iter().chain(CALLS).chain(CHECKS).chain(fused)
}

type LaunchFn = unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_uint, *mut *mut c_void) -> c_int;

/// The loaded kernels. One runs at a time.
pub struct Kernels {
    launch: Mutex<LaunchFn>,
    names: HashMap<&'static str, CString>,
    _library: Library,
}

/// The kernels, compiled and loaded on first use.
pub fn kernels() -> Result<&'static Kernels> {
    static KERNELS: OnceLock<Result<Kernels>> = OnceLock::new();
    KERNELS.get_or_init(|| load(&compile()?)).as_ref().map_err(Clone::clone)
}

impl Kernels {
    /// Runs a kernel to its end.
    pub fn launch(&self, kernel: &'static str, grid: [u32; 2], block: u32, arguments: &[Argument]) -> Result<()> {
        // As on a GPU, which loads those of the list.
        let missing = || GpuError::failed(format!("the kernel {kernel}"), "it is not in the list of kernels");
        let name = self.names.get(kernel).ok_or_else(missing)?;
        let mut pointers: Vec<*mut c_void> = arguments.iter().map(Argument::pointer).collect();
        let launch = self.launch.lock();
        // SAFETY: the caller of `Driver::launch` guarantees that the arguments match the kernel's parameters.
        match unsafe { launch(name.as_ptr(), grid[0], grid[1], block, pointers.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(GpuError::failed(format!("the kernel {kernel}"), "no kernel has this name")),
        }
    }
}

fn load(path: &Path) -> Result<Kernels> {
    let failed = |e: libloading::Error| GpuError::failed(format!("loading {}", path.display()), e.to_string());
    // SAFETY: it was compiled from the sources of this crate, which execute nothing when loaded.
    let library = unsafe { Library::new(path) }.map_err(failed)?;
    // SAFETY: emulate.cpp defines the function with this signature.
    let launch: Symbol<LaunchFn> = unsafe { library.get(b"larder_launch\0") }.map_err(failed)?;
    let named = |kernel| (kernel, CString::new(kernel).expect("kernel names have no NUL"));
    let names = all_kernels().into_iter().map(named).collect();
    Ok(Kernels { launch: Mutex::new(*launch), names, _library: library })
}

/// Compiles the kernels, unless that was done before, and returns the path of the library, beside the executable.
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
    // The folder of the code books, and of the library until it is complete.
    let unfinished = folder.join(format!("{name}-{}.tmp", process::id()));
    fs::create_dir_all(&unfinished).map_err(failed)?;
    let compiled = compile_in(&unfinished, &compiler).and_then(|library| fs::rename(library, &path).map_err(failed));
    // If it cannot be removed, only a folder too much is left.
    let _ = fs::remove_dir_all(&unfinished);
    compiled.map(|()| path)
}

/// Compiles the kernels in a folder for this, and returns the path of the library.
fn compile_in(folder: &Path, compiler: &str) -> Result<PathBuf> {
    let failed = |e: io::Error| GpuError::failed("compiling the emulator", e.to_string());
    let library = folder.join("emulator.so");
    fs::write(folder.join("code_books.cuh"), code_books::header()).map_err(failed)?;
    let mut command = Command::new(compiler);
    command
        .args(options())
        .arg("-I")
        .arg(folder)
        .arg("-o")
        .arg(&library)
        .arg(format!("{SOURCES}/emulator/emulate.cpp"));
    let output = command.output().map_err(|e| {
        let what = "the GPU emulator needs a C++20 compiler: set CXX, or install c++";
        GpuError::Missing(format!("{what}: {compiler}: {e}"))
    })?;
    if !output.status.success() {
        return Err(GpuError::failed("compiling the emulator", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(library)
}

/// A hash of the sources, the options and the name of the compiler.
fn fingerprint(sources: &Path, compiler: &str) -> io::Result<u64> {
    let mut hash = XxHash3_64::new();
    let mut folders = vec![sources.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(folder)?.map(|e| Ok(e?.path())).collect::<io::Result<_>>()?;
        entries.sort();
        for path in entries {
            if path.is_dir() {
                folders.push(path);
            } else {
                hash.write(path.as_os_str().as_encoded_bytes());
                hash.write(&read_regular(&path, SOURCE_BYTES)?);
            }
        }
    }
    hash.write(code_books::header().as_bytes());
    hash.write(compiler.as_bytes());
    options().for_each(|option| hash.write(option.as_bytes()));
    Ok(hash.finish())
}
