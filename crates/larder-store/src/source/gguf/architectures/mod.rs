//! The supported architectures: the names of their tensors and how their configs are built.

mod bailing_moe;
mod config;
mod deepseek4;
mod gated_delta;
mod granite;
mod kimi_delta;
mod latent_attention;
mod minimax_m3;
mod qwen4_exp;
mod sliding;
mod state_space;
mod tensor_names;
mod typed_layers;

pub(super) use config::hub_config;
pub(super) use tensor_names::{ARCHITECTURES, Architecture, MTP};
