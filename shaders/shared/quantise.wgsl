// Groups of 32 f32 to signed bytes: scale = max |x| / 127, q = round(x / scale).

struct QuantisedGroup {
  low: vec4<u32>,     // elements 0..16
  high: vec4<u32>,    // elements 16..32
  scales: vec2<f32>,  // (scale, scale * sum of q)
}

fn largest(v: vec4<f32>) -> f32 {
  let a = abs(v);
  return max(max(a.x, a.y), max(a.z, a.w));
}

fn rounded(v: vec4<f32>, inverse: f32) -> u32 {
  return pack4xI8(vec4<i32>(round(v * inverse)));
}

fn quantise_group(
  v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>,
  v4: vec4<f32>, v5: vec4<f32>, v6: vec4<f32>, v7: vec4<f32>,
) -> QuantisedGroup {
  let low_max = max(max(largest(v0), largest(v1)), max(largest(v2), largest(v3)));
  let high_max = max(max(largest(v4), largest(v5)), max(largest(v6), largest(v7)));
  let group_max = max(low_max, high_max);
  // A group of zeros stays zero; the smallest normal number keeps the quotient finite.
  let inverse = select(0.0, 127.0 / group_max, group_max > 1.2e-38);
  let low = vec4(rounded(v0, inverse), rounded(v1, inverse), rounded(v2, inverse), rounded(v3, inverse));
  let high = vec4(rounded(v4, inverse), rounded(v5, inverse), rounded(v6, inverse), rounded(v7, inverse));
  let ones = 0x01010101u;
  let sum = dot4I8Packed(low.x, ones) + dot4I8Packed(low.y, ones) + dot4I8Packed(low.z, ones) + dot4I8Packed(low.w, ones)
    + dot4I8Packed(high.x, ones) + dot4I8Packed(high.y, ones) + dot4I8Packed(high.z, ones) + dot4I8Packed(high.w, ones);
  let scale = group_max / 127.0;
  return QuantisedGroup(low, high, vec2(scale, scale * f32(sum)));
}
