// Dot products of 4-bit weights with i8 activations, two at a time in one 32-bit multiplication, for adapters whose
// dot4I8Packed is many instructions. The integers are the same.
//
//   (a + b * 2^16) * (y + x * 2^16) = a*y + (a*x + b*y) * 2^16   (mod 2^32)
//
// With a, b in 0..16 and |x|, |y| <= 127, eight such products sum to less than 2^15 in each half, so that adding 2^15
// and shifting right by 16 gives the sum of a*x + b*y exactly.

const PAIR_MASK: vec4<u32> = vec4<u32>(0x000f000fu);
const PAIR_START: u32 = 0x8000u;

/// Bytes 2 and 0 of each word as (low, high) halves.
fn even_pairs(x: vec4<u32>) -> vec4<u32> {
  let low = bitcast<vec4<i32>>(x << vec4(8u)) >> vec4(24u);
  let high = bitcast<vec4<i32>>(x << vec4(24u)) >> vec4(8u);
  return bitcast<vec4<u32>>(low + high);
}

/// Bytes 3 and 1 of each word as (low, high) halves.
fn odd_pairs(x: vec4<u32>) -> vec4<u32> {
  let low = bitcast<vec4<i32>>(x) >> vec4(24u);
  let high = (bitcast<vec4<i32>>(x << vec4(16u)) >> vec4(24u)) << vec4(16u);
  return bitcast<vec4<u32>>(low + high);
}

/// The dot product of 16 elements; `w_even` and `w_odd` are nibbles at the places that the pairs have.
fn dot_pairs(w_even: vec4<u32>, x_even: vec4<u32>, w_odd: vec4<u32>, x_odd: vec4<u32>) -> i32 {
  let sum = PAIR_START
    + w_even.x * x_even.x + w_even.y * x_even.y + w_even.z * x_even.z + w_even.w * x_even.w
    + w_odd.x * x_odd.x + w_odd.y * x_odd.y + w_odd.z * x_odd.z + w_odd.w * x_odd.w;
  return bitcast<i32>(sum) >> 16u;
}
