//! How tensors in any number format are described in safetensors files, which know only plain dtypes.

use larder_core::{NumberFormat, RowOrder, TensorMeta};

/// Number format and logical shape as one line of metadata, for example `q8_0 1408x2048`.
pub(crate) fn describe(kind: NumberFormat, shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("{kind} {}", dims.join("x"))
}

/// The line of [`describe`] with the row order, unless it is plain: `q8_0 1408x2048 rows8`.
pub(crate) fn describe_with_order(meta: &TensorMeta) -> String {
    let plain = describe(meta.kind, &meta.shape);
    if meta.order == RowOrder::Plain { plain } else { format!("{plain} {}", meta.order) }
}

/// Parses a line of [`describe_with_order`]; `None` if it is not one.
pub(crate) fn parse(text: &str) -> Option<TensorMeta> {
    let (kind, rest) = text.split_once(' ')?;
    if let Some((dims, order)) = rest.split_once(' ') {
        let meta = parse(&format!("{kind} {dims}"))?;
        let order = order.parse().ok().filter(|o| *o == RowOrder::best(meta.kind) && meta.shape.len() == 2)?;
        return Some(TensorMeta { order, ..meta });
    }
    let dims = rest;
    let dims = dims.split('x').filter(|d| !d.is_empty());
    TensorMeta::new(kind.parse().ok()?, dims.map(|d| d.parse().ok()).collect::<Option<_>>()?)
}

/// Shape of the tensor in the file: for block formats, the last dimension is in bytes.
pub(crate) fn stored_shape(meta: &TensorMeta) -> Vec<usize> {
    let mut shape = meta.shape.clone();
    if let Some(cols) = shape.last_mut().filter(|_| !meta.kind.is_float()) {
        *cols = meta.kind.row_bytes(*cols).expect("the last dimension must be whole blocks");
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_round_trip() {
        for (kind, shape) in
            [(NumberFormat::Q8_0, vec![3, 64]), (NumberFormat::F32, vec![]), (NumberFormat::Bf16, vec![2, 1, 5])]
        {
            let meta = parse(&describe(kind, &shape)).unwrap();
            assert_eq!((meta.kind, &meta.shape), (kind, &shape));
        }
        let interleaved = TensorMeta { order: RowOrder::Rows8, ..parse("q8_0 16x64").unwrap() };
        assert_eq!(describe_with_order(&interleaved), "q8_0 16x64 rows8");
        assert_eq!(parse("q8_0 16x64 rows8"), Some(interleaved));
        assert_eq!(stored_shape(&parse("q8_0 3x64").unwrap()), [3, 68]);
        for text in ["", "q8_0", "q9 32", "q8_0 33", "q8_0 -1", "f32 99999999999999x99999999999999", "f32 8x8 rows8"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
