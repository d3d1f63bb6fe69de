//! The embedding of a text: the mean of the hidden states of its tokens.

/// The sum of the hidden states of the tokens that were computed so far, behind the final norm.
#[derive(Clone, Default)]
pub struct HiddenSum(Vec<f64>);

impl HiddenSum {
    /// Adds the states of tokens, `[tokens, hidden]`, one after the other: so steps of any sizes give the same bits.
    pub fn add(&mut self, states: &[f32], hidden: usize) {
        self.0.resize(hidden, 0.0);
        for state in states.chunks_exact(hidden) {
            self.0.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
        }
    }

    /// The embedding: the direction of the mean, as a vector of length 1.
    pub fn embedding(&self) -> Vec<f32> {
        let length = self.0.iter().map(|x| x * x).sum::<f64>().sqrt();
        // A length of zero leaves zeros.
        let factor = if length > 0.0 { 1.0 / length } else { 0.0 };
        self.0.iter().map(|x| (x * factor) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_is_a_direction() {
        let mut sum = HiddenSum::default();
        sum.add(&[1.0, 0.0, 2.0, 4.0], 2);
        assert_eq!(sum.embedding(), [0.6, 0.8]);
        sum.add(&[-3.0, -4.0], 2);
        assert_eq!(sum.embedding(), [0.0, 0.0]);
    }
}
