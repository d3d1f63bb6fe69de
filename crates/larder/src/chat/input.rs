//! Reads messages from a terminal or a pipe.

use std::io::{BufRead, Read, StdinLock};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use rustyline::Editor;
use rustyline::config::{CompletionType, Config};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;

use super::completion::ChatCompleter;
use crate::user_folders;

/// Maximum number of lines in the history.
const HISTORY_LINES: usize = 1000;
/// Maximum size of a message.
const MESSAGE_BYTES: usize = 4 << 20;
/// A line before and after a message of several lines.
const FENCE: &str = "\"\"\"";

/// The source of lines.
pub enum Lines {
    /// A terminal, with editing, completion and history.
    Terminal(Box<LineEditor>),
    /// Standard input that is no terminal.
    Pipe(StdinLock<'static>),
}

/// The line editor of a terminal.
pub struct LineEditor {
    editor: Editor<ChatCompleter, DefaultHistory>,
    history: Option<PathBuf>,
}

/// One input of the user.
#[derive(PartialEq, Eq, Debug)]
pub enum Input {
    /// One line: a message or a command.
    Line(String),
    /// Several lines: always a message.
    Block(String),
    /// Ctrl-C at the prompt.
    Interrupt,
    /// End of input.
    End,
}

impl Lines {
    /// Opens the terminal with its history if `interactive`, else standard input.
    pub fn open(interactive: bool, with_history: bool) -> Result<Self> {
        if !interactive {
            return Ok(Lines::Pipe(std::io::stdin().lock()));
        }
        let config = Config::builder().max_history_size(HISTORY_LINES)?.completion_type(CompletionType::List).build();
        let mut editor = Editor::with_config(config).context("the terminal's line editor cannot be started")?;
        editor.set_helper(Some(ChatCompleter));
        let history = user_folders::state().filter(|_| with_history).map(|dir| dir.join("history"));
        if let Some(path) = &history {
            // At first there is no history, and an unreadable one is no reason to refuse the chat.
            let _ = editor.load_history(path);
        }
        Ok(Lines::Terminal(Box::new(LineEditor { editor, history })))
    }

    /// The next message or command.
    pub fn next(&mut self) -> Result<Input> {
        let input = read_message(&mut |prompt| self.line(prompt))?;
        if let (Lines::Terminal(terminal), Input::Line(text) | Input::Block(text)) = (self, &input) {
            terminal.remember(text);
        }
        Ok(input)
    }

    /// Asks a question on the terminal; in a pipe the answer is no.
    pub fn confirm(&mut self, question: &str) -> Result<bool> {
        let Lines::Terminal(_) = self else { return Ok(false) };
        let answer = self.line(&format!("{question} [y/N] "))?;
        Ok(matches!(answer, RawLine::Line(text) if matches!(text.trim(), "y" | "Y" | "yes")))
    }

    fn line(&mut self, prompt: &str) -> Result<RawLine> {
        match self {
            Lines::Terminal(terminal) => match terminal.editor.readline(prompt) {
                Ok(line) => Ok(RawLine::Line(line)),
                Err(ReadlineError::Interrupted) => Ok(RawLine::Interrupt),
                Err(ReadlineError::Eof) => Ok(RawLine::End),
                Err(error) => Err(error).context("the terminal cannot be read"),
            },
            Lines::Pipe(pipe) => read_line(pipe),
        }
    }
}

impl LineEditor {
    fn remember(&mut self, text: &str) {
        let new = !text.trim().is_empty() && self.editor.add_history_entry(text).unwrap_or(false);
        if let Some(path) = self.history.as_ref().filter(|_| new) {
            let kept = path.parent().is_some_and(|dir| std::fs::create_dir_all(dir).is_ok())
                && self.editor.append_history(path).is_ok();
            if !kept {
                eprintln!("warning: {}: the history cannot be written", path.display());
                self.history = None;
            }
        }
    }
}

/// One line of input.
enum RawLine {
    Line(String),
    Interrupt,
    End,
}

fn read_line(from: &mut impl BufRead) -> Result<RawLine> {
    let mut bytes = Vec::new();
    from.take(MESSAGE_BYTES as u64 + 1).read_until(b'\n', &mut bytes).context("reading standard input failed")?;
    check_length(bytes.len())?;
    if bytes.is_empty() {
        return Ok(RawLine::End);
    }
    let mut line = String::from_utf8(bytes).ok().context("standard input is not UTF-8 text")?;
    line.truncate(line.trim_end_matches(['\n', '\r']).len());
    Ok(RawLine::Line(line))
}

fn check_length(bytes: usize) -> Result<()> {
    if bytes > MESSAGE_BYTES {
        bail!("a message can have at most {MESSAGE_BYTES} bytes");
    }
    Ok(())
}

/// Reads the lines of one message; `next` shows a prompt and reads a line.
fn read_message(next: &mut dyn FnMut(&str) -> Result<RawLine>) -> Result<Input> {
    let first = match next("> ")? {
        RawLine::Line(line) => line,
        RawLine::Interrupt => return Ok(Input::Interrupt),
        RawLine::End => return Ok(Input::End),
    };
    let fenced = first.trim() == FENCE;
    if !fenced && !first.ends_with('\\') {
        return Ok(Input::Line(first));
    }
    let mut text = String::new();
    let mut line = if fenced { None } else { Some(first) };
    loop {
        if let Some(line) = line.take() {
            let goes_on = !fenced && line.ends_with('\\');
            text.push_str(if goes_on { &line[..line.len() - 1] } else { &line });
            if !fenced && !goes_on {
                break;
            }
            text.push('\n');
            check_length(text.len())?;
        }
        match next("… ")? {
            RawLine::Line(next) if fenced && next.trim() == FENCE => break,
            RawLine::Line(next) => line = Some(next),
            // Ctrl-C discards the message.
            RawLine::Interrupt => return Ok(Input::Interrupt),
            RawLine::End => break,
        }
    }
    text.truncate(text.strip_suffix('\n').unwrap_or(&text).len());
    Ok(Input::Block(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(text: &str) -> Vec<Input> {
        let mut bytes = text.as_bytes();
        let mut all = Vec::new();
        while all.last() != Some(&Input::End) {
            all.push(read_message(&mut |_| read_line(&mut bytes)).unwrap());
        }
        all.pop();
        all
    }

    #[test]
    fn lines_are_joined_to_messages() {
        let block = |text: &str| Input::Block(text.into());
        let line = |text: &str| Input::Line(text.into());
        assert_eq!(inputs("a\r\n/b\n\nc"), [line("a"), line("/b"), line(""), line("c")]);
        assert_eq!(inputs("a\\\nb\\\nc\nd"), [block("a\nb\nc"), line("d")]);
        assert_eq!(inputs("\"\"\"\n/a\\\n\nb\n\"\"\"\nc"), [block("/a\\\n\nb"), line("c")]);
    }

    #[test]
    fn an_unfinished_message_is_taken_at_the_end() {
        assert_eq!(inputs("\"\"\"\na"), [Input::Block("a".into())]);
        assert_eq!(inputs("a\\"), [Input::Block("a".into())]);
    }

    #[test]
    fn binary_data_and_endless_lines_are_refused() {
        assert!(read_line(&mut &b"\xff\n"[..]).is_err());
        assert!(read_line(&mut std::io::BufReader::new(std::io::repeat(b'x'))).is_err());
        let endless = read_message(&mut |_| Ok(RawLine::Line("x".repeat(1 << 20) + "\\")));
        assert!(endless.is_err());
    }
}
