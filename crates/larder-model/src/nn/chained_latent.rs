//! Latent attention as a part of chains on a device, from its input on, to all rows or to those that an indexer chooses there. Rows in main
//! memory are attended to by the CPU, between two chains.

use candle_core::Tensor;

use super::chained_choice::{ListLengths, device_rotation};
use super::latent::{LatentAttention, Query, RowChoice};
use super::output_gate::DeviceGate;
use super::{AttentionMask, ChainedMixer, ForwardPass, HandedChoice};
use crate::device::{DeviceHeads, DeviceOps, DeviceRows, HeadNorm, HeadRest};
use crate::error::Result;
use crate::hidden::{Hidden, Place, receive};
use crate::matrix::{Linear, PlacedMatrix};
use crate::step::LayerStates;

impl LatentAttention {
    /// Whether there is a form for devices, if its products are there.
    pub(super) fn has_device_form(&self) -> bool {
        let choice = match &self.choice {
            RowChoice::All | RowChoice::Shared(_) => true,
            RowChoice::Indexed(indexer) => indexer.has_device_form(),
        };
        let query = match &self.q {
            Query::Full(_) => true,
            Query::Low(_, norm, _) => norm.as_rms().is_some(),
        };
        choice && query && self.kv_norm.as_rms().is_some()
    }

    /// Whether all of it is computed on a device.
    pub(super) fn is_for_devices(&self) -> bool {
        let choice = match &self.choice {
            RowChoice::All | RowChoice::Shared(_) => true,
            RowChoice::Indexed(indexer) => indexer.is_on_device(),
        };
        let gate = self.output_gate.as_ref().is_none_or(|(product, _)| product.is_on_device());
        let of_query = match &self.q {
            Query::Full(product) => product.is_on_device(),
            Query::Low(a, _, b) => a.is_on_device() && b.is_on_device(),
        };
        let products = of_query && self.kv_a.is_on_device() && self.o.is_on_device();
        let heads = PlacedMatrix::begins_heads(&self.to_latent, self.shape.nope + self.shape.rope)
            && PlacedMatrix::begins_heads(&self.to_value, self.shape.kv_rank);
        self.has_device_form() && choice && gate && products && heads
    }

    /// The products with the input `x`, and those of the queries.
    fn begin_products(&self, x: DeviceRows, pass: &ForwardPass, ops: &dyn DeviceOps) -> Result<Products> {
        let (Query::Full(first) | Query::Low(first, ..)) = &self.q;
        let of_gate = self.output_gate.as_ref();
        let of_index = match &self.choice {
            RowChoice::Indexed(indexer) => indexer.device_products(pass),
            RowChoice::All | RowChoice::Shared(_) => Vec::new(),
        };
        let products = [first, &self.kv_a].into_iter().chain(of_gate.map(|(product, _)| product)).chain(of_index);
        let mut all =
            Linear::begin_each(&products.collect::<Vec<_>>(), x, ops)?.expect("the products are on the device");
        let index = all.split_off(2 + usize::from(of_gate.is_some()));
        let gate = of_gate.map(|(_, function)| DeviceGate { rows: all[2], function: *function });
        let (latent, queries) = match &self.q {
            Query::Full(_) => (x, all[0]),
            Query::Low(_, norm, product) => {
                let (weight, eps) = norm.as_rms().expect("it is for devices");
                let latent = ops.rms_norm(all[0], weight.on_device(ops)?, eps)?;
                (latent, product.begin(latent, ops)?.expect("the product is on the device"))
            }
        };
        Ok(Products { queries, keys: all[1], latent, index, gate })
    }

    /// The choice of rows on the device; `None` if each token attends to all that it sees.
    fn begin_choice(
        &self,
        products: &Products,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths> {
        let lengths = match &self.choice {
            RowChoice::All => return Ok(None),
            RowChoice::Indexed(indexer) => indexer.begin(&products.index, products.latent, states, pass, ops)?,
            RowChoice::Shared(most) => match pass.handed_on.get() {
                Some(choice) => choice.on_device(pass, *most, ops)?,
                None => return Ok(None),
            },
        };
        pass.handed_on.set(HandedChoice::Device(lengths.clone()));
        Ok(lengths)
    }
}

/// Products of latent attention on a device.
struct Products {
    /// `[tokens, heads · (nope + rope)]`
    queries: DeviceRows,
    /// `[tokens, kv_rank + rope]`: the new rows before their norm.
    keys: DeviceRows,
    /// `[tokens, q_rank]`: what queries are made of.
    latent: DeviceRows,
    /// Those of the indexer.
    index: Vec<DeviceRows>,
    gate: Option<DeviceGate>,
}

impl ChainedMixer for LatentAttention {
    /// The CPU chooses rows in main memory.
    fn takes(&self, keys: Place) -> bool {
        keys == Place::Device || matches!(self.choice, RowChoice::All)
    }

    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let products = self.begin_products(x.on_device(ops)?, pass, ops)?;
        let latents = PlacedMatrix::begin_heads(&self.to_latent, products.queries, ops)?;
        let mixed = match states.place() {
            Place::Host => self.begin_in_memory(latents, [products.queries, products.keys], states, pass, ops)?,
            Place::Device => self.begin_on_device(latents, &products, states, pass, ops)?,
        };
        let values = PlacedMatrix::begin_heads(&self.to_value, mixed, ops)?;
        let values = match products.gate {
            Some(gate) => gate.begin(values, self.shape.heads, ops)?,
            None => values,
        };
        Ok(self.o.begin(values, ops)?.expect("the output product is on the device"))
    }
}

impl LatentAttention {
    /// The attention by the CPU to rows in main memory, of queries and their parts in the latent space.
    fn begin_in_memory(
        &self,
        latents: DeviceRows,
        [queries, keys]: [DeviceRows; 2],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let [latents, queries, keys] =
            receive(ops, &[latents, queries, keys])?.try_into().expect("there are three results");
        let by_head = |x: Tensor| x.reshape((pass.tokens(), self.shape.heads, ()));
        self.append_keys(&keys, states, pass)?;
        let query = self.query_of(by_head(latents)?, &by_head(queries)?, pass)?;
        Hidden::Host(self.attend(&query, states, pass, &[])?).on_device(ops)
    }

    /// The attention on the device to rows there.
    fn begin_on_device(
        &self,
        latents: DeviceRows,
        products: &Products,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let chosen = self.begin_choice(products, states, pass, ops)?;
        let (kv_rank, rope, nope) = (self.shape.kv_rank, self.shape.rope, self.shape.nope);
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.extend(span.tokens, 1, kv_rank + rope)?;
        }
        let (weight, eps) = self.kv_norm.as_rms().expect("it is for devices");
        let weights = [None, Some(weight.on_device(ops)?)];
        let rotation = device_rotation(self.rotary.filter(|_| rope > 0), kv_rank, &pass.ropes);
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let heads = DeviceHeads {
            queries: latents,
            rest: Some(HeadRest { rows: products.queries, first: nope }),
            keys: products.keys,
            values: None,
            norm: Some(HeadNorm { weights, eps, whole: false, width: Some(kv_rank), behind_rotation: false }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation,
            scales: &scales,
            bias: None,
        };
        let rows = (&*states, (|kv| (&kv.keys, None)) as super::KeysAndValues);
        match chosen {
            None => self.over_rows().begin_new(ops, &heads, rows, (pass, AttentionMask::Causal)),
            Some(lengths) => self.over_rows().begin_chosen(ops, &heads, rows, (pass, AttentionMask::Causal), &lengths),
        }
    }
}
