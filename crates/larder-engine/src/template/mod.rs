//! Chat templates: from messages to the text that a model was trained on.
//!
//! Templates are untrusted input. A template has no access to files or the clock; its steps, recursion depth and output
//! length are limited.

mod error;
mod functions;
mod input;
mod moment;
mod python;
mod tags;

use std::{io, thread};

use minijinja::{Environment, Value};

pub use error::TemplateError;
pub use input::ChatInput;
pub use moment::Moment;

use crate::text::TokenizerConfig;

/// Maximum length of a template.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Maximum length of the rendered text.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Maximum number of steps of the template engine; a few hundred per message are usual.
const MAX_STEPS: u64 = 2_000_000;
/// Stack for values nested as deep as the steps allow: dropping such a value takes a stack frame per level.
const STACK_BYTES: usize = 256 << 20;
/// Maximum nesting of macros and loops.
const MAX_RECURSION: usize = 100;

/// A model's compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    names: Vec<String>,
    special: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Compiles the template of a model: its `chat_template.jinja` if it has one, else that of the config; `None` if
    /// there is neither.
    pub fn new(jinja: Option<&[u8]>, config: &TokenizerConfig) -> Result<Option<Self>, TemplateError> {
        let sources = match jinja {
            Some(bytes) => {
                let text = std::str::from_utf8(bytes).map_err(|_| TemplateError::NotText)?;
                vec![("default".to_owned(), text.to_owned())]
            }
            None => config.chat_templates.clone(),
        };
        if sources.is_empty() {
            return Ok(None);
        }
        let mut environment = functions::environment();
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_recursion_limit(MAX_RECURSION);
        let mut names = Vec::new();
        for (name, source) in sources {
            if source.len() > MAX_SOURCE_BYTES {
                return Err(TemplateError::Source { bytes: source.len(), limit: MAX_SOURCE_BYTES });
            }
            let source = tags::without_generation(&source);
            environment.add_template_owned(name.clone(), source).map_err(TemplateError::from_syntax)?;
            names.push(name);
        }
        Ok(Some(ChatTemplate { environment, names, special: config.special.clone() }))
    }

    /// Renders the prompt text of a chat.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let no_thread = |what: String| TemplateError::Failed { line: 0, what };
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            let rendering = thread.spawn_scoped(scope, || self.render_here(input));
            let rendering = rendering.map_err(|error| no_thread(format!("cannot start its thread: {error}")))?;
            rendering.join().unwrap_or_else(|_| Err(no_thread("the template engine panicked".into())))
        })
    }

    fn render_here(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let name = self.name_for(input)?;
        let template = self.environment.get_template(name).map_err(TemplateError::from_render)?;
        let context = Value::from_pairs(input.variables(&self.special)?);
        let mut output = Limited { bytes: Vec::new(), full: false };
        match template.render_captured_to(context, &mut output) {
            Err(_) if output.full => Err(TemplateError::TooLong { limit: MAX_OUTPUT_BYTES }),
            Err(error) => Err(TemplateError::from_render(error)),
            Ok(_) => String::from_utf8(output.bytes).map_err(|_| TemplateError::NotText),
        }
    }

    fn name_for(&self, input: &ChatInput) -> Result<&str, TemplateError> {
        let has = |name: &&str| self.names.iter().any(|own| own == name);
        let wanted = if input.tools.is_some() { ["tool_use", "default"].as_slice() } else { &["default"] };
        wanted.iter().copied().find(has).ok_or_else(|| TemplateError::NoDefault { names: self.names.join(", ") })
    }
}

/// Collects the output up to its maximum length.
struct Limited {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
