//! Workers and who asks them, in one process.

mod answers;
mod failures;
mod rig;
mod safety;
