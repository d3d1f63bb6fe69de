//! The template language as transformers sets it up: filters, functions, white space.

use std::sync::Arc;

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Object},
};

use super::{error::Raised, moment::Moment, python};

/// The variable that carries the time; a template cannot access it, since names have no spaces.
pub(super) const NOW: &str = "the time";

impl Object for Moment {}

/// The template environment, set up as transformers does.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(whitespace());
    environment.set_formatter(print);
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: Value| python::display(&value));
    environment.add_function("raise_exception", raise);
    environment.add_function("strftime_now", strftime_now);
    environment
}

fn whitespace() -> SyntaxConfig {
    let config = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    config.expect("the default delimiters are distinct")
}

fn print(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&python::display(value)?),
    };
    written.map_err(|_| Error::from(ErrorKind::WriteFailure))
}

fn raise(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &mut State, format: &str) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|now| now.downcast_object::<Moment>());
    let now = now.unwrap_or_else(|| Arc::new(Moment::from_unix(0)));
    let unknown = |code| Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not support {code}"));
    now.format(format).map_err(unknown)
}

fn to_json(
    value: Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let argument = |given: Option<Value>, name: &str| match given {
        Some(value) => Ok(Some(value)),
        None => named.get::<Option<Value>>(name),
    };
    let truth = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ensure_ascii = truth(argument(ensure_ascii, "ensure_ascii")?);
    let indent = indentation(argument(indent, "indent")?)?;
    let separators = separation(argument(separators, "separators")?, indent.is_some())?;
    let sort_keys = truth(argument(None, "sort_keys")?);
    named.assert_all_used()?;
    python::Dumps { ensure_ascii, indent, separators, sort_keys }.json(&value)
}

fn indentation(indent: Option<Value>) -> Result<Option<String>, Error> {
    const WIDEST: usize = 64;
    let Some(indent) = indent.filter(|indent| !indent.is_none()) else {
        return Ok(None);
    };
    match indent.as_str() {
        Some(text) if text.len() <= WIDEST => Ok(Some(text.to_owned())),
        None if indent.is_integer() && indent.as_usize().is_none_or(|width| width <= WIDEST) => {
            Ok(Some(" ".repeat(indent.as_usize().unwrap_or(0))))
        }
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: indent must be a string or a number of at most 64 characters",
        )),
    }
}

fn separation(separators: Option<Value>, indented: bool) -> Result<(String, String), Error> {
    match separators.filter(|separators| !separators.is_none()) {
        None => Ok((if indented { "," } else { ", " }.into(), ": ".into())),
        Some(pair) => {
            let text = |index| Ok::<_, Error>(pair.get_item_by_index(index)?.to_string());
            Ok((text(0)?, text(1)?))
        }
    }
}
