//! Sums and differences of structs of counters, field by field.

/// Implements `Add`, `AddAssign` and `Sub` for a struct field by field; `Sub` gives what lies between two readings.
///
/// A field that is left out of the list does not compile, so no counter is forgotten.
///
/// ```
/// #[derive(Clone, Copy, PartialEq, Debug)]
/// struct Counts {
///     hits: u64,
///     misses: u64,
/// }
/// larder_core::fieldwise!(Counts { hits, misses });
///
/// let (before, now) = (Counts { hits: 2, misses: 1 }, Counts { hits: 5, misses: 3 });
/// assert_eq!(now - before, Counts { hits: 3, misses: 2 });
/// assert_eq!(now + before, Counts { hits: 7, misses: 4 });
/// ```
#[macro_export]
macro_rules! fieldwise {
    ($name:ident { $($field:ident),+ $(,)? }) => {
        impl ::std::ops::Add for $name {
            type Output = $name;

            fn add(self, other: $name) -> $name {
                $name { $($field: self.$field + other.$field),+ }
            }
        }

        impl ::std::ops::AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                *self = *self + other;
            }
        }

        impl ::std::ops::Sub for $name {
            type Output = $name;

            fn sub(self, then: $name) -> $name {
                $name { $($field: self.$field - then.$field),+ }
            }
        }
    };
}
