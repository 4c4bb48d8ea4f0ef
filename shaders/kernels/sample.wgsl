// Draws one token per logit row, as sampling/reference.rs does: everything at or above one cut is kept (top-k, top-p,
// min-p), and the kept token with the largest logit / temperature + gumbel(seed, position, token) wins. Greedy rows
// take the largest logit. Ties go to the lowest id.
//
// Nothing is sorted: cuts are found by radix selection over order-preserving keys, 11 + 11 + 10 bits, with a histogram
// in workgroup memory. Histograms hold integers (counts for top-k, probabilities in fixed point for top-p), so sums do
// not depend on the order of lanes. The quads (four logits) that can matter are listed first, if they are few; all
// passes then walk the list.
//
// Grid: num_logits workgroups.
#import grid
#import step
#import philox

struct Params {
  vocab: u32,
  stride: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> logits: array<vec4<u32>>; // [num_logits, stride / 4], bits of f32
@group(0) @binding(2) var<storage, read_write> sampled: array<vec2<u32>>; // [num_logits]: (token, 1 if a logit is not finite)
@group(0) @binding(3) var<uniform> params: Params;

const BINS: u32 = 2048u;
const LOWEST: f32 = -3.4e38;
/// Quads that the list holds.
const LISTED: u32 = 1024u;

var<workgroup> bins: array<atomic<u32>, BINS>;
var<workgroup> lane_f: array<f32, ${WG}>;
var<workgroup> lane_u: array<u32, ${WG}>;
var<workgroup> chosen: vec2<u32>; // (bin, amount above it)
var<workgroup> worst: atomic<u32>; // largest magnitude bits of the row
var<workgroup> mass: atomic<u32>; // kept weights together, fixed point
var<workgroup> listed: array<u32, LISTED>; // quads that hold a candidate
var<workgroup> num_listed: atomic<u32>; // may exceed LISTED: then the list is not used
var<workgroup> num_candidates: atomic<u32>; // tokens
var<workgroup> lowest_key: atomic<u32>; // smallest of the largest logits of all lanes' shares

/// The larger value; on ties the lower token.
fn is_better(value: f32, token: u32, than_value: f32, than_token: u32) -> bool {
  return value > than_value || (value == than_value && token < than_token);
}

/// Order-preserving key of a float.
fn key_of(bits: u32) -> u32 {
  return select(bits ^ 0xffffffffu, bits | 0x80000000u, bits < 0x80000000u);
}

fn bits_of_key(key: u32) -> u32 {
  return select(key ^ 0xffffffffu, key & 0x7fffffffu, key >= 0x80000000u);
}

/// (value, token) of all lanes reduced into place 0.
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

/// Sum over all lanes into place 0, always in the same order.
fn reduce_sum(lane: u32) {
  workgroupBarrier();
  for (var half = ${WG / 2}u; half > 0u; half /= 2u) {
    if lane < half {
      lane_f[lane] += lane_f[lane + half];
    }
    workgroupBarrier();
  }
}

fn clear_bins(lane: u32) {
  for (var i = lane; i < BINS; i += ${WG}u) {
    atomicStore(&bins[i], 0u);
  }
  workgroupBarrier();
}

/// The bin in which the sum from the top reaches `wanted`, and the sum above it; into `chosen`.
fn choose_bin(lane: u32, wanted: u32) {
  workgroupBarrier();
  let source = (${WG - 1}u - lane) * ${2048 / WG}u; // lane 0 has the highest bins
  var sum = 0u;
  for (var i = 0u; i < ${2048 / WG}u; i++) {
    sum += atomicLoad(&bins[source + i]);
  }
  lane_u[lane] = sum;
  workgroupBarrier();
  var above = 0u;
  for (var i = 0u; i < lane; i++) {
    above += lane_u[i];
  }
  // Exactly one lane holds the crossing.
  for (var is_mine = above < wanted && wanted <= above + sum; is_mine; is_mine = false) {
    var bin = source + ${2048 / WG}u;
    var reached = above;
    var before = above;
    for (; reached < wanted && bin > source;) {
      bin -= 1u;
      before = reached;
      reached += atomicLoad(&bins[bin]);
    }
    chosen = vec2(bin, before);
  }
  workgroupBarrier();
}

/// Bits of four logits of the row; 0 beyond the vocabulary.
fn quad(source: u32, i: u32) -> vec4<u32> {
  return select(vec4(0u), logits[source + i], inside(i));
}

fn inside(i: u32) -> vec4<bool> {
  return i * 4u + vec4(0u, 1u, 2u, 3u) < vec4(params.vocab);
}

/// Radix digits from the top: pass 0 has bits 21.., pass 1 bits 10.., pass 2 bits 0..
fn digit_shift(pass_idx: u32) -> u32 {
  return select(select(0u, 10u, pass_idx == 1u), 21u, pass_idx == 0u);
}

/// Bits above a pass's digit.
fn known_bits(pass_idx: u32) -> u32 {
  return select(select(0xfffffc00u, 0xffe00000u, pass_idx == 1u), 0u, pass_idx == 0u);
}

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = linear_workgroup(group);
  let is_row = row < num_logits();
  let at = select(0u, row, is_row);
  let source = at * (params.stride / 4u);
  let num_quads = select(0u, (params.vocab + 3u) / 4u, is_row);
  if lane == 0u {
    atomicStore(&worst, 0u);
    atomicStore(&mass, 0u);
    atomicStore(&lowest_key, 0xffffffffu);
    atomicStore(&num_listed, 0u);
    atomicStore(&num_candidates, 0u);
  }
  workgroupBarrier();

  // Largest logit, and whether all are finite (by their bits: fast math may not see a NaN). A lane has 8 shares of the
  // row with a maximum each.
#for u in 0..2
  var top_${u} = vec4(LOWEST);
  var top_at_${u} = vec4(0u);
#end
  var worst4 = vec4(0u);
  for (var i = lane; i < num_quads; i += ${2 * WG}u) {
#for u in 0..2
    {
      let at_quad = i + ${u * WG}u;
      let is_token = inside(at_quad);
      let bits = quad(source, min(at_quad, num_quads - 1u));
      worst4 = max(worst4, select(vec4(0u), bits & vec4(0x7fffffffu), is_token));
      let value = select(vec4(LOWEST), bitcast<vec4<f32>>(bits), is_token);
      let wins = value > top_${u};
      top_${u} = select(top_${u}, value, wins);
      top_at_${u} = select(top_at_${u}, vec4(at_quad * 4u), wins);
    }
#end
  }
  var value = LOWEST;
  var token = 0xffffffffu;
  var share_low = top_0[0];
#for u in 0..2
#for e in 0..4
  let wins_${u}_${e} = is_better(top_${u}[${e}], top_at_${u}[${e}] + ${e}u, value, token);
  value = select(value, top_${u}[${e}], wins_${u}_${e});
  token = select(token, top_at_${u}[${e}] + ${e}u, wins_${u}_${e});
  share_low = min(share_low, top_${u}[${e}]);
#end
#end
  lane_f[lane] = value;
  lane_u[lane] = token;
  atomicMin(&lowest_key, key_of(bitcast<u32>(share_low)));
  atomicMax(&worst, max(max(worst4.x, worst4.y), max(worst4.z, worst4.w)));
  reduce_best(lane);
  let top = lane_f[0];
  let top_token = lane_u[0];
  let is_faulty = atomicLoad(&worst) >= 0x7f800000u;
  let share_floor = bitcast<f32>(bits_of_key(atomicLoad(&lowest_key)));
  workgroupBarrier();

  let temperature = bitcast<f32>(sampling_word(at, 0u));
  let is_drawn = temperature > 0.0 && !is_faulty;
  let inverse = 1.0 / max(temperature, 1e-30);
  let drawn_quads = select(0u, num_quads, is_drawn);
  let top_k = sampling_word(at, 1u);
  let top_p = bitcast<f32>(sampling_word(at, 2u));
  let has_top_k = is_drawn && top_k > 0u && top_k < params.vocab;
  let has_top_p = is_drawn && top_p < 1.0;

  // Candidates. Gumbels lie between -3.2 and 22.9, so nothing further below the largest logit wins a draw, and its
  // weight is 0 in fixed point. Each share holds a logit at or above the smallest of the shares' maxima, so for a k up
  // to their number nothing below that is among the k largest.
  var candidate_floor = top - 26.2 * temperature;
  candidate_floor = max(candidate_floor, select(LOWEST, share_floor, has_top_k && top_k <= ${8 * WG}u));
  for (var i = lane; i < select(0u, num_quads, has_top_k || has_top_p); i += ${WG}u) {
    // Look for the next quad that counts, then work: some software drivers execute an `if` whatever its condition.
    var counts = vec4(false);
    for (; i < drawn_quads; i += ${WG}u) {
      counts = inside(i) & (bitcast<vec4<f32>>(quad(source, i)) >= vec4(candidate_floor));
      if any(counts) {
        break;
      }
    }
    if i < drawn_quads {
      let ones = select(vec4(0u), vec4(1u), counts);
      atomicAdd(&num_candidates, ones.x + ones.y + ones.z + ones.w);
      let place = atomicAdd(&num_listed, 1u);
      if place < LISTED {
        listed[place] = i;
      }
    }
  }
  workgroupBarrier();
  let list_length = atomicLoad(&num_listed);
  let has_list = (has_top_k || has_top_p) && list_length <= LISTED;
  let work = select(drawn_quads, list_length, has_list);

  // Top-k: the key of the k-th largest candidate.
  let count_work = select(0u, work, has_top_k);
  let count_passes = select(0u, 3u, has_top_k);
  var cut_key = 0u;
  var wanted = min(top_k, atomicLoad(&num_candidates));
  for (var pass_idx = 0u; pass_idx < count_passes; pass_idx++) {
    clear_bins(lane);
    let shift = digit_shift(pass_idx);
    let known = known_bits(pass_idx);
    for (var j = lane; j < count_work; j += ${WG}u) {
      let i = select(j, listed[min(j, LISTED - 1u)], has_list);
      let bits = quad(source, i);
      let counts = inside(i) & (bitcast<vec4<f32>>(bits) >= vec4(candidate_floor));
#for e in 0..4
      let key_${e} = key_of(bits[${e}]);
      if counts[${e}] && (key_${e} & known) == cut_key {
        atomicAdd(&bins[(key_${e} & ~known) >> shift], 1u);
      }
#end
    }
    choose_bin(lane, wanted);
    cut_key |= chosen.x << shift;
    wanted -= chosen.y;
  }
  var cut = select(candidate_floor, bitcast<f32>(bits_of_key(cut_key)), has_top_k);

  // Top-p: weights relative to the largest, first as floats for the scale of the fixed point, then as integers.
  let mass_work = select(0u, work, has_top_p);
  let mass_passes = select(0u, 3u, has_top_p);
  var sum4 = vec4(0.0);
  for (var j = lane; j < mass_work; j += ${WG}u) {
    let i = select(j, listed[min(j, LISTED - 1u)], has_list);
    let logit = bitcast<vec4<f32>>(quad(source, i));
    sum4 += select(vec4(0.0), exp(min((logit - top) * inverse, vec4(0.0))), inside(i) & (logit >= vec4(cut)));
  }
  lane_f[lane] = sum4.x + sum4.y + sum4.z + sum4.w;
  reduce_sum(lane);
  // The power of two that brings the sum to between 2^30 and 2^31.
  let scale = bitcast<f32>((157u - ((bitcast<u32>(max(lane_f[0], 1.0)) >> 23u) - 127u)) << 23u);
  var mass_key = 0u;
  for (var pass_idx = 0u; pass_idx < mass_passes; pass_idx++) {
    clear_bins(lane);
    let shift = digit_shift(pass_idx);
    let known = known_bits(pass_idx);
    var lane_mass = 0u;
    for (var j = lane; j < mass_work; j += ${WG}u) {
      let i = select(j, listed[min(j, LISTED - 1u)], has_list);
      let bits = quad(source, i);
      let logit = bitcast<vec4<f32>>(bits);
      let weighs = inside(i) & (logit >= vec4(cut));
      let weight = vec4<u32>(exp(min((logit - top) * inverse, vec4(0.0))) * scale + 0.5);
#for e in 0..4
      let key_${e} = key_of(bits[${e}]);
      if weighs[${e}] && (key_${e} & known) == mass_key {
        atomicAdd(&bins[(key_${e} & ~known) >> shift], weight[${e}]);
        lane_mass += weight[${e}];
      }
#end
    }
    for (var is_first = pass_idx == 0u; is_first; is_first = false) {
      atomicAdd(&mass, lane_mass);
      workgroupBarrier();
      let total = atomicLoad(&mass);
      wanted = clamp(u32(ceil(top_p * f32(total))), 1u, total);
    }
    choose_bin(lane, wanted);
    mass_key |= chosen.x << shift;
    wanted -= chosen.y;
  }
  cut = select(cut, bitcast<f32>(bits_of_key(mass_key)), has_top_p);

  let min_p = bitcast<f32>(sampling_word(at, 3u));
  cut = max(cut, select(LOWEST, top + temperature * log(max(min_p, 1e-37)), min_p > 0.0));
  cut = min(cut, top);

  // Gumbel-max over what is kept.
  let seed = vec2(sampling_word(at, 7u), sampling_word(at, 8u));
  let position = sampling_word(at, 9u);
  value = LOWEST;
  token = top_token;
  for (var j = lane; j < work; j += ${WG}u) {
    var i = 0u;
    var logit = vec4(0.0);
    var is_kept = vec4(false);
    for (; j < work; j += ${WG}u) {
      i = select(j, listed[min(j, LISTED - 1u)], has_list);
      logit = bitcast<vec4<f32>>(quad(source, i));
      is_kept = inside(i) & (logit >= vec4(cut)) & ((logit - top) * inverse + 22.9 > vec4(value));
      if any(is_kept) {
        break;
      }
    }
    let score = (logit - top) * inverse + gumbel(philox(vec4(i, position, 0u, 0u), seed));
#for e in 0..4
    let wins_${e} = j < work && is_kept[${e}] && is_better(score[${e}], i * 4u + ${e}u, value, token);
    value = select(value, score[${e}], wins_${e});
    token = select(token, i * 4u + ${e}u, wins_${e});
#end
  }
  lane_f[lane] = value;
  lane_u[lane] = token;
  reduce_best(lane);
  if lane == 0u && is_row {
    sampled[row] = vec2(select(top_token, lane_u[0], is_drawn), u32(is_faulty));
  }
}
