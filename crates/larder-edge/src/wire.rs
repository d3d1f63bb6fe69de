//! The gRPC messages, client and server, generated from `proto/experts.proto`.

tonic::include_proto!("larder.edge.v1");
