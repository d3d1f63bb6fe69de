//! Reads the tensors of a model ahead of the code that builds it, in the order in which that will request them.
//!
//! One tensor after the other would leave the SSD idle while the system provides memory, while checksums are compared
//! and rows are reordered.

use std::collections::BTreeMap;
use std::thread::{self, Scope};

use larder_core::{TensorSpec, Tensors, TensorsError};
use parking_lot::{Condvar, Mutex};

use crate::weights::Bytes;

/// Threads that read: as many reads are in flight.
const THREADS: usize = 4;
/// The most bytes that are being read or wait for the builder, unless a single tensor is larger.
const AHEAD_BYTES: usize = 64 << 20;

/// The tensors that will be requested, and those of them that have been read.
pub(crate) struct ReadAhead<'a> {
    source: &'a dyn Tensors,
    /// Names and lengths in bytes, in the order of the requests.
    tensors: Vec<(&'a str, usize)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Index of the next tensor to read.
    next: usize,
    /// Index of the next tensor to be taken.
    taken: usize,
    /// Tensors that have been read and not taken.
    ready: BTreeMap<usize, Result<Bytes, TensorsError>>,
    /// Bytes of the tensors that are being read or ready.
    bytes: usize,
    stopping: bool,
}

/// Ends the reading when it is dropped.
pub(crate) struct Reading<'q, 'a>(&'q ReadAhead<'a>);

impl<'a> ReadAhead<'a> {
    /// For a build that will request `specs`, in this order. A tensor that is read by row, is missing or has another
    /// shape is left to the request.
    pub fn new(source: &'a dyn Tensors, specs: &'a [TensorSpec]) -> Self {
        let tensor = |spec: &'a TensorSpec| {
            let stays_on_ssd = spec.by_row && source.rows(&spec.name).is_some();
            let meta = source.meta(&spec.name).filter(|meta| !stays_on_ssd && meta.shape == spec.shape)?;
            Some((spec.name.as_str(), meta.bytes))
        };
        let tensors = specs.iter().filter_map(tensor).collect();
        ReadAhead { source, tensors, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Starts the threads; they end when all is read, or when the returned guard is dropped. Without threads every
    /// request reads its tensor itself.
    pub fn begin<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Reading<'scope, 'a> {
        for i in 0..THREADS {
            let thread = thread::Builder::new().name(format!("larder-load-{i}"));
            if thread.spawn_scoped(scope, || self.read()).is_err() && i == 0 {
                self.state.lock().stopping = true;
            }
        }
        Reading(self)
    }

    /// The bytes of a tensor, which the caller requests once. `None` if it was not to be read ahead.
    pub fn take(&self, name: &str) -> Option<Result<Bytes, TensorsError>> {
        let mut state = self.state.lock();
        let at = state.taken + self.tensors[state.taken..].iter().position(|(next, _)| *next == name)?;
        // Tensors before it will not be requested any more.
        for skipped in state.taken..at {
            state.forget(skipped, self.tensors[skipped].1);
        }
        state.taken = at;
        self.changed.notify_all();
        loop {
            if let Some(read) = state.ready.remove(&at) {
                state.bytes -= self.tensors[at].1;
                state.taken = at + 1;
                self.changed.notify_all();
                return Some(read);
            }
            if state.stopping {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn read(&self) {
        let _panics = StopOnPanic(self);
        while let Some((at, name, len)) = self.claim() {
            let mut bytes = Bytes::zeroed(len);
            let read = self.source.read(name, 0, &mut bytes).map(|()| bytes);
            let mut state = self.state.lock();
            if at < state.taken {
                state.bytes -= len
            } else {
                drop(state.ready.insert(at, read))
            }
            self.changed.notify_all();
        }
    }

    /// The next tensor to read, as soon as there is room for it.
    fn claim(&self) -> Option<(usize, &'a str, usize)> {
        let mut state = self.state.lock();
        loop {
            state.next = state.next.max(state.taken);
            let (at, (name, len)) = (state.next, *self.tensors.get(state.next)?);
            if state.stopping {
                return None;
            }
            if state.bytes == 0 || state.bytes + len <= AHEAD_BYTES {
                (state.next, state.bytes) = (at + 1, state.bytes + len);
                return Some((at, name, len));
            }
            self.changed.wait(&mut state);
        }
    }
}

impl State {
    /// A tensor will not be taken. If it is being read, the thread that reads it sees so.
    fn forget(&mut self, at: usize, bytes: usize) {
        if self.ready.remove(&at).is_some() {
            self.bytes -= bytes;
        }
    }
}

/// Lets requests read by themselves if the thread that has it panics, so that none waits for what it was reading.
struct StopOnPanic<'q, 'a>(&'q ReadAhead<'a>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.state.lock().stopping = true;
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Reading<'_, '_> {
    fn drop(&mut self) {
        self.0.state.lock().stopping = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use larder_core::{NumberFormat, TensorMeta};

    use super::*;

    /// Tensors whose bytes are their number; some cannot be read.
    struct Numbered {
        metas: BTreeMap<String, TensorMeta>,
        unreadable: &'static str,
        /// Reads that have begun.
        reads: AtomicUsize,
    }

    impl Tensors for Numbered {
        fn meta(&self, name: &str) -> Option<&TensorMeta> {
            self.metas.get(name)
        }

        fn read(&self, name: &str, _: usize, into: &mut [u8]) -> Result<(), TensorsError> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if name == self.unreadable {
                return Err(TensorsError(format!("{name} is on a bad sector")));
            }
            into.fill(name.parse().unwrap());
            Ok(())
        }
    }

    fn numbered(floats: &[usize]) -> (Numbered, Vec<TensorSpec>) {
        let meta = |floats: usize| TensorMeta::new(NumberFormat::F32, vec![floats]).unwrap();
        let metas = floats.iter().enumerate().map(|(i, floats)| (i.to_string(), meta(*floats))).collect();
        let spec = |(i, floats): (usize, &usize)| TensorSpec::new(i.to_string(), &[*floats], true);
        let specs = floats.iter().enumerate().map(spec).collect();
        (Numbered { metas, unreadable: "none", reads: AtomicUsize::new(0) }, specs)
    }

    #[test]
    fn tensors_are_handed_over_in_order_each_with_its_bytes() {
        // The second is alone larger than what may be read ahead.
        let floats: Vec<usize> = [5, AHEAD_BYTES / 4 + 1].into_iter().chain((0..200).map(|i| i * 37)).collect();
        let (source, specs) = numbered(&floats);
        let ahead = ReadAhead::new(&source, &specs);
        thread::scope(|scope| {
            let _reading = ahead.begin(scope);
            for (i, floats) in floats.iter().enumerate() {
                let bytes = ahead.take(&i.to_string()).unwrap().unwrap();
                assert!(bytes.len() == 4 * floats && bytes.iter().all(|b| *b == i as u8), "{i}");
            }
            assert!(ahead.take("0").is_none(), "each is taken once");
        });
        assert_eq!(source.reads.load(Ordering::Relaxed), floats.len(), "each is read once");
    }

    #[test]
    fn requests_may_leave_tensors_out_and_end_early() {
        let quarter = AHEAD_BYTES / 16;
        let (source, specs) = numbered(&[quarter; 60]);
        let ahead = ReadAhead::new(&source, &specs);
        thread::scope(|scope| {
            let _reading = ahead.begin(scope);
            for i in [0, 1, 9, 10, 31] {
                assert_eq!(ahead.take(&i.to_string()).unwrap().unwrap()[0], i);
            }
            assert!(ahead.take("9").is_none() && ahead.take("unknown").is_none());
        });
        let most = 32 + AHEAD_BYTES / (4 * quarter) + THREADS;
        assert!(source.reads.load(Ordering::Relaxed) <= most, "no more than {AHEAD_BYTES} bytes are read ahead");
        assert!(ahead.state.lock().bytes <= AHEAD_BYTES);
    }

    #[test]
    fn an_error_is_that_of_the_tensor_requested() {
        let (source, specs) = numbered(&[10; 5]);
        let source = Numbered { unreadable: "3", ..source };
        let ahead = ReadAhead::new(&source, &specs);
        thread::scope(|scope| {
            let _reading = ahead.begin(scope);
            assert!(ahead.take("2").unwrap().is_ok());
            let error = ahead.take("3").unwrap().map(|_| ()).unwrap_err();
            assert_eq!(error.to_string(), "3 is on a bad sector");
        });
    }

    #[test]
    fn no_request_waits_for_a_thread_that_panicked() {
        let (mut source, mut specs) = numbered(&[10; 5]);
        // Its name is no number.
        source.metas.insert("broken".into(), source.metas["0"].clone());
        specs[2].name = "broken".into();
        let ahead = ReadAhead::new(&source, &specs);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            thread::scope(|scope| {
                let _reading = ahead.begin(scope);
                assert!(ahead.take("broken").is_none());
            });
        }));
        assert!(outcome.is_err(), "the panic is not hidden");
    }

    #[test]
    fn tensors_of_another_shape_are_left_to_the_request() {
        let (source, mut specs) = numbered(&[10, 20]);
        specs[1].shape = vec![21];
        let ahead = ReadAhead::new(&source, &specs);
        thread::scope(|scope| {
            let _reading = ahead.begin(scope);
            assert!(ahead.take("0").unwrap().is_ok());
            assert!(ahead.take("1").is_none());
        });
    }
}
