//! What one rendering of a template may take: bytes of the values that it makes, and time.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

/// What an element of a list is counted as, in bytes.
pub(super) const ELEMENT_BYTES: usize = 32;
/// Maximum nesting of values: deeper ones are an error instead of a stack overflow.
pub(super) const MAX_DEPTH: usize = 128;
/// Maximum weight of the values that one operation reads. Lists that hold one another can be far larger when they are
/// read than they are in memory.
const MAX_WEIGHT: usize = 1 << 30;

/// Counts down while a template is rendered. Every operation that can make a value or read much takes from it first, so
/// an operation that is refused has neither allocated nor computed anything.
///
/// Bytes are never given back when a value is dropped, so what is alive is at most what was taken.
#[derive(Debug)]
pub(super) struct Budget {
    left: AtomicUsize,
    until: Instant,
    out_of_memory: AtomicBool,
    out_of_time: AtomicBool,
}

impl Budget {
    /// A budget of `bytes` and of `time` from now on.
    pub(super) fn new(bytes: usize, time: Duration) -> Self {
        Budget {
            left: AtomicUsize::new(bytes),
            until: Instant::now() + time,
            out_of_memory: AtomicBool::new(false),
            out_of_time: AtomicBool::new(false),
        }
    }

    /// Whether something was refused because the bytes were spent.
    pub(super) fn is_out_of_memory(&self) -> bool {
        self.out_of_memory.load(Ordering::Relaxed)
    }

    /// Whether something was refused because the time was over.
    pub(super) fn is_out_of_time(&self) -> bool {
        self.out_of_time.load(Ordering::Relaxed)
    }

    /// Takes `bytes` for a value that is about to be made.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Error> {
        self.has(bytes)?;
        self.left.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Checks that there are `bytes` for a value whose exact size is taken when it is known, and that there is time.
    pub(super) fn has(&self, bytes: usize) -> Result<(), Error> {
        self.has_time()?;
        if bytes <= self.left.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.out_of_memory.store(true, Ordering::Relaxed);
        Err(Error::new(ErrorKind::InvalidOperation, "a value is too large"))
    }

    /// Takes what a list of `len` elements is counted as.
    pub(super) fn take_list(&self, len: usize) -> Result<(), Error> {
        self.take(len.saturating_mul(ELEMENT_BYTES))
    }

    /// Checks an operation of `steps` in which no time is looked at.
    pub(super) fn has_steps(&self, steps: usize) -> Result<(), Error> {
        if steps > MAX_WEIGHT { self.end_of_time() } else { self.has_time() }
    }

    fn has_time(&self) -> Result<(), Error> {
        if Instant::now() < self.until { Ok(()) } else { self.end_of_time() }
    }

    fn end_of_time(&self) -> Result<(), Error> {
        self.out_of_time.store(true, Ordering::Relaxed);
        Err(Error::new(ErrorKind::InvalidOperation, "the template takes too long"))
    }

    /// The bytes that are read if all of `value` is read, its elements as often as they occur. What passes is neither
    /// nested too deep nor too large for an operation that reads all of it.
    pub(super) fn weigh(&self, value: &Value) -> Result<usize, Error> {
        let mut weight = 0;
        self.add_weight(value, 0, &mut weight)?;
        self.has_time()?;
        Ok(weight)
    }

    /// The weight of all of `values` together.
    pub(super) fn weigh_all(&self, values: &[Value]) -> Result<usize, Error> {
        values.iter().try_fold(0usize, |sum, value| Ok(sum.saturating_add(self.weigh(value)?)))
    }

    fn add_weight(&self, value: &Value, depth: usize, weight: &mut usize) -> Result<(), Error> {
        check_depth(depth)?;
        let before = *weight;
        *weight = weight.saturating_add(ELEMENT_BYTES + value.as_str().map_or(0, str::len));
        // The time is looked at about every 4096 elements.
        if *weight >> 17 != before >> 17 {
            self.has_steps(*weight)?;
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.checked().try_for_each(|item| self.add_weight(&item?, depth + 1, weight))
            }
            ValueKind::Map => {
                value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten().try_for_each(
                    |(key, item)| {
                        self.add_weight(&key, depth + 1, weight)?;
                        self.add_weight(&item, depth + 1, weight)
                    },
                )
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a value at `depth`, its nesting, that is deeper than the stack is certain to hold.
pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    if depth <= MAX_DEPTH {
        return Ok(());
    }
    Err(Error::new(ErrorKind::BadSerialization, format!("a value is nested more than {MAX_DEPTH} levels deep")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Budget {
        Budget::new(1000, Duration::from_secs(60))
    }

    #[test]
    fn bytes_are_taken_until_there_are_none() {
        let budget = budget();
        assert!(budget.take(600).is_ok() && budget.has(400).is_ok());
        assert!(budget.take(500).is_err() && budget.is_out_of_memory());
        assert!(budget.take(400).is_ok() && budget.take(1).is_err() && !budget.is_out_of_time());
    }

    #[test]
    fn nothing_is_taken_after_the_time() {
        let budget = Budget::new(1000, Duration::ZERO);
        assert!(budget.take(1).is_err() && budget.weigh(&Value::from(1)).is_err());
        assert!(budget.is_out_of_time() && !budget.is_out_of_memory());
    }

    #[test]
    fn shared_elements_weigh_as_often_as_they_occur() {
        let twice = |value: Value| Value::from(vec![value.clone(), value]);
        let three = Value::from("abc");
        assert_eq!(budget().weigh(&three).unwrap(), ELEMENT_BYTES + 3);
        assert_eq!(budget().weigh(&twice(three)).unwrap(), 3 * ELEMENT_BYTES + 6);
        let huge = (0..100).fold(Value::from(1), |value, _| twice(value));
        let budget = budget();
        assert!(budget.weigh(&huge).is_err() && budget.is_out_of_time());
    }

    #[test]
    fn deep_values_are_refused() {
        let deep = (0..200).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(budget().weigh(&deep).unwrap_err().to_string().contains("nested"));
    }
}
