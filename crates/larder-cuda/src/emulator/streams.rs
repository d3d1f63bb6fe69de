//! What was asked of the streams and has not happened, and what events know.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::EmulatorFault;
use super::library::Kernels;
use crate::driver::{Argument, Stream};
use crate::error::{GpuError, Result};

/// What memory from the device is aligned to.
const ALIGN: usize = 256;
/// What a copy that failed leaves behind.
const RUBBISH: u8 = 0x5A;
/// How many times longer everything takes before it is awake.
const ASLEEP: f64 = 4.0;

/// Something that a stream was asked for.
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
    /// An event, and its how manieth recording this is.
    Record(usize, u64),
    /// An event, and the recording to be waited for.
    WaitEvent(usize, u64),
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

pub struct QueuedOp {
    pub act: StreamOp,
    pub fails: bool,
}

#[derive(Default)]
struct Queue {
    ops: VecDeque<QueuedOp>,
    clock_s: f64,
    /// What went wrong and no event has told yet; on the stream of kernels all of them will.
    failure: Option<GpuError>,
}

#[derive(Default)]
struct EventState {
    asked: u64,
    over: u64,
    at_s: f64,
    failure: Option<GpuError>,
}

pub struct State {
    pub device: Allocations,
    pub host: Allocations,
    /// Where memory was page-locked, and how much.
    pub registered: BTreeMap<usize, usize>,
    pub failing: [u64; 4],
    pub refuses_to_register: bool,
    pub ignores_events: bool,
    pub launches: u64,
    /// How much work it says that it takes until it is awake.
    pub waking: Duration,
    worked_s: f64,
    latency_s: f64,
    s_per_byte: f64,
    launch_s: f64,
    queues: [Queue; 3],
    marks: Vec<EventState>,
    random: u64,
}

impl State {
    pub fn new(seed: u64) -> Self {
        State {
            device: Allocations::default(),
            host: Allocations::default(),
            registered: BTreeMap::new(),
            failing: [0; 4],
            refuses_to_register: false,
            ignores_events: false,
            launches: 0,
            waking: Duration::ZERO,
            worked_s: 0.0,
            latency_s: 1e-6,
            s_per_byte: 1e-10,
            launch_s: 1e-6,
            queues: Default::default(),
            marks: Vec::new(),
            random: seed,
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

    /// A copy is between what was page-locked and what was allocated.
    pub fn check_copy(&self, here: usize, there: usize, bytes: usize) -> Result<()> {
        let registered = self.registered.range(..=here).next_back();
        let inside = registered.is_some_and(|(from, len)| here + bytes <= from + len);
        if !inside && !self.host.has(here, bytes) {
            return Err(GpuError::failed(format!("copying {bytes} bytes"), "the memory here is not page-locked"));
        }
        if !self.device.has(there, bytes) {
            return Err(GpuError::failed(format!("copying {bytes} bytes"), "the device has no such memory"));
        }
        Ok(())
    }

    /// What a kernel copies across the link is between the same.
    pub fn check_launch(&self, kernel: &str, arguments: &[Argument]) -> Result<()> {
        let [Argument::Address(from), Argument::Address(to), Argument::Bytes(bytes)] = *arguments else {
            return Ok(());
        };
        if kernel != "copy_bytes" {
            return Ok(());
        }
        let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
        if self.device.has(from, bytes) { self.check_copy(to, from, bytes) } else { self.check_copy(from, to, bytes) }
    }

    /// Whether a copy or a kernel is yet to use this memory.
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

    /// How much was asked for that has not happened.
    pub fn pending_ops(&self) -> usize {
        self.queues.iter().map(|queue| queue.ops.len()).sum()
    }

    pub fn ask(&mut self, stream: Stream, op: QueuedOp) {
        self.queues[stream as usize].ops.push_back(op);
    }

    pub fn create_event(&mut self) -> usize {
        self.marks.push(EventState::default());
        self.marks.len() - 1
    }

    /// The number of the next recording.
    pub fn recording(&mut self, event: usize) -> u64 {
        self.marks[event].asked += 1;
        self.marks[event].asked
    }

    /// The number of the last recording.
    pub fn recorded(&self, event: usize) -> u64 {
        self.marks[event].asked
    }

    pub fn is_complete(&self, event: usize) -> bool {
        self.marks[event].over == self.marks[event].asked
    }

    pub fn result(&self, event: usize) -> Result<()> {
        self.marks[event].failure.clone().map_or(Ok(()), Err)
    }

    pub fn elapsed(&self, from: usize, to: usize) -> Duration {
        Duration::from_secs_f64((self.marks[to].at_s - self.marks[from].at_s).max(0.0))
    }

    /// Lets one thing happen on some stream; false if nothing can.
    pub fn step(&mut self, kernels: &Kernels) -> bool {
        let ready: Vec<usize> = (0..Stream::ALL.len()).filter(|stream| self.is_ready(*stream)).collect();
        if ready.is_empty() {
            return false;
        }
        let stream = ready[self.below(ready.len() as u64) as usize];
        let op = self.queues[stream].ops.pop_front().expect("it is ready");
        self.perform(stream, op, kernels);
        true
    }

    fn is_ready(&self, stream: usize) -> bool {
        match self.queues[stream].ops.front() {
            None => false,
            Some(QueuedOp { act: StreamOp::WaitEvent(event, recording), .. }) => {
                self.ignores_events || self.marks[*event].over >= *recording
            }
            Some(_) => true,
        }
    }

    fn perform(&mut self, stream: usize, op: QueuedOp, kernels: &Kernels) {
        let what = op.act.name();
        let done = match op.act {
            StreamOp::Copy { from, to, bytes } => {
                self.work(stream, self.latency_s + bytes as f64 * self.s_per_byte);
                // SAFETY: both were checked when it was asked for, and whoever asked keeps them until it is over.
                unsafe {
                    match op.fails {
                        false => std::ptr::copy(from as *const u8, to as *mut u8, bytes),
                        true => std::ptr::write_bytes(to as *mut u8, RUBBISH, bytes),
                    }
                }
                Ok(())
            }
            StreamOp::Launch { kernel, grid, block, arguments } => {
                self.work(stream, self.launch_s);
                // Behind a failure no kernel runs: what it would read may not be there.
                let runs = !op.fails && self.queues[stream].failure.is_none();
                if runs { kernels.launch(kernel, grid, block, &arguments) } else { Ok(()) }
            }
            StreamOp::Record(event, recording) => {
                self.record(stream, event, recording);
                Ok(())
            }
            StreamOp::WaitEvent(event, _) => {
                let clock_s = &mut self.queues[stream].clock_s;
                *clock_s = clock_s.max(self.marks[event].at_s);
                Ok(())
            }
        };
        let told = GpuError::failed(what, "the emulator was told to fail");
        let failure = if op.fails { Some(told) } else { done.err() };
        let queue = &mut self.queues[stream];
        queue.failure = queue.failure.take().or(failure);
    }

    /// Takes its time, and more of it before half of the work is done that it says it takes to be awake.
    fn work(&mut self, stream: usize, seconds: f64) {
        let sleeps = self.worked_s < self.waking.as_secs_f64() / 2.0;
        let seconds = if sleeps { ASLEEP * seconds } else { seconds };
        self.worked_s += seconds;
        self.queues[stream].clock_s += seconds;
    }

    fn record(&mut self, stream: usize, event: usize, recording: u64) {
        let queue = &mut self.queues[stream];
        let (at_s, failure) = (queue.clock_s, queue.failure.clone());
        if stream != Stream::Compute as usize {
            queue.failure = None;
        }
        self.marks[event] = EventState { asked: self.marks[event].asked, over: recording, at_s, failure };
    }

    /// The next random number below `limit`, which is at least 1: splitmix64.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

/// Pieces of memory, by where they begin.
#[derive(Default)]
pub struct Allocations(BTreeMap<usize, usize>);

impl Allocations {
    /// A new piece, full of `filling`.
    pub fn allocate(&mut self, bytes: usize, filling: u8) -> usize {
        // SAFETY: the layout is not empty, and the bytes are there.
        let at = unsafe {
            let at = alloc(layout(bytes));
            assert!(!at.is_null(), "{bytes} bytes of memory");
            at.write_bytes(filling, bytes);
            at as usize
        };
        self.0.insert(at, bytes);
        at
    }

    /// The length of a piece.
    pub fn len_of(&self, at: usize) -> usize {
        self.0[&at]
    }

    pub fn free(&mut self, at: usize) {
        let bytes = self.0.remove(&at).expect("a piece that was allocated");
        // SAFETY: it was allocated with this layout, and is known to nobody any more.
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
    Layout::from_size_align(bytes.max(1), ALIGN).expect("less than all addresses")
}
