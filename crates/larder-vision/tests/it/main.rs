//! Tests of pictures and towers against files and references, in one binary.

mod files;
mod hostile;
mod mmproj;
mod pixels;
mod reference;
mod same_bits;
mod support;
