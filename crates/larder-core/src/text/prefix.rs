//! What lists have in common.

/// How many items two lists begin with alike.
///
/// ```
/// assert_eq!(larder_core::common_prefix(&[1, 2, 3], &[1, 2, 4, 3]), 2);
/// ```
pub fn common_prefix<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
