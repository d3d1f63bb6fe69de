//! A timeline of the process, for profiles: what each thread does, and which reads are in flight, as a file in Chrome's
//! trace event format, which Perfetto and `chrome://tracing` open.
//!
//! There is at most one timeline in a process. While none has begun, an event costs one load and one branch. Events are
//! gathered in memory and written some hundred at a time, always whole ones: a process that is killed leaves a file
//! that can be opened.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Bytes of events that are gathered before they are written.
const GATHERED_BYTES: usize = 64 << 10;

/// The beginning of a file. Each event after it begins with the comma that separates it from the one before, so that
/// the file holds whole events at any time.
const OPENING: &[u8] = br#"[
{"ph":"M","name":"process_name","pid":1,"args":{"name":"larder"}}"#;
/// What an event begins with.
const SEPARATOR: &str = ",\n";

static IS_ON: AtomicBool = AtomicBool::new(false);
static TIMELINE: Mutex<Option<Timeline>> = Mutex::new(None);
static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The number of this thread, and the timeline that knows its name.
    static THREAD: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Numbers of an event, by name.
pub type EventArgs<'a> = &'a [(&'static str, u64)];

struct Timeline {
    file: File,
    path: PathBuf,
    /// The start of the timeline.
    start: Instant,
    /// Bytes that the file may have.
    limit: u64,
    written: u64,
    events: Vec<u8>,
    /// Differs between the timelines of a process.
    generation: u64,
    ended: Option<String>,
}

/// Begins the timeline of this process. The file is complete when the [`TimelineGuard`] is dropped.
///
/// # Errors
///
/// If a timeline has begun already, or if the file cannot be written.
pub fn begin(file: File, path: &Path, limit: u64) -> std::io::Result<TimelineGuard> {
    static GENERATION: AtomicU64 = AtomicU64::new(1);
    let mut timeline = TIMELINE.lock();
    if timeline.is_some() {
        return Err(std::io::Error::other("a timeline of this process is being written already"));
    }
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut begun = Timeline {
        file,
        path: path.to_owned(),
        start: Instant::now(),
        limit,
        written: 0,
        events: OPENING.to_vec(),
        generation,
        ended: None,
    };
    begun.write()?;
    *timeline = Some(begun);
    IS_ON.store(true, Ordering::Release);
    Ok(TimelineGuard(()))
}

/// Whether a timeline is being written.
#[inline]
pub fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// The timeline of the process while it is being written; dropped, it completes the file.
pub struct TimelineGuard(());

impl TimelineGuard {
    /// Completes the file. Returns why it ends before the process does, if so.
    pub fn finish(self) -> Option<String> {
        end()
    }
}

impl Drop for TimelineGuard {
    fn drop(&mut self) {
        end();
    }
}

fn end() -> Option<String> {
    IS_ON.store(false, Ordering::Release);
    let mut timeline = TIMELINE.lock().take()?;
    if timeline.ended.is_none() {
        timeline.events.extend_from_slice(b"\n]\n");
        if let Err(error) = timeline.write() {
            timeline.ended = Some(format!("{} cannot be written: {error}", timeline.path.display()));
        }
    }
    timeline.ended
}

/// Something that a thread does from now until this is dropped.
#[must_use = "an event ends when its span is dropped"]
pub struct TimelineSpan<const N: usize> {
    name: &'static str,
    start: Option<Instant>,
    args: [(&'static str, u64); N],
}

/// Begins an event of this thread.
#[inline]
pub fn span<const N: usize>(name: &'static str, args: [(&'static str, u64); N]) -> TimelineSpan<N> {
    TimelineSpan { name, start: is_on().then(Instant::now), args }
}

impl<const N: usize> Drop for TimelineSpan<N> {
    fn drop(&mut self) {
        if let Some(start) = self.start {
            complete(self.name, start, Instant::now(), &self.args);
        }
    }
}

/// Something that this thread did from `start` to `end`.
pub fn complete(name: &str, start: Instant, end: Instant, args: EventArgs) {
    event(|timeline, thread, into| {
        let (at, took) = (timeline.micros(start), micros(end.saturating_duration_since(start)));
        write!(into, r#"{SEPARATOR}{{"ph":"X","name":"{name}","pid":1,"tid":{thread},"ts":{at:.3},"dur":{took:.3}"#)?;
        write_args(into, args)
    });
}

/// Something in flight beside the threads begins; [`end_flight`] with the same name and id ends it.
pub fn begin_flight(name: &str, id: u64, args: EventArgs) {
    flight('b', name, id, args);
}

/// Something in flight has ended.
pub fn end_flight(name: &str, id: u64, args: EventArgs) {
    flight('e', name, id, args);
}

fn flight(phase: char, name: &str, id: u64, args: EventArgs) {
    event(|timeline, thread, into| {
        let at = timeline.micros(Instant::now());
        write!(
            into,
            r#"{SEPARATOR}{{"ph":"{phase}","cat":"SSD","name":"{name}","id":{id},"pid":1,"tid":{thread},"ts":{at:.3}"#
        )?;
        write_args(into, args)
    });
}

/// The values of a counter from now on.
pub fn counter(name: &str, values: EventArgs) {
    event(|timeline, thread, into| {
        let at = timeline.micros(Instant::now());
        write!(into, r#"{SEPARATOR}{{"ph":"C","name":"{name}","pid":1,"tid":{thread},"ts":{at:.3}"#)?;
        write_args(into, values)
    });
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn write_args(into: &mut Vec<u8>, args: EventArgs) -> std::io::Result<()> {
    into.extend_from_slice(br#","args":{"#);
    for (i, (name, value)) in args.iter().enumerate() {
        write!(into, r#"{}"{name}":{value}"#, if i == 0 { "" } else { "," })?;
    }
    into.extend_from_slice(b"}}");
    Ok(())
}

/// Adds an event, which `describe` writes, if a timeline is being written.
fn event(describe: impl FnOnce(&Timeline, u64, &mut Vec<u8>) -> std::io::Result<()>) {
    if !is_on() {
        return;
    }
    let mut timeline = TIMELINE.lock();
    let Some(timeline) = timeline.as_mut().filter(|timeline| timeline.ended.is_none()) else { return };
    let mut events = std::mem::take(&mut timeline.events);
    let thread = timeline.thread(&mut events);
    // Writing into memory does not fail.
    let _ = describe(timeline, thread, &mut events);
    timeline.events = events;
    if timeline.events.len() < GATHERED_BYTES {
        return;
    }
    if let Err(error) = timeline.write() {
        timeline.stop(format!("{} cannot be written: {error}", timeline.path.display()));
    } else if timeline.written >= timeline.limit {
        timeline.stop(format!("{} has reached its limit of {} bytes", timeline.path.display(), timeline.limit));
    }
}

impl Timeline {
    /// Microseconds from the start of the timeline to `at`.
    fn micros(&self, at: Instant) -> f64 {
        micros(at.saturating_duration_since(self.start))
    }

    /// The number of this thread; its first event is preceded by its name.
    fn thread(&self, into: &mut Vec<u8>) -> u64 {
        let (mut number, generation) = THREAD.get();
        if generation != self.generation {
            number = if number == 0 { NEXT_THREAD.fetch_add(1, Ordering::Relaxed) } else { number };
            THREAD.set((number, self.generation));
            let thread = std::thread::current();
            let name: String = thread.name().unwrap_or("unnamed").chars().filter(|c| is_plain(*c)).collect();
            let _ = write!(
                into,
                r#"{SEPARATOR}{{"ph":"M","name":"thread_name","pid":1,"tid":{number},"args":{{"name":"{name}"}}}}"#
            );
        }
        number
    }

    fn write(&mut self) -> std::io::Result<()> {
        self.file.write_all(&self.events)?;
        self.written += self.events.len() as u64;
        self.events.clear();
        Ok(())
    }

    fn stop(&mut self, why: String) {
        IS_ON.store(false, Ordering::Release);
        self.ended = Some(why);
        self.events = Vec::new();
    }
}

/// Whether a character needs no escape in JSON.
fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || " -_.:".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since a process has one timeline.
    #[test]
    fn events_are_whole_and_the_file_is_bounded() {
        let dir = std::env::temp_dir().join(format!("larder-timeline-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("profile.json");
        let begin_with = |limit| begin(File::create(&path).unwrap(), &path, limit).unwrap();
        complete("before", Instant::now(), Instant::now(), &[]);

        let guard = begin_with(u64::MAX);
        assert!(begin(File::create(dir.join("other")).unwrap(), &path, 1).is_err());
        {
            let _outer = span("outer", [("layer", 3)]);
            let _inner = span("inner", []);
            begin_flight("read", 7, &[("bytes", 4096)]);
            counter("cache", &[("hits", 1), ("misses", 2)]);
        }
        std::thread::Builder::new()
            .name("a \"b\"\n".into())
            .spawn(|| end_flight("read", 7, &[]))
            .unwrap()
            .join()
            .unwrap();
        assert_eq!(guard.finish(), None);
        let text = std::fs::read_to_string(&path).unwrap();
        for part in [
            r#""ph":"X","name":"outer""#,
            r#""args":{"layer":3}"#,
            r#""ph":"b","cat":"SSD","name":"read","id":7"#,
            r#""args":{"hits":1,"misses":2}"#,
            r#""args":{"name":"a b"}"#,
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(text.starts_with("[\n{") && text.ends_with("}}\n]\n") && !text.contains("before"), "{text}");
        let at = |name: &str| text.find(name).unwrap();
        assert!(at("\"inner\"") < at("\"outer\""), "an inner event ends first");

        let guard = begin_with(1 << 20);
        let start = Instant::now();
        (0..100_000).for_each(|i| complete("step", start, start, &[("number", i)]));
        assert!(!is_on());
        let why = guard.finish().expect("it was ended");
        assert!(why.contains("has reached its limit of 1048576 bytes"), "{why}");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() < (1 << 20) + GATHERED_BYTES + 1024 && text.ends_with("}}"), "{}", text.len());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
