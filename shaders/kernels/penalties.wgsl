// Changes logits in place by what came before and by the bias lists: repetition over prompt and output, presence and
// frequency over the output, then the biases; sampling/reference.rs `apply_penalties`. Each token occurs once per list.
// Rows of a beam search (sampling word 11) become log-probabilities first, and those are changed; `beam_logprobs` there.
// Grid: num_logits workgroups.
#import grid
#import step

struct Params {
  vocab: u32,
  stride: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>; // [num_logits, stride]
@group(0) @binding(2) var<uniform> params: Params;

const LOWEST: f32 = -3.4e38;

var<workgroup> lane_f: array<f32, ${WG}>;

fn reduce_max(lane: u32) {
  workgroupBarrier();
  for (var half = ${WG / 2}u; half > 0u; half /= 2u) {
    if lane < half {
      lane_f[lane] = max(lane_f[lane], lane_f[lane + half]);
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

/// Subtracts ln of the sum of exp from every logit of the row.
fn normalise(source: u32, lane: u32) {
  var largest = LOWEST;
  for (var i = lane; i < params.vocab; i += ${WG}u) {
    largest = max(largest, logits[source + i]);
  }
  lane_f[lane] = largest;
  reduce_max(lane);
  largest = lane_f[0];
  workgroupBarrier();
  var sum = 0.0;
  for (var i = lane; i < params.vocab; i += ${WG}u) {
    sum += exp(logits[source + i] - largest);
  }
  lane_f[lane] = sum;
  reduce_sum(lane);
  let logsumexp = largest + log(lane_f[0]);
  for (var i = lane; i < params.vocab; i += ${WG}u) {
    logits[source + i] -= logsumexp;
  }
  storageBarrier();
}

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = linear_workgroup(group);
  let is_row = row < num_logits();
  let at = select(0u, row, is_row);
  let source = at * params.stride;
  let repetition = bitcast<f32>(sampling_word(at, 4u));
  let presence = bitcast<f32>(sampling_word(at, 5u));
  let frequency = bitcast<f32>(sampling_word(at, 6u));

  for (var is_beam = is_row && sampling_word(at, 11u) == 1u; is_beam; is_beam = false) {
    normalise(source, lane);
  }
  let penalties_end = select(0u, penalty_start(at + 1u), is_row);
  for (var i = penalty_start(at) + lane; i < penalties_end; i += ${WG}u) {
    let entry = penalty(i); // (token, occurrences in the output)
    if entry.x < params.vocab {
      let logit = logits[source + entry.x];
      let scaled = select(logit * repetition, logit / repetition, logit > 0.0);
      logits[source + entry.x] = scaled - frequency * f32(entry.y) - select(0.0, presence, entry.y > 0u);
    }
  }
  // A token may be in both lists.
  storageBarrier();
  let biases_end = select(0u, bias_start(at + 1u), is_row);
  for (var i = bias_start(at) + lane; i < biases_end; i += ${WG}u) {
    let entry = bias(i); // (token, bits)
    if entry.x < params.vocab {
      logits[source + entry.x] += bitcast<f32>(entry.y);
    }
  }
}
