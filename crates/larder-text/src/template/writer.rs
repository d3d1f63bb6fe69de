//! Text that is written within a budget.

use minijinja::Error;

use super::budget::Budget;

/// Bytes that are written between two looks at the budget.
const STEP_BYTES: usize = 1 << 16;

/// Collects a text and takes its bytes from the budget as it grows.
pub(super) struct Writer<'a> {
    text: String,
    taken: usize,
    budget: &'a Budget,
}

impl<'a> Writer<'a> {
    pub(super) fn new(budget: &'a Budget) -> Self {
        Writer { text: String::new(), taken: 0, budget }
    }

    pub(super) fn push_str(&mut self, text: &str) -> Result<(), Error> {
        if text.len() > STEP_BYTES {
            self.budget.has(text.len())?;
        }
        self.text.push_str(text);
        if self.text.len() - self.taken > STEP_BYTES { self.take() } else { Ok(()) }
    }

    pub(super) fn push(&mut self, c: char) -> Result<(), Error> {
        self.text.push(c);
        if self.text.len() - self.taken > STEP_BYTES { self.take() } else { Ok(()) }
    }

    /// The text.
    pub(super) fn finish(mut self) -> Result<String, Error> {
        self.take()?;
        Ok(self.text)
    }

    fn take(&mut self) -> Result<(), Error> {
        self.budget.take(self.text.len() - self.taken)?;
        self.taken = self.text.len();
        Ok(())
    }
}
