//! Compiles the kernels with NVRTC for the GPU at hand.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::thread;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use crate::error::{GpuError, Result};
use crate::kernel_cache::{KernelCache, KernelKey};
use crate::sources::{KernelSource, SOURCES};

/// The error if NVRTC is missing. The name of its library in CUDA 13 is not among those that are tried.
const MISSING: &str = "NVRTC, which compiles the kernels, is missing: neither libnvrtc.so nor libnvrtc.so.12 can be loaded. \
                       Install the CUDA toolkit or the package nvidia-cuda-nvrtc-cu12 from PyPI, and set LD_LIBRARY_PATH \
                       to its folder. With CUDA 13 the library is libnvrtc.so.13: make a link named libnvrtc.so beside \
                       it; it needs a driver for CUDA 13";

/// The oldest capability that has all instructions of the kernels, ten times the major number plus the minor one:
/// products of four integers with one instruction came with it.
const OLDEST: u32 = 61;

/// The oldest architecture for which products on tensor cores are compiled.
const TENSOR_CORES: u32 = 80;

/// The kernels, compiled for a card.
pub struct CompiledKernels {
    /// The image of each source.
    pub images: Vec<Vec<u8>>,
    /// Whether they have products on tensor cores.
    pub has_tensor_cores: bool,
}

/// The images of all sources for a card, from the cache or compiled now.
pub fn compiled(capability: (u32, u32)) -> Result<CompiledKernels> {
    // SAFETY: the call only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::Missing(MISSING.into()));
    }
    let target = Target::of(capability, &architectures()?)?;
    let (images, target) = (&KernelCache::of_user(), &target);
    let images: Result<_> = thread::scope(|scope| {
        let compile = |source: &'static KernelSource| scope.spawn(move || image(source, target, images));
        let threads: Vec<_> = SOURCES.iter().map(compile).collect();
        threads.into_iter().map(|thread| thread.join().expect("compilation does not panic")).collect()
    });
    Ok(CompiledKernels { images: images?, has_tensor_cores: target.architecture >= TENSOR_CORES })
}

/// The target of a compilation: which GPUs, and whether the output is machine code.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Target {
    capability: (u32, u32),
    /// Ten times the major number plus the minor one.
    architecture: u32,
    option: String,
    /// Whether the output is machine code for this GPU; else it is PTX, which the driver compiles when it is loaded.
    is_machine_code: bool,
}

impl Target {
    /// Machine code if the compiler supports this capability, else PTX for the newest older one that it supports.
    fn of(capability: (u32, u32), known: &[u32]) -> Result<Self> {
        let (major, minor) = capability;
        let wanted = 10 * major + minor;
        if wanted < OLDEST {
            let (oldest, least) = (OLDEST / 10, OLDEST % 10);
            return Err(GpuError::Unsupported(format!(
                "the GPU has compute capability {major}.{minor}, but the kernels need {oldest}.{least} or later"
            )));
        }
        if known.contains(&wanted) {
            let option = format!("-arch=sm_{wanted}");
            return Ok(Target { capability, architecture: wanted, option, is_machine_code: true });
        }
        match known.iter().filter(|arch| (OLDEST..wanted).contains(arch)).max() {
            Some(arch) => {
                let option = format!("-arch=compute_{arch}");
                Ok(Target { capability, architecture: *arch, option, is_machine_code: false })
            }
            None => Err(GpuError::Unsupported(format!(
                "the GPU has compute capability {major}.{minor}, but the installed NVRTC supports only {} and later",
                known.iter().min().map_or("none".into(), |arch| format!("{}.{}", arch / 10, arch % 10)),
            ))),
        }
    }
}

fn architectures() -> Result<Vec<u32>> {
    let failed =
        |e: NvrtcError| GpuError::failed("querying the architectures that NVRTC supports", format!("{:?}", e.0));
    let mut count: c_int = 0;
    // SAFETY: the pointer is to an integer.
    unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result().map_err(failed)?;
    let mut known: Vec<c_int> = vec![0; count.max(0) as usize];
    // SAFETY: the vector has the length that NVRTC returned.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(failed)?;
    Ok(known.into_iter().map(|arch| arch as u32).collect())
}

/// The version of NVRTC, major and minor.
pub fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to integers.
    let queried = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result();
    queried.map_err(|e| GpuError::failed("querying the version of NVRTC", format!("{:?}", e.0)))?;
    Ok((major, minor))
}

fn image(source: &KernelSource, target: &Target, images: &KernelCache) -> Result<Vec<u8>> {
    let (text, options) =
        (source.with_includes(), [target.option.clone(), "--fmad=false".into(), "--std=c++17".into()]);
    let key = KernelKey { text: &text, options: &options, compiler: version()? };
    images.get(&key, || compile(source, &text, &options, target))
}

fn compile(source: &KernelSource, text: &str, options: &[String], target: &Target) -> Result<Vec<u8>> {
    let failed = |cause: String| {
        let (major, minor) = target.capability;
        GpuError::Kernels { file: source.file, capability: format!("{major}.{minor}"), cause }
    };
    let error = |e: NvrtcError| failed(format!("{:?}", e.0));
    let c_string = |text: &str| CString::new(text).map_err(|e| failed(e.to_string()));
    let (text, name) = (c_string(text)?, c_string(source.file)?);
    let program = Program(result::create_program(&text, Some(&name)).map_err(error)?);
    // SAFETY: the program lives until the end of this function, and its text longer.
    let compiled = unsafe { result::compile_program(program.0, options) };
    compiled.map_err(|e| failed(program.log().unwrap_or_else(|| format!("{:?}", e.0))))?;
    program.image(target.is_machine_code).map_err(error)
}

struct Program(sys::nvrtcProgram);

impl Program {
    /// The log of the compiler.
    fn log(&self) -> Option<String> {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(self.0) }.ok()?;
        let bytes: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|c| *c != 0).collect();
        Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|log| !log.is_empty())
    }

    fn image(&self, is_machine_code: bool) -> Result<Vec<u8>, NvrtcError> {
        type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        type Get = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        let (size, get): (Size, Get) = if is_machine_code {
            (sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
        } else {
            (sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
        };
        let mut bytes = 0;
        // SAFETY: the program was compiled.
        unsafe { size(self.0, &raw mut bytes) }.result()?;
        let mut image = vec![0u8; bytes];
        // SAFETY: the vector has the length that NVRTC returned.
        unsafe { get(self.0, image.as_mut_ptr().cast()) }.result()?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is not used any more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_architecture_that_gpu_and_compiler_support_is_chosen() {
        let known = [75, 80, 86, 89, 90];
        let target = |capability| Target::of(capability, &known);
        assert_eq!(target((8, 9)).unwrap().option, "-arch=sm_89");
        assert_eq!(target((12, 0)).unwrap().option, "-arch=compute_90");
        assert_eq!(
            target((8, 7)).unwrap(),
            Target { capability: (8, 7), architecture: 86, option: "-arch=compute_86".into(), is_machine_code: false }
        );
        let error = target((6, 1)).unwrap_err().to_string();
        let message = "the GPU has compute capability 6.1, but the installed NVRTC supports only 7.5 and later";
        assert_eq!(error, message);
        let error = Target::of((5, 2), &[50, 52, 61]).unwrap_err().to_string();
        assert_eq!(error, "the GPU has compute capability 5.2, but the kernels need 6.1 or later");
    }

    /// Needs NVRTC, but no GPU.
    #[test]
    fn all_sources_compile_for_old_and_new_architectures() {
        // SAFETY: the call only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return println!("skipped: NVRTC is not installed");
        }
        let mut known = architectures().unwrap();
        known.retain(|arch| *arch >= OLDEST);
        for arch in [known.iter().min(), known.iter().max()].into_iter().flatten() {
            let target = Target::of((arch / 10, arch % 10), &known).unwrap();
            let options = [target.option.clone(), "--fmad=false".into(), "--std=c++17".into()];
            let compile = |source: &KernelSource| compile(source, &source.with_includes(), &options, &target).unwrap();
            let images: Vec<Vec<u8>> = SOURCES.iter().map(compile).collect();
            assert!(images.iter().all(|image| image.starts_with(b"\x7FELF")), "machine code for {arch}");
            for kernel in crate::launches::all_kernels() {
                let section = format!(".text.{kernel}\0").into_bytes();
                let has = |image: &&Vec<u8>| image.windows(section.len()).any(|at| at == section);
                assert_eq!(images.iter().filter(has).count(), 1, "{kernel} for {arch}");
            }
        }
    }
}
