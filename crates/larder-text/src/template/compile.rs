//! From the text of a template to the instructions of the engine, within limits.

use std::collections::BTreeMap;

use minijinja::{
    Error,
    machinery::{CodeGenerator, Instructions, Token, parse, tokenize},
};

use super::{TemplateError, functions, rewrite};

/// Maximum length of a template; those of published models have up to 70 kB.
pub(super) const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Maximum number of words and signs in a tag. The parser calls itself for each, in the worst case.
const MAX_TAG_TOKENS: usize = 4096;
/// Maximum number of `elif` tags, for the same reason.
const MAX_BRANCHES: usize = 1000;

/// A template's instructions, and those of its blocks by name.
pub(super) struct Compiled<'a> {
    pub(super) instructions: Instructions<'a>,
    pub(super) blocks: BTreeMap<&'a str, Instructions<'a>>,
}

/// Compiles `source`. Needs the stack of [`on_large_stack`](super::on_large_stack).
pub(super) fn compile<'a>(name: &'a str, source: &'a str) -> Result<Compiled<'a>, TemplateError> {
    check_length(source)?;
    check_tags(source)?;
    let tree = parse(source, name, functions::whitespace()).map_err(TemplateError::from_syntax)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&rewrite::statement(&tree));
    let (instructions, blocks) = generator.finish();
    Ok(Compiled { instructions, blocks })
}

/// Refuses a template that is too long.
pub(super) fn check_length(source: &str) -> Result<(), TemplateError> {
    if source.len() <= MAX_SOURCE_BYTES {
        return Ok(());
    }
    Err(TemplateError::Source { bytes: source.len(), limit: MAX_SOURCE_BYTES })
}

/// Refuses tags that the parser might not have the stack for. An error of the tokens themselves is the parser's to
/// tell.
fn check_tags(source: &str) -> Result<(), TemplateError> {
    let (mut length, mut branches, mut is_first) = (0, 0, false);
    let too_large = |line: u16, what: String| Err(TemplateError::Syntax { line: line.into(), what });
    for token in tokenize(source, false, functions::whitespace()).map_while(Result::<_, Error>::ok) {
        let (token, span) = token;
        length = match token {
            Token::BlockStart | Token::VariableStart | Token::TemplateData(_) => 0,
            _ => length + 1,
        };
        if length > MAX_TAG_TOKENS {
            return too_large(span.start_line, format!("a tag has more than {MAX_TAG_TOKENS} words and signs"));
        }
        branches += usize::from(is_first && matches!(token, Token::Ident("elif")));
        if branches > MAX_BRANCHES {
            return too_large(span.start_line, format!("the template has more than {MAX_BRANCHES} elif tags"));
        }
        is_first = matches!(token, Token::BlockStart);
    }
    Ok(())
}
