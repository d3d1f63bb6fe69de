//! The size to which a picture is resized.

/// The most that the longer side may be, in shorter sides.
pub const MOST_ASPECT: f64 = 200.0;

/// Both sides as whole multiples of `factor`, with a number of pixels between the limits and nearly the same aspect;
/// `None` if one side is more than [`MOST_ASPECT`] times the other. Ties are rounded to even, in f64.
pub fn smart_resize(
    (width, height): (usize, usize),
    factor: usize,
    (least, most): (usize, usize),
) -> Option<(usize, usize)> {
    let (w, h, f) = (width as f64, height as f64, factor as f64);
    if w.max(h) / w.min(h) > MOST_ASPECT {
        return None;
    }
    let rounded = |side: f64| (side / f).round_ties_even() * f;
    let (near_w, near_h) = (rounded(w), rounded(h));
    let sides = if near_w * near_h > most as f64 {
        let shrink = (h * w / most as f64).sqrt();
        let shrunk = |side: f64| f.max((side / shrink / f).floor() * f);
        (shrunk(w), shrunk(h))
    } else if near_w * near_h < least as f64 {
        let grow = (least as f64 / (h * w)).sqrt();
        let grown = |side: f64| (side * grow / f).ceil() * f;
        (grown(w), grown(h))
    } else {
        (near_w, near_h)
    };
    Some((sides.0 as usize, sides.1 as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_even_multiple() {
        // 48 / 32 = 1.5 and 80 / 32 = 2.5 both become two.
        assert_eq!(smart_resize((48, 80), 32, (1, 1 << 20)), Some((64, 64)));
        assert_eq!(smart_resize((49, 81), 32, (1, 1 << 20)), Some((64, 96)));
    }

    #[test]
    fn limits_are_kept_and_sides_never_vanish() {
        for width in 1..60 {
            for height in (1..4000).step_by(37) {
                let Some((w, h)) = smart_resize((width, height), 32, (4096, 65536)) else {
                    assert!(height > 200 * width, "{width} x {height}");
                    continue;
                };
                assert!(w > 0 && h > 0 && w % 32 == 0 && h % 32 == 0);
                assert!(w * h >= 4096 && (w * h <= 65536 || w == 32 || h == 32), "{width} x {height}: {w} x {h}");
            }
        }
        assert_eq!(smart_resize((1, 201), 32, (4096, 65536)), None);
        assert!(smart_resize((1, 200), 32, (4096, 65536)).is_some());
    }
}
