//! Measurements that need more than one crate.
