//! The address of another server.

use std::fmt;
use std::str::FromStr;

use axum::http::Uri;

/// Scheme, host, port and path below which the API is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpstreamAddress {
    /// Whether it speaks TLS.
    pub with_tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path before `/v1`, without a slash at its end.
    base: String,
}

impl UpstreamAddress {
    /// Host and port, as the header `Host` has them.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let standard = if self.with_tls { 443 } else { 80 };
        if self.port == standard { host } else { format!("{host}:{}", self.port) }
    }

    /// The path of a request there: below the base, and with `/v1` before it.
    pub fn path(&self, uri: &Uri) -> String {
        let path = uri.path();
        let version = if path.starts_with("/v1/") { "" } else { "/v1" };
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        format!("{}{version}{path}{query}", self.base)
    }
}

impl FromStr for UpstreamAddress {
    type Err = String;

    /// Parses `http://HOST[:PORT][/BASE][/v1]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|error| format!("{error}; expected http://HOST:PORT"))?;
        let with_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err("must begin with http:// or https://".into()),
        };
        if with_tls && cfg!(not(feature = "https")) {
            return Err("this larder was built without TLS; build it with --features tls, or use http".into());
        }
        let authority = uri.authority().ok_or("has no host")?;
        if authority.as_str().contains('@') {
            return Err("must not contain a user or password; give a key with --upstream-key".into());
        }
        if uri.query().is_some() {
            return Err("must not have a query".into());
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = authority.port_u16().unwrap_or(if with_tls { 443 } else { 80 });
        let base = uri.path().trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base).trim_end_matches('/').to_owned();
        Ok(UpstreamAddress { with_tls, host, port, base })
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let scheme = if self.with_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_below_the_base() {
        for (address, path, wanted) in [
            ("http://a:8000", "/v1/chat/completions", "/v1/chat/completions"),
            ("http://a:8000/v1", "/v1/chat/completions?x=1", "/v1/chat/completions?x=1"),
            ("http://a/api/v1/", "/chat/completions", "/api/v1/chat/completions"),
            ("http://[::1]:9/", "/v1/messages", "/v1/messages"),
        ] {
            let address: UpstreamAddress = address.parse().unwrap();
            assert_eq!(address.path(&path.parse().unwrap()), wanted, "{address}");
        }
        let address: UpstreamAddress = "http://[::1]:9".parse().unwrap();
        assert_eq!((address.host.as_str(), address.authority().as_str()), ("::1", "[::1]:9"));
        assert_eq!("http://a".parse::<UpstreamAddress>().unwrap().authority(), "a");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "a:1", "ftp://a", "http://", "http://u:p@a", "http://a?b", "http://a b"] {
            assert!(text.parse::<UpstreamAddress>().is_err(), "{text}");
        }
        assert_eq!("https://a/v1".parse::<UpstreamAddress>().is_ok(), cfg!(feature = "https"));
    }
}
