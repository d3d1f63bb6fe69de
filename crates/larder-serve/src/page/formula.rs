//! Formulas in LaTeX as MathML, for the page. A formula comes from a model or a stranger: its size, the time, and the
//! size and depth of what becomes of it are bounded, it may define no commands, and it is converted on a thread whose
//! stack is large enough for the deepest recursion of the crate that does it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use pulldown_latex::config::{DisplayMode, RenderConfig};
use pulldown_latex::event::{Content, Event};
use pulldown_latex::{Parser, Storage, push_mathml};

/// Largest formula in bytes.
pub const FORMULA_BYTES_MAX: usize = 4000;
/// Largest MathML of a formula in bytes.
const MATHML_BYTES_MAX: usize = 256 << 10;
/// Deepest nesting of elements. Browsers lay out MathML recursively.
const DEPTH_MAX: usize = 150;
/// Time limit of a batch; the formulas after it are refused.
const TIME_MAX: Duration = Duration::from_secs(2);
/// `\hat\hat…` of the largest formula takes 1 to 2 MiB; commands have at least half the length of this one.
const STACK_BYTES: usize = 16 << 20;
/// Commands that are not for strangers: definitions, which could expand without end, and codes of characters.
const REFUSED: &[&str] =
    &["def", "edef", "gdef", "xdef", "let", "futurelet", "newcommand", "renewcommand", "providecommand", "char"];
/// The elements of formulas.
const ELEMENTS: &[&str] = &[
    "math",
    "mfrac",
    "mi",
    "mn",
    "mo",
    "mover",
    "mroot",
    "mrow",
    "mspace",
    "msqrt",
    "msub",
    "msubsup",
    "msup",
    "mtable",
    "mtd",
    "mtext",
    "mtr",
    "munder",
    "munderover",
];
/// Commands that answers use and the crate does not know.
const PRELUDE: &str = r"\def\boxed#1{\begin{array}{|c|}\hline #1\\\hline\end{array}}\let\fbox\boxed\def\tag#1{\qquad(#1)}\let\bm\boldsymbol\let\mathscr\mathcal\let\mbox\text\def\label#1{}\def\nonumber{}\def\notag{}";

/// A formula and how it is shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Formula {
    /// The formula without its delimiters.
    pub latex: String,
    /// Whether it has a line of its own.
    pub display: bool,
}

/// The MathML of each formula, or a sentence about why there is none.
pub fn convert(formulas: Vec<Formula>) -> Vec<Result<String, String>> {
    let count = formulas.len();
    let end = Instant::now() + TIME_MAX;
    let work = move || {
        let in_time = |formula: &Formula| {
            if Instant::now() < end {
                mathml(formula)
            } else {
                Err("The formulas before this one took too long.".into())
            }
        };
        formulas.iter().map(in_time).collect::<Vec<_>>()
    };
    let thread = thread::Builder::new().name("mathml".into()).stack_size(STACK_BYTES).spawn(work);
    let failed = || vec![Err("The formula could not be converted: no thread could be started.".into()); count];
    thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(failed)
}

fn mathml(formula: &Formula) -> Result<String, String> {
    let latex = &formula.latex;
    if latex.len() > FORMULA_BYTES_MAX {
        return Err(format!("The formula is longer than {FORMULA_BYTES_MAX} bytes."));
    }
    if let Some(name) = refused_command(latex) {
        return Err(format!("The command '\\{name}' is not supported."));
    }
    // The crate has places that panic, such as a number that begins with a letter outside of ASCII.
    let rendered = catch_unwind(AssertUnwindSafe(|| render(formula)));
    let rendered = rendered.unwrap_or_else(|_| Err("The formula is malformed.".into()))?;
    match depth(&rendered) {
        Some(depth) if depth <= DEPTH_MAX && rendered.len() <= MATHML_BYTES_MAX => Ok(rendered),
        Some(_) => Err("The formula is too large or too deeply nested.".into()),
        None => Err("The formula is malformed.".into()),
    }
}

/// The first command of a formula that is refused.
fn refused_command(latex: &str) -> Option<&str> {
    let mut rest = latex;
    while let Some((_, after)) = rest.split_once('\\') {
        let name = &after[..after.bytes().take_while(u8::is_ascii_alphabetic).count()];
        if REFUSED.contains(&name) {
            return Some(name);
        }
        // The second of two backslashes begins no command.
        rest = after.strip_prefix('\\').unwrap_or(after);
    }
    None
}

fn render(formula: &Formula) -> Result<String, String> {
    let (storage, source) = (Storage::new(), format!("{PRELUDE}{}", formula.latex));
    // All events first: the renderer would write an error into the formula.
    let events: Result<Vec<_>, _> = Parser::new(&source, &storage).collect();
    let events = events.map_err(|error| sentence(&error.to_string()))?;
    let display_mode = if formula.display { DisplayMode::Block } else { DisplayMode::Inline };
    let config = RenderConfig { display_mode, xml: true, ..RenderConfig::default() };
    let mut mathml = String::new();
    push_mathml(&mut mathml, events.into_iter().map(|event| Ok::<_, std::io::Error>(escaped(event))), config)
        .map_err(|error| sentence(&error.to_string()))?;
    Ok(mended(&mathml))
}

/// The crate escapes texts, but no names of functions; those with markup become texts.
fn escaped(event: Event) -> Event {
    match event {
        Event::Content(Content::Function(name)) if name.contains(['<', '>', '&']) => {
            Event::Content(Content::Text(name))
        }
        other => other,
    }
}

/// The crate escapes no single characters, forgets a space between attributes, and writes a space of LaTeX as an entity
/// that XML does not have.
fn mended(mathml: &str) -> String {
    let mut mended =
        without_styles(mathml).replace("\"minsize=", "\" minsize=").replace(">&amp;nbsp;</mtext>", ">\u{a0}</mtext>");
    mended = mended.replace("&nbsp;", "\u{a0}");
    for (character, entity) in [("<", "&lt;"), (">", "&gt;"), ("&", "&amp;")] {
        for after in ["</", "\u{338}</"] {
            mended = mended.replace(&format!(">{character}{after}"), &format!(">{entity}{after}"));
        }
    }
    mended
}

/// The page's policy allows no attributes of style, which are colours and negative spaces.
fn without_styles(mathml: &str) -> String {
    const STYLE: &str = " style=\"";
    let mut parts = mathml.split(STYLE);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('"').map_or(part, |(_, rest)| rest))
}

/// The first line of an error, without the part of the formula that follows.
fn sentence(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    format!("The formula cannot be converted: {}.", line.trim_start_matches("parsing error: "))
}

/// The deepest nesting of elements; `None` if they are not closed in their turn or are not those of formulas.
fn depth(mathml: &str) -> Option<usize> {
    let (mut open, mut deepest) = (Vec::new(), 0);
    for part in mathml.split('<').skip(1) {
        let (tag, _) = part.split_once('>')?;
        if let Some(name) = tag.strip_prefix('/') {
            (open.pop() == Some(name)).then_some(())?;
            continue;
        }
        let name = tag.split([' ', '/']).next()?;
        ELEMENTS.contains(&name).then_some(())?;
        if !tag.ends_with('/') {
            open.push(name);
            deepest = deepest.max(open.len());
        }
    }
    open.is_empty().then_some(deepest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(latex: &str) -> Result<String, String> {
        convert(vec![Formula { latex: latex.into(), display: false }]).remove(0)
    }

    #[test]
    fn formulas_become_mathml() {
        let shown = Formula { latex: r"\frac{a}{b}".into(), display: true };
        let inline = Formula { display: false, ..shown.clone() };
        let both = convert(vec![shown, inline]);
        let math = |display: &str| {
            format!(
                "<math display=\"{display}\" xmlns=\"http://www.w3.org/1998/Math/MathML\"><mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac></math>"
            )
        };
        assert_eq!(both, [Ok(math("block")), Ok(math("inline"))]);
        for known in [
            r"\boxed{x^2}",
            r"\begin{align*}a&=b\tag{1}\label{x}\\c&=d\nonumber\end{align*}",
            r"\bm{x}\mathscr{L}",
            r"\mbox{a b}",
            r"\begin{cases}x & y\\ z\end{cases}",
            r"\left\{\big(\right.",
            r"\$5\ \%",
            r"a<b>c \& \not< d",
        ] {
            let mathml = one(known).unwrap_or_else(|error| panic!("{known}: {error}"));
            assert!(is_well_formed(&mathml), "{known}: {mathml}");
        }
        for styled in [r"\color{red}x", r"\textcolor{blue}{x\big(}", r"a\!b", r"\begin{matrix}a\\[1em]b\end{matrix}"] {
            let mathml = one(styled).unwrap();
            assert!(is_well_formed(&mathml) && !mathml.contains("style=\""), "{mathml}");
        }
        assert!(one(r"a\ b").unwrap().contains("<mtext>\u{a0}</mtext>"));
    }

    /// Whether attributes have spaces before them, and `&` stands only before what XML knows.
    fn is_well_formed(mathml: &str) -> bool {
        let tags = mathml.split('<').skip(1).filter_map(|rest| rest.split('>').next());
        let is_spaced = |between: &str| ["", "/"].contains(&between) || between.starts_with(' ');
        tags.into_iter().all(|tag| tag.split('"').skip(2).step_by(2).all(is_spaced))
            && mathml
                .split('&')
                .skip(1)
                .all(|rest| ["lt;", "gt;", "amp;"].iter().any(|entity| rest.starts_with(entity)))
    }

    #[test]
    fn what_cannot_be_converted_is_said_in_a_sentence() {
        assert_eq!(
            one(r"\unknown{x}").unwrap_err(),
            "The formula cannot be converted: unknown primitive command found."
        );
        for wrong in [r"\frac", "{", "}", "x^2^3", "a & b", r"\left(", r"\begin{x}", "\\", "$x$", "#1"] {
            let error = one(wrong).unwrap_err();
            assert!(error.ends_with('.') && error.lines().count() == 1, "{wrong}: {error}");
        }
    }

    #[test]
    fn nothing_can_be_defined() {
        for definition in
            [r"\def\a{\a\a}\a", r"\let\a=b", r"\newcommand{\a}{x}", r"x\renewcommand\frac{1}", r"\char`\é"]
        {
            assert!(one(definition).unwrap_err().ends_with("is not supported."), "{definition}");
        }
        // Other commands that begin like these are.
        assert!(one(r"\begin{matrix}a\\let b\end{matrix}").is_ok());
        assert!(one(r"\delta \letters").unwrap_err().contains("unknown"));
    }

    #[test]
    fn sizes_and_depths_are_bounded() {
        assert!(one(&"x".repeat(FORMULA_BYTES_MAX + 1)).unwrap_err().contains("longer than"));
        assert!(one(&"x".repeat(FORMULA_BYTES_MAX)).is_ok());
        let nested = |open: &str, close: &str, levels| format!("{}x{}", open.repeat(levels), close.repeat(levels));
        for (open, close) in
            [("{", "}"), (r"\sqrt{", "}"), ("x^{", "}"), (r"\left(", r"\right)"), (r"\hat ", ""), (r"\boxed{", "}")]
        {
            one(&nested(open, close, 10)).unwrap_or_else(|error| panic!("{open}: {error}"));
            let deepest = FORMULA_BYTES_MAX / (open.len() + close.len()) - 1;
            assert!(one(&nested(open, close, deepest)).is_err(), "{open}");
        }
    }

    #[test]
    fn no_command_overflows_the_stack() {
        // Commands that take the next one as their argument are converted recursively.
        for command in [
            r"\hat",
            r"\bar",
            r"\vec",
            r"\dot",
            r"\not",
            r"\sqrt",
            r"\frac",
            r"\binom",
            r"\mathbb",
            r"\bm",
            r"\text",
            r"\overset",
            r"\cancel",
            r"\'",
            r"\=",
            r"\.",
            r"\^",
            r"\~",
            r"\mathop",
            r"\underline",
            r"\overline",
            r"\stackrel",
            r"\relax",
            r"\limits",
            "%\n",
            "{}",
            "^",
            "_",
            r"\big",
            r"\left.",
            r"\prescript",
            r"\genfrac",
            r"\substack",
            r"\xrightarrow",
            r"\operatorname",
        ] {
            let _ = one(&command.repeat(FORMULA_BYTES_MAX / command.len()));
        }
    }

    #[test]
    fn a_panic_concerns_one_formula() {
        let formulas =
            [r"\begin{alignat}{é}x\end{alignat}", "x"].map(|latex| Formula { latex: latex.into(), display: false });
        let both = convert(formulas.to_vec());
        assert!(both[0].is_err() && both[1].is_ok(), "{both:?}");
    }

    #[test]
    fn markup_in_a_formula_is_text() {
        for hostile in [
            r"\text{<script>alert(1)</script>}",
            r#"\text{" onclick="x}"#,
            r"\operatorname{<img src=x>}",
            r"\mathop{<mi href='x'>}",
            r"<b>\&amp;",
        ] {
            let mathml = one(hostile).unwrap();
            assert!(["<script", "<img", "<mi href", "<b>"].iter().all(|markup| !mathml.contains(markup)), "{mathml}");
            assert!(is_well_formed(&mathml), "{mathml}");
        }
        for link in [r"\href{javascript:x}{y}", r"\url{x}", r"\class{a}{b}", r"\style{a}{b}"] {
            assert!(one(link).is_err(), "{link}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_converted_or_refused(parts in proptest::collection::vec(part(), 0..40)) {
            if let Ok(mathml) = one(&parts.concat()) {
                proptest::prop_assert!(mathml.starts_with("<math ") && is_well_formed(&mathml), "{mathml}");
            }
        }
    }

    /// Pieces of LaTeX, whole and broken, and any character.
    fn part() -> impl proptest::strategy::Strategy<Value = String> {
        use proptest::prelude::*;
        const PIECES: &[&str] = &[
            r"\frac",
            r"\hat",
            "{",
            "}",
            "^",
            "_",
            "&",
            r"\\",
            r"\left(",
            r"\right)",
            r"\begin{aligned}",
            r"\end{aligned}",
            r"\begin{array}{c|c}",
            r"\end{array}",
            r"\hline",
            r"\text{",
            r"\boxed{",
            r"\tag{1}",
            r"\big",
            r"\not",
            r"\sum",
            r"\limits",
            r"\mathbb",
            r"\substack{",
            "x",
            "12",
            " ",
            r"\ ",
            r"\,",
            r"\color{red}",
            r"\kern",
            "1em",
            "'",
            "%",
            "\n",
            "~",
            "[",
            "]",
            r"\sqrt",
            r"\operatorname{",
            r"\middle|",
            r"\binom",
        ];
        prop_oneof![4 => proptest::sample::select(PIECES).prop_map(str::to_owned), 1 => any::<char>().prop_map(String::from)]
    }
}
