//! A worker's experts, and the thread that computes them: one job after the other, never on the runtime.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use larder_cache::Cache;
use larder_model::{ComputeContext, ExpertWorkspace, distinct};
use tokio::sync::{mpsc, oneshot};

use crate::compute_job::ComputeJob;

/// Experts that pass through slots, and where they are computed.
pub struct ExpertHost {
    cache: Cache,
    bench: ExpertWorkspace,
}

/// What became of a job.
#[derive(Debug)]
pub struct JobResult {
    /// A row for each term.
    pub rows: Vec<f32>,
    /// How long it took.
    pub busy: Duration,
    /// Experts that had to be read.
    pub missed: usize,
}

/// A job on its way to the thread.
pub struct QueuedJob {
    /// What to compute.
    pub job: ComputeJob,
    /// When nobody waits for it any more.
    pub deadline: Instant,
    /// Who waits: for rows, or for a sentence that says why there are none.
    pub reply: oneshot::Sender<Result<JobResult, String>>,
}

impl ExpertHost {
    /// Experts out of `cache`, computed by `compute`.
    pub fn new(cache: Cache, compute: Arc<ComputeContext>) -> Self {
        ExpertHost { cache, bench: ExpertWorkspace::new(compute) }
    }

    /// The weighted sums that a job asks for.
    pub fn compute(&mut self, job: &ComputeJob) -> Result<JobResult, String> {
        let start = Instant::now();
        let (call, ExpertHost { cache, bench }) = (job.call(), self);
        bench.begin(&call, &job.routed, cache.layout(job.layer));
        let wanted = distinct(&job.routed.ids, job.gate.experts);
        cache
            .visit(job.layer, &wanted, &[], &mut |layout, group| bench.compute(&call, &job.routed, layout, group))
            .map_err(|e| e.to_string())?;
        let mut rows = vec![0.0; job.terms.len() * (job.x.len() / job.states)];
        for (term, row) in job.terms.iter().zip(rows.chunks_exact_mut(job.x.len() / job.states)) {
            term.clone().for_each(|place| bench.add(&call, &job.routed, place, row));
        }
        Ok(JobResult { rows, busy: start.elapsed(), missed: cache.last_visit().misses.len() })
    }

    /// A thread that takes orders until nobody can give any.
    pub fn spawn(mut self, mut queue: mpsc::Receiver<QueuedJob>) -> io::Result<thread::JoinHandle<()>> {
        thread::Builder::new().name("experts".into()).spawn(move || {
            while let Some(QueuedJob { job, deadline, reply }) = queue.blocking_recv() {
                // Who asked may have gone, or gone elsewhere.
                if !reply.is_closed() && Instant::now() < deadline {
                    let _ = reply.send(self.compute(&job));
                }
            }
        })
    }
}
