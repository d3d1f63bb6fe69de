//! A choice and its options as people write them: `name:key=value,key=value`.

use std::fmt;
use std::ops::RangeInclusive;

/// Why a strategy or policy cannot be had.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// A name that is none.
    #[error("unknown {what} '{name}'; known are {known}")]
    UnknownName {
        /// What was asked for.
        what: &'static str,
        /// As written.
        name: String,
        /// All there are.
        known: String,
    },
    /// An option that this one does not have.
    #[error("'{spec}': {name} has no option '{option}'; {known}")]
    UnknownOption {
        /// As written.
        spec: String,
        /// Whose option.
        name: &'static str,
        /// As written.
        option: String,
        /// All there are.
        known: String,
    },
    /// An option's value that cannot be.
    #[error("'{spec}': {option} must be {wanted}, not '{got}'")]
    InvalidValue {
        /// As written.
        spec: String,
        /// Which option.
        option: &'static str,
        /// What it can be.
        wanted: String,
        /// As written.
        got: String,
    },
    /// An option that has to be given and is not, or one given twice, or two that exclude each other.
    #[error("'{spec}': {problem}")]
    InvalidOptions {
        /// As written.
        spec: String,
        /// What is wrong.
        problem: String,
    },
    /// Something that is not at hand, or a model that does not suit.
    #[error("{name} {problem}")]
    Unsuitable {
        /// Which strategy or policy.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
}

/// One option of a strategy or policy.
pub struct Knob {
    /// The key.
    pub name: &'static str,
    /// What it does.
    pub about: &'static str,
    /// What it can be.
    pub domain: Domain,
    /// What it is if not given; `None` if it may be absent.
    pub default: Option<&'static str>,
}

/// The values an option can have.
pub enum Domain {
    /// A whole number.
    Count(RangeInclusive<u64>),
    /// Any number.
    Number(RangeInclusive<f64>),
    /// One of these words.
    Word(&'static [&'static str]),
}

impl Domain {
    fn holds(&self, value: &str) -> bool {
        match self {
            Domain::Count(range) => value.parse().is_ok_and(|n| range.contains(&n)),
            Domain::Number(range) => value.parse().is_ok_and(|n| range.contains(&n)),
            Domain::Word(words) => words.contains(&value),
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
        }
    }
}

/// A row of a table that specs name.
pub trait Named: 'static {
    /// The name in specs.
    fn name(&self) -> &'static str;

    /// Every option.
    fn knobs(&self) -> &'static [Knob];
}

/// The options of a spec, checked against the row they are for.
#[derive(Clone)]
pub struct SpecOptions {
    name: &'static str,
    knobs: &'static [Knob],
    given: Vec<(&'static str, String)>,
}

impl SpecOptions {
    /// Finds the row of `table` that `spec` names, and checks its options. `what` says in messages what rows are.
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
        let (key, value) =
            pair.split_once('=').ok_or_else(|| wrong(format!("'{pair}' is not of the form option=value")))?;
        let knob = self.knobs.iter().find(|k| k.name == key).ok_or_else(|| PolicyError::UnknownOption {
            spec: spec.to_owned(),
            name: self.name,
            option: key.to_owned(),
            known: match self.knobs {
                [] => "it has none".to_owned(),
                knobs => format!("known are {}", list(knobs.iter().map(|k| k.name))),
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

    /// A word or a number as it was written; `None` if it is neither given nor has a default.
    pub fn text(&self, name: &str) -> Option<&str> {
        let given = self.given.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        given.or_else(|| self.knobs.iter().find(|k| k.name == name).expect("an option of this row").default)
    }

    /// An option without which there is no meaning.
    pub fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, PolicyError> {
        value.ok_or_else(|| self.wrong(format!("{name} has to be given, as in {}:{name}=…", self.name)))
    }

    /// Says what is wrong with the options together.
    pub fn wrong(&self, problem: String) -> PolicyError {
        PolicyError::InvalidOptions { spec: self.to_string(), problem }
    }
}

/// The spec that was parsed.
impl fmt::Display for SpecOptions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)?;
        for (i, (key, value)) in self.given.iter().enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { ':' } else { ',' })?;
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
            ],
        ),
    ];

    fn parse(spec: &str) -> Result<SpecOptions, String> {
        SpecOptions::parse(spec, "thing", TABLE).map(|(_, options)| options).map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_given_counts_and_what_is_not_has_its_default() {
        let options = parse("fancy:how=not,n=3").unwrap();
        assert_eq!((options.count("n"), options.number("x"), options.text("how")), (Some(3), Some(0.5), Some("not")));
        assert_eq!(options.to_string(), "fancy:how=not,n=3");
        assert_eq!(parse("fancy").unwrap().count("n"), None);
        assert_eq!(parse("plain").unwrap().to_string(), "plain");
    }

    #[test]
    fn what_cannot_be_is_one_sentence() {
        for (spec, message) in [
            ("", "unknown thing ''; known are plain, fancy"),
            ("psychic:n=1", "unknown thing 'psychic'; known are plain, fancy"),
            ("plain:n=1", "'plain:n=1': plain has no option 'n'; it has none"),
            ("fancy:m=1", "'fancy:m=1': fancy has no option 'm'; known are n, x, how"),
            ("fancy:n=0", "'fancy:n=0': n must be a whole number of at least 1, not '0'"),
            ("fancy:n=-1", "'fancy:n=-1': n must be a whole number of at least 1, not '-1'"),
            ("fancy:x=1.5", "'fancy:x=1.5': x must be a number from 0 to 1, not '1.5'"),
            ("fancy:x=nan", "'fancy:x=nan': x must be a number from 0 to 1, not 'nan'"),
            ("fancy:how=soso", "'fancy:how=soso': how must be so or not, not 'soso'"),
            ("fancy:", "'fancy:': '' is not of the form option=value"),
            ("fancy:n", "'fancy:n': 'n' is not of the form option=value"),
            ("fancy:n=1,n=2", "'fancy:n=1,n=2': n is given twice"),
        ] {
            assert_eq!(parse(spec).err().as_deref(), Some(message));
        }
    }
}
