//! A GPU by NVIDIA, through its driver's library, which is looked for when the program runs.
#![allow(unsafe_code)]

mod compiler;

use std::collections::HashMap;
use std::ffi::{CString, c_uint, c_void};
use std::fmt::Display;
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use crate::driver::{Driver, EventHandle, GpuInfo, Launch, Stream};
use crate::error::{GpuError, Result};

/// No kernel takes more.
const MAX_ARGUMENTS: usize = 8;
/// A card that idles has the clocks of its memory and of its link down, and takes 100 ms or more to notice work.
const WARM_UP: Duration = Duration::from_millis(250);
/// What a processor reads in about the 20 µs that a round trip takes.
const MIN_MATRIX_BYTES: usize = 256 << 10;

/// The driver's library, a card, and the kernels on it.
pub struct Cuda {
    device: sys::CUdevice,
    context: sys::CUcontext,
    streams: [sys::CUstream; Stream::ALL.len()],
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<&'static str, usize>>,
    name: String,
    capability: (u32, u32),
}

// SAFETY: the handles may be used from any thread, once the context is current there, which each call sees to.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver's functions may be called from several threads at once.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The card of this number, with all kernels.
    pub fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: it only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            let what = "there is no NVIDIA driver here: its library libcuda.so.1 cannot be loaded (a container has to be \
                        given it, and LD_LIBRARY_PATH says where else to look)";
            return Err(GpuError::Missing(what.into()));
        }
        result::init().map_err(|e| failed("starting the NVIDIA driver", e))?;
        let count = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
        let number = i32::try_from(ordinal).ok().filter(|number| *number < count);
        let number =
            number.ok_or_else(|| GpuError::Missing(format!("there is no GPU {ordinal}; there are {count}")))?;
        let device = result::device::get(number).map_err(|e| failed("opening the GPU", e))?;
        let name = result::device::get_name(device).map_err(|e| failed("asking for the GPU's name", e))?;
        // SAFETY: the device is one.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) };
        let of_card = |which| attribute(which).map(|n| n as u32).map_err(|e| failed("asking what the GPU can do", e));
        let major = of_card(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = of_card(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if of_card(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            let what = format!("{name} does not share its addresses with the machine, which kernels here rely on");
            return Err(GpuError::Unsupported(what));
        }
        let images = compiler::images((major, minor))?;

        // SAFETY: the device is one; the context is given back when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("opening the GPU", e))?;
        let streams = [null_mut(); Stream::ALL.len()];
        let (modules, functions) = (Vec::new(), Mutex::default());
        let mut cuda = Cuda { device, context, streams, modules, functions, name, capability: (major, minor) };
        cuda.enter()?;
        for stream in &mut cuda.streams {
            let made = result::stream::create(result::stream::StreamKind::NonBlocking);
            *stream = made.map_err(|e| failed("making a stream", e))?;
        }
        for image in images {
            // SAFETY: it is a whole image, as the compiler made it.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
            cuda.modules.push(module.map_err(|e| failed(&loading(), e))?);
        }
        Ok(cuda)
    }

    /// Makes the calling thread one of those that use this card.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as this does.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| failed("using the GPU", e))
    }

    /// Does something on this card.
    fn ask<T>(&self, what: impl Display, ask: impl FnOnce() -> Result<T, DriverError>) -> Result<T> {
        self.enter()?;
        ask().map_err(|e| failed(&what.to_string(), e))
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }

    fn function(&self, kernel: &'static str) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(kernel) {
            return Ok(*function as sys::CUfunction);
        }
        let name = CString::new(kernel).expect("names have no zeros");
        // SAFETY: the modules are loaded as long as this lives.
        let find = |module: &sys::CUmodule| unsafe { result::module::get_function(*module, name.clone()) }.ok();
        let found = self.modules.iter().find_map(find);
        let function = found.ok_or_else(|| GpuError::failed(format!("the kernel {kernel}"), "there is none"))?;
        functions.insert(kernel, function as usize);
        Ok(function)
    }
}

impl Driver for Cuda {
    fn info(&self) -> Result<GpuInfo> {
        let (free, total) = self.ask("asking how much device memory is free", result::mem_get_info)?;
        let (free_bytes, total_bytes) = (free as u64, total as u64);
        Ok(GpuInfo { name: self.name.clone(), capability: self.capability, free_bytes, total_bytes })
    }

    fn warm_up(&self) -> Duration {
        WARM_UP
    }

    fn min_matrix_bytes(&self) -> usize {
        MIN_MATRIX_BYTES
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.enter()?;
        // SAFETY: whoever asked gives it back.
        match unsafe { result::malloc_sync(bytes as usize) } {
            Ok(at) => Ok(at),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(GpuError::OutOfMemory { bytes, free_bytes: self.info()?.free_bytes })
            }
            Err(e) => Err(failed(&format!("taking {bytes} bytes of device memory"), e)),
        }
    }

    unsafe fn free(&self, at: u64) {
        self.drain();
        // SAFETY: as the caller guarantees.
        let _ = self.ask("giving device memory back", || unsafe { result::free_sync(at) });
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let what = format!("taking {bytes} bytes of page-locked memory");
        // As addresses are shared, it is at the same one for kernels.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: whoever asked gives it back.
        let take = || unsafe { result::malloc_host(bytes, flags) };
        let at = self.ask(&what, take)?.cast::<u8>();
        // SAFETY: so many bytes were taken.
        unsafe { at.write_bytes(0, bytes) };
        NonNull::new(at).ok_or_else(|| GpuError::failed(what, "there is none"))
    }

    unsafe fn free_host(&self, at: NonNull<u8>) {
        // SAFETY: as the caller guarantees.
        let _ = self.ask("giving memory back", || unsafe { result::free_host(at.as_ptr().cast()) });
    }

    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.ask("page-locking memory", || unsafe {
            let from = from.cast_mut().cast::<c_void>();
            sys::cuMemHostRegister_v2(from, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE).result()
        })
    }

    unsafe fn unregister(&self, from: *const u8) {
        // SAFETY: as the caller guarantees.
        let let_go = || unsafe { sys::cuMemHostUnregister(from.cast_mut().cast()).result() };
        let _ = self.ask("letting go of page-locked memory", let_go);
    }

    fn create_event(&self) -> Result<EventHandle> {
        let create = || result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT);
        Ok(EventHandle(self.ask("making an event", create)? as usize))
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        // SAFETY: as the caller guarantees.
        let _ = self.ask("forgetting an event", || unsafe { result::event::destroy(raw(event)) });
    }

    fn record(&self, event: EventHandle, stream: Stream) -> Result<()> {
        // SAFETY: events and streams live until nobody knows them.
        self.ask("recording an event", || unsafe { result::event::record(raw(event), self.stream(stream)) })
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `record`.
        let hold = || unsafe { result::stream::wait_event(self.stream(stream), raw(event), flags) };
        self.ask("letting a stream wait", hold)
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        self.enter()?;
        // SAFETY: as in `record`.
        match unsafe { result::event::query(raw(event)) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(failed("the GPU", e)),
        }
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        // SAFETY: as in `record`.
        self.ask("the GPU", || unsafe { result::event::synchronize(raw(event)) })
    }

    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration> {
        // SAFETY: as in `record`.
        let ms = self.ask("timing", || unsafe { result::event::elapsed(raw(from), raw(to)) })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    fn drain(&self) {
        let _ = self.ask("waiting for the GPU", result::ctx::synchronize);
    }

    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.ask(format_args!("copying {bytes} bytes to the GPU"), || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream(stream)).result()
        })
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.ask(format_args!("copying {bytes} bytes from the GPU"), || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream(stream)).result()
        })
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        assert!(launch.arguments.len() <= MAX_ARGUMENTS, "{} takes too much", launch.kernel);
        let function = self.function(launch.kernel)?;
        let [x, y]: [c_uint; 2] = launch.grid;
        let mut pointers = [null_mut::<c_void>(); MAX_ARGUMENTS];
        pointers.iter_mut().zip(launch.arguments).for_each(|(pointer, argument)| *pointer = argument.pointer());
        // SAFETY: as the caller guarantees; the driver copies the arguments before it returns.
        self.ask(format_args!("the kernel {}", launch.kernel), || unsafe {
            result::launch_kernel(function, (x, y, 1), (launch.block, 1, 1), 0, self.stream(stream), &mut pointers)
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.drain();
        for module in &self.modules {
            // SAFETY: nothing runs, and nobody has its functions any more.
            let _ = unsafe { result::module::unload(*module) };
        }
        for stream in self.streams.iter().filter(|stream| !stream.is_null()) {
            // SAFETY: nothing runs.
            let _ = unsafe { result::stream::destroy(*stream) };
        }
        // SAFETY: it was retained once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// What is done when kernels are loaded, and by whom: a driver does not know what a compiler newer than it has made.
fn loading() -> String {
    let mut driver = 0;
    // SAFETY: there is room for a number.
    let driver = unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().ok().map(|()| driver);
    of_versions(compiler::version().ok(), driver)
}

fn of_versions(compiler: Option<(i32, i32)>, driver: Option<i32>) -> String {
    let unknown = || "of an unknown version".to_owned();
    let compiler = compiler.map_or_else(unknown, |(major, minor)| format!("{major}.{minor}"));
    let driver = driver.map_or_else(unknown, |n| format!("for CUDA {}.{}", n / 1000, n % 1000 / 10));
    format!("loading kernels compiled by NVRTC {compiler} with a driver {driver}")
}

fn raw(event: EventHandle) -> sys::CUevent {
    event.0 as sys::CUevent
}

fn failed(what: &str, e: DriverError) -> GpuError {
    let said = e.error_string().map(|text| text.to_string_lossy().into_owned());
    let name = e.error_name().map(|text| text.to_string_lossy().into_owned());
    GpuError::failed(what, format!("{} ({})", said.unwrap_or_default(), name.unwrap_or_else(|_| format!("{:?}", e.0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_load_is_said_with_both_versions() {
        let said = "loading kernels compiled by NVRTC 13.0 with a driver for CUDA 12.8";
        assert_eq!(of_versions(Some((13, 0)), Some(12080)), said);
        let said = "loading kernels compiled by NVRTC of an unknown version with a driver of an unknown version";
        assert_eq!(of_versions(None, None), said);
    }
}
