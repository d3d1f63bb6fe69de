//! One worker, as it is known here: how it is reached, what it holds, whether it can be asked at present.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use crate::agreed::Agreed;
use crate::asker::machines::Machine;
use crate::gather::Gathered;
use crate::held::Held;
use crate::tls::Tls;
use crate::wire::experts_client::ExpertsClient;
use crate::wire::{ComputeReply, ComputeRequest, DescribeRequest};

/// How long a connection, or a worker that is asked what it is, may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a worker that failed is left alone, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// How often an idle connection is tried, and how long that may take.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// A worker.
pub struct Neighbour {
    /// Its name.
    pub name: String,
    client: ExpertsClient<Channel>,
    known: Mutex<Known>,
    /// Something may have changed: it failed.
    failed: Notify,
    /// It answered since it failed last.
    answered: AtomicBool,
}

/// What is known of a worker.
#[derive(Default)]
pub struct Known {
    /// What it holds, if it can be asked.
    pub held: Option<Arc<Held>>,
    /// Why it cannot be asked, or what went wrong last.
    pub trouble: Option<String>,
}

/// What became of a request.
pub struct Answer {
    /// Its number.
    pub id: u64,
    /// The answer, not yet checked, and its length; or what went wrong.
    pub outcome: Result<(ComputeReply, usize), String>,
    /// How long it took.
    pub took: Duration,
}

impl Neighbour {
    /// A worker that has not been asked anything. The error is a sentence.
    pub fn new(machine: &Machine, tls: &Tls, agreed: &Agreed) -> Result<Self, String> {
        let Machine { name, address } = machine;
        let said =
            |e: tonic::transport::Error| format!("the address {address} of {name} cannot be used: {}", deepest(&e));
        let window = u32::try_from(agreed.reply_bytes()).unwrap_or(u32::MAX).clamp(1 << 16, (1 << 31) - 1);
        let mut endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(said)?
            .connect_timeout(PATIENCE)
            .initial_stream_window_size(window)
            .initial_connection_window_size(window)
            .http2_keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1)
            .keep_alive_while_idle(true);
        if address.starts_with("https://") {
            let Some(ca) = &tls.ca else {
                return Err(format!(
                    "the address of {name} is https://, and no [tls] ca says whose certificates to believe"
                ));
            };
            let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).timeout(PATIENCE);
            if let Some((cert, key)) = &tls.identity {
                config = config.identity(Identity::from_pem(cert, key));
            }
            endpoint = endpoint.tls_config(config).map_err(said)?;
        }
        let client = ExpertsClient::new(endpoint.connect_with_connector_lazy(tower::service_fn(connect)))
            .max_decoding_message_size(agreed.reply_bytes())
            .max_encoding_message_size(agreed.request_bytes());
        let (known, failed, answered) = Default::default();
        Ok(Neighbour { name: name.clone(), client, known: Mutex::new(known), failed, answered })
    }

    /// What is known of it.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It gave no answer that could be used: it is left alone for a while.
    pub fn rest(&self, trouble: String) {
        *self.known() = Known { held: None, trouble: Some(trouble) };
        self.failed.notify_one();
    }

    /// It gave a good answer.
    pub fn thank(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Asks what it is until it can be asked for experts, and again whenever it failed; says when the first try is over.
    pub async fn watch(self: Arc<Self>, agreed: Arc<Agreed>, tried: UnboundedSender<()>) {
        let mut tried = Some(tried);
        let mut pause = PAUSE.0;
        loop {
            let described = tokio::time::timeout(PATIENCE, self.describe(&agreed)).await;
            let described = described.unwrap_or_else(|_| Err("does not answer".into()));
            let is_there = described.is_ok();
            {
                let mut known = self.known();
                match described {
                    Ok(held) => known.held = Some(Arc::new(held)),
                    Err(trouble) => *known = Known { held: None, trouble: Some(trouble) },
                }
            }
            drop(tried.take());
            if is_there {
                self.failed.notified().await;
            }
            if self.answered.swap(false, Ordering::Relaxed) {
                pause = PAUSE.0;
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE.1);
        }
    }

    async fn describe(&self, agreed: &Agreed) -> Result<Held, String> {
        let description = self.client.clone().describe(DescribeRequest {}).await.map_err(|s| spoken(&s))?.into_inner();
        if let Some(objection) = agreed.objection(&description) {
            return Err(objection);
        }
        Held::of_wire(&description.held, &agreed.geometry)
    }

    /// Sends a request; what becomes of it comes through `to`, at the deadline at the latest.
    pub async fn ask(self: Arc<Self>, message: ComputeRequest, deadline: Duration, to: UnboundedSender<Answer>) {
        let (id, start) = (message.id, Instant::now());
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        let mut client = self.client.clone();
        let outcome = match tokio::time::timeout(deadline, client.compute(request)).await {
            Ok(Ok(reply)) => {
                let reply = reply.into_inner();
                let length = reply.encoded_len();
                Ok((reply, length))
            }
            Ok(Err(status)) => Err(spoken(&status)),
            Err(_) => Err("did not answer in time".into()),
        };
        // Nobody listens any more if the run is over.
        let _ = to.send(Answer { id, outcome, took: start.elapsed() });
    }
}

/// A connection to the address of a worker.
async fn connect(to: Uri) -> io::Result<TokioIo<Gathered>> {
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("https") { 443 } else { 80 });
    // An address of version 6 is written in brackets.
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, port)).await?;
    Ok(TokioIo::new(Gathered::new(stream)))
}

/// A status as half a sentence, whoever wrote it.
fn spoken(status: &Status) -> String {
    let said: String = status.message().chars().filter(|c| !c.is_control()).take(300).collect();
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => "did not answer in time".into(),
        Code::Unavailable | Code::Unknown => format!("cannot be reached: {}", deepest(status)),
        _ => format!("refused: {said}"),
    }
}

/// The innermost reason of an error, on one line.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string().chars().filter(|c| !c.is_control()).take(300).collect()
}
