//! In which number format each matrix is stored: rules for names, and a format for all others.

use larder_core::{LayerIdx, NumberFormat};
use serde::{Deserialize, Serialize};

/// The word for the format of the source.
const KEEP: &str = "keep";

/// Rules that give matrices a number format by their names; the first rule that matches counts.
///
/// A matrix of the experts is called `layers.3.experts.down`, or `gate` or `up`; resident weights have the names of
/// their tensors.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct FormatMix {
    rules: Vec<FormatRule>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct FormatRule {
    /// A name, in which `*` stands for any text.
    pattern: String,
    /// `None` keeps the format of the source.
    kind: Option<NumberFormat>,
}

impl FormatMix {
    /// Reads a text with a rule per line: a pattern and a format, or `keep`. What follows `#` is a comment. The error
    /// names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rules = vec![];
        for (i, line) in text.lines().enumerate() {
            let rule = line.split('#').next().unwrap_or_default().trim();
            if !rule.is_empty() {
                rules.push(FormatRule::parse(rule).map_err(|why| format!("line {}: {why}", i + 1))?);
            }
        }
        if rules.is_empty() {
            Err("it has no rule, such as: layers.0.experts.* q8_0".into())
        } else {
            Ok(FormatMix { rules })
        }
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    fn rule(&self, name: &str) -> Option<usize> {
        self.rules.iter().position(|rule| matches(&rule.pattern, name))
    }

    /// The patterns that are the first to match none of these names.
    pub(crate) fn unused(&self, names: impl Iterator<Item = String>) -> Vec<&str> {
        let mut used = vec![false; self.rules.len()];
        names.filter_map(|name| self.rule(&name)).for_each(|rule| used[rule] = true);
        self.rules.iter().zip(used).filter(|(_, used)| !used).map(|(rule, _)| rule.pattern.as_str()).collect()
    }
}

impl FormatRule {
    fn parse(text: &str) -> Result<Self, String> {
        let (pattern, format) =
            text.split_once(char::is_whitespace).ok_or_else(|| format!("'{text}' has no number format"))?;
        let format = format.trim();
        let kind = match format {
            KEEP => None,
            other => Some(other.parse().map_err(|_| {
                let known = NumberFormat::names(NumberFormat::is_encodable);
                format!("'{other}' is no number format; there are {KEEP}, {known}")
            })?),
        };
        Ok(FormatRule { pattern: pattern.to_owned(), kind })
    }
}

impl From<FormatMix> for Vec<String> {
    fn from(mix: FormatMix) -> Self {
        let line = |rule: FormatRule| format!("{} {}", rule.pattern, rule.kind.map_or(KEEP, NumberFormat::name));
        mix.rules.into_iter().map(line).collect()
    }
}

impl TryFrom<Vec<String>> for FormatMix {
    type Error = String;

    fn try_from(lines: Vec<String>) -> Result<Self, String> {
        Ok(FormatMix { rules: lines.iter().map(|line| FormatRule::parse(line)).collect::<Result<_, _>>()? })
    }
}

/// What matrices are stored as; `None` keeps the format of the source.
#[derive(Clone, Copy, Default, Debug)]
pub struct WantedFormats<'a> {
    mix: Option<&'a FormatMix>,
    otherwise: Option<NumberFormat>,
}

impl From<Option<NumberFormat>> for WantedFormats<'_> {
    fn from(otherwise: Option<NumberFormat>) -> Self {
        WantedFormats { mix: None, otherwise }
    }
}

impl<'a> WantedFormats<'a> {
    /// By the rules of `mix`, and `otherwise` where none matches.
    pub fn new(mix: &'a FormatMix, otherwise: Option<NumberFormat>) -> Self {
        WantedFormats { mix: Some(mix), otherwise }
    }

    /// Of the resident tensor `name`.
    pub(crate) fn of(&self, name: &str) -> Option<NumberFormat> {
        let rule = self.mix.and_then(|mix| Some(&mix.rules[mix.rule(name)?]));
        rule.map_or(self.otherwise, |rule| rule.kind)
    }

    /// Of the matrix `part` of the experts of a layer.
    pub(crate) fn of_experts(&self, layer: LayerIdx, part: &str) -> Option<NumberFormat> {
        self.of(&expert_matrix(layer, part))
    }
}

/// The name of the matrix `part` (gate, up or down) of the experts of a layer.
pub(crate) fn expert_matrix(layer: LayerIdx, part: &str) -> String {
    format!("layers.{}.experts.{part}", layer.0)
}

/// Whether `name` is `pattern`, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, name, wanted) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*", "", true),
            ("a*", "a", true),
            ("a*c", "abc", true),
            ("a*c", "abcd", false),
            ("ab*ba", "aba", false),
            ("*.q_proj.*", "model.layers.0.self_attn.q_proj.weight", true),
            ("layers.*.experts.down", "layers.11.experts.down", true),
            ("layers.1.*", "layers.11.experts.down", false),
            ("a*b*c*b", "a-b-c-b", true),
            ("a*b*c*b", "a-b-b-c", false),
        ] {
            assert_eq!(matches(pattern, name), wanted, "{pattern} {name}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let text = "# a mix\nlayers.0.experts.*  q8_0\n*.experts.down q4_k # most bytes\n\nlm_head.weight\tkeep\n";
        let mix = FormatMix::parse(text).unwrap();
        let wanted = WantedFormats::new(&mix, Some(NumberFormat::Q2K));
        for (layer, part, kind) in
            [(0, "down", NumberFormat::Q8_0), (1, "down", NumberFormat::Q4K), (1, "up", NumberFormat::Q2K)]
        {
            assert_eq!(wanted.of_experts(LayerIdx(layer), part), Some(kind));
        }
        assert_eq!((wanted.of("lm_head.weight"), wanted.of("other")), (None, Some(NumberFormat::Q2K)));
        let names = ["layers.0.experts.down", "lm_head.weight"].map(str::to_owned);
        assert_eq!(mix.unused(names.into_iter()), ["*.experts.down"]);
        let lines: Vec<String> = mix.clone().into();
        assert_eq!(lines, ["layers.0.experts.* q8_0", "*.experts.down q4_k", "lm_head.weight keep"]);
        assert_eq!(FormatMix::try_from(lines).unwrap(), mix);
    }

    #[test]
    fn a_wrong_line_is_named() {
        let error = |text| FormatMix::parse(text).unwrap_err();
        assert!(error("a q8_0\n\n b  q9").starts_with("line 3: 'q9' is no number format; there are keep, f32"));
        assert_eq!(error("a"), "line 1: 'a' has no number format");
        assert!(error("# nothing\n").starts_with("it has no rule"));
        assert!(serde_json::from_str::<FormatMix>(r#"["a q9"]"#).is_err());
    }
}
