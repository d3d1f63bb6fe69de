//! Pictures of a server that behaves in every way.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::testing::{answering, wait_for_end, write_file};
use super::{FetchError, FileRoom, ImageHost, PictureFetcher, PictureUrl};

const MOST: usize = 200_000;
const TIME: Duration = Duration::from_secs(2);
/// Permits of all files together.
const ROOM: usize = 512;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn fetcher(hosts: &[String]) -> PictureFetcher {
    PictureFetcher::new(hosts.iter().map(|host| host.parse::<ImageHost>().unwrap()).collect(), TIME)
}

fn fetch(hosts: &[String], url: &str) -> Result<Vec<u8>, FetchError> {
    let all = Arc::new(Semaphore::new(ROOM));
    let mut room = FileRoom::new(all.clone(), all.clone().try_acquire_owned().unwrap(), ROOM);
    let fetched = runtime().block_on(fetcher(hosts).fetch(&PictureUrl::parse(url).unwrap(), MOST, &mut room));
    drop(room);
    assert_eq!(all.available_permits(), ROOM);
    fetched
}

fn file() -> Vec<u8> {
    (0..MOST).map(|i| (i * 7 % 251) as u8).collect()
}

/// Answers by the path of the request; `other` is a server that is not named.
fn answer(head: &str, client: &mut TcpStream, other: SocketAddr) {
    let own = client.local_addr().unwrap();
    let mut write = |text: &str| drop(client.write_all(text.as_bytes()));
    let redirect = |to: &str| format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n");
    match head.split(' ').nth(1).unwrap() {
        "/good" => write_file(client, "image/png", &file()),
        "/good?size=1" => write_file(client, "APPLICATION/octet-stream", b"small"),
        "/chunked" => {
            write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
        }
        "/to-the-end" => write("HTTP/1.1 200 OK\r\nContent-Type: image/gif\r\n\r\nabcde"),
        "/page" => write_file(client, "text/html; charset=utf-8", b"<html>"),
        "/json" => write_file(client, "application/json", b"{}"),
        "/gzip" => write("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
        "/missing" => write("HTTP/1.1 404 secret\r\nContent-Length: 6\r\n\r\nsecret"),
        "/partial" => write("HTTP/1.1 206 Partial\r\nContent-Length: 3\r\n\r\nabc"),
        "/nowhere" => write("HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"),
        "/short" => write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"),
        "/cut" => write("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcdefgh"),
        "/large" => write(&format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", MOST + 1)),
        "/two-lengths" => write("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde"),
        "/endless" => {
            write("HTTP/1.1 200 OK\r\n\r\n");
            while client.write_all(&[7; 4096]).is_ok() {}
        }
        "/endless-head" => {
            write("HTTP/1.1 200 OK\r\n");
            while client.write_all(b"X-Secret: secret\r\n").is_ok() {}
        }
        "/slow" => {
            write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n");
            while client.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
        }
        "/silent" => wait_for_end(client),
        "/nonsense" => write("secret\r\n\r\n"),
        "/loop" => write(&redirect("/loop")),
        "/twice" => write(&redirect(&format!("http://{own}/once"))),
        "/once" => write(&redirect("/good?size=1")),
        "/to-file" => write(&redirect("file:///etc/passwd")),
        "/to-user" => write(&redirect(&format!("http://user:secret@{own}/good"))),
        "/to-unnamed" => write(&redirect(&format!("http://{other}/good"))),
        "/to-private" => write(&redirect(&format!("http://localhost:{}/good", own.port()))),
        _ => {}
    }
}

#[test]
fn files_come_and_all_else_is_a_sentence() {
    let visits = Arc::new(AtomicUsize::new(0));
    let (counted, heads) = (visits.clone(), Arc::new(Mutex::new(vec![])));
    let other = answering(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let seen = heads.clone();
    let own = answering(move |head, client| {
        seen.lock().unwrap().push(head.to_ascii_lowercase());
        answer(head, client, other);
    });
    let hosts = [own.to_string(), format!("localhost:{}", own.port())];
    for (path, wanted) in [
        ("/good", Ok(file())),
        ("/good?size=1", Ok(b"small".to_vec())),
        ("/chunked", Ok(b"abcde".to_vec())),
        ("/to-the-end", Ok(b"abcde".to_vec())),
        ("/twice", Ok(b"small".to_vec())),
        // Bytes behind the length are no part of the file.
        ("/cut", Ok(b"abc".to_vec())),
        ("/page", Err(FetchError::NoPicture)),
        ("/json", Err(FetchError::NoPicture)),
        ("/gzip", Err(FetchError::Compressed)),
        ("/missing", Err(FetchError::Status(404))),
        ("/partial", Err(FetchError::Status(206))),
        ("/nowhere", Err(FetchError::Status(302))),
        ("/short", Err(FetchError::Incomplete)),
        ("/large", Err(FetchError::TooLarge(MOST))),
        ("/endless", Err(FetchError::TooLarge(MOST))),
        ("/two-lengths", Err(FetchError::NoAnswer)),
        ("/endless-head", Err(FetchError::NoAnswer)),
        ("/nonsense", Err(FetchError::NoAnswer)),
        ("/hangs-up", Err(FetchError::NoAnswer)),
        ("/slow", Err(FetchError::Slow(2))),
        ("/silent", Err(FetchError::Slow(2))),
        ("/loop", Err(FetchError::Redirects(3))),
        ("/to-file", Err(FetchError::Redirected)),
        ("/to-user", Err(FetchError::Redirected)),
        ("/to-unnamed", Err(FetchError::Redirected)),
        ("/to-private", Err(FetchError::Private)),
    ] {
        let since = Instant::now();
        let fetched = fetch(&hosts, &format!("http://{own}{path}"));
        assert!(fetched == wanted, "{path}: {:?}", fetched.map(|file| file.len()));
        assert!(since.elapsed() < 2 * TIME, "{path} took {:?}", since.elapsed());
    }
    assert_eq!(visits.load(Ordering::Relaxed), 0, "a server that is not named was visited");
    let heads = heads.lock().unwrap();
    assert_eq!(heads.iter().filter(|head| head.starts_with("get /loop ")).count(), 4);
    for head in heads.iter() {
        assert!(
            head.contains(&format!("\r\nhost: {own}\r\n")) && head.contains("\r\naccept-encoding: identity\r\n"),
            "{head}"
        );
        assert!(!head.contains("authorization") && !head.contains("cookie") && !head.contains("secret"), "{head}");
    }
}

/// A server without TLS, which says so.
fn refusing_tls() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    own
}

#[test]
fn hosts_that_are_not_named_are_not_visited() {
    let visits = Arc::new(AtomicUsize::new(0));
    let counted = visits.clone();
    let own = answering(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let (named, port) = (own.to_string(), own.port());
    let local = format!("localhost:{port}");
    for (hosts, url, wanted) in [
        (vec![], format!("http://{own}/good"), FetchError::Off),
        (vec!["127.0.0.1".to_owned()], format!("http://{own}/good"), FetchError::Unnamed),
        (vec!["example.org".to_owned()], format!("http://{own}/good"), FetchError::Unnamed),
        (vec![named.clone()], format!("http://{local}/good"), FetchError::Unnamed),
        (vec![named.clone()], format!("http://[::ffff:127.0.0.1]:{port}/good"), FetchError::Unnamed),
        // A name does not admit what it resolves to.
        (vec![local.clone()], format!("http://{local}/good"), FetchError::Private),
        (vec![named, local.clone()], format!("http://{local}/good"), FetchError::Private),
        (vec!["127.0.0.1:1".to_owned()], "http://127.0.0.1:1/good".to_owned(), FetchError::Unreachable),
    ] {
        assert_eq!(fetch(&hosts, &url), Err(wanted), "{hosts:?} {url}");
    }
    let with_tls = if cfg!(feature = "https") { FetchError::Handshake } else { FetchError::NoTls };
    let plain = refusing_tls();
    assert_eq!(fetch(&[plain.to_string()], &format!("https://{plain}/good")), Err(with_tls));
    assert_eq!(visits.load(Ordering::Relaxed), 0);
}

#[test]
fn a_file_waits_for_no_room_and_leaves_none_taken() {
    let own = answering(|_, client| write_file(client, "image/png", &file()));
    let url = PictureUrl::parse(&format!("http://{own}/good")).unwrap();
    let all = Arc::new(Semaphore::new(ROOM));
    for (most, wanted) in [(100, FetchError::TooManyBytes(0)), (ROOM, FetchError::NoRoom)] {
        let others = all.clone().try_acquire_many_owned(ROOM as u32 - 100).unwrap();
        let mut room = FileRoom::new(all.clone(), all.clone().try_acquire_owned().unwrap(), most);
        let fetched = runtime().block_on(fetcher(&[own.to_string()]).fetch(&url, MOST, &mut room));
        assert_eq!(fetched, Err(wanted));
        drop((others, room));
        assert_eq!(all.available_permits(), ROOM);
    }
}

#[test]
fn a_fetch_that_is_dropped_ends_its_connection() {
    for path in ["/silent", "/slow"] {
        let (to, ended) = channel();
        let own = answering(move |head, client| {
            let own = client.local_addr().unwrap();
            answer(head, client, own);
            to.send(()).unwrap();
        });
        let url = PictureUrl::parse(&format!("http://{own}{path}")).unwrap();
        let fetcher = PictureFetcher::new(vec![own.to_string().parse().unwrap()], Duration::from_secs(60));
        let all = Arc::new(Semaphore::new(ROOM));
        let mut room = FileRoom::new(all.clone(), all.clone().try_acquire_owned().unwrap(), ROOM);
        runtime().block_on(async {
            assert!(timeout(Duration::from_millis(300), fetcher.fetch(&url, MOST, &mut room)).await.is_err());
            let ended = spawn_blocking(move || ended.recv_timeout(Duration::from_secs(20))).await.unwrap();
            assert!(ended.is_ok(), "{path}: the connection is still open");
        });
    }
}
