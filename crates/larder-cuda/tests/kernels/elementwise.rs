//! Element-wise kernels, and the kernels that read and copy memory.

use larder_cuda::{Argument, Driver, Launch, Stream};
use larder_kernels::InputBuffer;
use larder_model::Activation;

use crate::random_data::RandomData;
use crate::{Aligned, BLOCK_BYTES, assert_same, emulator, input, launch, output, quantise, word};

/// The arguments of adding a bias, as kernels read them.
#[repr(C)]
struct BiasKernelArgs {
    bias: *const f32,
    out: *mut f32,
    tokens: u32,
    cols: u32,
}

#[test]
fn activations_are_the_same_to_the_bit() {
    let Some(emulator) = &emulator(0) else { return };
    const COUNT: usize = 400_000;
    let noise = &mut RandomData(5);
    let gates = noise.all_sizes(COUNT);
    let mut ups: Vec<f32> = (0..COUNT).map(|_| noise.value() * noise.one_of(&[1.0, 20.0])).collect();
    ups[7..10].copy_from_slice(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    let limited = Activation::LimitedSilu { limit: 2.5 };
    let bounded = Activation::ClampedSilu { limit: 2.5 };
    for (kernel, act, more) in [
        ("silu", Activation::Silu, &[][..]),
        ("relu", Activation::Relu, &[]),
        ("relu2", Activation::Relu2, &[]),
        ("gelu", Activation::Gelu, &[]),
        ("gelu_tanh", Activation::GeluTanh, &[]),
        ("clamped_swiglu", clamped, &[1.702, 7.0]),
        ("limited_silu", limited, &[2.5]),
        ("clamped_silu", bounded, &[2.5]),
    ] {
        let (mut got, mut want) = (gates.clone(), gates.clone());
        act.combine(&mut want, &ups);
        let mut blocks = Aligned::new(COUNT / 32 * BLOCK_BYTES);
        let mut arguments = vec![output(&mut got), input(&ups), word(COUNT), output(blocks.bytes_mut())];
        arguments.extend(more.iter().map(|value| Argument::Float(*value)));
        // SAFETY: both arrays have `COUNT` values, and there is room for their blocks.
        unsafe { launch(emulator, kernel, [COUNT.div_ceil(256), 1], 256, &arguments) };
        assert_same(&got, &want, kernel);
        assert!(blocks.bytes() == quantise(emulator, &got).bytes(), "{kernel}");
        let nan = gates.iter().position(|g| g.is_nan()).unwrap();
        assert!(got[nan].is_nan() && want.iter().filter(|v| v.is_finite() && **v != 0.0).count() > COUNT / 3);
    }
}

#[test]
fn activations_of_experts_without_a_gate_are_the_same_to_the_bit() {
    let Some(emulator) = &emulator(0) else { return };
    const COUNT: usize = 400_001;
    let values = RandomData(7).all_sizes(COUNT);
    for (kernel, act) in [
        ("silu_alone", Activation::Silu),
        ("relu_alone", Activation::Relu),
        ("relu2_alone", Activation::Relu2),
        ("gelu_alone", Activation::Gelu),
        ("gelu_tanh_alone", Activation::GeluTanh),
    ] {
        let (mut got, mut want) = (values.clone(), values.clone());
        act.apply(&mut want);
        // SAFETY: the array has `COUNT` values.
        unsafe { launch(emulator, kernel, [COUNT.div_ceil(256), 1], 256, &[output(&mut got), word(COUNT)]) };
        assert_same(&got, &want, kernel);
    }
}

#[test]
fn activations_are_quantised_to_the_same_bits() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(6);
    let mut x: Vec<f32> = (0..300).flat_map(|_| noise.activations(32)).collect();
    // Ties between two integers.
    x.extend((0..32).map(|i| if i == 31 { 127.0 } else { i as f32 - 15.5 }));
    x.extend(noise.all_sizes(32 * 50));
    let mut buffer = InputBuffer::new();
    let inputs = buffer.fill(&x, 32, true);
    let got = quantise(emulator, &x);
    let mut odd = 0;
    let both = got.bytes().chunks_exact(BLOCK_BYTES).zip(inputs.all_blocks().chunks_exact(BLOCK_BYTES));
    for (i, (got, want)) in both.enumerate() {
        // Integers, the scale, and their sums.
        let scale = |block: &[u8]| f32::from_ne_bytes(*block[32..].first_chunk().unwrap());
        odd += scale(want).is_nan() as usize;
        assert_same(&[scale(got)], &[scale(want)], format!("block {i}"));
        assert_eq!((&got[..32], &got[36..]), (&want[..32], &want[36..]), "block {i}");
    }
    assert!(odd > 10, "only {odd} blocks with a value that is not finite");
}

#[test]
fn biases_are_added_to_every_token() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(8);
    let shapes = [(3, 40), (1, 1), (0, 9), (7, 300)];
    let biases: Vec<Vec<f32>> = shapes.iter().map(|(_, cols)| noise.activations(*cols)).collect();
    let mut outputs: Vec<Vec<f32>> = shapes.iter().map(|(tokens, cols)| noise.activations(tokens * cols + 1)).collect();
    let mut want = outputs.clone();
    for ((bias, out), (tokens, cols)) in biases.iter().zip(&mut want).zip(shapes) {
        for row in out[..tokens * cols].chunks_mut(cols) {
            row.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
        }
    }
    let list: Vec<BiasKernelArgs> = biases
        .iter()
        .zip(&mut outputs)
        .zip(shapes)
        .map(|((bias, out), (tokens, cols))| BiasKernelArgs {
            bias: bias.as_ptr(),
            out: out.as_mut_ptr(),
            tokens: tokens as u32,
            cols: cols as u32,
        })
        .collect();
    // SAFETY: every pointer is to an array of the given shape, and no product has more than 2100 values.
    unsafe { launch(emulator, "add_biases", [2100usize.div_ceil(256), 4], 256, &[input(&list)]) };
    outputs.iter().zip(&want).for_each(|(got, want)| assert_same(got, want, "biases"));
}

#[test]
fn all_bytes_are_read() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(10);
    for bytes in [0, 5, 16, 4096, 100_003] {
        let mut data = Aligned::new(bytes);
        data.bytes_mut().iter_mut().for_each(|b| *b = noise.bits() as u8);
        let (pieces, tail) = data.bytes().as_chunks::<16>();
        let words = pieces.as_flattened().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let want = words.chain(tail.iter().map(|b| *b as u32)).fold(0, |all, word| all ^ word);
        let mut out = vec![0u32; 3];
        let arguments = [input(data.bytes()), Argument::Bytes(bytes as u64), output(&mut out)];
        // SAFETY: there are `bytes` bytes, and a word for each block.
        unsafe { launch(emulator, "read_all", [3, 1], 256, &arguments) };
        assert_eq!(out.iter().fold(0, |all, word| all ^ word), want, "{bytes} bytes");
    }
}

#[test]
fn bytes_are_copied_across_the_link() {
    const MAX_BYTES: usize = 1 << 20;
    let Some(emulator) = emulator(MAX_BYTES as u64) else { return };
    let noise = &mut RandomData(11);
    let (here, there) =
        (emulator.allocate_host(MAX_BYTES).unwrap().as_ptr(), emulator.allocate(MAX_BYTES as u64).unwrap());
    // SAFETY: `MAX_BYTES` bytes were allocated, and kernels are complete when the bytes are read.
    let here = unsafe { std::slice::from_raw_parts_mut(here, MAX_BYTES) };
    for (bytes, blocks) in [(1, 1), (15, 1), (16, 1), (4100, 2), (100_003, 3), (MAX_BYTES, 64)] {
        let data: Vec<u8> = (0..bytes).map(|_| noise.bits() as u8).collect();
        here.fill(7);
        here[..bytes].copy_from_slice(&data);
        let at = here.as_mut_ptr() as u64;
        for (from, to) in [(at, there), (there, at)] {
            let arguments = [Argument::Address(from), Argument::Address(to), Argument::Bytes(bytes as u64)];
            // SAFETY: both places have `bytes` bytes.
            unsafe { launch(&emulator, "copy_bytes", [blocks, 1], 256, &arguments) };
            if from == at {
                here.fill(8);
            }
        }
        assert!(here[..bytes] == data && here[bytes..].iter().all(|b| *b == 8), "{bytes} bytes");
    }
    let arguments = [Argument::Address(there), input(&[0u8; 64]), Argument::Bytes(64)];
    let launch = Launch { kernel: "copy_bytes", grid: [1, 1], block: 256, arguments: &arguments };
    // SAFETY: the launch is refused.
    let error = unsafe { emulator.launch(Stream::Compute, &launch) }.unwrap_err().to_string();
    assert!(error.contains("not page-locked"), "{error}");
}
