//! The number of the definition of products.

/// Number of the definition that gives products and attention their bits, which files and messages carry whose content
/// depends on them. It was 1 until multiplications and additions were fused.
pub const DEFINITION: u32 = 2;
