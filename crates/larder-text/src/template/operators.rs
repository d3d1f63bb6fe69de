//! The operators of the template language within a budget, as filters that [`rewrite`](super::rewrite) puts in their
//! place.

use std::sync::Arc;

use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Rest, Tuple, ValueKind},
};

use super::{
    budget::{Budget, ELEMENT_BYTES},
    python,
    rewrite::names,
    writer::Writer,
};

/// Maximum number of values of a `*` or `**` argument.
const MAX_SPREAD: usize = 1000;

/// An operation on one value.
type Unary = fn(&Budget, Value) -> Result<Value, Error>;
/// An operation on two values.
type Binary = fn(&Budget, &Value, &Value) -> Result<Value, Error>;

/// Adds the filters that stand for operators.
pub(super) fn add_to(environment: &mut Environment, budget: &Arc<Budget>) {
    let two: [(&str, Binary); 11] = [
        (names::ADD, add),
        (names::MUL, mul),
        (names::CONCAT, concat),
        (names::ITEM, item),
        (names::EQ, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a == b))),
        (names::NE, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a != b))),
        (names::LT, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a < b))),
        (names::LTE, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a <= b))),
        (names::GT, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a > b))),
        (names::GTE, |budget, a, b| compared(budget, a, b).map(|()| Value::from(a >= b))),
        (names::IN, |budget, a, b| contains(budget, b, a).map(Value::from)),
    ];
    for (name, operator) in two {
        let budget = Arc::clone(budget);
        environment.add_filter(name, move |a: Value, b: Value| operator(&budget, &a, &b));
    }
    let one: [(&str, Unary); 4] = [
        (names::READABLE, readable),
        (names::TEXT, |_, text| Ok(text)),
        (names::STORED, stored),
        (names::SPREAD, spread),
    ];
    for (name, operator) in one {
        let budget = Arc::clone(budget);
        environment.add_filter(name, move |value: Value| operator(&budget, value));
    }
    let budget = Arc::clone(budget);
    environment.add_function(names::CYCLE, cycle);
    environment.add_filter(names::SLICE, move |value: Value, start: Value, stop: Value, step: Value| {
        slice(&budget, &value, [start, stop, step])
    });
}

/// `value`, which is then safe to read as a whole: to compare, to print, to hash.
fn readable(budget: &Budget, value: Value) -> Result<Value, Error> {
    if is_container(&value) {
        budget.weigh(&value)?;
    }
    Ok(value)
}

/// `value`, if it cannot lead back to the namespace that it is stored in; what leads back to itself would never be
/// freed.
fn stored(budget: &Budget, value: Value) -> Result<Value, Error> {
    if is_container(&value) {
        budget.weigh(&value)?;
    }
    if has_reference(&value) {
        Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot hold a namespace, a macro or a loop"))
    } else {
        Ok(value)
    }
}

fn has_reference(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter().is_ok_and(|mut items| items.any(|item| has_reference(&item)))
        }
        ValueKind::Map => value.as_object().is_some_and(|map| {
            let kind = map.type_name();
            kind.ends_with("::Namespace")
                || kind.starts_with("minijinja::vm::")
                || map.try_iter_pairs().is_some_and(|mut pairs| pairs.any(|(_, item)| has_reference(&item)))
        }),
        _ => false,
    }
}

fn spread(budget: &Budget, value: Value) -> Result<Value, Error> {
    match value.len() {
        Some(len) if len > MAX_SPREAD => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a `*` argument has {len} values; at most {MAX_SPREAD} are supported"),
        )),
        _ => readable(budget, value),
    }
}

pub(super) fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// The elements of `value` in a list of its own.
pub(super) fn collect(budget: &Budget, value: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        // A look at the clock and the bytes for every 1024 elements, ahead of them.
        if items.len() % 1024 == 0 {
            budget.has(1024 * ELEMENT_BYTES)?;
        }
        items.push(item?);
        if items.len() % 1024 == 0 {
            budget.take_list(1024)?;
        }
    }
    budget.take_list(items.len() % 1024)?;
    Ok(items)
}

fn impossible(operator: &str, a: &Value, b: &Value) -> Error {
    let what = format!("tried to use {operator} operator on unsupported types {} and {}", a.kind(), b.kind());
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Two whole numbers, or two floats if one of them is.
enum Numbers {
    Whole(i128, i128),
    Floats(f64, f64),
}

fn numbers(a: &Value, b: &Value) -> Option<Numbers> {
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(a) || !is_number(b) {
        return None;
    }
    let whole = |value: &Value| i128::try_from(value.clone()).ok();
    let float = |value: &Value| f64::try_from(value.clone()).ok().or_else(|| whole(value).map(|whole| whole as f64));
    let is_whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    match (is_whole(a) && is_whole(b)).then(|| whole(a).zip(whole(b))).flatten() {
        Some((a, b)) => Some(Numbers::Whole(a, b)),
        None => float(a).zip(float(b)).map(|(a, b)| Numbers::Floats(a, b)),
    }
}

fn whole_number(number: Option<i128>, operator: &str) -> Result<Value, Error> {
    let number = number.ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("the result of {operator} is not within 128 bits"))
    })?;
    Ok(i64::try_from(number).map_or_else(|_| Value::from(number), Value::from))
}

/// `a + b`.
pub(super) fn add(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        budget.take(left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(a) && is_list(b) && a.is_tuple() == b.is_tuple() {
        let mut items = collect(budget, a)?;
        items.extend(collect(budget, b)?);
        return Ok(if a.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) });
    }
    match numbers(a, b) {
        Some(Numbers::Whole(a, b)) => whole_number(a.checked_add(b), "+"),
        Some(Numbers::Floats(a, b)) => Ok(Value::from(a + b)),
        None => Err(impossible("+", a, b)),
    }
}

fn mul(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (value, count) = if repeated(a) { (a, b) } else { (b, a) };
    if !repeated(value) {
        return match numbers(a, b) {
            Some(Numbers::Whole(a, b)) => whole_number(a.checked_mul(b), "*"),
            Some(Numbers::Floats(a, b)) => Ok(Value::from(a * b)),
            None => Err(impossible("*", a, b)),
        };
    }
    let count = count.as_usize().ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "strings and lists can only be multiplied with whole numbers from 0")
    })?;
    if let Some(text) = value.as_str() {
        budget.take(text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    let items = collect(budget, value)?;
    budget.take_list(items.len().saturating_mul(count))?;
    let length = items.len() * if items.is_empty() { 0 } else { count };
    let items: Vec<Value> = items.iter().cycle().take(length).cloned().collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

fn concat(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let mut out = Writer::new(budget);
    python::write(a, &mut out)?;
    python::write(b, &mut out)?;
    out.finish().map(Value::from)
}

/// Checks that `a` and `b` can be compared: both are read at most as far as the other one reaches.
fn compared(budget: &Budget, a: &Value, b: &Value) -> Result<(), Error> {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => budget.has_steps(a.len().min(b.len())),
        _ if is_container(a) && is_container(b) => budget.weigh(a).and_then(|_| budget.weigh(b)).map(drop),
        _ => Ok(()),
    }
}

fn contains(budget: &Budget, container: &Value, value: &Value) -> Result<bool, Error> {
    budget.weigh(value)?;
    if let Some(text) = container.as_str() {
        budget.has_steps(text.len())?;
        return match value.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => Ok(text.contains(&python::display(value, budget)?)),
        };
    }
    match container.kind() {
        ValueKind::Undefined | ValueKind::Plain => Ok(false),
        ValueKind::Map => Ok(container.as_object().is_some_and(|map| map.get_value(value).is_some())),
        ValueKind::Seq | ValueKind::Iterable => {
            budget.weigh(container)?;
            for item in container.try_iter()?.checked() {
                if item? == *value {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => Err(Error::new(ErrorKind::InvalidOperation, "cannot perform a containment check on this value")),
    }
}

fn item(budget: &Budget, container: &Value, key: &Value) -> Result<Value, Error> {
    budget.weigh(key)?;
    if let Some(text) = container.as_str() {
        budget.has_steps(text.len())?;
    }
    container.get_item(key)
}

/// `loop.cycle(…)`. The engine's own divides by the number of values.
fn cycle(state: &mut State, object: Value, values: Rest<Value>) -> Result<Value, Error> {
    if object.as_object().is_none_or(|object| !object.type_name().ends_with("::Loop")) {
        return object.call_method(state, "cycle", &values);
    }
    let turn = object.get_attr("index0")?.as_usize().unwrap_or(0);
    let value = turn.checked_rem(values.len()).and_then(|at| values.get(at));
    value.cloned().ok_or_else(|| Error::new(ErrorKind::MissingArgument, "cycle needs at least one value"))
}

/// `value[start:stop:step]` as Python computes it.
fn slice(budget: &Budget, value: &Value, bounds: [Value; 3]) -> Result<Value, Error> {
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(bounds) {
        *number = if bound.is_none() { None } else { Some(i64::try_from(bound)?) };
    }
    let step = numbers[2].unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        return slice_text(budget, text, numbers[0], numbers[1], step);
    }
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if !is_list(value) {
        let what = format!("value of type {} cannot be sliced", value.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    let items = collect(budget, value)?;
    let items: Vec<Value> = indices(items.len(), numbers[0], numbers[1], step).map(|at| items[at].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

fn slice_text(budget: &Budget, text: &str, start: Option<i64>, stop: Option<i64>, step: i64) -> Result<Value, Error> {
    budget.take(text.len())?;
    let len = text.chars().count();
    if step == 1 {
        let range = indices(len, start, stop, 1);
        let (skip, take) = (range.clone().next().unwrap_or(0), range.count());
        return Ok(Value::from(text.chars().skip(skip).take(take).collect::<String>()));
    }
    budget.has(len.saturating_mul(size_of::<char>()))?;
    let chars: Vec<char> = text.chars().collect();
    Ok(Value::from(indices(len, start, stop, step).map(|at| chars[at]).collect::<String>()))
}

/// The indices of a slice of `len` elements, each below `len`.
fn indices(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> + Clone {
    let len = len as i64;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let bound = |bound: Option<i64>, otherwise| match bound {
        None => otherwise,
        Some(at) => (if at < 0 { at.saturating_add(len) } else { at }).clamp(lowest, highest),
    };
    let start = bound(start, if step > 0 { lowest } else { highest });
    let stop = bound(stop, if step > 0 { highest } else { lowest });
    let distance = if step > 0 { stop - start } else { start - stop };
    let width = step.unsigned_abs();
    let count = if distance > 0 { (distance as u64).div_ceil(width) } else { 0 };
    // Each index lies between `start` and `stop`, so nothing overflows.
    (0..count).map(move |n| {
        let at = if step > 0 { start as u64 + n * width } else { start as u64 - n * width };
        at as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_those_of_python() {
        let cut = |len, start, stop, step| indices(len, start, stop, step).collect::<Vec<_>>();
        assert_eq!(cut(4, None, None, 1), [0, 1, 2, 3]);
        assert_eq!(cut(4, None, None, -1), [3, 2, 1, 0]);
        assert_eq!(cut(4, Some(1), Some(-1), 1), [1, 2]);
        assert_eq!(cut(4, Some(-2), None, 1), [2, 3]);
        assert_eq!(cut(4, Some(-9), Some(9), 2), [0, 2]);
        assert_eq!(cut(4, Some(2), None, -1), [2, 1, 0]);
        assert_eq!(cut(4, Some(-1), Some(0), -2), [3, 1]);
        assert_eq!(cut(4, Some(9), Some(-9), -3), [3, 0]);
        for (start, stop, step) in [(Some(3), Some(1), 1), (Some(1), Some(3), -1), (Some(4), None, 1)] {
            assert!(cut(4, start, stop, step).is_empty());
        }
        assert!(cut(0, None, None, -1).is_empty());
        assert_eq!(cut(3, Some(i64::MIN), Some(i64::MAX), i64::MAX), [0]);
        assert_eq!(cut(3, Some(i64::MAX), Some(i64::MIN), i64::MIN), [2]);
    }
}
