// Quantisation of activations: 32 values become signed bytes with one scale.

struct QuantisedGroup {
  low: vec4<u32>,  // elements 0..16
  high: vec4<u32>, // elements 16..32
  scale: vec2<f32>, // (scale, scale * sum of q)
}

fn largest_of(v: vec4<f32>) -> f32 {
  let a = abs(v);
  return max(max(a.x, a.y), max(a.z, a.w));
}

fn rounded(v: vec4<f32>, inverse: f32) -> vec4<i32> {
  return vec4<i32>(round(v * inverse));
}

fn sum_of(v: vec4<i32>) -> i32 {
  return v.x + v.y + v.z + v.w;
}

/// Symmetric: scale = max |x| / 127. A group of zeros has scale 0.
fn quantise(
  v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>,
  v4: vec4<f32>, v5: vec4<f32>, v6: vec4<f32>, v7: vec4<f32>,
) -> QuantisedGroup {
  let largest = max(
    max(max(largest_of(v0), largest_of(v1)), max(largest_of(v2), largest_of(v3))),
    max(max(largest_of(v4), largest_of(v5)), max(largest_of(v6), largest_of(v7))),
  );
  let scale = largest / 127.0;
  let inverse = select(0.0, 127.0 / largest, largest > 0.0);
#for i in 0..8
  let q${i} = rounded(v${i}, inverse);
#end
  let sum = sum_of(q0) + sum_of(q1) + sum_of(q2) + sum_of(q3) + sum_of(q4) + sum_of(q5) + sum_of(q6) + sum_of(q7);
  var out: QuantisedGroup;
  out.low = vec4<u32>(pack4xI8(q0), pack4xI8(q1), pack4xI8(q2), pack4xI8(q3));
  out.high = vec4<u32>(pack4xI8(q4), pack4xI8(q5), pack4xI8(q6), pack4xI8(q7));
  out.scale = vec2<f32>(scale, scale * f32(sum));
  return out;
}
