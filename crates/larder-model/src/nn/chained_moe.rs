//! MoE layers as parts of chains on a device.

use std::cell::OnceCell;

use super::moe::{DenseBeside, LatentExperts, MoeInput, SharedExpert, forward_some};
use super::router::{RouterOutput, RouterRows};
use super::{GateFunction, Moe};
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::experts::{CallOnDevice, DeviceMoeCall, ExpertPath, KnownExperts, MoeCall};
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};
use crate::step::TokenOrigin;
use crate::tap::{Phase, PhaseClock, Tap};

/// Rows that do not depend on the routed experts.
#[derive(Clone, Copy)]
pub(crate) struct AlwaysOnDevice {
    /// Of the dense MLP beside the experts.
    beside: Option<DeviceRows>,
    /// Of the shared expert, unless the CPU computes it.
    shared: Option<DeviceRows>,
}

/// The rows of a layer on a device, and what computes with them.
pub(crate) struct MoeOnDevice<'a> {
    /// The input of the layer.
    pub x: DeviceRows,
    /// What experts read of it; the input of the call has it in main memory.
    pub of_experts: DeviceRows,
    /// What [was begun](Moe::begin_always) of it.
    pub always: AlwaysOnDevice,
    /// The residual stream, if outputs are to be added to it.
    pub residual: Option<DeviceRows>,
    /// The operations of the device.
    pub ops: &'a dyn DeviceOps,
}

/// What a device chooses the experts of a layer by.
#[derive(Clone, Copy)]
pub(crate) struct ChosenBy<'a> {
    /// The router logits.
    pub logits: DeviceRows,
    /// The experts, if they are known; then logits only weigh them.
    pub known: Option<KnownExperts<'a>>,
}

impl Moe {
    /// Whether [`begin`](Self::begin) computes it.
    pub(crate) fn is_for_devices(&self) -> bool {
        let beside = self.beside.as_ref().is_none_or(DenseBeside::is_for_devices);
        let latent = self.latent.as_ref().is_none_or(LatentExperts::is_on_device);
        // Only what the experts read is read back. Where that is not the input of the layer, all others have to do without it on the host.
        let shared = self.shared.as_ref().is_none_or(SharedExpert::is_for_devices);
        let apart = self.latent.is_some() || self.beside.is_some() || self.early;
        let others = !apart || (shared && self.router.is_for_devices());
        // A factor is a part of adding the sums to a shared expert.
        let factor = self.factor == 1.0 || (self.latent.is_none() && self.beside.is_none() && self.shared.is_some());
        // Tokens without an expert have outputs of zeros.
        let skips = !self.router.may_skip() || (!apart && self.router.is_for_devices());
        beside && latent && others && factor && skips && self.capacity.is_none()
    }

    /// Whether a device that chooses experts computes everything else of the layer too.
    pub(crate) fn is_whole_on_devices(&self) -> bool {
        self.is_for_devices() && self.shared.as_ref().is_none_or(SharedExpert::is_for_devices)
    }

    /// What the experts read of the input `x` of the layer, begun on a device.
    pub(crate) fn begin_input(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        match &self.latent {
            Some(latent) => Ok(latent.down.begin(x, ops)?.expect("it is for devices")),
            None => Ok(x),
        }
    }

    /// What the router finds for the residual stream and what the norm of the layer makes of it, begun on a device; `None` if the CPU computes
    /// it. `before` is the state of the router of the layer before.
    pub(crate) fn begin_router(
        &self,
        [residual, x]: [DeviceRows; 2],
        before: Option<Hidden>,
        ops: &dyn DeviceOps,
    ) -> Result<Option<RouterRows>> {
        let input = match &self.beside {
            _ if self.early => residual,
            Some(beside) => beside.router_norm.for_devices().expect("it is for devices").begin(residual, ops)?,
            None => x,
        };
        self.router.begin(input, before, ops)
    }

    /// What every token uses, for the residual stream and the input `x` of the layer, begun on a device.
    pub(crate) fn begin_always(
        &self,
        residual: DeviceRows,
        x: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<AlwaysOnDevice> {
        Ok(AlwaysOnDevice {
            beside: self.beside.as_ref().map(|beside| beside.begin(residual, ops)).transpose()?,
            shared: self.shared.as_ref().map_or(Ok(None), |shared| shared.begin(x, ops))?,
        })
    }

    /// Begins the experts that a device has, for what they read, before the host knows the choice. [`begin`](Self::begin) follows. Not of
    /// several tokens if some may have no expert, since the others are computed apart then.
    pub(crate) fn begin_hits(&self, x: DeviceRows, chosen_by: ChosenBy, experts: &mut dyn ExpertPath) -> Result<()> {
        if self.router.may_skip() && x.rows > 1 {
            return Ok(());
        }
        experts.begin_hits(&self.call_on_device(chosen_by, CallOnDevice { x, shared: None, residual: None }))
    }

    /// As [`forward`](Self::forward), with the outputs as rows of a chain, added to the residual stream if it is among
    /// `rows`. The caller guarantees that it [is for devices](Self::is_for_devices).
    pub(crate) fn begin(
        &self,
        input: MoeInput,
        rows: MoeOnDevice,
        origins: &[TokenOrigin],
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
        clock: &mut PhaseClock,
    ) -> Result<DeviceRows> {
        let MoeInput { x, early, known, state, .. } = input;
        let MoeOnDevice { x: rows, of_experts, always: AlwaysOnDevice { beside, shared }, residual, ops } = rows;
        let RouterOutput { logits, skipping } = match early {
            Some(logits) => self.router.output_of(logits)?,
            None => self.router.forward(x, state)?,
        };
        if let Some(skipping) = &skipping {
            tap.router_classes(self.layer, &skipping.classes);
        }
        let some = skipping.map(|skipping| skipping.others()).filter(|kept| kept.len() < rows.rows);
        clock.lap(Phase::Routing, tap);
        let always = OnceCell::new();
        let of_cpu = self.shared.as_ref().filter(|_| shared.is_none());
        // A shared expert that the CPU computes is added to the sums before these are added to the residual stream.
        let is_direct = self.adds_at_once();
        let onto = residual.filter(|_| of_cpu.is_none() && is_direct);
        let meanwhile = || {
            if let Some(of_cpu) = of_cpu {
                always.get_or_init(|| of_cpu.forward(x));
            }
        };
        let mut out = vec![0.0; rows.rows * of_experts.width];
        let (routed, sums) = with_f32(&logits, |logits| {
            with_f32(x, |x| {
                let (layer, gate, act, tokens) = (self.layer, &self.gate, self.act, rows.rows);
                let at_once = shared.filter(|_| is_direct);
                let on_device = Some(CallOnDevice { x: of_experts, shared: at_once, residual: onto });
                let (on_device, meanwhile) = (on_device.filter(|_| some.is_none()), &meanwhile);
                let call = MoeCall { layer, gate, act, logits, x, on_device, tokens, known, origins, meanwhile };
                match &some {
                    Some(kept) => Ok((forward_some(kept, &call, experts, &mut out)?, None)),
                    None => experts.begin(&call, &mut out),
                }
            })
        })???;
        with_f32(&logits, |logits| tap.routed(self.layer, logits, &routed))?;
        meanwhile();
        let of_cpu = always.into_inner().transpose()?;
        let of_cpu = of_cpu.map(|y| with_f32(&y, |y| ops.send(y, rows.width))?).transpose()?;
        match sums {
            Some(sums) if onto.is_some() => Ok(sums),
            Some(sums) => self.begin_output(sums, beside, [shared.filter(|_| !is_direct).or(of_cpu), residual], ops),
            None => self.begin_output(ops.send(&out, of_experts.width)?, beside, [shared.or(of_cpu), residual], ops),
        }
    }

    /// As [`begin`](Self::begin), with experts that the device chooses by these logits. The caller guarantees that the layer is
    /// [whole on devices](Self::is_whole_on_devices), and has asked the path.
    pub(crate) fn begin_chosen(
        &self,
        rows: MoeOnDevice,
        chosen_by: ChosenBy,
        experts: &mut dyn ExpertPath,
    ) -> Result<DeviceRows> {
        let MoeOnDevice { of_experts, always: AlwaysOnDevice { beside, shared }, residual, ops, .. } = rows;
        let is_direct = self.adds_at_once();
        let [at_once, onto] = [shared, residual].map(|rows| rows.filter(|_| is_direct));
        let on_device = CallOnDevice { x: of_experts, shared: at_once, residual: onto };
        let sums = experts.begin_chosen(&self.call_on_device(chosen_by, on_device))?;
        match is_direct {
            true => Ok(sums),
            false => self.begin_output(sums, beside, [shared, residual], ops),
        }
    }

    /// The output of the layer on a device, from the sums of its routed experts in their own width.
    fn begin_output(
        &self,
        sums: DeviceRows,
        beside: Option<DeviceRows>,
        added: [Option<DeviceRows>; 2],
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let mut y = match &self.latent {
            Some(latent) => latent.up.begin(sums, ops)?.expect("it is for devices"),
            None => sums,
        };
        if let (Some(dense), Some(beside)) = (&self.beside, beside) {
            let after = dense.after_experts.for_devices().expect("it is for devices");
            y = ops.add(after.begin(y, ops)?, beside, 1.0)?;
        }
        let mut factor = self.factor as f32;
        added.into_iter().flatten().try_fold(y, |y, more| ops.add(more, y, std::mem::replace(&mut factor, 1.0)))
    }

    /// Whether nothing comes between the sums of routed experts and what they are added to.
    fn adds_at_once(&self) -> bool {
        self.latent.is_none() && self.beside.is_none() && self.factor == 1.0
    }

    /// The call of the experts by router logits on a device.
    fn call_on_device<'a>(&'a self, chosen_by: ChosenBy<'a>, on_device: CallOnDevice) -> DeviceMoeCall<'a> {
        let ChosenBy { logits, known } = chosen_by;
        let (layer, gate, act, none) = (self.layer, &self.gate, self.act, self.router.bias_of_none());
        DeviceMoeCall { layer, gate, act, logits, none, known, on_device }
    }
}

impl LatentExperts {
    fn is_on_device(&self) -> bool {
        self.down.is_on_device() && self.up.is_on_device()
    }
}

impl DenseBeside {
    /// Whether [`begin`](Self::begin) and the norms of router and experts are computed on a device.
    fn is_for_devices(&self) -> bool {
        let norms = [&self.router_norm, &self.norm, &self.after, &self.after_experts];
        self.mlp.is_for_devices() && norms.into_iter().all(|norm| norm.for_devices().is_some())
    }

    /// As [`forward`](Self::forward), begun on a device. The caller guarantees that it [is for devices](Self::is_for_devices).
    fn begin(&self, residual: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let [norm, after] = [&self.norm, &self.after].map(|norm| norm.for_devices().expect("it is for devices"));
        after.begin(self.mlp.begin(norm.begin(residual, ops)?, ops)?, ops)
    }
}

impl SharedExpert {
    /// Whether [`begin`](Self::begin) computes it.
    fn is_for_devices(&self) -> bool {
        self.gate.as_ref().is_none_or(Linear::is_on_device) && self.mlp.is_for_devices()
    }

    /// As [`forward`](Self::forward), begun on a device; `None` if the CPU computes it.
    fn begin(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<Option<DeviceRows>> {
        if !self.is_for_devices() {
            return Ok(None);
        }
        let y = self.mlp.begin(x, ops)?;
        match &self.gate {
            Some(gate) => {
                let gate = gate.begin(x, ops)?.expect("it is for devices");
                ops.gate(y, gate, GateFunction::Sigmoid, 1).map(Some)
            }
            None => Ok(Some(y)),
        }
    }
}
