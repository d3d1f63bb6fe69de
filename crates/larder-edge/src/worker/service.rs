//! What a worker answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

use crate::codec;
use crate::compute_job::{ComputeJob, InvalidRequest};
use crate::expert_set::ExpertSet;
use crate::handshake::{Handshake, PROTOCOL_VERSION};
use crate::wire::experts_server::Experts;
use crate::wire::{ComputeReply, ComputeRequest, DescribeRequest, Description, Format};
use crate::worker::busy_flag::BusyFlag;
use crate::worker::expert_host::QueuedJob;

/// A worker's side of the service.
pub struct WorkerService {
    /// Its name in the placement.
    pub name: String,
    /// The model.
    pub handshake: Arc<Handshake>,
    /// Its share of the experts.
    pub held: ExpertSet,
    /// The thread that computes.
    pub queue: mpsc::Sender<QueuedJob>,
    /// The longest that a request may take.
    pub request_timeout: Duration,
    /// Knows whether there is anything to do.
    pub busy: Arc<BusyFlag>,
}

impl WorkerService {
    /// A request's job, if this worker is the one to do it.
    fn job(&self, request: &ComputeRequest) -> Result<ComputeJob, Status> {
        let job = ComputeJob::read(request, &self.handshake).map_err(|refusal| match refusal {
            InvalidRequest::Malformed(what) => Status::invalid_argument(what),
            InvalidRequest::WrongModel(what) => Status::failed_precondition(what),
        })?;
        let chosen = job.terms.iter().cloned().flatten().map(|place| job.routed.ids[place]);
        match chosen.into_iter().find(|expert| !self.held.contains(job.layer, *expert)) {
            Some(expert) => {
                let what = format!("{}, {expert} is not among the experts of the worker {}", job.layer, self.name);
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
        }))
    }

    async fn compute(&self, request: Request<ComputeRequest>) -> Result<Response<ComputeReply>, Status> {
        let _busy = self.busy.begin();
        let deadline = Instant::now()
            + client_timeout(&request).map_or(self.request_timeout, |asked| asked.min(self.request_timeout));
        let request = request.into_inner();
        let job = self.job(&request)?;
        let format = job.format;
        let (reply, computed) = oneshot::channel();
        let full = |_| Status::resource_exhausted("the worker has as much to do as it takes on");
        self.queue.try_send(QueuedJob { job, deadline, reply }).map_err(full)?;
        // The thread lets go of an order without a word only if it came too late for it, or is gone itself.
        let computed = computed.await.map_err(|_| Status::deadline_exceeded("the request came too late"))?;
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

/// How long the asker waits, if he says so.
fn client_timeout<T>(request: &Request<T>) -> Option<Duration> {
    let said = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = said.split_at_checked(said.len().checked_sub(1)?)?;
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
    fn the_askers_patience_is_heard() {
        let says = |text: &str| {
            let mut request = Request::new(());
            request.metadata_mut().insert("grpc-timeout", text.parse().unwrap());
            client_timeout(&request)
        };
        assert_eq!(says("250m"), Some(Duration::from_millis(250)));
        assert_eq!(says("7S"), Some(Duration::from_secs(7)));
        assert_eq!((says(""), says("5"), says("x9m"), says("18446744073709551615H")), (None, None, None, None));
        assert_eq!(client_timeout(&Request::new(())), None);
    }
}
