//! What a prompt and its answer took, as `run`, `bench` and `chat` report it: as JSON and as a line.

use std::fmt;
use std::time::Duration;

use larder_engine::{AheadCounts, DraftCounts, Generated};
use larder_model::RowTraffic;
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::print;
use crate::telemetry::Totals;

/// The prefill of a prompt and the decode of its answer.
#[derive(Clone, Default)]
pub struct RunReport {
    /// The steps of the prompt.
    pub prompt: Totals,
    /// The steps of the answer.
    pub decode: Totals,
    /// Tokens of the answer, of which the last one is not computed.
    pub written: usize,
    /// How long prompt and answer took, with all that is done between steps.
    pub took: [Duration; 2],
    /// Tokens that were drafted.
    pub drafts: DraftCounts,
    /// Steps that were begun before their token was known.
    pub ahead: AheadCounts,
    /// Rows of tables of n-grams, if the model has such tables.
    pub ngram_rows: Option<RowTraffic>,
    /// Whether experts pass through a cache.
    pub streaming: bool,
}

impl RunReport {
    /// The report of a text that was generated in these steps.
    pub fn of(made: &Generated, [prompt, decode]: [Totals; 2], streaming: bool) -> Self {
        let (written, took) = (made.ids.len(), [made.prefill_time, made.decode_time]);
        let (drafts, ahead) = (made.drafts, made.ahead);
        RunReport { prompt, decode, written, took, drafts, ahead, ngram_rows: None, streaming }
    }
}

impl Serialize for RunReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let DraftCounts { steps, drafted, accepted } = self.drafts;
        let json = json!({
            "prompt": self.prompt.json(self.streaming),
            "decode": self.decode.json(self.streaming),
            "speculation": {"steps": steps, "drafted": drafted, "accepted": accepted},
            "ahead": {"steps": self.ahead.steps, "dropped": self.ahead.dropped},
            "ngram_rows": self.ngram_rows.map(print::ngram_rows_json),
        });
        json.serialize(serializer)
    }
}

/// One line; `{:#}` with what was read and how long that was waited for.
impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let RunReport { prompt, decode, written, took: [prefill_time, decode_time], .. } = self;
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        write!(f, "prefill {} tokens at {:.1}/s, ", prompt.tokens, rate(prompt.tokens, *prefill_time))?;
        write!(f, "decode {written} tokens at {:.1}/s", rate(*written, *decode_time))?;
        if self.drafts.drafted > 0 {
            write!(f, ", {} of {} drafts accepted", self.drafts.accepted, self.drafts.drafted)?;
        }
        match (self.streaming, f.alternate()) {
            (true, true) => write!(f, ", {}", reads(decode)),
            (true, false) => write!(f, ", {:.0} % cache hits", 100.0 * decode.traffic.hit_rate()),
            (false, true) => f.write_str(", all experts in memory"),
            (false, false) => Ok(()),
        }
    }
}

/// Hits, bytes and waiting of an answer.
fn reads(decode: &Totals) -> String {
    let Totals { tokens, time, traffic, .. } = decode;
    let tokens = (*tokens).max(1);
    let per_token = |bytes: u64| print::bytes(bytes / tokens as u64);
    let waited = 100.0 * traffic.waited.as_secs_f64() / time.as_secs_f64().max(1e-9);
    let (read, waiting) = (per_token(traffic.bytes()), format!("{waited:.0} % of the time waiting"));
    let Some(tiers) = traffic.tiers else {
        let counted = |reads: u64, what: &str| match reads {
            0 => String::new(),
            reads => format!(" ({:.1} {what})", reads as f64 / tokens as f64),
        };
        let small = counted(traffic.small_reads, "smaller copies");
        let certain = counted(traffic.reads_ahead.certain, "experts ahead, known to be wanted");
        let hits = 100.0 * traffic.hit_rate();
        return format!("{hits:.0} % cache hits, {read} read per token{small}{certain}, {waiting} for reads");
    };
    let share = |n: u64, of: u64| 100.0 * n as f64 / of.max(1) as f64;
    let (counts, wanted) = (tiers.counts, tiers.counts.wanted());
    format!(
        "{:.0} % hits in VRAM and {:.0} % in memory, {:.0} % computed on the GPU, {read} read and {} copied to the GPU \
         per token, {waiting}",
        share(counts.device_hits, wanted),
        share(counts.host_hits, wanted),
        share(tiers.on_device, tiers.on_device + tiers.on_host),
        per_token(tiers.to_device_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_line_and_an_object() {
        let prompt = Totals { tokens: 8, ..Totals::default() };
        let took = [Duration::from_secs(2), Duration::from_secs(4)];
        let drafts = DraftCounts { steps: 1, drafted: 3, accepted: 2 };
        let report = RunReport { prompt, written: 6, took, drafts, ..RunReport::default() };
        let line = "prefill 8 tokens at 4.0/s, decode 6 tokens at 1.5/s, 2 of 3 drafts accepted";
        assert_eq!(report.to_string(), line);
        assert_eq!(format!("{report:#}"), format!("{line}, all experts in memory"));
        let streaming = RunReport { streaming: true, ..report };
        assert!(format!("{streaming:#}").ends_with("read per token, 0 % of the time waiting for reads"));
        let json = serde_json::to_value(&streaming).unwrap();
        assert_eq!((&json["speculation"]["drafted"], &json["prompt"]["tokens"]), (&json!(3), &json!(8)));
        assert!(json["decode"]["cache"]["hits"].is_number() && json["ngram_rows"].is_null());
    }
}
