//! The URL of a picture.

use std::fmt;

use axum::http::Uri;

use super::error::FetchError;
use super::host::{UrlHost, host_and_port};

/// A URL of http or https.
#[derive(Clone, PartialEq, Eq)]
pub struct PictureUrl {
    /// Its host.
    pub host: UrlHost,
    /// Its port.
    pub port: u16,
    /// Whether it is of https.
    pub with_tls: bool,
    /// Path and query.
    pub target: String,
}

/// Nothing of it gets into logs.
impl fmt::Debug for PictureUrl {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("PictureUrl")
    }
}

impl PictureUrl {
    /// Parses a URL.
    pub fn parse(text: &str) -> Result<Self, FetchError> {
        let text = text.trim();
        let (scheme, _) = text.split_once(':').ok_or(FetchError::Scheme)?;
        let with_tls = scheme.eq_ignore_ascii_case("https");
        if !with_tls && !scheme.eq_ignore_ascii_case("http") {
            return Err(FetchError::Scheme);
        }
        let uri: Uri = text.parse().map_err(|_| FetchError::Malformed)?;
        // A scheme without slashes is parsed as a host.
        uri.scheme().ok_or(FetchError::Malformed)?;
        let authority = uri.authority().ok_or(FetchError::Malformed)?.as_str();
        if authority.contains('@') {
            return Err(FetchError::User);
        }
        let (host, port) = host_and_port(authority).ok_or(FetchError::Malformed)?;
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let target = format!("{}{query}", uri.path());
        Ok(PictureUrl { host, port: port.unwrap_or(standard_port(with_tls)), with_tls, target })
    }

    /// The URL to which a `Location` leads: a whole one, or a path of the same server.
    pub fn redirected(&self, location: &str) -> Result<Self, FetchError> {
        let scheme = if self.with_tls { "https" } else { "http" };
        if location.starts_with("//") {
            PictureUrl::parse(&format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            PictureUrl::parse(&format!("{scheme}://{}{location}", self.authority()))
        } else {
            PictureUrl::parse(location)
        }
    }

    /// The port of URLs of its scheme that name none.
    pub fn standard_port(&self) -> u16 {
        standard_port(self.with_tls)
    }

    /// Host and port, as the header `Host` has them.
    pub fn authority(&self) -> String {
        let PictureUrl { host, port, .. } = self;
        if *port == self.standard_port() { host.to_string() } else { format!("{host}:{port}") }
    }
}

fn standard_port(with_tls: bool) -> u16 {
    if with_tls { 443 } else { 80 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(String, String, bool), FetchError> {
        PictureUrl::parse(text).map(|url| (url.authority(), url.target, url.with_tls))
    }

    #[test]
    fn urls_have_a_host_and_a_path() {
        for (text, authority, target, with_tls) in [
            ("http://example.org", "example.org", "/", false),
            ("HTTPS://Example.org:443/A.png", "example.org", "/A.png", true),
            ("http://example.org:443/", "example.org:443", "/", false),
            ("http://example.org?size=1", "example.org", "/?size=1", false),
            ("http://example.org/a%20b.png?x=1&y=/#part", "example.org", "/a%20b.png?x=1&y=/", false),
            (" https://[2001:DB8::1]:8443/a\n", "[2001:db8::1]:8443", "/a", true),
            ("http://127.0.0.1:8000//a", "127.0.0.1:8000", "//a", false),
        ] {
            assert_eq!(parsed(text), Ok((authority.to_owned(), target.to_owned(), with_tls)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        const SCHEME: &str =
            "file:///etc/passwd FILE:/etc/passwd ftp://a/b gopher://a javascript:1 data:,a httpx://a //a/b a";
        const USER: &str = "http://u@a/b https://u:p@a/b http://:p@a/b http://127.0.0.1@a/ http://a@127.0.0.1:80/";
        const MALFORMED: &str = "http: http:a http:80 http:/a http:// http:///a http://a\\b http://a:/ http://a:x/ \
            http://a:99999/ http://2130706433/ http://0x7f.1/ http://127.1/ http://0177.0.0.1/ http://a..b/ http://.a/ \
            http://a./ http://a%2eb/ http://[::1/ http://[::1]a/ http://[fe80::1%25eth0]/ http://ü.org/";
        let refused = [(SCHEME, FetchError::Scheme), (USER, FetchError::User), (MALFORMED, FetchError::Malformed)];
        for (texts, error) in refused {
            for text in texts.split_whitespace() {
                assert_eq!(parsed(text), Err(error), "{text}");
            }
        }
        for text in ["http://a b/", "http://a/b c", "http://a\r\nHost: b/", "http://a/\r\nb"] {
            assert_eq!(parsed(text), Err(FetchError::Malformed), "{text}");
        }
    }

    #[test]
    fn redirects_lead_to_whole_urls_and_paths() {
        let url = PictureUrl::parse("https://a.org:8443/x/y.png?z").unwrap();
        for (location, wanted) in [
            ("/b.png", Ok(("a.org:8443", "/b.png", true))),
            ("//b.org/c", Ok(("b.org", "/c", true))),
            ("http://b.org:81/c", Ok(("b.org:81", "/c", false))),
            ("c.png", Err(FetchError::Scheme)),
            ("file:///etc/passwd", Err(FetchError::Scheme)),
            ("http://u:p@b.org/", Err(FetchError::User)),
            ("//", Err(FetchError::Malformed)),
            ("/a b", Err(FetchError::Malformed)),
        ] {
            let next = url.redirected(location).map(|url| (url.authority(), url.target, url.with_tls));
            let wanted =
                wanted.map(|(authority, target, with_tls)| (authority.to_owned(), target.to_owned(), with_tls));
            assert_eq!(next, wanted, "{location}");
        }
    }

    #[test]
    fn logs_do_not_show_a_url() {
        assert_eq!(format!("{:?}", PictureUrl::parse("http://a.org/token").unwrap()), "PictureUrl");
    }
}
