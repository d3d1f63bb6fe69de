//! Notices while a model is opened and runs, and errors as sentences that name options.

mod notice;
mod sentence;
mod setting;

pub use notice::{Notice, Notices, PreloadRates, WorkProgress};
pub use sentence::{error_message, sentence};
pub use setting::Setting;
