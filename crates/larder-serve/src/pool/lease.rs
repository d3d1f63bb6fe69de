//! What keeps a model loaded: a lease, and bodies of responses that hold one.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

/// Gives leases, and takes them back.
pub trait Lender: Send + Sync {
    /// Ends a lease of a model, for a load of this number.
    fn give_back(self: Arc<Self>, model: usize, load: u64);
}

/// Keeps a model loaded until it is dropped.
pub struct ModelLease {
    lender: Arc<dyn Lender>,
    model: usize,
    /// The number of the load that it is for.
    load: u64,
    /// The routes of the model.
    pub router: Router,
}

impl ModelLease {
    /// A lease that was counted.
    pub fn new(lender: Arc<dyn Lender>, model: usize, load: u64, router: Router) -> Self {
        ModelLease { lender, model, load, router }
    }

    /// A body that holds the lease until its end.
    pub fn over(self, body: Body) -> Body {
        Body::new(LeasedBody { body, _lease: self })
    }
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        self.lender.clone().give_back(self.model, self.load);
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
