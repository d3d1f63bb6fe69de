//! Tests of structured output with a tokenizer of bytes and a few longer tokens.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::json;

use super::testing::{EOS, byte_tokenizer, compiler, random_text};
use super::*;
use larder_core::Xoshiro256;

fn refused(format: TextFormat) -> String {
    compiler(&byte_tokenizer(&[], &[])).compile(&format).err().expect("refused").to_string()
}

#[test]
fn one_token_that_can_follow_is_forced() {
    let tokenizer = byte_tokenizer(&[], &[]);
    let mut grammar = compiler(&tokenizer).compile(&TextFormat::Regex("q[xy]".into())).unwrap();
    let mut logits = vec![1.0; tokenizer.vocab_size()];
    let q = tokenizer.id("q").unwrap();
    assert_eq!(grammar.mask(&mut logits).unwrap(), Some(q));
    assert!(logits.iter().all(|l| *l == 1.0));
    grammar.accept(q).unwrap();
    assert_eq!(grammar.mask(&mut logits).unwrap(), None);
    let left: Vec<usize> = (0..logits.len()).filter(|id| logits[*id] == 1.0).collect();
    let mut want = ["x", "y"].map(|token| tokenizer.id(token).unwrap() as usize);
    want.sort_unstable();
    assert_eq!(left, want);
    assert!(!grammar.is_complete());
    grammar.accept(want[0] as u32).unwrap();
    assert!(grammar.is_complete());
}

#[test]
fn tokens_fit_up_to_the_first_that_cannot_follow() {
    let tokenizer = byte_tokenizer(&["ab"], &[]);
    let mut grammar = compiler(&tokenizer).compile(&TextFormat::Regex("(ab)+c".into())).unwrap();
    let ids = |words: &[&str]| words.iter().map(|word| tokenizer.id(word).unwrap()).collect::<Vec<_>>();
    let mut fitting = |words: &[&str]| grammar.fitting(&ids(words));
    assert_eq!(fitting(&["ab", "a", "b", "c"]), 4);
    assert_eq!(fitting(&["ab", "b", "c"]), 1);
    assert_eq!((fitting(&["c"]), fitting(&[])), (0, 0));
    // Behind the end comes nothing but the token that ends the text.
    assert_eq!(fitting(&["a", "b", "c", "ab"]), 3);
    let mut logits = vec![0.0; tokenizer.vocab_size()];
    assert_eq!(grammar.mask(&mut logits).unwrap(), None, "the position is the same");
    grammar.accept(ids(&["ab"])[0]).unwrap();
    assert_eq!(grammar.fitting(&ids(&["c"])), 1);
}

#[test]
fn a_token_that_cannot_follow_is_an_error() {
    let tokenizer = byte_tokenizer(&[], &[]);
    let mut grammar = compiler(&tokenizer).compile(&TextFormat::JsonObject).unwrap();
    assert!(grammar.accept(tokenizer.id("x").unwrap()).is_err());
}

#[test]
fn texts_in_lark_and_of_several_bytes_per_character() {
    let tokenizer = byte_tokenizer(&[], &[]);
    let compiler = compiler(&tokenizer);
    let mut rng = Xoshiro256::new(3);
    let nested = TextFormat::Lark("start: \"(\" start \")\" | \"é\"".into());
    let mut ended = 0;
    for _ in 0..40 {
        let Some(text) = random_text(&tokenizer, compiler.compile(&nested).unwrap(), &mut rng, 60) else { continue };
        let depth = text.find('é').expect("an é");
        assert_eq!(text, format!("{}é{}", "(".repeat(depth), ")".repeat(depth)));
        ended += 1;
    }
    assert!(ended > 20, "{ended}");
}

#[test]
fn what_cannot_be_compiled_is_refused_in_a_sentence() {
    let schema = |value: Value| refused(TextFormat::JsonSchema(value));
    assert!(schema(json!({"type": "string", "not": {"const": "a"}})).contains("not"));
    assert!(schema(json!({"type": "giraffe"})).contains("giraffe"));
    assert!(schema(json!({"$ref": "#/$defs/none"})).contains("none"));
    assert!(schema(json!({"$ref": "https://example.org/schema"})).contains("$ref"));
    assert!(schema(json!({"$ref": "#"})).contains("no text"));
    assert!(schema(json!(7)).contains("must be an object"));
    assert!(!refused(TextFormat::Regex("(a".into())).is_empty());
    assert!(!refused(TextFormat::Regex(r"(a)\1".into())).is_empty());
    assert!(!refused(TextFormat::Lark("start: nothing".into())).is_empty());
    let none = GrammarCompiler::new(&byte_tokenizer(&[], &[]), 300, &[]).err().unwrap();
    assert!(none.to_string().contains("no token that ends a text"), "{none}");
}

#[test]
fn hostile_grammars_are_refused_soon() {
    let chain: String = (0..5000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let (open, close) = ("(".repeat(100), ")".repeat(100));
    let mut deep = json!({"type": "integer"});
    for _ in 0..2000 {
        deep = json!({"type": "array", "items": deep});
    }
    let wide: Vec<Value> = (0..3000).map(|i| json!({"const": format!("{i}-{}", i * 7919)})).collect();
    let products: Vec<Value> = (0..40).map(|i| json!({"anyOf": [{"minLength": i}, {"maxLength": 100 - i}]})).collect();
    let cases = [
        TextFormat::Regex("(((((a{100}){100}){100}){100}){100})".into()),
        TextFormat::Regex("a{1000000}".into()),
        TextFormat::Regex(format!("{}a{}", "(".repeat(5000), ")".repeat(5000))),
        TextFormat::Regex("(a|b)*c(a|b){400}".into()),
        TextFormat::Regex("a".repeat(1 << 20)),
        TextFormat::Lark(format!("start: r0\n{chain}r5000: \"x\"")),
        TextFormat::Lark(format!("start: {open}\"x\"{close}")),
        TextFormat::Lark("start: start start | \"a\" | \"\"".into()),
        TextFormat::Lark("start: a{1,1000000}\na: \"x\" | \"y\" a".into()),
        TextFormat::Gbnf(format!("root ::= {}", "(".repeat(100))),
        TextFormat::Gbnf("root ::= (((\"a\"{1000}){1000}){1000}){1000}".into()),
        TextFormat::Gbnf(
            (0..40).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect::<String>()
                + "r40 ::= \"a\"\nroot ::= r0",
        ),
        TextFormat::Gbnf("root ::= root root | \"a\" | \"\"".into()),
        TextFormat::JsonSchema(deep),
        TextFormat::JsonSchema(json!({ "anyOf": wide })),
        TextFormat::JsonSchema(json!({ "type": "string", "allOf": products })),
        TextFormat::JsonSchema(json!({"$ref": "#"})),
        TextFormat::JsonSchema(json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})),
        TextFormat::JsonSchema(json!({"type": "string", "pattern": "^(a+)+$", "minLength": 50000})),
        TextFormat::JsonSchema(json!({"type": "array", "minItems": 100_000, "items": {"type": "integer"}})),
        TextFormat::JsonSchema(json!({"type": "string", "maxLength": 10_000_000})),
    ];
    let tokenizer = byte_tokenizer(&[], &[]);
    let compiler = compiler(&tokenizer);
    for (i, case) in cases.iter().enumerate() {
        let start = Instant::now();
        let outcome = compiler.compile(case).and_then(|mut grammar| {
            let mut rng = Xoshiro256::new(i as u64);
            for _ in 0..50 {
                let mut logits = vec![0.0; tokenizer.vocab_size()];
                let id = grammar.mask(&mut logits)?.unwrap_or_else(|| {
                    let allowed: Vec<usize> = (0..logits.len()).filter(|id| logits[*id] == 0.0).collect();
                    allowed[(rng.unit() * allowed.len() as f64) as usize] as u32
                });
                if id == EOS {
                    break;
                }
                grammar.accept(id)?;
            }
            Ok(())
        });
        println!("{i}: {:?} in {:?}", outcome.as_ref().err(), start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(10), "case {i}");
        if let Err(error) = outcome {
            assert!(!error.to_string().contains('\n') && error.to_string().len() < 1500, "case {i}: {error}");
        }
    }
}

/// Small sources of large grammars: copies of copies, combinations, pairs.
fn bombs() -> Vec<TextFormat> {
    let copies = |copies: usize, depth: usize| -> String {
        let body = |i: usize| format!("T{} ", i + 1).repeat(copies);
        (0..depth).map(|i| format!("T{i}: {}\n", body(i))).collect::<String>() + &format!("T{depth}: /[ab]c?/\n")
    };
    let nulls = vec![json!({"type": "null"}); 8000];
    let wide: serde_json::Map<_, _> = (0..8000).map(|i| (format!("k{i}"), json!(true))).collect();
    let patterns: serde_json::Map<_, _> =
        (0..600).map(|i| (format!("^k{i}_[a-z]+$"), json!({"type": "null"}))).collect();
    let gbnf = format!("root ::= a\na ::= {}\nb ::= {}\nc ::= [ab] \"c\"?", "b ".repeat(9000), "c ".repeat(9000));
    vec![
        TextFormat::Lark(format!("start: T0\n{}", copies(7000, 2))),
        TextFormat::Lark(format!("start: T0\n{}", copies(100, 6))),
        TextFormat::Gbnf(gbnf),
        TextFormat::JsonSchema(json!({"properties": wide, "anyOf": nulls})),
        TextFormat::JsonSchema(json!({"type": "object", "patternProperties": patterns})),
        TextFormat::Regex(r"\w".repeat(30_000)),
        TextFormat::Lark(format!(
            "start: T\nT: {}",
            (3..43).map(|i| format!("/(a|b)*a(a|b){{{i}}}/")).collect::<Vec<_>>().join(" & ")
        )),
    ]
}

#[test]
fn what_is_too_large_when_it_is_expanded_is_refused_before_it_is_built() {
    let compiler = compiler(&byte_tokenizer(&[], &[]));
    for (i, bomb) in bombs().iter().enumerate() {
        let start = Instant::now();
        let error = compiler.compile(bomb).err().unwrap_or_else(|| panic!("case {i} is compiled"));
        println!("{i}: {error} in {:?}", start.elapsed());
        assert!(error.to_string().contains("too large when it is expanded"), "case {i}: {error}");
        assert!(start.elapsed() < Duration::from_secs(1), "case {i}: {:?}", start.elapsed());
    }
}

#[test]
fn a_grammar_that_takes_too_long_is_refused_and_the_next_is_compiled() {
    let tokenizer = byte_tokenizer(&[], &[]);
    let compiler = compiler(&tokenizer);
    let source = || llguidance::api::TopLevelGrammar::from_lark("start: \"a\"".into());
    let error = compiler.compile_within(source(), Duration::ZERO).err().expect("no time");
    assert!(error.to_string().contains("takes more than"), "{error}");
    assert!(compiler.compile_within(source(), Duration::from_secs(60)).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn objects_that_end_are_json(seed in any::<u64>()) {
        let tokenizer = byte_tokenizer(&[], &[]);
        let grammar = compiler(&tokenizer).compile(&TextFormat::JsonObject).unwrap();
        if let Some(text) = random_text(&tokenizer, grammar, &mut Xoshiro256::new(seed), 200) {
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => prop_assert!(value.is_object()),
                // Numbers of JSON may be larger than any that this reader holds.
                Err(error) => prop_assert!(error.to_string().contains("number out of range"), "{text:?}: {error}"),
            }
        }
    }

    #[test]
    fn texts_match_their_regular_expression(seed in any::<u64>()) {
        let tokenizer = byte_tokenizer(&[], &[]);
        let regex = "(ab?c|[0-9]{2,4}|é+)(-(x|yz))*";
        let grammar = compiler(&tokenizer).compile(&TextFormat::Regex(regex.into())).unwrap();
        if let Some(text) = random_text(&tokenizer, grammar, &mut Xoshiro256::new(seed), 100) {
            let whole = fancy_regex::Regex::new(&format!("^(?:{regex})$")).unwrap();
            prop_assert!(whole.is_match(&text).unwrap(), "{text:?}");
        }
    }
}
