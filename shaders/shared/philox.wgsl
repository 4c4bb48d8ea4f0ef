// Randomness without state: Philox4x32-10 (Salmon et al. 2011), as in sampling/rng.rs. Word j of the block
// (seed, position, i) belongs to token 4 i + j.

/// High and low half of a * b.
fn mul_wide(a: u32, b: u32) -> vec2<u32> {
  let a0 = a & 0xffffu;
  let a1 = a >> 16u;
  let b0 = b & 0xffffu;
  let b1 = b >> 16u;
  let low = a0 * b0;
  let mid = a1 * b0 + (low >> 16u);
  let cross = a0 * b1 + (mid & 0xffffu);
  return vec2(a1 * b1 + (mid >> 16u) + (cross >> 16u), a * b);
}

fn philox(counter: vec4<u32>, seed: vec2<u32>) -> vec4<u32> {
  var c = counter;
  var k = seed;
#for round in 0..10
  {
    let p0 = mul_wide(0xD2511F53u, c.x);
    let p1 = mul_wide(0xCD9E8D57u, c.z);
    c = vec4(p1.x ^ c.y ^ k.x, p1.y, p0.x ^ c.w ^ k.y, p0.y);
    k += vec2(0x9E3779B9u, 0xBB67AE85u);
  }
#end
  return c;
}

/// Standard Gumbel variates from random bits: -ln(-ln(1 - v)), v = (bits + 1/2) / 2^32.
/// Small v, where the winners of an argmax lie, goes through a series, since 1 - v would lose its digits.
fn gumbel(bits: vec4<u32>) -> vec4<f32> {
  let v = (vec4<f32>(bits) + 0.5) * 0x1p-32;
  let rest = (vec4<f32>(~bits) + 0.5) * 0x1p-32; // 1 - v
  let series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))));
  let exponential = select(-log(rest), series, v < vec4(0.0625));
  return -log(exponential);
}
