//! A bound on what a format string makes, before it is formatted.

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use super::budget::Budget;

/// The longest text of a number without a width or precision: a float with all its digits, in any form.
const NUMBER_BYTES: usize = 512;
/// Bytes of an escaped character for each byte of it, in `repr`.
const WIDEST_ESCAPE: usize = 4;

/// Checks that the budget has what `text` makes of `args`. A field begins with `mark`: `%` or `{`.
///
/// Widths that are arguments themselves are refused: those of the text can be read here.
pub(super) fn check_format(budget: &Budget, text: &str, args: &[Value], mark: char) -> Result<(), Error> {
    let weights = args.iter().map(|arg| budget.weigh(arg)).collect::<Result<Vec<_>, _>>()?;
    let longest = weights.into_iter().max().unwrap_or(0);
    let fields = text.matches(mark).count();
    if mark == '%' && text.contains('*') && args.iter().any(|arg| arg.kind() == ValueKind::Number)
        || has_nested(text, mark)
    {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "a width or precision that is an argument is not supported",
        ));
    }
    let widths = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = widths.map(|digits| digits.parse().unwrap_or(usize::MAX)).fold(0, usize::saturating_add);
    let field = longest.saturating_mul(WIDEST_ESCAPE).saturating_add(NUMBER_BYTES);
    // A separator between thousands makes a number a third longer.
    let widths = widths.saturating_mul(2);
    budget.has(text.len().saturating_add(fields.saturating_mul(field)).saturating_add(widths))
}

/// Whether a field in braces contains another.
fn has_nested(text: &str, mark: char) -> bool {
    let mut depth = 0;
    mark == '{'
        && text.replace("{{", "").chars().any(|c| {
            match c {
                '{' => depth += 1,
                '}' => depth = 0,
                _ => {}
            }
            depth > 1
        })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(text: &str, args: &[Value], mark: char) -> bool {
        check_format(&Budget::new(1 << 17, Duration::from_secs(60)), text, args, mark).is_ok()
    }

    #[test]
    fn widths_and_arguments_are_counted() {
        let long = [Value::from("x".repeat(9000))];
        assert!(check("%5s %d", &[Value::from("a"), Value::from(1)], '%') && check("{} {:>5}", &long, '{'));
        assert!(!check("%100000s", &[Value::from("a")], '%') && !check("%.99999999999999999999f", &[], '%'));
        assert!(!check("{:>100000}", &[Value::from("a")], '{') && !check("{0}{0}{0}{0}{0}", &long, '{'));
    }

    #[test]
    fn widths_that_are_arguments_are_refused() {
        assert!(!check("%*d", &[Value::from(9), Value::from(1)], '%') && check("%s * %s", &[Value::from("a")], '%'));
        assert!(!check("{:{}}", &[Value::from(1), Value::from(9)], '{') && check("{{{}}}", &[Value::from(1)], '{'));
    }
}
