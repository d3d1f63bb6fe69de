//! Tests of GBNF: texts that a grammar generates against a naive matcher.

use super::*;
use crate::TextFormat;
use crate::grammar::testing::{byte_tokenizer, compiler, random_text};
use larder_core::Xoshiro256;

/// Whether `items` match at the beginning of `text`, and what may be left over: a naive reference.
fn rests<'t>(bodies: &[Alternatives], items: &[Item], text: &'t str, fuel: &mut u32) -> Vec<&'t str> {
    *fuel = fuel.saturating_sub(1);
    let Some((first, later)) = items.split_first().filter(|_| *fuel > 0) else { return vec![text] };
    let mut ends = if first.least == 0 { vec![text] } else { vec![] };
    let (mut at, mut count) = (vec![text], 0);
    while !at.is_empty() && first.most.is_none_or(|most| count < most) {
        at = at.into_iter().flat_map(|text| once(bodies, &first.symbol, text, fuel)).collect();
        at.sort_unstable_by_key(|text| text.len());
        at.dedup();
        count += 1;
        if count >= first.least {
            at.retain(|text| !ends.contains(text));
            ends.extend(&at);
        }
    }
    let mut all: Vec<&str> = ends.into_iter().flat_map(|text| rests(bodies, later, text, fuel)).collect();
    all.sort_unstable_by_key(|text| text.len());
    all.dedup();
    all
}

fn once<'t>(bodies: &[Alternatives], symbol: &Symbol, text: &'t str, fuel: &mut u32) -> Vec<&'t str> {
    let first = text.chars().next();
    let rest = |c: char| &text[c.len_utf8()..];
    match symbol {
        Symbol::Text(own) => text.strip_prefix(own.as_str()).into_iter().collect(),
        Symbol::Any => first.map(rest).into_iter().collect(),
        Symbol::Class { negated, ranges } => {
            let inside = |c: &char| ranges.iter().any(|(low, high)| (low..=high).contains(&c)) != *negated;
            first.filter(inside).map(rest).into_iter().collect()
        }
        Symbol::Rule(rule) => bodies[*rule].iter().flat_map(|items| rests(bodies, items, text, fuel)).collect(),
        Symbol::Group(inner) => inner.iter().flat_map(|items| rests(bodies, items, text, fuel)).collect(),
    }
}

fn matches(source: &str, text: &str) -> bool {
    let mut parser = Parser { rest: source, line: 1, names: HashMap::new(), rules: Vec::new() };
    parser.grammar().unwrap();
    let bodies: Vec<Alternatives> = parser.rules.into_iter().map(Option::unwrap).collect();
    let root = parser.names["root"];
    let mut fuel = 200_000;
    let found = bodies[root].iter().any(|items| rests(&bodies, items, text, &mut fuel).contains(&""));
    assert!(fuel > 0, "the reference takes too long for {text:?}");
    found
}

const JSON: &str = r#"# JSON, as people write it in GBNF
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,1})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn texts_drawn_from_a_grammar_match_it() {
    let tokenizer = byte_tokenizer(&["true", ": ", "ab"], &[]);
    let (compiler, mut rng) = (compiler(&tokenizer), Xoshiro256::new(5));
    for source in [
        JSON,
        "root ::= \"yes\" | \"no\"",
        "root ::= (\"a\" | \"ab\") (\"c\" | \"bc\")+ \".\"",
        "root ::= \"(\" root* \")\" | [a-c]",
        "root ::= item-list\nitem-list ::= item\n  | item \", \" item-list\nitem ::= [^\\n,()]{1,3} # no commas",
        "root ::= .{2,4} [\\u00e9\\x41-\\x43-]? \"\\\\\"\n",
        "root ::= expr \"=\" [0-9]+\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9] | \"(\" expr \")\"",
    ] {
        let grammar = compiler.compile(&TextFormat::Gbnf(source.into())).unwrap_or_else(|e| panic!("{e}: {source}"));
        let draw = |_| random_text(&tokenizer, grammar.clone(), &mut rng, 80);
        let texts: Vec<String> = (0..80).filter_map(draw).collect();
        assert!(texts.len() > 10, "{} of {source}", texts.len());
        for text in texts {
            assert!(matches(source, &text), "{text:?} is not of {source}");
        }
    }
}

#[test]
fn the_reference_refuses_other_texts() {
    assert!(matches(JSON, "{\"a\": [1, {}]}") && !matches(JSON, "{\"a\": [1, {}}") && !matches(JSON, "[]"));
    assert!(matches("root ::= \"a\"{2,3} [^b]", "aaac") && !matches("root ::= \"a\"{2,3} [^b]", "ac"));
}

#[test]
fn faults_are_named_with_their_line() {
    let refused = |source: &str| to_lark(source).map_err(|GrammarError(what)| what).unwrap_err();
    assert_eq!(refused("root ::= a\n"), "the rule 'a' is not defined");
    assert_eq!(refused("start ::= \"a\"\n"), "there is no rule 'root'");
    assert_eq!(refused(""), "there is no rule 'root'");
    for (source, fault) in [
        ("root ::= \"a\n", "line 1: a text does not end"),
        ("\n\nroot ::= [a", "line 3: a class of characters does not end"),
        ("root ::= (\"a\"", "line 1: expected ')'"),
        ("root = \"a\"", "line 1: expected '::='"),
        ("root ::= \"a\" )", "line 1: expected the end of the rule, found ')'"),
        ("root ::= \"a\"{3,2}", "line 1: '{3,2}' allows no number"),
        ("root ::= \"a\"{99999}", "line 1: expected a number of repetitions up to 10000"),
        ("root ::= \"a\"{2}*", "line 1: an item has two repetitions"),
        ("root ::= [z-a]", "line 1: the range 'z-a' is empty"),
        ("root ::= \"\\q\"", "line 1: '\\q' is not a known escape"),
        ("root ::= \"\\x4\"", "line 1: '\\x' needs 2 hexadecimal digits"),
        ("root ::= <think>", "line 1: tokens in angle brackets"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule is defined a second time"),
    ] {
        let got = refused(source);
        assert!(got.starts_with(fault), "{got} of {source:?}");
    }
    assert!(refused(&format!("root ::= {}", "(".repeat(5000))).contains("nested more than 64 deep"));
}

#[test]
fn rules_become_terminals_unless_they_are_recursive() {
    let lark = to_lark("root ::= a | \"[\" root \"]\"\na ::= b+\nb ::= [0-9]").unwrap();
    assert_eq!(
        lark,
        "start: rule_1\nTERMINAL_0: TERMINAL_2+\nrule_1: TERMINAL_0 | \"[\" rule_1 \"]\"\nTERMINAL_2: /[\\x{30}-\\x{39}]/\n"
    );
}
