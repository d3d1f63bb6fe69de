//! `larder doctor`: what the machine has, and what could be mended.

mod disk;
mod power;
mod processor;
mod ram;

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cli::machine::Doctor;
use crate::print;

/// The shape of the JSON, which changes only with this name.
const FORMAT: &str = "larder-doctor-1";

/// One thing that was looked at.
struct Finding {
    /// What it is, for programs.
    id: &'static str,
    /// What was found, for people.
    found: String,
    /// The same in numbers.
    numbers: Value,
    /// What is to be mended, if anything is.
    ail: Option<Ail>,
}

/// Something that could be better.
struct Ail {
    means: String,
    mend: String,
}

impl Finding {
    fn good(id: &'static str, found: impl Into<String>, numbers: Value) -> Self {
        Finding { id, found: found.into(), numbers, ail: None }
    }

    /// With what it means and what mends it, where `bad`.
    fn unless(mut self, bad: bool, means: impl Into<String>, mend: impl Into<String>) -> Self {
        if bad {
            self.ail = Some(Ail { means: means.into(), mend: mend.into() });
        }
        self
    }

    fn json(&self) -> Value {
        let (means, mend) = self.ail.as_ref().map(|ail| (&ail.means, &ail.mend)).unzip();
        let state = if self.ail.is_some() { "mend" } else { "good" };
        json!({
            "id": self.id, "state": state, "found": self.found, "means": means, "mend": mend, "numbers": self.numbers,
        })
    }
}

/// Looks at everything; the disk is that of `model`.
fn look(model: Option<&Path>) -> Result<Vec<Finding>> {
    let mut findings = processor::look();
    findings.extend(ram::look());
    findings.extend(disk::look(model)?);
    findings.extend(power::look());
    Ok(findings)
}

/// What everything is, and what was found.
pub fn facts(model: Option<&Path>) -> Result<Vec<(String, String)>> {
    Ok(look(model)?.into_iter().map(|finding| (finding.id.to_owned(), finding.found)).collect())
}

/// Says what was found and what could be mended.
pub fn run(args: &Doctor) -> Result<()> {
    let findings = look(args.model.as_deref())?;
    if args.json {
        let all: Vec<Value> = findings.iter().map(Finding::json).collect();
        println!("{}", json!({"format": FORMAT, "findings": all}));
        return Ok(());
    }
    let mark = |finding: &Finding| if finding.ail.is_some() { "!" } else { "" };
    let row = |finding: &Finding| vec![finding.id.to_owned(), mark(finding).to_owned(), finding.found.clone()];
    print!("{}", print::columns(&findings.iter().map(row).collect::<Vec<_>>()));
    for (finding, ail) in findings.iter().filter_map(|f| Some((f, f.ail.as_ref()?))) {
        println!("\n{}: {}\n  {}", finding.id, ail.means, ail.mend);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_bad_has_advice() {
        let finding = || Finding::good("x", "1 of 2", json!({"n": 1}));
        let good = finding().unless(false, "slow", "do it").json();
        assert_eq!((&good["state"], &good["means"], &good["mend"]), (&json!("good"), &Value::Null, &Value::Null));
        let bad = finding().unless(true, "slow", "do it").json();
        assert_eq!((&bad["state"], &bad["mend"], &bad["numbers"]["n"]), (&json!("mend"), &json!("do it"), &json!(1)));
    }
}
