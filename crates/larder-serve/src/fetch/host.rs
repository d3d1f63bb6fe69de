//! Hosts of URLs, and those whose pictures are fetched.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// The host of a URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UrlHost {
    /// A name, in small letters.
    Name(String),
    /// An address.
    Address(IpAddr),
}

impl UrlHost {
    /// The host that a text is: a name, an address of IPv4, or one of IPv6 in brackets. `None` for any other, also for
    /// numbers that some programs take for addresses of IPv4, such as `2130706433` and `127.0x1`.
    fn parse(text: &str) -> Option<Self> {
        if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
            return inner.parse::<Ipv6Addr>().ok().map(|address| UrlHost::Address(address.into()));
        }
        match text.parse::<Ipv4Addr>() {
            Ok(address) => Some(UrlHost::Address(address.into())),
            Err(_) => is_name(text).then(|| UrlHost::Name(text.to_ascii_lowercase())),
        }
    }

    /// The host as a certificate has it.
    pub fn certified(&self) -> String {
        match self {
            UrlHost::Name(name) => name.clone(),
            UrlHost::Address(address) => address.to_string(),
        }
    }
}

impl fmt::Display for UrlHost {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            UrlHost::Name(name) => f.write_str(name),
            UrlHost::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            UrlHost::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// Whether a text is the name of a host: labels between dots, the last of which does not begin with a digit.
fn is_name(text: &str) -> bool {
    /// Limits of the domain name system.
    const NAME_BYTES_MAX: usize = 253;
    const LABEL_BYTES_MAX: usize = 63;
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| (1..=LABEL_BYTES_MAX).contains(&label.len()) && label.bytes().all(is_letter);
    let is_number = |label: &str| label.starts_with(|first: char| first.is_ascii_digit());
    text.len() <= NAME_BYTES_MAX && text.split('.').all(is_label) && !text.rsplit('.').next().is_some_and(is_number)
}

/// The host and the port, if there is one, of the authority of a URL; `None` if it is none, or has a user.
pub fn host_and_port(text: &str) -> Option<(UrlHost, Option<u16>)> {
    let end = if text.starts_with('[') { text.find(']')? + 1 } else { text.find(':').unwrap_or(text.len()) };
    let (host, rest) = text.split_at(end);
    let port = match rest.strip_prefix(':') {
        Some(digits) => Some(port_of(digits)?),
        None if rest.is_empty() => None,
        None => return None,
    };
    Some((UrlHost::parse(host)?, port))
}

fn port_of(digits: &str) -> Option<u16> {
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|port| is_number && *port > 0)
}

/// A host whose pictures are fetched, or all hosts below a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageHost {
    host: UrlHost,
    /// Whether it is not the host itself, but those whose names end with its name.
    is_below: bool,
    /// The only port; `None` for that of the scheme.
    port: Option<u16>,
}

/// A text that names no host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "must be a host, such as example.org, *.example.org, 192.168.1.7:8000 or [::1]:8000, without http:// and a path"
)]
pub struct ImageHostError;

impl ImageHost {
    /// Whether it is this host at this port, where URLs without a port have the port `standard`.
    pub fn admits(&self, host: &UrlHost, port: u16, standard: u16) -> bool {
        let is_host = match (&self.host, host) {
            (UrlHost::Name(name), UrlHost::Name(longer)) if self.is_below => {
                longer.strip_suffix(name.as_str()).is_some_and(|before| before.ends_with('.'))
            }
            (named, host) => named == host,
        };
        is_host && port == self.port.unwrap_or(standard)
    }
}

impl FromStr for ImageHost {
    type Err = ImageHostError;

    /// Parses `HOST`, `*.HOST` or either with `:PORT`.
    fn from_str(text: &str) -> Result<Self, ImageHostError> {
        let text = text.trim();
        let (name, is_below) = text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        let (host, port) = host_and_port(name).ok_or(ImageHostError)?;
        if is_below && matches!(host, UrlHost::Address(_)) {
            return Err(ImageHostError);
        }
        Ok(ImageHost { host, is_below, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_hosts_are_admitted() {
        for (named, authority, standard, admitted) in [
            ("example.org", "example.org", 80, true),
            ("example.org", "EXAMPLE.org", 443, true),
            ("Example.ORG", "example.org:443", 443, true),
            ("example.org", "example.org:443", 80, false),
            ("example.org", "example.org:8000", 80, false),
            ("example.org", "a.example.org", 80, false),
            ("example.org", "example.org.evil.net", 80, false),
            ("example.org", "evilexample.org", 80, false),
            ("example.org:8000", "example.org:8000", 80, true),
            ("example.org:8000", "example.org", 80, false),
            ("*.example.org", "a.example.org", 443, true),
            ("*.example.org", "a.b.example.org", 443, true),
            ("*.example.org", "example.org", 443, false),
            ("*.example.org", "evilexample.org", 443, false),
            ("*.example.org", "a.example.org.evil.net", 443, false),
            ("*.example.org:81", "a.example.org:81", 80, true),
            ("*.example.org:81", "a.example.org", 80, false),
            ("127.0.0.1:8000", "127.0.0.1:8000", 80, true),
            ("127.0.0.1:8000", "localhost:8000", 80, false),
            ("127.0.0.1:8000", "[::ffff:127.0.0.1]:8000", 80, false),
            ("localhost:8000", "127.0.0.1:8000", 80, false),
            ("[::1]", "[::1]:443", 443, true),
            ("[::1]", "[0:0:0:0:0:0:0:1]", 80, true),
            ("[::1]", "[::2]", 80, false),
        ] {
            let host: ImageHost = named.parse().unwrap();
            let (own, port) = host_and_port(authority).unwrap();
            assert_eq!(host.admits(&own, port.unwrap_or(standard), standard), admitted, "{named} {authority}");
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        const WRONG: &str = "* *. *.*.org a.* *.127.0.0.1 *.[::1] http://a a/b a@b user:pass@a a..b .a a. a: a:0 a:+80 a:65536 \
            a:80:80 a:http ::1 [::1 [::1]x [127.0.0.1] [] a%2eb ü.org 2130706433 0x7f000001 127.1 127.0.0.01 0177.0.0.1 \
            127.0.0.0x1 256.0.0.1 1.2.3.4.5";
        let (long_name, long_label) = ("a.".repeat(127) + "org", "a".repeat(64));
        for text in WRONG.split_whitespace().chain(["", "a b", &long_name, &long_label]) {
            assert_eq!(text.parse::<ImageHost>(), Err(ImageHostError), "{text}");
            assert_eq!(host_and_port(text), None, "{text}");
        }
        assert!(host_and_port("xn--nxasmq6b.xn--j6w193g").is_some() && host_and_port("3com.com").is_some());
        assert_eq!(" example.org".parse::<ImageHost>(), "example.org".parse());
    }

    #[test]
    fn hosts_are_written_as_urls_and_certificates_have_them() {
        for (text, certified) in [("example.org", "example.org"), ("10.0.0.1", "10.0.0.1"), ("[fe80::1]", "fe80::1")] {
            let host = UrlHost::parse(text).unwrap();
            assert_eq!((host.to_string(), host.certified()), (text.to_owned(), certified.to_owned()));
        }
    }
}
