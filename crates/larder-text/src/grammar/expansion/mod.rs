//! The size that a grammar has when it is expanded, counted before anything is built: references that the compiler
//! copies, classes of characters, schemas that it combines.

mod lark;
mod schema;

use llguidance::api::TopLevelGrammar;

use super::GrammarError;

/// Largest size. A unit is about a character, a reference or a key, of which the compiler makes one or two nodes.
const UNITS_MAX: u64 = 200_000;
/// Units of a class of characters that is written as `\w` or `\p{…}`: up to 800 ranges.
const CLASS_UNITS: u64 = 100;

/// Checks the size of a grammar, which may name others.
pub(super) fn check(source: &TopLevelGrammar) -> Result<(), GrammarError> {
    let units = source.grammars.iter().map(|grammar| {
        let lark = grammar.lark_grammar.as_deref().map_or(0, lark::units);
        lark.saturating_add(grammar.json_schema.as_ref().map_or(0, schema::units))
    });
    match units.fold(0, u64::saturating_add) {
        units if units > UNITS_MAX => Err(GrammarError(format!(
            "it is too large when it is expanded: {units} characters, references and keys; at most {UNITS_MAX} are supported"
        ))),
        _ => Ok(()),
    }
}

/// Units of a regular expression. What it repeats is not copied.
fn regex_units(source: &str) -> u64 {
    let escapes = source.as_bytes().windows(2).filter(|pair| pair[0] == b'\\' && b"wWdDsSpP".contains(&pair[1]));
    source.len() as u64 + CLASS_UNITS * escapes.count() as u64
}
