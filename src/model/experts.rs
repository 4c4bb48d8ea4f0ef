//! Mixtures of experts (Shazeer et al., 2017, arXiv 1701.06538) as a spec: how tokens find their experts, and the roles of the
//! experts' tensors. Checked by [`ExpertSpec::validate`]; what the parts compute is said in `kernels/route`.

use super::spec::ModelSpec;
use serde::{Deserialize, Serialize};

/// What stands in place of a layer's MLP. All experts are gated, with the activation of the block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertSpec {
    pub num_experts: u32,
    /// Experts that a token passes.
    pub num_active: u32,
    /// Of one expert.
    pub intermediate_size: u32,
    pub routing: Routing,
    /// Intermediate size of the expert that every token passes; 0 is none.
    pub shared_size: u32,
    /// The shared expert is multiplied by the sigmoid of a product of its own (qwen2_moe).
    pub has_shared_gate: bool,
    /// Layers with a plain MLP.
    pub dense_layers: Vec<u32>,
    /// The router has a bias (gpt_oss).
    pub router_bias: bool,
    /// The experts' products have biases (gpt_oss).
    pub expert_bias: bool,
}

/// From router logits to experts and their shares.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Routing {
    pub scoring: Scoring,
    /// The shares of a token's experts add up to 1 (before `scale`).
    pub is_normalised: bool,
    /// Multiplies the shares.
    pub scale: f32,
    /// A vector is added to the scores for the choice alone (deepseek_v3).
    pub has_selection_bias: bool,
    /// Experts stand in so many groups, of which the best few are looked at (deepseek); 1 is no grouping.
    pub num_groups: u32,
    pub num_active_groups: u32,
    /// A group's score: the sum of its two best (deepseek_v3), else its best (deepseek_v2).
    pub group_by_two: bool,
}

impl Routing {
    /// Softmax over all experts, no groups.
    pub const SOFTMAX: Routing = Routing {
        scoring: Scoring::Softmax,
        is_normalised: true,
        scale: 1.0,
        has_selection_bias: false,
        num_groups: 1,
        num_active_groups: 1,
        group_by_two: false,
    };
}

/// What makes a logit a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    Sigmoid,
}

/// Tensors of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExpertPart {
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
}

/// Tensors beside the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MixPart {
    Router,
    RouterBias,
    /// Added to the scores for the choice alone.
    SelectionBias,
    SharedGate,
    SharedUp,
    SharedDown,
    /// A row whose product's sigmoid multiplies the shared expert.
    SharedMix,
}

impl ExpertPart {
    pub const ALL: [ExpertPart; 6] = [
        ExpertPart::Gate,
        ExpertPart::Up,
        ExpertPart::Down,
        ExpertPart::GateBias,
        ExpertPart::UpBias,
        ExpertPart::DownBias,
    ];

    pub fn is_vector(self) -> bool {
        !matches!(self, ExpertPart::Gate | ExpertPart::Up | ExpertPart::Down)
    }

    /// As [`super::spec::WeightRole::shape`].
    pub(super) fn shape(self, spec: &ModelSpec, experts: &ExpertSpec) -> (bool, Vec<u64>) {
        let (hidden, inner) = (u64::from(spec.hidden_size), u64::from(experts.intermediate_size));
        match self {
            ExpertPart::Gate | ExpertPart::Up => (true, vec![inner, hidden]),
            ExpertPart::Down => (true, vec![hidden, inner]),
            ExpertPart::GateBias | ExpertPart::UpBias => (experts.expert_bias, vec![inner]),
            ExpertPart::DownBias => (experts.expert_bias, vec![hidden]),
        }
    }
}

impl MixPart {
    pub const ALL: [MixPart; 7] = [
        MixPart::Router,
        MixPart::RouterBias,
        MixPart::SelectionBias,
        MixPart::SharedGate,
        MixPart::SharedUp,
        MixPart::SharedDown,
        MixPart::SharedMix,
    ];

    pub fn is_vector(self) -> bool {
        matches!(self, MixPart::RouterBias | MixPart::SelectionBias)
    }

    /// As [`super::spec::WeightRole::shape`].
    pub(super) fn shape(self, spec: &ModelSpec, experts: &ExpertSpec) -> (bool, Vec<u64>) {
        let (hidden, shared) = (u64::from(spec.hidden_size), u64::from(experts.shared_size));
        let num_experts = u64::from(experts.num_experts);
        match self {
            MixPart::Router => (true, vec![num_experts, hidden]),
            MixPart::RouterBias => (experts.router_bias, vec![num_experts]),
            MixPart::SelectionBias => (experts.routing.has_selection_bias, vec![num_experts]),
            MixPart::SharedGate | MixPart::SharedUp => (shared > 0, vec![shared, hidden]),
            MixPart::SharedDown => (shared > 0, vec![hidden, shared]),
            MixPart::SharedMix => (shared > 0 && experts.has_shared_gate, vec![1, hidden]),
        }
    }
}

/// More experts than any known model has; the router's tables are sized by it.
pub const MAX_EXPERTS: u32 = 512;
/// More experts per token than any known model has.
pub const MAX_ACTIVE: u32 = 32;

impl ExpertSpec {
    /// Checks ranges; the message names the field and the value.
    pub(super) fn validate(&self) -> Result<(), String> {
        let ranges = [
            ("the number of experts", self.num_experts, MAX_EXPERTS),
            ("the number of experts per token", self.num_active, MAX_ACTIVE.min(self.num_experts)),
            ("the experts' intermediate size", self.intermediate_size, 1 << 20),
            ("the number of expert groups", self.routing.num_groups, self.num_experts),
            ("the number of expert groups per token", self.routing.num_active_groups, self.routing.num_groups),
        ];
        for (what, value, max) in ranges {
            if value == 0 || value > max {
                return Err(format!("{what} must be from 1 to {max}, not {value}"));
            }
        }
        if self.shared_size > 1 << 20 {
            return Err(format!("the shared expert's intermediate size must be at most {}", 1 << 20));
        }
        let Routing { num_groups, num_active_groups, scale, .. } = self.routing;
        if !self.num_experts.is_multiple_of(num_groups) {
            return Err(format!("{} experts cannot stand in {num_groups} groups evenly", self.num_experts));
        }
        let reachable = self.num_experts / num_groups * num_active_groups;
        if self.num_active > reachable {
            return Err(format!("{} experts per token are more than {num_active_groups} groups have", self.num_active));
        }
        if !scale.is_finite() || scale == 0.0 {
            return Err(format!("the scale of the experts' shares must be a number other than 0, not {scale}"));
        }
        Ok(())
    }
}
