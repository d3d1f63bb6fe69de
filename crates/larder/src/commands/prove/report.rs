//! The result of each case: a line as soon as it is known, or all as JSON at the end.

use std::path::Path;

use anyhow::{Result, bail};
use larder_policy::routing::RoutingSpec;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::written::{FirstDifference, WrittenTexts};
use crate::print;

/// Columns of the names of cases.
const NAME_COLUMNS: usize = 46;

/// A case and its outcome.
#[derive(Debug, Serialize, Deserialize)]
pub struct CaseResult {
    pub name: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What a comparison found.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// This number of tokens and all of their logits have equal bits.
    Identical { tokens: usize },
    /// This number of tokens are equal before the first that is not.
    Differs { tokens: usize, difference: FirstDifference },
    /// There was nothing to compare.
    LeftOut { why: String },
}

impl Outcome {
    /// Of a comparison.
    pub fn of(expected: &WrittenTexts, found: &WrittenTexts) -> Self {
        match expected.difference(found) {
            None => Outcome::Identical { tokens: expected.tokens() },
            Some((difference, tokens)) => Outcome::Differs { tokens, difference },
        }
    }

    fn describe(&self) -> String {
        match self {
            Outcome::Identical { tokens } => format!("identical, {}", print::count(*tokens, "token", "tokens")),
            Outcome::Differs { tokens, difference } => {
                format!("DIFFERS after {}: {difference}", print::count(*tokens, "token", "tokens"))
            }
            Outcome::LeftOut { why } => format!("left out: {why}"),
        }
    }
}

/// The results so far.
pub struct ProofReport {
    json: bool,
    digest: String,
    results: Vec<CaseResult>,
}

impl ProofReport {
    /// Of cases whose texts are compared with those of this digest, which `first` describes.
    pub fn begin(first: &str, digest: String, json: bool) -> Self {
        if !json {
            println!("{first}; digest {digest}");
        }
        ProofReport { json, digest, results: Vec::new() }
    }

    /// Adds a result.
    pub fn add(&mut self, name: impl Into<String>, outcome: Outcome) {
        let name = name.into();
        if !self.json {
            println!("{name:<NAME_COLUMNS$}  {}", outcome.describe());
        }
        self.results.push(CaseResult { name, outcome });
    }

    /// Prints the verdict on a model under this strategy. Fails if a case differs.
    pub fn finish(self, model: &Path, routing: &RoutingSpec) -> Result<()> {
        let of = |wanted: fn(&Outcome) -> bool| self.results.iter().filter(|result| wanted(&result.outcome)).count();
        let equal = of(|outcome| matches!(outcome, Outcome::Identical { .. }));
        let unequal = of(|outcome| matches!(outcome, Outcome::Differs { .. }));
        if self.json {
            println!("{}", json!({"identical": unequal == 0, "digest": self.digest, "cases": self.results}));
        }
        let model = model.display();
        if unequal > 0 {
            let advice = if routing.is_lossless() {
                "check the model with `larder verify` and the memory of this machine".to_owned()
            } else {
                format!("{routing} may change the text: leave out --routing and --quality")
            };
            bail!("{model}: {unequal} of {} comparisons found other bits; {advice}", equal + unequal);
        }
        if !self.json {
            let left_out = self.results.len() - equal;
            let comparisons = print::count(equal, "comparison", "comparisons");
            println!("{model}: {comparisons}, every bit identical; {left_out} left out");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::written::DifferentLogit;
    use super::*;

    #[test]
    fn results_are_read_as_they_are_printed() {
        let logit = Some(DifferentLogit { id: 3, bits: [f32::NAN.to_bits(), 7] });
        let difference = FirstDifference { text: "greedy".into(), token: 1, ids: [2, 3], logit };
        for (outcome, said) in [
            (Outcome::Identical { tokens: 64 }, "identical, 64 tokens"),
            (
                Outcome::Differs { tokens: 1, difference },
                "DIFFERS after 1 token: greedy text, token 1: id 3, expected 2",
            ),
            (Outcome::LeftOut { why: "it is night".into() }, "left out: it is night"),
        ] {
            let printed = json!(CaseResult { name: "a".into(), outcome });
            let read: CaseResult = serde_json::from_value(printed.clone()).unwrap();
            assert!(read.outcome.describe().starts_with(said), "{printed}");
            assert_eq!(json!(read), printed);
        }
    }
}
