//! Attention of T5 as a part of chains on a device: over the own sequence, whose scores have a bias, and over the output of an encoder. Keys and
//! values in main memory are attended to by the CPU, between two chains.

use larder_kernels::AttentionArgs;

use super::{AttentionMask, ChainedMixer, ForwardPass, KvRows, RelativeAttention};
use crate::device::{DeviceHeads, DeviceKvView, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::hidden::{Hidden, Place, receive};
use crate::matrix::Linear;
use crate::step::LayerStates;

impl RelativeAttention {
    /// Whether its products are computed on a device.
    pub(crate) fn is_on_device(&self) -> bool {
        [&self.q, &self.k, &self.v, &self.o].into_iter().all(Linear::is_on_device)
    }

    /// As [`over_encoded`](Self::over_encoded), begun on a device. The caller guarantees that it [is there](Self::is_on_device).
    pub(crate) fn begin_over_encoded(
        &self,
        x: DeviceRows,
        states: &LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let q = self.q.begin(x, ops)?.expect("the product is on the device");
        let mixed = match states.place() {
            Place::Host => {
                let q = receive(ops, &[q])?.remove(0);
                Hidden::Host(self.attend_encoded(&q, states, pass)?).on_device(ops)?
            }
            Place::Device => {
                let of = |i: usize| (&states.of(i).encoder_keys, &states.of(i).encoder_values);
                let spans = || pass.spans.iter().enumerate();
                let seen: Vec<_> = spans().map(|(i, span)| vec![0..of(i).0.len(); span.tokens]).collect();
                let tasks: Vec<_> = spans().map(|(i, _)| self.task(of(i), &seen[i])).collect();
                // There are no rows of a second source.
                ops.attend_joined(q, &tasks.iter().collect::<Vec<_>>(), &vec![0; q.rows], false)?
            }
        };
        Ok(self.o.begin(mixed, ops)?.expect("the product is on the device"))
    }

    /// The attention of queries on a device to rows there, without a bias.
    fn task<'a>(
        &self,
        (keys, values): (&KvRows, &KvRows),
        seen: &'a [std::ops::Range<usize>],
    ) -> AttentionArgs<'a, DeviceKvView> {
        let [keys, values] = [keys, values].map(|rows| rows.view(self.head_dim).on_device());
        let (heads, kv_heads) = (self.heads, self.heads);
        AttentionArgs { queries: &[], heads, keys, values, kv_heads, seen, scale: 1.0, sinks: None, bias: None }
    }
}

impl ChainedMixer for RelativeAttention {
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let products = Linear::begin_all([&self.q, &self.k, &self.v], x.on_device(ops)?, ops)?;
        let [queries, keys, values] = products.expect("the products are on the device");
        if states.place() == Place::Host {
            let products = receive(ops, &[queries, keys, values])?.try_into().expect("there are three products");
            let mixed = Hidden::Host(self.attend_own(products, states, pass)?).on_device(ops)?;
            return Ok(self.o.begin(mixed, ops)?.expect("the product is on the device"));
        }
        for (i, span) in pass.spans.iter().enumerate() {
            let state = states.of_mut(i);
            state.keys.extend(span.tokens, self.heads, self.head_dim)?;
            state.values.extend(span.tokens, self.heads, self.head_dim)?;
        }
        let heads = DeviceHeads {
            queries,
            rest: None,
            keys,
            values: Some(values),
            norm: None,
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: None,
            scales: &[],
            bias: self.bias.as_ref().map(|bias| bias.on_device(ops)).transpose()?,
        };
        let seen = pass.visible_ranges(AttentionMask::Causal);
        let tasks = pass.spans.iter().enumerate().map(|(i, span)| {
            let (state, bias) = (states.of(i), self.bias.as_ref().map(|bias| bias.at(span.start)));
            AttentionArgs { bias, ..self.task((&state.keys, &state.values), span.rows(&seen, 1)) }
        });
        let tasks: Vec<AttentionArgs<DeviceKvView>> = tasks.collect();
        let mixed = ops.attend_new(&heads, &tasks.iter().collect::<Vec<_>>())?;
        Ok(self.o.begin(mixed, ops)?.expect("the product is on the device"))
    }
}
