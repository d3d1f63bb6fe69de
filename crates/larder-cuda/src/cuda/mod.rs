//! An NVIDIA GPU, through the CUDA driver library, which is loaded at run time.
#![allow(unsafe_code)]

mod compiler;

use std::collections::HashMap;
use std::ffi::{CString, c_uint, c_void};
use std::fmt::Display;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use crate::driver::{Driver, EventHandle, GpuInfo, GraphHandle, Launch, MAX_ARGUMENTS, Stream};
use crate::error::{GpuError, Result};
use crate::launches::all_kernels;
use compiler::CompiledKernels;

/// An idle card has the clocks of its memory and of its link down, and takes 100 ms or more of work to raise them.
const WARM_UP: Duration = Duration::from_millis(250);

/// A GPU, with its context, its streams and the loaded kernels.
pub struct Cuda {
    device: sys::CUdevice,
    context: sys::CUcontext,
    streams: [sys::CUstream; Stream::ALL.len()],
    modules: Vec<sys::CUmodule>,
    /// By name of a kernel.
    functions: HashMap<&'static str, usize>,
    has_tensor_cores: bool,
    name: String,
    capability: (u32, u32),
}

// SAFETY: the handles may be used from any thread on which the context is current; each call makes it so.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver's functions may be called from several threads at once.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Opens GPU number `ordinal` and loads all kernels.
    pub fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: it only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            let what = "no NVIDIA driver found: libcuda.so.1 cannot be loaded. Install the driver; in a container, pass the GPU \
                        through; if the library is elsewhere, set LD_LIBRARY_PATH";
            return Err(GpuError::Missing(what.into()));
        }
        result::init().map_err(|e| failed("starting the NVIDIA driver", e))?;
        let count = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
        let number = i32::try_from(ordinal).ok().filter(|number| *number < count);
        let number = number
            .ok_or_else(|| GpuError::Missing(format!("there is no GPU {ordinal}; the number of GPUs is {count}")))?;
        let device = result::device::get(number).map_err(|e| failed("opening the GPU", e))?;
        let name = result::device::get_name(device).map_err(|e| failed("querying the name of the GPU", e))?;
        // SAFETY: the device handle is valid.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) };
        let query =
            |which| attribute(which).map(|n| n as u32).map_err(|e| failed("querying the attributes of the GPU", e));
        let major = query(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = query(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if query(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            let what = format!("{name} does not support unified addressing, which the kernels need");
            return Err(GpuError::Unsupported(what));
        }
        let CompiledKernels { images, has_tensor_cores } = compiler::compiled((major, minor))?;

        // SAFETY: the device handle is valid; the context is released when `Cuda` is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("opening the GPU", e))?;
        let streams = [null_mut(); Stream::ALL.len()];
        let (modules, functions, capability) = (Vec::new(), HashMap::new(), (major, minor));
        let mut cuda = Cuda { device, context, streams, modules, functions, has_tensor_cores, name, capability };
        cuda.enter()?;
        for stream in &mut cuda.streams {
            let made = result::stream::create(result::stream::StreamKind::NonBlocking);
            *stream = made.map_err(|e| failed("creating a stream", e))?;
        }
        for image in images {
            // SAFETY: the bytes are a complete image from the compiler.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
            cuda.modules.push(module.map_err(|e| failed(&loading(), e))?);
        }
        // A driver may load a kernel only when its function is asked for: not later, when experts have the memory that
        // is free now.
        cuda.functions =
            all_kernels().into_iter().map(|kernel| Ok((kernel, cuda.load(kernel)?))).collect::<Result<_>>()?;
        Ok(cuda)
    }

    /// Makes this GPU's context current on the calling thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| failed("making the GPU current", e))
    }

    /// Calls a driver function with the context current; `what` names the operation in an error.
    fn call<T>(&self, what: impl Display, function: impl FnOnce() -> Result<T, DriverError>) -> Result<T> {
        self.enter()?;
        function().map_err(|e| failed(&what.to_string(), e))
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }

    /// Loads a kernel from the module that has it.
    fn load(&self, kernel: &'static str) -> Result<usize> {
        let name = CString::new(kernel).expect("kernel names have no NUL");
        let what = format!("loading the kernel {kernel}");
        for module in &self.modules {
            // SAFETY: the modules stay loaded as long as `self` lives.
            match unsafe { result::module::get_function(*module, name.clone()) } {
                Ok(function) => return Ok(function as usize),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                Err(e) => return Err(failed(&what, e)),
            }
        }
        Err(GpuError::failed(what, "no module has it"))
    }

    fn function(&self, kernel: &'static str) -> Result<sys::CUfunction> {
        let function = self.functions.get(kernel).map(|function| *function as sys::CUfunction);
        function.ok_or_else(|| GpuError::failed(format!("the kernel {kernel}"), "it is not in the list of kernels"))
    }
}

impl Cuda {
    /// Adds launches to a graph, each behind the one before.
    fn add_nodes(&self, graph: sys::CUgraph, launches: &[Launch]) -> Result<()> {
        let mut before: sys::CUgraphNode = null_mut();
        for launch in launches {
            let mut pointers = pointers_of(launch);
            let params = sys::CUDA_KERNEL_NODE_PARAMS {
                func: self.function(launch.kernel)?,
                gridDimX: launch.grid[0],
                gridDimY: launch.grid[1],
                gridDimZ: 1,
                blockDimX: launch.block,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                kernelParams: pointers.as_mut_ptr(),
                extra: null_mut(),
                kern: null_mut(),
                ctx: null_mut(),
            };
            let (mut node, count) = (null_mut(), usize::from(!before.is_null()));
            // SAFETY: the handles are valid; the driver copies the arguments before it returns.
            self.call(format_args!("adding the kernel {} to a graph", launch.kernel), || unsafe {
                sys::cuGraphAddKernelNode_v2(&raw mut node, graph, &raw const before, count, &raw const params).result()
            })?;
            before = node;
        }
        Ok(())
    }
}

/// Pointers to the arguments of a launch.
fn pointers_of(launch: &Launch) -> [*mut c_void; MAX_ARGUMENTS] {
    let mut pointers = [null_mut::<c_void>(); MAX_ARGUMENTS];
    pointers.iter_mut().zip(launch.arguments).for_each(|(pointer, argument)| *pointer = argument.pointer());
    pointers
}

impl Driver for Cuda {
    fn info(&self) -> Result<GpuInfo> {
        let (free, total) = self.call("querying free device memory", result::mem_get_info)?;
        let (free_bytes, total_bytes) = (free as u64, total as u64);
        Ok(GpuInfo { name: self.name.clone(), capability: self.capability, free_bytes, total_bytes })
    }

    fn warm_up(&self) -> Duration {
        WARM_UP
    }

    fn has_tensor_cores(&self) -> bool {
        self.has_tensor_cores
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.enter()?;
        // SAFETY: the caller frees the memory.
        match unsafe { result::malloc_sync(bytes as usize) } {
            Ok(at) => Ok(at),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(GpuError::OutOfMemory { bytes, free_bytes: self.info()?.free_bytes })
            }
            Err(e) => Err(failed(&format!("allocating {bytes} bytes of device memory"), e)),
        }
    }

    unsafe fn free(&self, at: u64) {
        self.drain();
        // SAFETY: as the caller guarantees.
        let _ = self.call("freeing device memory", || unsafe { result::free_sync(at) });
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let what = format!("allocating {bytes} bytes of page-locked memory");
        // With unified addressing, kernels use the same address.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the caller frees the memory.
        let take = || unsafe { result::malloc_host(bytes, flags) };
        let at = self.call(&what, take)?.cast::<u8>();
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { at.write_bytes(0, bytes) };
        NonNull::new(at).ok_or_else(|| GpuError::failed(what, "the driver returned no address"))
    }

    unsafe fn free_host(&self, at: NonNull<u8>) {
        // SAFETY: as the caller guarantees.
        let _ = self.call("freeing page-locked memory", || unsafe { result::free_host(at.as_ptr().cast()) });
    }

    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.call("page-locking memory", || unsafe {
            let from = from.cast_mut().cast::<c_void>();
            sys::cuMemHostRegister_v2(from, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE).result()
        })
    }

    unsafe fn unregister(&self, from: *const u8) {
        // SAFETY: as the caller guarantees.
        let unregister = || unsafe { sys::cuMemHostUnregister(from.cast_mut().cast()).result() };
        let _ = self.call("unregistering page-locked memory", unregister);
    }

    fn create_event(&self) -> Result<EventHandle> {
        let create = || result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT);
        Ok(EventHandle(self.call("creating an event", create)? as usize))
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        // SAFETY: as the caller guarantees.
        let _ = self.call("destroying an event", || unsafe { result::event::destroy(raw(event)) });
    }

    fn record(&self, event: EventHandle, stream: Stream) -> Result<()> {
        // SAFETY: events and streams live as long as their handles are in use.
        self.call("recording an event", || unsafe { result::event::record(raw(event), self.stream(stream)) })
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `record`.
        let wait = || unsafe { result::stream::wait_event(self.stream(stream), raw(event), flags) };
        self.call("waiting for an event on a stream", wait)
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        self.enter()?;
        // SAFETY: as in `record`.
        match unsafe { result::event::query(raw(event)) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(failed("work on the GPU", e)),
        }
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        // SAFETY: as in `record`.
        self.call("work on the GPU", || unsafe { result::event::synchronize(raw(event)) })
    }

    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration> {
        // SAFETY: as in `record`.
        let ms = self.call("timing with events", || unsafe { result::event::elapsed(raw(from), raw(to)) })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    fn drain(&self) {
        let _ = self.call("waiting for the GPU", result::ctx::synchronize);
    }

    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.call(format_args!("copying {bytes} bytes to the GPU"), || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream(stream)).result()
        })
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: as the caller guarantees.
        self.call(format_args!("copying {bytes} bytes from the GPU"), || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream(stream)).result()
        })
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        let function = self.function(launch.kernel)?;
        let [x, y]: [c_uint; 2] = launch.grid;
        let mut pointers = pointers_of(launch);
        // SAFETY: as the caller guarantees; the driver copies the arguments before it returns.
        self.call(format_args!("the kernel {}", launch.kernel), || unsafe {
            result::launch_kernel(function, (x, y, 1), (launch.block, 1, 1), 0, self.stream(stream), &mut pointers)
        })
    }

    unsafe fn create_graph(&self, launches: &[Launch]) -> Result<Option<GraphHandle>> {
        self.enter()?;
        let mut graph = null_mut();
        // SAFETY: the pointer is to a handle.
        let created = unsafe { sys::cuGraphCreate(&raw mut graph, 0).result() };
        created.map_err(|e| failed("making a graph", e))?;
        let mut executable = null_mut();
        // SAFETY: the graph is whole, and the pointer is to a handle.
        let instantiate = || unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).result() };
        let made = self.add_nodes(graph, launches).and_then(|()| self.call("making a graph", instantiate));
        // SAFETY: the executable graph does not need it.
        let _ = unsafe { sys::cuGraphDestroy(graph).result() };
        made.map(|()| Some(GraphHandle(executable as usize)))
    }

    unsafe fn launch_graph(&self, graph: GraphHandle) -> Result<()> {
        // SAFETY: as the caller guarantees.
        let launch =
            || unsafe { sys::cuGraphLaunch(graph.0 as sys::CUgraphExec, self.stream(Stream::Compute)).result() };
        self.call("launching a graph", launch)
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: as the caller guarantees.
        let _ = self
            .call("destroying a graph", || unsafe { sys::cuGraphExecDestroy(graph.0 as sys::CUgraphExec).result() });
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.drain();
        for module in &self.modules {
            // SAFETY: nothing runs, and its functions are not used any more.
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

/// Names the operation of loading kernels, with both versions: a driver cannot load the output of a newer compiler.
fn loading() -> String {
    let mut driver = 0;
    // SAFETY: the pointer is to an integer.
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
    let message = e.error_string().map(|text| text.to_string_lossy().into_owned());
    let name = e.error_name().map(|text| text.to_string_lossy().into_owned());
    GpuError::failed(
        what,
        format!("{} ({})", message.unwrap_or_default(), name.unwrap_or_else(|_| format!("{:?}", e.0))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_loading_names_both_versions() {
        let message = "loading kernels compiled by NVRTC 13.0 with a driver for CUDA 12.8";
        assert_eq!(of_versions(Some((13, 0)), Some(12080)), message);
        let message = "loading kernels compiled by NVRTC of an unknown version with a driver of an unknown version";
        assert_eq!(of_versions(None, None), message);
    }
}
