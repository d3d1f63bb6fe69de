//! `larder doctor`: checks the machine and suggests improvements.

mod disk;
mod drive;
mod gpu;
mod kernels;
mod peaks;
mod power;
mod processor;
mod ram;
mod sysfs;

use std::path::Path;

use anyhow::Result;
use larder_kernels::instruction_set;
use larder_lab::Fact;
use serde_json::{Value, json};

use crate::cli::machine::DoctorArgs;
use crate::print;

/// Version of the JSON format.
const FORMAT: &str = "larder-doctor-1";

/// The result of one check.
struct Finding {
    /// Name of the check.
    id: &'static str,
    /// The result, as text.
    found: String,
    /// The result, as JSON.
    numbers: Value,
    /// What could be improved, if anything.
    advice: Option<Advice>,
}

/// What a finding means, and how to improve it.
struct Advice {
    means: String,
    fix: String,
}

impl Finding {
    fn new(id: &'static str, found: impl Into<String>, numbers: Value) -> Self {
        Finding { id, found: found.into(), numbers, advice: None }
    }

    /// Adds advice if `bad`: what the finding means and how to fix it.
    fn advise_if(mut self, bad: bool, means: impl Into<String>, fix: impl Into<String>) -> Self {
        if bad {
            self.advice = Some(Advice { means: means.into(), fix: fix.into() });
        }
        self
    }

    fn json(&self) -> Value {
        let (means, fix) = self.advice.as_ref().map(|advice| (&advice.means, &advice.fix)).unzip();
        let state = if self.advice.is_some() { "mend" } else { "good" };
        json!({
            "id": self.id, "state": state, "found": self.found, "means": means, "mend": fix, "numbers": self.numbers,
        })
    }
}

/// Runs all checks; the SSD is that of `model`.
fn check(model: Option<&Path>) -> Result<Vec<Finding>> {
    let mut findings = processor::check();
    findings.push(kernels::check());
    findings.extend(ram::check()?);
    findings.extend(disk::check(model)?);
    findings.extend(gpu::check());
    findings.extend(power::check());
    Ok(findings)
}

/// The name and the result of each check.
pub fn summary(model: Option<&Path>) -> Result<Vec<Fact>> {
    Ok(check(model)?.into_iter().map(|finding| Fact::new(finding.id, finding.found)).collect())
}

/// Processor, memory, and the drive of a path, as far as the system names them, without measuring anything.
pub fn machine(path: Option<&Path>) -> Vec<Fact> {
    let processor = processor::name().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let mut all = vec![Fact::new("Processor", format!("{processor}, {} kernels", instruction_set()))];
    all.extend(ram::total().map(|memory| Fact::new("Memory", memory)));
    all.extend(path.and_then(drive::name).map(|drive| Fact::new("Drive", drive)));
    all
}

/// Prints all findings and the advice, or the peaks.
pub fn run(args: &DoctorArgs) -> Result<()> {
    if args.peaks {
        return peaks::run(args.json);
    }
    let findings = check(args.model.as_deref())?;
    if args.json {
        let all: Vec<Value> = findings.iter().map(Finding::json).collect();
        println!("{}", json!({"format": FORMAT, "findings": all}));
        return Ok(());
    }
    let mark = |finding: &Finding| if finding.advice.is_some() { "!" } else { "" };
    let row = |finding: &Finding| vec![finding.id.to_owned(), mark(finding).to_owned(), finding.found.clone()];
    print!("{}", print::columns(&findings.iter().map(row).collect::<Vec<_>>()));
    for (finding, advice) in findings.iter().filter_map(|f| Some((f, f.advice.as_ref()?))) {
        println!("\n{}: {}\n  {}", finding.id, advice.means, advice.fix);
    }
    println!("\n{}", conclusion(&findings));
    Ok(())
}

/// One line: all is well, or which findings could be better.
fn conclusion(findings: &[Finding]) -> String {
    let bad: Vec<&str> = findings.iter().filter(|finding| finding.advice.is_some()).map(|finding| finding.id).collect();
    match bad[..] {
        [] => format!("All is well: {} checks, nothing to improve.", findings.len()),
        _ => format!("{} of {} checks found something to improve: {}.", bad.len(), findings.len(), bad.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_conclusion_names_what_could_be_better() {
        let finding = |id, bad| Finding::new(id, "", json!({})).advise_if(bad, "slow", "do it");
        assert_eq!(
            conclusion(&[finding("a", false), finding("b", false)]),
            "All is well: 2 checks, nothing to improve."
        );
        assert_eq!(
            conclusion(&[finding("a", true), finding("b", false), finding("c", true)]),
            "2 of 3 checks found something to improve: a, c."
        );
    }

    #[test]
    fn only_bad_findings_have_advice() {
        let finding = || Finding::new("x", "1 of 2", json!({"n": 1}));
        let good = finding().advise_if(false, "slow", "do it").json();
        assert_eq!((&good["state"], &good["means"], &good["mend"]), (&json!("good"), &Value::Null, &Value::Null));
        let bad = finding().advise_if(true, "slow", "do it").json();
        assert_eq!((&bad["state"], &bad["mend"], &bad["numbers"]["n"]), (&json!("mend"), &json!("do it"), &json!(1)));
    }
}
