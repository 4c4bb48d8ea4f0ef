//! What follows attention on the CPU in plain loops: an MLP, or a mixture of experts.

use crate::executor::LoadError;
use crate::executor::reference_executor::{Matrix, matvec, optional, required};
use crate::executor::reference_lora::adapted;
use crate::kernels::{combine, mlp, route};
use crate::model::Model;
use crate::model::experts::{ExpertPart, MixPart};
use crate::model::lora::Adapter;
use crate::model::spec::{Activation, ModelSpec, WeightRole};

/// One layer's.
pub(super) enum Ffn {
    Dense(Box<Mlp>),
    Experts(Box<Experts>),
}

/// down(act(gate x) * up x); without a gate down(act(up x)).
pub(super) struct Mlp {
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
    gate_bias: Option<Matrix>,
    up_bias: Option<Matrix>,
    down_bias: Option<Matrix>,
}

pub(super) struct Experts {
    router: Matrix,
    router_bias: Option<Matrix>,
    selection_bias: Option<Matrix>,
    experts: Vec<Mlp>,
    shared: Option<Mlp>,
    shared_mix: Option<Matrix>,
}

impl Mlp {
    fn projections(&mut self) -> impl Iterator<Item = &mut Matrix> {
        self.gate.iter_mut().chain([&mut self.up, &mut self.down])
    }
}

impl Ffn {
    pub(super) fn load(model: &Model, l: u32) -> Result<Ffn, LoadError> {
        let Some(spec) = model.spec().experts_of(l) else {
            return Ok(Ffn::Dense(Box::new(Mlp {
                gate: optional(model, WeightRole::Gate(l))?,
                up: required(model, WeightRole::Up(l))?,
                down: required(model, WeightRole::Down(l))?,
                gate_bias: optional(model, WeightRole::GateBias(l))?,
                up_bias: optional(model, WeightRole::UpBias(l))?,
                down_bias: optional(model, WeightRole::DownBias(l))?,
            })));
        };
        let mix = |part| WeightRole::Mix(l, part);
        let shared = match optional(model, mix(MixPart::SharedUp))? {
            None => None,
            Some(up) => Some(Mlp {
                gate: optional(model, mix(MixPart::SharedGate))?,
                up,
                down: required(model, mix(MixPart::SharedDown))?,
                gate_bias: None,
                up_bias: None,
                down_bias: None,
            }),
        };
        Ok(Ffn::Experts(Box::new(Experts {
            router: required(model, mix(MixPart::Router))?,
            router_bias: optional(model, mix(MixPart::RouterBias))?,
            selection_bias: optional(model, mix(MixPart::SelectionBias))?,
            experts: (0..spec.num_experts).map(|e| expert(model, l, e)).collect::<Result<_, _>>()?,
            shared,
            shared_mix: optional(model, mix(MixPart::SharedMix))?,
        })))
    }

    pub(super) fn projections(&mut self) -> Box<dyn Iterator<Item = &mut Matrix> + '_> {
        match self {
            Ffn::Dense(mlp) => Box::new(mlp.projections()),
            Ffn::Experts(mix) => {
                let mix = &mut **mix;
                Box::new(mix.experts.iter_mut().chain(&mut mix.shared).flat_map(Mlp::projections))
            }
        }
    }

    /// An adapter changes dense MLPs alone.
    pub(super) fn apply(&self, spec: &ModelSpec, x: &[f32], adapter: Option<&Adapter>) -> Vec<f32> {
        match self {
            Ffn::Dense(mlp) => mlp.apply(spec.block.activation, x, adapter),
            Ffn::Experts(experts) => experts.apply(spec, x),
        }
    }
}

fn expert(model: &Model, l: u32, e: u32) -> Result<Mlp, LoadError> {
    let role = |part| WeightRole::Expert(l, e, part);
    Ok(Mlp {
        gate: optional(model, role(ExpertPart::Gate))?,
        up: required(model, role(ExpertPart::Up))?,
        down: required(model, role(ExpertPart::Down))?,
        gate_bias: optional(model, role(ExpertPart::GateBias))?,
        up_bias: optional(model, role(ExpertPart::UpBias))?,
        down_bias: optional(model, role(ExpertPart::DownBias))?,
    })
}

impl Mlp {
    fn apply(&self, activation: Activation, x: &[f32], adapter: Option<&Adapter>) -> Vec<f32> {
        let up = adapted(&self.up, x, self.up_bias.as_ref(), adapter);
        let act: Vec<f32> = match &self.gate {
            Some(gate) => {
                let gate = adapted(gate, x, self.gate_bias.as_ref(), adapter);
                gate.iter().zip(&up).map(|(&g, &u)| mlp::gated_reference(activation, g, u)).collect()
            }
            None => up.iter().map(|&u| mlp::reference(activation, u)).collect(),
        };
        adapted(&self.down, &act, self.down_bias.as_ref(), adapter)
    }
}

impl Experts {
    fn apply(&self, spec: &ModelSpec, x: &[f32]) -> Vec<f32> {
        let Some(experts) = &spec.block.experts else { return vec![0.0; x.len()] };
        let activation = spec.block.activation;
        let logits = matvec(&self.router, x, self.router_bias.as_ref());
        let bias = self.selection_bias.as_ref().map(|bias| bias.data.as_slice());
        let chosen = route::reference(experts, &logits, bias);
        let parts: Vec<f32> =
            chosen.iter().flat_map(|&(e, _)| self.experts[e as usize].apply(activation, x, None)).collect();
        let shares: Vec<f32> = chosen.iter().map(|c| c.1).collect();
        let shared = self.shared.as_ref().map(|shared| shared.apply(activation, x, None));
        let mix = match &self.shared_mix {
            Some(mix) => 1.0 / (1.0 + f64::from(-matvec(mix, x, None)[0]).exp()),
            None => 1.0,
        };
        // The residual's scale comes later.
        combine::reference(&shares, &parts, shared.as_deref().map(|shared| (shared, mix)), 1.0)
    }
}
