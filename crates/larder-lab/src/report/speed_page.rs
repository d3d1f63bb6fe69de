//! Measured speeds as a page.

use std::fmt::Write;

use super::chart::BoxPlot;
use super::html::{END, begin, escape, table};

/// The speeds of some models on one machine.
pub struct SpeedReport {
    /// Title of the page.
    pub title: String,
    /// Facts of the machine: name and value.
    pub facts: Vec<(String, String)>,
    /// A section per model.
    pub sections: Vec<SpeedSection>,
}

/// The speeds of one model with one cache size.
pub struct SpeedSection {
    /// Model and cache size.
    pub title: String,
    /// Notes: eviction, reader, memory.
    pub notes: Vec<String>,
    /// Tokens per second of each run, by setting.
    pub runs: Vec<(String, Vec<f64>)>,
    /// Table below the plot; the first row is the header.
    pub table: Vec<Vec<String>>,
}

/// The report as a self-contained page without scripts.
pub fn speed_page(speeds: &SpeedReport) -> String {
    let mut out = begin(&speeds.title);
    let _ = writeln!(out, "<h1>{}</h1>", escape(&speeds.title));
    for part in &speeds.sections {
        let _ = writeln!(out, "<h2>{}</h2>", escape(&part.title));
        for note in &part.notes {
            let _ = writeln!(out, "<p class=\"faint\">{}</p>", escape(note));
        }
        let groups = part.runs.iter().enumerate().map(|(i, (name, runs))| (name.clone(), i, runs.clone())).collect();
        let boxes = BoxPlot { title: "Tokens per second".into(), x: "tokens per second".into(), groups };
        let _ = writeln!(out, "<div class=\"charts\"><figure>{}</figure></div>", boxes.svg());
        let cells = |row: &Vec<String>| row.iter().map(|cell| escape(cell)).collect();
        out.push_str(&table(&part.table.iter().map(cells).collect::<Vec<_>>()));
    }
    out.push_str("<h2>Machine</h2>\n");
    let facts = speeds.facts.iter().map(|(name, found)| vec![escape(name), escape(found)]);
    let heading = vec!["item".to_owned(), "value".to_owned()];
    out.push_str(&table(&std::iter::once(heading).chain(facts).collect::<Vec<_>>()));
    out.push_str(END);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        let part = SpeedSection {
            title: "a<b".into(),
            notes: vec!["1 & 2".into()],
            runs: vec![("x<y".into(), vec![1.0, 2.0]), ("none".into(), vec![])],
            table: vec![vec!["<i>".into()], vec!["\"".into()]],
        };
        let page = speed_page(&SpeedReport {
            title: "<t>".into(),
            facts: vec![("<k>".into(), "v".into())],
            sections: vec![part],
        });
        for bad in ["a<b", "x<y", "<i>", "<t>", "<k>", "NaN"] {
            assert!(!page.contains(bad), "{bad}");
        }
        assert!(page.contains("a&lt;b") && page.contains("<rect"));
    }
}
