//! What a conversation took.

use super::reply::Reply;
use crate::telemetry::Totals;
use crate::{memory, print};

/// The sums over all answers.
#[derive(Default)]
pub struct ChatStats {
    answers: usize,
    reused: usize,
    prompt: Totals,
    written: Totals,
    last: (usize, usize, usize),
}

impl ChatStats {
    /// One more.
    pub fn add(&mut self, answer: &Reply) {
        self.answers += 1;
        self.reused += answer.reused;
        for (sum, new) in [(&mut self.prompt, &answer.prompt), (&mut self.written, &answer.written)] {
            sum.tokens += new.tokens;
            sum.time += new.time;
            sum.traffic = sum.traffic + new.traffic;
        }
        self.last = (answer.reused, answer.prompt.tokens, answer.written.tokens);
    }

    /// For a table.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let line = |(reused, read, written)| format!("{reused} tokens remembered, {read} read, {written} written");
        let row = |name: &str, text: String| vec![name.to_owned(), text];
        vec![
            row("answers", self.answers.to_string()),
            row("last answer", line(self.last)),
            row("all answers", line((self.reused, self.prompt.tokens, self.written.tokens))),
            row("speed", format!("{:.1} read/s, {:.1} written/s", self.prompt.rate(), self.written.rate())),
            row("memory", format!("{} at most", print::bytes(memory::peak().unwrap_or_default()))),
        ]
    }
}

/// A line about one answer.
pub fn footer(answer: &Reply, streaming: bool) -> String {
    let Reply { reused, prompt, written, .. } = answer;
    let found = match streaming {
        true => format!(", {:.0} % of experts found in memory", 100.0 * written.traffic.hit_rate()),
        false => String::new(),
    };
    format!(
        "{reused} tokens remembered, {} read at {:.1}/s, {} written at {:.1}/s{found}",
        prompt.tokens,
        prompt.rate(),
        written.tokens,
        written.rate(),
    )
}
