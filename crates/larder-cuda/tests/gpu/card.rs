//! The same tests on a real GPU, if there is one.

use larder_core::{ExpertLayout, NumberFormat};
use larder_cuda::{Gpu, GpuError};
use larder_model::Activation;

use crate::{
    attention, cca, expert_choice, experts, flash, hits, hyper_connections, latents, link, ops, order, products,
    recurrent, sampling, sparse,
};

fn card() -> Option<Gpu> {
    match larder_cuda::open(0) {
        Ok(gpu) => Some(gpu),
        Err(GpuError::Missing(what)) => {
            println!("skipped: {what}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn a_gpu_gives_the_same_bits() {
    let Some(gpu) = card() else { return };
    products::compare(&gpu);
    attention::compare(&gpu);
    attention::compare_few_queries(&gpu);
    if gpu.flash_attention().is_ok() {
        flash::compare(&gpu);
    }
    ops::compare(&gpu);
    ops::compare_sums(&gpu);
    expert_choice::compare(&gpu);
    expert_choice::compare_with_none(&gpu);
    cca::compare(&gpu);
    hits::compare(&gpu);
    latents::compare(&gpu);
    recurrent::compare(&gpu);
    recurrent::compare_scans(&gpu);
    sampling::compare(&gpu);
    sparse::compare(&gpu);
    hyper_connections::compare(&gpu);
    sampling::compare_taken(&gpu);
    sampling::compare_draws(&gpu);
    sampling::compare_changes(&gpu);
    sampling::compare_rows(&gpu);
    let mut first = Some(gpu);
    experts::compare(|_| first.take().or_else(card));
}

#[test]
fn a_gpu_orders_copies_and_kernels() {
    let Some(gpu) = card() else { return };
    for seed in 0..200 {
        assert_eq!(link::play(&gpu, seed, false), 0);
        assert!(order::results_are_right(&gpu, seed), "seed {seed}");
        assert!(seed > 50 || expert_choice::results_are_right(&gpu, seed), "seed {seed}");
        assert!(seed > 50 || hits::results_are_right(&gpu, seed), "seed {seed}");
    }
    println!("{}", gpu.copy_mode());
}

#[test]
fn a_gpu_can_be_measured() {
    let Some(gpu) = card() else { return };
    let layout = ExpertLayout::new(2048, 1024, [NumberFormat::Q4_0; 3], false).unwrap();
    let start = std::time::Instant::now();
    let rates = gpu.measure(&layout, Activation::Silu, 8).unwrap();
    println!("{}: {rates:?} in {:?}", gpu.info().unwrap(), start.elapsed());
    assert!([rates.copy_in, rates.copy_out, rates.read, rates.compute].into_iter().all(|rate| rate > 0.0));
}
