//! Multiple-choice questions with four answers, as in MMLU: the model's answer is the likeliest letter.

use std::path::Path;

use super::csv::records;
use super::read_text;
use crate::LabError;

/// Answers per question.
pub const CHOICES: usize = 4;

const LETTERS: [char; CHOICES] = ['A', 'B', 'C', 'D'];

/// A multiple-choice question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// The question.
    pub text: String,
    /// The possible answers, A to D.
    pub choices: [String; CHOICES],
    /// Index of the correct answer.
    pub answer: usize,
}

/// Reads the questions of a CSV file with the columns question, four answers, and the correct answer as an index from 0
/// or a letter. A header is skipped.
pub fn read_questions(path: &Path) -> Result<Vec<Question>, LabError> {
    let wrong = |why: String| LabError::malformed(path, why);
    let mut all = Vec::new();
    for (at, record) in records(&read_text(path)?).map_err(wrong)?.into_iter().enumerate() {
        let (line, count) = (record.line, record.cells.len());
        let Ok([text, a, b, c, d, answer]) = <[String; CHOICES + 2]>::try_from(record.cells) else {
            let columns = "a question, four answers and the correct one";
            return Err(wrong(format!("has {count} columns in line {line} instead of 6: {columns}")));
        };
        if at == 0 && answer.trim().eq_ignore_ascii_case("answer") {
            continue;
        }
        let Some(answer) = place(&answer) else {
            let answer = answer.trim();
            return Err(wrong(format!(
                "has the answer '{answer}' in line {line}, which is not one of A to D or 0 to 3"
            )));
        };
        all.push(Question { text, choices: [a, b, c, d], answer });
    }
    if all.is_empty() { Err(wrong("holds no questions".into())) } else { Ok(all) }
}

fn place(answer: &str) -> Option<usize> {
    match answer.trim() {
        digit @ ("0" | "1" | "2" | "3") => digit.parse().ok(),
        letter => LETTERS.iter().position(|l| letter.chars().eq([*l])),
    }
}

/// The subject in a file's name, as in `high_school_physics_test.csv`.
pub fn subject_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ends = ["_test", "_dev", "_val", "_train"];
    let bare = ends.iter().find_map(|end| stem.strip_suffix(end)).unwrap_or(&stem);
    bare.replace('_', " ")
}

/// The text before the first question.
pub fn mcq_preamble(subject: &str) -> String {
    format!("The following are multiple choice questions (with answers) about {subject}.\n\n")
}

impl Question {
    /// The prompt: question and answers, up to where the letter follows.
    pub fn prompt_text(&self) -> String {
        let choices: String = LETTERS.iter().zip(&self.choices).map(|(l, c)| format!("{l}. {}\n", c.trim())).collect();
        format!("{}\n{choices}Answer:", self.text.trim())
    }

    /// The question with its answer, as a few-shot example.
    pub fn example_text(&self) -> String {
        format!("{} {}\n\n", self.prompt_text(), LETTERS[self.answer])
    }
}

/// A tokenised prompt, with the next token for each of the four letters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct McqPrompt {
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// The next tokens for A to D.
    pub letters: [u32; CHOICES],
}

impl McqPrompt {
    /// Tokenises `prompt` followed by each letter. A tokenizer may merge the letter with the space before it, so the
    /// prompt's tokens are those that all four have in common. `None` if the letters' tokens are not distinct.
    pub fn new<E>(prompt: &str, encode: impl Fn(&str) -> Result<Vec<u32>, E>) -> Result<Option<Self>, E> {
        let mut all = Vec::with_capacity(CHOICES);
        for letter in LETTERS {
            all.push(encode(&format!("{prompt} {letter}"))?);
        }
        let same = |at: &usize| all.iter().all(|ids| ids.get(*at).is_some_and(|id| *id == all[0][*at]));
        let common = (0..all[0].len()).take_while(same).count();
        let next: Option<Vec<u32>> = all.iter().map(|ids| ids.get(common).copied()).collect();
        let Some(letters) = next.and_then(|next| <[u32; CHOICES]>::try_from(next).ok()) else { return Ok(None) };
        let distinct = (1..CHOICES).all(|i| !letters[..i].contains(&letters[i]));
        Ok((distinct && common > 0).then(|| McqPrompt { prompt: all[0][..common].to_vec(), letters }))
    }

    /// The answer with the largest logit after the prompt.
    pub fn choose(&self, logits: &[f32]) -> usize {
        let of = |choice: usize| logits.get(self.letters[choice] as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (1..CHOICES).fold(0, |best, choice| if of(choice) > of(best) { choice } else { best })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("high_school_physics_test.csv");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn questions_come_with_or_without_a_header() {
        let (_a, with) = file("question,choice0,choice1,choice2,choice3,answer\n\"1, 2?\",1,2,3,4,2\n");
        let (_b, without) = file("\"1, 2?\",1,2,3,4,C\n");
        let all = read_questions(&with).unwrap();
        assert_eq!(all, read_questions(&without).unwrap());
        assert_eq!(all[0].example_text(), "1, 2?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: C\n\n");
        assert_eq!(subject_of(&with), "high school physics");
    }

    #[test]
    fn wrong_columns_and_answers_are_named_with_their_line() {
        let error = |text| read_questions(&file(text).1).unwrap_err().to_string();
        assert!(error("what?,1,2,3,4\n").contains("5 columns in line 1"));
        assert!(error("a,1,2,3,4,A\nb,1,2,3,4,E\n").contains("'E' in line 2"));
        assert!(error("question,a,b,c,d,answer\n").contains("no questions"));
    }

    #[test]
    fn a_prompt_ends_before_the_letter_in_any_tokenization() {
        // Each word is a token that includes the space after it.
        let words = |text: &str| -> Result<Vec<u32>, ()> {
            Ok(text.split_inclusive(' ').map(|w| w.bytes().map(u32::from).sum()).collect())
        };
        let prompt = McqPrompt::new("x Answer:", words).unwrap().unwrap();
        assert_eq!((prompt.prompt.len(), prompt.letters), (2, [65, 66, 67, 68]));
        let mut logits = [0.0; 100];
        logits[67] = 1.0;
        assert_eq!(prompt.choose(&logits), 2);
        assert_eq!(prompt.choose(&[0.0; 100]), 0);
        let blind = |_: &str| -> Result<Vec<u32>, ()> { Ok(vec![1, 2]) };
        assert_eq!(McqPrompt::new("x", blind).unwrap(), None);
    }
}
