//! Measuring an importance matrix.

use std::sync::Arc;

use anyhow::{Context, Result};
use larder_core::{Geometry, LayerIdx};
use larder_model::{ColumnSquares, ComputeContext, ExpertInput, InputSquares, LogitsFor};
use larder_store::Importance;

use super::{TextPass, chunks_per_step};
use crate::open::OpenModel;

/// Measures the inputs of the weight matrices of `model` over the `chunks` of a text, which is given by its name and
/// the tokens of a chunk, on `threads` compute threads. `on_step` gets the number of tokens of each step.
pub fn measure_importance(
    model: &OpenModel,
    (text, chunk): (&str, usize),
    chunks: &[&[u32]],
    threads: usize,
    on_step: &mut dyn FnMut(usize),
) -> Result<Importance> {
    let squares = Arc::new(InputSquares::default());
    let compute = ComputeContext::new(threads, false).context("compute threads cannot be started; try fewer")?;
    let compute = Arc::new(ComputeContext { input_squares: Some(squares.clone()), ..compute });
    let decoder = model.decoder(&compute)?;
    let experts = model.experts()?;
    let longest = chunks.iter().map(|chunk| chunk.len()).max().unwrap_or(1);
    let per_step = chunks_per_step(&model.blueprint, longest, LogitsFor::None)?;
    let mut pass = TextPass::new(&decoder, experts.as_dyn(), &compute);
    pass.run(chunks, per_step, LogitsFor::None, &mut |step, _| {
        on_step(chunks[step].iter().map(|chunk| chunk.len()).sum());
        Ok(())
    })?;
    let mut made = Importance::new(text.to_owned(), chunk);
    made.set_chunks(chunks.len());
    for (name, ColumnSquares { sums, tokens }) in squares.resident() {
        made.insert(&name, sums, vec![tokens as f32]);
    }
    for ((layer, input), experts) in squares.take_experts() {
        insert_experts(&mut made, &model.blueprint.geometry, layer, input, experts);
    }
    Ok(made)
}

/// Adds the matrices of a layer's experts that have this input.
fn insert_experts(
    made: &mut Importance,
    geometry: &Geometry,
    layer: LayerIdx,
    input: ExpertInput,
    mut experts: Vec<ColumnSquares>,
) {
    experts.resize(geometry.experts, ColumnSquares::default());
    let (parts, columns): (&[&str], _) = match input {
        ExpertInput::Hidden => (&["gate", "up"], geometry.hidden),
        ExpertInput::Inner => (&["down"], geometry.inter),
    };
    let counts: Vec<f32> = experts.iter().map(|expert| expert.tokens as f32).collect();
    let mut sums = Vec::with_capacity(experts.len() * columns);
    for mut expert in experts {
        expert.sums.resize(columns, 0.0);
        sums.append(&mut expert.sums);
    }
    for part in parts {
        made.insert(&format!("layers.{}.experts.{part}", layer.0), sums.clone(), counts.clone());
    }
}
