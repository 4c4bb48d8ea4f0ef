// Packed weights as bytes and scales; see kernels/pack.rs for the planes.

const ONES: vec4<u32> = vec4<u32>(0x01010101u);
const NIBBLES: vec4<u32> = vec4<u32>(0x0f0f0f0fu);

/// Elements 0..16 of a 4-bit granule, a byte each.
fn low_nibbles(q: vec4<u32>) -> vec4<u32> { return q & NIBBLES; }
/// Elements 16..32.
fn high_nibbles(q: vec4<u32>) -> vec4<u32> { return (q >> vec4(4u)) & NIBBLES; }

/// Fifth bits, in place, of elements 0..16 of a group.
fn low_fifths(h: u32) -> vec4<u32> { return ((vec4(h) >> vec4(0u, 1u, 2u, 3u)) & ONES) << vec4(4u); }
fn high_fifths(h: u32) -> vec4<u32> { return ((vec4(h) >> vec4(4u, 5u, 6u, 7u)) & ONES) << vec4(4u); }

/// Signed 6-bit elements from their nibbles and the word with their upper bits.
fn sixes(nibbles: vec4<u32>, h: u32) -> vec4<u32> {
  let upper = ((vec4(h) >> vec4(0u, 2u, 4u, 6u)) & vec4(0x03030303u)) << vec4(4u);
  // q - 32 in each byte; the top bit keeps a borrow from leaving its byte.
  return (((nibbles | upper) | vec4(0x80808080u)) - vec4(0x20202020u)) ^ vec4(0x80808080u);
}

/// The scale (`.x`) and the minimum (`.y`) words, a byte for each of 4 groups, of half a K-quant super-block.
fn k_scales(s: vec4<u32>, upper_half: bool) -> vec2<u32> {
  let lower = vec2(s.y & 0x3f3f3f3fu, s.z & 0x3f3f3f3fu);
  let upper = vec2(
    (s.w & 0x0f0f0f0fu) | ((s.y >> 2u) & 0x30303030u),
    ((s.w >> 4u) & 0x0f0f0f0fu) | ((s.z >> 2u) & 0x30303030u),
  );
  return select(lower, upper, upper_half);
}

fn byte_of(word: u32, idx: u32) -> f32 { return f32((word >> (idx * 8u)) & 0xffu); }
fn signed_byte_of(word: u32, idx: u32) -> i32 { return bitcast<i32>(word << (24u - idx * 8u)) >> 24u; }

/// One of two f16 in a word.
fn half_of(word: u32, idx: u32) -> f32 { return select(unpack2x16float(word).x, unpack2x16float(word).y, idx == 1u); }
