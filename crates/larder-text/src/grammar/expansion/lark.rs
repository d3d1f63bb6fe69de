//! The expanded size of a grammar in Lark: terminals are copied into the terminals that refer to them, rules are not.

use std::collections::HashMap;

use serde_json::Value;

use super::{regex_units, schema};

/// Units of a terminal that is imported.
const IMPORTED_UNITS: u64 = 64;

/// What an intersection multiplies the units of a definition by.
const INTERSECTION_FACTOR: u64 = 4;

/// Units of all definitions.
pub(super) fn units(source: &str) -> u64 {
    let mut scanner = Scanner { rest: source, definitions: vec![Definition::default()] };
    while scanner.step() {}
    let terminals = scanner.definitions.iter().filter(|definition| !definition.terminal.is_empty());
    let mut terminals = Terminals(terminals.map(|terminal| (terminal.terminal, Size::Of(terminal))).collect());
    let units = scanner.definitions.iter().map(|definition| match definition.terminal {
        "" => definition.whole(definition.units.saturating_add(definition.references.len() as u64)),
        terminal => terminals.units(terminal),
    });
    units.fold(0, u64::saturating_add)
}

/// What a terminal or some rules consist of.
#[derive(Default)]
struct Definition<'a> {
    /// Empty for rules.
    terminal: &'a str,
    units: u64,
    /// Terminals that it refers to.
    references: Vec<&'a str>,
    /// How often texts have to match two expressions, whose states are combined.
    intersections: u32,
}

impl Definition<'_> {
    /// Its units, with those of the terminals in it.
    fn whole(&self, units: u64) -> u64 {
        units.saturating_mul(INTERSECTION_FACTOR.saturating_pow(self.intersections))
    }
}

enum Size<'a> {
    Of(&'a Definition<'a>),
    Known(u64),
}

/// Terminals by their names.
struct Terminals<'a>(HashMap<&'a str, Size<'a>>);

impl<'a> Terminals<'a> {
    fn units(&mut self, name: &'a str) -> u64 {
        let definition = match self.0.get(name) {
            None => return IMPORTED_UNITS,
            Some(Size::Known(units)) => return *units,
            Some(Size::Of(definition)) => *definition,
        };
        // A terminal that refers to itself is refused later.
        self.0.insert(name, Size::Known(1));
        let of_references = definition.references.iter().map(|name| self.units(name));
        let units = definition.whole(of_references.fold(definition.units, u64::saturating_add));
        self.0.insert(name, Size::Known(units));
        units
    }
}

struct Scanner<'a> {
    rest: &'a str,
    /// The last is under way.
    definitions: Vec<Definition<'a>>,
}

impl<'a> Scanner<'a> {
    /// Takes the next token; false at the end.
    fn step(&mut self) -> bool {
        let Some(first) = self.rest.chars().next() else { return false };
        match first {
            '#' => drop(self.take(line_end(self.rest))),
            '/' if self.rest.starts_with("//") => drop(self.take(line_end(self.rest))),
            '/' => {
                let regex = self.take(closed(self.rest, '/'));
                self.add(regex_units(regex));
            }
            '"' => {
                let text = self.take(closed(self.rest, '"'));
                self.add(text.len() as u64);
            }
            '&' => {
                self.take(1);
                self.current().intersections += 1;
            }
            '%' => self.directive(),
            '_' | 'a'..='z' | 'A'..='Z' => self.name(),
            _ => drop(self.take(first.len_utf8())),
        }
        true
    }

    /// A reference, or the begin of a definition.
    fn name(&mut self) {
        let is_terminal = self.rest.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase());
        let is_part = |c: char| {
            "_-".contains(c) || c.is_ascii_digit() || c.is_ascii_uppercase() == is_terminal && c.is_ascii_alphabetic()
        };
        let name = self.take(self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len()).max(1));
        let behind = self.rest.trim_start_matches([' ', '\t']);
        let defines = behind.starts_with(':') && !behind.starts_with("::");
        match (is_terminal, defines) {
            (true, true) => self.definitions.push(Definition { terminal: name, ..Definition::default() }),
            (false, true) => self.definitions.push(Definition::default()),
            (true, false) => self.current().references.push(name),
            (false, false) => self.add(1),
        }
    }

    /// A directive, with its JSON if it has some.
    fn directive(&mut self) {
        let name =
            self.take(self.rest[1..].find(|c: char| !c.is_ascii_lowercase()).map_or(self.rest.len(), |at| at + 1));
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<Value>();
        if let ("%json" | "%regex", Some(Ok(value))) = (name, values.next()) {
            let end = values.byte_offset();
            self.add(schema::units(&value));
            self.take(end);
        } else if name == "%ignore" {
            self.definitions.push(Definition::default());
        }
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    fn add(&mut self, units: u64) {
        let current = self.current();
        current.units = current.units.saturating_add(units);
    }

    fn current(&mut self) -> &mut Definition<'a> {
        self.definitions.last_mut().expect("there is always one")
    }
}

fn line_end(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// Bytes up to the next `mark` behind the first, which no backslash precedes.
fn closed(text: &str, mark: char) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let ends = *c == mark && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |(at, mark)| at + mark.len_utf8())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_count_once_for_each_way_to_them() {
        let chain = |copies: usize, depth: usize| {
            let body = |i: usize| format!("T{} ", i + 1).repeat(copies);
            (0..depth).map(|i| format!("T{i}: {}\n", body(i))).collect::<String>() + &format!("T{depth}: \"ab\"\n")
        };
        assert_eq!(units("T: \"ab\""), 4);
        assert_eq!(units(&chain(2, 3)), 32 + 16 + 8 + 4);
        assert!(units(&chain(2, 100)) == u64::MAX && units(&chain(5000, 3)) > 1 << 36);
        assert_eq!(units("T: /a+/ & /b+/"), 4 * 8);
        // Rules are not copied.
        assert_eq!(units(&format!("start: T0 T0\n{}", chain(2, 1))), 2 + 8 + 4);
        assert!(units("a: b b\nb: c c\nc: \"x\"") < 10);
    }

    #[test]
    fn marks_within_texts_and_comments_define_nothing() {
        let plain = units("start: A B\nA: \"x\"\nB: \"y\"");
        assert_eq!(units("start: A B // A: A A A\nA: \"x\" # B: B B\nB: \"y\""), plain);
        assert_eq!(units(r#"T: "\" A: T T""#), r#""\" A: T T""#.len() as u64);
        assert_eq!(units(r"T: /A\/: T T/"), r"/A\/: T T/".len() as u64);
        assert_eq!(
            units("start: %json {\"const\": \"A: T T\"} X"),
            schema::units(&serde_json::json!({"const": "A: T T"})) + 1
        );
        assert_eq!(units("A: A B\nB: A"), 1 + 1 + 1);
        for broken in ["\"", "/", "%", "%json {", "_", "A", "é: \"", "T: \"\\"] {
            units(broken);
        }
    }
}
