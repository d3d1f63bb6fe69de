//! The causal depthwise convolution of rows.

/// Some tokens of a causal depthwise convolution, from number `first` on: `out [some, channels]` of
/// `x [tokens, channels]`, before which there is the `window` of the last `(width - 1) · dilation` inputs;
/// `taps [width, channels]`.
pub fn convolve_rows(
    [taps, window, x]: [&[f32]; 3],
    bias: Option<&[f32]>,
    [width, dilation]: [usize; 2],
    first: usize,
    out: &mut [f32],
) {
    let channels = taps.len() / width;
    for (t, out) in (first..).zip(out.chunks_exact_mut(channels)) {
        match bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.0),
        }
        for (tap, taps) in taps.chunks_exact(channels).enumerate() {
            let at = (t + tap * dilation) * channels;
            let row = if at < window.len() { &window[at..] } else { &x[at - window.len()..] };
            out.iter_mut().zip(taps).zip(row).for_each(|((out, tap), x)| *out += tap * x);
        }
    }
}

/// Takes the inputs `x` into the window.
pub fn shift_window(x: &[f32], window: &mut [f32]) {
    let kept = window.len().saturating_sub(x.len());
    window.copy_within(window.len() - kept.., 0);
    let (fresh, new) = (&mut window[kept..], x.len());
    fresh.copy_from_slice(&x[new - fresh.len()..]);
}
