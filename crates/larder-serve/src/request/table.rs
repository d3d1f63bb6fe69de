//! Tables of the fields that requests may have. A body is checked by its table, parsers see no other field, and
//! `/openapi.json` and `docs/serve-fields.md` list the same rows.

use serde_json::Value;

use super::fields::{whole, wrong_type};
use super::neutral::Neutral;
use crate::error::{ApiError, excerpt};

/// An object of a request.
pub struct Object {
    /// Its name in `/openapi.json`.
    pub name: &'static str,
    /// Its fields, in groups that several objects share.
    pub groups: &'static [&'static [Field]],
}

/// A field of an object.
#[derive(Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub kind: Kind,
    /// What it does, or why it is refused.
    pub about: &'static str,
    /// Whether the object is refused without it.
    pub is_required: bool,
}

/// The values that a field may have.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Anything; the parser decides.
    Any,
    /// A string.
    Text,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A boolean; without one, this holds.
    Flag(bool),
    /// A boolean that may be missing.
    Boolean,
    /// A number in this range.
    Number(f64, f64),
    /// A whole number in this range.
    Integer(i128, i128),
    /// The id of a token.
    Token,
    /// An array.
    List(&'static Kind),
    /// An object with any keys.
    Map,
    /// An object.
    Object(&'static Object),
    /// An array of objects.
    Objects(&'static Object),
    /// A value of one of these kinds.
    Either(&'static [Kind]),
    /// Only values that change nothing.
    Refused(Neutral),
    /// Anything; no parser reads it.
    Unread,
}

/// Some strings.
pub const TEXTS: Kind = Kind::List(&Kind::Text);

/// A field that may be missing.
pub const fn field(name: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { name, kind, about, is_required: false }
}

impl Field {
    /// The same field of an object that is refused without it.
    pub const fn required(self) -> Self {
        Field { is_required: true, ..self }
    }
}

impl Object {
    /// All fields.
    pub fn fields(&self) -> impl Iterator<Item = &'static Field> + use<> {
        self.groups.iter().copied().flatten()
    }

    /// The field of this name.
    pub fn find(&self, name: &str) -> Option<&'static Field> {
        self.fields().find(|field| field.name == name)
    }
}

impl Kind {
    /// The table of the objects that are of this kind or in it.
    pub fn object(&self) -> Option<&'static Object> {
        match self {
            Kind::Object(table) | Kind::Objects(table) => Some(table),
            Kind::Either(kinds) => kinds.iter().find_map(Kind::object),
            _ => None,
        }
    }

    /// Refuses a value that is not of this kind; errors call it `name`. Objects in it are checked when they are read.
    pub fn check(&self, name: &str, value: &Value) -> Result<(), ApiError> {
        let invalid = |message| Err(ApiError::invalid_field(name, "invalid_value", message));
        let range = |low: &dyn std::fmt::Display, high: &dyn std::fmt::Display| {
            invalid(format!("Invalid value for '{name}': expected {low} to {high}, but got {value} instead."))
        };
        if !self.has_type(value) {
            return Err(wrong_type(name, &self.names().0, value));
        }
        match self {
            Kind::Number(low, high) if !value.as_f64().is_some_and(|n| (*low..=*high).contains(&n)) => range(low, high),
            Kind::Integer(low, high) if !whole(value).is_some_and(|n| (*low..=*high).contains(&n)) => range(low, high),
            Kind::Choice(known) => match value.as_str().filter(|given| !known.contains(given)) {
                None => Ok(()),
                Some(other) => {
                    let (other, known) = (excerpt(other), known.join(", "));
                    invalid(format!("Invalid value for '{name}': '{other}' is not one of {known}."))
                }
            },
            Kind::Either(kinds) => {
                kinds.iter().find(|kind| kind.has_type(value)).map_or(Ok(()), |kind| kind.check(name, value))
            }
            _ => Ok(()),
        }
    }

    /// Whether a value has the type of this kind, whatever its range.
    fn has_type(&self, value: &Value) -> bool {
        match self {
            Kind::Any | Kind::Refused(_) | Kind::Unread => true,
            Kind::Text | Kind::Choice(_) => value.is_string(),
            Kind::Flag(_) | Kind::Boolean => value.is_boolean(),
            Kind::Number(..) => value.is_number(),
            Kind::Integer(..) => whole(value).is_some(),
            Kind::Token => whole(value).is_some_and(|id| u32::try_from(id).is_ok()),
            Kind::List(kind) => value.as_array().is_some_and(|list| list.iter().all(|value| kind.has_type(value))),
            Kind::Map | Kind::Object(_) => value.is_object(),
            Kind::Objects(_) => value.is_array(),
            Kind::Either(kinds) => kinds.iter().any(|kind| kind.has_type(value)),
        }
    }

    /// How errors call one value of this kind, and several.
    fn names(&self) -> (String, String) {
        let both = |one: &str, more: &str| (one.to_owned(), more.to_owned());
        match self {
            Kind::Any | Kind::Refused(_) | Kind::Unread => both("a value", "values"),
            Kind::Text | Kind::Choice(_) => both("a string", "strings"),
            Kind::Flag(_) | Kind::Boolean => both("a boolean", "booleans"),
            Kind::Number(..) => both("a number", "numbers"),
            Kind::Integer(..) => both("an integer", "integers"),
            Kind::Token => both("a token id", "token ids"),
            Kind::List(kind) => (format!("an array of {}", kind.names().1), format!("arrays of {}", kind.names().1)),
            Kind::Map | Kind::Object(_) => both("an object", "objects"),
            Kind::Objects(_) => both("an array of objects", "arrays of objects"),
            Kind::Either(kinds) => {
                let (one, more): (Vec<_>, Vec<_>) = kinds.iter().map(Kind::names).unzip();
                (one.join(" or "), more.join(" or "))
            }
        }
    }
}
