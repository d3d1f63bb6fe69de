//! The template language as transformers sets it up: filters, functions, white space.

use std::sync::Arc;

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, functions,
    syntax::SyntaxConfig,
    value::{Kwargs, Object, ValueOrKwargs},
};

use super::{budget::Budget, error::Raised, filters, methods, moment::Moment, operators, python};

/// The variable that carries the time; a template cannot access it, since names have no spaces.
pub(super) const NOW: &str = "the time";

/// What a pair of a dictionary is counted as, in elements of a list.
const PAIR_ELEMENTS: usize = 3;
/// The longest text of a code of `strftime`, in bytes for each byte of the code.
const LONGEST_DATE: usize = 32;

impl Object for Moment {}

/// The template environment of one rendering, set up as transformers does.
pub(super) fn environment(budget: &Arc<Budget>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(whitespace());
    operators::add_to(&mut environment, budget);
    filters::add_to(&mut environment, budget);
    // It prints every variable.
    environment.remove_global("debug");
    let shared = || Arc::clone(budget);
    let budget = shared();
    environment.set_formatter(move |out, _, value| print(&budget, out, value));
    let budget = shared();
    environment
        .set_unknown_method_callback(move |state, value, name, args| methods::call(&budget, state, value, name, args));
    let budget = shared();
    environment.add_filter(
        "tojson",
        move |value: Value, ascii: Option<Value>, indent: Option<Value>, separators: Option<Value>, named: Kwargs| {
            dumps(ascii, indent, separators, &named)?.json(&value, &budget)
        },
    );
    let budget = shared();
    environment.add_function("raise_exception", move |message: Value| raise(&budget, &message));
    let budget = shared();
    environment
        .add_function("strftime_now", move |state: &mut State, format: String| strftime_now(&budget, state, &format));
    let budget = shared();
    environment.add_function("dict", move |value: Option<Value>, named: Kwargs| {
        budget.take_list(PAIR_ELEMENTS * value.as_ref().and_then(Value::len).unwrap_or(0))?;
        functions::dict(value, named)
    });
    let budget = shared();
    environment.add_function("namespace", move |values: Option<ValueOrKwargs>| {
        budget.take_list(PAIR_ELEMENTS * values.as_ref().and_then(|values| values.len()).unwrap_or(0))?;
        functions::namespace(values)
    });
    environment
}

/// The syntax of templates: white space around blocks is removed as transformers does.
pub(super) fn whitespace() -> SyntaxConfig {
    let config = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    config.expect("the default delimiters are distinct")
}

fn print(budget: &Budget, out: &mut Output, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => {
            budget.take(text.len())?;
            out.write_str(text)
        }
        None => out.write_str(&python::display(value, budget)?),
    };
    written.map_err(|_| Error::from(ErrorKind::WriteFailure))
}

fn raise(budget: &Budget, message: &Value) -> Result<Value, Error> {
    let message = python::display(message, budget)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(budget: &Budget, state: &mut State, format: &str) -> Result<String, Error> {
    budget.take(format.len().saturating_mul(LONGEST_DATE))?;
    let now = state.lookup(NOW).and_then(|now| now.downcast_object::<Moment>());
    let now = now.unwrap_or_else(|| Arc::new(Moment::from_unix(0)));
    let unknown = |code| Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not support {code}"));
    now.format(format).map_err(unknown)
}

fn dumps(
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    named: &Kwargs,
) -> Result<python::Dumps, Error> {
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
    Ok(python::Dumps { ensure_ascii, indent, separators, sort_keys })
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
