//! The sizes of a model's experts, by layer, and the classes that they form.

use larder_core::format_bytes;

/// Bytes of one expert of each layer that has experts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertSizes(Vec<u64>);

impl ExpertSizes {
    /// From the bytes of one expert of each layer, in order of the layers.
    pub fn new(layers: impl IntoIterator<Item = u64>) -> Self {
        ExpertSizes(layers.into_iter().collect())
    }

    /// Bytes of one expert of each layer that has experts, in order.
    pub fn by_row(&self) -> &[u64] {
        &self.0
    }

    /// Bytes of the largest expert.
    pub fn largest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or_default()
    }

    /// Bytes of one expert of every layer, together.
    pub fn one_per_layer(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Bytes of an expert on average over the layers.
    pub fn mean(&self) -> u64 {
        self.one_per_layer().checked_div(self.0.len() as u64).unwrap_or_default()
    }

    /// The different sizes in bytes, largest first, each with the number of layers that have it.
    pub fn classes(&self) -> Vec<(u64, usize)> {
        let mut sizes = self.0.clone();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.chunk_by(|a, b| a == b).map(|class| (class[0], class.len())).collect()
    }

    /// The classes as text: `1.2 MB in 2 layers, 1 MB in 6`; `None` if all experts have one size.
    pub fn classes_text(&self) -> Option<String> {
        let classes = self.classes();
        let text = |(i, (bytes, layers)): (usize, &(u64, usize))| match i {
            0 if *layers == 1 => format!("{} in 1 layer", format_bytes(*bytes)),
            0 => format!("{} in {layers} layers", format_bytes(*bytes)),
            _ => format!("{} in {layers}", format_bytes(*bytes)),
        };
        (classes.len() > 1).then(|| classes.iter().enumerate().map(text).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_one_size_form_a_class() {
        let sizes = ExpertSizes::new([2_000_000, 1_000_000, 1_000_000, 2_000_000, 1_000_000]);
        assert_eq!((sizes.largest(), sizes.one_per_layer(), sizes.mean()), (2_000_000, 7_000_000, 1_400_000));
        assert_eq!(sizes.classes(), [(2_000_000, 2), (1_000_000, 3)]);
        assert_eq!(sizes.classes_text().unwrap(), "2.00 MB in 2 layers, 1.00 MB in 3");
        assert_eq!(ExpertSizes::new([5, 5]).classes_text(), None);
        assert_eq!(ExpertSizes::new([]).mean(), 0);
    }
}
