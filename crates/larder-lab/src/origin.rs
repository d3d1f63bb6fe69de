//! How a report came about: when, on which machine, with which program and command line.

use serde::Serialize;

/// A property of a machine or a model, as text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Fact {
    /// Name of the property.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl Fact {
    /// A property with its value.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Fact { name: name.into(), value: value.into() }
    }
}

/// How the numbers of a report came about.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub struct ReportOrigin {
    /// Date and time in UTC.
    pub date: String,
    /// Version of larder.
    pub version: String,
    /// The commit that larder was built from, if known.
    pub commit: Option<String>,
    /// The command line.
    pub command: String,
    /// Processor, threads, memory, and drive.
    pub machine: Vec<Fact>,
    /// Name, architecture, number formats and size of the model, if there is one for the whole report.
    pub model: Vec<Fact>,
}

impl ReportOrigin {
    /// Version and commit.
    pub fn larder(&self) -> String {
        match &self.commit {
            Some(commit) => format!("{}, commit {commit}", self.version),
            None => self.version.clone(),
        }
    }

    /// All properties, in the order of a page's head. `method` says what was repeated and what intervals mean.
    pub(crate) fn facts(&self, method: &[Fact]) -> Vec<Fact> {
        let mut all = vec![Fact::new("Date", self.date.as_str())];
        all.extend(self.model.iter().chain(&self.machine).cloned());
        all.push(Fact::new("larder", self.larder()));
        all.extend(method.iter().cloned());
        all
    }
}
