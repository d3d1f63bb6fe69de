//! Latent attention as a part of chains on a device, from its input on, where it attends to all rows. Rows in main memory are attended to by
//! the CPU, between two chains.

use candle_core::Tensor;

use super::latent::{LatentAttention, Query, RowChoice};
use super::output_gate::DeviceGate;
use super::{AttentionMask, ChainedMixer, ForwardPass};
use crate::device::{DeviceHeads, DeviceOps, DeviceRotation, DeviceRows, HeadNorm, HeadRest};
use crate::error::Result;
use crate::hidden::{Hidden, Place, receive};
use crate::matrix::{Linear, PlacedMatrix};
use crate::step::LayerStates;

impl LatentAttention {
    /// Whether all of it has a form for devices.
    pub(super) fn is_for_devices(&self) -> bool {
        let plain = matches!(self.choice, RowChoice::All);
        let gate = self.output_gate.as_ref().is_none_or(|(product, _)| product.is_on_device());
        let of_query = match &self.q {
            Query::Full(product) => product.is_on_device(),
            Query::Low(a, norm, b) => a.is_on_device() && norm.as_rms().is_some() && b.is_on_device(),
        };
        let products = of_query && self.kv_a.is_on_device() && self.o.is_on_device();
        let heads = PlacedMatrix::begins_heads(&self.to_latent, self.shape.nope + self.shape.rope)
            && PlacedMatrix::begins_heads(&self.to_value, self.shape.kv_rank);
        plain && gate && products && heads && self.kv_norm.as_rms().is_some()
    }

    /// What the product of the queries yields, the new rows before their norm, and what the output gate is made of.
    fn begin_products(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<([DeviceRows; 2], Option<DeviceGate>)> {
        let (Query::Full(first) | Query::Low(first, ..)) = &self.q;
        let gate = self.output_gate.as_ref();
        let products: Vec<&Linear> = [first, &self.kv_a].into_iter().chain(gate.map(|(product, _)| product)).collect();
        let all = Linear::begin_each(&products, x, ops)?.expect("the products are on the device");
        let (first, rows) = (all[0], all[1]);
        let queries = match &self.q {
            Query::Full(_) => first,
            Query::Low(_, norm, product) => {
                let (weight, eps) = norm.as_rms().expect("it is for devices");
                let latent = ops.rms_norm(first, weight.on_device(ops)?, eps)?;
                product.begin(latent, ops)?.expect("the product is on the device")
            }
        };
        Ok(([queries, rows], gate.map(|(_, function)| DeviceGate { rows: all[2], function: *function })))
    }
}

impl ChainedMixer for LatentAttention {
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let (products, gate) = self.begin_products(x.on_device(ops)?, ops)?;
        let latents = PlacedMatrix::begin_heads(&self.to_latent, products[0], ops)?;
        let mixed = match states.place() {
            Place::Host => self.begin_in_memory(latents, products, states, pass, ops)?,
            Place::Device => self.begin_on_device(latents, products, states, pass, ops)?,
        };
        let values = PlacedMatrix::begin_heads(&self.to_value, mixed, ops)?;
        let values = match gate {
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
        [queries, keys]: [DeviceRows; 2],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let (kv_rank, rope, nope) = (self.shape.kv_rank, self.shape.rope, self.shape.nope);
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.extend(span.tokens, 1, kv_rank + rope)?;
        }
        let (weight, eps) = self.kv_norm.as_rms().expect("it is for devices");
        let weights = [None, Some(weight.on_device(ops)?)];
        let rotation = self.rotary.filter(|_| rope > 0).map(|rotary| DeviceRotation {
            turns: pass.ropes[rotary.table].turns(),
            first: kv_rank,
            dim: rotary.dim,
            interleaved: rotary.interleaved,
        });
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let heads = DeviceHeads {
            queries: latents,
            rest: Some(HeadRest { rows: queries, first: nope }),
            keys,
            values: None,
            norm: Some(HeadNorm { weights, eps, whole: false, width: Some(kv_rank), behind_rotation: false }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation,
            scales: &scales,
        };
        let rows = (&*states, (|kv| (&kv.keys, None)) as super::KeysAndValues);
        self.over_rows().begin_new(ops, &heads, rows, (pass, AttentionMask::Causal))
    }
}
