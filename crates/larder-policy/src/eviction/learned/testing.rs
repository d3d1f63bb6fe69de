//! Weights for tests: valid in form, with random values.

use super::{
    Arrays, CROSSLAYER, Evictor, FEATURES, FLASHMOE, FLASHMOE_HIDDEN, FORMAT, Features, HEAD_HIDDEN, HORIZONS, MoeSize,
    SCALES, UsageFeatures, VERSION,
};
use larder_core::Rng;

/// A tensor's name and shape.
type Shape = (&'static str, Vec<usize>);

const HIDDEN: usize = 12;

/// Arrays of either form with random numbers.
pub fn arrays(form: &str, size: MoeSize, seed: u64) -> Arrays {
    let mut rng = Rng::with_stream(seed, 0);
    let mut arrays = Arrays::default();
    let features = if form == CROSSLAYER { Features::hash() } else { UsageFeatures::hash() };
    for (key, value) in [
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_owned()),
        ("form", form.to_owned()),
        ("layers", size.rows.to_string()),
        ("experts", size.experts.to_string()),
        ("top_k", size.top_k.to_string()),
        ("features", features),
        ("hidden", HIDDEN.to_string()),
    ] {
        arrays.meta.insert(key.to_owned(), value);
    }
    let mut draw = |shape: &[usize]| -> Vec<f32> {
        (0..shape.iter().product()).map(|_| rng.below(2001) as f32 / 1000.0 - 1.0).collect()
    };
    let MoeSize { rows, experts, .. } = size;
    let horizons = HORIZONS.len();
    let (floats, scaled): (Vec<Shape>, Vec<Shape>) = match form {
        FLASHMOE => (
            vec![
                ("first", vec![rows, FLASHMOE_HIDDEN, 2 * experts]),
                ("first_bias", vec![rows, FLASHMOE_HIDDEN]),
                ("second", vec![rows, FLASHMOE_HIDDEN, FLASHMOE_HIDDEN]),
                ("second_bias", vec![rows, FLASHMOE_HIDDEN]),
                ("third", vec![rows, experts, FLASHMOE_HIDDEN]),
                ("third_bias", vec![rows, experts]),
            ],
            vec![],
        ),
        _ => (
            vec![
                ("popularity", vec![rows, experts]),
                ("gather_bias", vec![rows, HIDDEN]),
                ("emit_bias", vec![rows, horizons, experts]),
                ("own", vec![rows, horizons, FEATURES, experts]),
                ("head", vec![HEAD_HIDDEN, FEATURES + horizons]),
                ("head_bias", vec![HEAD_HIDDEN]),
                ("head_out", vec![horizons, HEAD_HIDDEN]),
            ],
            vec![("gather", vec![rows, SCALES, experts, HIDDEN]), ("emit", vec![rows, horizons, experts, HIDDEN])],
        ),
    };
    for (name, shape) in floats {
        let numbers = draw(&shape);
        arrays.put(name, &shape, numbers);
    }
    for (name, shape) in scaled {
        let numbers = draw(&shape);
        arrays.put_quantised(name, &shape, &numbers);
    }
    arrays
}

/// Weights of the form `crosslayer` with random numbers.
pub fn evictor(size: MoeSize) -> Evictor {
    Evictor::from_arrays(&arrays(CROSSLAYER, size, 1)).expect("valid weights")
}
