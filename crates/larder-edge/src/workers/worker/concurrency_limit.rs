//! A limit of concurrent requests. Further requests are refused at once, before their body is read. A stream counts
//! until its answer begins.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::connections::ConnectionUse;

/// A service with a limited number of concurrent requests.
#[derive(Clone)]
pub struct ConcurrencyLimited<S> {
    inner: S,
    permits: Arc<Semaphore>,
}

impl<S> ConcurrencyLimited<S> {
    /// Limits `inner` to `most` requests, those being received included.
    pub fn new(inner: S, most: usize) -> Self {
        ConcurrencyLimited { inner, permits: Arc::new(Semaphore::new(most)) }
    }
}

impl<S: NamedService> NamedService for ConcurrencyLimited<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for ConcurrencyLimited<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.permits.clone().try_acquire_owned() {
            Ok(permit) => {
                let running = ConnectionUse::of(&request).map(ConnectionUse::begin);
                let response = self.inner.call(request);
                Box::pin(async move {
                    let response = response.await;
                    drop((permit, running));
                    response
                })
            }
            Err(_) => Box::pin(async {
                Ok(Status::resource_exhausted("the worker is at its limit of concurrent requests").into_http())
            }),
        }
    }
}
