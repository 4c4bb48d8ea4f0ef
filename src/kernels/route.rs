//! `route`: from router logits to each token's experts and their shares (Shazeer et al., 2017, arXiv 1701.06538; groups and
//! sigmoid scores: DeepSeek, 2024, arXiv 2405.04434 and 2412.19437).
//!
//! Guarantees: a token's experts depend on its own logits alone; of equal scores the lower index wins.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};
use crate::model::experts::{ExpertSpec, Routing, Scoring};

/// Mirrors `Params` of route.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_experts: u32,
    pub num_active: u32,
    pub stride: u32,
    pub num_groups: u32,
    pub num_active_groups: u32,
    pub scale: f32,
}

/// The defines of one variant.
pub fn defines(class: Class, routing: &Routing) -> Defines {
    let has_groups = routing.num_groups > 1;
    let flags = [
        ("SOFTMAX", routing.scoring == Scoring::Softmax),
        ("SIGMOID", routing.scoring == Scoring::Sigmoid),
        ("SELECTION_BIAS", routing.has_selection_bias),
        ("GROUPS", has_groups),
        ("BY_TWO", has_groups && routing.group_by_two),
        ("NORMALISED", routing.is_normalised),
    ];
    flags.iter().filter(|f| f.1).fold(class.defines(), |defines, flag| defines.flag(flag.0))
}

/// What [`Route::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// f32 `[num_tokens, stride]`
    pub logits: &'a BufferSlice,
    /// f32 `[num_experts]`, given exactly when the routing has one.
    pub selection_bias: Option<&'a BufferSlice>,
    /// u32 `[num_tokens, num_active]`, written.
    pub chosen: &'a BufferSlice,
    /// f32 `[num_tokens, num_active]`, written.
    pub shares: &'a BufferSlice,
}

/// The kernel with one layer's buffers.
#[derive(Clone, Debug)]
pub struct Route {
    bound: Arc<Bound>,
}

impl Route {
    /// `stride` is the number of elements from row to row of the logits.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        spec: &ExpertSpec,
        stride: u32,
        buffers: &Buffers<'_>,
    ) -> Result<Route, GpuError> {
        let Routing { num_groups, num_active_groups, scale, .. } = spec.routing;
        let (num_experts, num_active) = (spec.num_experts, spec.num_active);
        let params = Params { num_experts, num_active, stride, num_groups, num_active_groups, scale };
        let uniform = ctx.params.push(ctx.gpu, &params)?;
        let kernel = ctx.gpu.kernel("route", &defines(ctx.class, &spec.routing))?;
        let mut bindings = vec![
            ("step_meta", ctx.step_meta),
            ("logits", buffers.logits),
            ("chosen", buffers.chosen),
            ("shares", buffers.shares),
            ("params", &uniform),
        ];
        bindings.extend(buffers.selection_bias.map(|bias| ("selection_bias", bias)));
        Ok(Route { bound: ctx.gpu.bind(&kernel, &bindings)? })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("route", &self.bound, num_tokens);
    }
}

/// One token's experts with their shares, in f64. `logits` has one for each expert.
pub fn reference(spec: &ExpertSpec, logits: &[f32], selection_bias: Option<&[f32]>) -> Vec<(u32, f32)> {
    let routing = spec.routing;
    let sigmoid = |x: f32| 1.0 / (1.0 + f64::from(-x).exp());
    let scores: Vec<f64> = match routing.scoring {
        Scoring::Softmax => logits.iter().map(|&l| f64::from(l)).collect(),
        Scoring::Sigmoid => {
            let bias = |i: usize| selection_bias.map_or(0.0, |bias| f64::from(bias[i]));
            logits.iter().enumerate().map(|(i, &l)| sigmoid(l) + bias(i)).collect()
        }
    };
    let size = (spec.num_experts / routing.num_groups) as usize;
    let group_scores: Vec<f64> = scores
        .chunks(size)
        .map(|group| {
            let best = best(group, |_| true, 2);
            best.iter().take(if routing.group_by_two { 2 } else { 1 }).map(|&i| group[i]).sum()
        })
        .collect();
    let groups = best(&group_scores, |_| true, routing.num_active_groups as usize);
    let chosen = best(&scores, |i| groups.contains(&(i / size)), spec.num_active as usize);
    let share = |i: usize| match routing.scoring {
        Scoring::Softmax => {
            let total: f64 = logits.iter().map(|&l| f64::from(l - logits[i]).exp()).sum();
            1.0 / total
        }
        Scoring::Sigmoid => sigmoid(logits[i]),
    };
    let sum: f64 = if routing.is_normalised { chosen.iter().map(|&i| share(i)).sum() } else { 1.0 };
    chosen.iter().map(|&i| (i as u32, (share(i) / sum * f64::from(routing.scale)) as f32)).collect()
}

/// Indices of the `n` best of those that are open, best first, the lower of equal ones first.
fn best(scores: &[f64], is_open: impl Fn(usize) -> bool, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|&i| is_open(i)).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}
