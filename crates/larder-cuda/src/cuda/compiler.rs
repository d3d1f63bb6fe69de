//! The kernels, compiled by NVRTC for the card that is there.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::thread;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use crate::error::{GpuError, Result};
use crate::kernel_cache::{KernelCache, KernelKey};
use crate::sources::{KernelSource, SOURCES};

/// What to do where there is no library under any name that is looked for. That of CUDA 13 is not among them.
const MISSING: &str = "NVIDIA's compiler of kernels is missing: neither libnvrtc.so nor libnvrtc.so.12 can be loaded. It is \
                       in the CUDA toolkit, and in the package nvidia-cuda-nvrtc-cu12 on PyPI; LD_LIBRARY_PATH says where \
                       it is. CUDA 13 calls it libnvrtc.so.13: a link named libnvrtc.so beside it makes it known, and it \
                       needs a driver for CUDA 13";

/// The images of all sources for a card, from the cache or compiled now.
pub fn images(capability: (u32, u32)) -> Result<Vec<Vec<u8>>> {
    // SAFETY: it only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::Missing(MISSING.into()));
    }
    let target = Target::of(capability, &architectures()?)?;
    let (images, target) = (&KernelCache::of_user(), &target);
    thread::scope(|scope| {
        let compile = |source: &'static KernelSource| scope.spawn(move || image(source, target, images));
        let threads: Vec<_> = SOURCES.iter().map(compile).collect();
        threads.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    })
}

/// For which cards, and in which form.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Target {
    capability: (u32, u32),
    option: String,
    /// Machine code for this very card; else what the driver has yet to compile.
    is_machine_code: bool,
}

impl Target {
    /// The card's own instructions, if the compiler knows them, else those of the newest card before it.
    fn of(capability: (u32, u32), known: &[u32]) -> Result<Self> {
        let (major, minor) = capability;
        let wanted = 10 * major + minor;
        if known.contains(&wanted) {
            return Ok(Target { capability, option: format!("-arch=sm_{wanted}"), is_machine_code: true });
        }
        match known.iter().filter(|arch| **arch < wanted).max() {
            Some(arch) => Ok(Target { capability, option: format!("-arch=compute_{arch}"), is_machine_code: false }),
            None => Err(GpuError::Unsupported(format!(
                "the GPU has compute capability {major}.{minor}, and the NVRTC that is installed compiles for {} and later only",
                known.iter().min().map_or("none".into(), |arch| format!("{}.{}", arch / 10, arch % 10)),
            ))),
        }
    }
}

fn architectures() -> Result<Vec<u32>> {
    let failed = |e: NvrtcError| GpuError::failed("asking NVRTC for the cards that it knows", format!("{:?}", e.0));
    let mut count: c_int = 0;
    // SAFETY: there is room for a number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result().map_err(failed)?;
    let mut known: Vec<c_int> = vec![0; count.max(0) as usize];
    // SAFETY: there is room for as many as it said.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(failed)?;
    Ok(known.into_iter().map(|arch| arch as u32).collect())
}

/// The compiler's, major and minor.
pub fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: there is room for both.
    let asked = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result();
    asked.map_err(|e| GpuError::failed("asking for NVRTC's version", format!("{:?}", e.0)))?;
    Ok((major, minor))
}

fn image(source: &KernelSource, target: &Target, images: &KernelCache) -> Result<Vec<u8>> {
    let (text, options) =
        (source.with_includes(), [target.option.clone(), "--fmad=false".into(), "--std=c++17".into()]);
    let recipe = KernelKey { text: &text, options: &options, compiler: version()? };
    images.get(&recipe, || compile(source, &text, &options, target))
}

fn compile(source: &KernelSource, text: &str, options: &[String], target: &Target) -> Result<Vec<u8>> {
    let failed = |cause: String| {
        let (major, minor) = target.capability;
        GpuError::Kernels { file: source.file, capability: format!("{major}.{minor}"), cause }
    };
    let said = |e: NvrtcError| failed(format!("{:?}", e.0));
    let c_string = |text: &str| CString::new(text).map_err(|e| failed(e.to_string()));
    let (text, name) = (c_string(text)?, c_string(source.file)?);
    let program = Program(result::create_program(&text, Some(&name)).map_err(said)?);
    // SAFETY: the program lives until the end of this function, and its text longer.
    let compiled = unsafe { result::compile_program(program.0, options) };
    compiled.map_err(|e| failed(program.log().unwrap_or_else(|| format!("{:?}", e.0))))?;
    program.image(target.is_machine_code).map_err(said)
}

struct Program(sys::nvrtcProgram);

impl Program {
    /// What the compiler said.
    fn log(&self) -> Option<String> {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(self.0) }.ok()?;
        let bytes: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|c| *c != 0).collect();
        Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|log| !log.is_empty())
    }

    fn image(&self, is_machine_code: bool) -> Result<Vec<u8>, NvrtcError> {
        type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        type Get = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        let (size, get): (Size, Get) = match is_machine_code {
            true => (sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
            false => (sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
        };
        let mut bytes = 0;
        // SAFETY: the program was compiled.
        unsafe { size(self.0, &raw mut bytes) }.result()?;
        let mut image = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it said.
        unsafe { get(self.0, image.as_mut_ptr().cast()) }.result()?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_instructions_that_the_card_and_the_compiler_know_are_chosen() {
        let known = [75, 80, 86, 89, 90];
        let target = |capability| Target::of(capability, &known);
        assert_eq!(target((8, 9)).unwrap().option, "-arch=sm_89");
        assert_eq!(target((12, 0)).unwrap().option, "-arch=compute_90");
        assert_eq!(
            target((8, 7)).unwrap(),
            Target { capability: (8, 7), option: "-arch=compute_86".into(), is_machine_code: false }
        );
        let error = target((6, 1)).unwrap_err().to_string();
        let said =
            "the GPU has compute capability 6.1, and the NVRTC that is installed compiles for 7.5 and later only";
        assert_eq!(error, said);
    }

    /// Where NVRTC is installed this needs no GPU.
    #[test]
    fn all_sources_compile_for_old_and_new_cards() {
        // SAFETY: it only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return println!("skipped: there is no NVRTC here");
        }
        let known = architectures().unwrap();
        for arch in [known.iter().min(), known.iter().max()].into_iter().flatten() {
            let target = Target::of((arch / 10, arch % 10), &known).unwrap();
            let options = [target.option.clone(), "--fmad=false".into(), "--std=c++17".into()];
            let compile = |source: &KernelSource| compile(source, &source.with_includes(), &options, &target).unwrap();
            let images: Vec<Vec<u8>> = SOURCES.iter().map(compile).collect();
            assert!(images.iter().all(|image| image.starts_with(b"\x7FELF")), "machine code for {arch}");
            for kernel in crate::launches::KERNELS {
                let section = format!(".text.{kernel}\0").into_bytes();
                let has = |image: &&Vec<u8>| image.windows(section.len()).any(|at| at == section);
                assert_eq!(images.iter().filter(has).count(), 1, "{kernel} for {arch}");
            }
        }
    }
}
