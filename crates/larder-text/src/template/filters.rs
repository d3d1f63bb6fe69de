//! The filters and tests of templates within a budget.
//!
//! A filter that can make more than it gets is this crate's own. The others are the template engine's: what they read
//! is weighed before, and what they make is counted after.

use std::sync::Arc;

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    formatting::{FormatStyle, format},
    value::{Kwargs, Rest, ValueKind, ValueOrKwargs},
};

use super::{
    budget::Budget,
    format::check_format,
    methods,
    operators::{add, collect, is_container},
    python,
    rewrite::names,
    writer::Writer,
};

/// Filters that return the value or a part of it, and look at no more than its length.
const PARTS: &[&str] = &["default", "d", "first", "last", "length", "count", "bool", "safe", "attr"];
/// Filters that read the elements and return one of them.
const CHOICES: &[&str] = &["min", "max"];
/// Filters that arrange the elements anew.
const ARRANGEMENTS: &[&str] = &[
    "items",
    "reverse",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "sort",
    "unique",
    "groupby",
    "dictsort",
    "zip",
    "chain",
];
/// Those of them that read their arguments once.
const JOINTS: &[&str] = &["zip", "chain"];
/// Filters of this crate, which take from the budget themselves.
const OWN: &[&str] = &[
    "string", "pprint", "list", "replace", "trim", "lines", "split", "join", "indent", "format", "sum", "batch",
    "slice", "tojson",
];
/// How much longer a filter of the engine makes a text: `ΐ` has three letters in upper case, `"` is `&quot;` in HTML.
const WIDEST_CASE: usize = 3;
const WIDEST_ESCAPE: usize = 6;

/// Adds this crate's filters, and those by which the others are called.
pub(super) fn add_to(environment: &mut Environment, budget: &Arc<Budget>) {
    let shared = || Arc::clone(budget);
    let budget = shared();
    environment.add_filter(names::FILTER, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        filter(&budget, state, &args.into_values())
    });
    let budget = shared();
    environment.add_filter(names::TEST, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        test(&budget, state, &args.into_values())
    });
    // To Jinja2, a sequence is what has a length and elements: texts and dictionaries too.
    for name in ["iterable", "sequence"] {
        environment.add_test(name, |value: &Value| !value.is_none() && value.try_iter().is_ok());
    }
    let budget = shared();
    environment.add_filter("string", move |value: Value| python::display(&value, &budget));
    let budget = shared();
    environment.add_filter("pprint", move |value: Value| python::display(&value, &budget));
    let budget = shared();
    environment.add_filter("list", move |value: Value| collect(&budget, &value).map(Value::from));
    let budget = shared();
    environment.add_filter("replace", move |value: Value, old: Value, new: Value, count: Option<i64>| {
        let text = |value: &Value| python::display(value, &budget);
        methods::replace(&budget, &text(&value)?, &text(&old)?, &text(&new)?, count)
    });
    let budget = shared();
    environment.add_filter("trim", move |value: Value, chars: Option<String>| {
        methods::strip(&budget, &python::display(&value, &budget)?, chars.as_deref(), true, true)
    });
    let budget = shared();
    environment.add_filter("lines", move |text: String| methods::lines(&budget, &text, false));
    let budget = shared();
    environment.add_filter("split", move |text: String, separator: Option<String>, limit: Option<i64>| {
        methods::split(&budget, &text, separator.as_deref(), limit, false)
    });
    let budget = shared();
    environment.add_filter(
        "join",
        move |values: Value, separator: Option<String>, attribute: Option<String>, named: Kwargs| {
            join(&budget, &values, separator, attribute, &named)
        },
    );
    let budget = shared();
    environment.add_filter(
        "indent",
        move |value: Value, width: Option<usize>, first: Option<bool>, blank: Option<bool>, named: Kwargs| {
            indent(&budget, &value, width, first, blank, &named)
        },
    );
    let budget = shared();
    environment.add_filter("format", move |text: String, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        check_format(&budget, &text, &args, '%')?;
        let made = format(FormatStyle::Printf, &text, &args)?;
        budget.take(made.len())?;
        Ok::<_, Error>(made)
    });
    let budget = shared();
    environment.add_filter(
        "sum",
        move |values: Value, attribute: Option<String>, start: Option<Value>, named: Kwargs| {
            sum(&budget, &values, attribute, start, &named)
        },
    );
    let budget = shared();
    environment.add_filter("batch", move |state: &mut State, value: Value, count: usize, fill: Option<Value>| {
        budget.take_list(value.len().unwrap_or(0).saturating_mul(2).saturating_add(count))?;
        filters::batch(state, value, count, fill)
    });
    let budget = shared();
    environment.add_filter("slice", move |state: &mut State, value: Value, count: usize, fill: Option<Value>| {
        budget.take_list(value.len().unwrap_or(0).saturating_add(count.saturating_mul(2)))?;
        filters::slice(state, value, count, fill)
    });
}

/// A filter by its name: `args` are the value, the name, and the filter's arguments.
fn filter(budget: &Budget, state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let (name, args) = named(args)?;
    let args = as_jinja(name, args)?;
    let others = budget.weigh_all(&args[1..])?;
    if !JOINTS.contains(&name) {
        // An argument may be read for each element.
        let elements = if is_container(&args[0]) { args[0].len().unwrap_or(0) } else { 1 };
        budget.has_steps(elements.saturating_mul(others + 1))?;
    }
    let unknown = |error: Error| with_name(error, ErrorKind::UnknownFilter, &format!("filter {name} is unknown"));
    if PARTS.contains(&name) {
        budget.has_steps(args[0].as_str().map_or(0, str::len))?;
        return state.apply_filter(name, &args).map_err(unknown);
    }
    let weight = budget.weigh(&args[0])?.saturating_add(others);
    if CHOICES.contains(&name) {
        return state.apply_filter(name, &args).map_err(unknown);
    }
    if ARRANGEMENTS.contains(&name) {
        budget.has(args[0].as_str().map_or(0, str::len))?;
        let made = state.apply_filter(name, &args).map_err(unknown)?;
        return arranged(budget, made);
    }
    let widest = if matches!(name, "escape" | "e" | "urlencode") { WIDEST_ESCAPE } else { WIDEST_CASE };
    budget.has(weight)?;
    if OWN.contains(&name) {
        return state.apply_filter(name, &args);
    }
    budget.has(weight.saturating_mul(widest))?;
    let made = state.apply_filter(name, &args).map_err(unknown)?;
    let made = if made.as_str().is_none() { arranged(budget, made)? } else { made };
    budget.take(budget.weigh(&made)?)?;
    Ok(made)
}

/// The arguments with which an engine's filter does what Jinja2's does.
fn as_jinja(name: &str, mut args: Vec<Value>) -> Result<Vec<Value>, Error> {
    match name {
        "length" | "count" | "first" | "last" if args[0].is_undefined() => args[0] = Value::from(Vec::<Value>::new()),
        "int" if args.len() == 1 => args.push(Value::from(0)),
        "float" if args.len() == 1 => args.push(Value::from(0.0)),
        "default" | "d" if args.last().is_some_and(Value::is_kwargs) => {
            let named = Kwargs::try_from(args.pop().unwrap_or_default())?;
            for name in ["default_value", "boolean"].iter().skip(args.len() - 1) {
                args.push(named.get::<Option<Value>>(name)?.unwrap_or_else(|| Value::from("")));
            }
            named.assert_all_used()?;
        }
        _ => {}
    }
    Ok(args)
}

/// What an engine's filter made; a list, which may be lazy, as a list of its own.
fn arranged(budget: &Budget, made: Value) -> Result<Value, Error> {
    match made.kind() {
        ValueKind::String => budget.take(made.as_str().map_or(0, str::len)).map(|()| made),
        ValueKind::Seq | ValueKind::Iterable if !made.is_tuple() => collect(budget, &made).map(Value::from),
        _ => Ok(made),
    }
}

/// A test by its name: `args` are the value, the name, and the test's arguments.
fn test(budget: &Budget, state: &mut State, args: &[Value]) -> Result<bool, Error> {
    let (name, args) = named(args)?;
    if args.len() > 1 {
        budget.has(budget.weigh_all(&args)?)?;
    }
    budget.has_steps(args[0].as_str().map_or(0, str::len))?;
    let unknown = |error: Error| with_name(error, ErrorKind::UnknownTest, &format!("test {name} is unknown"));
    state.perform_test(name, &args).map_err(unknown)
}

/// The name, which is the second of `args`, and the others.
fn named(args: &[Value]) -> Result<(&str, Vec<Value>), Error> {
    let [value, name, others @ ..] = args else {
        return Err(Error::from(ErrorKind::MissingArgument));
    };
    let name = name.as_str().ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    Ok((name, std::iter::once(value).chain(others).cloned().collect()))
}

/// `error` with `what` if it is of a kind that lacks it.
fn with_name(error: Error, kind: ErrorKind, what: &str) -> Error {
    if error.kind() == kind && error.detail().is_none() { Error::new(kind, what.to_owned()) } else { error }
}

/// `value`, or what it has at the end of a path such as `a.b`.
fn at_path(value: Value, path: Option<&str>) -> Result<Value, Error> {
    let Some(path) = path else {
        return Ok(value);
    };
    path.split('.').try_fold(value, |value, key| match key.parse::<usize>() {
        Ok(index) => value.get_item_by_index(index),
        Err(_) => value.get_attr(key),
    })
}

fn join(
    budget: &Budget,
    values: &Value,
    separator: Option<String>,
    attribute: Option<String>,
    named: &Kwargs,
) -> Result<Value, Error> {
    let separator = or_named(separator, named, "d")?.unwrap_or_default();
    let attribute = or_named(attribute, named, "attribute")?;
    named.assert_all_used()?;
    methods::join(budget, values, &separator, |item| at_path(item, attribute.as_deref()))
}

fn or_named(given: Option<String>, named: &Kwargs, name: &str) -> Result<Option<String>, Error> {
    if given.is_some() { Ok(given) } else { named.get(name) }
}

fn indent(
    budget: &Budget,
    value: &Value,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    named: &Kwargs,
) -> Result<Value, Error> {
    let flag = |given: Option<bool>, name: &str| match given {
        Some(given) => Ok(given),
        None => named.get::<Option<bool>>(name).map(Option::unwrap_or_default),
    };
    let width = match width {
        Some(width) => width,
        None => named.get::<Option<usize>>("width")?.unwrap_or(4),
    };
    let (first, blank) = (flag(first, "first")?, flag(blank, "blank")?);
    named.assert_all_used()?;
    let text = python::display(value, budget)?;
    budget.has(width)?;
    let spaces = " ".repeat(width);
    let mut out = Writer::new(budget);
    let text = text.strip_suffix('\n').map_or(text.as_str(), |text| text.strip_suffix('\r').unwrap_or(text));
    for (index, line) in text.split('\n').enumerate() {
        out.push_str(if index > 0 { "\n" } else { "" })?;
        let is_blank = line.is_empty() || line == "\r";
        if (index > 0 || first) && (blank || !is_blank) {
            out.push_str(&spaces)?;
        }
        out.push_str(line)?;
    }
    out.finish().map(Value::from)
}

fn sum(
    budget: &Budget,
    values: &Value,
    attribute: Option<String>,
    start: Option<Value>,
    named: &Kwargs,
) -> Result<Value, Error> {
    let attribute = or_named(attribute, named, "attribute")?;
    let start = match start {
        Some(start) => Some(start),
        None => named.get("start")?,
    };
    named.assert_all_used()?;
    let mut sum = start.unwrap_or_else(|| Value::from(0));
    for item in values.try_iter()?.checked() {
        let item = at_path(item?, attribute.as_deref())?;
        if !item.is_undefined() {
            sum = add(budget, &sum, &item)?;
        }
    }
    Ok(sum)
}
