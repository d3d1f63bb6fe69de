//! Statistics of a chat.

use larder_os::memory;

use super::reply::Reply;
use crate::print;
use crate::run_report::RunReport;
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
        let RunReport { prompt, decode, took, .. } = &answer.report;
        for ((sum, new), took) in [(&mut self.prompt, prompt), (&mut self.written, decode)].into_iter().zip(took) {
            sum.tokens += new.tokens;
            sum.time += *took;
            sum.traffic = sum.traffic + new.traffic;
        }
        self.last = (answer.reused, prompt.tokens, decode.tokens);
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
pub fn footer(Reply { reused, ttft, report, .. }: &Reply) -> String {
    format!("TTFT {:.2} s, {reused} tokens cached, {report}", ttft.as_secs_f64())
}
