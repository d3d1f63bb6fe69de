//! How a tensor of any kind is written down in a file that knows only plain dtypes.

use larder_core::{Kind, TensorMeta};

/// Kind and logical shape as one line of metadata, for example `q8_0 1408x2048`.
pub(crate) fn describe(kind: Kind, shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("{kind} {}", dims.join("x"))
}

/// The tensor that [`describe`] wrote, or `None` if the text is none of its.
pub(crate) fn parse(text: &str) -> Option<TensorMeta> {
    let (kind, dims) = text.split_once(' ')?;
    let dims = dims.split('x').filter(|d| !d.is_empty());
    TensorMeta::new(kind.parse().ok()?, dims.map(|d| d.parse().ok()).collect::<Option<_>>()?)
}

/// The shape under which the file holds the tensor: in bytes along the last dimension if it comes in blocks.
pub(crate) fn stored_shape(meta: &TensorMeta) -> Vec<usize> {
    let mut shape = meta.shape.clone();
    if let Some(cols) = shape.last_mut().filter(|_| !meta.kind.is_float()) {
        *cols = meta.kind.row_bytes(*cols).expect("the last dimension is whole blocks");
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_read_back() {
        for (kind, shape) in [(Kind::Q8_0, vec![3, 64]), (Kind::F32, vec![]), (Kind::Bf16, vec![2, 1, 5])] {
            let meta = parse(&describe(kind, &shape)).unwrap();
            assert_eq!((meta.kind, &meta.shape), (kind, &shape));
        }
        assert_eq!(stored_shape(&parse("q8_0 3x64").unwrap()), [3, 68]);
        for text in ["", "q8_0", "q9 32", "q8_0 33", "q8_0 -1", "f32 99999999999999x99999999999999"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
