//! Prints answers to standard output and everything else to standard error.

use std::io::{IsTerminal, Write};

use crate::cli::ThinkingFlag;

const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// The part of a reply that a piece of text belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextPart {
    /// Reasoning before the answer.
    Thinking,
    /// The answer.
    Answer,
}

/// Properties of the outputs.
#[derive(Clone, Copy)]
pub struct Output {
    /// Whether standard output is a terminal.
    pub terminal: bool,
    /// Whether to use colours on it.
    colours: bool,
}

impl Output {
    /// Detects a terminal and, from NO_COLOR and TERM, colours.
    pub fn detect() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|text| text.is_empty());
        let capable = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let terminal = std::io::stdout().is_terminal();
        Output { terminal, colours: terminal && wanted && capable }
    }

    /// Prints a line to standard error.
    pub fn line(&self, text: &str) {
        // A closed standard error is no reason to fail.
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// Prints a note to standard error: in brackets, dim on a terminal.
    pub fn note(&self, text: &str) {
        if self.colours && std::io::stderr().is_terminal() {
            self.line(&format!("{DIM}[{text}]{RESET}"))
        } else {
            self.line(&format!("[{text}]"))
        }
    }
}

/// Prints an answer as it is generated.
pub struct ReplyPrinter<W> {
    to: W,
    output: Output,
    thinking: ThinkingFlag,
    /// The part that the last text belonged to.
    last: Option<TextPart>,
}

impl<W: Write> ReplyPrinter<W> {
    /// A printer that shows reasoning as `thinking` says.
    pub fn new(to: W, output: Output, thinking: ThinkingFlag) -> Self {
        ReplyPrinter { to, output, thinking, last: None }
    }

    /// Prints a piece of text.
    pub fn write(&mut self, part: TextPart, text: &str) -> std::io::Result<()> {
        if part == TextPart::Thinking && self.thinking == ThinkingFlag::Off {
            return Ok(());
        }
        if self.last != Some(part) {
            self.change(part)?;
        }
        if self.output.terminal {
            self.to.write_all(without_controls(text).as_bytes())?
        } else {
            self.to.write_all(text.as_bytes())?
        }
        self.to.flush()
    }

    /// Ends the last line of the answer.
    pub fn finish(&mut self) -> std::io::Result<()> {
        self.reset()?;
        self.to.write_all(b"\n")?;
        self.to.flush()
    }

    fn change(&mut self, part: TextPart) -> std::io::Result<()> {
        self.reset()?;
        if self.last.is_some() {
            self.to.write_all(b"\n\n")?;
        }
        self.last = Some(part);
        if self.is_dim() { self.to.write_all(DIM.as_bytes()) } else { Ok(()) }
    }

    fn reset(&mut self) -> std::io::Result<()> {
        if self.is_dim() { self.to.write_all(RESET.as_bytes()) } else { Ok(()) }
    }

    fn is_dim(&self) -> bool {
        self.output.colours && self.thinking == ThinkingFlag::Dim && self.last == Some(TextPart::Thinking)
    }
}

/// Replaces control characters, so that a model cannot send escape sequences to the terminal.
fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(terminal: bool, colours: bool, thinking: ThinkingFlag) -> String {
        let mut printer = ReplyPrinter::new(Vec::new(), Output { terminal, colours }, thinking);
        printer.write(TextPart::Thinking, "hm").unwrap();
        printer.write(TextPart::Thinking, ", so").unwrap();
        printer.write(TextPart::Answer, "Yes\x1b[2J").unwrap();
        printer.finish().unwrap();
        String::from_utf8(printer.to).unwrap()
    }

    #[test]
    fn thinking_is_dim_plain_or_hidden() {
        assert_eq!(written(true, true, ThinkingFlag::Dim), "\x1b[2mhm, so\x1b[0m\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(true, false, ThinkingFlag::Dim), "hm, so\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(true, true, ThinkingFlag::On), "hm, so\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(false, false, ThinkingFlag::Off), "Yes\x1b[2J\n");
    }
}
