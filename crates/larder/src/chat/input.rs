//! Lines from a person or a pipe, put together to messages.

use std::io::{BufRead, Read, StdinLock};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use rustyline::DefaultEditor;
use rustyline::config::Config;
use rustyline::error::ReadlineError;

use crate::xdg;

/// Lines of history that are kept.
const HISTORY_LINES: usize = 1000;
/// More is no message.
const MESSAGE_BYTES: usize = 4 << 20;
/// Alone on a line before and after a message of many lines.
const FENCE: &str = "\"\"\"";

/// Where lines come from.
pub enum Lines {
    /// A terminal, with editing and history.
    Terminal(Box<LineEditor>),
    /// Anything else.
    Pipe(StdinLock<'static>),
}

/// A terminal's editor.
pub struct LineEditor {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

/// What came.
#[derive(PartialEq, Eq, Debug)]
pub enum Input {
    /// One line, which may be a command.
    Line(String),
    /// Several lines that are certainly none.
    Block(String),
    /// Ctrl-C where nothing was to be stopped.
    Interrupt,
    /// The end.
    End,
}

impl Lines {
    /// From a person at a terminal, or as they come.
    pub fn open(interactive: bool, with_history: bool) -> Result<Self> {
        if !interactive {
            return Ok(Lines::Pipe(std::io::stdin().lock()));
        }
        let config = Config::builder().max_history_size(HISTORY_LINES)?.build();
        let mut editor = DefaultEditor::with_config(config).context("the terminal cannot be edited on")?;
        let history = xdg::state().filter(|_| with_history).map(|dir| dir.join("history"));
        if let Some(path) = &history {
            // A first start has none, and one that cannot be read is no reason not to talk.
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
                eprintln!("warning: {}: the history cannot be kept", path.display());
                self.history = None;
            }
        }
    }
}

/// A line as it was typed.
enum RawLine {
    Line(String),
    Interrupt,
    End,
}

fn read_line(from: &mut impl BufRead) -> Result<RawLine> {
    let mut bytes = Vec::new();
    from.take(MESSAGE_BYTES as u64 + 1).read_until(b'\n', &mut bytes).context("standard input cannot be read")?;
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
        bail!("a message of more than {MESSAGE_BYTES} bytes is too long");
    }
    Ok(())
}

/// Puts a message together from lines, each asked for with a prompt.
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
            // Given up, like any line.
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
    fn lines_are_put_together() {
        let block = |text: &str| Input::Block(text.into());
        let line = |text: &str| Input::Line(text.into());
        assert_eq!(inputs("a\r\n/b\n\nc"), [line("a"), line("/b"), line(""), line("c")]);
        assert_eq!(inputs("a\\\nb\\\nc\nd"), [block("a\nb\nc"), line("d")]);
        assert_eq!(inputs("\"\"\"\n/a\\\n\nb\n\"\"\"\nc"), [block("/a\\\n\nb"), line("c")]);
    }

    #[test]
    fn what_is_cut_off_counts() {
        assert_eq!(inputs("\"\"\"\na"), [Input::Block("a".into())]);
        assert_eq!(inputs("a\\"), [Input::Block("a".into())]);
    }

    #[test]
    fn bytes_and_endless_lines_are_refused() {
        assert!(read_line(&mut &b"\xff\n"[..]).is_err());
        assert!(read_line(&mut std::io::BufReader::new(std::io::repeat(b'x'))).is_err());
        let endless = read_message(&mut |_| Ok(RawLine::Line("x".repeat(1 << 20) + "\\")));
        assert!(endless.is_err());
    }
}
