//! What a conversation took.

use super::talk::Answer;
use crate::telemetry::Totals;
use crate::{memory, print};

/// The sums over all answers.
#[derive(Default)]
pub struct Stats {
    answers: usize,
    kept: usize,
    prompt: Totals,
    written: Totals,
    last: (usize, usize, usize),
}

impl Stats {
    /// One more.
    pub fn add(&mut self, answer: &Answer) {
        self.answers += 1;
        self.kept += answer.kept;
        for (sum, new) in [(&mut self.prompt, &answer.prompt), (&mut self.written, &answer.written)] {
            sum.tokens += new.tokens;
            sum.time += new.time;
            sum.traffic = sum.traffic + new.traffic;
        }
        self.last = (answer.kept, answer.prompt.tokens, answer.written.tokens);
    }

    /// For a table.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let line = |(kept, read, written)| format!("{kept} tokens remembered, {read} read, {written} written");
        let row = |name: &str, text: String| vec![name.to_owned(), text];
        vec![
            row("answers", self.answers.to_string()),
            row("last answer", line(self.last)),
            row("all answers", line((self.kept, self.prompt.tokens, self.written.tokens))),
            row("speed", format!("{:.1} read/s, {:.1} written/s", self.prompt.rate(), self.written.rate())),
            row("memory", format!("{} at most", print::bytes(memory::peak().unwrap_or_default()))),
        ]
    }
}

/// A line about one answer.
pub fn footer(answer: &Answer, streams: bool) -> String {
    let Answer { kept, prompt, written, .. } = answer;
    let found = match streams {
        true => format!(", {:.0} % of experts found in memory", 100.0 * written.traffic.hit_rate()),
        false => String::new(),
    };
    format!(
        "{kept} tokens remembered, {} read at {:.1}/s, {} written at {:.1}/s{found}",
        prompt.tokens,
        prompt.rate(),
        written.tokens,
        written.rate(),
    )
}
