//! One value for each matrix of an expert.

/// One value for each matrix of an expert. Experts of two matrices have no gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerMatrix<T> {
    /// Of `gate [inter, hidden]`, if there is one.
    #[serde(default = "Option::default", skip_serializing_if = "Option::is_none")]
    pub gate: Option<T>,
    /// Of `up [inter, hidden]`.
    pub up: T,
    /// Of `down [hidden, inter]`.
    pub down: T,
}

impl<T> PerMatrix<T> {
    /// The values with the names of their matrices, in the order of an expert's data.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &T)> {
        self.gate.iter().map(|gate| ("gate", gate)).chain([("up", &self.up), ("down", &self.down)])
    }

    /// The values, in the order of an expert's data.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.named().map(|(_, value)| value)
    }

    /// References to the values.
    pub fn as_ref(&self) -> PerMatrix<&T> {
        PerMatrix { gate: self.gate.as_ref(), up: &self.up, down: &self.down }
    }

    /// The value that `f` makes of each.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> PerMatrix<U> {
        PerMatrix { gate: self.gate.map(&mut f), up: f(self.up), down: f(self.down) }
    }
}

/// Gate, up and down.
impl<T> From<[T; 3]> for PerMatrix<T> {
    fn from([gate, up, down]: [T; 3]) -> Self {
        PerMatrix { gate: Some(gate), up, down }
    }
}

/// Up and down.
impl<T> From<[T; 2]> for PerMatrix<T> {
    fn from([up, down]: [T; 2]) -> Self {
        PerMatrix { gate: None, up, down }
    }
}
