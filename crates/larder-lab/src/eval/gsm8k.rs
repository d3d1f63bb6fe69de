//! GSM8K: word problems whose answer is a number.

use std::path::Path;

use serde::Deserialize;

use super::read_text;
use crate::LabError;

/// Precedes the final number in the data.
const MARK: &str = "####";

/// A problem with its solution.
#[derive(Clone, PartialEq, Debug)]
pub struct MathProblem {
    /// The question.
    pub question: String,
    /// The worked solution, with the number at the end.
    pub solution: String,
    /// The correct number.
    pub number: f64,
}

#[derive(Deserialize)]
struct Line {
    question: String,
    answer: String,
}

/// Reads the problems of a file with one JSON object per line, with `question` and `answer`.
pub fn read_problems(path: &Path) -> Result<Vec<MathProblem>, LabError> {
    let text = read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(at, line)| {
            let wrong = |why: String| LabError::malformed(path, format!("is malformed in line {}: {why}", at + 1));
            let Line { question, answer } = serde_json::from_str(line)
                .map_err(|e| wrong(format!("not a JSON object with a question and an answer: {e}")))?;
            let number = answer.contains(MARK).then(|| final_number(&answer)).flatten();
            let number = number.ok_or_else(|| wrong(format!("the answer does not end with {MARK} and a number")))?;
            Ok(MathProblem { question, solution: without_annotations(&answer), number })
        })
        .collect()
}

/// Removes calculator annotations, as in `<<3*4=12>>`.
fn without_annotations(answer: &str) -> String {
    let mut out = String::with_capacity(answer.len());
    let mut rest = answer;
    while let Some((before, after)) = rest.split_once("<<") {
        out.push_str(before);
        rest = after.split_once(">>").map_or("", |(_, behind)| behind);
    }
    out.push_str(rest);
    out
}

impl MathProblem {
    /// The prompt, up to where the solution begins.
    pub fn prompt_text(&self) -> String {
        format!("Question: {}\nAnswer:", self.question.trim())
    }

    /// The problem with its solution, as a few-shot example.
    pub fn example_text(&self) -> String {
        format!("{} {}\n\n", self.prompt_text(), self.solution.trim())
    }
}

/// The final number of a text: the first one after the last `####`, else the last number.
pub fn final_number(text: &str) -> Option<f64> {
    match text.rsplit_once(MARK) {
        Some((_, behind)) => numbers(behind).next(),
        None => numbers(text).last(),
    }
}

/// The numbers in a text: optional sign, digits with thousands separators, optional fraction.
fn numbers(text: &str) -> impl Iterator<Item = f64> + '_ {
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(|c: char| c.is_ascii_digit())?;
        let sign = rest[..start].trim_end_matches('$').ends_with('-');
        let from = &rest[start..];
        let end = from.find(|c: char| !c.is_ascii_digit() && c != ',' && c != '.').unwrap_or(from.len());
        rest = &from[end..];
        let digits = from[..end].trim_end_matches([',', '.']).replace(',', "");
        // Of something like 1.2.3 only the first part is used.
        let value = digits.parse().or_else(|_| digits.split('.').next().unwrap_or_default().parse::<f64>()).ok()?;
        Some(if sign { -value } else { value })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_final_number_is_found_in_common_notations() {
        let found = |text| final_number(text);
        assert_eq!(found("She makes 9 * 2 = $18.\n#### 18"), Some(18.0));
        assert_eq!(found("#### 3\nthen 4 #### $1,250.50 a day, not 7"), Some(1250.5));
        assert_eq!(found("so it is -3, no: 12."), Some(12.0));
        assert_eq!(found("down by -$5"), Some(-5.0));
        assert_eq!(found("version 1.2.3"), Some(1.0));
        assert_eq!(found("nothing ####"), None);
        assert_eq!(found(""), None);
    }

    #[test]
    fn problems_are_read_without_annotations() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.jsonl");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("{\"question\": \"How many?\", \"answer\": \"2+3=<<2+3=5>>5 eggs\\n#### 5\"}\n\n");
        let all = read_problems(&path).unwrap();
        assert_eq!(all[0].example_text(), "Question: How many?\nAnswer: 2+3=5 eggs\n#### 5\n\n");
        assert_eq!((all.len(), all[0].number), (1, 5.0));
        write("{\"question\": \"a\", \"answer\": \"five\"}");
        assert!(read_problems(&path).unwrap_err().to_string().contains("line 1: the answer does not end"));
        write("\nnot json");
        assert!(read_problems(&path).unwrap_err().to_string().contains("line 2: not a JSON"));
    }
}
