//! The forward pass of a layer as chains of operations on a device. The host waits once, for the router: what follows the experts is
//! begun behind them, up to the router of the next layer. Where the device has all experts of a layer it chooses them too, and the host
//! does not wait.

use candle_core::Tensor;
use larder_core::ExpertId;

use crate::device::{DeviceOps, DeviceRows};
use crate::error::{ModelError, Result};
use crate::experts::{HintSource, KnownExperts};
use crate::hidden::{Hidden, Place, receive};
use crate::layer_pass::{OtherLayers, Running, hint_next_layer, next_moe};
use crate::matrix::with_f32;
use crate::nn::{
    ChainedConnection, ChainedMixer, ChosenBy, DeviceNorm, ForwardPass, Mixer, Moe, MoeInput, MoeOnDevice, Norm,
    RelativeAttention, RouterRows,
};
use crate::stack::{Branch, CrossAttention, Ffn, Layer, Stack};
use crate::step::LayerStates;
use crate::tap::Phase;

/// The parts of a layer, one of which may be missing. All but the mixer have a form for devices.
pub(crate) struct DeviceLayer<'a> {
    ops: &'a dyn DeviceOps,
    mixer: Option<DeviceMixer<'a>>,
    /// Attention over the output of an encoder, behind the mixer.
    cross: Option<DeviceCross<'a>>,
    ffn: Option<DeviceFfn<'a>>,
    /// On what a part adds to the residual stream.
    factor: f32,
    /// On the output of the layer.
    scale: f32,
}

/// A mixer between its norms.
struct DeviceMixer<'a> {
    /// Before the mixer.
    norm: &'a Norm,
    part: &'a dyn Mixer,
    /// Its form for chains; `None` if it is computed on the CPU, but for products with weights on the device.
    chained: Option<&'a dyn ChainedMixer>,
    after: DeviceNorm<'a>,
    connection: Option<&'a dyn ChainedConnection>,
}

/// Attention over the output of an encoder, behind its norm.
struct DeviceCross<'a> {
    norm: DeviceNorm<'a>,
    attention: &'a RelativeAttention,
}

impl<'a> DeviceCross<'a> {
    fn of(CrossAttention { norm, attention }: &'a CrossAttention) -> Option<Self> {
        Some(DeviceCross { norm: norm.for_devices()?, attention: Some(attention).filter(|it| it.is_on_device())? })
    }
}

/// A feed-forward part between its norms.
struct DeviceFfn<'a> {
    norm: DeviceNorm<'a>,
    part: &'a Ffn,
    after: DeviceNorm<'a>,
    connection: Option<&'a dyn ChainedConnection>,
}

impl<'a> DeviceMixer<'a> {
    fn of(branch: &'a Branch<Box<dyn Mixer>>) -> Option<Self> {
        let (part, connection) = (branch.part.as_ref(), connection_of(branch)?);
        Some(DeviceMixer { norm: &branch.norm, part, chained: part.chained(), after: norm_after(branch)?, connection })
    }

    /// Its form for chains with keys and values in this place.
    fn chained(&self, keys: Place) -> Option<&'a dyn ChainedMixer> {
        self.chained.filter(|chained| chained.takes(keys))
    }

    /// As [`chained`](Self::chained), and its norm, if it takes its input on the device.
    fn chained_input(&self, keys: Place) -> Option<(&'a dyn ChainedMixer, DeviceNorm<'a>)> {
        let chained = self.chained(keys).filter(|chained| chained.input_place() == Place::Device)?;
        Some((chained, self.norm.for_devices()?))
    }

    /// Whether the host waits for something between the input and the output.
    fn waits(&self, kv: &LayerStates) -> bool {
        self.chained_input(kv.place()).is_none()
            || (self.part.layer_shape().keys.is_some() && kv.place() == Place::Host)
    }
}

impl<'a> DeviceFfn<'a> {
    fn of(branch: &'a Branch<Ffn>) -> Option<Self> {
        let (part, connection) = (Some(&branch.part).filter(|part| part.is_for_devices())?, connection_of(branch)?);
        // Routers before the mixer read the one stream that there is.
        let is_early = matches!(part, Ffn::Moe(moe) if moe.early);
        (connection.is_none() || !is_early).then_some(())?;
        Some(DeviceFfn { norm: branch.norm.for_devices()?, part, after: norm_after(branch)?, connection })
    }

    /// What the part reads of the residual stream, or streams.
    fn read(&self, residual: DeviceRows, ops: &dyn DeviceOps) -> Result<FfnRows> {
        let (stream, mix) = match self.connection {
            Some(connection) => connection.begin_read(residual, ops).map(|[stream, mix]| (stream, Some(mix)))?,
            None => (residual, None),
        };
        Ok(FfnRows { residual, stream, input: self.norm.begin(stream, ops)?, mix })
    }
}

/// The rows of a feed-forward part.
struct FfnRows {
    /// The residual stream, or streams.
    residual: DeviceRows,
    /// What the part reads of them.
    stream: DeviceRows,
    /// The same behind the norm.
    input: DeviceRows,
    /// What its connection needs to write the output.
    mix: Option<DeviceRows>,
}

/// The connection of a part with several residual streams, if there is one; `None` if the CPU computes it.
fn connection_of<Part>(branch: &Branch<Part>) -> Option<Option<&dyn ChainedConnection>> {
    match &branch.connection {
        Some(connection) => connection.chained().map(Some),
        None => Some(None),
    }
}

/// The norm of the output of a part.
fn norm_after<Part>(branch: &Branch<Part>) -> Option<DeviceNorm<'_>> {
    branch.after.as_ref().unwrap_or(&Norm::None).for_devices()
}

/// The experts of a layer that the tokens decide on.
enum TokenExperts {
    /// `[tokens, k]`
    Ids(Vec<ExpertId>),
    /// Experts of a token that only the device knows: the id of their table there.
    OfDrawn(usize),
}

impl TokenExperts {
    fn for_device(&self) -> KnownExperts<'_> {
        match self {
            TokenExperts::Ids(ids) => KnownExperts::Ids(ids),
            TokenExperts::OfDrawn(table) => KnownExperts::OfDrawn(*table),
        }
    }

    /// Where the CPU computes with them, or an error.
    fn for_host(&self) -> Result<&[ExpertId]> {
        match self {
            TokenExperts::Ids(ids) => Ok(ids),
            TokenExperts::OfDrawn(_) => {
                Err(ModelError::Request("only the device knows the token that decides on experts".into()))
            }
        }
    }
}

/// An MoE part, and its rows on the device.
struct MoeRows<'a> {
    moe: &'a Moe,
    /// Its experts, if they are known.
    known: Option<&'a TokenExperts>,
    /// What the part reads, behind the norm.
    input: DeviceRows,
    /// What its experts read.
    of_experts: DeviceRows,
    /// The router logits, if they are known from before attention.
    early: Option<DeviceRows>,
    /// What the part reads, without the norm.
    stream: DeviceRows,
    /// The residual stream, or streams.
    residual: DeviceRows,
    /// The residual stream, if outputs are to be added to it.
    onto: Option<DeviceRows>,
}

/// What the router of the next layer needs, of what is on the device.
enum Hint<'a> {
    /// Its logits.
    Logits(&'a Moe, DeviceRows),
    /// The residual stream, from which the CPU computes them.
    Residual(DeviceRows),
}

impl<'a> DeviceLayer<'a> {
    /// The layer on the device of its model; `None` if a part of it is computed on the CPU only.
    pub fn of(layer: &'a Layer, others: OtherLayers<'a>, stack: &'a Stack) -> Option<Self> {
        let ops = stack.head.compute().device_ops.as_deref()?;
        let mixer = match &layer.mixer {
            Some(branch) => Some(DeviceMixer::of(branch)?),
            None => None,
        };
        let ffn = match &layer.ffn {
            Some(branch) => Some(DeviceFfn::of(branch)?),
            None => None,
        };
        let cross = match others.cross {
            Some(cross) => Some(DeviceCross::of(cross)?),
            None => None,
        };
        // A factor on outputs is a part of the addition.
        let has_connection = mixer.as_ref().is_some_and(|mixer| mixer.connection.is_some())
            || ffn.as_ref().is_some_and(|ffn| ffn.connection.is_some());
        // Attention over an encoder's output is between a mixer and a feed-forward part with one residual stream.
        let has_place = cross.is_none() || (mixer.is_some() && !has_connection);
        if (has_connection && stack.factors.residual != 1.0) || !has_place {
            return None;
        }
        Some(DeviceLayer { ops, mixer, cross, ffn, factor: stack.factors.residual as f32, scale: layer.scale as f32 })
    }

    /// The output of the layer for its input `x`, which the device may still be computing when this returns.
    pub fn forward(
        &self,
        x: &Hidden,
        others: OtherLayers,
        layer: &Layer,
        kv: &mut LayerStates,
        running: &mut Running,
    ) -> Result<Hidden> {
        let known = self.known_experts(layer, running)?;
        // A wait has the same effect.
        if self.mixer.as_ref().is_some_and(|mixer| !mixer.waits(kv)) {
            self.ops.begin_layer();
        }
        let (x, rows) = match &self.mixer {
            Some(mixer) => self.mix(mixer, x, kv, running.pass)?,
            // The residual stream is of the layer before, and has to outlive a wait for the router.
            None => {
                let x = x.on_device(self.ops)?;
                (x, self.read(x)?)
            }
        };
        let FfnRows { residual, stream, input, mix } = rows;
        let early = match layer.moe().filter(|moe| moe.early) {
            Some(moe) => moe.begin_router([x; 2], None, self.ops)?.map(|router| router.logits),
            None => None,
        };
        let Some(ffn) = &self.ffn else {
            running.clock.lap(Phase::Mixing, running.tap);
            return self.scaled(residual).map(Hidden::Device);
        };
        // Experts are added to the residual stream at once where nothing comes between.
        let onto = Some(residual).filter(|_| ffn.after.is_none() && self.factor == 1.0 && ffn.connection.is_none());
        let (y, is_whole) = match ffn.part {
            Ffn::Dense(mlp) => (mlp.begin(input, self.ops)?, false),
            Ffn::Moe(moe) => {
                let of_experts = moe.begin_input(input, self.ops)?;
                let of_moe = MoeRows { moe, known: known.as_ref(), input, of_experts, early, stream, residual, onto };
                (self.experts(&of_moe, others, running)?, onto.is_some())
            }
        };
        let x = match (is_whole, ffn.connection.zip(mix)) {
            (true, _) => y,
            (false, Some((connection, mix))) => {
                connection.begin_write(residual, mix, ffn.after.begin(y, self.ops)?, self.ops)?
            }
            (false, None) => self.ops.add(residual, ffn.after.begin(y, self.ops)?, self.factor)?,
        };
        running.clock.lap(Phase::Experts, running.tap);
        self.scaled(x).map(Hidden::Device)
    }

    /// The experts that the tokens decide on, if they do.
    fn known_experts(&self, layer: &Layer, running: &mut Running) -> Result<Option<TokenExperts>> {
        let Some((moe, by_token)) = layer.moe().and_then(|moe| Some((moe, moe.by_token.as_ref()?))) else {
            return Ok(None);
        };
        if running.pass.drawn {
            return Ok(Some(TokenExperts::OfDrawn(by_token.on_device(self.ops)?)));
        }
        let ids = by_token.of(&running.pass.tokens);
        running.experts.will_use(moe.layer, &moe.gate, &ids);
        Ok(Some(TokenExperts::Ids(ids)))
    }

    /// The output of the layer.
    fn scaled(&self, x: DeviceRows) -> Result<DeviceRows> {
        if self.scale == 1.0 { Ok(x) } else { self.ops.scale(x, self.scale) }
    }

    /// What the feed-forward part reads, if there is one.
    fn read(&self, residual: DeviceRows) -> Result<FfnRows> {
        match &self.ffn {
            Some(ffn) => ffn.read(residual, self.ops),
            None => Ok(FfnRows { residual, stream: residual, input: residual, mix: None }),
        }
    }

    /// The residual stream before the mixer, and what the feed-forward part reads behind it.
    fn mix(
        &self,
        mixer: &DeviceMixer,
        x: &Hidden,
        kv: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<(DeviceRows, FfnRows)> {
        let place = kv.place();
        // What several streams are read by is on the device, also where the mixer is not.
        let read = match mixer.connection {
            Some(connection) => {
                let x = x.on_device(self.ops)?;
                let [stream, mix] = connection.begin_read(x, self.ops)?;
                Some([x, stream, mix])
            }
            None => None,
        };
        let (x, mixed, mix) = match (mixer.chained_input(place), read) {
            (Some((part, norm)), read) => {
                let (x, stream, mix) = match read {
                    Some([x, stream, mix]) => (x, stream, Some(mix)),
                    None => {
                        let x = x.on_device(self.ops)?;
                        (x, x, None)
                    }
                };
                let input = Hidden::Device(norm.begin(stream, self.ops)?);
                (x, part.begin(&input, kv, pass, self.ops)?, mix)
            }
            (None, None) => {
                let x = x.on_host(Some(self.ops))?;
                let mixed = self.mix_on_host(mixer, &x, kv, pass)?;
                // Rows on the device may not outlive a wait of the mixer.
                (Hidden::Host(x).on_device(self.ops)?, mixed, None)
            }
            (None, Some(read)) => {
                let [x, stream, mix] = receive(self.ops, &read)?.try_into().expect("there are three results");
                let mixed = self.mix_on_host(mixer, &stream, kv, pass)?;
                let [x, mix] = [x, mix].map(|rows| Hidden::Host(rows).on_device(self.ops));
                (x?, mixed, Some(mix?))
            }
        };
        let mixed = mixer.after.begin(mixed, self.ops)?;
        let rows = match (mixer.connection.zip(mix), &self.cross) {
            (Some((connection, mix)), _) => self.read(connection.begin_write(x, mix, mixed, self.ops)?)?,
            (None, Some(cross)) => {
                let [residual, input] = cross.norm.begin_sum(x, mixed, self.factor, self.ops)?;
                let mixed = cross.attention.begin_over_encoded(input, kv, pass, self.ops)?;
                self.read_sum(residual, mixed, 1.0)?
            }
            (None, None) => self.read_sum(x, mixed, self.factor)?,
        };
        Ok((x, rows))
    }

    /// What the feed-forward part reads of a sum of one residual stream and what is added to it.
    fn read_sum(&self, x: DeviceRows, mixed: DeviceRows, factor: f32) -> Result<FfnRows> {
        match &self.ffn {
            Some(ffn) if ffn.connection.is_none() => {
                let [residual, input] = ffn.norm.begin_sum(x, mixed, factor, self.ops)?;
                Ok(FfnRows { residual, stream: residual, input, mix: None })
            }
            _ => self.read(self.ops.add(x, mixed, factor)?),
        }
    }

    /// The output of a mixer whose input, or all of it, is computed on the CPU, on the device.
    fn mix_on_host(
        &self,
        mixer: &DeviceMixer,
        stream: &Tensor,
        kv: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<DeviceRows> {
        let input = Hidden::Host(mixer.norm.forward(stream)?);
        match mixer.chained(kv.place()) {
            Some(part) if part.input_place() == Place::Host => part.begin(&input, kv, pass, self.ops),
            Some(part) => part.begin(&Hidden::Device(input.on_device(self.ops)?), kv, pass, self.ops),
            None => Hidden::Host(mixer.part.forward(&input.on_host(None)?, kv, pass)?).on_device(self.ops),
        }
    }

    /// The outputs of the experts. Waits for the router, unless the device chooses them.
    fn experts(&self, rows: &MoeRows, others: OtherLayers, running: &mut Running) -> Result<DeviceRows> {
        let MoeRows { moe, known, input, of_experts, early, stream, residual, onto } = *rows;
        let Running { pass, experts, tap, clock } = running;
        let for_device = known.map(TokenExperts::for_device);
        let router = match early {
            Some(logits) => Some(RouterRows::of(logits)),
            None => moe.begin_router([stream, input], pass.router_state.get(), self.ops)?,
        };
        let (logits, state) = (router.map(|router| router.logits), router.and_then(|router| router.state));
        let with = |always| MoeOnDevice { x: input, of_experts, always, residual: onto, ops: self.ops };
        // Hidden states are waited for between two layers, which rows that are handed on do not outlive.
        let outlives = state.is_none() || !tap.wants_hidden();
        if let Some(logits) = logits.filter(|_| moe.is_whole_on_devices() && outlives && !tap.wants_routing())
            && experts.chooses_on_device(moe.layer, &moe.gate, pass.tokens())
        {
            clock.lap(Phase::Mixing, *tap);
            if let Some(state) = state {
                pass.router_state.set(Hidden::Device(state));
            }
            let always = moe.begin_always(stream, input, self.ops)?;
            return moe.begin_chosen(with(always), ChosenBy { logits, known: for_device }, *experts);
        }
        let known = known.map(TokenExperts::for_host).transpose()?;
        let hint = match experts.wants_hint(HintSource::LayerBefore, pass.tokens()) {
            true => self.hint(residual, others.following)?,
            false => None,
        };
        let hinted = hint.as_ref().map(|hint| match hint {
            Hint::Logits(_, rows) | Hint::Residual(rows) => *rows,
        });
        let wanted: Vec<DeviceRows> = [Some(of_experts), logits, state, hinted].into_iter().flatten().collect();
        self.ops.begin_receive(&wanted)?;
        // What does not depend on the host's choice.
        let always = moe.begin_always(stream, input, self.ops)?;
        if let Some(logits) = logits {
            moe.begin_hits(of_experts, ChosenBy { logits, known: for_device }, *experts)?;
        }
        let mut got = receive(self.ops, &wanted)?.into_iter();
        let x = got.next().expect("the first of the wanted rows");
        let early = logits.and_then(|_| got.next());
        if let Some(state) = state.and_then(|_| got.next()) {
            // Rows on the device may not outlive the next wait.
            pass.router_state.set(Hidden::Host(state));
        }
        clock.lap(Phase::Mixing, *tap);
        match (hint, got.next()) {
            (Some(Hint::Logits(next, _)), Some(logits)) => with_f32(&logits, |logits| {
                experts.hint(HintSource::LayerBefore, next.layer, &next.gate, logits);
            })?,
            (Some(Hint::Residual(_)), Some(residual)) => hint_next_layer(others.following, &residual, *experts)?,
            _ => {}
        }
        let of_moe = MoeInput { residual: &x, x: &x, early, known, state: &pass.router_state };
        moe.begin(of_moe, with(always), &pass.origins, *experts, *tap, clock)
    }

    /// Begins what the router of the next MoE layer would choose by if this layer's experts added nothing; `None` behind the last one.
    fn hint<'l>(&self, residual: DeviceRows, following: &'l [Layer]) -> Result<Option<Hint<'l>>> {
        let Some((ffn, moe)) = next_moe(following) else { return Ok(None) };
        let norm = ffn.norm.for_devices().filter(|_| moe.is_for_devices());
        let logits = match norm.zip(connection_of(ffn)) {
            Some((norm, connection)) => {
                let stream = match connection {
                    Some(connection) => connection.begin_read(residual, self.ops)?[0],
                    None => residual,
                };
                moe.begin_router([stream, norm.begin(stream, self.ops)?], None, self.ops)?.map(|router| router.logits)
            }
            None => None,
        };
        Ok(Some(logits.map_or(Hint::Residual(residual), |logits| Hint::Logits(moe, logits))))
    }
}

/// The activations `x` in main memory; on a device it waits for them.
pub(crate) fn on_host(x: &Hidden, stack: &Stack) -> Result<Tensor> {
    x.on_host(stack.head.compute().device_ops.as_deref())
}
