// For logit rows that ask: ln of the sum of exp over the row, and the most likely tokens, most likely first, the lowest
// id first on ties; sampling/reference.rs `logprobs`. Penalties and biases count, temperature does not. Rows that
// `penalties` made log-probabilities (sampling word 11) are taken as they are.
// Grid: num_logits workgroups.
#import grid
#import step

struct Params {
  vocab: u32,
  stride: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> logits: array<vec4<f32>>; // [num_logits, stride / 4]
@group(0) @binding(2) var<storage, read> sampled: array<vec2<u32>>; // [num_logits]: (token, not finite)
// [num_logits, 1 + TOP]: (logsumexp, logprob of the sampled token), then (token, logprob) of the most likely
@group(0) @binding(3) var<storage, read_write> logprobs: array<vec2<u32>>;
@group(0) @binding(4) var<uniform> params: Params;

const LOWEST: f32 = -3.4e38;
const NONE: u32 = 0xffffffffu;

var<workgroup> lane_f: array<f32, ${WG}>;
var<workgroup> lane_u: array<u32, ${WG}>;

fn is_better(value: f32, token: u32, than_value: f32, than_token: u32) -> bool {
  return value > than_value || (value == than_value && token < than_token);
}

fn reduce_best(lane: u32) {
  workgroupBarrier();
  for (var half = ${WG / 2}u; half > 0u; half /= 2u) {
    if lane < half && is_better(lane_f[lane + half], lane_u[lane + half], lane_f[lane], lane_u[lane]) {
      lane_f[lane] = lane_f[lane + half];
      lane_u[lane] = lane_u[lane + half];
    }
    workgroupBarrier();
  }
}

fn reduce_sum(lane: u32) {
  workgroupBarrier();
  for (var half = ${WG / 2}u; half > 0u; half /= 2u) {
    if lane < half {
      lane_f[lane] += lane_f[lane + half];
    }
    workgroupBarrier();
  }
}

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = linear_workgroup(group);
  let is_row = row < num_logits();
  let at = select(0u, row, is_row);
  let asked = select(NONE, sampling_word(at, 10u), is_row);
  let is_asked = asked != NONE;
  let source = at * (params.stride / 4u);
  let to = at * ${1 + TOP}u;
  let num_quads = select(0u, (params.vocab + 3u) / 4u, is_asked);
  let num_rounds = select(0u, max(1u, min(asked, ${TOP}u)), is_asked);

  // Each round finds the best token after the one before it; the first gives the largest logit for the sum.
  var before = 3.4e38;
  var before_token = 0u;
  var logsumexp = 0.0;
  for (var round_idx = 0u; round_idx < num_rounds; round_idx++) {
    var value = LOWEST;
    var token = NONE;
    for (var i = lane; i < num_quads; i += ${WG}u) {
      let quad = logits[source + i];
#for e in 0..4
      let id_${e} = i * 4u + ${e}u;
      let wins_${e} = id_${e} < params.vocab && quad[${e}] > value
        && (quad[${e}] < before || (quad[${e}] == before && id_${e} > before_token));
      value = select(value, quad[${e}], wins_${e});
      token = select(token, id_${e}, wins_${e});
#end
    }
    lane_f[lane] = value;
    lane_u[lane] = token;
    reduce_best(lane);
    before = lane_f[0];
    before_token = lane_u[0];
    workgroupBarrier();
    for (var is_first = round_idx == 0u; is_first; is_first = false) {
      var sum = vec4(0.0);
      for (var i = lane; i < num_quads; i += ${WG}u) {
        let inside = i * 4u + vec4(0u, 1u, 2u, 3u) < vec4(params.vocab);
        sum += select(vec4(0.0), exp(logits[source + i] - before), inside);
      }
      lane_f[lane] = sum.x + sum.y + sum.z + sum.w;
      reduce_sum(lane);
      logsumexp = select(before + log(lane_f[0]), 0.0, sampling_word(at, 11u) == 1u);
      workgroupBarrier();
    }
    if lane == 0u {
      logprobs[to + 1u + round_idx] = vec2(before_token, bitcast<u32>(before - logsumexp));
    }
  }
  if lane == 0u && is_asked {
    let token = min(sampled[at].x, params.vocab - 1u);
    let logit = logits[source + token / 4u][token % 4u];
    logprobs[to] = vec2(bitcast<u32>(logsumexp), bitcast<u32>(logit - logsumexp));
  }
}
