//! A worker's experts, and the thread that computes them: one job after the other, never on the async runtime.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use larder_cache::{Cache, ExpertCache};
use larder_model::{ComputeContext, ExpertWorkspace, wanted_experts};
use tokio::sync::{mpsc, oneshot};

use crate::workers::compute_job::ComputeJob;

/// The cache of a worker's experts, and the buffers to compute them.
pub struct ExpertHost {
    cache: Cache,
    bench: ExpertWorkspace,
}

/// The result of a job.
#[derive(Debug)]
pub struct JobResult {
    /// One row per term: `[terms, hidden]`.
    pub rows: Vec<f32>,
    /// Time of computing, reads included.
    pub busy: Duration,
    /// Number of experts that had to be read.
    pub missed: usize,
}

/// A job in the queue of the thread.
pub struct QueuedJob {
    /// The checked request.
    pub job: ComputeJob,
    /// The time after which the client has given up.
    pub deadline: Instant,
    /// Receives the result, or the error as a sentence.
    pub reply: oneshot::Sender<Result<JobResult, String>>,
}

impl ExpertHost {
    /// A host for the experts of `cache`, computed with `compute`.
    pub fn new(cache: Cache, compute: Arc<ComputeContext>) -> Self {
        ExpertHost { cache, bench: ExpertWorkspace::new(compute) }
    }

    /// Computes the weighted sums of a job's terms.
    pub fn compute(&mut self, job: &ComputeJob) -> Result<JobResult, String> {
        let start = Instant::now();
        let (call, ExpertHost { cache, bench }) = (job.call(), self);
        bench.begin(&call, &job.routed, cache.layout(job.layer));
        let wanted = wanted_experts(&job.routed.ids, job.gate.experts);
        cache
            .visit(
                job.layer,
                &wanted,
                &[],
                &mut |layout, stage, group| bench.compute_stage(&call, &job.routed, layout, stage, group),
                &|| (),
            )
            .map_err(|e| e.to_string())?;
        let mut rows = vec![0.0; job.terms.len() * (job.x.len() / job.states)];
        for (term, row) in job.terms.iter().zip(rows.chunks_exact_mut(job.x.len() / job.states)) {
            term.clone().for_each(|place| bench.add(&call, &job.routed, place, row));
        }
        Ok(JobResult { rows, busy: start.elapsed(), missed: cache.last_visit().misses.len() })
    }

    /// Spawns a thread that computes queued jobs until the queue is closed.
    pub fn spawn(mut self, mut queue: mpsc::Receiver<QueuedJob>) -> io::Result<thread::JoinHandle<()>> {
        thread::Builder::new().name("experts".into()).spawn(move || {
            while let Some(QueuedJob { job, deadline, reply }) = queue.blocking_recv() {
                // The client may have disconnected or asked another worker.
                if !reply.is_closed() && Instant::now() < deadline {
                    let _ = reply.send(self.compute(&job));
                }
            }
        })
    }
}
