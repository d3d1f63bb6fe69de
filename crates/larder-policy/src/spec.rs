//! Specs as users write them: a name with options, `name:key=value,key=value`. A switch may be given by its key alone.

use std::fmt;
use std::ops::RangeInclusive;

/// Why a strategy or policy cannot be made.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// The table has no row of this name.
    #[error("unknown {what} '{name}'; available: {known}")]
    UnknownName {
        /// The kind of row: an eviction policy or a routing strategy.
        what: &'static str,
        /// The name as written.
        name: String,
        /// The names in the table.
        known: String,
    },
    /// The row has no such option.
    #[error("'{spec}': {name} has no option '{option}'; {known}")]
    UnknownOption {
        /// The spec as written.
        spec: String,
        /// The name of the row.
        name: &'static str,
        /// The option as written.
        option: String,
        /// The options of the row.
        known: String,
    },
    /// The value of an option is outside its domain.
    #[error("'{spec}': {option} must be {wanted}, not '{got}'")]
    InvalidValue {
        /// The spec as written.
        spec: String,
        /// The name of the option.
        option: &'static str,
        /// The values that the option takes.
        wanted: String,
        /// The value as written.
        got: String,
    },
    /// A required option is missing, an option is given twice, or two options exclude each other.
    #[error("'{spec}': {problem}")]
    InvalidOptions {
        /// The spec as written.
        spec: String,
        /// The fault of the options.
        problem: String,
    },
    /// An input is missing, or the model does not suit the strategy or policy.
    #[error("{name} {problem}")]
    Unsuitable {
        /// The name of the strategy or policy.
        name: &'static str,
        /// The input that is missing or unsuitable.
        problem: String,
    },
}

/// One option of a strategy or policy.
pub struct Knob {
    /// The key in specs.
    pub name: &'static str,
    /// Its effect, in a few words.
    pub about: &'static str,
    /// The values that it takes.
    pub domain: Domain,
    /// The value if the spec does not give one; `None` for an option without a default.
    pub default: Option<&'static str>,
}

/// The values that an option takes.
pub enum Domain {
    /// A whole number in this range.
    Count(RangeInclusive<u64>),
    /// A number in this range.
    Number(RangeInclusive<f64>),
    /// One of these words.
    Word(&'static [&'static str]),
    /// `yes` or `no`; the key alone means `yes`.
    Switch,
}

/// A switch that is on.
const YES: &str = "yes";
/// A switch that is off.
const NO: &str = "no";

impl Domain {
    fn holds(&self, value: &str) -> bool {
        match self {
            Domain::Count(range) => value.parse().is_ok_and(|n| range.contains(&n)),
            Domain::Number(range) => value.parse().is_ok_and(|n| range.contains(&n)),
            Domain::Word(words) => words.contains(&value),
            Domain::Switch => [YES, NO].contains(&value),
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Domain::Count(r) if *r.end() == u64::MAX => write!(f, "a whole number of at least {}", r.start()),
            Domain::Count(r) => write!(f, "a whole number from {} to {}", r.start(), r.end()),
            Domain::Number(r) if *r.end() == f64::MAX => write!(f, "a number of at least {}", r.start()),
            Domain::Number(r) => write!(f, "a number from {} to {}", r.start(), r.end()),
            Domain::Word(words) => f.write_str(&words.join(" or ")),
            Domain::Switch => write!(f, "{YES} or {NO}"),
        }
    }
}

/// A row of a table that specs refer to by name.
pub trait Named: 'static {
    /// The name in specs.
    fn name(&self) -> &'static str;

    /// Every option of the row.
    fn knobs(&self) -> &'static [Knob];
}

/// The options of a spec, checked against the row that it names.
#[derive(Clone)]
pub struct SpecOptions {
    name: &'static str,
    knobs: &'static [Knob],
    given: Vec<(&'static str, String)>,
}

impl SpecOptions {
    /// Finds the row of `table` that `spec` names, and checks the options. `what` names the kind of row in messages.
    pub fn parse<T: Named>(
        spec: &str,
        what: &'static str,
        table: &'static [T],
    ) -> Result<(&'static T, SpecOptions), PolicyError> {
        let (name, rest) = spec.split_once(':').map_or((spec, None), |(name, rest)| (name, Some(rest)));
        let row = table.iter().find(|row| row.name() == name).ok_or_else(|| PolicyError::UnknownName {
            what,
            name: name.to_owned(),
            known: list(table.iter().map(T::name)),
        })?;
        let mut options = SpecOptions { name: row.name(), knobs: row.knobs(), given: Vec::new() };
        for pair in rest.into_iter().flat_map(|rest| rest.split(',')) {
            options.add(spec, pair)?;
        }
        Ok((row, options))
    }

    fn add(&mut self, spec: &str, pair: &str) -> Result<(), PolicyError> {
        let wrong = |problem: String| PolicyError::InvalidOptions { spec: spec.to_owned(), problem };
        let is_switch = |key| self.knobs.iter().any(|k| k.name == key && matches!(k.domain, Domain::Switch));
        let (key, value) = match pair.split_once('=') {
            None if is_switch(pair) => (pair, YES),
            split => split.ok_or_else(|| wrong(format!("'{pair}' is not of the form key=value")))?,
        };
        let knob = self.knobs.iter().find(|k| k.name == key).ok_or_else(|| PolicyError::UnknownOption {
            spec: spec.to_owned(),
            name: self.name,
            option: key.to_owned(),
            known: match self.knobs {
                [] => "it takes no options".to_owned(),
                knobs => format!("available: {}", list(knobs.iter().map(|k| k.name))),
            },
        })?;
        if self.given.iter().any(|(name, _)| *name == knob.name) {
            return Err(wrong(format!("{key} is given twice")));
        }
        if !knob.domain.holds(value) {
            let (spec, wanted, got) = (spec.to_owned(), knob.domain.to_string(), value.to_owned());
            return Err(PolicyError::InvalidValue { spec, option: knob.name, wanted, got });
        }
        self.given.push((knob.name, value.to_owned()));
        Ok(())
    }

    /// A whole number; `None` if it is neither given nor has a default.
    pub fn count(&self, name: &str) -> Option<u64> {
        self.text(name).map(|v| v.parse().expect("checked when it was given"))
    }

    /// A number; `None` if it is neither given nor has a default.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.text(name).map(|v| v.parse().expect("checked when it was given"))
    }

    /// A word or a number as written; `None` if it is neither given nor has a default.
    pub fn text(&self, name: &str) -> Option<&str> {
        let given = self.given.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        given.or_else(|| self.knobs.iter().find(|k| k.name == name).expect("an option of this row").default)
    }

    /// Whether a switch is on; off if it is neither given nor has a default.
    pub fn is_on(&self, name: &str) -> bool {
        self.text(name) == Some(YES)
    }

    /// The value of an option that has no sensible default; an error if it is not given.
    pub fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, PolicyError> {
        value.ok_or_else(|| self.wrong(format!("option '{name}' is required, as in {}:{name}=…", self.name)))
    }

    /// An error about the options taken together.
    pub fn wrong(&self, problem: String) -> PolicyError {
        PolicyError::InvalidOptions { spec: self.to_string(), problem }
    }
}

/// Prints the spec that was parsed.
impl fmt::Display for SpecOptions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)?;
        for (i, (key, value)) in self.given.iter().enumerate() {
            let switch = self.knobs.iter().any(|k| k.name == *key && matches!(k.domain, Domain::Switch));
            write!(f, "{}{key}", if i == 0 { ':' } else { ',' })?;
            // The short form of a switch that is on, so that the spec has one spelling in tables.
            if !(switch && value == YES) {
                write!(f, "={value}")?;
            }
        }
        Ok(())
    }
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Row(&'static str, &'static [Knob]);

    impl Named for Row {
        fn name(&self) -> &'static str {
            self.0
        }

        fn knobs(&self) -> &'static [Knob] {
            self.1
        }
    }

    const TABLE: &[Row] = &[
        Row("plain", &[]),
        Row(
            "fancy",
            &[
                Knob { name: "n", about: "", domain: Domain::Count(1..=u64::MAX), default: None },
                Knob { name: "x", about: "", domain: Domain::Number(0.0..=1.0), default: Some("0.5") },
                Knob { name: "how", about: "", domain: Domain::Word(&["so", "not"]), default: Some("so") },
                Knob { name: "on", about: "", domain: Domain::Switch, default: Some("no") },
            ],
        ),
    ];

    fn parse(spec: &str) -> Result<SpecOptions, String> {
        SpecOptions::parse(spec, "thing", TABLE).map(|(_, options)| options).map_err(|e| e.to_string())
    }

    #[test]
    fn a_given_value_replaces_the_default() {
        let options = parse("fancy:how=not,n=3").unwrap();
        assert_eq!((options.count("n"), options.number("x"), options.text("how")), (Some(3), Some(0.5), Some("not")));
        assert_eq!(options.to_string(), "fancy:how=not,n=3");
        assert_eq!(parse("fancy").unwrap().count("n"), None);
        assert_eq!(parse("plain").unwrap().to_string(), "plain");
    }

    #[test]
    fn a_switch_is_on_by_its_key_alone() {
        for (spec, on, printed) in [
            ("fancy", false, "fancy"),
            ("fancy:on", true, "fancy:on"),
            ("fancy:on=yes,n=3", true, "fancy:on,n=3"),
            ("fancy:n=3,on=no", false, "fancy:n=3,on=no"),
        ] {
            let options = parse(spec).unwrap();
            assert_eq!((options.is_on("on"), options.to_string()), (on, printed.to_owned()));
        }
    }

    #[test]
    fn an_invalid_spec_is_one_sentence() {
        for (spec, message) in [
            ("", "unknown thing ''; available: plain, fancy"),
            ("psychic:n=1", "unknown thing 'psychic'; available: plain, fancy"),
            ("plain:n=1", "'plain:n=1': plain has no option 'n'; it takes no options"),
            ("fancy:m=1", "'fancy:m=1': fancy has no option 'm'; available: n, x, how, on"),
            ("fancy:n=0", "'fancy:n=0': n must be a whole number of at least 1, not '0'"),
            ("fancy:n=-1", "'fancy:n=-1': n must be a whole number of at least 1, not '-1'"),
            ("fancy:x=1.5", "'fancy:x=1.5': x must be a number from 0 to 1, not '1.5'"),
            ("fancy:x=nan", "'fancy:x=nan': x must be a number from 0 to 1, not 'nan'"),
            ("fancy:how=soso", "'fancy:how=soso': how must be so or not, not 'soso'"),
            ("fancy:", "'fancy:': '' is not of the form key=value"),
            ("fancy:n", "'fancy:n': 'n' is not of the form key=value"),
            ("fancy:n=1,n=2", "'fancy:n=1,n=2': n is given twice"),
            ("fancy:on,on=no", "'fancy:on,on=no': on is given twice"),
            ("fancy:on=1", "'fancy:on=1': on must be yes or no, not '1'"),
        ] {
            assert_eq!(parse(spec).err().as_deref(), Some(message));
        }
    }
}
