//! Pixel values and outputs of towers, against those of transformers.

use larder_kernels::ThreadPool;

use crate::support::{PICTURES, Reference, relative_error};

#[test]
fn pixel_values_are_those_of_transformers() {
    let mut compared = 0;
    for reference in Reference::all() {
        let tower = reference.tower();
        for name in PICTURES {
            let patches = tower.processor().patches(&ThreadPool::single_threaded(), &reference.picture(name)).unwrap();
            let grid = reference.expected.integers(&format!("grid.{name}"));
            assert_eq!(grid, [1, patches.rows, patches.columns], "{} {name}", reference.folder.display());
            let key = format!("pixel_values.{name}");
            if !reference.expected.0.contains_key(&key) {
                continue;
            }
            let (expected, square) = (reference.expected.floats(&key), tower.processor().config().patch.pow(2));
            // Each channel stands there once per time slice.
            let ours = patches.values.chunks_exact(square).flat_map(|channel| [channel, channel]).flatten();
            let different = ours.zip(&expected).filter(|(a, b)| a != b).count();
            assert_eq!((patches.values.len() * 2, different), (expected.len(), 0), "{name}");
            compared += 1;
        }
    }
    println!("{compared} pictures compared value by value");
}

#[test]
fn towers_give_the_rows_of_transformers() {
    let mut worst = 0.0f64;
    let references = Reference::all();
    assert!(!references.is_empty());
    for reference in references {
        let tower = reference.tower();
        for name in PICTURES {
            let image = tower.encode(&reference.picture(name)).unwrap();
            assert_eq!(image.grid.tokens() * image.width, image.rows.len());
            let mut check = |got: &[f32], key: String| {
                let off = relative_error(got, &reference.expected.floats(&key));
                assert!(off < 1e-4, "{}: {key} is off by {off:e}", reference.folder.display());
                worst = worst.max(off);
            };
            check(&image.rows, format!("tower.{name}"));
            image.deepstack.iter().enumerate().for_each(|(k, rows)| check(rows, format!("deepstack.{name}.{k}")));
            let key = format!("deepstack.{name}.{}", image.deepstack.len());
            assert!(!reference.expected.0.contains_key(&key), "a deepstack feature is missing");
        }
    }
    println!("the largest relative error is {worst:e}");
}
