//! A fake of the hub: a server with scripted faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server replies to a request.
#[derive(Clone, Debug)]
pub enum ScriptedReply {
    Normal,
    Status(u16, &'static str),
    /// Close the connection after this many bytes of the body.
    Truncate(usize),
    /// Change a byte of the body.
    Corrupt,
    /// Ignore the requested range and send the whole file.
    IgnoreRange,
    /// Send this many bytes of the body, then nothing for a long time.
    Stall(usize),
    /// State a wrong length in the header.
    WrongLength,
}

/// A request as it was received.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    pub path: String,
    pub range: Option<String>,
    /// Address and port that were connected to.
    pub host: String,
    pub token: Option<String>,
}

type Script = Box<dyn Fn(&RecordedRequest, usize) -> ScriptedReply + Send + Sync>;

pub struct FakeHub {
    /// Where the hub listens.
    hub: SocketAddr,
    /// Where it redirects to for large files: another port, and so another origin.
    pub cdn: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    token: Option<String>,
    /// Called with the request and the number of earlier requests for its path.
    script: Script,
    cdn: SocketAddr,
    log: Mutex<Vec<RecordedRequest>>,
}

impl FakeHub {
    pub fn start(files: BTreeMap<String, Vec<u8>>, token: Option<&str>, script: Script) -> Self {
        let [hub, cdn] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [hub_address, cdn_address] = [&hub, &cdn].map(|listener| listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            files,
            token: token.map(str::to_owned),
            script,
            cdn: cdn_address,
            log: Mutex::new(vec![]),
        });
        for listener in [hub, cdn] {
            let serving = shared.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let shared = serving.clone();
                    // A client that disconnects early is not an error of the server.
                    thread::spawn(move || drop(shared.serve(&stream)));
                }
            });
        }
        FakeHub { hub: hub_address, cdn: cdn_address, shared }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    pub fn log(&self) -> Vec<RecordedRequest> {
        self.shared.log.lock().clone()
    }

    /// The ranges of the requests for the data of `file`.
    pub fn ranges(&self, file: &str) -> Vec<Option<String>> {
        let path = format!("/cdn/{file}");
        self.log().into_iter().filter(|request| request.path == path).map(|request| request.range).collect()
    }
}

impl Shared {
    fn serve(&self, stream: &TcpStream) -> std::io::Result<()> {
        let request = read_request(stream)?;
        let before = {
            let mut log = self.log.lock();
            let before = log.iter().filter(|a| a.path == request.path).count();
            log.push(request.clone());
            before
        };
        let reply = (self.script)(&request, before);
        let authorized = self.token.is_none() || request.token == self.token.as_ref().map(|t| format!("Bearer {t}"));
        let path = request.path.clone();
        match reply {
            ScriptedReply::Status(status, extra) => respond(stream, status, extra, b""),
            _ if path.starts_with("/cdn/") => self.send(stream, &request, &path["/cdn/".len()..], &reply),
            _ if !authorized => respond(stream, 401, "", b"{}"),
            _ if path == "/api/models/o/n/revision/main?blobs=true"
                || path == format!("/api/models/o/n/revision/{COMMIT}?blobs=true") =>
            {
                respond(stream, 200, "", self.listing().to_string().as_bytes())
            }
            _ => match path.strip_prefix(&format!("/o/n/resolve/{COMMIT}/")) {
                Some(name) if self.files.contains_key(name) && is_large(name) => {
                    let (etag, bytes) = (sha256(&self.files[name]), self.files[name].len());
                    let to = format!("Location: http://{}/cdn/{name}\r\n", self.cdn);
                    let extra = format!("{to}X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {bytes}\r\n");
                    respond(stream, 302, &extra, b"Found")
                }
                Some(name) if self.files.contains_key(name) => self.send(stream, &request, name, &reply),
                _ => respond(stream, 404, "", b"not found"),
            },
        }
    }

    fn listing(&self) -> serde_json::Value {
        let of = |(name, bytes): (&String, &Vec<u8>)| {
            if is_large(name) {
                json!({"rfilename": name, "size": bytes.len(), "blobId": "f".repeat(40),
                           "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 130}})
            } else {
                json!({"rfilename": name, "size": bytes.len(), "blobId": blob(bytes)})
            }
        };
        json!({"id": "o/n", "sha": COMMIT, "siblings": self.files.iter().map(of).collect::<Vec<_>>()})
    }

    fn send(
        &self,
        mut stream: &TcpStream,
        request: &RecordedRequest,
        name: &str,
        reply: &ScriptedReply,
    ) -> std::io::Result<()> {
        let whole = &self.files[name];
        let range = request.range.as_deref().filter(|_| !matches!(reply, ScriptedReply::IgnoreRange)).map(|r| {
            let (first, last) = r.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let last = last.parse().map_or(whole.len(), |last: usize| (last + 1).min(whole.len()));
            (first.parse::<usize>().unwrap(), last)
        });
        let (first, end) = range.unwrap_or((0, whole.len()));
        let mut body = whole[first..end].to_vec();
        let total = whole.len() + usize::from(matches!(reply, ScriptedReply::WrongLength));
        let head = match range {
            Some(_) => format!("HTTP/1.1 206 Partial\r\nContent-Range: bytes {first}-{}/{total}\r\n", end - 1),
            None => "HTTP/1.1 200 OK\r\n".into(),
        };
        let surplus = if range.is_none() { total - whole.len() } else { 0 };
        write!(stream, "{head}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len() + surplus)?;
        match reply {
            ScriptedReply::Truncate(at) => body.truncate(*at),
            ScriptedReply::Corrupt => body[0] ^= 1,
            ScriptedReply::Stall(at) => {
                stream.write_all(&body[..(*at).min(body.len())])?;
                thread::sleep(Duration::from_secs(20));
                return Ok(());
            }
            _ => {}
        }
        stream.write_all(&body)
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<RecordedRequest> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = RecordedRequest { path, range: None, host: String::new(), token: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.to_owned()),
            "host" => request.host = value.to_owned(),
            "authorization" => request.token = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(request)
}

fn respond(mut stream: &TcpStream, status: u16, extra: &str, body: &[u8]) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} Status\r\n{extra}Content-Length: {length}\r\nConnection: close\r\n\r\n")?;
    stream.write_all(body)
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

fn blob(bytes: &[u8]) -> String {
    let framed = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &framed).as_ref())
}
