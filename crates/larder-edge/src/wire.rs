//! The messages, their client and their server, made from `proto/experts.proto`.

tonic::include_proto!("larder.edge.v1");
