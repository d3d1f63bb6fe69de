//! The gRPC service of a worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::DEFINITION;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

use crate::workers::codec;
use crate::workers::compute_job::{ComputeJob, InvalidRequest};
use crate::workers::expert_set::ExpertSet;
use crate::workers::handshake::{Handshake, PROTOCOL_VERSION};
use crate::workers::wire::experts_server::Experts;
use crate::workers::wire::{ComputeReply, ComputeRequest, DescribeRequest, Description, Format};
use crate::workers::worker::busy_flag::BusyFlag;
use crate::workers::worker::drain::Announcement;
use crate::workers::worker::expert_host::QueuedJob;

/// Implements the service `Experts`.
pub struct WorkerService {
    /// The worker's name in the placement.
    pub name: String,
    /// The model that it serves.
    pub handshake: Arc<Handshake>,
    /// The experts that it holds.
    pub held: ExpertSet,
    /// Queue of the thread that computes.
    pub queue: mpsc::Sender<QueuedJob>,
    /// Timeout of a request.
    pub request_timeout: Duration,
    /// What it says of itself in the handshake.
    pub announcement: Arc<Announcement>,
    /// Marks requests as in progress.
    pub busy: Arc<BusyFlag>,
}

impl WorkerService {
    /// Checks that a request is valid and that this worker holds its experts.
    fn job(&self, request: &ComputeRequest) -> Result<ComputeJob, Status> {
        let job = ComputeJob::read(request, &self.handshake).map_err(|error| match error {
            InvalidRequest::Malformed(what) => Status::invalid_argument(what),
            InvalidRequest::WrongModel(what) => Status::failed_precondition(what),
        })?;
        let chosen = job.terms.iter().cloned().flatten().map(|entry| job.routed.ids[entry]);
        match chosen.into_iter().find(|expert| !self.held.contains(job.layer, *expert)) {
            Some(expert) => {
                let what = format!("{}, {expert}: the worker {} does not hold this expert", job.layer, self.name);
                Err(Status::failed_precondition(what))
            }
            None => Ok(job),
        }
    }
}

#[tonic::async_trait]
impl Experts for WorkerService {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<Description>, Status> {
        Ok(Response::new(Description {
            version: PROTOCOL_VERSION,
            name: self.name.clone(),
            model: self.handshake.model.clone(),
            exact: self.handshake.exact,
            formats: vec![Format::F32.into(), Format::Bf16.into()],
            held: self.held.to_wire(),
            draining: self.announcement.is_draining(),
            instance: self.announcement.instance,
            definition: DEFINITION,
        }))
    }

    async fn compute(&self, request: Request<ComputeRequest>) -> Result<Response<ComputeReply>, Status> {
        let _busy = self.busy.begin();
        let deadline = Instant::now()
            + client_timeout(&request).map_or(self.request_timeout, |timeout| timeout.min(self.request_timeout));
        let request = request.into_inner();
        let job = self.job(&request)?;
        let format = job.format;
        let (reply, computed) = oneshot::channel();
        let full = |_| Status::resource_exhausted("the worker's request queue is full");
        self.queue.try_send(QueuedJob { job, deadline, reply }).map_err(full)?;
        // The thread drops a job without a reply only if the deadline has passed or the thread has ended.
        let computed = computed
            .await
            .map_err(|_| Status::deadline_exceeded("the request's deadline passed before it was computed"))?;
        let computed = computed.map_err(Status::data_loss)?;
        Ok(Response::new(ComputeReply {
            version: PROTOCOL_VERSION,
            id: request.id,
            model: request.model,
            layer: request.layer,
            format: format.into(),
            rows: codec::encode(format, &computed.rows),
            busy_micros: computed.busy.as_micros() as u64,
            missed: computed.missed as u32,
        }))
    }
}

/// The timeout in the request's `grpc-timeout` header, if there is one.
fn client_timeout<T>(request: &Request<T>) -> Option<Duration> {
    let text = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number.checked_mul(3600)?),
        "M" => Duration::from_secs(number.checked_mul(60)?),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_headers_are_parsed() {
        let parse = |text: &str| {
            let mut request = Request::new(());
            request.metadata_mut().insert("grpc-timeout", text.parse().unwrap());
            client_timeout(&request)
        };
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("7S"), Some(Duration::from_secs(7)));
        assert_eq!((parse(""), parse("5"), parse("x9m"), parse("18446744073709551615H")), (None, None, None, None));
        assert_eq!(client_timeout(&Request::new(())), None);
    }
}
