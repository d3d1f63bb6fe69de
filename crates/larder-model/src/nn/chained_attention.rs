//! Attention as a part of chains on a device: from its input on where all that lies between its products and the KV cache has a form for
//! devices, else from its queries on. Keys and values in main memory are attended to by the CPU, between two chains.

use candle_core::Tensor;

use super::attention::{Attention, InputProducts, KEYS_AND_VALUES, QkNorm};
use super::chained_choice::device_rotation;
use super::output_gate::DeviceGate;
use super::{ChainedMixer, ForwardPass, OutputGate};
use crate::device::{DeviceHeads, DeviceOps, DeviceRows, HeadNorm};
use crate::error::Result;
use crate::hidden::{Hidden, Place, receive};
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

impl Attention {
    /// Whether all between its products and the KV cache has a form for devices.
    pub(super) fn has_device_form(&self) -> bool {
        let (norm, eps) = match &self.norm {
            QkNorm::None => (true, None),
            QkNorm::Whole(q, k) | QkNorm::PerHead(q, k) | QkNorm::PerHeadAfterRope(q, k) => {
                match (q.as_rms(), k.as_rms()) {
                    (Some((_, of_queries)), Some((_, of_keys))) => (of_queries == of_keys, Some(of_keys)),
                    _ => (false, None),
                }
            }
            QkNorm::AfterRope { eps } => (true, Some(*eps)),
        };
        // All norms add the same.
        let value_norm = self.value_norm.is_none_or(|of_values| eps.is_none_or(|eps| eps == of_values));
        // A norm of each head is behind the clip.
        let clip = self.clip.is_none() || matches!(self.norm, QkNorm::None | QkNorm::Whole(..));
        let indexer = self.indexer.as_ref().is_none_or(|indexer| indexer.chained().has_device_form());
        value_norm && clip && norm && indexer
    }

    /// Whether all of it is computed on a device, from its input on.
    pub(super) fn is_for_devices(&self) -> bool {
        let gate = match &self.output_gate {
            OutputGate::Product(product, _) => product.is_on_device(),
            OutputGate::None => true,
        };
        let products = match &self.inputs {
            InputProducts::Apart { q, k, v } => {
                [Some(q), Some(k), v.as_ref()].into_iter().flatten().all(Linear::is_on_device)
            }
            InputProducts::Convolved(inputs) => inputs.is_on_device(),
        };
        let indexer = self.indexer.as_ref().is_none_or(|indexer| indexer.chained().is_on_device());
        self.has_device_form() && gate && products && indexer && self.o.is_on_device()
    }
}

impl ChainedMixer for Attention {
    fn input_place(&self) -> Place {
        if self.is_for_devices() { Place::Device } else { Place::Host }
    }

    /// The CPU chooses rows in main memory.
    fn takes(&self, keys: Place) -> bool {
        keys == Place::Device || self.indexer.is_none()
    }

    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let (mixed, gate) = match x {
            Hidden::Host(x) => {
                let (q, gate) = self.queries(x, states, pass)?;
                let mixed = self.begin_from_queries(&q, states, pass, ops)?;
                let send = |(gate, function)| -> Result<_> {
                    Ok(DeviceGate { rows: Hidden::Host(gate).on_device(ops)?, function })
                };
                (mixed, gate.map(send).transpose()?)
            }
            Hidden::Device(x) if states.place() == Place::Host => {
                let (products, gate, _) = self.begin_products(*x, states, pass, ops)?;
                let products = receive(ops, &products)?.try_into().expect("there are three products");
                let q = self.queries_of(products, states, pass)?;
                (self.begin_from_queries(&q, states, pass, ops)?, gate)
            }
            Hidden::Device(x) => self.begin_from_input(*x, states, pass, ops)?,
        };
        let mixed = match gate {
            Some(gate) => gate.begin(mixed, self.shape.heads, ops)?,
            None => mixed,
        };
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask));
        Ok(self.o.begin(mixed, ops)?.expect("the output product is on the device"))
    }
}

impl Attention {
    /// Attention over the rows of the KV cache, wherever they are.
    fn begin_from_queries(
        &self,
        q: &Tensor,
        states: &LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        match states.place() {
            Place::Host => Hidden::Host(self.attend(q, states, pass, &[])?).on_device(ops),
            Place::Device => {
                let rows = (states, KEYS_AND_VALUES);
                with_f32(q, |q| self.over_rows().begin_step(ops, q, rows, (pass, self.mask)))?
            }
        }
    }

    /// Attention, its products with the input included; and what the output gate is made of.
    fn begin_from_input(
        &self,
        x: DeviceRows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<(DeviceRows, Option<DeviceGate>)> {
        let ([queries, keys, values], gate, of_index) = self.begin_products(x, states, pass, ops)?;
        let chosen = match &self.indexer {
            Some(indexer) => indexer.chained().begin(&of_index, states, pass, ops)?,
            None => None,
        };
        let norm = self.begin_norm(ops)?;
        for (i, span) in pass.spans.iter().enumerate() {
            let kv = states.of_mut(i);
            kv.keys.extend(span.tokens, self.shape.kv_heads, self.shape.head_dim)?;
            kv.values.extend(span.tokens, self.shape.kv_heads, self.shape.value_dim)?;
        }
        let rotation = device_rotation(self.rotary, 0, &pass.ropes);
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let (rest, values, clip) = (None, Some(values), self.clip.map(|limit| limit as f32));
        let (value_norm, value_factor) = (self.value_norm, self.value_scale as f32);
        let scales = &scales;
        let heads = DeviceHeads {
            queries,
            rest,
            keys,
            values,
            norm,
            clip,
            value_norm,
            value_factor,
            rotation,
            scales,
            bias: None,
        };
        let (rows, seen) = ((&*states, KEYS_AND_VALUES), (pass, self.mask));
        let mixed = match chosen {
            None => self.over_rows().begin_new(ops, &heads, rows, seen)?,
            Some(lengths) => self.over_rows().begin_chosen(ops, &heads, rows, seen, &lengths)?,
        };
        Ok((mixed, gate))
    }

    /// The norm of queries and keys, with its weights on the device.
    fn begin_norm(&self, ops: &dyn DeviceOps) -> Result<Option<HeadNorm>> {
        // Without a rotation there is no norm behind it.
        let behind_rotation = match &self.norm {
            QkNorm::PerHeadAfterRope(..) | QkNorm::AfterRope { .. } if self.rotary.is_none() => return Ok(None),
            QkNorm::PerHeadAfterRope(..) | QkNorm::AfterRope { .. } => true,
            _ => false,
        };
        let (weights, eps) = match &self.norm {
            QkNorm::None => return Ok(None),
            QkNorm::AfterRope { eps } => ([None; 2], *eps),
            QkNorm::Whole(q, k) | QkNorm::PerHead(q, k) | QkNorm::PerHeadAfterRope(q, k) => {
                let (of_queries, eps) = q.as_rms().expect("it is for devices");
                let (of_keys, _) = k.as_rms().expect("it is for devices");
                ([Some(of_queries.on_device(ops)?), Some(of_keys.on_device(ops)?)], eps)
            }
        };
        Ok(Some(HeadNorm { weights, eps, whole: matches!(self.norm, QkNorm::Whole(..)), width: None, behind_rotation }))
    }

    /// Queries, keys and values, the product of the output gate, and those of the indexer. Without a product of its own the values are what
    /// that of the keys yields.
    fn begin_products(
        &self,
        x: DeviceRows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<([DeviceRows; 3], Option<DeviceGate>, Vec<DeviceRows>)> {
        let of_inputs = match &self.inputs {
            InputProducts::Apart { q, k, v } => [Some(q), Some(k), v.as_ref()].into_iter().flatten().collect(),
            InputProducts::Convolved(inputs) => inputs.products().to_vec(),
        };
        let gate = match &self.output_gate {
            OutputGate::Product(product, function) => Some((product, *function)),
            OutputGate::None => None,
        };
        let of_index = self.indexer.as_ref().map_or_else(Vec::new, |indexer| indexer.chained().device_products(pass));
        let products = of_inputs.iter().copied().chain(gate.map(|(product, _)| product)).chain(of_index);
        let mut rows =
            Linear::begin_each(&products.collect::<Vec<_>>(), x, ops)?.expect("the products are on the device");
        let of_index = rows.split_off(of_inputs.len() + usize::from(gate.is_some()));
        let gate = gate.map(|(_, function)| DeviceGate { rows: rows[of_inputs.len()], function });
        let inputs = match (&self.inputs, &rows[..of_inputs.len()]) {
            (InputProducts::Convolved(inputs), [q, k, current, delayed]) => {
                inputs.begin([*q, *k, *current, *delayed], states, pass, ops)?
            }
            (_, [q, k, v]) => [*q, *k, *v],
            (_, rows) => [rows[0], rows[1], rows[1]],
        };
        Ok((inputs, gate, of_index))
    }
}
