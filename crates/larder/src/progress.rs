//! Progress of long work: a bar on a terminal, plain lines elsewhere, nothing for work that ends soon.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use larder_core::printable;
use parking_lot::Mutex;

use crate::print;

/// No line is printed before this time.
const QUIET_TIME: Duration = Duration::from_millis(1500);
/// Time between two plain lines.
const PLAIN_EVERY: Duration = Duration::from_secs(10);

/// The progress of some work.
pub struct Bar {
    what: String,
    unit: Unit,
    total: u64,
    start: Instant,
    kind: BarKind,
}

/// The unit of the progress.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Items(&'static str),
}

impl Unit {
    /// A number whose unit follows with the total.
    fn without_unit(self, n: u64) -> String {
        match self {
            Unit::Items(_) if n < 1_000_000 => n.to_string(),
            _ => self.with_unit(n),
        }
    }

    fn with_unit(self, n: u64) -> String {
        match self {
            Unit::Bytes => print::bytes(n),
            Unit::Items(what) if n < 1_000_000 => format!("{n} {what}"),
            Unit::Items(what) => format!("{:.1} million {what}", n as f64 / 1e6),
        }
    }
}

enum BarKind {
    Terminal(ProgressBar),
    Plain(Mutex<PlainLines>),
}

struct PlainLines {
    done: u64,
    next: Duration,
}

/// A bar on standard error for `total` bytes of `what`.
pub fn bar(what: &str, total: u64) -> Bar {
    begin(what, Unit::Bytes, total)
}

/// A bar on standard error for `total` items of `what`.
pub fn count(what: &str, items: &'static str, total: u64) -> Bar {
    begin(what, Unit::Items(items), total)
}

fn begin(what: &str, unit: Unit, total: u64) -> Bar {
    // The name of a file on the hub, for example.
    let what = printable(what);
    let kind = if std::io::stderr().is_terminal() {
        BarKind::Terminal(terminal(&what, unit, total))
    } else {
        BarKind::Plain(Mutex::new(PlainLines { done: 0, next: QUIET_TIME }))
    };
    Bar { what, unit, total, start: Instant::now(), kind }
}

fn terminal(what: &str, unit: Unit, total: u64) -> ProgressBar {
    let style = match unit {
        Unit::Bytes => "{msg} {wide_bar:.cyan/dim} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
        Unit::Items(_) => "{msg} {wide_bar:.cyan/dim} {percent} % {per_sec} {eta}",
    };
    let style = ProgressStyle::with_template(style).expect("the template is valid");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(8));
    bar.set_style(style);
    bar.set_message(what.to_owned());
    bar
}

impl Bar {
    /// Adds `amount` to what is done.
    pub fn advance(&self, amount: u64) {
        match &self.kind {
            BarKind::Terminal(bar) => bar.inc(amount),
            BarKind::Plain(plain) => {
                let mut plain = plain.lock();
                plain.done += amount;
                let passed = self.start.elapsed();
                if passed >= plain.next {
                    plain.next = passed + PLAIN_EVERY;
                    let rate = self.unit.with_unit((plain.done as f64 / passed.as_secs_f64()) as u64);
                    let (done, total) = (self.unit.without_unit(plain.done), self.unit.with_unit(self.total));
                    eprintln!("{}: {done} of {total}, {rate}/s", self.what);
                }
            }
        }
    }

    /// Starts at `amount`, for continued work.
    pub fn resume(&self, amount: u64) {
        match &self.kind {
            BarKind::Terminal(bar) => bar.set_position(amount),
            BarKind::Plain(plain) => plain.lock().done = amount,
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let BarKind::Terminal(bar) = &self.kind {
            bar.finish_and_clear();
        }
    }
}

/// A bar for converting or verifying a store; its length is known when the work begins.
pub struct StoreProgress {
    what: &'static str,
    bar: OnceLock<Bar>,
}

impl StoreProgress {
    /// A bar for `what`, shown when the work begins.
    pub fn new(what: &'static str) -> Self {
        StoreProgress { what, bar: OnceLock::new() }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.get().into_iter().for_each(Bar::finish);
    }
}

impl larder_store::Progress for StoreProgress {
    fn begin(&self, bytes: u64) {
        self.bar.get_or_init(|| bar(self.what, bytes));
    }

    fn advance(&self, bytes: u64) {
        self.bar.get().into_iter().for_each(|bar| bar.advance(bytes));
    }
}
