//! What a `tokenizer.json` makes of a text at most, and in how much time, before the `tokenizers` crate uses it: each
//! part of such a file may multiply the text that the part before it made, and its regular expressions may try again
//! and again.

use fancy_regex::Expr;
use serde_json::Value;

/// How much longer normalizers and pre-tokenizers together, or decoders, may make a text.
const MAX_GROWTH: usize = 100;
/// Maximum number of normalizers, pre-tokenizers, post-processors or decoders, and of the pieces of a template.
const MAX_PARTS: usize = 64;
/// Maximum nesting of sequences of them.
const MAX_NESTING: usize = 8;
/// Maximum length of a text in such a part.
const MAX_PART_BYTES: usize = 64 << 10;
/// Maximum length of the prefix or suffix of the tokens within a word.
const MAX_AFFIX_BYTES: usize = 64;
/// Maximum number of characters of a word that WordPiece looks up part by part.
const MAX_WORD_CHARS: u64 = 1000;

/// Checks the parts of a `tokenizer.json` but its vocabulary. The error completes a sentence that begins with the
/// file's name.
pub(super) fn check(
    normalizer: Option<&Value>,
    pre_tokenizer: Option<&Value>,
    post_processor: Option<&Value>,
    decoder: Option<&Value>,
) -> Result<(), String> {
    let normalizers = parts(normalizer, "normalizers")?;
    let pre_tokenizers = parts(pre_tokenizer, "pretokenizers")?;
    let unicode = normalizers.iter().map(|part| unicode_growth(part)).max().unwrap_or(1);
    let split = normalizers.iter().chain(&pre_tokenizers).try_fold(unicode, multiplied)?;
    let decoded = parts(decoder, "decoders")?.iter().try_fold(1, multiplied)?;
    if split.max(decoded) > MAX_GROWTH {
        return Err(format!(
            "has normalizers, pre-tokenizers or decoders that can make a text more than {MAX_GROWTH} times longer"
        ));
    }
    parts(post_processor, "processors")?.iter().try_for_each(|part| check_template(part))
}

/// Checks the settings of a tokenizer's model.
pub(super) fn check_model(model: &ModelSettings) -> Result<(), String> {
    for affix in [&model.continuing_subword_prefix, &model.end_of_word_suffix].into_iter().flatten() {
        if affix.len() > MAX_AFFIX_BYTES {
            return Err(format!(
                "has a prefix or suffix of subwords of {} bytes; at most {MAX_AFFIX_BYTES} are supported",
                affix.len()
            ));
        }
    }
    match model.max_input_chars_per_word {
        Some(chars) if chars > MAX_WORD_CHARS => {
            Err(format!("has max_input_chars_per_word {chars}; at most {MAX_WORD_CHARS} are supported"))
        }
        _ => Ok(()),
    }
}

/// The settings of a tokenizer's model that are checked.
#[derive(serde::Deserialize)]
pub(super) struct ModelSettings {
    #[serde(rename = "vocab")]
    _vocab: serde::de::IgnoredAny,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
}

/// The parts of a possibly nested sequence, whose list is called `key`.
fn parts<'a>(part: Option<&'a Value>, key: &str) -> Result<Vec<&'a Value>, String> {
    let mut all = Vec::new();
    collect(part.unwrap_or(&Value::Null), key, 0, &mut all)?;
    Ok(all)
}

fn collect<'a>(part: &'a Value, key: &str, depth: usize, all: &mut Vec<&'a Value>) -> Result<(), String> {
    if let Some(list) = part.get(key).and_then(Value::as_array) {
        if depth == MAX_NESTING {
            return Err(format!("has {key} nested more than {MAX_NESTING} levels deep"));
        }
        return list.iter().try_for_each(|part| collect(part, key, depth + 1, all));
    }
    all.push(part);
    if all.len() > MAX_PARTS {
        return Err(format!("has more than {MAX_PARTS} {key}"));
    }
    Ok(())
}

/// `growth` times what `part` can make of a byte.
fn multiplied(growth: usize, part: &&Value) -> Result<usize, String> {
    Ok(growth.saturating_mul(growth_of(part)?))
}

/// How often the normal forms of Unicode, which do not add up, multiply a text.
fn unicode_growth(part: &Value) -> usize {
    match part["type"].as_str().unwrap_or_default() {
        "NFC" | "NFD" | "BertNormalizer" => 3,
        "NFKC" | "NFKD" => 12,
        _ => 1,
    }
}

fn growth_of(part: &Value) -> Result<usize, String> {
    let text = |key: &str| match part[key].as_str().unwrap_or_default() {
        long if long.len() > MAX_PART_BYTES => {
            Err(format!("has a part with a text of {} bytes; at most {MAX_PART_BYTES} are supported", long.len()))
        }
        text => Ok(text.len()),
    };
    if let Some(pattern) = part["pattern"]["Regex"].as_str() {
        check_regex(pattern)?;
    }
    text("prepend")?;
    Ok(match part["type"].as_str().unwrap_or_default() {
        // A match of no characters, or of one.
        "Replace" => match part["pattern"]["String"].as_str() {
            Some(pattern) if !pattern.is_empty() => text("content")?.div_ceil(pattern.len()).max(1),
            _ => 1 + text("content")?,
        },
        "ByteLevel" => 2,
        // Of a space its replacement, of a character with spaces around it.
        "Metaspace" => 4,
        "Lowercase" | "BertNormalizer" => 3,
        _ => 1,
    })
}

/// A template that has the text once, and few tokens beside it.
fn check_template(post_processor: &Value) -> Result<(), String> {
    for (key, most) in [("single", 1), ("pair", 2)] {
        let Some(pieces) = post_processor.get(key).and_then(Value::as_array) else { continue };
        let texts = pieces.iter().filter(|piece| piece.get("Sequence").is_some()).count();
        if pieces.len() > MAX_PARTS || texts > most {
            return Err(format!(
                "has a post_processor whose template repeats the text or has more than {MAX_PARTS} pieces"
            ));
        }
    }
    let special = post_processor.get("special_tokens").and_then(Value::as_object);
    let long = |token: &Value| token["ids"].as_array().is_some_and(|ids| ids.len() > MAX_PARTS);
    if special.is_some_and(|special| special.values().any(long)) {
        Err(format!("has a post_processor with a special token of more than {MAX_PARTS} ids"))
    } else {
        Ok(())
    }
}

/// Refuses a regular expression that can take time exponential in the text.
///
/// An expression without look-around, back-references and the like is matched in linear time. Others are matched by
/// backtracking, where a repetition of something that can match in several ways tries all of them.
fn check_regex(pattern: &str) -> Result<(), String> {
    let wrong = |what: String| format!("has the regular expression {:?}, which {what}", shortened(pattern));
    if pattern.len() > MAX_PART_BYTES {
        return Err(wrong(format!("has {} bytes; at most {MAX_PART_BYTES} are supported", pattern.len())));
    }
    if bracket_depth(pattern) > MAX_PARTS {
        return Err(wrong(format!("is nested more than {MAX_PARTS} levels deep")));
    }
    let tree = Expr::parse_tree(pattern).map_err(|error| wrong(format!("is not valid: {error}")))?;
    if backtracks(&tree.expr) && repeats_a_choice(&tree.expr, false) {
        return Err(wrong("can take exponential time".into()));
    }
    Ok(())
}

fn shortened(text: &str) -> String {
    text.chars().take(60).collect()
}

/// The parser of expressions calls itself for each opened bracket.
fn bracket_depth(pattern: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for c in pattern.chars() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

fn children(expr: &Expr) -> Vec<&Expr> {
    match expr {
        Expr::Concat(all) | Expr::Alt(all) => all.iter().collect(),
        Expr::Group(child) | Expr::AtomicGroup(child) | Expr::LookAround(child, _) => vec![child],
        Expr::Repeat { child, .. } => vec![child],
        Expr::Conditional { condition, true_branch, false_branch } => vec![condition, true_branch, false_branch],
        _ => Vec::new(),
    }
}

/// Whether any part needs backtracking.
fn backtracks(expr: &Expr) -> bool {
    let plain = matches!(
        expr,
        Expr::Empty
            | Expr::Any { .. }
            | Expr::Assertion(_)
            | Expr::Literal { .. }
            | Expr::Concat(_)
            | Expr::Alt(_)
            | Expr::Group(_)
            | Expr::Repeat { .. }
            | Expr::Delegate { .. }
    );
    !plain || children(expr).into_iter().any(backtracks)
}

/// Whether something that can match in several ways is repeated; `within` says that `expr` is repeated.
fn repeats_a_choice(expr: &Expr, within: bool) -> bool {
    let is_choice = match expr {
        Expr::Alt(_) | Expr::Conditional { .. } => true,
        Expr::Repeat { lo, hi, .. } => lo != hi,
        Expr::Backref { .. } | Expr::BackrefWithRelativeRecursionLevel { .. } => true,
        Expr::SubroutineCall(_) | Expr::UnresolvedNamedSubroutineCall { .. } => return true,
        _ => false,
    };
    let repeats = matches!(expr, Expr::Repeat { hi, .. } if *hi > 1);
    within && is_choice || children(expr).into_iter().any(|child| repeats_a_choice(child, within || repeats))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn normalizers(parts: Vec<Value>) -> Result<(), String> {
        check(Some(&json!({"type": "Sequence", "normalizers": parts})), None, None, None)
    }

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    #[test]
    fn chains_that_multiply_are_refused() {
        assert_eq!(normalizers(vec![json!({"type": "NFC"}), replace(" ", "▁"), json!({"type": "Lowercase"})]), Ok(()));
        assert!(normalizers(vec![replace("a", "aaaaaaaaaaaa"); 2]).unwrap_err().contains("100 times"));
        assert!(normalizers(vec![replace("a", &"b".repeat(101))]).is_err());
        assert!(
            normalizers(vec![json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "b".repeat(100)})])
                .is_err()
        );
        let bytes = json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "ByteLevel"}); 7]});
        assert!(check(None, Some(&bytes), None, None).unwrap_err().contains("pre-tokenizers"));
        let decoders = json!({"type": "Sequence", "decoders": vec![replace("a", "aaaaaaaaaaaa"); 2]});
        assert!(check(None, None, None, Some(&decoders)).is_err());
        assert!(normalizers(vec![json!({"type": "Strip"}); 65]).unwrap_err().contains("more than 64"));
        let deep = (0..9).fold(json!({"type": "NFC"}), |part, _| json!({"type": "Sequence", "normalizers": [part]}));
        assert!(check(Some(&deep), None, None, None).unwrap_err().contains("nested"));
    }

    #[test]
    fn templates_have_the_text_once() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let template = |pieces: Vec<Value>, ids: usize| {
            let special = json!({"<s>": {"id": "<s>", "ids": vec![1; ids], "tokens": []}});
            let template =
                json!({"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special});
            check(None, None, Some(&json!({"type": "Sequence", "processors": [template]})), None)
        };
        assert_eq!(template(vec![text.clone()], 1), Ok(()));
        assert!(template(vec![text.clone(); 2], 1).is_err());
        assert!(template(vec![json!({"SpecialToken": {"id": "<s>", "type_id": 0}}); 65], 1).is_err());
        assert!(template(vec![text], 65).unwrap_err().contains("ids"));
    }

    #[test]
    fn regular_expressions_of_published_models_are_accepted() {
        for pattern in [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\s+(?!\S)|\s+",
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
            r"(?:a|b)+c",
        ] {
            assert_eq!(check_regex(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn regular_expressions_of_exponential_time_are_refused() {
        for pattern in
            [r"(a+)+(?=b)", r"(?:a|aa)*(?!c)", r"(x?){50}(?=y)", r"(a)(?:\1|a)+b", r"(?:(?:a*)b?)*(?!c)", "("]
        {
            assert!(check_regex(pattern).is_err(), "{pattern}");
        }
        assert!(check_regex(&"(".repeat(60_000)).unwrap_err().contains("nested"));
        assert!(check_regex(&"a".repeat(100_000)).is_err());
    }

    #[test]
    fn settings_of_the_model_are_bounded() {
        let settings = |mut json: Value| {
            json["vocab"] = json!({});
            check_model(&serde_json::from_value(json).unwrap())
        };
        assert_eq!(settings(json!({"continuing_subword_prefix": "##", "max_input_chars_per_word": 100})), Ok(()));
        assert!(settings(json!({"continuing_subword_prefix": "#".repeat(65)})).is_err());
        assert!(settings(json!({"end_of_word_suffix": "#".repeat(65)})).is_err());
        assert!(settings(json!({"max_input_chars_per_word": 1001})).is_err());
    }
}
