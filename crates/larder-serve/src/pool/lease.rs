//! What keeps a model loaded: a lease, and bodies of responses that hold one.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use super::ModelPool;
use super::state::PoolState;
use super::work::Running;

/// Keeps a model loaded until it is dropped.
pub struct ModelLease {
    pool: Arc<ModelPool>,
    model: usize,
    /// The number of the load that it is for.
    load: u64,
    /// The routes of the model.
    pub router: Router,
}

impl ModelLease {
    /// A lease that was counted.
    pub(super) fn new(pool: Arc<ModelPool>, model: usize, running: &Running) -> Self {
        ModelLease { pool, model, load: running.load, router: running.router.clone() }
    }

    /// A body that holds the lease until its end.
    pub fn over(self, body: Body) -> Body {
        Body::new(LeasedBody { body, _lease: self })
    }
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        let (model, load) = (self.model, self.load);
        self.pool.change(|state: &mut PoolState| {
            let slot = &mut state.models[model];
            slot.last_used = Some(Instant::now());
            if let Some(running) = slot.phase.running_mut().filter(|running| running.load == load) {
                running.leases = running.leases.saturating_sub(1);
            }
        });
    }
}

/// A response's body with the lease of its model.
struct LeasedBody {
    body: Body,
    _lease: ModelLease,
}

impl HttpBody for LeasedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
