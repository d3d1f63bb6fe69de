//! Chat templates: from messages to the text that a model was trained on.
//!
//! Templates are untrusted input. A template has no access to files or the clock. What it may take is limited: its
//! length and nesting when it is opened ([`compile`]), and its steps, the depth of its calls, the bytes of all values
//! that it makes, and its time when it is rendered ([`budget`]). The engine parses and runs it, but not the operations
//! that can grow a value or read a large one: [`rewrite`] replaces them by this crate's own, which ask the budget
//! first. So a rendering ends by itself, and no thread is ever left behind.

mod budget;
mod compile;
mod error;
mod filters;
mod format;
mod functions;
mod input;
mod methods;
mod moment;
mod operators;
mod python;
mod rewrite;
mod roles;
mod tags;
mod writer;

use std::sync::{Arc, OnceLock};
use std::{thread, time::Duration};

use minijinja::{AutoEscape, Value, machinery};

pub use error::TemplateError;
pub use input::ChatInput;
pub use moment::Moment;

use self::budget::Budget;
use crate::tokens::TokenizerConfig;

/// What the values of one rendering may take in bytes, dropped ones included.
const MAX_BYTES: usize = 128 << 20;
/// What one rendering may take in time. Usual are 1 to 20 ms.
const MAX_TIME: Duration = Duration::from_secs(2);
/// Maximum number of steps of the template engine; a few hundred per message are usual.
const MAX_STEPS: u64 = 2_000_000;
/// Stack for the deepest syntax tree within the limits of [`compile`], which takes a quarter of it.
const STACK_BYTES: usize = 256 << 20;
/// Maximum nesting of macros and loops.
const MAX_RECURSION: usize = 100;

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    /// The templates by name, each of which compiles.
    sources: Vec<(String, String)>,
    special: Vec<(String, String)>,
    /// Found out when the first chat asks.
    roles: OnceLock<roles::TemplateRoles>,
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
        let mut checked = Vec::new();
        for (name, source) in sources {
            compile::check_length(&source)?;
            // All ends of lines are line feeds, as Jinja2 reads a template.
            let source = tags::without_generation(&source.replace("\r\n", "\n").replace('\r', "\n"));
            on_large_stack(|| compile::compile(&name, &source).map(drop))?;
            checked.push((name, source));
        }
        Ok(Some(ChatTemplate { sources: checked, special: config.special.clone(), roles: OnceLock::new() }))
    }

    /// The source of the template, of the one for chats with tools if there are two.
    pub fn source(&self, tools: bool) -> &str {
        let find = |name: &&str| self.sources.iter().find(|(own, _)| own == name);
        let wanted = if tools { ["tool_use", "default"].as_slice() } else { &["default"] };
        wanted.iter().find_map(find).or(self.sources.first()).map_or("", |(_, source)| source)
    }

    /// Renders the prompt text of a chat.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        self.render_within(input, MAX_TIME)
    }

    fn render_within(&self, input: &ChatInput, time: Duration) -> Result<String, TemplateError> {
        on_large_stack(|| self.render_here(input, time))
    }

    /// Compiles and renders: an environment, whose functions know the budget, lives as long as a rendering.
    fn render_here(&self, input: &ChatInput, time: Duration) -> Result<String, TemplateError> {
        let (name, source) = self.source_for(input)?;
        let compiled = compile::compile(name, source)?;
        let budget = Arc::new(Budget::new(MAX_BYTES, time));
        let mut environment = functions::environment(&budget);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_recursion_limit(MAX_RECURSION);
        let context = Value::from_pairs(input.variables(&self.special)?);
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        let rendered = machinery::eval(
            &environment,
            &compiled.instructions,
            context,
            &compiled.blocks,
            &mut output,
            AutoEscape::None,
        );
        match rendered {
            Ok(_) => {}
            Err(error) => return Err(TemplateError::from_render(error, &budget)),
        }
        Ok(text)
    }

    fn source_for(&self, input: &ChatInput) -> Result<&(String, String), TemplateError> {
        let find = |name: &&str| self.sources.iter().find(|(own, _)| own == name);
        let wanted = if input.tools.is_some() { ["tool_use", "default"].as_slice() } else { &["default"] };
        wanted.iter().find_map(find).ok_or_else(|| {
            let names: Vec<&str> = self.sources.iter().map(|(name, _)| name.as_str()).collect();
            TemplateError::NoDefault { names: names.join(", ") }
        })
    }
}

/// The result of `work` on a thread with a stack of [`STACK_BYTES`], of which only what is used becomes memory.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, TemplateError> + Send) -> Result<T, TemplateError> {
    let no_thread = |what: String| TemplateError::Failed { line: 0, what };
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| no_thread(format!("cannot start its thread: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(no_thread("the template engine panicked".into())))
    })
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod tests;
