// A group of 32 f32, P neighbours in each of 32 / P neighbouring lanes, to signed bytes: scale = max |x| / 127,
// q = round(x / scale). The kernel file declares yq: array<u32> and ys: array<vec2<f32>>.
//
// Defines: SG, SUBGROUP; P = max(32 / SG, 1), at most 4.

#if P == 4
alias Own = vec4<f32>;

fn packed_own(v: Own, inverse: f32, lane: u32) -> vec2<u32> {
  let q = vec4<i32>(round(v * inverse));
  return vec2(pack4xI8(q), bitcast<u32>(q.x + q.y + q.z + q.w));
}

fn largest_own(v: Own) -> f32 {
  let a = abs(v);
  return max(max(a.x, a.y), max(a.z, a.w));
}

fn squares_own(v: Own) -> f32 {
  return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x)));
}
#endif
#if P == 2
alias Own = vec2<f32>;

fn packed_own(v: Own, inverse: f32, lane: u32) -> vec2<u32> {
  let q = vec2<i32>(round(v * inverse));
  let word = ((bitcast<u32>(q.x) & 0xffu) | ((bitcast<u32>(q.y) & 0xffu) << 8u)) << ((lane & 1u) * 16u);
  return vec2(word | subgroupShuffleXor(word, 1u), bitcast<u32>(q.x + q.y));
}

fn largest_own(v: Own) -> f32 {
  return max(abs(v.x), abs(v.y));
}

fn squares_own(v: Own) -> f32 {
  return fma(v.y, v.y, v.x * v.x);
}
#endif
#if P == 1
alias Own = f32;

fn packed_own(v: Own, inverse: f32, lane: u32) -> vec2<u32> {
  let q = i32(round(v * inverse));
  var word = (bitcast<u32>(q) & 0xffu) << ((lane & 3u) * 8u);
  word |= subgroupShuffleXor(word, 1u);
  word |= subgroupShuffleXor(word, 2u);
  return vec2(word, bitcast<u32>(q));
}

fn largest_own(v: Own) -> f32 {
  return abs(v);
}

fn squares_own(v: Own) -> f32 {
  return v * v;
}
#endif

#if SG == 64
fn group_max(x: f32) -> f32 {
  var y = max(x, subgroupShuffleXor(x, 1u));
#for i in 1..5
  y = max(y, subgroupShuffleXor(y, 1u << ${i}u));
#end
  return y;
}

fn group_add(x: f32) -> f32 {
  var y = x + subgroupShuffleXor(x, 1u);
#for i in 1..5
  y += subgroupShuffleXor(y, 1u << ${i}u);
#end
  return y;
}

fn group_count(x: i32) -> i32 {
  var y = x + subgroupShuffleXor(x, 1u);
#for i in 1..5
  y += subgroupShuffleXor(y, 1u << ${i}u);
#end
  return y;
}
#else
fn group_max(x: f32) -> f32 {
  return subgroupMax(x);
}

fn group_add(x: f32) -> f32 {
  return subgroupAdd(x);
}

fn group_count(x: i32) -> i32 {
  return subgroupAdd(x);
}
#endif

/// Quantises the group of which this lane owns `v`, elements at..at + P of the output, and stores it where `stores`.
fn store_group(at: u32, v: Own, lane: u32, stores: bool) {
  let largest = group_max(largest_own(v));
  // A group of zeros stays zero; the smallest normal number keeps the quotient finite.
  let inverse = select(0.0, 127.0 / largest, largest > 1.2e-38);
  let own = packed_own(v, inverse, lane);
  let sum = group_count(bitcast<i32>(own.y));
  let scale = largest / 127.0;
  if stores {
    if at % 4u == 0u {
      yq[at / 4u] = own.x;
    }
    if at % 32u == 0u {
      ys[at / 32u] = vec2(scale, scale * f32(sum));
    }
  }
}
