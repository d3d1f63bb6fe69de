//! Attention as a part of chains on a device: from its input on where all that lies between its products and the KV cache has a form for
//! devices, else from its queries on.

use super::attention::{Attention, InputProducts, KEYS_AND_VALUES, QkNorm};
use super::{ChainedMixer, ForwardPass};
use crate::device::{DeviceHeads, DeviceOps, DeviceRotation, DeviceRows, HeadNorm};
use crate::error::Result;
use crate::hidden::{Hidden, HiddenPlace};
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

impl ChainedMixer for Attention {
    fn input_place(&self) -> HiddenPlace {
        let clean = self.value_norm.is_none() && self.value_scale == 1.0 && self.clip.is_none();
        let products = match &self.inputs {
            InputProducts::Apart { q, k, v } => {
                [Some(q), Some(k), v.as_ref()].into_iter().flatten().all(Linear::is_on_device)
            }
            _ => false,
        };
        let norm = match &self.norm {
            QkNorm::None => true,
            QkNorm::Whole(q, k) | QkNorm::PerHead(q, k) => match (q.as_rms(), k.as_rms()) {
                (Some((_, of_queries)), Some((_, of_keys))) => of_queries == of_keys,
                _ => false,
            },
            QkNorm::PerHeadAfterRope(..) | QkNorm::AfterRope { .. } => false,
        };
        match clean && products && norm {
            true => HiddenPlace::Device,
            false => HiddenPlace::Host,
        }
    }

    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let mixed = match x {
            Hidden::Host(x) => {
                let (q, _) = self.queries(x, states, pass)?;
                let rows = (&*states, KEYS_AND_VALUES);
                with_f32(&q, |q| self.over_rows().begin_step(ops, q, rows, (pass, self.mask)))??
            }
            Hidden::Device(x) => self.begin_from_input(*x, states, pass, ops)?,
        };
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask));
        Ok(self.o.begin(mixed, ops)?.expect("the output product is on the device"))
    }
}

impl Attention {
    /// Attention, its products with the input included.
    fn begin_from_input(
        &self,
        x: DeviceRows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let [queries, keys, values] = self.begin_products(x, ops)?;
        let norm = match &self.norm {
            QkNorm::Whole(q, k) | QkNorm::PerHead(q, k) => {
                let (of_queries, eps) = q.as_rms().expect("it is for devices");
                let (of_keys, _) = k.as_rms().expect("it is for devices");
                let weights = [Some(of_queries.on_device(ops)?), Some(of_keys.on_device(ops)?)];
                Some(HeadNorm { weights, eps, whole: matches!(self.norm, QkNorm::Whole(..)), width: None })
            }
            _ => None,
        };
        for (i, span) in pass.spans.iter().enumerate() {
            let kv = states.of_mut(i);
            kv.keys.extend(span.tokens, self.shape.kv_heads, self.shape.head_dim)?;
            kv.values.extend(span.tokens, self.shape.kv_heads, self.shape.value_dim)?;
        }
        let rotation = self.rotary.map(|rotary| DeviceRotation {
            turns: pass.ropes[rotary.table].turns(),
            first: 0,
            dim: rotary.dim,
            interleaved: rotary.interleaved,
        });
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let heads = DeviceHeads { queries, rest: None, keys, values: Some(values), norm, rotation, scales: &scales };
        self.over_rows().begin_new(ops, &heads, (states, KEYS_AND_VALUES), (pass, self.mask))
    }

    /// The products with the input; without one of its own the values are what the product of the keys yields.
    fn begin_products(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<[DeviceRows; 3]> {
        let products = match &self.inputs {
            InputProducts::Apart { q, k, v: Some(v) } => Linear::begin_all([q, k, v], x, ops)?,
            InputProducts::Apart { q, k, v: None } => Linear::begin_all([q, k], x, ops)?.map(|[q, k]| [q, k, k]),
            _ => None,
        };
        Ok(products.expect("the products are on the device"))
    }
}
