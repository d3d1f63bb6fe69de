//! Progress of long work: a bar on a terminal, plain lines elsewhere, nothing for work that ends soon. Of a prompt, a
//! line on a terminal alone.

use std::collections::VecDeque;
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

/// Nothing is said of a prompt before this time.
const LONG_PROMPT: Duration = Duration::from_secs(2);

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
    let bar = on_terminal(Some(total), style);
    bar.set_message(what.to_owned());
    bar
}

/// A line on standard error that is overwritten in place.
fn on_terminal(total: Option<u64>, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(8)).with_style(style)
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

/// The progress of a prompt: a line on a terminal once its prefill has taken long, which is erased at its end.
pub struct PromptLine {
    total: usize,
    start: Instant,
    rate: RecentRate,
    is_terminal: bool,
    line: Option<ProgressBar>,
}

impl PromptLine {
    /// For a prompt of `total` tokens that begins to be computed now, of which `done` are in the KV cache already.
    pub fn begin(total: usize, done: usize) -> Self {
        let (start, is_terminal) = (Instant::now(), std::io::stderr().is_terminal());
        let mut rate = RecentRate::default();
        rate.add(Duration::ZERO, done);
        PromptLine { total, start, rate, is_terminal, line: None }
    }

    /// Shows that `done` tokens are in the KV cache.
    pub fn reached(&mut self, done: usize) {
        let passed = self.start.elapsed();
        self.rate.add(passed, done);
        if self.is_terminal && passed >= LONG_PROMPT {
            let line = self.line.get_or_insert_with(|| on_terminal(None, "{wide_msg}"));
            line.set_message(prompt_text(done, self.total, self.rate.per_second()));
        }
    }

    /// Erases the line.
    pub fn finish(&mut self) {
        self.line.take().into_iter().for_each(|line| line.finish_and_clear());
    }
}

/// How much of a prompt is done, and how long the rest takes at the rate of tokens per second, once that is known.
fn prompt_text(done: usize, total: usize, rate: Option<f64>) -> String {
    let text = format!("prefill: {done} of {total} tokens");
    let Some(rate) = rate else { return text };
    let left = Duration::from_secs_f64(total.saturating_sub(done) as f64 / rate);
    format!("{text}, {rate:.1} tokens/s, {} left", print::time(left))
}

/// The rate of the newer half of the time: later tokens of a prompt have more to attend to than the first.
#[derive(Default)]
struct RecentRate {
    /// The time that had passed, and what was done by then.
    marks: VecDeque<(Duration, usize)>,
}

impl RecentRate {
    fn add(&mut self, passed: Duration, done: usize) {
        self.marks.push_back((passed, done));
        while self.marks.get(1).is_some_and(|(time, _)| *time <= passed / 2) {
            self.marks.pop_front();
        }
    }

    fn per_second(&self) -> Option<f64> {
        let ((from, before), (to, now)) = (self.marks.front()?, self.marks.back()?);
        let done = now.checked_sub(*before).filter(|done| *done > 0)?;
        Some(done as f64 / (*to - *from).as_secs_f64().max(1e-9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_says_what_is_done_and_how_long_the_rest_takes() {
        assert_eq!(prompt_text(0, 8192, None), "prefill: 0 of 8192 tokens");
        let text = "prefill: 1024 of 8192 tokens, 35.1 tokens/s, 3 min 25 s left";
        assert_eq!(prompt_text(1024, 8192, Some(35.06)), text);
        assert_eq!(prompt_text(8, 8, Some(4.0)), "prefill: 8 of 8 tokens, 4.0 tokens/s, 0 s left");
    }

    #[test]
    fn the_rate_is_that_of_the_newer_half() {
        let seconds = Duration::from_secs;
        let mut rate = RecentRate::default();
        rate.add(seconds(0), 100);
        assert_eq!(rate.per_second(), None);
        rate.add(seconds(1), 100);
        assert_eq!(rate.per_second(), None, "nothing was done");
        // A hundred tokens in each of four seconds, then ten.
        (2..=5).for_each(|i| rate.add(seconds(i), 100 * i as usize));
        assert_eq!(rate.per_second(), Some(100.0));
        (6..=10).for_each(|i| rate.add(seconds(i), 500 + 10 * (i as usize - 5)));
        assert_eq!(rate.per_second(), Some(10.0));
        assert!(rate.marks.len() <= 6);
    }

    #[test]
    fn a_prompt_that_is_not_on_a_terminal_says_nothing() {
        let mut line = PromptLine { is_terminal: false, ..PromptLine::begin(100, 0) };
        line.start = line.start.checked_sub(LONG_PROMPT).unwrap();
        line.reached(50);
        assert!(line.line.is_none());
        line.finish();
    }
}
