//! The page at `/`: one file that contains its style, script and icon, with a content security policy that allows only
//! those.

pub mod formula;

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};

const PAGE: &str = include_str!("page.html");
/// The style, one file per subject, joined.
const STYLE: &str = concat!(
    include_str!("theme.css"),
    include_str!("page.css"),
    include_str!("conversations.css"),
    include_str!("reading.css"),
    include_str!("panel.css"),
);
const ICON: &str = include_str!("icon.txt");
/// The script of the head, which runs before the page is painted.
const THEME: &str = include_str!("theme.js");
/// The script, one file per subject, joined.
const SCRIPT: &str = concat!(
    include_str!("api.js"),
    include_str!("grammars.js"),
    include_str!("code.js"),
    include_str!("formulas.js"),
    include_str!("markdown.js"),
    include_str!("context.js"),
    include_str!("store.js"),
    include_str!("tree.js"),
    include_str!("tabs.js"),
    include_str!("models.js"),
    include_str!("settings.js"),
    include_str!("content.js"),
    include_str!("attachments.js"),
    include_str!("messages.js"),
    include_str!("prefill.js"),
    include_str!("generation.js"),
    include_str!("chat.js"),
    include_str!("welcome.js"),
    include_str!("transfer.js"),
    include_str!("conversations.js"),
    include_str!("grid.js"),
    include_str!("visits.js"),
    include_str!("charts.js"),
    include_str!("lambda.js"),
    include_str!("engine.js"),
);

/// The page but for the nonce, which differs per response.
static ASSEMBLED: LazyLock<String> = LazyLock::new(|| {
    let page = PAGE.replace("{theme}", THEME).replace("{style}", STYLE);
    page.replace("{script}", SCRIPT).replace("{icon}", ICON.trim())
});

/// The page with its headers.
pub fn response() -> Response {
    let nonce = nonce();
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy(&nonce)),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    (headers, ASSEMBLED.replace("{nonce}", &nonce)).into_response()
}

fn policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// An unpredictable value: the hasher's keys come from the system's random source.
fn nonce() -> String {
    let part = || RandomState::new().hash_one("page");
    format!("{:016x}{:016x}", part(), part())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_are_assembled() {
        for name in ["{theme}", "{style}", "{script}", "{icon}"] {
            assert!(PAGE.contains(name) && !ASSEMBLED.contains(name), "{name}");
        }
        assert!(ASSEMBLED.contains(STYLE) && ASSEMBLED.contains(SCRIPT) && ASSEMBLED.contains(THEME));
        // These would end the element that the part is in.
        assert!(!STYLE.contains("</"));
        for script in [THEME, SCRIPT] {
            assert!(!script.contains("</script") && !script.contains("<!--"));
        }
    }

    #[test]
    fn all_colours_are_those_of_the_themes() {
        let others = [
            include_str!("page.css"),
            include_str!("conversations.css"),
            include_str!("reading.css"),
            include_str!("panel.css"),
        ];
        for style in others {
            for literal in ["rgb(", "hsl(", ": #", "solid #", "prefers-color-scheme"] {
                assert!(!style.contains(literal), "{literal}");
            }
        }
        let theme = include_str!("theme.css");
        let (light, dark) = theme.split_once(":root[data-theme=\"dark\"]").unwrap();
        for name in light.split("--").skip(1).filter_map(|rest| rest.split(':').next()) {
            assert!(dark.contains(&format!("--{name}: ")), "--{name} has no dark colour");
        }
        assert!(light.contains("color-scheme: light;") && dark.contains("color-scheme: dark;"));
    }

    #[test]
    fn no_two_responses_share_a_nonce() {
        assert_ne!(nonce(), nonce());
        assert!(nonce().len() == 32 && policy("abc").matches("'nonce-abc'").count() == 2);
    }
}
