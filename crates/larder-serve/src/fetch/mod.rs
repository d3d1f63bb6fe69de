//! Pictures at addresses: fetched from hosts that are named, and else from none.
//!
//! A request must not make the server reach what its client cannot. So the addresses of a name are looked up once, each
//! of them has to be public, and the connection is made to one of these; a redirect is a new URL, with the same checks.

mod address;
mod error;
mod host;
mod room;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;
mod url;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, Request, Response, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::net::connect::{exchange, opened};
use crate::options::LOOKUP_THREADS;
use address::is_public;
pub use error::FetchError;
use host::UrlHost;
pub use host::{ImageHost, ImageHostError};
pub use room::FileRoom;
pub use url::PictureUrl;

/// Time for a picture, from the search for its host to its last byte.
pub const FETCH_TIME: Duration = Duration::from_secs(20);
/// Time to connect to one address.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Redirects that are followed.
const REDIRECTS_MAX: usize = 3;
/// What this client calls itself.
const AGENT: &str = concat!("larder/", env!("CARGO_PKG_VERSION"));

type Result<T> = std::result::Result<T, FetchError>;

/// Fetches pictures.
pub struct PictureFetcher {
    hosts: Vec<ImageHost>,
    time: Duration,
    /// One permit for each thread that looks up names.
    lookups: Arc<Semaphore>,
}

impl PictureFetcher {
    /// From these hosts, each picture within this time.
    pub fn new(hosts: Vec<ImageHost>, time: Duration) -> Self {
        PictureFetcher { hosts, time, lookups: Arc::new(Semaphore::new(LOOKUP_THREADS)) }
    }

    /// Refuses a URL whose host is not named.
    pub fn check(&self, url: &PictureUrl) -> Result<()> {
        if self.hosts.is_empty() {
            return Err(FetchError::Off);
        }
        if !self.hosts.iter().any(|host| host.admits(&url.host, url.port, url.standard_port())) {
            return Err(FetchError::Unnamed);
        }
        if url.with_tls && cfg!(not(feature = "https")) { Err(FetchError::NoTls) } else { Ok(()) }
    }

    /// The file at a URL, of at most `most` bytes, in a buffer that `room` has been made for. Dropping the future ends
    /// the connection.
    pub async fn fetch(&self, url: &PictureUrl, most: usize, room: &mut FileRoom) -> Result<Vec<u8>> {
        self.check(url)?;
        let fetched = timeout(self.time, self.follow(url.clone(), most, room)).await;
        fetched.map_err(|_| FetchError::Slow(self.time.as_secs()))?
    }

    /// The file at a URL, or where it is redirected to.
    async fn follow(&self, mut url: PictureUrl, most: usize, room: &mut FileRoom) -> Result<Vec<u8>> {
        for _ in 0..=REDIRECTS_MAX {
            let response = self.ask(&url).await?;
            match location(&response) {
                Some(location) => url = self.redirected(&url, location)?,
                None => return file_of(response, most, room).await,
            }
        }
        Err(FetchError::Redirects(REDIRECTS_MAX))
    }

    fn redirected(&self, url: &PictureUrl, location: &str) -> Result<PictureUrl> {
        let next = url.redirected(location).and_then(|next| self.check(&next).map(|()| next));
        next.map_err(|_| FetchError::Redirected)
    }

    /// The head of the answer to a request for a URL.
    async fn ask(&self, url: &PictureUrl) -> Result<Response<Incoming>> {
        let stream = connect(&self.addresses(url).await?).await?;
        let stream = opened(stream, &url.host.certified(), url.with_tls).await.map_err(|_| FetchError::Handshake)?;
        let request = Request::get(&url.target)
            .header(header::HOST, url.authority())
            .header(header::ACCEPT, "image/*")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, AGENT)
            .header(header::CONNECTION, "close")
            .body(Full::new(Bytes::new()))
            .map_err(|_| FetchError::Malformed)?;
        exchange(stream, request).await.map_err(|_| FetchError::NoAnswer)
    }

    /// The addresses of a URL's host, all of them public, or that by which the host was named.
    async fn addresses(&self, url: &PictureUrl) -> Result<Vec<SocketAddr>> {
        let name = match &url.host {
            UrlHost::Address(address) => return Ok(vec![SocketAddr::new(*address, url.port)]),
            UrlHost::Name(name) => name.clone(),
        };
        let found = self.look_up(name, url.port).await.filter(|found| !found.is_empty());
        let found = found.ok_or(FetchError::Unresolved)?;
        if found.iter().all(|found| is_public(found.ip())) { Ok(found) } else { Err(FetchError::Private) }
    }

    /// The addresses that the system has for a name; `None` if it finds none.
    async fn look_up(&self, name: String, port: u16) -> Option<Vec<SocketAddr>> {
        let permit = self.lookups.clone().acquire_owned().await.ok()?;
        let look_up = move || {
            // It is held until the system answers, also if the client has disconnected.
            let _permit = permit;
            (name.as_str(), port).to_socket_addrs().map(Iterator::collect)
        };
        spawn_blocking(look_up).await.ok()?.ok()
    }
}

/// A connection to the first of some addresses that accepts one.
async fn connect(addresses: &[SocketAddr]) -> Result<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(CONNECT_TIME, TcpStream::connect(address)).await {
            return Ok(stream);
        }
    }
    Err(FetchError::Unreachable)
}

/// Where an answer redirects to.
fn location(response: &Response<Incoming>) -> Option<&str> {
    let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    response.headers().get(header::LOCATION).filter(|_| is_redirect)?.to_str().ok()
}

/// The file in an answer, which is read up to its end or to `most` bytes, whatever its head says.
async fn file_of(response: Response<Incoming>, most: usize, room: &mut FileRoom) -> Result<Vec<u8>> {
    let (head, mut body) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(FetchError::Status(head.status.as_u16()));
    }
    check_kind(&head.headers)?;
    let mut file = Vec::new();
    if body.size_hint().lower() > most as u64 {
        return Err(FetchError::TooLarge(most));
    }
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| FetchError::Incomplete)?;
        let Ok(data) = frame.into_data() else { continue };
        if data.len() > most - file.len() {
            return Err(FetchError::TooLarge(most));
        }
        room.extend(&mut file, data.len())?;
        file.extend_from_slice(&data);
    }
    Ok(file)
}

/// Refuses what is not a picture by its head; whether it is one by its bytes is seen when it is decoded.
fn check_kind(headers: &HeaderMap) -> Result<()> {
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return Err(FetchError::Compressed);
    }
    let is_file = |kind: &[u8]| {
        let kind = kind.to_ascii_lowercase();
        kind.starts_with(b"image/") || kind.starts_with(b"application/octet-stream") || kind == b"binary/octet-stream"
    };
    let kind = headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes());
    if kind.is_none_or(is_file) { Ok(()) } else { Err(FetchError::NoPicture) }
}
