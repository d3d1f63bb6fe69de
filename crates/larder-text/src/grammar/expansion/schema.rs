//! The expanded size of a JSON Schema: alternatives that have to hold together are combined, and patterns of keys
//! compared in pairs.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::regex_units;

/// Keywords that are combined with those beside them.
const COMBINED: [&str; 6] = ["allOf", "anyOf", "oneOf", "enum", "const", "$ref"];

/// Units of a schema.
pub(super) fn units(schema: &Value) -> u64 {
    let mut sizes = Sizes { root: schema, references: HashMap::new() };
    sizes.total(schema)
}

/// How large a schema is, and in how many alternatives the largest of its parts is divided.
#[derive(Clone, Copy)]
struct Size {
    alternatives: u64,
    units: u64,
}

impl Size {
    const ONE: Size = Size { alternatives: 1, units: 1 };

    /// One schema or the other.
    fn or(self, other: Size) -> Size {
        let alternatives = self.alternatives.saturating_add(other.alternatives);
        Size { alternatives, units: self.units.saturating_add(other.units) }
    }

    /// Both: each alternative of one is combined with a copy of the other.
    fn and(self, other: Size) -> Size {
        let copies = self.alternatives.saturating_mul(other.units);
        Size {
            alternatives: self.alternatives.saturating_mul(other.alternatives),
            units: copies.saturating_add(other.alternatives.saturating_mul(self.units)),
        }
    }

    /// Parts beside each other.
    fn beside(self, other: Size) -> Size {
        Size { alternatives: self.alternatives.max(other.alternatives), units: self.units.saturating_add(other.units) }
    }
}

struct Sizes<'a> {
    root: &'a Value,
    /// By address; `None` while it is counted.
    references: HashMap<&'a str, Option<Size>>,
}

impl<'a> Sizes<'a> {
    /// Units of a schema and of all that it contains, definitions included.
    fn total(&mut self, value: &'a Value) -> u64 {
        let own = self.size(value).units;
        let definitions = ["$defs", "definitions"].into_iter().filter_map(|key| value.get(key)?.as_object());
        let all: Vec<&Value> = definitions.flat_map(Map::values).collect();
        all.into_iter().map(|inner| self.total(inner)).fold(own, u64::saturating_add)
    }

    fn size(&mut self, value: &'a Value) -> Size {
        match value {
            Value::Object(keys) => self.object(keys),
            Value::Array(items) => items.iter().fold(Size::ONE, |all, item| all.beside(self.size(item))),
            Value::String(text) => Size { units: 1 + text.len() as u64 / 8, ..Size::ONE },
            _ => Size::ONE,
        }
    }

    fn object(&mut self, keys: &'a Map<String, Value>) -> Size {
        let mut plain = Size::ONE;
        let mut combined = Vec::new();
        for (key, value) in keys {
            match key.as_str() {
                "$defs" | "definitions" | "description" | "examples" | "default" | "title" => {}
                key if COMBINED.contains(&key) => combined.push(self.applied(key, value)),
                "pattern" => plain.units = plain.units.saturating_add(value.as_str().map_or(0, regex_units)),
                "properties" => plain = plain.beside(self.members(value)),
                "patternProperties" => plain = plain.beside(patterns(value)).beside(self.members(value)),
                _ => plain = plain.beside(self.size(value)).beside(Size { units: key.len() as u64 / 8, ..Size::ONE }),
            }
        }
        combined.into_iter().fold(plain, Size::and)
    }

    /// Schemas by names, which may be those of keywords.
    fn members(&mut self, value: &'a Value) -> Size {
        let members = value.as_object().into_iter().flatten();
        members.fold(Size::ONE, |all, (name, inner)| {
            all.beside(self.size(inner)).beside(Size { units: 1 + name.len() as u64 / 8, ..Size::ONE })
        })
    }

    fn applied(&mut self, key: &str, value: &'a Value) -> Size {
        match (key, value) {
            ("allOf", Value::Array(all)) => all.iter().fold(Size::ONE, |size, inner| size.and(self.size(inner))),
            ("anyOf" | "oneOf" | "enum", Value::Array(all)) => {
                all.iter().map(|inner| self.size(inner)).reduce(Size::or).unwrap_or(Size::ONE)
            }
            ("$ref", Value::String(address)) => self.referred(address),
            _ => self.size(value),
        }
    }

    /// The schema at an address, which is copied where it is combined. One that refers to itself counts once.
    fn referred(&mut self, address: &'a str) -> Size {
        if let Some(known) = self.references.get(address) {
            return known.unwrap_or(Size::ONE);
        }
        self.references.insert(address, None);
        let found = address.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
        let size = found.map_or(Size::ONE, |found| self.size(found));
        self.references.insert(address, Some(size));
        size
    }
}

/// Each two patterns are compared, in the presence of all.
fn patterns(value: &Value) -> Size {
    let (count, units) = value.as_object().map_or((0, 0), |patterns| {
        let units = patterns.keys().map(|pattern| regex_units(pattern)).fold(0, u64::saturating_add);
        (patterns.len() as u64, units)
    });
    Size { units: count.saturating_mul(count).saturating_mul(units) / 2, ..Size::ONE }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_holds_together_is_multiplied() {
        let any = |count: usize| json!({"anyOf": vec![json!({"type": "null"}); count]});
        assert!(units(&any(3000)) < 20_000);
        assert!(units(&json!({"type": "string", "enum": vec!["word"; 3000]})) < 20_000);
        let both = units(&json!({"allOf": [any(300), any(300)]}));
        assert!((90_000..1_000_000).contains(&both), "{both}");
        assert!(units(&json!({"allOf": vec![any(2); 40]})) > 1 << 40);
        let wide: Map<String, Value> = (0..10_000).map(|i| (format!("key{i}"), json!(true))).collect();
        assert!(units(&json!({"properties": wide, "anyOf": any(5000)["anyOf"]})) > 10_000_000);
        // Names of properties are no keywords.
        assert!(units(&json!({"properties": {"default": {"allOf": [any(300), any(300)]}}})) > 90_000);
    }

    #[test]
    fn references_are_copied_where_they_are_combined() {
        let mut definitions = Map::new();
        for i in 0..40 {
            let next = json!({"$ref": format!("#/$defs/a{}", i + 1)});
            definitions.insert(format!("a{i}"), json!({"allOf": [next, next]}));
        }
        definitions.insert("a40".into(), json!({"anyOf": [{"type": "null"}, {"type": "boolean"}]}));
        assert!(units(&json!({"$ref": "#/$defs/a0", "$defs": definitions})) > 1 << 40);
        let list =
            json!({"$defs": {"list": {"properties": {"next": {"$ref": "#/$defs/list"}}}}, "$ref": "#/$defs/list"});
        assert!(units(&list) < 50);
        assert!(units(&json!({"$ref": "#"})) < 10);
    }

    #[test]
    fn patterns_of_keys_are_compared_in_pairs() {
        let of = |count: usize| -> Value {
            let patterns = (0..count).map(|i| (format!("^key{i}_[a-z]+$"), json!({"type": "integer"})));
            json!({"patternProperties": patterns.collect::<Map<_, _>>()})
        };
        assert!(units(&of(8)) < 10_000 && units(&of(300)) > 10_000_000, "{} {}", units(&of(8)), units(&of(300)));
    }
}
