//! Grammars in GBNF, the notation of llama.cpp, as grammars in Lark.
//!
//! A rule that does not refer to itself, however indirectly, becomes a terminal, which is a regular expression; others
//! become rules. A terminal takes as much text as it can: where it could also end earlier, so that what follows would
//! begin within it, that text is not generated. No text is generated that the grammar does not have.

use std::collections::HashMap;
use std::fmt::Write;

use super::GrammarError;

/// Deepest nesting of groups.
const DEPTH_MAX: usize = 64;
/// Most repetitions that an item may ask for.
const REPETITIONS_MAX: u32 = 10_000;

/// The grammar of a source in GBNF, in Lark.
pub(super) fn to_lark(source: &str) -> Result<String, GrammarError> {
    let mut parser = Parser { rest: source, line: 1, names: HashMap::new(), rules: Vec::new() };
    parser.grammar().map_err(|what| GrammarError(format!("line {}: {what}", parser.line)))?;
    let Parser { names, rules, .. } = parser;
    let mut bodies = Vec::new();
    for (i, rule) in rules.into_iter().enumerate() {
        let name = || names.iter().find(|(_, at)| **at == i).map_or("", |(name, _)| name);
        bodies.push(rule.ok_or_else(|| GrammarError(format!("the rule '{}' is not defined", name())))?);
    }
    let Some(root) = names.get("root") else { return Err(GrammarError("there is no rule 'root'".into())) };
    let recursive = recursive(&bodies);
    let lark = Lark { recursive: &recursive };
    let mut out = format!("start: {}\n", lark.name(*root));
    for (i, body) in bodies.iter().enumerate() {
        let _ = writeln!(out, "{}: {}", lark.name(i), lark.alternatives(body));
    }
    Ok(out)
}

/// Sequences of items, of which one is chosen.
type Alternatives = Vec<Vec<Item>>;

/// A symbol and how often it comes.
struct Item {
    symbol: Symbol,
    least: u32,
    /// `None` for any number.
    most: Option<u32>,
}

enum Symbol {
    /// These characters.
    Text(String),
    /// A character of these ranges, or of none of them.
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// Any character.
    Any,
    /// The rule of this index.
    Rule(usize),
    Group(Alternatives),
}

struct Parser<'a> {
    rest: &'a str,
    line: usize,
    names: HashMap<String, usize>,
    /// By index; `None` for a rule that was only referred to.
    rules: Vec<Option<Alternatives>>,
}

impl Parser<'_> {
    fn grammar(&mut self) -> Result<(), String> {
        self.space(true);
        while !self.rest.is_empty() {
            let name = self.name().ok_or_else(|| self.expected("the name of a rule"))?;
            self.space(false);
            if !self.take("::=") {
                return Err(self.expected("'::='"));
            }
            self.space(true);
            let body = self.alternatives(0)?;
            let index = self.index(name);
            if self.rules[index].replace(body).is_some() {
                return Err("the rule is defined a second time".into());
            }
            if !self.rest.is_empty() && !self.rest.starts_with('\n') {
                return Err(self.expected("the end of the rule"));
            }
            self.space(true);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<Alternatives, String> {
        if depth > DEPTH_MAX {
            return Err(format!("groups are nested more than {DEPTH_MAX} deep"));
        }
        let mut all = vec![self.sequence(depth)?];
        loop {
            // An alternative may begin on a line of its own.
            let (rest, line) = (self.rest, self.line);
            self.space(true);
            if !self.take("|") {
                (self.rest, self.line) = (rest, line);
                return Ok(all);
            }
            self.space(true);
            all.push(self.sequence(depth)?);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Item>, String> {
        let mut items = Vec::new();
        loop {
            self.space(depth > 0);
            let Some(symbol) = self.symbol(depth)? else { return Ok(items) };
            let (least, most) = self.repetitions()?;
            items.push(Item { symbol, least, most });
        }
    }

    fn symbol(&mut self, depth: usize) -> Result<Option<Symbol>, String> {
        Ok(Some(match self.rest.chars().next() {
            Some('"') => self.text()?,
            Some('[') => self.class()?,
            Some('.') => {
                self.rest = &self.rest[1..];
                Symbol::Any
            }
            Some('(') => {
                self.rest = &self.rest[1..];
                let inner = self.alternatives(depth + 1)?;
                self.space(true);
                if !self.take(")") {
                    return Err(self.expected("')'"));
                }
                Symbol::Group(inner)
            }
            Some('<' | '!') => return Err("tokens in angle brackets are not supported; write their text".into()),
            Some(c) if is_name(c) => match self.name() {
                Some(name) => Symbol::Rule(self.index(name)),
                None => return Ok(None),
            },
            _ => return Ok(None),
        }))
    }

    fn text(&mut self) -> Result<Symbol, String> {
        self.rest = &self.rest[1..];
        let mut text = String::new();
        loop {
            match self.rest.chars().next() {
                Some('"') => {
                    self.rest = &self.rest[1..];
                    return Ok(Symbol::Text(text));
                }
                None | Some('\n') => return Err("a text does not end; it needs a second '\"'".into()),
                Some(_) => text.push(self.character()?),
            }
        }
    }

    fn class(&mut self) -> Result<Symbol, String> {
        self.rest = &self.rest[1..];
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            if matches!(self.rest.chars().next(), None | Some('\n')) {
                return Err("a class of characters does not end; it needs a ']'".into());
            }
            let first = self.character()?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let last = if is_range {
                self.rest = &self.rest[1..];
                self.character()?
            } else {
                first
            };
            if last < first {
                return Err(format!("the range '{first}-{last}' is empty"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() && !negated {
            return Err("a class of characters is empty".into());
        }
        Ok(Symbol::Class { negated, ranges })
    }

    /// A character, which may be escaped.
    fn character(&mut self) -> Result<char, String> {
        let mut chars = self.rest.chars();
        let first = chars.next().ok_or_else(|| self.expected("a character"))?;
        if first != '\\' {
            self.rest = chars.as_str();
            return Ok(first);
        }
        let escape = chars.next().ok_or_else(|| self.expected("a character behind '\\'"))?;
        self.rest = chars.as_str();
        let digits = match escape {
            'n' => return Ok('\n'),
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '"' | '[' | ']' | '\\' | '-' | '^' | '/' | '.' => return Ok(escape),
            other => return Err(format!("'\\{}' is not a known escape", other.escape_default())),
        };
        let code = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let character =
            code.and_then(char::from_u32).ok_or_else(|| format!("'\\{escape}' needs {digits} hexadecimal digits"))?;
        self.rest = &self.rest[digits..];
        Ok(character)
    }

    fn repetitions(&mut self) -> Result<(u32, Option<u32>), String> {
        let range = match () {
            _ if self.take("*") => (0, None),
            _ if self.take("+") => (1, None),
            _ if self.take("?") => (0, Some(1)),
            _ if self.take("{") => self.bounds()?,
            _ => return Ok((1, Some(1))),
        };
        match self.rest.starts_with(['*', '+', '?', '{']) {
            true => Err("an item has two repetitions; put the first into a group".into()),
            false => Ok(range),
        }
    }

    fn bounds(&mut self) -> Result<(u32, Option<u32>), String> {
        let text = self.rest.split_once('}').map(|(inner, _)| inner).ok_or("a number of repetitions does not end")?;
        let number = |digits: &str| {
            let number = digits.trim().parse().ok().filter(|n| *n <= REPETITIONS_MAX);
            number.ok_or_else(|| format!("expected a number of repetitions up to {REPETITIONS_MAX}"))
        };
        let bounds = match text.split_once(',') {
            None => (number(text)?, Some(number(text)?)),
            Some((least, "")) => (number(least)?, None),
            Some(("", most)) => (0, Some(number(most)?)),
            Some((least, most)) => (number(least)?, Some(number(most)?)),
        };
        if bounds.1.is_some_and(|most| most < bounds.0) {
            return Err(format!("'{{{}}}' allows no number of repetitions", text.trim()));
        }
        self.rest = &self.rest[text.len() + 1..];
        Ok(bounds)
    }

    fn name(&mut self) -> Option<String> {
        let bytes = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn index(&mut self, name: String) -> usize {
        let next = self.rules.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == next {
            self.rules.push(None);
        }
        index
    }

    /// Skips white space and comments, line ends only with `lines`.
    fn space(&mut self, lines: bool) {
        loop {
            match self.rest.chars().next() {
                Some(' ' | '\t' | '\r') => self.rest = &self.rest[1..],
                Some('\n') if lines => {
                    self.line += 1;
                    self.rest = &self.rest[1..];
                }
                Some('#') => self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..],
                _ => return,
            }
        }
    }

    fn take(&mut self, mark: &str) -> bool {
        match self.rest.strip_prefix(mark) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expected(&self, what: &str) -> String {
        let found: String = self.rest.chars().take(20).take_while(|c| *c != '\n').collect();
        format!("expected {what}, found '{}'", found.escape_debug())
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Which rules refer to themselves, directly or by others, or refer to one that does.
fn recursive(bodies: &[Alternatives]) -> Vec<bool> {
    let direct: Vec<Vec<usize>> = bodies.iter().map(rules_of).collect();
    // A rule of which all references are terminals is one; what is left over is recursive.
    let mut is_recursive = vec![true; bodies.len()];
    let mut missing: Vec<usize> = direct.iter().map(Vec::len).collect();
    let mut users = vec![Vec::new(); bodies.len()];
    for (i, used) in direct.iter().enumerate() {
        used.iter().for_each(|rule| users[*rule].push(i));
    }
    let mut ready: Vec<usize> = (0..bodies.len()).filter(|i| missing[*i] == 0).collect();
    while let Some(rule) = ready.pop() {
        is_recursive[rule] = false;
        for user in &users[rule] {
            missing[*user] -= 1;
            if missing[*user] == 0 {
                ready.push(*user);
            }
        }
    }
    is_recursive
}

fn rules_of(body: &Alternatives) -> Vec<usize> {
    let of = |item: &Item| match &item.symbol {
        Symbol::Rule(index) => vec![*index],
        Symbol::Group(inner) => rules_of(inner),
        _ => vec![],
    };
    body.iter().flatten().flat_map(of).collect()
}

/// Writes Lark.
struct Lark<'a> {
    recursive: &'a [bool],
}

impl Lark<'_> {
    fn name(&self, rule: usize) -> String {
        if self.recursive[rule] { format!("rule_{rule}") } else { format!("TERMINAL_{rule}") }
    }

    fn alternatives(&self, body: &Alternatives) -> String {
        body.iter().map(|items| self.sequence(items)).collect::<Vec<_>>().join(" | ")
    }

    fn sequence(&self, items: &[Item]) -> String {
        match items {
            [] => "\"\"".into(),
            items => items.iter().map(|item| self.item(item)).collect::<Vec<_>>().join(" "),
        }
    }

    fn item(&self, Item { symbol, least, most }: &Item) -> String {
        let symbol = match symbol {
            Symbol::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
            Symbol::Any => "/(?s:.)/".into(),
            Symbol::Class { negated: true, ranges } if ranges.is_empty() => "/(?s:.)/".into(),
            Symbol::Class { negated, ranges } => class(*negated, ranges),
            Symbol::Rule(index) => self.name(*index),
            Symbol::Group(inner) => format!("({})", self.alternatives(inner)),
        };
        match (least, most) {
            (1, Some(1)) => symbol,
            (0, Some(1)) => format!("{symbol}?"),
            (0, None) => format!("{symbol}*"),
            (1, None) => format!("{symbol}+"),
            (least, None) => format!("{symbol}{{{least},}}"),
            (least, Some(most)) => format!("{symbol}{{{least},{most}}}"),
        }
    }
}

fn class(negated: bool, ranges: &[(char, char)]) -> String {
    let code = |c: char| format!("\\x{{{:x}}}", u32::from(c));
    let range = |(first, last): &(char, char)| {
        if first == last { code(*first) } else { format!("{}-{}", code(*first), code(*last)) }
    };
    let ranges: String = ranges.iter().map(range).collect();
    format!("/[{}{ranges}]/", if negated { "^" } else { "" })
}

#[cfg(test)]
mod tests;
