//! Valid replies: the results of several workers, and what a worker tells of itself.

use std::time::Duration;

use super::fixture::*;
use crate::workers::wire::Format;
use crate::workers::wire::experts_client::ExpertsClient;
use crate::workers::wire::{ComputeRequest, DescribeRequest};
use crate::workers::{ClientOptions, TlsCredentials};

#[test]
fn several_workers_give_the_bits_of_one_machine() {
    let (even, odd, all) =
        (worker(experts_where(|e| e % 2 == 0)), worker(experts_where(|e| e % 2 == 1)), worker(experts_where(|_| true)));
    for scales_input in [false, true] {
        for stored in [experts_where(|_| false), experts_where(|e| e < 3), experts_where(|_| true)] {
            let mut edge = edge(&[("even", &even), ("odd", &odd), ("all", &all)], stored);
            assert_eq!(outputs(&mut edge, scales_input).unwrap(), expected(scales_input));
            let report = edge.report();
            assert!(report.remote_experts() > 0 && report.fallbacks == 0, "{report:?}");
            assert!(report.workers.iter().all(|w| w.failures == 0), "{report:?}");
        }
    }
}

#[test]
fn idle_connections_stay_open() {
    let all = worker(experts_where(|_| true));
    let mut edge = edge(&[("all", &all)], experts_where(|_| false));
    for pause in [0, 500, 230, 1] {
        std::thread::sleep(Duration::from_millis(pause));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    }
    let worker = &edge.report().workers[0];
    assert_eq!((worker.failures, &worker.trouble), (0, &None));
}

#[test]
fn each_worker_is_asked_once_for_each_layer() {
    let (low, high) = (worker(experts_where(|e| e < 4)), worker(experts_where(|e| e >= 4)));
    let mut edge = edge(&[("low", &low), ("high", &high)], experts_where(|_| false));
    outputs(&mut edge, false).unwrap();
    // Ten calls, two of them in two chunks.
    let report = edge.report();
    assert!(report.workers.iter().all(|w| w.answers <= 12), "{report:?}");
    assert!(report.workers.iter().map(|w| w.answers).sum::<u64>() >= 12);
}

#[test]
fn bf16_results_are_close() {
    let all = worker(experts_where(|_| true));
    let client_options = ClientOptions { format: Format::Bf16, ..client_options() };
    let mut edge =
        edge_with(&addresses(&[("all", &all)], TlsCredentials::default()), client_options, experts_where(|_| false));
    let (got, want) = (outputs(&mut edge, false).unwrap(), expected(false));
    assert_ne!(got, want);
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        let (got, want) = (f32::from_bits(*got), f32::from_bits(*want));
        assert!((got - want).abs() < 0.05 * want.abs().max(1.0), "{got} instead of {want}");
    }
}

#[test]
fn a_worker_describes_itself_and_refuses_experts_that_it_does_not_hold() {
    let even = worker(experts_where(|e| e % 2 == 0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = ExpertsClient::connect(even.address.clone()).await.unwrap();
        let description = client.describe(DescribeRequest {}).await.unwrap().into_inner();
        assert_eq!(
            (description.version, description.held.len(), &description.held[1].experts[..]),
            (1, 2, &[0, 2, 4, 6][..])
        );
        let request = ComputeRequest {
            version: 1,
            id: 1,
            model: handshake().model,
            layer: 2,
            format: Format::F32.into(),
            activation: 1,
            states: vec![0; 4 * HIDDEN],
            term_state: vec![0],
            term_experts: vec![1],
            experts: vec![3],
            weights: vec![1.0],
            ..Default::default()
        };
        let refused = client.compute(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert_eq!(refused.message(), "layer 2, expert 3: the worker worker does not hold this expert");
        let other = ComputeRequest { model: "beef".into(), ..request.clone() };
        assert_eq!(client.compute(other).await.unwrap_err().code(), tonic::Code::FailedPrecondition);
        let newer = ComputeRequest { version: 9, ..request };
        assert_eq!(client.compute(newer).await.unwrap_err().code(), tonic::Code::InvalidArgument);
    });
}

#[test]
fn health_and_reflection_are_served() {
    let all = worker(experts_where(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(all.address.clone()).unwrap().connect().await.unwrap();
        let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
        let service = "larder.edge.v1.Experts".to_owned();
        let check = health.check(tonic_health::pb::HealthCheckRequest { service }).await.unwrap();
        assert_eq!(check.into_inner().status, 1);
        use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_response::MessageResponse};
        let ask = MessageRequest::FileContainingSymbol("larder.edge.v1.Experts".into());
        let ask = ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
        let stream = tokio_stream::iter([ask]);
        let mut replies =
            ServerReflectionClient::new(channel).server_reflection_info(stream).await.unwrap().into_inner();
        let reply = tokio::time::timeout(Duration::from_secs(5), replies.message()).await.unwrap().unwrap().unwrap();
        assert!(matches!(reply.message_response, Some(MessageResponse::FileDescriptorResponse(_))), "{reply:?}");
    });
}
