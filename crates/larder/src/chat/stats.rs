//! Statistics of a chat.

use larder_os::memory;

use super::reply::Reply;
use crate::print;
use crate::telemetry::Totals;

/// Sums over all answers.
#[derive(Default)]
pub struct ChatStats {
    answers: usize,
    reused: usize,
    prompt: Totals,
    written: Totals,
    last: (usize, usize, usize),
}

impl ChatStats {
    /// Adds an answer.
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

    /// The statistics as rows of a table.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let line = |(reused, read, written)| format!("{reused} tokens cached, {read} prefilled, {written} generated");
        let row = |name: &str, text: String| vec![name.to_owned(), text];
        vec![
            row("answers", self.answers.to_string()),
            row("last answer", line(self.last)),
            row("all answers", line((self.reused, self.prompt.tokens, self.written.tokens))),
            row("speed", format!("prefill {:.1}/s, decode {:.1}/s", self.prompt.rate(), self.written.rate())),
            row("memory", format!("{} peak", print::bytes(memory::peak().unwrap_or_default()))),
        ]
    }
}

/// The footer of one answer.
pub fn footer(answer: &Reply, streaming: bool) -> String {
    let Reply { reused, ttft, prompt, written, .. } = answer;
    let found =
        if streaming { format!(", {:.0} % cache hits", 100.0 * written.traffic.hit_rate()) } else { String::new() };
    format!(
        "TTFT {:.2} s, {reused} tokens cached, prefill {} tokens at {:.1}/s, decode {} tokens at {:.1}/s{found}",
        ttft.as_secs_f64(),
        prompt.tokens,
        prompt.rate(),
        written.tokens,
        written.rate(),
    )
}
