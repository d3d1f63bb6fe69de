//! The forward pass of one layer: token mixing, then a feed-forward part, each added to the residual stream.
//!
//! ```text
//! x = x + after(mixer(norm(x)))
//! x = x + after(ffn(norm(x)))
//! ```
//!
//! The host waits once on a device, for the router: what follows the experts is begun with them, up to the router of
//! the next layer. Where the device has all experts of a layer it chooses them too, and the host does not wait.

use larder_core::ExpertId;

use crate::error::{ModelError, Result};
use crate::experts::{HashRouting, HintSource};
use crate::nn::{Moe, MoeInput, MoeOutput, RouterRows, Running};
use crate::ops::{Ops, Rows};
use crate::stack::{Branch, CrossAttention, Ffn, Layer};
use crate::step::LayerStates;
use crate::tap::Phase;

/// What the computation of a layer looks at of others.
#[derive(Clone, Copy, Default)]
pub(crate) struct OtherLayers<'r> {
    /// The attention over the output of an encoder.
    pub cross: Option<&'r CrossAttention>,
    /// The layers after it.
    pub following: &'r [Layer],
}

/// The rows of a part of a layer.
#[derive(Clone, Copy)]
struct PartRows {
    /// The residual stream, or streams.
    residual: Rows,
    /// What the part reads of them.
    stream: Rows,
    /// The same after the norm.
    input: Rows,
    /// What its connection needs to write the output.
    mix: Option<Rows>,
}

impl PartRows {
    /// Of no part.
    fn of(x: Rows) -> Self {
        PartRows { residual: x, stream: x, input: x, mix: None }
    }

    fn live(self) -> impl Iterator<Item = Rows> {
        [self.residual, self.stream, self.input].into_iter().chain(self.mix)
    }
}

/// The experts of a layer that the tokens decide on.
enum TokenExperts {
    /// `[tokens, k]`
    Ids(Vec<ExpertId>),
    /// Experts of a token that only the device knows: the id of their table there.
    OfDrawn(usize),
}

impl TokenExperts {
    fn for_device(&self) -> HashRouting<'_> {
        match self {
            TokenExperts::Ids(ids) => HashRouting::Ids(ids),
            TokenExperts::OfDrawn(table) => HashRouting::OfDrawn(*table),
        }
    }

    /// Where the host computes with them, or an error.
    fn for_host(&self) -> Result<&[ExpertId]> {
        match self {
            TokenExperts::Ids(ids) => Ok(ids),
            TokenExperts::OfDrawn(_) => {
                Err(ModelError::Request("only the device knows the token that decides on experts".into()))
            }
        }
    }
}

impl<Part> Branch<Part> {
    /// What the part reads of the residual stream, or streams.
    fn read(&self, residual: Rows, ops: &dyn Ops) -> Result<PartRows> {
        let (stream, mix) = match &self.connection {
            Some(connection) => connection.read(residual, ops).map(|[stream, mix]| (stream, Some(mix)))?,
            None => (residual, None),
        };
        Ok(PartRows { residual, stream, input: self.norm.forward(stream, ops)?, mix })
    }

    /// The output `y` of the part, after its norm.
    fn after(&self, y: Rows, ops: &dyn Ops) -> Result<Rows> {
        self.after.as_ref().map_or(Ok(y), |norm| norm.forward(y, ops))
    }

    /// The residual stream, or streams, with the output `y` of the part.
    fn write(&self, rows: &PartRows, y: Rows, factor: f32, ops: &dyn Ops) -> Result<Rows> {
        let y = self.after(y, ops)?;
        match self.connection.as_deref().zip(rows.mix) {
            Some((connection, mix)) => {
                let y = if factor == 1.0 { y } else { ops.scale(y, factor)? };
                connection.write(rows.residual, mix, y, ops)
            }
            None => ops.add(rows.residual, y, factor),
        }
    }
}

impl Layer {
    /// The output of the layer for its input `x [tokens, hidden]`, or `[tokens, streams · hidden]`.
    pub(crate) fn forward(
        &self,
        x: Rows,
        others: OtherLayers,
        kv: &mut LayerStates,
        running: &mut Running,
    ) -> Result<Rows> {
        let ops = running.ops;
        ops.begin_layer();
        running.keep_only([x]);
        let early = self.early_router(x, running)?;
        let known = self.known_experts(running)?;
        let rows = self.mixed(x, others, kv, running)?;
        let logits = early.map(|early| early.logits);
        running.keep_only(rows.live().chain(logits));
        let x = match &self.ffn {
            None => {
                running.clock.lap(Phase::Mixing, running.tap);
                rows.residual
            }
            Some(ffn) => {
                let y = match &ffn.part {
                    Ffn::Dense(mlp) => {
                        running.clock.lap(Phase::Mixing, running.tap);
                        MoeOutput { rows: mlp.forward(rows.input, ops)?, is_added: false }
                    }
                    Ffn::Moe(moe) => {
                        // Experts are added to the residual stream at once where nothing comes between.
                        let is_plain = ffn.after.is_none() && running.factor == 1.0 && ffn.connection.is_none();
                        let onto = is_plain.then_some(rows.residual);
                        experts(moe, &rows, (early, known, onto), others.following, running)?
                    }
                };
                if y.is_added { y.rows } else { ffn.write(&rows, y.rows, running.factor, ops)? }
            }
        };
        let x = if self.scale == 1.0 { x } else { ops.scale(x, self.scale as f32)? };
        running.clock.lap(Phase::Experts, running.tap);
        Ok(x)
    }

    /// What a router before the mixer finds.
    fn early_router(&self, x: Rows, running: &mut Running) -> Result<Option<RouterRows>> {
        let Some(moe) = self.moe().filter(|moe| moe.early) else { return Ok(None) };
        let router = moe.route([x; 2], None, running.ops)?;
        if running.experts.wants_hint(HintSource::Router, x.rows) {
            let logits = running.ops.download(&[router.logits])?;
            running.experts.hint(HintSource::Router, moe.layer, &moe.gate, &logits[0]);
        }
        Ok(Some(router))
    }

    /// The experts that the tokens decide on, if they do.
    fn known_experts(&self, running: &mut Running) -> Result<Option<TokenExperts>> {
        let Some((moe, by_token)) = self.moe().and_then(|moe| Some((moe, moe.by_token.as_ref()?))) else {
            return Ok(None);
        };
        if running.pass.drawn {
            return Ok(Some(TokenExperts::OfDrawn(by_token.id(running.ops)?)));
        }
        let ids = by_token.of(&running.pass.tokens);
        running.experts.will_use(moe.layer, &moe.gate, &ids);
        Ok(Some(TokenExperts::Ids(ids)))
    }

    /// What the feed-forward part reads after the mixer, and after attention over the output of an encoder.
    fn mixed(&self, x: Rows, others: OtherLayers, kv: &mut LayerStates, running: &Running) -> Result<PartRows> {
        let (ops, factor) = (running.ops, running.factor);
        let Some(mixer) = &self.mixer else { return self.read(x, ops) };
        let rows = mixer.read(x, ops)?;
        let y = mixer.part.forward(rows.input, kv, running.pass, ops)?;
        if rows.mix.is_some() {
            return self.read(self.over_encoded(mixer.write(&rows, y, factor, ops)?, others, kv, running)?, ops);
        }
        let y = mixer.after(y, ops)?;
        match (others.cross, &self.ffn) {
            (None, Some(ffn)) if ffn.connection.is_none() => {
                let [residual, input] = ffn.norm.add_forward(x, y, factor, ops)?;
                Ok(PartRows { residual, stream: residual, input, mix: None })
            }
            _ => self.read(self.over_encoded(ops.add(x, y, factor)?, others, kv, running)?, ops),
        }
    }

    /// The residual stream with attention over the output of an encoder, if there is one.
    fn over_encoded(&self, x: Rows, others: OtherLayers, kv: &LayerStates, running: &Running) -> Result<Rows> {
        let Some(CrossAttention { norm, attention }) = others.cross else { return Ok(x) };
        let y = attention.over_encoded(norm.forward(x, running.ops)?, kv, running.pass, running.ops)?;
        running.ops.add(x, y, 1.0)
    }

    /// What the feed-forward part reads, if there is one.
    fn read(&self, x: Rows, ops: &dyn Ops) -> Result<PartRows> {
        self.ffn.as_ref().map_or(Ok(PartRows::of(x)), |ffn| ffn.read(x, ops))
    }
}

/// The output of the experts. Waits for the router, unless a device chooses them.
fn experts(
    moe: &Moe,
    rows: &PartRows,
    (early, known, onto): (Option<RouterRows>, Option<TokenExperts>, Option<Rows>),
    following: &[Layer],
    running: &mut Running,
) -> Result<MoeOutput> {
    let (ops, x) = (running.ops, rows.input);
    running.clock.lap(Phase::Mixing, running.tap);
    let of_experts = moe.expert_input(x, ops)?;
    let router = match early {
        Some(early) => early,
        None => moe.route([rows.stream, x], running.pass.router_state.get(), ops)?,
    };
    if let Some(state) = router.state {
        running.pass.router_state.set(state);
    }
    let input = MoeInput { stream: rows.stream, x, of_experts, router, onto };
    let may_choose = moe.may_choose_on_device() && !running.tap.wants_routing();
    let device = running.experts.on_device().filter(|_| may_choose);
    if device.is_some_and(|device| device.chooses(moe.layer, &moe.gate, x.rows)) {
        return moe.forward_chosen(&input, known.as_ref().map(TokenExperts::for_device), running);
    }
    let known = known.as_ref().map(TokenExperts::for_host).transpose()?;
    let next = next_moe(following).filter(|_| running.experts.wants_hint(HintSource::LayerBefore, x.rows));
    let next = next.map(|(ffn, next)| Ok::<_, ModelError>((next, hint(ffn, next, rows.residual, ops)?))).transpose()?;
    moe.forward(&input, known, next, running)
}

/// The next MoE layer, if a router chooses its experts by what it reads alone.
fn next_moe(following: &[Layer]) -> Option<(&Branch<Ffn>, &Moe)> {
    let next = following.iter().find_map(|layer| Some((layer.ffn.as_ref()?, layer.moe()?)));
    next.filter(|(_, moe)| moe.by_token.is_none() && !moe.router.may_skip())
}

/// What the router of the next MoE layer would choose by if this layer's experts added nothing to the residual stream.
fn hint(ffn: &Branch<Ffn>, moe: &Moe, residual: Rows, ops: &dyn Ops) -> Result<Rows> {
    let rows = ffn.read(residual, ops)?;
    Ok(moe.route([rows.stream, rows.input], None, ops)?.logits)
}
