//! The queues of the streams, the state of events, memory, and the emulated clock.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use larder_core::Rng;

use super::EmulatorFault;
use super::library::Kernels;
use crate::driver::{Argument, Stream};
use crate::error::{GpuError, Result};

/// Alignment of allocations.
const ALIGN: usize = 256;
/// The byte that a failed copy leaves in its target.
const GARBAGE: u8 = 0x5A;
/// Factor on all times before the device has warmed up.
const COLD_FACTOR: f64 = 4.0;

/// An operation of a stream.
pub enum StreamOp {
    Copy {
        from: usize,
        to: usize,
        bytes: usize,
    },
    Launch {
        kernel: &'static str,
        grid: [u32; 2],
        block: u32,
        arguments: Vec<Argument>,
    },
    /// An event, and the number of this recording of it.
    Record(usize, u64),
    /// An event, and the number of the recording to wait for.
    WaitEvent(usize, u64),
}

/// A launch of a graph.
#[derive(Clone)]
pub struct GraphLaunch {
    pub kernel: &'static str,
    pub grid: [u32; 2],
    pub block: u32,
    pub arguments: Vec<Argument>,
}

impl StreamOp {
    pub fn name(&self) -> String {
        match self {
            StreamOp::Copy { bytes, .. } => format!("copying {bytes} bytes"),
            StreamOp::Launch { kernel, .. } => format!("the kernel {kernel}"),
            StreamOp::Record(..) => "recording an event".into(),
            StreamOp::WaitEvent(..) => "waiting for an event".into(),
        }
    }
}

/// An operation in a queue.
pub struct QueuedOp {
    pub act: StreamOp,
    /// Whether it was chosen to fail.
    pub fails: bool,
}

#[derive(Default)]
struct Queue {
    ops: VecDeque<QueuedOp>,
    clock_s: f64,
    /// A failure that no event has reported yet; on the compute stream every later event reports it.
    failure: Option<GpuError>,
}

#[derive(Default)]
struct EventState {
    submitted: u64,
    complete: u64,
    /// The stream of the last recording that was submitted.
    stream: Option<Stream>,
    at_s: f64,
    failure: Option<GpuError>,
}

/// The state of the emulator.
pub struct State {
    pub device: Allocations,
    pub host: Allocations,
    /// Page-locked existing memory: length by address.
    pub registered: BTreeMap<usize, usize>,
    pub failing: [u64; 4],
    pub refuses_to_register: bool,
    /// Streams that do not wait for events of other streams: those that wait, and those of the events.
    pub ignored_waits: Vec<(Stream, Stream)>,
    pub launches: u64,
    /// The launches of each graph.
    pub graphs: Vec<Vec<GraphLaunch>>,
    /// The reported warm-up time.
    pub warm_up: Duration,
    worked_s: f64,
    latency_s: f64,
    s_per_byte: f64,
    launch_s: f64,
    queues: [Queue; Stream::ALL.len()],
    events: Vec<EventState>,
    random: Rng,
}

impl State {
    pub fn new(seed: u64) -> Self {
        State {
            device: Allocations::default(),
            host: Allocations::default(),
            registered: BTreeMap::new(),
            failing: [0; 4],
            refuses_to_register: false,
            ignored_waits: Vec::new(),
            launches: 0,
            graphs: Vec::new(),
            warm_up: Duration::ZERO,
            worked_s: 0.0,
            latency_s: 1e-6,
            s_per_byte: 1e-10,
            launch_s: 1e-6,
            queues: Default::default(),
            events: Vec::new(),
            random: Rng::new(seed),
        }
    }

    pub fn set_times(&mut self, latency: Duration, bytes_per_s: f64, launch: Duration) {
        self.latency_s = latency.as_secs_f64();
        self.s_per_byte = 1.0 / bytes_per_s;
        self.launch_s = launch.as_secs_f64();
    }

    pub fn fails(&mut self, fault: EmulatorFault) -> bool {
        let one_in = self.failing[fault as usize];
        one_in > 0 && self.below(one_in) == 0
    }

    /// Checks that a copy is between page-locked memory and device memory.
    pub fn check_copy(&self, here: usize, there: usize, bytes: usize) -> Result<()> {
        let registered = self.registered.range(..=here).next_back();
        let inside = registered.is_some_and(|(from, len)| here + bytes <= from + len);
        if !inside && !self.host.has(here, bytes) {
            return Err(GpuError::failed(format!("copying {bytes} bytes"), "the main memory is not page-locked"));
        }
        if !self.device.has(there, bytes) {
            return Err(GpuError::failed(format!("copying {bytes} bytes"), "the device memory is not allocated"));
        }
        Ok(())
    }

    /// Checks a copy that is made by a kernel in the same way.
    pub fn check_launch(&self, kernel: &str, arguments: &[Argument]) -> Result<()> {
        let [Argument::Address(from), Argument::Address(to), Argument::Bytes(bytes)] = *arguments else {
            return Ok(());
        };
        if kernel != "copy_bytes" {
            return Ok(());
        }
        let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
        if self.device.has(from, bytes) && self.device.has(to, bytes) {
            return Ok(());
        }
        if self.device.has(from, bytes) { self.check_copy(to, from, bytes) } else { self.check_copy(from, to, bytes) }
    }

    /// Whether a pending copy or kernel uses this memory.
    pub fn is_used(&self, from: usize, bytes: usize) -> bool {
        let uses = |op: &QueuedOp| match op.act {
            StreamOp::Copy { from: a, to: b, bytes: len } => {
                [a, b].iter().any(|at| *at < from + bytes && from < at + len)
            }
            StreamOp::Launch { ref arguments, .. } => arguments.iter().any(|argument| match argument {
                Argument::Address(at) => (from..from + bytes).contains(&(*at as usize)),
                _ => false,
            }),
            _ => false,
        };
        self.queues.iter().any(|queue| queue.ops.iter().any(uses))
    }

    /// Number of operations that were submitted and not executed.
    pub fn pending_ops(&self) -> usize {
        self.queues.iter().map(|queue| queue.ops.len()).sum()
    }

    pub fn submit(&mut self, stream: Stream, op: QueuedOp) {
        self.queues[stream as usize].ops.push_back(op);
    }

    pub fn create_event(&mut self) -> usize {
        self.events.push(EventState::default());
        self.events.len() - 1
    }

    /// Counts a recording of the event and returns its number.
    pub fn recording(&mut self, event: usize, stream: Stream) -> u64 {
        self.events[event].submitted += 1;
        self.events[event].stream = Some(stream);
        self.events[event].submitted
    }

    /// The number of the last recording that was submitted.
    pub fn recorded(&self, event: usize) -> u64 {
        self.events[event].submitted
    }

    pub fn is_complete(&self, event: usize) -> bool {
        self.events[event].complete == self.events[event].submitted
    }

    pub fn result(&self, event: usize) -> Result<()> {
        self.events[event].failure.clone().map_or(Ok(()), Err)
    }

    pub fn elapsed(&self, from: usize, to: usize) -> Duration {
        Duration::from_secs_f64((self.events[to].at_s - self.events[from].at_s).max(0.0))
    }

    /// Executes one operation of some stream; false if no stream can proceed.
    pub fn step(&mut self, kernels: &Kernels) -> bool {
        let ready: Vec<usize> = (0..Stream::ALL.len()).filter(|stream| self.is_ready(*stream)).collect();
        if ready.is_empty() {
            return false;
        }
        let stream = ready[self.below(ready.len() as u64) as usize];
        let op = self.queues[stream].ops.pop_front().expect("a ready stream has an operation");
        self.perform(stream, op, kernels);
        true
    }

    fn is_ready(&self, stream: usize) -> bool {
        match self.queues[stream].ops.front() {
            None => false,
            Some(QueuedOp { act: StreamOp::WaitEvent(event, recording), .. }) => {
                let EventState { complete, stream: of, .. } = self.events[*event];
                complete >= *recording
                    || self.ignored_waits.iter().any(|(a, b)| *a as usize == stream && Some(*b) == of)
            }
            Some(_) => true,
        }
    }

    fn perform(&mut self, stream: usize, op: QueuedOp, kernels: &Kernels) {
        let what = op.act.name();
        let done = match op.act {
            StreamOp::Copy { from, to, bytes } => {
                self.work(stream, self.latency_s + bytes as f64 * self.s_per_byte);
                // SAFETY: both ranges were checked on submission, and the caller keeps them until the copy is complete.
                unsafe {
                    if op.fails {
                        std::ptr::write_bytes(to as *mut u8, GARBAGE, bytes)
                    } else {
                        std::ptr::copy(from as *const u8, to as *mut u8, bytes)
                    }
                }
                Ok(())
            }
            StreamOp::Launch { kernel, grid, block, arguments } => {
                self.work(stream, self.launch_s);
                // After a failure no kernel runs: its inputs may be missing.
                let runs = !op.fails && self.queues[stream].failure.is_none();
                if runs { kernels.launch(kernel, grid, block, &arguments) } else { Ok(()) }
            }
            StreamOp::Record(event, recording) => {
                self.record(stream, event, recording);
                Ok(())
            }
            StreamOp::WaitEvent(event, _) => {
                let clock_s = &mut self.queues[stream].clock_s;
                *clock_s = clock_s.max(self.events[event].at_s);
                Ok(())
            }
        };
        let injected = GpuError::failed(what, "injected fault");
        let failure = if op.fails { Some(injected) } else { done.err() };
        let queue = &mut self.queues[stream];
        queue.failure = queue.failure.take().or(failure);
    }

    /// Advances the clock of a stream; more slowly until half of the warm-up time has been worked.
    fn work(&mut self, stream: usize, seconds: f64) {
        let cold = self.worked_s < self.warm_up.as_secs_f64() / 2.0;
        let seconds = if cold { COLD_FACTOR * seconds } else { seconds };
        self.worked_s += seconds;
        self.queues[stream].clock_s += seconds;
    }

    fn record(&mut self, stream: usize, event: usize, recording: u64) {
        let queue = &mut self.queues[stream];
        let (at_s, failure) = (queue.clock_s, queue.failure.clone());
        if stream != Stream::Compute as usize {
            queue.failure = None;
        }
        let event = &mut self.events[event];
        (event.complete, event.at_s, event.failure) = (recording, at_s, failure);
    }

    /// The next random number below `limit`, which is at least 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.random.bits() % limit
    }
}

/// Allocations: length by address.
#[derive(Default)]
pub struct Allocations(BTreeMap<usize, usize>);

impl Allocations {
    /// Allocates memory and fills it with `filling`.
    pub fn allocate(&mut self, bytes: usize, filling: u8) -> usize {
        // SAFETY: the layout is not empty, and the allocation has `bytes` bytes.
        let at = unsafe {
            let at = alloc(layout(bytes));
            assert!(!at.is_null(), "cannot allocate {bytes} bytes");
            at.write_bytes(filling, bytes);
            at as usize
        };
        self.0.insert(at, bytes);
        at
    }

    /// The length of an allocation.
    pub fn len_of(&self, at: usize) -> usize {
        self.0[&at]
    }

    pub fn free(&mut self, at: usize) {
        let bytes = self.0.remove(&at).expect("the address was allocated");
        // SAFETY: it was allocated with this layout, and is not used any more.
        unsafe { dealloc(at as *mut u8, layout(bytes)) }
    }

    pub fn bytes(&self) -> u64 {
        self.0.values().sum::<usize>() as u64
    }

    fn has(&self, at: usize, bytes: usize) -> bool {
        self.0.range(..=at).next_back().is_some_and(|(from, len)| at + bytes <= from + len)
    }
}

impl Drop for Allocations {
    fn drop(&mut self) {
        while let Some(at) = self.0.keys().next().copied() {
            self.free(at);
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN).expect("the size fits the address space")
}
