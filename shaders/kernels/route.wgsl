// From router logits to each token's experts and their shares (mixtures of experts): the best num_active by score, the
// lower index where scores are equal.
// A score is the logit (SOFTMAX: the order is that of the probabilities) or its sigmoid plus a bias for the choice alone
// (SIGMOID, SELECTION_BIAS). With GROUPS only the best few groups of experts are looked at, by their best score or, with
// BY_TWO, by the sum of their two best. A share is the softmax over all experts or the sigmoid; NORMALISED ones add up to 1.
// Grid: a workgroup per token. Lane l takes experts l, l + SG, …
//
// Defines: SOFTMAX or SIGMOID; SELECTION_BIAS, GROUPS, BY_TWO, NORMALISED; SG, SUBGROUP.
#import grid
#import step

struct Params {
  num_experts: u32,
  num_active: u32,
  stride: u32, // elements from row to row of the logits
  num_groups: u32, // at most 32
  num_active_groups: u32,
  scale: f32, // multiplies the shares
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // [num_tokens, stride]
#ifdef SELECTION_BIAS
@group(0) @binding(2) var<storage, read> selection_bias: array<f32>; // [num_experts]
#endif
@group(0) @binding(3) var<storage, read_write> chosen: array<u32>; // [num_tokens, num_active]
@group(0) @binding(4) var<storage, read_write> shares: array<f32>; // [num_tokens, num_active]
@group(0) @binding(5) var<uniform> params: Params;

/// Below every score.
const LOWEST: f32 = -3e38;
const HIGHEST: f32 = 3e38;
const NOBODY: u32 = 0xffffffffu;

struct Best { value: f32, idx: u32 }

#ifndef SUBGROUP
var<workgroup> values: array<f32, ${SG}>;
var<workgroup> indices: array<u32, ${SG}>;
#endif

/// The best of all lanes; every lane must call it.
fn best_of_lanes(lane: u32, mine: Best) -> Best {
#ifdef SUBGROUP
  let value = subgroupMax(mine.value);
  return Best(value, subgroupMin(select(NOBODY, mine.idx, mine.value == value)));
#else
  workgroupBarrier();
  values[lane] = mine.value;
  indices[lane] = mine.idx;
  workgroupBarrier();
  var best = Best(values[0], indices[0]);
  for (var i = 1u; i < ${SG}u; i++) {
    let is_better = values[i] > best.value || (values[i] == best.value && indices[i] < best.idx);
    best.value = select(best.value, values[i], is_better);
    best.idx = select(best.idx, indices[i], is_better);
  }
  return best;
#endif
}

#ifdef SOFTMAX
#ifndef NORMALISED
/// Every lane must call it.
fn sum_of_lanes(lane: u32, value: f32) -> f32 {
#ifdef SUBGROUP
  return subgroupAdd(value);
#else
  workgroupBarrier();
  values[lane] = value;
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < ${SG}u; i++) {
    sum += values[i];
  }
  return sum;
#endif
}
#endif
#endif

#ifdef SIGMOID
fn sigmoid(x: f32) -> f32 {
  return 1.0 / (1.0 + exp(min(-x, 80.0)));
}
#endif

/// What experts are chosen by.
fn score(start: u32, expert: u32) -> f32 {
#ifdef SIGMOID
#ifdef SELECTION_BIAS
  return sigmoid(logits[start + expert]) + selection_bias[expert];
#else
  return sigmoid(logits[start + expert]);
#endif
#else
  return logits[start + expert];
#endif
}

/// True when a candidate comes after the last one that was taken.
fn comes_after(value: f32, idx: u32, last: Best) -> bool {
  return value < last.value || (value == last.value && idx > last.idx);
}

#ifdef GROUPS
/// The score of a group; every lane must call it.
fn group_score(lane: u32, start: u32, group: u32) -> f32 {
  let size = params.num_experts / params.num_groups;
  var first = Best(LOWEST, NOBODY);
  var second = LOWEST;
  for (var i = lane; i < size; i += ${SG}u) {
    let value = score(start, group * size + i);
    if value > first.value {
      second = first.value;
      first = Best(value, i);
    } else {
      second = max(second, value);
    }
  }
  let best = best_of_lanes(lane, first);
#ifdef BY_TWO
  let other = select(first.value, second, first.idx == best.idx);
  return best.value + best_of_lanes(lane, Best(other, lane)).value;
#else
  return best.value;
#endif
}

/// A bit for each group that is looked at; every lane must call it.
fn active_groups(lane: u32, start: u32) -> u32 {
  var open_groups = 0u;
  var last = Best(HIGHEST, 0u);
  for (var i = 0u; i < params.num_active_groups; i++) {
    var best = Best(LOWEST, 0u);
    for (var group = 0u; group < params.num_groups; group++) {
      let value = group_score(lane, start, group);
      if value > best.value && comes_after(value, group, last) {
        best = Best(value, group);
      }
    }
    open_groups |= 1u << best.idx;
    last = best;
  }
  return open_groups;
}
#endif

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  let token = linear_workgroup(group_id);
  if token >= num_tokens() {
    return;
  }
  let start = token * params.stride;
#ifdef GROUPS
  let open_groups = active_groups(lane, start);
  let group_size = params.num_experts / params.num_groups;
#endif
  var last = Best(HIGHEST, 0u);
  var top = 0.0;
  var sum = 0.0;
  for (var i = 0u; i < params.num_active; i++) {
    var mine = Best(LOWEST, NOBODY);
    for (var expert = lane; expert < params.num_experts; expert += ${SG}u) {
      let value = score(start, expert);
#ifdef GROUPS
      let is_open = ((open_groups >> (expert / group_size)) & 1u) == 1u;
#else
      let is_open = true;
#endif
      if is_open && value > mine.value && comes_after(value, expert, last) {
        mine = Best(value, expert);
      }
    }
    last = best_of_lanes(lane, mine);
    // Of logits that are not finite none is the best; such a row is broken anyway.
    let expert = min(last.idx, params.num_experts - 1u);
    let logit = logits[start + expert];
#ifdef SOFTMAX
    top = select(top, logit, i == 0u);
    let share = exp(logit - top);
#else
    let share = sigmoid(logit);
#endif
    sum += share;
    if lane == 0u {
      chosen[token * params.num_active + i] = expert;
      shares[token * params.num_active + i] = share;
    }
  }
#ifdef NORMALISED
  let factor = params.scale / (sum + 1e-20);
#else
#ifdef SOFTMAX
  var own = 0.0;
  for (var expert = lane; expert < params.num_experts; expert += ${SG}u) {
    own += exp(min(logits[start + expert] - top, 80.0));
  }
  let factor = params.scale / sum_of_lanes(lane, own);
#else
  let factor = params.scale;
#endif
#endif
  if lane == 0u {
    for (var i = 0u; i < params.num_active; i++) {
      shares[token * params.num_active + i] *= factor;
    }
  }
}
