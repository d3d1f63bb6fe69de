//! Sizes, times and words of strangers as text.

pub(crate) mod prefix;
pub(crate) mod printable;
pub(crate) mod timestamp;
pub(crate) mod units;
