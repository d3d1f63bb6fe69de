//! Answers on standard output, everything else on standard error.

use std::io::{IsTerminal, Write};

use super::thinking::Part;
use crate::cli::ThinkingFlag;

const PALE: &str = "\x1b[2m";
const USUAL: &str = "\x1b[0m";

/// What the outputs are.
#[derive(Clone, Copy)]
pub struct Screen {
    /// Whether answers go to a terminal.
    pub terminal: bool,
    /// Whether a terminal is to be painted on.
    colours: bool,
}

impl Screen {
    /// As standard output and the environment have it.
    pub fn find() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|text| text.is_empty());
        let capable = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let terminal = std::io::stdout().is_terminal();
        Screen { terminal, colours: terminal && wanted && capable }
    }

    /// Says something that is no answer.
    pub fn say(&self, text: &str) {
        // Whoever listened may have gone by now.
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// The same, in brackets and pale.
    pub fn note(&self, text: &str) {
        match self.colours && std::io::stderr().is_terminal() {
            true => self.say(&format!("{PALE}[{text}]{USUAL}")),
            false => self.say(&format!("[{text}]")),
        }
    }
}

/// Writes one answer as it comes.
pub struct Pen<W> {
    to: W,
    screen: Screen,
    thinking: ThinkingFlag,
    /// What the last text belonged to.
    last: Option<Part>,
}

impl<W: Write> Pen<W> {
    /// A pen that shows thinking in this way.
    pub fn new(to: W, screen: Screen, thinking: ThinkingFlag) -> Self {
        Pen { to, screen, thinking, last: None }
    }

    /// Writes a piece.
    pub fn write(&mut self, part: Part, text: &str) -> std::io::Result<()> {
        if part == Part::Thinking && self.thinking == ThinkingFlag::Off {
            return Ok(());
        }
        if self.last != Some(part) {
            self.change(part)?;
        }
        match self.screen.terminal {
            true => self.to.write_all(harmless(text).as_bytes())?,
            false => self.to.write_all(text.as_bytes())?,
        }
        self.to.flush()
    }

    /// Ends the answer's last line.
    pub fn finish(&mut self) -> std::io::Result<()> {
        self.usual()?;
        self.to.write_all(b"\n")?;
        self.to.flush()
    }

    fn change(&mut self, part: Part) -> std::io::Result<()> {
        self.usual()?;
        if self.last.is_some() {
            self.to.write_all(b"\n\n")?;
        }
        self.last = Some(part);
        if self.is_pale() { self.to.write_all(PALE.as_bytes()) } else { Ok(()) }
    }

    fn usual(&mut self) -> std::io::Result<()> {
        if self.is_pale() { self.to.write_all(USUAL.as_bytes()) } else { Ok(()) }
    }

    fn is_pale(&self) -> bool {
        self.screen.colours && self.thinking == ThinkingFlag::Dim && self.last == Some(Part::Thinking)
    }
}

/// A model may have learned to write what a terminal obeys.
fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(terminal: bool, colours: bool, thinking: ThinkingFlag) -> String {
        let mut pen = Pen::new(Vec::new(), Screen { terminal, colours }, thinking);
        pen.write(Part::Thinking, "hm").unwrap();
        pen.write(Part::Thinking, ", so").unwrap();
        pen.write(Part::Answer, "Yes\x1b[2J").unwrap();
        pen.finish().unwrap();
        String::from_utf8(pen.to).unwrap()
    }

    #[test]
    fn thinking_is_pale_plain_or_absent() {
        assert_eq!(written(true, true, ThinkingFlag::Dim), "\x1b[2mhm, so\x1b[0m\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(true, false, ThinkingFlag::Dim), "hm, so\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(true, true, ThinkingFlag::On), "hm, so\n\nYes\u{fffd}[2J\n");
        assert_eq!(written(false, false, ThinkingFlag::Off), "Yes\x1b[2J\n");
    }
}
